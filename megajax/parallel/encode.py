"""Encoders of inputs other than text, on all devices of the mesh, whatever splits the text's layers.

Dimensions: B rows of a batch, T tokens of a row, K blocks of a row, each with P patches (of images, or pieces of other
inputs), F what the encoder makes of them (a few patches become one), D model width.
The blocks of a row are split over all devices that share the row: those of `context`, `tensor` and `pipeline`. Each
runs the whole encoder on its blocks, in which every image is whole. Then each device takes what its tokens need: the
results are gathered over the axes that split the tokens, and summed over the others.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import axis_size, is_inside_pipeline, manual
from megajax.mesh.sharding import activation_spec, axes_of, constrain

Encode = Callable[[Any, dict], tuple[jax.Array, ...]]
PIPELINE = "pipeline"


def encode(run: Encode, weights: Any, arrays: dict[str, jax.Array], index_BT: jax.Array) -> tuple[jax.Array, ...]:
    """For each result of `run` what its tokens read, zeros where the index is negative -> [B, T, D] each, sharded
    like the residual stream.

    run: (weights, arrays [blocks, P, ...]) -> results [blocks, F, D]. arrays: [B, K, P, ...] each. index: int32 [B, T],
    from 0 to K F - 1, over the blocks of the row. In a pipeline the backward pass runs the encoder again.
    """
    if is_inside_pipeline():
        results = _encode_again(weights, arrays, index_BT, run)
    else:
        results = _region(run, arrays, index_BT)(weights, arrays, index_BT)
    return tuple(constrain(result, "batch", "sequence", None) for result in results)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _encode_again(weights, arrays, index_BT, run: Encode):
    return _region(run, arrays, index_BT)(weights, arrays, index_BT)


def _forward(weights, arrays, index_BT, run):
    return _encode_again(weights, arrays, index_BT, run), (weights, arrays, index_BT)


def _backward(run, residuals, d_out):
    weights, arrays, index_BT = residuals
    parts = _Parts(arrays, index_BT)

    def body(weights, arrays, index_BT, d_out):
        return jax.vjp(lambda weights: parts.body(run, weights, arrays, index_BT), weights)[1](d_out)[0]

    in_specs = (P(), parts.specs(arrays), parts.index_spec, parts.out_spec)
    return manual(body, in_specs, P())(weights, arrays, index_BT, d_out), None, None


_encode_again.defvjp(_forward, _backward)


def _region(run: Encode, arrays: dict, index_BT: jax.Array) -> Callable:
    parts = _Parts(arrays, index_BT)
    body = functools.partial(parts.body, run)
    return manual(body, (P(), parts.specs(arrays), parts.index_spec), parts.out_spec)


class _Parts:
    """How blocks and tokens are split over the devices."""

    def __init__(self, arrays: dict[str, jax.Array], index_BT: jax.Array):
        shape = next(iter(arrays.values())).shape[:2]
        self.blocks_spec = activation_spec(shape, ("batch", "blocks"))
        self.index_spec = activation_spec(index_BT.shape, ("batch", "blocks"))
        self.out_spec = P(*self.index_spec, None)
        self.split = axes_of(self.blocks_spec[1])
        self.gathered = tuple(axis for axis in self.split if axis in axes_of(self.index_spec[1]))
        self.summed = (*(axis for axis in self.split if axis not in self.gathered), *self._pipeline())
        self.varying = (*axes_of(self.blocks_spec[0]), *self.split, *self._pipeline())

    @staticmethod
    def _pipeline() -> tuple[str, ...]:
        return (PIPELINE,) if axis_size(PIPELINE) > 1 else ()

    def specs(self, arrays: dict[str, jax.Array]) -> dict[str, P]:
        return {name: P(*self.blocks_spec, *[None] * (array.ndim - 2)) for name, array in arrays.items()}

    def body(self, run: Encode, weights, arrays, index_BT) -> tuple[jax.Array, ...]:
        # Here, so that their gradients are summed over the devices once, not in every layer.
        weights = compat.vary(weights, self.varying)
        if self._pipeline():  # every rank holds the blocks of all ranks
            arrays = jax.tree.map(lambda a: _own(a, PIPELINE), arrays)
        rows = index_BT.shape[0]
        results = run(weights, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays))
        return tuple(self._taken(result.reshape(rows, -1, result.shape[-1]), index_BT) for result in results)

    def _taken(self, result_BFD: jax.Array, index_BT: jax.Array) -> jax.Array:
        """An index counts the results of all devices, those of the axes in `split` and then of `pipeline` in order."""
        if self.gathered:
            result_BFD = lax.all_gather(result_BFD, self.gathered, axis=1, tiled=True)
        count = result_BFD.shape[1] // math.prod(lax.axis_size(axis) for axis in self.gathered)
        rest_BT, place_BT = jnp.divmod(index_BT, count)
        is_here_BT = index_BT >= 0
        stride = count
        for axis in reversed((*self.split, *self._pipeline())):
            rest_BT, number_BT = jnp.divmod(rest_BT, lax.axis_size(axis))
            if axis in self.gathered:
                place_BT += stride * number_BT
                stride *= lax.axis_size(axis)
            else:
                is_here_BT &= number_BT == lax.axis_index(axis)
        taken_BTD = jax.vmap(lambda results, places: results[places])(result_BFD, jnp.where(is_here_BT, place_BT, 0))
        taken_BTD = jnp.where(is_here_BT[..., None], taken_BTD, 0)
        return lax.psum(taken_BTD, self.summed) if self.summed else taken_BTD


def _own(array: jax.Array, axis: str) -> jax.Array:
    """This device's part of the blocks [B, K, ...] that every device along the axis holds."""
    size = array.shape[1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(array, lax.axis_index(axis) * size, size, axis=1)


def num_parts(sizes: dict[str, int]) -> int:
    """Devices that share the blocks of a row, on a mesh with axes of these sizes."""
    return math.prod(sizes[axis] for axis in ("context", "tensor", PIPELINE))
