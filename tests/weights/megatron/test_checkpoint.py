"""Megatron's checkpoints are read whole, from any split over tensor and pipeline ranks, and executed in no part.

megatron_core_0_20.tar.xz was written by Megatron Core 0.20.0 on four processes (tensor 2, pipeline 2, CPU, gloo): a
model of two layers with random weights in both formats, the arguments as its own parser made them, and whole.npz, which
that program gathered from its ranks by the layer numbers and partition dims that Megatron gave it.

megatron_core_0_16_mixtures.tar.xz holds two mixtures by Megatron Core 0.16.1 in the same way: one of sequential experts
(tensor 2, pipeline 2, expert 2), and one of the older grouped GEMM (tensor 2, expert 2, expert tensor 2) with a dense
layer, a shared expert and the bias of the router. whole.npz is what Megatron itself loaded from torch_dist into one
process; grouped matrices have the names of sequential ones there.

megatron_core_0_16_families.tar.xz has a BERT and a T5 (tensor 2) and a hybrid M*-M (tensor 2, pipeline 2) by Megatron
Core 0.16.1 in both formats, of Megatron's own layers and with its kernels for Mamba left out. torch_dist holds whole
tensors, which Megatron put together.
"""

import argparse
import dataclasses
import pickle
import shutil
import sys
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from joined import arrays_of
from megajax.checkpoint import piecewise
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.piecewise import StoredParams
from megajax.convert.megatron import main
from megajax.inference.engine import Engine
from megajax.inference.load import open_model
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig
from megajax.models.bert import BertConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.hybrid import HybridConfig
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.weights import start_from
from megajax.weights.megatron import from_megajax, to_megajax
from megajax.weights.megatron.checkpoint import open_checkpoint, whole_layers
from megajax.weights.megatron.families import read_arguments
from megajax.weights.megatron.import_checkpoint import import_checkpoint, read
from megajax.weights.megatron.ranks import Rank, StoredArray, joined_array, numbered, whole_stage

RECORDED = Path(__file__).parent / "megatron_core_0_20.tar.xz"
MIXTURES = Path(__file__).parent / "megatron_core_0_16_mixtures.tar.xz"
FAMILIES = Path(__file__).parent / "megatron_core_0_16_families.tar.xz"
LAYER = "decoder.layers.0."
LLAMA = dict(
    num_layers=2, hidden_size=8, num_attention_heads=4, group_query_attention=True, num_query_groups=2, kv_channels=2,
    ffn_hidden_size=12, max_position_embeddings=32, seq_length=32, swiglu=True, add_bias_linear=False,
    normalization="RMSNorm", layernorm_epsilon=1e-6, position_embedding_type="rope", rotary_base=500000,
    rotary_percent=1.0, untie_embeddings_and_output_weights=True, qk_layernorm=True, hidden_dropout=0.0,
    attention_dropout=0.0, init_method_std=0.02, tokenizer_type="NullTokenizer", vocab_size=13,
)  # fmt: skip
LLAMA_MODEL = DecoderConfig(
    num_layers=2, embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=2, mlp_dim=12, max_positions=32, vocab_size=16,
    vocab_multiple=1, activation="swiglu", biases=(), norm="rmsnorm", norm_epsilon=1e-6, position="rope",
    rope=RopeConfig(base=500000.0), tied_embeddings=False, qk_norm=True,
)  # fmt: skip
GPT = dict(num_layers=2, hidden_size=8, num_attention_heads=4, max_position_embeddings=32, add_bias_linear=True)


# ----------------------------------------------------------------------------- joining


def stored(array):
    return StoredArray(array.shape, array.dtype, lambda: array)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("name", "shape", "dim"),
    [
        ("embedding.word_embeddings.weight", (16, 3), 0),
        ("output_layer.weight", (16, 3), 0),
        (LAYER + "self_attention.linear_qkv.weight", (24, 3), 0),  # whole groups: queries, key, value of each
        (LAYER + "self_attention.linear_qkv.bias", (24,), 0),
        (LAYER + "self_attention.linear_proj.weight", (3, 16), 1),
        (LAYER + "mlp.linear_fc2.weight", (3, 16), 1),
        (LAYER + "mlp.linear_fc1.weight", (16, 3), 0),
        (LAYER + "self_attention.linear_q_proj.weight", (24, 3), 0),
        (LAYER + "self_attention.linear_kv_up_proj.weight", (24, 3), 0),
        (LAYER + "self_attention.linear_kv_down_proj.weight", (16, 3), 0),
        ("mtp.layers.0.eh_proj.weight", (8, 16), 0),
    ],
)
def test_shards_of_tensor_ranks_are_joined(name, shape, dim, size):
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    joined = joined_array(name, [stored(part) for part in np.split(whole, size, dim)], gated=False)
    assert joined.shape == shape
    np.testing.assert_array_equal(joined, whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_has_its_part_of_the_gate_above_its_part_of_the_up_projection(size):
    gate = np.arange(8.0)[:, None]
    up = 100 + gate
    shards = [np.concatenate(parts) for parts in zip(np.split(gate, size), np.split(up, size), strict=True)]
    joined = joined_array(LAYER + "mlp.linear_fc1.weight", [stored(shard) for shard in shards], gated=True)
    np.testing.assert_array_equal(joined, np.concatenate([gate, up]))


def test_projections_to_latents_are_copies_or_parts():
    whole = np.arange(24.0).reshape(8, 3)
    name = LAYER + "self_attention.linear_q_down_proj.weight"
    for shards in ([whole, whole], np.split(whole, 2)):
        joined = joined_array(name, [stored(shard) for shard in shards], gated=False, num_rows=8)
        assert joined.shape == whole.shape
        np.testing.assert_array_equal(joined, whole)


def test_copies_are_taken_from_the_first_rank_and_differences_said(caplog):
    for name in (LAYER + "input_layernorm.weight", LAYER + "mlp.linear_fc2.bias"):
        copies = [stored(np.full(4, value)) for value in (1.0, 1.0)]
        np.testing.assert_array_equal(joined_array(name, copies, gated=False), np.ones(4))
    assert not caplog.text
    joined = joined_array(LAYER + "input_layernorm.weight", [stored(np.ones(4)), stored(np.zeros(4))], gated=False)
    np.testing.assert_array_equal(joined, np.ones(4))
    assert "input_layernorm.weight is not the same on all ranks" in caplog.text


def test_layers_of_pipeline_stages_follow_one_another_in_the_order_of_their_chunks():
    """Two stages of two virtual ones: the first chunks of both stages come before the second ones."""
    sizes = [2, 1, 1, 2]
    order = [{f"decoder.layers.{n}.a": (chunk, n) for n in range(size)} for chunk, size in enumerate(sizes)]
    found = {name: array for chunk in numbered(order) for name, array in chunk.items()}
    assert found == {
        "decoder.layers.0.a": (0, 0),
        "decoder.layers.1.a": (0, 1),
        "decoder.layers.2.a": (1, 0),
        "decoder.layers.3.a": (2, 0),
        "decoder.layers.4.a": (3, 0),
        "decoder.layers.5.a": (3, 1),
    }
    with pytest.raises(ValueError, match="decoder.layers.0.a is not on all tensor ranks"):
        whole_stage({Rank(0, 0): {"decoder.layers.0.a": 1}, Rank(1, 0): {}}, {})


def test_layers_that_are_stacked_or_numbered_and_halves_by_themselves():
    stacked = np.arange(12.0).reshape(3, 4)
    arrays = {
        "decoder.layers.mlp.linear_fc2.bias": stacked,
        "decoder.layers.7.mlp.linear_fc1.weight_w": stacked,
        "decoder.layers.7.mlp.linear_fc1.weight_v": stacked + 50,
        "decoder.final_layernorm.weight": stacked[0],
    }
    found = whole_layers(
        {key: (array.shape, array.dtype) for key, array in arrays.items()}, lambda key, at: arrays[key][at]
    )
    assert sorted(found) == [
        *(f"decoder.{name}" for name in ("final_layernorm.weight", "layers.0.mlp.linear_fc2.bias")),
        *(f"decoder.layers.{n}.mlp.linear_fc2.bias" for n in (1, 2)),
        "decoder.layers.7.mlp.linear_fc1.weight",
    ]
    np.testing.assert_array_equal(found["decoder.layers.2.mlp.linear_fc2.bias"], stacked[2])
    fc1 = found["decoder.layers.7.mlp.linear_fc1.weight"]
    assert fc1.shape == (6, 4)
    np.testing.assert_array_equal(fc1, np.concatenate([stacked, stacked + 50]))


# ----------------------------------------------------------------------------- arguments


def model_of(arguments):
    return config_of(arguments).model


def config_of(arguments, folder=Path("nowhere"), shapes=None):
    return read_arguments(arguments, {"embedding.word_embeddings.weight": (16, 8)} | (shapes or {}), folder)


def test_arguments_of_a_llama():
    config = config_of(LLAMA)
    assert config.model == LLAMA_MODEL
    assert config.training.sequence_length == 32
    assert config.data.tokenizer == "null:14"  # Megatron's adds the end of a document


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, dict(activation="gelu_tanh", position="learned", norm="layernorm", dropout=0.1, mlp_dim=32)),
        (dict(bias_gelu_fusion=False), dict(activation="gelu")),
        (dict(add_bias_linear=False), dict(activation="gelu", biases=("norm",))),
        (dict(openai_gelu=True, bias_gelu_fusion=False), dict(activation="gelu_tanh")),
        (dict(squared_relu=True), dict(activation="squared_relu")),
        (dict(num_query_groups=1), dict(num_kv_heads=4)),  # the default, which means nothing
        (
            dict(norm_epsilon=1e-3, apply_layernorm_1p=True),
            dict(norm_epsilon=1e-3, norm="layernorm_1p"),
        ),
        (dict(use_rotary_position_embeddings=True), dict(position="rope")),
        (dict(add_position_embedding=False), dict(position="none")),
        (dict(window_size=(127, 0), window_attn_skip_freq=4, num_layers=8), dict(window=128, pattern="w3f")),
        (dict(position_embedding_type="rope", no_rope_freq=4, num_layers=8), dict(position="rope", pattern="f3n")),
        (dict(add_bias_linear=False, add_qkv_bias=True), dict(biases=("qkv", "norm"))),
        (dict(add_qkv_bias=False), dict(biases=("qkv", "attention_out", "mlp", "norm"))),  # Megatron's rule too
        (dict(rotary_interleaved=True), dict(rope=RopeConfig(interleaved=True))),
        (dict(rotary_seq_len_interpolation_factor=4), dict(rope=RopeConfig(scaling="linear", factor=4.0))),
        (dict(softmax_type="learnable"), dict(attention_sinks=True)),
        (dict(use_rope_scaling=True, rope_scaling_factor=32.0), dict(rope=RopeConfig(scaling="llama3", factor=32.0))),
    ],
)
def test_arguments_of_a_gpt(arguments, expected):
    model = model_of(GPT | arguments)
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_latent_size", 8),
        ("mtp_use_repeated_layer", True),
        ("hybrid_layer_pattern", "M*-"),
        ("position_embedding_type", "mrope"),
        ("normalization", "BatchNorm"),
        ("window_size", (127, 127)),
        ("softmax_type", "off-by-one"),
        ("use_mup", True),
    ],
)
def test_what_megajax_does_not_have_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*from_megatron.md"):
        model_of(GPT | dict(window_attn_skip_freq=None) | {name: value})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, dict(expert_dim=None, router=RouterConfig(top_k=2))),
        (dict(moe_ffn_hidden_size=6, moe_shared_expert_intermediate_size=10), dict(expert_dim=6, shared_dim=10)),
        (
            dict(
                moe_router_score_function="sqrtsoftplus", moe_router_enable_expert_bias=True,
                moe_router_topk_scaling_factor=2.5, moe_router_num_groups=4, moe_router_group_topk=2,
            ),
            dict(router=RouterConfig(
                score="sqrt_softplus", bias_update_rate=1e-3, scale=2.5, groups=(4, 2)
            )),
        ),
        (
            dict(
                moe_router_load_balancing_type=["none", "seq_aux_loss"], moe_aux_loss_coeff=[0.01, 0.02],
                moe_z_loss_coeff=0.03, moe_expert_capacity_factor=1.5, moe_token_drop_policy="position",
                moe_router_pre_softmax=True,
            ),
            dict(router=RouterConfig(
                score="softmax_all", aux_loss=0.02, aux_loss_scope="sequence", z_loss=0.03, capacity_factor=1.5,
                drop="position",
            )),
        ),
    ],
)  # fmt: skip
def test_arguments_of_a_mixture(arguments, expected):
    moe = model_of(GPT | dict(add_bias_linear=False, num_experts=8, moe_router_topk=2) | arguments).moe
    assert {name: getattr(moe, name) for name in expected} == expected
    assert moe.num_experts == 8


MLA = dict(
    add_bias_linear=False, position_embedding_type="rope", qk_layernorm=True, multi_latent_attention=True,
    q_lora_rank=6, kv_lora_rank=4, qk_head_dim=4, qk_pos_emb_head_dim=2, v_head_dim=3, normalization="RMSNorm",
    rotary_base=1e4,
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            dict(rope_type="rope", rotary_scaling_factor=1.0),
            dict(
                head_dim=4, latent=LatentConfig(4, 6, 2, 3), qk_norm=False, attention_multiplier=None,
                rope=RopeConfig(interleaved=True),
            ),
        ),
        (
            # DeepSeek-V3: 0.1 ln 40 + 1 = 1.36888794541139
            dict(rotary_scaling_factor=40, mscale=1.0, mscale_all_dim=1.0, q_lora_rank=None, beta_fast=32, beta_slow=1),
            dict(
                latent=LatentConfig(4, None, 2, 3), attention_multiplier=pytest.approx(1.8738542070 / 6**0.5),
                rope=RopeConfig(
                    interleaved=True, scaling="yarn", factor=40.0, attention_factor=1.0, original_length=4096,
                    ramp=(1.0, 32.0),
                ),
            ),
        ),
        (dict(mtp_num_layers=2, mtp_loss_scaling_factor=0.3), dict(mtp_layers=2, mtp_loss=0.3, dropout=0.0)),
    ],
    ids=["rope", "yarn", "multi-token prediction"],
)  # fmt: skip
def test_arguments_of_latent_attention(arguments, expected):
    model = model_of(GPT | MLA | arguments)
    assert {name: getattr(model, name) for name in expected} == expected
    model.check(MeshConfig(), 32, ExecutionConfig())


def test_scales_that_versions_of_megatron_read_differently_are_logged(caplog):
    for all_dim, count in ((1.0, 0), (0.0, 1)):
        model_of(GPT | MLA | dict(rotary_scaling_factor=40, mscale=1.0, mscale_all_dim=all_dim))
        assert caplog.text.count(f"mscale=1.0, mscale_all_dim={all_dim}: the second one scales attention") == count


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_interleaved", True),
        ("add_bias_linear", True),
        ("qk_layernorm", False),
        ("position_embedding_type", "none"),
        ("rope_type", "dynamic"),
    ],
)
def test_latent_attention_of_another_kind_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: .*from_megatron.md"):
        model_of(GPT | MLA | {name: value})


def test_a_size_that_is_not_said_is_named():
    with pytest.raises(ValueError, match="do not say num_layers"):
        model_of({name: value for name, value in GPT.items() if name != "num_layers"})


@pytest.mark.parametrize("place", ["in the checkpoint", "where Megatron read it"])
def test_the_tokenizer_is_found(place, tmp_path):
    beside = tmp_path / ("iter_0000001/tokenizer" if place == "in the checkpoint" else "elsewhere")
    beside.mkdir(parents=True)
    (beside / "tokenizer.json").write_text("{}")
    arguments = GPT | dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path / "elsewhere"))
    config = config_of(arguments, tmp_path / "iter_0000001")
    assert config.data.tokenizer == str(beside / "tokenizer.json")


# ----------------------------------------------------------------------------- folders


def test_folders_that_are_no_checkpoint_are_refused(tmp_path, monkeypatch, capsys):
    def refused(match, **which):
        with pytest.raises(ValueError, match=match):
            open_checkpoint(tmp_path, **which)

    refused("latest_checkpointed_iteration.txt does not exist; give the folder that Megatron saved to")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    refused(r"names no iteration \(''\); use --iteration=N")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    refused("iter_0000007 does not exist")
    refused("iter_0000003 does not exist", iteration=3)
    (tmp_path / "iter_0000007").mkdir()
    monkeypatch.setitem(sys.modules, "megajax.weights.megatron.files", None)
    refused(r"torch is not installed.*megajax\[megatron\]")
    with pytest.raises(SystemExit, match="2"):
        main(["import", f"--from={tmp_path}", "--run_dir=out"])
    assert capsys.readouterr().err.startswith("error: torch is not installed")
    with pytest.raises(SystemExit, match="2"):
        main(["import", f"--from={tmp_path}", "--iterations=3"])
    assert capsys.readouterr().err.startswith("error: --iterations=3 is unknown; did you mean --iteration?")


def unpacked(archive: Path, tmp_path_factory) -> Path:
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("megatron")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return unpacked(RECORDED, tmp_path_factory) / "tp2_pp2"


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    return unpacked(MIXTURES, tmp_path_factory)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return unpacked(FAMILIES, tmp_path_factory)


@pytest.fixture
def save(recorded, tmp_path):
    """A copy that may be damaged."""
    return Path(shutil.copytree(recorded, tmp_path / "save"))


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
def test_what_megatron_wrote_is_imported_bit_for_bit(kind, recorded, tmp_path):
    run_dir = tmp_path / "run"
    checkpoint, config = import_checkpoint(recorded / kind, run_dir)
    assert (checkpoint.iteration, config.model) == (7, LLAMA_MODEL)
    found = from_megajax(arrays_of(Engine.from_run(run_dir).params, config.model), config.model)
    whole = np.load(recorded / "whole.npz")
    assert sorted(found) == sorted(whole)
    for name, array in found.items():
        np.testing.assert_array_equal(array, whole[name].astype(array.dtype), err_msg=name)
    started = dataclasses.replace(config, checkpoint=CheckpointConfig(start_from=str(run_dir)))
    start_from.check(start_from.pinned(started))


@pytest.mark.parametrize("kind", ["torch_dist", "torch"])
@pytest.mark.parametrize("name", ["mixture_tp2_pp2_ep2", "mixture_tp2_ep2_etp2"])
def test_mixtures_that_megatron_wrote_are_read_bit_for_bit(name, kind, mixtures):
    checkpoint, config = read(mixtures / name / kind, None, None)
    whole = np.load(mixtures / name / "whole.npz")
    assert config.model.moe.num_experts == 4 and config.model.moe.expert_dim == 6
    found = from_megajax(to_megajax(checkpoint.parameters, config.model), config.model)
    assert sorted(found) == sorted(whole)
    for parameter, array in found.items():
        assert array.dtype == whole[parameter].dtype
        np.testing.assert_array_equal(array, whole[parameter], err_msg=parameter)


SMALL = dict(num_layers=2, embed_dim=8, num_heads=4, mlp_dim=12, vocab_size=16, vocab_multiple=1, max_positions=16)
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0)
OF_FAMILIES = {
    "bert_tp2": BertConfig(
        **SMALL, **NO_DROPOUT, norm_epsilon=1e-5, norm_placement="pre", embedding_norm=False, activation="gelu_tanh",
        head_activation="gelu",
    ),
    "t5_tp2": EncoderDecoderConfig(
        **SMALL, **NO_DROPOUT, num_decoder_layers=2, head_dim=2, decoder_length=8, num_buckets=8, max_distance=12,
        norm="layernorm", norm_epsilon=1e-5, final_norm=False, activation="gelu_tanh", bias=True,
        attention_multiplier=None, logit_multiplier=1.0, head_bias=True,
    ),
    "hybrid_tp2_pp2": HybridConfig(
        **SMALL | {"num_layers": 4}, **NO_DROPOUT, pattern="M*-M", num_kv_heads=2, head_dim=2, position="none",
        norm="rmsnorm", norm_epsilon=1e-5, activation="squared_relu", biases=(), tied_embeddings=False,
        mamba=MambaConfig(num_heads=4, head_dim=4, state_dim=6, num_groups=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_other_families_are_imported_the_same_from_both_formats(name, families, tmp_path):
    whole = {}
    for kind in ("torch_dist", "torch"):
        checkpoint, config = read(families / name / kind, None, None)
        assert config.model == OF_FAMILIES[name]
        whole[kind] = from_megajax(to_megajax(checkpoint.parameters, config.model), config.model)
    assert sum(array.size for array in whole["torch"].values()) == Model(config.model).num_parameters()
    jax.tree.map(np.testing.assert_array_equal, whole["torch"], whole["torch_dist"])

    import_checkpoint(families / name / "torch", tmp_path / "run")
    assert open_model(tmp_path / "run").source.config.model == config.model


HYBRID = LLAMA | dict(layernorm_epsilon=1e-5, hybrid_override_pattern="M*", qk_layernorm=False)
OF_HYBRID = {
    "decoder.layers.0.mixer.conv1d.weight.x": (16, 1, 4),
    "decoder.layers.1.self_attention.linear_proj.weight": (8, 8),
    "decoder.final_norm.weight": (8,),
}
WITHOUT_CONVOLUTION = {"decoder.layers.0.mixer.dt_bias": (2,), "decoder.final_norm.weight": (8,)}
OF_BERT = {"lm_head.dense.weight": (8, 8)}
OF_T5 = {"decoder.layers.0.cross_attention.linear_q.weight": (8, 8)}
ROPE = {"position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("arguments", "names", "error"),
    [
        (HYBRID | {"hybrid_override_pattern": "MG"}, OF_HYBRID, "hybrid_override_pattern=MG"),
        (HYBRID | {"hybrid_layer_pattern": "M*/M"}, OF_HYBRID, "hybrid_layer_pattern="),
        (HYBRID | {"spec": ["specs", "gated_delta_product_stack_spec"]}, OF_HYBRID, "spec="),
        (HYBRID | {"layernorm_epsilon": 1e-6}, OF_HYBRID, "layernorm_epsilon=1e-06"),
        (HYBRID, WITHOUT_CONVOLUTION, "no layer has mixer.conv1d.weight"),
        (GPT | {"normalization": "RMSNorm"}, OF_BERT, "normalization=RMSNorm"),
        (GPT | {"swiglu": True}, OF_BERT, "swiglu=True"),
        (GPT | ROPE, OF_T5, "position_embedding_type=rope"),
        (GPT | {"num_experts": 4}, OF_T5, "num_experts=4"),
    ],
)
def test_what_the_other_families_do_not_have_is_refused_by_name(arguments, names, error):
    with pytest.raises(ValueError, match=f"^{error}"):
        config_of(arguments, shapes=names)


def test_a_mixture_is_written_piece_by_piece(mixtures, tmp_path, monkeypatch):
    """A piece is a part of one expert."""
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 300)
    source = mixtures / "mixture_tp2_ep2_etp2" / "torch_dist"
    checkpoint, config = import_checkpoint(source, tmp_path / "run")
    stored = StoredParams(tmp_path / "run", 7, Model(config.model).layer_rows)
    want = to_megajax(checkpoint.parameters, config.model)
    for path, array in jax.tree_util.tree_leaves_with_path(want):
        found = stored.open(name_of(path))
        np.testing.assert_array_equal(found.read((slice(None),) * array.ndim), array)


def test_experts_of_other_layouts(mixtures):
    """Matrices of a grouped layer numbered per rank, and a tensor of torch_dist for each expert."""
    experts = "decoder.layers.0.mlp.experts."
    ranks = {
        Rank(t, e): {f"{experts}linear_fc2.weight{n}": stored(np.full((2, 2), 10 * e + n)) for n in range(2)}
        for t, e in ((0, 0), (1, 1), (0, 2), (1, 3))
    }
    sizes = dict(num_experts=8, expert_model_parallel_size=4, expert_tensor_parallel_size=1)
    found = whole_stage(ranks, sizes)
    for number in range(8):
        (array,) = found[f"{experts}local_experts.{number}.linear_fc2.weight"]
        np.testing.assert_array_equal(array, np.full((2, 2), 10 * (number // 2) + number % 2))

    keys = {f"{experts}experts.{n}.linear_fc1.weight_{half}": ((3, 2), np.float32) for n in range(2) for half in "wv"}
    alone = whole_layers(keys, lambda key, at: np.full((3, 2), "wv".index(key[-1])))
    assert sorted(alone) == [f"{experts}local_experts.{n}.linear_fc1.weight" for n in range(2)]
    assert np.asarray(alone[f"{experts}local_experts.1.linear_fc1.weight"])[:, 0].tolist() == [0, 0, 0, 1, 1, 1]


def test_a_missing_rank_of_experts_is_named(mixtures, tmp_path):
    save = Path(shutil.copytree(mixtures / "mixture_tp2_pp2_ep2" / "torch", tmp_path / "save"))
    shutil.rmtree(save / "iter_0000007" / "mp_rank_01_001_001")
    with pytest.raises(ValueError, match="mp_rank_01_001_000, mp_rank_00_001_001 of 8 ranks is missing"):
        open_checkpoint(save)


def test_bfloat16_stays_bfloat16(save):
    import torch

    from megajax.weights.megatron import files

    def cast(value):
        return value.bfloat16() if isinstance(value, torch.Tensor) else value

    for file in save.glob("torch/iter_0000007/*/model_optim_rng.pt"):
        state = files.load(file)
        given = {name: value for name, value in vars(state["args"]).items() if isinstance(value, int | str | float)}
        state |= {"args": argparse.Namespace(**given), "model": {n: cast(a) for n, a in state["model"].items()}}
        torch.save(state, save / "new")
        (save / "new").replace(file)
    whole = np.load(save / "whole.npz")
    for name, array in open_checkpoint(save / "torch").parameters.items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, whole[name].astype(jnp.bfloat16))


def test_virtual_stages_take_turns(tmp_path):
    """Of two ranks with two chunks of a layer each the first has layers 0 and 2."""
    torch = pytest.importorskip("torch")
    name = "decoder.layers.{}.mlp.linear_fc2.weight"
    arguments = argparse.Namespace(pipeline_model_parallel_size=2, untie_embeddings_and_output_weights=True)
    for rank in range(2):
        chunks = {f"model{chunk}": {name.format(0): torch.full((1, 1), 2 * chunk + rank)} for chunk in range(2)}
        folder = tmp_path / "iter_0000003" / f"mp_rank_00_{rank:03d}"
        folder.mkdir(parents=True)
        torch.save({"args": arguments, "iteration": 3} | chunks, folder / "model_optim_rng.pt")
    parameters = open_checkpoint(tmp_path, 3).parameters
    assert {key: np.asarray(array).item() for key, array in parameters.items()} == {name.format(n): n for n in range(4)}


def test_the_command_shows_and_writes(recorded, tmp_path, capsys):
    arguments = ["import", f"--from={recorded / 'torch_dist' / 'iter_0000007'}", f"--run_dir={tmp_path / 'run'}"]
    main([*arguments, "--dry_run"])
    shown = capsys.readouterr().out
    assert "decoder.layers.1.mlp.linear_fc1.weight float32[24, 8]" in shown
    assert "--model.num_kv_heads=2" in shown and "--model.rope.base=500000.0" in shown
    assert not list(tmp_path.iterdir())
    main([*arguments, "--dtype=bfloat16", "--tokenizer=bytes"])
    assert "step 7" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "run exists" in capsys.readouterr().err


def test_incomplete_copies_are_refused(save, tmp_path):
    (save / "torch_dist/iter_0000007/__2_0.distcp").unlink()
    shutil.rmtree(save / "torch/iter_0000007/mp_rank_01_001")
    with pytest.raises(ValueError, match="cannot be read .*; copy the whole folder"):
        import_checkpoint(save / "torch_dist", tmp_path / "run")
    with pytest.raises(ValueError, match="mp_rank_01_001 of 4 ranks is missing; copy the whole folder"):
        import_checkpoint(save / "torch", tmp_path / "run")
    (save / "torch_dist/iter_0000007/metadata.json").unlink()
    with pytest.raises(ValueError, match="incomplete"):
        import_checkpoint(save / "torch_dist", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f",  # bytes, and a text, that are longer than any memory
        lambda good: b"\x80\x04\x8d" + b"\xff" * 7 + b"\x0f",
        lambda good: b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        lambda good: good[: len(good) // 2],
        lambda good: good.replace(b"state_dict_metadata", b"state_dict_metadatb"),
    ],
    ids=["bytes", "text", "nested", "cut", "name"],
)
def test_damaged_metadata_is_refused_in_one_line(damage, save, tmp_path):
    file = save / "torch_dist/iter_0000007/.metadata"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=r"^\S*/\.metadata cannot be read \(\w+: ?[^\n]*$"):
        import_checkpoint(save / "torch_dist", tmp_path / "run")


class Copy:
    """A pickle that copies a file when it is loaded as pickles usually are."""

    def __init__(self, source, target):
        self.call = shutil.copyfile, (str(source), str(target))

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["arguments", "metadata"])
def test_nothing_in_a_checkpoint_is_executed(place, save, tmp_path):
    import torch

    from megajax.weights.megatron import files

    copied = tmp_path / "copied"
    harm = Copy(RECORDED, copied)
    if place == "arguments":
        kind, file = "torch", save / "torch/iter_0000007/mp_rank_00_000/model_optim_rng.pt"
        state = files.load(file)
        given = {name: value for name, value in vars(state["args"]).items() if isinstance(value, int | str | float)}
        torch.save(state | {"args": argparse.Namespace(**given, more=harm)}, tmp_path / "new")
        (tmp_path / "new").replace(file)
    else:
        kind, file = "torch_dist", save / "torch_dist/iter_0000007/.metadata"
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = harm
        file.write_bytes(pickle.dumps(metadata))
    pickle.loads(pickle.dumps(harm))
    copied.unlink()  # it does what it says
    import_checkpoint(save / kind, tmp_path / "run")
    assert not copied.exists()


def test_a_file_that_is_more_than_data_is_refused_without_torchs_advice_to_execute_it(tmp_path):
    torch = pytest.importorskip("torch")
    from megajax.weights.megatron import files

    class Nested:
        def __reduce__(self):
            return Path.touch, (tmp_path / "touched",)  # it looks up the method that it then calls

    torch.save({"args": Nested()}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"file.pt cannot be read \(UnpicklingError: (?!Weights only load failed)"):
        files.load(tmp_path / "file.pt")
    assert not (tmp_path / "touched").exists()
