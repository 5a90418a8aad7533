"""Relative positions as a bias of the attention scores, one number per head and bucket of distances (Raffel et al.
2019, https://arxiv.org/abs/1910.10683, section 2.1).

Dimensions: T queries, S keys, N heads, C buckets.
Half of the buckets are for one distance each, the others for ranges that grow logarithmically up to `max_distance`;
what is farther away shares the last bucket. Bidirectional: half of all buckets are for keys after the query.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.mesh.sharding import constrain
from megajax.ops.matmul import dot_precision
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class RelativeBiasConfig:
    """The biases of one stack, and the buckets of distances that share one."""

    num_heads: int
    num_buckets: int
    max_distance: int
    bidirectional: bool
    init_std: float

    def buckets(self) -> np.ndarray:
        """int32 [2 * max_distance + 1]: bucket of a key that is -max_distance to max_distance places after its
        query."""
        offsets = np.arange(-self.max_distance, self.max_distance + 1)
        distances = np.abs(offsets) if self.bidirectional else np.maximum(-offsets, 0)
        count = self.num_buckets // 2 if self.bidirectional else self.num_buckets
        num_exact = count // 2
        # in float32, as the published models were trained
        ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(num_exact)
        places = np.log(ratios) / np.float32(math.log(self.max_distance / num_exact)) * np.float32(count - num_exact)
        logarithmic = np.minimum(num_exact + places.astype(np.int32), count - 1)
        found = np.where(distances < num_exact, distances, logarithmic)
        return (found + np.where((offsets > 0) & self.bidirectional, count, 0)).astype(np.int32)


class RelativeBias(nnx.Module):
    """(positions of queries int32 [T], of keys int32 [S]) -> float32 [N, T, S], for all layers of a stack."""

    def __init__(self, config: RelativeBiasConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.init_std)
        shape = (config.num_buckets, config.num_heads)
        self.table = weight(shape, ("buckets", "heads"), init, rngs, "embedding")

    def __call__(self, q_positions_T: jax.Array, k_positions_S: jax.Array) -> jax.Array:
        farthest = self.config.max_distance
        offsets_TS = jnp.clip(k_positions_S[None] - q_positions_T[:, None], -farthest, farthest)
        bucket_TS = jnp.asarray(self.config.buckets())[offsets_TS + farthest]
        # A product, because the gradient of a lookup would add T * S rows to the few of the table one after the other.
        is_bucket_TSC = (bucket_TS[..., None] == jnp.arange(self.config.num_buckets)).astype(jnp.float32)
        table_CN = self.table[...].astype(jnp.float32)
        bias_NTS = jnp.einsum("tsc,cn->nts", is_bucket_TSC, table_CN, precision=dot_precision(jnp.float32))
        return constrain(bias_NTS, "heads", None, None)
