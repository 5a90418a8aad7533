"""The Hugging Face decoders without experts: tables of their options and tensors, used by mapping.py both ways.

A family consists of the keys of its config.json (options) and its tensors (weights.py). Sources: the configuration and
modeling files of transformers 5 for each family, and the config.json files of version 4, which spell some options
differently.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megajax.weights.hugging_face import weights
from megajax.weights.hugging_face.form import Family
from megajax.weights.hugging_face.layer_options import NO_ROPE, Window
from megajax.weights.hugging_face.options import GATED, PLAIN, Choice, Follows, Option, Options
from megajax.weights.hugging_face.rope import ROPE, TWO_ROPES, Rope


@dataclasses.dataclass(frozen=True)
class RotatedDims:
    """rotary_dim of GPT-J: the number of rotated dims of a head instead of a fraction; there are no other options."""

    default: int = 64
    keys = ("rotary_dim",)

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if (rotated := theirs.get("rotary_dim", self.default)) is None:
            raise ValueError("rotary_dim=None is not supported; give the number of rotated dims of a head")
        return {"rope.fraction": rotated / (theirs["n_embd"] // theirs["n_head"]), "rope.interleaved": True}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        return {"rotary_dim": round(ours["rope.fraction"] * ours["head_dim"])}


class FalconOptions:
    """Key-value heads and parallel residuals."""

    keys = ("new_decoder_architecture", "num_ln_in_parallel_attn", "num_kv_heads", "multi_query", "parallel_attn")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        if theirs.get("new_decoder_architecture", False):
            norms = theirs.get("num_ln_in_parallel_attn") or 2
            if norms != 2:
                raise ValueError(f"num_ln_in_parallel_attn={norms} is not supported with new_decoder_architecture")
            return {"num_kv_heads": theirs.get("num_kv_heads"), "parallel_residual": "two_norms"}
        heads = 1 if theirs.get("multi_query", True) else None
        parallel = "one_norm" if theirs.get("parallel_attn", True) else "none"
        return {"num_kv_heads": heads, "parallel_residual": parallel}

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        is_new = ours["parallel_residual"] == "two_norms"
        return {
            "new_decoder_architecture": is_new,
            "multi_query": is_new or ours["num_kv_heads"] == 1,  # used by the old architecture only,
            "num_kv_heads": ours["num_kv_heads"] if is_new else ours["num_heads"],  # as this by the new one
            "parallel_attn": ours["parallel_residual"] != "none",
            "num_ln_in_parallel_attn": 2 if is_new else None,
        }


# Values of our words.
RMS = dict(position="rope", norm="rmsnorm", bias=False)
_LAYER_NORM = dict(position="rope", norm="layernorm", bias=False)
_BIASED = dict(position="rope", norm="layernorm", bias=True)

# Keys of config.json with their defaults.
SIZES: Options = (
    Option("vocab_size", "vocab_size"),
    Option("hidden_size", "embed_dim"),
    Option("num_hidden_layers", "num_layers"),
    Option("num_attention_heads", "num_heads"),
    Option("max_position_embeddings", "max_positions", 2048),
    Option("initializer_range", "init_std", 0.02),
)
MLP = Option("intermediate_size", "mlp_dim")
KV_HEADS = Option("num_key_value_heads", "num_kv_heads", None)
DECODER: Options = (*SIZES, MLP, KV_HEADS)
HEAD_DIM = Option("head_dim", "head_dim", None)
UNTIED = Option("tie_word_embeddings", "tied_embeddings", False)
_TIED = Option("tie_word_embeddings", "tied_embeddings", True)
RMS_EPSILON = Option("rms_norm_eps", "norm_epsilon", 1e-6)
RMS_EPSILON_5 = Option("rms_norm_eps", "norm_epsilon", 1e-5)
_NORM_EPSILON = Option("layer_norm_eps", "norm_epsilon", 1e-5)
_LONG_NORM_EPSILON = Option("layer_norm_epsilon", "norm_epsilon", 1e-5)
SILU = Option("hidden_act", "activation", "silu", values=GATED)
_GELU_NEW = dict(gelu_new="gelu_tanh") | PLAIN  # written by this name
ATTENTION_BIAS = Option("attention_bias", ("qkv_bias", "attention_out_bias"), False)
_MLP_BIAS = Option("mlp_bias", "mlp_bias", False)
_PARALLEL = {False: "none", True: "one_norm"}
_TWO_NORMS = {True: "two_norms", False: "none"}
_GPT2: Options = (  # and GPT-J
    Option("vocab_size", "vocab_size"),
    Option("n_embd", "embed_dim"),
    Option("n_inner", "mlp_dim", None),
    Option("n_layer", "num_layers"),
    Option("n_head", "num_heads"),
    Option("n_positions", "max_positions", 1024),
    _LONG_NORM_EPSILON,
    Option("initializer_range", "init_std", 0.02),
    Option("activation_function", "activation", "gelu_new", values=_GELU_NEW),
)
LLAMA: Options = (*DECODER, UNTIED, SILU)
_GEMMA: Options = (
    *DECODER,
    HEAD_DIM,
    _TIED,
    RMS_EPSILON,
    Option("hidden_activation", "activation", "gelu_pytorch_tanh", values=GATED),
    ATTENTION_BIAS,
    Option("query_pre_attn_scalar", "attention_multiplier", 256, power=-0.5),
    Follows("embedding_multiplier", 0.5),
)

FAMILIES: tuple[Family, ...] = (
    # Order of preference when exporting a model without a named architecture.
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        dict(position="learned", norm="layernorm", bias=True),
        (
            *_GPT2,
            _TIED,
            Choice("scale_attn_weights", True),
            Choice("scale_attn_by_inverse_layer_idx", False),
            Choice("add_cross_attention", False),
        ),
        weights.GPT2,
    ),
    Family(
        "LlamaForCausalLM",
        "llama",
        RMS,
        (*LLAMA, HEAD_DIM, RMS_EPSILON, ATTENTION_BIAS, _MLP_BIAS, ROPE),
        weights.LLAMA,
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        RMS,
        (*LLAMA, HEAD_DIM, RMS_EPSILON, ROPE, Window("everywhere", default=4096)),
        weights.LLAMA,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        RMS | dict(qkv_bias=True),
        (*LLAMA, RMS_EPSILON, ROPE, Window("switched", default=4096)),
        weights.LLAMA,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        RMS | dict(qk_norm=True),
        (*LLAMA, HEAD_DIM, RMS_EPSILON, ATTENTION_BIAS, ROPE, Window("switched", default=4096)),
        weights.LLAMA,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        RMS | dict(norm_zero_centered=True, norm_placement="sandwich"),
        (
            *_GEMMA,
            Option("final_logit_softcapping", "logit_soft_cap", 30.0),
            Option("attn_logit_softcapping", "attention_soft_cap", 50.0),
            ROPE,
            Window("pattern", default=4096, every=2),
        ),
        weights.GEMMA,
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        RMS | dict(norm_zero_centered=True, norm_placement="sandwich", qk_norm=True),
        (
            *_GEMMA,
            Option("final_logit_softcapping", "logit_soft_cap", None),
            Choice("attn_logit_softcapping", None),  # transformers has the key and does not read it
            Choice("use_bidirectional_attention", False),
            TWO_ROPES,
            Window("pattern", default=4096, every=6),
        ),
        weights.GEMMA,
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        RMS,
        (
            *LLAMA,
            RMS_EPSILON_5,
            Rope(fraction=1.0, scalings=("longrope",), original_length=4096),
            Window("everywhere", default=None),
        ),
        weights.PHI3,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        RMS | dict(norm_placement="post", qk_norm="all_heads"),
        (*LLAMA, RMS_EPSILON_5, ATTENTION_BIAS, ROPE),
        weights.OLMO2,
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        RMS,
        (
            *DECODER,
            _TIED,
            SILU,
            RMS_EPSILON,
            ATTENTION_BIAS,
            _MLP_BIAS,
            Rope(base=2_000_000.0),
            NO_ROPE,
            Window("listed", default=None),
        ),
        weights.LLAMA,
    ),
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        dict(position="rope", norm="layernorm"),
        (
            *DECODER,
            _TIED,
            Option("hidden_act", "activation", "gelu_pytorch_tanh", values=PLAIN),
            Option("norm_epsilon", "norm_epsilon", 1e-5),
            Option("use_bias", "bias", True),
            ROPE,
            Window("everywhere", default=None),
        ),
        weights.STARCODER2,
    ),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        _LAYER_NORM,
        (
            *LLAMA,
            _NORM_EPSILON,
            Option("use_qkv_bias", "qkv_bias", False),
            Option("use_parallel_residual", "parallel_residual", False, values=_PARALLEL),
            Choice("qk_layernorm", False),
            Rope(fraction=0.25),
        ),
        weights.LLAMA,
    ),
    Family(
        "NemotronForCausalLM",
        "nemotron",
        _LAYER_NORM | dict(norm_zero_centered=True),
        (
            *DECODER,
            HEAD_DIM,
            UNTIED,
            Option("hidden_act", "activation", "relu2", values=PLAIN),
            Option("norm_eps", "norm_epsilon", 1e-5),
            ATTENTION_BIAS,
            _MLP_BIAS,
            Rope(fraction=0.5),
        ),
        weights.LLAMA,
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _BIASED,
        (
            *SIZES,
            MLP,
            UNTIED,
            Option("hidden_act", "activation", "gelu", values=PLAIN),
            _NORM_EPSILON,
            Option("use_parallel_residual", "parallel_residual", True, values=_TWO_NORMS),
            Option("attention_bias", ("qkv_bias", "attention_out_bias"), True),
            Rope(fraction=0.25, names=("rotary_emb_base", "rotary_pct")),
        ),
        weights.NEOX,
    ),
    Family(
        "PhiForCausalLM",
        "phi",
        _BIASED | dict(parallel_residual="one_norm", head_bias=True),
        (
            *DECODER,
            UNTIED,
            Option("hidden_act", "activation", "gelu_new", values=_GELU_NEW),
            _NORM_EPSILON,
            Choice("qk_layernorm", False),
            Rope(fraction=0.5),
        ),
        weights.PHI,
    ),
    Family(
        "GPTJForCausalLM",
        "gptj",
        _LAYER_NORM | dict(mlp_bias=True, parallel_residual="one_norm", head_bias=True),
        (*_GPT2, UNTIED, RotatedDims()),
        weights.GPTJ,
    ),
    Family(
        "FalconForCausalLM",
        "falcon",
        dict(position="rope", norm="layernorm"),
        (
            *SIZES,
            _TIED,
            Option("ffn_hidden_size", "mlp_dim", None),
            Option("activation", "activation", "gelu", values=PLAIN),
            _LONG_NORM_EPSILON,
            Option("bias", "bias", False),
            Choice("alibi", False),
            FalconOptions(),
            ROPE,
        ),
        weights.FALCON,
    ),
    Family(
        "CohereForCausalLM",
        "cohere",
        _LAYER_NORM | dict(norm_bias=False, parallel_residual="one_norm"),
        (
            *DECODER,
            _TIED,
            SILU,
            _NORM_EPSILON,
            ATTENTION_BIAS,
            Option("logit_scale", "logit_multiplier", 0.0625),
            Choice("use_qk_norm", False),
            Rope(base=500_000.0, interleaved=True),
        ),
        weights.LLAMA,
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        RMS,
        (
            *LLAMA,
            RMS_EPSILON,
            ATTENTION_BIAS,
            _MLP_BIAS,
            ROPE,
            Option("embedding_multiplier", "embedding_multiplier", 1.0),
            Option("attention_multiplier", "attention_multiplier", 1.0),
            Option("residual_multiplier", "residual_multiplier", 1.0),
            Option("logits_scaling", "logit_multiplier", 1.0, power=-1),
        ),
        weights.LLAMA,
    ),
    Family(
        "BloomForCausalLM",
        "bloom",
        dict(position="alibi", norm="layernorm", bias=True, embedding_norm=True, activation="gelu_tanh"),
        (
            Option("vocab_size", "vocab_size"),
            Option("hidden_size", "embed_dim", also=("n_embed",)),
            Option("n_layer", "num_layers", also=("num_hidden_layers",)),
            Option("n_head", "num_heads", also=("num_attention_heads",)),
            _LONG_NORM_EPSILON,
            Option("initializer_range", "init_std", 0.02),
            _TIED,
            Choice("apply_residual_connection_post_layernorm", False),
        ),
        weights.BLOOM,
    ),
)
