"""Layer normalisation (Ba et al. 2016) and RMS normalisation (Zhang and Sennrich 2019), over the last dim.

XLA fuses each forward into one pass; the statistics are float32 whatever the dtype of x.
"""

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """x [..., D] / rms(x) * scale [D] -> x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + epsilon)
    return (x32 * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """(x [..., D] - mean) / std * scale [D] + bias [D] -> x's dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, -1, keepdims=True)
    inverse_std = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + epsilon)
    return (centred * inverse_std * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
