"""The kernel of the cross-entropy for Hopper against XLA's fusions of the same products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.choice import log_choice
from megajax.ops.cross_entropy import cross_entropy
from pallas_kernels import cross_entropy as kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]

WIDTH = 256


@pytest.mark.parametrize(
    ("rows", "vocab_size", "padded"),
    # One step, several whole ones, as many as fit into shared memory, more than fit; fewer rows than blocks.
    [(640, 4096, 4096), (640, 16384, 16384), (1000, 50257, 50304), (1000, 53248, 53248), (300, 151936, 151936)]
    + [(64, 128000, 128256), (1000, 20000, 40960)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kernel_equals_xla(rows, vocab_size, padded, dtype, monkeypatch, caplog):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (1, rows, WIDTH), dtype)
    head = jax.random.normal(keys[1], (WIDTH, padded), jnp.float32) / 4
    labels = jax.random.randint(keys[2], (1, rows), 0, vocab_size)
    weights = jax.random.uniform(keys[3], (1, rows)) / rows
    labels = labels.at[0, :2].set(jnp.array([vocab_size - 1, padded + 7]))
    weights = weights.at[0, 1].set(0)
    options = dict(vocab_size=vocab_size, z_loss=1e-3, label_smoothing=0.0, multiplier=0.7)
    chunk = rows * padded * 2  # half of the logits

    def results():
        log_choice.cache_clear()
        run = functools.partial(cross_entropy, labels_BT=labels, weights_BT=weights, max_chunk_bytes=chunk, **options)
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
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.linalg.norm(got - want) < 2**-9 * np.linalg.norm(want)
    np.testing.assert_array_equal(np.asarray(gradients[1])[:, vocab_size:], 0)
