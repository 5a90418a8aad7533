"""The kernel for latents in pages, interpreted, equals the reference; in decoding what must not be read is NaN."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.latent_attention import SCALE, errors, random_case, random_prompts
from benchmarks.kernels.latent_attention import reference as reference_in_float32
from megajax.ops.attention_backends import Pallas
from megajax.ops.attention_mask import CAUSAL, window
from megajax.ops.paged_attention import attend_to_pages
from pallas_kernels import latent_attention as kernel

KEY_DIM = 96
VALUE_DIM = 64
# Whole blocks of queries: JAX's interpreter, unlike TMA, does not drop what is beyond the last one.
CASES = {
    # The first part of the first sequence and both of the last have no step. The ring goes round.
    "two parts": (random_case, [40, 330, 0], dict(heads=64, page_size=16), 2),
    # From the middle of a page in the middle of a step; heads of two blocks.
    "window": (random_case, [230, 75], dict(heads=72, page_size=32, window=70), 1),
    "many parts": (random_case, [300], dict(heads=64, page_size=64), 9),  # combined by the second kernel
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


@pytest.mark.parametrize("is_decoding", [True, False], ids=["decoding", "prompts"])
def test_operation_gives_the_kernel_what_each_token_sees(is_decoding, stand_in, make_test_mesh):
    """The window, and nothing below zero; heads are split over tensor."""

    def attend(*arrays, value_dim, scale):
        assert scale == SCALE and arrays[0].shape[2] == 2
        return reference_in_float32(*arrays, value_dim=value_dim)

    stand_in(Pallas, latent_kernel=SimpleNamespace(attend=attend))
    draw = random_case if is_decoding else random_prompts
    sequences = [1, 40] if is_decoding else [(0, 5), (9, 3)]
    q, pages, table, lower, upper = draw(sequences, heads=4, page_size=8, key_dim=12)
    pages = jnp.nan_to_num(pages)  # the window below reads less than is there
    run = functools.partial(attend_to_pages, value_dim=8, scale=SCALE, mask=CAUSAL & window(6))
    with jax.set_mesh(make_test_mesh(tensor=2)):
        table = jnp.minimum(table, len(pages) - 1)
        found = jax.jit(run)(q, pages, table, None if is_decoding else lower, upper)
    wanted, _ = reference_in_float32(q, pages, table, jnp.maximum(lower, upper - 6), upper, value_dim=8)
    np.testing.assert_allclose(found, wanted, rtol=2**-7, atol=2**-9)  # bfloat16


PROGRAM = """
import functools, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.paged_attention import attend_to_pages
from megajax.planning.plan import devices_without_gpu, plan_device

mesh = make_mesh(MeshConfig(tensor=2), devices_without_gpu(2, plan_device("h100")))

def array(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

for batch, length, heads, page_size in ((3, 1, 256, 64), (3, 1, 32, 16), (1, 512, 32, 64), (1, 512, 256, 8)):
    q = array((batch, length, heads, 576), jnp.bfloat16, None, None, "tensor")
    pages = array((50, 1, 1, page_size, 576), jnp.bfloat16)
    bounds = array((batch, length), jnp.int32)
    lower = None if length == 1 else bounds
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(attend_to_pages, value_dim=512, scale=0.1))
        text = run.lower(q, pages, array((batch, 512 // page_size), jnp.int32), lower, bounds).compile().as_text()
    print(text.count('custom_call_target="mosaic_gpu'))
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper_on_a_mesh(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == ["1"] * 4
