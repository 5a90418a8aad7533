"""Assembles a run from its config: the entry point of train.py, replays and notebooks.

`train` does all of it. Its parts: `check` compares the config with the run directory and changes nothing, `record`
writes the files that describe the run, `make_trainer` builds the Trainer.
"""

import contextlib
import dataclasses
import functools
import json
import logging
from collections.abc import Generator, Iterable
from pathlib import Path

import jax
from jax.sharding import Mesh

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.steps import newest_meta
from megajax.config import Config, differences, holds_run, incompatibilities
from megajax.data.datasets import Amounts, Datasets, check_same_data, check_vocab_size
from megajax.data.iterables import IterableSource
from megajax.data.tokenizers.load import save_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.mesh.config import make_mesh
from megajax.mesh.processes import COMPILATION_CACHE, use_compilation_cache
from megajax.planning.card import startup_rows
from megajax.planning.memory import check_host_memory
from megajax.terminal.announce import announced
from megajax.training.faults.disk import check_room
from megajax.training.faults.watchdog import Watchdog
from megajax.training.loop import CannotGoOn, Output, Trainer
from megajax.training.program import Program
from megajax.training.replay import run_again
from megajax.training.reporting.console import Console, format_count
from megajax.training.reporting.metrics import Listener, MetricsWriter, running_seconds
from megajax.training.reporting.starts import start_record
from megajax.training.run_lock import RunLock, locked
from megajax.weights import start_from

logger = logging.getLogger("megajax")


def train(
    config: Config,
    program: Program[Mesh] | None = None,
    on_metrics: Listener | None = None,
    batches: Iterable | None = None,
) -> str:
    """Builds everything that the config describes and trains -> "finished", "interrupted" or "already finished".

    program: of this config on all devices, if it has been made already; what it has compiled is not compiled again.
    on_metrics: is called with each line of metrics.jsonl, in the process that writes it. batches: what to train on
    instead of the data of the config (data/iterables.py), in one process.
    Raises ValueError, with one line, if another run uses the directory, if the config cannot be trained, or if training
    cannot go on because of what it reads or where it writes.
    """
    with Watchdog(config.launch.hang_minutes) as watchdog, locked(Path(config.run_dir)) as lock:
        return _train(config, watchdog, lock, program, on_metrics, batches)


def _train(
    config: Config,
    watchdog: Watchdog,
    lock: RunLock,
    program: Program[Mesh] | None,
    on_metrics: Listener | None,
    batches: Iterable | None,
) -> str:
    watchdog.alive()
    with announced("starting the devices"):
        num_devices = jax.device_count()
    config = config.check_on(num_devices)
    config = start_from.pinned(config)
    run_dir = Path(config.run_dir)
    changed = check(config)
    program = program or make_program(config)
    check_host_memory(program, config.training)
    datasets = load_data(config, trains_on_own=batches is not None)
    _check_sample_prompt(config.training.sample_prompt, datasets.tokenizer)
    check_room(run_dir, program.abstract_state, config.training.steps)
    watchdog.alive()
    if jax.process_index() == 0:
        record(config, program, datasets)
    # All processes must find the same programs: one that has to compile waits for the others to autotune with it.
    use_compilation_cache(COMPILATION_CACHE if jax.process_count() == 1 else run_dir / "compilation")
    with make_trainer(config, program, datasets, watchdog, lock, on_metrics, batches) as trainer:
        console = trainer.output.console
        if changed:
            console.note(f"changed since the run was last started: {'; '.join(changed)}")
        console.card(f"megajax: {run_dir}", startup_rows(program, config.training, datasets))
        state = trainer.start()
        watchdog.alive()
        try:
            outcome = trainer.run(state)
        except CannotGoOn:
            raise
        except ValueError as error:  # not bad input at this point: keep the traceback
            raise RuntimeError("training stopped") from error
    if outcome != "already finished":
        console.note(f"{outcome}: {run_dir}, step {trainer.checkpointer.latest_step()} of {config.training.steps}")
    return outcome


def replay(config: Config, step: int) -> None:
    """Runs a step of the run again, in memory only; the run may be training."""
    config = config.check_on(jax.device_count())
    if not holds_run(config.run_dir):
        raise ValueError(f"--replay_step={step}: run_dir={config.run_dir} holds no run; name the run with --run_dir")
    config = start_from.pinned(config)
    changed = check(config)
    if jax.process_count() == 1:  # with several processes the cache is in the run directory
        use_compilation_cache()
    program = make_program(config)
    datasets = load_data(config)
    with make_trainer(config, program, datasets, Watchdog(0)) as trainer:
        run_again(trainer, step, changed)


def check(config: Config) -> list[str]:
    """-> fields that differ from the last start of the run. Raises ValueError if the directory holds a run that cannot
    resume with this config, or if the weights to start from do not fit the model; nothing is written."""
    run_dir = Path(config.run_dir)
    if not holds_run(run_dir):
        if config.checkpoint.start_from:
            start_from.check(config)
        elif config.lora.rank:
            raise ValueError(
                f"lora.rank={config.lora.rank} adapts weights that have been trained, and these would be random; name "
                "them with --checkpoint.start_from, or leave it out"
            )
        return []
    if (run_dir / "exported.json").is_file():
        raise ValueError(
            f"run_dir={run_dir} holds exported parameters without optimizer state; train in the run directory that "
            "they came from, or begin a new run with --checkpoint.start_from"
        )
    before = Config.load(run_dir)
    now = dataclasses.replace(config, run_dir=str(run_dir))
    if other := incompatibilities(before, now):
        raise ValueError(
            f"run_dir={run_dir} holds a run that cannot resume with other settings ({'; '.join(other)}); use another "
            "--run_dir, and --checkpoint.start_from to begin with these weights"
        )
    return [line for line in differences(before, now) if not line.startswith("launch.")]


def load_data(config: Config, *, trains_on_own: bool = False) -> Datasets:
    """trains_on_own: the program gives what is trained on; the data of the config has the tokenizer, and what is
    evaluated on. Raises ValueError if the run was started with other data, unless data.allow_change, or if the
    tokenizer has ids that the model does not have."""
    training = config.training
    schedule = training.schedule(config.mesh)
    evaluated = training.eval_steps * training.global_batch_size if training.eval_every_steps else 0
    amounts = Amounts(
        sequence_length=training.sequence_length,
        seed=training.seed,
        num_train_samples=schedule.num_samples(training.steps),
        num_eval_samples=evaluated,
        first_sample=lambda step: schedule(step).first_sample,
    )
    datasets = config.task.datasets(config.data, config.model, amounts)
    check_vocab_size(datasets.num_token_ids, config.model.vocab_size)
    if trains_on_own:
        datasets = dataclasses.replace(datasets, sources=(), record={"batches": "given"})
    most = config.task.max_epochs
    if most is not None and not datasets.is_mock and jax.process_index() == 0:
        _warn_of_repetition(datasets, most)
    if not config.data.allow_change:
        _check_data(datasets, Path(config.run_dir))
    return datasets


def _check_sample_prompt(prompt: str, tokenizer: Tokenizer) -> None:
    """Raises ValueError if the tokenizer cannot encode it, which would be found when the run is finished."""
    try:
        if prompt:
            tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(
            f"training.sample_prompt={prompt!r} cannot be encoded by data.tokenizer, {tokenizer.identity} ({error}); "
            "name the tokenizer of the data, or use --training.sample_prompt="
        ) from None


def _warn_of_repetition(datasets: Datasets, most: int) -> None:
    for source in datasets.sources:
        if source.epochs > most:
            logger.warning(
                "data: %s, %s tokens, is read %s times: beyond %d epochs repeated text teaches a model less and less; "
                "use more text, fewer --training.steps or a smaller --training.global_batch_size",
                source.name,
                format_count(source.tokens_per_epoch),
                f"{source.epochs:,.1f}",
                most,
            )


def _check_data(datasets: Datasets, run_dir: Path) -> None:
    """Compares with the data recorded in the newest step or, before the first step, in data.json."""
    if found := newest_meta(run_dir):
        step, meta = found
        check_same_data(meta["data"], datasets.record, f"step {step} in {run_dir}")
        return
    path = run_dir / "data.json"
    if not path.is_file():
        return
    try:
        before = json.loads(path.read_text())
        if not isinstance(before, dict):
            raise ValueError("it does not hold an object {...}")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"data: {path} cannot be read ({error}), so it is unknown which data the run was started with; restore "
            "it, or continue with --data.allow_change=True"
        ) from None
    check_same_data(before, datasets.record, str(path))


def record(config: Config, program: Program[Mesh], datasets: Datasets) -> None:
    """Writes config.json, data.json, the tokenizer and a line of starts.jsonl; only the first process calls this."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    _replace(run_dir / "config.json", config.to_json())
    _replace(run_dir / "data.json", json.dumps(datasets.record, indent=2) + "\n")
    save_tokenizer(datasets.tokenizer, run_dir)
    with (run_dir / "starts.jsonl").open("a") as file:
        print(json.dumps(start_record(program.mesh, program.compiler_options)), file=file)


@contextlib.contextmanager
def make_trainer(
    config: Config,
    program: Program[Mesh],
    datasets: Datasets,
    watchdog: Watchdog,
    lock: RunLock | None = None,
    on_metrics: Listener | None = None,
    batches: Iterable | None = None,
) -> Generator[Trainer]:
    """The Trainer of a run on all devices; the mesh of the config must be resolved. lock: of the run directory; without
    it nothing is written there. on_metrics, batches: as in `train`."""
    run_dir = Path(config.run_dir)
    writes = jax.process_index() == 0 and lock is not None
    described = dataclasses.asdict(config)
    own_source = None
    if batches is not None:
        length = config.training.sequence_length
        form = functools.partial(config.task.formats, config.data, config.model, length, datasets.tokenizer)
        own_source = IterableSource(
            batches, config.training.schedule(config.mesh), datasets.tokenizer, lambda: form().eval, length
        )
    writer = MetricsWriter(run_dir, config.logging, described, lock, on_metrics) if writes else None
    with Checkpointer(run_dir, None if lock is None else config.checkpoint) as checkpointer:
        yield Trainer(
            config=config.training,
            launch=config.launch,
            program=program,
            datasets=datasets,
            data_config=config.data,
            checkpointer=checkpointer,
            starting_weights=functools.partial(start_from.weights, config, program)
            if config.checkpoint.start_from
            else None,
            output=Output(
                run_dir=run_dir,
                console=Console(enabled=jax.process_index() == 0),
                writer=writer,
                meta={
                    "config": described,
                    "tokenizer": datasets.tokenizer.identity,
                    "eod_id": datasets.tokenizer.eod_id,
                    "data": datasets.record,
                },
                running_seconds=running_seconds(run_dir / "metrics.jsonl"),
            ),
            watchdog=watchdog,
            lock=lock or RunLock(run_dir),
            own_source=own_source,
        )
    if writer is not None:
        writer.close()


def make_program(config: Config) -> Program[Mesh]:
    """The Program on all devices of all processes; the mesh of the config must be resolved."""
    return config.make_program(make_mesh(config.mesh))


def _replace(path: Path, text: str) -> None:
    """Replaces a file atomically, because other processes may be reading it."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)
