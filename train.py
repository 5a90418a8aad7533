"""Train a model: python train.py --config=NAME [--section.field=value ...]

Run again, it resumes from its run directory. --list_configs shows the recipes, --help the fields, --plan what a run
would need, without a GPU, --plan=search:64 the meshes of 64 GPUs by predicted speed, --replay_step=K does step K of the
run again, changing nothing in its directory, and says which tensor went non-finite first.
"""

import dataclasses
import sys
from pathlib import Path

from megajax.training.faults.signals import leave_when_asked

if __name__ == "__main__":
    leave_when_asked()  # while the rest is imported too, which takes seconds

import jax

import configs
from megajax import config as configuration
from megajax.announce import announced
from megajax.config import Config
from megajax.mesh import initialize_processes
from megajax.training.faults.run_lock import locked
from megajax.training.faults.supervisor import supervise
from megajax.training.faults.watchdog import Watchdog
from megajax.training.reporting.best_effort import print_what_can_be_printed
from megajax.training.reporting.console import log_to_stderr


def main(arguments: list[str]) -> None:
    if "--list_configs" in arguments:
        for name, recipe in configs.recipes().items():
            print(f"{name:<14} {recipe.__doc__.splitlines()[0]}")
        return
    name, plan_device, replay_step, wants_help, overrides = _parse(arguments)
    config = configs.recipe(name)
    if wants_help:
        configuration.print_help(config, f"train.py --config={name}")
    config = configuration.override(config, overrides)
    if not config.run_dir:
        config = dataclasses.replace(config, run_dir=f"runs/{name}")
    if plan_device:
        plan(name, config, plan_device)
        return
    config.check()
    if replay_step is not None:
        initialize_processes()
        replay(config, replay_step)
        return
    config.checkpoint.check_local_dir()
    if config.launch.max_restarts:
        command = [sys.executable, __file__, *arguments, "--launch.max_restarts=0"]
        limits = config.launch.max_restarts, config.launch.hang_minutes
        raise SystemExit(supervise(command, Path(config.run_dir), *limits))
    with Watchdog(config.launch.hang_minutes) as watchdog:
        watchdog.alive()
        initialize_processes()
        watchdog.alive()
        with locked(Path(config.run_dir)):
            outcome = train(config)
    if outcome != "interrupted" and config.training.sample_prompt and jax.process_count() == 1:
        _print_sample(config)


def train(config: Config) -> str:
    """Builds everything that the config describes and trains -> "finished", "interrupted" or "already finished"."""
    with Watchdog(config.launch.hang_minutes) as watchdog:
        return _train(config, watchdog)


def _train(config: Config, watchdog: Watchdog) -> str:
    from megajax import run, start_from
    from megajax.mesh import COMPILATION_CACHE, use_compilation_cache
    from megajax.planning.card import startup_rows
    from megajax.training.faults.disk import check_room

    watchdog.alive()
    with announced("starting the devices"):
        num_devices = jax.device_count()
    config = config.check_on(num_devices)
    config = start_from.pinned(config)
    run_dir = Path(config.run_dir)
    changed = run.check(config)
    program = run.make_program(config)
    datasets = run.load_data(config)
    check_room(run_dir, program.abstract_state, config.training.steps)
    watchdog.alive()
    if jax.process_index() == 0:
        run.record(config, program, datasets)
    # All processes must find the same programs: one that has to compile waits for the others to autotune with it.
    use_compilation_cache(COMPILATION_CACHE if jax.process_count() == 1 else run_dir / "compilation")
    with run.make_trainer(config, program, datasets, watchdog) as trainer:
        console = trainer.output.console
        if changed:
            console.note(f"changed since the run was last started: {'; '.join(changed)}")
        console.card(f"megajax: {run_dir}", startup_rows(program, config.training, datasets))
        state = trainer.start()
        watchdog.alive()
        try:
            outcome = trainer.run(state)
        except ValueError as error:  # no bad input any more: the traceback is worth keeping
            raise RuntimeError("training stopped") from error
    if outcome != "already finished":
        console.note(f"{outcome}: {run_dir}, step {trainer.checkpointer.latest_step()} of {config.training.steps}")
    return outcome


def replay(config: Config, step: int) -> None:
    """Runs a step of the run again, in memory only; the run may be training."""
    from megajax import run, start_from
    from megajax.mesh import use_compilation_cache
    from megajax.training.faults.replay import run_again

    config = config.check_on(jax.device_count())
    if not configuration.holds_run(config.run_dir):
        raise ValueError(f"--replay_step={step}: run_dir={config.run_dir} holds no run; name the run with --run_dir")
    config = start_from.pinned(config)
    changed = run.check(config)
    if jax.process_count() == 1:  # that of several processes lies in the run directory
        use_compilation_cache()
    program = run.make_program(config)
    datasets = run.load_data(config)
    with run.make_trainer(config, program, datasets, Watchdog(0), read_only=True) as trainer:
        run_again(trainer, step, changed)


def plan(name: str, config: Config, device_name: str) -> None:
    """Prints what the run would need on its mesh; an axis of -1 counts as 1. device_name: of a GPU, or
    search:NUMBER[:GPU], which ranks the meshes of so many."""
    from megajax.planning.plan import plan_device, plan_rows
    from megajax.search import search_rows
    from megajax.training.reporting.console import Console

    if device_name.split(":")[0] == "search":
        _, number, kind = (device_name + "::").split(":")[:3]
        if not number.isdecimal():
            raise ValueError(f"--plan={device_name}: for how many GPUs? --plan=search:64, or search:64:h200")
        Console().card(f"meshes for {name}", search_rows(config, int(number), plan_device(kind or "h100")))
        return
    device = plan_device(device_name)
    sizes = {axis: max(size, 1) for axis, size in config.mesh.sizes().items()}
    mesh = dataclasses.replace(config.mesh, **sizes)
    config = dataclasses.replace(config, mesh=mesh).check_on(mesh.num_devices)
    packed = not config.data.cross_document_attention
    rows = plan_rows(config.make_program(), config.training, packed, device)
    Console().card(f"plan of {name}", rows)


def _parse(arguments: list[str]) -> tuple[str, str, int | None, bool, list[str]]:
    """-> (recipe name, device to plan for or "", step to replay or None, whether help is wanted, overrides)."""
    name = ""
    plan_device = ""
    replay_step = None
    wants_help = False
    overrides = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument.startswith("--config="):
            name = argument.removeprefix("--config=")
        elif argument == "--config":
            name = next(waiting, "")
        elif argument == "--plan" or argument.startswith("--plan="):
            plan_device = argument.removeprefix("--plan").removeprefix("=") or "h100"
        elif argument == "--replay_step" or argument.startswith("--replay_step="):
            number = argument.removeprefix("--replay_step").removeprefix("=") or next(waiting, "")
            if not number.isdecimal():
                raise ValueError(f"--replay_step={number} is not the number of a step; --replay_step=1200")
            replay_step = int(number)
        elif argument in ("--help", "-h"):
            wants_help = True
        else:
            overrides.append(argument)
    if not name and wants_help:
        print(__doc__)
        raise SystemExit(0)
    if not name:
        raise ValueError("which recipe? --config=NAME; --list_configs shows all (python train.py --config=gpt_tiny)")
    return name, plan_device, replay_step, wants_help, overrides


def _print_sample(config: Config) -> None:
    from megajax.inference.engine import Engine, Sampling

    with announced("generating a sample"):
        engine = Engine.from_run(config.run_dir)
        (text,) = engine.generate([config.training.sample_prompt], Sampling(max_tokens=100, temperature=0.8, top_k=50))
    print(f"\nsample of {config.run_dir}:\n{config.training.sample_prompt}{text}")


if __name__ == "__main__":
    print_what_can_be_printed()
    log_to_stderr()
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
