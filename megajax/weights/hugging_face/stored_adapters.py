"""The adapters of a step of a run, and its matrices with the adapters merged into them."""

import functools
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.piecewise import PiecewiseArray, StoredParams
from megajax.config import Config
from megajax.weights.tensor_map import Part, WeightMap


class StoredAdapters:
    def __init__(self, run_dir: str | Path, step: int, config: Config, weights: WeightMap):
        """Raises ValueError if the run has none."""
        if config.lora.rank is None:
            raise ValueError(f"run={run_dir} has no adapters (lora.rank=None) to merge; leave out --merge")
        self.factors = functools.lru_cache(maxsize=4)(self._factors)
        """a and b of a matrix, of all layers as they are stored."""
        self.rank = config.lora.rank
        self.scale = config.lora.scale
        self.stored = StoredParams(run_dir, step, weights.layer_rows)

    def __contains__(self, name: str) -> bool:
        """Whether one of our matrices has an adapter."""
        return f"{name}_lora_a" in self.stored.dtypes

    def _factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        arrays = [self.stored.open(f"{name}_{factor}") for factor in ("lora_a", "lora_b")]
        a, b = (array.read(tuple(map(slice, array.shape))) for array in arrays)
        return a, b

    def of_part(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """a [in, r], b [r, out]."""
        at = (*self.stored.row_of(part.name, part.at[0]), *part.at[1:])
        a, b = (factor[at] for factor in self.factors(part.name))
        return a.reshape(-1, self.rank), b.reshape(self.rank, -1)


class MergedParams:
    """StoredParams of a run whose adapters are merged into its matrices, in float32."""

    def __init__(self, adapters: StoredAdapters, weights: WeightMap, compute: jnp.dtype):
        """compute: in which matrices are written that the run has in 8 bits."""
        self._adapters = adapters
        self._records = weights.records
        self._squares = np.zeros(2)
        """Of changes, and of their errors."""
        self.row_of = adapters.stored.row_of
        floats = {name: dtype for name, dtype in adapters.stored.dtypes.items() if dtype.itemsize > 1}
        self.dtypes = dict.fromkeys(adapters.stored.dtypes, np.dtype(compute)) | floats

    @property
    def error(self) -> float:
        """Of what has been read and then rounded: the error of the changes, relative to these."""
        changes, errors = self._squares
        return math.sqrt(errors / changes) if changes else 0.0

    def open(self, name: str, rounded_to: np.dtype) -> PiecewiseArray:
        base = self._base(name)
        if name not in self._adapters:
            return base
        a, b = self._adapters.factors(name)
        record = self._records[name]
        first = len(base.shape) - len(record.axes) + record.num_stacked  # a pipeline stores one dim more
        end = first + record.num_inputs

        def read(index) -> np.ndarray:
            of_a = a[index[:end]]
            of_b = b[(*index[:first], slice(None), *index[end:])]
            change = np.float32(self._adapters.scale) * np.tensordot(of_a, of_b, 1)
            merged = base.read(index).astype(np.float32) + change
            errors = merged.astype(rounded_to).astype(np.float32) - merged
            self._squares += [np.sum(np.square(values, dtype=np.float64)) for values in (change, errors)]
            return merged

        return PiecewiseArray(base.shape, np.dtype(np.float32), read)

    def _base(self, name: str) -> PiecewiseArray:
        """A matrix in 8 bits (lora.base) as the numbers that it stands for."""
        stored = self._adapters.stored
        levels = stored.open(name)
        if f"{name}_scale" not in stored.dtypes:
            return levels
        record = self._records[name]
        scale = stored.open(f"{name}_scale")
        first = len(levels.shape) - len(record.axes) + record.num_stacked
        inputs = tuple(range(first, first + record.num_inputs))
        return levels.times(np.expand_dims(scale.read(tuple(map(slice, scale.shape))), inputs))
