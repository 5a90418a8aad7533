"""The attention kernels for Hopper against float32, beside cuDNN on the same inputs; alone, and in a model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.ops import attention_mask as masks
from megajax.ops.attention import attention, reference_attention
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


def error(got, want) -> float:
    """Relative to what is wanted; to inputs, which are near one, if that is zero, as gradients of tokens that see
    themselves alone are."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / (np.linalg.norm(want) or np.sqrt(want.size))


def poison_memory():
    """What is freed now is what the next outputs are given: a place that is not written shows as NaN."""
    for array in [jnp.full((64 << 20,), jnp.nan, jnp.float32) for _ in range(4)]:
        array.block_until_ready()
        array.delete()


# batch, length, heads, key-value heads, head dim, window, packed, soft cap, causal, dtype
CASES = {
    "causal": (2, 1024, 4, 4, 128, None, False, None, True, jnp.bfloat16),
    "causal, 64": (2, 1024, 4, 4, 64, None, False, None, True, jnp.bfloat16),
    "float16": (1, 512, 4, 2, 128, None, False, None, True, jnp.float16),
    "no whole tile": (3, 777, 4, 2, 128, None, False, None, True, jnp.bfloat16),
    "more tiles than multiprocessors": (9, 1024, 8, 2, 128, None, True, None, True, jnp.bfloat16),
    "more than L2 holds": (1, 8192, 16, 4, 128, None, False, None, True, jnp.bfloat16),
    "short": (2, 40, 4, 1, 64, None, False, None, True, jnp.bfloat16),
    "window": (1, 1500, 4, 2, 128, 200, False, None, True, jnp.bfloat16),
    "narrow window, 64": (2, 1000, 8, 2, 64, 33, False, None, True, jnp.bfloat16),
    "packed": (3, 1024, 8, 2, 128, None, True, None, True, jnp.bfloat16),
    "packed window, 64, no whole tile": (2, 1111, 4, 1, 64, 150, True, None, True, jnp.bfloat16),
    "soft cap": (2, 640, 4, 2, 128, None, False, 5.0, True, jnp.bfloat16),
    "packed, soft cap, 64": (1, 900, 4, 2, 64, None, True, 3.0, True, jnp.bfloat16),
    "not causal": (2, 600, 4, 2, 128, None, False, None, False, jnp.bfloat16),
    "packed, not causal": (2, 512, 4, 4, 64, None, True, None, False, jnp.bfloat16),
    "causal, 256": (2, 1024, 4, 2, 256, None, False, None, True, jnp.bfloat16),
    "packed window, 256, no whole tile": (2, 777, 4, 1, 256, 150, True, None, True, jnp.bfloat16),
    "packed, soft cap, 256": (1, 640, 8, 2, 256, None, True, 3.0, True, jnp.float16),
    "causal, 80": (2, 1024, 4, 4, 80, None, False, None, True, jnp.bfloat16),
    "packed window, 80, no whole tile": (2, 777, 4, 1, 80, 150, True, None, True, jnp.bfloat16),
    "packed, soft cap, 80": (1, 640, 8, 2, 80, None, True, 3.0, True, jnp.float16),
    "more tiles than multiprocessors, 80": (9, 1024, 8, 8, 80, None, True, None, False, jnp.bfloat16),
    "short, 80": (2, 40, 4, 1, 80, None, False, None, True, jnp.bfloat16),
    "packed images, 72": (2, 1200, 16, 16, 72, None, True, None, False, jnp.bfloat16),
    "packed, 96": (2, 512, 4, 4, 96, None, True, None, True, jnp.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_no_less_exact_than_cudnn(case, caplog):
    check(case)
    chosen = caplog.records[0].getMessage()
    assert chosen == "attention: pallas" or chosen.startswith(f"attention: pallas (head dim {case[4]}, padded to")


JOINED = ("causal", "no whole tile", "packed window, 64, no whole tile", "packed, not causal", "causal, 256")


@pytest.mark.parametrize("case", [CASES[name] for name in JOINED], ids=JOINED)
def test_joined_queries_keys_and_values_give_what_separate_ones_give(case):
    batch, length, heads, kv_heads, head_dim, window, packed, soft_cap, causal, dtype = case
    group = heads // kv_heads
    of_joined, of_d_out = jax.random.split(jax.random.key(0))
    joined = jax.random.normal(of_joined, (batch, length, kv_heads, group + 2, head_dim), dtype)
    d_out = jax.random.normal(of_d_out, (batch, length, heads, head_dim), dtype)
    ids = jnp.broadcast_to(jnp.arange(length) // 300, (batch, length)) if packed else None
    mask = masks.CAUSAL & masks.window(window) if causal else masks.FULL
    how = dict(mask=mask, scale=head_dim**-0.5, soft_cap=soft_cap, segments=None if ids is None else (ids, ids))

    @functools.partial(jax.jit, static_argnums=2)
    def run(joined, d_out, reads_joined):
        def op(joined):
            q, k, v = jnp.split(joined, (group, group + 1), 3)
            parts = q.reshape(batch, length, heads, head_dim), k[:, :, :, 0], v[:, :, :, 0]
            return attention(*parts, joined=joined if reads_joined else None, backend="pallas", **how)

        out, vjp = jax.vjp(op, joined)
        return out, *vjp(d_out)

    poison_memory()
    out, d_joined = run(joined, d_out, True)
    want, d_want = run(joined, d_out, False)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(want, np.float32))
    # The gradients of queries are added in no fixed order.
    assert error(d_joined, d_want) < 2**-9


@st.composite
def cases(draw):
    length, (heads, kv_heads) = draw(st.integers(2, 700)), draw(st.sampled_from([(4, 4), (4, 2), (6, 1)]))
    causal = draw(st.booleans())
    return (
        draw(st.integers(1, 3)), length, heads, kv_heads, draw(st.sampled_from([64, 72, 80, 128, 256])),
        draw(st.none() | st.integers(2, length)) if causal else None, draw(st.booleans()),
        draw(st.none() | st.floats(1.0, 30.0)), causal, draw(st.sampled_from([jnp.bfloat16, jnp.float16])),
    )  # fmt: skip


@settings(
    max_examples=8,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.generate],
)
@given(cases())
def test_no_less_exact_than_cudnn_whatever_the_shape(case):
    check(case)


def check(case):
    """Forward, d_q, d_k and d_v: errors of two roundings at most, and less than 1.2 times those of cuDNN if it can."""
    B, T, N, K, H, window, packed, soft_cap, causal, dtype = case
    mask, scale = (masks.CAUSAL if causal else masks.FULL) & masks.window(window), H**-0.5
    keys = jax.random.split(jax.random.key(T), 5)
    draw = lambda key, heads: jax.random.normal(key, (B, T, heads, H), dtype)
    q, k, v, d_out = (draw(key, heads) for key, heads in zip(keys, (N, K, K, N), strict=False))
    segments = None
    if packed:
        ids = jnp.sort(jax.random.randint(keys[4], (B, T), 0, 6), -1)
        segments = ids, ids

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradients(op, q, k, v, d_out):
        out, vjp = jax.vjp(op, q, k, v)
        return out, *vjp(d_out)

    def truth(q, k, v):
        places = (jnp.arange(T)[None],) * 2
        return reference_attention(q, k, v, mask, scale, soft_cap, segments, places)[0]

    def by(backend):
        op = functools.partial(attention, mask=mask, scale=scale, soft_cap=soft_cap, segments=segments, backend=backend)
        poison_memory()
        return value_and_gradients(op, q, k, v, d_out)

    with jax.default_matmul_precision("highest"):
        wanted = value_and_gradients(truth, *(a.astype(jnp.float32) for a in (q, k, v, d_out)))
    errors = [error(got, want) for got, want in zip(by("pallas"), wanted, strict=True)]
    # Two roundings to 8 bits (probabilities, result) of 0.9 * 2^-9 each in the mean square, a little more backward. Of
    # few tokens most gradients are zero, and those that are left may have roundings of up to 2^-8 each.
    assert np.max(errors) < (2**-8 if T >= 32 else 2**-7), errors  # np.max, as max hides NaN
    if soft_cap is None and causal and H <= 128:
        cudnn = [error(got, want) for got, want in zip(by("cudnn"), wanted, strict=True)]
        assert all(ours < 1.2 * theirs for ours, theirs in zip(errors, cudnn, strict=True)), (errors, cudnn)


@pytest.mark.parametrize(
    "name", ["causal", "no whole tile", "packed window, 64, no whole tile", "not causal", "causal, 256", "causal, 80"]
)
def test_ordered_sums_have_the_same_bits_each_time(name):
    _, T, N, K, H, window, packed, _, causal, dtype = CASES[name]
    B = 16  # many blocks that add to the same queries
    keys = jax.random.split(jax.random.key(T), 5)
    draw = lambda key, heads: jax.random.normal(key, (B, T, heads, H), dtype)
    q, k, v, d_out = (draw(key, heads) for key, heads in zip(keys, (N, K, K, N), strict=False))
    ids = jnp.sort(jax.random.randint(keys[4], (B, T), 0, 6), -1)
    mask = (masks.CAUSAL if causal else masks.FULL) & masks.window(window)
    given = dict(mask=mask, scale=H**-0.5, segments=(ids, ids) if packed else None)

    def gradients(deterministic):
        op = functools.partial(attention, **given, backend="pallas", deterministic=deterministic)
        return jax.jit(lambda *qkv: jax.vjp(op, *qkv)[1](d_out))

    ordered = gradients(True)
    first, *others = (jax.tree.map(np.asarray, ordered(q, k, v)) for _ in range(8))
    assert all(np.array_equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    # An order of its own: only d_q's last bits differ.
    for got, want in zip(first, gradients(False)(q, k, v), strict=True):
        assert error(got, want) < 2**-9


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_decoder_with_the_kernel_matches_cudnn(recompute, one_gpu, caplog):
    config = DecoderConfig(
        num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=2, vocab_size=1000, position="rope", norm="rmsnorm",
        biases=(), activation="swiglu",
    )  # fmt: skip
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 1000, (2, 512)).astype(np.int32),
        "labels": rng.integers(0, 1000, (2, 512)).astype(np.int32),
        "loss_weights": np.full((2, 512), 1 / 1024, np.float32),
        "positions": np.tile(np.arange(512, dtype=np.int32), (2, 1)),
        "segment_ids": np.sort(rng.integers(0, 4, (2, 512)), -1).astype(np.int32),
    }
    results = []
    for backend in ("pallas", "cudnn"):
        execution = ExecutionConfig(attention_backend=backend, recompute=recompute)
        model = Model(config, PrecisionConfig(), execution)
        params = model.init(0, one_gpu)
        step = jax.jit(jax.value_and_grad(lambda p, model=model: model.loss(p, batch, Language()).total()))
        results.append(step(params))
    (loss, gradients), (other_loss, others) = results
    assert abs(float(loss) - float(other_loss)) < 1e-3
    worst = np.max(jax.tree.leaves(jax.tree.map(error, gradients, others)))
    assert worst < 2e-2, worst
    assert "attention: pallas" in caplog.text and "attention: cudnn" in caplog.text
