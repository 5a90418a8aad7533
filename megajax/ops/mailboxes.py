"""Sums and gathers over the `tensor` axis by kernels of ours, which are part of a CUDA graph
(pallas_kernels/mailboxes.py).

XLA does them by itself wherever this file is not asked. But what XLA takes for them is launched by the host, one by one
(jaxlib 0.11.2), so that a decoding step is not one CUDA graph, and the host waits until it is done.
"""

import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import axis_size, free_axes, mailbox_addresses, manual
from megajax.mesh.sharding import WEIGHT_AXES, weight_spec
from megajax.ops import four_bits
from megajax.ops.matmul import Weight, matmul
from megajax.quantization.weights import QuantizedWeight

AXIS = "tensor"


class Mailboxes:
    """Memory on each GPU of a mesh, into which the others write."""

    def __init__(self, mesh: Mesh):
        from pallas_kernels import mailboxes as kernel  # not at the top: only Hopper needs it, and it takes time

        num_gpus = mesh.shape[AXIS]
        zeros = np.zeros((num_gpus, kernel.mailbox_bytes(num_gpus) // 4), np.uint32)
        self._memory = jax.block_until_ready(jax.device_put(zeros, NamedSharding(mesh, P(AXIS))))
        shards = sorted(self._memory.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        self.addresses = kernel.in_words([shard.data.unsafe_buffer_pointer() for shard in shards])
        """uint32 [N, 2]."""


def problem(mesh: Mesh, dtype: jnp.dtype) -> str:
    """Why the GPUs of this mesh have no mailboxes for a model that computes in this dtype, or ""."""
    devices = list(mesh.devices.flat)
    others = sorted({device.device_kind for device in devices if not compat.is_hopper(device.device_kind)})
    if others:
        return f"{', '.join(others)} is not Hopper"
    if mesh.size != mesh.shape[AXIS]:
        return f"the mesh has other axes than {AXIS}"
    if dtype != jnp.bfloat16:
        return f"the model computes in {dtype}"
    if len({device.process_index for device in devices}) > 1:
        return "the GPUs belong to several processes"
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return "NCCL_P2P_DISABLE is set"
    pairs = itertools.permutations(devices, 2)
    unreached = next((pair for pair in pairs if not compat.reaches_memory(*pair)), None)
    return "" if unreached is None else "{} cannot access the memory of {}".format(*unreached)


def once_all_are_ready(x: jax.Array, addresses: jax.Array) -> jax.Array:
    """x, after a sum by XLA over the GPUs. In a program with one, XLA makes all of its CUDA graphs on all GPUs before
    any of them runs: a GPU that waited for another one, whose graph is still made, could wait for ever."""
    num_gpus = len(addresses)
    total = manual(lambda: lax.psum(lax.axis_index(AXIS), AXIS), (), P())()
    return jnp.where(total == num_gpus * (num_gpus - 1) // 2, x, 0)


def is_summed(shape: Sequence[int], dtype: jnp.dtype) -> bool:
    """Whether mailboxes sum an array here."""
    return mailbox_addresses() is not None and dtype == jnp.bfloat16 and _is_exchanged(shape, dtype)


def summed(x: jax.Array) -> jax.Array:
    """The sum over AXIS, in a region that is manual over it, of an array that `is_summed`."""
    from pallas_kernels import mailboxes as kernel

    return kernel.all_reduce(x, _rank(), _given_addresses())


def summed_over_parts(
    body: Callable[[Any, list], jax.Array], whole: Any, weights: Sequence[Any], axes: Sequence[Sequence[str]]
) -> jax.Array:  # fmt: skip
    """body(whole, weights), which is a sum over the dims of the weights that AXIS splits.

    If that is the only axis, each GPU computes it from its part of the weights, and the results are summed, by XLA
    where there are no mailboxes. whole: arrays that all GPUs have. axes: the logical axes of each weight.
    """
    of_others = math.prod(size for axis, size in free_axes().items() if axis != AXIS)
    if axis_size(AXIS) == 1 or of_others > 1 or not all(isinstance(w, jax.Array) for w in weights):
        return body(whole, list(weights))
    specs = [weight_spec(each) for each in axes]
    # check_vma: it does not know that the result is the same on all GPUs.
    run = manual(lambda whole, weights: _sum(body(whole, weights)), (P(), specs), P(), check_vma=False)
    return run(whole, list(weights))


def summed_matmul(x: jax.Array, w: Weight, num_contracted: int, axes: Sequence[str]) -> jax.Array:
    """matmul (ops/matmul.py) by a weight with these logical axes."""
    is_split = any(AXIS in WEIGHT_AXES[axis] for axis in axes[:num_contracted])
    is_in_4_bits = isinstance(w, QuantizedWeight) and w.is_in_4_bits
    has_parts = mailbox_addresses() is not None or is_in_4_bits and four_bits.splits_alone()
    spec = _spec(w, num_contracted, axes) if is_split and has_parts else None
    if spec is None:
        return matmul(x, w, num_contracted, weight_spec(axes[num_contracted:]))

    x_spec = P(*(None,) * (x.ndim - num_contracted), *weight_spec(axes)[:num_contracted])
    return manual(lambda x, w: _sum(matmul(x, w, num_contracted)), (x_spec, spec), P(), check_vma=False)(x, w)


def _sum(y: jax.Array) -> jax.Array:
    return summed(y) if is_summed(y.shape, y.dtype) else lax.psum(y, AXIS)


def _spec(w: Weight, num_contracted: int, axes: Sequence[str]) -> Any:
    """Of the arrays of a weight whose product is the sum of the products with its parts; None of another one."""
    inputs, outputs = (tuple(weight_spec(part)) for part in (axes[:num_contracted], axes[num_contracted:]))
    if isinstance(w, jax.Array):
        return P(*inputs, *outputs)
    if not isinstance(w, QuantizedWeight):
        return None
    if w.is_in_4_bits and w.scale.shape[0] == 1:  # each byte has an input of the first and one of the second half
        return None
    # Where inputs are rounded by row, a part of a row has a scale of its own, which is finer than one of the whole row.
    groups = AXIS if w.is_in_4_bits else None  # of inputs that AXIS splits
    return w.specs(P(*outputs, *inputs), P(groups, *outputs))


def gathered(x: jax.Array) -> jax.Array:
    """An array whose last dim AXIS splits, whole on all GPUs if they have mailboxes; unchanged if not."""
    addresses = mailbox_addresses()
    if addresses is None or x.shape[-1] % len(addresses):
        return x
    if not _is_exchanged((x.shape[-1] // len(addresses),), x.dtype):
        return x

    def body(x):
        from pallas_kernels import mailboxes as kernel

        return kernel.all_gather(x, _rank(), _given_addresses())

    return manual(body, P(*(None,) * (x.ndim - 1), AXIS), P(), check_vma=False)(x)


def _is_exchanged(shape: Sequence[int], dtype: jnp.dtype) -> bool:
    from pallas_kernels import mailboxes as kernel

    return kernel.is_exchanged(shape, dtype)


def _rank() -> jax.Array:
    return lax.axis_index(AXIS).astype(jnp.uint32)


def _given_addresses() -> jax.Array:
    addresses = mailbox_addresses()
    assert addresses is not None
    return addresses
