"""Parts of an input, which machines encode independently: `preprocess --part=I/N`.

The bytes of the input files, as stored, are cut into N ranges of the same length, and a part is what begins in its
range: lines of .jsonl, row groups of .parquet, and whole files of all other kinds. So for any N the documents of parts
1 to N, in this order, are those of the input.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import NamedTuple

from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.indexed.meta import COUNTS, read_meta

BLOCK_BYTES = 1 << 20
MAX_PARTS = 99_999


class Part(NamedTuple):
    number: int
    """From 1."""
    count: int

    def prefix(self, output_prefix: str) -> str:
        """Of the dataset that the part writes; in alphabetical order, parts are in the order of their documents."""
        return f"{output_prefix}-{self.number:05d}-of-{self.count:05d}"


class Piece(NamedTuple):
    """What is read of a file: bytes [begin, end) of it, by default all."""

    path: str
    begin: int = 0
    end: int | None = None


def parse_part(text: str) -> Part:
    """I/N. Raises ValueError."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count) <= MAX_PARTS):
        raise ValueError(f"--part={text} must be I/N with 1 <= I <= N <= {MAX_PARTS}, such as 3/16")
    return Part(int(number), int(count))


def pieces_of(part: Part, files: Sequence[tuple[str, bool]]) -> list[Piece]:
    """The files, or pieces of them, that a part reads. files: path, and whether it may be cut."""
    sizes = [os.path.getsize(path) for path, _ in files]
    total = sum(sizes) + len(files)  # an empty file counts as a byte, so that it belongs to a part
    low = total * (part.number - 1) // part.count
    high = total * part.number // part.count
    pieces = []
    offset = 0
    for (path, may_be_cut), size in zip(files, sizes, strict=True):
        if may_be_cut and low < offset + max(size, 1) and offset < high:
            pieces.append(Piece(path, _boundary(path, low - offset, size), _boundary(path, high - offset, size)))
        elif not may_be_cut and low <= offset < high:
            pieces.append(Piece(path))
        offset += size + 1
    return pieces


def _boundary(path: str, position: int, size: int) -> int:
    """The first beginning of a line at `position` or after it; in files without lines, the position."""
    position = min(max(position, 0), size)
    if position == 0 or path.endswith(".parquet"):
        return position
    with open(path, "rb") as file:
        file.seek(position - 1)
        while (piece := file.readline(BLOCK_BYTES)) and not piece.endswith(b"\n"):
            pass
        return file.tell()


def part_facts(part: Part, files: Sequence[str], **settings) -> dict:
    """What the meta.json of a part says of it: its place, the input, and the settings that others do not name."""
    found = [os.stat(path) for path in files]
    listing = [(path, file.st_size, file.st_mtime_ns) for path, file in zip(files, found, strict=True)]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    return {"number": part.number, "count": part.count, "input_files": digest, **settings}


def finished_part(expected: dict[str, dict], overwrite: bool) -> dict[str, dict] | None:
    """Prefix -> meta.json of a part that has been written, None if it has not. expected: prefix -> what they must say.

    Raises ValueError if they were made of other input or with other settings; with overwrite, None.
    """
    metas = {}
    for prefix, wanted in expected.items():
        meta = read_meta(prefix)  # written last
        if meta is None:
            return None
        known = meta | meta.get("part", {})
        differing = [name for name, value in (wanted | wanted["part"]).items() if known.get(name) != value]
        if differing and not overwrite:
            raise ValueError(
                f"--output_prefix: {prefix} is a part made of other input files or with other settings (different: "
                f"{', '.join(name for name in differing if name != 'part')}); use another prefix, or --overwrite"
            )
        if differing:
            return None
        IndexedDataset(prefix)  # refuses files that are missing or cut short
        metas[prefix] = meta
    return metas


def check_complete(prefixes: Sequence[str], metas: Sequence[dict]) -> None:
    """Raises ValueError if datasets to merge are parts, but not all parts of the same input in their order."""
    parts = [meta.get("part") for meta in metas]
    first = next((part for part in parts if part), None)
    if first is None:
        return
    if parts != [first | {"number": number} for number in range(1, first["count"] + 1)]:
        named = ", ".join(f"{part['number']}/{part['count']}" if part else "no part" for part in parts)
        raise ValueError(
            f"merge: --input must name parts 1 to {first['count']} of the same input and settings, in this order; "
            f"{prefixes[0]} and what follows are {named}"
        )
    if not any(meta["num_tokens"] for meta in metas):
        raise ValueError(f"merge: no part has any text ({prefixes[0]} and the others); name other files")


def joined(inputs: Sequence[dict]) -> list[dict]:
    """`inputs` of the meta.json of consecutive parts: files that were cut become one again."""
    files: list[dict] = []
    for file in inputs:
        if file.get("begin"):
            for name in COUNTS:
                files[-1][name] += file[name]
        else:
            files.append(dict(file))
    return files
