"""Recipes in files of the user: --config=FILE.yaml and --config=FILE.py:NAME, --save_config and --config_schema.

A YAML file has the sections of a config, with the fields that it sets; each is read as an override of the command line
is. `config` names the recipe that it starts from, without which it starts from the defaults: a recipe of megajax, a
hugging_face:DIR or hugging_face:ORG/NAME, or another file, whose path is relative to this one.
"""

import dataclasses
import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from megajax.config import KINDS, Config
from megajax.fields.schema import schema_of
from megajax.fields.suggestions import did_you_mean
from megajax.overrides import override
from megajax.terminal.command_line import docstrings, options

SUFFIXES = (".yaml", ".yml")
BASE = "config"  # the key that names the recipe to start from


def is_file(name: str) -> bool:
    """Whether --config=NAME names a file."""
    return name.endswith((*SUFFIXES, ".py")) or ".py:" in name


def read(name: str, recipe: Callable[[str], Config], parents: tuple[str, ...] = ()) -> Config:
    """The config of --config=NAME. recipe: of what is no file. Raises ValueError, naming the file, for one that cannot
    be read, and for fields and values as `override` does."""
    path = name.partition(".py:")[0] + ".py" if ".py:" in name else name
    if not os.path.isfile(path):
        raise ValueError(f"--config={name}: the file {path} does not exist")
    if path.endswith(".py"):
        return _of_python(path, name.removeprefix(path).removeprefix(":"))
    if os.path.abspath(path) in parents:
        raise ValueError(f"--config={path} starts from itself; remove its key {BASE!r}")
    values = _loaded(path)
    base = values.pop(BASE, None)
    config = Config()
    if isinstance(base, str) and is_file(base):
        config = read(os.path.join(os.path.dirname(path), base), recipe, (*parents, os.path.abspath(path)))
    elif base is not None:
        config = recipe(str(base))
    try:
        config = override(config, dict(_flat(values)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return config if "run_dir" in values else dataclasses.replace(config, run_dir=f"runs/{Path(path).stem}")


def _of_python(path: str, name: str) -> Config:
    """Of the function NAME of the file, which is imported by its name, so that workers can import it too."""
    folder, file = os.path.split(os.path.abspath(path))
    name_of_file = file.removesuffix(".py")
    is_new = folder not in sys.path
    if is_new:
        sys.path.insert(0, folder)
    module = importlib.import_module(name_of_file)
    if module.__file__ != os.path.join(folder, file):
        if is_new:  # workers would import the file in place of the other module
            sys.path.remove(folder)
        raise ValueError(f"--config={path}: there is another module {name_of_file}; rename the file")
    functions = inspect.getmembers(module, inspect.isfunction)
    names = [found for found, function in functions if function.__module__ == module.__name__ and found[0] != "_"]
    if name not in names:
        hint = did_you_mean(name, names) or f"; name one of its functions, {path}:NAME: {', '.join(names)}"
        raise ValueError(f"--config={path}:{name} is unknown{hint}")
    config = getattr(module, name)()
    if not isinstance(config, Config):
        raise ValueError(f"--config={path}:{name} returns {type(config).__name__}, not a megajax.Config")
    return config if config.run_dir else dataclasses.replace(config, run_dir=f"runs/{name}")


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML's loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _loaded(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config={path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config={path} does not hold the sections of a config, such as training: {{steps: 100}}")
    return values


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(section.field, value); a section without fields is left out."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif value is not None or not dataclasses.is_dataclass(getattr(Config, name, None)):
            yield name, value


def write(config: Config, path: str) -> None:
    """Writes all fields, so that the recipe stays what it is when megajax's change; an empty run_dir is left out.

    Raises ValueError for another kind of file, and if it exists.
    """
    if not path.endswith(SUFFIXES):
        raise ValueError(f"--save_config={path} must end in {' or '.join(SUFFIXES)}")
    if os.path.exists(path):
        raise ValueError(f"--save_config={path} exists; use another name, or remove it")
    nested: dict[str, Any] = {}
    for option in options(config):
        *sections, field = option.path
        part = nested
        for section in sections:
            part = part.setdefault(section, {})
        part[field] = list(option.default) if isinstance(option.default, tuple) else option.default
    del nested["training"]["steps" if config.training.epochs is not None else "epochs"]
    if not config.run_dir:
        del nested["run_dir"]
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(nested, file, sort_keys=False, allow_unicode=True)


def schema() -> dict[str, Any]:
    """The JSON schema of a YAML file, for the completion and the checks of editors."""
    properties: dict[str, Any] = {BASE: {"type": "string", "description": "Recipe to start from."}}
    hints = typing.get_type_hints(Config, include_extras=True)
    for field in dataclasses.fields(Config):
        if field.name in KINDS:
            kinds = KINDS[field.name].all()
            properties[field.name] = {"anyOf": [_section(kinds[kind]) for kind in sorted(kinds)]}
        elif dataclasses.is_dataclass(hints[field.name]):
            properties[field.name] = _section(hints[field.name])
        else:
            properties[field.name] = _field(Config, field, hints[field.name])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "a recipe of megajax",
        "type": ["object", "null"],
        "properties": properties,
        "additionalProperties": False,
    }


def _section(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    properties = {
        field.name: _section(hints[field.name])
        if dataclasses.is_dataclass(hints[field.name])
        else _field(kind, field, hints[field.name])
        for field in dataclasses.fields(kind)
    }
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _field(owner: type, field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    return schema_of(hint) | {"description": docstrings(owner).get(field.name, ""), "default": field.default}
