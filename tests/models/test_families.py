"""A family of models, or a kind of layer, arrives in a file of its own: two toys train, plan, resume and generate.

Both are defined here alone. One has a recurrent layer, with a state instead of keys and values, a variable that no
gradient reaches, a term of the loss and a metric; the other has two stacks.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import configs
from megajax import run
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.loader import IndexedSource
from megajax.inference.engine import Engine, Sampling, ServingConfig
from megajax.layers.attention.kv_cache import Places
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.layer import Activation, Flops, Saved, Terms
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.stack import Stack
from megajax.layers.transformer import TransformerLayerConfig
from megajax.mesh import compat
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import constrain
from megajax.models.decoder import DecoderConfig
from megajax.models.interface import MODELS, AnyModule, BatchArray, ModelConfig, split_key
from megajax.models.model import Model
from megajax.ops.attention_mask import CAUSAL, window
from megajax.ops.embedding import embed
from megajax.optim.optimizer import Optimizer
from megajax.overrides import override
from megajax.parameters import Structure, observe, variable, weight
from megajax.planning.plan import plan_device, plan_rows
from megajax.precision import PrecisionConfig
from megajax.training.batches import BatchPlacer, device_batches
from megajax.training.config import LaunchConfig
from megajax.training.reporting.console import Console
from megajax.weights import start_from
from runs import run_of, toy_config

T, STEPS = 16, 4
NORM = NormConfig("rmsnorm", 1e-5, zero_centered=False, bias=False)

# ----------------------------------------------------------------------------- a recurrent layer among others


@dataclasses.dataclass(frozen=True)
class RecurrentConfig:
    """h_t = a_t h_(t-1) + (1 - a_t) v_t, with a_t and v_t from x_t; x + out(h)."""

    embed_dim: int
    saved: Saved | None = None
    kind = "recurrent"
    modules = {"gates": ("gates",)}
    reach = None

    def build(self, rngs):
        return Recurrent(self.embed_dim, rngs=rngs)

    def saving_by_name(self):
        return dataclasses.replace(self, saved=self.saved or Saved(("input", "gates"), ()))

    def check(self, mesh, sequence_length):
        if mesh.context > 1:
            raise ValueError(f"mesh.context={mesh.context}: this layer reads a sequence whole; use --mesh.context=1")

    def flops(self, sequence_length):
        return Flops(2 * 3 * self.embed_dim**2)

    def activations(self, sequence_length):
        return {
            "input": Activation(self.embed_dim),
            "gates": Activation(2 * self.embed_dim, Flops(4 * self.embed_dim**2)),
        }

    def sent(self, mesh, itemsize):
        return {"tensor": 4 * self.embed_dim * itemsize}

    def new_pages(self, sizes):
        return States(jnp.zeros((sizes.num_rows + 1, self.embed_dim)))


def half_way(value, observed):
    return 0.5 * value + 0.5 * observed


class Recurrent(nnx.Module):
    def __init__(self, embed_dim, *, rngs):
        D = embed_dim
        self.gate = Linear((D,), (D,), ("embed", "mlp"), 0.2, rngs=rngs)
        self.value = Linear((D,), (D,), ("embed", "mlp"), 0.2, rngs=rngs)
        self.out = Linear((D,), (D,), ("mlp", "embed"), 0.2, rngs=rngs)
        self.mean_square = variable((), (), nnx.initializers.ones, rngs, half_way)

    def __call__(self, x_BTD, inputs, cache, key):
        x_BTD = checkpoint_name(x_BTD, "input")
        keep, value = (checkpoint_name(linear(x_BTD), "gates") for linear in (self.gate, self.value))
        keep = jax.nn.sigmoid(keep.astype(jnp.float32))
        added = (1 - keep) * value.astype(jnp.float32)
        if cache is not None:
            keep, added = cache.resumed(keep, added)
        combine = lambda left, right: (left[0] * right[0], left[1] * right[0] + right[1])
        _, states = jax.lax.associative_scan(combine, (keep, added), axis=1)
        cache = None if cache is None else cache.after(states)
        mean_square = jnp.mean(states**2)
        scaled = (states / jax.lax.rsqrt(self.mean_square[...])).astype(x_BTD.dtype)
        scaled = observe(scaled, self.mean_square, mean_square)
        y_BTD = constrain(x_BTD + self.out(scaled), "batch", "sequence", None)
        return y_BTD, cache, Terms({"small_states": 0.01 * mean_square}, {"state": mean_square})


@functools.partial(jax.tree_util.register_dataclass, data_fields=("states", "places"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class States:
    """What a recurrent layer remembers of each running sequence [R, D]; the last row takes the padding."""

    states: jax.Array
    places: Places | None = None

    def at(self, places):
        return dataclasses.replace(self, places=places)

    def resumed(self, keep, added):
        """The gates, where the first token of each sequence continues from the state before it."""
        rows = self.places.rows_BT
        is_first = jnp.concatenate([jnp.ones_like(rows[:, :1], bool), rows[:, 1:] != rows[:, :-1]], 1)[..., None]
        before = jnp.where((self.places.positions_BT > 0)[..., None], self.states[rows], 0.0)
        return jnp.where(is_first, 0.0, keep), jnp.where(is_first, added + keep * before, added)

    def after(self, states):
        rows = self.places.rows_BT
        is_last = jnp.concatenate([rows[:, 1:] != rows[:, :-1], jnp.ones_like(rows[:, :1], bool)], 1)
        return States(self.states.at[jnp.where(is_last, rows, self.states.shape[0] - 1)].set(states))


@dataclasses.dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """A decoder whose every second layer is recurrent."""

    kind: Literal["toy_hybrid"] = "toy_hybrid"

    def make_stacks(self, execution):
        (layers,) = super().make_stacks(execution).values()
        saved = Saved.choose(
            execution.recompute_of(0),
            execution.recompute_modules,
            execution.offload,
            ("input", "gates"),
            RecurrentConfig.modules,
        )
        recurrent = RecurrentConfig(self.embed_dim, saved)
        return {"layers": tuple(recurrent if number % 2 else layer for number, layer in enumerate(layers))}


# ----------------------------------------------------------------------------- two stacks


@dataclasses.dataclass(frozen=True)
class TwoStacksConfig(ModelConfig):
    """Tokens go through `encoder`; `decoder` reads them again beside what it made."""

    kind: Literal["toy_two_stacks"] = "toy_two_stacks"
    embed_dim: int = 16
    vocab_size: int = 64

    def build(self, rngs, dtype, execution, stages):
        return TwoStacks(self, dtype, execution, rngs=rngs)

    def make_stacks(self, execution):
        layer = functools.partial(self._layer, execution=execution)
        return {"encoder": (layer(CAUSAL & window(4)),), "decoder": (layer(CAUSAL), layer(CAUSAL))}

    def _layer(self, mask, execution):
        attention = AttentionConfig(
            embed_dim=self.embed_dim, num_heads=4, num_kv_heads=2, head_dim=4, mask=mask, init_std=0.2,
            out_init_std=0.2, **execution.of_attention,
        )  # fmt: skip
        mlp = MlpConfig(self.embed_dim, 32, "swiglu", False, 0.2, 0.2)
        return TransformerLayerConfig(attention=attention, mlp=mlp, norm=NORM)

    def inputs(self, sequence_length, *, packed):
        return {"tokens": BatchArray.sequence(sequence_length)}

    def flops_outside(self, sequence_length):
        return Flops(2 * self.embed_dim * self.vocab_size)


class TwoStacks(AnyModule):
    def __init__(self, config, dtype, execution, *, rngs):
        self.config, self.dtype = config, dtype
        D, V = config.embed_dim, config.vocab_size
        self.embedding = weight((V, D), ("vocab", "embed"), nnx.initializers.normal(0.2), rngs, "embedding")
        stacks = config.stacks(execution)
        self.encoder = Stack(stacks["encoder"], scan=False, rngs=rngs)
        self.decoder = Stack(stacks["decoder"], scan=execution.scans(2), rngs=rngs)
        self.norm = Norm(NORM, D, rngs=rngs)
        self.head = Linear((D,), (V,), ("embed", "vocab"), 0.2, rngs=rngs, role="head")

    def run(self, batch, caches, key):
        encoder_key, decoder_key = split_key(key)
        tokens = embed(self.embedding[...], batch["tokens"], self.dtype)
        read, encoder, first = self.encoder(tokens, {}, caches.get("encoder"), encoder_key)
        x, decoder, second = self.decoder(tokens + read, {}, caches.get("decoder"), decoder_key)
        return x, {"encoder": encoder, "decoder": decoder}, (first, second)

    def hidden(self, batch, key=None):
        x, _, terms = self.run(batch, {}, key)
        return self.output(x), terms

    def output(self, x_BTD):
        return self.norm(x_BTD)

    def logit_options(self):
        return dict(vocab_size=self.config.vocab_size)

    def extend(self, batch, caches):
        x, caches, _ = self.run(batch, caches, None)
        return x, caches


# ----------------------------------------------------------------------------- what both must do

HYBRID = HybridConfig(
    num_layers=4, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64, position="rope", norm="rmsnorm", biases=(),
    activation="swiglu", init_std=0.2, dropout=0.1, attention_dropout=0.1,
)  # fmt: skip
FAMILIES = {"hybrid": HYBRID, "two stacks": TwoStacksConfig()}


def config_of(family: str, run_dir, mesh=MeshConfig(), **training) -> Config:
    training = dict(steps=STEPS, sequence_length=T) | training
    return toy_config(run_dir, mesh, training, model=FAMILIES[family])


def losses(lines: list[dict]) -> list[float]:
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """{family: (config, lines of metrics)} of a run on one device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        configs = {family: config_of(family, tmp_path_factory.mktemp("runs") / "run") for family in FAMILIES}
        return {family: (config, run_of(config, monkeypatch)) for family, config in configs.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_and_evaluates(family, trained):
    config, lines = trained[family]
    found = losses(lines)
    assert len(found) == STEPS + 2 and found[-1] < found[0]
    assert Config.load(config.run_dir) == config
    described = json.loads((Path(config.run_dir) / "config.json").read_text())
    assert described["model"]["kind"] == FAMILIES[family].kind


@pytest.mark.parametrize("family, mesh", [
    ("hybrid", dict(fsdp=2, tensor=2)),
    pytest.param("hybrid", dict(pipeline=2, virtual_stages=2), marks=pytest.mark.slow),
    pytest.param("two stacks", dict(data=2, context=2), marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_family_is_the_same_on_a_mesh_and_in_microbatches(family, mesh, trained, tmp_path, monkeypatch):
    mesh = MeshConfig(**mesh)
    microbatches = dict(microbatch_size=2) if mesh.pipeline > 1 else {}
    lines = run_of(config_of(family, tmp_path / "run", mesh, **microbatches), monkeypatch)
    np.testing.assert_allclose(losses(lines), losses(trained[family][1]), rtol=1e-5)


def test_layers_are_the_same_scanned_recomputed_and_in_microbatches(trained, tmp_path, monkeypatch):
    """Losses, and terms, which are means: that of four microbatches is that of the whole, as each has as many
    sequences. A metric is not part of the loss."""
    how = ["--execution.scan_layers=True", "--execution.recompute=full", "--training.microbatch_size=2"]
    found = run_of(override(config_of("hybrid", tmp_path / "run"), how), monkeypatch)
    expected = trained["hybrid"][1]
    np.testing.assert_allclose(losses(found), losses(expected), rtol=1e-5)
    first = expected[0]
    for name in ("small_states", "state"):
        np.testing.assert_allclose(found[0][name], first[name], rtol=1e-5)
    assert first["small_states"] == pytest.approx(2 * 0.01 * first["state"], rel=1e-5)  # a sum of two layers, a mean


@pytest.mark.parametrize("family", ["hybrid", pytest.param("two stacks", marks=pytest.mark.slow)])
def test_family_resumes_bit_for_bit(family, trained, tmp_path, monkeypatch):
    config = config_of(family, tmp_path / "run")
    run_of(dataclasses.replace(config, launch=LaunchConfig(exit_at_step=2)), monkeypatch)
    assert losses(run_of(config, monkeypatch)) == losses(trained[family][1])


@pytest.mark.parametrize("family", FAMILIES)
def test_family_generates_what_it_predicts_without_a_cache(family, trained):
    config, _ = trained[family]
    serving = ServingConfig(max_rows=3, max_batch_tokens=16, page_size=2, num_pages=10)
    engine = Engine.from_run(config.run_dir, serving=serving)
    # More tokens than a call computes, more prompts than rows, and fewer pages than three of them need.
    prompts = [[5, 17, 3], list(range(20, 31)), [4] * 11, [1], [7, 7, 8, 9, 10, 11, 12], [3, 2, 1]]
    found = engine.generate_tokens(prompts, Sampling(max_tokens=5, temperature=0.0))
    assert engine.stats().preemptions > 0
    for _ in range(3):  # the second time may find pages, and the third the state at their end
        assert engine.generate_tokens(prompts[1:2], Sampling(max_tokens=5, temperature=0.0)) == found[1:2]
    assert engine.stats().prefix_hits >= 10
    model = engine.model

    @jax.jit
    def logits(weights, tokens_BT):
        batch = {"tokens": tokens_BT, "positions": jnp.arange(tokens_BT.shape[1])[None]}
        module = model.module(weights)
        if family == "hybrid":
            return module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])
        return module.logits(module.run(batch, {}, None)[0])

    for prompt, new in zip(prompts, found, strict=True):
        tokens = [*prompt, *new]
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(tokens)] = tokens
        predicted = np.argmax(logits(engine.params, padded)[0, :, :63], -1)
        assert new == predicted[len(prompt) - 1 : len(tokens) - 1].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_planned(family, tmp_path):
    config = config_of(family, tmp_path / "run", MeshConfig(fsdp=2))
    model = config.make_model()
    rows = dict(plan_rows(config.make_program(), config.training, plan_device("a100")))
    Console().card("plan", list(rows.items()))
    assert f"({model.num_parameters():,})" in rows["parameters"] and rows["verdict"].startswith("fits")
    matrices = {"hybrid": 2 * (16 * 16 * 4 + 3 * 16 * 32) + 2 * 3 * 16 * 16 + 128 * 16,
                "two stacks": 3 * (16 * 16 * 3 + 3 * 16 * 32) + 64 * 16}  # fmt: skip
    assert config.make_model().training_flops(T).matmuls == 6 * matrices[family]


@dataclasses.dataclass(frozen=True)
class OtherBatchConfig(HybridConfig):
    kind: Literal["toy_other_batch"] = "toy_other_batch"

    def inputs(self, sequence_length, *, packed):
        planes = BatchArray(("time", None), (sequence_length, 2), jnp.int32)
        return super().inputs(sequence_length, packed=packed) | {"positions": planes}


def test_data_of_another_shape_than_the_model_reads_is_refused(tmp_path):
    config = override(config_of("hybrid", tmp_path / "run"), ["--model.kind=toy_other_batch"])
    program = config.make_program(make_mesh(config.mesh, jax.devices()[:1]))
    schedule = config.training.schedule(config.mesh)
    source = IndexedSource(run.load_data(config).train, schedule, config.data)
    placer = BatchPlacer(program, config.training)
    batches = device_batches(source, schedule, placer, start=0, stop=1, weights=dict)
    wanted = (
        r"task.kind=language gives positions as int32\[16\] per sample, and .*=toy_other_batch reads int32\[16, 2\]"
    )
    with pytest.raises(ValueError, match=wanted):
        next(batches)


def test_two_stacks_are_refused_in_a_pipeline(tmp_path):
    config = config_of("two stacks", tmp_path / "run", MeshConfig(pipeline=2), microbatch_size=1)
    with pytest.raises(ValueError, match="mesh.pipeline=2.*toy_two_stacks.*encoder, decoder.*use --mesh.pipeline=1"):
        config.check()


def test_the_kind_of_model_can_be_named_on_the_command_line():
    recipe = configs.recipe("gpt_tiny")
    config = override(recipe, ["--model.kind=toy_hybrid", "--model.num_layers=2"])
    assert type(config.model) is HybridConfig and config.model.num_layers == 2
    assert config.model.embed_dim == recipe.model.embed_dim  # what both have stays as the recipe says it
    assert override(config, ["--model.kind=toy_hybrid"]) == config
    assert Config.from_json(config.to_json()) == config
    assert run.incompatibilities(recipe, config) == ["model.kind: decoder -> toy_hybrid"]


# ----------------------------------------------------------------------------- variables


def test_variables_follow_what_was_observed_and_have_no_gradient(trained):
    config, lines = trained["hybrid"]
    engine = Engine.from_run(config.run_dir)
    value, metrics = np.ones(2), [line["state"] for line in lines if "state" in line]
    found = np.asarray(engine.model.stacked(engine.params)["layers"]["recurrent"]["mean_square"])
    for mean in metrics:
        value = 0.5 * value + 0.5 * mean
    np.testing.assert_allclose(found.mean(), value.mean(), rtol=1e-5)
    assert found[0] != found[1]


FROZEN = ["--training.frozen=embedding,layers.dense.*"]


def test_frozen_parameters_have_no_moments(tmp_path):
    config = override(config_of("hybrid", tmp_path / "run"), FROZEN)
    model = config.make_model()
    optimizer = Optimizer(config.optimizer, model.trained)
    assert set(model.trained["layers"]) == {"recurrent"} and "embedding" not in model.trained
    moments = jax.eval_shape(optimizer.init, model.split(model.abstract_weights).params)
    assert not any("dense" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(moments))
    with pytest.raises(ValueError, match="training.frozen: 'layers.dens.*' matches no parameter"):
        override(config, ["--training.frozen=layers.dens.*"]).make_model()


@pytest.mark.slow
def test_frozen_parameters_are_frozen_in_a_pipeline_too(tmp_path, monkeypatch):
    alone = config_of("hybrid", tmp_path / "run")
    piped = config_of("hybrid", tmp_path / "piped", MeshConfig(pipeline=2), microbatch_size=2)
    lines, found = (run_of(override(config, FROZEN), monkeypatch) for config in (alone, piped))
    np.testing.assert_allclose(losses(found), losses(lines), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["compute", "float32"])
def test_a_pipeline_trains_in_bfloat16(reduce, trained, tmp_path, monkeypatch):
    """On CPU a sum of 16-bit numbers over its stages once ended the process."""
    config = config_of("hybrid", tmp_path / "run", MeshConfig(pipeline=2), microbatch_size=2)
    found = losses(run_of(dataclasses.replace(config, precision=PrecisionConfig(gradient_reduce=reduce)), monkeypatch))
    np.testing.assert_allclose(found, losses(trained["hybrid"][1]), rtol=1e-2)


def test_variables_keep_float32_beside_matrices_in_bfloat16():
    model = Model(HYBRID, PrecisionConfig(params="bfloat16"))
    dtypes = jax.tree.map(lambda a, record: (record.role, str(a.dtype)), model.abstract_weights, model.records)
    assert set(jax.tree.leaves(dtypes, is_leaf=lambda node: isinstance(node, tuple))) == {
        ("embedding", "bfloat16"), ("matrix", "bfloat16"), ("vector", "float32"), ("variable", "float32"),
    }  # fmt: skip


def test_a_family_needs_a_kind_of_its_own():
    with pytest.raises(TypeError, match="needs a unique kind"):
        type("Nameless", (DecoderConfig,), {})
    assert MODELS.of("decoder") is DecoderConfig


def test_two_parameters_of_one_name_are_refused():
    class Router(nnx.Module):
        def __init__(self, rngs):
            self.router = Linear((2,), (3,), ("embed", "experts"), 0.1, rngs=rngs, role="router")
            self.router.add_bias_parameter(rngs)
            self.router_bias = variable((3,), ("experts",), nnx.initializers.zeros, rngs, half_way)

    with pytest.raises(ValueError, match="two parameters have the name router_bias"):
        Structure.of(nnx.split(Router(nnx.Rngs(0)))[1])


def test_what_belongs_to_a_linear_is_called_after_it():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.query = Linear((2,), (3,), ("embed", "mlp"), 0.1, rngs=rngs)
            self.query.adapter = Linear((2,), (1,), ("embed", "mlp"), 0.1, rngs=rngs)

    state = nnx.split(Layer(nnx.Rngs(0)))[1]
    tree = Structure.of(state).to_tree(state)
    assert {name: a.shape for name, a in tree.items()} == {"query": (2, 3), "query_adapter_weight": (2, 1)}
    assert jax.tree.map(np.array_equal, Structure.of(state).to_state(tree), state)


# ----------------------------------------------------------------------------- beginning from another run


def test_a_run_starts_from_the_weights_of_another_with_a_new_optimizer(trained, tmp_path, monkeypatch):
    source, lines = trained["hybrid"]
    config = override(config_of("hybrid", tmp_path / "run", eval_every_steps=0), ["--launch.exit_at_step=1"])
    config = dataclasses.replace(config, checkpoint=CheckpointConfig(start_from=f"{source.run_dir}/checkpoints/2"))
    first, *_ = run_of(config, monkeypatch)
    # The same samples as the first step of the other run, with the weights that it had after two.
    assert first["step"] == 1 and first["loss"] < lines[0]["loss"] - 0.1
    # A run that has begun goes on from its own weights, and remembers where they came from.
    again = override(config, ["--launch.exit_at_step=2", "--checkpoint.start_from="])
    assert losses(run_of(again, monkeypatch))[0] == first["loss"]
    assert Config.load(config.run_dir).checkpoint.start_from == f"{source.run_dir}/checkpoints/2"
    other = override(again, [f"--checkpoint.start_from={source.run_dir}/checkpoints/4"])
    assert start_from.pinned(other).checkpoint.start_from == f"{source.run_dir}/checkpoints/2"


def test_the_newest_step_is_looked_up_once(trained, tmp_path):
    source = shutil.copytree(trained["hybrid"][0].run_dir, tmp_path / "source")
    config = dataclasses.replace(
        config_of("hybrid", tmp_path / "run"), checkpoint=CheckpointConfig(start_from=str(source))
    )
    first = start_from.pinned(config)
    assert first.checkpoint.start_from == f"{source}/checkpoints/4"
    Path(config.run_dir).mkdir()
    (Path(config.run_dir) / "config.json").write_text(first.to_json())
    (source / "checkpoints" / "4").rename(source / "checkpoints" / "9")
    assert start_from.pinned(config) == first == start_from.pinned(first)
    assert start_from.pinned(override(config, ["--checkpoint.start_from="])) == first


def test_a_run_starts_with_new_parameters_and_keeps_others_where_it_says_so(trained, tmp_path, monkeypatch, caplog):
    """A head of another size, and biases that the other run does not have; of the rest only some are trained."""
    source, lines = trained["hybrid"]
    config = override(config_of("hybrid", tmp_path / "run", steps=1, eval_every_steps=0), [
        f"--checkpoint.start_from={source.run_dir}/checkpoints/4", "--model.biases=qkv,attention_out,mlp",
        "--model.tied_embeddings=False",
        "--model.rope.base=500000",
    ])  # fmt: skip
    with pytest.raises(ValueError, match="start_from=.*another model .head is missing there; layers.dense.atten"):
        run.check(config)
    with pytest.raises(ValueError, match="checkpoint.start_fresh: '.*_scale' matches no parameter"):
        run.check(override(config, ["--checkpoint.start_fresh=*_scale"]))
    config = override(config, [
        "--checkpoint.start_fresh=head,*_bias", "--training.trained=head,layers.recurrent.*",
        "--training.frozen=layers.recurrent.out",
    ])  # fmt: skip
    with caplog.at_level("INFO", "megajax"):
        (line,) = run_of(config, monkeypatch)
    assert "newly initialised: head, layers.dense.attention.key_bias" in caplog.text
    assert "model.rope.base: 10000.0 -> 500000" in caplog.text
    weights, before = Engine.from_run(config.run_dir).params, Engine.from_run(source.run_dir).params
    same = jax.tree.map(np.array_equal, weights["layers"]["recurrent"], before["layers"]["recurrent"])
    assert all(jax.tree.leaves(same["out"])) and np.array_equal(weights["embedding"], before["embedding"])
    assert not any(jax.tree.leaves([same[name] for name in ("gate", "value")]))
    assert line["loss"] < lines[0]["loss"] + 1


@pytest.mark.parametrize("change, message", [
    ("--model.num_layers=2", r"layers.dense.attention.key is \[2, 16, 4, 4\] there and \[1, 16, 4, 4\] here"),
    ("--model.embed_dim=32", r"embedding is \[128, 16\] there and \[128, 32\] here"),
    ("--model.kind=decoder", "layers.recurrent.gate is missing here"),
])  # fmt: skip
def test_a_run_cannot_start_from_another_model(change, message, trained, tmp_path):
    config = override(config_of("hybrid", tmp_path / "run"), [change])
    source = f"{trained['hybrid'][0].run_dir}/checkpoints/4"
    with pytest.raises(ValueError, match=f"checkpoint.start_from=.*another model .*{message}"):
        run.check(override(config, [f"--checkpoint.start_from={source}"]))


def test_a_run_cannot_start_from_what_is_not_there(trained, tmp_path):
    source, _ = trained["hybrid"]
    config = config_of("hybrid", tmp_path / "run")
    start = lambda path: dataclasses.replace(config, checkpoint=CheckpointConfig(start_from=str(path)))
    with pytest.raises(ValueError, match="start_from=.*nowhere: .* no checkpoint in .*nowhere/checkpoints"):
        start_from.pinned(start(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="step=7 is not in .*; there are 2, 4"):
        run.check(start(f"{source.run_dir}/checkpoints/7"))


def test_a_cpu_optimises_the_program_of_initial_weights_less_with_the_same_result(monkeypatch):
    def drawn(options):
        draw = jax.jit(lambda key: jax.random.normal(key, (64, 48)) * 0.02, compiler_options=options)
        return np.asarray(draw(jax.random.key(0)))

    assert compat.options_to_run_once() == {}  # the tests have a level of their own
    monkeypatch.delenv("XLA_FLAGS")
    options = compat.options_to_run_once()
    assert options == {"xla_backend_optimization_level": "1"}
    np.testing.assert_array_equal(drawn(options), drawn({"xla_backend_optimization_level": "3"}))
