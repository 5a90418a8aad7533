"""BERT: the model that Megatron's arguments describe, and the table of its parameters."""

from megajax.models.bert import BertConfig
from megajax.weights.megatron.arguments import ONLY_DECODERS, Arguments, Shapes, head_dim, shared_fields
from megajax.weights.megatron.rows import (
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
_FIXED = ONLY_DECODERS | {
    "normalization": ("LayerNorm",),
    "position_embedding_type": ("learned_absolute",),
    "add_bias_linear": (True,),
    "disable_bias_linear": (False,),
    "swiglu": (False,),
    "squared_relu": (False,),
}


def read_model(given: Arguments, shapes: Shapes) -> BertConfig:
    given.require(_FIXED)
    if head_dim(given) * given.size("num_attention_heads") != given.size("hidden_size"):
        raise given.refuse("kv_channels")
    types = shapes.get(_TYPES)
    return BertConfig(
        **shared_fields(given, shapes),
        num_layers=int(given.get("encoder_num_layers", "num_layers")),
        num_token_types=types[0] if types else 0,
        norm_placement="pre",
        embedding_norm=False,
        head_activation="gelu",  # fixed in Megatron
        tied_embeddings=OUTPUT not in shapes,
        next_sentence="binary_head.weight" in shapes,
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
