"""What any layout of a pipeline saved, any other restores, bit for bit, the optimizer's moments included."""

import functools
import itertools

import jax
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import with_shardings
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.parallel.schedule import make_stages
from megajax.precision import PrecisionConfig
from megajax.training.state import abstract_state, state_shardings

CONFIG = DecoderConfig(
    num_layers=5, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64, max_positions=16, biases=("norm",)
)  # fmt: skip
LAYOUTS = {
    "none": dict(fsdp=2, tensor=2),
    "pipeline 2": dict(pipeline=2, fsdp=2, data=2),
    "pipeline 4, interleaved, empty stages": dict(
        pipeline=4, tensor=2, virtual_stages=2, pipeline_layout="t|t|t|t|t|||"
    ),
    "pipeline 2, uneven": dict(pipeline=2, pipeline_layout="tttt|t"),
}


def target_on(sizes: dict, offload_state: bool = False):
    """-> (model, its state as abstract arrays with shardings)."""
    mesh_config = MeshConfig(**sizes)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    model = Model(CONFIG, stages=make_stages(mesh_config, CONFIG.num_layers))
    optimizer = Optimizer(OptimizerConfig(offload_state=offload_state), model.trained)
    shardings = state_shardings(model, optimizer, mesh, shard_over_data=True)
    return model, with_shardings(abstract_state(model, optimizer), shardings)


@functools.cache
def params_of(layout: str | None = None):
    """On the host, the same numbers for each layer; without a layout they stand one after the other."""
    if layout is None:
        rng = np.random.default_rng(3)
        abstract = Model(CONFIG, PrecisionConfig()).abstract_weights
        return jax.tree.map(lambda a: rng.standard_normal(a.shape).astype(a.dtype), abstract)
    plain, rows = params_of(), target_on(LAYOUTS[layout])[0].layer_rows
    arrange = lambda a, rows: np.where(rows.reshape(*rows.shape, *[1] * (a.ndim - 1)) < 0, 0, a[rows])
    layers = {
        kind: jax.tree.map(lambda a, k=kind: arrange(a, rows[f"layers.{k}"]), tree)
        for kind, tree in plain["layers"].items()
    }
    return plain | {"layers": layers}


def moments_of(params, optimizer_state):
    """The optimizer's state with 2 and 3 times the parameters as moments."""
    structure, scales = jax.tree.structure(params), itertools.count(2)
    is_moments = lambda node: jax.tree.structure(node) == structure

    def fill(node):
        if not is_moments(node):
            return np.full(node.shape, 4, node.dtype)
        scale = np.float32(next(scales))
        return jax.tree.map(lambda a: a * scale, params)

    return jax.tree.map(fill, optimizer_state, is_leaf=is_moments)


def save(run_dir, params, target, meta):
    shardings = jax.tree.map(lambda a: a.sharding, target)
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        moments = jax.device_put(moments_of(params, target.optimizer), shardings.optimizer)
        checkpointer.save(4, jax.device_put(params, shardings.params), moments, meta)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{layout: run directory} of the same state."""
    folders = {}
    for name, sizes in LAYOUTS.items():
        model, target = target_on(sizes)
        folders[name] = tmp_path_factory.mktemp("run")
        rows = {kind: rows.tolist() for kind, rows in model.layer_rows.items()}
        save(folders[name], params_of(name), target, {"layer_rows": rows})
    return folders


# What is read does not depend on who saved it but through the rows, so each as source and as goal, twice, is enough.
NAMES = list(LAYOUTS)
PAIRS = [(source, NAMES[(number + step) % len(NAMES)]) for number, source in enumerate(NAMES) for step in (1, 2)]


@pytest.mark.parametrize(("source", "goal"), PAIRS)
def test_any_layout_restores_any_other(source, goal, saved):
    model, target = target_on(LAYOUTS[goal])
    with Checkpointer(saved[source], None) as checkpointer:
        params, moments, _ = checkpointer.restore(4, target.params, target.optimizer, model.layer_rows)
    want = params_of(goal)
    for got, place, expected in zip(*map(jax.tree.leaves, (params, target.params, want)), strict=True):
        assert got.sharding == place.sharding
        np.testing.assert_array_equal(got, expected)
    jax.tree.map(np.testing.assert_array_equal, moments, moments_of(want, target.optimizer))


def test_moments_on_the_host_come_back_there(saved):
    model, target = target_on(LAYOUTS["pipeline 2"], offload_state=True)
    with Checkpointer(saved["none"], None) as checkpointer:
        _, moments, _ = checkpointer.restore(4, target.params, target.optimizer, model.layer_rows)
    for got, expected in zip(jax.tree.leaves(moments), jax.tree.leaves(target.optimizer), strict=True):
        assert got.sharding.memory_kind == expected.sharding.memory_kind
