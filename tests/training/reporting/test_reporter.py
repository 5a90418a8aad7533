"""Skipped updates are reported with their samples, too many end the run; only steps are productive time."""

import contextlib
import threading
import time

import jax
import numpy as np
import pytest

from megajax.training.batch_schedule import BatchSchedule
from megajax.training.reporting.reporter import Carried, Reporter


class Lines:
    def __init__(self):
        self.notes = []
        self.announcements = []

    def note(self, text):
        self.notes.append(text)

    def step(self, *_):
        pass

    def progress(self, *_):
        pass

    def announced(self, what):
        self.announcements.append(what)
        return contextlib.nullcontext()


class Written:
    def __init__(self):
        self.lines = []

    def write(self, line):
        self.lines.append(line)


def reporter(
    console,
    max_consecutive_skips,
    writer=None,
    every_steps=10,
    carried=Carried(),
    first=0,
    rampup=None,
    lowest_loss_scale=0.0,
):
    return Reporter(
        first, num_steps=100, every_steps=every_steps, sequence_length=4, schedule=BatchSchedule(8, None, rampup),
        flops_per_token=lambda *_, **__: 1.0, compute_dtype="bfloat16", num_devices=1,
        max_consecutive_skips=max_consecutive_skips,
        console=console, writer=writer, carried_before=carried, lowest_loss_scale=lowest_loss_scale,
    )  # fmt: skip


class Loss(float):
    """Of a step that a device runs until `done`."""

    def __init__(self, _):
        self.done = threading.Event()

    def block_until_ready(self):
        self.done.wait()


def dispatch(it, step, loss=1.0):
    with it.starting(step):
        pass
    it.dispatched(step, {"loss": loss, "grad_norm": 1.0, "skipped": 0, "total_skipped": 0}, 0.1)


def run(console, max_consecutive_skips, skipped):
    it, total = reporter(console, max_consecutive_skips), 0
    for step, one in enumerate(skipped, start=1):
        total += one
        loss = float("nan") if one else 1.0
        with it.starting(step):
            pass
        it.dispatched(step, {"loss": loss, "grad_norm": loss, "skipped": one, "total_skipped": total}, 0.1)
    it.flush()


@pytest.mark.fault
def test_a_skipped_update_names_its_samples_at_once_and_not_at_the_next_line_of_metrics():
    console = Lines()
    run(console, 3, [0, 0, 1, 0, 1, 1, 0])
    notes = [note for note in console.notes if "skipped" in note]
    assert [note.split(":")[0] for note in notes] == ["step 3", "step 5", "step 6"]
    assert "samples 16 to 23 (1 skipped so far)" in notes[0] and "loss nan" in notes[0]


@pytest.mark.fault
def test_overflows_count_only_at_the_lowest_loss_scale_and_spikes_always():
    console = Lines()
    it = reporter(console, 2, lowest_loss_scale=1.0)
    infinite, spike = float("inf"), 100.0
    steps = [(infinite, 8.0), (infinite, 4.0), (infinite, 2.0), (spike, 2.0), (infinite, 1.0)]
    with pytest.raises(RuntimeError, match="2 consecutive updates were skipped, up to step 5"):
        for step, (norm, scale) in enumerate(steps, start=1):
            with it.starting(step):
                pass
            metrics = {"loss": 1.0, "grad_norm": norm, "skipped": 1, "total_skipped": step, "loss_scale": scale}
            it.dispatched(step, metrics, 0.1)
        it.flush()
    notes = [note for note in console.notes if "skipped" in note]
    assert len(notes) == 5 and "loss scale now 8, samples 0 to 7" in notes[0]


@pytest.mark.fault
def test_too_many_in_a_row_end_the_run():
    with pytest.raises(RuntimeError, match="3 consecutive updates were skipped, up to step 7"):
        run(Lines(), 3, [0, 1, 1, 0, 1, 1, 1, 1])
    run(Lines(), 0, [1] * 50)


def test_goodput_counts_steps_and_neither_the_first_nor_evaluation_nor_saving(monkeypatch):
    """A clock that stands still but for the times given here: earlier starts ran 100 s, of which 40 were productive."""
    clock = [1000.0]
    read = threading.Event()

    def perf_counter():
        now = clock[0]
        if threading.current_thread() is not threading.main_thread():
            read.set()
        return now

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    console, writer = Lines(), Written()
    it = reporter(console, 0, writer, every_steps=2, carried=Carried(40.0, 100.0))

    def pass_time(seconds):
        clock[0] += seconds

    def end(loss):
        read.clear()
        loss.done.set()
        assert read.wait(60)

    pass_time(30)  # compilation
    dispatch(it, 1)
    running = Loss(1.0)
    dispatch(it, 2, running)
    for step in (3, 4):
        pass_time(4)
        end(running)
        pass_time(1)  # step `step` is running, and the loop still dispatching it
        running = Loss(1.0)
        dispatch(it, step, running)
        clock[0] -= 1
    pass_time(4)
    end(running)
    it.flush()
    assert it.productive_seconds == 40 + 3 * 4
    pass_time(50)
    it.evaluation(4, {"eval_loss": 1.0})
    pass_time(7)  # a save
    it.restart_clock()
    running = Loss(1.0)
    dispatch(it, 5, running)
    pass_time(3)
    end(running)
    it.flush()
    assert it.productive_seconds == 40 + 3 * 4 + 3
    seconds = {line["step"]: line["step_seconds"] for line in writer.lines if "step_seconds" in line}
    assert seconds == {2: 4, 4: 4}
    found = {line["step"]: line["goodput"] for line in writer.lines if "goodput" in line}
    assert found == {1: 40 / 130, 2: 44 / 135, 4: 52 / 142}
    it.close()
    assert console.notes[-1].startswith("goodput: 55.0 s of 3m 22s in steps (27.2%)")


def test_speeds_are_those_of_the_batches_that_were_read_and_what_is_compiled_counts_in_none(monkeypatch):
    """Batches of 2, 2, 2, 5, 5, 8, 8: 1 s a sequence, and 100 s to compile each size before its first step."""
    clock = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    console, writer = Lines(), Written()
    it = reporter(console, 0, writer, every_steps=3, rampup=(2, 3, 12))

    def wait(loss):  # of a step: its batch size
        clock[0] += loss

    monkeypatch.setattr(jax, "block_until_ready", wait)
    sizes = [2, 2, 2, 5, 5, 8, 8]
    for step, size in enumerate(sizes, start=1):
        with it.starting(step):
            clock[0] += 100 if step in (1, 4, 6) else 0
        it.dispatched(step, {"loss": size, "grad_norm": 1.0, "skipped": 0, "total_skipped": 0}, 0.1)
    it.flush()
    assert it.productive_seconds == 2 + 2 + 5 + 8
    found = {line["step"]: (line.get("step_seconds"), line.get("tokens_per_second")) for line in writer.lines}
    assert found == {1: (None, None), 3: (2.0, 4.0), 6: (5.0, 4.0)}
    assert [note.split(",")[0] for note in console.notes] == ["the first step", "step 4", "step 6"]
    assert console.announcements[:3] == [
        "compiling the train step",
        "running the first step",
        "compiling the train step",
    ]


def test_the_mean_loss_is_of_the_steps_since_the_line_before_without_skipped_ones():
    writer = Written()
    it = reporter(Lines(), 0, writer, every_steps=4)
    for step in range(1, 10):
        with it.starting(step):
            pass
        skipped = step in (3, 9)
        loss = float("nan") if skipped else float(step)
        it.dispatched(step, {"loss": loss, "grad_norm": 1.0, "skipped": skipped, "total_skipped": 0}, 0.1)
    it.flush()
    found = {line["step"]: (line["loss"], line["mean_loss"]) for line in writer.lines}
    assert found == {1: (1.0, 1.0), 4: (4.0, (2 + 4) / 2), 8: (8.0, (5 + 6 + 7 + 8) / 4)}


def test_a_resumed_run_has_the_lines_and_mean_losses_of_an_undisturbed_one():
    """Stopped after step 7, in the middle of an interval, and resumed there."""

    def lines(*parts):
        writer, carried = Written(), Carried()
        for first, last in parts:
            it = reporter(Lines(), 0, writer, every_steps=4, first=first, carried=carried)
            for step in range(first + 1, last + 1):
                with it.starting(step):
                    pass
                loss = 1 / np.float32(step)
                it.dispatched(step, {"loss": loss, "grad_norm": 1.0, "skipped": 0, "total_skipped": 0}, 0.1)
            it.flush()
            carried = it.carried()
        return [(line["step"], line["mean_loss"]) for line in writer.lines]

    assert [step for step, _ in lines((0, 12))] == [1, 4, 8, 12]
    assert lines((0, 7), (7, 12)) == lines((0, 12))
