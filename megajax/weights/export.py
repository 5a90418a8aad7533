"""Exports the parameters of a run: a run directory with config, tokenizer and one step without optimizer state.

infer.py reads it on any mesh, train.py refuses it. Layers are stored in order, whatever pipeline the run had, and
adapters are merged into their matrices. With a dtype, matrices are cast; vectors (norms, biases) keep theirs, so that
serving in bfloat16 computes with the same numbers.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.layout import recorded
from megajax.checkpoint.steps import find_step
from megajax.config import Config
from megajax.layers.lora import LoraConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.parameters import Parameter
from megajax.weights.run_directory import copy_tokenizer, describe, new_directory


def export(run_dir: str | Path, output: str | Path, step: int | None = None, dtype: str | None = None) -> int:
    """Writes `output` from one step of a run (default: the newest) -> the step.

    The arrays are sharded over all devices of this process, verified as saved, then cast. Raises ValueError if the
    output exists, or if the step is missing or damaged; then nothing is written.
    """
    run_dir = Path(run_dir)
    step = find_step(run_dir, step)
    config = Config.load(run_dir, step)
    model = Model(config.model, config.precision, config.execution, adapters=config.lora.transforms)
    adapts = bool(config.model.transforms or model.adapters)
    with new_directory(output, "output") as new:
        with Checkpointer(run_dir, None) as checkpointer:
            weights, meta = _read(checkpointer, step, model, "float32" if adapts else dtype)
        if adapts:
            config = dataclasses.replace(config, model=config.model.without_transforms, lora=LoraConfig())
            weights = _merged(model, weights, dtype)
            meta |= {"config": dataclasses.asdict(config)}
        record = {"run": str(run_dir.resolve()), "step": step, "dtype": dtype}
        with Checkpointer(new, CheckpointConfig(keep=0)) as writer:
            writer.write(step, {"params": weights}, meta)
            writer.wait()
        describe(new, config, record)
        copy_tokenizer(run_dir, new)
    return step


def _read(checkpointer: Checkpointer, step: int, model: Model, dtype: str | None):
    """-> (weights, meta), with the layers in order."""
    meta = checkpointer.read_meta(step)
    meta.pop("digests", None)
    mesh = make_mesh(MeshConfig(fsdp=jax.device_count()))
    abstract = model.abstract_weights if dtype is None else model.cast_weights(jnp.dtype(dtype))
    target = jax.tree.map(lambda a, record: _spread(a, record, mesh), abstract, model.records)
    weights = checkpointer.restore_params(step, target, model.layer_rows)
    return weights, meta | recorded(model.layer_rows)


def _merged(model: Model, weights: dict, dtype: str | None) -> dict:
    """The weights with the transforms of the model merged into them, then cast."""
    plain = model.without_transforms
    abstract = plain.abstract_weights if dtype is None else plain.cast_weights(jnp.dtype(dtype))

    def run(weights: dict) -> dict:
        return jax.tree.map(lambda array, wanted: array.astype(wanted.dtype), model.merged(weights), abstract)

    return jax.jit(run)(weights)


def _spread(a: jax.ShapeDtypeStruct, record: Parameter, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """Adds a sharding: matrices are split over all devices if divisible."""
    splits = record.is_cast and a.shape[-1] % mesh.size == 0
    spec = P(*[None] * (len(a.shape) - 1), "fsdp") if splits else P()
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
