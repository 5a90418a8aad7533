"""No option is dropped in silence: what an export accepts, transformers computes."""

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
import pytest

import configs
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.mapping import FAMILIES, family_for, family_of
from megajax.weights.hugging_face.translate import read_options, write_options

RECORDED = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")
ENTRIES = json.loads(str(RECORDED["families"]))
# The keys that the authors of these models publish, with their values.
PUBLISHED = json.loads((Path(__file__).parents[2] / "oracles" / "hugging_face_configs.json").read_text())
LENGTH = 16
# Both sides are float32 and add up in another order.
TOLERANCE = 2e-5

# Every field that changes what a decoder computes, with values to try; several fields where one needs the others.
SCALED = {"rope.factor": 4.0, "rope.original_length": 8, "max_positions": 32, "position": "rope"}
VALUES = {
    "num_kv_heads": [1, 2, None],
    "head_dim": [8, 12, 16],
    "mlp_dim": [40, None],
    "position": ["learned", "rope", "alibi", "none"],
    "rotary": [(True, False), ()],
    "norm": ["layernorm", "rmsnorm"],
    "norm_epsilon": [1e-3],
    "norm_zero_centered": [True, False],
    "norm_bias": [True, False],
    "norm_placement": ["pre", "post", "sandwich"],
    "embedding_norm": [True, False],
    "parallel_residual": ["none", "one_norm", "two_norms"],
    "qk_norm": [True, False, "all_heads"],
    "activation": ["gelu", "gelu_tanh", "relu", "squared_relu", "swiglu", "geglu", "geglu_tanh"],
    "qkv_bias": [True, False],
    "attention_out_bias": [True, False],
    "mlp_bias": [True, False],
    "head_bias": [True, False],
    "tied_embeddings": [True, False],
    "window": [5, None],
    "windows": [(True, False), ()],
    "attention_multiplier": [0.3, None],
    "attention_soft_cap": [2.0, None],
    "attention_sinks": [True],
    "embedding_multiplier": [3.0, 1.0],
    "residual_multiplier": [0.5, 1.0],
    "logit_multiplier": [0.5, 1.0],
    "logit_soft_cap": [3.0, None],
    "rope.base": [300.0],
    "rope.fraction": [0.25, 0.5, 0.75, 1.0],
    "rope.interleaved": [True, False],
    "rope.local_base": [200.0, None],
    "rope.scaling": [
        "none",
        SCALED | {"rope.scaling": "linear"},
        SCALED | {"rope.scaling": "dynamic", "rope.original_length": 64, "max_positions": 64},
        SCALED | {"rope.scaling": "llama3", "rope.ramp": (0.5, 2.0)},
        SCALED | {"rope.scaling": "yarn_exact", "rope.ramp": (0.5, 4.0)},
        SCALED | {"rope.scaling": "yarn", "rope.attention_factor": 1.5},
        SCALED | {"rope.scaling": "longrope", "rope.length": LENGTH},
    ],
    "moe.shared_dim": [24, 48, None],
    "moe.shared_gate": [True, False],
    "experts": [(False, True), (False, True, True), ()],
    "moe.router.top_k": [1, 2],
    "moe.router.score": ["softmax", "softmax_all", "sigmoid", "sqrt_softplus"],
    "moe.router.scale": [1.5],
    "moe.router.bias_update_rate": [1e-3, None],
    "moe.router.groups": [(2, 1)],
    "latent.q_rank": [None, 24],
    "latent.value_dim": [8],
}
DECODERS = [family for family in FAMILIES if type(family.form.default) is DecoderConfig]
BASES = {family_of(entry["options"]).architecture: entry["options"] for entry in reversed(ENTRIES.values())}

# Keys of config.json, with values to try; None removes the key.
ROPES = [dict(rope_type="default"), dict(type="linear", factor=4.0), dict(rope_type="dynamic", factor=4.0)] + [
    dict(factor=4.0, original_max_position_embeddings=8) | kind
    for kind in (
        dict(rope_type="llama3", low_freq_factor=0.5, high_freq_factor=2.0),
        dict(rope_type="yarn", mscale=0.7),
        dict(rope_type="yarn", mscale=1.0, mscale_all_dim=0.7),
        dict(rope_type="yarn", beta_fast=4.0, beta_slow=0.5, truncate=False),
    )
]
KEYS = {
    "rope_scaling": [*ROPES, None],
    "rope_parameters": [*(kind | dict(rope_theta=300.0) for kind in ROPES), None],
    "rope_theta": [300.0],
    "rotary_emb_base": [200.0],
    "rotary_pct": [0.5],
    "rope_local_base_freq": [100.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [8],
    "max_position_embeddings": [32],
    "hidden_act": ["gelu", "silu", "gelu_new", "relu"],
    "hidden_activation": ["gelu", "silu"],
    "tie_word_embeddings": [True, False],
    "rms_norm_eps": [1e-3],
    "layer_norm_eps": [1e-3],
    "layer_norm_epsilon": [1e-3],
    "norm_eps": [1e-3],
    "norm_epsilon": [1e-3],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "use_parallel_residual": [True, False],
    "sliding_window": [5, None],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1],
    "sliding_window_pattern": [2, 3],
    "layer_types": [["sliding_attention"], ["full_attention"], ["sliding_attention", "full_attention"]],
    "no_rope_layers": [[1, 0], [1, 1, 0]],
    "query_pre_attn_scalar": [12],
    "attn_logit_softcapping": [2.0, None],
    "use_bidirectional_attention": [True],
    "logits_scaling": [3.0],
    "num_attention_heads": [2],
    "head_dim": [8, 12],
    "num_key_value_heads": [1, 2],
    "norm_topk_prob": [True, False],
    "num_experts_per_tok": [1, 2],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[1]],
    "clip_qkv": [0.5],
    "first_k_dense_replace": [0, 2],
    "rope_interleave": [False],
    "scale_attn_weights": [False],
    "slow_but_exact": [True],
    "pretraining_tp": [2],
}


def replaced(config: DecoderConfig, words: dict) -> DecoderConfig:
    form = DECODERS[0].form
    return form.config(form.words(config) | words)


def changed(config: DecoderConfig, name: str, value) -> DecoderConfig:
    if name in ("windows", "rotary", "experts"):
        value = tuple(value[layer % len(value)] for layer in range(config.num_layers if value else 0))
    try:
        config = replaced(config, value if isinstance(value, dict) else {name: value})
    except ValueError:
        return config
    if config.rope.scaling == "longrope":
        pairs = int(config.rotary_head_dim * config.rope.fraction) // 2
        factors = (1.5,) * pairs + tuple(2.0 + n for n in range(pairs))
    else:
        factors = ()
    return dataclasses.replace(config, rope=dataclasses.replace(config.rope, factors=factors))


def is_accepted(family, config: DecoderConfig) -> bool:
    try:
        config.check(MeshConfig(), LENGTH, ExecutionConfig())
        write_options(family, config)
    except ValueError:
        return False
    return True


def drawn(family, seed: int) -> DecoderConfig:
    """The family's model with every second value of VALUES that the export accepts, in an order that is drawn."""
    rng = np.random.default_rng([seed, zlib.crc32(family.architecture.encode())])
    config = read_options(family, BASES[family.architecture])
    choices = [(name, value) for name, values in VALUES.items() for value in values]
    for number in rng.permutation(len(choices)):
        new = changed(config, *choices[number])
        if is_accepted(family, new) and rng.random() < 0.5:
            config = new
    return config


def write(family, config: DecoderConfig, path: Path, write_drawn) -> Folder:
    tensors = {tensor.name: [tensor.shape, 0] for tensor in family.map_of(config).tensors}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    write_drawn(path, {"options": tokens | write_options(family, config), "tensors": tensors})
    return Folder(path)


def test_exact_yarn_of_deepseek_is_written_as_it_was_read():
    family = family_of(dict(architectures=["DeepseekV3ForCausalLM"]))
    scaling = dict(type="yarn", factor=4.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=0.7)
    for truncate in (True, False):
        config = read_options(family, BASES[family.architecture] | dict(rope_scaling=scaling | dict(truncate=truncate)))
        assert config.rope.scaling == ("yarn" if truncate else "yarn_exact")
        assert read_options(family, write_options(family, config)) == config


def test_values_to_try_are_of_words_that_there_are():
    assert VALUES.keys() <= DECODERS[0].form.words(DecoderConfig()).keys()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.architecture)
def test_what_is_exported_is_what_transformers_computes(family, seed, load_theirs, write_drawn, our_logits, tmp_path):
    config = drawn(family, seed)
    folder = write(family, config, tmp_path, write_drawn)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
    want = load_theirs(tmp_path).logits(ids)
    folder.model = config
    np.testing.assert_allclose(our_logits(folder, ids), want, rtol=0, atol=TOLERANCE * want.std())


def described(family, seed: int) -> dict:
    """A config.json with every third value of KEYS that the import accepts, in an order that is drawn."""
    rng = np.random.default_rng([seed, zlib.crc32(family.architecture.encode())])
    options = BASES[family.architecture] | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    number_of_layers = read_options(family, options).num_layers
    choices = [(name, value) for name, values in KEYS.items() for value in values]
    for number in rng.permutation(len(choices)):
        name, value = choices[number]
        if name in ("layer_types", "no_rope_layers"):
            value = (value * number_of_layers)[:number_of_layers]
        new = {key: old for key, old in options.items() if key != name} | ({} if value is None else {name: value})
        try:
            read_options(family, new).check(MeshConfig(), LENGTH, ExecutionConfig())
        except (ValueError, KeyError):
            continue
        options = new if rng.random() < 0.4 else options
    return options


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.architecture)
def test_what_is_imported_is_what_transformers_computes(family, seed, load_theirs, write_drawn, our_logits, tmp_path):
    """Or transformers does not load it."""
    options = described(family, seed)
    config = read_options(family, options)
    tensors = {tensor.name: [tensor.shape, 0] for tensor in family.map_of(config).tensors}
    write_drawn(tmp_path, {"options": options, "tensors": tensors})
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH)).astype(np.int32)
    try:
        want = load_theirs(tmp_path, may_warn=True).logits(ids)
    except (RuntimeError, TypeError, KeyError, ValueError, AttributeError) as error:
        pytest.skip(f"transformers: {str(error).splitlines()[0]}")
    np.testing.assert_allclose(our_logits(Folder(tmp_path), ids), want, rtol=0, atol=TOLERANCE * want.std())


# ----------------------------------------------------------------------------- keys of config.json


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_known_keys_and_no_other_key_is_ignored(name):
    options = PUBLISHED[name]
    family = family_of(options)
    model = read_options(family, options)
    assert read_options(family, options | dict(new_option=None)) == model
    with pytest.raises(ValueError, match=f"new_option=0 is unknown in {family.architecture}, .* remove the key"):
        read_options(family, options | dict(new_option=0))
    with pytest.raises(ValueError, match="rope_interleaved=True is not supported by .*; supported is False"):
        read_options(family, options | dict(rope_interleaved=True))


# What the shapes of the tensors show, or what changes no logit.
OTHER_DEFAULTS = {"num_kv_heads", "head_dim", "max_positions", "init_std"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_keys_that_are_missing_have_the_defaults_of_transformers(family, transformers):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # With the default images of Gemma 3, and the default choice of DeepSeek-V2's experts, there is no model.
    vision = dict(model_type="siglip_vision_model", image_size=896, patch_size=14)
    needed = {"gemma3": dict(vision_config=vision), "deepseek_v2": dict(num_experts_per_tok=6)}
    sizes = needed.get(family.model_type, {})
    defaults = json.loads(CONFIG_MAPPING[family.model_type](**sizes).to_json_string(use_diff=False))
    options = defaults | dict(architectures=[family.architecture])
    whole = dataclasses.asdict(read_options(family, options))
    for key in {key for option in family.options for key in option.keys} & defaults.keys():
        try:
            found = read_options(family, {name: value for name, value in options.items() if name != key})
        except (KeyError, ValueError) as error:
            assert isinstance(error, KeyError) or "is missing" in str(error), key
            continue
        different = {name for name, value in dataclasses.asdict(found).items() if value != whole[name]}
        assert different <= OTHER_DEFAULTS, (key, different)


def test_partial_rotary_is_exported_as_a_class_that_has_it_or_refused():
    biases = dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), False)
    config = replaced(read_options(LLAMA, BASES["LlamaForCausalLM"]), biases)
    half = replaced(config, {"rope.fraction": 0.5})
    assert family_for(config) is LLAMA and family_for(half).architecture == "Phi3ForCausalLM"
    found = {family.architecture for family in DECODERS if "partial_rotary_factor" in _written(family, 0.5)}
    assert found == {
        f"{name}ForCausalLM" for name in ("Phi3", "StableLm", "Nemotron", "GPTNeoX", "Phi")
    }  # as transformers 5.23
    with pytest.raises(ValueError, match="LlamaForCausalLM does not have model.rope.fraction=0.5"):
        write_options(LLAMA, half)
    for place in (dict(partial_rotary_factor=0.4), dict(rope_parameters=dict(partial_rotary_factor=0.4))):
        with pytest.raises(ValueError, match="partial_rotary_factor=0.4 is not supported: this class of transformers"):
            read_options(LLAMA, BASES["LlamaForCausalLM"] | place)
    phi = next(family for family in DECODERS if family.architecture == "PhiForCausalLM")
    with pytest.raises(ValueError, match="partial_rotary_factor=0.4 rotates an odd number of entries, 3 of head_dim=8"):
        read_options(phi, BASES[phi.architecture] | dict(rope_parameters=dict(partial_rotary_factor=0.4)))


LLAMA = family_of(dict(architectures=["LlamaForCausalLM"]))


def _written(family, fraction: float) -> dict:
    config = read_options(family, BASES[family.architecture])
    try:
        return write_options(family, replaced(config, {"rope.fraction": fraction}))
    except ValueError:
        return {}


FULL = dict(rope_type="default", rope_theta=1e6)
SCALED_WINDOW = dict(rope_type="linear", factor=4.0, rope_theta=1e4)
REFUSED = [
    ("Gemma3", "sliding_attention: rope_type=linear is not supported", dict(
        rope_parameters=dict(full_attention=FULL, sliding_attention=SCALED_WINDOW))),
    ("Gemma3", "rope_parameters: factor, rope_type is not supported beside", dict(
        rope_parameters=dict(rope_type="linear", factor=4.0))),
    ("Gemma3", "partial_rotary_factor=0.5 is not supported", dict(
        rope_parameters=dict(full_attention=FULL | dict(partial_rotary_factor=0.5)))),
    ("Gemma3", "truncate=False is ignored by transformers", dict(
        rope_parameters=dict(full_attention=FULL | dict(rope_type="yarn", factor=4.0, truncate=False)))),
    ("Gemma3", "attn_logit_softcapping=50.0 is not supported; supported is None", dict(attn_logit_softcapping=50.0)),
    ("Qwen3", "full_attention, sliding_attention is not supported in rope_parameters", dict(
        rope_parameters=dict(full_attention=FULL, sliding_attention=SCALED_WINDOW))),
    ("Phi3", "rope_type=linear is not supported; supported are default, longrope", dict(
        rope_scaling=dict(type="linear", factor=2.0))),
    ("Llama", "rope_type=dynamic: original_max_position_embeddings=16 is not supported", dict(
        rope_scaling=dict(type="dynamic", factor=2.0, original_max_position_embeddings=16))),
    ("Llama", "rope_theta=5.0, but 10000.0 is used", dict(rope_theta=5.0)),
    ("DeepseekV2", "topk_method=group_limited_greedy is not supported", dict(topk_method="group_limited_greedy")),
    ("SmolLM3", "use_sliding_window=True is not supported without layer_types", dict(
        use_sliding_window=True, sliding_window=5, layer_types=None)),
    ("SmolLM3", "layer_types names sliding_attention, but use_sliding_window is not true", dict(
        use_sliding_window=False, sliding_window=5, layer_types=["sliding_attention"] * 4)),
    ("Mistral", "layer_types=.* is not supported: sliding_window=4096 applies to all", dict(
        sliding_window=4096, layer_types=["full_attention"] * 3)),
    ("Qwen2", "layer_types must be a list with an entry for each of the 3 layers", dict(layer_types=[])),
]  # fmt: skip


@pytest.mark.parametrize("name, message, changes", REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_transformers_computes_otherwise_is_refused(name, message, changes):
    options = BASES[f"{name}ForCausalLM"] | changes
    with pytest.raises(ValueError, match=message):
        read_options(family_of(options), {key: value for key, value in options.items() if value is not None})


@pytest.mark.parametrize("name, key", [("Granite", "attention_multiplier"), ("Gemma2", "query_pre_attn_scalar")])
def test_the_usual_factor_on_scores_is_written_as_a_number(name, key):
    """transformers does not load a null."""
    options = BASES[f"{name}ForCausalLM"]
    family = family_of(options)
    model = replaced(read_options(family, options), {"attention_multiplier": None, "head_dim": None})
    width = model.embed_dim // model.num_heads
    found = write_options(family, model)[key]
    assert found == pytest.approx({"attention_multiplier": width**-0.5, "query_pre_attn_scalar": width}[key])
    if name == "Gemma2":
        with pytest.raises(ValueError, match="model.attention_multiplier=0.3, for which .* no whole number"):
            write_options(family, replaced(model, {"attention_multiplier": 0.3}))


def test_sizes_of_latents_are_written_as_numbers():
    config = configs.recipe("moonlight_16b_a3b").model
    family = family_for(config)
    assert write_options(family, config) | dict(rms_norm_eps=1e-5, v_head_dim=128) == write_options(family, config)
    latent = dataclasses.replace(config.latent, norm_epsilon=None)
    with pytest.raises(ValueError, match="set model.latent.norm_epsilon to 1e-6"):
        write_options(family, dataclasses.replace(config, latent=latent))
