"""The executor alone, on a toy: layers of several kinds in patterns that differ between stages, held weights, terms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.mesh.config import MeshConfig
from megajax.parallel.pipeline import Parts, Placed, Programs, loss_and_gradients
from megajax.parallel.schedule import make_stages, make_table

B, T, D = 2, 4, 8


@dataclasses.dataclass(frozen=True)
class Mix:
    """x + tanh(x w), with an auxiliary loss."""

    kind = "mix"
    factor: float
    reads: bool = False
    """Whether it adds what `embed` gives besides x."""

    def shape(self):
        return (D, D)

    def __call__(self, w, x, noise):
        y = x + self.factor * jnp.tanh(x @ w) + noise
        return y, {"square": jnp.mean(y**2)}


@dataclasses.dataclass(frozen=True)
class Scale:
    """x (1 + s): another kind, without an auxiliary loss."""

    kind = "scale"
    reads: bool = False

    def shape(self):
        return (D,)

    def __call__(self, s, x, noise):
        return x * (1 + s), {}


def add(left, right):
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in {**left, **right}}


def run_layers(configs, weights, held, x, entered, inputs):
    """held: a shift of each layer, which has no gradient."""
    auxiliary, metrics = {}, {}
    for config, w, shift, noise in zip(configs, weights, held, inputs, strict=True):
        x, new = config(w, x + shift + entered["more"] if config.reads else x + shift, noise)
        auxiliary = add(auxiliary, new)
        metrics = add(metrics, {f"{name}_again": jnp.stack([value, 1.0]) for name, value in new.items()})
    return x, (auxiliary, metrics)


def loss_of(shared, held, x, batch):
    loss = jnp.sum(batch["weights"] * (x @ shared["out"] + held["offset"][0]) ** 2)
    return loss, {"loss": loss, "output": jnp.mean(x)}


def embed(shared, held, batch, key):
    x = batch["x"] * shared["into"]
    return x + held["offset"], {"more": jnp.sin(x)}


PARTS = Parts(
    embed=embed,
    key_of=jax.random.fold_in,
    inputs=lambda batch, key: key,
    stage=run_layers,
    layer_inputs=lambda key, number: 0.1 * jax.random.normal(jax.random.fold_in(key, number), (D,)),
    loss=loss_of,
    constrain_gradients=lambda kind, tree: tree,
)
PATTERNS = {
    "as Mamba and attention": [Mix(1.0, reads=True), Scale(), Scale(), Mix(0.5), Scale(), Mix(1.0), Mix(1.0)],
    "one kind in one stage": [Scale(reads=True), Scale(), Scale(), Mix(1.0), Mix(1.0), Mix(1.0), Mix(2.0)],
}


FIELDS = [dict(pipeline=2), dict(pipeline=4), dict(pipeline=2, virtual_stages=2)]
CASES = [(name, fields) for name in PATTERNS for fields in FIELDS]
QUICK = [
    ("as Mamba and attention", FIELDS[1]),
    ("as Mamba and attention", FIELDS[2]),
    ("one kind in one stage", FIELDS[0]),
]


@pytest.mark.parametrize(
    "pattern, fields",
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
    ids=str,
)
@pytest.mark.parametrize("train", [True, False], ids=["train", "evaluate"])
def test_terms_and_gradients_equal_plain_differentiation(pattern, fields, train, make_test_mesh):
    loss_scale = jnp.float32(4.0) if train and "virtual_stages" not in fields else None
    pattern = PATTERNS[pattern]
    num_microbatches, key = 5, jax.random.key(3)
    stages = make_stages(MeshConfig(**fields), len(pattern))
    draw = lambda number, shape: 0.3 * jax.random.normal(jax.random.key(number), shape)
    weights = [draw(number, config.shape()) for number, config in enumerate(pattern)]
    shifts = [draw(200 + number, (D,)) for number in range(len(pattern))]
    shared, shared_held = {"into": 1 + draw(100, (D,)), "out": draw(101, (D, 3))}, {"offset": draw(103, (D,))}
    batch = {
        "x": draw(102, (num_microbatches, B, T, D)),
        "weights": jax.random.uniform(key, (num_microbatches, B, T, 1)),
    }

    def plain(weights, shared):
        losses, reports, terms = [], [], []
        for number in range(num_microbatches):
            one, its_key = jax.tree.map(lambda a, n=number: a[n], batch), jax.random.fold_in(key, number)
            x, entered = PARTS.embed(shared, shared_held, one, its_key)
            inputs = [PARTS.layer_inputs(its_key, layer) for layer in range(len(pattern))]
            x, new = run_layers(pattern, weights, shifts, x, entered, inputs)
            loss, reported = PARTS.loss(shared, shared_held, x, one)
            losses.append(loss)
            reports.append(reported)
            terms.append(new)
        reported, (auxiliary, metrics) = (jax.tree.map(lambda *parts: sum(parts), *trees) for trees in (reports, terms))
        auxiliary = jax.tree.map(lambda a: a / num_microbatches, auxiliary)
        return sum(losses) + sum(auxiliary.values()), (reported, auxiliary, metrics)

    rows = {
        kind: stages.rows({n for n, config in enumerate(pattern) if config.kind == kind}) for kind in ("mix", "scale")
    }
    config_of = {config.kind: config for config in pattern}

    def stacked(trees, shape_of):
        stack = lambda kind, row: jnp.stack([trees[n] if n >= 0 else jnp.zeros(shape_of(kind)) for n in row])
        return {kind: jnp.stack([stack(kind, row) for row in rows[kind]]) for kind in rows}

    runs = [[tuple((pattern[n], pattern[n].kind) for n in stage) for stage in chunk] for chunk in stages.layers]
    programs = tuple(dict.fromkeys(run for chunk in runs for run in chunk))
    most = max(len(stage) for chunk in stages.layers for stage in chunk)
    numbers = [[[*stage, *[0] * (most - len(stage))] for stage in chunk] for chunk in stages.layers]
    of_stage = [[programs.index(run) for run in chunk] for chunk in runs]
    table = make_table(stages.num_ranks, num_microbatches, stages.num_chunks, backward=train)
    whole = lambda tree: jax.tree.map(lambda _: P(), tree)
    with jax.set_mesh(make_test_mesh(**fields)):
        run = jax.jit(
            lambda layers, shared, held, shared_held, batch: loss_and_gradients(
                PARTS, Programs(programs, np.array(of_stage), np.array(numbers)), table,
                Placed(layers, shared, whole(shared)), Placed(held, shared_held, whole(shared_held)), batch, key,
                train=train, loss_scale=loss_scale,
            )
        )  # fmt: skip
        layers = stacked(weights, lambda kind: config_of[kind].shape())
        held = stacked(shifts, lambda kind: (D,))
        reported, (auxiliary, metrics), gradients = run(layers, shared, held, shared_held, batch)
    wanted_terms, wanted = jax.value_and_grad(plain, (0, 1), has_aux=True)(weights, shared)
    _, (want, want_auxiliary, want_metrics) = wanted_terms
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, reported, want)
    jax.tree.map(close, auxiliary, want_auxiliary)
    jax.tree.map(close, metrics, want_metrics)
    if not train:
        assert gradients is None
        return
    if loss_scale is not None:  # of the gradients alone
        gradients = jax.tree.map(lambda a: a / loss_scale, gradients)
    jax.tree.map(close, gradients[1], wanted[1])
    for kind, got in gradients[0].items():
        for row, number in np.ndenumerate(rows[kind]):
            close(got[row], wanted[0][number] if number >= 0 else 0.0)
