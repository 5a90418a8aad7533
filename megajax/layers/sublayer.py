"""Layers of one branch, x + f(norm(x)), where f is attention, a recurrent mixer, an MLP or experts: those of a hybrid,
whose pattern has one letter for each (models/hybrid.py). A transformer layer is two of them."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Activation, BranchConfig
from megajax.layers.norm import Norm
from megajax.layers.transformer import ResidualLayer, ResidualLayerConfig
from megajax.parallel.context import ContextMethod


@dataclasses.dataclass(frozen=True, kw_only=True)
class SublayerConfig(ResidualLayerConfig):
    branch: BranchConfig
    context: ContextMethod

    @property
    def branches(self) -> tuple[BranchConfig, ...]:
        return (self.branch,)

    def build(self, rngs: nnx.Rngs) -> "Sublayer":
        return Sublayer(self, rngs=rngs)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        around = {"residual": Activation(self.embed_dim), "normed": Activation(self.embed_dim)}
        return around | self.branch.activations(sequence_length)


class Sublayer(ResidualLayer):
    """(x [B, T, D], inputs, cache, key) -> (x + branch(norm(x)), cache, Terms)."""

    def __init__(self, config: SublayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.context)
        self.norm = Norm(config.norm, config.embed_dim, rngs=rngs)
        self.mixer = config.branch.build(rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache: Any, key: DropoutKey | None):
        keys = [None] * 2 if key is None else key.split(2)
        x_BTD, read_BTD = self._branch_input(self.norm, "residual", x_BTD, axis=self.mixer.input_axis)
        y_BTD, cache, terms = self.mixer(read_BTD, inputs, cache, keys[0])
        return x_BTD + self._branch_output(None, y_BTD, keys[1], cache), cache, terms
