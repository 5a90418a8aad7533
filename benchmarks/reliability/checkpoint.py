"""The cost of checkpoints: python -m benchmarks.reliability.checkpoint --config=NAME [--section.field=value ...]

Saves the state of a recipe several times in the background while its train step keeps running, then restores it. The
cost of a save is the time that it blocks the loop (including the digests) plus the time that steps lose while it is
written; the last columns relate this to an interval between saves. Reads come from the page cache if memory is large
enough.

    --seconds=10     of steps without a save, after half as much to warm up
    --saves=3        number of saves; medians are reported, without the first if there are several
    --folder=DIR     where to write; default: a temporary directory, removed at the end
    --local_dir=DIR  also measures local snapshots there (/dev/shm)
    --output=FILE    writes all results as JSON
"""

import dataclasses
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.command_line import read_config, run, split
from benchmarks.records import devices, jax_versions, record, save
from benchmarks.train_step import RATE, Setup, set_up, sustained
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.local import LocalSnapshots
from megajax.checkpoint.verify import digests, sealed
from megajax.config import Config
from megajax.training.reporting.console import format_bytes
from megajax.training.state import TrainState

INTERVAL_MINUTES = 10, 30


@dataclasses.dataclass(frozen=True)
class Save:
    holding_seconds: float
    """Time for which the loop was blocked."""
    writing_seconds: float
    """From its start until it is on disk, as seen between two steps."""
    steps: int
    """Steps done while it was written."""
    step_seconds: float | None
    """Time of each of them."""

    def lost_seconds(self, plain: float) -> float:
        """plain: seconds of a step without a save."""
        return self.holding_seconds + (self.steps * (self.step_seconds - plain) if self.steps else 0.0)


def measure(config: Config, *, seconds: float, num_saves: int, folder: Path, local_dir: str) -> dict:
    setup = set_up(config)
    state = setup.new_state()
    step, _ = setup.compile(state, setup.program.compiler_options)
    state, _, (plain,) = sustained(step, state, setup.batches, seconds)
    trees = {"params": state.weights, "optimizer": state.optimizer}
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
    _digests(trees)  # compiles
    digest_seconds = _seconds(lambda: _digests(trees))
    host_bytes = {"training": _peak_host_bytes()}
    local = []
    if local_dir:
        snapshots = LocalSnapshots(Path(local_dir) / "megajax_benchmark")

        def write(number: int, trees: dict, meta: dict) -> None:
            snapshots.save(number, trees, sealed(number, meta, _digests(trees)))

        state, local = _saves(write, snapshots.is_writing, num_saves, setup, step, state)
        snapshots.wait()
        snapshots.close()
        snapshots.remove_up_to(num_saves)
        host_bytes["local snapshots"] = _peak_host_bytes()
    with Checkpointer(folder, CheckpointConfig(keep=1)) as checkpointer:
        state, saves = _saves(checkpointer.write, checkpointer.is_saving, num_saves, setup, step, state)
        checkpointer.wait()
    host_bytes["saves"] = _peak_host_bytes()
    target = setup.program.abstract_state
    del state, trees
    with Checkpointer(folder, None) as checkpointer:
        trees = (target.weights, target.optimizer)
        rows = setup.program.model.layer_rows
        restore_seconds = _seconds(lambda: jax.block_until_ready(checkpointer.restore(num_saves, *trees, rows)[:2]))
    host_bytes["restore"] = _peak_host_bytes()
    found = summary(saves, plain)
    found_local = summary(local, plain) if local else None
    return record(
        "checkpoint",
        [plain],
        devices(setup.program.mesh.size),
        jax_versions(),
        num_bytes=num_bytes,
        digest_seconds=digest_seconds,
        restore_seconds=restore_seconds,
        peak_host_bytes=host_bytes,
        saves=[dataclasses.asdict(save) for save in saves],
        local_saves=[dataclasses.asdict(save) for save in local],
        median=found,
        local_median=found_local,
    )


def _saves(
    write: Callable, is_writing: Callable[[], bool], num_saves: int, setup: Setup, step: Callable, state: TrainState
) -> tuple[TrainState, list[Save]]:
    """write(number, trees, meta) starts one save; steps continue until it is on disk."""
    saves = []
    batches = setup.batches
    meta = {"layer_rows": {kind: rows.tolist() for kind, rows in setup.program.model.layer_rows.items()}}
    for number in range(1, num_saves + 1):
        jax.block_until_ready(state)
        start = time.perf_counter()
        write(number, {"params": state.weights, "optimizer": state.optimizer}, meta)
        held = time.perf_counter()
        count = 0
        waiting = None
        while is_writing():
            state, metrics = step(state, batches[count % len(batches)], RATE)
            jax.block_until_ready(waiting)  # one step behind the device, like the training loop
            count += 1
            waiting = metrics
        written = time.perf_counter()
        jax.block_until_ready(state)
        step_seconds = (time.perf_counter() - held) / count if count else None
        saves.append(Save(held - start, written - start, count, step_seconds))
    return state, saves


def summary(saves: list[Save], plain: float) -> dict:
    saves = saves[1:] or saves

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    lost = median([save.lost_seconds(plain) for save in saves])
    return {
        "holding_seconds": median([save.holding_seconds for save in saves]),
        "writing_seconds": median([save.writing_seconds for save in saves]),
        "step_seconds": median([save.step_seconds for save in saves if save.steps]),
        "lost_seconds": lost,
        "share": {str(minutes): lost / (60 * minutes) for minutes in INTERVAL_MINUTES},
    }


def _digests(trees: dict) -> dict:
    return {name: digests(tree) for name, tree in trees.items()}


def _seconds(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _peak_host_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def table(result: dict) -> str:
    """Markdown: the cost of a save."""
    lines = [
        f"{format_bytes(result['num_bytes'])} on {result['device']}: digests {result['digest_seconds']:.3f} s, restore "
        f"{result['restore_seconds']:.2f} s, step {1000 * result['step_seconds']:.1f} ms",
        "peak host memory: " + ", ".join(f"{n} {format_bytes(b)}" for n, b in result["peak_host_bytes"].items()),
        "",
        "| save | holds the loop | on disk after | step meanwhile | lost | "
        + " | ".join(f"every {minutes} minutes" for minutes in INTERVAL_MINUTES)
        + " |",
        "|---|" + "---|" * (4 + len(INTERVAL_MINUTES)),
    ]
    for name, found in (("checkpoint", result["median"]), ("local snapshot", result["local_median"])):
        if found is not None:
            meanwhile = found["step_seconds"]
            shares = " | ".join(f"{share:.2%}" for share in found["share"].values())
            lines.append(
                f"| {name} | {found['holding_seconds']:.2f} s | {found['writing_seconds']:.2f} s | "
                f"{'-' if meanwhile is None else f'{1000 * meanwhile:.1f} ms'} | {found['lost_seconds']:.2f} s | "
                f"{shares} |"
            )
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    known = {"config": "", "seconds": "10", "saves": "3", "folder": "", "local_dir": "", "output": ""}
    values, overrides = split(arguments, known)
    config = read_config(values["config"], overrides)
    num_saves = int(values["saves"])
    if num_saves < 1:
        raise ValueError(f"saves={num_saves} must be at least 1")
    if values["folder"]:
        Path(values["folder"]).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=values["folder"] or None))
    try:
        options = dict(seconds=float(values["seconds"]), num_saves=num_saves, local_dir=values["local_dir"])
        result = measure(config, folder=folder, **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{values['config']} {' '.join(overrides)}: {table(result)}", flush=True)
    save(values["output"], {"config": values["config"], "overrides": overrides} | result)


if __name__ == "__main__":
    run(main)
