"""Opens a model for inference: a step of a run, or a Hugging Face folder, on a mesh."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.inference.config import WeightDtype
from megajax.inference.device.weights import check_weights, restore_weights
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.weights.adapters import AdaptedWeights
from megajax.weights.sources import Source, StoredWeights, open_source


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """Everything but the weights, which `restore` reads."""

    source: Source
    model: Model
    mesh: Mesh
    tokenizer: Tokenizer
    start_ids: tuple[int, ...]
    """Tokens that precede every text: those of the tokenizer, for weights from other frameworks."""
    weights: WeightDtype = "auto"
    """How `restore` returns them."""
    adapted: StoredWeights | None = None
    """Those of the source with adapters beside them; None: there are none."""

    def restore(self, replaced: dict | None = None, *, joins: bool = False) -> dict:
        """The weights, an array per layer, sharded over the mesh: matrices in the compute dtype, to which layers cast
        them anyway, or as QuantizedWeights. replaced, joins: see `restore_weights`."""
        return restore_weights(self.adapted or self.source, self.model, self.mesh, self.weights, replaced, joins=joins)

    def check(self) -> dict:
        """Reads all weights and keeps none -> abstract arrays like the result of `restore`. Raises ValueError if they
        are damaged or not finite."""
        return check_weights(self.adapted or self.source, self.model, self.mesh, self.weights)


def open_model(
    path: str | Path,
    mesh: MeshConfig | None = None,
    step: int | None = None,
    compute: Literal["float32", "bfloat16"] | None = None,
    weights: WeightDtype = "auto",
    devices: Sequence[jax.Device] | None = None,
    adapters: Mapping[str, str | Path] = {},
) -> OpenedModel:
    """The model of a step of a run directory (default: the newest), or of a Hugging Face folder.

    mesh: default one device; a smaller mesh takes the first of the devices, default all of the machine. compute: in
    place of precision.compute of the run. weights: see ServingConfig.weight_dtype. adapters: see Engine.from_run.
    Raises ValueError if the directory holds no run, no checkpoint or not that step, if the step or the tokenizer is
    damaged or does not belong to the run, for what is no adapter of it, or if the mesh does not divide the model or has
    a pipeline.
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
    devices = jax.devices() if devices is None else devices
    if -1 in mesh_config.sizes().values() or mesh_config.num_devices > len(devices):
        mesh_config = mesh_config.resolve(len(devices))
        config.model.check(mesh_config, config.training.sequence_length, config.execution)
    device_mesh = make_mesh(mesh_config, devices[: mesh_config.num_devices])
    precision = config.precision.for_inference.with_compute(compute)
    adapted = AdaptedWeights(source, adapters) if adapters else None
    transforms = config.lora.transforms if adapted is None else (adapted.transform,)
    model = Model(config.model, precision, config.execution, adapters=transforms)
    start_ids = getattr(tokenizer, "start_ids", ()) if source.is_foreign else ()
    return OpenedModel(source, model, device_mesh, tokenizer, tuple(start_ids), weights, adapted)
