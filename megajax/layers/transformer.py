"""Layers that add branches to a residual stream, and the transformer layer: attention and MLP, in sequence or in
parallel."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.attention.multi_head import AttentionConfig
from megajax.layers.dropout import DropoutKey, dropout
from megajax.layers.layer import Activation, BranchConfig, Flops, Saved
from megajax.layers.norm import Norm, NormConfig
from megajax.mesh.config import MeshConfig
from megajax.mesh.sharding import constrain
from megajax.parallel.context import ContextMethod, current_order
from megajax.parameters import weight

NormPlacement = Literal["pre", "post", "sandwich", "post_residual"]
ParallelResidual = Literal["none", "one_norm", "two_norms"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualLayerConfig:
    """A LayerConfig made of branches. A kind of layer says which these are and what `activations` are around them, and
    overrides what is not their sum."""

    norm: NormConfig
    residual_multiplier: float = 1.0
    dropout: float = 0.0
    saved: Saved | None = None

    @property
    def branches(self) -> tuple[BranchConfig, ...]:
        """In the order of the forward pass. The first may have a cache; the last gives the layer its kind."""
        raise NotImplementedError

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        raise NotImplementedError

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return self.branches[-1].kind

    @property
    def embed_dim(self) -> int:
        return self.branches[0].embed_dim

    @property
    def reach(self) -> int | None:
        return self.branches[0].reach

    @property
    def modules(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, Sequence[str]] = {"norm": ("normed",)}
        for branch in self.branches:
            found |= branch.modules
        return found

    def check(self, mesh: MeshConfig, sequence_length: int) -> None:
        for branch in self.branches:
            branch.check(mesh, sequence_length)

    def flops(self, sequence_length: int) -> Flops:
        return sum((branch.flops(sequence_length) for branch in self.branches), Flops())

    def sent(self, mesh: MeshConfig, itemsize: int) -> dict[str, float]:
        """Each branch gathers its input (latent attention: the latents) over `tensor` and scatters its output, forward
        and backward, and once more in a recomputed forward pass."""
        saves = self.saved is None or any(branch.projected in self.saved.kept for branch in self.branches)
        sent: dict[str, float] = defaultdict(float)
        for branch in self.branches:
            for axis, size in branch.sent(mesh, itemsize, passes=2 if saves else 3).items():
                sent[axis] += size
        return dict(sent)

    def new_pages(self, sizes: Any) -> Any:
        return self.branches[0].new_pages(sizes)

    def saving(
        self, recompute: Literal["none", "selective", "full"], recomputed: Sequence[str], offload: Sequence[str]
    ) -> Self:
        """The same layer with the result of Saved.choose."""
        saved = Saved.choose(recompute, recomputed, offload, self._activation_names, self.modules)
        return dataclasses.replace(self, saved=saved and _saving_lse(saved))

    def saving_by_name(self) -> Self:
        return self if self.saved else dataclasses.replace(self, saved=_saving_lse(Saved(self._activation_names, ())))

    @property
    def _activation_names(self) -> tuple[str, ...]:
        return tuple(self.activations(sequence_length=1))  # they do not depend on it


def _saving_lse(saved: Saved) -> Saved:
    if "attention_out" not in saved.kept:
        return saved
    # Otherwise the attention would run again to get it; 4 bytes per head and token.
    return dataclasses.replace(saved, on_device=(*saved.on_device, "attention_lse"))


class ResidualLayer(nnx.Module):
    """How branches read the residual stream, and how they are added to it."""

    def __init__(self, config: ResidualLayerConfig, context: ContextMethod):
        self.residual_multiplier = config.residual_multiplier
        self.dropout = config.dropout
        self.saved = config.saved
        self.context = context

    def _branch_input(
        self, norm: Norm | None, name: str, x_BTD: jax.Array, y_BTD: jax.Array | None = None, *, axis: str
    ) -> tuple[jax.Array, jax.Array]:
        """(x + y under this checkpoint name, the input of a branch with this logical axis of the sequence)."""
        if self.saved is not None or norm is None:
            # The sum is not fused into the norm: recomputing the norm would need y, and with it the matmul that made y.
            x_BTD = checkpoint_name(x_BTD if y_BTD is None else x_BTD + y_BTD, name)
            y_BTD = None
        if norm is None:
            # So that the gradient is materialised here, as in ops/norm.py.
            x_BTD = jax.lax.optimization_barrier(x_BTD)
            return x_BTD, constrain(x_BTD, "batch", axis, None)
        x_BTD, read_BTD = norm.residual(x_BTD, y_BTD)
        return x_BTD, checkpoint_name(constrain(read_BTD, "batch", axis, None), "normed")

    def _branch_output(self, norm: Norm | None, y_BTD: jax.Array, key: DropoutKey | None, cache: Any) -> jax.Array:
        """The output of a branch, ready to be added to the residual stream."""
        y_BTD = constrain(y_BTD, "batch", "sequence", None)
        if cache is None:
            # Keeps XLA from adding x in place inside the matmul that makes y: x, needed again by the backward pass,
            # would be copied.
            y_BTD = jax.lax.optimization_barrier(y_BTD)
        if norm is not None:
            _, y_BTD = norm.residual(checkpoint_name(y_BTD, "branch_out"))
        if self.residual_multiplier != 1.0:
            y_BTD = (y_BTD.astype(jnp.float32) * self.residual_multiplier).astype(y_BTD.dtype)
        order = None if key is None else current_order(y_BTD.shape[1], self.context)
        return dropout(y_BTD, self.dropout, key, order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerLayerConfig(ResidualLayerConfig):
    attention: AttentionConfig
    mlp: BranchConfig
    """A feed-forward network, or experts."""
    norm_placement: NormPlacement = "pre"
    parallel_residual: ParallelResidual = "none"
    branch_scales: bool = False
    """Multiply the output of each branch by a learned vector (Touvron et al. 2021, LayerScale)."""
    added: str | None = None
    """An input that is added to the output of the layer."""

    @property
    def branches(self) -> tuple[BranchConfig, ...]:
        return self.attention, self.mlp

    @property
    def norms_input(self) -> bool:
        """Whether the inputs of attention and MLP are normalised."""
        return self.norm_placement in ("pre", "sandwich")

    @property
    def norms_output(self) -> bool:
        """Whether their outputs are normalised before they are added."""
        return self.norm_placement in ("post", "sandwich")

    @property
    def norms_residual(self) -> bool:
        """Whether the residual stream is normalised after each addition."""
        return self.norm_placement == "post_residual"

    @property
    def has_mlp_norm(self) -> bool:
        return self.norms_input and self.parallel_residual != "one_norm"

    @property
    def norm_readers(self) -> dict[str, tuple[str, ...]]:
        """The norms on the residual stream, and the submodules that read what each returns."""
        if not self.norms_input:
            return {}
        if not self.has_mlp_norm:
            return {"attention_norm": ("attention", "mlp")}
        return {"attention_norm": ("attention",), "mlp_norm": ("mlp",)}

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        if self.norms_residual:
            return PostNormTransformerLayer(self, rngs=rngs)
        layer = TransformerLayer if self.parallel_residual == "none" else ParallelTransformerLayer
        return layer(self, rngs=rngs)

    def activations(self, sequence_length: int) -> dict[str, Activation]:
        D = self.embed_dim
        out = Flops(matmuls=self.attention.out_flops)
        down = Flops(matmuls=self.mlp.out_flops)
        of_mlp = self.mlp.activations(sequence_length)
        found = {"residual": Activation(D)}
        if self.norms_input:
            found["normed"] = Activation(2 * D if self.has_mlp_norm else D)
        found |= self.attention.activations(sequence_length)
        if self.norms_output:
            found["branch_out"] = Activation(2 * D, out + down)
        if self.parallel_residual == "none":
            found["residual_mid"] = Activation(D, Flops() if self.norms_output else out)
        if not self.norms_residual:
            return found | of_mlp
        return found | {"normed": Activation(D)} | of_mlp | {"residual_out": Activation(D, down)}


class TransformerLayer(ResidualLayer):
    """(x [B, T, D], inputs, cache, key) -> (x, cache, Terms): x + attention(x), then x + mlp(x).

    Their inputs are normalised (pre, sandwich); their outputs are normalised (post, sandwich), multiplied and subject
    to dropout before they are added.
    """

    def __init__(self, config: TransformerLayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.attention.context)

        def norm_if(wanted: bool) -> Norm | None:
            return Norm(config.norm, config.embed_dim, rngs=rngs) if wanted else None

        self.attention_norm = norm_if(config.norms_input)
        self.attention = config.attention.build(rngs)
        self.attention_post_norm = norm_if(config.norms_output)
        self.mlp_norm = norm_if(config.has_mlp_norm)
        self.mlp = config.mlp.build(rngs)
        self.mlp_post_norm = norm_if(config.norms_output)
        self.added = config.added
        self.branch_scales = config.branch_scales
        if config.branch_scales:
            shape = (config.embed_dim,)
            self.attention_scale = weight(shape, ("norm",), nnx.initializers.ones, rngs, "vector")
            self.mlp_scale = weight(shape, ("norm",), nnx.initializers.ones, rngs, "vector")

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache: Any, key: DropoutKey | None):
        keys = [None] * 3 if key is None else key.split(3)
        x_BTD, read_BTD = self._branch_input(self.attention_norm, "residual", x_BTD, axis=self.attention.input_axis)
        y_BTD, cache, _ = self.attention(read_BTD, inputs, cache, keys[0])
        y_BTD = self._branch_output(self.attention_post_norm, y_BTD, keys[1], cache)
        if self.branch_scales:
            y_BTD *= self.attention_scale[...].astype(y_BTD.dtype)
        x_BTD, read_BTD = self._branch_input(self.mlp_norm, "residual_mid", x_BTD, y_BTD, axis=self.mlp.input_axis)
        y_BTD, cache, terms = self.mlp(read_BTD, inputs, cache, None)
        y_BTD = self._branch_output(self.mlp_post_norm, y_BTD, keys[2], cache)
        if self.branch_scales:
            y_BTD *= self.mlp_scale[...].astype(y_BTD.dtype)
        x_BTD += y_BTD
        if self.added is not None and self.added in inputs:
            x_BTD += inputs[self.added]
        return x_BTD, cache, terms


class PostNormTransformerLayer(ResidualLayer):
    """norm(x + attention(x)), then norm(x + mlp(x)), as in the original transformer (Vaswani et al. 2017) and BERT."""

    def __init__(self, config: TransformerLayerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, config.attention.context)
        self.attention = config.attention.build(rngs)
        self.attention_post_norm = Norm(config.norm, config.embed_dim, rngs=rngs)
        self.mlp = config.mlp.build(rngs)
        self.mlp_post_norm = Norm(config.norm, config.embed_dim, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache: Any, key: DropoutKey | None):
        keys = [None] * 3 if key is None else key.split(3)
        x_BTD = checkpoint_name(x_BTD, "residual")
        read_BTD = constrain(x_BTD, "batch", self.attention.input_axis, None)
        y_BTD, cache, _ = self.attention(read_BTD, inputs, cache, keys[0])
        x_BTD = self._add_and_norm(self.attention_post_norm, "residual_mid", x_BTD, y_BTD, keys[1], cache)
        x_BTD = checkpoint_name(x_BTD, "normed")
        y_BTD, cache, terms = self.mlp(constrain(x_BTD, "batch", self.mlp.input_axis, None), inputs, cache, None)
        return self._add_and_norm(self.mlp_post_norm, "residual_out", x_BTD, y_BTD, keys[2], cache), cache, terms

    def _add_and_norm(self, norm: Norm, name: str, x_BTD: jax.Array, y_BTD: jax.Array, key: DropoutKey | None, cache):
        """norm(x + y), with the sum under this checkpoint name."""
        y_BTD = self._branch_output(None, y_BTD, key, cache)
        if self.saved is not None:  # as in _branch_input
            return norm.residual(checkpoint_name(x_BTD + y_BTD, name))[1]
        return norm.residual(x_BTD, y_BTD)[1]


class ParallelTransformerLayer(TransformerLayer):
    """x + attention(x) + mlp(x), with separate norms or a shared one (Wang and Komatsuzaki 2021)."""

    def __call__(self, x_BTD: jax.Array, inputs: dict, cache: Any, key: DropoutKey | None):
        keys = [None] * 3 if key is None else key.split(3)
        x_BTD, read_BTD = self._branch_input(self.attention_norm, "residual", x_BTD, axis=self.attention.input_axis)
        y_BTD, cache, _ = self.attention(read_BTD, inputs, cache, keys[0])
        if self.mlp_norm is not None:
            x_BTD, read_BTD = self._branch_input(self.mlp_norm, "residual", x_BTD, axis=self.mlp.input_axis)
        y_BTD = self._branch_output(self.attention_post_norm, y_BTD, keys[1], cache)
        z_BTD, cache, terms = self.mlp(read_BTD, inputs, cache, None)
        return x_BTD + y_BTD + self._branch_output(self.mlp_post_norm, z_BTD, keys[2], cache), cache, terms
