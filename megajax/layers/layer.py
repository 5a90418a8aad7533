"""What a layer is: the contract between a kind of layer and the stack, the planner and the engine.

A layer is described by a hashable config, a LayerConfig. Layers with the same `kind` have parameters of the same shapes
and are stored stacked; what else differs between them (a window, rotary or not) is in the config, and so part of the
program. Whoever plans, counts or generates asks each config and sums; nobody reads the fields of a particular kind.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
from flax import nnx

from megajax.mesh import MeshConfig


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a layer's forward pass leaves for its backward pass beside its input; the rest is computed again.

    Names are those that the layer gives to its activations with `checkpoint_name`. None instead of a Saved: plain
    automatic differentiation, nothing is computed again.
    """

    on_device: tuple[str, ...]
    on_host: tuple[str, ...]
    """Copied to pinned host memory after the forward pass and back before the backward pass."""

    @property
    def kept(self) -> tuple[str, ...]:
        return self.on_device + self.on_host

    @staticmethod
    def choose(
        recompute: Literal["none", "selective", "full"],
        recomputed: Sequence[str],
        offload: Sequence[str],
        activations: Sequence[str],
        modules: Mapping[str, Sequence[str]],
    ) -> "Saved | None":
        """What a layer with these activations and modules (LayerConfig) keeps.

        recomputed: modules that selective recomputation computes again. offload: activations that are kept on the host
        in any case. Names that belong to other kinds of layers are passed over. None if nothing is computed again.
        """
        on_host = tuple(name for name in offload if name in activations)
        if recompute == "none" and not on_host:
            return None
        again = {
            "none": set(),
            "selective": {name for module in recomputed for name in modules.get(module, ())},
            "full": set(activations),
        }[recompute]
        return Saved(tuple(name for name in activations if name not in again and name not in on_host), on_host)


class Flops(NamedTuple):
    """FLOPs a token; a multiply-add is two. Of the forward pass, unless it says otherwise."""

    matmuls: float = 0.0
    """With weights."""
    mixing: float = 0.0
    """Between tokens (attention, a scan), as if every token saw every other: PaLM's and most tables' convention."""
    mixing_causal: float = 0.0
    """The same, counting only what a token sees: Megatron Core's current convention."""
    routed: float = 0.0
    """Of the matmuls those of experts that a router chooses: devices may have uneven shares of them."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def __mul__(self, factor: float) -> "Flops":
        return Flops(*(factor * value for value in self))

    def total(self, *, causal: bool) -> float:
        return self.matmuls + (self.mixing_causal if causal else self.mixing)


class Activation(NamedTuple):
    """One that a layer may keep for its backward pass."""

    elements: int
    """A token; of a name that stands for several, all of them."""
    flops: Flops = Flops()
    """To make it again from those before it."""
    scores: int = 0
    """Attention scores of a token, and arrays of their size, float32: what the plain formula holds in memory and the
    kernels never do."""
    needs_scores: bool = False
    """The plain formula runs on every device."""


class Terms(NamedTuple):
    """What a layer has to say beside its output."""

    auxiliary: dict[str, jax.Array] = {}
    """Terms of the loss, float32 scalars: summed over layers, mean over microbatches (a router's load balance)."""
    metrics: dict[str, jax.Array] = {}
    """Never part of the loss, float32 scalars or vectors: mean over the layers that have them and over microbatches."""


class Cache(Protocol):
    """What a layer remembers of the tokens before; a pytree. Attention asks it to `attend` (layers/kv_cache.py)."""

    def at(self, places_BT: jax.Array) -> "Cache":
        """The same, ready for the next T tokens of each row. places: int32, where in the row each stands; padding,
        which must leave no trace, stands beyond the length of the cache."""


class LayerConfig(Protocol):
    """A hashable description of one layer. `build` gives an nnx.Module that is called as

        module(x [B, T, D], inputs, cache, key) -> (x, cache, Terms)

    inputs: what all layers of the stack read (Model.block_inputs); cache: None in training; key: for dropout, or None.
    """

    kind: str
    saved: Saved | None
    embed_dim: int
    """Width of the residual stream."""
    modules: Mapping[str, Sequence[str]]
    """What execution.recompute_modules can name: the activations that need not be kept if the module runs again."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module: ...

    def saving_by_name(self) -> "LayerConfig":
        """The same layer with a Saved in any case, as a pipeline needs it: everything by name instead of None."""

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        """Raises ValueError for what does not divide over the mesh, in the words of the model's config."""

    def flops(self, sequence_length: int) -> Flops:
        """Of one token."""

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        """By their names, in the order of the forward pass; the first is the layer's input."""

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        """{mesh axis: bytes of a token} that a device would send in a step if the axis were endlessly long: times
        (n - 1) / n it is what it sends over n devices."""

    def new_cache(self, length: int) -> Any:
        """An empty Cache with room for `length` tokens a row."""


class FeedForwardConfig(Protocol):
    """A hashable description of the part of a transformer layer that follows the attention. `build` returns an
    nnx.Module that is called as

        module(x [B, T, D], generates: bool) -> (y [B, T, D], Terms)

    generates: with a cache, a few tokens at a time.
    """

    kind: str
    """Kind of the layer."""
    embed_dim: int
    modules: Mapping[str, Sequence[str]]
    down_flops: float
    """Of the output projection, per token."""

    def build(self, rngs: nnx.Rngs) -> nnx.Module: ...

    def check(self, mesh: MeshConfig) -> None:
        """As LayerConfig."""

    def flops(self) -> Flops:
        """As LayerConfig."""

    def activations(self) -> dict[str, Activation]:
        """As LayerConfig, without the input."""

    def sent(self, mesh: MeshConfig, itemsize: int, passes: int) -> dict[str, float]:
        """As LayerConfig. passes: number of forward and backward passes."""


def check_divisible(axis: str, size: int, fields: dict[str, int]) -> None:
    """Raises ValueError for a size of a model, by its field, that does not divide over the devices of a mesh axis."""
    for name, value in fields.items():
        if value % size:
            largest = math.gcd(value, size)
            raise ValueError(
                f"model.{name}={value} is not divisible by mesh.{axis}={size}; use --mesh.{axis}={largest}"
            )
