"""Numbers read well, plain lines where stdout is no terminal, silence on every process but 0."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
import time
import types

import IPython
import IPython.display
import pytest
from rich.console import Console as RichConsole

from megajax.terminal import announce
from megajax.terminal.one_line import reflowed, wrapped
from megajax.training.reporting.console import (
    Console,
    format_bytes,
    format_count,
    format_flops,
    format_number_of,
    format_seconds,
    log_to_stderr,
)

METRICS = {
    "loss": 5.1234,
    "grad_norm": 1.5,
    "learning_rate": 3e-4,
    "step_seconds": 0.5,
    "tokens_per_second": 12345.6,
    "mfu": 0.5721,
    "peak_memory_bytes": 12.3 * 2**30,
}


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0"),
        (950, "950"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (124_439_808, "124.4M"),
        (999_960_000, "1.00B"),
        (1.23e9, "1.23B"),
        (9.999e9, "10.0B"),
        (175e9, "175.0B"),
        (1.5e13, "15.0T"),
        (3e17, "300000.0T"),
        (0.25, "0.25"),
    ],
)
def test_format_count(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize("count, text", [(5.5e9, "5.50 GFLOP"), (1.08e12, "1.08 TFLOP"), (3.15e23, "315000.0 EFLOP")])
def test_format_flops(count, text):
    assert format_flops(count) == text


def test_format_number_of():
    assert [format_number_of(count, "step") for count in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
    assert [format_number_of(count, "process", "processes") for count in (1, 2)] == ["1 process", "2 processes"]


@pytest.mark.parametrize(
    "num_bytes, text", [(512, "512 B"), (2**10, "1.00 KiB"), (12.3 * 2**30, "12.3 GiB"), (80 * 2**30, "80.0 GiB")]
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0123, "12.3 ms"),
        (0.9999, "1.00 s"),
        (1.5, "1.50 s"),
        (12.34, "12.3 s"),
        (59.99, "1m 00s"),
        (75, "1m 15s"),
        (3599.7, "1h 00m"),
        (7500, "2h 05m"),
        (93_600, "1d 02h"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_plain_step_line(capsys):
    console = Console(is_terminal=False)
    console.step(10, 100, METRICS)
    console.step(100, 100, {"eval_loss": 4.5, "eval_bits_per_byte": 1.25, "mfu": None})
    console.close()
    assert capsys.readouterr().out.splitlines() == [
        "step 10/100 loss 5.1234 grad_norm 1.500 lr 3.000e-04 500.0 ms/step 12.3k tokens/s MFU 57.2% "
        "peak 12.3 GiB 45.0 s left",
        "step 100/100 eval_loss 4.5000 bits/byte 1.2500",
    ]


def test_plain_card_is_aligned_and_not_read_as_markup(capsys):
    Console(is_terminal=False).card("run", [("mesh", "[data] 8"), ("parameters", "124.4M")])
    assert capsys.readouterr().out == "run\n  mesh        [data] 8\n  parameters  124.4M\n"


@pytest.fixture
def screen():
    """A console on a terminal of this width, and its output without control sequences."""

    def make(width):
        console = Console(is_terminal=True)
        console.terminal = RichConsole(force_terminal=True, width=width, file=io.StringIO())
        return console, lambda: re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.terminal.file.getvalue())

    return make


@pytest.mark.parametrize("width, left_out", [(80, ["peak", "grad_norm"]), (60, ["peak", "lr"]), (200, [])])
def test_a_terminal_keeps_step_bar_and_a_line_of_history_at_any_width(screen, width, left_out):
    console, shown = screen(width)
    console.step(10, 100, METRICS | {"mean_loss": 4.5})
    console.progress(11, 100)
    console.close()
    *history, bar = [line for line in re.split(r"[\r\n]+", shown()) if line.strip()]
    assert all(len(line) <= width for line in (*history, bar))
    assert history[0].startswith("step 10/100 loss 4.5000") and "MFU 57.2%" in history[0] or width == 60
    assert not any(name in history[0] for name in left_out) and ("peak" in history[0]) == (not left_out)
    assert bar.startswith("step 11/100 ━") and "loss 4.5000" in bar


def test_all_lines_of_a_run_show_the_same_metrics_as_far_as_they_have_them(screen):
    console, shown = screen(80)
    first = {name: METRICS[name] for name in ("loss", "grad_norm", "learning_rate")}  # no speed: it was compiled
    console.step(1, 100, first)
    console.step(10, 100, METRICS | {"tokens_per_second": 1e3, "mfu": None})
    console.close()
    lines = [line for line in re.split(r"[\r\n]+", shown()) if line.startswith("step") and "━" not in line]
    assert lines == ["step 1/100 loss 5.1234 lr 3.000e-04",
                     "step 10/100 loss 5.1234 lr 3.000e-04 500.0 ms/step 1.00k tokens/s"]  # fmt: skip


def test_a_narrow_terminal_breaks_neither_words_nor_commands(screen):
    note = "figures need matplotlib, which is not installed; pip install 'megajax[plot]' (in /a/folder/of/models)"
    broken = [
        "figures need matplotlib, which is not installed;",
        "pip install 'megajax[plot]' (in",
        "/a/folder/of/models)",
    ]
    path = "x" * 70 + "/checkpoints"
    console, shown = screen(50)
    console.note(note)
    console.card("run", [("data", "word " * 9 + "end"), ("folder", path)])
    console.close()
    card = ["run", "  data    " + "word " * 7 + "word", "          word end", "", "  folder", "          " + path]
    assert [line.rstrip() for line in shown().splitlines()] == [*broken, *(line for line in card if line)]
    assert wrapped("python " + "-x " * 30 + "--y=3", 40).count("\n") == 2  # too long to stay whole


def test_docstrings_are_broken_anew_and_keep_their_items():
    long = (
        "Reads some text with the model, finds the ranges of its matrices, optionally smooths some of them here, and so"
    )
    text = (
        f"Title\n\n{long} once\nmore on to the end.\n\n  chat  a conversation in the terminal that ends\n  fill  masks"
    )
    lines = reflowed(text, 40).split("\n")
    assert lines[:2] == ["Title", ""] and all(len(line) <= 40 for line in lines)
    assert " ".join(lines[2:6]).endswith("so once more on to the end.")
    assert lines[-3:] == ["  chat  a conversation in the terminal", "        that ends", "  fill  masks"]


def test_the_loss_shown_is_the_mean_since_the_line_before(capsys):
    Console(is_terminal=False).step(10, 100, {"loss": 5.0, "mean_loss": 4.0})
    assert capsys.readouterr().out == "step 10/100 loss 4.0000\n"


def test_a_name_with_line_breaks_and_colours_stays_in_its_line(capsys):
    name = "runs/x\nstep 9/9 loss 0.0001\x1b[31m"
    Console(is_terminal=False).note(f"finished: {name}")
    Console(is_terminal=False).card(name, [("data", name)])
    shown = r"runs/x\nstep 9/9 loss 0.0001\x1b[31m"
    assert capsys.readouterr().out == f"finished: {shown}\n{shown}\n  data  {shown}\n"


def test_what_takes_long_is_logged_once_and_what_does_not_is_not(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "megajax")
    with announce.announced("short"):
        pass
    monkeypatch.setattr(announce, "PATIENCE_SECONDS", 0.01)
    with announce.announced("tokenizing"):
        end = time.monotonic() + 120
        while not caplog.records and time.monotonic() < end:
            time.sleep(0.001)
    assert caplog.messages == ["tokenizing ..."]


def test_names_cannot_forge_lines_of_the_log(capsys):
    logger = logging.getLogger("megajax")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        log_to_stderr()
        logger.info("serving %s", "a\nmegajax: all is well\x1b[2K\r\u2028é")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before
    assert capsys.readouterr().err == "megajax: serving a\\nmegajax: all is well\\x1b[2K\\r\\u2028é\n"


IN_TERMINAL = """
import logging, time
from megajax.training.batch_schedule import BatchSchedule
from megajax.training.reporting.console import Console, log_to_stderr
from megajax.training.reporting.reporter import Carried, Reporter
log_to_stderr()
console = Console()
reporter = Reporter(
    0, num_steps=3, every_steps=2, sequence_length=4, schedule=BatchSchedule(8, None, None),
    flops_per_token=lambda *_, **__: 1.0, compute_dtype="float32", num_devices=1, max_consecutive_skips=0,
    carried_before=Carried(), console=console, writer=None,
)
for step in (1, 2, 3):
    with reporter.starting(step):
        time.sleep(0.3)
    reporter.dispatched(step, {"loss": 1.0, "grad_norm": 1.0, "skipped": 0, "total_skipped": 0}, 0.1)
with console.announced("evaluating"):
    time.sleep(0.8)
    logging.getLogger("megajax").warning("a line of the log")
console.close()
"""


def test_in_a_terminal_a_spinner_says_what_takes_long_below_the_bar_and_log_lines_stay_whole():
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", IN_TERMINAL], stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while piece := _read(ours):
        shown += piece
    assert process.wait(120) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "compiling the train step 0:00:00" in text and "evaluating 0:00:00" in text
    # The bar moves with each step, also with those that have no line.
    assert "step 1/3 ━" in text and "step 2/3 ━" in text
    assert "megajax: a line of the log" in [line.strip() for line in re.split(r"[\r\n]+", text)]


def _read(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side is closed
        return b""


def test_terminal_shows_card_steps_and_notes(capsys):
    console = Console(is_terminal=True)
    console.card("gpt2", [("mesh", "[data] 8")])
    console.step(1, 100, METRICS)
    console.note("saved [checkpoint] 1")
    console.step(2, 100, METRICS)
    console.step(2, 100, {"eval_loss": 4.5})
    console.close()
    shown = capsys.readouterr().out
    for text in ("gpt2", "[data] 8", "saved [checkpoint] 1", "step 2/100", "loss 5.1234", "eval_loss 4.5000"):
        assert text in shown


def test_disabled_console_prints_nothing(capsys):
    for is_terminal in (True, False):
        console = Console(is_terminal=is_terminal, enabled=False)
        console.card("run", [("a", "b")])
        console.step(1, 2, METRICS)
        console.note("text")
        console.close()
    assert capsys.readouterr().out == ""


def test_metric_that_is_nan_is_shown(capsys):
    Console(is_terminal=False).step(1, 2, {"loss": float("nan")})
    assert capsys.readouterr().out == "step 1/2 loss nan\n"


def test_a_notebook_has_one_output_that_changes(monkeypatch, capsys):
    outputs = []

    class Output:
        def update(self, data, raw):
            outputs.append(data)

    def display(data, raw, display_id):
        outputs.append(data)
        return Output()

    monkeypatch.setattr(IPython, "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setattr(IPython.display, "display", display)
    console = Console()
    for step, loss in ((1, 4.0), (2, 2.0), (3, 3.0)):
        console.step(step, 4, {"loss": 0.0, "mean_loss": loss})
    console.step(3, 4, {"eval_loss": 2.5})
    console.step(4, 4, {"loss": None, "mean_loss": None})
    console.note("finished")
    assert capsys.readouterr().out == "finished\n" and len(outputs) == 5
    assert outputs[3]["text/plain"] == "step 3/4 loss 3.0000\nstep 3/4 eval_loss 2.5000"
    assert outputs[0]["text/html"] == "<pre>step 1/4 loss 4.0000</pre>"
    assert 'points="0.0,0.0 240.0,100.0 480.0,50.0"' in outputs[4]["text/html"]
