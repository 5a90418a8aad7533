"""A model as pure functions of one pytree of parameters: embed -> stack of blocks -> loss.

Whatever trains, saves, plans or converts a model sees only this: nested dicts of arrays, the logical axes of each, and
the three parts. A model config has `build(rngs, dtype, stages)`, which returns an nnx.Module with `embed`,
`block_inputs`, `layers` (a Stack) and `loss`.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from megajax.layers.block import rows_of_kind
from megajax.parallel.schedule import Stages
from megajax.precision import PrecisionConfig, cast_floating
from megajax.sharding import is_axes, weight_shardings

logger = logging.getLogger("megajax")


class Model:
    def __init__(self, config, precision: PrecisionConfig, stages: Stages | None = None):
        """config: a model config, e.g. DecoderConfig. stages: of the pipeline that its layers are stored for, and
        models/pipelined.py then runs; None: no pipeline. Allocates nothing."""
        self.config, self.precision, self.stages = config, precision, stages
        build = functools.partial(config.build, dtype=precision.compute_dtype, stages=stages)
        self._build = lambda key: build(nnx.Rngs(params=key))
        self._graphdef, state = nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))
        self._state_structure = jax.tree.structure(state)
        metadata = lambda name: nnx.to_pure_dict(
            jax.tree.map(lambda p: p.get_metadata()[name], state, is_leaf=_is_param)
        )
        self.axes = metadata("axes")
        """Logical axes of each parameter: the pytree of parameters with tuples of names as leaves."""
        self.decay_mask = metadata("decay")
        """Whether weight decay applies to each parameter."""
        self.abstract_params = jax.eval_shape(lambda: self._init(jax.random.key(0)))

    def _init(self, key: jax.Array) -> dict:
        params = nnx.to_pure_dict(nnx.split(self._build(key))[1])
        return cast_floating(params, self.precision.params_dtype)

    def shardings(self, mesh: Mesh):
        return weight_shardings(self.axes, mesh)

    def init(self, seed: int, mesh: Mesh) -> dict:
        """Parameters drawn from `seed`, each device making its own part only; the same numbers on every mesh."""
        with jax.set_mesh(mesh):
            return jax.jit(self._init, out_shardings=self.shardings(mesh))(jax.random.key(seed))

    def module(self, params: dict) -> nnx.Module:
        """The nnx.Module with these parameters (arrays or tracers)."""
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._state_structure, jax.tree.leaves(params)))

    def loss(self, params: dict, batch: dict, *, key: jax.Array | None, train: bool) -> tuple[jax.Array, dict]:
        """-> (loss with its auxiliary terms, {name: auxiliary term}), float32 scalars.

        batch: tokens, labels, positions int32 [B, T]; loss_weights float32 [B, T], what each token counts; segment_ids
        int32 [B, T] if packed documents must not see each other. key: for dropout; None: no dropout.
        """
        module = self.module(params)
        embed_key, layers_key = (None, None) if key is None else jax.random.split(key)
        x = module.embed(batch, embed_key)
        x, _, auxiliary = module.layers(x, module.block_inputs(batch), key=layers_key)
        return module.loss(x, batch, train=train) + sum(auxiliary.values(), jnp.float32(0)), auxiliary

    def gradient_pieces(self, gradients: dict) -> list[jax.Array]:
        """The gradients as the backward pass makes them: layer by layer where the stack is unrolled.

        What only reads them (a norm) then reads each where it lies, instead of through the concatenation of all layers.
        """
        if self.config.scanned or self.stages is not None:
            return jax.tree.leaves(gradients)
        leaves = zip(jax.tree.leaves(gradients), jax.tree.leaves(self.axes, is_leaf=is_axes), strict=True)
        return [piece for leaf, axes in leaves for piece in (leaf if axes[0] == "layers" else [leaf])]

    def num_parameters(self) -> int:
        """Counted from the arrays, without rows of padding."""
        size_of = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))
        padding = 0
        for kind, rows in self.layer_rows.items():
            padding += size_of(self.abstract_params["layers"][kind]) // rows.size * int((rows < 0).sum())
        return size_of(self.abstract_params) - padding

    @property
    def layer_rows(self) -> dict[str, np.ndarray]:
        """{kind: number of the layer in each row of its stack}, -1 for a row that stands for none."""
        configs = self.module(self.abstract_params).layers.configs
        return {kind: rows_of_kind(configs, kind, self.stages) for kind in self.abstract_params["layers"]}


def _is_param(leaf) -> bool:
    return isinstance(leaf, nnx.Variable)
