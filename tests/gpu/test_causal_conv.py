"""The convolution of state space layers on Hopper against XLA's in float32, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.causal_conv import causal_conv

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


def relative_error(got, want) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# Blocks of 256 and 128 channels, tiles of 64 and 8 tokens, one and several pieces, two to four taps.
@pytest.mark.parametrize(
    ("shape", "num_pieces", "num_taps", "has_bias", "is_packed", "dtype"),
    [
        ((2, 2048, 24, 64), 1, 4, True, True, jnp.bfloat16),
        ((3, 1000, 2, 128), 1, 4, False, True, jnp.bfloat16),
        ((1, 512, 1, 128), 4, 3, True, False, jnp.bfloat16),
        ((2, 256, 12, 128), 2, 2, False, False, jnp.float16),
    ],
    ids=str,
)
def test_kernels_match_the_reference(shape, num_pieces, num_taps, has_bias, is_packed, dtype, caplog):
    batch, length, *channels = shape
    keys = jax.random.split(jax.random.key(0), 6)
    x = jax.random.normal(keys[0], shape, dtype)
    d_out = jax.random.normal(keys[1], shape, dtype)
    before = jax.random.normal(keys[2], (batch, num_pieces, num_taps - 1, *channels), dtype)
    kernel = jax.random.normal(keys[3], (num_taps, *channels), jnp.float32)
    bias = jax.random.normal(keys[4], channels, jnp.float32) if has_bias else None
    segments = None
    if is_packed:
        ids = jnp.cumsum(jax.random.bernoulli(keys[5], 0.1, (batch, length)), 1, dtype=jnp.int32)
        segments = (ids, jnp.zeros((batch, num_pieces, num_taps - 1), jnp.int32))

    @jax.jit
    def run(x, kernel, bias, before, d_out):
        def convolution(*arrays):
            x, kernel, bias, before = arrays
            return causal_conv(x, kernel, bias, before_BI=before, segments=segments, axes=("heads", None))

        out, vjp = jax.vjp(convolution, x, kernel, bias, before)
        return out, *vjp(d_out)

    found = run(x, kernel, bias, before, d_out)
    assert "convolution: our kernels" in caplog.text
    exact = [array.astype(jnp.float32) for array in (x, before, d_out)]
    wanted = run(exact[0], kernel, bias, exact[1], exact[2])
    assert "convolution: XLA (dtype float32)" in caplog.text
    for got, want in zip(found, wanted, strict=True):
        if want is not None:
            assert relative_error(got, want) <= (1e-5 if got.dtype == jnp.float32 else 2**-8)
