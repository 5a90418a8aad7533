"""The causal convolution of state space layers, each channel by itself, with SiLU (Dao and Gu 2024,
https://arxiv.org/abs/2405.21060).

Dimensions: B batch, T sequence in I pieces (parallel/context.py), W taps, further dims of channels. Sums are float32
(float64 for float64 inputs). On Hopper both passes are kernels of ours (pallas_kernels/causal_conv.py).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import free_axes, manual
from megajax.mesh.sharding import activation_spec, axes_of
from megajax.ops.choice import log_choice
from megajax.ops.ssd import wide


def causal_conv(
    x_BT: jax.Array,
    kernel_W: jax.Array,
    bias: jax.Array | None,
    *,
    before_BI: jax.Array,
    segments: tuple[jax.Array, jax.Array] | None = None,
    axes: Sequence[str | None],
) -> jax.Array:
    """silu(sum over w of kernel_w x_(t - W + 1 + w) + bias), each channel by itself -> [B, T, *channels].

    x: [B, T, *channels]; kernel: [W, *channels]. before: [B, I, W - 1, *channels], the tokens before each piece, zeros
    before the first. segments: int32 ([B, T], before [B, I, W - 1]), ids of documents: no token reads another's. axes:
    logical axes of the channels.
    """
    return _causal_conv(x_BT, kernel_W, bias, before_BI, segments, tuple(axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _causal_conv(x, kernel, bias, before, segments, axes):
    if not _has_kernel(x, kernel, before, axes):
        return jax.nn.silu(_sum_of_taps(x, kernel, bias, before, segments)).astype(x.dtype)

    def body(*arrays):
        from pallas_kernels import causal_conv as kernels  # not at the top: it takes time to import

        return kernels.forward(_inputs(*arrays)).reshape(arrays[0].shape)

    specs = _specs(x, kernel, before, axes)
    # In the kernel carries of loops vary over other axes than what they start with.
    run = manual(body, specs, specs[0], check_vma=False)
    return run(x, kernel, bias, before, *(segments or (None, None)))


def _causal_conv_forward(*arguments):
    return _causal_conv(*arguments), arguments[:-1]


def _causal_conv_backward(axes, arguments, d_out):
    x, kernel, bias, before, segments = arguments
    if not _has_kernel(x, kernel, before, axes):
        return _reference_backward(arguments, d_out)
    specs = _specs(x, kernel, before, axes)
    split_over = tuple(axis for entry in specs[0][:2] for axis in axes_of(entry))

    def body(*arrays):
        from pallas_kernels import causal_conv as kernels

        *given, d_out = arrays
        inputs = _inputs(*given)
        found = kernels.backward(inputs, d_out.reshape(inputs.x_STC.shape))
        shapes = [array if array is None else array.shape for array in (given[0], given[3], given[1], given[2])]
        d_x, d_before, *sums = [a if a is None else a.reshape(shape) for a, shape in zip(found, shapes, strict=True)]
        return d_x, d_before, *(a if a is None else lax.psum(a, split_over) for a in sums)

    run = manual(body, (*specs, specs[0]), (specs[0], specs[3], specs[1], specs[2]), check_vma=False)
    d_x, d_before, d_kernel, d_bias = run(x, kernel, bias, before, *(segments or (None, None)), d_out)
    return d_x, d_kernel.astype(kernel.dtype), d_bias if bias is None else d_bias.astype(bias.dtype), d_before, None


_causal_conv.defvjp(_causal_conv_forward, _causal_conv_backward)


def _has_kernel(x, kernel, before, axes) -> bool:
    reason = compat.mosaic_problem() or _kernel_problem(x, kernel, before, axes)
    log_choice("convolution", f"XLA ({reason})" if reason else "our kernels (pallas_kernels/causal_conv.py)")
    return not reason


def _kernel_problem(x, kernel, before, axes) -> str:
    from pallas_kernels import causal_conv as kernels

    sizes = free_axes()
    shards = [sizes[axis] for entry in _specs(x, kernel, before, axes)[0][2:] for axis in axes_of(entry)]
    channels = math.prod(x.shape[2:]) // math.prod(shards)
    return kernels.problem(x.shape[1] // before.shape[1], channels, kernel.shape[0], x.dtype)


def _specs(x, kernel, before, axes) -> tuple:
    """Of x, kernel, bias, before, and the ids of documents of x and before."""
    of_kernel = activation_spec(kernel.shape, (None, *axes))
    of_x = activation_spec(x.shape, ("batch", "time", *axes))
    of_before = activation_spec(before.shape, ("batch", "time", None, *axes))
    return of_x, of_kernel, P(*of_kernel[1:]), of_before, P(*of_x[:2]), P(*of_before[:3])


def _inputs(x, kernel, bias, before, ids, ids_before):
    """Each piece of this device is a sequence."""
    from pallas_kernels import causal_conv as kernels

    num_taps = kernel.shape[0]
    before = before.reshape(-1, num_taps - 1, math.prod(x.shape[2:]))
    x = x.reshape(before.shape[0], -1, before.shape[2])
    return kernels.Inputs(
        x,
        kernel.reshape(num_taps, -1).astype(jnp.float32),
        None if bias is None else bias.reshape(-1).astype(jnp.float32),
        before,
        None if ids is None else ids.reshape(x.shape[:2]),
        None if ids_before is None else ids_before.reshape(before.shape[:2]),
    )


def _reference_backward(arguments, d_out):
    """As automatic differentiation, except that the gradient before silu, which is read for each tap, is rounded to x's
    dtype and stored once."""
    x, kernel, bias, before, segments = arguments
    kernel, d_out = lax.optimization_barrier((kernel, d_out))  # else XLA might keep the sum from the forward pass
    total, transpose = jax.vjp(functools.partial(_sum_of_taps, segments=segments), x, kernel, bias, before)
    (d_total,) = jax.vjp(jax.nn.silu, total)[1](d_out.astype(total.dtype))
    d_total = lax.optimization_barrier(d_total.astype(x.dtype))
    return *transpose(d_total.astype(total.dtype)), None


def _sum_of_taps(x, kernel, bias, before, segments):
    """What silu is applied to, [B, I, T / I, *channels], float32."""
    pieces = x.reshape(x.shape[0], before.shape[1], -1, *x.shape[2:])
    dtype = wide(x)
    windows = _windows(pieces.astype(dtype), before.astype(dtype))
    if segments is not None:
        own, earlier = segments
        own = own.reshape(pieces.shape[:3])
        ids = _windows(own, earlier)
        rank = (1,) * (x.ndim - 2)
        windows = [jnp.where((i == own).reshape(*own.shape, *rank), w, 0) for w, i in zip(windows, ids, strict=True)]
    return _weighted(windows, kernel, bias).reshape(x.shape)


def convolved(windows: Sequence[jax.Array], kernel_W: jax.Array, bias: jax.Array | None) -> jax.Array:
    """silu(sum of windows[w] * kernel[w] + bias), in the dtype of the windows, with float32 inside. windows: W arrays
    [..., *channels], the oldest token first."""
    return jax.nn.silu(_weighted(windows, kernel_W, bias)).astype(windows[0].dtype)


def _weighted(windows, kernel_W, bias) -> jax.Array:
    dtype = wide(windows[0])
    taps = zip(windows, kernel_W, strict=True)
    total = jnp.asarray(sum(window.astype(dtype) * tap.astype(dtype) for window, tap in taps))
    return total if bias is None else total + bias.astype(dtype)


def _windows(pieces_BIT: jax.Array, before_BI: jax.Array) -> list[jax.Array]:
    """W arrays like pieces: for each token those W - 1, ..., 0 before it. before: [B, I, W - 1, ...]."""
    width = before_BI.shape[2] + 1

    def padded(array, low, high):
        padding = [(low, high, 0) if axis == 2 else (0, 0, 0) for axis in range(array.ndim)]
        return lax.pad(array, jnp.zeros((), array.dtype), padding)

    # Sums of padded arrays, not slices of joined ones: XLA would store the joined array.
    length = pieces_BIT.shape[2]
    windows = []
    for back in range(width - 1, 0, -1):
        earlier = before_BI[:, :, width - 1 - back :]
        windows.append(padded(pieces_BIT, back, -back) + padded(earlier, 0, length - back))
    return [*windows, pieces_BIT]
