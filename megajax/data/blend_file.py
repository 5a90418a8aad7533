"""The datasets of a run and their weights: a list of paths, or blend files, which can be nested.

A blend file is JSON, {"blend": [entry, ...]}; its relative paths are relative to it. An entry has one of

    "path": as in data.paths        "blend": [entry, ...]        "file": another blend file

Either all entries of a list have a "weight", or none has. Without, an entry is weighted by its number of tokens times
"epochs" (default 1): with "epochs": 3 it is read three times while others are read once.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence

from megajax import hub
from megajax.data.blend import normalize_weights
from megajax.data.indexed.dataset import prefix_of

# Of files of conversations.
RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet")
MOST = 1e30  # weight or epochs of an entry: the sum of many is finite


@dataclasses.dataclass(frozen=True)
class Entry:
    """A dataset, or a blend of entries."""

    path: str = ""
    entries: tuple["Entry", ...] = ()
    weight: float | None = None
    """Within its list; None: tokens times epochs."""
    epochs: float = 1.0


def is_blend_file(path: str) -> bool:
    return path.endswith(".json") and not holds_conversations(path)


def holds_conversations(path: str) -> bool:
    """Whether it is a file or folder of conversations, not the prefix of a dataset or a blend file."""
    if is_dataset(path) or os.path.isfile(f"{path}.bin"):
        return False
    if path.endswith(".json"):  # a blend is an object
        return os.path.isfile(path) and _first_character(path) == "["
    names = (name for _, _, found in os.walk(path) for name in found)
    return path.endswith(RECORD_SUFFIXES) or any(name.endswith(RECORD_SUFFIXES) for name in names)


def is_dataset(path: str) -> bool:
    """Whether it names what the package datasets reads (prepare/hugging_face_rows.py)."""
    return path.startswith(hub.PREFIX)


def _first_character(path: str) -> str:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(1 << 10).lstrip()[:1]


def read_blend(paths: Sequence[str], field: str = "data.paths") -> Entry:
    """The blend of `paths`, prefixes or blend files, weighted by tokens; or each with its weight before it, as Megatron
    writes it. Raises ValueError, naming field or file and entry, if something cannot be read."""
    weights: list[float | None] = [None] * len(paths)
    if paths and _number(paths[0]) is not None:
        weights = [_number(weight) for weight in paths[::2]]
        paths = paths[1::2]
        if len(paths) != len(weights) or not all(weight and 0 < weight <= MOST for weight in weights):
            raise ValueError(
                f"{field}: write a number above 0, at most {MOST:g}, before each path, as in 0.7,web,0.3,code, or none"
            )
    entries = (_entry_of_path(path, weight, ()) for path, weight in zip(paths, weights, strict=True))
    return Entry(entries=tuple(entries))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def prefixes(entry: Entry) -> list[str]:
    """Prefixes of all datasets of the blend, without duplicates, in order."""
    return list(dict.fromkeys([entry.path] if entry.path else (p for child in entry.entries for p in prefixes(child))))


def renamed(entry: Entry, rename: Callable[[str], str]) -> Entry:
    """The blend with other paths."""
    entries = tuple(renamed(child, rename) for child in entry.entries)
    return dataclasses.replace(entry, path=entry.path and rename(entry.path), entries=entries)


def shares(entry: Entry, num_tokens: Callable[[str], int]) -> dict[str, float]:
    """{prefix: its fraction of the blend}; the fractions of a dataset named twice add up. num_tokens: of a prefix."""
    if entry.path:
        return {entry.path: 1.0}
    found: dict[str, float] = {}
    # either all have a weight, or none
    amounts = [_tokens(e, num_tokens) * e.epochs if e.weight is None else e.weight for e in entry.entries]
    for child, part in zip(entry.entries, normalize_weights(amounts), strict=True):
        for prefix, share in shares(child, num_tokens).items():
            found[prefix] = found.get(prefix, 0.0) + part * share
    return found


def _tokens(entry: Entry, num_tokens: Callable[[str], int]) -> int:
    return sum(num_tokens(prefix) for prefix in prefixes(entry))


def _entry_of_path(path: str, weight: float | None, parents: tuple[str, ...], epochs: float = 1.0) -> Entry:
    if not is_blend_file(path):
        return Entry(prefix_of(path), weight=weight, epochs=epochs)
    return Entry(entries=_read_file(path, parents), weight=weight, epochs=epochs)


def _read_file(path: str, parents: tuple[str, ...]) -> tuple[Entry, ...]:
    if os.path.abspath(path) in parents:
        raise ValueError(
            f"data.paths: {path} includes itself through {len(parents)} blend files; remove one of these entries"
        )
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.paths: blend file {path} cannot be read ({error})") from None
    if not isinstance(content, dict) or list(content) != ["blend"]:
        raise ValueError(f'data.paths: {path} is not {{"blend": [...]}}')
    return _entries(content["blend"], path, (*parents, os.path.abspath(path)), "blend")


def _entries(content, file: str, parents: tuple[str, ...], where: str) -> tuple[Entry, ...]:
    if not isinstance(content, list) or not content:
        raise ValueError(f"data.paths: {file}, {where} is not a list of entries")
    found = tuple(_entry(child, file, parents, f"{where}[{number}]") for number, child in enumerate(content))
    if len({entry.weight is None for entry in found}) > 1:
        raise ValueError(f'data.paths: {file}, {where}: give each entry a "weight", or none')
    return found


def _entry(content, file: str, parents: tuple[str, ...], where: str) -> Entry:
    def refusal(what: str) -> ValueError:
        return ValueError(f"data.paths: {file}, {where} {what}")

    kinds = ("path", "blend", "file")
    known = isinstance(content, dict) and set(content) <= {*kinds, "weight", "epochs"}
    if not known or sum(kind in content for kind in kinds) != 1 or {"weight", "epochs"} <= set(content):
        raise refusal('must have one of "path", "blend" and "file", and may have "weight" or "epochs"')
    for name in ("weight", "epochs"):
        if name in content and not _positive(content[name]):
            raise refusal(f"has {name} {content[name]!r}; use a number above 0, at most {MOST:g}")
    weight = content.get("weight")
    epochs = content.get("epochs", 1.0)
    if "blend" in content:
        return Entry(entries=_entries(content["blend"], file, parents, f"{where}.blend"), weight=weight, epochs=epochs)
    name = content.get("path", content.get("file"))
    path = name if isinstance(name, str) else ""
    if path and not is_dataset(path):
        path = os.path.join(os.path.dirname(file), path)
    if not path or is_blend_file(path) != ("file" in content):
        raise refusal(
            f'names {name!r}; "path" is the prefix of a .bin or a file of conversations, "file" a blend file that ends '
            "in .json"
        )
    return _entry_of_path(path, weight, parents, epochs)


def _positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST


def phase_weights(parts: Iterable[dict[str, float]]) -> tuple[list[str], list[list[float]]]:
    """(all prefixes, their weights in each phase, 0 for a dataset it does not use), from the shares of the phases."""
    parts = list(parts)
    names = list(dict.fromkeys(name for phase in parts for name in phase))
    return names, [[phase.get(name, 0.0) for name in names] for phase in parts]
