"""Attention over a split sequence equals attention: each method, value and gradients, also inside a pipeline stage."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.ops.attention import attention as attention_of_one
from megajax.ops.attention_backends import Cudnn, Pallas
from megajax.ops.attention_mask import CAUSAL, FULL, first, window
from megajax.parallel.context import attention, sequence_order

B, T, N, K, H = 4, 32, 4, 4, 8
SCALE = 1 / math.sqrt(H)
CLOSE = functools.partial(np.testing.assert_allclose, atol=3e-6)  # float32 sums of order 1 in another order
# Ends of documents in each row. In the third each token of the second half is one: all blocks but the diagonal are
# masked for the devices that have it, which must not give NaN.
CUTS = [5], [3, 19], range(T // 2, T), [1, 2, 31]
SEGMENTS = np.stack([np.searchsorted(cuts, np.arange(T), "right") for cuts in CUTS]).astype(np.int32)
VARIANTS = {
    "causal": {},
    "full, packed, dropout": {"mask": FULL, "packed": True, "rate": 0.3},
    "window, soft cap": {"mask": CAUSAL & window(7), "soft_cap": 0.7},
    "packed": {"packed": True},
    "packed, window, dropout": {"packed": True, "mask": CAUSAL & window(11), "rate": 0.3},
    "ALiBi, sinks, window": {"alibi": True, "sinks": True, "mask": CAUSAL & window(11)},
    "prefix": {"mask": CAUSAL | first(21)},
    "window and first keys": {"mask": CAUSAL & (window(5) | first(2))},
}
SLOPES = np.array([0.5, 0.25, 0.7, 0.1], np.float32)
METHODS = ("ring", "all_gather", "all_to_all")
# (mesh, number of heads of keys and values); all-to-all splits these heads.
CASES = [
    *((method, dict(data=2, context=2, tensor=2), K) for method in METHODS),
    ("ring", dict(context=8), 2),
    pytest.param("all_gather", dict(context=8), 2, marks=pytest.mark.slow),
    ("all_to_all", dict(context=4), K),
    pytest.param("all_to_all", dict(context=2), 2, marks=pytest.mark.slow),
]


def arguments(kv_heads=K):
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((B, T, heads, H)).astype(np.float32) for heads in (N, kv_heads, kv_heads, N)]


def sinks_of(q):
    """[N]: the first queries, so that the gradient of a sink is part of theirs."""
    return 0.3 * q[0, 0, :, 0]


def all_variants(op, segments):
    """(q, k, v, g) -> {variant: (out, gradients of sum(out * g))}, one program for all."""

    def one(q, k, v, *, mask=CAUSAL, soft_cap=None, packed=False, rate=0.0, alibi=False, sinks=False):
        return op(
            q, k, v, mask=mask, scale=SCALE, soft_cap=soft_cap,
            segments=(segments, segments) if packed else None,
            dropout=(rate, (jax.random.key(7), jnp.int32(0))) if rate else None,
            slopes=SLOPES if alibi else None, sinks=sinks_of(q) if sinks else None,
        )  # fmt: skip

    def run(q, k, v, g):
        results = {}
        for name, options in VARIANTS.items():
            out, vjp = jax.vjp(functools.partial(one, **options), q, k, v)
            results[name] = out, vjp(g)
        return results

    return run


@functools.cache
def wanted(make_test_mesh, kv_heads=K):
    with jax.set_mesh(make_test_mesh()):
        run = jax.jit(all_variants(attention_of_one, SEGMENTS))
        return jax.tree.map(np.asarray, run(*arguments(kv_heads)))


@pytest.mark.parametrize(("method", "sizes", "kv_heads"), CASES, ids=str)
def test_value_and_gradients_equal_attention_on_one_device(method, sizes, kv_heads, make_test_mesh):
    order = sequence_order(T, sizes["context"], method)
    run = all_variants(functools.partial(attention, method=method), SEGMENTS[:, order])
    with jax.set_mesh(make_test_mesh(**sizes)):
        results = jax.jit(run)(*(a[:, order] for a in arguments(kv_heads)))
    back = jax.tree.map(lambda a: np.asarray(a)[:, np.argsort(order)], results)
    jax.tree.map(CLOSE, back, wanted(make_test_mesh, kv_heads))


@pytest.mark.parametrize("method", METHODS)
def test_inside_a_pipeline_stage(method, make_test_mesh):
    order = sequence_order(T, 2, method)
    run = all_variants(functools.partial(attention, method=method), SEGMENTS[:, order])

    def stage(*arguments):
        arguments = jax.tree.map(lambda a: jax.lax.pcast(a, ("pipeline",), to="varying"), arguments)
        return jax.tree.map(lambda a: a[None], run(*arguments))

    stages = jax.shard_map(stage, axis_names={"pipeline"}, in_specs=P(), out_specs=P("pipeline"))
    with jax.set_mesh(make_test_mesh(pipeline=2, context=2, tensor=2)):
        both = jax.jit(stages)(*(a[:, order] for a in arguments()))
    for number in range(2):
        back = jax.tree.map(lambda a, number=number: np.asarray(a)[number][:, np.argsort(order)], both)
        jax.tree.map(CLOSE, back, wanted(make_test_mesh))


def cudnn_forward(q, k, v, bias=None, *, scale, window, causal):
    """What the cuDNN calls mean; tests/gpu has the real ones."""
    assert window is None
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    if causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    scores = scores if bias is None else scores + bias
    lse = jax.nn.logsumexp(scores, -1)
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(scores - lse[..., None]), v, precision="highest"), lse


def cudnn_backward(q, k, v, out, lse, d_out, bias=None, *, scale, window, causal, learns_bias=False):
    """By the log-sum-exp that is given, of all keys."""
    assert window is None and not learns_bias
    einsum = functools.partial(jnp.einsum, precision="highest")
    scores = einsum("btnh,bsnh->bnts", q, k) * scale
    if causal:
        scores = jnp.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    probs = jnp.exp((scores if bias is None else scores + bias) - lse[..., None])
    delta = jnp.sum(out * d_out, -1).swapaxes(1, 2)
    d_scores = probs * (einsum("btnh,bsnh->bnts", d_out, v) - delta[..., None]) * scale
    d_k, d_v = einsum("bnts,btnh->bsnh", d_scores, q), einsum("bnts,btnh->bsnh", probs, d_out)
    return einsum("bnts,bsnh->btnh", d_scores, k), d_k, d_v


@pytest.fixture
def cudnn_stand_ins(monkeypatch, stand_in):
    stand_in(Cudnn)
    monkeypatch.setattr("megajax.mesh.compat.cudnn_attention_forward", cudnn_forward)
    monkeypatch.setattr("megajax.mesh.compat.cudnn_attention_backward", cudnn_backward)


def intervals(k, lower, upper):
    key = jnp.arange(k.shape[1], dtype=jnp.float32)
    return jnp.where((key >= lower[..., None]) & (key < upper[..., None]), 0.0, -jnp.inf)[:, None]


def pallas_forward(q, k, v, lower, upper, *, scale, soft_cap):
    """What our kernel means: every query sees an interval, of which it asks that its bounds never descend."""
    bias = intervals(k, *_ascending(lower, upper))
    out, lse = cudnn_forward(q, k, v, bias, scale=scale, window=None, causal=False)
    sees = jnp.isfinite(lse)
    return jnp.where(sees.swapaxes(1, 2)[..., None], out, 0.0), jnp.where(sees, lse, -1e30)


def pallas_backward(q, k, v, out, lse, d_out, lower, upper, *, scale, soft_cap, ordered):
    bias = intervals(k, *_ascending(lower, upper))
    return cudnn_backward(q, k, v, out, lse, d_out, bias, scale=scale, window=None, causal=False)


def _ascending(lower, upper):
    """NaN if they descend: then nothing is seen, and the results show it."""
    return (jnp.where(jnp.all(jnp.diff(a) >= 0), a.astype(jnp.float32), jnp.nan) for a in (lower, upper))


@pytest.fixture
def pallas_stand_ins(stand_in):
    stand_in(Pallas, kernel=SimpleNamespace(HEAD_DIMS=(), forward=pallas_forward, backward=pallas_backward))


KERNEL_VARIANTS = [
    {},
    {"mask": CAUSAL & window(7)},
    {"packed": True},
    {"packed": True, "mask": CAUSAL & window(11)},
    {"sinks": True},
    {"mask": FULL},
    {"mask": FULL, "packed": True},
    {"mask": CAUSAL | first(21)},
]


def run_kernel_variants(op, order, backend="auto"):
    """Of all KERNEL_VARIANTS (out, gradients of sum(out * g)), in the order of the tokens."""

    def losses(q, k, v, g):
        results = []
        for options in KERNEL_VARIANTS:
            given = dict(mask=options.get("mask", CAUSAL), scale=SCALE, backend=backend)
            pair = (SEGMENTS[:, order],) * 2 if options.get("packed") else None

            def one(q, k, v, given=given, pair=pair, with_sinks="sinks" in options):
                return op(q, k, v, segments=pair, sinks=sinks_of(q) if with_sinks else None, **given)

            out, vjp = jax.vjp(one, q, k, v)
            results.append((out, vjp(g)))
        return results

    results = jax.jit(losses)(*(a[:, order] for a in arguments()))
    return jax.tree.map(lambda a: np.asarray(a)[:, np.argsort(order)], results)


@pytest.fixture(scope="module")
def kernel_variants_of_one(make_test_mesh):
    with jax.set_mesh(make_test_mesh()):
        return run_kernel_variants(attention_of_one, np.arange(T))


@pytest.mark.parametrize("method, backend", [
    ("ring", "cudnn"), ("ring", "pallas"), ("all_gather", "pallas"),
    pytest.param("all_gather", "cudnn", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_kernel_gets_what_the_formula_says(method, backend, kernel_variants_of_one, make_test_mesh, request):
    request.getfixturevalue(f"{backend}_stand_ins")
    with jax.set_mesh(make_test_mesh(context=4, data=2)):
        op = functools.partial(attention, method=method)
        got = run_kernel_variants(op, sequence_order(T, 4, method), backend)
    jax.tree.map(CLOSE, got, kernel_variants_of_one)


def test_order_gives_each_device_an_early_and_a_late_chunk():
    np.testing.assert_array_equal(sequence_order(8, 2, "ring"), [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(sequence_order(8, 2, "all_to_all"), np.arange(8))
    np.testing.assert_array_equal(sequence_order(8, 1, "ring"), np.arange(8))


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_a_loop_over_layers_keeps_no_masks_of_the_ring(method, make_test_mesh, cudnn_stand_ins):
    """Partial evaluation of a scan computes what its carry does not touch once, before it, and keeps it."""
    q, *_ = arguments()
    segments = SEGMENTS[:, sequence_order(T, 4, method)]

    def layers(q):
        given = dict(method=method, mask=CAUSAL & window(7), scale=SCALE, backend="cudnn")
        given |= dict(segments=(segments, segments))
        return lax.scan(lambda x, _: (attention(x, x, x, **given), None), q, None, length=2)[0].sum()

    with jax.set_mesh(make_test_mesh(context=4)):
        jaxpr = jax.make_jaxpr(jax.grad(layers))(q).jaxpr
    before = next(i for i, equation in enumerate(jaxpr.eqns) if equation.primitive.name == "scan")
    kept = [out.aval for equation in jaxpr.eqns[:before] for out in equation.outvars]
    assert not [aval for aval in kept if not 0 < aval.size <= B * N * T]  # of the log-sum-exp
