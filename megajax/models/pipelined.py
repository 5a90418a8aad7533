"""A model of one stack, split into pipeline stages: loss and gradients of all microbatches of a step.

Stacks that the loss runs (multi-token prediction) are part of the loss, which all ranks compute together.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from megajax.layers.dropout import DropoutKey
from megajax.layers.layer import Totals
from megajax.layers.stack import fold, run_stage
from megajax.mesh.sharding import constrain_weights, local_weight_spec
from megajax.models.interface import NO_REGULARISERS, LossOptions, LossTerms, Objective, OneStack, split_key
from megajax.models.model import Model, Weights
from megajax.parallel import pipeline
from megajax.parallel.schedule import Stages, make_table
from megajax.parameters import is_in_8_bits, merge

STACK = "layers"  # the attribute of models/interface.py OneStack


def loss_and_gradients(
    model: Model,
    weights: Weights,
    batch: dict,
    objective: Objective,
    key: jax.Array | None,
    options: LossOptions,
    loss_scale: jax.Array | None = None,
) -> tuple[LossTerms, dict, dict]:
    """-> (the terms of the step, float32 gradients of the trained parameters, observations for the variables).

    weights: stored for model.stages. batch: arrays [M, B, ...] as Model.loss takes them, M microbatches. key: that of
    the step, for dropout. loss_scale: float32 scalar; the gradients are those of the loss times this.
    """
    terms, (d_layers, d_shared) = _run(model, weights, batch, objective, key, options, loss_scale, train=True)
    names = dict.fromkeys((*weights.params, *weights.variables))
    found = model.split({name: d_layers if name == STACK else d_shared[name] for name in names})
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    return terms, found.params, jax.tree.map(lambda a: a / num_microbatches, found.variables)


def loss(
    model: Model, weights: Weights, batch: dict, objective: Objective, options: LossOptions = NO_REGULARISERS
) -> LossTerms:
    """The loss without gradients or dropout."""
    return _run(model, weights, batch, objective, None, options, None, train=False)[0]


def _run(
    model: Model,
    weights: Weights,
    batch: dict,
    objective: Objective,
    key: jax.Array | None,
    options: LossOptions,
    loss_scale: jax.Array | None,
    *,
    train: bool,
) -> tuple[LossTerms, Any]:
    """-> (the terms of the step, the gradients of parallel/pipeline.py)."""
    stages = _stages(model)
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    table = make_table(stages.num_ranks, num_microbatches, stages.num_chunks, backward=train)
    records = model.split(model.records)
    of_loss, of_layers, gradients = pipeline.loss_and_gradients(
        _parts(model, objective, options, *jax.tree.leaves(batch)[0].shape[:2]),
        _programs(model),
        table,
        _placed(model, merge(weights.params, weights.variables), merge(records.params, records.variables)),
        _placed(model, weights.frozen, records.frozen),
        batch,
        key,
        train=train,
        loss_scale=loss_scale,
    )
    return of_loss.with_layers(Totals(*of_layers)), gradients


def _stages(model: Model) -> Stages:
    assert model.stages is not None
    return model.stages


def _module(model: Model, weights: dict) -> OneStack:
    module = model.module(weights)
    assert isinstance(module, OneStack), type(module)  # Config.check refuses a pipeline of others
    return module


def _placed(model: Model, weights: dict, records: dict) -> pipeline.Placed:
    """Casts matrices of the layers once per step, not for each microbatch, so that fsdp gathers the smaller copies;
    unless their gradients, or their low-precision format, need more precision than the copies have."""
    precision = model.precision

    def cast(array, record):
        return array.astype(precision.compute_dtype) if record.is_cast and not is_in_8_bits(array) else array

    if not precision.has_float32_gradients and not precision.is_low:
        stacks = {name: records[name] for name in model.config.stacks(model.execution) if name in weights}
        weights = weights | {name: jax.tree.map(cast, weights[name], tree) for name, tree in stacks.items()}
    shared = {name: tree for name, tree in weights.items() if name != STACK}

    def over_ranks(record):
        return local_weight_spec(record.axes, (pipeline.AXIS,))

    specs = {name: jax.tree.map(over_ranks, records[name]) for name in shared}
    return pipeline.Placed(weights.get(STACK, {}), shared, specs)


def _parts(
    model: Model, objective: Objective, options: LossOptions, num_microbatches: int, microbatch: int
) -> pipeline.Parts:
    unused_layers = {STACK: model.abstract_weights[STACK]}  # embedding and loss do not read them
    any_module = _module(model, model.abstract_weights)

    def module(trained, held):
        return _module(model, merge(trained, held, unused_layers))

    def rank_record(record):
        """The record without the dim that the ranks split."""
        return dataclasses.replace(record, axes=(record.axes[0], *record.axes[2:]))

    differentiated = model.split(model.records)._replace(frozen={}).merged()
    records = jax.tree.map(rank_record, differentiated.get(STACK, {}))

    def loss(trained, held, x, batch):
        heads = module(trained, held)
        terms = objective.loss(heads, heads.output(x), batch, options).share(num_microbatches)
        return terms.total(), terms

    def stage(configs, trained, held, x, entered, inputs):
        layers = [
            model.for_matmuls(merge(*weights), model.records[STACK][config.kind])
            for config, *weights in zip(configs, trained, held, strict=True)
        ]
        return run_stage(configs, layers, x, [(found | entered, key) for found, key in inputs])

    return pipeline.Parts(
        embed=lambda trained, held, batch, key: module(trained, held).entry(batch, split_key(key)[0]),
        key_of=lambda key, number: DropoutKey(key, number * microbatch),
        inputs=lambda batch, key: (any_module.block_inputs(batch), split_key(key)[1]),
        layer_inputs=lambda inputs, number: (inputs[0], fold(inputs[1], number)),
        stage=stage,
        loss=loss,
        constrain_gradients=lambda kind, gradients: constrain_weights(gradients, records[kind]),
    )


def _programs(model: Model) -> pipeline.Programs:
    stages = _stages(model)
    configs = _module(model, model.abstract_weights).layers.configs
    runs = [
        [tuple((configs[number], configs[number].kind) for number in stage) for stage in chunk]
        for chunk in stages.layers
    ]
    programs = tuple(dict.fromkeys(run for chunk in runs for run in chunk))
    most = max(len(stage) for chunk in stages.layers for stage in chunk)
    numbers = [[[*stage, *[0] * (most - len(stage))] for stage in chunk] for chunk in stages.layers]
    of_stage = [[programs.index(run) for run in chunk] for chunk in runs]
    return pipeline.Programs(programs, np.array(of_stage, np.int32), np.array(numbers, np.int32))
