"""Numbers read well, plain lines where stdout is no terminal, silence on every process but 0."""

import pytest

from megajax.training.reporting.console import Console, format_bytes, format_count, format_seconds

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
        (999_960_000, "1.00G"),
        (1.23e9, "1.23G"),
        (9.999e9, "10.0G"),
        (175e9, "175.0G"),
        (3.15e23, "315000.0E"),
        (0.25, "0.25"),
    ],
)
def test_format_count(count, text):
    assert format_count(count) == text


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
