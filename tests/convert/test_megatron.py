"""Converting to Megatron's names and layouts and back is the identity, and refuses what does not fit."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.convert.megatron import from_megajax, to_megajax
from megajax.layers.mamba import MambaConfig
from megajax.layers.moe import MoeConfig
from megajax.layers.router import RouterConfig
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig

ORACLES = Path(__file__).parent.parent / "oracles"
SMALL = DecoderConfig(num_layers=3, embed_dim=8, num_heads=4, vocab_size=29, vocab_multiple=16, max_positions=6)
T5 = dict(
    num_layers=1, num_decoder_layers=2, embed_dim=8, num_heads=2, head_dim=6, mlp_dim=12, vocab_size=29,
    vocab_multiple=16, max_positions=6,
)  # fmt: skip
CONFIGS = {
    "gpt": SMALL,
    "llama": dataclasses.replace(
        SMALL, num_kv_heads=2, position="rope", norm="rmsnorm", activation="swiglu", bias=False, tied_embeddings=False,
        qk_norm=True,
    ),
    "wide heads, multi-query": dataclasses.replace(SMALL, head_dim=5, num_kv_heads=1, mlp_dim=10, qk_norm=True),
    "gated with biases": dataclasses.replace(SMALL, activation="geglu", norm_zero_centered=True, tied_embeddings=False),
    "sinks, biases by place": dataclasses.replace(
        SMALL, bias=False, qkv_bias=True, norm_bias=False, attention_sinks=True
    ),
    "experts": dataclasses.replace(
        SMALL, activation="swiglu", bias=False, moe=MoeConfig(4, 6, layers="de", shared_dim=10, shared_gate=True,
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
        vocab_multiple=16, position="none", norm="rmsnorm", bias=False, activation="squared_relu",
        moe=MoeConfig(4, 6, shared_dim=10), mamba=MambaConfig(head_dim=4, state_dim=6, num_groups=2),
    ),
}  # fmt: skip
LLAMA = CONFIGS["llama"]


def random_params(config):
    rng = np.random.default_rng(0)
    abstract = Model(config, PrecisionConfig()).abstract_weights
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), abstract)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_the_identity(name):
    config, params = CONFIGS[name], random_params(CONFIGS[name])
    named = from_megajax(params, config)
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


@pytest.mark.parametrize("num_rows", [29, 32, 40])
def test_vocabulary_is_padded_with_zeros_or_cut(num_rows):
    named = from_megajax(random_params(LLAMA), LLAMA)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        named[name] = np.resize(named[name], (num_rows, 8))
    params = to_megajax(named, LLAMA)
    for table in (params["embedding"], params["head"].T):
        assert table.shape == (32, 8)
        assert np.all(table[:29] != 0) and np.all((table[29:] == 0) == (num_rows == 29))


def test_names_of_transformer_engine_are_known():
    named = from_megajax(random_params(SMALL), SMALL)
    fused = {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): array
        for name, array in named.items()
    }
    assert set(fused) != set(named)
    jax.tree.map(np.testing.assert_array_equal, to_megajax(fused, SMALL), to_megajax(named, SMALL))


def test_names_of_grouped_experts_are_known():
    config = CONFIGS["experts"]
    named = from_megajax(random_params(config), config)
    pattern = r"local_experts\.(\d)\.(linear_fc[12]\.weight)"
    grouped = {re.sub(pattern, r"\2\1", name): array for name, array in named.items()}
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in grouped
    jax.tree.map(np.testing.assert_array_equal, to_megajax(grouped, config), to_megajax(named, config))
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
    with pytest.raises(ValueError, match="final_norm/bias .* missing"):
        from_megajax(params, dataclasses.replace(LLAMA, norm="layernorm"))
    with pytest.raises(ValueError, match="embedding has shape"):
        from_megajax(params | {"embedding": params["embedding"][:-1]}, LLAMA)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(head_bias=True), "head_bias"),
        (dict(norm_placement="sandwich"), "layers/dense/attention_post_norm/scale"),
        (dict(norm_placement="post"), "layers/dense/attention_norm/scale"),
        (dict(qk_norm="all_heads"), "layers/dense/attention/key_norm/scale"),
    ],
    ids=str,
)
def test_parameters_that_megatron_does_not_have_are_refused(fields, name):
    config = dataclasses.replace(LLAMA, **fields)
    for convert, given in ((from_megajax, random_params(config)), (to_megajax, {})):
        with pytest.raises(ValueError, match=f"parameter {name} is not in both"):
            convert(given, config)
