"""Recurrent layers and hybrids: the same on every mesh, resumed, and token by token from a cache."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs import recipes
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine, Sampling, ServingConfig
from megajax.layers.attention.kv_cache import Places, PoolSizes
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.execution import ExecutionConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.overrides import override
from megajax.parallel.context import sequence_order
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.batches import abstract_batch
from megajax.training.config import LaunchConfig, TrainingConfig
from runs import run_of

T, STEPS, VOCAB = 32, 3, 64
RECIPES = ("mamba2_tiny", "hybrid_tiny", "delta_net_tiny", "mamba2_130m", "mamba2_2p7b", "hybrid_8b")
MAMBA = MambaConfig(head_dim=4, state_dim=8, num_groups=2, chunk=8)
DELTA_NET = DeltaNetConfig(num_value_heads=4, value_head_dim=4, num_key_heads=2, key_head_dim=8, chunk=8)
HYBRID = HybridConfig(
    num_layers=4, pattern="M*G-", mamba=MAMBA, delta_net=DELTA_NET, embed_dim=16, num_heads=4, num_kv_heads=2,
    mlp_dim=32, vocab_size=VOCAB, position="none", norm="rmsnorm", biases=(), activation="squared_relu", init_std=0.2,
)  # fmt: skip


def config_of(run_dir, mesh=MeshConfig(), model=HYBRID, execution=ExecutionConfig(), **training) -> Config:
    return Config(
        model=model,
        mesh=mesh,
        execution=execution,
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="mock", tokenizer="null:63", cache_dir=str(run_dir.parent / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        training=TrainingConfig(**dict(
            steps=STEPS, global_batch_size=8, sequence_length=T, log_every_steps=1, eval_every_steps=3, eval_steps=1,
        ) | training),
        checkpoint=CheckpointConfig(every_steps=1),
        run_dir=str(run_dir),
    )  # fmt: skip


def losses(lines: list[dict]) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> (config, losses) of a run on one device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        config = config_of(tmp_path_factory.mktemp("hybrid") / "run")
        return config, losses(run_of(config, monkeypatch))


@pytest.mark.slow
def test_hybrid_resumes_bit_for_bit(trained, tmp_path, monkeypatch):
    _, wanted = trained
    assert len(wanted) == STEPS + 1 and wanted[-1] < wanted[0]
    config = config_of(tmp_path / "run")
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    assert losses(run_of(config, monkeypatch)) == wanted


def loss_and_gradients(model: Model, sizes: dict[str, int]):
    """Of packed documents."""
    mesh = make_mesh(MeshConfig(**sizes), jax.devices()[: math.prod(sizes.values())])
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, VOCAB, (2, T), np.int32) for name in ("tokens", "labels")}
    batch["positions"] = np.broadcast_to(np.arange(T, dtype=np.int32), (2, T))
    batch["loss_weights"] = rng.random((2, T), np.float32)
    batch["segment_ids"] = np.sort(rng.integers(0, 3, (2, T), np.int32), 1)
    order = sequence_order(T, sizes.get("context", 1), "ring")
    sharding = NamedSharding(mesh, P(None, "context"))
    batch = {name: jax.device_put(array[:, order], sharding) for name, array in batch.items()}
    weights = model.init(0, mesh)
    with jax.set_mesh(mesh):
        return jax.device_get(jax.jit(jax.value_and_grad(lambda w: model.loss(w, batch, Language()).total()))(weights))


@pytest.mark.parametrize("letter", [pytest.param("M", marks=pytest.mark.slow), "G"])
def test_gradients_on_a_mesh_are_those_of_one_device(letter):
    model = Model(dataclasses.replace(HYBRID, pattern=letter, num_layers=1), PrecisionConfig(compute="float32"))
    loss, gradients = loss_and_gradients(model, {})
    found_loss, found = loss_and_gradients(model, dict(tensor=2, context=2))
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    for ours, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


ALL_TO_ALL = ExecutionConfig(context_attention="all_to_all")


@pytest.mark.parametrize("mesh, execution", [
    pytest.param(dict(tensor=2, context=2), ExecutionConfig(), marks=pytest.mark.slow),
    pytest.param(dict(pipeline=2, context=2), ExecutionConfig(), marks=pytest.mark.slow),
    pytest.param(dict(data=2, fsdp=2, tensor=2), ExecutionConfig(), marks=pytest.mark.slow),
    pytest.param(dict(context=4), ExecutionConfig(recompute="full", scan_layers=True), marks=pytest.mark.slow),
    pytest.param(dict(context=2, tensor=2), ExecutionConfig(context_attention="all_gather"), marks=pytest.mark.slow),
    pytest.param(dict(context=2, fsdp=2), ALL_TO_ALL, marks=pytest.mark.slow),
    pytest.param(dict(pipeline=2, virtual_stages=2, tensor=2), ExecutionConfig(), marks=pytest.mark.slow),
    pytest.param(dict(pipeline=2, tensor=2, context=2), ExecutionConfig(recompute="selective"),
                 marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_mesh_matches_one_device(mesh, execution, trained, tmp_path, monkeypatch):
    mesh = MeshConfig(**mesh)
    microbatches = dict(microbatch_size=2) if mesh.pipeline > 1 else {}
    lines = run_of(config_of(tmp_path / "run", mesh, execution=execution, **microbatches), monkeypatch)
    np.testing.assert_allclose(losses(lines), trained[1], rtol=1e-5)


@pytest.mark.slow
def test_one_group_is_computed_on_every_device(tmp_path, monkeypatch):
    """As mamba2_2p7b: B and C of a single group, over which the gated norm goes too; and a single head of keys."""
    one = dict(
        mamba=dataclasses.replace(MAMBA, num_groups=1), delta_net=dataclasses.replace(DELTA_NET, num_key_heads=1)
    )
    model = dataclasses.replace(HYBRID, pattern="MG", **one)
    wanted = losses(run_of(config_of(tmp_path / "one" / "run", model=model), monkeypatch))
    mesh = MeshConfig(tensor=2, context=2)
    found = losses(run_of(config_of(tmp_path / "mesh" / "run", mesh, model), monkeypatch))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_layers_of_experts_match_one_device(tmp_path, monkeypatch):
    moe = MoeConfig(num_experts=4, expert_dim=16, router=RouterConfig(top_k=2, aux_loss=0.01))
    model = dataclasses.replace(HYBRID, pattern="ME", num_layers=2, moe=moe, delta_net=DeltaNetConfig())
    wanted = run_of(config_of(tmp_path / "one" / "run", model=model, steps=2, eval_every_steps=0), monkeypatch)
    config = config_of(tmp_path / "mesh" / "run", MeshConfig(expert=2), model, steps=2, eval_every_steps=0)
    found = run_of(config, monkeypatch)
    assert "router_max_load" in wanted[0]
    np.testing.assert_allclose(losses(found), losses(wanted), rtol=1e-5)


def counted(config: HybridConfig) -> int:
    """Parameters by the formula, from the sizes alone; no biases, RMSNorm."""
    D, F, mamba, delta = config.embed_dim, config.width_of_mlp, config.mamba, config.delta_net
    H = mamba.num_heads or 2 * D // mamba.head_dim
    inner, shared = H * mamba.head_dim, 2 * mamba.num_groups * mamba.state_dim
    heads = delta.num_value_heads or 2 * D // delta.value_head_dim
    values, keys = heads * delta.value_head_dim, (delta.num_key_heads or heads) * delta.key_head_dim
    sizes = {
        "G": D * (3 * values + 2 * keys + 2 * heads) + 4 * (values + 2 * keys) + 2 * heads + delta.value_head_dim,
        "M": D * (2 * inner + shared + H) + inner * D + 5 * (inner + shared) + 3 * H + inner,
        "*": 2 * D * (config.num_heads + config.kv_heads) * config.width_of_head,
        "-": (3 if config.activation == "swiglu" else 2) * D * F,
    }
    layers = sum(sizes[config.letter(number)] + D for number in range(config.num_layers))
    return layers + D + config.padded_vocab_size * D * (1 if config.tied_embeddings else 2)


@pytest.mark.parametrize("name", RECIPES)
def test_counted_parameters_equal_the_real_ones_of_every_recipe(name):
    config = recipes()[name]()
    assert counted(config.model) == Model(config.model, config.precision).num_parameters()


# ----------------------------------------------------------------------------- from a cache


@pytest.fixture(scope="module")
def generating():
    """-> (model, weights, logits of these tokens [2, T] without a cache, tokens)."""
    model = Model(HYBRID, PrecisionConfig(compute="float32"), ExecutionConfig())
    weights = model.init(seed=0)
    tokens_BT = np.random.default_rng(0).integers(0, VOCAB, (2, T), np.int32)

    @jax.jit
    def logits(weights, tokens_BT):
        module = model.module(weights)
        batch = batch_of(tokens_BT)
        return module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])

    return model, weights, np.asarray(logits(weights, tokens_BT)), tokens_BT


def batch_of(tokens_BT, positions_BT=None) -> dict:
    places = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32), tokens_BT.shape)
    return {"tokens": tokens_BT, "positions": places if positions_BT is None else positions_BT}


def test_paged_cache_equals_no_cache_at_every_position(generating):
    """Two sequences in rows 2 and 0 of an engine: their prompts in calls that cut them anywhere, then token by token,
    with padding in every call. Row 2 was used by another sequence before."""
    model, weights, wanted, tokens_BT = generating
    page, num_rows = 8, 3
    sizes = PoolSizes(num_pages=2 * T // page, page_size=page, num_rows=num_rows, dtype=jnp.float32)
    caches = model.config.new_pages(sizes, model.execution)
    pages_of = np.arange(2 * T // page, dtype=np.int32).reshape(2, -1)
    row_of = np.array([2, 0])
    padding = (np.int32(2 * T), np.int32(0), np.int32(num_rows))

    @jax.jit
    def extend(weights, caches, tokens_BT, places):
        caches = {name: tuple(cache.at(places) for cache in of_stack) for name, of_stack in caches.items()}
        x, caches = model.module(weights).extend(batch_of(tokens_BT, places.positions_BT), caches)
        return model.module(weights).logits(x), caches

    def call(caches, items, width, *, one_each):
        """items: (sequence, position); the tokens of a call, padded to `width`."""
        slots = [pages_of[s, t // page] * page + t % page for s, t in items]
        arrays = [np.array([value] * width, np.int32) for value in padding]
        tokens, lower, upper = (np.zeros(width, np.int32) for _ in range(3))
        for i, ((s, t), slot) in enumerate(zip(items, slots, strict=True)):
            arrays[0][i], arrays[1][i], arrays[2][i], tokens[i] = slot, t, row_of[s], tokens_BT[s, t]
            lower[i], upper[i] = (0, t + 1) if one_each else (s * T, s * T + t + 1)
        shape = (width, 1) if one_each else (1, width)
        table = np.zeros((width, T // page), np.int32) if one_each else pages_of.reshape(1, -1)
        if one_each:
            table[: len(items)] = [pages_of[s] for s, _ in items]
        shaped = [a.reshape(shape) for a in (*arrays, lower, upper)]
        places = Places(*shaped[:3], table, None if one_each else shaped[3], shaped[4])
        found, caches = extend(weights, caches, tokens.reshape(shape), places)
        found = np.asarray(found).reshape(width, -1)
        for i, (s, t) in enumerate(items):
            np.testing.assert_allclose(found[i], wanted[s, t], rtol=1e-5, atol=1e-5, err_msg=f"{s}, {t}")
        return caches

    caches = call(caches, [(0, t) for t in range(5)], 12, one_each=False)
    caches = call(caches, [(0, t) for t in range(7)] + [(1, t) for t in range(2)], 12, one_each=False)
    caches = call(caches, [(1, 2), *((0, t) for t in range(7, 16))], 12, one_each=False)
    for t in range(3, 12):
        caches = call(caches, [(1, t), (0, t + 13)], 3, one_each=True)
    caches = call(caches, [(1, t) for t in range(12, 24)], 12, one_each=False)
    for states in (caches["layers"][0].states, caches["layers"][2].states):
        assert states.shape[0] == num_rows + 1 and not states[1].any()  # no sequence had this row


@pytest.mark.slow
def test_the_engine_generates_what_the_model_predicts(trained):
    """Prompts longer than a call, and more of them than rows."""
    config, _ = trained
    engine = Engine.from_run(config.run_dir, serving=ServingConfig(max_rows=2, max_batch_tokens=8, page_size=8))
    prompts = [[5, 17, 3], [1], list(range(20, 38)), [4] * 11]
    found = engine.generate_tokens(prompts, Sampling(max_tokens=6, temperature=0.0))
    model = engine.model

    @jax.jit
    def logits(weights, tokens_BT):
        module = model.module(weights)
        batch = batch_of(tokens_BT)
        return module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])

    for prompt, new in zip(prompts, found, strict=True):
        tokens = np.zeros((1, T), np.int32)
        tokens[0, : len(prompt) + len(new)] = [*prompt, *new]
        predicted = np.argmax(logits(engine.params, tokens)[0, :, :63], -1)
        assert new == predicted[len(prompt) - 1 : len(prompt) + len(new) - 1].tolist()


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("change, message", [
    ("--model.pattern=M|M*", r"pattern=M.M\*: pipeline stages .*use --model.pattern='MM\*' --mesh.pipeline_layout='t"),
    ("--model.pattern=MX", r"pattern='MX' must be letters of layers: M \(Mamba-2\), G"),
    ("--model.pattern=", "pattern='' must be letters"),
    ("--model.pattern=M*M", "num_layers=4 is not a multiple of the 3 letters of model.pattern; use .*num_layers=6"),
    ("--model.pattern=MGE*", "moe.num_experts=None and model.pattern=MGE. contradict"),
    ("--model.pattern=*-", "model.mamba: head_dim, .* set, but model.pattern=.- has no M"),
    ("--model.pattern=M*", "delta_net: num_value_heads, .* no G; use --model.delta_net.num_value_heads=None "),
    ("--model.delta_net.num_key_heads=3", "delta_net.num_key_heads=3 does not divide the 4 .*num_key_heads=1"),
    ("--model.delta_net.value_head_dim=3 --model.delta_net.num_value_heads=None", "value_head_dim=3 does not divide 2"),
    ("--mesh.tensor=4 --model.mamba.num_groups=4 --model.num_kv_heads=4", "delta_net.num_key_heads=2 is not divisible"),
    ("--model.mtp_layers=1", "mtp_layers=1 is not supported by model.kind=hybrid.*use --model.mtp_layers=0"),
    ("--model.norm_placement=post", "norm_placement=post is not supported .*use --model.norm_placement=pre"),
    ("--model.mamba.num_groups=3", "mamba.num_groups=3 does not divide the 8 heads .*num_groups=1"),
    ("--model.mamba.dt_min=1 --model.mamba.dt_max=0.5", "mamba.dt_max=0.5 must be more than model.mamba.dt_min=1.0"),
    ("--model.mamba.head_dim=3", "mamba.head_dim=3 does not divide 2 . model.embed_dim=32"),
    ("--mesh.tensor=4", "mamba.num_groups=2 is not divisible by mesh.tensor=4; use --mesh.tensor=2"),
    ("--mesh.context=8", "sequence_length=32 cannot be split into the 16 equal pieces .*use .*sequence_length=48"),
    ("--execution.recompute=core", "'core' is unknown; .*activation, mamba, .*delta_net"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        override(config_of(tmp_path / "run"), change.split()).check()


def test_the_program_of_mamba2_tiny_does_not_grow_with_its_layers():
    """Unrolled, it takes minutes to compile on a busy machine."""

    def num_lines(num_layers: int) -> int:
        config = override(recipes()["mamba2_tiny"](), {"model.num_layers": num_layers, "data.source": "mock"})
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        program = config.make_program(mesh)
        batch = config.training.schedule(config.mesh)(0)
        arrays = abstract_batch(program.arrays(config.training), batch, mesh)
        with jax.set_mesh(mesh):
            lowered = program.train_step(config.training).lower(program.abstract_state, arrays, np.float32(0))
        return lowered.as_text().count("\n")

    assert num_lines(7) < 1.2 * num_lines(2)
