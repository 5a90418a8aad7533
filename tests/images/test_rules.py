"""Pixels, views and tokens of images, against the Pillow processors of transformers."""

import dataclasses
import re
import types

import numpy as np
import pytest

from megajax.fields.ranges import check_fields
from megajax.images.rules import NEWLINE, ImageRule

EXTREME_SIZES = [(1, 1), (1, 200), (200, 1), (2, 399)]
TOO_LONG = [(1, 5000), (5000, 1)]


def test_pixels_equal_those_of_transformers(family, make_processor, same_pixels, draw, sizes):
    processor = make_processor(family)
    for height, width in EXTREME_SIZES + sizes(30, 700):
        same_pixels(family.rule, processor, draw(height, width))


@pytest.mark.slow
def test_pixels_of_many_sizes_equal_those_of_transformers(family, make_processor, same_pixels, draw, sizes):
    processor = make_processor(family)
    for height, width in sizes(500, 1500):
        same_pixels(family.rule, processor, draw(height, width))


def test_long_images_have_the_pixels_of_transformers_or_are_refused(family, make_processor, same_pixels, draw):
    processor = make_processor(family)
    for height, width in TOO_LONG:
        image = draw(height, width)
        if family.rule.resize in ("crop", "pixels"):
            with pytest.raises(ValueError, match=f"{width} x {height} pixels is too long"):
                family.rule.views(height, width)
            with pytest.raises(ValueError, match=f"{width} x {height} pixels is too long"):
                family.rule.pixels(image)
        else:
            same_pixels(family.rule, processor, image)


def test_views_and_tokens_count_what_pixels_and_patches_return(family, draw, sizes):
    rule = family.rule
    for height, width in EXTREME_SIZES + sizes(10, 700):
        grids = rule.views(height, width)
        patches = [rule.patches(view) for view in rule.pixels(draw(height, width))]
        assert [len(of_view) for of_view in patches] == [rows * cols for rows, cols in grids]
        assert all(rows % rule.merge == 0 == cols % rule.merge for rows, cols in grids)
        order = rule.token_order(height, width)
        assert order.dtype == np.int32
        tokens = order[order != NEWLINE]
        num_tokens = sum(map(len, patches)) // rule.merge**2
        if rule.resize == "pinpoints":
            assert len(set(tokens)) == len(tokens) and set(tokens) <= set(range(num_tokens))
        else:
            np.testing.assert_array_equal(order, np.arange(num_tokens))


@pytest.mark.parametrize("name", ["internvl", "qwen2_vl", "qwen3_vl"])
def test_token_counts_equal_those_of_transformers(families, name, make_processor, sizes):
    family = families[name]
    processor = make_processor(family)
    tokens_a_view = 256 if name == "internvl" else 1 / 4
    for height, width in sizes(500, 5000):
        count = processor.get_number_of_image_patches(height, width, {}) * tokens_a_view
        assert len(family.rule.token_order(height, width)) == count, (height, width)


def test_grids_of_siglip2_equal_those_of_transformers(families, sizes):
    pytest.importorskip("PIL")
    name = "transformers.models.siglip2.image_processing_pil_siglip2"
    theirs = pytest.importorskip(name).get_image_size_for_max_num_patches
    for height, width in sizes(500, 50_000):
        ((rows, cols),) = families["siglip2"].rule.views(height, width)
        assert (16 * rows, 16 * cols) == theirs(height, width, 16, 256), (height, width)


@pytest.mark.parametrize(("name", "count"), [("llava", 576), ("siglip", 729), ("gemma3", 256)])
def test_squares_have_a_fixed_count(families, name, count, sizes):
    for height, width in sizes(50, 5000):
        assert len(families[name].rule.token_order(height, width)) == count


@pytest.mark.parametrize("step", [1, -1])
def test_counts_of_llava_next_equal_those_of_transformers(families, make_processor, sizes, step):
    transformers = pytest.importorskip("transformers")
    family = families["llava_next"]
    pinpoints = family.rule.pinpoint_sizes[::step]
    rule = dataclasses.replace(family.rule, pinpoints=tuple(side for size in pinpoints for side in size))
    family = family._replace(rule=rule, options=family.options | {"image_grid_pinpoints": [*map(list, pinpoints)]})
    processor = object.__new__(transformers.LlavaNextProcessor)  # which its __init__ gives only to those with text
    processor.image_processor = make_processor(family)
    processor.patch_size = 14
    processor.num_additional_image_tokens = 1
    processor.vision_feature_select_strategy = "default"
    processor.image_token = "x"
    views = np.zeros((1, 1, 3, 336, 336))
    for height, width in [(1, 5000), (5000, 1)] + sizes(500, 5000):
        theirs = processor.replace_image_token({"image_sizes": [(height, width)], "pixel_values": views}, 0)
        assert len(family.rule.token_order(height, width)) == len(theirs), (height, width)


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (200, 200), (1000, 311), (37, 900), (2, 399), (5000, 1)])
def test_order_of_llava_next_is_that_of_its_model(families, size):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rule = families["llava_next"].rule
    vision = types.SimpleNamespace(image_size=336, patch_size=14)
    config = types.SimpleNamespace(vision_config=vision, image_grid_pinpoints=[*map(list, rule.pinpoint_sizes)])
    num_views = len(rule.views(*size))
    numbers = torch.arange(num_views * 576, dtype=torch.float32).reshape(num_views, 576, 1)
    (theirs,), _ = transformers.LlavaNextModel.pack_image_features(
        types.SimpleNamespace(config=config), [numbers], torch.tensor([size]), "default", torch.tensor([float(NEWLINE)])
    )
    np.testing.assert_array_equal(rule.token_order(*size), theirs[:, 0].numpy())


def test_patches_of_a_merged_square_stand_together():
    rule = ImageRule("squash", size=9, patch_size=2, merge=2)
    rows, cols = np.mgrid[:9, :9]
    view = np.stack([rows, cols, rows + cols], -1).astype(np.uint8)
    patches = rule.patches(view).reshape(16, 2, 2, 3)
    corners = [(0, 0), (0, 2), (2, 0), (2, 2), (0, 4), (0, 6), (2, 4), (2, 6)]
    assert [tuple(patch[0, 0, :2]) for patch in patches[:8]] == corners
    np.testing.assert_array_equal(patches[5], view[0:2, 6:8])
    normal = rule.normalized(patches.reshape(16, 12))
    np.testing.assert_array_equal(normal[5].reshape(2, 2, 3), rule.normalized(view)[0:2, 6:8])


def test_an_image_of_another_mode_or_without_pixels_is_refused():
    image = pytest.importorskip("PIL.Image")
    with pytest.raises(ValueError, match="mode RGBA, not RGB"):
        ImageRule().pixels(image.new("RGBA", (5, 5)))
    with pytest.raises(ValueError, match="0 x 5 pixels is empty"):
        ImageRule().pixels(image.new("RGB", (0, 5)))


def test_every_family_is_without_contradiction(family):
    family.rule.check()
    check_fields(family.rule)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": 10}, "a.size=10 has 0 patches of a.patch_size=14 a side, not a multiple of a.merge=1; use a.size=14"),
        ({"size": 350, "merge": 2}, "a.size=350 has 25 patches"),
        ({"pinpoints": (336, 336)}, "a.pinpoints=336,336 with a.resize=crop"),
        ({"resize": "pinpoints"}, "a.pinpoints= with a.resize=pinpoints"),
        ({"resize": "pinpoints", "pinpoints": (336, 672, 336)}, "must be pairs"),
        ({"resize": "pinpoints", "pinpoints": (336, 500)}, "multiples of a.size=336"),
        ({"resize": "pixels", "min_pixels": 2_000_000}, "a.min_pixels=2000000 is above a.max_pixels=1003520"),
        ({"resize": "patches", "merge": 2}, "a.merge=2: a.resize=patches"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(ImageRule(), **fields).check("a.")
