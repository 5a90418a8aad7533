"""Attention of chunks of a text to what was retrieved for them (RETRO, Borgeaud et al. 2021, section 2.4,
https://arxiv.org/abs/2112.04426).

Dimensions: B batch, T tokens, D model width, N heads, H head dim; the text is U = T / M chunks of M tokens, and chunk u
has S retrieved tokens. Blocks are small (64 x 256 scores), so attention within them is plain JAX, which XLA partitions:
chunks over `context`, heads over `tensor`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, Branch, BranchConfig, Flops, Terms, check_divisible
from megajax.layers.linear import Linear, input_axis
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.ops.matmul import dot_precision

MASKED_SCORE = -1e30
BLOCKS = ("batch", "time", None, "heads", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockAttentionConfig(BranchConfig):
    num_heads: int
    head_dim: int
    bias: bool
    scale: float
    init_std: float
    out_init_std: float
    chunk_length: int
    num_keys: int
    """Retrieved tokens of a chunk."""

    kind = "retrieval"
    projected = "qkv"

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        return {"qkv": ("qkv",), "core_attention": ("attention_out",), "attention": ("qkv", "attention_out")}

    @property
    def out_flops(self) -> float:
        return 2 * self.embed_dim * self.num_heads * self.head_dim

    def build(self, rngs: nnx.Rngs) -> Branch:
        return ChunkedCrossAttention(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        check_divisible("tensor", mesh.tensor, {"num_heads": self.num_heads})

    @property
    def _keys_per_token(self) -> float:
        return self.num_keys / self.chunk_length

    @property
    def _projection_flops(self) -> float:
        return self.out_flops * (1 + 2 * self._keys_per_token)

    def flops(self, sequence_length: int) -> Flops:
        pairs = 4 * self.num_heads * self.head_dim * self.num_keys
        return Flops(self._projection_flops + self.out_flops, mixing=pairs, mixing_causal=pairs)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        width = self.num_heads * self.head_dim
        pairs = self.flops(sequence_length)
        return {
            "qkv": Activation(width * (1 + 2 * self._keys_per_token), Flops(self._projection_flops)),
            "attention_out": Activation(
                width,
                dataclasses.replace(pairs, matmuls=0.0),
                scores=self.num_heads * self.num_keys * 3,
                needs_scores=True,
            ),
        }


class BlockAttention(nnx.Module):
    """Blocks of x attend to blocks of another array, without a causal mask."""

    def __init__(self, config: BlockAttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        heads = (config.num_heads, config.head_dim)
        axes = ("embed", "heads", "head_dim")
        self.query, self.key, self.value = (Linear((D,), heads, axes, config.init_std, rngs=rngs) for _ in range(3))
        self.out = Linear(heads, (D,), ("heads", "head_dim", "embed"), config.out_init_std, rngs=rngs)
        for linear in (self.query, self.key, self.value, self.out) if config.bias else ():
            linear.add_bias_parameter(rngs)

    @property
    def input_axis(self) -> str:
        """Logical axis of the sequence in its input."""
        return input_axis((self.query, self.key, self.value))

    def attend(self, x_BUMD: jax.Array, read_BUSD: jax.Array, sees_BUMS: jax.Array) -> jax.Array:
        """-> [B, U, M, D]; zeros for queries that see nothing. sees: bool, broadcast to [B, U, M, S]."""
        q_BUMNH = self._heads(self.query, x_BUMD)
        k_BUSNH = self._heads(self.key, read_BUSD)
        v_BUSNH = self._heads(self.value, read_BUSD)
        precision = dot_precision(q_BUMNH.dtype)
        scores = jnp.einsum("bumnh,busnh->bunms", q_BUMNH, k_BUSNH, precision=precision)
        scores = scores.astype(np.promote_types(scores.dtype, np.float32))
        sees_BUNMS = sees_BUMS[:, :, None]
        scores = jnp.where(sees_BUNMS, scores * self.config.scale, MASKED_SCORE)
        weights = jnp.where(sees_BUNMS, jax.nn.softmax(scores, -1), 0).astype(q_BUMNH.dtype)
        out_BUMNH = constrain(jnp.einsum("bunms,busnh->bumnh", weights, v_BUSNH, precision=precision), *BLOCKS)
        out_BUMNH = checkpoint_name(out_BUMNH, "attention_out")
        y_BUMD = self.out(_joined(out_BUMNH)).reshape(x_BUMD.shape)
        return jnp.where(jnp.any(sees_BUMS, -1)[..., None], y_BUMD, 0)

    def _heads(self, linear: Linear, x_BUMD: jax.Array) -> jax.Array:
        """-> [B, U, M, N, H]."""
        y_BTNH = linear(_joined(x_BUMD))
        return checkpoint_name(constrain(y_BTNH.reshape(*x_BUMD.shape[:3], *y_BTNH.shape[2:]), *BLOCKS), "qkv")


def _joined(x: jax.Array) -> jax.Array:
    """[B, U, M, ...] -> [B, U M, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])


class ChunkedCrossAttention(BlockAttention):
    """x [B, T, D] -> [B, T, D]. From the last token of a chunk on, M tokens read what was retrieved for it: the first
    that have seen the whole chunk. The first M - 1 tokens of a sequence read nothing."""

    def __call__(
        self, x_BTD: jax.Array, inputs: dict, cache: Any = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, Any, Terms]:
        """-> (out, cache, no Terms).

        inputs: `neighbours` [B, U, S, D], what was retrieved for each chunk; `is_neighbour` bool [B, U, S], False for
            padding; optionally segment_ids int32 [B, T]: a token reads nothing for a chunk that ends in another one.
        """
        length = self.config.chunk_length
        x_BUMD = ahead(x_BTD, length)
        sees_BUMS = inputs["is_neighbour"][:, :, None]
        if "segment_ids" in inputs:
            ids_BUM = ahead(inputs["segment_ids"], length)
            sees_BUMS = sees_BUMS & (ids_BUM == ids_BUM[:, :, :1])[..., None]
        y_BTD = _joined(self.attend(x_BUMD, inputs["neighbours"], sees_BUMS))
        y_BTD = jnp.pad(y_BTD[:, : y_BTD.shape[1] - length + 1], ((0, 0), (length - 1, 0), (0, 0)))
        return y_BTD, cache, Terms()


def ahead(a: jax.Array, length: int) -> jax.Array:
    """[B, T, ...] -> [B, U, M, ...]: block u begins with the last token of chunk u; zeros beyond the end."""
    padding = [(0, 0), (0, length - 1)] + [(0, 0)] * (a.ndim - 2)
    return jnp.pad(a[:, length - 1 :], padding).reshape(a.shape[0], -1, length, *a.shape[2:])
