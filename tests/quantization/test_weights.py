"""Products with matrices in 8 and 4 bits, against NumPy in float64."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.ops.matmul import matmul, matmul_side_by_side
from megajax.quantization.weights import QuantizedWeight, WeightFormat, packed

FORMATS = [WeightFormat(dtype, inputs) for dtype in ("int8", "float8") for inputs in ("unchanged", "dynamic", "static")]
LARGEST = {"int8": 127, "float8": 448}


def rounded(x, dtype):
    """float64 -> the nearest level, as float64."""
    x = np.clip(x, -LARGEST[dtype], LARGEST[dtype])
    return np.rint(x) if dtype == "int8" else x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.mark.parametrize("format", FORMATS, ids=" ".join)
def test_products_equal_the_formula(format):
    rng = np.random.default_rng(0)
    x_BNH = rng.standard_normal((3, 4, 8)).astype(np.float32)
    w_NHD = rng.standard_normal((4, 8, 6)).astype(np.float32)
    w_NHD[..., 2] = 0
    input_scale = jnp.float32(2 / LARGEST[format.dtype]) if format.inputs == "static" else None  # saturates
    weight = QuantizedWeight.of(jnp.asarray(w_NHD), 2, format, input_scale)
    x = x_BNH.reshape(3, 32).astype(np.float64)
    w = w_NHD.reshape(32, 6).astype(np.float64)
    scale = (np.abs(w_NHD).max((0, 1)) / np.float32(LARGEST[format.dtype])).astype(np.float64)
    scale[2] = 1
    w = rounded((w_NHD.reshape(32, 6) / scale.astype(np.float32)).astype(np.float64), format.dtype) * scale
    np.testing.assert_allclose(weight.matrix().reshape(32, 6), w, rtol=1e-6)
    if format.inputs != "unchanged":
        of_token = np.abs(x_BNH.reshape(3, 32)).max(1, keepdims=True) / np.float32(LARGEST[format.dtype])
        of_input = np.float32(input_scale) if format.inputs == "static" else of_token
        x = rounded((x_BNH.reshape(3, 32) / of_input).astype(np.float64), format.dtype) * of_input
    np.testing.assert_allclose(matmul(x_BNH, weight, 2), x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "same_as"), [(32, "unchanged"), (33, "dynamic")])
def test_inputs_are_rounded_in_products_of_many_rows(rows, same_as):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, 16)), jnp.bfloat16)
    matrix = jnp.asarray(rng.standard_normal((16, 8)), jnp.bfloat16)
    by_rows, other = (QuantizedWeight.of(matrix, 1, WeightFormat("float8", name)) for name in ("by_rows", same_as))
    np.testing.assert_array_equal(matmul(x, by_rows), matmul(x, other))


def in_groups(rng, inputs, outputs, num_groups, has_zero):
    """-> (QuantizedWeight in 4 bits, float64 [K, N])."""
    num_inputs, num_outputs = math.prod(inputs), math.prod(outputs)
    levels = rng.integers(-8, 8, (num_outputs, num_inputs))
    zero = rng.integers(-8, 8, (num_groups, num_outputs)) * has_zero
    scale = rng.uniform(0.01, 0.03, (num_groups, num_outputs)).astype(np.float16)
    meant = np.zeros((num_inputs, num_outputs))
    for k, n in np.ndindex(*meant.shape):
        group = k * num_groups // num_inputs
        meant[k, n] = (levels[n, k] - zero[group, n]) * float(scale[group, n])
    values = packed(levels.reshape(num_outputs, num_groups, -1))
    weight = QuantizedWeight(
        jnp.asarray(values.reshape(*outputs, *inputs[:-1], inputs[-1] // 2)),
        jnp.asarray(scale.reshape(num_groups, *outputs)), None, "unchanged",
        jnp.asarray(zero.astype(np.int8).reshape(num_groups, *outputs)) if has_zero else None,
    )  # fmt: skip
    return weight, meant


@pytest.mark.parametrize("has_zero", [False, True])
def test_products_of_groups_equal_the_formula(has_zero):
    """A group of 16 has two heads."""
    rng = np.random.default_rng(0)
    weight, meant = in_groups(rng, (6, 8), (2, 5), 3, has_zero)
    np.testing.assert_array_equal(weight.matrix(), meant.astype(np.float32).reshape(6, 8, 2, 5))
    x = rng.standard_normal((4, 2, 6, 8)).astype(np.float32)
    expected = x.reshape(-1, 48).astype(np.float64) @ meant
    np.testing.assert_allclose(matmul(x, weight, 2).reshape(-1, 10), expected, rtol=1e-5, atol=1e-5)
    assert weight.size == 480


def test_groups_of_inputs_are_packed_as_the_kernel_reads_them():
    """A thread finds inputs 2t, 2t + 1, 2t + 8 and 2t + 9 of 16 in one word, beside those of the second half."""
    levels = np.arange(64) % 16 - 8
    words = packed(levels).reshape(-1, 4)
    for word, first in zip(words[:4], (0, 4, 2, 6), strict=True):
        inputs = first + np.array([0, 1, 8, 9])
        np.testing.assert_array_equal((word & 15) ^ 8, levels[inputs] + 8)
        np.testing.assert_array_equal((word >> 4) ^ 8, levels[inputs + 32] + 8)
    weight = QuantizedWeight(jnp.asarray(packed(levels)[None]), jnp.ones((1, 1)), None, "unchanged")
    np.testing.assert_array_equal(weight.matrix()[:, 0], levels)


def test_matrices_of_groups_are_joined_if_all_have_zeros_or_none():
    rng = np.random.default_rng(0)
    (one, meant), (two, _) = (in_groups(rng, (32,), (2, n, 2), 4, True) for n in (2, 1))
    joint = QuantizedWeight.joined([one, two], 2)
    np.testing.assert_array_equal(joint.matrix(), np.concatenate([one.matrix(), two.matrix()], 2))
    flat = one.reshape((32, 8))
    np.testing.assert_array_equal(flat.matrix(), meant.astype(np.float32))
    assert QuantizedWeight.joined([one, in_groups(rng, (32,), (2, 1, 2), 4, False)[0]], 2) is None
    assert QuantizedWeight.joined([one, in_groups(rng, (32,), (2, 1, 2), 2, True)[0]], 2) is None


@pytest.mark.parametrize("rows", [4, 600])
def test_products_side_by_side_equal_single_ones(rows):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, 16)).astype(np.float32)
    shapes = [(16, 4, 2), (16, 2, 2)]
    matrices = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    whole = [QuantizedWeight.of(jnp.asarray(w), 1, WeightFormat("float8", "dynamic")) for w in matrices]
    joined = matmul_side_by_side(jnp.asarray(x), [w.reshape((16, 2, -1, 2)) for w in whole], 2)
    one, two = (np.asarray(matmul(jnp.asarray(x), w)).reshape(rows, 2, -1, 2) for w in whole)
    np.testing.assert_array_equal(joined, np.concatenate([one, two], 2))


PROGRAM = """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from megajax.planning.plan import devices_without_gpu, plan_device
mesh = Mesh(np.array(devices_without_gpu(1, plan_device("h100"))), ("data",))
def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
formats = [(dtype, inputs) for inputs in ("unchanged", "dynamic") for dtype in ("int8", "float8")]
for dtype, inputs in [*formats, ("float8", "by_rows")]:
    for rows in (1, 16, 4096):
        matrix = array((4096, 4096), jnp.bfloat16)
        weight = jax.eval_shape(lambda w: QuantizedWeight.of(w, 1, WeightFormat(dtype, inputs)), matrix)
        weight = jax.tree.map(lambda a: array(a.shape, a.dtype), weight)
        def steps(weight, x, count):  # a cast of the matrix must not be moved out of the loop
            return jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(weight.multiply(x)), x)
        compiled = jax.jit(steps).lower(weight, array((rows, 4096), jnp.bfloat16), array((), jnp.int32)).compile()
        # The state of the loop, or levels and float32 products; partial products of few rows. A copy of the matrix
        # would have at least 16 MiB.
        per_row = 4096 * (2 if inputs == "unchanged" else 1 + 4)
        print(compiled.memory_analysis().temp_size_in_bytes < rows * per_row + 4 * 2**20)
"""


@pytest.mark.cuda_wheels
def test_no_copy_of_a_matrix_is_made_on_hopper(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == ["True"] * 15
