"""A folder of PEFT with a LoRA adapter as the source of a run: adapter_config.json and adapter_model.safetensors.

For a matrix NAME.weight [out, in] of the base the file has base_model.model.NAME.lora_A.weight [r, in] and
lora_B.weight [out, r]. A matrix of theirs that holds several of ours (fused queries, keys and values) has one adapter:
each of ours gets the columns of B that change it, with their rows of A.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from megajax import hub
from megajax.checkpoint.layout import Rows, stack_of
from megajax.checkpoint.piecewise import PiecewiseArray, StoredParameter
from megajax.config import Config
from megajax.data.tokenizers.tokenizer import read_json
from megajax.layers.lora import LoraConfig
from megajax.models.model import Model
from megajax.parameters import merge, name_of, select
from megajax.weights.hugging_face.folder import Folder, is_folder, problems_in
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.tensor_map import Part, Tensor, WeightMap

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FACTORS = {"A": "lora_a", "B": "lora_b"}
"""Theirs and ours."""


def is_adapter(path: str | Path) -> bool:
    """Whether `path` is a folder of PEFT."""
    return (Path(path) / CONFIG).is_file()


def open_folder(path: str | Path) -> Folder:
    """A folder of transformers, or one of PEFT with its base. Raises ValueError if it is not fully supported."""
    return AdapterFolder(path) if is_adapter(path) else Folder(path)


def module_of(tensor: Tensor) -> str:
    return tensor.name.removesuffix(".weight")


def factor_name(module: str, letter: str) -> str:
    return f"base_model.model.{module}.lora_{letter}.weight"


def matrix_b(tensor: Tensor, rank: int) -> Tensor:
    """B beside a matrix: it has the rank as inputs, and is [out, r] also where the matrix is [in, out]."""
    parts = [dataclasses.replace(p, shape=(rank, *p.shape[p.num_inputs :]), num_inputs=1) for p in tensor.parts]
    layout = "linear" if tensor.layout == "conv1d" else tensor.layout
    return dataclasses.replace(tensor, parts=tuple(parts), layout=layout)


def base_of(adapter: str | Path, otherwise: Path | None = None) -> Path:
    """The folder of the base. If the adapter names none on this machine, it is `otherwise`, or downloaded if that is
    None and the name is one of the hub. Raises ValueError if there is none."""
    path = Path(adapter)
    options = read_json(str(path / CONFIG))
    named = options.get("base_model_name_or_path")
    for place in (Path(named), path / named) if named else ():
        if is_folder(place):
            return place
    if otherwise is not None:
        return otherwise
    problem = "its name is missing"
    try:
        if named:
            return Path(hub.local(f"{hub.PREFIX}{hub.Name(named, options.get('revision'))}"))
    except ValueError as error:
        problem = str(error)
    raise ValueError(
        f"{path / CONFIG}: base_model_name_or_path={named!r} is no folder on this machine; write there the path of the "
        f"folder with the weights that the adapter belongs to, or its name on the hub ({problem})"
    )


class AdapterFolder(Folder):
    """Raises ValueError, naming an option or a tensor, if the folder or its base is not fully supported."""

    def __init__(self, path: str | Path, base: Path | None = None):
        """base: see `base_of`."""
        self.adapter = Path(path)
        super().__init__(base_of(path, base))
        file = self.adapter / CONFIG
        options = read_json(str(file))
        with problems_in(file):
            for name, wanted in {"peft_type": "LORA", "use_dora": False}.items():
                if options.get(name, wanted) != wanted:
                    raise ValueError(f"{name}={options[name]} is not supported; only LoRA is, {name}={wanted}")
            self._lora, self._adapters = _read(self.adapter, options, self.family.map_of(self.model))

    def __reduce__(self) -> tuple:
        return type(self), (self.adapter, self.path)

    def __str__(self) -> str:
        return f"{self.adapter} on {self.path}"

    @property
    def config(self) -> Config:
        return dataclasses.replace(super().config, lora=self._lora)

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        base = super().restore_params(select(abstract, lambda name: name not in self._adapters), layer_rows)

        def load(path, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            layers = [layer for _, layer in self.open(name_of(path), layer_rows).parts]
            whole = np.stack([layer.read(()) for layer in layers]).reshape(leaf.shape).astype(leaf.dtype)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, whole.__getitem__)

        adapters = select(abstract, lambda name: name in self._adapters)
        return merge(base, jax.tree_util.tree_map_with_path(load, adapters))

    def open(self, name: str, layer_rows: Rows) -> StoredParameter:
        if name not in self._adapters:
            return super().open(name, layer_rows)
        array = self._adapters[name]
        stack = stack_of(name, layer_rows)
        assert stack is not None, name
        layers = self.map.layer_rows[stack].tolist()
        rows = layer_rows[stack].ravel().tolist()
        of_layer = {layer: _piecewise(array[number]) for number, layer in enumerate(layers)}
        padding = _piecewise(np.zeros_like(array[0]))
        return StoredParameter([(layer, of_layer.get(layer, padding)) for layer in rows], None)

    def piecewise(self, model: Model) -> dict:
        adapters = select(model.abstract_weights, lambda name: name in self._adapters)
        arrays = jax.tree_util.tree_map_with_path(lambda path, _: _piecewise(self._adapters[name_of(path)]), adapters)
        return merge(super().piecewise(model.without_transforms), arrays)


def _piecewise(array: np.ndarray) -> PiecewiseArray:
    return PiecewiseArray(array.shape, array.dtype, array.__getitem__)


class _Adapter(NamedTuple):
    """Of one of our matrices, of one layer and expert."""

    part: Part
    a: np.ndarray
    """[in, r]."""
    b: np.ndarray
    """[r, *outputs]."""
    scale: float


def _read(folder: Path, options: Mapping[str, Any], weights: WeightMap) -> tuple[LoraConfig, dict[str, np.ndarray]]:
    """-> (the section lora, float32 arrays by the names of our adapters, with the layers in order). One of a smaller
    rank than others ends with zeros."""
    found = list(_adapters(folder, options, weights))
    rank = max(len(adapter.b) for adapter in found)
    scales = {adapter.scale for adapter in found}
    lora = LoraConfig(rank, float(options.get("lora_alpha", 8)), bool(options.get("use_rslora")))
    if rank != options.get("r") or len(scales) > 1:
        lora = LoraConfig(rank, max(scales) * rank)
    matrices = {name: _in_layer(name, weights) for name, record in weights.records.items() if record.role == "matrix"}
    targets = {matrices[adapter.part.name] for adapter in found}
    arrays: dict[str, np.ndarray] = {}
    for name in (name for name, in_layer in matrices.items() if in_layer in targets):
        record, shape = weights.records[name], weights.shapes[name]
        first, end = record.num_stacked, record.num_stacked + record.num_inputs
        arrays[f"{name}_lora_a"] = np.zeros((*shape[:end], rank), np.float32)
        arrays[f"{name}_lora_b"] = np.zeros((*shape[:first], rank, *shape[end:]), np.float32)
    for part, a, b, scale in found:
        row = weights.row_of(part)
        of_a, of_b = (arrays[f"{part.name}_{ours}"][row] for ours in FACTORS.values())
        of_a[..., : len(b)] = a.reshape(*of_a.shape[:-1], len(b))
        of_b[: len(b)] = b * np.float32(scale / lora.scale)
    is_everything = targets == set(matrices.values())
    return dataclasses.replace(lora, targets=("*",) if is_everything else tuple(sorted(targets))), arrays


def _in_layer(name: str, weights: WeightMap) -> str:
    """layers.dense.mlp.up -> mlp.up."""
    return name.removeprefix(f"{stack_of(name, weights.layer_rows)}.")


def _adapters(folder: Path, options: Mapping[str, Any], weights: WeightMap) -> Iterator[_Adapter]:
    files = TensorFiles(folder, [folder / WEIGHTS])
    left = set(files.forms)
    for tensor in weights.tensors:
        for module in (module_of(tensor), module_of(tensor).partition(".")[2]):  # which may lack that of the base model
            names = [factor_name(module, letter) for letter in FACTORS]
            if left.issuperset(names):
                left -= set(names)
                a, b = (files[name].astype(np.float32) for name in names)
                yield from _of_tensor(tensor, a, b, _scale(options, module, len(a)))
    if left or not files.forms:
        raise ValueError(f"{WEIGHTS} has tensors that are no adapter of the base: {', '.join(sorted(left)[:4])}")


def _of_tensor(tensor: Tensor, a: np.ndarray, b: np.ndarray, scale: float) -> Iterator[_Adapter]:
    of_b = matrix_b(tensor, len(a))
    if (a.shape[1:], b.shape) != (tensor.parts[0].inputs, of_b.shape):
        raise ValueError(f"{module_of(tensor)}: lora_A is {[*a.shape]} and lora_B {[*b.shape]}, which does not fit")
    for part, of_part in zip(tensor.parts, of_b.split(b), strict=True):
        used = np.flatnonzero(of_part.reshape(len(a), -1).any(1))
        if len(tensor.parts) == 1 or not used.size:
            used = np.arange(len(a))
        yield _Adapter(part, a[used].T, of_part[used], scale)


def _scale(options: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = options.get("alpha_pattern") or {}
    alpha = next((alpha for pattern, alpha in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module)), None)
    alpha = options.get("lora_alpha", 8) if alpha is None else alpha
    return alpha / (math.sqrt(rank) if options.get("use_rslora") else rank)
