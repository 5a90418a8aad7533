"""Tables of the tensors of each Hugging Face decoder, and of the parameters that they become.

The names are those of the files that transformers writes. In the name of a tensor the first `{}` is the number of the
layer, a second one that of the expert; `layers.*.` in the name of a parameter is any kind of layer (dense, moe).
"""

from collections.abc import Sequence

from megajax.weights.tensor_map import Row, linear, norm, of_multi_token

_L = "layers.*."
_Q, _K, _V, _OUT = (f"{_L}attention.{name}" for name in ("query", "key", "value", "out"))
_GATE, _UP, _DOWN = (f"layers.dense.mlp.{name}" for name in ("gate", "up", "down"))
_EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN, _ROUTER = (
    f"layers.moe.mlp.{name}" for name in ("gate", "up", "down", "router")
)
_SHARED = "layers.moe.mlp.shared"
_HEAD = linear("lm_head", "head")


def _attention(theirs: str, out: str) -> tuple[Row, ...]:
    names = {"q_proj": _Q, "k_proj": _K, "v_proj": _V, out: _OUT}
    return tuple(row for name, ours in names.items() for row in linear(f"{theirs}.{name}", ours))


def _gated(theirs: str, ours: str) -> tuple[Row, ...]:
    return tuple(row for name in ("gate", "up", "down") for row in linear(f"{theirs}.{name}_proj", f"{ours}.{name}"))


_LLAMA_OUTSIDE = (Row("model.embed_tokens.weight", ("embedding",)), *norm("model.norm", "final_norm"), *_HEAD)
_LLAMA_ATTENTION = (
    *_attention("model.layers.{}.self_attn", "o_proj"),
    *norm("model.layers.{}.self_attn.q_norm", _L + "attention.query_norm"),
    *norm("model.layers.{}.self_attn.k_norm", _L + "attention.key_norm"),
)
_LLAMA_MLP = _gated("model.layers.{}.mlp", "layers.dense.mlp")
_LLAMA_NORMS = (
    *norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *norm("model.layers.{}.post_attention_layernorm", _L + "mlp_norm"),
)
LLAMA = (*_LLAMA_OUTSIDE, *_LLAMA_NORMS, *_LLAMA_ATTENTION, *_LLAMA_MLP)
PHI3 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *linear("model.layers.{}.self_attn.qkv_proj", _Q, _K, _V),
    *linear("model.layers.{}.self_attn.o_proj", _OUT),
    *linear("model.layers.{}.mlp.gate_up_proj", _GATE, _UP),
    *linear("model.layers.{}.mlp.down_proj", _DOWN),
)
GEMMA = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_ATTENTION,
    *_LLAMA_MLP,
    *norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *norm("model.layers.{}.post_attention_layernorm", _L + "attention_post_norm"),
    *norm("model.layers.{}.pre_feedforward_layernorm", _L + "mlp_norm"),
    *norm("model.layers.{}.post_feedforward_layernorm", _L + "mlp_post_norm"),
)
OLMO2 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_ATTENTION,
    *_LLAMA_MLP,
    *norm("model.layers.{}.post_attention_layernorm", _L + "attention_post_norm"),
    *norm("model.layers.{}.post_feedforward_layernorm", _L + "mlp_post_norm"),
)
STARCODER2 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *_LLAMA_ATTENTION,
    *linear("model.layers.{}.mlp.c_fc", _UP),
    *linear("model.layers.{}.mlp.c_proj", _DOWN),
)
PHI = (
    Row("model.embed_tokens.weight", ("embedding",)),
    *norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_attention("model.layers.{}.self_attn", "dense"),
    *linear("model.layers.{}.mlp.fc1", _UP),
    *linear("model.layers.{}.mlp.fc2", _DOWN),
    *norm("model.final_layernorm", "final_norm"),
    *_HEAD,
)
GPT2 = (
    Row("transformer.wte.weight", ("embedding",)),
    Row("transformer.wpe.weight", ("position_embedding",)),
    *norm("transformer.h.{}.ln_1", _L + "attention_norm"),
    *linear("transformer.h.{}.attn.c_attn", _Q, _K, _V, layout="conv1d"),
    *linear("transformer.h.{}.attn.c_proj", _OUT, layout="conv1d"),
    *norm("transformer.h.{}.ln_2", _L + "mlp_norm"),
    *linear("transformer.h.{}.mlp.c_fc", _UP, layout="conv1d"),
    *linear("transformer.h.{}.mlp.c_proj", _DOWN, layout="conv1d"),
    *norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
GPTJ = (
    Row("transformer.wte.weight", ("embedding",)),
    *norm("transformer.h.{}.ln_1", _L + "attention_norm"),
    *_attention("transformer.h.{}.attn", "out_proj"),
    *linear("transformer.h.{}.mlp.fc_in", _UP),
    *linear("transformer.h.{}.mlp.fc_out", _DOWN),
    *norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
NEOX = (
    Row("gpt_neox.embed_in.weight", ("embedding",)),
    *norm("gpt_neox.layers.{}.input_layernorm", _L + "attention_norm"),
    *norm("gpt_neox.layers.{}.post_attention_layernorm", _L + "mlp_norm"),
    *linear("gpt_neox.layers.{}.attention.query_key_value", _Q, _K, _V, layout="by_head"),
    *linear("gpt_neox.layers.{}.attention.dense", _OUT),
    *linear("gpt_neox.layers.{}.mlp.dense_h_to_4h", _UP),
    *linear("gpt_neox.layers.{}.mlp.dense_4h_to_h", _DOWN),
    *norm("gpt_neox.final_layer_norm", "final_norm"),
    *(Row(row.theirs.replace("lm_head", "embed_out"), row.ours, row.layout) for row in _HEAD),
)
_BLOOM_LAYER = (
    *linear("transformer.h.{}.self_attention.query_key_value", _Q, _K, _V, layout="by_head"),
    *linear("transformer.h.{}.self_attention.dense", _OUT),
    *linear("transformer.h.{}.mlp.dense_h_to_4h", _UP),
    *linear("transformer.h.{}.mlp.dense_4h_to_h", _DOWN),
)
_BLOOM_OUTSIDE = (
    Row("transformer.word_embeddings.weight", ("embedding",)),
    *norm("transformer.word_embeddings_layernorm", "embedding_norm"),
    *norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
BLOOM = (
    *_BLOOM_OUTSIDE,
    *norm("transformer.h.{}.input_layernorm", _L + "attention_norm"),
    *norm("transformer.h.{}.post_attention_layernorm", _L + "mlp_norm"),
    *_BLOOM_LAYER,
)
FALCON = (
    *_BLOOM_OUTSIDE,
    *norm("transformer.h.{}.input_layernorm", _L + "attention_norm", parallel_residual="none"),
    *norm("transformer.h.{}.post_attention_layernorm", _L + "mlp_norm", parallel_residual="none"),
    *norm("transformer.h.{}.input_layernorm", _L + "attention_norm", parallel_residual="one_norm"),
    *norm("transformer.h.{}.ln_attn", _L + "attention_norm", parallel_residual="two_norms"),
    *norm("transformer.h.{}.ln_mlp", _L + "mlp_norm", parallel_residual="two_norms"),
    *_BLOOM_LAYER,
)

# ----------------------------------------------------------------------------- mixtures of experts

MIXTRAL = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *_LLAMA_ATTENTION,
    *linear("model.layers.{}.block_sparse_moe.gate", _ROUTER),
    *linear("model.layers.{}.block_sparse_moe.experts.{}.w1", _EXPERT_GATE),
    *linear("model.layers.{}.block_sparse_moe.experts.{}.w3", _EXPERT_UP),
    *linear("model.layers.{}.block_sparse_moe.experts.{}.w2", _EXPERT_DOWN),
)
_QWEN_SHARED = (
    *_gated("model.layers.{}.mlp.shared_expert", _SHARED),
    *linear("model.layers.{}.mlp.shared_expert_gate", f"{_SHARED}_gate"),
)
_QWEN_MOE = (*LLAMA, *linear("model.layers.{}.mlp.gate", _ROUTER), *_QWEN_SHARED)
QWEN_MOE = (
    *_QWEN_MOE,
    *_gated("model.layers.{}.mlp.experts.{}", "layers.moe.mlp"),
)
# As transformers 5 has them in memory, which save_pretrained(save_original_format=False) writes.
FUSED_EXPERTS = (
    *_QWEN_MOE,
    Row("model.layers.{}.mlp.experts.gate_up_proj", (_EXPERT_GATE, _EXPERT_UP), "linear"),
    Row("model.layers.{}.mlp.experts.down_proj", (_EXPERT_DOWN,), "linear"),
)

# ----------------------------------------------------------------------------- latent attention

DEEPSEEK_V3 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *linear("model.layers.{}.self_attn.q_proj", _Q),
    *linear("model.layers.{}.self_attn.q_a_proj", f"{_Q}_down"),
    *norm("model.layers.{}.self_attn.q_a_layernorm", f"{_Q}_norm"),
    *linear("model.layers.{}.self_attn.q_b_proj", f"{_Q}_up"),
    *linear("model.layers.{}.self_attn.kv_a_proj_with_mqa", f"{_L}attention.key_value_down"),
    *norm("model.layers.{}.self_attn.kv_a_layernorm", f"{_L}attention.key_value_norm"),
    *linear("model.layers.{}.self_attn.kv_b_proj", f"{_K}_up", f"{_V}_up", layout="within_heads"),
    *linear("model.layers.{}.self_attn.o_proj", _OUT),
    *_LLAMA_MLP,
    Row("model.layers.{}.mlp.gate.weight", (_ROUTER,), "linear"),
    Row("model.layers.{}.mlp.gate.e_score_correction_bias", (f"{_ROUTER}_expert_bias",)),
    *_gated("model.layers.{}.mlp.experts.{}", "layers.moe.mlp"),
    *_gated("model.layers.{}.mlp.shared_experts", _SHARED),
)


def multi_token_rows(table: Sequence[Row], first_layer: int, depth: int) -> list[Row]:
    """The tensors of a layer of multi-token prediction, which follow those of the layers of the model."""
    stack = f"mtp_{depth}."
    own = (
        *norm("model.layers.{}.enorm", f"{stack}*.embedding_norm"),
        *norm("model.layers.{}.hnorm", f"{stack}*.hidden_norm"),
        *linear("model.layers.{}.eh_proj", f"{stack}*.projection"),
        *norm("model.layers.{}.shared_head.norm", f"{stack}*.final_norm"),
    )
    return of_multi_token((*own, *table), first_layer, depth)
