"""Rows of the tables that pair Megatron Core's parameters with ours, for the parts that its models share.

Megatron's linear weights are [out, in]. The rows of `linear_qkv` go by key-value head: its N / K queries, its key, its
value; those of `linear_kv` (cross-attention) and `linear_kv_up_proj` (latent attention) by head: its key, its value. A
gated `linear_fc1` is the gate above the up projection. Names in the arguments are prefixes.
"""

from megajax.weights.tensor_map import Row, linear

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
SEQUENCE_TO_SEQUENCE_OUTPUT = "lm_head.output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"
SEQUENCE_TO_SEQUENCE_BIAS = "lm_head.output_layer.bias"
# Arrays with a row for each token.
VOCABULARY = (EMBEDDING, OUTPUT, OUTPUT_BIAS, SEQUENCE_TO_SEQUENCE_OUTPUT, SEQUENCE_TO_SEQUENCE_BIAS)
EMBEDDINGS = (
    Row(EMBEDDING, ("embedding",)),
    Row("embedding.position_embeddings.weight", ("position_embedding",)),
)

Table = tuple[Row, ...]


def self_attention(theirs: str, ours: str) -> Table:
    names = (f"{ours}query", f"{ours}key", f"{ours}value")
    return (
        *linear(f"{theirs}linear_qkv", *names, layout="by_head"),
        *linear(f"{theirs}linear_proj", f"{ours}out"),
    )


def feed_forward(theirs: str, ours: str, is_gated: bool) -> Table:
    names = (f"{ours}gate", f"{ours}up") if is_gated else (f"{ours}up",)
    return *linear(f"{theirs}linear_fc1", *names), *linear(f"{theirs}linear_fc2", f"{ours}down")


def experts(theirs: str, ours: str, is_gated: bool) -> Table:
    """theirs: with the place of the number of a layer."""
    return (
        *linear(f"{theirs}router", f"{ours}router"),
        Row(f"{theirs}router.expert_bias", (f"{ours}router_expert_bias",)),
        *feed_forward(theirs + "experts.local_experts.{}.", ours, is_gated),
        *feed_forward(f"{theirs}shared_experts.", f"{ours}shared.", is_gated),
        Row(f"{theirs}shared_experts.gate_weight", (f"{ours}shared_gate",), "linear"),
    )
