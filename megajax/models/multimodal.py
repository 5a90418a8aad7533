"""A decoder that reads images between its tokens (LLaVA, Liu et al. 2023, https://arxiv.org/abs/2304.08485; Gemma 3,
Qwen2.5-VL, Qwen3-VL): towers (models/tower.py) encode them on all devices of the mesh, and their results replace the
embeddings of the tokens that stand for an image. The data says which: the model never counts tokens.

Dimensions: as in models/decoder.py; K blocks of a sample, P patches of a block.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import NonNegativeInt
from megajax.images.layout import NEWLINE
from megajax.images.rows import ImageInputs
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Flops, Totals
from megajax.layers.transformer import ResidualLayerConfig, TransformerLayerConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import Decoder, DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, StackRole, split_key
from megajax.models.tower import Tower, TowerConfig
from megajax.parallel.encode import encode, num_parts
from megajax.parallel.schedule import Stages

TOWER = "vision_layers"


@dataclasses.dataclass(frozen=True)
class MultimodalConfig(DecoderConfig):
    kind: Literal["multimodal"] = "multimodal"  # pyrefly: ignore[bad-override]: a DecoderConfig but for its kind
    """The family of the model."""
    vision: TowerConfig = TowerConfig()
    """The encoder of images."""
    image_token: NonNegativeInt = 0
    """Token id that stands for an image, and for each of its results, in the text."""
    image_attention: Literal["causal", "bidirectional"] = "causal"
    """Whether the tokens of an image see each other in both directions (Gemma 3)."""

    @classmethod
    def of(cls, text: DecoderConfig, vision: TowerConfig, image_token: int) -> "MultimodalConfig":
        """A decoder that reads images besides."""
        fields = {field.name: getattr(text, field.name) for field in dataclasses.fields(text) if field.name != "kind"}
        return cls(**fields, vision=vision, image_token=image_token)

    def build(
        self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None
    ) -> "Multimodal":
        return Multimodal(self, dtype, execution, stages, rngs=rngs)

    def stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[ResidualLayerConfig, ...]]:
        return {TOWER: self.vision.layers(execution, self.init_std), **super().stacks(execution)}

    def _layer_config(self, number: int, execution: ExecutionConfig) -> TransformerLayerConfig:
        layer = super()._layer_config(number, execution)
        is_deep = number < len(self.vision.deep_layers)
        return dataclasses.replace(layer, added=added_name(number)) if is_deep else layer

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        return {TOWER: "embed", **super().stack_roles}

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """Besides those of the text:

        image_index int32 [T]: which result of the tower replaces the embedding of a token, counted over the blocks of
            the row; TEXT; NEWLINE.
        patches uint8 [K, P, values of a patch]: K blocks of the images of the row, as images/layout.py has them.
        patch_places int32 [K, P, 5]: Layout.places; the numbers of the views differ within a block.
        position_ids int32 [T, 3]: with rope.sections time, row and column of each token.
        block_ids int32 [T]: with image_attention=bidirectional the number of the image of a token from 1; 0: text.
        """
        found = super().inputs(sequence_length, packed=packed)
        sequence = BatchArray.sequence(sequence_length)
        found["image_index"] = sequence
        shape = (self.vision.blocks, self.vision.patches)
        dims = ("blocks", None, None)
        found["patches"] = BatchArray(dims, (*shape, self.vision.image.patch_size**2 * 3), jnp.uint8)
        found["patch_places"] = BatchArray(dims, (*shape, 5), jnp.int32)
        if self.rope.sections is not None:
            found["position_ids"] = BatchArray(("time", None), (sequence_length, 3), jnp.int32)
        if self.image_attention == "bidirectional":
            found["block_ids"] = sequence
        return found

    @property
    def image_inputs(self) -> ImageInputs:
        return ImageInputs(self.vision.layouts, self.image_token, self.vision.blocks, self.vision.patches)

    def flops_outside(self, sequence_length: int) -> Flops:
        return super().flops_outside(sequence_length) + self._flops_around_tower(sequence_length)

    def _flops_around_tower(self, sequence_length: int) -> Flops:
        """Of the embedding of patches and of the projector, per token of the text."""
        patches = self.vision.blocks * self.vision.patches
        patch = Flops(2 * self.vision.image.patch_size**2 * 3 * self.vision.embed_dim * self.vision.frames)
        of_images = patch * patches + self.vision.projector_flops(self.embed_dim) * (patches / self.vision.merged)
        return of_images * (1 / sequence_length)

    def notes(self, sequence_length: int) -> dict[str, str]:
        vision = self.vision
        whole = self.forward_flops(sequence_length).total(causal=True)
        of_tower = sum((layer.flops(sequence_length) for layer in self.stacks(ExecutionConfig())[TOWER]), Flops())
        of_tower += self._flops_around_tower(sequence_length)
        blocks = f"{vision.blocks} blocks" if vision.blocks > 1 else "a block"
        tokens = vision.blocks * vision.patches // vision.merged
        share = 100 * of_tower.total(causal=True) / whole
        return {
            "images": f"{blocks} of {vision.patches:,} patches a sample, up to {tokens:,} tokens of the text; "
            f"{share:.0f} % of the FLOPs are the tower's"
        }

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        super().check(mesh, sequence_length, execution)
        self.vision.check()
        if self.vision.num_layers == 0:
            raise ValueError("model.vision.num_layers=0 with model.kind=multimodal; use model.kind=decoder for text")
        if self.mtp_layers:
            raise ValueError(f"model.mtp_layers={self.mtp_layers} is not supported by model.kind=multimodal; use 0")
        if self.image_attention == "bidirectional" and mesh.context > 1 and execution.context_attention != "all_to_all":
            raise ValueError(
                f"mesh.context={mesh.context} with model.image_attention=bidirectional: the tokens of an image see "
                "tokens of other devices; use --execution.context_attention=all_to_all"
            )
        if self.vision.deep_layers and mesh.pipeline > 1:
            raise ValueError(
                f"mesh.pipeline={mesh.pipeline} with model.vision.deep_layers: their outputs are added in the first "
                "layers, which a pipeline does not give them; use --mesh.pipeline=1"
            )
        parts = num_parts({"context": mesh.context, "tensor": mesh.tensor, "pipeline": mesh.pipeline})
        if self.vision.blocks % parts:
            raise ValueError(
                f"model.vision.blocks={self.vision.blocks} must be a multiple of {parts} = mesh.context * mesh.tensor "
                f"* mesh.pipeline, which share them; use --model.vision.blocks="
                f"{-(-self.vision.blocks // parts) * parts}"
            )


def added_name(number: int) -> str:
    """The input of the layers that is added to the output of this one."""
    return f"added_{number}"


class Multimodal(Decoder):
    """A Decoder whose `embed` puts the results of the tower at the places of the images."""

    def __init__(
        self, config: MultimodalConfig, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None, *,
        rngs: nnx.Rngs
    ):  # fmt: skip
        super().__init__(config, dtype, execution, stages, rngs=rngs)
        self.vision = Tower(config.vision, config.embed_dim, config.init_std, dtype, rngs=rngs)

    def hidden(self, batch: dict, key: DropoutKey | None = None) -> tuple[jax.Array, tuple[Totals, ...]]:
        embed_key, layers_key = split_key(key)
        x_BTD, added = self._embed_all(batch, embed_key)
        x_BTD, _, terms = self.layers(x_BTD, self.block_inputs(batch) | added, key=layers_key)
        return self.output(x_BTD), (terms,)

    def embed(self, batch: dict, key: DropoutKey | None) -> jax.Array:
        return self._embed_all(batch, key)[0]

    def block_inputs(self, batch: dict) -> dict:
        positions = batch.get("position_ids", batch["positions"])
        blocks = {name: batch[name] for name in ("block_ids",) if name in batch}
        return super().block_inputs(batch | {"positions": positions}) | blocks

    def extend(self, batch: dict, caches: dict) -> tuple[jax.Array, dict]:
        """batch: also position_ids, and with images image_index int32 [B, T], of the rows of features [slots, 1 +
        levels, D] (encode_images)."""
        x_BTD, added = self._embed_all(batch, None)
        x_BTD, layers, _ = self.layers(x_BTD, self.block_inputs(batch) | added, caches["layers"])
        return x_BTD, {"layers": layers}

    def encode_images(self, batch: dict, index_BT: jax.Array) -> jax.Array:
        return jnp.stack(self._encoded(batch, index_BT), 2)

    def _embed_all(self, batch: dict, key: DropoutKey | None) -> tuple[jax.Array, dict]:
        """-> (x, what the first layers add: added_name)."""
        x_BTD = super().embed(batch, key)
        if "image_index" not in batch:
            return x_BTD, {}
        index_BT = batch["image_index"]
        is_image_BT1 = (index_BT >= 0)[..., None]
        if "features" in batch:
            found = jnp.moveaxis(batch["features"][jnp.maximum(index_BT, 0)], 2, 0)
            results_BTD, *deep = (jnp.where(is_image_BT1, array, 0) for array in found)
        else:
            results_BTD, *deep = self._encoded(batch, index_BT)
        x_BTD = jnp.where(is_image_BT1, results_BTD.astype(x_BTD.dtype), x_BTD)
        if self.vision.config.newline:
            newline_D = self.vision.newline[...].astype(x_BTD.dtype)
            x_BTD = jnp.where((index_BT == NEWLINE)[..., None], newline_D, x_BTD)
        return x_BTD, {added_name(number): array.astype(x_BTD.dtype) for number, array in enumerate(deep)}

    def _encoded(self, batch: dict, index_BT: jax.Array) -> tuple[jax.Array, ...]:
        """The results of the tower, and of its deep layers, at these places of the blocks of a row [B, T, D] each."""
        arrays = {name: batch[name] for name in ("patches", "patch_places")}
        graphdef, state = nnx.split((self.vision, getattr(self, TOWER)))

        def run(state, arrays: dict) -> tuple[jax.Array, ...]:
            vision, layers = nnx.merge(graphdef, state)
            x_BPC = vision.embed(arrays)
            return vision.results(layers.outputs(x_BPC, vision.layer_inputs(arrays), vision.config.deep_layers))

        return encode(run, state, arrays, index_BT)
