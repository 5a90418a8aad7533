"""Adapters of several runs and folders of PEFT, side by side beside the base that they have in common."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megajax import hub
from megajax.checkpoint.layout import Rows, stack_of
from megajax.checkpoint.piecewise import PiecewiseArray, StoredParameter
from megajax.checkpoint.verify import digest_of_pieces
from megajax.config import Config
from megajax.layers.lora import AdapterChoice, NamedAdapter
from megajax.models.model import Model
from megajax.parameters import Parameter, named
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from megajax.weights.hugging_face.adapter import AdapterFolder, is_adapter
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.sources import Source, open_source

COMPARED = 64  # numbers at the beginning of each axis of an array by which two bases are compared
FACTORS = ("_lora_a", "_lora_b")


class _Adapter(NamedTuple):
    description: str
    """NAME=DIR."""
    source: Source
    model: Model
    """With this adapter alone."""

    @property
    def records(self) -> dict[str, Parameter]:
        return named(self.model.records)

    @property
    def matrices(self) -> list[str]:
        """Those that it changes."""
        return [name for name in self.records if f"{name}{FACTORS[0]}" in self.records]

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Of the parameters of its base."""
        shapes = {name: [*a.shape] for name, a in named(self.model.abstract_weights).items()}
        return {name: shape for name, shape in shapes.items() if not name.endswith((*FACTORS, "_scale"))}

    @property
    def rank(self) -> int:
        return self.source.config.lora.rank or 0


class AdaptedWeights:
    """The weights of a model with an AdapterChoice: those of the base, and the adapters, which are read and verified
    when a factor of them is opened."""

    def __init__(self, base: Source, adapters: Mapping[str, str | Path]):
        """adapters: {name: directory of a run with adapters, or folder of PEFT}. Raises ValueError for what is no
        adapter of the base, for a base that has one, and for what cannot have several."""
        if base.config.lora.rank is not None:
            raise ValueError(f"adapters: {base} has one itself (lora.rank); serve the base that it was trained on")
        if base.config.model.media:
            raise ValueError(f"adapters: {base} reads more than text; its adapters can only be served alone (--run)")
        self._base = base
        self._shapes = _Adapter(str(base), base, _model(base.config)).shapes
        self._adapters = [_opened(f"{name}={path}", path, base) for name, path in adapters.items()]
        found = [
            NamedAdapter(name, each.rank, each.source.config.lora.scale)
            for name, each in zip(adapters, self._adapters, strict=True)
        ]
        matrices = {_in_layer(name, each.model.layer_rows) for each in self._adapters for name in each.matrices}
        self.transform = AdapterChoice(tuple(sorted(matrices)), tuple(found))
        for each in self._adapters:
            self._check(each)

    def __str__(self) -> str:
        return f"{self._base} with the adapters {', '.join(each.description for each in self._adapters)}"

    @property
    def weight_format(self) -> WeightFormat | None:
        return self._base.weight_format

    def levels(self, name: str, layer: int | None) -> QuantizedWeight | None:
        return self._base.levels(name, layer)

    def open(self, name: str, layer_rows: Rows) -> StoredParameter:
        if not name.endswith(FACTORS):
            return self._base.open(name, layer_rows)
        stack = stack_of(name, layer_rows)
        assert stack is not None, name
        found = [_read(each, name) if name in each.records else None for each in self._adapters]
        axis = -1 if name.endswith(FACTORS[0]) else 0  # of the rank, in a layer
        example = next(iter(next(layers for layers in found if layers is not None).values()))
        parts = []
        for layer in layer_rows[stack].ravel().tolist():
            factors = [
                _zeros(example, axis, each.rank) if layers is None else layers[layer]
                for each, layers in zip(self._adapters, found, strict=True)
            ]
            padding = self.transform.num_columns - sum(each.rank for each in self._adapters)
            whole = np.concatenate([*factors, _zeros(example, axis, padding)], axis)
            parts.append((layer, PiecewiseArray(whole.shape, whole.dtype, whole.__getitem__)))
        return StoredParameter(parts, None)

    def _check(self, adapter: _Adapter) -> None:
        """Raises ValueError for an adapter of another base, or of matrices that cannot have several."""
        unfit = [name for name in adapter.matrices if not self.transform.fits(adapter.records[name])]
        if unfit:
            raise ValueError(
                f"adapters: {adapter.description} changes {unfit[0]}; adapters of experts and of latents can only be "
                "served alone (--run), or merged (python -m megajax.convert.hugging_face export --merge)"
            )
        trained = [name for name, record in named(adapter.model.trained).items() if record.role != "adapter"]
        if trained:
            raise ValueError(
                f"adapters: {adapter.description} has trained {trained[0]} as well, which is not part of an adapter; "
                "serve it alone (--run)"
            )
        for name, shape in adapter.shapes.items():
            if name not in self._shapes or (name in adapter.matrices and shape != self._shapes[name]):
                found = self._shapes.get(name, "missing")
                raise ValueError(
                    f"adapters: {adapter.description} belongs to another model than {self._base}: {name} is {shape} "
                    f"there, and {found} here; serve the model that it was trained on"
                )
            if adapter.records[name].role != "matrix":
                mine, theirs = (_beginning(source, name, adapter.model) for source in (adapter.source, self._base))
                if not all(np.array_equal(mine[layer], theirs[layer]) for layer in mine.keys() - {-1}):  # padding
                    raise ValueError(
                        f"adapters: {adapter.description} belongs to another base than {self._base}: {name} differs; "
                        "serve the base that it was trained on"
                    )


def _opened(description: str, path: str | Path, base: Source) -> _Adapter:
    """Raises ValueError."""
    path = hub.local(path)
    if is_adapter(path):
        source = AdapterFolder(path, base.path if isinstance(base, Folder) else None)
    else:
        source = open_source(path)
    config = source.config
    if config.lora.rank is None:
        raise ValueError(
            f"adapters: {description} has none (lora.rank=None); give a run that trained adapters or a folder of PEFT"
        )
    return _Adapter(description, source, _model(config))


def _model(config: Config) -> Model:
    parts = (config.model, config.precision.for_inference, config.execution)
    trained = dict(trained=config.training.trained, frozen=config.training.frozen)
    return Model(*parts, adapters=config.lora.transforms, **trained)


def _in_layer(name: str, layer_rows: Rows) -> str:
    return name.removeprefix(f"{stack_of(name, layer_rows)}.")


def _read(adapter: _Adapter, name: str) -> dict[int, np.ndarray]:
    """A factor of each layer. Raises ValueError if it is not what was saved."""
    stored = adapter.source.open(name, adapter.model.layer_rows)
    found = [(layer, part.read(tuple(map(slice, part.shape)))) for layer, part in stored.parts]
    if stored.digest is not None and digest_of_pieces(array for _, array in found) != stored.digest:
        raise ValueError(f"adapters: {adapter.description} is damaged: {name} is not what was saved")
    return {layer: array for layer, array in found if layer is not None}


def _beginning(source: Source, name: str, model: Model) -> dict[int | None, np.ndarray]:
    """Of a parameter in each layer, in the compute dtype, in which a run with adapters stores it."""
    parts = source.open(name, model.layer_rows).parts
    read = {layer: part.read(tuple(slice(min(size, COMPARED)) for size in part.shape)) for layer, part in parts}
    return {layer: array.astype(model.precision.compute_dtype) for layer, array in read.items()}


def _zeros(example: np.ndarray, axis: int, rank: int) -> np.ndarray:
    shape = list(example.shape)
    shape[axis] = rank
    return np.zeros(shape, example.dtype)
