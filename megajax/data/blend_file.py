"""Which datasets a run reads and how much of each: a list of paths, or files of nested blends.

A blend file is JSON, {"blend": [entry, ...]}; its relative paths are relative to it. An entry has one of

    "path": prefix of an indexed dataset        "blend": [entry, ...]        "file": another blend file

and says what it weighs among the entries of its list: all of them by "weight", or none, and then they count by their
tokens times "epochs" (default 1): what has "epochs": 3 is read three times while another is read once.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence

from megajax.data.blend import normalize_weights


@dataclasses.dataclass(frozen=True)
class Entry:
    """A dataset, or a blend of entries."""

    path: str = ""
    entries: tuple["Entry", ...] = ()
    weight: float | None = None
    """Among its list; None counts tokens times epochs."""
    epochs: float = 1.0


def is_blend_file(path: str) -> bool:
    return path.endswith(".json")


def read_blend(paths: Sequence[str], weights: Sequence[float] = ()) -> Entry:
    """The blend of `paths`, prefixes or blend files, by weights or by tokens. Raises ValueError with the file and the
    entry for what cannot be read."""
    weight = dict(enumerate(weights))
    entries = (_of_path(path, weight.get(number), ()) for number, path in enumerate(paths))
    return Entry(entries=tuple(entries))


def prefixes(entry: Entry) -> list[str]:
    """Of all datasets in it, each once, in their order."""
    return list(dict.fromkeys([entry.path] if entry.path else (p for one in entry.entries for p in prefixes(one))))


def shares(entry: Entry, num_tokens: Callable[[str], int]) -> dict[str, float]:
    """{prefix: its part of the blend}; a dataset that is named twice has both parts. num_tokens: of a prefix."""
    if entry.path:
        return {entry.path: 1.0}
    found: dict[str, float] = {}
    by_weight = entry.entries[0].weight is not None
    amounts = [one.weight if by_weight else _tokens(one, num_tokens) * one.epochs for one in entry.entries]
    for one, part in zip(entry.entries, normalize_weights(amounts), strict=True):
        for prefix, share in shares(one, num_tokens).items():
            found[prefix] = found.get(prefix, 0.0) + part * share
    return found


def _tokens(entry: Entry, num_tokens: Callable[[str], int]) -> int:
    return sum(num_tokens(prefix) for prefix in prefixes(entry))


def _of_path(path: str, weight: float | None, above: tuple[str, ...], epochs: float = 1.0) -> Entry:
    if not is_blend_file(path):
        return Entry(path, weight=weight, epochs=epochs)
    return Entry(entries=_read_file(path, above), weight=weight, epochs=epochs)


def _read_file(path: str, above: tuple[str, ...]) -> tuple[Entry, ...]:
    if os.path.abspath(path) in above:
        raise ValueError(f"data.paths: {path} names itself, by way of {len(above)} blend files; take it out of one")
    try:
        with open(path) as file:
            content = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"data.paths: blend file {path} cannot be read ({error})") from None
    if not isinstance(content, dict) or list(content) != ["blend"]:
        raise ValueError(f'data.paths: {path} is not {{"blend": [...]}}')
    return _entries(content["blend"], path, (*above, os.path.abspath(path)), "blend")


def _entries(content, file: str, above: tuple[str, ...], where: str) -> tuple[Entry, ...]:
    if not isinstance(content, list) or not content:
        raise ValueError(f"data.paths: {file}, {where} is not a list of entries")
    found = tuple(_entry(one, file, above, f"{where}[{number}]") for number, one in enumerate(content))
    if len({one.weight is None for one in found}) > 1:
        raise ValueError(f'data.paths: {file}, {where}: give each entry a "weight", or none')
    return found


def _entry(content, file: str, above: tuple[str, ...], where: str) -> Entry:
    def refusal(what: str) -> ValueError:
        return ValueError(f"data.paths: {file}, {where} {what}")

    kinds = ("path", "blend", "file")
    known = isinstance(content, dict) and set(content) <= {*kinds, "weight", "epochs"}
    if not known or sum(kind in content for kind in kinds) != 1 or {"weight", "epochs"} <= set(content):
        raise refusal('must have one of "path", "blend" and "file", and may have "weight" or "epochs"')
    for name in ("weight", "epochs"):
        if name in content and not _positive(content[name]):
            raise refusal(f"has {name} {content[name]!r}; use a number above 0")
    weight = content.get("weight")
    epochs = content.get("epochs", 1.0)
    if "blend" in content:
        return Entry(entries=_entries(content["blend"], file, above, f"{where}.blend"), weight=weight, epochs=epochs)
    name = content.get("path", content.get("file"))
    if not isinstance(name, str) or is_blend_file(name) != ("file" in content):
        raise refusal(f'names {name!r}; "path" is a prefix without .bin, "file" a blend file that ends in .json')
    return _of_path(os.path.join(os.path.dirname(file), name), weight, above, epochs)


def _positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def phase_weights(parts: Iterable[dict[str, float]]) -> tuple[list[str], list[list[float]]]:
    """(all prefixes, for each phase a weight for each of them, 0 where it has none), from the shares of the phases."""
    parts = list(parts)
    names = list(dict.fromkeys(name for one in parts for name in one))
    return names, [[one.get(name, 0.0) for name in names] for one in parts]
