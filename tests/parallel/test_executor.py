"""The executor alone, on a toy: layers of several kinds in patterns that differ between stages, auxiliary losses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.mesh import MeshConfig
from megajax.parallel.pipeline import Parts, Programs, loss_and_gradients
from megajax.parallel.schedule import make_stages, make_table

B, T, D = 2, 4, 8


@dataclasses.dataclass(frozen=True)
class Mix:
    """x + tanh(x w), with an auxiliary loss."""

    kind = "mix"
    factor: float

    def shape(self):
        return (D, D)

    def __call__(self, w, x, noise):
        y = x + self.factor * jnp.tanh(x @ w) + noise
        return y, {"square": jnp.mean(y**2)}


@dataclasses.dataclass(frozen=True)
class Scale:
    """x (1 + s): another kind, without an auxiliary loss."""

    kind = "scale"

    def shape(self):
        return (D,)

    def __call__(self, s, x, noise):
        return x * (1 + s), {}


def add(left, right):
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def run_layers(configs, weights, x, inputs):
    auxiliary = {}
    for config, w, noise in zip(configs, weights, inputs, strict=True):
        x, new = config(w, x, noise)
        auxiliary = add(auxiliary, new)
    return x, auxiliary


PARTS = Parts(
    embed=lambda shared, batch, key: batch["x"] * shared["into"],
    inputs=lambda batch, key: key,
    stage=run_layers,
    layer_inputs=lambda key, number: 0.1 * jax.random.normal(jax.random.fold_in(key, number), (D,)),
    loss=lambda shared, x, batch: jnp.sum(batch["weights"] * (x @ shared["out"]) ** 2),
    place=lambda kind, tree: tree,
)
PATTERNS = {
    "as Mamba and attention": [Mix(1.0), Scale(), Scale(), Mix(0.5), Scale(), Mix(1.0), Mix(1.0)],
    "one kind in one stage": [Scale(), Scale(), Scale(), Mix(1.0), Mix(1.0), Mix(1.0), Mix(2.0)],
}


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(
    "fields",
    [dict(pipeline=2), dict(pipeline=4, pipeline_schedule="gpipe"), dict(pipeline=2, virtual_stages=2)],
    ids=str,
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "evaluate"])
def test_loss_auxiliary_losses_and_gradients_equal_plain_differentiation(pattern, fields, train, make_test_mesh):
    num_microbatches, key = 5, jax.random.key(3)
    stages = make_stages(MeshConfig(**fields), len(pattern))
    draw = lambda number, shape: 0.3 * jax.random.normal(jax.random.key(number), shape)
    weights = [draw(number, config.shape()) for number, config in enumerate(pattern)]
    shared = {"into": 1 + draw(100, (D,)), "out": draw(101, (D, 3))}
    batch = {
        "x": draw(102, (num_microbatches, B, T, D)),
        "weights": jax.random.uniform(key, (num_microbatches, B, T, 1)),
    }

    def plain(weights, shared):
        loss, auxiliary = 0.0, {}
        for number in range(num_microbatches):
            one, its_key = jax.tree.map(lambda a, n=number: a[n], batch), jax.random.fold_in(key, number)
            x = PARTS.embed(shared, one, its_key)
            inputs = [PARTS.layer_inputs(its_key, layer) for layer in range(len(pattern))]
            x, new = run_layers(pattern, weights, x, inputs)
            loss, auxiliary = loss + PARTS.loss(shared, x, one), add(auxiliary, new)
        return loss + sum(auxiliary.values()), (loss, auxiliary)

    rows = {
        kind: stages.rows({n for n, config in enumerate(pattern) if config.kind == kind}) for kind in ("mix", "scale")
    }
    stack = lambda kind, row: jnp.stack([weights[n] if n >= 0 else jnp.zeros(config_of[kind].shape()) for n in row])
    config_of = {config.kind: config for config in pattern}
    layers = {kind: jnp.stack([stack(kind, row) for row in rows[kind]]) for kind in rows}
    runs = [[tuple((pattern[n], pattern[n].kind) for n in stage) for stage in chunk] for chunk in stages.layers]
    programs = tuple(dict.fromkeys(run for chunk in runs for run in chunk))
    most = max(len(stage) for chunk in stages.layers for stage in chunk)
    numbers = [[[*stage, *[0] * (most - len(stage))] for stage in chunk] for chunk in stages.layers]
    of_stage = [[programs.index(run) for run in chunk] for chunk in runs]
    table = make_table(stages.schedule, stages.num_ranks, num_microbatches, stages.num_chunks, backward=train)
    with jax.set_mesh(make_test_mesh(**fields)):
        run = jax.jit(
            lambda layers, shared, batch: loss_and_gradients(
                PARTS, Programs(programs, np.array(of_stage), np.array(numbers)), table, layers, shared,
                jax.tree.map(lambda _: P(), shared), batch, key, train=train,
            )
        )  # fmt: skip
        loss, auxiliary, gradients = run(layers, shared, batch)
    (_, (want, want_auxiliary)), wanted = jax.value_and_grad(plain, (0, 1), has_aux=True)(weights, shared)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    close(loss, want)
    jax.tree.map(close, auxiliary, want_auxiliary)
    if not train:
        assert gradients is None
        return
    jax.tree.map(close, gradients[1], wanted[1])
    for kind, got in gradients[0].items():
        for row, number in np.ndenumerate(rows[kind]):
            close(got[row], wanted[0][number] if number >= 0 else 0.0)
