"""Windows of time, and the arguments that the benchmarks share."""

from benchmarks import records, sustained
from benchmarks.command_line import split


def test_windows_count_what_comes_after_the_warm_up_and_last_as_long_as_asked(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(sustained.time, "perf_counter", lambda: now[0])

    def run(count: int) -> None:
        calls.append(count)
        compiles, cold = len(calls) == 1, len(calls) == 2
        now[0] += 20.0 if compiles else count * (0.25 if cold else 0.5)  # the clocks fall while it warms up

    assert sustained.windows(run, seconds=10, num_windows=2) == [0.5, 0.5]
    assert calls == [1, 3, 20, 20, 20]


def test_record_takes_the_median_of_the_windows():
    assert records.record("x", [3.0, 1.0, 2.0], "cpu", {})["step_seconds"] == 2.0


def test_known_arguments_are_taken_out_and_overrides_are_left():
    arguments = ["--config=a", "--profile", "--training.steps=3", "b.json"]
    values, rest = split(arguments, {"config": "", "profile": "", "seconds": "10"})
    assert values == {"config": "a", "profile": "yes", "seconds": "10"}
    assert rest == ["--training.steps=3", "b.json"]
