"""metrics.jsonl is valid, complete and has one line a step; the console formats numbers and stays quiet when told."""

import contextlib
import json
import logging
import math
import resource
import shlex
import struct
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from megajax.training.reporting import best_effort, metrics
from megajax.training.reporting.console import Console
from megajax.training.reporting.metrics import LoggingConfig, MetricsWriter, running_seconds
from megajax.training.reporting.profiling import Profiler

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
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_files_lie_in_the_run_directory(tmp_path):
    writer = MetricsWriter(tmp_path, LoggingConfig(), {})
    writer.write({"step": 1, "loss": 2.5, "mfu": None})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


DAMAGED = [b'{"step": 2, "loss": \xff.0}', b"[1, 2]", b"null", b'{"step": "3", "loss": 1.0}', b"[" * 100_000, b""]


@pytest.mark.fault
def test_damaged_lines_are_set_aside_and_the_rest_is_kept(tmp_path, caplog):
    whole = [b'{"step": 1, "loss": 2.0}', b'{"step": 4, "loss": 1.0}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([whole[0], *DAMAGED, whole[1], b'{"step": 5}', b'{"st']))
    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.rewind(4)
    writer.write({"step": 5, "loss": 0.5})
    assert [line["step"] for line in read_lines(tmp_path)] == [1, 4, 5]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes().splitlines() == DAMAGED
    assert "metrics.jsonl: 6 damaged lines moved to metrics.jsonl.damaged" in caplog.text


@pytest.mark.fault
def test_a_record_that_cannot_be_read_at_all_is_set_aside(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").mkdir()
    writer = MetricsWriter(tmp_path, QUIET, {})
    writer.rewind(0)
    writer.write({"step": 1, "loss": 0.5})
    assert read_lines(tmp_path) == [{"step": 1, "loss": 0.5}]
    assert "cannot be read" in caplog.text and (tmp_path / "metrics.jsonl.damaged").is_dir()


class AtOnce:
    """In place of the thread that writes for TensorBoard: all writes are over when the disk has room again."""

    def __init__(self, *_):
        pass

    def submit(self, function, *arguments):
        function(*arguments)

    def shutdown(self):
        pass


@contextlib.contextmanager
def full_disk(num_bytes):
    """No file can grow beyond num_bytes: as on a full disk, the write that reaches the limit is cut short and the
    next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.fault
def test_a_full_disk_is_reported_once_and_nothing_is_lost_when_there_is_room_again(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "megajax")
    monkeypatch.setattr(metrics, "ThreadPoolExecutor", AtOnce)
    writer = MetricsWriter(tmp_path, LoggingConfig(), {})
    with full_disk(130):
        for step in range(1, 31):  # tensorboardX's own writer waits for ever from the 11th
            writer.write({"step": step, "loss": 1.0})
    assert caplog.text.count("metrics.jsonl cannot be written ([Errno 27]") == 1
    assert caplog.text.count("TensorBoard") == 1
    writer.write({"step": 31, "loss": 1.0})
    writer.close()
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, 32))
    assert [event.step for event in tensorboard_events(tmp_path) if event.step] == list(range(1, 32))
    assert caplog.text.count("metrics.jsonl can be written again") == 1


def test_what_waits_for_room_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(best_effort, "MOST_WAITING_BYTES", 100)
    file = best_effort.Appender(tmp_path / "file")
    with full_disk(0):
        for number in range(100):
            with pytest.raises(OSError):
                file.append(b"%06d\n" % number)
    file.append(b"new\n")
    file.append(b"newer\n")
    assert (tmp_path / "file").read_text().split() == [f"{number:06d}" for number in range(15)] + ["newer"]


def tensorboard_events(run_dir, folder="tensorboard"):
    """Checked by the lengths and CRCs of the format, as TensorBoard does."""
    (path,) = (run_dir / folder).glob("events*")
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        assert struct.unpack("<I", content[8:12])[0] == masked_crc32c(content[:8])
        assert struct.unpack("<I", content[12 + length : 16 + length])[0] == masked_crc32c(data)
        yield event_pb2.Event.FromString(data)
        content = content[16 + length :]


def test_tensorboard_has_every_number_and_hides_what_a_resumed_run_does_again(tmp_path):
    writer = MetricsWriter(tmp_path, LoggingConfig(), {"training": {"seed": 7}})
    writer.rewind(2)
    writer.write({"step": 3, "loss": 2.5, "mean_loss": 3.0, "grad_norm": 1.0, "balance": 0.5, "mfu": None})
    writer.write({"step": 3, "eval_loss": 2.0})
    writer.close()
    version, start, config, event = tensorboard_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (start.step, start.session_log.status) == (3, event_pb2.SessionLog.START)
    assert b'"seed": 7' in config.summary.value[0].tensor.string_val[0]
    assert scalars(event) == (
        3,
        {"loss/of_the_step": 2.5, "loss": 3.0, "optimizer/grad_norm": 1.0, "model/balance": 0.5},
    )
    # One chart has both losses: the same tag, in two files.
    version, start, event = tensorboard_events(tmp_path, "tensorboard/eval")
    assert (start.step, scalars(event)) == (3, (3, {"loss": 2.0}))


def scalars(event):
    return event.step, {value.tag: value.simple_value for value in event.summary.value}


PRINTS = """
import sys
from megajax.training.reporting.best_effort import print_what_can_be_printed
from megajax.training.reporting.console import Console, log_to_stderr
print_what_can_be_printed()
log_to_stderr()
console = Console()
for step in range(1, 4):
    console.step(step, 3, {"loss": 1.0})
console.close()
print("as train.py prints a sample", flush=True)
"""


@pytest.mark.fault
@pytest.mark.parametrize("kind", ["full", "pipe", "closed", "both"])
def test_a_stdout_that_cannot_be_written_changes_no_exit_status(kind):
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(PRINTS)}"
    command = {
        "full": f"{command} > /dev/full",
        "pipe": f"set -o pipefail; ({command}) | true",
        "closed": f"{command} >&-",
        "both": f"{command} > /dev/full 2>&1",
    }[kind]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0 and "Error" not in done.stderr.replace("[Errno", "")
    assert done.stderr.count("stdout cannot be written") == (1 if kind == "full" else 0) or kind == "pipe"


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


@pytest.mark.fault
def test_weights_and_biases_and_a_profile_that_fail_end_no_run(monkeypatch, tmp_path, caplog):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    fake = types.ModuleType("wandb")
    fake.init = lambda **_: types.SimpleNamespace(log=fail, finish=fail)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    writer = MetricsWriter(tmp_path, LoggingConfig(tensorboard=False, wandb_project="p"), {})
    for step in (1, 2):
        writer.write({"step": step, "loss": 0.5})
    writer.close()
    monkeypatch.setattr(jax.profiler, "start_trace", lambda _: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    with Profiler((1, 1), tmp_path, Console(enabled=False)) as profiler:
        profiler.before(1)
        profiler.after(1, {})
    assert len(read_lines(tmp_path)) == 2
    assert caplog.text.count("Weights & Biases cannot be written") == caplog.text.count("profile cannot be") == 1


def test_running_seconds_are_those_of_the_last_line_whatever_is_damaged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert running_seconds(path) == 0
    lines = '{"step": 1, "running_seconds": 5.5}', '{"step": 2, "running_seconds": 7.0}', '{"step": 2, "eval_loss": 1}'
    path.write_text("\n".join(lines))
    assert running_seconds(path) == 7
    path.write_text('{"step": 1, "running_seconds": null}\n{"step')
    assert running_seconds(path) == 0
