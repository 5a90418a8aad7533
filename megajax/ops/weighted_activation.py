"""The activation of the rows of experts, times their routing weights.

Dimensions: R rows, W matmul outputs per row and column (2 if gated, else 1), F width of an expert, E groups (the
experts of a device). Rows are laid out as in ops/grouped_matmul.py, and rows after the last group are empty.

On Hopper our kernel (pallas_kernels/gated.py) computes gated activations, and all gradients in one pass over the rows;
elsewhere XLA computes ops/activation.py and the product.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh import compat
from megajax.mesh.current import manual
from megajax.mesh.sharding import WEIGHT_AXES, rows_spec
from megajax.ops.activation import GATED, OF_KERNEL, Activation, activate, kernel_problem
from megajax.ops.choice import log_choice

TENSOR = WEIGHT_AXES["mlp"]


def reference(wide_RWF: jax.Array, weights_R: jax.Array, name: Activation) -> jax.Array:
    """activate(wide) * weight, a product in float32 -> [R, F] in the dtype of wide."""
    hidden_RF = activate(wide_RWF, name).astype(jnp.float32) * weights_R[:, None]
    return hidden_RF.astype(wide_RWF.dtype)


def weighted_activation(wide_RWF: jax.Array, weights_R: jax.Array, sizes_E: jax.Array, name: Activation) -> jax.Array:
    """As `reference`, by our kernel or by XLA.

    weights_R: float32. sizes_E: int32, rows of each group, concatenated over devices. Empty rows of wide must be zero:
    results and gradients there are zero, too.
    """
    reason = kernel_problem(wide_RWF, rows_spec(None, "mlp"), name) or ("" if name in GATED else f"activation {name}")
    log_choice("activation of experts", f"XLA ({reason})" if reason else "our kernel (pallas_kernels/gated.py)")
    if reason:
        return reference(wide_RWF, weights_R, name)
    return _by_kernel(wide_RWF, weights_R, sizes_E, OF_KERNEL[name])


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _by_kernel(wide_RWF, weights_R, sizes_E, function):
    def body(wide_RWF, weights_R, sizes_E):
        from pallas_kernels import gated as kernel

        hidden_RF = kernel.forward(wide_RWF, weights_R, jnp.sum(sizes_E), function=function)
        return compat.vary(hidden_RF, compat.varying_axes(wide_RWF))

    return manual(body, _given(), rows_spec("mlp"))(wide_RWF, weights_R, sizes_E)


def _given() -> tuple:
    """Specs of wide, weights and sizes."""
    return rows_spec(None, "mlp"), rows_spec(), rows_spec()


def _forward(wide_RWF, weights_R, sizes_E, function):
    return _by_kernel(wide_RWF, weights_R, sizes_E, function), (wide_RWF, weights_R, sizes_E)


def _backward(function, residuals, d_hidden_RF):
    def body(wide_RWF, weights_R, sizes_E, d_hidden_RF):
        from pallas_kernels import gated as kernel

        results = kernel.backward(wide_RWF, weights_R, jnp.sum(sizes_E), d_hidden_RF, function=function)
        d_wide_RWF, d_weights_R = compat.vary(results, compat.varying_axes(wide_RWF))
        return d_wide_RWF, lax.psum(d_weights_R, TENSOR)

    run = manual(body, (*_given(), rows_spec("mlp")), (rows_spec(None, "mlp"), rows_spec()))
    return *run(*residuals, d_hidden_RF), None


_by_kernel.defvjp(_forward, _backward)
