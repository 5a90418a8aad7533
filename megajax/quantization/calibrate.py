"""Ranges of the inputs of matrices, and what rounding does to their products.

Dimensions: R rows (tokens), K inputs, N outputs, L layers.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax.models.model import Model
from megajax.ops.matmul import matmul
from megajax.quantization.formats import largest
from megajax.quantization.observe import observe
from megajax.quantization.weights import DTYPES, QuantizedWeight, WeightFormat

RangeRule = Literal["max", "percentile"]

BINS = 2048
BINS_PER_OCTAVE = 32  # steps of 2 % of a value
LOWEST_OCTAVE = -40


class Error(NamedTuple):
    """Of the products of one matrix; arrays float64 [L]."""

    range: np.ndarray
    """Largest absolute input."""
    signal_to_noise: np.ndarray
    """In decibels: 10 log10 of the mean square of the products over that of their errors."""


def channel_ranges(x_RK: jax.Array, w_KN: jax.Array, given: Any) -> dict[str, jax.Array]:
    """largest: of |x| per input [K]."""
    return {"largest": jnp.max(jnp.abs(x_RK.astype(jnp.float32)), 0)}


def channel_ranges_and_counts(x_RK: jax.Array, w_KN: jax.Array, given: Any) -> dict[str, jax.Array]:
    """And counts: how many |x| are in each of BINS geometric bins."""
    octave_RK = jnp.log2(jnp.abs(x_RK.astype(jnp.float32))) - LOWEST_OCTAVE
    bins_RK = jnp.clip(jnp.ceil(octave_RK * BINS_PER_OCTAVE), 0, BINS - 1).astype(jnp.int32)
    counts = jnp.bincount(bins_RK.ravel(), length=BINS).astype(jnp.float32)
    return channel_ranges(x_RK, w_KN, given) | {"counts": counts}


def input_ranges(
    model: Model, weights: dict, mesh: Mesh, batches: Sequence[dict], rule: RangeRule, percentile: float
) -> dict[str, np.ndarray]:
    """{name of a matrix: float32 [L]}: the largest |x| that a static scale covers; larger inputs saturate."""
    statistics = channel_ranges if rule == "max" else channel_ranges_and_counts
    found = observe(model, weights, mesh, batches, statistics)
    if rule == "max":
        return {name: seen["largest"].max(1).astype(np.float32) for name, seen in found.items()}
    return {name: percentile_of(seen, percentile) for name, seen in found.items()}


def percentile_of(seen: Mapping[str, np.ndarray], percentile: float) -> np.ndarray:
    """float32 [L]: the upper end of the bin that this percentage of all |x| reaches."""
    cumulative_LB = np.cumsum(seen["counts"], 1)
    bins_L = (cumulative_LB < percentile / 100 * cumulative_LB[:, -1:]).sum(1)
    upper_L = 2.0 ** (bins_L / BINS_PER_OCTAVE + LOWEST_OCTAVE)
    return np.minimum(upper_L, seen["largest"].max(1)).astype(np.float32)


def errors(
    model: Model,
    weights: dict,
    mesh: Mesh,
    batches: Sequence[dict],
    format: WeightFormat,
    ranges: Mapping[str, np.ndarray],
) -> dict[str, Error]:
    """What the format does to the products of each matrix, with exact inputs. ranges: of input_ranges, for static
    inputs."""
    given = {name: jnp.asarray(range_) for name, range_ in ranges.items()}
    found = observe(model, weights, mesh, batches, _squares(format), given)
    return {
        name: Error(seen["largest"], 10 * np.log10(seen["signal"] / np.maximum(seen["noise"], 1e-300)))
        for name, seen in found.items()
    }


@functools.cache
def _squares(format: WeightFormat) -> Callable[[jax.Array, jax.Array, Any], dict[str, jax.Array]]:
    limit = largest(DTYPES[format.dtype])

    def squares(x_RK: jax.Array, w_KN: jax.Array, range_: jax.Array) -> dict[str, jax.Array]:
        scale = range_ / limit if format.inputs == "static" else None
        rounded_RN = QuantizedWeight.of(w_KN.astype(x_RK.dtype), 1, format, scale).multiply(x_RK)
        exact_RN = matmul(x_RK, w_KN).astype(jnp.float32)
        noise_RN = rounded_RN.astype(jnp.float32) - exact_RN
        range_x = jnp.max(jnp.abs(x_RK.astype(jnp.float32)))
        return {"largest": range_x, "signal": jnp.sum(exact_RN**2), "noise": jnp.sum(noise_RN**2)}

    return squares
