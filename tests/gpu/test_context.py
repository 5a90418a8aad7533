"""The ring and its relatives with cuDNN's blocks and with ours, against the plain reference in float32 on one GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops import attention_mask as masks
from megajax.ops.attention import reference_attention
from megajax.parallel.context import attention, sequence_order

pytestmark = pytest.mark.gpu

B, T, N, K, H = 2, 2048, 8, 4, 128
CASES = {"causal": {}, "window": {"window": 300}, "packed": {"packed": True}}


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("backend", ["cudnn", "pallas"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "all_to_all"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_split_sequence_matches_reference(case, method, backend):
    num_ranks, mask, scale = min(jax.device_count(), 4), masks.CAUSAL & masks.window(case.get("window")), H**-0.5
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    given = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    segment_ids = jnp.sort(jax.random.randint(jax.random.key(1), (B, T), 1, 6), -1)
    order = sequence_order(T, num_ranks, method)

    def truth(q, k, v):
        places, pair = (jnp.arange(T)[None],) * 2, (segment_ids,) * 2 if case.get("packed") else None
        return reference_attention(q, k, v, mask, scale, None, pair, places)[0]

    def split(q, k, v):
        pair = (segment_ids[:, order],) * 2 if case.get("packed") else None
        return attention(q, k, v, method=method, mask=mask, scale=scale, segments=pair, backend=backend)

    def run(op, q, k, v, d_out):
        out, vjp = jax.vjp(op, q, k, v)
        return out, *vjp(d_out)

    wants = jax.jit(run, static_argnums=0)(truth, *(a.astype(jnp.float32) for a in given))
    with jax.set_mesh(make_mesh(MeshConfig(context=num_ranks), jax.devices()[:num_ranks])):
        results = jax.jit(run, static_argnums=0)(split, *(a[:, order] for a in given))
    for got, want in zip(results, wants, strict=True):
        got, want = np.asarray(got, np.float32)[:, np.argsort(order)], np.asarray(want)
        # bf16 has 8 bits: a relative error of 2^-8 in each rounded factor.
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-2
