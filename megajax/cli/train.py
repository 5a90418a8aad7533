"""Train a model, or resume a run.

--config=NAME          recipe; --list_configs lists all. FILE.yaml and
                       FILE.py:NAME are recipes of your own, hugging_face:DIR
                       and hugging_face:ORG/NAME fine-tune public weights
--run_dir=DIR          directory of the run (default: runs/NAME). If it holds a
                       run, that run resumes; without --config it resumes with
                       its saved configuration
--save_config=FILE     write the configuration, overrides included, to
                       FILE.yaml, which --config takes
--config_schema        print the JSON schema of such files, for editors
--plan[=GPU]           estimate memory and speed of the run without a GPU: h100,
                       h200, a100, b200; --plan=search:64[:GPU] ranks the meshes
                       of 64 GPUs by predicted speed
--plan_price=2.5       with --plan: price of a GPU-hour, to show the cost of the
                       whole run
--plan_figure=FILE     with --plan: draw memory and pipeline schedule to
                       FILE.svg or FILE.png
--replay_step=K        repeat step K without changing the run directory, and
                       report which tensor became non-finite first
--section.field=VALUE  override a field of the configuration
--help                 with --config=NAME or --run_dir=DIR: show all fields with
                       their values
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import configs
from megajax import hub
from megajax.fields.ranges import NonNegativeFloat, NonNegativeInt
from megajax.terminal.command_line import parse_known, print_help
from megajax.terminal.one_line import for_terminal, terminal_width, wrapped

if TYPE_CHECKING:
    from megajax.config import Config


@dataclasses.dataclass(frozen=True)
class Options:
    config: str = ""
    """Recipe to start from; empty: the configuration of the run in run_dir."""
    list_configs: bool = False
    """List the recipes."""
    save_config: str = ""
    """Write the configuration, overrides included, to this .yaml file, which --config takes."""
    config_schema: bool = False
    """Print the JSON schema of such files, for editors."""
    plan: str = ""
    """Estimate memory and speed of the run on a GPU: h100 (default), h200, a100 or b200; search:64 or search:64:h200
    ranks the meshes of 64 GPUs."""
    plan_price: NonNegativeFloat | None = None
    """With plan: price of a GPU-hour, in any currency."""
    plan_figure: str = ""
    """With plan: file for a drawing of memory and pipeline schedule, .svg or .png."""
    replay_step: NonNegativeInt | None = None
    """Step of the run to repeat, without changing its directory."""


def main(arguments: list[str]) -> None:
    options, wants_help, overrides = _parse(arguments)
    if options.list_configs:
        _list_configs()
        return
    if options.config_schema:
        from megajax import recipe_files

        print(json.dumps(recipe_files.schema(), indent=2))
        return
    is_resumed = not options.config and _names_run_dir(overrides)
    if wants_help and not options.config and not is_resumed:
        print(_usage())
        return
    if not options.config and not is_resumed:
        raise ValueError(
            "which recipe? --config=NAME; --list_configs shows all (python train.py --config=gpt_tiny); "
            "--run_dir=DIR alone resumes a run"
        )
    with hub.without_weights() if options.plan or wants_help else contextlib.nullcontext():
        config = _saved_config(overrides) if is_resumed else configs.recipe(options.config)
        _run(config, options, wants_help, overrides)


def _run(config: "Config", options: Options, wants_help: bool, overrides: list[str]) -> None:
    from megajax.overrides import override

    config = override(config, overrides)
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=f"runs/{options.config}")
    if wants_help:
        about = "Override a field with --section.field=VALUE; commas separate list elements."
        print_help(_program(), about, Options, config)
        return
    if options.save_config:
        _save(config, options.save_config, _names_run_dir(overrides))
        return
    if not options.plan and (options.plan_figure or options.plan_price is not None):
        raise ValueError("--plan_price and --plan_figure need --plan")
    config = config.with_steps()
    if options.plan:
        plan(options.config or config.run_dir, config, options)
        return
    config.check()
    _start(config, options.replay_step)


def _start(config: "Config", replay_step: int | None) -> None:
    """Trains, or replays a step. Imports what that needs, Orbax for example, only now: errors come sooner without."""
    import jax

    from megajax import run
    from megajax.mesh.processes import initialize_processes, use_cpu_devices
    from megajax.training.faults.supervisor import supervise
    from megajax.training.faults.watchdog import Watchdog

    if config.launch.cpu_devices:
        use_cpu_devices(config.launch.cpu_devices)
    if replay_step is not None:
        initialize_processes()
        run.replay(config, replay_step)
        return
    config.checkpoint.check_local_dir()
    if config.launch.max_restarts:
        command = [sys.executable, *sys.orig_argv[1:], "--launch.max_restarts=0"]
        limits = config.launch.max_restarts, config.launch.hang_minutes
        raise SystemExit(supervise(command, Path(config.run_dir), *limits))
    with Watchdog(config.launch.hang_minutes) as watchdog:
        watchdog.alive()
        initialize_processes()
        watchdog.alive()
        outcome = run.train(config)
    if outcome != "interrupted" and config.training.sample_prompt and jax.process_count() == 1:
        _print_sample(config)


def _saved_config(overrides: list[str]) -> "Config":
    """The config of the run in --run_dir, without the `launch` section of its last start."""
    from megajax.config import Config, holds_run
    from megajax.overrides import normalised
    from megajax.training.config import LaunchConfig
    from megajax.weights.hugging_face.folder import is_folder

    (*_, run_dir) = (
        value for name, _, value in (a.partition("=") for a in normalised(overrides)) if name == "--run_dir"
    )
    if is_folder(run_dir):
        raise ValueError(
            f"run_dir={run_dir} is a Hugging Face folder, not a run; begin one with --config=hugging_face:{run_dir}"
        )
    if not holds_run(run_dir):
        raise ValueError(f"run_dir={run_dir} holds no run to resume; begin one with --config=NAME (--list_configs)")
    return dataclasses.replace(Config.load(run_dir), launch=LaunchConfig())


def _save(config: "Config", path: str, names_run_dir: bool) -> None:
    """names_run_dir: whether it was given; if not, the new recipe has its own."""
    from megajax import recipe_files

    recipe_files.write(config if names_run_dir else dataclasses.replace(config, run_dir=""), path)
    print(f"{path} written; {_program()} --config={path} trains it")


def plan(name: str, config: "Config", options: Options) -> None:
    """Prints the plan of the run on its mesh, or searches a mesh; an axis of -1 counts as 1."""
    from megajax.planning.plan import plan_device, plan_rows
    from megajax.planning.search import print_search
    from megajax.training.reporting.console import Console

    if options.plan.split(":")[0] == "search":
        print_search(name, config, options.plan)
        return
    device = plan_device(options.plan)
    config = config.for_plan()
    program = config.make_program()
    if options.plan_figure:
        from megajax.figures.drawings import plan_figure, save

        save(plan_figure(program, config.training, device, title=name), options.plan_figure)
    Console().card(f"plan of {name}", plan_rows(program, config.training, device, options.plan_price))


def _print_sample(config: "Config") -> None:
    from megajax.inference.engine import Engine, Sampling
    from megajax.terminal.announce import announced

    with announced("generating a sample"):
        engine = Engine.from_run(config.run_dir)
        (text,) = engine.generate([config.training.sample_prompt], Sampling(max_tokens=100, temperature=0.8, top_k=50))
    print(f"\nsample of {config.run_dir}:\n{config.training.sample_prompt}{text}")


# ----------------------------------------------------------------------------- command line


def _parse(arguments: list[str]) -> tuple[Options, bool, list[str]]:
    """-> (our options, whether help was requested, overrides of the configuration)."""
    words = ["--plan=h100" if word == "--plan" else word for word in arguments if word not in ("--help", "-h")]
    options, overrides = parse_known(Options, words, _program())
    return options, {"--help", "-h"}.intersection(arguments) != set(), overrides


def _names_run_dir(overrides: list[str]) -> bool:
    return any(word.startswith(("--run_dir", "--run-dir")) for word in overrides)


def _list_configs() -> None:
    found = {name: text.splitlines()[0] for name, text in configs.docstrings().items()}
    width = max(map(len, found))
    for name, line in found.items():
        print(for_terminal(f"{name:<{width}}  {line}", sys.stdout, indent=width + 2))


def _program() -> str:
    name = Path(sys.argv[0]).name
    return f"python {name}" if name == "train.py" else "megajax train"


def _section_lines() -> list[str]:
    """The sections of a config with the names of their fields, wrapped for the terminal."""
    from megajax.config import Config

    lines = []
    for field in dataclasses.fields(Config):
        if dataclasses.is_dataclass(section := field.default):
            names = " ".join(part.name for part in dataclasses.fields(section))
            lines.append(wrapped(f"  {field.name + '.':<14}{names}", min(terminal_width(), 120), indent=16))
    return lines


def _usage() -> str:
    program = _program()
    return "\n".join(
        [
            f"usage: {program} --config=NAME [--section.field=VALUE ...]",
            "",
            __doc__.rstrip(),
            "",
            "Sections of the configuration, with their fields, which",
            f"{program} --config=gpt_tiny --help describes:",
            *_section_lines(),
        ]
    )
