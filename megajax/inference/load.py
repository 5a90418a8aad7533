"""Loads a model for inference: a step of a run, or a Hugging Face folder, on a mesh."""

import dataclasses
import logging
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.mesh import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.sharding import with_shardings
from megajax.sources import Source, open_source

logger = logging.getLogger("megajax")


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    source: Source
    model: Model
    params: dict
    """Sharded over `mesh`, with the dtypes of `serving_params`."""
    mesh: Mesh
    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    """Tokens that precede every text: those of the tokenizer, for weights from other frameworks."""


def load_model(
    path: str | Path,
    mesh: MeshConfig | None = None,
    step: int | None = None,
    compute: Literal["float32", "bfloat16"] | None = None,
) -> LoadedModel:
    """The model of a run directory, with the parameters of one step (default: the newest), or of a Hugging Face folder.

    mesh: default one device; a mesh smaller than the machine takes its first devices. compute: in place of
    precision.compute of the run. Raises ValueError if the
    directory holds no run, no checkpoint or not that step, if the step or the tokenizer is damaged or does not belong
    to the run, or if the mesh does not divide the model or has a pipeline.
    """
    source = open_source(path, step)
    mesh_config = mesh or MeshConfig()
    config = source.config
    if mesh_config.pipeline > 1:
        raise ValueError(
            f"mesh.pipeline={mesh_config.pipeline}: inference does not support pipelines; use --mesh.tensor or "
            "--mesh.fsdp"
        )
    mesh_config.check()
    config.model.check(mesh_config, config.training.sequence_length, config.execution)
    tokenizer = source.tokenizer()
    devices = jax.devices()
    if -1 in mesh_config.sizes().values() or mesh_config.num_devices > len(devices):
        mesh_config = mesh_config.resolve(len(devices))
        config.model.check(mesh_config, config.training.sequence_length, config.execution)
    device_mesh = make_mesh(mesh_config, devices[: mesh_config.num_devices])
    precision = dataclasses.replace(config.precision, compute=compute or config.precision.compute)
    model = Model(config.model, precision, config.execution)
    params = restore(source, model, device_mesh)
    start_ids = getattr(tokenizer, "start_ids", ()) if source.is_foreign else ()
    return LoadedModel(source, model, params, device_mesh, tokenizer, tuple(start_ids))


def restore(source: Source, model: Model, mesh: Mesh) -> dict:
    """The weights of a source for inference, sharded over `mesh`."""
    target = with_shardings(serving_params(model), model.shardings(mesh))
    params = source.restore_params(target, model.layer_rows)
    logger.info("loaded %s", source)
    return params


def serving_params(model: Model):
    """Abstract weights for inference: matrices in the compute dtype, all else as stored.

    Layers cast their matrices to the compute dtype anyway, so results are the same, and a token reads half the memory.
    """
    return model.cast_weights(model.precision.compute_dtype)
