"""Statistics of the products of a model over batches of text, collected where matrices are multiplied (ops/matmul.py).

The statistics of a product are returned as gradients: from any layer, inside loops and recomputation. There is no
backward pass, because they depend on no gradient, and XLA removes it.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from megajax.evaluation.perplexity import indexed_documents, text_documents
from megajax.evaluation.text_model import TextModel
from megajax.mesh.sharding import BATCH_AXES, constrain
from megajax.models.execution import ExecutionConfig
from megajax.models.interface import NO_REGULARISERS, ModelConfig
from megajax.models.model import Model
from megajax.ops.matmul import ObservedWeight
from megajax.parallel.context import sequence_order
from megajax.parameters import Parameter, name_of, named
from megajax.precision import PrecisionConfig

logger = logging.getLogger("megajax")

BATCH_TOKENS = 8192  # of a batch, per shard


def matrices(model: Model) -> dict[str, Parameter]:
    """The records of the matrices that are quantised, by name."""
    return {name: record for name, record in named(model.records).items() if record.is_quantizable}


def batches_of(
    model: TextModel, texts: Sequence[str], prefixes: Sequence[str], num_samples: int
) -> list[dict[str, np.ndarray]]:
    """Up to num_samples sequences of model.max_length tokens from consecutive documents, in batches.

    texts, prefixes: as of evaluation/perplexity.py. Raises ValueError for too little text.
    """
    shards = math.prod(model.scorer.mesh.shape[axis] for axis in BATCH_AXES)
    samples = []
    for sample in _samples(_tokens(model, texts, prefixes), model.max_length + 1):
        samples.append(sample)
        if len(samples) == num_samples:
            break
    if len(samples) < num_samples:
        logger.warning("the text has %d sequences of %d tokens, fewer than samples=%d", len(samples),
                       model.max_length, num_samples)  # fmt: skip
    size = min(max(1, BATCH_TOKENS // model.max_length), len(samples) // shards) * shards
    if not size:
        raise ValueError(
            f"the text has {len(samples)} sequences of max_length={model.max_length} tokens, and needs {shards}; give "
            "more text, or a smaller --max_length"
        )
    starts = range(0, len(samples) - size + 1, size)
    return [_batch(model, np.array(samples[start : start + size], np.int32)) for start in starts]


def _tokens(model: TextModel, texts: Sequence[str], prefixes: Sequence[str]) -> Iterator[int]:
    for text in texts:
        for document in text_documents(model, text):
            yield from document.text.tokens
    for prefix in prefixes:
        for document in indexed_documents(model, prefix):
            yield from document.text.tokens


def _samples(tokens: Iterator[int], length: int) -> Iterator[list[int]]:
    sample: list[int] = []
    for token in tokens:
        sample.append(token)
        if len(sample) == length:
            yield sample
            sample = []


def _batch(model: TextModel, samples_BT: np.ndarray) -> dict[str, np.ndarray]:
    length = samples_BT.shape[1] - 1
    order = sequence_order(length, model.scorer.mesh.shape["context"], model.scorer.model.execution.context_attention)
    shape = (len(samples_BT), length)
    return {
        "tokens": samples_BT[:, :-1][:, order],
        "labels": samples_BT[:, 1:][:, order],
        "positions": np.broadcast_to(np.arange(length, dtype=np.int32), shape)[:, order],
        "loss_weights": np.ones(shape, np.float32),
    }


def observe(
    model: Model,
    weights: dict,
    mesh: Mesh,
    batches: Sequence[dict[str, np.ndarray]],
    statistics: Callable[[jax.Array, jax.Array, Any], dict[str, jax.Array]],
    given: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, np.ndarray]]:
    """{name of a matrix: {name of a statistic: float64 [layers, ...]}}, those named `largest` the maximum over the
    batches, others the sum.

    weights: stacked. statistics: (x [R, K], weight [K, N], given of the layer) -> arrays of float32. given: by name of
    a matrix, arrays [layers, ...].
    """
    program = _program(model.config, model.precision, model.execution, statistics)
    given = {name: given[name] if given else () for name in matrices(model)}

    def combine(path, one, other):
        return np.maximum(one, other) if path[-1].key == "largest" else one + other

    def seen_in(batch: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
        return jax.tree.map(lambda a: np.asarray(a, np.float64), program(weights, given, batch))

    with jax.set_mesh(mesh):
        total, *others = map(seen_in, batches)
    return functools.reduce(functools.partial(jax.tree_util.tree_map_with_path, combine), others, total)


@functools.lru_cache(maxsize=4)
def _program(config: ModelConfig, precision: PrecisionConfig, execution: ExecutionConfig, statistics: Callable):
    """(weights, given, a batch) -> the statistics of each matrix."""
    precision = dataclasses.replace(precision, gradient_reduce="compute")
    model = Model(config, precision, dataclasses.replace(execution, recompute="none"))
    records = matrices(model)

    def unseen(array: jax.Array, record: Parameter, given: Any):
        """Zeros in the shapes of the statistics."""
        num_inputs = math.prod(array.shape[1 : 1 + record.num_inputs])
        x = jax.ShapeDtypeStruct((1, num_inputs), precision.compute_dtype)
        w = jax.ShapeDtypeStruct((num_inputs, array[0].size // num_inputs), array.dtype)
        found = jax.eval_shape(statistics, x, w, jax.tree.map(lambda a: a[0], given))
        return jax.tree.map(lambda a: jnp.zeros((array.shape[0], *a.shape), a.dtype), found)

    def run(weights: dict, given: dict, batch: dict):
        leaves = named(weights)
        seen = {name: unseen(leaves[name], record, given[name]) for name, record in records.items()}
        batch = {name: constrain(array, "batch", "time") for name, array in batch.items()}

        def loss(seen: dict) -> jax.Array:
            def observed(path, array):
                name = name_of(path)
                return ObservedWeight(array, seen[name], given[name], statistics) if name in seen else array

            module = model.module(jax.tree_util.tree_map_with_path(observed, weights))
            return module.cross_entropy(
                module.hidden(batch)[0], batch["labels"], batch["loss_weights"], NO_REGULARISERS
            )

        return jax.grad(loss)(seen)

    return jax.jit(run)
