"""Command line shared by the benchmarks: --config=NAME, overrides of its fields, and options of each benchmark."""

import json
import sys
from collections.abc import Callable

import configs
from megajax.config import Config
from megajax.mesh.allocators import use_gpu_memory
from megajax.overrides import override
from megajax.training.reporting.console import log_to_stderr


def split(arguments: list[str], known: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """-> (values of the known names, with defaults from `known`; the rest). `--name` alone has the value "yes"."""
    values = dict(known)
    rest = []
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and name in known:
            values[name] = value if equals else "yes"
        else:
            rest.append(argument)
    return values, rest


def only(arguments: list[str], known: dict[str, str]) -> dict[str, str]:
    """The values of the known names. Raises ValueError if there is anything else."""
    values, rest = split(arguments, known)
    if rest:
        raise ValueError(f"{rest[0]} is unknown; there are {', '.join(f'--{name}' for name in known) or 'none'}")
    return values


def read_config(name: str, overrides: list[str]) -> Config:
    """Raises ValueError for an unknown recipe or field."""
    return override(configs.recipe(name), overrides)


def measured(arguments: list[str], measure: Callable[[Config, float, int], dict]) -> dict:
    """measure(config, seconds of a window, number of windows) with what the arguments say."""
    values, overrides = split(arguments, {"config": "", "seconds": "10", "windows": "1"})
    return measure(read_config(values["config"], overrides), float(values["seconds"]), int(values["windows"]))


def print_measured(arguments: list[str], measure: Callable[[Config, float, int], dict]) -> None:
    print(json.dumps(measured(arguments, measure)), flush=True)


def run(main: Callable[[list[str]], int | None]) -> None:
    """main(arguments) -> exit status; bad input is one line on stderr and status 2."""
    log_to_stderr()
    use_gpu_memory()
    try:
        raise SystemExit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
