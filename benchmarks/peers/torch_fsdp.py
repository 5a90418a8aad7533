"""Peer on several GPUs of a host: FSDP2, each block compiled, cuDNN SDPA, bf16 with float32 reduction, fused AdamW.

    torchrun --standalone --nproc-per-node=N -m benchmarks.peers.torch_fsdp --config=NAME [--seconds=10] [--windows=1]

The global batch of the recipe is split over all GPUs, whatever its mesh says. execution.recompute=full recomputes each
block, anything else nothing. Fresh random tokens each step, no clipping. The first process prints one line of JSON.
"""

import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.command_line import measured, run
from benchmarks.peers.torch_model import Gpt, check, cross_entropy, initialise
from benchmarks.peers.torch_step import measure_steps
from megajax.config import Config


def sharded_model(config: Config, device: torch.device) -> Gpt:
    """Built on the meta device, sharded, then initialised: no GPU ever holds the whole model."""
    model = config.model
    with torch.device("meta"):
        gpt = Gpt(model, config.training.sequence_length, device, config.execution.recompute == "full")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in gpt.blocks:
        block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(gpt, mp_policy=policy)
    gpt.to_empty(device=device)
    initialise(gpt, model.init_std)
    return gpt


def measure(config: Config, seconds: float, num_windows: int) -> dict:
    check(config)
    training = config.training
    num_gpus = dist.get_world_size()
    if training.global_batch_size % num_gpus:
        raise ValueError(
            f"training.global_batch_size={training.global_batch_size} is not divisible by {num_gpus} GPUs; "
            f"use --training.global_batch_size={num_gpus}"
        )
    if config.model.tied_embeddings:
        raise ValueError(
            "model.tied_embeddings=True: the FSDP peer does not tie them; use --model.tied_embeddings=False"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(training.seed)
    gpt = sharded_model(config, device)
    compiled = torch.compile(cross_entropy)
    shape = (training.global_batch_size // num_gpus, training.sequence_length + 1)
    generator = torch.Generator(device).manual_seed(dist.get_rank())

    def loss_of() -> torch.Tensor:
        tokens = torch.randint(0, config.model.vocab_size, shape, device=device, generator=generator)
        return compiled(gpt(tokens[:, :-1]), tokens[:, 1:])

    def agreed(count: int) -> int:
        of_first = torch.tensor(count, device=device)  # the processes' clocks differ, their step counts must not
        dist.broadcast(of_first, 0)
        return int(of_first)

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return measure_steps(gpt, loss_of, seconds, num_windows, num_gpus=num_gpus, agreed=agreed)


def main(arguments: list[str]) -> None:
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl")
    result = measured(arguments, measure)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
