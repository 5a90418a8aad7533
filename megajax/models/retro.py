"""A decoder that reads what a database has for its text (RETRO, Borgeaud et al. 2021, https://arxiv.org/abs/2112.04426;
Wang et al. 2023, https://arxiv.org/abs/2304.06762).

Dimensions: as in models/decoder.py; U chunks of M tokens, each with K neighbours of R tokens. Some layers have a
chunked cross-attention (layers/chunked_cross_attention.py) between attention and MLP. What it reads is encoded once, in
the middle of the first of these layers: a neighbour is encoded while attending to the chunk for which it was retrieved.
So that this is a place between two stacks, every layer of this family is one branch: attention, retrieval or MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.fields.ranges import NonNegativeInt, PositiveInt, Range
from megajax.layers.chunked_cross_attention import BlockAttention, BlockAttentionConfig
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.feed_forward.mlp import Mlp, MlpConfig
from megajax.layers.layer import BranchConfig, Flops, Totals
from megajax.layers.norm import Norm
from megajax.layers.stack import Stack
from megajax.layers.sublayer import SublayerConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.models.decoder import Decoder, DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import BatchArray, StackRole
from megajax.ops.embedding import embed
from megajax.parallel.schedule import Stages
from megajax.parameters import weight
from megajax.retrieval.inputs import NO_TOKEN, NeighbourInputs


@dataclasses.dataclass(frozen=True)
class RetroConfig(DecoderConfig):
    kind: Literal["retro"] = "retro"  # pyrefly: ignore[bad-override]: a DecoderConfig but for its kind
    """The family of the model."""
    chunk_length: PositiveInt = 64
    """Tokens of a chunk, for each of which neighbours are retrieved."""
    num_neighbours: PositiveInt = 2
    """Neighbours of a chunk."""
    neighbour_length: PositiveInt = 128
    """Tokens of a neighbour: a chunk of the database and what follows it."""
    retrieval_layers: tuple[NonNegativeInt, ...] = ()
    """Layers that read neighbours, ascending; empty: as in Megatron, every third from number 5, or 8 with more than 15
    layers, counted from 0."""
    encoder_layers: Annotated[int, Range(at_least=1, at_most=100)] = 2
    """Layers of the encoder of neighbours, the first of which attends to the chunk."""

    def build(self, rngs: nnx.Rngs, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None) -> "Retro":
        return Retro(self, dtype, execution, stages, rngs=rngs)

    @property
    def neighbours(self) -> NeighbourInputs:
        return NeighbourInputs(self.chunk_length, self.num_neighbours, self.neighbour_length)

    @property
    def reading_layers(self) -> tuple[int, ...]:
        first = 5 if self.num_layers <= 15 else 8
        return self.retrieval_layers or tuple(range(first, self.num_layers, 3))

    @property
    def num_branches(self) -> int:
        return 2 * self.num_layers + len(self.reading_layers)

    def make_stacks(self, execution: ExecutionConfig) -> Mapping[str, tuple[SublayerConfig, ...]]:
        """front_layers end with the attention of the first layer that reads neighbours."""
        first = self.reading_layers[0]
        front: list[SublayerConfig] = []
        body: list[SublayerConfig] = []
        for number in range(self.num_layers):
            own = front if number <= first else body
            own.append(self._sublayer(self._attention(number, execution), number, execution))
            own = front if number < first else body
            if number in self.reading_layers:
                own.append(self._sublayer(self.block_attention, number, execution))
            own.append(self._sublayer(self._feed_forward(number, execution), number, execution))
        return {"layers": tuple(body), "front_layers": tuple(front)}

    def _sublayer(self, branch: BranchConfig, number: int, execution: ExecutionConfig) -> SublayerConfig:
        layer = SublayerConfig(
            branch=branch,
            norm=self.norm_config,
            context=execution.context_attention,
            residual_multiplier=self.residual_multiplier,
            dropout=self.dropout,
        )
        return layer.saving(execution.recompute_of(number), execution.recompute_modules, execution.offload)

    @property
    def block_attention(self) -> BlockAttentionConfig:
        return BlockAttentionConfig(
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            head_dim=self.width_of_head,
            bias="qkv" in self.biases,
            scale=self.attention_scale,
            init_std=self.init_std,
            out_init_std=self.out_init_std,
            chunk_length=self.chunk_length,
            num_keys=self.num_neighbours * self.neighbour_length,
        )

    @property
    def encoder_mlp(self) -> MlpConfig:
        stds = (self.init_std, self.out_init_std)
        return MlpConfig(self.embed_dim, self.width_of_mlp, self.activation, "mlp" in self.biases, *stds)

    @property
    def encoder_branches(self) -> tuple[BranchConfig, ...]:
        """Of all layers of the encoder: attention to the neighbour, in the first layer to the chunk, MLP."""
        chunk, count, length = self.chunk_length, self.num_neighbours, self.neighbour_length
        own = dataclasses.replace(self.block_attention, chunk_length=length, num_keys=length)
        cross = dataclasses.replace(self.block_attention, chunk_length=count * length, num_keys=chunk)
        return (own, self.encoder_mlp) * self.encoder_layers + (cross,)

    @property
    def neighbours_per_token(self) -> float:
        """Tokens of neighbours per token of the text."""
        return self.num_neighbours * self.neighbour_length / self.chunk_length

    @property
    def stack_roles(self) -> dict[str, StackRole]:
        return {"front_layers": "embed"}

    def inputs(self, sequence_length: int, *, packed: bool) -> dict[str, BatchArray]:
        """Also neighbour_tokens int32 [U, K, R], NO_TOKEN for padding."""
        shape = (sequence_length // self.chunk_length, self.num_neighbours, self.neighbour_length)
        neighbours = BatchArray((None, None, None), shape, jnp.int32)
        return super().inputs(sequence_length, packed=packed) | {"neighbour_tokens": neighbours}

    def flops_outside(self, sequence_length: int) -> Flops:
        """With the encoder of neighbours."""
        encoder = sum((branch.flops(self.neighbour_length) for branch in self.encoder_branches), Flops())
        return super().flops_outside(sequence_length) + encoder * self.neighbours_per_token

    def activations_outside(self, sequence_length: int) -> float:
        """Those of the encoder, whose weights of attention are kept too."""
        found = [a for branch in self.encoder_branches for a in branch.activations(self.neighbour_length).values()]
        around = 2 * self.embed_dim * len(self.encoder_branches)
        return (sum(a.elements + a.scores for a in found) + around) * self.neighbours_per_token

    def check(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        self._check_layers()
        self._check_mesh(mesh, sequence_length, execution)
        self.check_one_branch()
        super().check(mesh, sequence_length, execution)

    def _check_layers(self) -> None:
        layers = self.reading_layers
        if not layers:
            raise ValueError(
                f"model.num_layers={self.num_layers} has no layer that reads neighbours, which begin with number 5; "
                "set --model.retrieval_layers"
            )
        if tuple(sorted(set(layers))) != layers or layers[-1] >= self.num_layers:
            raise ValueError(
                f"model.retrieval_layers={','.join(map(str, layers))} must ascend and be below model.num_layers="
                f"{self.num_layers}"
            )

    def _check_mesh(self, mesh: MeshConfig, sequence_length: int, execution: ExecutionConfig) -> None:
        if mesh.pipeline > 1:
            raise ValueError(
                f"mesh.pipeline={mesh.pipeline} is not supported by model.kind=retro: all stages would have to send "
                "the encoded neighbours, four times as much as the text; use --mesh.pipeline=1"
            )
        if mesh.context > 1 and execution.context_attention != "all_to_all":
            raise ValueError(
                f"mesh.context={mesh.context} with model.kind=retro: chunks are whole where the tokens of a device are "
                "adjacent; use --execution.context_attention=all_to_all"
            )
        if self.neighbour_length % mesh.tensor:
            raise ValueError(
                f"model.neighbour_length={self.neighbour_length} is not divisible by mesh.tensor={mesh.tensor}; use "
                f"--model.neighbour_length={-(-self.neighbour_length // mesh.tensor) * mesh.tensor}"
            )
        unit = self.chunk_length * mesh.context
        if sequence_length % unit:
            raise ValueError(
                f"training.sequence_length={sequence_length} is not divisible by {unit} = model.chunk_length * "
                f"mesh.context; use --training.sequence_length={-(-sequence_length // unit) * unit}"
            )

    def check_generates(self) -> None:
        raise ValueError(
            "model.kind=retro reads neighbours, which engines do not look up; use infer.py generate --database"
        )


class Retro(Decoder):
    """A Decoder of two stacks, front_layers and layers, with the encoder of neighbours between them."""

    front_layers: Stack

    def __init__(
        self, config: RetroConfig, dtype: jnp.dtype, execution: ExecutionConfig, stages: Stages | None, *,
        rngs: nnx.Rngs
    ):  # fmt: skip
        super().__init__(config, dtype, execution, stages, rngs=rngs)
        self.encoder = NeighbourEncoder(config, rngs=rngs)

    def hidden(self, batch: dict, key: DropoutKey | None = None) -> tuple[jax.Array, tuple[Totals, ...]]:
        embed_key, front_key, encoder_key, layers_key = (None,) * 4 if key is None else key.split(4)
        x_BTD = self.embed(batch, embed_key)
        inputs = self.block_inputs(batch)
        x_BTD, _, of_front = self.front_layers(x_BTD, inputs, key=front_key)
        inputs |= self._neighbours(batch, x_BTD, encoder_key)
        x_BTD, _, of_body = self.layers(x_BTD, inputs, key=layers_key)
        return self.output(x_BTD), (of_front, of_body)

    def _neighbours(self, batch: dict, x_BTD: jax.Array, key: DropoutKey | None) -> dict:
        """What the chunked cross-attention reads; x: the text in the middle of the first layer that has one."""
        tokens_BUKR = batch["neighbour_tokens"]
        is_token_BUKR = tokens_BUKR != NO_TOKEN
        found_BXD = embed(self.embedding[...], jnp.maximum(tokens_BUKR, 0).reshape(len(x_BTD), -1), self.dtype)
        return {
            "neighbours": self.encoder(found_BXD.reshape(*tokens_BUKR.shape, -1), is_token_BUKR, x_BTD, key),
            "is_neighbour": is_token_BUKR.reshape(*tokens_BUKR.shape[:2], -1),
        }


class NeighbourEncoder(nnx.Module):
    """Encodes each neighbour in both directions, and in the first layer with attention to its chunk."""

    def __init__(self, config: RetroConfig, *, rngs: nnx.Rngs):
        self.config = config
        D = config.embed_dim
        init = nnx.initializers.normal(config.init_std)
        self.positions = weight((config.neighbour_length, D), ("positions", "embed"), init, rngs, "embedding")
        self.chunk_norm = Norm(config.norm_config, D, rngs=rngs)
        for number in range(config.encoder_layers):
            setattr(self, f"layer_{number}", EncoderLayer(config, reads_chunk=number == 0, rngs=rngs))
        self.norm = Norm(config.norm_config, D, rngs=rngs)

    def __call__(
        self, x_BUKRD: jax.Array, is_token_BUKR: jax.Array, text_BTD: jax.Array, key: DropoutKey | None
    ) -> jax.Array:
        """-> [B, U, K R, D]."""
        batch, chunks, count, length, width = x_BUKRD.shape
        x = x_BUKRD + self.positions[...].astype(x_BUKRD.dtype)
        chunk_BUMD = self.chunk_norm(text_BTD).reshape(batch, chunks, -1, width)
        is_token = is_token_BUKR.reshape(batch, chunks * count, length)
        x = x.reshape(batch, chunks * count * length, width)
        for number in range(self.config.encoder_layers):
            layer_key = None if key is None else key.fold(number)
            x = getattr(self, f"layer_{number}")(x, is_token, chunk_BUMD, layer_key)
        return self.norm(x).reshape(batch, chunks, count * length, width)


class EncoderLayer(nnx.Module):
    def __init__(self, config: RetroConfig, *, reads_chunk: bool, rngs: nnx.Rngs):
        self.reads_chunk = reads_chunk
        self.dropout = config.dropout
        D = config.embed_dim
        self.attention_norm = Norm(config.norm_config, D, rngs=rngs)
        self.attention = BlockAttention(config.block_attention, rngs=rngs)
        if reads_chunk:
            self.cross_norm = Norm(config.norm_config, D, rngs=rngs)
            self.cross_attention = BlockAttention(config.block_attention, rngs=rngs)
        self.mlp_norm = Norm(config.norm_config, D, rngs=rngs)
        self.mlp = Mlp(config.encoder_mlp, rngs=rngs)

    def __call__(
        self, x_BXD: jax.Array, is_token: jax.Array, chunk_BUMD: jax.Array, key: DropoutKey | None
    ) -> jax.Array:
        """x: [B, U K R, D], all neighbours one after another; is_token: bool [B, U K, R]."""

        def in_blocks(number: int, norm: Norm) -> jax.Array:
            return norm(x_BXD).reshape(len(x_BXD), number, -1, x_BXD.shape[-1])

        def dropped(y: jax.Array, branch: int) -> jax.Array:
            branch_key = None if key is None else key.fold(branch)
            return dropout(y.reshape(x_BXD.shape), self.dropout, branch_key, np.arange(x_BXD.shape[1]))

        own = in_blocks(is_token.shape[1], self.attention_norm)
        x_BXD += dropped(self.attention.attend(own, own, is_token[:, :, None]), 0)
        if self.reads_chunk:
            chunks = chunk_BUMD.shape[1]
            sees_all = jnp.ones((1, 1, 1, 1), bool)
            own = in_blocks(chunks, self.cross_norm)
            x_BXD += dropped(self.cross_attention.attend(own, chunk_BUMD, sees_all), 1)
        y_BXD = self.mlp(constrain(self.mlp_norm(x_BXD), "batch", "time", None))[0]
        return x_BXD + dropped(constrain(y_BXD, "batch", "time", None), 2)
