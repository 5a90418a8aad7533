"""Recipes: each public function of the modules here returns the whole Config of one named run."""

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable

from megajax.config import Config, did_you_mean


def recipes() -> dict[str, Callable[[], Config]]:
    """Name -> function, in the order of the modules and of the source lines."""
    found = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        functions = [f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
        functions.sort(key=lambda f: f.__code__.co_firstlineno)
        found |= {f.__name__: f for f in functions if not f.__name__.startswith("_")}
    return found


def recipe(name: str) -> Config:
    """The config of a recipe. Raises ValueError for an unknown name, with the nearest one."""
    known = recipes()
    if name not in known:
        raise ValueError(f"--config={name} is unknown{did_you_mean(name, known)}; --list_configs shows all")
    config = known[name]()
    return config if config.run_dir else dataclasses.replace(config, run_dir=f"runs/{name}")
