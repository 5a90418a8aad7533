"""Repeats one step of a run and reports which tensor became non-finite first: python train.py ... --replay_step=K

Training resumes in memory from the newest complete checkpoint before the step, with the same program; nothing is
written to the run directory, so the run may be training at the same time. The step itself then runs twice with that
program, which must give bitwise identical results, and once operation by operation (training/faults/nonfinite.py).
"""

import contextlib
import dataclasses
import json
import logging
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from megajax.checkpoint.verify import digests
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer
from megajax.training.faults.nonfinite import Origin, find_origins
from megajax.training.loop import Trainer
from megajax.training.reporting.metrics import read_metrics
from megajax.training.reporting.starts import start_record
from megajax.training.state import TrainState
from megajax.training.step import make_train_step

logger = logging.getLogger("megajax")
# Limits of the lists; the first entries matter most.
MOST_ORIGINS = 5
MOST_GRADIENTS = 8
MOST_PLACES = 6  # enough for the call stack from the operation up to its layer
# What the loops of a step iterate over, by the function that contains the loop.
LOOPS = {"_scan": "layer", "train_step": "microbatch"}
# Fields that do not affect the result of a step.
WITHOUT_EFFECT = ("run_dir", "checkpoint.", "logging.", "launch.", "training.log_", "training.eval_")
# Tolerance for float32 sums in another order, accumulated over some steps.
ROUNDING = 1e-3


def run_again(trainer: Trainer, step: int, changed: list[str]) -> None:
    """Runs the step again and prints a report.

    trainer: that of the run, with a read-only checkpointer. step: from 1, as in metrics.jsonl. changed: "name: old ->
    new" for config fields that differ from the last start of the run. Raises ValueError for a step beyond the run, and
    for a pipeline.
    """
    config = trainer.config
    mesh = trainer.program.mesh_config
    if trainer.program.model.stages is not None:
        raise ValueError(
            f"--replay_step={step} with mesh.pipeline={mesh.pipeline}: a pipeline is a single operation, which "
            f"cannot be traced; use --mesh.pipeline=1 --mesh.virtual_stages=1 --mesh.pipeline_layout= "
            f"--mesh.fsdp={mesh.fsdp * mesh.pipeline}, as any mesh reads the checkpoint"
        )
    if not 1 <= step <= config.steps:
        raise ValueError(f"--replay_step={step} must be from 1 to training.steps={config.steps}")
    with jax.set_mesh(trainer.program.mesh):
        _replay(trainer, step, changed)


def _replay(trainer: Trainer, step: int, changed: list[str]) -> None:
    note = trainer.output.console.note
    config = trainer.config
    program = trainer.program
    schedule = config.schedule(program.mesh_config)

    def rate(done: int) -> np.float32:
        return np.float32(trainer.learning_rate(done))

    state = _state_before(trainer, step)
    step_function = program.train_step(config)
    first = int(state.step)
    samples = schedule(step - 1)
    note(f"replay of step {step}, from {f'the checkpoint of step {first}' if first else 'the initial parameters'}")
    batches = trainer.train_batches(first, step, lambda: state.weights)
    for done, batch in enumerate(batches, start=first):
        if done < step - 1:
            state, _ = step_function(state, batch, rate(done))
    kept = _copy(state, _on_host(state))
    shardings = jax.tree.map(lambda a: a.sharding, state)
    state = None  # frees its memory

    values, identical = _run_twice(lambda: step_function(_copy(kept, shardings), batch, rate(step - 1)))
    loss, grad_norm, skipped = (values[name] for name in ("loss", "grad_norm", "skipped"))
    note(f"samples {samples.first_sample} to {samples.first_sample + samples.size - 1}")
    note(f"loss {loss:.6g}, gradient norm {grad_norm:.6g}, update {'skipped' if skipped else 'applied'}")
    changed = [*(line for line in changed if not line.startswith(WITHOUT_EFFECT)), *_other_machine(trainer)]
    note(verdict(values, identical, recorded_metrics(trainer.output.run_dir, step), changed))

    model = program.model
    # With a loop over the layers, the report can name the layer. Full recomputation saves memory, since nothing is
    # fused here; the arithmetic is the same.
    loop = dataclasses.replace(model.execution, scan_layers=True, recompute="full", recompute_every=1, offload=())
    parts = (model.config, model.precision, loop)
    looped = Model(*parts, adapters=model.adapters, trained=config.trained, frozen=config.frozen)
    function = make_train_step(looped, program.task, WithGradients(program.optimizer.config, model.trained), config)
    (_, metrics), origins = find_origins(function, _copy(kept, shardings), batch, rate(step - 1))
    for line in describe(origins, model.num_layers, ok=bool(np.isfinite([loss, grad_norm]).all())):
        note(line)
    for line in describe_gradients(_gradient_norms(metrics["gradients"], model)):
        note(line)


class WithGradients(Optimizer):
    """Adds the gradients to the metrics of an update, which is a single operation of the search."""

    def update(self, grads, *arguments: Any, **others: Any):
        params, state, metrics = jax.jit(super().update)(grads, *arguments, **others)
        return params, state, metrics | {"gradients": grads}


def verdict(
    values: dict[str, float], identical: bool, recorded: dict[str, float | None] | None, changed: list[str]
) -> str:
    """values: metrics of both runs; recorded: those in metrics.jsonl, None for a value that is not finite."""
    if not identical:
        return "the two runs differ: this device or program is not deterministic"
    if recorded is None:
        return "both runs are bitwise identical; metrics.jsonl has no line for this step to compare with"
    pairs = [(values[name], recorded[name]) for name in ("loss", "grad_norm")]
    if all(now == then if then is not None else not math.isfinite(now) for now, then in pairs):
        return "reproduced: both runs and metrics.jsonl are bitwise identical"
    shown = ", ".join("not finite" if then is None else f"{then:.9g}" for _, then in pairs)
    shown = f"metrics.jsonl has loss and gradient norm {shown}"

    def close(now: float, then: float | None) -> bool:
        return not math.isfinite(now) if then is None else math.isclose(now, then, rel_tol=ROUNDING)

    if changed and all(close(now, then) for now, then in pairs):
        return f"reproduced except for rounding: {shown}; changed since: {'; '.join(changed)}"
    if changed:
        return f"not reproduced: {shown}; either a hardware fault or a change: {'; '.join(changed)}"
    return f"not reproduced: {shown}; probably a transient hardware fault"


def describe(origins: list[Origin], num_layers: int, *, ok: bool) -> list[str]:
    """Lines that report where the step became non-finite. ok: the compiled step has finite loss and gradient norm."""
    if not origins and ok:
        return ["all values are finite, except for masked ones"]
    if not origins:
        return [
            "operation by operation all values are finite: only the compiled program differs (rounding, or a fault)"
        ]
    lines = ["not finite, in order of computation:"]
    for number, origin in enumerate(origins[:MOST_ORIGINS], start=1):
        out = origin.output
        made = f"{_shape(out)}, {out.num_nan} NaN and {out.num_inf} infinite of {math.prod(out.shape)}"
        if origin.primitive == "argument":
            lines.append(f"  {number}. before the step: {_argument(origin.places[0])}, {made}")
            continue
        where = "".join(f", {_loop(loop, num_layers)}" for loop in origin.loops)
        part = ", backward pass" if origin.backward else ", forward pass" if "jvp" in origin.name_stack else ""
        lines.append(f"  {number}. {origin.primitive}{part}{where}: {made}")
        lines.append(f"     at {', called by '.join(origin.places[:MOST_PLACES]) or 'an unknown location'}")
        if inputs := [f"{_shape(found)} up to {found.largest:.3g}" for found in origin.inputs]:
            lines.append(f"     of {', '.join(inputs)}")
        if origin.name_stack:
            lines.append(f"     traced in {origin.name_stack}")
    more = len(origins) - MOST_ORIGINS
    return [*lines, f"  and {more} more"] if more > 0 else lines


def describe_gradients(norms: dict[str, float]) -> list[str]:
    bad = [f"{name} ({norm})" for name, norm in norms.items() if not math.isfinite(norm)]
    if bad:
        more = f" and {len(bad) - MOST_GRADIENTS} more" if len(bad) > MOST_GRADIENTS else ""
        return [f"gradient norms that are not finite: {', '.join(bad[:MOST_GRADIENTS])}{more}"]
    largest = sorted(norms.items(), key=lambda item: -item[1])[:5]
    return [f"largest gradient norms: {', '.join(f'{name} {norm:.4g}' for name, norm in largest)}"]


def _loop(loop, num_layers: int) -> str:
    function = loop.place.split(" ")[-1]
    if function not in LOOPS:
        return f"iteration {loop.iteration} of {loop.length} at {loop.place}"
    is_layer = LOOPS[function] == "layer"
    if is_layer and num_layers % loop.length:  # one of several loops over layers
        return f"iteration {loop.iteration} of {loop.length} of a loop over layers"
    layers_per_iteration = num_layers // loop.length if is_layer else 1
    first = layers_per_iteration * loop.iteration
    return (
        f"{LOOPS[function]} {first}"
        if layers_per_iteration == 1
        else f"layers {first} to {first + layers_per_iteration - 1}"
    )


def _argument(path: str) -> str:
    """[0] is the state, [1] the batch."""
    return path.removeprefix("[0].") if path.startswith("[0]") else path.replace("[1]", "batch", 1)


def _shape(found) -> str:
    return f"{found.dtype}[{','.join(map(str, found.shape))}]"


# ------------------------------------------------------------------ the state, the runs, the record


def _state_before(trainer: Trainer, step: int) -> TrainState:
    """The state of the newest complete checkpoint before the step, or the initial one."""
    model = trainer.program.model
    target = trainer.program.abstract_state
    for saved in _saved_steps(trainer, step):
        try:
            restore = trainer.checkpointer.restore
            weights, optimizer_state, meta = restore(saved, target.weights, target.optimizer, model.layer_rows)
        except (MemoryError, jax.errors.JaxRuntimeError):  # not the fault of the checkpoint
            raise
        except Exception as error:  # Orbax raises many types, and a training run removes old checkpoints
            logger.warning("checkpoint %d is not used: %s", saved, (str(error).splitlines() or [repr(error)])[0])
            continue
        return trainer.program.restored_state(saved, weights, optimizer_state, meta)
    return trainer.initial_state()


def _saved_steps(trainer: Trainer, step: int) -> list[int]:
    """Newest first, as process 0 sees them."""
    found = [int(path.name) for path in trainer.checkpointer.folder.glob("*") if path.name.isdecimal()]
    steps = sorted((saved for saved in found if saved < step), reverse=True)
    if jax.process_count() > 1:
        padded = np.array([*steps[:100], *[0] * 100][:100], np.int32)
        steps = [saved for saved in multihost_utils.broadcast_one_to_all(padded).tolist() if saved]
    return steps


def _on_host(state: TrainState):
    """Shardings of a copy in host memory."""
    return jax.tree.map(lambda a: a.sharding.with_memory_kind("pinned_host"), state)


def _copy(state: TrainState, shardings) -> TrainState:
    return jax.block_until_ready(jax.device_put(state, shardings, may_alias=False))


def _run_twice(run) -> tuple[dict[str, float], bool]:
    """-> (metrics that are numbers, whether all metrics and the new state of both runs are bitwise identical)."""
    found = []
    for _ in range(2):
        state, metrics = run()
        found.append((jax.device_get(metrics), digests(state)))
        del state
    (first, state), (second, other_state) = found
    identical = state == other_state and all(first[name].tobytes() == second[name].tobytes() for name in first)
    return {name: float(value) for name, value in first.items() if value.ndim == 0}, identical


def recorded_metrics(run_dir: Path, step: int) -> dict[str, float | None] | None:
    """Loss and gradient norm of the step, if metrics.jsonl has them."""
    found = None
    try:
        for _, record in read_metrics(run_dir / "metrics.jsonl"):
            if record is not None and record["step"] == step and {"loss", "grad_norm"} <= record.keys():
                found = {name: record[name] for name in ("loss", "grad_norm")}
    except OSError as error:
        logger.warning("nothing to compare with: %s", error)
    is_number = found is not None and all(value is None or type(value) in (int, float) for value in found.values())
    return found if is_number else None


def _other_machine(trainer: Trainer) -> list[str]:
    """`name: old -> new` for hardware and versions that differ from the last start of the run."""
    path = trainer.output.run_dir / "starts.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    then = {}
    with contextlib.suppress(ValueError):  # a line that a crash cut off
        then = json.loads(lines[-1]) if lines else {}
    then = then if isinstance(then, dict) else {}
    now = start_record(trainer.program.mesh, trainer.program.compiler_options)
    return [
        f"{name}: {then[name]} -> {now[name]}"
        for name in now
        if name != "time" and then.get(name, now[name]) != now[name]
    ]


def _gradient_norms(gradients, model: Model) -> dict[str, float]:
    """{name of a parameter, with its layer if stacked: norm}, computed without overflow of the sum of squares."""
    leaves = jax.tree_util.tree_leaves_with_path(gradients)
    stacked = [record.axes[:1] == ("layers",) for record in jax.tree.leaves(model.trained)]
    rows = [leaf if is_stack else leaf[None] for (_, leaf), is_stack in zip(leaves, stacked, strict=True)]
    norms = {}
    for (path, _), is_stack, values in zip(leaves, stacked, jax.device_get(_row_norms(rows)), strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        labels = [name]
        if is_stack:
            labels = [f"{name} of layer {layer}" for layer in model.layer_rows[f"{path[0].key}.{path[1].key}"]]
        norms |= dict(zip(labels, values.tolist(), strict=True))
    return norms


@jax.jit
def _row_norms(gradients: list[jax.Array]) -> list[jax.Array]:
    """[rows, ...] -> float32 [rows] of each."""

    def norms(gradient):
        rest = tuple(range(1, gradient.ndim))
        largest = jnp.max(jnp.abs(gradient), rest, keepdims=True)
        scaled = gradient / jnp.where(largest > 0, largest, 1.0)
        return jnp.sqrt(jnp.sum(jnp.square(scaled), rest)) * jnp.squeeze(largest, rest)

    return [norms(gradient) for gradient in gradients]
