"""Converts the arguments stored in a Megatron checkpoint to our config.

Arguments that decide what a model computes or which parameters it has are mapped, or refused by name; those that decide
how it is computed or trained (parallelism, fusions, optimizer, data) are not read.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.interface import ModelConfig
from megajax.models.pattern import pattern_of
from megajax.tasks.interface import task_of
from megajax.training.config import TrainingConfig
from megajax.weights.megatron.rows import EMBEDDING

logger = logging.getLogger("megajax")

# Arguments of unsupported models, with the values that disable them; the families say which of them they support.
UNSUPPORTED: dict[str, tuple] = {
    "moe_latent_size": (),
    "moe_apply_probs_on_input": (False,),
    "moe_input_jitter_eps": (0,),
    "moe_n_hash_layers": (0,),
    "experimental_attention_variant": (),
    "linear_attention_freq": (),
    "mtp_use_repeated_layer": (False,),
    "hybrid_layer_pattern": (),
    "hybrid_override_pattern": (),
    "is_hybrid_model": (False,),
    "heterogeneous_layers_config_path": (),
    "heterogeneous_layers_config_encoded_json": (),
    "decoder_num_layers": (),
    "spec": (),
    "use_legacy_models": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "mrope_section": (),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "softmax_scale": (),
    "quick_geglu": (False,),
    "activation_func_clamp_value": (),
    "glu_linear_offset": (0.0,),
    "use_mup": (False,),
    "enable_mhc_connections": (False,),
}
# What the configs of encoders have no field for, with the values that are their own.
ONLY_DECODERS: dict[str, tuple] = {
    "add_position_embedding": (True,),
    "group_query_attention": (False,),
    "qk_layernorm": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_layernorm_1p": (False,),
    "num_experts": (0,),
    "multi_latent_attention": (False,),
    "window_size": (),
    "softmax_type": ("vanilla",),
}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_SCORES: dict[str, Any] = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}
_BALANCE = {
    "aux_loss": "microbatch", "seq_aux_loss": "sequence", "global_aux_loss": "batch", "none": None,
    "sinkhorn": None,
}  # fmt: skip
NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}

Shapes = Mapping[str, tuple[int, ...]]


class Arguments:
    def __init__(self, arguments: Mapping[str, Any]):
        self._arguments = arguments

    def get(self, *names: str, default: Any = None) -> Any:
        """Value of the first of these names that is present; they differ between versions of Megatron."""
        values = (self._arguments.get(name) for name in names)
        return next((value for value in values if value is not None), default)

    def size(self, name: str) -> int:
        """Raises ValueError if it is missing."""
        if self.get(name) is None:
            raise ValueError(f"the arguments do not say {name}, which the model needs")
        return int(self.get(name))

    def require(self, allowed: Mapping[str, tuple]) -> None:
        """Raises ValueError for the first argument whose value is not allowed; None always is."""
        for name, values in allowed.items():
            if self.get(name) not in (None, *values):
                raise self.refuse(name)

    def refuse(self, name: str) -> ValueError:
        value = self.get(name)
        return ValueError(f"{name}={value}: megajax has no such model; docs/from_megatron.md lists what there is")


def read_config(given: Arguments, model: ModelConfig, vocabulary_rows: int, folder: Path) -> Config:
    """The config of a run with this model. vocabulary_rows: of the embedding. folder: of the checkpoint, which may hold
    the tokenizer."""
    data = DataConfig(source="mock", tokenizer=_tokenizer(given, vocabulary_rows, folder))
    length = given.size("seq_length" if given.get("seq_length") else "max_position_embeddings")
    training = TrainingConfig(sequence_length=length)
    return Config(model=model, task=task_of(model) or Config().task, data=data, training=training)


def shared_fields(given: Arguments, shapes: Shapes) -> dict[str, Any]:
    """The fields that the configs of all families have."""
    width = given.size("hidden_size")
    return dict(
        embed_dim=width,
        num_heads=given.size("num_attention_heads"),
        mlp_dim=int(given.get("ffn_hidden_size", default=4 * width)),
        # Megatron's softmax includes all rows of the table, also the padding.
        vocab_size=shapes[EMBEDDING][0],
        vocab_multiple=1,
        max_positions=given.size("max_position_embeddings"),
        norm_epsilon=given.get("layernorm_epsilon", "norm_epsilon", default=1e-5),
        activation=_activation(given),
        dropout=given.get("hidden_dropout", default=0.1),
        attention_dropout=given.get("attention_dropout", default=0.1),
    )


def head_dim(given: Arguments) -> int:
    return int(given.get("kv_channels", default=given.size("hidden_size") // given.size("num_attention_heads")))


def norm_kind(given: Arguments) -> Any:
    """NormConfig.kind."""
    name = given.get("normalization", default="LayerNorm")
    if name not in NORMS:
        raise given.refuse("normalization")
    return NORMS[name]


def decoder_model(given: Arguments, shapes: Shapes) -> DecoderConfig:
    """shapes: of the parameters."""
    bias = has_bias(given)
    softmax = given.get("softmax_type", default="vanilla")
    if softmax not in ("vanilla", "learnable"):
        raise given.refuse("softmax_type")
    qkv_bias = ("qkv",) if given.get("add_qkv_bias") else ()
    norm_bias = ("norm",) if norm_kind(given) == "layernorm" else ()
    one_p = given.get("layernorm_zero_centered_gamma", "apply_layernorm_1p", default=False)
    model = DecoderConfig(
        **shared_fields(given, shapes),
        num_layers=given.size("num_layers"),
        pattern=_pattern(given),
        num_kv_heads=given.size("num_query_groups" if given.get("group_query_attention") else "num_attention_heads"),
        head_dim=head_dim(given),
        position=_position(given),
        rope=_rope(given),
        norm=norm_kind(given) + ("_1p" if one_p else ""),
        qk_norm=bool(given.get("qk_layernorm", default=False)),
        biases=(*(("qkv", "attention_out", "mlp") if bias else qkv_bias), *norm_bias),
        attention_sinks=softmax == "learnable",
        tied_embeddings=not given.get("untie_embeddings_and_output_weights", default=False),
        window=_window(given),
        moe=_moe(given),
        init_std=given.get("init_method_std", default=0.02),
    )
    return _with_multi_token(given, _with_latents(given, model))


def _with_latents(given: Arguments, model: DecoderConfig) -> DecoderConfig:
    if not given.get("multi_latent_attention"):
        return model
    if model.position != "rope":
        raise given.refuse("position_embedding_type")
    if model.rope.interleaved:
        raise given.refuse("rotary_interleaved")
    if "mlp" in model.biases:
        raise given.refuse("add_bias_linear")
    if not model.qk_norm:  # of the latents
        raise given.refuse("qk_layernorm")
    factor = float(given.get("rotary_scaling_factor", default=40.0))
    kind = given.get("rope_type", default="yarn")
    if kind not in ("rope", "yarn"):
        raise given.refuse("rope_type")
    # Megatron rotates neighbours here, and stretches wavelengths only with YaRN.
    plain = RopeConfig(base=model.rope.base, fraction=model.rope.fraction, interleaved=True)
    head_dim = given.size("qk_head_dim")
    rope_dim = given.size("qk_pos_emb_head_dim")
    of_tables = given.get("mscale", default=1.0)
    of_all = given.get("mscale_all_dim", default=0.0)
    if _yarn_scale(factor, of_tables) != _yarn_scale(factor, of_all):
        logger.warning(
            "mscale=%s, mscale_all_dim=%s: the second one scales attention, as in Megatron Core 0.16; in older "
            "versions the first one did",
            of_tables,
            of_all,
        )
    multiplier = _yarn_scale(factor, of_all) ** 2
    latent = LatentConfig(
        kv_rank=given.size("kv_lora_rank"),
        q_rank=given.get("q_lora_rank"),
        rope_dim=rope_dim,
        value_dim=given.size("v_head_dim"),
    )
    return dataclasses.replace(
        model,
        num_kv_heads=model.num_heads,
        head_dim=head_dim,
        qk_norm=False,
        rope=_yarn(given, factor, of_tables, of_all) if kind == "yarn" else plain,
        attention_multiplier=None if multiplier == 1 else multiplier / math.sqrt(head_dim + rope_dim),
        latent=latent,
    )


def _yarn(given: Arguments, factor: float, of_tables: float, of_all: float) -> RopeConfig:
    """of_tables, of_all: coefficients of the scale in sines and cosines, and of that of the logits."""
    return RopeConfig(
        base=float(given.get("rotary_base", default=10000)),
        interleaved=True,
        scaling="yarn",
        factor=factor,
        attention_factor=_yarn_scale(factor, of_tables) / _yarn_scale(factor, of_all),
        original_length=int(given.get("original_max_position_embeddings", default=4096)),
        ramp=(float(given.get("beta_slow", default=1.0)), float(given.get("beta_fast", default=32.0))),
    )


def _yarn_scale(factor: float, coefficient: float) -> float:
    return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0


def _with_multi_token(given: Arguments, model: DecoderConfig) -> DecoderConfig:
    count = given.get("mtp_num_layers", default=0)
    if not count:
        return model
    for name in ("hidden_dropout", "attention_dropout"):
        if given.get(name, default=0.1):
            logger.warning("%s=%s becomes 0: layers of multi-token prediction have none here", name, given.get(name))
    scale = float(given.get("mtp_loss_scaling_factor", default=0.1))
    return dataclasses.replace(model, mtp_layers=int(count), mtp_loss=scale, dropout=0.0, attention_dropout=0.0)


def _moe(given: Arguments) -> MoeConfig:
    if not given.get("num_experts"):
        return MoeConfig()
    return MoeConfig(
        num_experts=given.size("num_experts"),
        expert_dim=given.get("moe_ffn_hidden_size"),
        shared_dim=given.get("moe_shared_expert_intermediate_size"),
        shared_gate=bool(given.get("moe_shared_expert_gate", "moe_use_shared_expert_gate", default=False)),
        router=_router(given),
    )


def _pattern(given: Arguments) -> str:
    number = given.size("num_layers")
    if given.get("window_size") is None:
        attention = "f" * number
    else:
        attention = "".join("w" if has else "f" for has in _per_layer(given, "window_attn_skip_freq"))
    rotary = _per_layer(given, "no_rope_freq")
    if any(not has and letter == "w" for has, letter in zip(rotary, attention, strict=True)):
        raise given.refuse("no_rope_freq")
    attention = "".join(letter if has else "n" for has, letter in zip(rotary, attention, strict=True))
    feed_forward = _layers_with_experts(given) if given.get("num_experts") else ""
    return pattern_of("" if set(attention) == {"w"} else attention, feed_forward)


def _per_layer(given: Arguments, name: str) -> list[bool]:
    """Whether each layer is not skipped, of a number n that skips every n-th layer; Megatron also has lists."""
    number = given.size("num_layers")
    value = given.get(name)
    if isinstance(value, list | tuple | str):
        raise given.refuse(name)
    return [not value or (layer + 1) % value != 0 for layer in range(number)]


def _layers_with_experts(given: Arguments) -> str:
    """A number n is every n-th layer from the first; a list has a 1 for each layer with experts."""
    number = given.size("num_layers")
    frequency = given.get("moe_layer_freq", default=1)
    if isinstance(frequency, int):
        frequency = [layer % frequency == 0 for layer in range(number)]
    if not isinstance(frequency, list | tuple):
        raise given.refuse("moe_layer_freq")
    return "".join("e" if has else "d" for has in frequency)


def _router(given: Arguments) -> RouterConfig:
    score = given.get("moe_router_score_function", default="softmax")
    if score not in _SCORES:
        raise given.refuse("moe_router_score_function")
    pre_softmax = given.get("moe_router_pre_softmax", default=False)  # read with softmax only
    kinds = given.get("moe_router_load_balancing_type", default="aux_loss")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if any(kind not in _BALANCE for kind in kinds):
        raise given.refuse("moe_router_load_balancing_type")
    coefficients = given.get("moe_aux_loss_coeff", default=0.0)
    coefficients = [coefficients] * len(kinds) if isinstance(coefficients, int | float) else list(coefficients)
    named = zip((_BALANCE[kind] for kind in kinds), coefficients, strict=True)
    # A checkpoint has no state of the loss of a batch.
    losses: dict[Any, float] = {scope: float(value) for scope, value in named if scope not in (None, "batch")}
    if len(losses) > 1:
        raise given.refuse("moe_router_load_balancing_type")
    scope: Any = next(iter(losses), "microbatch")
    has_bias = bool(given.get("moe_router_enable_expert_bias", default=False))
    return RouterConfig(
        top_k=given.size("moe_router_topk"),
        score="softmax_all" if score == "softmax" and pre_softmax else _SCORES[score],
        scale=float(given.get("moe_router_topk_scaling_factor", default=1.0)),
        groups=(given.get("moe_router_num_groups", default=1), given.get("moe_router_group_topk", default=1)),
        bias_update_rate=given.get("moe_router_bias_update_rate", default=1e-3) if has_bias else None,
        assignment="sinkhorn" if "sinkhorn" in kinds else "top_k",
        z_loss=float(given.get("moe_z_loss_coeff", default=0.0)),
        capacity_factor=given.get("moe_expert_capacity_factor"),
        drop="position" if given.get("moe_token_drop_policy") == "position" else "probability",
        aux_loss=losses.get(scope, 0.0),
        aux_loss_scope=scope,
    )


def _position(given: Arguments) -> Any:
    position = given.get("position_embedding_type", default="learned_absolute")
    if given.get("use_rotary_position_embeddings"):  # of older versions, like the next
        return "rope"
    if position == "learned_absolute" and given.get("add_position_embedding") is False:
        return "none"
    if position not in _POSITIONS:
        raise given.refuse("position_embedding_type")
    return _POSITIONS[position]


def _rope(given: Arguments) -> RopeConfig:
    scaled: dict[str, Any] = {}
    interpolation = given.get("rotary_seq_len_interpolation_factor", default=1)
    if given.get("use_rope_scaling"):
        scaled = dict(scaling="llama3", factor=float(given.get("rope_scaling_factor", default=8.0)))
    if interpolation != 1:
        if scaled:  # of both together
            raise given.refuse("rotary_seq_len_interpolation_factor")
        scaled = dict(scaling="linear", factor=float(interpolation))
    return RopeConfig(
        base=float(given.get("rotary_base", default=10000)),
        fraction=float(given.get("rotary_percent", default=1.0)),
        interleaved=bool(given.get("rotary_interleaved", default=False)),
        **scaled,
    )


def has_bias(given: Arguments) -> bool:
    """Whether linear layers have biases."""
    return bool(given.get("add_bias_linear", default=not given.get("disable_bias_linear", default=False)))


def _activation(given: Arguments) -> str:
    if given.get("swiglu"):
        return "swiglu"
    if given.get("squared_relu"):
        return "squared_relu"
    # Megatron's fused bias and GELU kernel, the default with biases, computes the tanh approximation.
    is_fused = has_bias(given) and given.get("bias_gelu_fusion", default=True)
    return "gelu_tanh" if is_fused or given.get("openai_gelu") else "gelu"


def _window(given: Arguments) -> int | None:
    """Megatron counts the keys before and after a token, excluding itself."""
    window = given.get("window_size")
    if window is None:
        return None
    before, after = window
    if after != 0 or before < 0:
        raise given.refuse("window_size")
    return before + 1


def _tokenizer(given: Arguments, vocabulary_rows: int, folder: Path) -> str:
    """Value of data.tokenizer: a file in the checkpoint or at the path that Megatron used; else null:VOCAB."""
    named = given.get("tokenizer_model")
    candidates = [folder / "tokenizer"] + ([Path(named)] if isinstance(named, str) else [])
    files = ("tokenizer.json", "tokenizer.model")
    found = [
        file
        for candidate in candidates
        for file in (candidate, *(candidate / name for name in files))
        if file.is_file()
    ]
    known = [file for file in found if file.name == "tokenizer.json" or file.suffix == ".model"]
    if known and given.get("tokenizer_type") != "TikTokenizer":  # its .json has another format
        return str(known[0])
    if given.get("tokenizer_type") == "NullTokenizer" and given.get("vocab_size") is not None:
        return f"null:{given.size('vocab_size') + 1}"  # it adds an end-of-document token
    return f"null:{vocabulary_rows}"
