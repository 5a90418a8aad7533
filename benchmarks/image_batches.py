"""Random texts about random images: what the steps of models that read images, and those of their peers, are timed on.

A row is one conversation. It has an image for each block of its patches, of the size that fills one if images may have
any, each before an equal share of the text.
"""

import math

import numpy as np

from megajax.media.rows import TEXT, MediaInputs
from megajax.models.multimodal import MultimodalConfig


def image_side(inputs: MediaInputs) -> int:
    """Height and width of the images in pixels."""
    rule = inputs.layouts.rule
    if inputs.layouts.view_size is not None:
        return rule.size
    return math.isqrt(inputs.block_size) * rule.patch_size


def image_rows(model: MultimodalConfig, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The arrays of MultimodalConfig.inputs for rows of text [..., T], and tokens, labels, loss_mask (of the text) and
    segment_ids.

    Raises ValueError if the images leave no room for text.
    """
    *rows, length = shape
    inputs = model.image_inputs
    assert inputs is not None
    side = image_side(inputs)
    sizes = np.full((inputs.blocks, 2), side, np.int32)
    num_text = length + 1 - int(inputs.num_tokens(sizes).sum())
    if num_text < 2 * inputs.blocks:
        raise ValueError(
            f"training.sequence_length={length} leaves no room for text beside {inputs.blocks} images of {side} x "
            f"{side} pixels; use more tokens or fewer model.vision.blocks"
        )
    is_image = np.zeros(inputs.blocks + num_text, bool)
    is_image[np.arange(inputs.blocks) * (len(is_image) // inputs.blocks)] = True
    expanded = inputs.expanded(np.where(is_image, inputs.token, inputs.token + 1), sizes)
    rule = inputs.layouts.rule
    views = [np.zeros((height * rule.patch_size, width * rule.patch_size, 3), np.uint8) for height, width in
             rule.views(side, side)]  # fmt: skip
    blocks = inputs.blocks_of(sizes, lambda _: views)
    (number_T,) = expanded.numbers
    index = np.full(len(number_T), TEXT, np.int32)
    index[number_T > 0] = blocks.pop("index")
    drawn = rng.integers(0, inputs.token, (*rows, length + 1), dtype=np.int32)
    tokens = np.where(number_T > 0, inputs.token, drawn)
    same = {
        "image_index": index[:-1],
        "block_ids": number_T[:-1],
        "position_ids": expanded.positions[:-1],
        "loss_mask": (number_T[1:] == 0).astype(np.float32),
        "segment_ids": np.ones(length, np.int32),
        "patch_places": blocks["patch_places"],
    }
    found = {name: np.broadcast_to(array, (*rows, *array.shape)) for name, array in same.items()}
    patches = rng.integers(0, 256, (*rows, *blocks["patches"].shape), np.uint8)
    return found | {"tokens": tokens[..., :-1], "labels": tokens[..., 1:], "patches": patches}
