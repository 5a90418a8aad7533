"""The table of decoders, without and with experts."""

from megajax.convert.megatron.entries import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    Entry,
    Heads,
    Table,
    experts,
    feed_forward,
    norm,
    output_layer,
    positions,
    self_attention,
    vocabulary,
)
from megajax.models.decoder import DecoderConfig


def table(config: DecoderConfig) -> Table:
    D = config.embed_dim
    found = outside_of_layers(config, "decoder.final_layernorm")
    for kind in ("dense", "moe"):
        layers = [n for n in range(config.num_layers) if config.moe.has_experts(n) == (kind == "moe")]
        if layers:
            layer = norm(config.norm_config, "attention_norm", f"{LAYER}input_layernorm", D)
            layer += attention(config, "attention/")
            layer += norm(config.norm_config, "mlp_norm", f"{LAYER}pre_mlp_layernorm", D)
            layer += mlp(config, "mlp/") if kind == "dense" else mixture(config, "mlp/")
            found += [entry.of_kind(kind, layers) for entry in layer]
    return found


def outside_of_layers(config: DecoderConfig, final_norm: str) -> Table:
    """final_norm: its name in Megatron."""
    D = config.embed_dim
    sizes = (config.vocab_size, config.padded_vocab_size, D)
    found = [vocabulary("embedding", EMBEDDING, *sizes)]
    if config.position == "learned":
        found.append(positions(config.max_positions, config.max_positions, D))
    found += norm(config.norm_config, "final_norm", final_norm, D)
    if not config.tied_embeddings:
        found.append(output_layer("head", OUTPUT, *sizes))
    return found


def attention(config: DecoderConfig, ours: str) -> Table:
    """Of a layer; ours: prefix."""
    N = config.num_heads
    H = config.width_of_head
    theirs = f"{LAYER}self_attention."
    biases = dict(qkv_bias=config.has_qkv_bias, out_bias=config.has_attention_out_bias)
    found = self_attention(ours, theirs, Heads(config.embed_dim, N, config.kv_heads, H, **biases))
    if config.attention_sinks:
        found.append(Entry((f"{ours}sinks",), f"{theirs}core_attention.softmax_offset", (N,)))
    if config.qk_norm is True:
        found += norm(config.norm_config, f"{ours}query_norm", f"{theirs}q_layernorm", H)
        found += norm(config.norm_config, f"{ours}key_norm", f"{theirs}k_layernorm", H)
    return found


def mlp(config: DecoderConfig, ours: str) -> Table:
    """Of a layer; ours: prefix."""
    sizes = (config.embed_dim, config.width_of_mlp, config.activation)
    return feed_forward(ours, f"{LAYER}mlp.", *sizes, has_bias=config.has_mlp_bias)


def mixture(config: DecoderConfig, ours: str) -> Table:
    """Of a layer; ours: prefix."""
    return experts(config.moe, ours, f"{LAYER}mlp.", config.embed_dim, config.width_of_mlp, config.activation)
