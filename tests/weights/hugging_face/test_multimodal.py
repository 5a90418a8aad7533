"""Models that read images: recorded logits of transformers come out, packed or not, and folders come back."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

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
# The rows of a batch: the prompts packed into it, and whether each view has a block of its own, or all have one.
ROWS = [
    (["two images"], False),
    (["swapped"], True),
    (["text"], False),
    (["text", "two images"], True),
    (["swapped", "text"], False),
]
# The others come back in the slow tests.
QUICK = ("llava", "internvl")
# Not kept: what follows the layer of a CLIP or a SigLIP that a LLaVA reads.
UNUSED = re.compile(r"vision_tower\.(post_layernorm|head|encoder\.layers\.2)\.")


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
        views = sum(len(layout.bounds) - 1 for layout in layouts)
        patches = sum(len(layout.places) for layout in layouts)
        config = dataclasses.replace(
            folder.model, vision=dataclasses.replace(vision, blocks=views, patches=-(-patches // 8) * 8)
        )
        rows = []
        for prompts, is_spread in ROWS:
            conversations = [(ids, [images[at] for at in numbers]) for ids, numbers in map(PROMPTS.get, prompts)]
            rows.append(image_row(config, max(sizes) + min(sizes), conversations, views if is_spread else 1))
        found = compute(folder, config, {key: np.stack([row[key] for row in rows]) for key in rows[0]})
        return [
            [of_row[row["segment_ids"] == number] for number in range(1, len(prompts) + 1)]
            for (prompts, _), row, of_row in zip(ROWS, rows, found, strict=True)
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
    written = write_options(family, model)
    assert read_options(family, written) == model
    changed = {
        f"{section}.{key}": (given, written[section][key])
        for section in ("text_config", "vision_config")
        for key, given in options[section].items()
        if key in written[section] and given not in (written[section][key], [written[section][key]] * 2)
    }
    changed.pop("text_config.tie_word_embeddings", None)  # that of the whole decides
    of_unused = {"vision_config.num_hidden_layers", "vision_config.vision_use_head"}
    assert set(changed) <= (of_unused if name.startswith("llava") else set()), changed


def on_hub(name: str) -> str:
    """CLIP and SigLIP, which have layers and not a layer, in a model."""
    return re.sub(r"^vision_tower\.(?=.*(embedding\.|class_embedding|layers\.|layrnorm|post_layernorm))",
                  "vision_tower.vision_model.", name)  # fmt: skip


def in_memory(name: str) -> str:
    if name.startswith("language_model.lm_head."):
        return name.removeprefix("language_model.")
    if name.startswith("language_model.model."):
        return name.replace("language_model.model.", "model.language_model.")
    if name.startswith("model.") and not name.startswith(("model.visual.", "model.language_model.")):
        return name.replace("model.", "model.language_model.", 1)
    return name if name.startswith(("lm_head.", "model.")) else f"model.{name}"


def kept_tensors(name: str) -> dict[str, str]:
    """{name on the hub: name in the folder}"""
    keys = MODELS[name]["tensors"]
    return {on_hub(key): key for key in keys if not (name.startswith("llava") and UNUSED.match(key))}


@pytest.mark.parametrize("name", MODELS)
def test_tensors_have_the_names_of_the_hub(name, folder_of):
    folder = Folder(folder_of(name))
    tensors = {tensor.name: list(tensor.shape) for tensor in folder.family.map_of(folder.model).tensors}
    assert tensors == {on_hub: MODELS[name]["tensors"][key][0] for on_hub, key in kept_tensors(name).items()}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_tensors_come_back(name, folder_of, tmp_path):
    import_folder(folder_of(name), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    files = TensorFiles(folder_of(name))
    again = TensorFiles(tmp_path / "back")
    kept = kept_tensors(name)
    assert set(again.forms) == set(kept)
    for key in again.forms:
        assert files[kept[key]].tobytes() == again[key].tobytes(), key
    assert_same_model(Folder(tmp_path / "back"), Folder(folder_of(name)))


def assert_same_model(found: Folder, wanted: Folder) -> None:
    assert found.model == wanted.model
    for parameter, shape in wanted.map.shapes.items():
        index = (slice(None),) * len(shape)
        ours, theirs = (
            folder.reader.read(parameter, folder.map.layers_of(parameter), index, np.float32)
            for folder in (found, wanted)
        )
        np.testing.assert_array_equal(ours, theirs, err_msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_tensors_are_read_by_the_names_that_transformers_has_in_memory(name, folder_of, tmp_path):
    shutil.copytree(folder_of(name), tmp_path / "renamed")
    file = tmp_path / "renamed" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({in_memory(key): tensor for key, tensor in tensors.items()}, file)
    assert_same_model(Folder(tmp_path / "renamed"), Folder(folder_of(name)))


def test_a_head_in_the_files_is_not_tied(folder_of, tmp_path):
    """Files of InternVL may leave out that it is not, and it is tied by default."""
    shutil.copytree(folder_of("internvl"), tmp_path / "untied")
    assert Folder(tmp_path / "untied").model.tied_embeddings
    file = tmp_path / "untied" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    head = 2 * tensors["language_model.model.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors | {"language_model.lm_head.weight": head}, file)
    folder = Folder(tmp_path / "untied")
    assert not folder.model.tied_embeddings
    found = folder.reader.read("head", None, (slice(None),) * 2, np.float32)
    np.testing.assert_array_equal(found[:, : len(head)], head.T)


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
