"""The allowed values of a config field: given by its annotation, with a Range where the type is not enough.

    steps: PositiveInt = 1000
    dropout: Annotated[float, Range(at_least=0, below=1)] = 0.1

`check_fields` compares every field of a config, and of the configs in it, with its annotation. Unless a Range says how
large it may be, an integer must fit into int32, like counters and token ids on the devices, and any other number must
be a finite float32.
"""

import ctypes
import dataclasses
import functools
import math
import types
import typing
from typing import Annotated, Any, Literal

# Metadata of a field of a model whose value may change when a run resumes, because it does not affect the meaning of
# the weights.
MAY_CHANGE = {"may_change": True}

MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127

WORDS = {
    int: "a whole number (int32)",
    float: "a finite number (float32)",
    bool: "True or False",
    str: "text",
    type(None): "None",
}
PLURALS = {int: "whole numbers (int32)", float: "finite numbers (float32)", str: "texts"}


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a number, for Annotated; None: no bound."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def holds(self, value: float) -> bool:
        """Whether an int, or a float rounded to float32, is in the range: 1e-50 is not above 0."""
        number = ctypes.c_float(value).value if isinstance(value, float) else value
        return (
            (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


DEFAULTS = {
    int: Range(at_least=-MAX_INT32, at_most=MAX_INT32),
    float: Range(at_least=-MAX_FLOAT32, at_most=MAX_FLOAT32),
}
"""Bounds of numbers without an upper one."""
PositiveInt = Annotated[int, Range(at_least=1)]
NonNegativeInt = Annotated[int, Range(at_least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(at_least=0)]
NumLayers = Annotated[int, Range(at_least=1, at_most=10_000)]
Probability = Annotated[float, Range(at_least=0, at_most=1)]
DropRate = Annotated[float, Range(at_least=0, below=1)]
# Far above any value in use, so that a mistyped one is refused.
Epsilon = Annotated[float, Range(above=0, at_most=1)]
Coefficient = Annotated[float, Range(at_least=0, at_most=1000)]
Multiplier = Annotated[float, Range(above=0, at_most=1e6)]
InitStd = Annotated[float, Range(above=0, at_most=100)]
VocabMultiple = Annotated[int, Range(at_least=1, at_most=2**16)]


def check_fields(config: Any, prefix: str = "") -> None:
    """Raises ValueError for the first field of a dataclass, or of one in it, with a value that its annotation forbids.

    prefix: what precedes the name of a field: "--" or "--model." on the command line, or nothing, where a value that is
    allowed is suggested; "model." in a file.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        option = prefix + field.name
        hint = hints[field.name]
        if not allows(hint, value):
            raise ValueError(f"{option.removeprefix('--')}={value!r} must be {describe(hint)}{_way_out(option, field)}")
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{option}.")


def describe(hint: Any) -> str:
    """Describes the values that an annotation allows."""
    kind, ranges = _split(hint)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        words = "one of " + ", ".join(map(str, parts))
    elif typing.get_origin(kind) is tuple and parts[1:] != (...,) and len(set(parts)) > 1:
        return f"{len(parts)} values, separated by commas: {'; '.join(map(describe, parts))}"
    elif typing.get_origin(kind) is tuple:
        element, ranges = _split(parts[0])
        count = "a list of" if parts[1:] == (...,) else len(parts)
        plural = PLURALS.get(element) or f"the names {describe(element)}"
        words = f"{count} {plural}, separated by commas"
    elif is_union(kind):
        choices = [describe(part) for part in parts]
        words = (", or " if any("," in choice for choice in choices) else " or ").join(choices)
    else:
        words = WORDS.get(kind, kind.__name__)
    if any(bounds.at_most is not None and bounds.at_most > MAX_INT32 for bounds in ranges):
        words = words.replace(" (int32)", "").replace(" (float32)", "")
    return ", ".join([words, *map(str, ranges)])


def describe_range(hint: Any) -> str:
    """The bounds of a number, or of each in a list, in words; empty where the type says all."""
    kind, ranges = _split(hint)
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        bounds = [describe_range(part) for part in parts if part is not ...]
        return bounds[0] if len(set(bounds)) == 1 else ", ".join(bounds)
    if is_union(kind):
        return " or ".join(filter(None, map(describe_range, parts)))
    return " and ".join(map(str, ranges))


def is_union(hint: Any) -> bool:
    """The type of `int | None` differs from that of `PositiveInt | None`."""
    return typing.get_origin(hint) in (types.UnionType, typing.Union)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


@functools.cache
def _split(hint: Any) -> tuple[Any, list[Range]]:
    """-> (the annotation without metadata, its ranges)."""
    if typing.get_origin(hint) is not Annotated:
        return hint, []
    kind, *metadata = typing.get_args(hint)
    return kind, [item for item in metadata if isinstance(item, Range)]


def allows(hint: Any, value: Any) -> bool:
    """Whether the annotation allows the value."""
    kind, ranges = _split(hint)
    if kind in DEFAULTS and all(bounds.at_most is None for bounds in ranges):
        ranges = [*ranges, DEFAULTS[kind]]
    return _is_a(kind, value) and all(bounds.holds(value) for bounds in ranges)


def _is_a(kind: Any, value: Any) -> bool:
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return value in parts
    if is_union(kind):
        return any(allows(part, value) for part in parts)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            return False
        each = parts[:1] * len(value) if parts[1:] == (...,) else parts
        return len(each) == len(value) and all(map(allows, each, value))
    if kind not in (int, float):
        return isinstance(value, kind)
    if isinstance(value, bool):  # an int in Python
        return False
    if kind is int:
        return isinstance(value, int)
    return isinstance(value, int | float) and (abs(value) <= MAX_FLOAT32 or value == math.inf)


def _way_out(option: str, field: dataclasses.Field) -> str:
    default = field.default
    is_unset = default is None or default is dataclasses.MISSING or dataclasses.is_dataclass(default)
    is_typed = option.startswith("--") or "." not in option
    if is_unset or not is_typed:
        return ""
    return f"; use {option}={','.join(map(str, default)) if isinstance(default, tuple) else default}"


def changed_fields(config, default) -> list[str]:
    """Names of the fields that differ, those of nested configs too."""
    changed = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed += [f"{field.name}.{name}" for name in changed_fields(value, getattr(default, field.name))]
        elif value != getattr(default, field.name):
            changed.append(field.name)
    return changed
