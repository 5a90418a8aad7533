"""LoRA for the peer: frozen matrices and embeddings in bfloat16, float32 adapters beside the matrices of the blocks.

The fused projection to queries, keys and values has one adapter, where megajax has three.
"""

import torch
from torch import Tensor, nn

from benchmarks.peers.torch_model import Gpt
from megajax.layers.lora import LoraConfig


class Adapted(nn.Module):
    """x -> base(x) + scale * b(a(x)), in bfloat16 under autocast."""

    def __init__(self, base: nn.Linear, lora: LoraConfig):
        super().__init__()
        self.base = base
        self.scale = lora.scale
        options = dict(bias=False, device=base.weight.device, dtype=torch.float32)
        self.a = nn.Linear(base.in_features, lora.rank, **options)
        self.b = nn.Linear(lora.rank, base.out_features, **options)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.b(self.a(x))


def adapt(gpt: Gpt, lora: LoraConfig) -> None:
    """Changes the model in place; only adapters have gradients."""
    gpt.to(torch.bfloat16).requires_grad_(False)
    for block in gpt.blocks:
        for module in (block, block.mlp):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Adapted(child, lora))
