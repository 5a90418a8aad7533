"""Writes latent_attention.npz: latent attention as Megatron Core computes it, without a GPU and Transformer Engine.

python tests/oracles/make_latent_attention.py    (recorded with Megatron Core 0.16.1 and torch for the CPU)

The class is Megatron's; the core attention, which is Transformer Engine's there, is a plain one here. Keys are
NAME/arguments (those of Megatron's command line, JSON), NAME/weights/*, NAME/x and NAME/out, both [T, B, D].
"""

import json
import os
from pathlib import Path

import numpy as np
import torch

torch.cuda.current_device = lambda: "cpu"
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig  # noqa: E402

COMMON = dict(
    num_layers=1, hidden_size=16, num_attention_heads=3, kv_lora_rank=10, qk_head_dim=6, qk_pos_emb_head_dim=8,
    v_head_dim=5, add_bias_linear=False, layernorm_epsilon=1e-6, normalization="RMSNorm", rotary_base=10000,
    qk_layernorm=True,
)  # fmt: skip
CASES = {
    "yarn": dict(
        q_lora_rank=12, rope_type="yarn", rotary_scaling_factor=40, mscale=1.0, mscale_all_dim=0.5, beta_fast=4,
        beta_slow=1, original_max_position_embeddings=16,
    ),
    "rope": dict(q_lora_rank=None, rope_type="rope", rotary_scaling_factor=1.0),
}  # fmt: skip
OF_COMMAND_LINE = dict(multi_latent_attention=True, position_embedding_type="rope", max_position_embeddings=32)


class CoreAttention(torch.nn.Module):
    def __init__(self, softmax_scale: float, **others):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *others, **options):
        scores = torch.einsum("sbnh,tbnh->bnst", query, key) * self.scale
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        mixed = torch.einsum("bnst,tbnv->sbnv", scores.masked_fill(later, float("-inf")).softmax(-1), value)
        return mixed.flatten(2)


class Norm(torch.nn.Module):
    def __init__(self, config, hidden_size: int, eps: float):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def record(name: str, arguments: dict) -> dict[str, np.ndarray]:
    config = MLATransformerConfig(
        **arguments, use_cpu_initialization=True, params_dtype=torch.float32, apply_rope_fusion=False
    )
    columns = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj")
    parts = multi_latent_attention.MLASelfAttentionSubmodules(
        **dict.fromkeys(columns, ColumnParallelLinear),
        core_attention=CoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=Norm,
        kv_layernorm=Norm,
    )
    module = multi_latent_attention.MLASelfAttention(config, parts, 1, AttnMaskType.causal)
    x = torch.randn(24, 2, 16)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.4 + float(parameter.ndim == 1))
        out, _ = module(x, None)
    found = {f"weights/{key}": parameter.detach() for key, parameter in module.named_parameters()}
    arrays = {key: array.numpy() for key, array in (found | {"x": x, "out": out}).items()}
    arrays["arguments"] = np.array(json.dumps(arguments | OF_COMMAND_LINE))
    return {f"{name}/{key}": array for key, array in arrays.items()}


if __name__ == "__main__":
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    multi_latent_attention.TELinear = type("NoTransformerEngine", (), {})
    torch.manual_seed(0)
    arrays = {}
    for name, case in CASES.items():
        arrays |= record(name, COMMON | case)
    np.savez_compressed(Path(__file__).parent / "latent_attention.npz", **arrays)
