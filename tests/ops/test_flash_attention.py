"""The attention kernel sees what the mask says, the op gives it the bounds of each mesh, and it equals its formula."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.layers.attention.multi_head import AttentionConfig
from megajax.mesh import compat
from megajax.ops import attention_mask as masks
from megajax.ops import norm
from megajax.ops.attention import attention, key_bounds, reference_attention
from megajax.ops.attention_backends import Inputs, Options, Pallas, choose
from megajax.ops.choice import log_choice
from pallas_kernels import flash_attention as kernel
from pallas_kernels.flash_attention import backward_block, schedule, tiles

# ----------------------------------------------------------------------------- bounds and tiles


def visible(lower, upper, num_keys):
    key = np.arange(num_keys)
    return (key >= np.asarray(lower)[..., None]) & (key < np.asarray(upper)[..., None])


def bounds_of(length, mask, ids=None, blocks=None):
    like = jax.ShapeDtypeStruct((1, length, 1, 1), jnp.float32)
    segments = None if ids is None else (jnp.asarray(ids)[None],) * 2
    return key_bounds(like, like, segments, mask, None if blocks is None else jnp.asarray(blocks)[None])


MASKS = {
    "causal": masks.CAUSAL,
    "full": masks.FULL,
    "window": masks.CAUSAL & masks.window(5),
    "window ahead": masks.window(5),
    "prefix": masks.CAUSAL | masks.first(9),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("packed", [False, True])
def test_bounds_say_what_the_mask_says(name, packed):
    length, ids = 40, np.repeat([3, 1, 7, 7, 2], [4, 1, 20, 3, 12])  # numbers of documents need not ascend
    index = np.arange(length)
    want = np.asarray(MASKS[name].visible(index[:, None] - index, index))
    want = want & (ids[:, None] == ids) if packed else want
    lower, upper = bounds_of(length, MASKS[name], ids if packed else None)
    assert np.array_equal(visible(lower, upper, length)[0], want)
    assert (np.diff(lower) >= 0).all() and (np.diff(upper) >= 0).all()


@pytest.mark.parametrize("window", [5, 40])
def test_the_tokens_of_an_image_see_each_other_within_the_window(window):
    ids, blocks = np.repeat([1, 2], [17, 23]), np.repeat([0, 1, 2, 0, 3, 0], [3, 9, 4, 2, 7, 15])
    index = np.arange(40)
    same_block = (blocks[:, None] == blocks) & (blocks > 0)
    want = (index > index[:, None] - window) & ((index <= index[:, None]) | same_block) & (ids[:, None] == ids)
    mask = masks.CAUSAL & masks.window(window)
    lower, upper = bounds_of(40, mask, ids, blocks)
    assert np.array_equal(visible(lower, upper, 40)[0], want)
    assert (np.diff(lower) >= 0).all() and (np.diff(upper) >= 0).all()
    # One head with equal keys: a query gets the mean of the values that it sees.
    ones = jnp.ones((1, 40, 1, 1))
    eye = jnp.eye(40)[None, :, None]
    how = dict(scale=1.0, mask=mask, segments=(jnp.asarray(ids)[None],) * 2, blocks=jnp.asarray(blocks)[None])
    out = attention(ones, ones, eye, **how)
    assert np.array_equal(np.asarray(out)[0, :, 0] > 0, want)


def test_tiles_hold_all_that_is_seen_and_those_in_the_middle_are_seen_wholly():
    rng = np.random.default_rng(0)
    for length in (64, 130, 517, 1000):
        for _ in range(4):
            ids = np.sort(rng.integers(0, rng.integers(1, 12), length))
            window = None if rng.random() < 0.5 else int(rng.integers(1, length))
            lower, upper = bounds_of(length, masks.CAUSAL & masks.window(window), ids)
            sees = visible(lower, upper, length)[0]
            for block_k in (64, 128):
                a, b = (tiles.extremes(bounds, 128) for bounds in (lower, upper))
                ranges = np.stack(tiles.range_of_keys(*a, *b, block_k), -1)[0]
                check_ranges(ranges, sees, 128, block_k)
                check_ranges(
                    np.asarray(tiles.ranges_of_queries(lower, upper, 64, block_k, length))[0], sees.T, block_k, 64
                )


@pytest.mark.parametrize("bytes_of_head", [1, 1 << 30], ids=["tile by tile", "head by head"])
def test_every_tile_is_taken_once_and_those_of_a_head_in_order(bytes_of_head):
    tiles = schedule.Schedule(batch=3, heads=4, tiles=5, bytes_of_head=bytes_of_head, last_first=True)
    taken = [tuple(map(int, tiles.tile(index, lambda b, number: (0, 0, 0, 0))[4:])) for index in range(tiles.count)]
    assert sorted(taken) == [(number, b, head) for number in range(5) for b in range(3) for head in range(4)]
    for b, head in {tuple(rest) for _, *rest in taken}:
        assert [number for number, *rest in taken if rest == [b, head]] == [4, 3, 2, 1, 0]
    assert tiles.head_by_head == (bytes_of_head > 1)


def check_ranges(ranges, sees, block, other):
    """ranges: int [tiles, 4] of `other` columns, for tiles of `block` rows of sees."""
    assert len(ranges) == -(-len(sees) // block)
    for number, (first, full_first, full_last, last) in enumerate(ranges):
        assert first <= full_first <= full_last <= last
        rows = sees[number * block : (number + 1) * block]
        assert not rows[:, : first * other].any() and not rows[:, last * other :].any()
        assert rows[:, full_first * other : full_last * other].all()


# ----------------------------------------------------------------------------- the op


def stand_in_forward(q, k, v, lower, upper, *, scale, soft_cap):
    """The formula with intervals."""
    assert q.shape[3] == k.shape[3] == v.shape[3]
    k, v = (jnp.repeat(a, q.shape[2] // a.shape[2], 2) for a in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * scale
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    key = jnp.arange(k.shape[1])
    sees = (key >= lower[..., None]) & (key < upper[..., None])
    scores = jnp.where(sees[:, None], scores, -1e30)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v, precision="highest")
    return out, jax.nn.logsumexp(scores, -1)


def stand_in_backward(q, k, v, out, lse, d_out, lower, upper, **options):
    return jax.vjp(lambda q, k, v: stand_in_forward(q, k, v, lower, upper, **options)[0], q, k, v)[1](d_out)


@pytest.mark.parametrize("sizes", [{}, dict(data=2, fsdp=2, tensor=2), dict(pipeline=2, expert=2, tensor=2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 3, "soft_cap": 0.7}], ids=str)
def test_op_gives_the_kernel_its_part_of_packed_documents(sizes, options, make_test_mesh, stand_in):
    ordered = []

    def backward(*arrays, **options):
        ordered.append(options.pop("ordered"))
        return stand_in_backward(*arrays, **options)

    dims = set()

    def forward(q, *others, **options):
        dims.add(q.shape[3])
        return stand_in_forward(q, *others, **options)

    stand_in(Pallas, kernel=SimpleNamespace(HEAD_DIMS=(4, 8, 12), forward=forward, backward=backward))
    B, T, N, K, H = 4, 16, 4, 2, 7
    V = 5 if options else H  # values of another width: the kernels get all padded to 8
    rng = np.random.default_rng(0)
    shapes = ((N, H), (K, H), (K, V), (N, V))
    q, k, v, d_out = (rng.standard_normal((B, T, *shape)).astype(np.float32) for shape in shapes)
    ids = np.sort(rng.integers(0, 4, (B, T)), -1).astype(np.int32)
    mask, soft_cap = masks.CAUSAL & masks.window(options.get("window")), options.get("soft_cap")

    def truth(q, k, v):
        places = (jnp.arange(T)[None],) * 2
        return reference_attention(q, k, v, mask, 0.3, soft_cap, (ids, ids), places)[0]

    def value_and_gradients(op, q, k, v, d_out):
        out, vjp = jax.vjp(op, q, k, v)
        return out, vjp(d_out)

    op = functools.partial(attention, mask=mask, scale=0.3, soft_cap=soft_cap, segments=(ids, ids))
    op = functools.partial(op, deterministic=bool(options), backend="pallas")
    with jax.set_mesh(make_test_mesh(**sizes)):
        got = jax.jit(functools.partial(value_and_gradients, op))(q, k, v, d_out)
    want = value_and_gradients(truth, q, k, v, d_out)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-6), got, want)
    assert set(ordered) == {bool(options)} and dims == {8}


def apart(joined_BTKGH):
    batch, length, _, _, head_dim = joined_BTKGH.shape
    q, k, v = jnp.split(joined_BTKGH, (joined_BTKGH.shape[3] - 2, joined_BTKGH.shape[3] - 1), 3)
    return q.reshape(batch, length, -1, head_dim), k[:, :, :, 0], v[:, :, :, 0]


def joined_stand_in():
    def forward(joined, *bounds, **options):
        return stand_in_forward(*apart(joined), *bounds, **options)

    def backward(joined, out, lse, d_out, *bounds, ordered, **options):
        return jax.vjp(lambda joined: forward(joined, *bounds, **options)[0], joined)[1](d_out)

    return SimpleNamespace(HEAD_DIMS=(4,), joined_forward=forward, joined_backward=backward)


@pytest.mark.parametrize("sizes", [{}, dict(data=2, fsdp=2, tensor=2), dict(pipeline=2, expert=2, tensor=2)], ids=str)
def test_op_gives_the_kernel_its_part_of_joined_queries_keys_and_values(sizes, make_test_mesh, stand_in):
    stand_in(Pallas, kernel=joined_stand_in())
    rng = np.random.default_rng(0)
    B, T, K, G, H = 4, 16, 2, 3, 4
    joined = rng.standard_normal((B, T, K, G + 2, H)).astype(np.float32)
    d_out = rng.standard_normal((B, T, K * G, H)).astype(np.float32)
    ids = np.sort(rng.integers(0, 4, (B, T)), -1).astype(np.int32)

    def truth(joined):
        places = (jnp.arange(T)[None],) * 2
        return reference_attention(*apart(joined), masks.CAUSAL, 0.3, None, (ids, ids), places)[0]

    def op(joined):
        how = dict(mask=masks.CAUSAL, scale=0.3, segments=(ids, ids), backend="pallas")
        return attention(*apart(joined), joined=joined, **how)

    def value_and_gradient(op, joined, d_out):
        out, vjp = jax.vjp(op, joined)
        return out, *vjp(d_out)

    with jax.set_mesh(make_test_mesh(**sizes)):
        got = jax.jit(functools.partial(value_and_gradient, op))(joined, d_out)
    want = value_and_gradient(truth, joined, d_out)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-6), got, want)


@pytest.mark.parametrize("key_bias", [True, False])
def test_layer_without_rotation_gives_attention_its_product_as_it_is(key_bias, make_test_mesh, stand_in):
    config = AttentionConfig(
        embed_dim=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        qkv_bias=True,
        key_bias=key_bias,
        init_std=1,
        out_init_std=1,
    )
    layer = config.build(nnx.Rngs(0))
    for linear in (layer.query, layer.key, layer.value):
        if hasattr(linear, "bias"):
            linear.bias[...] = jax.random.normal(jax.random.key(linear.bias.size), linear.bias.shape)
    graph, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (2, 8, 8))

    def value_and_gradients(backend):
        config_of = dataclasses.replace(config, backend=backend)

        def run(state, x):
            layer = nnx.merge(graph, state)
            layer.config = config_of
            return layer(x, {})[0]

        out, vjp = jax.vjp(run, state, x)
        return out, *vjp(jnp.ones_like(out))

    with jax.set_mesh(make_test_mesh()):
        want = value_and_gradients("reference")
        stand_in(Pallas, kernel=joined_stand_in())  # has no other kernel
        got = value_and_gradients("pallas")

    def agree(a, b):
        """To the rounding of float32 sums, whose terms are as large as the largest of them, 215. That of a key bias is
        zero but for this rounding."""
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 + 5e-7 * np.abs(b).max())

    jax.tree.map(agree, got, want)


def test_vmap_of_the_op_and_of_its_gradient_joins_the_batch(make_test_mesh, stand_in):
    batches = []

    def forward(q, *others, **options):
        batches.append(len(q))
        return stand_in_forward(q, *others, **options)

    def backward(q, *others, **options):
        batches.append(len(q))
        return stand_in_backward(q, *others, **{k: v for k, v in options.items() if k != "ordered"})

    joined = dict(HEAD_DIMS=(4,), forward=tiles.joins_batches(forward), backward=tiles.joins_batches(backward))
    stand_in(Pallas, kernel=SimpleNamespace(**joined))
    shape = (3, 2, 8, 2, 4)  # of vmap, B, T, N, H
    q, k, v = (np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i in range(3))

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, mask=masks.CAUSAL, scale=0.3, backend="pallas") ** 2)

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 2))
    with jax.set_mesh(make_test_mesh()):
        got = jax.jit(jax.vmap(gradient, in_axes=(0, None, 0)))(q, k[0], v)
        assert batches.count(6) == 2
        wants = [gradient(q[i], k[0], v[i]) for i in range(3)]
    for i, want in enumerate(wants):
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, atol=1e-5), got, want)


def on_hopper(monkeypatch):
    monkeypatch.setattr(compat, "mesh_platform", lambda: "gpu")
    monkeypatch.setattr(compat, "mosaic_problem", lambda: "")
    monkeypatch.setattr(compat, "cudnn_attention_problem", lambda: "")


def test_what_was_measured_to_be_faster_is_taken(monkeypatch):
    on_hopper(monkeypatch)
    q = lambda head_dim=128, dtype=jnp.bfloat16, length=4096: jax.ShapeDtypeStruct((1, length, 2, head_dim), dtype)
    causal, window = masks.CAUSAL, masks.CAUSAL & masks.window(8)

    def chosen(q, mask, kv_heads=2, packed=False, alibi=False, value_dim=None, **options):
        k, v = (
            jax.ShapeDtypeStruct((*q.shape[:2], kv_heads, dim), q.dtype)
            for dim in (q.shape[3], value_dim or q.shape[3])
        )
        return choose(Inputs.of(Options(mask, 1.0, **options), q, k, v, is_packed=packed, has_slopes=alibi)).name

    assert [chosen(q(h), mask) for h in (64, 128) for mask in (causal, window)] == ["pallas"] * 4
    assert [chosen(q(length=n), causal) for n in (128, 5000, 6000, 2**17)] == ["pallas"] * 2 + ["cudnn"] * 2
    assert [chosen(q(), mask, kv_heads=1) for mask in (causal, window)] == ["cudnn", "pallas"]
    assert chosen(q(), masks.FULL) == "cudnn"
    assert [chosen(q(h, length=2**17), causal, packed=True) for h in (64, 128)] == ["pallas"] * 2
    assert chosen(q(length=2**17), causal, soft_cap=5.0) == chosen(q(256, length=2**17), causal) == "pallas"
    widths = 64, 72, 80, 96, 128
    assert [chosen(q(h), mask, packed=True) for h in widths for mask in (causal, masks.FULL)] == ["pallas"] * 10
    assert [chosen(q(h), mask) for h in (72, 96) for mask in (causal, masks.FULL)] == ["cudnn"] * 4
    assert chosen(q(320), causal, packed=True) == "reference"
    assert chosen(q(length=2**17), causal, deterministic=True) == "pallas"
    assert chosen(q(96), causal, deterministic=True) == "pallas"
    assert chosen(q(), causal, dropout=0.1) == chosen(q(dtype=jnp.float32), causal, packed=True) == "reference"
    assert chosen(q(), causal, alibi=True) == "reference"
    assert chosen(q(192), causal, value_dim=128) == "pallas"  # compiled without a GPU
    monkeypatch.setattr(compat, "compute_capability", lambda: 9.0)
    for version, expected in ((91400, ["cudnn", "pallas", "pallas"]), (90900, ["pallas"] * 3)):
        monkeypatch.setattr(compat, "cudnn_version", lambda version=version: version)
        latent = [chosen(q(192), causal, value_dim=128, packed=packed) for packed in (False, True)]
        assert [*latent, chosen(q(192), causal, value_dim=64)] == expected


def test_what_a_config_asks_for_is_taken_where_it_can_be_and_else_the_log_says_why(monkeypatch, caplog, make_test_mesh):
    caplog.set_level("INFO", "megajax")
    log_choice.cache_clear()
    q = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    run = lambda backend: attention(q, q, q, mask=masks.CAUSAL, scale=1.0, backend=backend)
    with jax.set_mesh(make_test_mesh()):
        jax.eval_shape(lambda: run("pallas"))
        assert "attention: reference (not pallas: no kernels for cpu; not cudnn: no NVIDIA GPU)" in caplog.text
        on_hopper(monkeypatch)
        taken = []
        monkeypatch.setattr(kernel, "forward", lambda q, *_, **__: (taken.append("ours"), (q, jnp.ones((1, 2, 8))))[1])
        jax.eval_shape(lambda: run("pallas"))
        assert taken == ["ours"] and "attention: pallas" in caplog.text


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "logged"),
    [
        (64, 64, "attention: pallas"),
        (72, 72, "attention: pallas (head dim 72, padded to 80)"),
        (80, 80, "attention: pallas"),
        (96, 96, "attention: pallas (head dim 96, padded to 128)"),
        (192, 128, "attention: pallas (head dim 192, of values 128, padded to 256)"),
        (300, 300, "attention: reference (not pallas: head dim 300; not cudnn: head dim 300)"),
    ],
)
def test_the_log_says_to_what_heads_of_packed_images_are_padded(head_dim, value_dim, logged, monkeypatch, caplog):
    on_hopper(monkeypatch)
    caplog.set_level("INFO", "megajax")
    log_choice.cache_clear()
    q, v = (jax.ShapeDtypeStruct((1, 256, 2, dim), jnp.bfloat16) for dim in (head_dim, value_dim))
    choose(Inputs.of(Options(masks.FULL, 1.0), q, q, v, is_packed=True))
    assert [record.getMessage() for record in caplog.records] == [logged]


# ----------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("head_dim", tiles.HEAD_DIMS)
def test_a_warpgroup_stores_gradients_of_keys_only_where_its_gradient_of_queries_was(head_dim):
    """The other warpgroup may still be copying its own out, which the interpreter, where copies are done at once, does
    not show."""
    one = schedule.Schedule(batch=1, heads=1, tiles=1, bytes_of_head=1)
    heads = tiles.Heads(1, 1)
    plan = backward_block.Plan(one, tiles.TILES[head_dim], heads, head_dim, 1, jnp.bfloat16, 1.0, None, False)
    results = plan.shared_memory().results
    refs = results.refs if isinstance(results, plgpu.RefUnion) else ()
    of_warpgroup = {math.prod(ref.shape[1:]) * jnp.dtype(ref.dtype).itemsize for ref in refs}
    assert len(of_warpgroup) <= 1


@pytest.mark.parametrize(
    ("head_dim", "num_sms", "joined"),
    [(64, 1, False), (64, 1, True), (80, 1, False), pytest.param(256, 3, False, marks=pytest.mark.slow)],
)
def test_interpreted_kernel_equals_the_formula(head_dim, num_sms, joined, interpreted, monkeypatch):
    """Packed documents with a window and a soft cap, grouped queries: tiles unseen, seen wholly or in part; one block
    that takes all tiles, so that each slot is used again, and three for four. T is a multiple of the tiles: TMA reads
    zeros beyond the end, the interpreter an error (that no thread is told of, so that the others wait for ever)."""
    monkeypatch.setattr(schedule, "NUM_SMS", num_sms)
    B, T, N, K, H = (1, 128, 4, 2, head_dim) if joined else (1, 256, 2, 1, head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, d_out = (
        jax.random.normal(key, (B, T, heads, H), jnp.bfloat16) for key, heads in zip(keys, (N, K, K, N), strict=True)
    )
    bounds = bounds_of(T, masks.CAUSAL & masks.window(120), np.repeat([0, 1], [40, T - 40]))
    options = dict(scale=0.3, soft_cap=4.0)

    forward = jax.jit(
        functools.partial(
            in_one_array(kernel.joined_forward) if joined else kernel.forward, **options, interpret=interpreted
        )
    )
    backward = jax.jit(
        functools.partial(
            in_one_array(kernel.joined_backward) if joined else kernel.backward, **options, interpret=interpreted
        )
    )
    in_float32 = [a.astype(jnp.float32) for a in (q, k, v)]
    out, lse = stand_in_forward(*in_float32, *bounds, **options)
    wants = stand_in_backward(*in_float32, None, None, d_out.astype(jnp.float32), *bounds, **options)
    got = *forward(q, k, v, *bounds), *backward(q, k, v, out.astype(q.dtype), lse, d_out, *bounds)
    for mine, expected in zip(got, (out, lse, *wants), strict=True):
        mine, expected = np.asarray(mine, np.float64), np.asarray(expected, np.float64)
        assert np.linalg.norm(mine - expected) < 2**-8 * np.linalg.norm(expected)  # bfloat16: two roundings


def in_one_array(run):
    """The kernel of joined queries, keys and values with the arguments and results of the one of separate ones."""

    def call(q, k, v, *others, **options):
        batch, length, kv_heads, head_dim = k.shape
        grouped = q.reshape(batch, length, kv_heads, -1, head_dim)
        joined = jnp.concatenate([grouped, k[:, :, :, None], v[:, :, :, None]], 3)
        results = run(joined, *others, **options)
        return results if len(results) > 1 else apart(results[0])

    return call


def test_packed_images_with_heads_of_72_equal_the_formula(interpreted, stand_in, make_test_mesh, monkeypatch):
    """Images of several sizes in one row, each seeing itself, in 80 columns of which 8 are zeros."""
    monkeypatch.setattr(schedule, "NUM_SMS", 1)
    how = {name: functools.partial(getattr(kernel, name), interpret=interpreted) for name in ("forward", "backward")}
    stand_in(Pallas, kernel=SimpleNamespace(HEAD_DIMS=tiles.HEAD_DIMS, **how))
    shape = (1, 256, 1, 72)
    q, k, v, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4))
    ids = jnp.repeat(jnp.arange(3), jnp.array([90, 30, 136]))[None]

    def truth(q, k, v):
        places = (jnp.arange(256)[None],) * 2
        return reference_attention(q, k, v, masks.FULL, 0.12, None, (ids, ids), places)[0]

    def value_and_gradients(op, *arrays):
        out, vjp = jax.vjp(op, *arrays[:3])
        return out, *vjp(arrays[3])

    op = functools.partial(attention, mask=masks.FULL, scale=0.12, segments=(ids, ids), backend="pallas")
    with jax.set_mesh(make_test_mesh()):
        got = jax.jit(functools.partial(value_and_gradients, op))(q, k, v, d_out)
    wants = value_and_gradients(truth, *(a.astype(jnp.float32) for a in (q, k, v, d_out)))
    for mine, expected in zip(got, wants, strict=True):
        mine, expected = np.asarray(mine, np.float64), np.asarray(expected, np.float64)
        assert np.linalg.norm(mine - expected) < 2**-8 * np.linalg.norm(expected)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops import attention_mask as masks
from megajax.ops.attention import attention
from megajax.mesh.sharding import activation_spec
from megajax.planning.plan import devices_without_gpu, plan_device

mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), devices_without_gpu(4, plan_device("h100")))

def run(q, k, v, ids, d_out, soft_cap):
    options = dict(mask=masks.CAUSAL, scale=0.1, soft_cap=soft_cap, segments=(ids, ids), backend="pallas")
    options["deterministic"] = soft_cap is None
    out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, **options), q, k, v)
    return out, vjp(d_out)

cases = (1000, 128, "bfloat16", None), (500, 256, "bfloat16", None), (777, 64, "float16", None), (128, 128, "bfloat16", 5.0)
cases += (1000, 80, "bfloat16", None), (777, 80, "float16", 5.0), (600, 72, "bfloat16", None)
for length, head_dim, dtype, soft_cap in cases:
    with jax.set_mesh(mesh):
        def array(heads):
            spec = activation_spec((4, length, heads, head_dim), ("batch", "time", "heads", None))
            return jax.ShapeDtypeStruct((4, length, heads, head_dim), dtype, sharding=NamedSharding(mesh, spec))
        arrays = array(8), array(4), array(4), jax.ShapeDtypeStruct((4, length), jnp.int32), array(8)
        text = jax.jit(run, static_argnums=5).lower(*arrays, soft_cap).compile().as_text()
    print(length, text.count('custom_call_target="mosaic_gpu'))

def joined(joined, d_out):
    parts = jnp.split(joined, (4, 5), 3)
    q, k, v = (a.reshape(*a.shape[:2], -1, 64) for a in parts)
    how = dict(mask=masks.CAUSAL, scale=0.1, backend="pallas")
    out, vjp = jax.vjp(lambda joined: attention(q, k, v, joined=joined, **how), joined)
    return out, vjp(d_out)

with jax.set_mesh(mesh):
    def array(*shape):
        spec = activation_spec(shape, ("batch", "time", "kv_heads", None, None)[: len(shape)])
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec))
    text = jax.jit(joined).lower(array(4, 1000, 2, 6, 64), array(4, 1000, 8, 64)).compile().as_text()
print("joined", text.count('custom_call_target="mosaic_gpu'))
arrays = [array(4, 128, heads, 64) for heads in (8, 4, 4, 8)]

def layers(q, k, v, d_out):
    attend = lambda q, k, v: attention(q, k, v, mask=masks.CAUSAL, scale=0.1, backend="pallas")
    return jax.vjp(lambda q, k, v: attend(attend(q, k, v), k, v), q, k, v)[1](d_out)

with jax.set_mesh(mesh):
    text = jax.jit(layers).lower(*arrays).compile().as_text()
zeros = [line for line in text.splitlines() if " = (f32[" in line and "broadcast" in line.split(" = ")[0]]
print("zeros made at once:", len(zeros))
"""  # noqa: E501


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper_on_a_mesh(compile_for_hopper):
    *kernels, zeros = [line.split()[-1] for line in compile_for_hopper(PROGRAM)]
    assert kernels == ["2"] * 8  # forward, backward
    assert zeros == "0"  # in one operation for both layers, which has the memory of both


@pytest.mark.parametrize(
    ("kind", "capability", "attention_backend", "norm_backend"),
    [
        ("Tesla T4", "7.5", "reference", "xla"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "cudnn", "xla"),
        ("NVIDIA H100 80GB HBM3", "9.0", "pallas", "kernel"),
    ],
)
def test_gpus_before_hopper_take_what_they_can_do(kind, capability, attention_backend, norm_backend, monkeypatch):
    device = SimpleNamespace(device_kind=kind, compute_capability=capability, platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compat, "cudnn_attention_problem", lambda: "")
    q = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)
    assert choose(Inputs.of(Options(masks.CAUSAL, 1.0), q, q, q)).name == attention_backend
    assert norm.backend_of(jax.ShapeDtypeStruct((2, 1024, 512), jnp.bfloat16)) == norm_backend
