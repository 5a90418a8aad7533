"""Converting to Megatron's names and layouts and back is the identity, and refuses what does not fit."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import rope_tables
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.parameters import Structure
from megajax.precision import PrecisionConfig
from megajax.weights.megatron import from_megajax, to_megajax
from megajax.weights.megatron.families import read_arguments

ORACLES = Path(__file__).parents[2] / "oracles"
SMALL = DecoderConfig(num_layers=3, embed_dim=8, num_heads=4, vocab_size=29, vocab_multiple=16, max_positions=6)
T5 = dict(
    num_layers=1, num_decoder_layers=2, embed_dim=8, num_heads=2, head_dim=6, mlp_dim=12, vocab_size=29,
    vocab_multiple=16, max_positions=6,
)  # fmt: skip
CONFIGS = {
    "gpt": SMALL,
    "llama": dataclasses.replace(
        SMALL, num_kv_heads=2, position="rope", norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False,
        qk_norm=True,
    ),
    "wide heads, multi-query": dataclasses.replace(SMALL, head_dim=5, num_kv_heads=1, mlp_dim=10, qk_norm=True),
    "gated with biases": dataclasses.replace(SMALL, activation="geglu", norm="layernorm_1p", tied_embeddings=False),
    "sinks, biases by place": dataclasses.replace(
        SMALL, biases=("qkv",), attention_sinks=True
    ),
    "experts": dataclasses.replace(
        SMALL, activation="swiglu", biases=("norm",), pattern="de", moe=MoeConfig(4, 6, shared_dim=10, shared_gate=True,
        router=RouterConfig(score="sigmoid", bias_update_rate=1e-3)),
    ),
    "bert": BertConfig(
        num_layers=2, embed_dim=8, num_heads=4, vocab_size=29, vocab_multiple=16, max_positions=16,
        norm_placement="pre", embedding_norm=False,
    ),
    "t5, learned positions": EncoderDecoderConfig(
        **T5, position="learned", norm="layernorm", bias=True, head_bias=True
    ),
    "t5, relative positions": EncoderDecoderConfig(**T5, activation="geglu", tied_embeddings=False, final_norm=False),
    "hybrid": HybridConfig(
        num_layers=5, pattern="M*-EM", embed_dim=8, num_heads=4, num_kv_heads=2, mlp_dim=12, vocab_size=29,
        vocab_multiple=16, position="none", norm="rmsnorm", biases=(), activation="squared_relu",
        moe=MoeConfig(4, 6, shared_dim=10), mamba=MambaConfig(head_dim=4, state_dim=6, num_groups=2),
    ),
    "latent": dataclasses.replace(
        SMALL, position="rope", head_dim=4, biases=("norm",), latent=LatentConfig(kv_rank=6, rope_dim=2), mtp_layers=1,
    ),
    "deepseek": dataclasses.replace(
        SMALL, position="rope", head_dim=4, biases=(), norm="rmsnorm", activation="swiglu", tied_embeddings=False,
        latent=LatentConfig(kv_rank=6, q_rank=5, rope_dim=2, value_dim=3), mtp_layers=2,
        pattern="dee", moe=MoeConfig(4, 6, shared_dim=10, router=RouterConfig(score="sigmoid", bias_update_rate=1e-3)),
    ),
}  # fmt: skip
LLAMA = CONFIGS["llama"]
DEEPSEEK = CONFIGS["deepseek"]


@functools.cache
def random_params(config):
    rng = np.random.default_rng(0)
    abstract = Model(config, PrecisionConfig()).abstract_weights
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), abstract)


@functools.cache
def as_named(config):
    return from_megajax(random_params(config), config)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_the_identity(name):
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    named = as_named(config)
    expert_biases = sum(array.size for name, array in named.items() if name.endswith("expert_bias"))
    parameters = sum(array.size for array in named.values()) - expert_biases
    assert parameters == Model(config, PrecisionConfig()).num_parameters()
    jax.tree.map(np.testing.assert_array_equal, to_megajax(named, config), params)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_megatrons_own_parameters_survive_the_way_through_ours(name):
    saved = np.load(ORACLES / f"{name}.npz")
    sizes = json.loads(str(saved["config"]))
    family = CONFIGS["gpt" if name == "gpt2" else "llama"]
    config = dataclasses.replace(
        family, num_layers=2, embed_dim=64, mlp_dim=sizes["ffn_hidden_size"], vocab_size=128, max_positions=32
    )
    named = {key.removeprefix("param/"): saved[key] for key in saved.files if key.startswith("param/")}
    again = from_megajax(to_megajax(named, config), config)
    assert list(sorted(again)) == list(sorted(named))
    for key, array in named.items():
        np.testing.assert_array_equal(again[key], array)


def test_layouts_are_megatrons():
    """Against indices written out by hand: 4 query heads in 2 groups, head dim 2, width 8."""
    params = random_params(LLAMA)
    named = from_megajax(params, LLAMA)
    ours = params["layers"]["dense"]
    qkv, fc1 = (named[f"decoder.layers.1.{name}.weight"] for name in ("self_attention.linear_qkv", "mlp.linear_fc1"))
    # Rows of a group: 2 x 2 of queries, 2 of the key, 2 of the value.
    np.testing.assert_array_equal(qkv[8 + 2], ours["attention"]["query"][1][:, 3, 0])
    np.testing.assert_array_equal(qkv[8 + 4 + 1], ours["attention"]["key"][1][:, 1, 1])
    np.testing.assert_array_equal(qkv[6], ours["attention"]["value"][1][:, 0, 0])
    np.testing.assert_array_equal(fc1[:32], ours["mlp"]["gate"][1].T)
    np.testing.assert_array_equal(fc1[32:], ours["mlp"]["up"][1].T)


def test_latent_attention_and_multi_token_prediction_have_megatrons_layouts():
    """Against indices written out by hand: 4 heads with keys of 4 + 2 and values of 3, width 8."""
    params = random_params(DEEPSEEK)
    named = as_named(DEEPSEEK)
    ours = params["layers"]["moe"]["attention"]
    names = ("q_down", "q_up", "kv_down", "kv_up")
    theirs = [named[f"decoder.layers.2.self_attention.linear_{name}_proj.weight"] for name in names]
    query_down, query_up, down, up = theirs
    np.testing.assert_array_equal(query_down, ours["query_down"][1].T)
    np.testing.assert_array_equal(query_up[3 * 6 + 5], ours["query_up"][1][:, 3, 5])
    np.testing.assert_array_equal(down[6:], ours["key_value_down"][1][:, 6:].T)  # the rotary part
    np.testing.assert_array_equal(up[2 * 7 + 3], ours["key_up"][1][:, 2, 3])
    np.testing.assert_array_equal(up[2 * 7 + 4], ours["value_up"][1][:, 2, 0])
    out = named["decoder.layers.2.self_attention.linear_proj.weight"]
    np.testing.assert_array_equal(out[:, 1 * 3 + 2], ours["out"][1][1, 2])
    of_depth = params["mtp_2"]["moe"]
    embedding_half = named["mtp.layers.1.eh_proj.weight"][:, :8]
    np.testing.assert_array_equal(embedding_half, of_depth["projection"][0][:8].T)
    np.testing.assert_array_equal(named["mtp.layers.1.hnorm.weight"], of_depth["hidden_norm"]["scale"][0])
    expert = named["mtp.layers.1.transformer_layer.mlp.experts.local_experts.3.linear_fc2.weight"]
    np.testing.assert_array_equal(expert, of_depth["layer"]["mlp"]["down"][0][3].T)


@pytest.mark.parametrize("name", ["yarn", "rope"])
def test_latent_attention_computes_what_megatrons_does(name):
    saved = np.load(ORACLES / "latent_attention.npz")
    config = read_arguments(
        json.loads(str(saved[f"{name}/arguments"])), {"embedding.word_embeddings.weight": (16, 8)}, Path("nowhere")
    ).model
    prefix = f"{name}/weights/"
    theirs = {key.removeprefix(prefix): saved[key] for key in saved.files if key.startswith(prefix)}
    named = as_named(config) | {f"decoder.layers.0.self_attention.{key}": array for key, array in theirs.items()}
    weights = jax.tree.map(lambda a: a[0], to_megajax(named, config)["layers"]["dense"]["attention"])
    (layer,) = config.stacks(ExecutionConfig())["layers"]
    graph, state = nnx.split(nnx.eval_shape(lambda: layer.attention.build(nnx.Rngs(params=0))))
    attention = nnx.merge(graph, Structure.of(state).to_state(weights))
    x_BTD = saved[f"{name}/x"].swapaxes(0, 1)
    positions = np.broadcast_to(np.arange(x_BTD.shape[1], dtype=np.int32), x_BTD.shape[:2])
    tables = rope_tables(config.rope, config.rotary_head_dim, positions)
    out_BTD, _, _ = jax.jit(attention)(x_BTD, dict(zip(("cos_global", "sin_global"), tables, strict=True)))
    wanted = saved[f"{name}/out"].swapaxes(0, 1)
    np.testing.assert_allclose(out_BTD, wanted, rtol=0, atol=1e-5 * wanted.std())  # float32 in both


@pytest.mark.parametrize("num_rows", [29, 32, 40])
def test_vocabulary_is_padded_with_zeros_or_cut(num_rows):
    named = from_megajax(random_params(LLAMA), LLAMA)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        named[name] = np.resize(named[name], (num_rows, 8))
    params = to_megajax(named, LLAMA)
    for table in (params["embedding"], params["head"].T):
        assert table.shape == (32, 8)
        assert np.all(table[:29] != 0) and np.all((table[29:] == 0) == (num_rows == 29))


@pytest.mark.parametrize(("config", "fused_names"), [
    (SMALL, {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }),
    (DEEPSEEK, {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        ".transformer_layer.": ".mtp_model_layer.",
    }),
], ids=["gpt", "deepseek"])  # fmt: skip
def test_names_of_transformer_engine_are_known(config, fused_names):
    fused = {}
    for name, array in as_named(config).items():
        for own, other in fused_names.items():
            name = name.replace(own, other)
        fused[name] = array
    assert all(other in " ".join(fused) for other in fused_names.values())
    jax.tree.map(np.testing.assert_array_equal, to_megajax(fused, config), random_params(config))


def test_names_of_grouped_experts_are_known():
    config = CONFIGS["experts"]
    named = as_named(config)
    pattern = r"local_experts\.(\d)\.(linear_fc[12]\.weight)"
    grouped = {re.sub(pattern, r"\2\1", name): array for name, array in named.items()}
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in grouped
    jax.tree.map(np.testing.assert_array_equal, to_megajax(grouped, config), random_params(config))
    missing = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"
    with pytest.raises(ValueError, match=f"{missing} .* missing"):
        to_megajax({name: array for name, array in named.items() if name != missing}, config)


def test_what_does_not_fit_is_named():
    params = random_params(LLAMA)
    named = from_megajax(params, LLAMA)
    fc1, head = "decoder.layers.2.mlp.linear_fc1.weight", "output_layer.weight"

    def refused(changes, match):
        with pytest.raises(ValueError, match=match):
            to_megajax({name: array for name, array in (named | changes).items() if array is not None}, LLAMA)

    refused({fc1: None}, f"{fc1} .* missing")
    refused({fc1: named[fc1][:-1]}, rf"{fc1} has shape \(63, 8\).*\(64, 8\)")
    refused({head: named[head][:28]}, rf"{head} has shape \(28, 8\)")
    refused({"decoder.layers.3.mlp.linear_fc1.weight": named[fc1]}, "layers.3.mlp.linear_fc1.weight .* unexpected")
    with pytest.raises(ValueError, match="parameter head .* unexpected"):
        from_megajax(params, dataclasses.replace(LLAMA, tied_embeddings=True))
    with pytest.raises(ValueError, match="final_norm.bias .* missing"):
        from_megajax(params, dataclasses.replace(LLAMA, norm="layernorm", biases=("norm",)))
    with pytest.raises(ValueError, match="embedding has shape"):
        from_megajax(params | {"embedding": params["embedding"][:-1]}, LLAMA)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(biases=("qkv", "attention_out", "mlp", "norm", "head")), "head_bias"),
        (dict(norm_placement="sandwich"), "layers.dense.attention_post_norm.scale"),
        (dict(norm_placement="post"), "layers.dense.attention_post_norm.scale"),
        (dict(qk_norm="all_heads"), "layers.dense.attention.key_norm.scale"),
    ],
    ids=str,
)
def test_parameters_that_megatron_does_not_have_are_refused(fields, name):
    config = dataclasses.replace(LLAMA, **fields)
    for convert, given in ((from_megajax, random_params(config)), (to_megajax, {})):
        with pytest.raises(ValueError, match=f"Megatron has no tensor for .*{name}"):
            convert(given, config)


def test_attention_and_mlp_side_by_side_are_refused():
    config = dataclasses.replace(LLAMA, parallel_residual="one_norm")
    with pytest.raises(ValueError, match="model.parallel_residual=one_norm: Megatron has no such layers"):
        from_megajax(random_params(config), config)
