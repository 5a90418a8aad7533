"""Loss curves side by side, and what the README shows of them."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import curves, time_to_loss

ROOT = Path(__file__).parents[2]


def write(folder: Path, losses: dict[int, float]) -> Path:
    folder.mkdir()
    rows = [{"step": step, "loss": loss} for step, loss in losses.items()] + [{"step": 9, "eval_loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_table_says_how_far_runs_are_apart(tmp_path, capsys):
    first, second = write(tmp_path / "a", {2: 4.0, 4: 3.0}), write(tmp_path / "b", {2: 4.5, 4: 2.75})
    curves.main([f"one={first}", f"other={second}", f"--plot={tmp_path}/p.svg", f"--output={tmp_path}/o.json"])
    assert "| other | 2.7500 | +0.1250 | 0.5000 |" in capsys.readouterr().out
    assert "<!-- difference -->" in (tmp_path / "p.svg").read_text()
    assert json.loads((tmp_path / "o.json").read_text()) == {
        "steps": [2, 4],
        "losses": {"one": [4, 3], "other": [4.5, 2.75]},
    }


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    first, second = write(tmp_path / "a", {2: 4.0}), write(tmp_path / "b", {3: 4.0})
    with pytest.raises(ValueError, match="log_every_steps"):
        curves.main([f"one={first}", f"other={second}"])
    with pytest.raises(ValueError, match="metrics.jsonl is not there"):
        curves.main([f"one={tmp_path}"])


def test_readme_shows_the_measured_curves():
    found = json.loads((ROOT / "benchmarks" / "measured" / "loss_curves.json").read_text())
    assert curves.table(found) in (ROOT / "docs" / "speed.md").read_text()


def test_speed_shows_the_measured_times_to_a_loss(tmp_path, capsys):
    time_to_loss.main([f"--plot={tmp_path}/p.svg"])
    assert capsys.readouterr().out in (ROOT / "docs" / "speed.md").read_text()
    assert "<!-- gpt2_124m_speed in 80 steps -->" in (tmp_path / "p.svg").read_text()


def test_hyperparameters_shows_the_measured_losses():
    rows = json.loads((ROOT / "benchmarks" / "measured" / "learning_rates.json").read_text())["rows"]
    page = (ROOT / "docs" / "hyperparameters.md").read_text()
    for width in (64, 128):
        for name, shown in (("adamw", "AdamW"), ("muon", "Muon")):
            own = [row for row in rows if (row["embed_dim"], row["optimizer"]) == (width, name)]
            (line,) = [line for line in page.splitlines() if line.startswith(f"| {shown}, width {width} |")]
            assert re.findall(r"\d\.\d{3}", line) == [f"{row['eval_bits_per_byte']:.3f}" for row in own]
