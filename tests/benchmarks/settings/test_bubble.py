"""The bubble that `benchmarks.settings.bubble` reads from steps, and that docs/pipeline.md shows what was measured."""

import json
from pathlib import Path

import pytest

from benchmarks.settings import bubble

ROOT = Path(__file__).parents[3]
COMMAND = "python -m benchmarks.train_step --config=gpt3_7b_pipeline --mesh.virtual_stages={} --steps=3 "


def row(chunks, microbatches, seconds):
    command = COMMAND.format(chunks) + f"--training.global_batch_size={microbatches} --training.microbatch_size=1"
    return {"command": command + " --mesh.data=1", "step_seconds": seconds, "tokens_per_second_per_device": 1.0,
            "peak_memory_bytes": 2**30}  # fmt: skip


def test_steps_by_the_formula_have_the_bubble_of_the_formula():
    rows = [row(chunks, number, 0.1 * (number + 3 / chunks)) for chunks in (1, 4) for number in (8, 4, 16)]
    found = bubble.points([*rows, row(8, 4, 1.0)])
    assert [one["microbatches"] for one in found] == [4, 8, 16, 4, 8, 16, 4]
    assert [one.get("bubble") for one in found[:-1]] == pytest.approx([one["formula"] for one in found[:-1]])
    assert "bubble" not in found[-1]  # one step is no series


@pytest.mark.slow
def test_docs_show_what_was_measured(tmp_path):
    rows = json.loads((ROOT / "benchmarks" / "measured" / "pipeline.json").read_text())["rows"]
    assert bubble.table(rows) in (ROOT / "docs" / "pipeline.md").read_text()
    bubble.plot(rows, str(tmp_path / "bubble.svg"))
