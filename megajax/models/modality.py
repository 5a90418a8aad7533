"""What the encoders of all modalities have in common: transformer layers, and a projector to the text's width.

Dimensions: B blocks, P positions of a block (patches of images, frames of sound), C width of the encoder, F = P /
merged results, D width of the text. Media of any size are packed one after another in a block (Dehghani et al. 2023,
NaViT), and a position attends to those of its view (media/rows.py).
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import MAY_CHANGE, Epsilon, NonNegativeInt, PositiveInt, Range
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.layer import Activation, Flops
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.transformer import TransformerLayerConfig
from megajax.media.kinds import Kind
from megajax.media.rows import Layouts
from megajax.mesh.config import MeshConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray
from megajax.ops import activation as nonlinearity
from megajax.ops.activation import activate
from megajax.ops.attention_mask import FULL


@dataclasses.dataclass(frozen=True)
class ModalityConfig:
    """Base of the section of a modality; with num_layers=0 the model does not read it. A derived class has the
    properties that raise here."""

    num_layers: Annotated[int, Range(at_least=0, at_most=10_000)] = 0
    """Transformer layers; 0: the model has no such encoder."""
    embed_dim: PositiveInt = 1024
    """Width of the encoder."""
    num_heads: PositiveInt = 16
    """Attention heads."""
    mlp_dim: PositiveInt = 4096
    """Feed-forward width."""
    activation: nonlinearity.Activation = "gelu_tanh"
    """Feed-forward activation."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of normalisation."""
    norm_epsilon: Epsilon = 1e-6
    """Added to the variance."""
    merged_by_mean: bool = False
    """The positions that become one token are averaged (Gemma 3) instead of concatenated."""
    project_norm: Literal["none", "patch", "merged"] = "none"
    """What the projector normalises: each position before they are merged, or what they are merged into."""
    project_norm_kind: Literal["layernorm", "rmsnorm", "rmsnorm_1p"] = "layernorm"
    """Kind of that normalisation; _1p: the scale is stored minus one."""
    project_norm_epsilon: Epsilon | None = None
    """Added to its variance; None: norm_epsilon."""
    project_dim: PositiveInt | None = None
    """Width of the hidden layer of the projector; None: it is a single matrix."""
    project_activation: nonlinearity.Activation = "gelu"
    """Of the hidden layer."""
    project_bias: bool = True
    """Biases of the projector."""
    deep_layers: tuple[NonNegativeInt, ...] = ()
    """Layers whose outputs, each through a projector of its own, are added to the outputs of the first layers of the
    text, one each (Meng et al. 2024, DeepStack; Qwen3-VL)."""
    blocks: PositiveInt = dataclasses.field(default=1, metadata=MAY_CHANGE)
    """Blocks of a training sample, which the devices of mesh.context, tensor and pipeline share; an image, a tile of
    it, or a piece of sound, is in one block."""

    kind: ClassVar[Kind]

    @property
    def block_size(self) -> int:
        """Positions of a block."""
        raise NotImplementedError

    @property
    def merged(self) -> int:
        """Positions that become one token of the text."""
        raise NotImplementedError

    @property
    def layouts(self) -> Layouts:
        """Of the media that it encodes."""
        raise NotImplementedError

    @property
    def embed_flops(self) -> Flops:
        """Of the embedding of a position."""
        raise NotImplementedError

    @property
    def attention_options(self) -> dict[str, Any]:
        """Of AttentionConfig, besides what all encoders have."""
        raise NotImplementedError

    def build(self, embed_dim: int, init_std: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> "Encoder":
        """embed_dim: of the text."""
        raise NotImplementedError

    # ------------------------------------------------------------------ derived from the methods above

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def norm_config(self) -> NormConfig:
        return NormConfig(self.norm, self.norm_epsilon, zero_centered=False, bias=True)

    def layers(self, execution: ExecutionConfig, init_std: float) -> tuple["ModalityLayerConfig", ...]:
        attention = AttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            out_bias=True,
            mask=FULL,
            segments="view_ids",
            **self.attention_options,
            **execution.of_attention,
            init_std=init_std,
            out_init_std=init_std / (2 * max(self.num_layers, 1)) ** 0.5,
        )
        layer = ModalityLayerConfig(
            attention=attention,
            mlp=MlpConfig(self.embed_dim, self.mlp_dim, self.activation, True, init_std, attention.out_init_std),
            norm=self.norm_config,
            blocks=self.blocks,
            block_size=self.block_size,
        )
        how = (execution.recompute_modules, execution.offload)
        return tuple(layer.saving(execution.recompute_of(number), *how) for number in range(self.num_layers))

    def arrays(self) -> dict[str, BatchArray]:
        """Of a batch, besides the index of the text."""
        shape = (self.blocks, self.block_size)
        dims = ("blocks", None, None)
        values = BatchArray(dims, (*shape, self.layouts.value_dim), jnp.dtype(self.kind.values_dtype))
        return {self.kind.values: values, self.kind.places: BatchArray(dims, (*shape, self.kind.num_places), jnp.int32)}

    def flops_around(self, embed_dim: int) -> Flops:
        """Of the embedding and the projectors, per sample."""
        positions = self.blocks * self.block_size
        wide = self.embed_dim * (1 if self.merged_by_mean else self.merged)
        hidden = self.project_dim
        one = 2 * wide * embed_dim if hidden is None else 2 * hidden * (wide + embed_dim)
        projected = Flops(one * (1 + len(self.deep_layers)))
        return self.embed_flops * positions + projected * (positions / self.merged)

    def check(self, prefix: str) -> None:
        """Raises ValueError for fields that contradict each other. prefix: before names, as "model.vision."."""
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"{prefix}embed_dim={self.embed_dim} is not divisible by {prefix}num_heads={self.num_heads}; use a "
                "width of whole heads"
            )
        if self.block_size % self.merged:
            name = f"{prefix}{self.kind.values}"
            raise ValueError(
                f"{name}={self.block_size} is no multiple of the {self.merged} {self.kind.values} that are merged "
                f"into one token; use {name}={-(-self.block_size // self.merged) * self.merged}"
            )
        if tuple(sorted(set(self.deep_layers))) != self.deep_layers or max(self.deep_layers, default=0) >= max(
            self.num_layers, 1
        ):
            raise ValueError(
                f"{prefix}deep_layers={','.join(map(str, self.deep_layers))} must ascend and be below "
                f"{prefix}num_layers={self.num_layers}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalityLayerConfig(TransformerLayerConfig):
    """A layer of an encoder, whose positions are not the tokens of the text: what it says is per token of the text."""

    blocks: int
    """Of a sample."""
    block_size: int

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        """Every device runs whole layers."""

    def flops(self, sequence_length: int) -> Flops:
        """As if a view took all of a block."""
        return super().flops(self.block_size) * (self.blocks * self.block_size / sequence_length)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        share = self.blocks * self.block_size / sequence_length

        def scaled(a: Activation) -> Activation:
            return a._replace(elements=a.elements * share, flops=a.flops * share, scores=a.scores * share)

        return {name: scaled(a) for name, a in super().activations(self.block_size).items()}

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        return {}


class Encoder(nnx.Module):
    """All of an encoder but its layers, which are a stack of the model. A derived class has the methods that raise
    here."""

    def __init__(self, config: ModalityConfig, embed_dim: int, init_std: float, *, rngs: nnx.Rngs):
        """embed_dim: of the text."""
        self.project = Projector(config, config.project_norm, embed_dim, init_std, rngs=rngs)
        for number in range(len(config.deep_layers)):
            setattr(self, deep_name(number), Projector(config, "merged", embed_dim, init_std, rngs=rngs))

    def embed(self, batch: dict) -> jax.Array:
        """The arrays of its kind, as MultimodalConfig.inputs has them -> [B, P, C]."""
        raise NotImplementedError

    def layer_inputs(self, batch: dict) -> dict:
        """What the layers read besides x: view_ids int32 [B, P], 0 for padding, and others."""
        raise NotImplementedError

    def last(self, x_BPC: jax.Array, batch: dict) -> jax.Array:
        """The output of the last layer as the projector reads it."""
        raise NotImplementedError

    def results(self, outputs: list[jax.Array], batch: dict) -> tuple[jax.Array, ...]:
        """outputs: [B, P, C] of the deep layers and the last one -> of the last one and the deep layers, [B, F, D]."""
        *deep, last_BPC = outputs
        projected = [getattr(self, deep_name(number))(x_BPC) for number, x_BPC in enumerate(deep)]
        return (self.project(self.last(last_BPC, batch)), *projected)


def deep_name(number: int) -> str:
    """Name of the projector of the deep layer with this number."""
    return f"deep_{number}"


class Projector(nnx.Module):
    """[B, P, C] -> merged, normalised, projected to the text's width [B, F, D]."""

    def __init__(
        self, config: ModalityConfig, norm: Literal["none", "patch", "merged"], embed_dim: int, init_std: float, *,
        rngs: nnx.Rngs,
    ):  # fmt: skip
        self.config = config
        self.norm_at = norm
        C = config.embed_dim
        wide = C if config.merged_by_mean else C * config.merged
        if norm != "none":
            kind = config.project_norm_kind
            form = NormConfig(
                "layernorm" if kind == "layernorm" else "rmsnorm",
                config.norm_epsilon if config.project_norm_epsilon is None else config.project_norm_epsilon,
                zero_centered=kind.endswith("_1p"),
                bias=True,
            )
            self.norm = Norm(form, C if norm == "patch" else wide, rngs=rngs)
        hidden = config.project_dim
        if hidden is not None:
            self.up = Linear((wide,), (hidden,), ("embed", "mlp"), init_std, rngs=rngs)
        inputs = (wide, "embed") if hidden is None else (hidden, "mlp")
        out_axis = "head_dim" if hidden is None else "embed"
        self.down = Linear(inputs[:1], (embed_dim,), (inputs[1], out_axis), init_std, rngs=rngs)
        for linear in self._linears() if config.project_bias else ():
            linear.add_bias_parameter(rngs)

    def _linears(self) -> tuple[Linear, ...]:
        return (self.down,) if self.config.project_dim is None else (self.up, self.down)

    def __call__(self, x_BPC: jax.Array) -> jax.Array:
        if self.norm_at == "patch":
            x_BPC = self.norm(x_BPC)
        y = self._merged(x_BPC)
        if self.norm_at == "merged":
            y = self.norm(y)
        if self.config.project_dim is not None:
            y = activate(self.up(y)[..., None, :], self.config.project_activation)
        return self.down(y)

    def _merged(self, x_BPC: jax.Array) -> jax.Array:
        batch, positions, width = x_BPC.shape
        groups = x_BPC.reshape(batch, positions // self.config.merged, self.config.merged, width)
        if self.config.merged_by_mean:
            return jnp.mean(groups.astype(jnp.float32), 2).astype(x_BPC.dtype)
        return groups.reshape(*groups.shape[:2], -1)
