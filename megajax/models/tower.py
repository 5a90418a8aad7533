"""Towers: encoders of images in patches, such as CLIP, SigLIP and those of Qwen.

Dimensions: B blocks, P patches of a block, p values of a patch, C width of the tower, m side of the square of patches
that becomes one token, D width of the text.
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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.fields.ranges import MAY_CHANGE, NonNegativeInt, PositiveInt
from megajax.images.layout import CLASS_TOKEN, ImageLayouts
from megajax.images.rules import ImageRule
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.layer import Flops
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm
from megajax.media.kinds import IMAGE
from megajax.models.execution import ExecutionConfig
from megajax.models.modality import Encoder, ModalityConfig, ModalityLayerConfig
from megajax.ops.matmul import dot_precision
from megajax.parameters import weight


@dataclasses.dataclass(frozen=True)
class TowerConfig(ModalityConfig):
    """A section of a model; with num_layers=0 the model has no tower."""

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
    newline: bool = False
    """A learned token ends each row of tiles (LLaVA-NeXT)."""
    patches: PositiveInt = dataclasses.field(default=1024, metadata=MAY_CHANGE)
    """Patches of a block, class tokens included."""

    kind = IMAGE

    @property
    def block_size(self) -> int:
        return self.patches

    @property
    def merged(self) -> int:
        return self.image.merge**2

    @property
    def attention_options(self) -> dict[str, Any]:
        return dict(
            qkv_bias=self.qkv_bias,
            qk_norm=dataclasses.replace(self.norm_config, kind="rmsnorm") if self.qk_norm else None,
            qk_norm_scope="all_heads",
            rope="global" if self.rotary else "none",
        )

    @property
    def embed_flops(self) -> Flops:
        return Flops(2 * self.image.patch_size**2 * 3 * self.embed_dim * self.frames)

    @property
    def patch_shape(self) -> tuple[int, int, int]:
        return self.image.patch_size, self.image.patch_size, 3

    @property
    def layouts(self) -> ImageLayouts:
        """Of the images that it encodes."""
        return ImageLayouts(self.image, self.class_token, self.window)

    @property
    def table_rows(self) -> int:
        return self.table**2 + self.class_token

    def layers(self, execution: ExecutionConfig, init_std: float) -> tuple[ModalityLayerConfig, ...]:
        layers = [
            dataclasses.replace(layer, branch_scales=self.branch_scales)
            for layer in super().layers(execution, init_std)
        ]
        return tuple(
            windowed(layer) if self.window and number not in self.full_layers else layer
            for number, layer in enumerate(layers)
        )

    def build(self, embed_dim: int, init_std: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> "Tower":
        return Tower(self, embed_dim, init_std, dtype, rngs=rngs)

    def check(self, prefix: str = "model.vision.") -> None:
        super().check(prefix)
        self.image.check(f"{prefix}image.")
        if self.rotary and self.head_dim % 4:
            raise ValueError(
                f"{prefix}rotary rotates pairs by row and pairs by column, and the width {self.head_dim} of a head is "
                f"no multiple of 4; change {prefix}num_heads"
            )
        if self.window % self.image.merge:
            raise ValueError(
                f"{prefix}window={self.window} is no multiple of {prefix}image.merge={self.image.merge}, whose squares "
                f"it must hold whole; use {prefix}window={-(-self.window // self.image.merge) * self.image.merge}"
            )


def windowed(layer: ModalityLayerConfig) -> ModalityLayerConfig:
    return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, segments="window_ids"))


class Tower(Encoder):
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
        super().__init__(config, embed_dim, init_std, rngs=rngs)

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
        inputs = {"view_ids": image_BP}
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

    def last(self, x_BPC: jax.Array, batch: dict) -> jax.Array:
        return self.final_norm(x_BPC) if self.config.final_norm else x_BPC

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
