"""Sums and gathers over the `tensor` axis by kernels of ours, which are part of a CUDA graph
(pallas_kernels/mailboxes.py).

XLA does them by itself wherever this file is not asked. But what XLA takes for them is launched by the host, one by one
(jaxlib 0.11.2), so that a decoding step is not one CUDA graph, and the host waits until it is done.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.mesh.current import manual
from megajax.mesh.sharding import WEIGHT_AXES, weight_spec
from megajax.ops.matmul import Weight, matmul
from megajax.quantization.weights import QuantizedWeight
from pallas_kernels import mailboxes as kernel

AXIS = "tensor"
HOPPER = "H100", "H200", "GH200"


class Mailboxes:
    """Memory on each GPU of a mesh, into which the others write."""

    def __init__(self, mesh: Mesh):
        num_gpus = mesh.shape[AXIS]
        zeros = np.zeros((num_gpus, kernel.mailbox_bytes(num_gpus) // 4), np.uint32)
        self._memory = jax.block_until_ready(jax.device_put(zeros, NamedSharding(mesh, P(AXIS))))
        shards = sorted(self._memory.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        self.words = kernel.address_words([shard.data.unsafe_buffer_pointer() for shard in shards])
        """uint32 [N, 2]: where they are."""


def problem(mesh: Mesh, dtype: jnp.dtype) -> str:
    """Why the devices of this mesh have no mailboxes for a model that computes in this dtype, or ""."""
    kinds = {device.device_kind for device in mesh.devices.flat}
    if not all(any(name in kind for name in HOPPER) for kind in kinds):
        return f"{', '.join(sorted(kinds))} is not Hopper"
    if mesh.size != mesh.shape[AXIS]:
        return f"the mesh has other axes than {AXIS}"
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        return "the GPUs belong to several processes"
    return "" if dtype == jnp.bfloat16 else f"the model computes in {dtype}"


_words: ContextVar[jax.Array | None] = ContextVar("words of mailboxes", default=None)


@contextlib.contextmanager
def exchanging(words: jax.Array | None) -> Iterator[None]:
    """What is traced within uses mailboxes, unless words is None. words: those of the Mailboxes."""
    token = _words.set(words)
    try:
        yield
    finally:
        _words.reset(token)


def is_summed(shape: Sequence[int], dtype: jnp.dtype) -> bool:
    """Whether mailboxes sum an array here."""
    return _words.get() is not None and dtype == jnp.bfloat16 and kernel.is_exchanged(shape, dtype)


def summed(x: jax.Array) -> jax.Array:
    """The sum over AXIS, in a region that is manual over it, of an array that `is_summed`."""
    return kernel.all_reduce(x, _rank(), _given_words())


def summed_matmul(x: jax.Array, w: Weight, num_contracted: int, axes: Sequence[str]) -> jax.Array:
    """matmul (ops/matmul.py) by a weight with these logical axes."""
    is_split = any(AXIS in WEIGHT_AXES[axis] for axis in axes[:num_contracted])
    spec = _spec(w, num_contracted, axes) if is_split and _words.get() is not None else None
    if spec is None:
        return matmul(x, w, num_contracted)

    def body(x, w):
        y = matmul(x, w, num_contracted)
        return summed(y) if is_summed(y.shape, y.dtype) else lax.psum(y, AXIS)

    x_spec = P(*(None,) * (x.ndim - num_contracted), *weight_spec(axes)[:num_contracted])
    # check_vma: it does not know that the result is the same on all GPUs.
    return manual(body, (x_spec, spec), P(), check_vma=False)(x, w)


def _spec(w: Weight, num_contracted: int, axes: Sequence[str]) -> Any:
    """Of the arrays of a weight whose product is the sum of the products with its parts; None of another one."""
    inputs, outputs = (tuple(weight_spec(part)) for part in (axes[:num_contracted], axes[num_contracted:]))
    if isinstance(w, jax.Array):
        return P(*inputs, *outputs)
    # 4 bits have a kernel of their own. Rounded `by_rows`, a part of a row has a scale of its own, which is finer than
    # that of the whole row; a `dynamic` one belongs to the format of a folder.
    if not isinstance(w, QuantizedWeight) or w.is_in_4_bits or w.inputs == "dynamic":
        return None
    of_input = None if w.input_scale is None else P()
    specs: dict[str, Any] = dict(values=P(*outputs, *inputs), scale=P(None, *outputs), input_scale=of_input)
    return dataclasses.replace(w, **specs)


def gathered(x: jax.Array) -> jax.Array | None:
    """An array whose last dim AXIS splits, whole on all GPUs; None: mailboxes do not do this here."""
    words = _words.get()
    if words is None or x.shape[-1] % len(words):
        return None
    if not kernel.is_exchanged((x.shape[-1] // len(words),), x.dtype):
        return None

    def body(x):
        return kernel.all_gather(x, _rank(), _given_words())

    return manual(body, P(*(None,) * (x.ndim - 1), AXIS), P(), check_vma=False)(x)


def _rank() -> jax.Array:
    return lax.axis_index(AXIS).astype(jnp.uint32)


def _given_words() -> jax.Array:
    words = _words.get()
    assert words is not None
    return words
