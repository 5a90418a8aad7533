"""BERT: the model that Megatron's arguments describe, and the table of its parameters."""

from collections.abc import Mapping

from megajax.models.bert import BertConfig
from megajax.models.decoder_fields import padded_vocab_size
from megajax.weights.megatron.arguments import Arguments, activation
from megajax.weights.megatron.entries import (
    EMBEDDING,
    OUTPUT,
    OUTPUT_BIAS,
    Entry,
    Heads,
    Table,
    feed_forward,
    linear,
    norm,
    output_layer,
    positions,
    self_attention,
    vocabulary,
)

LAYER = "encoder.layers.{}."
_TYPES = "embedding.tokentype_embeddings.weight"
# What BertConfig has no field for, with the values that are its own.
_FIXED = {
    "normalization": ("LayerNorm",),
    "position_embedding_type": ("learned_absolute",),
    "add_position_embedding": (True,),
    "add_bias_linear": (True,),
    "disable_bias_linear": (False,),
    "group_query_attention": (False,),
    "qk_layernorm": (False,),
    "layernorm_zero_centered_gamma": (False,),
    "apply_layernorm_1p": (False,),
    "swiglu": (False,),
    "squared_relu": (False,),
    "num_experts": (0,),
    "multi_latent_attention": (False,),
    "window_size": (),
    "softmax_type": ("vanilla",),
}


def read_model(given: Arguments, shapes: Mapping[str, tuple[int, ...]]) -> BertConfig:
    given.require(_FIXED)
    width = given.size("hidden_size")
    heads = given.size("num_attention_heads")
    if int(given.get("kv_channels", default=width // heads)) * heads != width:
        raise given.refuse("kv_channels")
    types = shapes.get(_TYPES)
    return BertConfig(
        num_layers=int(given.get("encoder_num_layers", "num_layers")),
        embed_dim=width,
        num_heads=heads,
        mlp_dim=int(given.get("ffn_hidden_size", default=4 * width)),
        vocab_size=shapes[EMBEDDING][0],
        vocab_multiple=1,
        max_positions=given.size("max_position_embeddings"),
        num_token_types=types[0] if types else 0,
        norm_epsilon=given.get("layernorm_epsilon", "norm_epsilon", default=1e-5),
        norm_placement="pre",
        embedding_norm=False,
        activation=activation(given),
        head_activation="gelu",  # fixed in Megatron
        tied_embeddings=OUTPUT not in shapes,
        next_sentence="binary_head.weight" in shapes,
        dropout=given.get("hidden_dropout", default=0.1),
        attention_dropout=given.get("attention_dropout", default=0.1),
        init_std=given.get("init_method_std", default=0.02),
    )


def table(config: BertConfig) -> Table:
    D = config.embed_dim
    N = config.num_heads
    sizes = (config.vocab_size, config.padded_vocab_size)
    rows = padded_vocab_size(config.position_rows, config.vocab_multiple)
    found = [vocabulary("embedding", EMBEDDING, *sizes, D), positions(config.max_positions, rows, D)]
    if config.num_token_types:
        found.append(Entry(("token_type_embedding",), _TYPES, (config.num_token_types, D)))
    layer = norm(config.norm_config, "attention_norm", f"{LAYER}input_layernorm", D)
    layer += self_attention("attention/", f"{LAYER}self_attention.", Heads(D, N, N, D // N, True, True))
    layer += norm(config.norm_config, "mlp_norm", f"{LAYER}pre_mlp_layernorm", D)
    layer += feed_forward("mlp/", f"{LAYER}mlp.", D, config.width_of_mlp, config.activation, has_bias=True)
    found += [entry.of_layers("layers/dense", range(config.num_layers)) for entry in layer]
    found += norm(config.norm_config, "final_norm", "encoder.final_layernorm", D)
    found += linear("head_dense", "lm_head.dense", (D,), (D,), has_bias=True)
    found += norm(config.norm_config, "head_norm", "lm_head.layer_norm", D)
    found.append(vocabulary("head_bias", OUTPUT_BIAS, *sizes))
    if not config.tied_embeddings:
        found.append(output_layer("head", OUTPUT, *sizes, D))
    if config.has_next_sentence:
        found += linear("pooler", "pooler.dense", (D,), (D,), has_bias=True)
        found += linear("next_sentence", "binary_head", (D,), (2,), has_bias=True)
    return found
