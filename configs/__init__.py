"""Recipes: each public function of the modules here returns the whole Config of one named run."""

import ast
import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megajax import hub
from megajax.fields.suggestions import did_you_mean

if TYPE_CHECKING:
    from megajax.config import Config

FIRST = "gpt"  # the module with the recipe to begin with


def docstrings() -> dict[str, str]:
    """Name -> docstring, in the order of the modules, FIRST before the others, and of the lines in them. Imports no
    recipe, which takes time."""
    return {name: text for _, name, text in _read()}


def recipes() -> dict[str, Callable[[], "Config"]]:
    """Name -> function, in the same order."""
    return {name: getattr(importlib.import_module(module), name) for module, name, _ in _read()}


def recipe(name: str) -> "Config":
    """The config of a recipe, of hugging_face:DIR or hugging_face:ORG/NAME, or of a file (megajax/recipe_files.py).
    Raises ValueError for an unknown name, with the nearest one."""
    if name.startswith(hub.PREFIX):
        return importlib.import_module("megajax.weights.hugging_face.recipe").fine_tuning(name)
    if "." in name and (files := importlib.import_module("megajax.recipe_files")).is_file(name):
        return files.read(name, recipe)
    modules = {name: module for module, name, _ in _read()}
    if name not in modules:
        hint = did_you_mean(name, modules) or "; --list_configs shows all"
        raise ValueError(f"--config={name} is unknown{hint}")
    config = getattr(importlib.import_module(modules[name]), name)()
    return config if config.run_dir else dataclasses.replace(config, run_dir=f"runs/{name}")


def _read() -> Iterator[tuple[str, str, str]]:
    """(module, name, docstring) of each recipe, from the source."""
    modules = sorted(pkgutil.iter_modules(__path__), key=lambda info: (info.name != FIRST, info.name))
    for module_info in modules:
        for line in ast.parse((Path(__path__[0]) / f"{module_info.name}.py").read_text()).body:
            if isinstance(line, ast.FunctionDef) and not line.name.startswith("_"):
                yield f"{__name__}.{module_info.name}", line.name, ast.get_docstring(line) or ""
