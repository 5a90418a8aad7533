"""Tables of the options and parameters of each Hugging Face decoder family, used by mapping.py in both directions.

A family consists of the keys of its config.json (options) and the names of its tensors (weights). Sources: the
configuration and modeling files of transformers 5 for each family, and the config.json files of version 4, which spell
some options differently. `{}` in the name of a tensor is the layer number.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from megajax.hugging_face.options import (
    GATED,
    NO_ROPE,
    PLAIN,
    ROPE,
    TWO_ROPES,
    Choice,
    Follows,
    Option,
    Options,
    Rope,
    Window,
    falcon_options,
)

Layout = Literal["same", "linear", "conv1d", "by_head"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Maps one Hugging Face tensor (theirs) to one or several of our parameters; ignored if the model has none of
    these."""

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = "same"
    """linear: theirs is [out, in], ours [in, out], several of ours concatenated along out. conv1d: theirs is [in, out].
    by_head: as linear, with rows grouped by key-value head: queries, key, value. same: no change."""
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of our config for which the row applies."""


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    architecture: str
    model_type: str
    always: Mapping[str, Any]
    """Values of our config fields common to all models of the family."""
    options: Options
    weights: tuple[Row, ...]


def _linear(theirs: str, *ours: str, layout: Layout = "linear") -> tuple[Row, Row]:
    biases = tuple(f"{name}_bias" for name in ours)
    return Row(f"{theirs}.weight", ours, layout), Row(f"{theirs}.bias", biases, layout)


def _norm(theirs: str, ours: str, **where: Any) -> tuple[Row, Row]:
    return Row(f"{theirs}.weight", (f"{ours}.scale",), where=where), Row(
        f"{theirs}.bias", (f"{ours}.bias",), where=where
    )


_L = "layers.dense."
_Q, _K, _V, _OUT = (f"{_L}attention.{name}" for name in ("query", "key", "value", "out"))
_GATE, _UP, _DOWN = (f"{_L}mlp.{name}" for name in ("gate", "up", "down"))
_HEAD = _linear("lm_head", "head")

# ----------------------------------------------------------------------------- parameters

_LLAMA_OUTSIDE = (Row("model.embed_tokens.weight", ("embedding",)), *_norm("model.norm", "final_norm"), *_HEAD)
_LLAMA_ATTENTION = (
    *_linear("model.layers.{}.self_attn.q_proj", _Q),
    *_linear("model.layers.{}.self_attn.k_proj", _K),
    *_linear("model.layers.{}.self_attn.v_proj", _V),
    *_linear("model.layers.{}.self_attn.o_proj", _OUT),
    *_norm("model.layers.{}.self_attn.q_norm", _L + "attention.query_norm"),
    *_norm("model.layers.{}.self_attn.k_norm", _L + "attention.key_norm"),
)
_LLAMA_MLP = (
    *_linear("model.layers.{}.mlp.gate_proj", _GATE),
    *_linear("model.layers.{}.mlp.up_proj", _UP),
    *_linear("model.layers.{}.mlp.down_proj", _DOWN),
)
_LLAMA_NORMS = (
    *_norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_norm("model.layers.{}.post_attention_layernorm", _L + "mlp_norm"),
)
_LLAMA_WEIGHTS = (*_LLAMA_OUTSIDE, *_LLAMA_NORMS, *_LLAMA_ATTENTION, *_LLAMA_MLP)
_PHI3_WEIGHTS = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *_linear("model.layers.{}.self_attn.qkv_proj", _Q, _K, _V),
    *_linear("model.layers.{}.self_attn.o_proj", _OUT),
    *_linear("model.layers.{}.mlp.gate_up_proj", _GATE, _UP),
    *_linear("model.layers.{}.mlp.down_proj", _DOWN),
)
_GEMMA_NORMS = (
    *_norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_norm("model.layers.{}.post_attention_layernorm", _L + "attention_post_norm"),
    *_norm("model.layers.{}.pre_feedforward_layernorm", _L + "mlp_norm"),
    *_norm("model.layers.{}.post_feedforward_layernorm", _L + "mlp_post_norm"),
)
_OLMO2_NORMS = (
    *_norm("model.layers.{}.post_attention_layernorm", _L + "attention_post_norm"),
    *_norm("model.layers.{}.post_feedforward_layernorm", _L + "mlp_post_norm"),
)
_STARCODER2_MLP = (*_linear("model.layers.{}.mlp.c_fc", _UP), *_linear("model.layers.{}.mlp.c_proj", _DOWN))
_PHI_WEIGHTS = (
    Row("model.embed_tokens.weight", ("embedding",)),
    *_norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_linear("model.layers.{}.self_attn.q_proj", _Q),
    *_linear("model.layers.{}.self_attn.k_proj", _K),
    *_linear("model.layers.{}.self_attn.v_proj", _V),
    *_linear("model.layers.{}.self_attn.dense", _OUT),
    *_linear("model.layers.{}.mlp.fc1", _UP),
    *_linear("model.layers.{}.mlp.fc2", _DOWN),
    *_norm("model.final_layernorm", "final_norm"),
    *_HEAD,
)
_GPT2_WEIGHTS = (
    Row("transformer.wte.weight", ("embedding",)),
    Row("transformer.wpe.weight", ("position_embedding",)),
    *_norm("transformer.h.{}.ln_1", _L + "attention_norm"),
    *_linear("transformer.h.{}.attn.c_attn", _Q, _K, _V, layout="conv1d"),
    *_linear("transformer.h.{}.attn.c_proj", _OUT, layout="conv1d"),
    *_norm("transformer.h.{}.ln_2", _L + "mlp_norm"),
    *_linear("transformer.h.{}.mlp.c_fc", _UP, layout="conv1d"),
    *_linear("transformer.h.{}.mlp.c_proj", _DOWN, layout="conv1d"),
    *_norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
_GPTJ_WEIGHTS = (
    Row("transformer.wte.weight", ("embedding",)),
    *_norm("transformer.h.{}.ln_1", _L + "attention_norm"),
    *_linear("transformer.h.{}.attn.q_proj", _Q),
    *_linear("transformer.h.{}.attn.k_proj", _K),
    *_linear("transformer.h.{}.attn.v_proj", _V),
    *_linear("transformer.h.{}.attn.out_proj", _OUT),
    *_linear("transformer.h.{}.mlp.fc_in", _UP),
    *_linear("transformer.h.{}.mlp.fc_out", _DOWN),
    *_norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
_NEOX_WEIGHTS = (
    Row("gpt_neox.embed_in.weight", ("embedding",)),
    *_norm("gpt_neox.layers.{}.input_layernorm", _L + "attention_norm"),
    *_norm("gpt_neox.layers.{}.post_attention_layernorm", _L + "mlp_norm"),
    *_linear("gpt_neox.layers.{}.attention.query_key_value", _Q, _K, _V, layout="by_head"),
    *_linear("gpt_neox.layers.{}.attention.dense", _OUT),
    *_linear("gpt_neox.layers.{}.mlp.dense_h_to_4h", _UP),
    *_linear("gpt_neox.layers.{}.mlp.dense_4h_to_h", _DOWN),
    *_norm("gpt_neox.final_layer_norm", "final_norm"),
    *(Row(row.theirs.replace("lm_head", "embed_out"), row.ours, row.layout) for row in _HEAD),
)
_BLOOM_LAYER = (
    *_linear("transformer.h.{}.self_attention.query_key_value", _Q, _K, _V, layout="by_head"),
    *_linear("transformer.h.{}.self_attention.dense", _OUT),
    *_linear("transformer.h.{}.mlp.dense_h_to_4h", _UP),
    *_linear("transformer.h.{}.mlp.dense_4h_to_h", _DOWN),
)
_BLOOM_OUTSIDE = (
    Row("transformer.word_embeddings.weight", ("embedding",)),
    *_norm("transformer.word_embeddings_layernorm", "embedding_norm"),
    *_norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
_BLOOM_WEIGHTS = (
    *_BLOOM_OUTSIDE,
    *_norm("transformer.h.{}.input_layernorm", _L + "attention_norm"),
    *_norm("transformer.h.{}.post_attention_layernorm", _L + "mlp_norm"),
    *_BLOOM_LAYER,
)
_FALCON_WEIGHTS = (
    *_BLOOM_OUTSIDE,
    *_norm("transformer.h.{}.input_layernorm", _L + "attention_norm", parallel_residual="none"),
    *_norm("transformer.h.{}.post_attention_layernorm", _L + "mlp_norm", parallel_residual="none"),
    *_norm("transformer.h.{}.input_layernorm", _L + "attention_norm", parallel_residual="one_norm"),
    *_norm("transformer.h.{}.ln_attn", _L + "attention_norm", parallel_residual="two_norms"),
    *_norm("transformer.h.{}.ln_mlp", _L + "mlp_norm", parallel_residual="two_norms"),
    *_BLOOM_LAYER,
)

# ----------------------------------------------------------------------------- options

_ATTENTION_BIAS = Option("attention_bias", ("qkv_bias", "attention_out_bias"), False)
_LLAMA_OPTIONS: Options = (
    Option("vocab_size", "vocab_size"),
    Option("hidden_size", "embed_dim"),
    Option("intermediate_size", "mlp_dim"),
    Option("num_hidden_layers", "num_layers"),
    Option("num_attention_heads", "num_heads"),
    Option("num_key_value_heads", "num_kv_heads", None),
    Option("head_dim", "head_dim", None),
    Option("max_position_embeddings", "max_positions", 2048),
    Option("initializer_range", "init_std", 0.02),
    Option("tie_word_embeddings", "tied_embeddings", False),
)
_RMS_EPSILON = Option("rms_norm_eps", "norm_epsilon", 1e-6)
_SILU = Option("hidden_act", "activation", "silu", values=GATED)
_GELU = Option("hidden_act", "activation", "gelu_pytorch_tanh", values=PLAIN)
_RMS = dict(position="rope", norm="rmsnorm", bias=False)
_LAYER_NORM = dict(position="rope", norm="layernorm", bias=False)
_BIASED = dict(position="rope", norm="layernorm", bias=True)
_NO_HEAD_DIM = tuple(option for option in _LLAMA_OPTIONS if option.theirs != "head_dim")
_OTHER_NAMES: Options = (  # GPT-2 and GPT-J
    Option("vocab_size", "vocab_size"),
    Option("n_embd", "embed_dim"),
    Option("n_inner", "mlp_dim", None),
    Option("n_layer", "num_layers"),
    Option("n_head", "num_heads"),
    Option("n_positions", "max_positions", 1024),
    Option("layer_norm_epsilon", "norm_epsilon", 1e-5),
    Option("initializer_range", "init_std", 0.02),
    Option("activation_function", "activation", "gelu_new", values=dict(gelu_new="gelu_tanh") | PLAIN),
)

_LLAMA = Family(
    "LlamaForCausalLM",
    "llama",
    _RMS,
    (*_LLAMA_OPTIONS, _RMS_EPSILON, _SILU, _ATTENTION_BIAS, Option("mlp_bias", "mlp_bias", False), ROPE),
    _LLAMA_WEIGHTS,
)

FAMILIES: tuple[Family, ...] = (
    # Order of preference when exporting a model without a named architecture.
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        dict(position="learned", norm="layernorm", bias=True),
        (
            *_OTHER_NAMES,
            Option("tie_word_embeddings", "tied_embeddings", True),
            Choice("scale_attn_weights", True),
            Choice("scale_attn_by_inverse_layer_idx", False),
            Choice("add_cross_attention", False),
        ),
        _GPT2_WEIGHTS,
    ),
    _LLAMA,
    Family(
        "MistralForCausalLM",
        "mistral",
        _RMS,
        (*_LLAMA_OPTIONS, _RMS_EPSILON, _SILU, ROPE, Window("everywhere", default=4096)),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _RMS | dict(qkv_bias=True),
        (*_NO_HEAD_DIM, _RMS_EPSILON, _SILU, ROPE, Window("switched", default=4096)),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _RMS | dict(qk_norm=True),
        (*_LLAMA_OPTIONS, _RMS_EPSILON, _SILU, _ATTENTION_BIAS, ROPE, Window("switched", default=4096)),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _RMS | dict(norm_zero_centered=True, norm_placement="sandwich"),
        (
            *(option for option in _LLAMA_OPTIONS if option.theirs != "tie_word_embeddings"),
            Option("tie_word_embeddings", "tied_embeddings", True),
            _RMS_EPSILON,
            Option("hidden_activation", "activation", "gelu_pytorch_tanh", values=GATED),
            _ATTENTION_BIAS,
            Option("query_pre_attn_scalar", "attention_multiplier", 256, power=-0.5),
            Option("final_logit_softcapping", "logit_soft_cap", 30.0),
            Option("attn_logit_softcapping", "attention_soft_cap", 50.0),
            Follows("embedding_multiplier", "embed_dim", 0.5),
            ROPE,
            Window("pattern", default=4096, every=2),
        ),
        (*_LLAMA_OUTSIDE, *_GEMMA_NORMS, *_LLAMA_ATTENTION, *_LLAMA_MLP),
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _RMS | dict(norm_zero_centered=True, norm_placement="sandwich", qk_norm=True),
        (
            *(option for option in _LLAMA_OPTIONS if option.theirs != "tie_word_embeddings"),
            Option("tie_word_embeddings", "tied_embeddings", True),
            _RMS_EPSILON,
            Option("hidden_activation", "activation", "gelu_pytorch_tanh", values=GATED),
            _ATTENTION_BIAS,
            Option("query_pre_attn_scalar", "attention_multiplier", 256, power=-0.5),
            Option("final_logit_softcapping", "logit_soft_cap", None),
            Option("attn_logit_softcapping", "attention_soft_cap", None),
            Choice("use_bidirectional_attention", False),
            Follows("embedding_multiplier", "embed_dim", 0.5),
            TWO_ROPES,
            Window("pattern", default=4096, every=6),
        ),
        (*_LLAMA_OUTSIDE, *_GEMMA_NORMS, *_LLAMA_ATTENTION, *_LLAMA_MLP),
    ),
    Family(
        "Phi3ForCausalLM",
        "phi3",
        _RMS,
        (
            *_NO_HEAD_DIM,
            Option("rms_norm_eps", "norm_epsilon", 1e-5),
            _SILU,
            Rope(),
            Window("everywhere", default=None),
        ),
        _PHI3_WEIGHTS,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        _RMS | dict(norm_placement="post", qk_norm=True, qk_norm_scope="all_heads"),
        (*_NO_HEAD_DIM, Option("rms_norm_eps", "norm_epsilon", 1e-5), _SILU, _ATTENTION_BIAS, ROPE),
        (*_LLAMA_OUTSIDE, *_OLMO2_NORMS, *_LLAMA_ATTENTION, *_LLAMA_MLP),
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        _RMS,
        (
            *(option for option in _NO_HEAD_DIM if option.theirs != "tie_word_embeddings"),
            Option("tie_word_embeddings", "tied_embeddings", True),
            _RMS_EPSILON,
            _SILU,
            _ATTENTION_BIAS,
            Option("mlp_bias", "mlp_bias", False),
            Rope(base=2_000_000.0),
            NO_ROPE,
            Window("switched", default=None),
        ),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        dict(position="rope", norm="layernorm"),
        (
            *(option for option in _NO_HEAD_DIM if option.theirs != "tie_word_embeddings"),
            Option("tie_word_embeddings", "tied_embeddings", True),
            Option("norm_epsilon", "norm_epsilon", 1e-5),
            _GELU,
            Option("use_bias", "bias", True),
            ROPE,
            Window("everywhere", default=None),
        ),
        (*_LLAMA_OUTSIDE, *_LLAMA_NORMS, *_LLAMA_ATTENTION, *_STARCODER2_MLP),
    ),
    Family(
        "StableLmForCausalLM",
        "stablelm",
        _LAYER_NORM,
        (
            *_NO_HEAD_DIM,
            Option("layer_norm_eps", "norm_epsilon", 1e-5),
            _SILU,
            Option("use_qkv_bias", "qkv_bias", False),
            Option(
                "use_parallel_residual", "parallel_residual", False, values={False: "none", True: "one_norm"}
            ),
            Choice("qk_layernorm", False),
            Rope(fraction=0.25),
        ),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "NemotronForCausalLM",
        "nemotron",
        _LAYER_NORM | dict(norm_zero_centered=True),
        (
            *_LLAMA_OPTIONS,
            Option("norm_eps", "norm_epsilon", 1e-5),
            Option("hidden_act", "activation", "relu2", values=PLAIN),
            _ATTENTION_BIAS,
            Option("mlp_bias", "mlp_bias", False),
            Rope(fraction=0.5),
        ),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        _BIASED,
        (
            *(option for option in _NO_HEAD_DIM if option.theirs != "num_key_value_heads"),
            Option("layer_norm_eps", "norm_epsilon", 1e-5),
            Option("hidden_act", "activation", "gelu", values=PLAIN),
            Option(
                "use_parallel_residual", "parallel_residual", True, values={True: "two_norms", False: "none"}
            ),
            Option("attention_bias", ("qkv_bias", "attention_out_bias"), True),
            Rope(fraction=0.25),
        ),
        _NEOX_WEIGHTS,
    ),
    Family(
        "PhiForCausalLM",
        "phi",
        _BIASED | dict(parallel_residual="one_norm", head_bias=True),
        (
            *_NO_HEAD_DIM,
            Option("layer_norm_eps", "norm_epsilon", 1e-5),
            Option("hidden_act", "activation", "gelu_new", values=dict(gelu_new="gelu_tanh") | PLAIN),
            Choice("qk_layernorm", False),
            Rope(fraction=0.5),
        ),
        _PHI_WEIGHTS,
    ),
    Family(
        "GPTJForCausalLM",
        "gptj",
        _LAYER_NORM | dict(mlp_bias=True, parallel_residual="one_norm", head_bias=True),
        (
            *_OTHER_NAMES,
            Option("tie_word_embeddings", "tied_embeddings", False),
            Rope(interleaved=True, rotated=("rotary_dim", 64)),
        ),
        _GPTJ_WEIGHTS,
    ),
    Family(
        "FalconForCausalLM",
        "falcon",
        dict(position="rope", norm="layernorm"),
        (
            *(option for option in _NO_HEAD_DIM if option.theirs not in
              ("num_key_value_heads", "intermediate_size", "tie_word_embeddings")),
            Option("ffn_hidden_size", "mlp_dim", None),
            Option("tie_word_embeddings", "tied_embeddings", True),
            Option("layer_norm_epsilon", "norm_epsilon", 1e-5),
            Option("activation", "activation", "gelu", values=PLAIN),
            Option("bias", "bias", False),
            Choice("alibi", False),
            falcon_options,
            ROPE,
        ),
        _FALCON_WEIGHTS,
    ),
    Family(
        "CohereForCausalLM",
        "cohere",
        _LAYER_NORM | dict(norm_bias=False, parallel_residual="one_norm"),
        (
            *(option for option in _NO_HEAD_DIM if option.theirs != "tie_word_embeddings"),
            Option("tie_word_embeddings", "tied_embeddings", True),
            Option("layer_norm_eps", "norm_epsilon", 1e-5),
            _SILU,
            _ATTENTION_BIAS,
            Option("logit_scale", "logit_multiplier", 0.0625),
            Choice("use_qk_norm", False),
            Rope(interleaved=True),
        ),
        _LLAMA_WEIGHTS,
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        _RMS,
        (
            *(option for option in _LLAMA.options if getattr(option, "theirs", "") != "head_dim"),
            Option("embedding_multiplier", "embedding_multiplier", 1.0),
            Option("attention_multiplier", "attention_multiplier", 1.0),
            Option("residual_multiplier", "residual_multiplier", 1.0),
            Option("logits_scaling", "logit_multiplier", 1.0, power=-1),
        ),
        _LLAMA_WEIGHTS,
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
            Option("layer_norm_epsilon", "norm_epsilon", 1e-5),
            Option("initializer_range", "init_std", 0.02),
            Option("tie_word_embeddings", "tied_embeddings", True),
            Choice("apply_residual_connection_post_layernorm", False),
        ),
        _BLOOM_WEIGHTS,
    ),
)  # fmt: skip
