"""The encoder of a Whisper: it computes what transformers does, of clips packed in one block, and a model starts so."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.media.rows import MediaInputs
from megajax.models.audio_tower import AudioConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.models.multimodal import MultimodalConfig
from megajax.parameters import merge, named, select
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig
from megajax.weights import start_from
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.tower import TowerFolder

SIZES = dict(d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=24, num_mel_bins=80)
TOKENS = dict(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
LENGTHS = (37, 12)  # mel frames: an odd number, and the encoder's most positions are 19
TEXT = DecoderConfig(num_layers=1, embed_dim=8, num_heads=1, vocab_size=8)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """(folder, model of transformers)."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    options = dict(decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, max_source_positions=19)
    model = transformers.WhisperModel(transformers.WhisperConfig(**SIZES, **TOKENS, **options))
    with torch.no_grad():
        for name, parameter in model.encoder.named_parameters():
            if name != "embed_positions.weight":
                parameter.normal_(0.1, 0.3)
    folder = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(folder)
    return folder, model.eval()


def model_of(audio: AudioConfig, **vision) -> MultimodalConfig:
    return dataclasses.replace(MultimodalConfig.of(TEXT, audio=audio, audio_token=7), **vision)


def loaded(folder: TowerFolder, config: MultimodalConfig) -> tuple[Model, dict]:
    model = Model(config, PrecisionConfig(compute="float32"))
    weights = folder.weights(config)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
    found = weights.restore_params(select(form, weights.names.__contains__), model.layer_rows)
    return model, merge(found, model.init(0, only=named(model.abstract_weights).keys() - weights.names))


def test_clips_packed_in_a_block_are_encoded_as_each_alone_by_transformers(whisper):
    """Transformers takes clips of one length only, and no mask: each is given to an encoder of its own length."""
    import torch

    path, theirs = whisper
    folder = TowerFolder(path)
    audio = dataclasses.replace(folder.tower, frames=30, merge=2)
    assert (audio.num_layers, audio.positions, audio.activation) == (2, 19, "gelu")
    config = model_of(audio)
    rng = np.random.default_rng(0)
    views = [rng.normal(0, 1, (length, 80)).astype(np.float32) for length in LENGTHS]
    sizes = np.array([(160 * length, 0) for length in LENGTHS], np.int32)
    inputs = config.media[0]
    assert isinstance(inputs, MediaInputs)
    blocks = inputs.blocks_of(sizes, lambda number: [views[number]])
    model, weights = loaded(folder, config)

    @jax.jit
    def run(weights, batch):
        module = model.module(weights)
        (last,) = module.audio_layers.outputs(module.audio.embed(batch), module.audio.layer_inputs(batch), ())
        return module.audio.last(last, batch)

    arrays = {name: blocks[name] for name in ("frames", "frame_places")}
    found = np.asarray(run(weights, arrays))[0]
    number = blocks["frame_places"][0, :, 0]
    for at, view in enumerate(views, 1):
        count = -(-len(view) // 2)
        encoder = theirs.encoder
        with torch.no_grad():
            x = torch.nn.functional.gelu(encoder.conv1(torch.from_numpy(view.T)[None]))
            x = torch.nn.functional.gelu(encoder.conv2(x)).mT + encoder.embed_positions.weight[:count]
            for layer in encoder.layers:
                x = layer(x, None)
            want = encoder.layer_norm(x)[0].numpy()
        assert (number == at).sum() == count
        np.testing.assert_allclose(found[number == at], want, rtol=0, atol=1e-5 * want.std())
    assert not found[number == 0].any()


def test_a_clip_of_full_length_is_encoded_as_by_the_whole_class(whisper):
    import torch

    path, theirs = whisper
    folder = TowerFolder(path)
    config = model_of(dataclasses.replace(folder.tower, frames=20, merge=1))
    view = np.random.default_rng(1).normal(0, 1, (38, 80)).astype(np.float32)
    blocks = config.media[0].blocks_of(np.array([(38 * 160, 0)]), lambda _: [view])
    model, weights = loaded(folder, config)
    module = model.module(weights)
    (last,) = module.audio_layers.outputs(module.audio.embed(blocks), module.audio.layer_inputs(blocks), ())
    found = np.asarray(module.audio.last(last, blocks))[0, :19]
    with torch.no_grad():
        want = theirs.encoder(torch.from_numpy(view.T)[None]).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * want.std())


def config_of(text, towers, audio: AudioConfig) -> Config:
    return Config(
        model=MultimodalConfig.of(Folder(text).model, audio=audio, audio_token=2),
        data=DataConfig(source="mock", tokenizer="null:300"),
        training=TrainingConfig(sequence_length=16),
        checkpoint=CheckpointConfig(
            start_from=str(text), start_towers_from=tuple(map(str, towers)), start_fresh=("audio.project.*",)
        ),
    )


def test_a_run_starts_with_the_encoder_of_a_whisper(whisper, llama_folder, make_test_mesh):
    path, _ = whisper
    audio = dataclasses.replace(TowerFolder(path).tower, frames=20, project_dim=8)
    config = config_of(llama_folder, [path], audio)
    start_from.check(config)
    program = config.make_program(make_test_mesh(fsdp=2))
    found = named(start_from.weights(config, program))
    assert found.keys() == named(program.model.abstract_weights).keys()
    theirs = safetensors.numpy.load_file(path / "model.safetensors")
    np.testing.assert_array_equal(found["audio.second"], theirs["encoder.conv2.weight"].transpose(2, 1, 0))
    for layer in range(2):
        key = theirs[f"encoder.layers.{layer}.self_attn.k_proj.weight"]
        np.testing.assert_array_equal(np.reshape(found["audio_layers.dense.attention.key"][layer], (16, 16)), key.T)
    assert "audio_layers.dense.attention.key_bias" not in found


def test_a_model_with_sound_is_not_exported():
    with pytest.raises(ValueError, match=r"model\.audio\.num_layers=2: other frameworks have no class"):
        MultimodalConfig.of(TEXT, audio=AudioConfig(num_layers=2), audio_token=7).check_exports()


def test_what_does_not_fit_is_named(whisper, llama_folder, tmp_path):
    path, _ = whisper
    audio = dataclasses.replace(TowerFolder(path).tower, frames=20)
    with pytest.raises(ValueError, match="has two encoders of one kind"):
        start_from.check(config_of(llama_folder, [path, path], audio))
    with pytest.raises(ValueError, match="model.audio.num_layers=0 reads no clips; use --model.audio.num_layers=2"):
        start_from.check(config_of(llama_folder, [path], AudioConfig()))
    with pytest.raises(ValueError, match=r"conv1\.weight is \[16, 80, 3\], but model.audio implies \[16, 128, 3\]"):
        start_from.check(config_of(llama_folder, [path], dataclasses.replace(audio, mels=128)))
    shutil.copytree(path, tmp_path / "other")
    tensors = safetensors.numpy.load_file(path / "model.safetensors")
    tensors["encoder.embed_positions.weight"] += 0.1
    safetensors.numpy.save_file(tensors, tmp_path / "other" / "model.safetensors")
    with pytest.raises(ValueError, match="has other positions than the sinusoids of Whisper"):
        start_from.check(config_of(llama_folder, [tmp_path / "other"], audio))
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"new_option": 1}))
    with pytest.raises(ValueError, match="new_option=1 is unknown in whisper"):
        TowerFolder(tmp_path / "other")
