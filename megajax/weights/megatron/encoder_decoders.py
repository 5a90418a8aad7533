"""T5: the model that Megatron's arguments describe, and the table of its parameters."""

from collections.abc import Mapping

from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.weights.megatron.arguments import NORMS, Arguments, activation, has_bias
from megajax.weights.megatron.rows import (
    EMBEDDING,
    EMBEDDINGS,
    SEQUENCE_TO_SEQUENCE_BIAS,
    SEQUENCE_TO_SEQUENCE_OUTPUT,
    Table,
    feed_forward,
    self_attention,
)
from megajax.weights.tensor_map import Row, linear, norm

# What EncoderDecoderConfig has no field for, with the values that are its own.
_FIXED = {
    "normalization": tuple(NORMS),
    "position_embedding_type": ("learned_absolute", "relative"),
    "add_position_embedding": (True,),
    "add_qkv_bias": (False,),
    "group_query_attention": (False,),
    "qk_layernorm": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_layernorm_1p": (False,),
    "num_experts": (0,),
    "multi_latent_attention": (False,),
    "window_size": (),
    "softmax_type": ("vanilla",),
}
SUPPORTED = ("decoder_num_layers",)


def read_model(given: Arguments, shapes: Mapping[str, tuple[int, ...]]) -> EncoderDecoderConfig:
    given.require(_FIXED)
    width = given.size("hidden_size")
    heads = given.size("num_attention_heads")
    layers = int(given.get("encoder_num_layers", "num_layers"))
    return EncoderDecoderConfig(
        num_layers=layers,
        num_decoder_layers=int(given.get("decoder_num_layers", default=layers)),
        embed_dim=width,
        num_heads=heads,
        head_dim=int(given.get("kv_channels", default=width // heads)),
        mlp_dim=int(given.get("ffn_hidden_size", default=4 * width)),
        vocab_size=shapes[EMBEDDING][0],
        vocab_multiple=1,
        decoder_length=int(given.get("decoder_seq_length", default=128)),
        position="relative" if given.get("position_embedding_type") == "relative" else "learned",
        num_buckets=int(given.get("relative_attention_num_buckets", default=32)),
        max_distance=int(given.get("relative_attention_max_distance", default=128)),
        max_positions=given.size("max_position_embeddings"),
        norm=NORMS[given.get("normalization", default="LayerNorm")],
        norm_epsilon=given.get("layernorm_epsilon", "norm_epsilon", default=1e-5),
        # Only with Transformer Engine.
        final_norm="decoder.final_layernorm.weight" in shapes,
        activation=activation(given),
        bias=has_bias(given),
        attention_multiplier=None,
        tied_embeddings=SEQUENCE_TO_SEQUENCE_OUTPUT not in shapes,
        logit_multiplier=1.0,
        head_bias=SEQUENCE_TO_SEQUENCE_BIAS in shapes,
        dropout=given.get("hidden_dropout", default=0.1),
        attention_dropout=given.get("attention_dropout", default=0.1),
    )


def table(config: EncoderDecoderConfig) -> Table:
    stacks = ("encoder", "decoder")
    return (
        *EMBEDDINGS,
        *(row for stack in stacks for row in _stack(stack, config.is_gated)),
        Row(SEQUENCE_TO_SEQUENCE_OUTPUT, ("head",), "linear"),
        Row(SEQUENCE_TO_SEQUENCE_BIAS, ("head_bias",)),
    )


def _stack(name: str, is_gated: bool) -> Table:
    theirs = f"{name}.layers.{{}}."
    ours = f"{name}.*."
    cross = f"{theirs}cross_attention."
    return (
        Row(f"{name}_relative_pos_emb.relative_attention_bias.weight", (f"{name}_bias.table",)),
        *norm(f"{theirs}input_layernorm", f"{ours}attention_norm"),
        *self_attention(f"{theirs}self_attention.", f"{ours}attention."),
        *norm(f"{theirs}pre_cross_attn_layernorm", f"{ours}cross_norm"),
        *linear(f"{cross}linear_q", f"{ours}cross_attention.query"),
        *linear(
            f"{cross}linear_kv", f"{ours}cross_attention.key", f"{ours}cross_attention.value", layout="within_heads"
        ),
        *linear(f"{cross}linear_proj", f"{ours}cross_attention.out"),
        *norm(f"{theirs}pre_mlp_layernorm", f"{ours}mlp_norm"),
        *feed_forward(f"{theirs}mlp.", f"{ours}mlp.", is_gated),
        *norm(f"{name}.final_layernorm", f"{name}_norm"),
    )
