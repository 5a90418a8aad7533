"""Attention equals its formula, value and gradients, on every mesh and inside a pipeline stage."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from megajax.mesh import compat
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.attention import attention, reference_attention
from megajax.ops.attention_backends import BACKENDS, Cudnn, Reference
from megajax.ops.attention_mask import CAUSAL, FULL, first, window
from megajax.ops.paged_attention import attend_to_pages
from megajax.parallel import context

B, T, N, K, H = 4, 16, 4, 2, 16
SCALE = 1 / math.sqrt(H)
CLOSE = functools.partial(np.testing.assert_allclose, atol=3e-6)  # float32 sums of order 1 in another order
# [B, T]: documents of several lengths, cut at other places in each row.
CUTS = [5], [3, 9], [], [1, 2, 15]
SEGMENTS = np.stack([np.searchsorted(cuts, np.arange(T), "right") for cuts in CUTS]).astype(np.int32)
# Whether query i sees key j.
SEEN = {
    FULL: lambda i, j: (i >= 0) & (j >= 0),
    CAUSAL: lambda i, j: j <= i,
    CAUSAL & window(5): lambda i, j: (j <= i) & (j > i - 5),
    CAUSAL | first(6): lambda i, j: (j <= i) | (j < 6),
    CAUSAL & (window(4) | first(2)): lambda i, j: (j <= i) & ((j > i - 4) | (j < 2)),
}
VARIANTS = {
    "causal": {},
    "full": {"mask": FULL},
    "full, packed": {"mask": FULL, "packed": True},
    "window, soft cap": {"mask": CAUSAL & window(5), "soft_cap": 0.7},
    "packed": {"packed": True},
    "packed, window": {"packed": True, "mask": CAUSAL & window(5)},
    "packed, ALiBi": {"packed": True, "alibi": True},
    "window, sinks": {"mask": CAUSAL & window(5), "sinks": True},
    "bias": {"bias": True},
    "other keys, padded": {"mask": FULL, "num_keys": 10, "bias": True},
    "prefix": {"mask": CAUSAL | first(6)},
    "window and first keys": {"mask": CAUSAL & (window(4) | first(2))},
}
SLOPES = np.array([0.5, 0.25, 0.7, 0.1], np.float32)


@pytest.fixture(params=[dict(), dict(data=2, fsdp=2, tensor=2), dict(pipeline=2, expert=2, tensor=2)], ids=str)
def mesh(request, make_test_mesh):
    """None that splits the sequence: for those see tests/parallel/test_context.py."""
    with jax.set_mesh(make_test_mesh(**request.param)) as mesh:
        yield mesh


def arguments():
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, T, heads, H)).astype(np.float32) for heads in (N, K, K, N)]


def sinks_of(q):
    """[N]: some queries, so that the gradient of a sink is part of theirs."""
    return 0.3 * q[0, 0, :, 0]


def bias_of(q, num_keys):
    """[N, T, S]: products of queries, so that the gradient of the bias is part of theirs."""
    return 0.1 * jnp.einsum("tnh,snh->nts", q[0], q[1, :num_keys], precision="highest")


def ours(
    q, k, v, *, mask=CAUSAL, soft_cap=None, packed=False, alibi=False, sinks=False, bias=False,
    num_keys=None, **rest
):  # fmt: skip
    segments = (SEGMENTS, SEGMENTS) if packed else None
    if num_keys:
        segments = (np.zeros((B, T), np.int32), SEGMENTS[:, :num_keys])
        k, v = (a[:, :num_keys] for a in (k, v))
    rest |= dict(bias=bias_of(q, num_keys) if bias else None)
    rest |= dict(slopes=SLOPES if alibi else None, sinks=sinks_of(q) if sinks else None)
    return attention(q, k, v, mask=mask, scale=SCALE, soft_cap=soft_cap, segments=segments, **rest)


def formula(
    q, k, v, *, mask=CAUSAL, soft_cap=None, packed=False, alibi=False, sinks=False, bias=False,
    num_keys=T
):  # fmt: skip
    """Query head n reads key head n // (N / K); a sink is one more key, of value 0."""
    k, v = (jnp.repeat(a, N // K, axis=2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * SCALE
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    place = np.arange(T)
    visible = np.broadcast_to(SEEN[mask](place[:, None], place), (B, T, T))
    if bias:
        scores = scores.at[..., :num_keys].add(bias_of(q, num_keys))
    if num_keys < T:
        visible = np.broadcast_to((SEGMENTS == 0)[:, None] & (place < num_keys), (B, T, T))
    if packed:
        visible = visible & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
    if alibi:
        scores = scores - SLOPES[:, None, None] * (place[:, None] - place).astype(np.float32)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    if sinks:
        column = jnp.broadcast_to(sinks_of(q)[:, None, None], (B, N, T, 1))
        scores = jnp.concatenate([scores, column], -1)
    probs = jax.nn.softmax(scores, -1)[..., :T]
    return jnp.einsum("bnts,bsnh->btnh", probs, v, precision="highest")


def all_variants(op):
    """(q, k, v, g) -> {variant: (out, gradients of sum(out * g))}, one program for all."""

    def run(q, k, v, g):
        results = {}
        for name, options in VARIANTS.items():
            out, vjp = jax.vjp(functools.partial(op, **options), q, k, v)
            results[name] = out, vjp(g)
        return results

    return run


@functools.cache
def wanted():
    return jax.tree.map(np.asarray, jax.jit(all_variants(formula))(*arguments()))


def test_value_and_gradients_equal_the_formula(mesh):
    jax.tree.map(CLOSE, jax.jit(all_variants(ours))(*arguments()), wanted())


def test_value_and_gradients_equal_the_formula_in_a_pipeline_stage(on_stages):
    for stage in on_stages(all_variants(ours), *arguments()):
        jax.tree.map(CLOSE, stage, wanted())


@pytest.mark.parametrize(
    "name",
    ["causal", "full, packed", "packed", "packed, window", "window, sinks", "bias", "other keys, padded"],
)
def test_cudnn_gets_what_the_formula_says(name, make_test_mesh, monkeypatch, stand_in):
    """With grouped queries, relative positions, and documents kept apart by a bias: in the cuDNN call of jax 0.10.2,
    segment offsets take keys for as many heads as queries. cuDNN needs a GPU: its meaning stands for it here, tests/gpu
    has the real one."""

    def forward(q, k, v, bias=None, *, scale, window, causal):
        k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
        distance = np.arange(T)[:, None] - np.arange(k.shape[1])
        visible = ((distance >= 0) | (not causal)) & (distance < (window or T))
        scores = jnp.where(visible, scores if bias is None else scores + bias, -jnp.inf)
        out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v, precision="highest")
        return out, jax.nn.logsumexp(scores, -1)

    def backward(q, k, v, out, lse, d_out, bias=None, *, learns_bias, **options):
        """As cuDNN: the probabilities come from the log-sum-exp that it is given."""
        for got, want in zip((out, lse), forward(q, k, v, bias, **options), strict=True):
            assert jax.typeof(got) == jax.typeof(want)

        def of_all_keys(q, k, v, bias):
            found, found_lse = forward(q, k, v, bias, **options)
            total = jnp.logaddexp(found_lse, lax.stop_gradient(beside))
            return found * jnp.exp(found_lse - total).swapaxes(1, 2)[..., None]

        own = forward(q, k, v, bias, **options)[1]
        beside = jnp.log(jnp.maximum(jnp.exp(lse) - jnp.exp(own), 1e-30))  # what others have of the softmax
        bias = compat.vary(bias, compat.varying_axes(q))  # the gradient is that of the rows of this device
        return jax.vjp(of_all_keys, q, k, v, bias)[1](d_out)[: 3 + learns_bias]

    stand_in(Cudnn)
    monkeypatch.setattr(compat, "cudnn_attention_forward", forward)
    monkeypatch.setattr(compat, "cudnn_attention_backward", backward)

    def run(q, k, v, g):
        out, vjp = jax.vjp(functools.partial(ours, backend="cudnn", **VARIANTS[name]), q, k, v)
        return out, vjp(g)

    with jax.set_mesh(make_test_mesh(data=2, fsdp=2, tensor=2)):
        jax.tree.map(CLOSE, jax.jit(run)(*arguments()), wanted()[name])


def test_a_backend_of_the_registry_serves_both_passes_a_split_sequence_and_pages(make_test_mesh, monkeypatch):
    called = []

    class Other(Reference):
        def problem(self, inputs):
            return "sinks" if inputs.has_sinks else ""

        def __getattribute__(self, name):
            called.append(name)
            return super().__getattribute__(name)

    def calls(*arrays, **options):
        called.clear()
        given = dict(mask=CAUSAL, scale=SCALE, method="ring", backend="other", **options)
        jax.eval_shape(jax.grad(lambda *qkv: context.attention(*qkv, **given).sum()), *arrays)
        return [name for name in called if name in ("forward", "backward")]

    monkeypatch.setitem(BACKENDS, "other", Other())
    q, k, v, _ = arguments()
    with jax.set_mesh(make_test_mesh()):
        assert calls(q, k, v) == ["forward", "backward"] and calls(q, k, v, sinks=SLOPES) == []
    with jax.set_mesh(make_test_mesh(context=2)):
        assert set(calls(q, k, v)) == {"forward", "backward"}
    pages, table, ends = jnp.zeros((2, 2, K, 8, H)), jnp.zeros((B, 1), jnp.int32), jnp.ones((B, T), jnp.int32)
    with jax.set_mesh(make_test_mesh()):
        for lower, upper, name in ((None, ends[:, :1], "decode"), (ends - 1, ends, "forward")):
            called.clear()
            pages_of = functools.partial(attend_to_pages, scale=SCALE, backend="other")
            jax.eval_shape(pages_of, q[:, : upper.shape[1]], pages, table, lower, upper)
            assert name in called


# ----------------------------------------------------------------------------- dropout


RATE = 0.3


def dropped(q, k, v, g):
    """With the identity as values the output is the dropped probabilities [B, T, N, S]; and the gradient for q."""
    identity = np.broadcast_to(np.eye(T, H, dtype=np.float32)[:, None], v.shape)
    op = functools.partial(ours, dropout=(RATE, (jax.random.key(7), jnp.int32(0))))
    probs = op(q, k, identity)
    _, vjp = jax.vjp(lambda q: op(q, k, v), q)
    return probs, vjp(g)[0]


@functools.cache
def dropped_on_one_device():
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        return jax.tree.map(np.asarray, jax.jit(dropped)(*arguments()))


def test_dropout_mask_is_the_same_on_every_mesh(mesh):
    probs, d_q = jax.jit(dropped)(*arguments())
    np.testing.assert_array_equal(probs == 0, dropped_on_one_device()[0] == 0)
    CLOSE(d_q, dropped_on_one_device()[1])


def test_dropout_mask_is_the_same_in_a_pipeline_stage(on_stages):
    for probs, d_q in on_stages(dropped, *arguments()):
        np.testing.assert_array_equal(probs == 0, dropped_on_one_device()[0] == 0)
        CLOSE(d_q, dropped_on_one_device()[1])


def test_dropout_drops_its_rate_and_scales_the_rest():
    q, k, v, _ = arguments()
    plain = np.asarray(formula(q, k, np.broadcast_to(np.eye(T, H, dtype=np.float32)[:, None], v.shape)))
    probs = dropped_on_one_device()[0]
    visible = plain > 0
    assert (probs == 0)[visible].mean() == pytest.approx(RATE, abs=0.04)  # 4 sigma of 2,176 draws
    CLOSE(probs, np.where(probs == 0, 0, plain / (1 - RATE)))
    keep = probs != 0
    for other in (keep[::-1], keep[:, :, ::-1]):  # rows and heads draw independently
        assert 0.5 < (keep == other)[visible & visible[::-1]].mean() < 0.7  # 0.58 if independent


# ----------------------------------------------------------------------------- edges


def test_a_row_that_sees_no_key_gives_no_nan(make_test_mesh):
    q, k, v, g = arguments()
    everyone = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    strangers = np.ones_like(everyone), (everyone < 3).astype(np.int32)
    places = everyone - 4, everyone
    run = functools.partial(attention, mask=CAUSAL & window(2), scale=SCALE)

    @jax.jit
    def both(q, k, v):
        results = []
        for options in ({"segments": strangers}, {"indices": places}):
            out, vjp = jax.vjp(functools.partial(run, **options), q, k, v)
            results.append((out, vjp(g)))
        return results

    with jax.set_mesh(make_test_mesh()):
        (out, gradients), others = both(q, k, v)
    for array in jax.tree.leaves((out, gradients, others)):
        assert np.all(np.isfinite(array))
    # As documented: the mean of the values.
    CLOSE(out[:, 5:], np.broadcast_to(np.repeat(v, N // K, axis=2).mean(1)[:, None], (B, T - 5, N, H)))


def test_indices_place_queries_among_the_keys(make_test_mesh):
    """The last queries against all keys: a step of decoding."""
    q, k, v, _ = arguments()
    everyone = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    places = everyone[:, -3:], everyone
    run = functools.partial(attention, mask=CAUSAL, scale=SCALE, indices=places)
    for sizes in ({}, {"data": 2, "tensor": 2}):
        with jax.set_mesh(make_test_mesh(**sizes)):
            CLOSE(jax.jit(run)(q[:, -3:], k, v), wanted()["causal"][0][:, -3:])


def test_reference_gives_the_log_sum_exp():
    q, k, v, _ = arguments()
    places = np.arange(T)[None]
    out, lse = reference_attention(q, k, v, CAUSAL, SCALE, None, None, (places, places))
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, N // K, axis=2)) * SCALE
    CLOSE(lse, np.log(np.sum(np.exp(scores) * np.tri(T), -1)))
    assert lse.shape == (B, N, T) and lse.dtype == jnp.float32 and out.dtype == q.dtype
