"""Tables of the options and tensors of each Hugging Face decoder family, used by mapping.py in both directions.

A family consists of the keys of its config.json (options) and its tensors (weights.py). Sources: the configuration and
modeling files of transformers 5 for each family, and the config.json files of version 4, which spell some options
differently.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megajax.weights.hugging_face import weights
from megajax.weights.hugging_face.form import DecoderForm, Form
from megajax.weights.hugging_face.options import (
    GATED,
    NO_ROPE,
    PLAIN,
    ROPE,
    TWO_ROPES,
    Choice,
    ExpertLayers,
    Follows,
    NoWindow,
    Option,
    Options,
    Rope,
    RotatedDims,
    SigmoidRouter,
    Window,
    deepseek_options,
    falcon_options,
)
from megajax.weights.hugging_face.weights import Row


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    architecture: str
    model_type: str
    always: Mapping[str, Any]
    """Values of our config fields common to all models of the family."""
    options: Options
    weights: tuple[Row, ...]
    """As the tensors are written."""
    other_weights: tuple[Row, ...] = ()
    """Another form of the tensors, which is read if a folder has it."""
    form: Form = DecoderForm()
    ignored: tuple[str, ...] = ()
    """Ends of the names of tensors that files may have and the architecture does not use."""

    @property
    def tables(self) -> tuple[tuple[Row, ...], ...]:
        return (self.weights, self.other_weights) if self.other_weights else (self.weights,)


# Values of our fields.
_RMS = dict(position="rope", norm="rmsnorm", bias=False)
_LAYER_NORM = dict(position="rope", norm="layernorm", bias=False)
_BIASED = dict(position="rope", norm="layernorm", bias=True)

# Keys of config.json with their defaults.
_SIZES: Options = (
    Option("vocab_size", "vocab_size"),
    Option("hidden_size", "embed_dim"),
    Option("num_hidden_layers", "num_layers"),
    Option("num_attention_heads", "num_heads"),
    Option("max_position_embeddings", "max_positions", 2048),
    Option("initializer_range", "init_std", 0.02),
)
_MLP = Option("intermediate_size", "mlp_dim")
_KV_HEADS = Option("num_key_value_heads", "num_kv_heads", None)
_HEAD_DIM = Option("head_dim", "head_dim", None)
_UNTIED = Option("tie_word_embeddings", "tied_embeddings", False)
_TIED = Option("tie_word_embeddings", "tied_embeddings", True)
_RMS_EPSILON = Option("rms_norm_eps", "norm_epsilon", 1e-6)
_RMS_EPSILON_5 = Option("rms_norm_eps", "norm_epsilon", 1e-5)
_NORM_EPSILON = Option("layer_norm_eps", "norm_epsilon", 1e-5)
_LONG_NORM_EPSILON = Option("layer_norm_epsilon", "norm_epsilon", 1e-5)
_SILU = Option("hidden_act", "activation", "silu", values=GATED)
_GELU_NEW = dict(gelu_new="gelu_tanh") | PLAIN  # written by this name
_ATTENTION_BIAS = Option("attention_bias", ("qkv_bias", "attention_out_bias"), False)
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
_LLAMA: Options = (*_SIZES, _MLP, _KV_HEADS, _UNTIED, _SILU)
_GEMMA: Options = (
    *_SIZES,
    _MLP,
    _KV_HEADS,
    _HEAD_DIM,
    _TIED,
    _RMS_EPSILON,
    Option("hidden_activation", "activation", "gelu_pytorch_tanh", values=GATED),
    _ATTENTION_BIAS,
    Option("query_pre_attn_scalar", "attention_multiplier", 256, power=-0.5),
    Follows("embedding_multiplier", "embed_dim", 0.5),
)
_TOP_K = Option("num_experts_per_tok", "moe.router.top_k")
_NUM_EXPERTS = Option("num_experts", "moe.num_experts", also=("num_local_experts",))
_NORMALISED = Option("norm_topk_prob", "moe.router.score", False, values={True: "softmax", False: "softmax_all"})
_EXPERTS_ONLY = Option("intermediate_size", ("moe.expert_dim", "mlp_dim"))
_QWEN_EXPERTS: Options = (
    _TOP_K,
    _NUM_EXPERTS,
    _NORMALISED,
    Option("moe_intermediate_size", "moe.expert_dim"),
    ExpertLayers(),
    NoWindow(),
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
        _RMS,
        (*_LLAMA, _HEAD_DIM, _RMS_EPSILON, _ATTENTION_BIAS, _MLP_BIAS, ROPE),
        weights.LLAMA,
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        _RMS,
        (*_LLAMA, _HEAD_DIM, _RMS_EPSILON, ROPE, Window("everywhere", default=4096)),
        weights.LLAMA,
    ),
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        _RMS | dict(qkv_bias=True),
        (*_LLAMA, _RMS_EPSILON, ROPE, Window("switched", default=4096)),
        weights.LLAMA,
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        _RMS | dict(qk_norm=True),
        (*_LLAMA, _HEAD_DIM, _RMS_EPSILON, _ATTENTION_BIAS, ROPE, Window("switched", default=4096)),
        weights.LLAMA,
    ),
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _RMS | dict(norm_zero_centered=True, norm_placement="sandwich"),
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
        _RMS | dict(norm_zero_centered=True, norm_placement="sandwich", qk_norm=True),
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
        _RMS,
        (
            *_LLAMA,
            _RMS_EPSILON_5,
            Rope(fraction=1.0, scalings=("longrope",), original_length=4096),
            Window("everywhere", default=None),
        ),
        weights.PHI3,
    ),
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        _RMS | dict(norm_placement="post", qk_norm="all_heads"),
        (*_LLAMA, _RMS_EPSILON_5, _ATTENTION_BIAS, ROPE),
        weights.OLMO2,
    ),
    Family(
        "SmolLM3ForCausalLM",
        "smollm3",
        _RMS,
        (
            *_SIZES,
            _MLP,
            _KV_HEADS,
            _TIED,
            _SILU,
            _RMS_EPSILON,
            _ATTENTION_BIAS,
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
            *_SIZES,
            _MLP,
            _KV_HEADS,
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
            *_LLAMA,
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
            *_SIZES,
            _MLP,
            _KV_HEADS,
            _HEAD_DIM,
            _UNTIED,
            Option("hidden_act", "activation", "relu2", values=PLAIN),
            Option("norm_eps", "norm_epsilon", 1e-5),
            _ATTENTION_BIAS,
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
            *_SIZES,
            _MLP,
            _UNTIED,
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
            *_SIZES,
            _MLP,
            _KV_HEADS,
            _UNTIED,
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
        (*_GPT2, _UNTIED, RotatedDims()),
        weights.GPTJ,
    ),
    Family(
        "FalconForCausalLM",
        "falcon",
        dict(position="rope", norm="layernorm"),
        (
            *_SIZES,
            _TIED,
            Option("ffn_hidden_size", "mlp_dim", None),
            Option("activation", "activation", "gelu", values=PLAIN),
            _LONG_NORM_EPSILON,
            Option("bias", "bias", False),
            Choice("alibi", False),
            falcon_options,
            ROPE,
        ),
        weights.FALCON,
    ),
    Family(
        "CohereForCausalLM",
        "cohere",
        _LAYER_NORM | dict(norm_bias=False, parallel_residual="one_norm"),
        (
            *_SIZES,
            _MLP,
            _KV_HEADS,
            _TIED,
            _SILU,
            _NORM_EPSILON,
            _ATTENTION_BIAS,
            Option("logit_scale", "logit_multiplier", 0.0625),
            Choice("use_qk_norm", False),
            Rope(base=500_000.0, interleaved=True),
        ),
        weights.LLAMA,
    ),
    Family(
        "GraniteForCausalLM",
        "granite",
        _RMS,
        (
            *_LLAMA,
            _RMS_EPSILON,
            _ATTENTION_BIAS,
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
    Family(
        "MixtralForCausalLM",
        "mixtral",
        _RMS,
        (
            *_SIZES,
            _EXPERTS_ONLY,
            _KV_HEADS,
            _HEAD_DIM,
            _UNTIED,
            _SILU,
            _RMS_EPSILON_5,
            _TOP_K,
            Option("num_local_experts", "moe.num_experts"),
            Rope(base=1_000_000.0),
            Window("everywhere", default=None),
        ),
        weights.MIXTRAL,
        weights.FUSED_EXPERTS,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _RMS | dict(qk_norm=True),
        (*_LLAMA, _HEAD_DIM, _RMS_EPSILON, _ATTENTION_BIAS, *_QWEN_EXPERTS, ROPE),
        weights.QWEN_MOE,
        weights.FUSED_EXPERTS,
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _RMS | {"moe.shared_gate": True},
        (
            *_LLAMA,
            _RMS_EPSILON,
            Option("qkv_bias", "qkv_bias", True),
            *_QWEN_EXPERTS,
            Option("shared_expert_intermediate_size", "moe.shared_dim"),
            ROPE,
        ),
        weights.QWEN_MOE,
        weights.FUSED_EXPERTS,
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        _RMS | dict(qk_norm="all_heads"),
        (
            *_SIZES,
            _EXPERTS_ONLY,
            _KV_HEADS,
            _UNTIED,
            _SILU,
            _RMS_EPSILON_5,
            _ATTENTION_BIAS,
            _TOP_K,
            _NUM_EXPERTS,
            _NORMALISED,
            Choice("clip_qkv", None),
            ROPE,
        ),
        weights.QWEN_MOE,
        weights.FUSED_EXPERTS,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        _RMS | {"moe.router.score": "sigmoid"},
        (
            *_SIZES,
            _MLP,
            _KV_HEADS,
            _UNTIED,
            _SILU,
            # the class normalises latents with this epsilon, whatever the key says
            Option("rms_norm_eps", "norm_epsilon", 1e-6, values={1e-6: 1e-6}),
            ROPE,  # written again below, with its factor on the scores
            Option("rope_interleave", "rope.interleaved", True),
            Option("q_lora_rank", "latent.q_rank", 1536),
            Option("kv_lora_rank", "latent.kv_rank", 512),
            Option("qk_nope_head_dim", "head_dim", 128),
            Option("qk_rope_head_dim", "latent.rope_dim", 64),
            Option("v_head_dim", "latent.value_dim", 128),
            Option("n_routed_experts", "moe.num_experts", 256, also=("num_local_experts",)),
            Option("moe_intermediate_size", "moe.expert_dim", 2048),
            SigmoidRouter(top_k=8, num_groups=8, top_groups=4),
            Option("routed_scaling_factor", "moe.router.scale", 2.5),
            Option("num_nextn_predict_layers", "mtp_layers", 1, also=("num_mtp_layers",)),
            deepseek_options,
            Choice("scoring_func", "sigmoid"),
            Choice("topk_method", "noaux_tc"),
            Choice("attention_bias", False),
            Choice("moe_layer_freq", 1),
        ),
        weights.DEEPSEEK_V3,
    ),
)
