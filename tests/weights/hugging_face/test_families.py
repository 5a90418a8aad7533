"""Every table maps both ways, and recorded logits of transformers come out."""

import dataclasses
import json
import shutil
from operator import attrgetter
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.mapping import FAMILIES, family_for, family_of
from megajax.weights.hugging_face.translate import read_options, write_options

# Written by test_transformers.py from transformers 5.23.
RECORDED = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")
ENTRIES = json.loads(str(RECORDED["families"]))
# Both sides are float32 and add up in another order.
TOLERANCE = 1e-5
# The others are compared by the slow test.
QUICK = ("gpt2", "llama3 scaling", "gemma3", "falcon", "qwen2_moe")


def test_every_family_is_recorded():
    assert {family_of(entry["options"]).architecture for entry in ENTRIES.values()} == {
        family.architecture for family in FAMILIES if type(family.form.default) is DecoderConfig
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in ENTRIES]
)
def test_logits_are_those_of_transformers(name, write_drawn, our_logits, tmp_path):
    write_drawn(tmp_path, ENTRIES[name])
    want = RECORDED[name]
    ids = np.random.default_rng(0).integers(0, want.shape[-1], (2, want.shape[1])).astype(np.int32)[:1]
    found = our_logits(Folder(tmp_path), ids)
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE * want.std())


@pytest.mark.parametrize("name", ENTRIES)
def test_options_and_tensors_come_back(name):
    entry = ENTRIES[name]
    family = family_of(entry["options"])
    model = read_options(family, entry["options"])
    written = write_options(family, model)
    assert read_options(family, written) == model
    different = {
        key: (value, written[key])
        for key, value in entry["options"].items()
        if key in written and value is not None and written[key] != value
    }
    assert set(different) <= {"rope_parameters", "sliding_window"}, different
    tensors = family.map_of(model).tensors
    assert {tensor.name: list(tensor.shape) for tensor in tensors} == {
        name: shape for name, (shape, _) in entry["tensors"].items()
    }
    for tensor in tensors:
        array = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
        parts = tensor.split(array)
        assert [part.shape for part in parts] == [part.shape for part in tensor.parts]
        written = np.zeros_like(array)
        for view, part in zip(tensor.views(written), parts, strict=True):
            view[...] = part.reshape(view.shape)
        np.testing.assert_array_equal(written, array)


def test_experts_in_one_tensor_are_read_as_those_in_several(write_drawn, tmp_path):
    write_drawn(tmp_path / "several", ENTRIES["mixtral"])
    several = Folder(tmp_path / "several")
    tensors = safetensors.numpy.load_file(tmp_path / "several" / "model.safetensors")
    for layer in range(several.model.num_layers):
        block = f"model.layers.{layer}.block_sparse_moe."
        gate, up, down = (
            np.stack([tensors.pop(f"{block}experts.{n}.{name}.weight") for n in range(4)])
            for name in ("w1", "w3", "w2")
        )
        tensors |= {
            f"model.layers.{layer}.mlp.experts.gate_up_proj": np.concatenate([gate, up], 1),
            f"model.layers.{layer}.mlp.experts.down_proj": down,
            f"model.layers.{layer}.mlp.gate.weight": tensors.pop(f"{block}gate.weight"),
        }
    shutil.copytree(tmp_path / "several", tmp_path / "one")
    safetensors.numpy.save_file(tensors, tmp_path / "one" / "model.safetensors")
    one = Folder(tmp_path / "one")
    assert one.map.shapes == several.map.shapes
    for name, shape in one.map.shapes.items():
        index = (slice(1, 2), *[slice(None)] * (len(shape) - 1)) if "layers" in name else (slice(None),) * len(shape)
        parts = [folder.reader.read(name, folder.map.layers_of(name), index, np.float32) for folder in (one, several)]
        np.testing.assert_array_equal(*parts)


DRAFTING = ENTRIES["deepseek_v3"]["options"] | dict(num_hidden_layers=2, num_nextn_predict_layers=1)


def drafting_tensors() -> dict[str, np.ndarray]:
    """Of a DeepSeek-V3 of two layers and one of multi-token prediction, which is the third."""
    D = DRAFTING["hidden_size"]
    shapes = {name: shape for name, (shape, _) in ENTRIES["deepseek_v3"]["tensors"].items()}
    own = {"enorm.weight": [D], "hnorm.weight": [D], "eh_proj.weight": [D, 2 * D], "shared_head.norm.weight": [D]}
    shapes |= {f"model.layers.2.{name}": shape for name, shape in own.items()}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return tensors | {f"model.layers.2.{name}": tensors[copied] for name, copied in copies.items()}


def save(path: Path, options: dict, tensors: dict[str, np.ndarray]) -> Folder:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(options))
    safetensors.numpy.save_file(tensors, path / "model.safetensors")
    return Folder(path)


def test_a_layer_of_multi_token_prediction_is_read_as_the_same_layer_of_the_model(tmp_path):
    tensors = drafting_tensors()
    draft = save(tmp_path / "draft", DRAFTING, tensors)
    usual = {name: tensors[name] for name in ENTRIES["deepseek_v3"]["tensors"]}
    whole = save(tmp_path / "whole", DRAFTING | dict(num_hidden_layers=3, num_nextn_predict_layers=0), usual)
    names = [name for name in draft.map.shapes if name.startswith("mtp_1.moe.layer.")]
    assert len(names) == 18
    for name in names:
        index = (slice(None),) * len(draft.map.shapes[name])
        found = draft.reader.read(name, np.array([0]), index, np.float32)
        wanted = whole.reader.read(name.replace("mtp_1.moe.layer.", "layers.moe."), np.array([2]), index, np.float32)
        np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_guesses_are_those_of_the_formula(tmp_path):
    """DeepSeek-V3 (https://arxiv.org/abs/2412.19437), equations 21 to 23, in float64, with layers that add nothing."""
    tensors = drafting_tensors()
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name][...] = 0
    theirs = {name: array.astype(np.float64) for name, array in tensors.items()}
    V = DRAFTING["vocab_size"]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * theirs[f"{name}.weight"]

    ids = np.random.default_rng(1).integers(0, V, (2, 8)).astype(np.int32)
    embedded = theirs["model.embed_tokens.weight"][ids]
    hidden = norm(norm(embedded, "model.norm")[:, :-1], "model.layers.2.hnorm")
    joined = np.concatenate([norm(embedded[:, 1:], "model.layers.2.enorm"), hidden], -1)
    projected = joined @ theirs["model.layers.2.eh_proj.weight"].T
    want = norm(projected, "model.layers.2.shared_head.norm") @ theirs["lm_head.weight"].T

    folder = save(tmp_path / "draft", DRAFTING, tensors)
    model = Model(folder.model, PrecisionConfig(compute="float32"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), ids.shape)

    @jax.jit
    def guesses(weights):
        module = model.module(weights)
        batch = {"tokens": ids, "positions": positions}
        inputs = module.block_inputs(batch)
        hidden = module.final_norm(module.layers(module.embed(batch, None), inputs)[0])
        following = module.embed({"tokens": np.roll(ids, -1, 1), "positions": positions}, None)
        hidden, _, _ = module.mtp_1(hidden, inputs | {"next_embeddings": following})
        return hidden @ module.head.matrix()

    with jax.default_matmul_precision("highest"):
        found = np.asarray(guesses(folder.restore_params(form, model.layer_rows)))[:, :-1, :V]
    np.testing.assert_allclose(found, want, rtol=0, atol=TOLERANCE * want.std())


def test_version_4_of_transformers_is_read():
    options = dict(ENTRIES["llama3 scaling"]["options"])
    family = family_of(options)
    model = read_options(family, options)
    new = options.pop("rope_parameters")
    scaling = {name: value for name, value in new.items() if name != "rope_theta"}
    old = options | {"rope_theta": new["rope_theta"], "rope_scaling": scaling}
    assert read_options(family, old) == model
    written = write_options(family, model)
    assert written["rope_parameters"] == new and written["rope_scaling"] == scaling
    assert written["rope_theta"] == new["rope_theta"]

    options = dict(ENTRIES["gemma3"]["options"])
    family = family_of(options)
    model = read_options(family, options)
    options |= dict(rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6)
    del options["rope_parameters"], options["layer_types"]
    assert read_options(family, options) == model


SMALL = dict(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
    max_position_embeddings=2048,
)  # fmt: skip
LONGROPE = dict(short_factor=[1.0] * 4, long_factor=[2.0] * 4)
SPELLINGS = {
    "YaRN with mscale": ("Llama", dict(rope_scaling=dict(
        type="yarn", factor=40, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=0.707,
    )), {"rope.scaling": "yarn", "rope.factor": 40.0, "rope.original_length": 512,
         "rope.attention_factor": (0.1 * np.log(40) + 1) / (0.1 * 0.707 * np.log(40) + 1)}),
    "LongRoPE by its old name, without a factor": (
        "Phi3", dict(original_max_position_embeddings=512, rope_scaling=dict(type="su", **LONGROPE)),
        {"rope.scaling": "longrope", "rope.factor": 4.0, "rope.original_length": 512,
         "rope.factors": (1.0,) * 4 + (2.0,) * 4},
    ),
    "a window that is switched off": ("Qwen2", dict(sliding_window=64, max_window_layers=0), {"window": None}),
    "a window above the layers that there are": (
        "Qwen2", dict(use_sliding_window=True, sliding_window=64), {"window": None},
    ),
    "a window in all layers": (
        "Qwen2", dict(use_sliding_window=True, sliding_window=64, max_window_layers=0),
        {"window": 64, "pattern": ""},
    ),
    "the usual layers without rotary embedding": ("SmolLM3", {}, {"pattern": "f3n"}),
    "other layers without rotary embedding": ("SmolLM3", dict(no_rope_layer_interval=2), {"pattern": "fn"}),
    "defaults of Falcon": ("Falcon", {}, {"num_kv_heads": 1, "parallel_residual": "one_norm"}),
    "Falcon with as many keys as queries": ("Falcon", dict(multi_query=False), {"num_kv_heads": 4}),
    "names of GPT-NeoX": (
        "GPTNeoX", dict(rotary_pct=0.5, rotary_emb_base=5000), {"rope.fraction": 0.5, "rope.base": 5000.0},
    ),
    "defaults of GPT-J": (
        "GPTJ", dict(vocab_size=300, n_embd=512, n_layer=2, n_head=4),
        {"rope.fraction": 0.5, "parallel_residual": "one_norm"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_defaults_and_other_spellings_are_those_of_transformers(name):
    family, options, wanted = SPELLINGS[name]
    sizes = {} if "n_embd" in options else SMALL
    options = sizes | dict(architectures=[f"{family}ForCausalLM"], **options)
    model = read_options(family_of(options), options)
    found = {field: attrgetter(field)(model) for field in wanted}
    assert found == {field: pytest.approx(value) if isinstance(value, float) else value
                     for field, value in wanted.items()}  # fmt: skip


def test_a_number_comes_back_as_it_was_written():
    """1 / (1 / 49) is not 49."""
    options = ENTRIES["granite"]["options"] | dict(logits_scaling=49.0)
    family = family_of(options)
    assert write_options(family, read_options(family, options))["logits_scaling"] == 49.0


REFUSED = {
    "hidden_act=relu is not supported; supported are silu": dict(hidden_act="relu"),
    "rope_type=mrope is not supported": dict(rope_parameters=dict(rope_type="mrope", rope_theta=1e4)),
    "rope_type=llama3: mrope_section is not supported": dict(
        rope_parameters=dict(rope_type="llama3", factor=2.0, mrope_section=[1])
    ),
    "hidden_size is missing": dict(hidden_size=None),
    "GptOssForCausalLM.*supported are GPT2LMHeadModel, LlamaForCausalLM": dict(architectures=["GptOssForCausalLM"]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_options_are_named(message):
    options = ENTRIES["llama"]["options"] | REFUSED[message]
    options = {name: value for name, value in options.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        read_options(family_of(options), options)


def test_an_option_with_one_supported_value_may_be_null():
    options = ENTRIES["gpt2"]["options"] | dict(scale_attn_by_inverse_layer_idx=None)
    read_options(family_of(options), options)
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx=True is not supported; supported is False"):
        read_options(family_of(options), options | dict(scale_attn_by_inverse_layer_idx=True))


@pytest.mark.parametrize(
    "options, pattern",
    [
        (dict(decoder_sparse_step=2), "de"),
        (dict(mlp_only_layers=[0, 1]), "d2e2"),
        (dict(decoder_sparse_step=2, mlp_only_layers=[1]), "d3e"),
    ],
)
def test_layers_with_experts_are_named_as_in_the_folder(options, pattern):
    options = ENTRIES["qwen3_moe, every second layer"]["options"] | dict(decoder_sparse_step=1) | options
    family = family_of(options)
    model = read_options(family, options)
    assert model.pattern == pattern
    assert read_options(family, write_options(family, model)) == model


def test_losses_of_the_router_are_not_part_of_the_folder():
    options = ENTRIES["mixtral"]["options"]
    family = family_of(options)
    model = read_options(family, options)
    router = dataclasses.replace(model.moe.router, aux_loss=0.01, aux_loss_scope="batch", capacity_factor=1.5)
    trained = dataclasses.replace(model, moe=dataclasses.replace(model.moe, router=router))
    assert family_for(trained) is family and write_options(family, trained) == write_options(family, model)
    assert len(family.map_of(trained).tensors) == len(family.map_of(model).tensors)
    grouped = dataclasses.replace(model, moe=dataclasses.replace(model.moe, shared_dim=8))
    with pytest.raises(ValueError, match="MixtralForCausalLM does not have model.moe.shared_dim=8"):
        write_options(family, grouped)


def test_layers_with_a_window_need_no_period():
    entry = ENTRIES["gemma3"]["options"]
    kinds = ["full_attention", *entry["layer_types"][1:]]
    family = family_of(entry)
    model = read_options(family, entry | dict(layer_types=kinds))
    assert model.attention_letter(0) == "f"
    assert write_options(family, model)["layer_types"] == kinds
