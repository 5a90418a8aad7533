"""The table of decoders: without and with experts, latent attention and multi-token prediction."""

import dataclasses

import numpy as np

from megajax.models.decoder import DecoderConfig, mtp_name
from megajax.weights.megatron.entries import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    Entry,
    Heads,
    Table,
    experts,
    feed_forward,
    linear,
    norm,
    output_layer,
    positions,
    self_attention,
    transposed,
    vocabulary,
)

_MTP = "mtp.layers.{}."  # of one layer of multi-token prediction, around the transformer layer in it


def table(config: DecoderConfig) -> Table:
    found = outside_of_layers(config, "decoder.final_layernorm")
    for kind in ("dense", "moe"):
        layers = [n for n in range(config.num_layers) if _kind(config, n) == kind]
        if layers:
            found += [entry.of_layers(f"layers/{kind}", layers) for entry in _layer(config, kind)]
    return found + _multi_token(config)


def _kind(config: DecoderConfig, number: int) -> str:
    """Kind of the layer with this number."""
    return "moe" if config.moe.has_experts(number) else "dense"


def _layer(config: DecoderConfig, kind: str) -> Table:
    D = config.embed_dim
    found = norm(config.norm_config, "attention_norm", f"{LAYER}input_layernorm", D)
    found += attention(config, "attention/")
    found += norm(config.norm_config, "mlp_norm", f"{LAYER}pre_mlp_layernorm", D)
    return found + (mlp(config, "mlp/") if kind == "dense" else mixture(config, "mlp/"))


def _multi_token(config: DecoderConfig) -> Table:
    """The layers of multi-token prediction, which are like the last layer."""
    D = config.embed_dim
    kind = _kind(config, config.num_layers - 1)
    layer = [Entry(("projection",), f"{_MTP}eh_proj.weight", (D, 2 * D), transposed, np.transpose)]
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "final_norm": "final_layernorm"}
    for ours, theirs in names.items():
        layer += norm(config.norm_config, ours, _MTP + theirs, D)
    for entry in _layer(config, kind):
        ours = tuple(f"layer/{path}" for path in entry.ours)
        theirs = entry.theirs.replace(LAYER, f"{_MTP}transformer_layer.")
        layer.append(dataclasses.replace(entry, ours=ours, theirs=theirs))
    stacks = [f"{mtp_name(depth)}/{kind}" for depth in range(1, config.mtp_layers + 1)]
    return [entry.of_layers(stack, (number,)) for number, stack in enumerate(stacks) for entry in layer]


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
    """Entries of a layer. ours: prefix of our names."""
    return (_attention if config.latent.kv_rank is None else _latent_attention)(config, ours)


def _attention(config: DecoderConfig, ours: str) -> Table:
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


def _latent_attention(config: DecoderConfig, ours: str) -> Table:
    D = config.embed_dim
    N = config.num_heads
    H = config.width_of_head
    latent = config.latent
    rank = latent.kv_rank
    value_dim = latent.value_dim or H
    theirs = f"{LAYER}self_attention."

    def split_up(rows):
        return tuple(np.split(rows.T.reshape(rank, N, -1), (H,), -1))

    def join_up(key, value):
        return np.concatenate([key, value], -1).reshape(rank, -1).T

    queries = (N, H + latent.rope_dim)
    if latent.q_rank is None:
        found = linear(f"{ours}query", f"{theirs}linear_q_proj", (D,), queries, has_bias=False)
    else:
        found = linear(f"{ours}query_down", f"{theirs}linear_q_down_proj", (D,), (latent.q_rank,), has_bias=False)
        found += linear(f"{ours}query_up", f"{theirs}linear_q_up_proj", (latent.q_rank,), queries, has_bias=False)
        found += norm(config.norm_config, f"{ours}query_norm", f"{theirs}q_layernorm", latent.q_rank)
    down = (f"{ours}key_value_down", f"{theirs}linear_kv_down_proj")
    found += linear(*down, (D,), (rank + latent.rope_dim,), has_bias=False)
    up = (f"{ours}key_up", f"{ours}value_up")
    found.append(Entry(up, f"{theirs}linear_kv_up_proj.weight", (N * (H + value_dim), rank), split_up, join_up))
    found += linear(f"{ours}out", f"{theirs}linear_proj", (N, value_dim), (D,), has_bias=False)
    found += norm(config.norm_config, f"{ours}key_value_norm", f"{theirs}kv_layernorm", rank)
    if config.attention_sinks:
        found.append(Entry((f"{ours}sinks",), f"{theirs}core_attention.softmax_offset", (N,)))
    return found


def mlp(config: DecoderConfig, ours: str) -> Table:
    """Entries of a layer. ours: prefix of our names."""
    sizes = (config.embed_dim, config.width_of_mlp, config.activation)
    return feed_forward(ours, f"{LAYER}mlp.", *sizes, has_bias=config.has_mlp_bias)


def mixture(config: DecoderConfig, ours: str) -> Table:
    """Entries of a layer. ours: prefix of our names."""
    return experts(config.moe, ours, f"{LAYER}mlp.", config.embed_dim, config.width_of_mlp, config.activation)
