"""Self-attention layer: multi-head, grouped-query (Ainslie et al. 2023) or multi-query; ALiBi (Press et al. 2022).

Dimensions: B batch, T sequence, S keys, D model width, N heads, K key-value heads, H head dim.
Tensor parallel: the heads of query, key, value and out are split; one reduction at the end.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention.kv_cache import PagedCache, PoolSizes
from megajax.layers.attention.rope import apply_rope
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, Branch, BranchConfig, Flops, Terms, check_divisible
from megajax.layers.linear import Linear, SideBySide, input_axis, side_by_side
from megajax.layers.norm import Norm, NormConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.ops.attention_backends import BackendName
from megajax.ops.attention_mask import CAUSAL, Mask, window
from megajax.ops.joining import split
from megajax.ops.matmul import add_bias
from megajax.parallel.context import ContextMethod, attention
from megajax.parameters import weight

MAX_DROPOUT_LENGTH = 65536  # dropout packs the query and key indices into one 32-bit counter


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(BranchConfig):
    """The defaults are plain causal attention, so that a model names only what differs."""

    num_heads: int
    num_kv_heads: int | None = None
    """None: num_heads."""
    head_dim: int
    qkv_bias: bool = False
    key_bias: bool = True
    """Whether qkv_bias is also of the keys (Whisper: no)."""
    out_bias: bool = False
    qk_norm: NormConfig | None = None
    qk_norm_scope: Literal["head", "all_heads"] = "head"
    rope: Literal["none", "global", "local"] = "none"
    """Which of the rotary tables in the inputs to use."""
    rope_interleaved: bool = False
    alibi: bool = False
    relative_bias: bool = False
    """Add `relative_bias` of the inputs to the scores (layers/attention/relative_position.py)."""
    mask: Mask = CAUSAL
    """Which tokens of its segment a token attends to. Padding is a segment of its own."""
    segments: str = "segment_ids"
    """Which of the inputs has the segments."""
    scale: float | None = None
    """Factor on the scores; None: 1 / sqrt(width of a query)."""
    soft_cap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    context: ContextMethod = "ring"
    backend: BackendName = "auto"
    deterministic: bool = False
    init_std: float
    out_init_std: float
    query_init_std: float | None = None
    """Of the queries; None: init_std."""

    kind = "attention"
    projected = "qkv"
    caches_values = True
    """Whether a cache stores values besides keys."""

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        return {
            "qkv": ("qkv",),
            "core_attention": ("attention_out",),
            "attention": ("qkv", "attention_out"),
        }

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def score_scale(self) -> float:
        """Factor on the scores."""
        return 1.0 / math.sqrt(self.heads_dim // self.num_heads) if self.scale is None else self.scale

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Number and width of the heads whose keys a cache stores."""
        return self.kv_heads, self.head_dim

    @property
    def heads_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of keys and values together."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def out_dim(self) -> int:
        """Width of the outputs of all heads together."""
        return self.heads_dim

    @property
    def qkv_flops(self) -> float:
        """FLOPs of the projections to queries, keys and values per token."""
        return 2 * self.embed_dim * (self.heads_dim + self.kv_dim)

    @property
    def out_flops(self) -> float:
        return 2 * self.embed_dim * self.out_dim

    def new_pages(self, sizes: PoolSizes) -> PagedCache:
        if self.mask != CAUSAL & window(self.mask.reach):
            raise ValueError(
                f"attention with the mask '{self.mask}' cannot read pages of the last tokens: use a causal mask, with "
                "or without a window"
            )
        return PagedCache.zeros(sizes, *self.cached_heads, has_values=self.caches_values)

    @property
    def reach(self) -> int | None:
        return self.mask.reach

    def build(self, rngs: nnx.Rngs) -> Branch:
        return Attention(self, rngs=rngs)

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        check_divisible("tensor", mesh.tensor, {"num_heads": self.num_heads, "num_kv_heads": self.kv_heads})
        if self.dropout > 0 and sequence_length > MAX_DROPOUT_LENGTH:
            raise ValueError(
                f"model.attention_dropout={self.dropout} supports sequences of at most {MAX_DROPOUT_LENGTH} tokens, "
                f"training.sequence_length={sequence_length} is longer; use --model.attention_dropout=0"
            )
        if mesh.context > 1:
            self._check_context(mesh, sequence_length)

    def _check_context(self, mesh: MeshConfig, sequence_length: int) -> None:
        if self.context != "all_to_all":
            if sequence_length % (2 * mesh.context):
                raise ValueError(
                    f"training.sequence_length={sequence_length} is not divisible by {2 * mesh.context} = 2 * "
                    f"mesh.context, the chunks of execution.context_attention={self.context}; use "
                    f"--training.sequence_length={-(-sequence_length // (2 * mesh.context)) * 2 * mesh.context}"
                )
            return
        for name, value in (("num_heads", self.num_heads), ("num_kv_heads", self.kv_heads)):
            if value % (mesh.tensor * mesh.context):
                raise ValueError(
                    f"model.{name}={value} is not divisible by {mesh.tensor * mesh.context} = mesh.tensor("
                    f"{mesh.tensor}) * mesh.context({mesh.context}), over which execution.context_attention=all_to_all "
                    "splits the heads; use --execution.context_attention=ring"
                )

    def flops(self, sequence_length: int) -> Flops:
        visible = self.mask.mean_keys(sequence_length)
        pair = 2 * (self.heads_dim + self.out_dim)  # per query-key pair: the score, and its contribution to the output
        return Flops(self.qkv_flops + self.out_flops, mixing=pair * sequence_length, mixing_causal=pair * visible)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        return {
            "qkv": Activation(self.heads_dim + self.kv_dim, Flops(self.qkv_flops)),
            "attention_out": Activation(
                self.out_dim,
                dataclasses.replace(self.flops(sequence_length), matmuls=0.0),
                scores=self.num_heads * sequence_length * (6 if self.dropout else 3),  # as XLA compiles it for the CPU
                needs_scores=self.backend == "reference"
                or self.dropout > 0
                or self.alibi
                or not self.mask.is_interval
                or (self.relative_bias and (self.deterministic or sequence_length % 2 > 0 or self.head_dim > 128)),
                # The bias of each pair and its gradient, as far as they show in the time of t5_base.
                inside=3 * self.num_heads * sequence_length * self.relative_bias,
            ),
        }

    def sent(self, mesh: MeshConfig, itemsize: int, passes: int) -> dict[str, float]:
        if self.context == "all_to_all":  # q, k, v and out both ways, and the extra traffic of the backward pass
            over_context = (3 * self.heads_dim + 2 * self.out_dim + 3 * self.kv_dim) * itemsize
        else:  # both passes, with gradients in float32
            over_context = self.kv_dim * mesh.context * (2 * itemsize + 4)
        return super().sent(mesh, itemsize, passes) | {"context": over_context}


class Attention(nnx.Module):
    """x [B, T, D] -> [B, T, D]."""

    def __init__(self, config: AttentionConfig, *, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        N = config.num_heads
        K = config.kv_heads
        H = config.head_dim
        query_std = config.init_std if config.query_init_std is None else config.query_init_std
        self.query = Linear((D,), (N, H), ("embed", "heads", "head_dim"), query_std, rngs=rngs)
        self.key = Linear((D,), (K, H), ("embed", "kv_heads", "head_dim"), config.init_std, rngs=rngs)
        self.value = Linear((D,), (K, H), ("embed", "kv_heads", "head_dim"), config.init_std, rngs=rngs)
        self.out = Linear((N, H), (D,), ("heads", "head_dim", "embed"), config.out_init_std, rngs=rngs)
        for linear in (self.query, self.key, self.value) if config.qkv_bias else ():
            if linear is not self.key or config.key_bias:
                linear.add_bias_parameter(rngs)
        if config.out_bias:
            self.out.add_bias_parameter(rngs)
        if config.qk_norm is not None:
            is_per_head = config.qk_norm_scope == "head"
            self.query_norm = Norm(config.qk_norm, H if is_per_head else N * H, rngs=rngs)
            self.key_norm = Norm(config.qk_norm, H if is_per_head else K * H, rngs=rngs)
        if config.sinks:
            self.sinks = weight((N,), ("heads",), nnx.initializers.zeros, rngs, "vector")

    @property
    def input_axis(self) -> str:
        """Logical axis of the sequence in the layer's input."""
        return input_axis((self.query, self.key, self.value))

    def __call__(
        self, x_BTD: jax.Array, inputs: dict, cache: Any = None, key: DropoutKey | None = None
    ) -> tuple[jax.Array, Any, Terms]:
        """-> (out, cache, no Terms).

        inputs: `cos_global` and `sin_global`, or `cos_local` and `sin_local` (config.rope); optionally the segments,
            int32 [B, T]; `block_ids`, int32 [B, T], above 0 for adjacent tokens that also see the later of them;
            with config.relative_bias `relative_bias`, float32 [N, T, S].
        cache: has `attend(q, k, v, ...) -> (out, cache)`, see layers/attention/kv_cache.py; None in training.
        key: for config.dropout of the attention probabilities; None: no dropout.
        """
        config = self.config
        q_BTNH, k_BTKH, v_BTKH, joined = self._project(x_BTD, has_gradient=cache is None)
        q_BTNH = rotated(q_BTNH, config, inputs)
        k_BTKH = rotated(k_BTKH, config, inputs)
        options = attention_options(config, self.sinks[...] if config.sinks else None)
        if config.relative_bias:
            options["bias"] = inputs["relative_bias"]
        if cache is not None:
            out_BTNH, cache = cache.attend(q_BTNH, k_BTKH, v_BTKH, **options)
        else:
            out_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, config, inputs, key, options | {"joined": joined})
        return self.out(out_BTNH), cache, Terms()

    def _normed(self, norm: Norm, x_BTNH: jax.Array) -> jax.Array:
        if self.config.qk_norm_scope == "head":
            return norm(x_BTNH, num_heads=x_BTNH.shape[2])
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

    @property
    def _norms_are_alike(self) -> bool:
        """Whether queries and keys are normalised per head, as they come from their matmul."""
        config = self.config
        return config.qk_norm is not None and config.qk_norm_scope == "head" and not config.qkv_bias

    def _normed_together(self, joined_BTKGH: jax.Array) -> jax.Array:
        """_normed of queries and keys beside each other, and the values as they are: XLA makes one kernel of it."""
        place_G1 = jnp.arange(joined_BTKGH.shape[3])[:, None]
        normed = jnp.where(place_G1 < place_G1.size - 2, self.query_norm(joined_BTKGH), self.key_norm(joined_BTKGH))
        return jnp.where(place_G1 < place_G1.size - 1, normed, joined_BTKGH)

    @property
    def side_by_side(self) -> SideBySide:
        config = self.config
        return SideBySide(
            (self.query, self.key, self.value), (config.embed_dim, config.kv_heads, -1, config.head_dim), 2
        )

    def _project(
        self, x_BTD: jax.Array, *, has_gradient: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Queries, keys, both normalised, and values, computed by one matmul: concatenated per key-value head, the dim
        that `tensor` splits. And all together, [B, T, K, G + 2, H], if they are as attention reads them."""
        config = self.config
        H = config.head_dim
        heads = config.num_heads // config.kv_heads
        joined = side_by_side(x_BTD, *self.side_by_side, has_gradient=has_gradient)
        is_normed = not has_gradient and self._norms_are_alike
        is_final = has_gradient and config.rope == "none" and config.qk_norm is None
        if is_final:
            if config.qkv_bias:  # as one dim: the epilogue of a matmul adds a vector
                joined = add_bias(joined.reshape(*x_BTD.shape[:2], -1), self._biases().ravel()).reshape(joined.shape)
            joined = checkpoint_name(constrain(joined, "batch", "time", "kv_heads", None, None), "qkv")
            q, k, v = split(joined, 3, (heads, 1, 1))
        else:
            joined = self._normed_together(joined) if is_normed else joined
            # XLA computes gradients through a rotation in its concatenation, but not in the selects of `split`.
            q, k, v = jnp.split(joined, (heads, heads + 1), axis=3)
        q = q.reshape(*x_BTD.shape[:2], config.num_heads, H)
        k = k[..., 0, :]
        v = v[..., 0, :]
        if not is_final:
            q = self.query.add_bias(q)
            k = self.key.add_bias(k)
            v = self.value.add_bias(v)
        q = constrain(q, "batch", "time", "heads", None)
        k = constrain(k, "batch", "time", "kv_heads", None)
        v = constrain(v, "batch", "time", "kv_heads", None)
        q, k, v = (checkpoint_name(y, "qkv") for y in (q, k, v))
        if config.qk_norm is not None and not is_normed:
            q = self._normed(self.query_norm, q)
            k = self._normed(self.key_norm, k)
        return q, k, v, joined if is_final else None

    def _biases(self) -> jax.Array:
        """Those of queries, keys and values, [K, G + 2, H]."""
        config = self.config
        shape = (config.kv_heads, -1, config.head_dim)
        of_key = self.key.bias[...] if config.key_bias else jnp.zeros_like(self.value.bias[...])
        return jnp.concatenate([a.reshape(shape) for a in (self.query.bias[...], of_key, self.value.bias[...])], 1)


def rotated(x_BTNH: jax.Array, config: AttentionConfig, inputs: dict) -> jax.Array:
    """Applies the rotary embedding of this layer, if it has one."""
    if config.rope == "none":
        return x_BTNH
    tables = (inputs[f"cos_{config.rope}"], inputs[f"sin_{config.rope}"])
    return apply_rope(x_BTNH, *tables, interleaved=config.rope_interleaved)


def attention_options(config: AttentionConfig, sinks_N: jax.Array | None) -> dict:
    """Arguments of parallel/context.py's `attention`, in training and with a cache."""
    return dict(
        method=config.context,
        backend=config.backend,
        deterministic=config.deterministic,
        mask=config.mask,
        scale=config.score_scale,
        soft_cap=config.soft_cap,
        slopes=jnp.asarray(alibi_slopes(config.num_heads)) if config.alibi else None,
        sinks=sinks_N,
    )


def attend(
    q_BTNH, k_BTKH, v_BTKH, config: AttentionConfig, inputs: dict, dropout_key: DropoutKey | None, options: dict
) -> jax.Array:
    """Attention of a batch to itself, in training: within segments, with dropout."""
    segment_ids = inputs.get(config.segments)
    segments = None if segment_ids is None else (segment_ids, segment_ids)
    dropout = dropout_of(config, dropout_key)
    blocks = inputs.get("block_ids")
    return attention(q_BTNH, k_BTKH, v_BTKH, segments=segments, blocks=blocks, dropout=dropout, **options)


def dropout_of(config: AttentionConfig, key: DropoutKey | None) -> tuple[float, DropoutKey] | None:
    """The dropout of the probabilities as parallel/context.py's `attention` takes it."""
    return (config.dropout, key) if config.dropout and key is not None else None


def alibi_slopes(num_heads: int) -> np.ndarray:
    """float32 [N]: per head, how much a score decreases per token of distance between query and key.

    2^(-8 / n), 2^(-16 / n), ... where n is the largest power of two up to N; further heads take every second slope of 2
    n.
    """

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-8 / count * np.arange(1, count + 1))

    power = 2 ** int(math.log2(num_heads))
    return np.concatenate([geometric(power), geometric(2 * power)[::2]])[:num_heads].astype(np.float32)
