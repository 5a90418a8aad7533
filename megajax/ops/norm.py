"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019), over the last dim.

Dimensions: B batch, T sequence, R rows, D model width.
Statistics are float32 for any dtype of x. `residual_norm` is the norm on the residual stream: it defines its derivative
and its sharding, and uses our kernel on Hopper (pallas_kernels/norm.py).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import free_axes, manual
from megajax.mesh.sharding import activation_spec, axes_of
from megajax.ops.choice import log_choice


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x [..., D] / rms(x) * scale [D], or [N, D] of `for_each_head` -> x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + epsilon)
    return (x32 * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def for_each_head(scale_H: jax.Array, num_heads: int) -> jax.Array:
    """The scale of each head [N, H]. Its gradient is summed over tokens, then over heads: XLA's sum over both at once
    has only H columns, so few that it takes several times as long."""
    return jnp.broadcast_to(scale_H, (num_heads, *scale_H.shape))


for_each_head.defvjp(
    lambda scale_H, num_heads: (for_each_head(scale_H, num_heads), None),
    lambda num_heads, _, d_scale_NH: (jnp.sum(lax.optimization_barrier(d_scale_NH), 0),),
)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """(x [..., D] - mean) / std * scale [D] + bias [D] -> x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    inverse_std = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + epsilon)
    return (centred * inverse_std * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def gated_rms_norm(x: jax.Array, gate: jax.Array, scale: jax.Array, num_groups: int, epsilon: float) -> jax.Array:
    """rms_norm of x * silu(gate) over each of `num_groups` equal parts of the channels (Dao and Gu 2024) -> x's dtype.

    x, gate [B, T, H, P], scale [H, P]. x, gate and, without the kernel, the statistics are saved for the backward pass.
    """
    return _gated_forward(x, gate, scale, num_groups, epsilon)[0]


def _gated_forward(x, gate, scale, num_groups, epsilon):
    groups = _groups_for_kernel(x, num_groups)
    if groups:

        def body(x, gate, scale):
            from pallas_kernels import norm as kernel

            rows = (a.reshape(-1, scale.size // groups) for a in (x, gate))
            normed = kernel.gated_forward(*rows, scale.reshape(groups, -1), epsilon=epsilon)
            return compat.vary(normed, compat.varying_axes(x)).reshape(x.shape)

        spec, of_scale = _gated_specs(x)
        return manual(body, (spec, spec, of_scale), spec)(x, gate, scale), (x, gate, scale, None)

    gated = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
    parts = gated.reshape(*x.shape[: x.ndim - scale.ndim], num_groups, -1)
    inverse_rms = lax.rsqrt(jnp.mean(parts * parts, -1, keepdims=True) + epsilon)
    normed = (parts * inverse_rms).reshape(x.shape)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype), (x, gate, scale, inverse_rms)


def _gated_backward(num_groups, epsilon, residuals, d_out):
    """Without the kernel two passes over x, gate and d_out: the mean of each part, then all gradients."""
    x, gate, scale, inverse_rms = residuals
    if inverse_rms is None:
        return _gated_backward_by_kernel(x, gate, scale, d_out, num_groups, epsilon)
    x32 = x.astype(jnp.float32)
    d_out32 = d_out.astype(jnp.float32)
    activated, through_silu = jax.vjp(jax.nn.silu, gate.astype(jnp.float32))
    normed = (x32 * activated).reshape(*inverse_rms.shape[:-1], -1) * inverse_rms
    d_normed = (d_out32 * scale.astype(jnp.float32)).reshape(normed.shape)
    mean = jnp.mean(d_normed * normed, -1, keepdims=True)
    d_gated = ((d_normed - normed * mean) * inverse_rms).reshape(x.shape)
    d_scale = jnp.sum(d_out32 * normed.reshape(x.shape), tuple(range(x.ndim - scale.ndim)))
    (d_gate,) = through_silu(d_gated * x32)
    d_x = (d_gated * activated).astype(x.dtype)
    # Stored once: otherwise XLA computes the gradient of the gate again where it is joined with others.
    return *lax.optimization_barrier((d_x, d_gate.astype(gate.dtype))), d_scale.astype(scale.dtype)


def _gated_backward_by_kernel(x, gate, scale, d_out, num_groups, epsilon):
    groups = _groups_for_kernel(x, num_groups)
    spec, of_scale = _gated_specs(x)
    split_over = tuple(axis for entry in spec[:2] for axis in axes_of(entry))

    def body(x, gate, scale, d_out):
        from pallas_kernels import norm as kernel

        rows = (a.reshape(-1, scale.size // groups) for a in (x, gate, d_out))
        found = kernel.gated_backward(*rows, scale.reshape(groups, -1), epsilon=epsilon)
        d_x, d_gate, parts = compat.vary(found, compat.varying_axes(x))
        d_scale = lax.psum(jnp.sum(parts, 0), split_over).reshape(scale.shape)
        return d_x.reshape(x.shape), d_gate.reshape(x.shape), d_scale

    run = manual(body, (spec, spec, of_scale, spec), (spec, spec, of_scale))
    d_x, d_gate, d_scale = run(x, gate, scale, d_out)
    return d_x, d_gate, d_scale.astype(scale.dtype)


gated_rms_norm.defvjp(_gated_forward, _gated_backward)


def _gated_specs(x) -> tuple[P, P]:
    """Of x and gate, and of the scale."""
    spec = activation_spec(x.shape, ("batch", "time", "heads", None))
    return spec, P(*spec[2:])


def _groups_for_kernel(x, num_groups: int) -> int:
    """Groups of a device, each of which is a row of the kernel; 0: XLA computes the norm."""
    sizes = free_axes()
    spec, of_scale = _gated_specs(x)
    split, heads = (math.prod(sizes[axis] for entry in each for axis in axes_of(entry)) for each in (spec, of_scale))
    width = math.prod(x.shape[2:]) // num_groups
    reason = compat.mosaic_problem() or _kernel_problem(x.size // width // split, width, x.dtype, num_groups // heads)
    if not reason and num_groups % heads:
        reason = "a group on several devices"
    log_choice("gated norm", f"XLA ({reason})" if reason else "our kernel (pallas_kernels/norm.py)")
    return 0 if reason else num_groups // heads


@functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable, static_argnums=3)
def rms_norm_then_gate(x: jax.Array, gate: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """rms_norm(x) * silu(gate) -> x's dtype. In contrast to gated_rms_norm the gate is applied after the norm.

    x, gate [..., D], scale [D]. Only x, gate and scale are saved for the backward pass.
    """
    normed = rms_norm(x.astype(jnp.float32), scale, epsilon)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def residual_norm(
    x_BTD: jax.Array, y_BTD: jax.Array | None, scale_D: jax.Array, bias_D: jax.Array | None, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """(s = x + y, or x without y; layer_norm of s, or rms_norm without a bias), sharded as batch, sequence.

    The gradients of the two results are combined in one pass over the rows. The gradient of x is materialised instead
    of being fused into its consumers: everything on the residual stream is local to a row, so XLA would fuse the norm
    gradients of all layers into each other. Compile time would grow with the square of the number of layers (7 B, 4
    layers: 47 s instead of 5 s), and each fusion would recompute the later layers.
    """
    return _residual_norm(x_BTD, y_BTD, scale_D, bias_D, (epsilon, backend_of(x_BTD)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _residual_norm(x_BTD, y_BTD, scale_D, bias_D, options):
    epsilon, backend = options
    if backend == "xla":
        total_BTD = x_BTD if y_BTD is None else x_BTD + y_BTD
        return total_BTD, _reference(total_BTD, scale_D, bias_D, epsilon)

    def body(x_BTD, y_BTD, scale_D, bias_D):
        from pallas_kernels import norm as kernel

        results = kernel.forward(_rows(x_BTD), _rows(y_BTD), scale_D, bias_D, epsilon=epsilon)
        total, normed = compat.vary(results, compat.varying_axes(x_BTD))
        return total.reshape(x_BTD.shape), normed.reshape(x_BTD.shape)

    spec = _spec(x_BTD)
    return manual(body, (spec, spec, P(), P()), (spec, spec))(x_BTD, y_BTD, scale_D, bias_D)


def _forward(x_BTD, y_BTD, scale_D, bias_D, options):
    total_BTD, normed_BTD = _residual_norm(x_BTD, y_BTD, scale_D, bias_D, options)
    return (total_BTD, normed_BTD), (total_BTD, scale_D, bias_D, y_BTD is None)


def _backward(options, residuals, gradients):
    epsilon, backend = options
    total_BTD, scale_D, bias_D, alone = residuals
    d_total_BTD, d_normed_BTD = gradients
    if backend == "xla":
        normalise = functools.partial(_reference, epsilon=epsilon)
        through_BTD, d_scale_D, d_bias_D = jax.vjp(normalise, total_BTD, scale_D, bias_D)[1](d_normed_BTD)
        d_x_BTD = lax.optimization_barrier(d_total_BTD + through_BTD)
        return d_x_BTD, None if alone else d_x_BTD, d_scale_D, d_bias_D

    spec = _spec(total_BTD)
    split_over = tuple(axis for entry in spec for axis in axes_of(entry))

    def body(total_BTD, d_normed_BTD, d_total_BTD, scale_D):
        from pallas_kernels import norm as kernel

        centred = bias_D is not None
        rows = (_rows(a) for a in (total_BTD, d_normed_BTD, d_total_BTD))
        results = kernel.backward(*rows, scale_D, centred=centred, epsilon=epsilon)
        d_x_RD, *parts = compat.vary(results, compat.varying_axes(total_BTD))
        sums = (None if part is None else lax.psum(jnp.sum(part, 0), split_over) for part in parts)
        return d_x_RD.reshape(total_BTD.shape), *sums

    run = manual(body, (spec, spec, spec, P()), (spec, P(), P()))
    d_x_BTD, *sums = run(total_BTD, d_normed_BTD, d_total_BTD, scale_D)
    d_scale_D, d_bias_D = (None if d is None else d.astype(scale_D.dtype) for d in sums)
    return d_x_BTD, None if alone else d_x_BTD, d_scale_D, d_bias_D


_residual_norm.defvjp(_forward, _backward)


def _reference(x, scale, bias, epsilon):
    return rms_norm(x, scale, epsilon) if bias is None else layer_norm(x, scale, bias, epsilon)


def _rows(a_BTD):
    return None if a_BTD is None else a_BTD.reshape(-1, a_BTD.shape[-1])


def _spec(x_BTD) -> P:
    return activation_spec(x_BTD.shape, ("batch", "sequence", None))


def backend_of(x_BTD) -> str:
    sizes = free_axes()
    parts = math.prod(sizes[axis] for entry in _spec(x_BTD) for axis in axes_of(entry))
    rows = x_BTD.size // x_BTD.shape[-1] // parts
    reason = compat.mosaic_problem() or _kernel_problem(rows, x_BTD.shape[-1], x_BTD.dtype)
    log_choice("norm", f"XLA ({reason})" if reason else "fused with the residual (pallas_kernels/norm.py)")
    return "xla" if reason else "kernel"


def _kernel_problem(rows: int, width: int, dtype, num_groups: int = 1) -> str:
    from pallas_kernels import norm as kernel  # not at the top: only Hopper needs it, and it takes time to import

    return kernel.problem(rows, width, dtype, num_groups)
