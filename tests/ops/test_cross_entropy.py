"""Cross-entropy equals its formula, value and gradients, chunked or not, on every mesh and over pipeline stages, by XLA
and by the kernel; the kernel, interpreted, equals its formula; and so do the scores of single tokens."""

import dataclasses
import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from megajax.mesh import compat
from megajax.ops.choice import log_choice
from megajax.ops.cross_entropy import cross_entropy
from megajax.ops.cross_entropy import value_and_gradient as reference
from megajax.ops.low_precision import FORMATS
from megajax.ops.token_scores import token_scores
from megajax.quantization.formats import quantize
from pallas_kernels import cross_entropy as kernel

B, T, D, V, TOKENS = 4, 16, 8, 32, 27  # V columns of the head, of which some may be padding
VARIANTS = {
    "plain": {},
    "z-loss and label smoothing": {"z_loss": 1e-2, "label_smoothing": 0.1},
    "padding": {"z_loss": 1e-2, "label_smoothing": 0.1, "vocab_size": TOKENS},
    "bias, multiplier, soft cap": {"z_loss": 1e-2, "biased": True, "multiplier": 0.7, "soft_cap": 1.5,
                                   "vocab_size": TOKENS},
}  # fmt: skip
# Of a device's logits: all at once, 2 chunks on a mesh and 16 on one device, a token at a time.
CHUNKS = {"whole": {}, "chunked": {"max_chunk_bytes": 512}, "token by token": {"max_chunk_bytes": 1}}


def close(got, want):
    """float32 sums in another order: a few roundings of 2^-24, of the largest element."""
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * np.abs(want).max())


def arguments(batch=B, length=T):
    """x, head, labels, weights."""
    rng = np.random.default_rng(0)
    x, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((batch, length, D), (D, V)))
    labels = rng.integers(0, TOKENS, (batch, length)).astype(np.int32)
    weights = (rng.random((batch, length)) / (batch * length)).astype(np.float32)
    # Tokens that do not count may have any label.
    labels.flat[:3], labels.flat[5] = -100, V + 7
    weights.flat[:3] = weights.flat[5] = 0
    return x, head, labels, weights


def ours(x, head, labels, weights, *, vocab_size=V, z_loss=0.0, label_smoothing=0.0, biased=False, **rest):
    """biased: by the first row of the head, so that the gradient of the bias is part of that row's."""
    options = dict(vocab_size=vocab_size, z_loss=z_loss, label_smoothing=label_smoothing)
    return cross_entropy(x, head, labels, weights, bias_V=head[0] if biased else None, **options, **rest)


def formula(
    x, head, labels, weights, *, vocab_size=V, z_loss=0.0, label_smoothing=0.0, biased=False, multiplier=1.0,
    soft_cap=None
):  # fmt: skip
    logits = jnp.einsum("btd,dv->btv", x, head[:, :vocab_size], precision="highest")
    logits = multiplier * (logits + (head[0, :vocab_size] if biased else 0.0))
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    lse = jax.nn.logsumexp(logits, -1)
    log_probs = logits - lse[..., None]
    of_label = jnp.take_along_axis(log_probs, jnp.clip(labels, 0, vocab_size - 1)[..., None], -1)[..., 0]
    r = label_smoothing * vocab_size / (vocab_size - 1)
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
def wanted(batch=B, length=T):
    x, head, labels, weights = arguments(batch, length)
    with jax.enable_x64(True):
        x, head, weights = (jnp.asarray(a, jnp.float64) for a in (x, head, weights))
        return jax.tree.map(np.asarray, jax.jit(all_variants(formula))(x, head, labels, weights))


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_value_and_gradients_equal_the_formula(mesh, chunk):
    jax.tree.map(close, jax.jit(all_variants(functools.partial(ours, **chunk)))(*arguments()), wanted())


@pytest.mark.parametrize("chunk", CHUNKS.values(), ids=CHUNKS)
def test_value_and_gradients_equal_the_formula_over_pipeline_stages(over_stages, chunk):
    run, head = all_variants(functools.partial(ours, **chunk)), P(None, "pipeline")
    specs = (P(), head, P(), P()), {name: (P(), (P(), head)) for name in VARIANTS}
    jax.tree.map(close, over_stages(run, *specs, *arguments()), wanted())


@pytest.mark.parametrize(
    ("shape", "tokens_at_once", "num_chunks"),
    [((2, 16), 16, 1), ((2, 16), 8, 2), ((2, 15), 14, 3), ((2, 15), 4, 5), ((2, 7), 7, 1), ((2, 7), 6, 7)],
    ids=str,
)
def test_any_number_of_tokens_is_cut_into_the_fewest_equal_chunks(shape, tokens_at_once, num_chunks, make_test_mesh):
    """15 and 7 tokens a device; nor can `tensor` then split the gradient of x along the sequence."""
    run = all_variants(functools.partial(ours, max_chunk_bytes=tokens_at_once * V // 2 * 4))
    with jax.set_mesh(make_test_mesh(data=2, tensor=2)):
        found = set(re.findall(r"\blength=(\d+)", str(jax.make_jaxpr(run)(*arguments(*shape)))))
        results = jax.jit(run)(*arguments(*shape))
    assert found == ({str(num_chunks - 1)} if num_chunks > 1 else set())  # the first is outside the loop
    jax.tree.map(close, results, wanted(*shape))


@pytest.mark.parametrize("sizes", [dict(fsdp=2), dict(data=2, fsdp=2), dict(data=2, tensor=2)], ids=str)
def test_three_sequences_on_meshes_that_split_two(sizes, make_test_mesh):
    with jax.set_mesh(make_test_mesh(**sizes)):
        results = jax.jit(all_variants(ours))(*arguments(3, 5))
    jax.tree.map(close, results, wanted(3, 5))


@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("op", [ours, jax.value_and_grad(ours, (0, 1))], ids=["loss", "gradients"])
def test_memory_is_that_of_a_chunk_whatever_the_number_of_tokens(op, length, make_test_mesh):
    vocab, chunk_bytes = 4096, 2**19
    shapes = (B, length, D), (D, vocab), (B, length), (B, length)
    dtypes = jnp.float32, jnp.float32, jnp.int32, jnp.float32
    arrays = [jax.ShapeDtypeStruct(*of) for of in zip(shapes, dtypes, strict=True)]
    op = functools.partial(op, max_chunk_bytes=chunk_bytes, vocab_size=vocab, **VARIANTS["z-loss and label smoothing"])
    with jax.set_mesh(make_test_mesh()):
        used = jax.jit(op).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    gradients = 4 * (B * length * D + D * vocab)
    # Logits and what comes of them; the gradients once as sums and once as results. All logits: 4 and 32 MiB.
    assert used < 2.1 * chunk_bytes + 2 * gradients


def test_a_frozen_head_costs_no_gradient():
    def program(of: int | tuple[int, ...]):
        return jax.jit(jax.grad(functools.partial(ours, max_chunk_bytes=512), of)).lower(*arguments()).compile()

    frozen, whole = program(0), program((0, 1))
    np.testing.assert_array_equal(frozen(*arguments()), whole(*arguments())[0])
    flops = [found.cost_analysis()["flops"] for found in (frozen, whole)]
    assert flops[0] < 0.75 * flops[1]  # two products instead of three


def test_an_fp8_output_layer_multiplies_rounded_operands():
    """Loss and gradients, from the definition; the rounding itself is tested in tests/quantization/test_formats.py."""
    x, head, labels, weights = arguments()
    x, labels, weights = x.reshape(-1, D), labels.ravel(), weights.ravel()

    def rounded(name, array):
        return np.float64(quantize(jnp.asarray(array), getattr(FORMATS["fp8"], name), (0,)).factor(jnp.float32))

    x8, head8 = rounded("input", x), rounded("weight", head)
    logits = x8 @ head8
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    target = np.arange(V) == labels[:, None]
    d_logits8 = rounded("gradient", ((probabilities - target) * weights[:, None]).astype(np.float32))
    loss = -np.sum(np.log(np.where(target, probabilities, 1)).sum(1) * weights)
    run = jax.jit(jax.value_and_grad(functools.partial(ours, recipe="fp8"), (0, 1)))
    found = run(*arguments())
    expected = (loss, ((d_logits8 @ head8.T).reshape(B, T, D), x8.T @ d_logits8))
    jax.tree.map(close, found, expected)


# Relative errors of the gradients, as in test_low_precision.py.
ERRORS = {"fp8_rowwise": 0.06, "nvfp4": 0.3}


def test_an_output_layer_in_any_format_is_as_exact_as_the_format(make_test_mesh):
    """On a mesh, and in chunks: each device and chunk has its own scales."""

    def run(*arguments):
        given = {recipe: dict(recipe=recipe, max_chunk_bytes=512) for recipe in ERRORS}
        return {
            recipe: jax.value_and_grad(functools.partial(ours, **options), (0, 1))(*arguments)
            for recipe, options in given.items()
        }

    exact, exact_gradients = wanted()["plain"]
    with jax.set_mesh(make_test_mesh(data=2, fsdp=2, tensor=2)):
        results = jax.jit(run)(*arguments())
    for recipe, (loss, gradients) in results.items():
        np.testing.assert_allclose(loss, exact, rtol=ERRORS[recipe])
        for got, want in zip(gradients, exact_gradients, strict=True):
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert ERRORS[recipe] / 10 < error < ERRORS[recipe], (recipe, error)


def test_chunks_change_nothing_without_gradients(make_test_mesh):
    """The forward pass alone, as in evaluation."""
    with jax.set_mesh(make_test_mesh(tensor=2, context=2)):
        for chunk in CHUNKS.values():
            loss = jax.jit(functools.partial(ours, **VARIANTS["z-loss and label smoothing"], **chunk))(*arguments())
            close(loss, wanted()["z-loss and label smoothing"][0])


def test_float16_gradients_survive_small_weights_and_large_loss_scales(make_test_mesh):
    """Weights of one in a million tokens are no normal numbers of float16, and neither is a scale of 2^20."""
    x, head, labels, weights = arguments()
    x = x.astype(np.float16).astype(np.float32)
    head = (head / 8).astype(np.float16).astype(np.float32)
    weights = weights * np.float32(1e-6 * weights.size)
    scale = np.float32(2**20)

    def of(op):
        return jax.grad(lambda x, head: scale * op(x, head, labels, weights, vocab_size=TOKENS), (0, 1))

    with jax.set_mesh(make_test_mesh()):
        d_x, d_head = jax.jit(of(lambda x, *rest, **options: ours(x.astype(np.float16), *rest, **options)))(x, head)
    want_x, want_head = of(formula)(x, head)
    # Roundings of 2^-11: of the gradients of the logits, and of the result.
    np.testing.assert_allclose(d_x, want_x, rtol=0, atol=2e-3 * np.abs(want_x).max())
    np.testing.assert_allclose(d_head, want_head, rtol=0, atol=2e-3 * np.abs(want_head).max())


def test_gradients_scale_with_the_loss(make_test_mesh):
    with jax.set_mesh(make_test_mesh(tensor=2, context=2)):
        scaled = jax.jit(all_variants(ours, factor=8.0))(*arguments())
    jax.tree.map(close, jax.tree.map(lambda a: a / 8, scaled), wanted())


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


def test_token_scores_equal_the_formula_on_every_mesh(mesh):
    x, head, labels, _ = arguments()
    labels = np.clip(labels, 0, TOKENS - 1)
    head[:, 3] = head[:, 11] = 3 * head[:, 5]  # equally likely tokens, also on two devices; often the most likely
    options = dict(bias_V=head[0], multiplier=0.7, soft_cap=9.0, vocab_size=TOKENS, max_chunk_bytes=512)
    got = jax.jit(lambda *arrays: token_scores(*arrays, **options))(x, head, labels)
    products = np.einsum("btd,dv->btv", x.astype(np.float64), head[:, :TOKENS])
    logits = 9.0 * np.tanh(0.7 * (products + head[0, :TOKENS]) / 9.0)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    # float32 logits of up to 9 that lose a few times 2^-24 of that
    np.testing.assert_allclose(got.log_probs, np.take_along_axis(log_probs, labels[..., None], 2)[..., 0], atol=1e-5)
    np.testing.assert_array_equal(got.top, log_probs.argmax(-1))
    assert (np.asarray(got.top) == 3).any()
    assert not (np.asarray(got.top) == 11).any()


def test_gradients_of_log_probabilities_and_entropies_equal_the_formula_on_every_mesh(mesh):
    """Of a sum with a factor for each token, as policies and preferences have; with a bias, a multiplier and a cap."""
    x, head, labels, factors = arguments()
    labels = np.clip(labels, 0, TOKENS - 1)
    bias = head[0].copy()
    entropy_factors = np.flip(factors, 1).copy()
    options = dict(multiplier=0.7, soft_cap=9.0, vocab_size=TOKENS, entropy=True, top_k=3, max_chunk_bytes=512)

    def total(x, head, bias):
        scores = token_scores(x, head, labels, bias_V=bias, **options)
        return jnp.sum(factors * scores.log_probs + entropy_factors * scores.entropy), scores

    (_, scores), gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(x, head, bias)
    x64, head64 = x.astype(np.float64), head[:, :TOKENS].astype(np.float64)
    logits = 9.0 * np.tanh(0.7 * (np.einsum("btd,dv->btv", x64, head64) + bias[:TOKENS]) / 9.0)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    probs = np.exp(log_probs)
    entropy = -(probs * log_probs).sum(-1)
    np.testing.assert_allclose(scores.entropy, entropy, atol=1e-5)
    np.testing.assert_allclose(scores.top_k.log_probs, -np.sort(-log_probs, -1)[..., :3], atol=1e-5)
    np.testing.assert_array_equal(scores.top_k.ids, np.argsort(-log_probs, -1, kind="stable")[..., :3])
    d_logits = factors[..., None] * (np.eye(TOKENS)[labels] - probs)
    d_logits -= entropy_factors[..., None] * probs * (log_probs + entropy[..., None])
    d_logits *= 0.7 * (1 - (logits / 9.0) ** 2)
    wanted_gradients = (
        np.einsum("btv,dv->btd", d_logits, head64),
        np.einsum("btd,btv->dv", x64, d_logits),
        d_logits.sum((0, 1)),
    )
    for found, expected in zip(gradients, wanted_gradients, strict=True):
        found = np.asarray(found)[..., : expected.shape[-1]]
        np.testing.assert_allclose(found, expected, atol=2e-6 * np.abs(expected).max() * TOKENS)  # float32 sums


def test_logits_are_rounded_to_bfloat16_as_an_engine_rounds_them():
    x, head, labels, _ = arguments()
    labels = np.clip(labels, 0, TOKENS - 1)
    x, head = (jnp.asarray(a, jnp.bfloat16) for a in (x, head))
    found = token_scores(x, head, labels, vocab_size=TOKENS, logits_dtype="bfloat16").log_probs
    logits = jnp.einsum("btd,dv->btv", x, head)[..., :TOKENS].astype(jnp.float32)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], 2)[..., 0]
    np.testing.assert_allclose(found, expected, atol=1e-6)


# ----------------------------------------------------------------------------- the kernel

FOR_KERNEL = {"z_loss": 1e-2, "multiplier": 0.7, "vocab_size": TOKENS}


@pytest.fixture
def stand_in(monkeypatch):
    """The kernel needs a Hopper GPU: here its reference stands for it. -> the shapes it was given. Lines of 24 columns,
    so the head gets 16 more."""
    shapes = []

    def value_and_gradient(products, *rest, **static):
        shapes.append(products.shape)
        return reference(products, *rest, **static)

    monkeypatch.setattr(compat, "mosaic_problem", lambda: "")
    monkeypatch.setattr(kernel, "LINE", 24)
    monkeypatch.setattr(kernel, "problem", lambda *_: "")
    monkeypatch.setattr(kernel, "value_and_gradient", value_and_gradient)
    return shapes


@pytest.mark.parametrize("sizes", [{}, {"data": 2, "fsdp": 2}, {"context": 2, "expert": 2}], ids=str)
def test_the_kernel_takes_the_place_of_the_formula(sizes, stand_in, make_test_mesh):
    x, head, labels, weights = arguments()
    loss_and_gradients = {
        name: jax.value_and_grad(functools.partial(op, **FOR_KERNEL), (0, 1))
        for name, op in {"ours": functools.partial(ours, max_chunk_bytes=512), "formula": formula}.items()
    }
    with jax.set_mesh(make_test_mesh(**sizes)):
        found = jax.jit(loss_and_gradients["ours"])(x, head, labels, weights)
    jax.tree.map(close, found, loss_and_gradients["formula"](x, head, labels, weights))
    assert set(stand_in) == {(4, 48)}  # 512 bytes of logits, without the padding


@pytest.mark.parametrize("kind", ["frozen head", "fp8", "log-probabilities"])
def test_other_losses_are_the_same_with_the_kernel(kind, stand_in, make_test_mesh, monkeypatch):
    x, head, labels, weights = arguments()

    def run(x, head):
        if kind == "log-probabilities":  # as policies have them: factors of both signs
            scores = token_scores(x, head, np.clip(labels, 0, TOKENS - 1), vocab_size=TOKENS, max_chunk_bytes=512)
            return jnp.sum((weights - 0.01) * scores.log_probs)
        return ours(x, head, labels, weights, recipe="fp8" if kind == "fp8" else None, **FOR_KERNEL)

    argnums = 0 if kind == "frozen head" else (0, 1)
    with jax.set_mesh(make_test_mesh()):
        found = jax.jit(jax.value_and_grad(run, argnums))(x, head)
        assert stand_in
        monkeypatch.setattr(kernel, "problem", lambda *_: "not wanted here")
        wanted = jax.jit(jax.value_and_grad(lambda *inputs: run(*inputs), argnums))(x, head)
    jax.tree.map(close, found, wanted)


def test_labels_that_are_no_tokens_change_nothing_with_the_kernel(stand_in, make_test_mesh, monkeypatch):
    x, head, labels, weights = arguments()
    labels[1, :4] = -1, TOKENS, V - 1, V + 5
    run = functools.partial(ours, labels=labels, weights=weights, **FOR_KERNEL)
    with jax.set_mesh(make_test_mesh()):
        found = jax.jit(jax.value_and_grad(lambda *inputs: run(*inputs), (0, 1)))(x, head)
        monkeypatch.setattr(kernel, "problem", lambda *_: "not wanted here")
        wanted = jax.jit(jax.value_and_grad(run, (0, 1)))(x, head)
    jax.tree.map(close, found, wanted)


def test_the_choice_is_logged_with_its_reason(stand_in, make_test_mesh, caplog):
    caplog.set_level(logging.INFO, "megajax")
    log_choice.cache_clear()
    x, head, labels, _ = arguments()
    with jax.set_mesh(make_test_mesh()):
        for options in ({}, {"label_smoothing": 0.1}, {"biased": True}, {"soft_cap": 1.5}):
            jax.make_jaxpr(jax.grad(functools.partial(ours, **options)))(*arguments())
        entropies = functools.partial(token_scores, vocab_size=V, entropy=True)
        jax.make_jaxpr(jax.grad(lambda x: entropies(x, head, np.clip(labels, 0, V - 1)).entropy.sum()))(x)
    with jax.set_mesh(make_test_mesh(tensor=2)):
        jax.make_jaxpr(jax.grad(ours))(*arguments())
    log_choice.cache_clear()
    assert [record.getMessage() for record in caplog.records] == [
        "cross-entropy: one kernel (pallas_kernels/cross_entropy.py)",
        "cross-entropy: XLA (label smoothing)",
        "cross-entropy: XLA (a bias)",
        "cross-entropy: XLA (a soft cap)",
        "cross-entropy: XLA (entropies)",
        "cross-entropy: XLA (a vocabulary in 2 parts)",
    ]


@pytest.mark.parametrize(
    ("width", "dtype", "reason"),
    [
        (4096, jnp.bfloat16, ""),
        (50304, jnp.float16, ""),
        (50304, jnp.float32, "dtype float32"),
        (50257, jnp.bfloat16, "width 50257"),
        (2048, jnp.bfloat16, "width 2048"),
    ],
)
def test_kernel_says_why_it_refuses(width, dtype, reason):
    assert kernel.problem(width, jnp.dtype(dtype)) == reason


# Two blocks, of three and two rows, or one. Steps of 1,024 columns, of which the last has the part of one warpgroup, or
# half of it; all three fit into shared memory, or two, or one.
@pytest.mark.parametrize(("slots", "rows", "width"), [(3, 5, 2304), (2, 1, 2304), (1, 5, 2304), (1, 3, 2176)])
def test_interpreted_kernel_equals_the_formula(slots, rows, width, interpreter, monkeypatch):
    # Two warpgroups write the same numbers where the last part begins before its half.
    interpreter = dataclasses.replace(interpreter, detect_races=width % 256 == 0)
    monkeypatch.setattr(plgpu, "load", lambda ref, index=(), *, layout, optimized=True: ref[index])
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
    iota = lambda dtype, shape, dim, layout: jax.lax.broadcasted_iota(dtype, shape, dim)
    monkeypatch.setattr(plgpu, "broadcasted_iota", iota)
    monkeypatch.setattr(kernel, "NUM_SMS", 2)
    monkeypatch.setattr(kernel, "LINES", 2)
    monkeypatch.setattr(kernel, "STEP", 1024)
    monkeypatch.setattr(kernel, "SLOTS", slots)
    vocab_size = width - 76
    rng = np.random.default_rng(0)
    products = 3 * rng.standard_normal((rows, width)).astype(np.float32)
    products[:, vocab_size:] = 50  # padding
    labels = np.array([vocab_size - 1, 1950, 0, -1, 1023], np.int32)[:rows]
    weights = rng.random(rows).astype(np.float32)
    weights[4:] = 0
    static = dict(vocab_size=vocab_size, multiplier=0.7, z_loss=1e-2)
    run = kernel.value_and_gradient.__wrapped__  # jit would not see other constants
    lse, gradient = run(products, labels, weights, dtype=jnp.float16, interpret=interpreter, **static)
    wanted_lse, wanted_gradient = reference(products, labels, weights, dtype=jnp.float32, **static)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6)
    # Rounded to 11 bits, or to a multiple of 2^-24; some numbers to the other neighbour.
    np.testing.assert_allclose(gradient, wanted_gradient, rtol=2**-10, atol=2**-24)
    np.testing.assert_array_equal(gradient[:, vocab_size:], 0)


PROGRAM = """
import functools
import jax, jax.numpy as jnp
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.cross_entropy import cross_entropy
from megajax.planning.plan import devices_without_gpu, plan_device

mesh = make_mesh(MeshConfig(fsdp=2), devices_without_gpu(2, plan_device("h100")))
for vocabulary in (4096, 50257, 151936):
    shapes = (2, 1024, 256), (256, vocabulary), (2, 1024), (2, 1024)
    dtypes = jnp.bfloat16, jnp.float32, jnp.int32, jnp.float32
    arrays = [jax.ShapeDtypeStruct(*of) for of in zip(shapes, dtypes)]
    loss = functools.partial(cross_entropy, vocab_size=vocabulary, z_loss=0.0, label_smoothing=0.0)
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(loss, (0, 1))).lower(*arrays).compile().as_text()
    print(vocabulary, text.count('custom_call_target="mosaic_gpu'))
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper_on_a_mesh(compile_for_hopper):
    assert [line.split()[-1] for line in compile_for_hopper(PROGRAM)] == ["1", "1", "1"]
