"""cuDNN attention against the plain reference, on a GPU, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops import attention_mask as masks
from megajax.ops.attention import attention, reference_attention
from megajax.ops.attention_backends import Inputs, Options, choose

pytestmark = pytest.mark.gpu

CASES = {
    "multi-head": (2, 512, 4, 4, 64, None),
    "grouped-query": (2, 512, 8, 2, 128, None),
    "window": (1, 1024, 4, 4, 128, 200),
    "grouped-query window": (2, 1024, 8, 2, 64, 100),
    "multi-query window": (2, 1024, 8, 1, 128, 300),
    "grouped-query window, no whole tile": (2, 1000, 8, 2, 128, 130),
    "grouped-query, window beyond the sequence": (2, 512, 8, 2, 64, 1000),
}


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cudnn_matches_reference(case, packed):
    B, T, N, K, H, window = case
    mask = masks.CAUSAL & masks.window(window)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    q, k, v, d_out = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    scale = H**-0.5
    segment_ids = jnp.sort(jax.random.randint(jax.random.key(1), (B, T), 1, 6), -1)
    segments = (segment_ids, segment_ids) if packed else None

    def truth(q, k, v):
        places = (jnp.arange(T)[None], jnp.arange(T)[None])
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return reference_attention(q, k, v, mask, scale, None, segments, places)[0]

    inputs = Inputs.of(Options(mask, scale), q, k, v, is_packed=packed)
    assert choose(inputs, "cudnn").name == "cudnn"
    fast = lambda q, k, v: attention(q, k, v, mask=mask, scale=scale, segments=segments, backend="cudnn")
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        out, vjp = jax.vjp(jax.jit(fast), q, k, v)
        gradients = vjp(d_out)
    want, vjp = jax.vjp(jax.jit(truth), q, k, v)
    wants = vjp(d_out.astype(jnp.float32))
    for got, expected in zip((out, *gradients), (want, *wants), strict=True):
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        # bf16 has 8 bits: a relative error of 2^-8 in each rounded factor.
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-2


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("mask", [masks.FULL, masks.CAUSAL], ids=["full", "causal"])
def test_cudnn_learns_a_bias(mask, packed):
    """Relative positions of T5, whose bias is shared by all rows, and texts with padding."""
    B, T, N, H = 3, 256, 4, 64
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, d_out = (jax.random.normal(key, (B, T, N, H), jnp.bfloat16) for key in keys[:4])
    bias = jax.random.normal(keys[4], (N, T, T), jnp.bfloat16).astype(jnp.float32)
    segment_ids = jnp.broadcast_to(jnp.arange(T) >= 200, (B, T)).astype(jnp.int32)
    segments = (segment_ids, segment_ids) if packed else None

    def truth(q, k, v, bias):
        places = (jnp.arange(T)[None], jnp.arange(T)[None])
        return reference_attention(q, k, v, mask, H**-0.5, None, segments, places, bias_NTS=bias)[0]

    inputs = Inputs.of(Options(mask, H**-0.5), q, k, v, is_packed=packed, has_bias=True)
    assert choose(inputs).name == "cudnn"
    with jax.set_mesh(make_mesh(MeshConfig(), jax.devices()[:1])):
        fast = lambda q, k, v, bias: attention(q, k, v, mask=mask, scale=H**-0.5, segments=segments, bias=bias)
        out, vjp = jax.vjp(jax.jit(fast), q, k, v, bias)
        gradients = vjp(d_out)
    want, vjp = jax.vjp(jax.jit(truth), *(x.astype(jnp.float32) for x in (q, k, v)), bias)
    wants = vjp(d_out.astype(jnp.float32))
    for got, expected in zip((out, *gradients), (want, *wants), strict=True):
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-2
