"""Options of a config.json, each with a pair of functions that convert to words of our model (`Form.words`) and back.

`read(theirs)` takes the whole config.json and returns words, those of sections as "rope.base";
`write(ours)` takes all of the words and returns keys of config.json. Each raises ValueError, with the option and its
value, for values that the other side does not support. `keys` are the keys of config.json that `read` takes into
account; any other key must be known to change nothing (known_keys.py).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

REQUIRED = object()

# Activations of plain and of gated feed-forward layers, by their names in transformers' ACT2FN; the first name of an
# activation is the one that is written.
PLAIN = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "relu": "relu", "relu2": "squared_relu",
}  # fmt: skip
GATED = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "gelu_new": "geglu_tanh",
}  # fmt: skip


class AnyOption(Protocol):
    @property
    def keys(self) -> tuple[str, ...]: ...
    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]: ...
    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]: ...


Options = tuple[AnyOption, ...]


@dataclasses.dataclass(frozen=True)
class Option:
    """Maps a key to one of our words, or to several with the same value."""

    theirs: str
    ours: str | tuple[str, ...]
    default: Any = REQUIRED
    """Default of transformers if config.json does not have the key."""
    values: Mapping | None = None
    """Their value -> ours, if they differ."""
    power: float = 1
    """Ours = theirs to this power."""
    also: tuple[str, ...] = ()
    """Other names of the key."""

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: theirs[name] for name in self.keys if theirs.get(name) is not None}
        if len({str(value) for value in given.values()}) > 1:
            both = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ValueError(f"{both} are two names of one option; remove the one that is not meant")
        value = next(iter(given.values()), theirs.get(self.theirs, self.default))
        if value is REQUIRED:
            raise ValueError(f"{self.theirs} is missing")
        if self.values is None or isinstance(value, list | dict):
            self._check_type(value)
        if self.values is not None:
            if value not in self.values:
                known = ", ".join(map(str, self.values))
                raise ValueError(f"{self.theirs}={value} is not supported; supported are {known}")
            value = self.values[value]
        elif self.power != 1 and value is not None:
            value = float(value) ** self.power
        return dict.fromkeys(self._fields, value)

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        value = ours[self._fields[0]]
        if value is None and self.default is REQUIRED:
            raise ValueError(f"model.{self._fields[0]}=None, which {self.theirs} cannot say")
        if self.values is not None:
            value = next((spelling for spelling, known in self.values.items() if known == value), None)
            if value is None:
                raise ValueError(f"model.{self._fields[0]}={ours[self._fields[0]]} has no {self.theirs}")
        elif self.power != 1 and value is not None:
            # the nearest number of 12 digits: 1 / (1 / 49) is not 49
            value = float(f"{value ** (1 / self.power):.12g}")
            if isinstance(self.default, int):
                if not value.is_integer():
                    raise ValueError(f"model.{self._fields[0]}={ours[self._fields[0]]}, for which {self.theirs} is "
                                     f"{value}, no whole number")  # fmt: skip
                value = int(value)
        return {self.theirs: value}

    def _check_type(self, value: Any) -> None:
        """Of a number or a truth value; its range is that of our field."""
        kind = int if self.default is REQUIRED else type(self.default)
        allowed = {bool: (bool,), int: (int,), float: (int, float), type(None): (int, float)}.get(kind, (str,))
        if value is not None and (not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool)):
            words = {bool: "true or false", int: "a whole number", str: "a name"}
            raise ValueError(f"{self.theirs}={value!r} must be {words.get(kind, 'a number')}")

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs, *self.also)

    @property
    def _fields(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours


@dataclasses.dataclass(frozen=True)
class Choice:
    """A key with one supported value; None counts as this value."""

    theirs: str
    value: Any

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        found = theirs.get(self.theirs)
        if found is not None and found != self.value:
            raise ValueError(f"{self.theirs}={found} is not supported; supported is {self.value}")
        return {}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclasses.dataclass(frozen=True)
class Follows:
    """A word without a key in config.json: a power of the width, which is hidden_size in all families that use this."""

    ours: str
    power: float
    keys = ()

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        return {self.ours: theirs["hidden_size"] ** self.power}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {}


def read_object(theirs: Mapping[str, Any], name: str) -> dict[str, Any]:
    """{} if it is missing or null. Raises ValueError for what is not an object."""
    found = theirs.get(name)
    if not isinstance(found, dict | None):
        raise ValueError(f"{name}={found} is not an object {{...}}")
    return found or {}
