"""BERT: the model that Megatron's arguments describe, and the table of its parameters."""

from collections.abc import Mapping

from megajax.models.bert import BertConfig
from megajax.weights.megatron.arguments import Arguments, activation
from megajax.weights.megatron.rows import (
    EMBEDDING,
    EMBEDDINGS,
    OUTPUT,
    OUTPUT_BIAS,
    Table,
    feed_forward,
    self_attention,
)
from megajax.weights.tensor_map import Row, linear, norm

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
    ours = "layers.*."
    return (
        *EMBEDDINGS,
        Row(_TYPES, ("token_type_embedding",)),
        *norm(f"{LAYER}input_layernorm", f"{ours}attention_norm"),
        *self_attention(f"{LAYER}self_attention.", f"{ours}attention."),
        *norm(f"{LAYER}pre_mlp_layernorm", f"{ours}mlp_norm"),
        *feed_forward(f"{LAYER}mlp.", f"{ours}mlp.", is_gated=False),
        *norm("encoder.final_layernorm", "final_norm"),
        *linear("lm_head.dense", "head_dense"),
        *norm("lm_head.layer_norm", "head_norm"),
        Row(OUTPUT, ("head",), "linear"),
        Row(OUTPUT_BIAS, ("head_bias",)),
        *linear("pooler.dense", "pooler"),
        *linear("binary_head", "next_sentence"),
    )
