"""Runs the type checker and counts its errors by folder. A folder may have as many as .ci/type_errors.json names, and
none if it is not named there.

After errors were corrected, `python .ci/check_types.py --record` writes the smaller numbers.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

RECORDED = Path(__file__).with_name("type_errors.json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write smaller numbers to type_errors.json")
    record = parser.parse_args().record

    found = errors_by_folder()
    allowed = json.loads(RECORDED.read_text())
    worse = {folder for folder, errors in found.items() if len(errors) > allowed.get(folder, 0)}
    for folder in sorted(worse):
        print(*found[folder], f"{folder}: {len(found[folder])} errors, not {allowed.get(folder, 0)}", sep="\n")

    left = {folder: min(limit, len(found[folder])) for folder, limit in allowed.items() if folder in found}
    if record:
        RECORDED.write_text(json.dumps(left, indent=2) + "\n")
    elif left != allowed:
        print("fewer type errors than .ci/type_errors.json names: run python .ci/check_types.py --record")
    print(f"type errors: {sum(map(len, found.values()))}, allowed: {sum(allowed.values())}")
    return 1 if worse else 0


def errors_by_folder() -> dict[str, list[str]]:
    """{folder, such as megajax/models, or file outside of one: its errors, one a line}."""
    command = ["pyrefly", "check", "--output-format=json", "--summary=none"]
    done = subprocess.run(command, cwd=RECORDED.parents[1], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    found = defaultdict(list)
    for error in json.loads(done.stdout)["errors"]:
        folder = "/".join(Path(error["path"]).parts[:2])
        found[folder].append(f"{error['path']}:{error['line']}: {error['concise_description']} [{error['name']}]")
    return found


if __name__ == "__main__":
    sys.exit(main())
