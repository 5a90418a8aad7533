from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from megajax.images.rules import ImageRule

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
SIZES = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
PINPOINTS = tuple(side for size in SIZES for side in size)


class Family(NamedTuple):
    """A rule, the class of transformers that follows it, and the options of that class."""

    rule: ImageRule
    processor: str
    options: dict


def square(side: int) -> dict:
    return {"height": side, "width": side}


FAMILIES = {
    "llava": Family(
        ImageRule("crop", size=336, patch_size=14, **CLIP),
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 336}, "crop_size": square(336)},
    ),
    "llava_next": Family(
        ImageRule("pinpoints", size=336, patch_size=14, pinpoints=PINPOINTS, **CLIP),
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 336}, "crop_size": square(336), "image_grid_pinpoints": [*map(list, SIZES)]},
    ),
    "internvl": Family(
        ImageRule("tiles", size=448, patch_size=14, merge=2, max_tiles=12, **IMAGENET),
        "GotOcr2ImageProcessor",
        {"size": square(448), "crop_to_patches": True, "min_patches": 1, "max_patches": 12},
    ),
    "siglip": Family(  # whose 27 x 27 patches leave out 6 rows and columns of pixels
        ImageRule("squash", size=384, patch_size=14, **HALF),
        "SiglipImageProcessor",
        {"size": square(384)},
    ),
    "siglip2": Family(
        ImageRule("patches", patch_size=16, max_patches=256, resample="bilinear", **HALF),
        "Siglip2ImageProcessor",
        {"patch_size": 16, "max_num_patches": 256},
    ),
    "gemma3": Family(
        ImageRule("squash", size=896, patch_size=14, merge=4, resample="bilinear", **HALF),
        "Gemma3ImageProcessor",
        {"size": square(896)},
    ),
    "qwen2_vl": Family(
        ImageRule("pixels", patch_size=14, merge=2, min_pixels=3136, max_pixels=200_704, **CLIP),
        "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 3136, "longest_edge": 200_704}, "patch_size": 14, "merge_size": 2},
    ),
    "qwen3_vl": Family(
        ImageRule("pixels", patch_size=16, merge=2, min_pixels=65_536, max_pixels=16_777_216, **HALF),
        "Qwen2VLImageProcessor",
        {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16, "merge_size": 2},
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="session")
def families() -> dict[str, Family]:
    return FAMILIES


@pytest.fixture(scope="session")
def make_processor() -> Callable:
    """Builds the Pillow processor of a family from its options."""
    pytest.importorskip("PIL")
    transformers = pytest.importorskip("transformers", minversion="5.23")

    def make(family: Family):
        how = {"image_mean": list(family.rule.mean), "image_std": list(family.rule.std), "resample": 3}
        if family.rule.resample == "bilinear":
            how["resample"] = 2
        return getattr(transformers, f"{family.processor}Pil")(**how, **family.options)

    return make


@pytest.fixture(scope="session")
def draw() -> Callable:
    """Draws an image of random pixels."""
    image = pytest.importorskip("PIL.Image")

    def drawn(height: int, width: int):
        rng = np.random.default_rng([height, width])
        return image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))

    return drawn


@pytest.fixture(scope="session")
def sizes() -> Callable:
    """Draws (height, width), each spread evenly over orders of magnitude, with an aspect of 20 at most."""

    def drawn(number: int, longest: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng(0)
        found = []
        while len(found) < number:
            height, width = np.exp(rng.uniform(0, np.log(longest), 2)).astype(int).tolist()
            if max(height, width) <= 20 * min(height, width):
                found.append((height, width))
        return found

    return drawn


@pytest.fixture(scope="session")
def same_pixels() -> Callable:
    """Asserts that the rule and a processor of transformers make the same pixels of an image, to the last bit."""

    def check(rule: ImageRule, processor, image) -> None:
        views = rule.pixels(image)
        assert_same(rule, views, processor(image, do_rescale=False, do_normalize=False))
        assert_same(rule, [rule.normalized(view) for view in views], processor(image))

    def assert_same(rule: ImageRule, ours: list[np.ndarray], output) -> None:
        theirs = output["pixel_values"]
        if rule.resize == "pixels":  # each patch is (channel, frame, row, column), with the same frame twice
            size = rule.patch_size
            theirs = theirs.reshape(-1, 3, 2, size, size)[:, :, 0].transpose(0, 2, 3, 1).reshape(-1, size * size * 3)
            np.testing.assert_array_equal(rule.patches(ours[0]), theirs)
            return
        if rule.resize == "patches":
            patches = rule.patches(ours[0])
            np.testing.assert_array_equal(patches, theirs[0][: len(patches)])
            assert output["pixel_attention_mask"][0].sum() == len(patches)
            return
        if rule.resize == "pinpoints":
            theirs = theirs[0]
        assert len(ours) == len(theirs)
        for view, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(view, other.transpose(1, 2, 0))

    return check
