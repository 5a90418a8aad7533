"""What waiting for images costs, with and without balancing: python -m benchmarks.data.balance [--conversations=20000]

Arithmetic on the sizes of images, no measurement of time. 64 devices train a model with the tower of Qwen3-VL 8B; its
conversations are packed into rows, shuffled and put into global batches by the code that training uses, without pixels
and without the model. In a step every device waits for the one whose images are the most work, so relative to a step
without waiting and without padding it takes

    step = (text + share * images) / (1 + share)
    text = tokens of the rows, padding included / tokens of their conversations
    images = work of the busiest device / mean over the devices

averaged over batches. share is the FLOPs of the encoder over those of the text, for the same conversations: 4 % is
like LLaVA-1.5, 33 % like Qwen3-VL 8B, 133 % like Gemma 3 4B. All three are applied to the same batches with images at
their own size; LLaVA-1.5 and Gemma 3 resize images to one size, so that only their number differs. The work of a view
of n patches is n + n^2 / (2 embed_dim + mlp_dim): the matmuls of a layer, and its attention relative to them. The text
counts by its tokens, and communication is left out.

The conversations are drawn, and are those of no data set. Each has 1 to 4 images, each number as likely; their areas
are lognormal with median 2^19 pixels (724 x 724) and sigma 1, their aspects lognormal with median 1 and sigma 0.4; the
texts lognormal with median 400 tokens and sigma 0.8, cut to 20 to 2,500. By Qwen3-VL's rule an image has about 256 to
4,096 patches, and 4 patches are a token; 72 % of the tokens are of images. With more text, or with conversations
without images, rows packed by tokens alone would differ more.

The table has these ways to encode the images of a batch:

    megajax                 rows are packed by tokens and patches, views are assigned to blocks of one size, the largest
                            first (`assigned` in megajax/media/rows.py). Time follows the size of the blocks, filled or
                            not; their padding costs matmuls and no attention.
    without padding         the assignment of megajax alone, as if time followed what the blocks hold
    in order                in the same rows, the images go to the devices that share a row in turn, as they come
    one device a row        in the same rows, one of the devices that share a row encodes its images while the others
                            wait, or all encode the same, as where the text alone is parallel over the context
    packed by tokens alone  in order, in rows that are packed without regard to images

All but the first are without padding of images, as if shapes could change from step to step: this favours them. If each
row has a device to itself, the second to the fourth are the same.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

import configs
from benchmarks.command_line import only, run
from megajax.data.samples.sft import PackedMedia, build_indices
from megajax.media.rows import MediaInputs, assigned
from megajax.models.multimodal import MultimodalConfig

DEVICES = 64
SHARES = (0.04, 0.33, 1.33)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh with its rows. All have 524,288 tokens a batch, in one microbatch."""

    mesh: str
    devices: int
    """That share a row, in a group."""
    rows: int
    """Of a group."""
    tokens: int
    """Of a row."""
    blocks: int
    """Of a row, a multiple of `devices`."""
    patches: int
    """Of a block, so that tokens and patches run out at about the same time, and the largest image fits."""


LAYOUTS = (
    Layout("data 64", 1, 1, 8192, 1, 24576),
    Layout("data 8, context or tensor 8", 8, 2, 32768, 8, 12288),
    Layout("data 8, context or tensor 8", 8, 8, 8192, 8, 4096),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A conversation, or several."""

    tokens: int
    """With those of the images."""
    views: list[int]
    """Patches of each view."""


Cost = Callable[[Sequence[int]], np.ndarray]
"""Views -> float64 [2, views]: patches and work of each."""


def drawn(count: int, inputs: MediaInputs, rng: np.random.Generator) -> list[Row]:
    """Conversations."""
    images = rng.integers(1, 5, count)
    areas = rng.lognormal(np.log(2**19), 1.0, images.sum())
    aspects = rng.lognormal(0.0, 0.4, images.sum())
    texts = rng.lognormal(np.log(400), 0.8, count).clip(20, 2500)
    sizes = np.rint(np.stack([np.sqrt(areas * aspects), np.sqrt(areas / aspects)], 1)).astype(np.int64)
    views = np.split(np.array(inputs.views(sizes)), np.cumsum(images)[:-1])
    return [
        Row(int(text) + mine.sum() // inputs.merged, mine.tolist()) for text, mine in zip(texts, views, strict=True)
    ]


def packed(conversations: Sequence[Row], tokens: int, media: tuple[MediaInputs, ...]) -> list[Row]:
    """Rows in the order of training. media: what is packed besides the tokens."""
    sizes = np.array([conversation.tokens for conversation in conversations])
    views = PackedMedia([(conversation.views,) for conversation in conversations], media) if media else None
    order, bounds = build_indices(np.arange(len(sizes)), sizes, None, tokens + 1, 0, views)
    rows = [[conversations[number] for number in part] for part in np.split(order, bounds[1:-1])]
    return [Row(sum(part.tokens for part in row), [view for part in row for view in part.views]) for row in rows]


# ----------------------------------------------------------------------------- ways: a group -> its loads [2, devices]


def in_filled_blocks(rows: Sequence[Row], layout: Layout, cost: Cost) -> np.ndarray:
    loads = np.zeros((2, layout.blocks))
    for number, row in enumerate(rows):
        chosen = assigned(row.views, layout.blocks, layout.patches, first=number)
        assert chosen is not None, "rows are packed so that their views fit"
        loads += _sums(chosen, row.views, layout.blocks, cost)
    return loads.reshape(2, layout.devices, -1).sum(2)


def in_blocks(rows: Sequence[Row], layout: Layout, cost: Cost) -> np.ndarray:
    loads = in_filled_blocks(rows, layout, cost)
    size = len(rows) * layout.blocks * layout.patches / layout.devices
    return loads + (size - loads[0])


def in_order(rows: Sequence[Row], layout: Layout, cost: Cost) -> np.ndarray:
    views = [view for row in rows for view in row.views]
    return _sums(np.arange(len(views)) % layout.devices, views, layout.devices, cost)


def on_one_device(rows: Sequence[Row], layout: Layout, cost: Cost) -> np.ndarray:
    views = [view for row in rows for view in row.views]
    return _sums(np.zeros(len(views), np.int64), views, layout.devices, cost)


def _sums(chosen: np.ndarray, views: Sequence[int], count: int, cost: Cost) -> np.ndarray:
    return np.stack([np.bincount(chosen, each, count) for each in cost(views)])


# ----------------------------------------------------------------------------- the table


def ratios(
    rows: Sequence[Row], layout: Layout, way: Callable[[Sequence[Row], Layout, Cost], np.ndarray], cost: Cost
) -> tuple[float, float, float]:
    """(patches of the busiest device over the mean, the same of its work, tokens over those of conversations), each
    the mean over batches."""
    groups = DEVICES // layout.devices
    found = []
    for begin in range(0, len(rows) - groups * layout.rows + 1, groups * layout.rows):
        batch = rows[begin : begin + groups * layout.rows]
        loads = [way(batch[group * layout.rows :][: layout.rows], layout, cost) for group in range(groups)]
        mean = cost([view for row in batch for view in row.views]).sum(1) / DEVICES
        patches, work = np.concatenate(loads, 1).max(1) / mean
        found.append((patches, work, len(batch) * layout.tokens / sum(row.tokens for row in batch)))
    patches, work, text = np.mean(found, 0)
    return patches, work, text


def table(count: int) -> list[str]:
    """Lines of Markdown. count: of conversations."""
    model = configs.recipe("qwen3_vl_8b").model
    assert isinstance(model, MultimodalConfig)
    (inputs,) = model.media
    width = 2 * model.vision.embed_dim + model.vision.mlp_dim

    def cost(views: Sequence[int]) -> np.ndarray:
        patches = np.array(views, np.float64)
        return np.stack([patches, patches + patches**2 / width])

    conversations = drawn(count, inputs, np.random.default_rng(0))
    shares = " | ".join(f"step, {share:.0%}" for share in SHARES)
    lines = [f"| mesh, tokens of a row | images | patches | work | {shares} |", "|---" * (4 + len(SHARES)) + "|"]
    for layout in LAYOUTS:
        of_blocks = dataclasses.replace(inputs, blocks=layout.blocks, block_size=layout.patches)
        balanced = packed(conversations, layout.tokens, (of_blocks,))
        ways = {"megajax": (balanced, in_blocks), "without padding": (balanced, in_filled_blocks)}
        if layout.devices > 1:
            ways |= {"in order": (balanced, in_order), "one device a row": (balanced, on_one_device)}
        ways["packed by tokens alone"] = (packed(conversations, layout.tokens, ()), in_order)
        for name, (rows, way) in ways.items():
            patches, work, text = ratios(rows, layout, way, cost)
            steps = " | ".join(f"{(text + share * work) / (1 + share):.2f}" for share in SHARES)
            lines.append(f"| {layout.mesh}; {layout.tokens:,} | {name} | {patches:.2f} | {work:.2f} | {steps} |")
    return lines


def main(arguments: list[str]) -> None:
    values = only(arguments, {"conversations": "20000"})
    print("\n".join(table(int(values["conversations"]))))


if __name__ == "__main__":
    run(main)
