"""What is saved on one mesh is restored on any other, bit for bit, and reading changes nothing."""

import contextlib
import json
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import with_shardings
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.training.state import abstract_state, state_shardings

MODEL = Model(
    DecoderConfig(num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=64, max_positions=16),
    PrecisionConfig(),
)
OPTIMIZER = Optimizer(OptimizerConfig(), MODEL.trained)


def mesh_of(**sizes):
    config = MeshConfig(**sizes)
    return make_mesh(config, jax.devices()[: config.num_devices])


MESHES = {
    "one device": (dict(), False),
    "data 8, ZeRO-1": (dict(data=8), True),
    "data 2, fsdp 2, tensor 2, ZeRO-1": (dict(data=2, fsdp=2, tensor=2), True),
    "fsdp 2, context 2, expert 2": (dict(fsdp=2, context=2, expert=2), False),
}


def state_on(mesh, shard_over_data: bool, optimizer=OPTIMIZER):
    """The same on every mesh; every number different from every other place, moments and counts included."""
    shardings, rng = state_shardings(MODEL, optimizer, mesh, shard_over_data), np.random.default_rng(3)
    draw = lambda a: rng.standard_normal(a.shape).astype(a.dtype) if a.ndim else np.array(5, a.dtype)
    return jax.device_put(jax.tree.map(draw, abstract_state(MODEL, optimizer)), shardings)


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


@pytest.fixture(scope="module")
def saved_on(tmp_path_factory):
    """{mesh: run directory with step 5}."""
    folders = {}
    for name, (sizes, shard_over_data) in MESHES.items():
        folders[name], state = tmp_path_factory.mktemp("run"), state_on(mesh_of(**sizes), shard_over_data)
        with Checkpointer(folders[name], CheckpointConfig()) as checkpointer:
            checkpointer.save(5, state.params, state.optimizer, {"step": 5, "note": "five"})
    return folders


# A step does not say what mesh saved it, so each as source and as goal, twice, is enough.
NAMES = list(MESHES)
PAIRS = [(source, NAMES[(number + step) % len(NAMES)]) for number, source in enumerate(NAMES) for step in (1, 2)]


@pytest.mark.parametrize("source, goal", PAIRS)
def test_what_any_mesh_saved_any_other_restores_bit_for_bit_with_optimizer_state(source, goal, saved_on):
    sizes, shard_over_data = MESHES[goal]
    mesh = mesh_of(**sizes)
    target = targets_on(mesh, shard_over_data)
    with Checkpointer(saved_on[source], None) as checkpointer:
        assert checkpointer.latest_step() == 5
        params, optimizer, meta = checkpointer.restore(5, target.params, target.optimizer, {})
    state = state_on(mesh, shard_over_data)
    assert_same((params, optimizer), (state.params, state.optimizer))
    assert meta == {"step": 5, "note": "five"}
    for array, wanted in zip(jax.tree.leaves((params, optimizer)), jax.tree.leaves(target[2:]), strict=True):
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)


def test_the_state_of_several_update_rules_is_restored_on_another_mesh(tmp_path):
    groups = ("embedding optimizer=lion learning_rate_scale=0.5", "*out optimizer=sgd")
    optimizer = Optimizer(OptimizerConfig(name="muon", groups=groups), MODEL.trained)
    state = state_on(mesh_of(data=2, fsdp=2, tensor=2), True, optimizer)
    target = targets_on(mesh_of(fsdp=4), False, optimizer)
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(5, state.params, state.optimizer, {})
        checkpointer.wait()
        _, restored, _ = checkpointer.restore(5, target.params, target.optimizer, {})
    assert jax.tree.structure(restored) == jax.tree.structure(state.optimizer)
    assert_same(restored, state.optimizer)
    for array, wanted in zip(jax.tree.leaves(restored), jax.tree.leaves(target.optimizer), strict=True):
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)


def test_offloaded_moments_are_saved_and_restored_as_others_are(saved, tmp_path):
    run_dir, state = saved
    offloading = Optimizer(OptimizerConfig(offload_state=True), MODEL.trained)
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


def saved_steps(run_dir) -> set[str]:
    return {path.name for path in (run_dir / "checkpoints").iterdir()}


def test_keep_best_leaves_those_of_the_lowest_evaluation_beside_the_newest_also_after_a_restart(tmp_path):
    small, config = {"w": jnp.arange(4.0)}, CheckpointConfig(keep=1, keep_best=2)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: float("nan")}
    with Checkpointer(tmp_path, config) as checkpointer:
        for step, loss in losses.items():
            checkpointer.save(step, small, small, {"eval_loss": loss})
    assert saved_steps(tmp_path) == {"2", "4", "5"}
    with Checkpointer(tmp_path, config) as checkpointer:
        checkpointer.save(6, small, small, {"eval_loss": 2.5})
        checkpointer.wait()
        assert saved_steps(tmp_path) == {"2", "4", "6"}
        checkpointer.save(7, small, small, {"eval_loss": 0.5})
        checkpointer.wait()
        assert saved_steps(tmp_path) == {"2", "7"}
        assert checkpointer.steps() == [2, 7]
        checkpointer.save(8, small, small, {"eval_loss": None})
    with Checkpointer(tmp_path, CheckpointConfig(keep=1, keep_best=1)) as checkpointer:
        checkpointer.save(9, small, small, {})
        assert checkpointer.failed_saves == 0
    assert saved_steps(tmp_path) == {"7", "9"}


def test_latest_is_at_every_moment_a_step_that_can_be_read(tmp_path):
    """By a reader that polls the link while steps come and go; one that is replaced just then is read again."""
    small, seen, problems, finished = {"w": jnp.arange(4096.0)}, [], [], threading.Event()

    def poll():
        while not finished.is_set():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(tmp_path / "latest")
                try:
                    meta = json.loads((tmp_path / target / "meta" / "metadata").read_text())
                    assert target == f"checkpoints/{meta['step']}" and (tmp_path / target / "params").is_dir()
                    seen.append(meta["step"])
                except Exception as error:
                    if os.readlink(tmp_path / "latest") == target:
                        problems.append(error)

    reader = threading.Thread(target=poll)
    reader.start()
    with Checkpointer(tmp_path, CheckpointConfig(keep=1)) as checkpointer:
        for step in range(1, 9):
            checkpointer.save(step, small, small, {"step": step})
            checkpointer.check()
    finished.set()
    reader.join()
    assert not problems and seen == sorted(seen) and len(set(seen)) > 3
    assert os.readlink(tmp_path / "latest") == "checkpoints/8"


def test_step_saved_before_is_left_alone(tmp_path):
    with Checkpointer(tmp_path, CheckpointConfig()) as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(4)}, {"m": jnp.zeros(4)}, {})
        checkpointer.wait()
        before = snapshot(tmp_path)
        checkpointer.save(1, {"w": jnp.ones(4)}, {"m": jnp.ones(4)}, {})
        checkpointer.wait()
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("config", "eval_every_steps", "message"),
    [
        (CheckpointConfig(keep_best=1, every_steps=10), 0, "but training.eval_every_steps=0.*steps=10"),
        (CheckpointConfig(keep_best=1, every_steps=10), 7, "no step before the last.*--training.eval_every_steps=10"),
    ],
)
def test_keep_best_without_an_evaluation_of_what_is_saved_is_refused(config, eval_every_steps, message):
    with pytest.raises(ValueError, match=message):
        config.check_evaluated(70, eval_every_steps)
    config.check_evaluated(71, eval_every_steps or 5)
