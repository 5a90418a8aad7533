"""Writes multimodal.npz: small random models of transformers that read images, and their logits.

    pip install -e '.[parity,images]'
    python tests/oracles/make_multimodal.py

Last run with transformers 5.23.0 and torch 2.15.0. Only config.json, preprocessor_config.json and the shapes of the
tensors are recorded: the weights are drawn by their names, images by their sizes. NAME/PROMPT are logits [T, V] of
transformers in float64, rounded to float32; of a tower, NAME/image N are hidden states [P, C]. Compared by
tests/weights/hugging_face/test_multimodal.py and test_tower.py.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ORACLES = Path(__file__).parent
sys.path.insert(0, str(ORACLES.parent / "weights" / "hugging_face"))

from conftest import TheirMultimodal, noise, write_described  # noqa: E402
from megajax.weights.hugging_face.tensor_files import TensorFiles  # noqa: E402

VOCAB = 40
IMAGE = 36
SIZES = [(30, 50), (67, 35)]  # height, width
IDS = [1, 5, 7, IMAGE, 9, 11, IMAGE, 3, 2, 8]
PROMPTS = {
    "two images": [IDS, [0, 1]],
    "swapped": [IDS, [1, 0]],
    "text": [[token for token in IDS if token != IMAGE], []],
}  # ids, images
TEXT = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    vocab_size=VOCAB, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
VIT = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, patch_size=4)
CLIP = VIT | dict(model_type="clip_vision_model", image_size=12)
QWEN_VIT = dict(
    hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=16, patch_size=4, spatial_merge_size=2
)
QWEN_TOKENS = dict(image_token_id=IMAGE, vision_start_token_id=37, vision_end_token_id=38, video_token_id=39)
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
PINPOINTS = [[12, 24], [24, 12], [24, 24]]
QWEN_IMAGES = dict(patch_size=4, merge_size=2, size=dict(shortest_edge=256, longest_edge=1600))
TILES = dict(size=dict(height=16, width=16), crop_to_patches=True, min_patches=1, max_patches=3)
# class of the config, its arguments, class of the image processor, its arguments
MODELS = {
    "llava": (
        "LlavaConfig",
        dict(vision_config=CLIP, text_config=dict(model_type="llama", **TEXT), image_token_index=IMAGE),
        "CLIPImageProcessor",
        dict(size=dict(shortest_edge=12), crop_size=dict(height=12, width=12)),
    ),
    "llava, siglip": (
        "LlavaConfig",
        dict(
            vision_config=VIT | dict(model_type="siglip_vision_model", image_size=12),
            text_config=dict(model_type="qwen3", **TEXT), image_token_index=IMAGE,
            vision_feature_select_strategy="full", vision_feature_layer=-2,
        ),
        "SiglipImageProcessor",
        dict(size=dict(height=12, width=12)),
    ),
    "llava_next": (
        "LlavaNextConfig",
        dict(
            vision_config=CLIP, text_config=dict(model_type="mistral", sliding_window=6, **TEXT),
            image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS,
        ),
        "LlavaNextImageProcessor",
        dict(
            size=dict(shortest_edge=12), crop_size=dict(height=12, width=12), image_grid_pinpoints=PINPOINTS
        ),
    ),
    "gemma3": (
        "Gemma3Config",
        dict(
            vision_config=VIT | dict(
                model_type="siglip_vision_model", image_size=24, num_hidden_layers=2, vision_use_head=False
            ),
            text_config=TEXT | dict(
                layer_types=["sliding_attention", "full_attention"], sliding_window=5, query_pre_attn_scalar=6
            ),
            image_token_index=IMAGE, boi_token_index=37, eoi_token_index=38, mm_tokens_per_image=9,
        ),
        "Gemma3ImageProcessor",
        dict(size=dict(height=24, width=24)),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        dict(
            vision_config=QWEN_VIT | dict(depth=3, window_size=16, fullatt_block_indexes=[1]),
            text_config=TEXT | dict(rope_parameters=MROPE), **QWEN_TOKENS,
        ),
        "Qwen2VLImageProcessor",
        QWEN_IMAGES,
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        dict(
            vision_config=QWEN_VIT | dict(depth=3, deepstack_visual_indexes=[0, 1], num_position_embeddings=25),
            text_config=TEXT | dict(rope_parameters=MROPE | dict(mrope_interleaved=True)), **QWEN_TOKENS,
        ),
        "Qwen2VLImageProcessor",
        QWEN_IMAGES,
    ),
    "internvl": (
        "InternVLConfig",
        dict(
            vision_config=VIT | dict(num_hidden_layers=2, image_size=[16, 16], patch_size=[4, 4], attention_bias=True),
            text_config=dict(model_type="qwen2") | TEXT, image_token_id=IMAGE,
        ),
        "GotOcr2ImageProcessor",
        TILES,
    ),
    "internvl 6B": (
        "InternVLConfig",
        dict(
            vision_config=VIT | dict(
                num_hidden_layers=2, image_size=[16, 16], patch_size=[4, 4], use_qk_norm=True, norm_type="rms_norm"
            ),
            text_config=dict(model_type="llama", **TEXT), image_token_id=IMAGE, tie_word_embeddings=False,
        ),
        "GotOcr2ImageProcessor",
        TILES,
    ),
}  # fmt: skip
SIGLIP = VIT | dict(num_hidden_layers=2)
OF_TEXT = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
# class, class of its config, and as above; which hidden states are recorded
TOWERS = {
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        dict(vision_config=VIT | dict(image_size=12), text_config=OF_TEXT, projection_dim=8),
        "CLIPImageProcessor",
        dict(size=dict(shortest_edge=12), crop_size=dict(height=12, width=12)),
        lambda out: out.hidden_states[-2][:, 1:],  # without the class token
    ),
    "siglip": (
        "SiglipVisionModel",
        "SiglipVisionConfig",
        SIGLIP | dict(image_size=12),
        "SiglipImageProcessor",
        dict(size=dict(height=12, width=12)),
        lambda out: out.last_hidden_state,
    ),
    "siglip2": (
        "Siglip2VisionModel",
        "Siglip2VisionConfig",
        SIGLIP | dict(num_patches=25),
        "Siglip2ImageProcessor",
        dict(patch_size=4, max_num_patches=30),
        lambda out: out.last_hidden_state,
    ),
}  # fmt: skip


def describe(make_model, kind: str, arguments: dict, processor: str, options: dict) -> dict:
    """As test_transformers.py, of a folder of a model that reads images."""
    model = make_model(getattr(transformers, kind)(**arguments))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        getattr(transformers, processor)(**options).save_pretrained(folder)
        config, images = (
            json.loads((Path(folder) / name).read_text()) for name in ("config.json", "preprocessor_config.json")
        )
        files = TensorFiles(Path(folder))
        tensors = {name: [list(form.shape), round(float(files[name].mean()))] for name, form in files.forms.items()}
    return {"options": config, "processor": images, "tensors": tensors}


def features_of(cls, folder: Path, images: list, chosen) -> list[np.ndarray]:
    """Of all patches of each image, [P, C], computed in float64."""
    model = cls.from_pretrained(folder, attn_implementation="eager").double().eval()
    inputs = transformers.AutoImageProcessor.from_pretrained(folder)(images, return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].double()
    with torch.no_grad():
        found = chosen(getattr(model, "vision_model", model)(**inputs, output_hidden_states=True)).float().numpy()
    counts = inputs["spatial_shapes"].prod(-1).tolist() if "spatial_shapes" in inputs else [found.shape[1]] * len(found)
    return [features[:count] for features, count in zip(found, counts, strict=True)]


def record() -> None:
    transformers.logging.disable_progress_bar()
    images = [noise(*size) for size in SIZES]
    entries = {}
    logits = {}
    for name, how in MODELS.items():
        entries[name] = describe(transformers.AutoModelForImageTextToText.from_config, *how)
        with tempfile.TemporaryDirectory() as folder:
            write_described(Path(folder), entries[name])
            theirs = TheirMultimodal(transformers, Path(folder))
            for prompt, (ids, numbers) in PROMPTS.items():
                logits[f"{name}/{prompt}"] = theirs.logits(ids, [images[number] for number in numbers])
                print(name, prompt, logits[f"{name}/{prompt}"].shape)
    towers = {}
    for name, (kind, *how, chosen) in TOWERS.items():
        cls = getattr(transformers, kind)
        towers[name] = describe(cls, *how)
        with tempfile.TemporaryDirectory() as folder:
            write_described(Path(folder), towers[name])
            for number, features in enumerate(features_of(cls, Path(folder), images, chosen)):
                logits[f"{name}/image {number}"] = features
                print(name, features.shape)
    np.savez_compressed(
        ORACLES / "multimodal.npz", models=json.dumps(entries), towers=json.dumps(towers), prompts=json.dumps(PROMPTS),
        sizes=np.array(SIZES), transformers=transformers.__version__, **logits,
    )  # fmt: skip


if __name__ == "__main__":
    record()
