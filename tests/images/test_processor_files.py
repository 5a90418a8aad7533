"""preprocessor_config.json and processor_config.json to a rule and back."""

import dataclasses
import json
import re

import pytest

from megajax.images.processor_files import options_of, read_rule, rule_of, write_rule

CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
# As openai/clip-vit-large-patch14-336 has it: of a class that is now called otherwise, with numbers for sizes.
OLD_CLIP = {
    "crop_size": 336, "do_center_crop": True, "do_normalize": True, "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3, "size": 336, **CLIP,
}  # fmt: skip
QWEN2 = {
    "min_pixels": 3136, "max_pixels": 200_704, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", **CLIP,
}  # fmt: skip


def transformers_auto():
    pytest.importorskip("PIL")
    return pytest.importorskip("transformers", minversion="5.23").AutoImageProcessor


def test_what_is_written_is_read_back(family, tmp_path):
    write_rule(tmp_path, family.rule, family.processor)
    assert read_rule(tmp_path, family.rule.patch_size, family.rule.merge) == family.rule


def test_transformers_makes_the_same_pixels_from_what_is_written(family, tmp_path, same_pixels, draw):
    # Values that no class has for its default.
    rule = dataclasses.replace(family.rule, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), max_tiles=5, max_patches=40)
    if rule.resize in ("squash", "tiles"):
        rule = dataclasses.replace(rule, size=112)
    write_rule(tmp_path, rule, family.processor)
    processor = transformers_auto().from_pretrained(tmp_path, backend="pil")
    assert type(processor).__name__ == f"{family.processor}Pil"
    for size in ((200, 333), (50, 20)):
        same_pixels(rule, processor, draw(*size))


@pytest.mark.parametrize("suffix", ["", "Fast", "Pil"])
def test_what_transformers_saves_is_read(family, make_processor, tmp_path, suffix):
    make_processor(family).save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    options = json.loads(file.read_text()) | {"image_processor_type": family.processor + suffix}
    file.write_text(json.dumps(options))
    assert read_rule(tmp_path, family.rule.patch_size, family.rule.merge) == family.rule


def test_a_nested_processor_comes_first(families, tmp_path):
    write_rule(tmp_path, families["siglip"].rule, "SiglipImageProcessor")
    nested = options_of(families["llava"].rule, "CLIPImageProcessor")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": nested}))
    assert read_rule(tmp_path, 14, 1) == families["llava"].rule
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "PaliGemmaProcessor"}))
    assert read_rule(tmp_path, 14, 1) == families["siglip"].rule


def test_internvl_cuts_tiles_whatever_its_image_processor_says(families, tmp_path):
    rule = families["internvl"].rule
    options = options_of(rule, "GotOcr2ImageProcessor") | {"crop_to_patches": False}
    assert rule_of(options, 14, 2) == dataclasses.replace(rule, resize="squash")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(options))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "InternVLProcessor"}))
    assert read_rule(tmp_path, 14, 2) == rule


def test_files_of_older_versions_are_read(families):
    assert rule_of(OLD_CLIP, 14, 1) == families["llava"].rule
    assert rule_of(QWEN2, 14, 2) == families["qwen2_vl"].rule


@pytest.mark.parametrize("name", ["llava", "llava_next", "internvl", "siglip", "siglip2", "gemma3", "qwen2_vl"])
def test_options_left_out_are_the_defaults_of_the_class(families, name, tmp_path, same_pixels, draw):
    file = tmp_path / "preprocessor_config.json"
    options = {"image_processor_type": families[name].processor}
    if name == "llava_next":  # whose default pinpoints do not fit its default size
        options |= {"size": {"shortest_edge": 336}, "crop_size": 336}
    if name == "internvl":  # whose default size is no multiple of 28
        options |= {"size": {"height": 448, "width": 448}, "crop_to_patches": True}
    file.write_text(json.dumps(options))
    processor = transformers_auto().from_pretrained(tmp_path, backend="pil")
    rule = read_rule(tmp_path, families[name].rule.patch_size, families[name].rule.merge)
    same_pixels(rule, processor, draw(150, 233))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llava", {"image_processor_type": "PixtralImageProcessor"}, "'PixtralImageProcessor' is not supported"),
        ("llava", {"resample": 1}, "resample=1 must be one of bicubic, bilinear"),
        ("llava", {"do_center_crop": False}, "do_center_crop=False is not supported; supported: True"),
        ("llava", {"do_pad": True}, "do_pad=True is not supported; supported: False"),
        ("llava", {"do_rescale": False}, "do_rescale=False is not supported; supported: True"),
        ("llava", {"rescale_factor": 1 / 127.5}, "rescale_factor=0.00784"),
        ("llava", {"image_mean": 0.5}, "mean=0.5 must be 3 finite numbers"),
        ("llava", {"image_mean": [0.5]}, "mean=(0.5,) must be 3 finite numbers"),
        ("llava", {"crop_size": 224}, "size={'shortest_edge': 336} with crop_size=224 is not supported"),
        ("llava", {"size": {"height": 336, "width": 336}}, "size={'height': 336, 'width': 336} with crop_size"),
        ("llava", {"do_flip": True}, "do_flip=True is not supported"),
        ("llava_next", {"image_grid_pinpoints": [[336, 500]]}, "pinpoints=336,500 must be pairs"),
        ("llava_next", {"image_grid_pinpoints": [336]}, "pinpoints=336 must be pairs"),
        ("internvl", {"min_patches": 2}, "min_patches=2 is not supported; supported: 1"),
        ("siglip", {"size": {"height": 384, "width": 200}}, "size={'height': 384, 'width': 200} is not supported"),
        ("siglip", {"size": {}}, "size={} is not supported"),
        ("siglip", {"size": 384}, "size=384 is not supported"),
        ("siglip", {"do_center_crop": True}, "do_center_crop=True is not supported"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan=True is not supported, because"),
        ("qwen2_vl", {"temporal_patch_size": 1}, "temporal_patch_size=1 is not supported; supported: 2"),
        ("qwen2_vl", {"patch_size": 16}, "patch_size=16 differs from that of the model, 14"),
        ("qwen2_vl", {"max_pixels": 100}, "min_pixels=3136 is above max_pixels=100"),
        ("siglip2", {"max_num_patches": 0}, "max_patches=0 must be"),
    ],
)
def test_options_that_are_not_supported_are_named(families, tmp_path, name, options, message):
    rule = families[name].rule
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(options_of(rule, families[name].processor) | options))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_rule(tmp_path, rule.patch_size, rule.merge)
    assert str(error.value).startswith(str(file))


@pytest.mark.parametrize("text", ["{", "[]", "{}", None])
def test_a_missing_or_damaged_file_is_named(tmp_path, text):
    file = tmp_path / "preprocessor_config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        read_rule(tmp_path, 14, 1)


def test_a_processor_that_resizes_in_another_way_is_not_written(families, tmp_path):
    with pytest.raises(ValueError, match="resize=crop is not that of SiglipImageProcessor, squash"):
        write_rule(tmp_path, families["llava"].rule, "SiglipImageProcessor")
