"""T5 of transformers: the same logits, and the same files on the way back.

python tests/weights/hugging_face/test_encoder_decoders.py records the logits that the quick test reads. Needs
pip install -e '.[parity]', as the slow test does.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.mapping import family_of
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.hugging_face.translate import read_options, write_options

FILE = Path(__file__).parents[2] / "oracles" / "hugging_face_t5.npz"
TOLERANCE = 1e-5  # both sides are float32 and add up in another order
SOURCE, TARGET = 14, 9
TINY = dict(
    vocab_size=50, d_model=32, d_kv=12, d_ff=40, num_layers=2, num_decoder_layers=1, num_heads=4,
    relative_attention_num_buckets=8, relative_attention_max_distance=11, decoder_start_token_id=0,
)  # fmt: skip
VERSIONS = {
    "v1.0": TINY,
    "v1.1": TINY | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
}


def batch() -> dict[str, np.ndarray]:
    """Two texts, the second with padding at its end."""
    rng = np.random.default_rng(0)
    is_text = (np.arange(SOURCE) < np.array([[SOURCE], [SOURCE - 5]])).astype(np.int32)
    return {
        "encoder_tokens": rng.integers(2, 50, (2, SOURCE)).astype(np.int32) * is_text,
        "encoder_segment_ids": is_text,
        "tokens": rng.integers(2, 50, (2, TARGET)).astype(np.int32),
    }


def our_logits(path: Path) -> np.ndarray:
    folder = Folder(path)
    model = Model(folder.model, PrecisionConfig(compute="float32"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
    weights = folder.restore_params(form, model.layer_rows)

    @jax.jit
    def run(weights, batch):
        module = model.module(weights)
        return module.token_logits(module.hidden(batch)[0])

    return np.asarray(run(weights, batch()))[..., : folder.model.vocab_size]


def assert_same_logits(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * wanted.std())


@pytest.fixture(scope="module")
def recorded():
    saved = np.load(FILE)
    return json.loads(str(saved["versions"])), saved


@pytest.mark.parametrize("version", VERSIONS)
def test_logits_are_those_of_transformers_and_the_files_come_back(
    version, recorded, write_drawn, assert_same_files, tmp_path
):
    entries, logits = recorded
    write_drawn(tmp_path / "theirs", entries[version])
    assert_same_logits(our_logits(tmp_path / "theirs"), logits[version])
    assert_same_files(tmp_path / "theirs", tmp_path)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    theirs = entries[version]["options"]
    different = {name for name in written if name in theirs and theirs[name] != written[name]}
    assert different <= {"dtype", "tie_word_embeddings"}  # which transformers 5 loses; the next key says it


def test_an_output_layer_that_transformers_cannot_say_is_refused(recorded):
    entries, _ = recorded
    family = family_of(entries["v1.1"]["options"])
    model = family.form.in_files(read_options(family, entries["v1.1"]["options"]), entries["v1.1"]["tensors"])
    assert not model.tied_embeddings and model.logit_multiplier == 1.0
    with pytest.raises(ValueError, match="T5ForConditionalGeneration does not have model.logit_multiplier=0.5 with"):
        write_options(family, dataclasses.replace(model, logit_multiplier=0.5))


# ----------------------------------------------------------------------------- transformers itself


def their_model(version: str):
    import transformers

    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**VERSIONS[version]))
    if version == "v1.1":
        import torch

        # The class ties its output layer; the files of v1.1 have one of their own.
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
        model.config.tie_word_embeddings = False
    return model.float().eval()


def their_logits(model) -> np.ndarray:
    import torch

    names = {"encoder_tokens": "input_ids", "encoder_segment_ids": "attention_mask", "tokens": "decoder_input_ids"}
    with torch.no_grad():
        given = {names[name]: torch.tensor(array, dtype=torch.long) for name, array in batch().items()}
        return model(**given).logits.numpy()


@pytest.mark.parametrize("saved_as", [False, True])
def test_an_output_layer_that_the_files_lack_is_tied_and_not_scaled(
    saved_as, recorded, write_drawn, assert_same_files, transformers, tmp_path
):
    """As transformers 5 computes tie_word_embeddings=False, and as it saves this."""
    entry = recorded[0]["v1.1"]
    tensors = {name: value for name, value in entry["tensors"].items() if name != "lm_head.weight"}
    options = entry["options"] | dict(tie_word_embeddings=saved_as, scale_decoder_outputs=False)
    write_drawn(tmp_path / "theirs", dict(options=options, tensors=tensors))
    load = transformers.T5ForConditionalGeneration.from_pretrained
    wanted = their_logits(load(tmp_path / "theirs").eval())
    assert_same_logits(our_logits(tmp_path / "theirs"), wanted)
    assert_same_files(tmp_path / "theirs", tmp_path)
    np.testing.assert_array_equal(their_logits(load(tmp_path / "back").eval()), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_logits_equal_transformers_there_and_back(version, assert_same_files, transformers, tmp_path):
    model = their_model(version)
    model.save_pretrained(tmp_path / "theirs")
    wanted = their_logits(transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "theirs").eval())
    np.testing.assert_array_equal(wanted, their_logits(model))
    assert_same_logits(our_logits(tmp_path / "theirs"), wanted)
    assert_same_files(tmp_path / "theirs", tmp_path)
    again, info = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    np.testing.assert_array_equal(their_logits(again.eval()), wanted)


def record() -> None:
    from transformers import T5ForConditionalGeneration

    from conftest import write_described

    arrays, entries = {}, {}
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            their_model(version).save_pretrained(folder)
            forms = TensorFiles(Path(folder)).forms
            tensors = {name: [list(form.shape), float("layer_norm" in name)] for name, form in forms.items()}
            options = json.loads((Path(folder) / "config.json").read_text())
            entries[version] = {"options": options, "tensors": tensors}
            write_described(Path(folder), entries[version])
            arrays[version] = their_logits(T5ForConditionalGeneration.from_pretrained(folder).eval())
    np.savez_compressed(FILE, versions=json.dumps(entries), **arrays)


if __name__ == "__main__":
    record()
