"""A layer of experts in PyTorch, bfloat16: router, sort, all-to-all with exact counts, torch._grouped_mm, and back.

    python -m benchmarks.peers.torch_moe [NAME ...]                                    on one GPU
    torchrun --standalone --nproc-per-node=2 -m benchmarks.peers.torch_moe [NAME ...]   experts split over GPUs

Prints milliseconds forward and backward, the median of steps, with 4,096 tokens per GPU.
"""

import os
import sys

import numpy as np

TOKENS = 4096
# Model width, width of an expert, experts, experts per token, width of the shared experts.
LAYERS = {
    "mixtral": (4096, 14336, 8, 2, 0),
    "deepseek": (7168, 2048, 32, 8, 2048),
    "qwen3": (2048, 768, 128, 8, 0),
}
WARM_UP, STEPS = 15, 30


def skew_of(experts: int) -> np.ndarray:
    """float32 [experts]: added to the logits of every token."""
    return np.random.default_rng(7).normal(size=experts).astype(np.float32)


def main(names: list[str]) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    if world > 1:
        dist.init_process_group("nccl")
    torch.manual_seed(rank)
    options = dict(device="cuda", dtype=torch.bfloat16)

    class Exchange(torch.autograd.Function):
        """Rows to the devices of their experts; the gradient goes the other way."""

        @staticmethod
        def forward(ctx, rows, received, sent):
            ctx.counts = sent, received
            out = rows.new_empty(sum(received), rows.shape[1])
            dist.all_to_all_single(out, rows.contiguous(), received, sent)
            return out

        @staticmethod
        def backward(ctx, gradient):
            received, sent = ctx.counts
            out = gradient.new_empty(sum(received), gradient.shape[1])
            dist.all_to_all_single(out, gradient.contiguous(), received, sent)
            return out, None, None

    def weight(*shape):
        return torch.nn.Parameter(torch.randn(*shape, **options) * 0.02)

    def swiglu(wide):
        gate, up = wide.chunk(2, -1)
        return F.silu(gate) * up

    class Layer(torch.nn.Module):
        def __init__(self, width, expert_width, experts, top_k, shared):
            super().__init__()
            self.experts, self.top_k = experts, top_k
            self.router = weight(width, experts)
            self.wide = weight(experts // world, width, 2 * expert_width)
            self.down = weight(experts // world, expert_width, width)
            self.shared_wide = weight(width, 2 * shared) if shared else None
            self.shared_down = weight(shared, width) if shared else None

        def of_experts(self, rows, counts):
            ends = torch.cumsum(counts, 0).to(torch.int32)
            hidden = swiglu(torch._grouped_mm(rows, self.wide, offs=ends))
            return torch._grouped_mm(hidden, self.down, offs=ends)

        def exchanged(self, rows, counts):
            from_others = torch.empty_like(counts)
            dist.all_to_all_single(from_others, counts)
            local = self.experts // world
            sent, received = (c.view(world, local).sum(1).tolist() for c in (counts, from_others))
            arrived = Exchange.apply(rows, received, sent)
            expert = torch.repeat_interleave(torch.arange(self.experts, device="cuda") % local, from_others)
            order = torch.argsort(expert, stable=True)
            results = self.of_experts(arrived[order], from_others.view(world, local).sum(0))
            return Exchange.apply(torch.empty_like(results).index_copy(0, order, results), sent, received)

        def forward(self, x, bias):
            logits = (x @ self.router).float() + bias
            weights, chosen = torch.topk(torch.softmax(logits, -1), self.top_k)
            weights = weights / weights.sum(-1, keepdim=True)
            order = torch.argsort(chosen.flatten(), stable=True)
            rows = x[order // self.top_k]
            counts = torch.bincount(chosen.flatten(), minlength=self.experts)
            results = (self.exchanged if world > 1 else self.of_experts)(rows, counts)
            per_choice = torch.empty_like(results).index_copy(0, order, results).view(*chosen.shape, -1)
            out = (per_choice * weights.to(x.dtype)[..., None]).sum(1)
            if self.shared_wide is not None:
                out = out + swiglu(x @ self.shared_wide) @ self.shared_down
            return out

    for name in names or LAYERS:
        layer = Layer(*LAYERS[name])
        width = LAYERS[name][0]
        d_y = torch.randn(TOKENS, width, **options)
        for skewed in (False, True):
            bias = torch.from_numpy(skew_of(layer.experts)).cuda() * skewed
            times = []
            for _ in range(WARM_UP + STEPS):
                x = torch.randn(TOKENS, width, **options, requires_grad=True)
                events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                if world > 1:
                    dist.barrier()
                events[0].record()
                y = layer(x, bias)
                events[1].record()
                y.backward(d_y)
                events[2].record()
                torch.cuda.synchronize()
                layer.zero_grad()
                times.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
            forward, backward = np.median(times[WARM_UP:], 0)
            if rank == 0:
                kind = "skewed" if skewed else "even"
                print(
                    f"torch {name} {kind}, {world} GPUs: forward {forward:.2f} ms, backward {backward:.2f}", flush=True
                )
        del layer
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
