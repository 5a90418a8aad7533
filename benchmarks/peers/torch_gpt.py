"""Peer on one GPU: the same step in PyTorch, compiled as a whole, cuDNN SDPA, fused AdamW, bf16 autocast.

    python -m benchmarks.peers.torch_gpt --config=NAME [--seconds=10] [--windows=1] [--section.field=value ...]

Fresh random tokens each step; with --lora.rank=N adapters alone are trained (torch_lora.py). It neither clips gradients
nor looks whether they are finite, which megajax does. Prints one line of JSON.
"""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.command_line import print_measured, run
from benchmarks.peers.torch_lora import adapt
from benchmarks.peers.torch_model import Gpt, check, cross_entropy, initialise
from benchmarks.peers.torch_step import measure_steps
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
    if config.lora.rank:
        adapt(gpt, config.lora)
    compiled = torch.compile(lambda tokens: cross_entropy(gpt(tokens[:, :-1]), tokens[:, 1:]))
    shape = (config.training.global_batch_size, config.training.sequence_length + 1)

    def loss_of() -> torch.Tensor:
        tokens = torch.randint(0, model.vocab_size, shape, device=device)
        with torch.autocast("cuda", torch.bfloat16):
            return compiled(tokens)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return measure_steps(gpt, loss_of, seconds, num_windows)


def main(arguments: list[str]) -> None:
    print_measured(arguments, measure)


if __name__ == "__main__":
    run(main)
