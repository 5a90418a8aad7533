"""Quantised folders: written by hand here, and in slow tests by and for compressed-tensors and transformers."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from megajax.convert.hugging_face import main
from megajax.inference.load import open_model
from megajax.models.model import Model
from megajax.parameters import name_of
from megajax.precision import PrecisionConfig
from megajax.quantization.weights import QuantizedWeight, WeightFormat, is_quantized
from megajax.weights.hugging_face.export import export_run
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.quantized import Quantization, quantized_rows
from megajax.weights.hugging_face.tensor_files import ShardWriter, TensorFiles, TensorForm

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = {np.dtype(np.int8): 127.0, FLOAT8: 448.0}


def of_type(name, strategy, **others):
    return dict(num_bits=8, type=name, strategy=strategy) | dict(symmetric=True) | others


def compressed(name, weights, inputs, **others):
    group = dict(targets=["Linear"], weights=of_type(name, **weights), input_activations=inputs)
    form = {"int": "int-quantized", "float": "float-quantized"}[name]
    return dict(quant_method="compressed-tensors", format=form, config_groups={"group_0": group}, **others)


TOKEN = dict(strategy="token", dynamic=True)
CHANNEL = dict(strategy="channel")
CONFIGS = {
    "float8 dynamic": compressed("float", CHANNEL, of_type("float", **TOKEN), ignore=["lm_head"]),
    "float8 static": compressed("float", dict(strategy="tensor"), of_type("float", "tensor", dynamic=False)),
    "float8 weights only": compressed("float", CHANNEL, None),
    "float8 blocks": compressed("float", dict(strategy="block", block_structure=[16, 12]), None),
    "int8 dynamic": compressed("int", CHANNEL, of_type("int", **TOKEN)),
    "int8 groups": compressed("int", dict(strategy="group", group_size=8), None),
    "fp8 blocks": dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[20, 16]),
    "fp8": dict(quant_method="fp8", activation_scheme="static"),
}
FORMATS = {
    "float8 dynamic": ("float8", "dynamic"), "float8 static": ("float8", "static"), "fp8": ("float8", "static"),
    "float8 weights only": ("float8", "unchanged"), "int8 dynamic": ("int8", "dynamic"),
}  # fmt: skip


def block_of(config: dict, shape: tuple[int, int]) -> tuple[int, int]:
    if config["quant_method"] == "fp8":
        return tuple(config.get("weight_block_size", shape))
    weights = config["config_groups"]["group_0"]["weights"]
    blocks = dict(tensor=shape, channel=(1, shape[1]))
    return blocks.get(weights["strategy"]) or tuple(weights.get("block_structure", (1, weights.get("group_size"))))


def quantized_by_hand(matrix: np.ndarray, block: tuple[int, int], dtype: np.dtype):
    """-> (levels, scales, what they stand for), with a loop over blocks."""
    levels = np.zeros(matrix.shape, dtype)
    meant = np.zeros(matrix.shape, np.float32)
    scales = np.zeros([-(-size // step) for size, step in zip(matrix.shape, block, strict=True)], np.float32)
    for place in np.ndindex(*scales.shape):
        part = tuple(slice(p * step, (p + 1) * step) for p, step in zip(place, block, strict=True))
        scales[place] = np.abs(matrix[part]).max() / LARGEST[dtype]
        scaled = matrix[part] / scales[place]
        levels[part] = (np.rint(scaled) if dtype == np.int8 else scaled).astype(dtype)
        meant[part] = levels[part].astype(np.float32) * scales[place]
    return levels, scales, meant


def write_tensors(folder, tensors: dict[str, np.ndarray]) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    writer = ShardWriter(folder, {name: TensorForm(a.shape, a.dtype) for name, a in tensors.items()})
    for name, array in tensors.items():
        writer[name][...] = array


@pytest.fixture(scope="module", params=CONFIGS)
def quantized_folder(request, llama_folder, tmp_path_factory):
    """-> (name, folder, {name of a matrix: what its levels stand for})."""
    config = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("quantized") / "llama"
    shutil.copytree(llama_folder, folder)
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | dict(quantization_config=config)))
    dtype = np.dtype(np.int8) if "int" in request.param else FLOAT8
    found = {}
    meant = {}
    files = TensorFiles(llama_folder)
    for name in files.forms:
        array = np.array(files[name])
        found[name] = array
        if name.endswith("proj.weight"):
            block = block_of(config, array.shape)
            found[name], scales, meant[name] = quantized_by_hand(array, block, dtype)
            is_inverse = config["quant_method"] == "fp8" and "weight_block_size" in config
            one = () if request.param == "fp8" else (1,)  # both are published
            found[name + ("_scale_inv" if is_inverse else "_scale")] = (
                scales.reshape(one) if scales.size == 1 else scales
            )
            if request.param in ("float8 static", "fp8"):
                found[name.removesuffix("weight") + "input_scale"] = np.full(one, 0.02, np.float32)
    write_tensors(folder, found)
    return request.param, folder, meant


def test_matrices_are_dequantised_for_training(quantized_folder):
    _, folder, meant = quantized_folder
    opened = Folder(folder)
    assert opened.forms["model.layers.0.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16
    for name, array in meant.items():
        tensor = next(tensor for tensor in opened.map.tensors if tensor.name == name)
        (part,) = tensor.parts
        read = opened.reader.read(part.name, np.array(part.at), (slice(None),) * (1 + len(part.shape)), np.float32)[0]
        np.testing.assert_array_equal(read, array.T.reshape(part.shape))
    assert opened.reader.dtypes["head"] == np.float32


def test_the_engine_takes_its_own_formats_over(quantized_folder):
    name, folder, meant = quantized_folder
    opened = open_model(folder, compute="float32")
    assert opened.source.weight_format == FORMATS.get(name)
    params = opened.restore()
    up = params["layers"]["dense"]["mlp"]["up"][1]
    expected = meant["model.layers.1.mlp.up_proj.weight"].T
    if name not in FORMATS:
        np.testing.assert_array_equal(up, expected)
        return
    assert up.inputs == FORMATS[name][1] and (up.inputs != "static" or up.input_scale == np.float32(0.02))
    np.testing.assert_array_equal(up.matrix(), expected)
    leaves = jax.tree.leaves(params, is_leaf=is_quantized)
    assert sum(map(is_quantized, leaves)) == 14


def test_explicit_dtypes_replace_that_of_the_folder(quantized_folder):
    name, folder, meant = quantized_folder
    if name not in ("int8 dynamic", "fp8 blocks"):
        return
    expected = meant["model.layers.1.mlp.up_proj.weight"].T
    rounded = open_model(folder, compute="float32", weights="float8").restore()["layers"]["dense"]["mlp"]["up"][1]
    again = jax.jit(lambda w: QuantizedWeight.of(w, 1, WeightFormat("float8", "by_rows")))(expected)
    jax.tree.map(np.testing.assert_array_equal, rounded, again)
    plain = open_model(folder, compute="float32", weights="compute").restore()["layers"]["dense"]["mlp"]["up"]
    np.testing.assert_array_equal(plain[1], expected)


def test_levels_of_an_explicit_dtype_stay_with_the_inputs_of_this_dtype(quantized_folder):
    name, folder, meant = quantized_folder
    if name not in FORMATS:
        return
    inputs = "by_rows" if FORMATS[name][0] == "float8" else "unchanged"
    up = open_model(folder, compute="float32", weights=FORMATS[name][0]).restore()["layers"]["dense"]["mlp"]["up"][1]
    assert (up.inputs, up.input_scale) == (inputs, None)
    np.testing.assert_array_equal(up.matrix(), meant["model.layers.1.mlp.up_proj.weight"].T)


def refused(folder, llama_folder, tensors, **config):
    shutil.copytree(llama_folder, folder, dirs_exist_ok=True)
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | dict(quantization_config=config)))
    files = TensorFiles(llama_folder)
    write_tensors(folder, {name: np.array(files[name]) for name in files.forms} | tensors)
    with pytest.raises(ValueError) as error:
        Folder(folder)
    return str(error.value)


def test_what_is_not_supported_is_refused_by_name(llama_folder, tmp_path):
    def problem(tensors=None, **config):
        return refused(tmp_path / "folder", llama_folder, tensors or {}, **config)

    assert "quant_method=hqq is not supported" in problem(quant_method="hqq")
    config = CONFIGS["int8 dynamic"]
    assert "format=marlin-24 is not supported" in problem(**config | dict(format="marlin-24"))
    assert "transform_config is not supported" in problem(**config | dict(transform_config={"R1": 1}))
    asymmetric = compressed("int", dict(strategy="channel") | dict(symmetric=False), None)
    assert "zero point (symmetric=false)" in problem(**asymmetric)
    name = "model.layers.0.mlp.up_proj.weight"
    levels = np.zeros((48, 32), np.int8)
    assert f"{name} is int8, and there is no {name}_scale" in problem({name: levels}, **config)
    wrong = {name: levels, f"{name}_scale": np.ones((7, 1), np.float32)}
    assert f"{name}_scale is [7, 1] and {name} [48, 32], which is no scale" in problem(wrong, **config)
    assert f"{name} is int8, but config.json has no quantization_config" in problem({name: levels})
    assert f"{name} is int32, which only matrices in 4 bits have" in problem({name: levels.astype(np.int32)})


# ----------------------------------------------------------------------------- writing

RECORDED = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")
ENTRIES = json.loads(str(RECORDED["families"]))
# Families whose tensors hold several matrices of ours, one after the other and by head, and one with experts.
FUSED = {
    "phi3": ["lm_head"],
    "falcon": ["lm_head"],
    "qwen2_moe": [
        *(rf"re:model\.layers\.\d+\.mlp\.experts\.\d+\.{name}_proj$" for name in ("gate", "up", "down")),
        r"re:model\.layers\.\d+\.mlp\.gate$",
        r"re:model\.layers\.\d+\.mlp\.shared_expert_gate$",
        "lm_head",
    ],
}


@pytest.mark.parametrize(
    "name, dtype, inputs",
    [
        ("phi3", "int8", "dynamic"),
        ("falcon", "float8", "static"),
        pytest.param("qwen2_moe", "float8", "dynamic", marks=pytest.mark.slow),
    ],
)
def test_quantised_matrices_are_those_of_the_engine(name, dtype, inputs, write_drawn, tmp_path):
    write_drawn(tmp_path / "folder", ENTRIES[name])
    before = import_folder(tmp_path / "folder", tmp_path / "run")
    model = Model(before.model)
    records = jax.tree_util.tree_leaves_with_path(model.records)
    names = [name_of(path) for path, record in records if record.is_quantizable]
    ranges = {name: np.arange(1, 9, dtype=np.float32) for name in names}  # by layer
    format = WeightFormat(dtype, inputs)
    export_run(tmp_path / "run", tmp_path / "out", quantization=Quantization(format, ranges))
    after = Folder(tmp_path / "out")
    assert after.weight_format == format
    assert sorted(after.options["quantization_config"]["ignore"]) == sorted(FUSED[name])
    by_name = {name_of(path): record for path, record in records}
    for parameter in names:
        layers = before.map.layers_of(parameter)
        whole = (slice(None),) * (1 + len(before.map.shapes[parameter][1:]))
        original = before.reader.read(parameter, layers, whole, np.float32)
        read = after.reader.read(parameter, layers, whole, np.float32)
        for row, layer in enumerate(layers.tolist()):
            levels = after.levels(parameter, layer)
            again = quantized_rows(_rows(original[row], by_name[parameter].num_inputs), levels.values.dtype)
            np.testing.assert_array_equal(levels.values.reshape(again[0].shape), again[0])
            np.testing.assert_array_equal(levels.scale.reshape(-1, 1), again[1])
            np.testing.assert_array_equal(levels.matrix(), read[row])
            if inputs == "static":
                assert levels.input_scale == np.float32((row + 1) / 448)
    loaded = jax.tree.leaves(open_model(tmp_path / "out", compute="float32").restore(), is_leaf=is_quantized)
    assert sum(map(is_quantized, loaded)) == sum(before.map.shapes[parameter][0] for parameter in names)
    outside = before.reader.read("final_norm.scale", None, (slice(None),), np.float32)
    np.testing.assert_array_equal(after.reader.read("final_norm.scale", None, (slice(None),), np.float32), outside)


def _rows(matrix: np.ndarray, num_inputs: int) -> np.ndarray:
    """[*K, *N] -> [N, K]."""
    return matrix.reshape(int(np.prod(matrix.shape[:num_inputs])), -1).T


def test_levels_and_scales_that_are_not_finite_are_refused(quantized_folder, tmp_path):
    name, folder, _ = quantized_folder
    if name not in FORMATS:
        return
    files = TensorFiles(folder)
    tensors = {tensor: np.array(files[tensor]) for tensor in files.forms}
    scale = "model.layers.1.mlp.up_proj.weight_scale"
    tensors[scale] = np.full_like(tensors[scale], np.inf)
    levels = scale.removesuffix("_scale")
    if tensors[levels].dtype == FLOAT8:
        tensors[levels][0, 0] = np.nan
    shutil.copytree(folder, tmp_path / "folder")
    write_tensors(tmp_path / "folder", tensors)
    named = levels if tensors[levels].dtype == FLOAT8 else scale
    with pytest.raises(ValueError, match=f"tensor {named} has values that are not finite"):
        open_model(tmp_path / "folder", compute="float32").restore()
    with pytest.raises(ValueError, match=f"tensor {levels} in .* has values that are not finite"):
        import_folder(tmp_path / "folder", tmp_path / "run")


def test_factors_change_what_is_written(llama_folder, tmp_path):
    before = import_folder(llama_folder, tmp_path / "run")
    factors = {"layers.dense.mlp.up": np.arange(1, 3, dtype=np.float32).reshape(2, 1, 1)}
    quantization = Quantization(WeightFormat("int8", "dynamic"), factors=factors)
    export_run(tmp_path / "run", tmp_path / "out", quantization=quantization)
    after = Folder(tmp_path / "out")
    for name, factor in (("up", 2), ("gate", 1)):
        parameter = f"layers.dense.mlp.{name}"
        original = before.reader.read(parameter, np.array([1]), (slice(None),) * 3, np.float32)[0]
        scale = np.abs(factor * original).max(0) / np.float32(127)
        np.testing.assert_array_equal(after.levels(parameter, 1).scale[0], scale)


def test_the_command_quantises_or_says_why_not(write_drawn, llama_folder, tmp_path, capsys):
    write_drawn(tmp_path / "gpt2", ENTRIES["gpt2"])
    for name, folder in (("llama", llama_folder), ("gpt2", tmp_path / "gpt2")):
        import_folder(folder, tmp_path / f"{name}_run")
    main(["export", f"--run={tmp_path / 'llama_run'}", f"--to={tmp_path / 'llama'}", "--quantize=float8"])
    assert Folder(tmp_path / "llama").weight_format == WeightFormat("float8", "dynamic")
    with pytest.raises(SystemExit):
        main(["export", f"--run={tmp_path / 'gpt2_run'}", f"--to={tmp_path / 'out'}", "--quantize=float8"])
    assert "quantize=float8: the matrices of GPT2LMHeadModel are no Linear modules" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------- transformers, compressed-tensors


@pytest.mark.slow
@pytest.mark.parametrize("dtype, inputs", [("float8", "dynamic"), ("float8", "static"), ("int8", "dynamic")])
def test_transformers_computes_the_same_from_our_files(llama_folder, tmp_path, dtype, inputs):
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import_folder(llama_folder, tmp_path / "run")
    model = Model(Folder(llama_folder).model, PrecisionConfig(compute="float32"))
    records = jax.tree_util.tree_leaves_with_path(model.records)
    ranges = {name_of(path): np.array([3, 4], np.float32) for path, record in records if record.is_quantizable}
    out = tmp_path / "out"
    export_run(tmp_path / "run", out, quantization=Quantization(WeightFormat(dtype, inputs), ranges))
    options = dict(dtype=torch.float32, output_loading_info=True)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(out, **options)
    assert not any(info.values())
    ids = np.random.default_rng(0).integers(0, 300, (1, 24)).astype(np.int32)
    want = theirs(torch.tensor(ids).long()).logits.detach().numpy()
    weights = open_model(out, compute="float32").restore()

    @jax.jit
    def logits(weights, tokens):
        batch = {"tokens": tokens, "positions": np.arange(24, dtype=np.int32)[None]}
        module = model.module(weights)
        return module.logits(module.layers(module.embed(batch, None), module.block_inputs(batch))[0])[..., :300]

    # Inputs near the middle between two levels are rounded either way, less than the noise of float8 (7e-3). In int8
    # compressed-tensors divides the largest input by 127.5, vLLM and we by 127: the noise of the format, 2e-3.
    error = (np.asarray(logits(weights, ids)) - want).std() / want.std()
    assert error < (2.5e-3 if dtype == "int8" else 1e-3)
    if inputs == "static":
        return
    compressed = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    compressed.save_pretrained(tmp_path / "again")
    for name in Folder(out).forms:
        np.testing.assert_array_equal(Folder(tmp_path / "again").files[name], Folder(out).files[name])


@pytest.mark.slow
def test_blocks_are_dequantised_as_transformers_does(llama_folder, tmp_path):
    pytest.importorskip("accelerate")  # transformers reads FP8 models with it
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shutil.copytree(llama_folder, tmp_path / "folder")
    config = CONFIGS["fp8 blocks"] | dict(weight_block_size=[16, 16])  # that divide all matrices
    options = json.loads((llama_folder / "config.json").read_text()) | dict(quantization_config=config)
    (tmp_path / "folder" / "config.json").write_text(json.dumps(options))
    files = TensorFiles(llama_folder)
    tensors = {name: np.array(files[name]) for name in files.forms}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name], tensors[name + "_scale_inv"], _ = quantized_by_hand(tensors[name], (16, 16), FLOAT8)
    write_tensors(tmp_path / "folder", tensors)
    dequantizing = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32, quantization_config=dequantizing
    ).state_dict()
    ours = Folder(tmp_path / "folder")
    for name in ours.forms:
        np.testing.assert_allclose(ours.files[name], theirs[name].float().numpy(), rtol=1e-6)
