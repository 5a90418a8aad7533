"""What is saved on one mesh is restored on any other, bit for bit, and reading changes nothing."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from megajax.checkpoint.checkpointer import CheckpointConfig, Checkpointer, with_shardings
from megajax.mesh import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.training.step import abstract_state, init_state, state_shardings

MODEL = Model(
    DecoderConfig(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64, max_positions=16),
    PrecisionConfig(),
)
OPTIMIZER = Optimizer(OptimizerConfig(), MODEL.decay_mask)


def mesh_of(**sizes):
    config = MeshConfig(**sizes)
    return make_mesh(config, jax.devices()[: config.num_devices])


def state_on(mesh, shard_over_data: bool):
    """Every number different from every other place, moments and counts included."""
    shardings = state_shardings(MODEL, OPTIMIZER, mesh, shard_over_data)
    state = init_state(MODEL, OPTIMIZER, 3, mesh, shardings)
    leaves, structure = jax.tree.flatten(state.optimizer)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    noise = lambda key, a: jax.random.normal(key, a.shape, a.dtype) if a.ndim else a + 5
    leaves = [jax.device_put(noise(key, a), a.sharding) for key, a in zip(keys, leaves, strict=True)]
    return state._replace(optimizer=jax.tree.unflatten(structure, leaves))


def targets_on(mesh, shard_over_data: bool, optimizer=OPTIMIZER):
    shardings = state_shardings(MODEL, optimizer, mesh, shard_over_data)
    return with_shardings(abstract_state(MODEL, optimizer), shardings)


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and jax.device_get(a).tobytes() == jax.device_get(b).tobytes()


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(run directory with steps 3 and 5 of a run on data 2 x fsdp 2 x tensor 2, its state)."""
    run_dir = tmp_path_factory.mktemp("run")
    state = state_on(mesh_of(data=2, fsdp=2, tensor=2), shard_over_data=True)
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        checkpointer.save(3, jax.tree.map(jnp.zeros_like, state.params), state.optimizer, {"step": 3})
        checkpointer.save(5, state.params, state.optimizer, {"step": 5, "note": "five"})
    return run_dir, state


@pytest.mark.parametrize(
    ("sizes", "shard_over_data"),
    [
        (dict(data=2, fsdp=2, tensor=2), True),
        (dict(), False),
        (dict(fsdp=8), False),
        (dict(tensor=4, data=2), True),
        (dict(context=2, expert=2), False),
    ],
)
def test_restore_on_any_mesh_is_bit_equal_with_optimizer_state(saved, sizes, shard_over_data):
    run_dir, state = saved
    target = targets_on(mesh_of(**sizes), shard_over_data)
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        assert checkpointer.latest_step() == 5
        params, optimizer, meta = checkpointer.restore(5, target.params, target.optimizer, {})
    assert_same(params, state.params)
    assert_same(optimizer, state.optimizer)
    assert meta == {"step": 5, "note": "five"}
    for array, wanted in zip(jax.tree.leaves((params, optimizer)), jax.tree.leaves(target[2:]), strict=True):
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)


def test_offloaded_moments_are_saved_and_restored_as_others_are(saved, tmp_path):
    run_dir, state = saved
    offloading = Optimizer(OptimizerConfig(offload_state=True), MODEL.decay_mask)
    on_host = targets_on(mesh_of(data=2, fsdp=4), True, offloading)
    on_device = targets_on(mesh_of(fsdp=2), False)
    with Checkpointer(run_dir, None) as checkpointer:
        params, optimizer, _ = checkpointer.restore(5, on_host.params, on_host.optimizer, {})
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(optimizer) if leaf.ndim}
    assert kinds == {"pinned_host"}
    assert_same(optimizer, state.optimizer)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(6, params, optimizer, {})
        checkpointer.wait()
        _, back, _ = checkpointer.restore(6, on_device.params, on_device.optimizer, {})
    assert_same(back, state.optimizer)


def test_parameters_alone_are_restored_read_only_and_nothing_changes_on_disk(saved):
    run_dir, state = saved
    before = snapshot(run_dir)
    with Checkpointer(run_dir, None) as checkpointer:
        assert checkpointer.latest_step() == 5
        params = checkpointer.restore_params(5, targets_on(mesh_of(tensor=2), False).params, {})
        old = checkpointer.restore_params(3, targets_on(mesh_of(), False).params, {})
    assert_same(params, state.params)
    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(old))
    assert snapshot(run_dir) == before


def test_reading_a_directory_without_checkpoints_finds_no_step_and_makes_nothing(tmp_path):
    with Checkpointer(tmp_path / "run", None) as checkpointer:
        assert checkpointer.latest_step() is None
    assert not (tmp_path / "run").exists()


def test_reading_leaves_a_save_under_way_alone_and_the_next_run_removes_what_a_crash_left(tmp_path):
    """A save that is not finished is an Orbax temporary directory."""
    unfinished = tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp"
    unfinished.mkdir(parents=True)
    with Checkpointer(tmp_path, None) as checkpointer:
        assert checkpointer.latest_step() is None
    assert unfinished.is_dir()
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        assert checkpointer.latest_step() is None
        checkpointer.save(8, {"w": jnp.zeros(4)}, {"m": jnp.zeros(4)}, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["8"]


@pytest.mark.parametrize(("keep", "left"), [(2, {"3", "4"}), (0, {"1", "2", "3", "4"})])
def test_keep_leaves_the_newest(keep, left, tmp_path):
    small = {"w": jnp.arange(4.0)}
    with Checkpointer(tmp_path, CheckpointConfig(keep=keep)) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, small, small, {"step": step})
        checkpointer.wait()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == left


def test_step_saved_before_is_left_alone(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(4)}, {"m": jnp.zeros(4)}, {})
        checkpointer.wait()
        before = snapshot(tmp_path)
        checkpointer.save(1, {"w": jnp.ones(4)}, {"m": jnp.ones(4)}, {})
        checkpointer.wait()
    assert snapshot(tmp_path) == before


def test_negative_numbers_are_refused():
    for name in ("every_steps", "keep"):
        with pytest.raises(ValueError, match=f"checkpoint.{name}=-1"):
            CheckpointConfig(**{name: -1}).check()
