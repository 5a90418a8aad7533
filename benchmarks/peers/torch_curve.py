"""Trains the PyTorch peer from the weights, on the batches and with the learning rates that megajax has written
(benchmarks/curve_beside_torch.py)."""

import contextlib
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.torch_model import Gpt, check, cross_entropy
from benchmarks.peers.torch_step import versions
from megajax.config import Config


def train(config: Config, folder: Path) -> dict:
    """-> {"losses": of each step, ...}. On a GPU compiled, and with cuDNN's attention."""
    check(config)
    torch.set_float32_matmul_precision("high")
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    with device:
        gpt = Gpt(config.model, config.training.sequence_length, device, recompute=False)
    load(gpt, dict(np.load(folder / "weights.npz")))
    optimizer = optimizer_of(gpt, config)

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(gpt(tokens)[..., : config.model.vocab_size], labels)  # without padding

    compiled = torch.compile(loss_of) if has_gpu else loss_of
    autocast = contextlib.nullcontext()
    if config.precision.compute != "float32":
        autocast = torch.autocast(device.type, getattr(torch, config.precision.compute))
    losses = []
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if has_gpu else contextlib.nullcontext():
        for step, rate in enumerate(json.loads((folder / "rates.json").read_text())):
            batch = np.load(folder / f"batch{step}.npz")
            tokens, labels = (torch.from_numpy(batch[name]).to(device, torch.int64) for name in ("tokens", "labels"))
            with autocast:
                loss = compiled(tokens, labels)
            loss.backward()
            if config.optimizer.clip_norm:
                nn.utils.clip_grad_norm_(gpt.parameters(), config.optimizer.clip_norm)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
    name = torch.cuda.get_device_name() if has_gpu else "cpu"
    return {"losses": [loss.item() for loss in losses], "device": name, "versions": versions()}


def optimizer_of(gpt: Gpt, config: Config) -> torch.optim.AdamW:
    """Matrices and embeddings decay, biases and norm scales do not."""
    section = config.optimizer
    parameters = list(gpt.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=section.betas, eps=section.epsilon, fused=parameters[0].is_cuda)


@torch.no_grad()
def load(gpt: Gpt, weights: dict[str, np.ndarray]) -> None:
    """weights: by name, as Model.weights has them. Raises KeyError for one that is missing."""
    tables = {"embedding": gpt.embedding, "position_embedding": gpt.position_embedding}
    for name, table in tables.items():
        if table is not None:
            table.weight.copy_(torch.from_numpy(weights[name]))
    _copy_norm(gpt.final_norm, weights, "final_norm", ...)
    if "head" in weights:
        gpt.head.weight.copy_(torch.from_numpy(weights["head"]).T)
    for number, block in enumerate(gpt.blocks):
        _copy_norm(block.attention_norm, weights, "layers.dense.attention_norm", number)
        _copy_norm(block.mlp_norm, weights, "layers.dense.mlp_norm", number)
        attention = [f"layers.dense.attention.{name}" for name in ("query", "key", "value")]
        _copy_linear(block.qkv, weights, attention, number, 1)
        _copy_linear(block.out, weights, ["layers.dense.attention.out"], number, 2)
        for name in ("gate", "up", "down"):
            linear = getattr(block.mlp, name)
            if linear is not None:
                _copy_linear(linear, weights, [f"layers.dense.mlp.{name}"], number, 1)


def _copy_linear(linear: nn.Linear, weights: dict, names: list[str], number: int, num_inputs: int) -> None:
    """names: of matrices [*K, *N] of a layer, whose outputs are side by side; num_inputs: dims K."""
    matrices = [weights[name][number] for name in names]
    rows = [matrix.reshape(np.prod(matrix.shape[:num_inputs]), -1).T for matrix in matrices]
    linear.weight.copy_(torch.from_numpy(np.concatenate(rows)))
    if linear.bias is not None:
        biases = [weights[f"{name}_bias"][number].ravel() for name in names]
        linear.bias.copy_(torch.from_numpy(np.concatenate(biases)))


def _copy_norm(norm: nn.Module, weights: dict, name: str, number) -> None:
    parameters: dict[str, Tensor] = dict(norm.named_parameters())
    for own, theirs in {"weight": "scale", "bias": "bias"}.items():
        if own in parameters:
            parameters[own].copy_(torch.from_numpy(np.ascontiguousarray(weights[f"{name}.{theirs}"][number])))
