"""What any layout of a pipeline saved, any other restores, bit for bit, the optimizer's moments included."""

import itertools

import jax
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import CheckpointConfig, Checkpointer, with_shardings
from megajax.mesh import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.parallel.schedule import make_stages
from megajax.precision import PrecisionConfig
from megajax.training.step import abstract_state, init_state, state_shardings

CONFIG = DecoderConfig(num_layers=5, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64, max_positions=16)
LAYOUTS = {
    "none": dict(fsdp=2, tensor=2),
    "pipeline 2": dict(pipeline=2, fsdp=2, data=2),
    "pipeline 4, interleaved, empty stages": dict(
        pipeline=4, tensor=2, virtual_stages=2, pipeline_layout="t|t|t|t|t|||"
    ),
    "pipeline 2, uneven": dict(pipeline=2, pipeline_layout="tttt|t"),
}


def target_on(sizes: dict, offload_state: bool = False):
    """-> (model, its state as abstract arrays with shardings, mesh, shardings, optimizer)."""
    mesh_config = MeshConfig(**sizes)
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    model = Model(CONFIG, PrecisionConfig(), make_stages(mesh_config, CONFIG.num_layers))
    optimizer = Optimizer(OptimizerConfig(offload_state=offload_state), model.decay_mask)
    shardings = state_shardings(model, optimizer, mesh, shard_over_data=True)
    return model, with_shardings(abstract_state(model, optimizer), shardings), mesh, shardings, optimizer


def with_moments(state):
    """The optimizer's state with 2 and 3 times the parameters as moments."""
    structure, scales = jax.tree.structure(state.params), itertools.count(2)
    is_moments = lambda node: jax.tree.structure(node) == structure

    def fill(node):
        if not is_moments(node):
            return node
        scale = next(scales)
        return jax.tree.map(lambda a: a * scale, state.params)

    return jax.tree.map(fill, state.optimizer, is_leaf=is_moments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """{layout: run directory} of the same state."""
    folders = {}
    for name, sizes in LAYOUTS.items():
        model, _, mesh, shardings, optimizer = target_on(sizes)
        state = init_state(model, optimizer, 3, mesh, shardings)
        folders[name] = tmp_path_factory.mktemp("run")
        rows = {kind: rows.tolist() for kind, rows in model.layer_rows.items()}
        with Checkpointer(folders[name], CheckpointConfig()) as checkpointer:
            checkpointer.save(4, state.params, with_moments(state), {"layer_rows": rows})
    return folders


@pytest.mark.parametrize(("source", "goal"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_any_layout_restores_any_other(source, goal, saved):
    model, target, mesh, shardings, optimizer = target_on(LAYOUTS[goal])
    with Checkpointer(saved[source], None) as checkpointer:
        params, moments, _ = checkpointer.restore(4, target.params, target.optimizer, model.layer_rows)
    want = init_state(model, optimizer, 3, mesh, shardings)
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(want.params), strict=True):
        assert got.sharding == expected.sharding
        np.testing.assert_array_equal(got, expected)
    assert jax.tree.structure(moments) == jax.tree.structure(want.optimizer)
    large = [leaf for leaf in jax.tree.leaves(moments) if leaf.ndim]
    wanted = [leaf * scale for scale in (2, 3) for leaf in jax.tree.leaves(want.params)]
    for got, expected in zip(large, wanted, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_moments_on_the_host_come_back_there(saved):
    model, target, *_ = target_on(LAYOUTS["pipeline 2"], offload_state=True)
    with Checkpointer(saved["none"], None) as checkpointer:
        _, moments, _ = checkpointer.restore(4, target.params, target.optimizer, model.layer_rows)
    for got, expected in zip(jax.tree.leaves(moments), jax.tree.leaves(target.optimizer), strict=True):
        assert got.sharding.memory_kind == expected.sharding.memory_kind


def test_checkpoint_without_rows_holds_the_layers_as_numbered(tmp_path):
    _, _, mesh, shardings, optimizer = target_on({})
    plain = Model(CONFIG, PrecisionConfig())
    state = init_state(plain, optimizer, 3, mesh, shardings)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, state.params, state.optimizer, {})
    model, target, mesh, shardings, optimizer = target_on(LAYOUTS["pipeline 2"])
    with Checkpointer(tmp_path, None) as checkpointer:
        params = checkpointer.restore_params(1, target.params, model.layer_rows)
    jax.tree.map(np.testing.assert_array_equal, params, model.init(3, mesh))
