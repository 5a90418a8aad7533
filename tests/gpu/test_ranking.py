"""The kernel that finds the experts of a token, on Hopper."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.top_k import top_k

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


@pytest.mark.parametrize("num_rows, num_values, count", [(1, 64, 1), (2, 128, 8), (8192, 128, 8), (300, 512, 22)])
def test_kernel_finds_the_largest(num_rows, num_values, count):
    values = np.random.default_rng(0).integers(-200, 200, size=(num_rows, num_values)).astype(np.float32)
    values[:, : num_values // 4] = -np.inf
    found = top_k(jnp.asarray(values), count)
    np.testing.assert_array_equal(found, np.argsort(-values, 1, stable=True)[:, :count])
