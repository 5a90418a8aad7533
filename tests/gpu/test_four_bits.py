"""Products with matrices in 4 bits on a GPU against NumPy in float64: our kernel for up to 512 rows, XLA's for more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.matmul import matmul
from megajax.quantization.weights import QuantizedWeight, packed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]

HEADS, SIZE, GROUPS, OUTPUTS = 16, 64, 8, 512


@pytest.mark.parametrize("has_zero", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 32, 33, 100, 512, 513])
def test_products_match_the_formula(rows, has_zero):
    rng = np.random.default_rng(rows)
    levels = rng.integers(-8, 8, (OUTPUTS, HEADS * SIZE))
    zero = rng.integers(-8, 8, (GROUPS, OUTPUTS)).astype(np.int8) * np.int8(has_zero)
    scale = rng.uniform(0.01, 0.03, (GROUPS, OUTPUTS)).astype(np.float16)
    values = jnp.asarray(packed(levels.reshape(OUTPUTS, GROUPS, -1)).reshape(OUTPUTS, HEADS, SIZE // 2))
    weight = QuantizedWeight(values, jnp.asarray(scale), None, "unchanged", jnp.asarray(zero) if has_zero else None)
    x = jnp.asarray(rng.standard_normal((rows, HEADS, SIZE)), jnp.bfloat16)
    found = np.asarray(jax.jit(matmul, static_argnums=2)(x, weight, 2), np.float64)
    of_groups = levels.reshape(OUTPUTS, GROUPS, -1) - zero.T[..., None].astype(np.float64)
    matrix = (of_groups * scale.T[..., None].astype(np.float64)).reshape(OUTPUTS, -1)
    wanted = np.asarray(x, np.float64).reshape(rows, -1) @ matrix.T
    # A value rounded to 8 bits is off by 0.9 * 2^-9 in the mean square: results are, and with many rows the matrix.
    assert np.linalg.norm(found - wanted) <= 1.5 * 2**-9 * np.linalg.norm(wanted)
