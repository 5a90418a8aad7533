"""T5: the model that Megatron's arguments describe, and the table of its parameters."""

from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.weights.megatron.arguments import (
    ONLY_DECODERS,
    Arguments,
    Shapes,
    has_bias,
    head_dim,
    norm_kind,
    shared_fields,
)
from megajax.weights.megatron.rows import (
    EMBEDDINGS,
    SEQUENCE_TO_SEQUENCE_BIAS,
    SEQUENCE_TO_SEQUENCE_OUTPUT,
    Table,
    feed_forward,
    self_attention,
)
from megajax.weights.tensor_map import Row, linear, norm

_FIXED = ONLY_DECODERS | {
    "position_embedding_type": ("learned_absolute", "relative"),
    "add_qkv_bias": (False,),
}
SUPPORTED = ("decoder_num_layers",)


def read_model(given: Arguments, shapes: Shapes) -> EncoderDecoderConfig:
    given.require(_FIXED)
    layers = int(given.get("encoder_num_layers", "num_layers"))
    return EncoderDecoderConfig(
        **shared_fields(given, shapes),
        num_layers=layers,
        num_decoder_layers=int(given.get("decoder_num_layers", default=layers)),
        head_dim=head_dim(given),
        decoder_length=int(given.get("decoder_seq_length", default=128)),
        position="relative" if given.get("position_embedding_type") == "relative" else "learned",
        num_buckets=int(given.get("relative_attention_num_buckets", default=32)),
        max_distance=int(given.get("relative_attention_max_distance", default=128)),
        norm=norm_kind(given),
        # Only with Transformer Engine.
        final_norm="decoder.final_layernorm.weight" in shapes,
        bias=has_bias(given),
        attention_multiplier=None,
        tied_embeddings=SEQUENCE_TO_SEQUENCE_OUTPUT not in shapes,
        logit_multiplier=1.0,
        head_bias=SEQUENCE_TO_SEQUENCE_BIAS in shapes,
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
