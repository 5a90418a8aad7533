"""Pictures of runs show what metrics.jsonl holds, over any x; those of plans what a plan counts."""

import json
import sys

import numpy as np
import pytest

import configs
from megajax.cli import train
from megajax.config import Config
from megajax.figures import plot
from megajax.figures.drawings import curves, plan_figure, save
from megajax.figures.runs import read_run
from megajax.overrides import override
from megajax.planning.memory import memory_per_device
from megajax.planning.plan import plan_device


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Ten logged steps, one evaluation, and two lines that nothing can read."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    lines = []
    for step in range(2, 22, 2):
        timed = {"step_seconds": 0.5, "tokens_per_second": 512.0, "mfu": None} if step > 2 else {}
        values = {
            "loss": 8.0 - step / 4 + step % 4,
            "mean_loss": 8.0 - step / 4,
            "learning_rate": 1e-3,
            "grad_norm": 1.0,
            "consumed_tokens": 256 * step,
        }
        lines.append(json.dumps({"step": step} | values | timed))
    lines.insert(5, json.dumps({"step": 10, "eval_loss": 5.25}))
    lines.insert(3, '{"step": 6, "lo')
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n\x00\x00garbage")
    config = override(configs.recipe("gpt_tiny"), ["--model.num_layers=1", "--model.embed_dim=32"])
    (folder / "config.json").write_text(config.to_json())
    return folder


def test_series_over_steps_tokens_flops_and_time(run_dir):
    run = read_run(run_dir)
    steps, losses = run.series("mean_loss")
    assert steps.tolist() == list(range(2, 22, 2)) and losses[0] == 7.5
    assert run.series("loss", "tokens")[0].tolist() == [256 * step for step in steps]
    config = Config.load(run_dir)
    flops = config.make_model().flops_per_token(config.training.sequence_length, causal=False)
    assert run.series("eval_loss", "flops")[0].tolist() == [2560 * flops]
    # The first line has no time: its steps were compiled.
    assert run.series("loss", "time")[0].tolist() == [0.5 * max(step - 2, 0) for step in steps]
    assert run.series("mfu")[0].size == 0


def test_smoothing_is_the_mean_of_the_last_values(run_dir):
    run = read_run(run_dir)
    losses = run.series("mean_loss")[1]
    smooth = run.series("mean_loss", smooth=3)[1]
    assert smooth[:2] == pytest.approx([losses[0], losses[:2].mean()])
    assert smooth[2:] == pytest.approx(np.convolve(losses, np.ones(3) / 3, "valid"))


def test_damaged_lines_are_named_and_skipped(run_dir, caplog):
    with caplog.at_level("WARNING", "megajax"):
        read_run(run_dir)
    assert "2 lines cannot be read and are left out (4, 13)" in caplog.text


def test_figure_has_a_line_for_each_run_and_metric(run_dir, tmp_path):
    runs = [read_run(run_dir)] * 2
    made = curves(runs, "tokens", smooth=2)
    shown = {axes.get_title(): axes for axes in made.axes if axes.get_visible()}
    assert list(shown) == ["loss", "learning rate", "gradient norm", "tokens/s"]  # MFU is null on a CPU
    assert shown["loss"].get_legend_handles_labels()[1] == ["small", "small, evaluation"] * 2
    batches, mean = shown["loss"].lines[:2]
    assert batches.get_alpha() < 0.5 and mean.get_alpha() is None
    for line, metric, smooth in ((batches, "loss", 1), (mean, "mean_loss", 2)):
        assert line.get_ydata().tolist() == runs[0].series(metric, smooth=smooth)[1].tolist()
    assert mean.get_xdata().tolist() == [256 * step for step in range(2, 22, 2)]
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        save(made, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)


def test_terminal_draws_without_matplotlib(run_dir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plot.main([str(run_dir), "--terminal", "--x=time"])
    panels = capsys.readouterr().out.split("\n\n")
    assert [panel.split("  ")[0] for panel in panels] == ["loss", "learning rate", "gradient norm", "tokens/s"]
    loss = panels[0].splitlines()
    assert loss[1].startswith("       7.5 ┤⠉") and loss[10].startswith("         3 ┤") and loss[10].endswith("a")
    assert all(len(line) <= 80 for panel in panels for line in panel.splitlines())
    with pytest.raises(ValueError, match=r"pip install 'megajax\[plot\]'"):
        plot.main([str(run_dir), "--output=a.png"])


@pytest.mark.parametrize("words, message", [
    ([], "which run"),
    (["RUN"], "where to"),
    (["RUN", "--x=epochs", "--terminal"], "x=epochs must be one of step, tokens, flops, time"),
    (["RUN", "--smooth=0", "--terminal"], "smooth=0 must be a whole number .* at least 1"),
    (["RUN", "--ouput=a.png"], "--ouput=a.png is unknown; did you mean --output[?]"),
    (["RUN", "--output=a.bmp"], r"a.bmp: the name must end in .png, .svg, .pdf"),
    (["nowhere", "--terminal"], "nowhere/metrics.jsonl does not exist"),
])  # fmt: skip
def test_wrong_arguments_are_one_line_with_the_way_out(run_dir, words, message):
    with pytest.raises(ValueError, match=message):
        plot.main([str(run_dir) if word == "RUN" else word for word in words])


def test_bars_of_a_plan_are_its_bytes_and_the_schedule_has_every_pass():
    words = ["--mesh.data=1", "--mesh.pipeline=2", "--training.microbatch_size=4"]
    config = override(configs.recipe("gpt_tiny"), words).check_on(2)
    program = config.make_program()
    made = plan_figure(program, config.training, plan_device("h100"), "tiny")
    memory, schedule = made.axes
    sizes, _ = memory_per_device(program, config.training)
    assert [bar.get_width() * 2**30 for bar in memory.patches] == pytest.approx(list(sizes.values()))
    assert len(schedule.patches) == 2 * 2 * 4  # ranks, passes, microbatches


def test_plan_figure_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "plan.svg"
    train.main(["--config=gpt_tiny", "--plan=a100", f"--plan_figure={path}", "--plan_price=2.5"])
    assert "usable" in path.read_text() or path.stat().st_size > 10_000
    assert "at 2.5 per GPU-hour" in capsys.readouterr().out
