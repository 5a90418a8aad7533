"""A step is run again from the run directory, which stays as it is; and a device with another copy ends a run."""

import dataclasses
import hashlib
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import megajax.run
from launch import ROOT, TIMEOUT_SECONDS, run, saved_steps, tiny_config
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.cli import train
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer
from megajax.training import loop
from megajax.training.state import new_state, state_shardings
from runs import run_of

MESH = ["--mesh.data=1", "--mesh.fsdp=2", "--training.microbatch_size=2"]
MESH += ["--training.steps=4", "--checkpoint.every_steps=1"]


def save_damaged(run_dir):
    """Step 2 of a run, as a device would save it that has written nonsense into layer 1."""
    config, mesh = tiny_config(run_dir), make_mesh(MeshConfig(fsdp=8))
    model = Model(config.model, config.precision)
    optimizer = Optimizer(config.optimizer, model.trained)
    state = new_state(model, optimizer, model.init(0, mesh), mesh, state_shardings(model, optimizer, mesh, False))
    mlp = state.params["layers"]["dense"]["mlp"]
    values = np.array(mlp["up"])
    values[1, 0] = 3e38
    mlp["up"] = jax.device_put(values, mlp["up"].sharding)
    rows = {kind: rows.tolist() for kind, rows in model.layer_rows.items()}
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        meta = {"skipped": 0, "layer_rows": rows, "config": dataclasses.asdict(config)}
        meta |= {"data": megajax.run.load_data(config).record, "source": {}, "consumed_samples": 16}
        meta |= {"running_seconds": 0.0, "productive_seconds": 0.0, "losses": []}
        checkpointer.save(2, state.params, state.optimizer, meta)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run on two devices whose steps 3 and 4 overflow in layer 1."""
    run_dir = tmp_path_factory.mktemp("replay") / "run"
    save_damaged(run_dir)
    with pytest.MonkeyPatch.context() as patch:
        lines = run_of(tiny_config(run_dir, *MESH), patch)
    assert [(line["step"], line["loss"]) for line in lines] == [(3, None), (4, None)]
    return run_dir


def content(run_dir):
    """{file: (digest of its content, time of its last change)}."""
    files = sorted(path for path in run_dir.rglob("*") if path.is_file())
    return {path: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.fault
def test_a_step_that_overflowed_is_reproduced_and_the_layer_and_place_are_named_and_nothing_changes(run_dir):
    before = content(run_dir)
    output = run(run_dir, *MESH, "--replay_step=4", devices_each=2)
    assert content(run_dir) == before
    assert "replay of step 4, from the checkpoint of step 3" in output and "samples 24 to 31" in output
    assert "reproduced: both runs and metrics.jsonl are bitwise identical" in output
    first, place, inputs = output[output.index("  1. ") :].splitlines()[:3]
    assert first.startswith("  1. dot_general, forward pass, microbatch 0, layer 1: float32[4,")
    assert (
        "megajax/ops/matmul.py:" in place and "megajax/layers/feed_forward/mlp.py:" in place and "up to 3e+38" in inputs
    )
    assert "gradient norms that are not finite: " in output


@pytest.mark.parametrize(
    "step, overrides, want",
    [
        (5, [], "--replay_step=5 must be from 1 to training.steps=4"),
        (0, [], "--replay_step=0 must be from 1"),
        (3, ["--mesh.pipeline=2", "--mesh.fsdp=4"], "mesh.pipeline=2: .* use --mesh.pipeline=1 .*--mesh.fsdp=8"),
    ],
)
def test_what_cannot_be_replayed_is_refused(step, overrides, want, run_dir):
    with pytest.raises(ValueError, match=want):
        megajax.run.replay(
            tiny_config(run_dir, *MESH, "--mesh.fsdp=8", "--training.microbatch_size=1", *overrides), step
        )


def test_a_step_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="replay_step=last must be a whole number"):
        train.main(["--config=gpt_tiny", "--replay_step=last"])


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run; name the run with --run_dir"):
        megajax.run.replay(tiny_config(tmp_path / "none"), 1)
    assert not (tmp_path / "none").exists()


@pytest.mark.fault
def test_a_device_with_another_copy_ends_the_run_before_anything_is_saved(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    compare = loop.check_replicas

    def damaged(state, mesh, done, latest_saved):
        """As if a bit had flipped in the memory of device 3 after step 3."""
        if done < 3:
            return compare(state, mesh, done, latest_saved)
        parts = [np.array(shard.data) for shard in state.params["embedding"].addressable_shards]
        parts[3][0, 0] += 1
        devices = [shard.device for shard in state.params["embedding"].addressable_shards]
        placed = [jax.device_put(part, device) for part, device in zip(parts, devices, strict=True)]
        old = state.params["embedding"]
        embedding = jax.make_array_from_single_device_arrays(old.shape, old.sharding, placed)
        return compare(state._replace(params=state.params | {"embedding": embedding}), mesh, done, latest_saved)

    monkeypatch.setattr(loop, "check_replicas", damaged)
    mesh = ["--mesh.data=8", "--training.steps=4", "--checkpoint.every_steps=2"]
    config = tiny_config(run_dir, *mesh, "--training.check_replicas_every_steps=1")
    with pytest.raises(RuntimeError, match=r"after step 3 .*device 3 \(cpu\): .params\['embedding'\];.* of step 2"):
        megajax.run.train(config)
    assert saved_steps(run_dir) == [2]


# Each process has its own idea of w, as if one of their devices had computed wrongly.
TWO_PROCESSES = """
import os, sys
import jax, numpy as np
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.processes import initialize_processes
from megajax.training.faults.replicas import check_replicas
initialize_processes()
mesh = make_mesh(MeshConfig(data=4))
value = np.full(3, float(jax.process_index() == 1), np.float32)
parts = [jax.device_put(value, device) for device in jax.local_devices()]
tree = {"w": jax.make_array_from_single_device_arrays((3,), jax.NamedSharding(mesh, jax.P()), parts)}
check_replicas(tree, mesh, 7, None)
"""


@pytest.mark.fault
def test_all_processes_hear_of_a_device_of_any():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-c", TWO_PROCESSES]
    start = lambda rank: subprocess.Popen(
        command, env=environment | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    processes = [start(rank) for rank in range(2)]
    try:
        for process in processes:
            output = process.communicate(timeout=TIMEOUT_SECONDS)[1]
            assert process.returncode == 1
            assert all(f"process {rank}, device " in output for rank in range(2)), output
            assert "after step 7" in output and "resumes from the beginning" in output
    finally:
        for process in processes:
            process.kill()
