"""The kernel of the cross-entropy for Hopper against its reference; alone and in the loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.choice import log_choice
from megajax.ops.cross_entropy import cross_entropy
from megajax.ops.cross_entropy import value_and_gradient as reference
from pallas_kernels import cross_entropy as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]

# One step, several whole ones, as many as fit into shared memory, more than fit; fewer rows than blocks; much padding.
SHAPES = [
    (640, 4096, 4096),
    (640, 16384, 16384),
    (1000, 50257, 50304),
    (1000, 53248, 53248),
    (300, 151936, 151936),
    (64, 128000, 128256),
    (1000, 20000, 40960),
]


@pytest.mark.parametrize(("rows", "vocab_size", "width"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernel_equals_the_reference(rows, vocab_size, width, dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    products = 3 * jax.random.normal(keys[0], (rows, width), jnp.float32)
    labels = jax.random.randint(keys[1], (rows,), 0, vocab_size).at[:2].set(jnp.array([vocab_size - 1, -1]))
    weights = 256 * jax.random.uniform(keys[2], (rows,)).at[2].set(0)
    static = dict(vocab_size=vocab_size, multiplier=0.7, z_loss=1e-3, dtype=dtype)
    lse, gradient = kernel.value_and_gradient(products, labels, weights, **static)
    wanted_lse, wanted = jax.jit(functools.partial(reference, **static))(products, labels, weights)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6)
    # Each result is rounded to 8 or 11 bits; float16 has no numbers between multiples of 2^-24.
    atol = 2**-23 if dtype == jnp.float16 else 0
    np.testing.assert_allclose(np.float32(gradient), np.float32(wanted), rtol=2**-7, atol=atol)


def test_loss_and_gradients_equal_xla_s(monkeypatch, caplog):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (2, 500, 256), jnp.bfloat16)
    head = jax.random.normal(keys[1], (256, 50304), jnp.float32) / 4
    labels = jax.random.randint(keys[2], (2, 500), 0, 50257)
    weights = jax.random.uniform(keys[3], (2, 500)) / 1000
    options = dict(vocab_size=50257, z_loss=1e-3, label_smoothing=0.0)
    half = 500 * 50304 * 4  # of the logits, bytes

    def results():
        log_choice.cache_clear()
        run = functools.partial(cross_entropy, labels_BT=labels, weights_BT=weights, max_chunk_bytes=half, **options)
        return jax.jit(jax.value_and_grad(run, (0, 1)))(x, head)

    loss, gradients = results()
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "problem", lambda *_: "not wanted here")
        wanted_loss, wanted_gradients = results()
    assert [record.getMessage() for record in caplog.records if "cross-entropy" in record.getMessage()] == [
        "cross-entropy: one kernel (pallas_kernels/cross_entropy.py)",
        "cross-entropy: XLA (not wanted here)",
    ]
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        got = np.asarray(got, np.float64)
        want = np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) < 2**-9 * np.linalg.norm(want)  # gradients of logits have 8 bits
