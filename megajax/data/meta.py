"""PREFIX.meta.json, beside the .bin and .idx that preprocess writes: tokenizer, counts, sha256 of output and inputs."""

import json
import os

from megajax.data.temporary import open_temporary, rename

COUNTS = "num_documents", "num_sequences", "num_tokens", "num_bytes", "num_skipped"


def make_meta(facts: dict, inputs: list[dict], dtype: str, sha256: str) -> dict:
    """P.meta.json: facts of the tokenizer, sums of the counts of all input files, these one by one."""
    sums = {name: sum(file[name] for file in inputs) for name in COUNTS}
    return facts | sums | {"dtype": dtype, "sha256": sha256, "inputs": inputs}


def write_meta(prefix: str, meta: dict) -> None:
    with open_temporary(prefix + ".meta.json") as file:
        file.write((json.dumps(meta, indent=1) + "\n").encode())
        rename(file, prefix + ".meta.json")


def read_meta(prefix: str) -> dict | None:
    """P.meta.json, or None for data of other tools."""
    if not os.path.exists(prefix + ".meta.json"):
        return None
    with open(prefix + ".meta.json") as file:
        return json.load(file)
