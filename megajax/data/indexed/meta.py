"""PREFIX.meta.json, which preprocess writes with .bin and .idx: tokenizer, counts, sha256 of output and inputs."""

import json
import os

from megajax.data.temporary import open_temporary, rename

COUNTS = "num_documents", "num_sequences", "num_tokens", "num_bytes", "num_skipped"
# Fields that other modules read, and their types.
READ = {"tokenizer": str, "tokenizer_identity": str, "vocab_size": int, "sha256": str} | {
    name: int for name in ("num_documents", "num_tokens", "num_bytes")
}


def make_meta(facts: dict, inputs: list[dict], dtype: str, sha256: str) -> dict:
    """P.meta.json: facts of the tokenizer, counts summed over the input files, and the input files."""
    sums = {name: sum(file[name] for file in inputs) for name in COUNTS}
    return facts | sums | {"dtype": dtype, "sha256": sha256, "inputs": inputs}


def write_meta(prefix: str, meta: dict) -> None:
    with open_temporary(prefix + ".meta.json") as file:
        file.write((json.dumps(meta, indent=1) + "\n").encode())
        rename(file, prefix + ".meta.json")


def read_meta(prefix: str) -> dict | None:
    """P.meta.json, or None if it does not exist (data of other tools). Raises ValueError if it is damaged."""
    path = prefix + ".meta.json"
    if not os.path.exists(path):
        return None
    way_out = "restore it, preprocess the data again, or remove it to use the data without it"
    try:
        with open(path) as file:
            meta = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"data: {path} cannot be read ({error}); {way_out}") from None
    if not isinstance(meta, dict):
        raise ValueError(f"data: {path} does not hold an object {{...}}; {way_out}")
    for name, kind in READ.items():
        if type(meta.get(name)) is not kind:
            raise ValueError(f"data: {path}: {name}={meta.get(name)!r} must be of type {kind.__name__}; {way_out}")
    return meta
