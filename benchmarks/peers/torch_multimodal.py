"""Peer of models that read images, on one GPU: the same model in transformers, torch.compile by layer, SDPA, fused
AdamW, bf16 autocast.

    python -m benchmarks.peers.torch_multimodal --config=llava_7b [--seconds=10] [--windows=1] [--section.field=value]

Beside python -m benchmarks.train_step with the same options: rows of the same text and images (image_batches.py), whose
pixels are already on the GPU. It neither clips gradients nor looks whether they are finite, which megajax does. Prints
one line of JSON.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from benchmarks.command_line import print_measured, run
from benchmarks.image_batches import image_rows, image_side
from benchmarks.peers.torch_step import measure_steps
from megajax.config import Config
from megajax.models.multimodal import MultimodalConfig
from megajax.weights.hugging_face.mapping import family_for
from megajax.weights.hugging_face.translate import write_options

NUM_BATCHES = 8


def measure(config: Config, seconds: float, num_windows: int) -> dict:
    """Raises ValueError for a model that transformers does not have."""
    assert isinstance(config.model, MultimodalConfig)
    options = write_options(family_for(config.model), config.model)
    torch.manual_seed(config.training.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda")
    with device:
        model_config = transformers.AutoConfig.for_model(**options)
        model = transformers.AutoModelForImageTextToText.from_config(model_config, attn_implementation="sdpa").train()
    # In parts: layers of one kind share a program; compiling the whole model takes minutes. Each layer of Gemma 3 is a
    # kind of its own to the compiler, and beyond the limit it would run them without compiling.
    torch._dynamo.config.recompile_limit = 1000
    for part in _layers(model):
        part.compile()

    @torch.compile
    def head_loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())

    training = config.training
    shape = (training.microbatch_size or training.global_batch_size, training.sequence_length)
    source = itertools.cycle([_batch(config.model, model_config, shape, i, device) for i in range(NUM_BATCHES)])

    def loss_of() -> Tensor:
        inputs, labels = next(source)
        with torch.autocast(device.type, torch.bfloat16):
            return head_loss(model.model(**inputs).last_hidden_state, labels)

    return measure_steps(
        model,
        loss_of,
        seconds,
        num_windows,
        name="transformers",
        num_microbatches=training.global_batch_size // shape[0],
        others={"transformers": transformers.__version__},
    )


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """Of the text and of the tower."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith(("layers", "blocks")):
            yield from module


def _batch(
    model: MultimodalConfig, theirs: transformers.PretrainedConfig, shape: tuple[int, int], number: int,
    device: torch.device,
) -> tuple[dict[str, Tensor], Tensor]:  # fmt: skip
    """-> (what their model reads, labels [B, T], -100 where they are images)."""
    rng = np.random.default_rng(number)
    rows = image_rows(model, shape, rng)
    is_image = rows["tokens"] == model.image_token
    inputs = model.image_inputs
    assert inputs is not None
    side = image_side(inputs)
    num_images = shape[0] * inputs.blocks
    arrays = {"input_ids": rows["tokens"].astype(np.int64), "token_type_ids": is_image.astype(np.int64)}
    if theirs.model_type != "gemma3":
        arrays.pop("token_type_ids")
    if theirs.model_type == "qwen3_vl":
        grid = side // inputs.layouts.rule.patch_size
        values = 3 * model.vision.frames * inputs.layouts.rule.patch_size**2
        arrays["pixel_values"] = rng.standard_normal((num_images * grid**2, values), np.float32)
        arrays["image_grid_thw"] = np.tile(np.array([1, grid, grid]), (num_images, 1))
        arrays["position_ids"] = np.moveaxis(rows["position_ids"], -1, 0).astype(np.int64)
    else:
        arrays["pixel_values"] = rng.standard_normal((num_images, 3, side, side), np.float32)
    labels = np.where(rows["loss_mask"] > 0, rows["labels"], -100).astype(np.int64)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).to(device) for name, array in arrays.items()}
    return tensors, torch.from_numpy(labels).to(device)


def main(arguments: list[str]) -> None:
    print_measured(arguments, measure)


if __name__ == "__main__":
    run(main)
