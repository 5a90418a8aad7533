"""Quantised folders: written by hand here, and in slow tests by and for compressed-tensors and transformers."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from megajax.hugging_face.folder import Folder
from megajax.hugging_face.tensor_files import ShardWriter, TensorFiles, TensorForm
from megajax.inference.load import open_model
from megajax.ops.quantized_matmul import QuantizedWeight, WeightFormat, is_quantized

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
            found[name + ("_scale_inv" if is_inverse else "_scale")] = (
                scales.reshape(-1) if scales.size == 1 else scales
            )
            if request.param in ("float8 static", "fp8"):
                found[name.removesuffix("weight") + "input_scale"] = np.array([0.02], np.float32)
    write_tensors(folder, found)
    return request.param, folder, meant


def test_matrices_are_dequantised_for_training(quantized_folder):
    _, folder, meant = quantized_folder
    opened = Folder(folder)
    assert opened.forms["model.layers.0.mlp.up_proj.weight"].dtype == ml_dtypes.bfloat16
    for name, array in meant.items():
        tensor = next(tensor for tensor in opened.map.tensors if tensor.name == name)
        (part,) = tensor.parts
        read = opened.read(part.name, np.array(part.at), (slice(None),) * (1 + len(part.shape)), np.float32)[0]
        np.testing.assert_array_equal(read, array.T.reshape(part.shape))
    assert opened.dtype("head") == np.float32


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
    again = jax.jit(lambda w: QuantizedWeight.of(w, 1, WeightFormat("float8", "dynamic")))(expected)
    jax.tree.map(np.testing.assert_array_equal, rounded, again)
    plain = open_model(folder, compute="float32", weights="compute").restore()["layers"]["dense"]["mlp"]["up"]
    np.testing.assert_array_equal(plain[1], expected)


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

    assert "quant_method=gptq is not supported" in problem(quant_method="gptq")
    config = CONFIGS["int8 dynamic"]
    assert "format=pack-quantized is not supported" in problem(**config | dict(format="pack-quantized"))
    assert "transform_config is not supported" in problem(**config | dict(transform_config={"R1": 1}))
    asymmetric = compressed("int", dict(strategy="channel") | dict(symmetric=False), None)
    assert "zero point (symmetric=false)" in problem(**asymmetric)
    name = "model.layers.0.mlp.up_proj.weight"
    levels = np.zeros((48, 32), np.int8)
    assert f"{name} is int8, and there is no {name}_scale" in problem({name: levels}, **config)
    wrong = {name: levels, f"{name}_scale": np.ones((7, 1), np.float32)}
    assert f"{name}_scale is [7, 1] and {name} [48, 32], which is no scale" in problem(wrong, **config)
    assert f"{name} is int8, but config.json has no quantization_config" in problem({name: levels})
