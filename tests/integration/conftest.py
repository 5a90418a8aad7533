"""Runs that several files compare with or go on from."""

import shutil
from pathlib import Path

import pytest

from launch import END, ENDLESS, EVALUATE, MESH, TWO, evaluations, losses, run, saved_steps


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> tuple[dict[int, float], dict[int, float]]:
    """Losses and losses of evaluations by step, of one process with four devices, uninterrupted."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run(run_dir, *MESH, *ENDLESS, *EVALUATE, END, devices_each=4)
    return losses(run_dir), evaluations(run_dir)


@pytest.fixture(scope="session")
def begun(tmp_path_factory) -> Path:
    """The same run by two processes with two devices each: it has stopped after step 5 and has the checkpoints 3, 5."""
    run_dir = tmp_path_factory.mktemp("begun") / "run"
    saving = ["--checkpoint.every_steps=3", "--launch.exit_at_step=5"]
    output = run(run_dir, *MESH, *ENDLESS, *EVALUATE, *saving, **TWO)
    assert "2 processes" in output and "interrupted" in output
    assert saved_steps(run_dir) == [3, 5]
    return run_dir


@pytest.fixture
def begun_run(begun, tmp_path) -> Path:
    """A copy of it."""
    shutil.copytree(begun, tmp_path / "run", symlinks=True)
    return tmp_path / "run"
