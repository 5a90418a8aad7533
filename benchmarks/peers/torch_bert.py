"""Peer of BERT on one GPU: BertForMaskedLM of transformers, torch.compile by layer, SDPA, fused AdamW, bf16 autocast.

    python -m benchmarks.peers.torch_bert --config=bert_large [--seconds=10] [--windows=1] [--section.field=value ...]

Beside python -m benchmarks.train_step --config=bert_large, with the same microbatches. Fresh random tokens each step, a
loss on all of them, no padding, so that SDPA needs no mask; megajax keeps its segments. It neither clips gradients nor
looks whether they are finite, which megajax does. Prints one line of JSON.
"""

import torch
import transformers

from benchmarks.command_line import print_measured, run
from benchmarks.peers.torch_step import measure_steps
from megajax.config import Config
from megajax.weights.hugging_face.mapping import family_for
from megajax.weights.hugging_face.translate import write_options


def measure(config: Config, seconds: float, num_windows: int) -> dict:
    """Raises ValueError for a model that is not BertForMaskedLM."""
    options = write_options(family_for(config.model, "BertForMaskedLM"), config.model)
    torch.manual_seed(config.training.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    with device:
        bert = transformers.BertForMaskedLM(transformers.BertConfig(**options, attn_implementation="sdpa")).train()
    # In parts: all layers share one program; compiling the whole model takes minutes.
    for part in (bert.bert.embeddings, *bert.bert.encoder.layer):
        part.compile()

    @torch.compile
    def head_loss(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(bert.cls(hidden).flatten(0, 1), labels.flatten())

    training = config.training
    microbatch_size = training.microbatch_size or training.global_batch_size
    shape = (microbatch_size, training.sequence_length)

    def loss_of() -> torch.Tensor:
        tokens, labels = (torch.randint(0, config.model.vocab_size, shape, device=device) for _ in range(2))
        with torch.autocast(device.type, torch.bfloat16):
            return head_loss(bert.bert(tokens).last_hidden_state, labels)

    return measure_steps(
        bert,
        loss_of,
        seconds,
        num_windows,
        name="transformers",
        num_microbatches=training.global_batch_size // microbatch_size,
        others={"transformers": transformers.__version__},
    )


def main(arguments: list[str]) -> None:
    print_measured(arguments, measure)


if __name__ == "__main__":
    run(main)
