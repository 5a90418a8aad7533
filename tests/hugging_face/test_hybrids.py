"""Mamba-2 and Nemotron-H of transformers: the same logits, and the same files on the way back.

python tests/hugging_face/test_hybrids.py records the logits that the quick test reads. Needs pip install -e
'.[parity]', as the slow test does.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from megajax.convert.hugging_face import export_run, import_folder
from megajax.hugging_face.folder import Folder
from megajax.hugging_face.mapping import family_for, family_of, read_options, write_options
from megajax.hugging_face.tensor_files import TensorFiles

FILE = Path(__file__).parent.parent / "oracles" / "hugging_face_hybrids.npz"
TOLERANCE = 1e-5  # both sides are float32 and add up in another order
LENGTH = 20
IDS = np.random.default_rng(0).integers(0, 50, (2, LENGTH)).astype(np.int32)
COMMON = dict(vocab_size=50, hidden_size=32, n_groups=2, chunk_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "mamba2": ("Mamba2", COMMON | dict(num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16)),
    "mamba2, one group": ("Mamba2", COMMON | dict(
        num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1, tie_word_embeddings=True,
        use_conv_bias=False, time_step_limit=(0.3, 0.8),
    )),
    "nemotron_h": ("NemotronH", COMMON | dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48, mamba_num_heads=6,
        mamba_head_dim=8, ssm_state_size=16, time_step_min=0.5, max_position_embeddings=64,
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    saved = np.load(FILE)
    return json.loads(str(saved["families"])), saved


def assert_same_files(folder: Path, tmp_path: Path) -> None:
    import_folder(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    files, again = TensorFiles(folder), TensorFiles(tmp_path / "back")
    assert set(again.forms) == set(files.forms)
    for name in again.forms:
        assert files[name].tobytes() == again[name].tobytes(), name


@pytest.mark.parametrize("name", [*(name for name in MODELS if name != "mamba2, one group"),
                                  pytest.param("mamba2, one group", marks=pytest.mark.slow)])  # fmt: skip
def test_logits_are_those_of_transformers_and_the_files_come_back(name, recorded, write_drawn, our_logits, tmp_path):
    entries, logits = recorded
    write_drawn(tmp_path / "theirs", entries[name])
    np.testing.assert_allclose(
        our_logits(Folder(tmp_path / "theirs"), IDS), logits[name], rtol=0, atol=TOLERANCE * logits[name].std()
    )
    assert_same_files(tmp_path / "theirs", tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_options_come_back(name, recorded):
    theirs = recorded[0][name]["options"]
    family = family_of(theirs)
    model = read_options(family, theirs)
    written = json.loads(json.dumps(write_options(family, model)))
    assert family_for(model) is family and read_options(family, written) == model
    assert not {key for key in written if key in theirs and theirs[key] != written[key]}


def test_older_folders_are_read(recorded):
    theirs = dict(recorded[0]["nemotron_h"]["options"])
    model = read_options(family_of(theirs), theirs)
    assert model.pattern == "M-*M-" and model.mamba.dt_min == 0.5
    del theirs["layers_block_type"]
    assert read_options(family_of(theirs), theirs | {"hybrid_override_pattern": "M-*M-"}) == model
    options = recorded[0]["mamba2"]["options"]
    assert options["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    family = family_of(options)
    old = options | {"time_step_limit": [0.0, float("inf")]}
    assert read_options(family, old) == read_options(family, options)
    with pytest.raises(ValueError, match="hybrid_override_pattern: E is not supported"):
        read_options(family_of(theirs), theirs | {"hybrid_override_pattern": "ME*"})


def test_what_a_folder_cannot_express_is_refused(recorded):
    options = recorded[0]["nemotron_h"]["options"]
    model = read_options(family_of(options), options)
    with pytest.raises(ValueError, match="Mamba2ForCausalLM does not have .*model.pattern=M-.M-"):
        family_for(model, "Mamba2ForCausalLM")
    with pytest.raises(ValueError, match="NemotronHForCausalLM does not have model.mamba.dt_max=0.5"):
        family_for(dataclasses.replace(model, mamba=dataclasses.replace(model.mamba, dt_max=0.5)))


# ----------------------------------------------------------------------------- transformers itself


def their_model(name: str):
    import transformers

    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**options)
    return getattr(transformers, f"{family}ForCausalLM")(config).float().eval()


def their_logits(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.tensor(IDS, dtype=torch.long), use_cache=False).logits.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_there_and_back(name, our_logits, tmp_path):
    pytest.importorskip("transformers")
    model = their_model(name)
    model.save_pretrained(tmp_path / "theirs")
    wanted = their_logits(model)
    found = our_logits(Folder(tmp_path / "theirs"), IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * wanted.std())
    assert_same_files(tmp_path / "theirs", tmp_path)
    again, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    np.testing.assert_array_equal(their_logits(again.float().eval()), wanted)


def record() -> None:
    from conftest import write_described

    arrays, entries = {}, {}
    for name in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            model = their_model(name)
            model.save_pretrained(folder)
            files = TensorFiles(Path(folder))
            tensors = {
                tensor: [list(form.shape), 1.0 if tensor.endswith(("norm.weight", "norm_f.weight")) else 0.0]
                for tensor, form in files.forms.items()
            }
            entries[name] = {"options": json.loads((Path(folder) / "config.json").read_text()), "tensors": tensors}
            write_described(Path(folder), entries[name])
            arrays[name] = their_logits(type(model).from_pretrained(folder).float().eval())
    np.savez_compressed(FILE, families=json.dumps(entries), **arrays)


if __name__ == "__main__":
    record()
