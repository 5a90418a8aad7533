"""Layers of one branch, x + f(norm(x)), where f is attention, a recurrent mixer, an MLP or experts: those of a hybrid,
whose pattern has one letter for each (models/hybrid.py). A transformer layer is two of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, FeedForwardConfig, Flops, Saved, Terms
from megajax.layers.norm import Norm, NormConfig
from megajax.layers.recurrent.mixer import RecurrentMixerConfig
from megajax.layers.transformer import SavingActivations, TransformerLayer
from megajax.mesh.config import MeshConfig
from megajax.parallel.context import ContextMethod


@dataclasses.dataclass(frozen=True)
class SublayerConfig(SavingActivations):
    """A LayerConfig; the classes below say what the branch is."""

    branch: Any
    norm: NormConfig
    context: ContextMethod
    residual_multiplier: float
    dropout: float
    saved: Saved | None = None

    @property
    def kind(self) -> str:
        return self.branch.kind

    @property
    def embed_dim(self) -> int:
        return self.branch.embed_dim

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        return {"norm": ("normed",)} | self.branch.modules

    def build(self, rngs: nnx.Rngs) -> "Sublayer":
        return Sublayer(self, rngs=rngs)

    def run(self, branch: nnx.Module, x_BTD: jax.Array, inputs: dict, cache, key: DropoutKey | None):
        """-> (the output of the branch, cache, Terms)."""
        y_BTD, cache = branch(x_BTD, inputs, cache, key)
        return y_BTD, cache, Terms()

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        self.branch.check(mesh, sequence_length)

    def flops(self, sequence_length: int) -> Flops:
        return self.branch.flops(sequence_length)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        of_branch = self.branch.activations(sequence_length)
        return {"residual": Activation(self.embed_dim), "normed": Activation(self.embed_dim)} | of_branch

    @property
    def _passes(self) -> int:
        """Forward and backward, and once more if the branch is recomputed."""
        first = next(iter(self.branch.activations(sequence_length=1)))
        return 2 if self.saved is None or first in self.saved.kept else 3

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        over_tensor = self._passes * (self.branch.gathered_dim + self.embed_dim) * itemsize
        return {"tensor": over_tensor, "context": self.branch.sent(mesh, itemsize)}

    def new_cache(self, length: int):
        return self.branch.new_cache(length)

    def new_pages(self, sizes: PoolSizes):
        return self.branch.new_pages(sizes)


@dataclasses.dataclass(frozen=True)
class RecurrentLayerConfig(SublayerConfig):
    branch: RecurrentMixerConfig


@dataclasses.dataclass(frozen=True)
class AttentionLayerConfig(SublayerConfig):
    branch: AttentionConfig

    kind = "attention"


@dataclasses.dataclass(frozen=True)
class FeedForwardLayerConfig(SublayerConfig):
    branch: FeedForwardConfig

    def run(self, branch: nnx.Module, x_BTD: jax.Array, inputs: dict, cache, key: DropoutKey | None):
        y_BTD, terms = branch(x_BTD, generates=cache is not None)
        return y_BTD, cache, terms

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        self.branch.check(mesh)

    def flops(self, sequence_length: int) -> Flops:
        return self.branch.flops()

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        of_branch = self.branch.activations()
        return {"residual": Activation(self.embed_dim), "normed": Activation(self.embed_dim)} | of_branch

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        passes = 2 if self.saved is None or "mlp_wide" in self.saved.kept else 3
        return self.branch.sent(mesh, itemsize, passes)

    def new_cache(self, length: int) -> "NoState":
        return NoState()

    def new_pages(self, sizes: PoolSizes) -> "NoState":
        return NoState()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoState:
    """The cache of a layer that sees each token by itself."""

    def at(self, places: Any) -> "NoState":
        return self


class Sublayer(TransformerLayer):
    """(x [B, T, D], inputs, cache, key) -> (x + branch(norm(x)), cache, Terms): the residual stream is read, and added
    to, as in a transformer layer."""

    def __init__(self, config: SublayerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.residual_multiplier = config.residual_multiplier
        self.dropout = config.dropout
        self.saved = config.saved
        self.context = config.context
        self.norm = Norm(config.norm, config.embed_dim, rngs=rngs)
        self.mixer = config.branch.build(rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache, key: DropoutKey | None):
        keys = [None] * 2 if key is None else key.split(2)
        x_BTD, read_BTD = self._branch_input(self.norm, "residual", x_BTD, axis=self.mixer.input_axis)
        y_BTD, cache, terms = self.config.run(self.mixer, read_BTD, inputs, cache, keys[0])
        return x_BTD + self._branch_output(None, y_BTD, keys[1], cache), cache, terms
