"""Models that read images: recorded logits of transformers come out, packed or not, and folders come back."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.images.rules import ImageRule
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.precision import PrecisionConfig
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.mapping import FAMILIES, family_of
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.hugging_face.translate import read_options, write_options

RECORDED = np.load(Path(__file__).parents[2] / "oracles" / "multimodal.npz")
MODELS = json.loads(str(RECORDED["models"]))
PROMPTS = json.loads(str(RECORDED["prompts"]))
SIZES = RECORDED["sizes"].tolist()
# Ours are float32; transformers' were computed in float64.
TOLERANCE = 1e-5
# The rows of a batch: the prompts packed into it, and whether each view has a block of its own.
ROWS = [
    (["two images"], False),
    (["swapped"], True),
    (["text"], False),
    (["text", "two images"], True),
    (["swapped", "text"], False),
]
# Not kept: what follows the layer of a CLIP that the text reads.
UNUSED = re.compile(r"vision_tower\.(vision_model\.)?(post_layernorm|encoder\.layers\.2)\.")


@pytest.fixture(scope="module")
def folder_of(write_drawn, tmp_path_factory):
    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("theirs") / name
        write_drawn(folder, MODELS[name])
        return folder

    return make


@pytest.fixture(scope="module")
def row_logits(folder_of, image_row, draw_noise):
    """name of a model -> for each of ROWS, and each of its prompts, logits [T, V]."""
    images = [draw_noise(*size) for size in SIZES]

    @functools.cache
    def logits(name: str) -> list[list[np.ndarray]]:
        folder = Folder(folder_of(name))
        vision = folder.model.vision
        sizes = [len(RECORDED[f"{name}/{prompt}"]) for prompt in PROMPTS]
        layouts = [vision.layouts.of(*size) for size in SIZES]
        views = sum(layout.num_views for layout in layouts)
        patches = sum(len(layout.places) for layout in layouts)
        config = dataclasses.replace(
            folder.model, vision=dataclasses.replace(vision, blocks=views, patches=-(-patches // 8) * 8)
        )
        rows = []
        for prompts, one_view_a_block in ROWS:
            row = image_row(config, max(sizes) + min(sizes), one_view_a_block=one_view_a_block)
            for prompt in prompts:
                ids, numbers = PROMPTS[prompt]
                row.add(ids, [images[number] for number in numbers])
            rows.append(row)
        batch = {key: np.stack([row.arrays[key] for row in rows]) for key in rows[0].arrays}
        found = compute(folder, config, batch)
        return [
            np.split(of_row[: row.end], np.flatnonzero(np.diff(row.arrays["segment_ids"][: row.end])) + 1)
            for row, of_row in zip(rows, found, strict=True)
        ]

    return logits


def compute(folder: Folder, config: MultimodalConfig, batch: dict) -> np.ndarray:
    """Logits [B, T, V] in float32."""
    model = Model(config, PrecisionConfig(compute="float32"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)

    @jax.jit
    def run(weights, batch):
        module = model.module(weights)
        return module.token_logits(module.hidden(batch)[0])[..., : config.vocab_size]

    with jax.default_matmul_precision("highest"):
        return np.asarray(run(folder.restore_params(form, model.layer_rows), batch))


def test_every_family_is_recorded():
    assert {family_of(entry["options"]).architecture for entry in MODELS.values()} == {
        family.architecture for family in FAMILIES if family.form.default.kind == "multimodal"
    }


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, row_logits):
    """However images are packed into blocks, and conversations into rows."""
    for (prompts, _), found in zip(ROWS, row_logits(name), strict=True):
        for prompt, logits in zip(prompts, found, strict=True):
            want = RECORDED[f"{name}/{prompt}"]
            np.testing.assert_allclose(logits, want, rtol=0, atol=TOLERANCE * want.std(), err_msg=f"{prompts} {prompt}")


@pytest.mark.parametrize("name", MODELS)
def test_images_in_another_order_give_other_logits(name, row_logits):
    """Which the tolerance of the test above must not hide."""
    (found,), (swapped,) = row_logits(name)[:2]
    assert np.abs(found[-1] - swapped[-1]).max() > 100 * TOLERANCE * found.std()


@pytest.mark.parametrize("name", MODELS)
def test_options_come_back(name):
    options = MODELS[name]["options"]
    family = family_of(options)
    model = read_options(family, options)
    assert read_options(family, write_options(family, model)) == model
    written = write_options(family, model)
    for section in ("text_config", "vision_config"):
        different = {
            key: (options[section][key], value)
            for key, value in written[section].items()
            if options[section].get(key, value) != value
        }
        is_cut = options.get("vision_feature_layer") == -2 and section == "vision_config"
        assert set(different) <= ({"num_hidden_layers"} if is_cut else set()), different


def on_hub(name: str) -> str:
    return re.sub(r"^vision_tower\.(?=embeddings|encoder\.layers|p)", "vision_tower.vision_model.", name)


def in_memory(name: str) -> str:
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return name.replace("model.", "model.language_model.", 1)
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"


@pytest.mark.parametrize("name", MODELS)
def test_tensors_come_back_by_the_names_of_the_hub(name, folder_of, tmp_path):
    import_folder(folder_of(name), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    files = TensorFiles(folder_of(name))
    again = TensorFiles(tmp_path / "back")
    is_clip = name.startswith("llava")
    kept = {on_hub(key): key for key in files.forms if not (is_clip and UNUSED.match(key))}
    assert set(again.forms) == set(kept)
    for key in again.forms:
        assert files[kept[key]].tobytes() == again[key].tobytes(), key
    first, second = Folder(folder_of(name)), Folder(tmp_path / "back")
    assert first.model == second.model
    assert first.model.vision.image != ImageRule()


@pytest.mark.parametrize("rename", [on_hub, in_memory])
@pytest.mark.parametrize("name", MODELS)
def test_other_names_of_the_tensors_are_read(name, rename, folder_of, tmp_path):
    usual = Folder(folder_of(name))
    tensors = safetensors.numpy.load_file(folder_of(name) / "model.safetensors")
    for file in ("config.json", "preprocessor_config.json"):
        (tmp_path / file).write_bytes((folder_of(name) / file).read_bytes())
    renamed = {rename(key): tensor for key, tensor in tensors.items()}
    assert len(renamed) == len(tensors)
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    other = Folder(tmp_path)
    for parameter, shape in usual.map.shapes.items():
        index = (slice(None),) * len(shape)
        found, wanted = (
            folder.reader.read(parameter, folder.map.layers_of(parameter), index, np.float32)
            for folder in (other, usual)
        )
        np.testing.assert_array_equal(found, wanted, err_msg=parameter)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_is_exported(name, folder_of, load_their_multimodal, draw_noise, tmp_path):
    import_folder(folder_of(name), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    theirs = load_their_multimodal(tmp_path / "back", may_lack=("post_layernorm.weight", "post_layernorm.bias"))
    images = [draw_noise(*size) for size in SIZES]
    for prompt, (ids, numbers) in PROMPTS.items():
        want = RECORDED[f"{name}/{prompt}"]
        found = theirs.logits(ids, [images[number] for number in numbers])
        # the same formulas in float64
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-6 * want.std())
