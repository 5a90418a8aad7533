"""--help for a configuration: every field with its type, allowed range, value and docstring."""

import contextlib
import dataclasses
import io
import typing
from typing import TYPE_CHECKING, Annotated, Any

import docstring_parser
import tyro

from megajax.fields.ranges import describe_range
from megajax.terminal.one_line import terminal_width, wrapped

if TYPE_CHECKING:
    from megajax.config import Config


def print_help(config: "Config", options: Any, program: str) -> None:
    """options: a dataclass with the options of the program, besides the fields of the config."""
    shown = described(config, options)
    about = "Override a field with --section.field=VALUE; commas separate list elements."
    printed = io.StringIO()  # which tyro takes for a printer without box characters: they would be copied with the text
    try:
        with contextlib.redirect_stdout(printed):
            tyro.cli(type(shown), default=shown, args=["--help"], prog=program, use_underscores=True, description=about)
    finally:
        print("\n".join(line.rstrip() for line in printed.getvalue().splitlines()))


def section_lines() -> list[str]:
    """The sections of a config with the names of their fields, wrapped for the terminal."""
    from megajax.config import Config

    lines = []
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section := field.default):
            names = " ".join(part.name for part in dataclasses.fields(section))
            lines.append(wrapped(f"  {field.name + '.':<14}{names}", min(terminal_width(), 120), indent=16))
    return lines


def described(config: "Config", options: Any) -> Any:
    """A dataclass with the fields of the options, then of the config, with help texts in its annotations."""
    parts = [_described(options, tyro.conf.FlagCreatePairsOff), _described(config, tyro.conf.FlagConversionOff)]
    kinds = [(field.name, field.type) for part in parts for field in dataclasses.fields(part)]
    return dataclasses.make_dataclass("Options", kinds)(
        **{name: value for part in parts for name, value in vars(part).items()}
    )


def _described(config: Any, booleans: Any) -> Any:
    """The same values in a dataclass whose annotations hold each field's help: its docstring without line breaks, and
    its range. booleans: tyro's marker for boolean fields."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    texts = _docstrings(type(config))
    kinds = []
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = _described(value, booleans)
            kind = type(value)
        else:
            allowed = describe_range(hints[field.name])
            text = " ".join(texts.get(field.name, "").split()) + (f" Must be {allowed}." if allowed else "")
            kind = Annotated[hints[field.name], booleans, tyro.conf.arg(help=text)]
        kinds.append((field.name, kind))
        values[field.name] = value
    return dataclasses.make_dataclass(type(config).__name__, kinds)(**values)


def _docstrings(kind: type) -> dict[str, str]:
    """Field -> docstring, including base classes."""
    found = {}
    for base in reversed(kind.__mro__[:-1]):
        parsed = docstring_parser.parse_from_object(base)
        found |= {param.arg_name: param.description for param in parsed.params if param.description}
    return found
