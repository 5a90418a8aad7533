"""Products of few rows with matrices in 4 bits, and the kernel, interpreted, equal their formula in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.linear import Linear, side_by_side
from megajax.ops import four_bits
from megajax.ops.mailboxes import summed_matmul
from megajax.ops.matmul import JoinedWeight
from megajax.quantization.weights import QuantizedWeight
from pallas_kernels import four_bits as kernel


def weight_of(rng, inputs, outputs, num_groups, has_zero):
    levels = rng.integers(0, 256, (*outputs, *inputs[:-1], inputs[-1] // 2), np.uint8)
    scale = rng.uniform(0.01, 0.03, (num_groups, *outputs)).astype(np.float16)
    zero = jnp.asarray(rng.integers(-8, 8, scale.shape, np.int8)) if has_zero else None
    return QuantizedWeight(jnp.asarray(levels), jnp.asarray(scale), None, "unchanged", zero)


# In place of what the interpreter cannot do.
def store_transposed(ref, value):
    ref[...] = value.T


def biased(values, shape, dtype):
    values = values.reshape(shape[0], -1, 2, 2, 2, 2).swapaxes(-4, -2).reshape(shape)
    return [((levels ^ 8) + kernel.BIAS - 8).astype(dtype) for levels in (values & 15, values >> 4)]


@pytest.mark.parametrize(("num_rows", "padded", "multiprocessors"), [(3, 8, 1), (100, 112, 4)])
@pytest.mark.parametrize("has_zero", [False, True])
def test_interpreted_kernel_equals_the_formula(interpreted, monkeypatch, num_rows, padded, multiprocessors, has_zero):
    """Two blocks of outputs, one and two tiles of rows, two parts, more steps than stages."""
    monkeypatch.setattr(kernel, "STAGES", 2)
    monkeypatch.setattr(kernel, "_biased", biased)
    monkeypatch.setattr("pallas_kernels.registers.store_transposed", store_transposed)
    monkeypatch.setattr("pallas_kernels.few_rows.STAGES", 2)
    monkeypatch.setattr(kernel, "MULTIPROCESSORS", multiprocessors)
    rng = np.random.default_rng(0)
    weight = weight_of(rng, (8, 128), (2, 128), 8, has_zero)
    x = jnp.asarray(rng.standard_normal((num_rows, 8, 128)), jnp.bfloat16)

    class Interpreted:
        padded = staticmethod(kernel.padded)

        @staticmethod
        def products(*arrays):
            found = kernel.products(*arrays, interpret=interpreted)
            assert found.shape == (2, padded, 256)
            return found

    found = np.asarray(four_bits.multiply(x, weight, Interpreted), np.float64)
    wanted = np.tensordot(np.asarray(x, np.float64), np.asarray(weight.matrix(), np.float64), 2)
    assert found.shape == wanted.shape == (num_rows, 2, 128)
    assert np.linalg.norm(found - wanted) <= 2**-9 * np.linalg.norm(wanted)


@pytest.fixture
def of_devices(monkeypatch):
    """Shapes of the levels of which the kernel, here its formula, computes products on a device."""
    shapes = []

    def products(rows_RK, values_NB, scale_GN, zero_GN):
        shapes.append(values_NB.shape)
        matrix_KN = QuantizedWeight(values_NB, scale_GN, None, "unchanged", zero_GN).matrix()
        return (rows_RK.astype(jnp.float32) @ matrix_KN)[None]

    monkeypatch.setattr(kernel, "products", products)
    monkeypatch.setattr("megajax.mesh.compat.mosaic_problem", lambda: "")
    return shapes


@pytest.mark.parametrize(
    ("inputs", "outputs", "axes", "of_device"),
    [
        ((4, 128), (256,), ("heads", "head_dim", "embed"), (256, 128)),  # summed
        ((256,), (2, 128), ("embed", "kv_heads", "head_dim"), (128, 128)),
        ((256,), (256,), ("embed", "mlp"), (128, 128)),
        ((256,), (256,), ("embed", "latent"), (256, 128)),  # whole
    ],
)
@pytest.mark.parametrize("has_zero", [False, True])
def test_each_gpu_reads_its_part_of_a_matrix(inputs, outputs, axes, of_device, has_zero, of_devices, make_test_mesh):
    rng = np.random.default_rng(1)
    weight = weight_of(rng, inputs, outputs, math.prod(inputs) // 128, has_zero)
    x = jnp.asarray(rng.standard_normal((3, 1, *inputs)), jnp.bfloat16)
    count = len(inputs)
    with jax.set_mesh(make_test_mesh(tensor=2)):
        found = jax.jit(lambda x, w: summed_matmul(x, w, count, axes))(x, weight)
    assert of_devices == [of_device]
    wanted = np.tensordot(np.asarray(x, np.float32), np.asarray(weight.matrix()), count)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=2**-7 * np.abs(wanted).max())


def test_one_group_of_all_inputs_is_not_split(of_devices, make_test_mesh):
    """Its bytes have inputs of both halves."""
    rng = np.random.default_rng(3)
    weight = weight_of(rng, (256,), (128,), 1, False)
    x = jnp.asarray(rng.standard_normal((3, 1, 256)), jnp.bfloat16)
    with jax.set_mesh(make_test_mesh(tensor=2)):
        found = jax.jit(lambda x, w: summed_matmul(x, w, 1, ("mlp", "embed")))(x, weight)
    wanted = np.tensordot(np.asarray(x, np.float32), np.asarray(weight.matrix()), 1)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=2**-7 * np.abs(wanted).max())
    assert not of_devices


@pytest.mark.parametrize(("dims", "axis", "of_device"), [((2, -1, 128), 2, (256, 128)), ((1, 512), 1, (256, 128))])
@pytest.mark.parametrize("is_joined", [False, True])
def test_each_gpu_reads_its_part_of_matrices_side_by_side(dims, axis, of_device, is_joined, of_devices, make_test_mesh):
    """Queries and values of a decoder, gate and up of its MLP."""
    rng = np.random.default_rng(2)
    names, outputs = (("kv_heads", "head_dim"), (4, 128)) if axis == 2 else (("mlp",), (512,))
    weights = [weight_of(rng, (256,), outputs, 2, True) for _ in range(2)]
    stored = JoinedWeight.of(weights, (256, *dims), axis) if is_joined else weights
    x = jnp.asarray(rng.standard_normal((3, 1, 256)), jnp.bfloat16)

    def multiplied(x, stored):
        linears = [Linear((256,), outputs, ("embed", *names), 0.02, rngs=nnx.Rngs(0)) for _ in stored]
        for linear, w in zip(linears, stored, strict=True):
            linear.weight = nnx.Param(w, record=linear.record)
        return side_by_side(x, linears, (256, *dims), axis, has_gradient=False)

    with jax.set_mesh(make_test_mesh(tensor=2)):
        found = jax.jit(multiplied)(x, stored)
    assert set(of_devices) == {(2 * of_device[0], of_device[1]) if is_joined else of_device}
    matrix = np.concatenate([np.asarray(w.matrix()).reshape(256, *dims) for w in weights], axis)
    wanted = np.tensordot(np.asarray(x, np.float32), matrix, 1)
    np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=2**-7 * np.abs(wanted).max())


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.matmul import matmul
from megajax.planning.plan import devices_without_gpu, plan_device
from megajax.quantization.weights import QuantizedWeight

mesh = make_mesh(MeshConfig(), devices_without_gpu(1, plan_device("h100")))

def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

with jax.set_mesh(mesh):
    for rows in (1, 512, 513):
        for zero in (None, array((32, 4096), jnp.int8)):
            values = array((4096, 32, 64), jnp.uint8)
            weight = QuantizedWeight(values, array((32, 4096), jnp.float16), None, "unchanged", zero)
            x = array((rows, 32, 128), jnp.bfloat16)
            compiled = jax.jit(lambda x, weight: matmul(x, weight, 2)).lower(x, weight).compile()
            is_small = compiled.memory_analysis().temp_size_in_bytes < 32 * 2**20
            print(rows, 'custom_call_target="mosaic_gpu' in compiled.as_text(), is_small)
"""


@pytest.mark.cuda_wheels
def test_kernel_of_few_rows_compiles_for_hopper(compile_for_hopper):
    """Without a copy of the matrix, which would have 32 MiB."""
    assert compile_for_hopper(PROGRAM) == [*["1 True True"] * 2, *["512 True True"] * 2, *["513 False False"] * 2]
