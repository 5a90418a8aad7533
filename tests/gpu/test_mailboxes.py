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

from megajax.inference.device import executor
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.ops.mailboxes import Mailboxes
from megajax.precision import PrecisionConfig
from pallas_kernels.mailboxes import SLOT_BYTES, all_gather, all_reduce

N = 4 if jax.device_count() >= 4 else 2
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 GPUs")]

ROWS = 2, 64, 256, 300, 4 * SLOT_BYTES // 8192 + 1  # of 4,096 numbers; the last ones need two and five rounds
WIDTH = 4096


@functools.cache
def boxes():
    mesh = make_mesh(MeshConfig(tensor=N), jax.devices()[:N])
    return mesh, Mailboxes(mesh)


@functools.cache
def program(rows: int):
    """What sums the rows of all GPUs in a loop, and gathers what they had last."""
    mesh, found = boxes()

    def body(x, words, steps):
        rank = lax.axis_index("tensor").astype(jnp.uint32)

        def step(carry):
            number, x = carry
            total = all_reduce(x[0], rank, words)
            return number + 1, (total.astype(jnp.float32) * (0.5 + 0.25 * rank))[None].astype(x.dtype)

        x = lax.while_loop(lambda carry: carry[0] < steps, step, (jnp.int32(0), x))[1]
        return x, all_gather(x[0], rank, words)[None]

    over = P("tensor")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(over, P(), P()), out_specs=(over, over), check_vma=False)
    x = jax.random.normal(jax.random.key(rows), (N, rows, WIDTH), jnp.bfloat16)
    x = jax.device_put(x, NamedSharding(mesh, over))
    words = jax.device_put(found.words, NamedSharding(mesh, P()))
    compiled = (
        jax.jit(mapped).lower(x, words, np.int32(1)).compile(compiler_options={executor.IN_GRAPHS: executor.WHOLE_LOOP})
    )
    jax.block_until_ready(compiled(x, words, np.int32(0)))
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


@pytest.mark.parametrize("rows", ROWS)
def test_sums_and_gathers_are_exact(rows):
    run, x = program(rows)
    found, gathered = run(np.int32(3))
    np.testing.assert_array_equal(np.asarray(found, np.float32), wanted(x, 3))
    for of_gpu in np.asarray(gathered, np.float32):
        np.testing.assert_array_equal(of_gpu, np.concatenate(wanted(x, 3), -1))


def test_many_sums_of_different_sizes_in_sequence():
    """No GPU waits for another one here, so one may be ahead; and slots are used again and again."""
    rng = np.random.default_rng(0)
    expected = {rows: wanted(program(rows)[1], 2) for rows in ROWS}
    for _ in range(50):
        chosen = rng.choice(ROWS, 8)
        found = [program(rows)[0](np.int32(2))[0] for rows in chosen]
        for rows, each in zip(chosen, found, strict=True):
            np.testing.assert_array_equal(np.asarray(each, np.float32), expected[rows])


CONFIG = DecoderConfig(num_layers=3, embed_dim=512, num_heads=16, head_dim=64, num_kv_heads=4, mlp_dim=1024,
                       vocab_size=4000, position="rope", activation="swiglu", biases=())  # fmt: skip
SERVING = ServingConfig(max_rows=8, max_batch_tokens=256, num_pages=64)


@pytest.mark.parametrize("weight_dtype", ["compute", "float8"])
def test_an_engine_on_several_gpus_decodes_in_a_graph_what_one_gpu_does(weight_dtype):
    """Log-probabilities of the first tokens: in bfloat16 sums of parts are rounded otherwise."""
    model = Model(CONFIG, PrecisionConfig(compute="bfloat16"))
    prompts = [list(range(5 * i, 5 * i + 10 + i)) for i in range(8)]

    serving = dataclasses.replace(SERVING, weight_dtype=weight_dtype)

    def found(num_gpus: int) -> list[list[dict[int, float]]]:
        mesh = make_mesh(MeshConfig(tensor=num_gpus), jax.devices()[:num_gpus])
        engine = Engine(model, model.init(0, mesh), mesh, None, serving=serving)
        engine.warm_up()
        assert engine.executor.asks_for_graphs
        sampling = Sampling(max_tokens=4, temperature=0.0, logprobs=20)
        requests = [engine.submit(prompt, sampling) for prompt in prompts]
        tops = {request: [] for request in requests}
        while engine.has_work:
            for output in engine.step():
                tops[output.request] += [dict(each.top) for each in output.logprobs]
        return [tops[request] for request in requests]

    for of_one, of_several in zip(found(1), found(N), strict=True):
        for one, several in zip(of_one[:2], of_several[:2], strict=True):
            both = one.keys() & several.keys()
            assert len(both) > 10
            np.testing.assert_allclose([one[t] for t in both], [several[t] for t in both], atol=0.08)
