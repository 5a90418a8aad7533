"""Cross-entropy equals its formula, value and gradients, chunked or not, on every mesh and inside a pipeline stage."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.cross_entropy import cross_entropy

B, T, D, V = 4, 16, 8, 32
CLOSE = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6)  # float32 sums in another order
VARIANTS = {
    "plain": {},
    "z-loss and label smoothing": {"z_loss": 1e-2, "label_smoothing": 0.1},
}
CHUNK = 4 * B * (V // 2) * 4  # bytes: 4 chunks on one device, each device's 1 or 2 on a mesh


def arguments():
    """x, head, labels, weights."""
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, T, D), (D, V)))
    labels = rng.integers(0, V, (B, T)).astype(np.int32)
    weights = (rng.random((B, T)) / (B * T)).astype(np.float32)
    # Tokens that do not count may have any label.
    labels[0, :3], labels[1, 4] = -100, V + 7
    weights[0, :3] = weights[1, 4] = 0
    return x, head, labels, weights


def ours(x, head, labels, weights, *, z_loss=0.0, label_smoothing=0.0, **chunk):
    return cross_entropy(x, head, labels, weights, z_loss=z_loss, label_smoothing=label_smoothing, **chunk)


def formula(x, head, labels, weights, *, z_loss=0.0, label_smoothing=0.0):
    logits = jnp.einsum("btd,dv->btv", x, head, precision="highest")
    lse = jax.nn.logsumexp(logits, -1)
    log_probs = logits - lse[..., None]
    of_label = jnp.take_along_axis(log_probs, jnp.clip(labels, 0, V - 1)[..., None], -1)[..., 0]
    r = label_smoothing * V / (V - 1)
    return jnp.sum(weights * (-(1 - r) * of_label - r * log_probs.mean(-1) + z_loss * lse**2))


def all_variants(op, factor=1.0):
    """-> {variant: (loss * factor, gradients)}, one program for all."""

    def run(x, head, labels, weights):
        def scaled(x, head, options):
            return op(x, head, labels, weights, **options) * factor

        return {
            name: jax.value_and_grad(functools.partial(scaled, options=options), (0, 1))(x, head)
            for name, options in VARIANTS.items()
        }

    return run


@functools.cache
def wanted():
    return jax.tree.map(np.asarray, jax.jit(all_variants(formula))(*arguments()))


@pytest.mark.parametrize("chunk", [{}, {"max_chunk_bytes": CHUNK}], ids=["whole", "chunked"])
def test_value_and_gradients_equal_the_formula(mesh, chunk):
    jax.tree.map(CLOSE, jax.jit(all_variants(functools.partial(ours, **chunk)))(*arguments()), wanted())


@pytest.mark.parametrize("chunk", [{}, {"max_chunk_bytes": 1}], ids=["whole", "chunked"])
def test_value_and_gradients_equal_the_formula_in_a_pipeline_stage(on_stages, chunk):
    for stage in on_stages(all_variants(functools.partial(ours, **chunk)), *arguments()):
        jax.tree.map(CLOSE, stage, wanted())


def test_chunks_change_nothing_without_gradients(make_test_mesh):
    """The forward pass alone, as in evaluation; max_chunk_bytes=1 is a token of each sequence at a time."""
    with jax.set_mesh(make_test_mesh(tensor=2, context=2)):
        for chunk in ({}, {"max_chunk_bytes": CHUNK}, {"max_chunk_bytes": 1}):
            loss = jax.jit(functools.partial(ours, **VARIANTS["z-loss and label smoothing"], **chunk))(*arguments())
            CLOSE(loss, wanted()["z-loss and label smoothing"][0])


def test_gradients_scale_with_the_loss(make_test_mesh):
    with jax.set_mesh(make_test_mesh(tensor=2, context=2)):
        scaled = jax.jit(all_variants(ours, factor=8.0))(*arguments())
    jax.tree.map(CLOSE, jax.tree.map(lambda a: a / 8, scaled), wanted())


def test_bfloat16_keeps_its_dtype_and_a_float32_loss(make_test_mesh):
    x, head, labels, weights = arguments()
    run = jax.value_and_grad(functools.partial(ours, labels=labels, weights=weights), (0, 1))
    with jax.set_mesh(make_test_mesh(tensor=2, fsdp=2)):
        loss, (d_x, d_head) = jax.jit(run)(x.astype(jnp.bfloat16), head)
    assert (loss.dtype, d_x.dtype, d_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert float(loss) == pytest.approx(float(wanted()["plain"][0]), rel=1e-2)  # logits of bfloat16 inputs
    np.testing.assert_allclose(d_head, wanted()["plain"][1][1], atol=1e-2 * float(np.abs(d_head).max()))


def test_large_logits_do_not_overflow(make_test_mesh):
    x, head, labels, weights = arguments()
    with jax.set_mesh(make_test_mesh(tensor=2)):
        results = jax.jit(jax.value_and_grad(ours, (0, 1)))(np.float32(1e4) * x, head, labels, weights)
    assert all(np.all(np.isfinite(a)) for a in jax.tree.leaves(results))
