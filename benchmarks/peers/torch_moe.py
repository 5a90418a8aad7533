"""A layer of experts in PyTorch, bfloat16: router, sort, all-to-all with exact counts, torch._grouped_mm, and back.

    python -m benchmarks.peers.torch_moe [NAME ...]                                    on one GPU
    torchrun --standalone --nproc-per-node=2 -m benchmarks.peers.torch_moe [NAME ...]   experts split over GPUs

Prints milliseconds forward and backward, the median of steps, with 4,096 tokens per GPU.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.moe_layer import LAYERS, TOKENS, skew_of
from benchmarks.peers.torch_model import Experts, initialise
from benchmarks.peers.torch_step import layer_times

WORLD = int(os.environ.get("WORLD_SIZE", 1))
OPTIONS = dict(device="cuda", dtype=torch.bfloat16)


class Exchange(torch.autograd.Function):
    """Rows to the devices of their experts; the gradient goes the other way."""

    @staticmethod
    def forward(ctx, rows, received, sent):
        ctx.counts = sent, received
        return exchange(rows, received, sent)

    @staticmethod
    def backward(ctx, gradient):
        return exchange(gradient, *ctx.counts), None, None


def exchange(rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent)
    return out


class Layer(Experts):
    """Experts that are split over the processes."""

    def of_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        if WORLD == 1:
            return super().of_experts(rows, counts)
        from_others = torch.empty_like(counts)
        dist.all_to_all_single(from_others, counts)
        local = self.num_experts // WORLD
        sent, received = (c.view(WORLD, local).sum(1).tolist() for c in (counts, from_others))
        arrived = Exchange.apply(rows, received, sent)
        expert = torch.repeat_interleave(torch.arange(self.num_experts, device="cuda") % local, from_others)
        order = torch.argsort(expert, stable=True)
        results = super().of_experts(arrived[order], from_others.view(WORLD, local).sum(0))
        return Exchange.apply(torch.empty_like(results).index_copy(0, order, results), sent, received)


def main(names: list[str]) -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    if WORLD > 1:
        dist.init_process_group("nccl")
    torch.manual_seed(rank)
    for name in names or LAYERS:
        layer = Layer(*LAYERS[name], world=WORLD).to(**OPTIONS)
        initialise(layer, 0.02)
        x, d_y = (torch.randn(TOKENS, LAYERS[name][0], **OPTIONS) for _ in range(2))
        inputs = [x.requires_grad_(), *layer.parameters()]
        for kind, skew in (("even", 0.0), ("skewed", 1.0)):
            bias = torch.from_numpy(skew_of(layer.num_experts)).cuda() * skew
            times = layer_times(
                lambda x, *_, layer=layer, bias=bias: layer(x, bias),
                inputs,
                d_y,
                before=dist.barrier if WORLD > 1 else lambda: None,
            )
            if rank == 0:
                print(f"torch {name} {kind}, {WORLD} GPUs: {times}", flush=True)
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
