"""The model of a recipe in plain PyTorch, for the peers: fused projections, SDPA, nothing of megajax.

Dimensions: B batch, T sequence, D model width, N heads, K key-value heads, H head dim, V vocabulary (padded).
"""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megajax.config import Config
from megajax.models.decoder import DecoderConfig

# The fields of a model that the peer knows; all others have to be at their defaults.
KNOWN = {
    "kind", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "vocab_size",
    "vocab_multiple", "position", "max_positions", "rope", "norm", "norm_epsilon", "activation",
    "biases", "tied_embeddings", "init_std",
}  # fmt: skip
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": F.silu,
}


def check(config: Config) -> None:
    """Raises ValueError for settings that the peers do not support."""
    model = config.model
    training = config.training
    fields = {field.name: (getattr(model, field.name), field.default) for field in dataclasses.fields(model)}
    unknown = {
        f"model.{name}={value}": name not in KNOWN and value != default for name, (value, default) in fields.items()
    }
    refused = unknown | {
        f"model.activation={model.activation}": model.activation not in ACTIVATIONS,
        f"model.position={model.position}": model.position == "alibi",
        "model.rope.interleaved=True": model.rope.interleaved,
        f"training.microbatch_size={training.microbatch_size}": training.microbatch_size is not None,
        "task.cross_document_attention=False": not config.task.cross_document_attention,
    }
    for field, holds in refused.items():
        if holds:
            raise ValueError(
                f"{field}: the PyTorch peer does not support this; measure without it, or use --peers=limit"
            )


def rope_tables(model: DecoderConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, H / 2]."""
    frequencies = torch.tensor(model.rope.inverse_frequencies(model.width_of_head), dtype=torch.float32, device=device)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BNTH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x_BNTH.float().chunk(2, -1)
    cos, sin = rope
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BNTH.dtype)


class Block(nn.Module):
    def __init__(self, model: DecoderConfig, rope: tuple[Tensor, Tensor] | None, recompute: bool):
        super().__init__()
        self.heads = (model.num_heads, model.kv_heads)
        self.head_dim = model.width_of_head
        self.activation = ACTIVATIONS[model.activation]
        self.gated = model.activation == "swiglu"
        self.rope = rope
        self.recompute = recompute
        width = model.embed_dim
        attended = model.num_heads * model.width_of_head
        wide = model.width_of_mlp
        linear = functools.partial(nn.Linear, bias="mlp" in model.biases)
        self.attention_norm = make_norm(model)
        self.mlp_norm = make_norm(model)
        self.qkv = linear(width, (model.num_heads + 2 * model.kv_heads) * model.width_of_head)
        self.out = linear(attended, width)
        self.gate = linear(width, wide) if self.gated else None
        self.up = linear(width, wide)
        self.down = linear(wide, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return checkpoint(self.compute, x_BTD, use_reentrant=False) if self.recompute else self.compute(x_BTD)

    def compute(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        heads, kv_heads = self.heads
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        if self.rope is not None:
            q = rotate(q, self.rope)
            k = rotate(k, self.rope)
        o_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        x_BTD = x_BTD + self.out(o_BNTH.transpose(1, 2).reshape(batch, length, -1))
        y_BTD = self.mlp_norm(x_BTD)
        if self.gated:
            return x_BTD + self.down(self.activation(self.gate(y_BTD)) * self.up(y_BTD))
        return x_BTD + self.down(self.activation(self.up(y_BTD)))


class Gpt(nn.Module):
    """tokens [B, T] -> logits [B, T, V]. Build it under `with torch.device(...)`; rope tables are on rope_device."""

    def __init__(self, model: DecoderConfig, length: int, rope_device: torch.device, recompute: bool):
        super().__init__()
        rope = rope_tables(model, length, rope_device) if model.position == "rope" else None
        self.embedding = nn.Embedding(model.padded_vocab_size, model.embed_dim)
        learned = model.position == "learned"
        self.position_embedding = nn.Embedding(model.max_positions, model.embed_dim) if learned else None
        self.blocks = nn.ModuleList([Block(model, rope, recompute) for _ in range(model.num_layers)])
        self.final_norm = make_norm(model)
        self.head = nn.Linear(model.embed_dim, model.padded_vocab_size, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        if self.position_embedding is not None:
            x_BTD = x_BTD + self.position_embedding.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.final_norm(x_BTD))


def make_norm(model: DecoderConfig) -> nn.Module:
    kind = nn.RMSNorm if model.norm == "rmsnorm" else nn.LayerNorm
    return kind(model.embed_dim, eps=model.norm_epsilon)


@torch.no_grad()
def initialise(module: nn.Module, std: float) -> None:
    """Matrices normal, biases zero, norm scales one."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=std)
        else:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.reshape(-1, logits_BTV.shape[-1]).float(), labels_BT.reshape(-1))
