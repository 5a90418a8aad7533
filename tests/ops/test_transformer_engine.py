"""Transformer Engine is called with the arguments of its documentation, and refused by name where it is missing.

A stand-in with its signature computes the reference: the package itself needs a GPU to be imported.
"""

import contextlib
import enum
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config
from megajax.mesh import compat
from megajax.ops import attention_mask as masks
from megajax.ops import transformer_engine
from megajax.ops.attention import attention, reference_attention
from megajax.ops.attention_backends import BACKENDS, Inputs, Options, TransformerEngine, choose
from megajax.overrides import override

B, T, N, K, H, WINDOW = 4, 16, 4, 2, 8, 5


def package() -> types.ModuleType:
    engine = types.ModuleType("transformer_engine.jax.attention")
    engine.AttnBiasType = enum.Enum("AttnBiasType", "NO_BIAS")
    engine.AttnMaskType = enum.Enum("AttnMaskType", "NO_MASK CAUSAL_MASK")
    engine.QKVLayout = enum.Enum("QKVLayout", "BSHD_BSHD_BSHD")
    engine.AttnSoftmaxType = enum.Enum("AttnSoftmaxType", "VANILLA_SOFTMAX")
    engine.SequenceDescriptor = types.SimpleNamespace(from_seqlens=lambda lengths: lengths)

    def fused_attn(
        qkv, bias, sequence_descriptor, seed, attn_bias_type, attn_mask_type, qkv_layout, softmax_type, scaling_factor,
        dropout_probability, is_training, max_segments_per_seq=1, window_size=None,
    ):  # fmt: skip
        q, k, v = qkv
        assert bias is None and seed is None and dropout_probability == 0.0 and is_training
        assert max_segments_per_seq == 1 and qkv_layout is engine.QKVLayout.BSHD_BSHD_BSHD
        assert attn_bias_type is engine.AttnBiasType.NO_BIAS
        assert softmax_type is engine.AttnSoftmaxType.VANILLA_SOFTMAX
        assert [lengths.shape for lengths in sequence_descriptor] == [q.shape[:1], k.shape[:1]]
        assert window_size is None or window_size[1] == 0
        window = None if window_size is None else window_size[0] + 1
        mask = (masks.CAUSAL if attn_mask_type is engine.AttnMaskType.CAUSAL_MASK else masks.FULL) & masks.window(
            window
        )
        places = jnp.arange(q.shape[1])[None], jnp.arange(k.shape[1])[None]
        return reference_attention(q, k, v, mask, scaling_factor, None, None, places)[0]

    engine.fused_attn = fused_attn
    return engine


@pytest.mark.parametrize(
    "mask", [masks.CAUSAL, masks.FULL, masks.CAUSAL & masks.window(WINDOW)], ids=["causal", "full", "window"]
)
def test_value_and_gradients_are_those_of_the_reference(mask, monkeypatch, make_test_mesh, stand_in):
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.attention", package())
    sharding = types.SimpleNamespace(MeshResource=dict, global_shard_guard=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.sharding", sharding)
    draw = lambda number, heads: jax.random.normal(jax.random.key(number), (B, T, heads, H))
    arrays = draw(0, N), draw(1, K), draw(2, K)

    stand_in(TransformerEngine)

    def run(backend: str):
        def loss(*arrays):
            return jnp.sum(jnp.sin(attention(*arrays, mask=mask, scale=0.3, backend=backend)))

        with jax.set_mesh(make_test_mesh(data=2, tensor=2)):
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)

    jax.tree.map(np.testing.assert_array_equal, run("transformer_engine"), run("reference"))


def test_it_is_refused_by_name_where_it_is_missing_or_lacks_a_feature(monkeypatch):
    config = override(Config(), ["--execution.attention_backend=transformer_engine"])
    with pytest.raises(ValueError, match="the package transformer_engine_jax is not installed; install it"):
        config.check()
    monkeypatch.setattr(transformer_engine, "problem", lambda: "")
    config.check()
    with pytest.raises(ValueError, match="mesh.context=2: attention to parts"):
        override(config, ["--mesh.context=2"]).check()


def test_it_says_what_it_does_not_support_and_others_follow(monkeypatch):
    monkeypatch.setattr(transformer_engine, "problem", lambda: "")
    monkeypatch.setattr(compat, "mesh_platform", lambda: "gpu")
    monkeypatch.setattr(compat, "compute_capability", lambda: 9.0)
    monkeypatch.setattr(compat, "cudnn_attention_problem", lambda: "")

    def refused(taken, head_dim=64, **others):
        inputs = Inputs(Options(masks.CAUSAL, 1.0), 2**17, 2, 2, head_dim, head_dim, jnp.bfloat16, **others)
        assert choose(inputs, "transformer_engine").name == taken
        return BACKENDS["transformer_engine"].problem(inputs)

    assert refused("transformer_engine") == ""
    assert refused("cudnn", has_sinks=True) == "attention sinks"
    assert refused("cudnn", is_split=True).startswith("no log-sum-exp")
    assert refused("cudnn", is_packed=True) == "packed documents"
    assert refused("cudnn", has_bias=True) == "bias"
    assert refused("reference", head_dim=256) == "head dim 256"
