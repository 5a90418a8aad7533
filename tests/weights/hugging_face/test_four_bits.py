"""Folders in 4 bits, packed here bit by bit; in a slow test read by compressed-tensors too."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.load import open_model
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.config import MeshConfig
from megajax.ops.matmul import matmul
from megajax.quantization.weights import WeightFormat, is_quantized
from megajax.weights.hugging_face.folder import Folder
from megajax.weights.hugging_face.four_bits import Packing, packed_matrices
from megajax.weights.hugging_face.import_folder import import_folder
from megajax.weights.hugging_face.tensor_files import ShardWriter, TensorFiles, TensorForm

GROUP = 8  # of 32 or 48 inputs
IN_ORDER = range(8)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def compressed(**weights):
    weights = dict(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True) | weights
    group = dict(targets=["Linear"], weights=weights, input_activations=None)
    return dict(
        quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed",
        config_groups={"group_0": group}, ignore=["lm_head"],
    )  # fmt: skip


GPTQ = dict(quant_method="gptq", bits=4, group_size=GROUP, desc_act=False, sym=False)
CONFIGS = {
    "awq": dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm", zero_point=True),
    "gptq": GPTQ,
    "gptq symmetric": GPTQ | dict(sym=True, checkpoint_format="gptq"),
    "gptq without groups": GPTQ | dict(group_size=-1),
    "gptq_v2": GPTQ | dict(checkpoint_format="gptq_v2"),
    "gptq by activation": GPTQ | dict(desc_act=True),
    "pack-quantized": compressed(),
    "pack-quantized asymmetric": compressed(symmetric=False),
}


def words(levels: np.ndarray, order, subtracted: int = 0) -> np.ndarray:
    """[A, 8 W] -> int32 [A, W]: in each word `order` says which of eight is next, beginning with the lowest bits."""
    out = np.zeros((len(levels), levels.shape[1] // 8), np.uint32)
    for row, word in np.ndindex(*out.shape):
        number = sum(int(levels[row, 8 * word + place]) << (4 * n) for n, place in enumerate(order))
        out[row, word] = (number - subtracted) % 2**32
    return out.view(np.int32)


def quantized(name: str, shape: tuple[int, int], rng) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """-> ({end of a name: tensor}, float64 [out, in]: what they stand for)."""
    N, K = shape
    G = 1 if "without groups" in name else K // GROUP
    levels = rng.integers(0, 16, (N, K))
    is_symmetric = name in ("gptq symmetric", "pack-quantized")
    zero = np.full((N, G), 8) if is_symmetric else rng.integers(0, 16, (N, G))
    scale = rng.uniform(0.01, 0.03, (N, G)).astype(np.float16)
    group_of = np.arange(K) // (K // G)
    if name == "gptq by activation":
        rng.shuffle(group_of)
    meant = np.zeros(shape)
    for n, k in np.ndindex(N, K):
        meant[n, k] = (levels[n, k] - zero[n, group_of[k]]) * float(scale[n, group_of[k]])
    if name == "awq":
        return dict(qweight=words(levels.T, AWQ), qzeros=words(zero.T, AWQ), scales=scale.T), meant
    if name.startswith("gptq"):
        subtracted = 0 if name == "gptq_v2" else 0x11111111
        qzeros = words(zero.T, IN_ORDER, subtracted)
        found = dict(qweight=words(levels, IN_ORDER).T, qzeros=qzeros, scales=scale.T)
        return found | dict(g_idx=group_of.astype(np.int32)), meant
    found = dict(weight_packed=words(levels, IN_ORDER), weight_scale=scale, weight_shape=np.array(shape, np.int64))
    if not is_symmetric:
        found["weight_zero_point"] = words(zero.T, IN_ORDER).T
    return found, meant


def write(folder, llama_folder, config: dict, tensors: dict[str, np.ndarray]) -> None:
    shutil.copytree(llama_folder, folder, dirs_exist_ok=True)
    options = json.loads((llama_folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(options | dict(quantization_config=config)))
    (folder / "model.safetensors").unlink()
    writer = ShardWriter(folder, {name: TensorForm(a.shape, a.dtype) for name, a in tensors.items()})
    for name, array in tensors.items():
        writer[name][...] = array


def tensors_in_four_bits(name: str, llama_folder) -> tuple[dict, dict]:
    """-> (tensors of the folder, {name of a matrix: what it stands for})."""
    rng = np.random.default_rng(0)
    files = TensorFiles(llama_folder)
    tensors = {}
    meant = {}
    for tensor in files.forms:
        if not tensor.endswith("proj.weight"):
            tensors[tensor] = np.array(files[tensor])
            continue
        found, meant[tensor] = quantized(name, files.forms[tensor].shape, rng)
        tensors |= {tensor.removesuffix("weight") + end: array for end, array in found.items()}
    return tensors, meant


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, llama_folder, tmp_path_factory):
    """-> (name, folder, {name of a matrix: float64 [out, in]})."""
    tensors, meant = tensors_in_four_bits(request.param, llama_folder)
    folder = tmp_path_factory.mktemp("four_bits") / "llama"
    write(folder, llama_folder, CONFIGS[request.param], tensors)
    return request.param, folder, meant


def test_words_are_read_as_published(tmp_path):
    """A word of each layout with the levels, or outputs, 0 to 7."""
    writer_of = {"awq": ("qweight", (2, 1), 0x75316420), "gptq": ("qweight", (1, 8), 0x76543210)}
    for layout, (end, shape, word) in writer_of.items():
        num_inputs = 2 if layout == "awq" else 8
        tensors = {
            f"x.{end}": np.full(shape, word, np.int32),
            "x.qzeros": np.full((1, 1), 0x77777777, np.int32),
            "x.scales": np.ones((1, 8), np.float16),
        }
        writer = ShardWriter(tmp_path, {name: TensorForm(a.shape, a.dtype) for name, a in tensors.items()})
        for name, array in tensors.items():
            writer[name][...] = array
        (matrix,) = packed_matrices(TensorFiles(tmp_path), Packing(layout, None, needs_zeros=True)).values()
        zero = 7 if layout == "awq" else 8  # which GPTQ writes as 7
        assert matrix.shape == (8, num_inputs)
        expected = np.tile(np.arange(8)[:, None], 2) if layout == "awq" else np.tile(np.arange(8), (8, 1))
        np.testing.assert_array_equal(matrix.dequantized(), expected - zero)


def test_matrices_are_dequantised_for_training(folder, tmp_path):
    _, path, meant = folder
    opened = Folder(path)
    assert opened.forms["model.layers.0.mlp.up_proj.weight"] == ((48, 32), ml_dtypes.bfloat16)
    for name, array in meant.items():
        tensor = next(tensor for tensor in opened.map.tensors if tensor.name == name)
        (part,) = tensor.parts
        read = opened.reader.read(part.name, np.array(part.at), (slice(None),) * (1 + len(part.shape)), np.float32)[0]
        np.testing.assert_array_equal(read, array.T.reshape(part.shape))


def test_the_engine_keeps_groups_that_are_in_order(folder, caplog):
    name, path, meant = folder
    opened = open_model(path, compute="float32")
    is_kept = name != "gptq by activation"
    assert opened.source.weight_format == (WeightFormat("int4", "unchanged") if is_kept else None)
    assert ("all matrices are dequantised" in caplog.text) != is_kept
    params = opened.restore()
    attention, mlp = (params["layers"]["dense"][part] for part in ("attention", "mlp"))
    found = {"self_attn.o_proj": attention["out"][1], "self_attn.q_proj": attention["query"][1],
             "mlp.down_proj": mlp["down"][1]}  # fmt: skip
    assert sum(map(is_quantized, jax.tree.leaves(params, is_leaf=is_quantized))) == (14 if is_kept else 0)
    for theirs, weight in found.items():
        expected = meant[f"model.layers.1.{theirs}.weight"].T
        matrix = weight.matrix() if is_kept else weight
        np.testing.assert_array_equal(np.asarray(matrix).reshape(expected.shape), expected)
        if is_kept:
            assert weight.is_in_4_bits and weight.scale.dtype == np.float16
            assert (weight.zero is None) == (name == "pack-quantized")


RECORDED = np.load(Path(__file__).parents[2] / "oracles" / "hugging_face_folders.npz")


@pytest.mark.parametrize("name", ["phi3", "falcon"])
def test_parts_of_a_tensor_have_their_own_groups(name, write_drawn, tmp_path):
    """Several matrices of ours in one of theirs, one after the other and by head."""
    write_drawn(tmp_path / "drawn", json.loads(str(RECORDED["families"]))[name])
    drawn = TensorFiles(tmp_path / "drawn")
    rng = np.random.default_rng(0)
    tensors = {}
    for tensor, form in drawn.forms.items():
        if len(form.shape) == 2 and ".0." in tensor:
            found, _ = quantized("gptq", form.shape, rng)
            tensors |= {tensor.removesuffix("weight") + end: array for end, array in found.items()}
        else:
            tensors[tensor] = np.array(drawn[tensor])
    write(tmp_path / "folder", tmp_path / "drawn", GPTQ, tensors)
    opened = Folder(tmp_path / "folder")
    names = [part.name for tensor in opened.map.tensors for part in tensor.parts if part.num_inputs and part.at == (0,)]
    assert len(names) == (7 if name == "phi3" else 6)
    for parameter in names:
        dims = len(opened.map.shapes[parameter])
        read = opened.reader.read(parameter, np.array([0]), (slice(None),) * dims, np.float32)[0]
        np.testing.assert_array_equal(opened.levels(parameter, 0).matrix(), read)


@pytest.fixture(scope="module")
def awq(llama_folder, tmp_path_factory):
    """-> (folder, {name of a matrix: float64 [out, in]})."""
    tensors, meant = tensors_in_four_bits("awq", llama_folder)
    folder = tmp_path_factory.mktemp("awq") / "llama"
    write(folder, llama_folder, CONFIGS["awq"], tensors)
    return folder, meant


def engine(folder, weights: str) -> Engine:
    opened = open_model(folder, compute="float32", weights=weights)
    serving = ServingConfig(max_rows=4, max_batch_tokens=64, page_size=8, num_pages=24, max_length=64)
    return Engine(opened.model, opened.restore(joins=True), opened.mesh, opened.tokenizer, serving=serving)


def test_generation_equals_that_of_the_dequantised_model(awq):
    """Prompts of more rows than have a product for each group, and of fewer."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 300, length).tolist() for length in (3, 45)]
    greedy = Sampling(max_tokens=12, temperature=0.0)
    packed = engine(awq[0], "auto")
    assert packed.params["layers"]["dense"]["attention"]["query"][0].weight.is_in_4_bits
    assert packed.generate_tokens(prompts, greedy) == engine(awq[0], "compute").generate_tokens(prompts, greedy)


def test_other_dtypes_quantise_again(awq):
    up = open_model(awq[0], compute="float32", weights="int8").restore()["layers"]["dense"]["mlp"]["up"][1]
    expected = awq[1]["model.layers.1.mlp.up_proj.weight"].T
    assert up.values.dtype == np.int8
    np.testing.assert_allclose(up.matrix(), expected, atol=np.abs(expected).max() / 254)


def test_any_mesh_that_splits_in_whole_groups_has_the_same_numbers(awq):
    alone = open_model(awq[0], compute="float32").restore(joins=True)
    params = open_model(awq[0], MeshConfig(tensor=2, fsdp=2), compute="float32").restore(joins=True)
    out = params["layers"]["dense"]["attention"]["out"][0]
    assert out.values.sharding.shard_shape(out.values.shape) == (16, 2, 4)  # of 32, 4, 8 / 2
    jax.tree.map(np.testing.assert_array_equal, params, alone)
    x = np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32)
    multiply = jax.jit(matmul, static_argnums=2)
    one = multiply(x, alone["layers"]["dense"]["attention"]["out"][0], 2)
    np.testing.assert_allclose(multiply(x, out, 2), one, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="the mesh splits groups of 8 inputs: decrease mesh.tensor"):
        open_model(awq[0], MeshConfig(fsdp=8), compute="float32").restore()


def test_zeros_in_place_of_biases_that_the_model_does_not_have_are_not_used(llama_folder, tmp_path):
    """AutoGPTQ wrote them."""
    tensors, _ = tensors_in_four_bits("gptq", llama_folder)
    bias = np.zeros(48, np.float16)

    def opened() -> Folder:
        write(tmp_path / "folder", llama_folder, GPTQ, tensors | {"model.layers.1.mlp.up_proj.bias": bias})
        return Folder(tmp_path / "folder")

    assert opened().weight_format == WeightFormat("int4", "unchanged")
    bias[5] = 1
    with pytest.raises(ValueError, match=r"1 tensors are unknown in LlamaForCausalLM: .*up_proj.bias"):
        opened()


def test_an_imported_run_has_the_matrices_in_bfloat16(awq, tmp_path):
    import_folder(awq[0], tmp_path / "run")
    up = open_model(tmp_path / "run", compute="bfloat16").restore()["layers"]["dense"]["mlp"]["up"][1]
    np.testing.assert_array_equal(up, awq[1]["model.layers.1.mlp.up_proj.weight"].T.astype(ml_dtypes.bfloat16))


def test_what_is_not_supported_is_refused_in_a_line_that_says_what_to_do(llama_folder, tmp_path):
    tensors, _ = tensors_in_four_bits("gptq", llama_folder)
    up = "model.layers.0.mlp.up_proj"

    def refused(match: str, config: dict, changed: dict | None = None) -> None:
        found = {name: array for name, array in (tensors | (changed or {})).items() if array.size}
        write(tmp_path / "folder", llama_folder, config, found)
        with pytest.raises(ValueError, match=match) as error:
            open_model(tmp_path / "folder", compute="float32").restore()
        assert "\n" not in str(error.value)

    bfloat16 = "use the folder in bfloat16"
    refused(f"bits=3 is not supported with quant_method=gptq, only 4; {bfloat16}", GPTQ | dict(bits=3))
    refused("bits=8 is not supported with quant_method=awq, only 4;", CONFIGS["awq"] | dict(bits=8))
    refused("version=gemv is not supported with quant_method=awq, only gemm;", CONFIGS["awq"] | dict(version="GEMV"))
    refused("zero_point=False is not supported", CONFIGS["awq"] | dict(zero_point=False))
    refused("checkpoint_format=marlin is not supported with quant_method=gptq, only gptq and gptq_v2;",
            GPTQ | dict(is_marlin_format=True))  # fmt: skip
    refused("checkpoint_format=bitblas is not supported", GPTQ | dict(checkpoint_format="bitblas"))
    refused("group_size=0 must be", GPTQ | dict(group_size=0))
    refused(f"num_bits=8, type=int are not supported with format=pack-quantized, only 4 and int; {bfloat16}",
            compressed(num_bits=8))  # fmt: skip
    refused("has 48 inputs, which are no whole groups of 32", GPTQ | dict(group_size=32))
    refused(r"scales is \[6, 32\] and .*qweight \[6, 32\], which needs \[3, 32\] with 4 bits and 3 groups",
            GPTQ | dict(group_size=16))  # fmt: skip
    refused(f"there is no scale for {up}.qweight", GPTQ, {f"{up}.scales": np.zeros(0)})
    refused(f"there is no zero for {up}.qweight", GPTQ, {f"{up}.qzeros": np.zeros(0)})
    refused(f"{up}.qweight is float32, and must be int32", GPTQ, {f"{up}.qweight": np.zeros((4, 48), np.float32)})
    refused(f"{up}.qzeros is int32, which only matrices in 4 bits have", GPTQ, {f"{up}.qweight": np.zeros(0)})
    refused(f"{up}.g_idx numbers groups that", GPTQ, {f"{up}.g_idx": np.full(32, 4, np.int32)})
    infinite = tensors[f"{up}.scales"].copy()
    infinite[1, 7] = np.inf
    refused(f"tensor {up}.scales has values that are not finite", GPTQ, {f"{up}.scales": infinite})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack-quantized", "pack-quantized asymmetric"])
def test_transformers_reads_the_same_matrices(name, llama_folder, tmp_path):
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tensors, meant = tensors_in_four_bits(name, llama_folder)
    write(tmp_path / "folder", llama_folder, CONFIGS[name], tensors)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folder", dtype=torch.float32, quantization_config=config
    ).state_dict()
    for matrix, expected in meant.items():
        # They are multiplied in float16, the dtype of the scales.
        np.testing.assert_allclose(theirs[matrix].float().numpy(), expected, rtol=2**-10)
