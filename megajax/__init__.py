"""Train and serve large language models with JAX.

    import megajax

    run = megajax.Run(megajax.recipe("gpt_tiny", {"training.steps": 100}))
    state = run.init()
    state, metrics = run.step(state, run.batch(0))

docs/library.md describes the names below. They are imported when they are used first, so that `import megajax` takes no
time.
"""

import importlib

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Plan",
    "Run",
    "figures",
    "load_run",
    "override",
    "plan",
    "recipe",
    "recipes",
    "search",
    "use_cpu_devices",
]

_MODULES = {
    "Config": "megajax.config",
    "Plan": "megajax.planning.summary",
    "override": "megajax.overrides",
    "use_cpu_devices": "megajax.mesh.processes",
}


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'megajax' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name == "figures":
        return importlib.import_module("megajax.figures")
    return getattr(importlib.import_module(_MODULES.get(name, "megajax.library")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
