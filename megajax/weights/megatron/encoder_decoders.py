"""T5: the model that Megatron's arguments describe, and the table of its parameters."""

from collections.abc import Mapping

from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.weights.megatron.arguments import NORMS, Arguments, activation, has_bias
from megajax.weights.megatron.entries import (
    EMBEDDING,
    SEQUENCE_TO_SEQUENCE_BIAS,
    SEQUENCE_TO_SEQUENCE_OUTPUT,
    Entry,
    Heads,
    Table,
    cross_attention,
    feed_forward,
    norm,
    output_layer,
    positions,
    self_attention,
    vocabulary,
)

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
    D = config.embed_dim
    sizes = (config.vocab_size, config.padded_vocab_size)
    found = [vocabulary("embedding", EMBEDDING, *sizes, D)]
    if config.position == "learned":
        found.append(positions(config.max_positions, config.max_positions, D))
    stacks = {"encoder": config.num_layers, "decoder": config.decoder_layers}
    for stack, num_layers in stacks.items():
        found += [entry.of_layers(f"{stack}/dense", range(num_layers)) for entry in _layer(config, stack)]
        if config.position == "relative":
            theirs = f"{stack}_relative_pos_emb.relative_attention_bias.weight"
            found.append(Entry((f"{stack}_bias/table",), theirs, (config.num_buckets, config.num_heads)))
        if config.final_norm:
            found += norm(config.norm_config, f"{stack}_norm", f"{stack}.final_layernorm", D)
    if not config.tied_embeddings:
        found.append(output_layer("head", SEQUENCE_TO_SEQUENCE_OUTPUT, *sizes, D))
    if config.head_bias:
        found.append(vocabulary("head_bias", SEQUENCE_TO_SEQUENCE_BIAS, *sizes))
    return found


def _layer(config: EncoderDecoderConfig, stack: str) -> Table:
    D = config.embed_dim
    N = config.num_heads
    heads = Heads(D, N, N, config.head_dim, qkv_bias=config.bias, out_bias=config.bias)
    theirs = f"{stack}.layers.{{}}."
    layer = norm(config.norm_config, "attention_norm", f"{theirs}input_layernorm", D)
    layer += self_attention("attention/", f"{theirs}self_attention.", heads)
    if stack == "decoder":
        layer += norm(config.norm_config, "cross_norm", f"{theirs}pre_cross_attn_layernorm", D)
        layer += cross_attention("cross_attention/", f"{theirs}cross_attention.", heads)
    layer += norm(config.norm_config, "mlp_norm", f"{theirs}pre_mlp_layernorm", D)
    return layer + feed_forward("mlp/", f"{theirs}mlp.", D, config.mlp_dim, config.activation, has_bias=config.bias)
