"""How the PyTorch peers are timed: whole training steps, and single layers."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.records import record
from benchmarks.sustained import LEARNING_RATE, windows

WARM_UP, STEPS = 15, 30


def measure_steps(
    module: nn.Module,
    loss_of: Callable[[], Tensor],
    seconds: float,
    num_windows: int,
    *,
    name: str = "torch",
    num_microbatches: int = 1,
    num_gpus: int = 1,
    agreed: Callable[[int], int] = int,
    others: dict[str, str] | None = None,
) -> dict:
    """The record of steps of fused AdamW. loss_of: forward pass of a microbatch; agreed: the number of steps of all
    processes, from that of one; others: further versions."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step() -> Tensor:
        for _ in range(num_microbatches):
            loss = loss_of()
            (loss / num_microbatches).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run_steps(count: int) -> None:
        for _ in range(agreed(count)):
            losses[1:] = [step()]
        torch.cuda.synchronize()

    start = time.perf_counter()
    losses = [step()]
    torch.cuda.synchronize()
    compile_seconds = time.perf_counter() - start
    found = windows(run_steps, seconds=seconds, num_windows=num_windows)
    return record(
        name,
        found,
        f"{num_gpus} x {torch.cuda.get_device_name()}",
        versions() | (others or {}),
        compile_seconds=compile_seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(),
        first_loss=losses[0].item(),
        loss=losses[-1].item(),
    )


def layer_times(
    run: Callable[..., Tensor], inputs: Sequence[Tensor], d_y: Tensor, before: Callable[[], None] = lambda: None
) -> str:
    """Median milliseconds of run(*inputs), and of the gradients of all inputs. before: each step."""
    times = []
    for _ in range(WARM_UP + STEPS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        before()
        events[0].record()
        y = run(*inputs)
        events[1].record()
        torch.autograd.grad(y, inputs, d_y)
        events[2].record()
        torch.cuda.synchronize()
        times.append((events[0].elapsed_time(events[1]), events[1].elapsed_time(events[2])))
    forward, backward = np.median(times[WARM_UP:], 0)
    return f"forward {forward:.2f} ms, backward {backward:.2f}"


def versions() -> dict[str, str]:
    cudnn = torch.backends.cudnn.version()
    return {"torch": torch.__version__, "cuda": str(torch.version.cuda), "cudnn": str(cudnn)}
