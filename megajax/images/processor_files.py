"""Image rules from and to the preprocessor_config.json or processor_config.json of a Hugging Face folder."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megajax.fields.ranges import check_fields
from megajax.images.rules import ImageRule

FILE = "preprocessor_config.json"
# Of a processor of images and text. If it has an image processor, transformers reads that one and not FILE.
NESTED_FILE = "processor_config.json"
NESTED = "image_processor"

HALF = (0.5, 0.5, 0.5)
PINPOINTS = (336, 672, 672, 336, 672, 672, 1008, 336, 336, 1008)
# The classes of transformers, with what each takes for options that a file leaves out.
PROCESSORS = {
    "CLIPImageProcessor": ImageRule("crop", size=224),
    "LlavaImageProcessor": ImageRule("crop", size=224),
    "LlavaNextImageProcessor": ImageRule("pinpoints", size=224, pinpoints=PINPOINTS),
    "GotOcr2ImageProcessor": ImageRule("tiles", size=384),
    "SiglipImageProcessor": ImageRule("squash", size=224, mean=HALF, std=HALF),
    "Gemma3ImageProcessor": ImageRule("squash", size=224, resample="bilinear", mean=HALF, std=HALF),
    "Siglip2ImageProcessor": ImageRule("patches", patch_size=16, resample="bilinear", mean=HALF, std=HALF),
    "Qwen2VLImageProcessor": ImageRule("pixels", patch_size=14, merge=2),
}
# Options with one supported value, which the classes also take for them where a file leaves them out.
FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
FIXED_OF = {
    "crop": {"do_center_crop": True, "do_pad": False},
    "pinpoints": {"do_center_crop": True},
    "tiles": {"min_patches": 1},
    "pixels": {"temporal_patch_size": 2},
}
# Options with the value of a field, some as lists.
KEYS = {"mean": "image_mean", "std": "image_std"}
KEYS_OF = {
    "pinpoints": {"pinpoints": "image_grid_pinpoints"},
    "tiles": {"max_tiles": "max_patches"},
    "pixels": {
        "min_pixels": "min_pixels", "max_pixels": "max_pixels", "patch_size": "patch_size", "merge": "merge_size",
    },
    "patches": {"max_patches": "max_num_patches", "patch_size": "patch_size"},
}  # fmt: skip
RESAMPLE = {"bilinear": 2, "bicubic": 3}  # the numbers of Pillow
# Read in another way, or without effect on the pixels of one RGB image.
OTHER_KEYS = {
    "crop_size", "crop_to_patches", "feature_extractor_type", "image_processor_type", "processor_class", "resample",
    "size",
    "_valid_processor_keys", "aspect_ratio_setting", "auto_map", "data_format", "default_to_square", "device",
    "disable_grouping", "do_convert_rgb", "do_pad", "image_seq_length", "image_token", "input_data_format",
    "max_patches", "min_patches", "model_input_names", "pan_and_scan_max_num_crops", "pan_and_scan_min_crop_size",
    "pan_and_scan_min_ratio_to_activate", "return_tensors",
}  # fmt: skip


def read_rule(folder: Path, patch_size: int, merge: int) -> ImageRule:
    """The rule of a folder. patch_size, merge: those of the model, which most of these files do not have.

    Raises ValueError, naming the file, if it is missing or damaged, or has an option that is not supported.
    """
    processor = _read(folder / NESTED_FILE)
    options = processor.get(NESTED)
    path = folder / (FILE if options is None else NESTED_FILE)
    if options is None:
        options = _read(path)
    if not isinstance(options, dict) or not options:
        raise ValueError(f"{path} says nothing of how images are prepared; copy it from the folder of the model")
    try:
        return rule_of({"processor_class": processor.get("processor_class")} | options, patch_size, merge)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_rule(folder: Path, rule: ImageRule, processor: str) -> None:
    """Writes preprocessor_config.json. Errors as in options_of."""
    (folder / FILE).write_text(json.dumps(options_of(rule, processor), indent=2) + "\n", encoding="utf-8")


def rule_of(options: Mapping[str, Any], patch_size: int, merge: int) -> ImageRule:
    """The rule of an image processor with these options; patch_size and merge as in read_rule.

    Raises ValueError, naming option and value, for what is not supported.
    """
    options = {key: value for key, value in options.items() if value is not None}
    rule = _class_of(options)
    if rule.resize == "pixels" and isinstance(options.get("size"), dict):
        names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        options = {names.get(key, key): value for key, value in options["size"].items()} | options
    keys = KEYS | KEYS_OF.get(rule.resize, {})
    _check_options(options, FIXED | FIXED_OF.get(rule.resize, {}), OTHER_KEYS | set(keys.values()))
    changes = {field: _flat(options[key]) for field, key in keys.items() if key in options}
    for field, value in {"patch_size": patch_size, "merge": merge}.items():
        if changes.setdefault(field, value) != value:
            raise ValueError(f"{keys[field]}={changes[field]} differs from that of the model, {value}")
    if "resample" in options:
        names = {str(number): name for name, number in RESAMPLE.items()}
        changes["resample"] = names.get(str(options["resample"]), options["resample"])
    if rule.resize not in ("pixels", "patches"):
        changes["size"] = _side(options, rule)
    rule = replace(rule, **changes)
    check_fields(rule)
    rule.check()
    return rule


def options_of(rule: ImageRule, processor: str) -> dict[str, Any]:
    """What preprocessor_config.json says for this one of PROCESSORS. Raises ValueError if it resizes in another way."""
    if PROCESSORS[processor].resize != rule.resize:
        raise ValueError(f"resize={rule.resize} is not that of {processor}, {PROCESSORS[processor].resize}")
    options: dict[str, Any] = {"image_processor_type": processor, "do_convert_rgb": True}
    options |= FIXED | FIXED_OF.get(rule.resize, {})
    options |= {key: getattr(rule, field) for field, key in (KEYS | KEYS_OF.get(rule.resize, {})).items()}
    options["resample"] = RESAMPLE[rule.resample]
    square = {"height": rule.size, "width": rule.size}
    if rule.resize in ("squash", "tiles"):
        options["size"] = square
    if rule.resize in ("crop", "pinpoints"):
        options |= {"size": {"shortest_edge": rule.size}, "crop_size": square}
    if rule.resize == "pinpoints":
        options["image_grid_pinpoints"] = rule.pinpoint_sizes
    if rule.resize == "tiles":
        options["crop_to_patches"] = True
    if rule.resize == "pixels":  # older versions of transformers read only min_pixels and max_pixels
        options["size"] = {"shortest_edge": rule.min_pixels, "longest_edge": rule.max_pixels}
    return options


def _read(path: Path) -> dict[str, Any]:
    """{} if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold an object {{...}}; download it again")
    return found


def _class_of(options: Mapping[str, Any]) -> ImageRule:
    found = str(options.get("image_processor_type") or options.get("feature_extractor_type"))
    name = found.removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if name not in PROCESSORS:
        raise ValueError(f"image_processor_type={found!r} is not supported; supported: {', '.join(PROCESSORS)}")
    # InternVL's processor of images and text cuts tiles, whatever the file says.
    is_tiled = options.get("crop_to_patches") or options.get("processor_class") == "InternVLProcessor"
    if name == "GotOcr2ImageProcessor" and not is_tiled:
        return replace(PROCESSORS[name], resize="squash")
    return PROCESSORS[name]


def _check_options(options: Mapping[str, Any], fixed: Mapping[str, Any], others: set[str]) -> None:
    if options.get("do_pan_and_scan"):
        raise ValueError(
            f"do_pan_and_scan={options['do_pan_and_scan']!r} is not supported, because its crops stand in the text "
            "with words between them; supported: False"
        )
    for key, value in options.items():
        if key in fixed:
            is_supported = isinstance(value, int | float) and math.isclose(value, fixed[key], rel_tol=1e-6)
        else:
            is_supported = key in others or value is False
        if not is_supported:
            raise ValueError(f"{key}={value!r} is not supported; supported: {fixed.get(key, 'files without it')}")


def _flat(value: Any) -> Any:
    """A list, also one of lists, as the tuple of its elements."""
    return tuple(np.ravel(value).tolist()) if isinstance(value, list | tuple) else value


def _side(options: Mapping[str, Any], rule: ImageRule) -> Any:
    """Of the squares that the views are."""
    size = options.get("size", rule.size)
    side = next(iter(size.values()), None) if isinstance(size, dict) else size
    square = {"height": side, "width": side}
    if rule.resize in ("crop", "pinpoints"):
        crop = options.get("crop_size", rule.size)
        if size not in (side, {"shortest_edge": side}) or crop not in (side, square):
            raise ValueError(
                f"size={size!r} with crop_size={crop!r} is not supported; supported: the shortest edge and a square "
                "crop of the same size"
            )
    elif "size" in options and size != square:
        raise ValueError(f"size={size!r} is not supported; supported: height and width of a square")
    return side
