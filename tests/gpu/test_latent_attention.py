"""The kernel for latents in pages on Hopper against the reference in float32, with NaN wherever nothing may be read."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.latent_attention import (
    CHECKS,
    CHUNKS,
    SCALE,
    VALUE_DIM,
    check,
    check_decoding,
    errors,
    random_case,
    random_prompts,
    reference,
)
from megajax.ops.paged_attention import attend_to_pages

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_gpu")]


@pytest.mark.parametrize("name", CHECKS)
def test_decoding_matches_the_reference(name):
    check_decoding(**CHECKS[name])


@pytest.mark.parametrize("heads", [16, 20, 128])
def test_prompts_match_the_reference(heads):
    check(random_prompts(CHUNKS, heads=heads, page_size=64, padding=20))


def test_operation_takes_the_kernel(caplog):
    case = random_case([1000, 17, 0, 129], heads=16, page_size=64)
    q, pages, table, _, upper = case
    out = jax.jit(functools.partial(attend_to_pages, value_dim=VALUE_DIM, scale=SCALE))(q, pages, table, None, upper)
    assert [record.getMessage() for record in caplog.records] == ["latent attention in pages: pallas"]
    assert out.dtype == jnp.bfloat16
    _, lse = reference(q, *case[1:])  # which the operation does not give
    error, _ = errors((out, lse), case)
    assert error < 2**-8  # two roundings to bfloat16
