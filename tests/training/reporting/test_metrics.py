"""metrics.jsonl is valid, complete and has one line a step; the console formats numbers and stays quiet when told."""

import json
import math
import sys
import time
import types

import numpy as np
import pytest

from megajax.training.reporting.metrics import LoggingConfig, MetricsWriter
from megajax.training.reporting.starts import first_start

QUIET = LoggingConfig(tensorboard=False)


def read_lines(run_dir):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_write_is_one_line_and_visible_at_once(tmp_path):
    writer = MetricsWriter(tmp_path / "run", QUIET, {})
    writer.write({"step": 1, "loss": 2.5, "consumed_tokens": 4096})
    assert read_lines(tmp_path / "run") == [{"step": 1, "loss": 2.5, "consumed_tokens": 4096}]
    writer.write({"step": 1, "eval_loss": 2.0})
    assert len(read_lines(tmp_path / "run")) == 2
    writer.close()


def test_numpy_and_jax_scalars_become_plain_numbers(tmp_path):
    import jax.numpy as jnp

    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.write({"step": np.int64(3), "loss": jnp.float32(1.5), "grad_norm": np.float32(0.25), "mfu": None})
    assert read_lines(tmp_path) == [{"step": 3, "loss": 1.5, "grad_norm": 0.25, "mfu": None}]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32(np.nan)])
def test_numbers_that_are_not_finite_become_null(tmp_path, value):
    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.write({"step": 1, "loss": value})
    assert read_lines(tmp_path) == [{"step": 1, "loss": None}]


def test_line_without_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="lack step"):
        MetricsWriter(tmp_path, QUIET, {}).write({"loss": 1.0})


def test_resumed_run_has_one_line_a_step(tmp_path):
    first = MetricsWriter(tmp_path, QUIET, {})
    for step in range(1, 8):
        first.write({"step": step, "loss": float(step)})
    first.close()
    resumed = MetricsWriter(tmp_path, QUIET, {})
    resumed.rewind(4)
    for step in range(5, 9):
        resumed.write({"step": step, "loss": 100.0 + step})
    lines = read_lines(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == [1.0, 2.0, 3.0, 4.0, 105.0, 106.0, 107.0, 108.0]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rewind_removes_a_line_that_a_crash_cut_off(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.rewind(2)
    writer.write({"step": 3, "loss": 1.0})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 3]


def test_rewind_on_a_new_run_does_nothing(tmp_path):
    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.rewind(0)
    assert read_lines(tmp_path) == []


def test_tensorboard_files_lie_in_the_run_directory(tmp_path):
    writer = MetricsWriter(tmp_path, LoggingConfig(), {})
    writer.write({"step": 1, "loss": 2.5, "mfu": None})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_missing_wandb_is_named_with_the_way_out(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="logging.wandb_project='p' needs the package wandb.*pip install"):
        MetricsWriter(tmp_path, LoggingConfig(tensorboard=False, wandb_project="p"), {})


def test_wandb_run_is_continued_after_a_restart(monkeypatch, tmp_path):
    started, logged = [], []
    run = types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: started.append(options) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    for step in (1, 2):
        writer = MetricsWriter(tmp_path, LoggingConfig(tensorboard=False, wandb_project="p"), {"seed": 1})
        writer.write({"step": step, "loss": 0.5, "mfu": None})
        writer.close()
    assert logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})]
    assert started[0]["id"] == started[1]["id"] and started[0]["config"] == {"seed": 1}


def test_the_first_of_all_starts_is_when_the_run_began(tmp_path):
    assert time.time() - first_start(tmp_path) < 1
    (tmp_path / "starts.jsonl").write_text(
        '{"time": "2026-11-21T10:00:00+0100"}\n{"time": "2026-11-22T10:00:00+0100"}\n'
    )
    assert first_start(tmp_path) == 1795251600
    (tmp_path / "starts.jsonl").write_text('{"devices": "8 x cpu"}\n')
    assert time.time() - first_start(tmp_path) < 1
