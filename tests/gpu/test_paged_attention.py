"""The paged attention kernel for Hopper against the reference in float32, with NaN wherever nothing may be read."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.paged_attention import CHECKS, check, errors, random_case
from megajax.ops import paged_attention as op
from pallas_kernels.paged_attention import decode

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


@pytest.mark.parametrize("name", CHECKS)
def test_kernel_matches_the_reference(name):
    check(**CHECKS[name])


@pytest.mark.parametrize("page_size", [8, 16, 32, 64])
def test_operation_takes_the_kernel(page_size, caplog):
    lengths = [4096, 3000, 17, 0, 129]
    case = random_case(lengths, kv_heads=8, group=4, head_dim=128, page_size=page_size)
    results = jax.jit(functools.partial(op.paged_attention, scale=0.1))(*case)
    assert [record.getMessage() for record in caplog.records] == ["paged attention: pallas"]
    assert results[0].dtype == jnp.bfloat16
    error, lse_error = errors(results, case, lengths, scale=0.1)
    assert error < 2**-8 and lse_error < 1e-4  # two roundings to bfloat16


def test_results_do_not_depend_on_the_split():
    """But for the order of float32 sums, and the rounding of probabilities relative to another maximum."""
    case = random_case([4000, 900], kv_heads=2, group=4, head_dim=128, page_size=64)
    for options in (dict(parts=1), dict(parts=7), dict(parts=16, stages=2), dict(parts=3, block=128)):
        results = jax.jit(functools.partial(decode, scale=0.1, **options))(*case)
        error, lse_error = errors(results, case, [4000, 900], scale=0.1)
        assert error < 2**-8 and lse_error < 1e-4, options
