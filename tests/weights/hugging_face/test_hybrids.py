"""Mamba-2 and Nemotron-H of transformers: the same logits, and the same files on the way back.

python tests/weights/hugging_face/test_hybrids.py records the logits that the quick test reads. Needs pip install -e
'.[parity]', as the slow test does.
"""

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from megajax.layers.feed_forward.moe import MoeConfig
from megajax.weights.hugging_face.export import Export
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.mapping import family_for, family_of
from megajax.weights.hugging_face.tensor_files import TensorFiles
from megajax.weights.hugging_face.translate import read_options, write_options

FILE = Path(__file__).parents[2] / "oracles" / "hugging_face_hybrids.npz"
TOLERANCE = 1e-5  # both sides are float32 and add up in another order
LENGTH = 20
IDS = np.random.default_rng(0).integers(0, 50, (2, LENGTH)).astype(np.int32)
# Of the models of the quick test the others have parts only.
LARGEST = ("mamba2", "nemotron_h, experts")
COMMON = dict(vocab_size=50, hidden_size=32, n_groups=2, chunk_size=8, bos_token_id=1, eos_token_id=2, pad_token_id=0)
NEMOTRON = dict(
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48, mamba_num_heads=6,
    mamba_head_dim=8, ssm_state_size=16, time_step_min=0.5, max_position_embeddings=64,
)  # fmt: skip
MODELS = {
    "mamba2": ("Mamba2", COMMON | dict(num_hidden_layers=2, num_heads=8, head_dim=8, state_size=16)),
    "mamba2, one group": ("Mamba2", COMMON | dict(
        num_hidden_layers=2, num_heads=4, head_dim=16, state_size=8, n_groups=1, tie_word_embeddings=True,
        use_conv_bias=False, time_step_limit=(0.3, 0.8),
    )),
    "nemotron_h": ("NemotronH", COMMON | NEMOTRON | dict(
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    )),
    "nemotron_h, experts": ("NemotronH", COMMON | NEMOTRON | dict(
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"], n_routed_experts=8,
        num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5, moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
    )),
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded():
    saved = np.load(FILE)
    return json.loads(str(saved["families"])), saved


@pytest.mark.parametrize(
    "name", [name if name in LARGEST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_logits_are_those_of_transformers_and_the_files_come_back(
    name, recorded, write_drawn, our_logits, assert_same_files, tmp_path
):
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
    with pytest.raises(ValueError, match="hybrid_override_pattern: G is not supported"):
        read_options(family_of(theirs), theirs | {"hybrid_override_pattern": "MG*"})


def test_experts_in_one_tensor_are_read(recorded, write_drawn, tmp_path):
    """As transformers has them in memory."""
    entry = recorded[0]["nemotron_h, experts"]
    write_drawn(tmp_path / "separate", entry)
    files = TensorFiles(tmp_path / "separate")
    fused = {name: files[name] for name in files.forms if ".experts." not in name}
    for layer, matrix in itertools.product((1, 4), ("up_proj", "down_proj")):
        experts = f"backbone.layers.{layer}.mixer.experts."
        fused[f"{experts}{matrix}"] = np.stack([files[f"{experts}{expert}.{matrix}.weight"] for expert in range(8)])
    fused = {name.replace("backbone.", "model."): tensor for name, tensor in fused.items()}
    (tmp_path / "fused").mkdir()
    (tmp_path / "fused" / "config.json").write_text(json.dumps(entry["options"]))
    safetensors.numpy.save_file(fused, tmp_path / "fused" / "model.safetensors")
    separate, together = Folder(tmp_path / "separate"), Folder(tmp_path / "fused")
    numbers = np.array([1, 4])
    for name in ("layers.moe.mixer.up", "layers.moe.mixer.down"):
        shape = separate.map.shapes[name]
        found, wanted = (
            folder.reader.read(name, numbers, (slice(None),) * len(shape), np.dtype(np.float32))
            for folder in (together, separate)
        )
        assert found.shape == shape
        np.testing.assert_array_equal(found, wanted)


def test_biases_of_routers_stay_float32(recorded, write_drawn, tmp_path):
    write_drawn(tmp_path / "theirs", recorded[0]["nemotron_h, experts"])
    import_folder(tmp_path / "theirs", tmp_path / "run")
    forms = Export(tmp_path / "run", None, "bfloat16", None).forms
    kept = {name for name, form in forms.items() if form.dtype == np.float32}
    assert kept == {f"backbone.layers.{layer}.mixer.gate.e_score_correction_bias" for layer in (1, 4)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"moe_latent_size": 16}, "moe_latent_size=16 is not supported; supported is None"),
        ({"n_shared_experts": 2}, "n_shared_experts=2 is not supported; supported is 1"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"topk_group": 1}, "num_experts_per_tok=4 is not twice topk_group=1"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported with num_experts_per_tok=4"),
        (
            {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
            "norm_topk_prob=True is not supported with num_experts_per_tok=1; supported is False",
        ),
    ],
)
def test_experts_that_we_do_not_have_are_refused(changed, message, recorded):
    theirs = recorded[0]["nemotron_h, experts"]["options"]
    with pytest.raises(ValueError, match=message):
        read_options(family_of(theirs), theirs | changed)
    dense = theirs | changed | {"layers_block_type": ["mamba", "mlp"]}
    assert read_options(family_of(theirs), dense).moe == MoeConfig()


def test_what_a_folder_cannot_express_is_refused(recorded):
    options = recorded[0]["nemotron_h"]["options"]
    model = read_options(family_of(options), options)
    with pytest.raises(ValueError, match="Mamba2ForCausalLM does not have .*model.pattern=M-.M-"):
        family_for(model, "Mamba2ForCausalLM")
    with pytest.raises(ValueError, match="NemotronHForCausalLM does not have model.mamba.dt_max=0.5"):
        family_for(dataclasses.replace(model, mamba=dataclasses.replace(model.mamba, dt_max=0.5)))
    with pytest.raises(ValueError, match="NemotronHForCausalLM does not have model.pattern=MG"):
        family_for(dataclasses.replace(model, num_layers=2, pattern="MG"), "NemotronHForCausalLM")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shared_dim": None}, "model.moe.shared_dim=None"),
        ({"shared_gate": True}, "model.moe.shared_gate=True"),
        ({"router": {"score": "sqrt_softplus"}}, "model.moe.router.score=sqrt_softplus"),
        ({"router": {"bias_update_rate": None}}, "model.moe.router.bias_update_rate=None"),
        ({"router": {"groups": (2, 1)}}, "num_experts_per_tok=4 is not twice topk_group=1"),
    ],
)
def test_experts_that_a_folder_cannot_express_are_refused(changed, message, recorded):
    options = recorded[0]["nemotron_h, experts"]["options"]
    model = read_options(family_of(options), options)
    router = dataclasses.replace(model.moe.router, **changed.get("router", {}))
    moe = dataclasses.replace(model.moe, **changed | {"router": router})
    with pytest.raises(ValueError, match=f"NemotronHForCausalLM does not have {message}"):
        family_for(dataclasses.replace(model, moe=moe), "NemotronHForCausalLM")


def test_losses_of_the_router_and_its_capacity_are_not_part_of_a_folder(recorded):
    options = recorded[0]["nemotron_h, experts"]["options"]
    model = read_options(family_of(options), options)
    router = dataclasses.replace(model.moe.router, aux_loss=0.01, capacity_factor=1.5, bias_update_rate=0.1)
    trained = dataclasses.replace(model, moe=dataclasses.replace(model.moe, router=router))
    assert read_options(family_for(trained), write_options(family_for(trained), trained)) == model


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
def test_logits_equal_transformers_there_and_back(name, our_logits, assert_same_files, transformers, tmp_path):
    model = their_model(name)
    model.save_pretrained(tmp_path / "theirs")
    wanted = their_logits(model)
    found = our_logits(Folder(tmp_path / "theirs"), IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * wanted.std())
    assert_same_files(tmp_path / "theirs", tmp_path)
    model.save_pretrained(tmp_path / "in_memory", save_original_format=False)
    np.testing.assert_array_equal(our_logits(Folder(tmp_path / "in_memory"), IDS), found)
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
