"""Peer of BERT on one GPU: BertForMaskedLM of transformers, torch.compile by layer, SDPA, fused AdamW, bf16 autocast.

    python -m benchmarks.peers.torch_bert --config=bert_large [--seconds=10] [--windows=1] [--section.field=value ...]

Beside python -m benchmarks.train_step --config=bert_large, with the same microbatches. Fresh random tokens each step, a
loss on all of them, no padding, so that SDPA needs no mask; megajax keeps its segments. It neither clips gradients nor
looks whether they are finite, which megajax does. Prints one line of JSON.
"""

import json
import time

import torch
import transformers

from benchmarks.command_line import read_config, run, split
from benchmarks.peers.torch_model import versions
from benchmarks.sustained import LEARNING_RATE, record, windows
from megajax.config import Config
from megajax.weights.hugging_face.mapping import family_for, write_options


def measure(config: Config, seconds: float, num_windows: int) -> dict:
    """Raises ValueError for a model that is not BertForMaskedLM."""
    options = write_options(family_for(config.model, "BertForMaskedLM"), config.model)
    torch.manual_seed(config.training.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    with device:
        bert = transformers.BertForMaskedLM(transformers.BertConfig(**options, attn_implementation="sdpa")).train()
    optimizer = torch.optim.AdamW(bert.parameters(), lr=LEARNING_RATE, fused=True)
    # In parts: all layers share one program; compiling the whole model takes minutes.
    for part in (bert.bert.embeddings, *bert.bert.encoder.layer):
        part.compile()

    @torch.compile
    def head_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(bert.cls(hidden).flatten(0, 1), labels.flatten())

    training = config.training
    microbatch_size = training.microbatch_size or training.global_batch_size
    count = training.global_batch_size // microbatch_size
    shape = (microbatch_size, training.sequence_length)

    def step() -> torch.Tensor:
        for _ in range(count):
            tokens, labels = (torch.randint(0, config.model.vocab_size, shape, device=device) for _ in range(2))
            with torch.autocast(device.type, torch.bfloat16):
                loss = head_loss(bert.bert(tokens).last_hidden_state, labels)
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run_steps(count: int) -> None:
        for _ in range(count):
            losses[1:] = [step()]
        torch.cuda.synchronize()

    start = time.perf_counter()
    losses = [step()]
    torch.cuda.synchronize()
    compile_seconds = time.perf_counter() - start
    found = windows(run_steps, seconds=seconds, num_windows=num_windows)
    return record(
        "transformers",
        found,
        f"1 x {torch.cuda.get_device_name()}",
        versions() | {"transformers": transformers.__version__},
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
