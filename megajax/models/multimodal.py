"""A decoder that reads images and sound between its tokens (LLaVA, Liu et al. 2023, https://arxiv.org/abs/2304.08485;
Gemma 3, Qwen2.5-VL, Qwen3-VL; Qwen2-Audio, Chu et al. 2024, https://arxiv.org/abs/2407.10759): an encoder for each kind
(models/tower.py, models/audio_tower.py) encodes them on all devices of the mesh, and their results replace the
embeddings of the tokens that stand for a medium. The data says which: the model never counts tokens.

Dimensions: as in models/decoder.py; K blocks of a sample, P positions of a block.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.fields.ranges import NonNegativeInt
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Flops
from megajax.layers.transformer import ResidualLayerConfig, TransformerLayerConfig
from megajax.media.kinds import IMAGE, KINDS, Kind
from megajax.media.rows import NEWLINE, MediaInputs
from megajax.mesh.config import MeshConfig
from megajax.models.audio_tower import AudioConfig
from megajax.models.decoder import Decoder, DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, StackRole
from megajax.models.modality import Encoder, ModalityConfig
from megajax.models.tower import TowerConfig
from megajax.parallel.encode import encode, num_parts
from megajax.parallel.schedule import Stages, make_stages


@dataclasses.dataclass(frozen=True)
class MultimodalConfig(DecoderConfig):
    kind: Literal["multimodal"] = "multimodal"  # pyrefly: ignore[bad-override]: a DecoderConfig but for its kind
    """The family of the model."""
    vision: TowerConfig = TowerConfig()
    """The encoder of images."""
    audio: AudioConfig = AudioConfig()
    """The encoder of sound."""
    image_token: NonNegativeInt = 0
    """Token id that stands for an image, and for each of its results, in the text."""
    audio_token: NonNegativeInt = 0
    """The same for a clip of sound."""
    image_attention: Literal["causal", "bidirectional"] = "causal"
    """Whether the tokens of an image see each other in both directions (Gemma 3)."""

    @classmethod
    def of(
        cls, text: DecoderConfig, vision: TowerConfig = TowerConfig(), image_token: int = 0, **others: Any
    ) -> "MultimodalConfig":
        """A decoder that reads media besides. others: further fields of this class alone, such as audio."""
        fields = {field.name: getattr(text, field.name) for field in dataclasses.fields(text) if field.name != "kind"}
        return cls(**fields, vision=vision, image_token=image_token, **others)

    def build(
        self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None
    ) -> "Multimodal":
        return Multimodal(self, dtype, execution, stages, rngs=rngs)

    def check_exports(self) -> None:
        super().check_exports()
        for kind in self.encoders:
            if kind != IMAGE:
                raise ValueError(
                    f"model.{kind.section}.num_layers={getattr(self, kind.section).num_layers}: other frameworks have "
                    f"no class for an encoder of {kind.plural} beside this text; only those of images are exported"
                )

    @property
    def encoders(self) -> dict[Kind, ModalityConfig]:
        """The section of each kind of media that the model reads."""
        sections = {kind: getattr(self, kind.section) for kind in KINDS}
        return {kind: section for kind, section in sections.items() if section.num_layers}

    @property
    def deep_layers(self) -> int:
        """First layers of the text to whose outputs those of encoders are added."""
        return max((len(section.deep_layers) for section in self.encoders.values()), default=0)

    @property
    def media(self) -> tuple[MediaInputs, ...]:
        return tuple(
            MediaInputs(
                section.layouts,
                getattr(self, kind.token),
                section.blocks,
                section.block_size,
                sees_itself=kind is IMAGE and self.image_attention == "bidirectional",
            )
            for kind, section in self.encoders.items()
        )

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[ResidualLayerConfig, ...]]:
        found = {kind.stack: section.layers(execution, self.init_std) for kind, section in self.encoders.items()}
        return {**found, **super().make_stacks(execution)}

    def _layer_config(self, number: int, execution: ExecutionConfig) -> TransformerLayerConfig:
        layer = super()._layer_config(number, execution)
        return dataclasses.replace(layer, added=added_name(number)) if number < self.deep_layers else layer

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        roles: dict[str, StackRole] = dict.fromkeys((kind.stack for kind in self.encoders), "embed")
        return roles | super().stack_roles

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """Besides those of the text, for each kind of media, such as images:

        image_index int32 [T]: which result of the encoder replaces the embedding of a token, counted over the blocks of
            the row; TEXT; NEWLINE.
        patches uint8 [K, P, values of a patch]: K blocks of the images of the row, as images/layout.py has them; of
            sound frames float32 (audio/layout.py).
        patch_places int32 [K, P, 5]: Layout.places; the numbers of the views differ within a block; of sound
            frame_places [K, P, 3].
        position_ids int32 [T, 3]: with rope.sections time, row and column of each token.
        block_ids int32 [T]: with image_attention=bidirectional the number of the image of a token from 1; 0: text.
        """
        found = super().inputs(sequence_length, packed=packed)
        sequence = BatchArray.sequence(sequence_length)
        for kind, section in self.encoders.items():
            found |= {kind.index: sequence} | section.arrays()
        if self.rope.sections is not None:
            found["position_ids"] = BatchArray(("time", None), (sequence_length, 3), jnp.int32)
        if any(inputs.sees_itself for inputs in self.media):
            found["block_ids"] = sequence
        return found

    def flops_outside(self, sequence_length: int) -> Flops:
        around = [section.flops_around(self.embed_dim) for section in self.encoders.values()]
        return super().flops_outside(sequence_length) + sum(around, Flops()) * (1 / sequence_length)

    def notes(self, sequence_length: int) -> dict[str, str]:
        whole = self.forward_flops(sequence_length).total(causal=True)
        stacks = self.stacks(ExecutionConfig())
        found = {}
        for kind, section in self.encoders.items():
            of_encoder = sum((layer.flops(sequence_length) for layer in stacks[kind.stack]), Flops())
            of_encoder += section.flops_around(self.embed_dim) * (1 / sequence_length)
            blocks = f"{section.blocks} blocks" if section.blocks > 1 else "a block"
            tokens = section.blocks * section.block_size // section.merged
            share = 100 * of_encoder.total(causal=True) / whole
            found[kind.plural] = (
                f"{blocks} of {section.block_size:,} {kind.values} a sample, up to {tokens:,} tokens of the text; "
                f"{share:.0f} % of the FLOPs are the tower's"
            )
        return found

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        super().check(mesh, sequence_length, execution)
        if not self.encoders:
            names = " and ".join(f"model.{kind.section}.num_layers=0" for kind in KINDS)
            raise ValueError(f"{names} with model.kind=multimodal; use model.kind=decoder for text")
        if self.mtp_layers:
            raise ValueError(f"model.mtp_layers={self.mtp_layers} is not supported by model.kind=multimodal; use 0")
        if (
            any(of.sees_itself for of in self.media)
            and mesh.context > 1
            and execution.context_attention != "all_to_all"
        ):
            raise ValueError(
                f"mesh.context={mesh.context} with model.image_attention=bidirectional: the tokens of an image see "
                "tokens of other devices; use --execution.context_attention=all_to_all"
            )
        stages = make_stages(mesh, self.num_layers)
        if stages is not None and len(stages.layers[0][0]) < self.deep_layers:
            raise ValueError(
                f"mesh.pipeline={mesh.pipeline} with mesh.virtual_stages={mesh.virtual_stages}: the first stage has "
                f"{len(stages.layers[0][0])} layers, and model.vision.deep_layers are added in the first "
                f"{self.deep_layers}; use fewer stages, or give it more layers with --mesh.pipeline_layout"
            )
        by_token = {getattr(self, kind.token): kind.token for kind in self.encoders}
        if len(by_token) < len(self.encoders):
            names = " and ".join(f"model.{kind.token}={getattr(self, kind.token)}" for kind in self.encoders)
            raise ValueError(f"{names}: each kind needs a token of its own")
        parts = num_parts({"context": mesh.context, "tensor": mesh.tensor, "pipeline": mesh.pipeline})
        for kind, section in self.encoders.items():
            name = f"model.{kind.section}"
            section.check(f"{name}.")
            if section.blocks % parts:
                raise ValueError(
                    f"{name}.blocks={section.blocks} must be a multiple of {parts} = mesh.context * mesh.tensor "
                    f"* mesh.pipeline, which share them; use --{name}.blocks="
                    f"{-(-section.blocks // parts) * parts}"
                )


def added_name(number: int) -> str:
    """The input of the layers that is added to the output of this one."""
    return f"added_{number}"


class Multimodal(Decoder):
    """A Decoder whose `entry` puts the results of the encoders at the places of the media. Each encoder is an attribute
    with the name of its section, its layers one of their own (Kind.stack)."""

    def __init__(
        self, config: MultimodalConfig, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None, *,
        rngs: nnx.Rngs
    ):  # fmt: skip
        super().__init__(config, dtype, execution, stages, rngs=rngs)
        for kind, section in config.encoders.items():
            setattr(self, kind.section, section.build(config.embed_dim, config.init_std, dtype, rngs))

    def block_inputs(self, batch: dict) -> dict:
        positions = batch.get("position_ids", batch["positions"])
        blocks = {name: batch[name] for name in ("block_ids",) if name in batch}
        return super().block_inputs(batch | {"positions": positions}) | blocks

    def encode_images(self, batch: dict, index_BT: jax.Array) -> jax.Array:
        return jnp.stack(self._encoded(IMAGE, batch, index_BT), 2)

    def entry(self, batch: dict, key: DropoutKey | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Instead of the images, a batch of an engine has image_features [slots, 1 + levels, D] (encode_images), of
        which image_index int32 [B, T] names the rows."""
        x_BTD = self.embed(batch, key)
        added: dict[str, jax.Array] = {}
        for kind in self.encoders:
            if kind.index not in batch:
                continue
            index_BT = batch[kind.index]
            is_medium_BT1 = (index_BT >= 0)[..., None]
            if kind.features in batch:
                found = jnp.moveaxis(batch[kind.features][jnp.maximum(index_BT, 0)], 2, 0)
                results_BTD, *deep = (jnp.where(is_medium_BT1, array, 0) for array in found)
            else:
                results_BTD, *deep = self._encoded(kind, batch, index_BT)
            x_BTD = jnp.where(is_medium_BT1, results_BTD.astype(x_BTD.dtype), x_BTD)
            encoder = self._encoder(kind)
            if hasattr(encoder, "newline"):
                newline_D = encoder.newline[...].astype(x_BTD.dtype)
                x_BTD = jnp.where((index_BT == NEWLINE)[..., None], newline_D, x_BTD)
            for number, array in enumerate(deep):
                name = added_name(number)
                array = array.astype(x_BTD.dtype)
                added[name] = added[name] + array if name in added else array
        return x_BTD, added

    @property
    def encoders(self) -> dict[Kind, ModalityConfig]:
        assert isinstance(self.config, MultimodalConfig)
        return self.config.encoders

    def _encoder(self, kind: Kind) -> Encoder:
        return getattr(self, kind.section)

    def _encoded(self, kind: Kind, batch: dict, index_BT: jax.Array) -> tuple[jax.Array, ...]:
        """The results of an encoder, and of its deep layers, at these places of the blocks of a row [B, T, D] each."""
        arrays = {name: batch[name] for name in (kind.values, kind.places)}
        graphdef, state = nnx.split((self._encoder(kind), getattr(self, kind.stack)))

        def run(state, arrays: dict) -> tuple[jax.Array, ...]:
            encoder, layers = nnx.merge(graphdef, state)
            x_BPC = encoder.embed(arrays)
            outputs = layers.outputs(x_BPC, encoder.layer_inputs(arrays), self.encoders[kind].deep_layers)
            return encoder.results(outputs, arrays)

        return encode(run, state, arrays, index_BT)
