"""Options of commands, declared by dataclasses: a field is an option, its docstring the help. Has no slow imports.

    run: str                               --run=DIR or --run DIR; has no default, so it is required
    step: int | None = None                --step=100
    text: tuple[str, ...] = ()             --text=a --text=b, or --text a b
    batch: tuple[int, ...] = (1, 8)        --batch=1,8
    watch: bool = False                    --watch, --no-watch, --watch=True
    mesh: MeshConfig = MeshConfig()        --mesh.tensor=2; a dataclass in a dataclass has a default
    serving: Annotated[ServingConfig, Part(has_prefix=False)] = ServingConfig()       --max_rows=8
    runs: Annotated[tuple[str, ...], POSITIONAL]                                      what has no name

Values are checked against the annotation (fields/ranges.py). An underscore ends the name of a field that is a keyword
of Python.
"""

import argparse
import contextlib
import dataclasses
import functools
import logging
import sys
import typing
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, NoReturn, TypeVar

from megajax.fields.ranges import Range, allows, describe, describe_range, is_union
from megajax.fields.suggestions import did_you_mean
from megajax.mesh.config import AXES, MeshConfig
from megajax.terminal.one_line import print_error, reflowed, shorten_library_errors, terminal_width

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

POSITIONAL = "positional"
TRUTHS = {"True": True, "False": False, "true": True, "false": False}
T = TypeVar("T", bound="DataclassInstance")


@dataclasses.dataclass(frozen=True)
class Part:
    """How the fields of a dataclass in a dataclass become options."""

    only: tuple[str, ...] = ()
    """These fields; (): all."""
    has_prefix: bool = True
    """Whether the names begin with that of the field."""


class Option(NamedTuple):
    name: str
    hint: Any
    """Its annotation."""
    default: Any
    """dataclasses.MISSING: it is required."""
    owner: type
    """The dataclass that has it."""
    path: tuple[str, ...]
    """Names of fields that lead to it."""
    is_positional: bool

    @property
    def help(self) -> str:
        """The docstring, with range and default."""
        text = docstrings(self.owner).get(self.path[-1], "")
        if allowed := describe_range(self.hint):
            text += f" Must be {allowed}."
        if self.is_required:
            return f"{text} (required)"
        if self.default in (None, "", ()):
            return text
        default = ",".join(map(str, self.default)) if isinstance(self.default, tuple) else self.default
        return f"{text} (default: {default})"

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have, apart from None."""
        kind = _plain(self.hint)
        return tuple(_plain(part) for part in typing.get_args(kind)) if is_union(kind) else (kind,)

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_list(self) -> bool:
        return any(typing.get_origin(kind) is tuple for kind in self.kinds)

    def read_type(self, typed: Any) -> Any:
        """As `read`, whatever the range."""
        for kind in self.kinds:
            with contextlib.suppress(ValueError):
                return _read(kind, typed)
        raise ValueError(typed)

    def read(self, typed: Any) -> Any:
        """The value of what was typed: a text, a list of them, or a bool. Raises ValueError."""
        with contextlib.suppress(ValueError):
            value = self.read_type(typed)
            if allows(self.hint, value):
                return value
        shown = ",".join(typed) if isinstance(typed, list) else typed
        raise ValueError(f"{self.name}={shown} must be {describe(self.hint)}")


@dataclasses.dataclass(frozen=True)
class Launch:
    cpu_devices: Annotated[int, Range(at_least=0, at_most=4096)] = 0
    """Number of virtual CPU devices to try a mesh on; 0: use the real devices."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnDevices:
    """A command that spreads a model over devices."""

    mesh: Annotated[MeshConfig, Part(only=AXES)] = MeshConfig()
    launch: Launch = Launch()

    def started_mesh(self) -> MeshConfig:
        """The mesh, after starting the virtual devices. Raises ValueError for sizes that no mesh has."""
        self.mesh.check()
        if self.launch.cpu_devices:
            from megajax.mesh.processes import use_cpu_devices

            use_cpu_devices(self.launch.cpu_devices)
        return self.mesh


def parse(kind: type[T], arguments: Sequence[str] | None, program: str, about: str = "") -> T:
    """The options in the arguments, by default those of the process. about: shown by --help, by default the docstring
    of `kind`. Raises ValueError for the first option that is unknown, missing or wrong."""
    found, unknown = parse_known(kind, arguments, program, about)
    if unknown:
        typed = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
        hint = did_you_mean(typed, [option.name for option in options(kind)], "--") or f"; see {program} --help"
        raise ValueError(f"{unknown[0]} is unknown{hint}")
    return found


def parse_known(kind: type[T], arguments: Sequence[str] | None, program: str, about: str = "") -> tuple[T, list[str]]:
    """As `parse` -> (options, the arguments that are none)."""
    known = {option.name: option for option in options(kind)}
    parser = _Parser(program, about or kind.__doc__)
    _add(parser, known.values())
    typed, unknown = parser.parse_known_intermixed_args(_normalised(arguments, known))
    values = {known[name].path: known[name].read(text) for name, text in vars(typed).items()}
    return _made(kind, values), unknown


def choose(kinds: Mapping[str, type[T]], arguments: Sequence[str] | None, program: str, about: str) -> T:
    """The options of the command that the first argument names. about: shown by --help."""
    name, *rest = _given(arguments) or [""]
    usage = f"{program} {{{','.join(kinds)}}}"
    if name in ("--help", "-h"):
        print(f"usage: {program} COMMAND [options]\n\n{reflowed(about, terminal_width()).rstrip()}")
        raise SystemExit(0)
    if name not in kinds:
        raise ValueError(f"{program} {name}: name a command{did_you_mean(name, kinds) or f': {usage}'}")
    return parse(kinds[name], rest, f"{program} {name}")


def values_of(chosen: Any) -> dict[str, Any]:
    """Name of each option -> its value."""
    return {option.name: functools.reduce(getattr, option.path, chosen) for option in options(type(chosen))}


def options(chosen: Any, prefix: str = "", path: tuple[str, ...] = (), only: Sequence[str] = ()) -> Iterator[Option]:
    """Those of a dataclass, and of the dataclasses in it. chosen: the class; or an instance, whose values are then the
    defaults."""
    kind = chosen if isinstance(chosen, type) else type(chosen)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if only and field.name not in only:
            continue
        hint = hints[field.name]
        name = prefix + field.name.rstrip("_")
        default = field.default
        if chosen is not kind:
            default = getattr(chosen, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(default):
            part = _part(hint)
            yield from options(default, f"{name}." if part.has_prefix else prefix, (*path, field.name), part.only)
        else:
            is_positional = POSITIONAL in getattr(hint, "__metadata__", ())
            yield Option(name, hint, default, kind, (*path, field.name), is_positional)


def print_help(program: str, about: str, command: type, config: Any) -> None:
    """Of a command whose other arguments override fields of a config: each with its value."""
    parser = _Parser(program, about)
    _add(parser, options(command))
    _add(parser, options(config), has_flags=False)
    parser.print_help()


@functools.cache
def docstrings(kind: type) -> dict[str, str]:
    """Field -> docstring in one line, including base classes."""
    import docstring_parser

    found = {}
    for base in reversed(kind.__mro__[:-1]):
        parsed = docstring_parser.parse_from_object(base)
        found |= {param.arg_name: " ".join(param.description.split()) for param in parsed.params if param.description}
    return found


@contextlib.contextmanager
def errors_in_one_line() -> Generator[None]:
    """A ValueError ends the process with status 2 and its message; libraries log only errors, in one line each."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    shorten_library_errors()
    try:
        yield
    except ValueError as error:
        print_error(error)
        raise SystemExit(2) from None


class _Parser(argparse.ArgumentParser):
    """Splits the arguments; it leaves values as they were typed, and what was not typed out."""

    def __init__(self, prog: str, description: str | None):
        super().__init__(
            prog,
            f"{prog} [options]",
            description=reflowed(description or "", terminal_width()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def _add(parser: argparse.ArgumentParser, known: Iterable[Option], has_flags: bool = True) -> None:
    """has_flags: --watch is enough for a boolean."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for option in known:
        group = ".".join(option.path[:-1])
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        settings: dict[str, Any] = {"help": option.help.replace("%", "%%")}
        if option.kinds == (bool,) and has_flags:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings["metavar"] = _metavar(option)
        if option.is_list:
            settings["nargs"] = "*" if option.is_positional else "+"
        if option.is_list and not option.is_positional:
            settings["action"] = "extend"
        if not option.is_positional:
            settings["required"] = option.is_required
        groups[group].add_argument(option.name if option.is_positional else f"--{option.name}", **settings)


def _metavar(option: Option) -> str:
    kind = option.kinds[0]
    if typing.get_origin(kind) is Literal:
        return "{" + ",".join(map(str, typing.get_args(kind))) + "}"
    if option.is_list:
        return "TEXT" if _plain(typing.get_args(kind)[0]) is str else "N,N"
    return {int: "N", float: "X", bool: "{True,False}"}.get(kind, "TEXT")


def _given(arguments: Sequence[str] | None) -> list[str]:
    return sys.argv[1:] if arguments is None else list(arguments)


def _normalised(arguments: Sequence[str] | None, known: Mapping[str, Option]) -> list[str]:
    """Names with underscores; --watch=True and --watch=False as --watch and --no-watch."""
    words = []
    waiting = _given(arguments)
    while waiting:
        word = waiting.pop(0)
        typed, equals, value = word.partition("=")
        name = typed.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or name not in known:
            words.append(word)
            continue
        if known[name].kinds != (bool,):
            words.append(f"--{name}{equals}{value}")
            continue
        if not equals and waiting and waiting[0] in TRUTHS:
            value = waiting.pop(0)
        elif not equals:
            value = "True"
        if value not in TRUTHS:
            raise ValueError(f"{name}={value} must be {describe(bool)}")
        words.append(f"--{name}" if TRUTHS[value] else f"--no-{name}")
    return words


def _read(kind: Any, typed: Any) -> Any:
    """Raises ValueError for what is no such value."""
    if typing.get_origin(kind) is tuple:
        parts = typing.get_args(kind)
        # Texts may contain commas, numbers not.
        words = typed if _plain(parts[0]) is str else [part for word in typed for part in word.split(",")]
        elements = parts[:1] * len(words) if parts[1:] == (...,) else parts
        return tuple(_read(_plain(element), word) for element, word in zip(elements, words, strict=True))
    if kind in (int, float, str):
        return kind(typed)
    if kind is bool and isinstance(typed, bool):
        return typed
    named = {"None": None} if kind is type(None) else {str(value): value for value in typing.get_args(kind)}
    if not isinstance(typed, str) or typed not in named:
        raise ValueError(typed)
    return named[typed]


def _made(kind: type[T], values: Mapping[tuple[str, ...], Any]) -> T:
    """The dataclass with these values, by their paths."""
    hints = typing.get_type_hints(kind)
    chosen = {}
    for field in dataclasses.fields(kind):
        own = {path[1:]: value for path, value in values.items() if path[0] == field.name}
        if dataclasses.is_dataclass(hints[field.name]):
            chosen[field.name] = _made(hints[field.name], own)
        elif own:
            chosen[field.name] = own[()]
    return kind(**chosen)


def _part(hint: Any) -> Part:
    return next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, Part)), Part())


def _plain(hint: Any) -> Any:
    """Without metadata."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint
