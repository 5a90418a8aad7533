"""Towers: encoders of images in patches, such as CLIP, SigLIP and those of Qwen, and the projector to the text's width.

Dimensions: B blocks, P patches of a block, p values of a patch, C width of the tower, m side of the square of patches
that becomes one token, F = P / m^2 results, D width of the text.
Images of any size are packed one after another in a block (Dehghani et al. 2023, NaViT); a patch attends to those of
its image, or of its window. The patches of a square of m x m are adjacent.

| | positions | norm | class_token | patch_bias | final_norm | project_norm, hidden |
|---|---|---|---|---|---|---|
| CLIP in LLaVA (Radford et al. 2021) | table | layernorm, embedding_norm | yes | no | no | none, D |
| SigLIP (Zhai et al. 2023) | table | layernorm | no | yes | yes | none, D; Gemma 3: merged by mean, merged, None |
| SigLIP2 NaFlex | table, antialiased | layernorm | no | yes | yes | |
| Qwen2.5-VL | rotary, windows | rmsnorm | no | no | no | patch, m^2 C |
| Qwen3-VL | table, rotary | layernorm | no | yes | no | patch, m^2 C; deep layers: merged |
| InternViT | table | layernorm, branch_scales | yes | yes | no | merged, D |
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.fields.ranges import MAY_CHANGE, Epsilon, NonNegativeInt, PositiveInt
from megajax.images.layout import CLASS_TOKEN, Layouts
from megajax.images.rules import ImageRule
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.mlp import MlpConfig
from megajax.layers.layer import Activation, Flops
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.transformer import TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.models.execution import ExecutionConfig
from megajax.ops import activation as nonlinearity
from megajax.ops.activation import activate
from megajax.ops.attention_mask import FULL
from megajax.ops.matmul import dot_precision
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """A section of a model; with num_layers=0 the model has no tower."""

    num_layers: NonNegativeInt = 0
    """Transformer layers; 0: the model reads no images."""
    embed_dim: PositiveInt = 1024
    """Width of the tower."""
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
    image: ImageRule = ImageRule()
    """How images become patches."""
    frames: PositiveInt = 1
    """Frames of a patch; those of a still image are equal (Qwen: 2)."""
    patch_bias: bool = True
    """Bias of the embedding of patches."""
    class_token: bool = False
    """Each image has a further token, which the text does not read (CLIP, InternViT)."""
    table: NonNegativeInt = 0
    """Side of the learned table of positions, in patches, stretched to the grid of each image; 0: none."""
    table_corners: bool = True
    """Corners of table and image coincide (Qwen3-VL); False: their edges do, and the table is filtered where it shrinks
    (NaFlex)."""
    rotary: bool = False
    """Rotate half of each head by row, half by column (Qwen)."""
    qkv_bias: bool = True
    """Biases of queries, keys and values (InternViT-6B: none)."""
    qk_norm: bool = False
    """Normalise queries and keys, all heads of a patch together (InternViT-6B)."""
    embedding_norm: bool = False
    """Normalise the embeddings before the first layer (CLIP)."""
    branch_scales: bool = False
    """Multiply the output of each branch by a learned vector (InternViT)."""
    final_norm: bool = True
    """Normalise the output of the last layer (SigLIP)."""
    window: NonNegativeInt = 0
    """Side of the squares, in patches, in which most layers attend (Qwen2.5-VL: 8); 0: all layers attend to images."""
    full_layers: tuple[NonNegativeInt, ...] = ()
    """With window: the layers that attend to whole images."""
    merged_by_mean: bool = False
    """The patches of a merged square are averaged (Gemma 3) instead of concatenated."""
    project_norm: Literal["none", "patch", "merged"] = "none"
    """What the projector normalises: each patch before they are merged, or what they are merged into."""
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
    newline: bool = False
    """A learned token ends each row of tiles (LLaVA-NeXT)."""
    blocks: PositiveInt = dataclasses.field(default=1, metadata=MAY_CHANGE)
    """Blocks of patches of a training sample, which the devices of mesh.context, tensor and pipeline share; an image,
    or a tile of it, is in one block."""
    patches: PositiveInt = dataclasses.field(default=1024, metadata=MAY_CHANGE)
    """Patches of a block, class tokens included."""

    @property
    def merged(self) -> int:
        """Patches that become one token of the text."""
        return self.image.merge**2

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        return self.image.patch_size, self.image.patch_size, 3

    @property
    def layouts(self) -> Layouts:
        """Of the images that it encodes."""
        return Layouts(self.image, self.class_token, self.window)

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    @property
    def norm_config(self) -> NormConfig:
        return NormConfig(self.norm, self.norm_epsilon, zero_centered=False, bias=True)

    @property
    def table_rows(self) -> int:
        return self.table**2 + self.class_token

    def layers(self, execution: ExecutionConfig, init_std: float) -> tuple["TowerLayerConfig", ...]:
        attention = AttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            qkv_bias=self.qkv_bias,
            out_bias=True,
            qk_norm=dataclasses.replace(self.norm_config, kind="rmsnorm") if self.qk_norm else None,
            qk_norm_scope="all_heads",
            rope="global" if self.rotary else "none",
            mask=FULL,
            segments="image_ids",
            **execution.of_attention,
            init_std=init_std,
            out_init_std=init_std / (2 * max(self.num_layers, 1)) ** 0.5,
        )
        layer = TowerLayerConfig(
            attention=attention,
            mlp=MlpConfig(self.embed_dim, self.mlp_dim, self.activation, True, init_std, attention.out_init_std),
            norm=self.norm_config,
            branch_scales=self.branch_scales,
            blocks=self.blocks,
            patches=self.patches,
        )
        windowed = dataclasses.replace(layer, attention=dataclasses.replace(attention, segments="window_ids"))
        chosen = [
            layer if not self.window or number in self.full_layers else windowed for number in range(self.num_layers)
        ]
        how = (execution.recompute_modules, execution.offload)
        return tuple(one.saving(execution.recompute_of(number), *how) for number, one in enumerate(chosen))

    def check(self, prefix: str = "model.vision.") -> None:
        """Raises ValueError for fields that contradict each other."""
        self.image.check(f"{prefix}image.")
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"{prefix}embed_dim={self.embed_dim} is not divisible by {prefix}num_heads={self.num_heads}; use a "
                "width of whole heads"
            )
        if self.rotary and self.head_dim % 4:
            raise ValueError(
                f"{prefix}rotary rotates pairs by row and pairs by column, and the width {self.head_dim} of a head is "
                f"no multiple of 4; change {prefix}num_heads"
            )
        if self.patches % self.merged:
            raise ValueError(
                f"{prefix}patches={self.patches} is no multiple of the {self.merged} patches that become one token; "
                f"use {prefix}patches={-(-self.patches // self.merged) * self.merged}"
            )
        if self.window % self.image.merge:
            raise ValueError(
                f"{prefix}window={self.window} is no multiple of {prefix}image.merge={self.image.merge}, whose squares "
                f"it must hold whole; use {prefix}window={-(-self.window // self.image.merge) * self.image.merge}"
            )
        if tuple(sorted(set(self.deep_layers))) != self.deep_layers or max(self.deep_layers, default=0) >= max(
            self.num_layers, 1
        ):
            raise ValueError(
                f"{prefix}deep_layers={','.join(map(str, self.deep_layers))} must ascend and be below "
                f"{prefix}num_layers={self.num_layers}"
            )

    def projector_flops(self, embed_dim: int) -> Flops:
        """Per result."""
        wide = self.embed_dim * (1 if self.merged_by_mean else self.merged)
        hidden = self.project_dim
        one = 2 * wide * embed_dim if hidden is None else 2 * hidden * (wide + embed_dim)
        return Flops(one * (1 + len(self.deep_layers)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerLayerConfig(TransformerLayerConfig):
    """A layer of a tower, whose patches are not the tokens of the text: what it says is per token of the text."""

    blocks: int
    """Of a sample."""
    patches: int
    """Of a block."""

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        """Every device runs whole layers."""

    def flops(self, sequence_length: int) -> Flops:
        """As if an image took all patches of a block."""
        return super().flops(self.patches) * (self.blocks * self.patches / sequence_length)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        share = self.blocks * self.patches / sequence_length

        def scaled(a: Activation) -> Activation:
            return a._replace(elements=a.elements * share, flops=a.flops * share, scores=a.scores * share)

        return {name: scaled(a) for name, a in super().activations(self.patches).items()}

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        return {}


class Tower(nnx.Module):
    """All of a tower but its layers, which are a stack of the model."""

    def __init__(self, config: TowerConfig, embed_dim: int, init_std: float, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        """embed_dim: of the text."""
        self.config = config
        self.dtype = dtype
        C = config.embed_dim
        init = nnx.initializers.normal(init_std)
        pixels = (config.frames, *config.patch_shape)
        self.patch = Linear(pixels, (C,), (*["pixels"] * 4, "embed"), init_std, rngs=rngs)
        if config.patch_bias:
            self.patch.add_bias_parameter(rngs)
        if config.class_token:
            self.class_token = weight((C,), ("norm",), init, rngs, "vector")
        if config.table:
            self.table = weight((config.table_rows, C), ("pixels", "embed"), init, rngs, "embedding")
        if config.embedding_norm:
            self.embedding_norm = Norm(config.norm_config, C, rngs=rngs)
        if config.final_norm:
            self.final_norm = Norm(config.norm_config, C, rngs=rngs)
        if config.newline:
            self.newline = weight((embed_dim,), ("norm",), init, rngs, "vector")
        self.project = Projector(config, config.project_norm, embed_dim, init_std, rngs=rngs)
        for number in range(len(config.deep_layers)):
            setattr(self, deep_name(number), Projector(config, "merged", embed_dim, init_std, rngs=rngs))

    def embed(self, batch: dict) -> jax.Array:
        """patches uint8 [B, P, p], patch_places int32 [B, P, 5] (MultimodalConfig.inputs) -> [B, P, C]."""
        config = self.config
        patches_BPp = batch["patches"]
        places_BP5 = batch["patch_places"]
        values_BPp = self._normalized(patches_BPp).astype(self.dtype)
        values = values_BPp.reshape(*patches_BPp.shape[:2], 1, *config.patch_shape)
        values = jnp.broadcast_to(values, (*values.shape[:2], config.frames, *config.patch_shape))
        x_BPC = self.patch(values)
        if config.class_token:
            is_class_BP1 = (places_BP5[..., 1] == CLASS_TOKEN)[..., None]
            x_BPC = jnp.where(is_class_BP1, self.class_token[...].astype(self.dtype), x_BPC)
        if config.table:
            x_BPC += self._positions(places_BP5)
        if config.embedding_norm:
            _, x_BPC = self.embedding_norm.residual(x_BPC)
        return x_BPC

    def layer_inputs(self, batch: dict) -> dict:
        """What the layers read besides x."""
        config = self.config
        image_BP, row_BP, col_BP, _, _ = jnp.moveaxis(batch["patch_places"], -1, 0)
        inputs = {"image_ids": image_BP}
        if config.window:
            side = config.window
            window_BP = (image_BP * 1024 + row_BP // side) * 1024 + col_BP // side
            inputs["window_ids"] = jnp.where(image_BP > 0, window_BP, 0)
        if config.rotary:
            frequencies = RopeConfig().inverse_frequencies(config.head_dim // 2)
            frequencies = frequencies.astype(np.float32)
            angles = [place_BP[..., None].astype(jnp.float32) * frequencies for place_BP in (row_BP, col_BP)]
            angles_BPR = jnp.concatenate(angles, -1)
            inputs |= {"cos_global": jnp.cos(angles_BPR), "sin_global": jnp.sin(angles_BPR)}
        return inputs

    def results(self, outputs: list[jax.Array]) -> tuple[jax.Array, ...]:
        """outputs: [B, P, C] of the deep layers and the last one -> of the last one and the deep layers, [B, F, D]."""
        *deep, last_BPC = outputs
        if self.config.final_norm:
            last_BPC = self.final_norm(last_BPC)
        projected = [getattr(self, deep_name(number))(x_BPC) for number, x_BPC in enumerate(deep)]
        return (self.project(last_BPC), *projected)

    def _normalized(self, patches_BPp: jax.Array) -> jax.Array:
        """uint8 -> float32."""
        rule = self.config.image
        mean, std = (np.tile(np.array(values, np.float32), rule.patch_size**2) for values in (rule.mean, rule.std))
        return (patches_BPp.astype(jnp.float32) / 255 - mean) / std

    def _positions(self, places_BP5: jax.Array) -> jax.Array:
        """The table, stretched to the grid of each image, at these places [B, P, C]."""
        config = self.config
        _, row_BP, col_BP, rows_BP, cols_BP = jnp.moveaxis(places_BP5, -1, 0)
        of_row_BPn = stretched(row_BP, rows_BP, config.table, config.table_corners)
        of_col_BPn = stretched(col_BP, cols_BP, config.table, config.table_corners)
        shares = (of_row_BPn[..., :, None] * of_col_BPn[..., None, :]).reshape(*row_BP.shape, -1)
        if config.class_token:
            is_class_BP1 = (row_BP == CLASS_TOKEN)[..., None]
            shares = jnp.concatenate([is_class_BP1.astype(jnp.float32), jnp.where(is_class_BP1, 0.0, shares)], -1)
        table = self.table[...].astype(self.dtype)
        return jnp.einsum("bpn,nc->bpc", shares.astype(self.dtype), table, precision=dot_precision(self.dtype))


class Projector(nnx.Module):
    """[B, P, C] -> merged, normalised, projected to the text's width [B, F, D]."""

    def __init__(
        self, config: TowerConfig, norm: Literal["none", "patch", "merged"], embed_dim: int, init_std: float, *,
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
        batch, num_patches, width = x_BPC.shape
        squares = x_BPC.reshape(batch, num_patches // self.config.merged, self.config.merged, width)
        if self.config.merged_by_mean:
            return jnp.mean(squares.astype(jnp.float32), 2).astype(x_BPC.dtype)
        return squares.reshape(*squares.shape[:2], -1)


def deep_name(number: int) -> str:
    """Name of the projector of the deep layer with this number."""
    return f"deep_{number}"


def stretched(place: jax.Array, count: jax.Array, side: int, corners: bool) -> jax.Array:
    """The weights of the `side` entries of a table for places 0 to count - 1 along one dim, linearly interpolated
    [..., side] float32.

    corners: entry 0 is at place 0 and the last entry at the last place. Otherwise the table covers the places from edge
    to edge, and where it shrinks, an entry counts for as many places as it covers (antialiased)."""
    entries = jnp.arange(side, dtype=jnp.float32)
    place = place[..., None].astype(jnp.float32)
    count = count[..., None].astype(jnp.float32)
    if corners:
        centre = place * (side - 1) / jnp.maximum(count - 1, 1)
        return jnp.maximum(1 - jnp.abs(entries - centre), 0)
    scale = side / jnp.maximum(count, 1)
    centre = (place + 0.5) * scale - 0.5
    shares = jnp.maximum(1 - jnp.abs(entries - centre) / jnp.maximum(scale, 1), 0)
    return shares / jnp.maximum(jnp.sum(shares, -1, keepdims=True), 1e-6)
