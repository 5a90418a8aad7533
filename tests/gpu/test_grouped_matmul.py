"""The grouped matmul for Hopper against the formula in float32, with groups of awkward sizes."""

import pytest

from benchmarks.kernels.grouped_matmul import check

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


@pytest.mark.parametrize("num_matrices", [1, 2])
def test_kernel_matches_the_formula(num_matrices):
    check(num_matrices)
