"""The Hugging Face decoders with experts: tables of their options and tensors, as those of families.py."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megajax.weights.hugging_face import weights
from megajax.weights.hugging_face.families import (
    ATTENTION_BIAS,
    HEAD_DIM,
    KV_HEADS,
    LLAMA,
    RMS,
    RMS_EPSILON,
    RMS_EPSILON_5,
    SILU,
    SIZES,
    UNTIED,
)
from megajax.weights.hugging_face.form import Family
from megajax.weights.hugging_face.layer_options import ExpertLayers, NoWindow, SigmoidRouter, Window
from megajax.weights.hugging_face.options import Choice, Option, Options
from megajax.weights.hugging_face.rope import ROPE, Rope


@dataclasses.dataclass(frozen=True)
class DeepseekOptions:
    """Which layers have experts, the width of the shared experts, YaRN's factor on the scores, and the epsilon of the
    norms of latents, which is that of the class whatever rms_norm_eps is."""

    num_dense: int
    """Default of first_k_dense_replace; the next one of n_shared_experts."""
    num_shared: int
    LATENT_EPSILON = 1e-6
    keys = ("first_k_dense_replace", "n_shared_experts")

    def read(self, theirs: Mapping[str, Any]) -> dict[str, Any]:
        num_layers = theirs["num_hidden_layers"]
        num_dense = theirs.get("first_k_dense_replace", self.num_dense)
        shared = (theirs.get("n_shared_experts", self.num_shared) or 0) * theirs["moe_intermediate_size"]
        return {
            "experts": tuple(number >= num_dense for number in range(num_layers)) if num_dense else (),
            "moe.shared_dim": shared or None,
            "attention_multiplier": self._multiplier(theirs),
            "latent.norm_epsilon": self.LATENT_EPSILON,
        }

    def write(self, ours: Mapping[str, Any]) -> dict[str, Any]:
        has_experts = list(ours["experts"]) or [True] * ours["num_layers"]
        width = ours["moe.expert_dim"]
        shared = ours["moe.shared_dim"] or 0
        if not width or shared % width:
            raise ValueError(f"model.moe.shared_dim={shared}, which is no multiple of model.moe.expert_dim={width}")
        if (epsilon := ours["latent.norm_epsilon"]) != self.LATENT_EPSILON:
            raise ValueError(f"an epsilon of {epsilon} of the norms of latents: set model.latent.norm_epsilon to 1e-6")
        scaling = {}
        factor = math.sqrt(ours["attention_multiplier"] * math.sqrt(self._width(ours)))
        is_yarn = ours["rope.scaling"] in ("yarn", "yarn_exact")
        if is_yarn and ours["rope.factor"] > 1 and not math.isclose(factor, 1, rel_tol=1e-12):
            scaling = {"mscale_all_dim": float(f"{(factor - 1) / (0.1 * math.log(ours['rope.factor'])):.12g}")}
        found = Rope().write(ours)
        for name in ("rope_scaling", "rope_parameters"):
            found[name] = found[name] and found[name] | scaling
        return found | {
            "first_k_dense_replace": has_experts.index(True) if any(has_experts) else len(has_experts),
            "n_shared_experts": shared // width,
        }

    def _multiplier(self, theirs: Mapping[str, Any]) -> float | None:
        scaling = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
        if not scaling.get("mscale_all_dim"):
            return None
        width = theirs.get("qk_nope_head_dim", 128) + theirs.get("qk_rope_head_dim", 64)
        factor = max(float(scaling["factor"]), 1.0)
        return (0.1 * scaling["mscale_all_dim"] * math.log(factor) + 1) ** 2 / math.sqrt(width)

    @staticmethod
    def _width(ours: Mapping[str, Any]) -> int:
        return ours["head_dim"] + ours["latent.rope_dim"]


_TOP_K = Option("num_experts_per_tok", "moe.router.top_k")
_NUM_EXPERTS = Option("num_experts", "moe.num_experts", also=("num_local_experts",))
_NORMALISED = Option("norm_topk_prob", "moe.router.score", False, values={True: "softmax", False: "softmax_all"})
_LATENTS: Options = (
    RMS_EPSILON,
    ROPE,  # written again by DeepseekOptions, with its factor on the scores
    Option("q_lora_rank", "latent.q_rank", 1536),
    Option("kv_lora_rank", "latent.kv_rank", 512),
    Option("qk_nope_head_dim", "head_dim", 128),
    Option("qk_rope_head_dim", "latent.rope_dim", 64),
    Option("v_head_dim", "latent.value_dim", 128),
)
_EXPERTS_ONLY = Option("intermediate_size", ("moe.expert_dim", "mlp_dim"))
_QWEN_EXPERTS: Options = (
    _TOP_K,
    _NUM_EXPERTS,
    _NORMALISED,
    Option("moe_intermediate_size", "moe.expert_dim"),
    ExpertLayers(),
    NoWindow(),
)

FAMILIES: tuple[Family, ...] = (
    Family(
        "MixtralForCausalLM",
        "mixtral",
        RMS,
        (
            *SIZES,
            _EXPERTS_ONLY,
            KV_HEADS,
            HEAD_DIM,
            UNTIED,
            SILU,
            RMS_EPSILON_5,
            _TOP_K,
            Option("num_local_experts", "moe.num_experts"),
            Rope(base=1_000_000.0),
            Window("everywhere", default=None),
        ),
        weights.MIXTRAL,
        (weights.FUSED_EXPERTS,),
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        RMS | dict(qk_norm=True),
        (*LLAMA, HEAD_DIM, RMS_EPSILON, ATTENTION_BIAS, *_QWEN_EXPERTS, ROPE),
        weights.QWEN_MOE,
        (weights.FUSED_EXPERTS,),
    ),
    Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        RMS | {"moe.shared_gate": True},
        (
            *LLAMA,
            RMS_EPSILON,
            Option("qkv_bias", "qkv_bias", True),
            *_QWEN_EXPERTS,
            Option("shared_expert_intermediate_size", "moe.shared_dim"),
            ROPE,
        ),
        weights.QWEN_MOE,
        (weights.FUSED_EXPERTS,),
    ),
    Family(
        "OlmoeForCausalLM",
        "olmoe",
        RMS | dict(qk_norm="all_heads"),
        (
            *SIZES,
            _EXPERTS_ONLY,
            KV_HEADS,
            UNTIED,
            SILU,
            RMS_EPSILON_5,
            ATTENTION_BIAS,
            _TOP_K,
            _NUM_EXPERTS,
            _NORMALISED,
            Choice("clip_qkv", None),
            ROPE,
        ),
        weights.QWEN_MOE,
        (weights.FUSED_EXPERTS,),
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        RMS | {"moe.router.score": "sigmoid"},
        (
            *LLAMA,
            *_LATENTS,
            Option("rope_interleave", "rope.interleaved", True),
            Option("n_routed_experts", "moe.num_experts", 256, also=("num_local_experts",)),
            Option("moe_intermediate_size", "moe.expert_dim", 2048),
            SigmoidRouter(top_k=8, num_groups=8, top_groups=4),
            Option("routed_scaling_factor", "moe.router.scale", 2.5),
            Option("num_nextn_predict_layers", "mtp_layers", 1, also=("num_mtp_layers",)),
            DeepseekOptions(num_dense=3, num_shared=1),
            Choice("scoring_func", "sigmoid"),
            Choice("topk_method", "noaux_tc"),
            Choice("attention_bias", False),
            Choice("moe_layer_freq", 1),
        ),
        weights.DEEPSEEK_V3,
    ),
    Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        RMS | {"moe.router.score": "softmax_all", "rope.interleaved": True},
        (
            *LLAMA,
            *_LATENTS,
            Option("n_routed_experts", "moe.num_experts", 64, also=("num_experts",)),
            Option("moe_intermediate_size", "moe.expert_dim", 1407),
            _TOP_K,
            Option("routed_scaling_factor", "moe.router.scale", 1.0),
            DeepseekOptions(num_dense=0, num_shared=2),
            Choice("scoring_func", "softmax"),
            Choice("topk_method", "greedy"),  # the other one scores a group of experts by its best one
            Choice("norm_topk_prob", False),
            Choice("attention_bias", False),
            Choice("moe_layer_freq", 1),
        ),
        weights.DEEPSEEK_V3,
    ),
)
