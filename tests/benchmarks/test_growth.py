"""docs/growth.md, its figure and its record say what a plan says."""

import json
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.growth import SERIES, planned
from benchmarks.published import RUNS

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "benchmarks" / "measured" / "growth.json").read_text())


@pytest.mark.parametrize("number, value", [(0, 32), (1, 2048), (2, 32768)], ids=["layers", "width", "tokens"])
def test_the_record_is_what_a_plan_says(number, value):
    row = RECORD["series"][number]["rows"][str(value)]
    found = planned(SERIES[number].config(value))
    assert RECORD["series"][number]["title"] == SERIES[number].title
    assert found["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-6)
    assert found["bytes_per_gpu"] == row["bytes_per_gpu"] and found["mesh"] == row["mesh"]


def test_the_table_of_published_runs_is_what_a_plan_says():
    text = (ROOT / "docs" / "growth.md").read_text()
    assert f"| {' | '.join(RUNS[0].row())} |" in text
    for published in RUNS:
        for who, speed in published.tokens_per_second.items():
            assert f"{who} {speed:,}" in text


def test_the_figure_has_a_title_for_each_series(tmp_path):
    pytest.importorskip("matplotlib")
    figures.growth(str(tmp_path / "growth.svg"), RECORD["series"])
    drawn = (tmp_path / "growth.svg").read_text()
    assert all(series["title"] in drawn for series in RECORD["series"])
