"""A run that could not save is refused before anything is compiled."""

import shutil
import types

import jax
import jax.numpy as jnp
import pytest

from launch import TINY, tiny_config
from megajax.cli import train
from megajax.training.faults.disk import check_room
from megajax.training.loop import Trainer
from megajax.training.state import TrainState

SCALAR = jax.ShapeDtypeStruct((), jnp.int32)
# 1024 * 1024 parameters in bfloat16, and as many moments in float32: 2 MiB + 4 MiB
STATE = TrainState(
    SCALAR,
    SCALAR,
    {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)},
    {},
    {},
    {"m": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)},
)


def with_free(monkeypatch, free):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))


def test_a_disk_without_room_for_a_checkpoint_is_refused_with_the_numbers(tmp_path, monkeypatch):
    with_free(monkeypatch, 6 * 2**20)
    check_room(tmp_path, STATE, 10)
    with_free(monkeypatch, 6 * 2**20 - 1)
    with pytest.raises(
        ValueError, match=r"checkpoint needs 6.00 MiB, and 6.00 MiB are free; free some space.*--run_dir"
    ):
        check_room(tmp_path, STATE, 10)


def test_checkpoints_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("not a directory")
    with pytest.raises(ValueError, match="checkpoints cannot be written.*use another --run_dir"):
        check_room(tmp_path, STATE, 10)


@pytest.mark.fault
def test_a_full_disk_ends_a_run_before_anything_is_compiled_but_not_one_that_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "start", lambda self: pytest.fail("training has begun"))
    with_free(monkeypatch, 1000)
    arguments = [*TINY, f"--run_dir={tmp_path / 'run'}", f"--data.cache_dir={tmp_path}", "--training.steps=7"]
    with pytest.raises(ValueError, match="1000 B are free"):
        train.main(arguments)
    (tmp_path / "run" / "checkpoints" / "7").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(tiny_config(tmp_path / "run", "--training.steps=7").to_json())
    with pytest.raises(pytest.fail.Exception, match="training has begun"):
        train.main(arguments)
