"""Attention by NVIDIA's Transformer Engine, where it is installed: execution.attention_backend=transformer_engine.

Only its public function is used, transformer_engine.jax.attention.fused_attn (signature of 2.20). It does not return
the log-sum-exp of the scores. So the backward pass runs the forward pass again, and what needs that number (attention
sinks, a sequence split over `context`) is not supported. docs/low_precision.md says what was
measured.
"""

import importlib
import importlib.metadata

import jax
import jax.numpy as jnp

from megajax.ops.attention_mask import Mask

PACKAGE = "transformer_engine_jax"


def problem() -> str:
    """Why it cannot be used here, or an empty string."""
    try:
        importlib.metadata.version(PACKAGE)  # its code is a part of transformer_engine: there is no module of this name
    except importlib.metadata.PackageNotFoundError:
        return f"the package {PACKAGE} is not installed"
    return ""


def forward(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, mask: Mask, scale: float) -> jax.Array:
    """softmax(scale * q k^T) v of one device -> [B, T, N, H] in q's dtype. mask: full, or causal, perhaps with a
    window."""
    engine = importlib.import_module("transformer_engine.jax.attention")
    lengths = tuple(jnp.full(a.shape[0], a.shape[1], jnp.int32) for a in (q_BTNH, k_BSKH))
    with _of_one_device():
        return engine.fused_attn(
            (q_BTNH, k_BSKH, v_BSKH),
            None,
            engine.SequenceDescriptor.from_seqlens(lengths),
            None,
            attn_bias_type=engine.AttnBiasType.NO_BIAS,
            attn_mask_type=engine.AttnMaskType.CAUSAL_MASK if mask.is_causal else engine.AttnMaskType.NO_MASK,
            qkv_layout=engine.QKVLayout.BSHD_BSHD_BSHD,
            softmax_type=engine.AttnSoftmaxType.VANILLA_SOFTMAX,
            scaling_factor=scale,
            dropout_probability=0.0,
            is_training=True,
            window_size=None if mask.reach is None else (mask.reach - 1, 0),  # keys before and after the query's own
        )


def backward(q_BTNH, k_BSKH, v_BSKH, d_out_BTNH, mask: Mask, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v."""
    _, vjp = jax.vjp(lambda q, k, v: forward(q, k, v, mask, scale), q_BTNH, k_BSKH, v_BSKH)
    with _of_one_device():
        return vjp(d_out_BTNH)


def _of_one_device():
    """The context in which its functions split nothing: they are called for the part of one device."""
    sharding = importlib.import_module("transformer_engine.jax.sharding")
    return sharding.global_shard_guard(sharding.MeshResource())
