"""SmoothQuant (Xiao et al. 2023, https://arxiv.org/abs/2211.10438): moves outliers of inputs into the weights.

x w = (x / s) (s w), with a factor s per input. 1 / s is folded into the norm that computes x, s into all matrices that
read it, so that the model computes the same and has no new parameters.
Dimensions: L layers, D inputs.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax.models.model import Model
from megajax.parameters import Parameter, name_of, named
from megajax.quantization.calibrate import channel_ranges
from megajax.quantization.observe import matrices, observe


def smoothing(
    model: Model, weights: dict, mesh: Mesh, batches: Sequence[dict], strength: float
) -> dict[str, np.ndarray]:
    """{name of a parameter: float32 [L, ...] that it is multiplied by}.

    strength: alpha in s = max |x|^alpha / max |w|^(1 - alpha), per input; 0.5 gives both the same range. weights:
    stacked. Raises ValueError for a model without norms before its matrices, or with zero-centred ones.
    """
    seen = observe(model, weights, mesh, batches, channel_ranges)
    names = named(weights)
    records = named(model.records)
    quantized = matrices(model)
    factors: dict[str, np.ndarray] = {}
    for norm, readers in _norms(model, records):
        observed = [name for name in readers if name in quantized]
        if not observed:
            continue
        of_inputs_LD = seen[observed[0]]["largest"]
        of_weights_LD = np.max([_largest_weights(names[name], records[name]) for name in observed], 0)
        is_used_LD = (of_inputs_LD > 0) & (of_weights_LD > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found_LD = of_inputs_LD**strength / of_weights_LD ** (1 - strength)
        factor_LD = np.where(is_used_LD, found_LD, 1).astype(np.float32)
        for part in ("scale", "bias"):
            if f"{norm}.{part}" in records:
                factors[f"{norm}.{part}"] = 1 / factor_LD
        for name in readers:
            record = records[name]
            shape = [1] * len(record.axes)
            shape[0], shape[record.num_stacked] = factor_LD.shape
            factors[name] = factor_LD.reshape(shape)
    if not factors:
        raise ValueError("smooth: no matrix of this model reads a norm; leave --smooth out")
    return factors


def smoothed(weights: dict, factors: Mapping[str, np.ndarray]) -> dict:
    """The weights times the factors."""

    def multiply(path, array: jax.Array) -> jax.Array:
        factor = factors.get(name_of(path))
        if factor is None:
            return array
        return jax.jit(lambda a, f: (a * f).astype(a.dtype), out_shardings=array.sharding)(array, jnp.asarray(factor))

    return jax.tree_util.tree_map_with_path(multiply, weights)


def _norms(model: Model, records: Mapping[str, Parameter]) -> Iterator[tuple[str, list[str]]]:
    """(name of a norm, names of the matrices that read what it returns), of each kind of layer."""
    for stack, layers in model.config.stacks(model.execution).items():
        for kind in dict.fromkeys(layer.kind for layer in layers):
            layer = next(layer for layer in layers if layer.kind == kind)
            for norm, modules in getattr(layer, "norm_readers", {}).items():
                if getattr(getattr(layer, "norm", None), "zero_centered", False):
                    raise ValueError("smooth: zero-centred norms cannot take a factor; leave --smooth out")
                prefixes = tuple(f"{stack}.{kind}.{module}." for module in modules)
                yield f"{stack}.{kind}.{norm}", [name for name in records if _reads(name, records[name], prefixes)]


def _reads(name: str, record: Parameter, prefixes: tuple[str, ...]) -> bool:
    """Whether this is a matrix in one of these modules whose inputs are the residual stream."""
    has_inputs = record.role in ("matrix", "router") and len(record.axes) > record.num_stacked + 1
    return name.startswith(prefixes) and has_inputs and record.axes[record.num_stacked] == "embed"


def _largest_weights(matrix: jax.Array, record: Parameter) -> np.ndarray:
    """[L, D]."""
    return np.asarray(jnp.max(jnp.abs(matrix.astype(jnp.float32)), tuple(range(2, len(record.axes)))))
