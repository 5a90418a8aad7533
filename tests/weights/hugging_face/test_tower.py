"""Towers of CLIP, SigLIP and SigLIP 2 alone: they compute what transformers does, and a model with a text starts so."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.parameters import merge, named, select
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig
from megajax.weights import start_from
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.tower import TowerFolder

RECORDED = np.load(Path(__file__).parents[2] / "oracles" / "multimodal.npz")
TOWERS = json.loads(str(RECORDED["towers"]))
MODELS = json.loads(str(RECORDED["models"]))
SIZES = RECORDED["sizes"].tolist()
# Ours are float32; transformers' were computed in float64.
TOLERANCE = 1e-5
FLOAT32 = PrecisionConfig(compute="float32")


@pytest.fixture(scope="module")
def folder_of(write_drawn, tmp_path_factory):
    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("towers") / name
        write_drawn(folder, (TOWERS | MODELS)[name])
        return folder

    return make


@pytest.mark.parametrize("name", TOWERS)
def test_features_are_those_of_transformers(name, folder_of, image_row, draw_noise):
    """Of two images in one block."""
    folder = TowerFolder(folder_of(name))
    # What a LLaVA reads of a CLIP is the output of the layer before the last.
    num_layers = folder.tower.num_layers - (name == "clip")
    tower = dataclasses.replace(folder.tower, num_layers=num_layers, patches=64)
    config = MultimodalConfig.of(
        DecoderConfig(num_layers=1, embed_dim=8, num_heads=1, vocab_size=8), tower, image_token=0
    )
    row = image_row(config, 80, [([0, 0], [draw_noise(*size) for size in SIZES])], blocks=1)
    model = Model(config, FLOAT32)
    weights = folder.weights(config)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
    loaded = weights.restore_params(select(form, weights.names.__contains__), model.layer_rows)
    fresh = model.init(0, only=named(model.abstract_weights).keys() - weights.names)

    @jax.jit
    def run(weights, batch):
        module = model.module(weights)
        vision = module.vision
        (last_BPC,) = module.vision_layers.outputs(vision.embed(batch), vision.layer_inputs(batch), ())
        return vision.final_norm(last_BPC) if tower.final_norm else last_BPC

    found = np.asarray(run(merge(loaded, fresh), {key: row[key] for key in ("patches", "patch_places")}))[0]
    places = row["patch_places"][0]
    for number in range(len(SIZES)):
        want = RECORDED[f"{name}/image {number}"]
        is_patch = (places[:, 0] == number + 1) & (places[:, 1] >= 0)
        np.testing.assert_allclose(found[is_patch], want, rtol=0, atol=TOLERANCE * want.std())


def config_of(text: Path, tower: Path, num_layers: int = 2, **checkpoint) -> Config:
    folder = TowerFolder(tower)
    vision = dataclasses.replace(folder.tower, num_layers=num_layers, project_dim=8)
    return Config(
        model=MultimodalConfig.of(Folder(text).model, vision, image_token=2),
        data=DataConfig(source="mock", tokenizer="null:300"),
        training=TrainingConfig(sequence_length=16),
        checkpoint=CheckpointConfig(start_from=str(text), start_towers_from=(str(tower),), **checkpoint),
    )


@pytest.mark.parametrize("name", ["clip", "llava"])
def test_a_run_starts_with_the_text_of_one_folder_and_the_tower_of_another(
    name, folder_of, llama_folder, make_test_mesh
):
    config = config_of(llama_folder, folder_of(name), start_fresh=("vision.project.*",))
    start_from.check(config)
    mesh = make_test_mesh(fsdp=2)
    program = config.make_program(mesh)
    found = named(start_from.weights(config, program))
    assert found.keys() == named(program.model.abstract_weights).keys()
    tower, text = (safetensors.numpy.load_file(path / "model.safetensors") for path in (folder_of(name), llama_folder))
    prefix = "vision_model." if name == "clip" else "vision_tower."
    patch = tower[f"{prefix}embeddings.patch_embedding.weight"]
    np.testing.assert_array_equal(found["vision.patch"][0], patch.transpose(2, 3, 1, 0))
    for layer in range(2):
        second = tower[f"{prefix}encoder.layers.{layer}.mlp.fc2.weight"]
        np.testing.assert_array_equal(found["vision_layers.dense.mlp.down"][layer], second.T)
    np.testing.assert_array_equal(found["embedding"][:300], text["model.embed_tokens.weight"])
    assert np.std(found["vision.project.up"]) > 0


def test_what_does_not_fit_is_named(folder_of, llama_folder):
    clip = folder_of("clip")
    with pytest.raises(ValueError, match=r"vision\.project\.\w+ is missing there.*checkpoint.start_fresh"):
        start_from.check(config_of(llama_folder, clip))
    fresh = dict(start_fresh=("vision.project.*",))
    with pytest.raises(ValueError, match=r"start_towers_from=.*encoder\.layers\.3\..* is missing, but model.vision"):
        start_from.check(config_of(llama_folder, clip, num_layers=4, **fresh))
    config = config_of(llama_folder, clip, **fresh)
    wide = dataclasses.replace(config.model, vision=dataclasses.replace(config.model.vision, mlp_dim=32))
    with pytest.raises(ValueError, match=r"mlp\.fc1\.weight is \[24, 16\], but model.vision implies \[32, 16\]"):
        start_from.check(dataclasses.replace(config, model=wide))
    decoder = dataclasses.replace(config, model=Folder(llama_folder).model)
    with pytest.raises(ValueError, match="model.kind=decoder reads no images"):
        start_from.check(decoder)
    with pytest.raises(ValueError, match="model_type=llama has no tower; supported are clip_vision_model"):
        TowerFolder(llama_folder)


def test_the_folders_are_those_of_the_first_start(folder_of, llama_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder_of("clip").parent)
    config = config_of(llama_folder, Path("clip"), start_fresh=("vision.project.*",))
    config = start_from.pinned(dataclasses.replace(config, run_dir=str(tmp_path)))
    assert config.checkpoint.start_towers_from == (str(folder_of("clip")),)
    (tmp_path / "config.json").write_text(config.to_json())
    again = dataclasses.replace(config, checkpoint=CheckpointConfig())
    assert start_from.pinned(again).checkpoint == config.checkpoint


def test_a_vision_config_with_every_attribute_of_version_4_is_read(folder_of, tmp_path):
    """As OpenAI published its CLIPs."""
    shutil.copytree(folder_of("clip"), tmp_path / "clip")
    file = tmp_path / "clip" / "config.json"
    options = json.loads(file.read_text())
    options["vision_config"] |= dict(
        add_cross_attention=False, chunk_size_feed_forward=0, diversity_penalty=0.0, dropout=0.0, is_decoder=False,
        initializer_factor=1.0, label2id={"LABEL_0": 0}, length_penalty=1.0, max_length=20, num_beams=1,
        output_scores=False, projection_dim=768, pruned_heads={}, sep_token_id=None, tie_encoder_decoder=False,
        tie_word_embeddings=True, top_k=50, torchscript=False, transformers_version="4.16.0.dev0", typical_p=1.0,
        use_bfloat16=False,
    )  # fmt: skip
    file.write_text(json.dumps(options))
    assert TowerFolder(tmp_path / "clip").tower == TowerFolder(folder_of("clip")).tower
    options["vision_config"]["new_option"] = 1
    file.write_text(json.dumps(options))
    with pytest.raises(ValueError, match="new_option=1 is unknown in clip_vision_model"):
        TowerFolder(tmp_path / "clip")


def test_what_the_folder_has_otherwise_is_said(folder_of):
    folder = TowerFolder(folder_of("siglip2"))
    tower = dataclasses.replace(folder.tower, activation="relu", num_layers=1, project_dim=8)
    model = MultimodalConfig.of(DecoderConfig(), tower, image_token=0)
    assert folder.differences(model) == ["model.vision.activation: gelu_tanh -> relu"]
