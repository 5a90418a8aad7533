"""Products of few rows with matrices in 4 bits, and the kernel, interpreted, equal their formula in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import four_bits
from megajax.quantization.weights import QuantizedWeight
from pallas_kernels import four_bits as kernel


def weight_of(rng, inputs, outputs, num_groups, has_zero):
    levels = rng.integers(0, 256, (*outputs, *inputs[:-1], inputs[-1] // 2), np.uint8)
    scale = rng.uniform(0.01, 0.03, (num_groups, *outputs)).astype(np.float16)
    zero = jnp.asarray(rng.integers(-8, 8, scale.shape, np.int8)) if has_zero else None
    return QuantizedWeight(jnp.asarray(levels), jnp.asarray(scale), None, "unchanged", zero)


def biased(values, shape, dtype):
    """In place of what the interpreter cannot do."""
    values = values.reshape(shape[0], -1, 2, 2, 2, 2).swapaxes(-4, -2).reshape(shape)
    return [((levels ^ 8) + kernel.BIAS - 8).astype(dtype) for levels in (values & 15, values >> 4)]


@pytest.mark.parametrize("has_zero", [False, True])
def test_interpreted_kernel_equals_the_formula(interpreted, monkeypatch, has_zero):
    """Two tiles of outputs, several parts, more steps than stages."""
    monkeypatch.setattr(kernel, "STAGES", 2)
    monkeypatch.setattr(kernel, "_biased", biased)
    monkeypatch.setattr("pallas_kernels.few_rows.STAGES", 2)
    monkeypatch.setattr(kernel, "BLOCKS", 4)
    rng = np.random.default_rng(0)
    weight = weight_of(rng, (8, 128), (2, 128), 8, has_zero)
    x = jnp.asarray(rng.standard_normal((3, 8, 128)), jnp.bfloat16)

    class Interpreted:
        @staticmethod
        def products(*arrays):
            found = kernel.products(*arrays, interpret=interpreted)
            assert found.shape == (2, 256, 8)
            return found

    found = np.asarray(four_bits.multiply(x, weight, Interpreted), np.float64)
    wanted = np.tensordot(np.asarray(x, np.float64), np.asarray(weight.matrix(), np.float64), 2)
    assert found.shape == wanted.shape == (3, 2, 128)
    assert np.linalg.norm(found - wanted) <= 2**-9 * np.linalg.norm(wanted)


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
    for rows in (1, 32, 33):
        for zero in (None, array((32, 4096), jnp.int8)):
            values = array((4096, 32, 64), jnp.uint8)
            weight = QuantizedWeight(values, array((32, 4096), jnp.float16), None, "unchanged", zero)
            x = array((rows, 32, 128), jnp.bfloat16)
            compiled = jax.jit(lambda x, weight: matmul(x, weight, 2)).lower(x, weight).compile()
            is_small = compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20
            print(rows, 'custom_call_target="mosaic_gpu' in compiled.as_text(), is_small)
"""


@pytest.mark.cuda_wheels
def test_kernel_of_few_rows_compiles_for_hopper(compile_for_hopper):
    """Without a copy of the matrix, which would have 32 MiB."""
    assert compile_for_hopper(PROGRAM) == [*["1 True True"] * 2, *["32 True True"] * 2, *["33 False False"] * 2]
