"""The interface of a layer towards the stack, the planner and the inference engine.

A layer is described by a hashable config, a LayerConfig. Layers with the same `kind` have parameters of the same shapes
and are stored stacked; other differences between them (a window, rotary or not) are in the config, and so part of the
program. Code that plans, counts or generates calls the methods of each config and sums the results; it never reads the
fields of a particular kind.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import jax
from flax import nnx

from megajax.layers.dropout import DropoutKey
from megajax.mesh.config import MeshConfig

ADAPTERS = "adapters"
"""In a batch, and among the inputs of layers: int32 [B, T], the number of the adapter of each token."""
PADDING = "padding"
"""The same: bool [B, T], tokens that belong to no sequence."""
MAILBOXES = "mailboxes"
"""The same: uint32 [N, 2], their addresses, for GPUs that sum products with kernels of ours (ops/mailboxes.py)."""


def read_by_layers(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What layers get of a batch whatever their family is."""
    return {name: batch[name] for name in (ADAPTERS, PADDING, MAILBOXES) if name in batch}


@dataclasses.dataclass(frozen=True)
class Saved:
    """Activations that a layer's forward pass saves for its backward pass besides its input; the rest is recomputed.

    Names are those given with `checkpoint_name`. None instead of a Saved: plain automatic differentiation without
    recomputation.
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
        """What a layer with these activations and modules (LayerConfig) saves.

        recomputed: modules recomputed with recompute="selective". offload: activations always saved on the host. Names
        of other kinds of layers are ignored. Returns None if nothing is recomputed or offloaded.
        """
        on_host = tuple(name for name in offload if name in activations)
        if recompute == "none" and not on_host:
            return None
        recomputed_names = {
            "none": set(),
            "selective": {name for module in recomputed for name in modules.get(module, ())},
            "full": set(activations),
        }[recompute]
        return Saved(
            tuple(name for name in activations if name not in recomputed_names and name not in on_host), on_host
        )


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs per token, of the forward pass unless stated otherwise; a multiply-add counts as two."""

    matmuls: float = 0.0
    """Matmuls with weights."""
    mixing: float = 0.0
    """Between tokens (attention, a scan), as if every token saw every other: the convention of PaLM and most tables."""
    mixing_causal: float = 0.0
    """The same, counting only what a token sees: Megatron Core's current convention."""
    routed: float = 0.0
    """Of the matmuls those of experts that a router chooses: devices may have uneven shares of them."""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.matmuls + other.matmuls,
            self.mixing + other.mixing,
            self.mixing_causal + other.mixing_causal,
            self.routed + other.routed,
        )

    def __mul__(self, factor: float) -> "Flops":
        return Flops(factor * self.matmuls, factor * self.mixing, factor * self.mixing_causal, factor * self.routed)

    def total(self, *, causal: bool) -> float:
        return self.matmuls + (self.mixing_causal if causal else self.mixing)


def _nothing(mesh: MeshConfig) -> float:
    return 0


class Activation(NamedTuple):
    """An activation that a layer may save for its backward pass."""

    elements: float
    """Elements per token; if a name stands for several arrays, of all of them."""
    flops: Flops = Flops()
    """Cost of recomputing it from the activations before it."""
    scores: float = 0
    """Elements per token of attention scores and arrays of their size, float32: materialised by plain attention, never
    by the kernels."""
    needs_scores: bool = False
    """Plain attention runs on every kind of device."""
    empty: Callable[[MeshConfig], float] = _nothing
    """Further elements per token on a mesh, which take memory and are not computed: empty rows of a buffer."""
    inside: int = 0
    """Elements per token of arrays that are written and read while it is computed, and never saved."""

    def and_also(self, other: "Activation") -> "Activation":
        """Of both under one name; `empty` and `inside` are those of the first."""
        return self._replace(
            elements=self.elements + other.elements,
            flops=self.flops + other.flops,
            scores=self.scores + other.scores,
            needs_scores=self.needs_scores or other.needs_scores,
        )


class Terms(NamedTuple):
    """What a layer returns besides its output."""

    auxiliary: dict[str, jax.Array] = {}
    """Terms of the loss, float32 scalars: summed over layers, mean over microbatches (a router's load balance)."""
    metrics: dict[str, jax.Array] = {}
    """Never part of the loss, float32 scalars or vectors: mean over the layers that have them and over microbatches."""


class Totals(NamedTuple):
    """The Terms of several layers."""

    auxiliary: dict[str, jax.Array]
    """{name: sum}."""
    metrics: dict[str, tuple[jax.Array, jax.Array]]
    """{name: (sum, number of layers)}."""


class StackedConfig(Protocol):
    """A hashable description of one layer, as a stack reads it. `build` returns an nnx.Module that is called as

        module(x [B, T, D], inputs, cache, key) -> (x, cache, Terms)

    inputs: what all layers of the stack read (Model.block_inputs); cache: None in training; key: for dropout, or None.
    """

    @property
    def kind(self) -> str: ...

    @property
    def saved(self) -> Saved | None: ...

    def build(self, rngs: nnx.Rngs) -> nnx.Module: ...


class LayerConfig(StackedConfig, Protocol):
    """A hashable description of one layer."""

    @property
    def embed_dim(self) -> int:
        """Width of the residual stream."""

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        """{name in execution.recompute: the activations that need not be saved if the module is recomputed}."""

    @property
    def reach(self) -> int | None:
        """Last tokens, itself included, that a token reads from a cache in pages; None: all."""

    def saving_by_name(self) -> "LayerConfig":
        """The same layer, with a Saved of all activations if it has None: a pipeline saves by name."""

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        """Raises ValueError, naming the fields of the model's config, for sizes that do not divide over the mesh."""

    def flops(self, sequence_length: int) -> Flops:
        """Per token."""

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        """By name, in the order of the forward pass; the first is the layer's input."""

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        """{mesh axis: bytes per token} sent by a device in a step, in the limit of a long axis: over n devices it is
        (n - 1) / n of that."""

    def new_pages(self, sizes: Any) -> Any:
        """An empty cache of these PoolSizes (attention/kv_cache.py), shared by all sequences of an engine: a pytree
        whose `at(places)` is what the layer is called with, ready for the tokens at these Places."""


class Branch(Protocol):
    """The nnx.Module of a branch."""

    @property
    def input_axis(self) -> str:
        """Logical axis of the sequence in its input."""

    def __call__(
        self, x_BTD: jax.Array, inputs: dict, cache: Any, key: DropoutKey | None, /
    ) -> tuple[jax.Array, Any, Terms]:
        """As a layer, but without the residual stream: the output is added to it. A branch that sees each token by
        itself returns the cache as it is."""


@dataclasses.dataclass(frozen=True)
class BranchConfig:
    """Base of the config of a branch of a layer, f in x + f(norm(x)): attention, a recurrent mixer, an MLP or experts.
    The methods are those of a LayerConfig; those that raise here, and the attributes, are a branch's own."""

    embed_dim: int

    kind: ClassVar[str]
    """That of a layer whose last branch it is."""

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        raise NotImplementedError

    @property
    def projected(self) -> str:
        """The activation that the projections of its input make: to recompute it is to gather the input again."""
        raise NotImplementedError

    @property
    def out_flops(self) -> float:
        """FLOPs of the output projection per token."""
        raise NotImplementedError

    @property
    def gathered_dim(self) -> int:
        """Width of what is gathered over `tensor`: its input, unless it gathers what it computes of it."""
        return self.embed_dim

    @property
    def reach(self) -> int | None:
        return None

    def build(self, rngs: nnx.Rngs) -> Branch:
        raise NotImplementedError

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        raise NotImplementedError

    def flops(self, sequence_length: int) -> Flops:
        raise NotImplementedError

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        """Without the input."""
        raise NotImplementedError

    def sent(self, mesh: MeshConfig, itemsize: int, passes: int) -> dict[str, float]:
        """passes: number of forward and backward passes, each of which gathers the input and scatters the output."""
        return {"tensor": passes * (self.gathered_dim + self.embed_dim) * itemsize}

    def new_pages(self, sizes: Any) -> Any:
        return NoState()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoState:
    """The cache of a branch that sees each token by itself."""

    def at(self, places: Any) -> "NoState":
        return self


def check_divisible(axis: str, size: int, fields: dict[str, int]) -> None:
    """Raises ValueError if a model size, {field: size}, does not divide over the devices of a mesh axis."""
    for name, value in fields.items():
        if value % size:
            largest = math.gcd(value, size)
            raise ValueError(
                f"model.{name}={value} is not divisible by mesh.{axis}={size}; use --mesh.{axis}={largest}"
            )
