"""What the tower of a model makes of images, kept on the device until the prompts with them have been computed.

Features have slots of a pool, one a result of the tower, known by the digest of their image; those that were not used
for longest give way. Images are encoded by themselves, several views in a call, in blocks of a few sizes.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from megajax.inference.scheduling.images import PromptImage
from megajax.inference.shapes import fitting, power_of_two
from megajax.inference.shapes import sizes as sizes_between
from megajax.media.rows import NEWLINE, MediaInputs

MIN_PATCHES = 64  # of the smallest block
WARM_PATCHES = 4096  # of the largest block that a warm-up compiles, if images have any size
VIEWS = (1, 4)  # in a call


class EncodeBatch(NamedTuple):
    """Views in blocks of P patches, one each, as MultimodalConfig.inputs has them, and where the results go."""

    patches_1KPp: np.ndarray
    places_1KP5: np.ndarray
    slots_F: np.ndarray
    """int32: slot of the pool; beyond: not kept."""


class ImageFeatures:
    """Which slots have the features of which images."""

    def __init__(self, inputs: MediaInputs, num_slots: int, num_parts: int):
        """num_parts: devices that share the views of a call."""
        self.inputs = inputs
        self.num_slots = num_slots
        self.num_encoded = 0
        self._views = [count for count in VIEWS if count % num_parts == 0] or [num_parts]
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: OrderedDict[bytes, np.ndarray] = OrderedDict()
        """The least recently used first."""

    def forget(self) -> None:
        """None has slots any more, for other parameters."""
        for slots in self._slots.values():
            self._free += slots.tolist()
        self._slots.clear()

    def slots(self, image: PromptImage, places: np.ndarray) -> np.ndarray:
        """int32: the slots of the results at these places of an encoded image; NEWLINE stays."""
        slots = self._slots[image.digest]
        return np.where(places == NEWLINE, NEWLINE, slots[places]).astype(np.int32)

    def encode(self, images: Iterable[PromptImage]) -> Iterator[EncodeBatch]:
        """The calls after which all of these images, which have at most num_slots results, have slots; none for those
        that have them already."""
        wanted = {image.digest: image for image in images}
        for digest in wanted:
            if digest in self._slots:
                self._slots.move_to_end(digest)
        new = [image for digest, image in wanted.items() if digest not in self._slots]
        for image in new:
            self._allocate(image, wanted.keys())
        self.num_encoded += len(new)
        views = defaultdict(list)
        for image in new:
            for begin, end in zip(image.layout.bounds[:-1].tolist(), image.layout.bounds[1:].tolist(), strict=True):
                views[_size_of_block(end - begin)].append((image, begin, end))
        for size, found in views.items():
            for start in range(0, len(found), self._views[-1]):
                yield self._batch(found[start : start + self._views[-1]], size)

    def shapes(self) -> list[tuple[int, int]]:
        """Of the calls that a warm-up compiles: (views, patches of each). Larger images compile more."""
        size = self.inputs.layouts.view_size
        sizes = sizes_between(MIN_PATCHES, WARM_PATCHES) if size is None else [_size_of_block(size)]
        return [(count, size) for count in self._views for size in sizes]

    def _allocate(self, image: PromptImage, kept: Iterable[bytes]) -> None:
        count = image.num_results
        for digest in [digest for digest in self._slots if digest not in kept]:
            if len(self._free) >= count:
                break
            self._free += self._slots.pop(digest).tolist()
        assert len(self._free) >= count, (count, self.num_slots)
        self._slots[image.digest] = np.array([self._free.pop() for _ in range(count)], np.int32)

    def _batch(self, views: list[tuple[PromptImage, int, int]], size: int) -> EncodeBatch:
        count = fitting(len(views), self._views)
        batch = self.empty(count, size)
        per_block = size // self.inputs.merged
        for number, (image, begin, end) in enumerate(views):
            batch.patches_1KPp[0, number, : end - begin] = image.patches[begin:end]
            places = batch.places_1KP5[0, number, : end - begin]
            places[:] = image.layout.places[begin:end]
            places[:, 0] = places[:, 0] > 0
            merged = self.inputs.merged
            results = slice(number * per_block, number * per_block + (end - begin) // merged)
            batch.slots_F[results] = self._slots[image.digest][begin // merged : end // merged]
        return batch

    def empty(self, count: int, size: int) -> EncodeBatch:
        return EncodeBatch(
            np.zeros((1, count, size, self.inputs.layouts.value_dim), np.uint8),
            np.zeros((1, count, size, 5), np.int32),
            np.full(count * size // self.inputs.merged, self.num_slots, np.int32),
        )


def _size_of_block(num_patches: int) -> int:
    return MIN_PATCHES * power_of_two(-(-num_patches // MIN_PATCHES))
