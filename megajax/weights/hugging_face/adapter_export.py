"""Writes the adapters of a run as a folder of PEFT (adapter.py), without torch.

A matrix of theirs that holds several of ours has one adapter: their `a` side by side and their `b` on a diagonal of
blocks, so that its rank is the sum of theirs (rank_pattern), with the same scale (alpha_pattern).
"""

import dataclasses
import functools
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax import hub
from megajax.checkpoint.steps import find_step
from megajax.config import Config
from megajax.data.tokenizers.tokenizer import read_json
from megajax.weights.hugging_face.adapter import (
    CONFIG,
    FACTORS,
    WEIGHTS,
    base_of,
    factor_name,
    is_adapter,
    matrix_b,
    module_of,
)
from megajax.weights.hugging_face.export import family_of_run
from megajax.weights.hugging_face.folder import is_folder
from megajax.weights.hugging_face.import_folder import write_json
from megajax.weights.hugging_face.stored_adapters import StoredAdapters
from megajax.weights.hugging_face.tensor_files import ShardWriter, TensorForm
from megajax.weights.run_directory import new_directory
from megajax.weights.tensor_map import Tensor

logger = logging.getLogger("megajax")


class AdapterExport:
    """One step of a run as a folder, before anything is written."""

    def __init__(self, run_dir: str | Path, step: int | None, architecture: str | None):
        """Raises ValueError for a step that is not there, for a model that no family of theirs has, and for a run that
        changed more than adapters."""
        self.run_dir = Path(run_dir)
        self.step = find_step(run_dir, step)
        self._config = Config.load(run_dir, self.step)
        _check(self._config)
        self.family = family_of_run(self.run_dir, self._config, architecture)
        written = self.family.form.trained_for(self._config.model, self._config.training.sequence_length)
        weights = self.family.map_of(written)
        self._adapters = StoredAdapters(run_dir, self.step, self._config, weights)
        self._tensors = [tensor for tensor in weights.tensors if self._adapted(tensor)]
        self.forms: dict[str, TensorForm] = {}
        for tensor in self._tensors:
            rank = self._adapters.rank * len(self._adapted(tensor))
            shapes = ((rank, *tensor.parts[0].inputs), matrix_b(tensor, rank).shape)
            for letter, shape in zip(FACTORS, shapes, strict=True):
                self.forms[factor_name(module_of(tensor), letter)] = TensorForm(shape, np.dtype(np.float32))

    def write(self, to: str | Path) -> None:
        """Raises ValueError if the directory exists or the step is damaged; then nothing is left."""
        of_experts = set(map(_leaf, self._of_experts))
        others = [name for name in map(module_of, self._tensors) if name not in self._of_experts]
        if ignored := [name for name in others if _leaf(name) in of_experts]:
            logger.warning(
                "PEFT 0.21 with transformers 5 ignores the adapters of matrices that are called like those of experts "
                "(%s, ...), without a word; vLLM reads them, and --merge needs neither", ignored[0],
            )  # fmt: skip
        with new_directory(to, "to") as new:
            writer = ShardWriter(new, self.forms, sys.maxsize, WEIGHTS)
            for tensor in self._tensors:
                for letter, array in zip(FACTORS, self._factors(tensor), strict=True):
                    writer[factor_name(module_of(tensor), letter)][...] = array
            write_json(new / CONFIG, self._options())

    @functools.cached_property
    def _of_experts(self) -> set[str]:
        """Modules of single experts that have an adapter."""
        return {module_of(tensor) for tensor in self._tensors if len(tensor.parts[0].at) > 1}

    def _adapted(self, tensor: Tensor) -> list[int]:
        """Numbers of its parts that have an adapter."""
        return [number for number, part in enumerate(tensor.parts) if part.name in self._adapters]

    def _factors(self, tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """A [r, in] and B [out, r]."""
        rank = self._adapters.rank
        numbers = self._adapted(tensor)
        of_b = matrix_b(tensor, rank * len(numbers))
        whole_b = np.zeros(of_b.shape, np.float32)
        views = of_b.views(whole_b)
        rows = []
        for block, number in enumerate(numbers):
            a, b = self._adapters.of_part(tensor.parts[number])
            rows.append(a.T)
            view = views[number][block * rank : (block + 1) * rank]
            view[...] = b.reshape(view.shape)
        return np.concatenate(rows), whole_b

    def _options(self) -> dict[str, Any]:
        lora = self._config.lora
        if self._of_experts:
            # PEFT fuses the gate and the up projection of experts, with twice the rank and twice alpha, whatever
            # use_rslora says.
            lora = dataclasses.replace(lora, alpha=lora.scale * self._adapters.rank, rslora=False)
        counts = {module_of(tensor): len(self._adapted(tensor)) for tensor in self._tensors}
        fused = {_leaf(module): count for module, count in counts.items() if count > 1}
        rank = self._adapters.rank
        alphas = {name: lora.alpha * (math.sqrt(count) if lora.rslora else count) for name, count in fused.items()}
        base = base_folder(self.run_dir, self._config)
        name = hub.name_of(base) if base else None
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM" if "next_token" in self._config.model.heads else None,
            "base_model_name_or_path": name.repo if name else base and str(base),
            "revision": name and name.revision,
            "r": rank,
            "lora_alpha": _number(lora.alpha),
            "use_rslora": lora.rslora,
            "target_modules": sorted(set(map(_in_layer, counts))),
            "rank_pattern": {name: rank * count for name, count in fused.items()},
            "alpha_pattern": {name: _number(alpha) for name, alpha in alphas.items()},
            "fan_in_fan_out": any(tensor.layout == "conv1d" for tensor in self._tensors),
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }


def _check(config: Config) -> None:
    model = config.make_model()
    if any(record.role != "adapter" for record in jax.tree.leaves(model.trained)):
        raise ValueError(
            f"run={config.run_dir} has trained more than adapters (training.trained), which a folder of PEFT does not "
            "hold; use --merge"
        )
    if config.model.media:
        raise ValueError(f"run={config.run_dir}: adapters of models that read images or sound need --merge")


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _in_layer(module: str) -> str:
    """The end of a name that tells a matrix from the others of a layer: self_attn.q_proj; of an expert gate_proj."""
    return re.split(r"\.\d+\.", module)[-1]


def base_folder(run_dir: Path, config: Config, *, is_frozen: bool = True) -> Path | None:
    """The Hugging Face folder with the frozen weights of a run; None: they were trained in a run. is_frozen: otherwise
    the folder that they began with; None: they were random."""
    while not (imported := read_json(str(run_dir / "exported.json")).get("folder")):
        if (is_frozen and config.lora.rank is None) or not config.checkpoint.start_from:
            return None
        run_dir, step = config.checkpoint.source()
        if is_folder(run_dir):
            return run_dir
        if is_adapter(run_dir):
            return base_of(run_dir)
        config = Config.load(run_dir, step)
    return Path(imported)
