"""The kernel for latents in pages, interpreted, equals the reference whatever lies where nothing may be read."""

import functools

import jax
import jax.numpy as jnp
import pytest

from benchmarks.kernels.latent_attention import SCALE, errors, random_case, random_prompts
from pallas_kernels import latent_attention as kernel

KEY_DIM = 96
VALUE_DIM = 64
# Whole blocks of queries: JAX's interpreter, unlike TMA, does not drop what is beyond the last one.
CASES = {
    # The first part of the first sequence and both of the last have no step. The ring goes round.
    "two parts": (random_case, [40, 330, 0], dict(heads=64, page_size=16), 2),
    # From the middle of a page in the middle of a step; heads of two blocks.
    "window": (random_case, [230, 75], dict(heads=72, page_size=32, window=70), 1),
    "many parts": (random_case, [40, 700], dict(heads=64, page_size=64), 9),  # combined by the second kernel
    # Four tokens per block; the last one also has padding.
    "prompts": (random_prompts, [(0, 9), (70, 5)], dict(heads=12, page_size=64, padding=2), 1),
    "split prompts": (random_prompts, [(130, 3)], dict(heads=65, page_size=64), 2),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernel_equals_the_reference(name, interpreted):
    draw, sequences, sizes, parts = CASES[name]
    case = draw(sequences, **sizes, key_dim=KEY_DIM)
    run = functools.partial(kernel.attend, value_dim=VALUE_DIM, scale=SCALE, parts=parts, interpret=interpreted)
    error, lse_error = errors(jax.jit(run)(*case), case, VALUE_DIM)
    # Rounded to bfloat16: the result (0.9 * 2^-9 in the mean square) and the probabilities.
    assert error < 2**-8 and lse_error < 1e-5


@pytest.mark.parametrize(
    ("dims", "page_size", "dtypes", "reason"),
    [
        ((576, 512), 64, (jnp.bfloat16, jnp.bfloat16), ""),
        ((576, 512), 64, (jnp.float32, jnp.bfloat16), "dtype float32"),
        ((576, 512), 64, (jnp.bfloat16, jnp.int8), "cache of int8"),
        ((288, 256), 64, (jnp.bfloat16, jnp.bfloat16), "latents of 256 and rotary keys of 32"),
        ((576, 512), 128, (jnp.bfloat16, jnp.bfloat16), "pages of 128 tokens"),
    ],
)
def test_kernel_says_why_it_refuses(dims, page_size, dtypes, reason):
    assert kernel.problem(*dims, page_size, *map(jnp.dtype, dtypes)) == reason


def test_tokens_fill_blocks_or_blocks_tokens():
    assert [kernel.fitting(heads) for heads in (1, 8, 9, 20, 40, 64, 65, 128)] == [8, 8, 16, 32, 64, 64, 128, 128]
