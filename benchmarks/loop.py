"""Measures the training loop: python -m benchmarks.loop --config=NAME [--seconds=10] [--section.field=value ...]

Runs train.py with its data loader, metrics and logging, in a temporary run directory, reads step times from
metrics.jsonl, and kills it once there are enough (stopping it would save gigabytes). One window per line of metrics.
"""

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import run, split
from benchmarks.records import ROOT, record
from benchmarks.sustained import LEARNING_RATE

# The mock documents only count up: with the recipe's learning rate the model would learn them during the measurement.
SETTINGS = (
    f"--optimizer.learning_rate={LEARNING_RATE}",
    "--optimizer.min_learning_rate=0",
    "--checkpoint.every_steps=0",
    "--training.eval_every_steps=0",
)


def counted(lines: list[dict], seconds: float) -> list[dict]:
    """The lines of metrics after a warm-up of half of `seconds`, or nothing yet if they do not last `seconds`."""
    warm = 0.0
    found = []
    lasted = 0.0
    last_step = 0
    for line in lines:
        took = line.get("step_seconds", 0.0) * (line["step"] - last_step)
        last_step = line["step"]
        if warm < seconds / 2:
            warm += took
        else:
            found.append(line)
            lasted += took
    return found if lasted >= seconds else []


def measure(name: str, overrides: list[str], seconds: float) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "train.py", f"--config={name}", *overrides, *SETTINGS, f"--run_dir={run_dir}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr)
        try:
            lines = _wait(process, run_dir / "metrics.jsonl", seconds)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        start = json.loads((run_dir / "starts.jsonl").read_text().splitlines()[-1])
    versions = {name: start[name] for name in ("jax", "jaxlib")}
    losses = dict(first_loss=lines[0]["loss"], loss=lines[-1]["loss"])
    return record("loop", [line["step_seconds"] for line in lines], start["devices"], versions, **losses)


def _wait(process: subprocess.Popen, metrics: Path, seconds: float) -> list[dict]:
    while True:
        ended = process.poll() is not None
        text = metrics.read_text() if metrics.exists() else ""
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if found := counted(lines, seconds):
            return found
        if ended:
            raise ValueError(f"train.py ended ({process.returncode}) before {seconds} s were measured; see above, or "
                             "ask for more --training.steps")  # fmt: skip
        time.sleep(0.2)


def main(arguments: list[str]) -> None:
    values, overrides = split(arguments, {"config": "", "seconds": "10"})
    print(json.dumps(measure(values["config"], overrides, float(values["seconds"]))), flush=True)


if __name__ == "__main__":
    run(main)
