"""A model over the stages of a pipeline: loss and gradients of all microbatches of a step."""

import jax
import numpy as np

from megajax.layers.block import fold, run_stage
from megajax.models.model import Model
from megajax.parallel import pipeline
from megajax.parallel.schedule import make_table
from megajax.sharding import constrain_weights, is_axes, local_weight_spec


def loss_and_gradients(model: Model, params: dict, batch: dict, key: jax.Array | None, *, train: bool):
    """-> (loss with its auxiliary terms, {name: auxiliary term}, float32 gradients or None).

    params: as model.stages lays them out. batch: arrays [M, B, T] as Model.loss takes them, M microbatches. key: of the
    step, folded with the number of the microbatch. train=False: no gradients, no regularising terms.
    """
    stages = model.stages
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    table = make_table(stages.schedule, stages.num_ranks, num_microbatches, stages.num_chunks, backward=train)
    shared = {name: tree for name, tree in params.items() if name != "layers"}
    over_ranks = lambda axes: local_weight_spec(axes, (pipeline.AXIS,))
    specs = {name: jax.tree.map(over_ranks, model.axes[name], is_leaf=is_axes) for name in shared}
    # Matrices are cast once a step, not with each microbatch, and gathered over fsdp as they are then.
    dtype, mask = model.precision.compute_dtype, model.decay_mask["layers"]
    layers = jax.tree.map(lambda a, is_matrix: a.astype(dtype) if is_matrix else a, params["layers"], mask)
    loss, auxiliary, gradients = pipeline.loss_and_gradients(
        _parts(model, train), _programs(model), table, layers, shared, specs, batch, key, train=train
    )
    loss += sum(auxiliary.values(), jax.numpy.float32(0))
    if not train:
        return loss, auxiliary, None
    d_layers, d_shared = gradients
    return loss, auxiliary, {name: d_layers if name == "layers" else d_shared[name] for name in params}


def _parts(model: Model, train: bool) -> pipeline.Parts:
    no_layers = {"layers": model.abstract_params["layers"]}  # embedding and loss do not read them
    module = lambda shared: model.module(shared | no_layers)
    any_module = model.module(model.abstract_params)
    keys = lambda key: (None, None) if key is None else jax.random.split(key)
    # The axes of what a layer of a rank has: without the dim that the ranks split.
    axes = {kind: jax.tree.map(lambda names: (names[0], *names[2:]), tree, is_leaf=is_axes)
            for kind, tree in model.axes["layers"].items()}  # fmt: skip
    return pipeline.Parts(
        embed=lambda shared, batch, key: module(shared).embed(batch, keys(key)[0]),
        inputs=lambda batch, key: (any_module.block_inputs(batch), keys(key)[1]),
        layer_inputs=lambda inputs, number: (inputs[0], fold(inputs[1], number)),
        stage=run_stage,
        loss=lambda shared, x, batch: module(shared).loss(x, batch, train=train),
        place=lambda kind, gradients: constrain_weights(gradients, axes[kind]),
    )


def _programs(model: Model) -> pipeline.Programs:
    stages, configs = model.stages, model.module(model.abstract_params).layers.configs
    runs = [
        [tuple((configs[number], configs[number].kind) for number in stage) for stage in chunk]
        for chunk in stages.layers
    ]
    programs = tuple(dict.fromkeys(run for chunk in runs for run in chunk))
    most = max(len(stage) for chunk in stages.layers for stage in chunk)
    numbers = [[[*stage, *[0] * (most - len(stage))] for stage in chunk] for chunk in stages.layers]
    of_stage = [[programs.index(run) for run in chunk] for chunk in runs]
    return pipeline.Programs(programs, np.array(of_stage, np.int32), np.array(numbers, np.int32))
