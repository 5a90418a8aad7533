"""Upcycling: a run with experts that starts from a dense model (Komatsuzaki et al. 2022,
https://arxiv.org/abs/2212.05055).

Each expert is a copy of the feed-forward network of its layer, or of 1 / G of its width if experts are narrower by that
factor (the granularity G of He et al. 2024, https://arxiv.org/abs/2410.07524). Experts g G to g G + G - 1 then hold
all parts of the network, and start with the same column of the router, so that a token goes to all of them. The output
projections are multiplied by what remains of the weights of a token, so that the model computes what the dense one did;
exactly, if weights are normalised over the chosen experts. Everything else is copied; routers are initialised anew.
"""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp

from megajax.checkpoint.layout import Rows, in_rows, stack_of
from megajax.config import Config
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.mesh.sharding import with_shardings
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parameters import Parameter, name_of, named
from megajax.weights.sources import WeightSource

logger = logging.getLogger("megajax")

FIELD = "model.moe"


def upcycled(source: WeightSource, config: Config) -> WeightSource:
    """The source as the run needs it: with experts, if the run has some and the source has none.

    Raises ValueError if experts cannot be made of the feed-forward networks of the source.
    """
    dense = source.config.model
    ours = config.model
    if not isinstance(dense, DecoderConfig) or not isinstance(ours, DecoderConfig):
        return source
    if ours.moe.num_experts is None or dense.moe.num_experts is not None:
        return source
    return _Upcycled(source, dense, config, ours, ours.moe.num_experts)


class _Upcycled:
    """The source that a dense one becomes."""

    reads_parts = False

    def __init__(
        self, source: WeightSource, dense: DecoderConfig, config: Config, ours: DecoderConfig, num_experts: int
    ):
        """dense: the model of `source`. ours: the model of `config`, the run; it has `num_experts` experts."""
        moe = ours.moe
        self._dense = source
        self._run = config
        self._num_experts = num_experts
        width = moe.expert_dim or dense.width_of_mlp
        self._granularity = dense.width_of_mlp // width
        _check(dense, moe, width, num_experts)
        self._scale = _scale(moe, self._granularity, num_experts)
        whole = dataclasses.replace(moe, expert_dim=width)
        model = dataclasses.replace(dense, moe=whole, pattern=ours.pattern)
        self.config = dataclasses.replace(source.config, model=model)
        self._widths = (width, dense.width_of_mlp)

    def __str__(self) -> str:
        return f"{self._dense}, upcycled"

    def restore_params(self, abstract: dict, layer_rows: Rows) -> dict:
        mesh = jax.tree.leaves(abstract)[0].sharding.mesh
        before = model_for(self._dense.config, self._run)
        after = model_for(self.config, self._run)
        target = with_shardings(before.abstract_weights, before.shardings(mesh))
        found = self._dense.restore_params(target, before.layer_rows)
        dense = named(found)
        names = list(named(abstract))
        fresh = [name for name in names if _dense_name(name) not in dense]
        logger.info(
            "upcycling: %d experts with a feed-forward width of %d of %d each; newly initialised: %s",
            self._num_experts, *self._widths, ", ".join(fresh),
        )  # fmt: skip
        initial = after.init(self._run.training.seed, mesh, only=fresh)
        dense |= named(initial)

        def make(path, leaf, record: Parameter):
            name = name_of(path)
            array = dense[name if name in fresh else _dense_name(name)]
            stack = stack_of(name, layer_rows)
            if stack is None:
                return array.astype(leaf.dtype)
            stored = layer_rows[stack] if name in fresh else before.layer_rows[_dense_name(stack)]
            form = functools.partial(self._converted, record=record, is_down=name.endswith(".down"))
            moved = jax.jit(
                lambda a: form(in_rows(a, stored, layer_rows[stack])).astype(leaf.dtype), out_shardings=leaf.sharding
            )
            return moved(array)

        return jax.tree_util.tree_map_with_path(make, abstract, after.records)

    def _converted(self, array: jax.Array, *, record: Parameter, is_down: bool) -> jax.Array:
        """Of layers of a kind, as it is in the dense model or newly initialised."""
        axes = record.axes
        parts = self._granularity
        if "experts" in axes:
            axis = axes.index("experts")
            split = jnp.stack(jnp.split(array, parts, axes.index("mlp") - 1), axis)
            repeats = [self._num_experts // parts if name == "experts" else 1 for name in axes]
            return jnp.tile(split, repeats) * jnp.asarray(self._scale if is_down else 1.0, array.dtype)
        if record.role == "router":
            of_groups = jax.lax.slice_in_dim(array, 0, array.shape[-1] // parts, axis=-1)
            return jnp.repeat(of_groups, parts, -1)
        return array


def _dense_name(name: str) -> str:
    """Of a parameter or a stack of layers: layers.moe.mlp.up -> layers.dense.mlp.up."""
    return ".".join("dense" if part == "moe" else part for part in name.split("."))


def _scale(moe: MoeConfig, granularity: int, num_experts: int) -> float:
    """Of the output projections: granularity over the sum of the weights of a token, for even weights."""
    router = moe.router
    total = router.top_k / num_experts if router.score == "softmax_all" else 1.0
    return granularity / (total * router.scale)


def _check(dense: DecoderConfig, moe: MoeConfig, width: int, num_experts: int) -> None:
    if "mlp" in dense.biases:
        raise ValueError("model.biases has mlp there: experts have no biases, so the model cannot be upcycled")
    if moe.shared_dim is not None:
        raise ValueError(
            f"{FIELD}.shared_dim={moe.shared_dim}: a dense model has no shared experts to start from; leave it out"
        )
    if dense.width_of_mlp % width:
        raise ValueError(
            f"{FIELD}.expert_dim={width} does not divide the feed-forward width {dense.width_of_mlp} of the dense "
            "model; choose a divisor, or leave it out for whole copies"
        )
    granularity = dense.width_of_mlp // width
    for field, number in (("num_experts", num_experts), ("router.top_k", moe.router.top_k)):
        if number % granularity:
            raise ValueError(
                f"{FIELD}.{field}={number}: an expert is 1 / {granularity} of the dense network, so it must be a "
                f"multiple of {granularity}"
            )


def model_for(source: Config, run: Config) -> Model:
    """The model of a source, with the pipeline stages of the run and its dtype of parameters."""
    training = dataclasses.replace(source.training, frozen=(), trained=())
    precision = dataclasses.replace(source.precision, params=run.precision.params)
    return dataclasses.replace(source, mesh=run.mesh, precision=precision, training=training).make_model()
