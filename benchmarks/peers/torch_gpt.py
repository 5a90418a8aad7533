"""Peer on one GPU: the same step in PyTorch, compiled as a whole, cuDNN SDPA, fused AdamW, bf16 autocast.

    python -m benchmarks.peers.torch_gpt --config=NAME [--seconds=10] [--windows=1] [--section.field=value ...]

Fresh random tokens each step. It neither clips gradients nor looks whether they are finite, which megajax does. Prints
one line of JSON.
"""

import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.command_line import read_config, run, split
from benchmarks.peers.torch_model import Gpt, check, cross_entropy, initialise, versions
from benchmarks.sustained import LEARNING_RATE, record, windows
from megajax.config import Config


def measure(config: Config, seconds: float, num_windows: int) -> dict:
    check(config)
    torch.manual_seed(config.training.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    model = config.model
    with device:
        gpt = Gpt(model, config.training.sequence_length, device, config.execution.recompute == "full")
    initialise(gpt, model.init_std)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE, fused=True)
    loss_of = torch.compile(lambda tokens: cross_entropy(gpt(tokens[:, :-1]), tokens[:, 1:]))
    shape = (config.training.global_batch_size, config.training.sequence_length + 1)

    def step() -> torch.Tensor:
        tokens = torch.randint(0, model.vocab_size, shape, device=device)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run_steps(count: int) -> None:
        for _ in range(count):
            losses[1:] = [step()]
        torch.cuda.synchronize()

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        start = time.perf_counter()
        losses = [step()]
        torch.cuda.synchronize()
        compile_seconds = time.perf_counter() - start
        found = windows(run_steps, seconds=seconds, num_windows=num_windows)
    return record(
        "torch",
        found,
        f"1 x {torch.cuda.get_device_name()}",
        versions(),
        compile_seconds=compile_seconds,
        peak_memory_bytes=torch.cuda.max_memory_allocated(),
        first_loss=losses[0].item(),
        loss=losses[-1].item(),
    )


def main(arguments: list[str]) -> None:
    values, overrides = split(arguments, {"config": "", "seconds": "10", "windows": "1"})
    config = read_config(values["config"], overrides)
    print(json.dumps(measure(config, float(values["seconds"]), int(values["windows"]))), flush=True)


if __name__ == "__main__":
    run(main)
