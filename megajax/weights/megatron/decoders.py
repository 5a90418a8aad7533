"""The table of decoders: without and with experts, latent attention and multi-token prediction."""

import dataclasses

from megajax.models.decoder import DecoderConfig
from megajax.ops.activation import GATED
from megajax.weights.megatron.rows import EMBEDDINGS, OUTPUT, Table, experts, feed_forward, self_attention
from megajax.weights.tensor_map import Row, linear, norm, of_multi_token

LAYER = "decoder.layers.{}."
_MTP = "mtp.layers.{}."  # of one layer of multi-token prediction, around the transformer layer in it


def table(config: DecoderConfig) -> Table:
    """Raises ValueError for layers that Megatron does not have."""
    if config.parallel_residual != "none":
        raise ValueError(f"model.parallel_residual={config.parallel_residual}: Megatron has no such layers")
    is_gated = config.activation in GATED
    layer = (
        *norm(f"{LAYER}input_layernorm", "layers.*.attention_norm"),
        *attention(config, f"{LAYER}self_attention.", "layers.*.attention."),
        *norm(f"{LAYER}pre_mlp_layernorm", "layers.*.mlp_norm"),
        *feed_forward(f"{LAYER}mlp.", "layers.dense.mlp.", is_gated),
        *experts(f"{LAYER}mlp.", "layers.moe.mlp.", is_gated),
    )
    found = [*EMBEDDINGS, *layer, *norm("decoder.final_layernorm", "final_norm"), Row(OUTPUT, ("head",), "linear")]
    inner = [dataclasses.replace(row, theirs=row.theirs.replace(LAYER, f"{_MTP}transformer_layer.")) for row in layer]
    for number in range(config.mtp_layers):
        found += of_multi_token([*_multi_token(f"mtp_{number + 1}.*."), *inner], number, number + 1)
    return tuple(found)


def _multi_token(ours: str) -> Table:
    return (
        *linear(f"{_MTP}eh_proj", f"{ours}projection"),
        *norm(f"{_MTP}enorm", f"{ours}embedding_norm"),
        *norm(f"{_MTP}hnorm", f"{ours}hidden_norm"),
        *norm(f"{_MTP}final_layernorm", f"{ours}final_norm"),
    )


def attention(config: DecoderConfig, theirs: str, ours: str) -> Table:
    """Of a layer. theirs, ours: prefixes."""
    sinks = Row(f"{theirs}core_attention.softmax_offset", (f"{ours}sinks",))
    if config.latent.kv_rank is None:
        return (
            *self_attention(theirs, ours),
            sinks,
            *norm(f"{theirs}q_layernorm", f"{ours}query_norm", qk_norm=True),
            *norm(f"{theirs}k_layernorm", f"{ours}key_norm", qk_norm=True),
        )
    return (
        *linear(f"{theirs}linear_q_proj", f"{ours}query"),
        *linear(f"{theirs}linear_q_down_proj", f"{ours}query_down"),
        *norm(f"{theirs}q_layernorm", f"{ours}query_norm"),
        *linear(f"{theirs}linear_q_up_proj", f"{ours}query_up"),
        *linear(f"{theirs}linear_kv_down_proj", f"{ours}key_value_down"),
        *norm(f"{theirs}kv_layernorm", f"{ours}key_value_norm"),
        *linear(f"{theirs}linear_kv_up_proj", f"{ours}key_up", f"{ours}value_up", layout="within_heads"),
        *linear(f"{theirs}linear_proj", f"{ours}out"),
        sinks,
    )
