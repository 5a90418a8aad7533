"""The ablation table: one row a variant, whatever becomes of it."""

import json

from benchmarks.settings import ablation
from benchmarks.settings.ablation import AGAIN, BASELINE, variants

TINY = ["--config=gpt_tiny", "--optimizer.name=adamw",
        "--model.num_layers=1", "--model.embed_dim=32", "--model.num_heads=2",
        "--model.mlp_dim=64", "--model.vocab_size=128", "--training.sequence_length=32",
        "--training.global_batch_size=8", "--mesh.data=8"]  # fmt: skip


def test_each_option_is_taken_away_and_each_candidate_added_between_two_measurements_of_the_same():
    found = variants({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"})
    assert list(found) == [BASELINE, "without a", "without b", "b=3", "c=4", AGAIN]
    assert found[BASELINE] == found[AGAIN] == {"a": "1", "b": "2"}
    assert found["without a"] == {"b": "2"}
    assert found["b=3"] == {"a": "1", "b": "3"}
    assert found["c=4"] == {"a": "1", "b": "2", "c": "4"}


def test_option_that_does_not_compile_is_a_row(tmp_path, capsys):
    options = "--options=xla_gpu_colour=3 xla_gpu_graph_min_graph_size=7"
    ablation.main([*TINY, "--seconds=0.01", options, f"--output={tmp_path / 'rows.json'}"])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    steps = {row["change"]: row["step_seconds"] for row in rows}
    assert list(steps) == [BASELINE, "xla_gpu_colour=3", "xla_gpu_graph_min_graph_size=7", AGAIN]
    assert steps.pop("xla_gpu_colour=3") is None and all(seconds > 0 for seconds in steps.values())
    out = capsys.readouterr().out
    assert "| `xla_gpu_colour=3` | - | INVALID_ARGUMENT: No such compile option" in out and "8 x cpu" in out
