"""Sums and gathers of several Hopper GPUs in mailboxes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.inference.device.compiler_options import IN_GRAPHS, WHOLE_LOOP, WITH_MAILBOXES
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.tokens.sampling import Sampling, TokenLogprobs
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.current import exchanging
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops.mailboxes import Mailboxes, once_all_are_ready, summed_matmul
from megajax.precision import PrecisionConfig
from megajax.quantization.weights import QuantizedWeight
from pallas_kernels.mailboxes import FEW_VECTORS, VECTOR_BYTES, all_gather, all_reduce

N = 4 if jax.device_count() >= 4 else 2
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 GPUs")]

ROW_BYTES = 2 * 4096
MOST_FEW = FEW_VECTORS * VECTOR_BYTES // ROW_BYTES
# (rows, width). Of 4,104 numbers the last block has less than the others.
SHAPES = ((5, 8), (2, 4096), (7, 4104), (MOST_FEW, 4096), (MOST_FEW + 1, 4104), (256, 4096), (1001, 4096), (2047, 4104))


@functools.cache
def boxes():
    mesh = make_mesh(MeshConfig(tensor=N), jax.devices()[:N])
    return mesh, Mailboxes(mesh)


@functools.cache
def program(rows: int, width: int):
    """What sums the rows of all GPUs in a loop, and gathers what they had last."""
    mesh, found = boxes()

    def body(x, words, steps):
        rank = lax.axis_index("tensor").astype(jnp.uint32)
        steps = once_all_are_ready(steps, words)

        def step(carry):
            number, x = carry
            total = all_reduce(x[0], rank, words)
            factor = 0.5 + 0.25 * rank.astype(jnp.float32)
            return number + 1, (total.astype(jnp.float32) * factor)[None].astype(x.dtype)

        x = lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.int32(0), x))[1]
        return x, all_gather(x[0], rank, words)[None]

    over = P("tensor")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(over, P(), P()), out_specs=(over, over), check_vma=False)
    x = jax.random.normal(jax.random.key(rows), (N, rows, width), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, over))
    words = jax.device_put(found.addresses, NamedSharding(mesh, P()))
    options = {IN_GRAPHS: WHOLE_LOOP} | WITH_MAILBOXES
    compiled = jax.jit(mapped).lower(x, words, np.int32(1)).compile(compiler_options=options)
    return functools.partial(compiled, x, words), np.asarray(x, np.float32)


def wanted(x: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        total = x[0]
        for each in x[1:]:
            total = total + each
        total = np.asarray(jnp.asarray(total).astype(jnp.bfloat16), np.float32)
        x = np.stack([total * np.float32(0.5 + 0.25 * rank) for rank in range(N)])
        x = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
    return x


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_gathers_are_exact(shape):
    run, x = program(*shape)
    found, gathered = run(np.int32(3))
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted(x, 3))
    for of_gpu in np.asarray(gathered, np.float32):
        np.testing.assert_array_equal(of_gpu, np.concatenate(wanted(x, 3), -1))


def test_many_sums_of_different_sizes_in_sequence():
    """The host waits for none of them, so one GPU may be ahead; and slots and flags are used again and again."""
    rng = np.random.default_rng(0)
    expected = [wanted(program(*shape)[1], 2) for shape in SHAPES]
    for _ in range(50):
        chosen = rng.choice(len(SHAPES), 8)
        found = [program(*SHAPES[number])[0](np.int32(2))[0] for number in chosen]
        for number, each in zip(chosen, found, strict=True):
            np.testing.assert_array_equal(np.asarray(each, np.float32), expected[number])


@pytest.mark.parametrize("rows", [1, 32, 33])
def test_products_in_four_bits_are_summed(rows):
    mesh, found = boxes()
    rng = np.random.default_rng(rows)
    num_groups = 2 * N
    levels = jnp.asarray(rng.integers(0, 256, (256, 64 * num_groups), np.uint8))
    scale = jnp.asarray(rng.uniform(0.01, 0.03, (num_groups, 256)), jnp.float16)
    weight = QuantizedWeight(levels, scale, None, "unchanged", jnp.full(scale.shape, -2, jnp.int8))
    x = jnp.asarray(rng.standard_normal((rows, 128 * num_groups)), jnp.bfloat16)

    def product(x, weight, words):
        x = once_all_are_ready(x, words)
        with exchanging(words):
            return summed_matmul(x, weight, 1, ("mlp", "embed"))

    with jax.set_mesh(mesh):
        y = jax.jit(product)(x, weight, found.addresses)
    wanted = np.asarray(x, np.float32) @ np.asarray(weight.matrix())
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, atol=2**-6 * np.abs(wanted).max())


DENSE = DecoderConfig(num_layers=3, embed_dim=512, num_heads=16, head_dim=64, num_kv_heads=4, mlp_dim=1024,
                      vocab_size=4000, position="rope", activation="swiglu", biases=())  # fmt: skip
MIXTURE = dataclasses.replace(DENSE, moe=MoeConfig(num_experts=16, expert_dim=512, shared_dim=512))
SERVING = ServingConfig(max_rows=8, max_batch_tokens=256, num_pages=64)


@pytest.mark.parametrize(("config", "weight_dtype"), [(DENSE, "compute"), (DENSE, "float8"), (MIXTURE, "compute")])
def test_an_engine_on_several_gpus_decodes_in_a_graph_what_one_gpu_does(config, weight_dtype):
    """Log-probabilities of the first two tokens, while they are the same: in bfloat16 sums of parts are rounded
    otherwise, and two tokens may be equally likely. The second one is generated by a decoding step. In a mixture the
    routed and the shared experts are summed apart."""
    model = Model(config, PrecisionConfig(compute="bfloat16"))
    prompts = [list(range(5 * i, 5 * i + 10 + i)) for i in range(8)]
    serving = dataclasses.replace(SERVING, weight_dtype=weight_dtype)

    def found(num_gpus: int) -> list[list[TokenLogprobs]]:
        mesh = make_mesh(MeshConfig(tensor=num_gpus), jax.devices()[:num_gpus])
        engine = Engine(model, model.init(0, mesh), mesh, None, serving=serving)
        engine.warm_up()
        assert engine.executor.asks_for_graphs
        sampling = Sampling(max_tokens=4, temperature=0.0, logprobs=20)
        requests = [engine.submit(prompt, sampling) for prompt in prompts]
        logprobs = {request: [] for request in requests}
        while engine.has_work:
            for output in engine.step():
                logprobs[output.request] += output.logprobs
        return [logprobs[request] for request in requests]

    num_second = 0
    for of_one, of_several in zip(found(1), found(N), strict=True):
        for number in range(2):
            one = dict(of_one[number].top)
            several = dict(of_several[number].top)
            both = one.keys() & several.keys()
            assert len(both) >= 15
            np.testing.assert_allclose([one[t] for t in both], [several[t] for t in both], atol=0.08)
            if of_one[0].token != of_several[0].token:
                break
            num_second += number
    assert num_second >= len(prompts) // 2
