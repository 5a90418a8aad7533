"""Train a model: python train.py --config=NAME [--section.field=value ...]

Run again, it resumes from its run directory. --list_configs shows the recipes, --help the fields, --plan what a run
would need, without a GPU, --plan=search:64 the meshes of 64 GPUs by predicted speed, --replay_step=K does step K of the
run again, changing nothing in its directory, and says which tensor went non-finite first.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax

import configs
from megajax import config as configuration
from megajax.config import Config
from megajax.mesh import initialize_processes
from megajax.training.faults.run_lock import locked
from megajax.training.faults.supervisor import supervise
from megajax.training.faults.watchdog import Watchdog
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
    from megajax.checkpoint.checkpointer import Checkpointer
    from megajax.data.tokenizers.tokenizer import save_tokenizer
    from megajax.mesh import COMPILATION_CACHE, use_compilation_cache
    from megajax.planning.card import startup_rows
    from megajax.training.faults.disk import check_room
    from megajax.training.loop import Trainer
    from megajax.training.reporting.console import Console
    from megajax.training.reporting.metrics import MetricsWriter
    from megajax.training.reporting.starts import first_start, start_record
    from megajax.training.state import abstract_state

    watchdog.alive()
    config = config.check_on(jax.device_count())
    run_dir, first_process = Path(config.run_dir), jax.process_index() == 0
    changed = _check_same_run(config, run_dir)
    console = Console(enabled=first_process)
    if changed:
        console.note(f"changed since the run was last started: {'; '.join(changed)}")

    parts = _build(config)
    mesh, model, optimizer, datasets, options = (
        parts[name] for name in ("mesh", "model", "optimizer", "datasets", "compiler_options")
    )
    check_room(run_dir, abstract_state(model, optimizer), config.training.steps)
    watchdog.alive()
    if first_process:
        run_dir.mkdir(parents=True, exist_ok=True)
        _replace(run_dir / "config.json", config.to_json())
        _replace(run_dir / "data.json", json.dumps(datasets.record, indent=2) + "\n")
        save_tokenizer(datasets.tokenizer, run_dir)
        with (run_dir / "starts.jsonl").open("a") as file:
            print(json.dumps(start_record(mesh, options)), file=file)

    # All processes must find the same programs: one that has to compile waits for the others to autotune with it.
    use_compilation_cache(COMPILATION_CACHE if jax.process_count() == 1 else run_dir / "compilation")
    shard_over_data = config.optimizer.shard_over_data
    rows = startup_rows(model, optimizer, mesh, config.mesh, config.training, datasets, shard_over_data, options)
    console.card(f"megajax: {run_dir}", rows)
    writer = MetricsWriter(run_dir, config.logging, dataclasses.asdict(config)) if first_process else None
    with Checkpointer(run_dir, config.checkpoint) as checkpointer:
        trainer = Trainer(
            **parts,
            checkpointer=checkpointer,
            checkpoint_every_steps=config.checkpoint.every_steps,
            writer=writer,
            console=console,
            meta={"config": dataclasses.asdict(config), "tokenizer": datasets.tokenizer.identity},
            watchdog=watchdog,
            first_started=first_start(run_dir),
        )
        state = trainer.start()
        watchdog.alive()
        try:
            outcome = trainer.run(state)
        except ValueError as error:  # no bad input any more: the traceback is worth keeping
            raise RuntimeError("training stopped") from error
    if writer is not None:
        writer.close()
    console.note(f"{outcome}: {run_dir}, step {checkpointer.latest_step()} of {config.training.steps}")
    return outcome


def _build(config: Config) -> dict[str, Any]:
    """What a Trainer takes of the config alone; writes nothing. Raises ValueError if the run began with other data."""
    from megajax.data.datasets import build_datasets, check_vocab_size
    from megajax.mesh import make_mesh
    from megajax.training.compiler_options import compiler_options

    training, mesh, model = config.training, make_mesh(config.mesh), config.make_model()
    options = compiler_options(model, mesh, offload_state=config.optimizer.offload_state)
    datasets = build_datasets(
        config.data,
        sequence_length=training.sequence_length,
        seed=training.seed,
        num_train_samples=training.schedule(config.mesh).num_samples(training.steps),
        first_sample=lambda step: training.schedule(config.mesh)(step).first_sample,
        num_eval_samples=training.eval_steps * training.eval_batch_size(config.mesh)
        if training.eval_every_steps
        else 0,
    )
    check_vocab_size(datasets.tokenizer, config.model.vocab_size)
    _check_same_data(datasets.record, config.data.allow_change, Path(config.run_dir))
    return dict(
        config=training,
        launch=config.launch,
        mesh_config=config.mesh,
        mesh=mesh,
        model=model,
        optimizer=config.make_optimizer(model),
        learning_rates=config.optimizer.make_schedule(training.steps),
        shard_over_data=config.optimizer.shard_over_data,
        datasets=datasets,
        data_config=config.data,
        run_dir=Path(config.run_dir),
        compiler_options=options,
    )


def replay(config: Config, step: int) -> None:
    """Runs a step of the run again, in memory only; the run may be training."""
    from megajax.checkpoint.checkpointer import Checkpointer
    from megajax.mesh import use_compilation_cache
    from megajax.training.faults.replay import run_again
    from megajax.training.loop import Trainer
    from megajax.training.reporting.console import Console

    config, run_dir = config.check_on(jax.device_count()), Path(config.run_dir)
    if not (run_dir / "config.json").is_file():
        raise ValueError(f"--replay_step={step}: run_dir={run_dir} holds no run; name the run with --run_dir")
    changed = _check_same_run(config, run_dir)
    if jax.process_count() == 1:  # that of several processes lies in the run directory
        use_compilation_cache()
    with Checkpointer(run_dir, None) as checkpointer:
        trainer = Trainer(
            **_build(config),
            checkpointer=checkpointer,
            checkpoint_every_steps=0,
            writer=None,
            console=Console(enabled=jax.process_index() == 0),
            meta={},
            watchdog=Watchdog(0),
            first_started=0.0,
        )
        run_again(trainer, step, changed)


def plan(name: str, config: Config, device_name: str) -> None:
    """Prints what the run would need on its mesh; an axis of -1 counts as 1. device_name: of a GPU, or
    search:NUMBER[:GPU], which ranks the meshes of so many."""
    from megajax.planning.plan import plan_device, plan_rows
    from megajax.planning.search import search_rows
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
    model = config.make_model()
    optimizer = config.make_optimizer(model)
    packed = not config.data.cross_document_attention
    rows = plan_rows(model, optimizer, mesh, config.training, config.optimizer.shard_over_data, packed, device)
    Console().card(f"plan of {name}", rows)


def _parse(arguments: list[str]) -> tuple[str, str, int | None, bool, list[str]]:
    """-> (recipe name, device to plan for or "", step to replay or None, whether help is wanted, overrides)."""
    name, plan_device, replay_step, wants_help, overrides = "", "", None, False, []
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


def _check_same_run(config: Config, run_dir: Path) -> list[str]:
    """-> What is not as it was when the run was last started. Raises ValueError if the directory holds a run whose
    parameters or optimizer state would not fit; nothing is overwritten."""
    if not (run_dir / "config.json").is_file():
        return []
    if (run_dir / "exported.json").is_file():
        raise ValueError(
            f"run_dir={run_dir} holds parameters alone, for serving, and no optimizer; train in the run directory that "
            "they came from, or use another --run_dir"
        )
    before, now = Config.load(run_dir), dataclasses.replace(config, run_dir=str(run_dir))
    if other := configuration.incompatibilities(before, now):
        raise ValueError(f"run_dir={run_dir} holds a run of another model ({'; '.join(other)}); use another --run_dir")
    return [line for line in configuration.differences(before, now) if not line.startswith("launch.")]


def _check_same_data(record: dict, allow_change: bool, run_dir: Path) -> None:
    """Raises ValueError if the directory holds a run on other data, unless that is allowed."""
    from megajax.data.datasets import check_same_data

    path = run_dir / "data.json"
    if path.is_file() and not allow_change:
        check_same_data(json.loads(path.read_text()), record)


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole: other processes may be reading it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def _print_sample(config: Config) -> None:
    from megajax.inference.engine import Engine, Sampling

    engine = Engine.from_run(config.run_dir)
    (text,) = engine.generate([config.training.sample_prompt], Sampling(max_tokens=100, temperature=0.8, top_k=50))
    print(f"\nsample of {config.run_dir}:\n{config.training.sample_prompt}{text}")


if __name__ == "__main__":
    log_to_stderr()
    try:
        main(sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
