"""Folders come in and go out bit for bit, start runs and generate; what cannot be read whole is refused by name."""

import dataclasses
import json
import math
import pickle
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import train  # isort: skip

import infer
from megajax.checkpoint import piecewise
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.checkpoint.layout import stack_of
from megajax.config import Config
from megajax.convert.hugging_face import main
from megajax.data.tokenizers.chat_template import load_chat_template
from megajax.data.tokenizers.load import load_saved_tokenizer
from megajax.inference.engine import Engine
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import with_shardings
from megajax.models.model import Model
from megajax.parallel.schedule import make_stages
from megajax.parameters import name_of
from megajax.weights.hugging_face.export import export_run, family_of_run
from megajax.weights.hugging_face.folder import Folder, is_folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.mapping import family_of
from megajax.weights.hugging_face.translate import read_options
from megajax.weights.parameter_reader import check_finite
from megajax.weights.sources import open_source


def tensors_of(folder) -> dict[str, np.ndarray]:
    return {
        name: array
        for file in folder.glob("*.safetensors")
        for name, array in safetensors.numpy.load_file(file).items()
    }


@pytest.fixture(scope="module")
def bf16_folder(llama_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bf16") / "llama"
    shutil.copytree(llama_folder, folder)
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors_of(llama_folder).items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def run_dir(bf16_folder, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("imported") / "run"
    import_folder(bf16_folder, run_dir)
    return run_dir


def test_a_folder_comes_back_bit_for_bit(bf16_folder, run_dir, tmp_path):
    out = tmp_path / "out"
    export_run(run_dir, out, shard_bytes=20_000)
    before = tensors_of(bf16_folder)
    after = tensors_of(out)
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert after[name].dtype == array.dtype == ml_dtypes.bfloat16
        assert after[name].tobytes() == array.tobytes(), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys() and len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in before.values())
    for file in out.glob("*.safetensors"):
        with safetensors.safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (bf16_folder / name).read_bytes()
    written, given = (json.loads((folder / "config.json").read_text()) for folder in (out, bf16_folder))
    assert {name: written[name] for name in given} == given
    assert is_folder(out) and not is_folder(run_dir) and Folder(out).model == Folder(bf16_folder).model


def test_an_imported_run_is_verified_as_any_other(run_dir, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(run_dir, broken, symlinks=True)
    for file in (broken / "checkpoints" / "0" / "params").rglob("d/*"):
        content = bytearray(file.read_bytes())
        for part in range(1, 8):
            content[len(content) * part // 8] ^= 16
        file.write_bytes(content)
    with pytest.raises(ValueError, match="checkpoints/0 .*use another step"):
        export_run(broken, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


PEAKS = """
import sys, threading
from pathlib import Path
from megajax.checkpoint import piecewise
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.import_folder import import_folder

piecewise.PIECE_BYTES = 2**20
peak = 0

def watch():
    global peak
    while True:
        (line,) = [line for line in open("/proc/self/status") if line.startswith("RssAnon")]
        peak = max(peak, int(line.split()[1]))
        pause.wait(0.002)

pause = threading.Event()
threading.Thread(target=watch, daemon=True).start()
for name in ("shallow", "deep"):
    import_folder(name, f"run_{name}")
    export_run(f"run_{name}", f"back_{name}")
    print(peak * 1024)
"""


def test_memory_does_not_grow_with_the_number_of_layers(llama_folder, write_drawn, tmp_path):
    sizes = dict(hidden_size=256, intermediate_size=2048)
    nbytes = {}
    for name, layers in (("shallow", 2), ("deep", 32)):
        options = json.loads((llama_folder / "config.json").read_text()) | sizes | dict(num_hidden_layers=layers)
        family = family_of(options)
        forms = {tensor.name: tensor.shape for tensor in family.map_of(read_options(family, options)).tensors}
        write_drawn(tmp_path / name, dict(options=options, tensors={name: [form, 0] for name, form in forms.items()}))
        nbytes[name] = sum(4 * math.prod(form) for form in forms.values())
    command = [sys.executable, "-c", PEAKS]
    shallow, deep = map(int, subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE).stdout.split())
    assert deep - shallow < nbytes["deep"] / 3  # the largest stacked array alone is 0.27 of it
    before, after = tensors_of(tmp_path / "deep"), tensors_of(tmp_path / "back_deep")
    assert before.keys() == after.keys() and all(np.array_equal(after[name], before[name]) for name in before)
    shutil.rmtree(tmp_path)


def test_runs_of_any_layout_are_read_piece_by_piece(run_dir, bf16_folder, tmp_path, monkeypatch):
    """Of a pipeline with a row of padding, written whole; the arrays have one chunk, larger than a piece."""
    rows = np.array([[1, -1], [0, -1]])
    config = Config.load(run_dir)
    model = Model(config.model)
    folder = pickle.loads(pickle.dumps(Folder(bf16_folder)))  # as another process gets it

    def stored(path, leaf):
        name = name_of(path)
        stack = stack_of(name, model.layer_rows)
        index = (slice(None),) * (leaf.ndim + (stack is not None))
        return jax.numpy.asarray(folder.reader.read(name, None if stack is None else rows, index, leaf.dtype))

    params = jax.tree_util.tree_map_with_path(stored, model.abstract_weights)
    new = tmp_path / "run"
    meta = dict(step=3, config=dataclasses.asdict(config), layer_rows={"layers.dense": rows.tolist()})
    with Checkpointer(new, CheckpointConfig(keep=0)) as checkpointer:
        checkpointer.write(3, {"params": params}, meta)
    (new / "config.json").write_text(config.to_json())
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 3000)
    export_run(new, tmp_path / "out", dtype="bfloat16")
    before, after = tensors_of(bf16_folder), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)


@pytest.fixture
def mixture(write_drawn, tmp_path):
    """A folder with a dense layer and one with experts."""
    recorded = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")
    entry = json.loads(str(recorded["families"]))["qwen2_moe"]
    entry["options"] |= dict(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    entry["tensors"] = {name: form for name, form in entry["tensors"].items() if ".layers.2." not in name}
    write_drawn(tmp_path / "theirs", entry)
    return tmp_path / "theirs"


def test_mixtures_come_back_bit_for_bit(mixture, tmp_path, monkeypatch):
    monkeypatch.setattr(piecewise, "PIECE_BYTES", 20_000)  # six of eight experts
    import_folder(mixture, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    before, after = tensors_of(mixture), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys() and any("experts.7" in name for name in before)
    assert all(after[name].tobytes() == before[name].tobytes() for name in before)


@pytest.mark.slow
def test_a_mixture_trains_and_is_exported(mixture, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([
        f"--config=hugging_face:{mixture}", "--run_dir=run", "--data.source=mock", "--training.steps=1",
        "--training.global_batch_size=8", "--training.sequence_length=16", "--optimizer.warmup_steps=0",
        "--training.eval_every_steps=0", "--training.log_every_steps=1",
    ])  # fmt: skip
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert math.isfinite(line["loss"]) and line["router_max_load"] >= 1
    export_run("run", "tuned")
    before, after = tensors_of(mixture), tensors_of(tmp_path / "tuned")
    assert after.keys() == before.keys()
    assert all(np.any(after[name] != before[name]) for name in before if "experts" in name)


def test_rows_that_pad_the_vocabulary_are_zeros(bf16_folder):
    folder = Folder(bf16_folder)
    whole = (slice(None), slice(None))
    embedding = folder.reader.read("embedding", None, whole, np.float32)
    head = folder.reader.read("head", None, whole, np.float32)
    assert embedding.shape == (384, 32) and head.shape == (32, 384)
    for table in (embedding, head.T):
        assert np.all(table[300:] == 0) and np.all(np.any(table[:300] != 0, axis=1))


@pytest.mark.parametrize("sizes", [dict(fsdp=2, tensor=2), dict(pipeline=2, virtual_stages=1, data=1)])
def test_each_device_reads_its_part(sizes, llama_folder, make_test_mesh):
    folder = Folder(llama_folder)
    config = MeshConfig(**sizes)
    mesh = make_test_mesh(**sizes)
    model = Model(folder.model, stages=make_stages(config, folder.model.num_layers))
    found = folder.restore_params(with_shardings(model.abstract_weights, model.shardings(mesh)), model.layer_rows)
    tensors = tensors_of(llama_folder)
    for layer in range(2):
        gate = np.asarray(found["layers"]["dense"]["mlp"]["gate"]).reshape(2, 32, 48)[layer]
        np.testing.assert_array_equal(gate, tensors[f"model.layers.{layer}.mlp.gate_proj.weight"].T)
        key = np.asarray(found["layers"]["dense"]["attention"]["key"]).reshape(2, 32, 2, 8)[layer]
        np.testing.assert_array_equal(key[:, 1, 3], tensors[f"model.layers.{layer}.self_attn.k_proj.weight"][11])
    assert jax.tree.map(lambda a: a.sharding, found) == model.shardings(mesh)


def changed(folder, tmp_path, tensors=None, options=None):
    new = tmp_path / "changed"
    shutil.copytree(folder, new)
    if tensors is not None:
        safetensors.numpy.save_file(tensors, new / "model.safetensors", {"format": "pt"})
    if options is not None:
        before = json.loads((folder / "config.json").read_text())
        (new / "config.json").write_text(json.dumps(before | options))
    return new


def test_what_does_not_fit_is_named_and_nothing_is_written(llama_folder, tmp_path, capsys):
    tensors = tensors_of(llama_folder)
    up = "model.layers.1.mlp.up_proj.weight"

    def refused(match, **changes):
        folder = changed(llama_folder, tmp_path, **changes)
        with pytest.raises(ValueError, match=match):
            import_folder(folder, tmp_path / "run")
        shutil.rmtree(folder)

    refused(f"tensor {up} .48, 32. is missing", tensors={n: a for n, a in tensors.items() if n != up})
    refused(f"tensor {up} is .47, 32., but config.json implies .48, 32.", tensors=tensors | {up: tensors[up][:47]})
    refused("1 tensors are unknown in LlamaForCausalLM: model.layers.1.self_attn.q_norm.weight",
            tensors=tensors | {"model.layers.1.self_attn.q_norm.weight": np.ones(8, np.float32)})  # fmt: skip
    refused("lm_head.weight differs from the embedding", options=dict(tie_word_embeddings=True))
    refused("config.json: rope_type=mrope", options=dict(rope_scaling=dict(rope_type="mrope")))
    refused(f"{up} is int32, which only", tensors=tensors | {up: tensors[up].astype(np.int32)})

    folder = changed(llama_folder, tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-8])
    with pytest.raises(ValueError, match="model.safetensors is damaged"):
        Folder(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="only pytorch_model.bin.*save_pretrained"):
        Folder(folder)
    shutil.rmtree(folder)
    (tmp_path / "there").mkdir()
    with pytest.raises(SystemExit, match="2"):
        main(["import", f"--from={llama_folder}", f"--run_dir={tmp_path / 'there'}"])
    assert capsys.readouterr().err == f"error: run_dir={tmp_path / 'there'} exists; use another, or remove it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


NESTED = "[" * 100_000 + "]" * 100_000
NAMED = "index.json names .*, which must be the name of a file in"
# The message, and what a stranger may have written: {file: its contents, or keys of its object}.
MALFORMED = [
    ("config.json is not the config.json of", {"config.json": f'{{"model_type": "llama", "a": {NESTED}}}'}),
    ("num_hidden_layers=1000000000 does not fit the files", {"config.json": dict(num_hidden_layers=10**9)}),
    ("num_hidden_layers=0 does not fit", {"config.json": dict(num_hidden_layers=0)}),
    ("num_hidden_layers='2' must be a whole number", {"config.json": dict(num_hidden_layers="2")}),
    ("hidden_size=1.5 must be a whole number", {"config.json": dict(hidden_size=1.5)}),
    ("model.num_heads=-4 must be a whole number .int32., at least 1$", {"config.json": dict(num_attention_heads=-4)}),
    ("tie_word_embeddings=1 must be true or false", {"config.json": dict(tie_word_embeddings=1)}),
    ("hidden_act=.'silu'. must be a name", {"config.json": dict(hidden_act=["silu"])}),
    ("architectures=5 must be a list", {"config.json": dict(architectures=5)}),
    ("rope_scaling=x is not an object", {"config.json": dict(rope_scaling="x")}),
    ("rope_parameters=5 is not an object", {"config.json": dict(rope_parameters=5)}),
    ("rope_type=linear needs factor in rope_scaling", {"config.json": dict(rope_scaling=dict(type="linear"))}),
    ("model.rope.base=inf must be a finite", {"config.json": dict(rope_theta=math.inf)}),
    ("quantization_config=fp8 is not an object", {"config.json": dict(quantization_config="fp8")}),
    (
        "model.rope.factor=.* must be a finite number",
        {"config.json": dict(rope_scaling=dict(type="linear", factor={}))},
    ),
    ("has a value of another kind than its key needs", {"config.json": dict(rope_scaling=dict(type=[]))}),
    ("index.json cannot be read .RecursionError", {"model.safetensors.index.json": f'{{"weight_map": {NESTED}}}'}),
    (NAMED, {"model.safetensors.index.json": '{"weight_map": {"a": "../other/model.safetensors"}}'}),
    (NAMED, {"model.safetensors.index.json": '{"weight_map": {"a": "/etc/hostname"}}'}),
    (NAMED, {"model.safetensors.index.json": '{"weight_map": {"a": 5}}'}),
    (NAMED, {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "a" * 5000}})}),
    ("index.json cannot be read .TypeError", {"model.safetensors.index.json": '{"weight_map": {"a": ["b"]}}'}),
    ("safetensors is damaged .*`-1`", {"model.safetensors": dict(shape=[-1, 32])}),
    ("safetensors is damaged .*overflow", {"model.safetensors": dict(shape=[2**62, 32])}),
    ("safetensors is damaged .*offset", {"model.safetensors": dict(data_offsets=[0, 2**62])}),
    ("safetensors is damaged .*header too small", {"model.safetensors": ""}),
    ("tokenizer.model has no tokens", {"tokenizer.json": None, "tokenizer.model": ""}),
    ("tokenizer_config.json is not JSON", {"tokenizer_config.json": NESTED}),
]


def change_file(path: Path, contents: str | dict | None) -> None:
    """contents: of the file, or keys of its object; of a file of tensors those of the first tensor."""
    if contents is None:
        path.unlink()
    elif isinstance(contents, str):
        path.write_text(contents)
    elif path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()) | contents))
    else:
        before = path.read_bytes()
        end = 8 + int.from_bytes(before[:8], "little")
        header = json.loads(before[8:end])
        next(entry for name, entry in header.items() if name != "__metadata__").update(contents)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + before[end:])


@pytest.mark.parametrize("message, files", MALFORMED)
def test_malformed_files_are_refused_in_one_line_and_at_once(message, files, small_llama_folder, tmp_path):
    folder = tmp_path / "folder"
    shutil.copytree(small_llama_folder, folder)
    for name, contents in files.items():
        change_file(folder / name, contents)
    begin = time.process_time()
    with pytest.raises(ValueError, match=message) as refused:
        import_folder(folder, tmp_path / "run")
    assert "\n" not in str(refused.value) and time.process_time() - begin < 5
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(value, dtype, small_llama_folder, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = {name: array.astype(dtype) for name, array in tensors_of(small_llama_folder).items()}
    check_finite(name, tensors[name])
    tensors[name][3, 5] = value
    folder = changed(small_llama_folder, tmp_path, tensors)
    with pytest.raises(ValueError, match=f"tensor {name} in .* has values that are not finite in {np.dtype(dtype)}"):
        import_folder(folder, tmp_path / "run")
    with pytest.raises(ValueError, match=f"tensor {name} in"):
        Engine.from_run(folder)
    assert not (tmp_path / "run").exists()


def test_names_without_the_base_model_tied_heads_and_old_buffers_are_read(llama_folder, tmp_path):
    tensors = {name.removeprefix("model."): array for name, array in tensors_of(llama_folder).items()}
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    folder = Folder(changed(llama_folder, tmp_path, tensors, dict(tie_word_embeddings=True)))
    assert folder.model.tied_embeddings
    found = folder.reader.read("final_norm.scale", None, (slice(None),), np.float32)
    np.testing.assert_array_equal(found, tensors["norm.weight"])


def test_layers_of_different_dtypes_are_stacked_in_float32(llama_folder, tmp_path):
    dtypes = dict(zip(("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
                      (np.float16, ml_dtypes.bfloat16), strict=True))  # fmt: skip
    tensors = tensors_of(llama_folder)
    mixed = {name: tensors[name].astype(dtype) for name, dtype in dtypes.items()}
    assert Folder(changed(llama_folder, tmp_path, tensors | mixed)).reader.dtypes["layers.dense.mlp.up"] == np.float32


def test_a_missing_package_is_named(llama_folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"needs the package safetensors; pip install 'megajax\[hugging_face\]'"):
        Folder(llama_folder)


def test_dry_runs_say_what_maps_to_what(llama_folder, run_dir, tmp_path, capsys):
    main(["import", f"--from={llama_folder}", "--dry_run"])
    line = "model.layers.0.mlp.gate_proj.weight x 2 float32[48, 32]  <->  layers.dense.mlp.gate"
    assert line in capsys.readouterr().out
    main(["export", f"--run={run_dir}", "--dry_run", "--dtype=float32", "--architecture=MistralForCausalLM"])
    out = capsys.readouterr().out
    assert line in out and out.startswith("MistralForCausalLM: 21 tensors, 138,880 bytes")


def test_a_model_that_no_family_has_is_refused(run_dir, tmp_path):
    broken = tmp_path / "run"
    shutil.copytree(run_dir, broken, symlinks=True)
    config = json.loads((broken / "config.json").read_text())
    shutil.rmtree(broken / "checkpoints" / "0" / "meta")
    config["model"]["attention_sinks"] = True
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError,
        match="no supported architecture has all .*; LlamaForCausalLM does not have model.attention_sinks=True",
    ):
        family_of_run(broken, Config.load(broken), None)
    with pytest.raises(ValueError, match="architecture=Other is not supported"):
        export_run(run_dir, tmp_path / "out", architecture="Other")


def test_another_architecture_than_that_of_the_weights_is_logged(run_dir, caplog):
    config = Config.load(run_dir)
    changed = dataclasses.replace(config, model=dataclasses.replace(config.model, qk_norm=True))
    assert family_of_run(run_dir, changed, None).architecture == "Qwen3ForCausalLM"
    assert "not exported as LlamaForCausalLM, from which the weights came: LlamaForCausalLM does not" in caplog.text


def test_a_folder_generates_as_the_run_that_was_imported_from_it(llama_folder, run_dir, capsys):
    arguments = ["--prompt=hello", "--max_tokens=4", "--temperature=0"]
    infer.main(["generate", f"--run={llama_folder}", *arguments])
    first = capsys.readouterr().out
    infer.main(["generate", f"--run={run_dir}", *arguments])
    assert capsys.readouterr().out == first and first.startswith("hello")
    with pytest.raises(ValueError, match="step=3: .*Hugging Face folder, which has no steps"):
        infer.main(["generate", f"--run={llama_folder}", "--step=3", *arguments])


def test_prompts_begin_as_the_tokenizer_of_the_folder_says(llama_folder, run_dir, tmp_path):
    folder = changed(llama_folder, tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    special = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, special)
    tokenizer.save(str(folder / "tokenizer.json"))
    engine = Engine.from_run(folder)
    text = engine.tokenizer.encode("hello")
    assert text[0] != 0 and engine.prompts.encode("hello") == [0, *text]
    assert open_source(run_dir).is_foreign


def test_generation_ends_at_each_token_that_the_folder_names(llama_folder, tmp_path):
    greedy = Sampling(max_tokens=4, temperature=0.0)
    (tokens,) = Engine.from_run(llama_folder).generate_tokens([[70, 71]], greedy)
    folder = changed(llama_folder, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[1, tokens[2]])))
    (ended,) = Engine.from_run(folder).generate_tokens([[70, 71]], greedy)
    assert len(tokens) == 4 and ended == tokens[: tokens.index(tokens[2])]


def test_a_folder_without_a_tokenizer_that_can_be_read_says_so(llama_folder, tmp_path, caplog):
    folder = changed(llama_folder, tmp_path)
    (folder / "tokenizer.json").unlink()
    for name in ("vocab.json", "merges.txt"):
        (folder / name).touch()
    assert Folder(folder).tokenizer_spec == "null:300"
    assert "has vocab.json and merges.txt and neither tokenizer.json nor tokenizer.model" in caplog.text
    assert "save_pretrained" in caplog.text


def test_the_vocabulary_and_merges_of_gpt2_become_a_tokenizer(llama_folder, tmp_path):
    folder = changed(llama_folder, tmp_path)
    (folder / "tokenizer.json").unlink()
    original = tokenizers.Tokenizer.from_file(str(llama_folder / "tokenizer.json"))
    original.model.save(str(folder))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    added = original.get_vocab_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<|tool|>": added}))
    assert Folder(folder).tokenizer_spec == "null:300"  # of another class
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | dict(tokenizer_class="GPT2Tokenizer")))
    found = Folder(folder).tokenizer()
    for text in ("hello hello", "Grüße\n 12 <|x|>", " a  b"):
        assert found.encode(text) == original.encode(text).ids and found.decode(found.encode(text)) == text
    assert found.eod_id == 1 and found.special_tokens.keys() == {"<s>", "</s>"} and found.token_id("<|tool|>") == added
    import_folder(folder, tmp_path / "run")
    again = load_saved_tokenizer(tmp_path / "run", "bytes")
    assert again.path.endswith("tokenizer.json") and again.identity == found.identity


def test_fine_tuning_on_conversations_from_a_folder_and_back(llama_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello hello"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"prompt": "hello", "completion": "hello hello"}) + "\n") * 40)
    arguments = [
        f"--config=hugging_face:{llama_folder}", "--run_dir=run", "--data.paths=chat.jsonl",
        "--training.steps=3", "--training.sequence_length=32", "--optimizer.warmup_steps=0",
        "--optimizer.learning_rate=1e-3", "--training.log_every_steps=1", "--training.eval_every_steps=0",
    ]  # fmt: skip
    train.main(arguments)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3] and lines[2]["loss"] < lines[0]["loss"]

    export_run(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    before, after = tensors_of(llama_folder), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert 0 < np.abs(after[name].astype(np.float32) - array).max() < 0.05, name
    options = json.loads((tmp_path / "out" / "config.json").read_text())
    assert options["max_position_embeddings"] == 64 and options["dtype"] == "bfloat16"
    assert options["eos_token_id"] == 1 and options["architectures"] == ["LlamaForCausalLM"]
    tokenizer = load_saved_tokenizer(tmp_path / "out", "bytes")
    assert load_chat_template(tokenizer).render(talk) == "<s><|user|>hello<|assistant|>hello hello</s>"
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (
        llama_folder / "generation_config.json"
    ).read_bytes()

    with pytest.raises(ValueError, match="start_from=.*another model .*layers.dense.mlp.down is"):
        train.main([*arguments, "--run_dir=other", "--model.mlp_dim=64"])
    assert not (tmp_path / "other" / "config.json").exists()
