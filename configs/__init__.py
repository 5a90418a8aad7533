"""Recipes: each public function of the modules here returns the whole Config of one named run."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable


def recipes() -> dict[str, Callable]:
    """Name -> function, in the order of the modules and of the lines in them."""
    found = {}
    for module_info in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        functions = [f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
        functions.sort(key=lambda f: f.__code__.co_firstlineno)
        found |= {f.__name__: f for f in functions if not f.__name__.startswith("_")}
    return found
