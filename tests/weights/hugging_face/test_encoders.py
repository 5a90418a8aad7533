"""BERT and RoBERTa of transformers: the same outputs, and the same files on the way back.

python tests/weights/hugging_face/test_encoders.py records the outputs that the quick test reads. Needs pip install -e
'.[parity]', as the slow test does.
"""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy

from megajax.models.bert import BertConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.mapping import family_for, family_of
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.hugging_face.translate import read_options, write_options

FILE = Path(__file__).parents[2] / "oracles" / "hugging_face_encoders.npz"
TOLERANCE = 1e-5  # both sides are float32 and add up in another order
LENGTH = 12
TINY = dict(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=20,
)  # fmt: skip
ROBERTA = TINY | dict(type_vocab_size=1, pad_token_id=1, layer_norm_eps=1e-5)
THREE = dict(num_labels=3)
ARCHITECTURES = {
    "BertForPreTraining": TINY,
    "BertForMaskedLM": TINY | dict(tie_word_embeddings=False, hidden_act="gelu_new"),
    "BertForSequenceClassification": TINY | THREE,
    "BertForTokenClassification": TINY | THREE,
    "BertModel": TINY,
    "RobertaForMaskedLM": ROBERTA,
    "RobertaForSequenceClassification": ROBERTA | THREE,
    "RobertaForTokenClassification": ROBERTA | THREE,
    "RobertaModel": ROBERTA,
}
QUICK = ("BertForPreTraining", "BertForTokenClassification", "RobertaForSequenceClassification")


def batch_of(num_token_types: int) -> dict[str, np.ndarray]:
    """Two texts, the second with padding at its end."""
    tokens = np.random.default_rng(0).integers(4, 50, (2, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    lengths = np.array([[LENGTH], [LENGTH - 4]])
    types = ((positions > 4) & (num_token_types > 1)).astype(np.int32)
    is_text = positions < lengths
    return {
        "tokens": np.where(is_text, tokens, 1).astype(np.int32),
        "positions": positions,
        "segment_ids": is_text.astype(np.int32),
        "token_types": types,
    }


def our_outputs(path: Path) -> tuple[np.ndarray, ...]:
    """(outputs of every token, or of the text if the head is for texts; those of the other head, if there is one)."""
    folder = Folder(path)
    config = folder.model
    model = Model(config, PrecisionConfig(compute="float32"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    form = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one), model.abstract_weights)
    weights = folder.restore_params(form, model.layer_rows)

    @jax.jit
    def run(weights, batch):
        module = model.module(weights)
        h, _ = module.hidden(batch)
        if config.classifies:
            return (module.class_logits(h, batch),)
        if config.head == "none":
            return h, module.pooled(h, batch)
        pairs = (module.pair_logits(h, batch),) if config.next_sentence else ()
        return module.token_logits(h)[..., : config.vocab_size], *pairs

    return tuple(map(np.asarray, run(weights, batch_of(config.num_token_types))))


def assert_same(found, wanted):
    """Outputs of padding differ: there it attends to the text."""
    is_text = batch_of(2)["segment_ids"] == 1
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs.ndim == 3:
            ours, theirs = ours[is_text], theirs[is_text]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE * theirs.std())


COPIES = ("cls.predictions.decoder.bias", "lm_head.decoder.bias")


@pytest.fixture(scope="module")
def recorded():
    saved = np.load(FILE)
    entries = json.loads(str(saved["families"]))
    return entries, {name: [saved[f"{name}/{i}"] for i in range(entries[name]["outputs"])] for name in entries}


@pytest.mark.parametrize("architecture", QUICK)
def test_outputs_are_those_of_transformers_and_the_files_come_back(
    architecture, recorded, write_drawn, assert_same_files, tmp_path
):
    entries, outputs = recorded
    write_drawn(tmp_path / "theirs", entries[architecture])
    assert_same(our_outputs(tmp_path / "theirs"), outputs[architecture])
    assert_same_files(tmp_path / "theirs", tmp_path, COPIES)


def test_the_bias_that_an_untied_output_layer_does_not_use_is_named(recorded, write_drawn, tmp_path, caplog):
    entries, outputs = recorded
    write_drawn(tmp_path / "theirs", entries["BertForMaskedLM"])
    assert_same(our_outputs(tmp_path / "theirs"), outputs["BertForMaskedLM"])
    assert (
        "cls.predictions.bias is not used by BertForMaskedLM, which takes cls.predictions.decoder.bias" in caplog.text
    )
    import_folder(tmp_path / "theirs", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    files, again = TensorFiles(tmp_path / "theirs"), TensorFiles(tmp_path / "back")
    assert files.forms == again.forms
    for name in files.forms:
        used = "cls.predictions.decoder.bias" if name == "cls.predictions.bias" else name
        assert again[name].tobytes() == files[used].tobytes(), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_options_come_back(architecture, recorded):
    theirs = recorded[0][architecture]["options"]
    family = family_of(theirs)
    assert family.architecture == architecture
    model = read_options(family, theirs)
    written = json.loads(json.dumps(write_options(family, model)))
    assert read_options(family, written) == model
    different = {name for name in written if name in theirs and theirs[name] != written[name]}
    assert not different
    assert model.head_activation is None  # as in runs of when there was no such field, so that they resume


def test_another_activation_of_the_head_is_refused():
    assert write_options(family_for(BertConfig()), BertConfig(head_activation="gelu"))["hidden_act"] == "gelu"
    with pytest.raises(ValueError, match="does not have model.head_activation=gelu_tanh"):
        write_options(family_for(BertConfig()), BertConfig(head_activation="gelu_tanh"))


def test_the_first_names_of_norms_and_unused_heads_are_read(recorded, write_drawn, tmp_path):
    """As in the files of bert-base-uncased, which say BertForMaskedLM and have the next-sentence head."""
    entry = recorded[0]["BertForPreTraining"]
    write_drawn(tmp_path / "new", entry)
    tensors = safetensors.numpy.load_file(tmp_path / "new" / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): array
        for name, array in tensors.items()
    }
    old["bert.embeddings.position_ids"] = np.arange(20)[None]
    (tmp_path / "old").mkdir()
    options = entry["options"] | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "old" / "config.json").write_text(json.dumps(options))
    safetensors.numpy.save_file(old, tmp_path / "old" / "model.safetensors")
    (logits,) = our_outputs(tmp_path / "old")
    np.testing.assert_array_equal(logits, our_outputs(tmp_path / "new")[0])


# ----------------------------------------------------------------------------- transformers itself


def their_model(architecture: str):
    import transformers

    kind = transformers.RobertaConfig if architecture.startswith("Roberta") else transformers.BertConfig
    model = getattr(transformers, architecture)(kind(**ARCHITECTURES[architecture], attn_implementation="eager"))
    return model.float().eval()


def their_outputs(model) -> list[np.ndarray]:
    import torch

    batch = batch_of(model.config.type_vocab_size)
    given = {
        "input_ids": batch["tokens"], "attention_mask": batch["segment_ids"], "token_type_ids": batch["token_types"],
    }  # fmt: skip
    with torch.no_grad():
        found = model(**{name: torch.tensor(array, dtype=torch.long) for name, array in given.items()})
    names = ("prediction_logits", "seq_relationship_logits", "logits", "last_hidden_state", "pooler_output")
    return [found[name].numpy() for name in names if found.get(name) is not None]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_outputs_equal_transformers_there_and_back(architecture, assert_same_files, transformers, tmp_path):
    model = their_model(architecture)
    model.save_pretrained(tmp_path / "theirs")
    wanted = their_outputs(model)
    assert_same(our_outputs(tmp_path / "theirs"), wanted)
    assert_same_files(tmp_path / "theirs", tmp_path, COPIES)
    again, info = getattr(transformers, architecture).from_pretrained(
        tmp_path / "back", attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    for found, want in zip(their_outputs(again.eval()), wanted, strict=True):
        np.testing.assert_array_equal(found, want)


def record() -> None:
    from conftest import write_described

    arrays, entries = {}, {}
    for architecture in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            model = their_model(architecture)
            model.save_pretrained(folder)
            files = TensorFiles(Path(folder))
            tensors = {
                name: [
                    list(form.shape),
                    1.0 if name.endswith("LayerNorm.weight") or name.endswith("norm.weight") else 0.0,
                ]
                for name, form in files.forms.items()
            }
            options = json.loads((Path(folder) / "config.json").read_text())
            entries[architecture] = {"options": options, "tensors": tensors}
            write_described(Path(folder), entries[architecture])
            outputs = their_outputs(type(model).from_pretrained(folder, attn_implementation="eager").eval())
        entries[architecture]["outputs"] = len(outputs)
        arrays |= {f"{architecture}/{i}": array for i, array in enumerate(outputs)}
    np.savez_compressed(FILE, families=json.dumps(entries), **arrays)


if __name__ == "__main__":
    record()
