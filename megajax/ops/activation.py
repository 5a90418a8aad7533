"""Nonlinearities of feed-forward layers, plain and gated (Hendrycks and Gimpel 2016; Shazeer 2020; So et al. 2021).

Dimensions: F feed-forward width, W matmul outputs per token that the nonlinearity reads: 2 (gate, up) if gated, else 1.
Only these matmul outputs are saved for the backward pass, which recomputes the rest: the tanh or sigmoid that autodiff
would save costs two passes over the widest array of a layer, 4.4 of 268 ms of gpt_1p3b on one H100.
On Hopper the backward pass of those in OF_KERNEL, in a feed-forward layer, is our kernel (pallas_kernels/gated.py).
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.mesh.current import free_axes, manual
from megajax.mesh.sharding import activation_spec, axes_of
from megajax.ops.choice import log_choice
from megajax.ops.matmul import add_bias_gradient

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh"]


def _exact_gelu(x: jax.Array) -> jax.Array:
    """x times the cumulative distribution function of the standard normal distribution. jax.nn.gelu uses erfc, whose
    two branches take several times as long as reading x."""
    wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    return (0.5 * wide * (1 + compat.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


_FUNCTIONS = {
    "gelu": _exact_gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "geglu": _exact_gelu,
    "geglu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
GATED = ("swiglu", "geglu", "geglu_tanh")
OF_KERNEL = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
"""Functions of the kernel, by activation."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def activate(wide_WF: jax.Array, name: Activation, bias_WF: jax.Array | None = None) -> jax.Array:
    """f(gate) * up of [..., 2, F] if gated, else f of [..., 1, F] -> [..., F], in the same dtype. Of four dims, the
    first two are batch and time.

    bias: [2 or 1, F]; what wide has been given as a constant. The gradient of the bias is computed here, in float32,
    because that of wide need not be read again for it.
    """
    return _formula(wide_WF, name)


def _formula(wide_WF, name):
    if wide_WF.dtype == jnp.float16:  # the square in the derivative of gelu_tanh overflows from 148 on
        return _formula(wide_WF.astype(jnp.float32), name).astype(jnp.float16)
    parts = [jnp.squeeze(part, -2) for part in jnp.split(wide_WF, wide_WF.shape[-2], -2)]
    hidden_F = _FUNCTIONS[name](parts[0])
    return hidden_F * parts[1] if name in GATED else hidden_F


def _forward(wide_WF, name, bias_WF):
    return _formula(wide_WF, name), (wide_WF, bias_WF)


def _backward(name, residuals, d_hidden_F):
    wide_WF, bias_WF = residuals
    if name in OF_KERNEL and wide_WF.ndim == 4:
        spec = activation_spec(wide_WF.shape, ("batch", "time", None, "mlp"))
        reason = kernel_problem(wide_WF, spec, name)
        chosen = f"XLA ({reason})" if reason else "our kernel (pallas_kernels/gated.py)"
        log_choice("gradient of the activation", chosen)
        if not reason:
            d_wide_WF, d_bias_WF = _backward_by_kernel(OF_KERNEL[name], spec, wide_WF, d_hidden_F, bias_WF is not None)
            return d_wide_WF, None if bias_WF is None else d_bias_WF.astype(bias_WF.dtype)
    # The barrier prevents XLA from reusing the tanh of the forward pass, which would have to be stored.
    wide_WF = jax.lax.optimization_barrier(wide_WF)
    (d_wide_WF,) = jax.vjp(functools.partial(_formula, name=name), wide_WF)[1](d_hidden_F)
    return d_wide_WF, None if bias_WF is None else add_bias_gradient(bias_WF, d_wide_WF)


activate.defvjp(_forward, _backward)


def kernel_problem(wide: jax.Array, spec: P, name: Activation) -> str:
    """Why our kernel does not compute it of [..., 2 or 1, F], sharded like this, or an empty string."""
    problem = compat.mosaic_problem()
    if problem:
        return problem
    from pallas_kernels import gated as kernel  # not at the top: only Hopper needs it, and it takes time to import

    if name not in OF_KERNEL:
        return f"activation {name}"
    sizes = free_axes()
    parts = [math.prod(sizes[axis] for axis in axes_of(entry)) for entry in spec]
    *rows, _, width = (dim // part for dim, part in zip(wide.shape, parts, strict=True))
    return kernel.problem(math.prod(rows), width, wide.dtype)


def _backward_by_kernel(function: str, spec: P, wide_BTWF: jax.Array, d_hidden_BTF: jax.Array, has_bias: bool):
    """-> (d_wide, d_bias [W, F] float32 or None)."""
    tokens = (*axes_of(spec[0]), *axes_of(spec[1]))

    def body(wide_BTWF, d_hidden_BTF):
        from pallas_kernels import gated as kernel

        wide_RWF = wide_BTWF.reshape(-1, *wide_BTWF.shape[2:])
        d_hidden_RF = d_hidden_BTF.reshape(-1, d_hidden_BTF.shape[2])
        results = kernel.unweighted_backward(wide_RWF, d_hidden_RF, function=function, with_sums=has_bias)
        d_wide_RWF, d_bias_WF = compat.vary(results, compat.varying_axes(wide_BTWF))
        return d_wide_RWF.reshape(wide_BTWF.shape), jax.lax.psum(d_bias_WF, tokens) if has_bias else None

    return manual(body, (spec, P(*spec[:2], spec[3])), (spec, P(None, spec[3])))(wide_BTWF, d_hidden_BTF)
