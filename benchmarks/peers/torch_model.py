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
    "biases", "tied_embeddings", "init_std", "qk_norm", "moe",
}  # fmt: skip
# Likewise the fields of a router; those of its losses are ignored.
KNOWN_OF_ROUTER = {"top_k", "aux_loss", "aux_loss_scope", "z_loss"}
ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": F.silu,
}


def check(config: Config) -> None:
    """Raises ValueError for settings that the peers do not support."""
    model = config.model
    training = config.training
    refused = (
        unknown(model, "model", KNOWN)
        | unknown(model.moe.router, "model.moe.router", KNOWN_OF_ROUTER)
        | {
            "model.moe.shared_gate=True": model.moe.shared_gate,
            f"model.activation={model.activation}": model.activation not in ACTIVATIONS,
            f"model.position={model.position}": model.position == "alibi",
            "model.rope.interleaved=True": model.rope.interleaved,
            f"training.microbatch_size={training.microbatch_size}": training.microbatch_size is not None,
            "task.cross_document_attention=False": not config.task.cross_document_attention,
        }
    )
    for field, holds in refused.items():
        if holds:
            raise ValueError(
                f"{field}: the PyTorch peer does not support this; measure without it, or use --peers=limit"
            )


def unknown(section, name: str, known: set[str]) -> dict[str, bool]:
    """{field=value: it is neither known nor at its default}"""
    fields = {field.name: (getattr(section, field.name), field.default) for field in dataclasses.fields(section)}
    return {f"{name}.{key}={value}": key not in known and value != default for key, (value, default) in fields.items()}


def rope_tables(model: DecoderConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [T, H / 2]."""
    frequencies = torch.tensor(model.rope.inverse_frequencies(model.width_of_head), dtype=torch.float32, device=device)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x_BNTH: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x_BNTH.float().chunk(2, -1)
    cos, sin = rope
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x_BNTH.dtype)


class Mlp(nn.Module):
    """x [..., D] -> [..., D]"""

    def __init__(self, width: int, wide: int, activation: str, bias: bool):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = nn.Linear(width, wide, bias) if activation == "swiglu" else None
        self.up = nn.Linear(width, wide, bias)
        self.down = nn.Linear(wide, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.activation(self.gate(x)) * self.up(x))
        return self.down(self.activation(self.up(x)))


class Experts(nn.Module):
    """x [..., D] -> [..., D]: router, rows sorted by expert, torch._grouped_mm in bfloat16, and back.

    It has no loss of balance. shared_width: of the experts that process every token; 0: there are none. world: the
    processes that share the experts.
    """

    def __init__(self, width: int, expert_width: int, num_experts: int, top_k: int, shared_width: int, world: int = 1):
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.router = nn.Parameter(torch.empty(width, num_experts))
        self.wide = nn.Parameter(torch.empty(num_experts // world, width, 2 * expert_width))
        self.narrow = nn.Parameter(torch.empty(num_experts // world, expert_width, width))
        self.shared = Mlp(width, shared_width, "swiglu", bias=False) if shared_width else None

    def of_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Of rows sorted by expert; counts: rows of each."""
        ends = torch.cumsum(counts, 0).to(torch.int32)
        gate, up = torch._grouped_mm(rows, self.wide.to(rows.dtype), offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * up, self.narrow.to(rows.dtype), offs=ends)

    def forward(self, x: Tensor, bias: Tensor | float = 0.0) -> Tensor:
        """bias [experts]: added to the router's logits."""
        rows = x.flatten(0, -2).to(torch.bfloat16)
        logits = (rows @ self.router.to(rows.dtype)).float() + bias
        weights, chosen = torch.topk(torch.softmax(logits, -1), self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = torch.argsort(chosen.flatten(), stable=True)
        # bincount would break the graph of torch.compile.
        counts = torch.histc(chosen.flatten().float(), self.num_experts, 0, self.num_experts - 1).long()
        results = self.of_experts(rows[order // self.top_k], counts)
        per_choice = torch.empty_like(results).index_copy(0, order, results).view(*chosen.shape, -1)
        out = (per_choice * weights.to(rows.dtype)[..., None]).sum(1)
        if self.shared is not None:
            out = out + self.shared(rows)
        return out.view(x.shape)


def feed_forward(model: DecoderConfig) -> nn.Module:
    moe = model.moe
    if moe.num_experts is None:
        return Mlp(model.embed_dim, model.width_of_mlp, model.activation, "mlp" in model.biases)
    expert_width = moe.expert_dim or model.width_of_mlp
    return Experts(model.embed_dim, expert_width, moe.num_experts, moe.router.top_k, moe.shared_dim or 0)


class Block(nn.Module):
    def __init__(self, model: DecoderConfig, rope: tuple[Tensor, Tensor] | None, recompute: bool):
        super().__init__()
        self.heads = (model.num_heads, model.kv_heads)
        self.head_dim = model.width_of_head
        self.rope = rope
        self.recompute = recompute
        width = model.embed_dim
        attended = model.num_heads * model.width_of_head
        linear = functools.partial(nn.Linear, bias="mlp" in model.biases)
        self.attention_norm = make_norm(model, width)
        self.query_norm = make_norm(model, model.width_of_head) if model.qk_norm else nn.Identity()
        self.key_norm = make_norm(model, model.width_of_head) if model.qk_norm else nn.Identity()
        self.mlp_norm = make_norm(model, width)
        self.qkv = linear(width, (model.num_heads + 2 * model.kv_heads) * model.width_of_head)
        self.out = linear(attended, width)
        self.mlp = feed_forward(model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return checkpoint(self.compute, x_BTD, use_reentrant=False) if self.recompute else self.compute(x_BTD)

    def compute(self, x_BTD: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        heads, kv_heads = self.heads
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        q = self.query_norm(q)
        k = self.key_norm(k)
        if self.rope is not None:
            q = rotate(q, self.rope)
            k = rotate(k, self.rope)
        o_BNTH = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=heads != kv_heads
        )
        x_BTD = x_BTD + self.out(o_BNTH.transpose(1, 2).reshape(batch, length, -1))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Gpt(nn.Module):
    """tokens [B, T] -> logits [B, T, V]. Build it under `with torch.device(...)`; rope tables are on rope_device."""

    def __init__(self, model: DecoderConfig, length: int, rope_device: torch.device, recompute: bool):
        super().__init__()
        rope = rope_tables(model, length, rope_device) if model.position == "rope" else None
        self.embedding = nn.Embedding(model.padded_vocab_size, model.embed_dim)
        learned = model.position == "learned"
        self.position_embedding = nn.Embedding(model.max_positions, model.embed_dim) if learned else None
        self.blocks = nn.ModuleList([Block(model, rope, recompute) for _ in range(model.num_layers)])
        self.final_norm = make_norm(model, model.embed_dim)
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


def make_norm(model: DecoderConfig, width: int) -> nn.Module:
    kind = nn.RMSNorm if model.norm == "rmsnorm" else nn.LayerNorm
    return kind(width, eps=model.norm_epsilon)


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
