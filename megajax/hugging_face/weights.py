"""Tables of the tensors of each Hugging Face decoder, and of the parameters that they become.

The names are those of the files that transformers writes. In the name of a tensor the first `{}` is the number of the
layer, a second one that of the expert; `layers.*.` in the name of a parameter is any kind of layer (dense, moe).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Layout = Literal["same", "linear", "conv1d", "by_head"]


@dataclasses.dataclass(frozen=True)
class Row:
    """Maps one Hugging Face tensor (theirs) to one or several of our parameters, of each kind of layer that has them.

    A tensor of each expert is a matrix of ours; a tensor without the number of an expert holds all, [experts, ...].
    """

    theirs: str
    ours: tuple[str, ...]
    layout: Layout = "same"
    """linear: theirs is [out, in], ours [in, out], several of ours concatenated along out. conv1d: theirs is [in, out].
    by_head: as linear, with rows grouped by key-value head: queries, key, value. same: no change."""
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of our config for which the row applies."""


def _linear(theirs: str, *ours: str, layout: Layout = "linear") -> tuple[Row, Row]:
    biases = tuple(f"{name}_bias" for name in ours)
    return Row(f"{theirs}.weight", ours, layout), Row(f"{theirs}.bias", biases, layout)


def _norm(theirs: str, ours: str, **where: Any) -> tuple[Row, Row]:
    return Row(f"{theirs}.weight", (f"{ours}.scale",), where=where), Row(
        f"{theirs}.bias", (f"{ours}.bias",), where=where
    )


_L = "layers.*."
_Q, _K, _V, _OUT = (f"{_L}attention.{name}" for name in ("query", "key", "value", "out"))
_GATE, _UP, _DOWN = (f"layers.dense.mlp.{name}" for name in ("gate", "up", "down"))
_EXPERT_GATE, _EXPERT_UP, _EXPERT_DOWN, _ROUTER = (
    f"layers.moe.mlp.{name}" for name in ("gate", "up", "down", "router")
)
_SHARED = "layers.moe.mlp.shared"
_HEAD = _linear("lm_head", "head")

_LLAMA_OUTSIDE = (Row("model.embed_tokens.weight", ("embedding",)), *_norm("model.norm", "final_norm"), *_HEAD)
_LLAMA_ATTENTION = (
    *_linear("model.layers.{}.self_attn.q_proj", _Q),
    *_linear("model.layers.{}.self_attn.k_proj", _K),
    *_linear("model.layers.{}.self_attn.v_proj", _V),
    *_linear("model.layers.{}.self_attn.o_proj", _OUT),
    *_norm("model.layers.{}.self_attn.q_norm", _L + "attention.query_norm"),
    *_norm("model.layers.{}.self_attn.k_norm", _L + "attention.key_norm"),
)
_LLAMA_MLP = (
    *_linear("model.layers.{}.mlp.gate_proj", _GATE),
    *_linear("model.layers.{}.mlp.up_proj", _UP),
    *_linear("model.layers.{}.mlp.down_proj", _DOWN),
)
_LLAMA_NORMS = (
    *_norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_norm("model.layers.{}.post_attention_layernorm", _L + "mlp_norm"),
)
LLAMA = (*_LLAMA_OUTSIDE, *_LLAMA_NORMS, *_LLAMA_ATTENTION, *_LLAMA_MLP)
PHI3 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *_linear("model.layers.{}.self_attn.qkv_proj", _Q, _K, _V),
    *_linear("model.layers.{}.self_attn.o_proj", _OUT),
    *_linear("model.layers.{}.mlp.gate_up_proj", _GATE, _UP),
    *_linear("model.layers.{}.mlp.down_proj", _DOWN),
)
GEMMA = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_ATTENTION,
    *_LLAMA_MLP,
    *_norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_norm("model.layers.{}.post_attention_layernorm", _L + "attention_post_norm"),
    *_norm("model.layers.{}.pre_feedforward_layernorm", _L + "mlp_norm"),
    *_norm("model.layers.{}.post_feedforward_layernorm", _L + "mlp_post_norm"),
)
OLMO2 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_ATTENTION,
    *_LLAMA_MLP,
    *_norm("model.layers.{}.post_attention_layernorm", _L + "attention_post_norm"),
    *_norm("model.layers.{}.post_feedforward_layernorm", _L + "mlp_post_norm"),
)
STARCODER2 = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *_LLAMA_ATTENTION,
    *_linear("model.layers.{}.mlp.c_fc", _UP),
    *_linear("model.layers.{}.mlp.c_proj", _DOWN),
)
PHI = (
    Row("model.embed_tokens.weight", ("embedding",)),
    *_norm("model.layers.{}.input_layernorm", _L + "attention_norm"),
    *_linear("model.layers.{}.self_attn.q_proj", _Q),
    *_linear("model.layers.{}.self_attn.k_proj", _K),
    *_linear("model.layers.{}.self_attn.v_proj", _V),
    *_linear("model.layers.{}.self_attn.dense", _OUT),
    *_linear("model.layers.{}.mlp.fc1", _UP),
    *_linear("model.layers.{}.mlp.fc2", _DOWN),
    *_norm("model.final_layernorm", "final_norm"),
    *_HEAD,
)
GPT2 = (
    Row("transformer.wte.weight", ("embedding",)),
    Row("transformer.wpe.weight", ("position_embedding",)),
    *_norm("transformer.h.{}.ln_1", _L + "attention_norm"),
    *_linear("transformer.h.{}.attn.c_attn", _Q, _K, _V, layout="conv1d"),
    *_linear("transformer.h.{}.attn.c_proj", _OUT, layout="conv1d"),
    *_norm("transformer.h.{}.ln_2", _L + "mlp_norm"),
    *_linear("transformer.h.{}.mlp.c_fc", _UP, layout="conv1d"),
    *_linear("transformer.h.{}.mlp.c_proj", _DOWN, layout="conv1d"),
    *_norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
GPTJ = (
    Row("transformer.wte.weight", ("embedding",)),
    *_norm("transformer.h.{}.ln_1", _L + "attention_norm"),
    *_linear("transformer.h.{}.attn.q_proj", _Q),
    *_linear("transformer.h.{}.attn.k_proj", _K),
    *_linear("transformer.h.{}.attn.v_proj", _V),
    *_linear("transformer.h.{}.attn.out_proj", _OUT),
    *_linear("transformer.h.{}.mlp.fc_in", _UP),
    *_linear("transformer.h.{}.mlp.fc_out", _DOWN),
    *_norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
NEOX = (
    Row("gpt_neox.embed_in.weight", ("embedding",)),
    *_norm("gpt_neox.layers.{}.input_layernorm", _L + "attention_norm"),
    *_norm("gpt_neox.layers.{}.post_attention_layernorm", _L + "mlp_norm"),
    *_linear("gpt_neox.layers.{}.attention.query_key_value", _Q, _K, _V, layout="by_head"),
    *_linear("gpt_neox.layers.{}.attention.dense", _OUT),
    *_linear("gpt_neox.layers.{}.mlp.dense_h_to_4h", _UP),
    *_linear("gpt_neox.layers.{}.mlp.dense_4h_to_h", _DOWN),
    *_norm("gpt_neox.final_layer_norm", "final_norm"),
    *(Row(row.theirs.replace("lm_head", "embed_out"), row.ours, row.layout) for row in _HEAD),
)
_BLOOM_LAYER = (
    *_linear("transformer.h.{}.self_attention.query_key_value", _Q, _K, _V, layout="by_head"),
    *_linear("transformer.h.{}.self_attention.dense", _OUT),
    *_linear("transformer.h.{}.mlp.dense_h_to_4h", _UP),
    *_linear("transformer.h.{}.mlp.dense_4h_to_h", _DOWN),
)
_BLOOM_OUTSIDE = (
    Row("transformer.word_embeddings.weight", ("embedding",)),
    *_norm("transformer.word_embeddings_layernorm", "embedding_norm"),
    *_norm("transformer.ln_f", "final_norm"),
    *_HEAD,
)
BLOOM = (
    *_BLOOM_OUTSIDE,
    *_norm("transformer.h.{}.input_layernorm", _L + "attention_norm"),
    *_norm("transformer.h.{}.post_attention_layernorm", _L + "mlp_norm"),
    *_BLOOM_LAYER,
)
FALCON = (
    *_BLOOM_OUTSIDE,
    *_norm("transformer.h.{}.input_layernorm", _L + "attention_norm", parallel_residual="none"),
    *_norm("transformer.h.{}.post_attention_layernorm", _L + "mlp_norm", parallel_residual="none"),
    *_norm("transformer.h.{}.input_layernorm", _L + "attention_norm", parallel_residual="one_norm"),
    *_norm("transformer.h.{}.ln_attn", _L + "attention_norm", parallel_residual="two_norms"),
    *_norm("transformer.h.{}.ln_mlp", _L + "mlp_norm", parallel_residual="two_norms"),
    *_BLOOM_LAYER,
)

# ----------------------------------------------------------------------------- mixtures of experts

MIXTRAL = (
    *_LLAMA_OUTSIDE,
    *_LLAMA_NORMS,
    *_LLAMA_ATTENTION,
    *_linear("model.layers.{}.block_sparse_moe.gate", _ROUTER),
    *_linear("model.layers.{}.block_sparse_moe.experts.{}.w1", _EXPERT_GATE),
    *_linear("model.layers.{}.block_sparse_moe.experts.{}.w3", _EXPERT_UP),
    *_linear("model.layers.{}.block_sparse_moe.experts.{}.w2", _EXPERT_DOWN),
)
_QWEN_SHARED = (
    *_linear("model.layers.{}.mlp.shared_expert.gate_proj", f"{_SHARED}.gate"),
    *_linear("model.layers.{}.mlp.shared_expert.up_proj", f"{_SHARED}.up"),
    *_linear("model.layers.{}.mlp.shared_expert.down_proj", f"{_SHARED}.down"),
    *_linear("model.layers.{}.mlp.shared_expert_gate", f"{_SHARED}_gate"),
)
_QWEN_MOE = (*LLAMA, *_linear("model.layers.{}.mlp.gate", _ROUTER), *_QWEN_SHARED)
QWEN_MOE = (
    *_QWEN_MOE,
    *_linear("model.layers.{}.mlp.experts.{}.gate_proj", _EXPERT_GATE),
    *_linear("model.layers.{}.mlp.experts.{}.up_proj", _EXPERT_UP),
    *_linear("model.layers.{}.mlp.experts.{}.down_proj", _EXPERT_DOWN),
)
# As transformers 5 has them in memory, which save_pretrained(save_original_format=False) writes.
FUSED_EXPERTS = (
    *_QWEN_MOE,
    Row("model.layers.{}.mlp.experts.gate_up_proj", (_EXPERT_GATE, _EXPERT_UP), "linear"),
    Row("model.layers.{}.mlp.experts.down_proj", (_EXPERT_DOWN,), "linear"),
)
