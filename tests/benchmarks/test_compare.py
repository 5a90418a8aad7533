"""The comparison: who takes which turn, and what the table says of it."""

import json
from pathlib import Path

import pytest

from benchmarks import compare, results
from benchmarks.loop import counted
from benchmarks.train_step import main as train_step

RESULT = {
    "command": "python -m benchmarks.compare --config=gpt_1p3b",
    "config": "gpt_1p3b",
    "work": "8 x 2048",
    "tokens_per_step": 16384,
    "flops_per_token": 9.1e9,
    "date": "2026-11-21",
    "commit": "abc1234",
    "device": "1 x NVIDIA H100 80GB HBM3",
    "num_devices": 1,
    "versions": {"jax": "0.11.2", "torch": "2.11"},
    "measurements": {
        "megajax": [{"windows": [0.250]}, {"windows": [0.270]}, {"windows": [0.260]}],
        "loop": [{"windows": [0.2613, 0.2613]}],
        "torch": [{"windows": [0.273]}],
        "limit": [{"windows": [0.208]}],
    },
    "problems": {},
}
FAILING = ["--config=gpt_1p3b", "--model.num_layers=0"]


def test_table_has_the_medians_and_the_ratios():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in results.table([RESULT]).splitlines()[2:6]]
    assert rows[0] == [
        "`gpt_1p3b`, 8 x 2048, 1 x NVIDIA H100 80GB HBM3", "megajax", "260.0 ms", "63.0k", "58.0%", "80%", "+5.0%"
    ]  # fmt: skip
    assert rows[1][1:3] == ["megajax, training loop (+0.5% per step)", "261.3 ms"]
    assert rows[2][1:] == ["PyTorch", "273.0 ms", "60.0k", "55.2%", "76%", "-"]
    assert rows[3][1:] == ["limit", "208.0 ms", "78.8k", "72.5%", "100%", "-"]


def test_table_says_where_its_numbers_come_from():
    line = results.table([RESULT]).splitlines()[-1]
    for part in ("--config=gpt_1p3b`", "1 x NVIDIA H100", "jax 0.11.2, torch 2.11", "2026-11-21", "commit abc1234",
                 "megajax 8.0% of 3"):  # fmt: skip
        assert part in line


def test_table_without_peers_on_an_unknown_device_has_dashes():
    alone = RESULT | {"device": "1 x cpu", "measurements": {"megajax": RESULT["measurements"]["megajax"]}}
    assert "| 63.0k | - | - | - |" in results.table([alone])


def test_tokens_per_second_are_of_one_gpu():
    eight = RESULT | {"num_devices": 8}
    assert results.tokens_per_second(eight, "megajax") == 16384 / 0.260 / 8


def test_plot_names_each_contender_with_its_speed(tmp_path):
    results.plot([RESULT, RESULT | {"config": "other"}], str(tmp_path / "speed.svg"))
    text = (tmp_path / "speed.svg").read_text()
    for shown in ("gpt_1p3b, 8 x 2048", "other, 8 x 2048", "megajax, training loop", "63.0k tokens/s, MFU 58.0%"):
        assert f"<!-- {shown}" in text


def test_contenders_alternate_and_the_loop_runs_once():
    turns = compare.order(["loop", "torch", "limit"], 3)
    assert turns == ["megajax", "loop", "torch", "limit", *["megajax", "torch", "limit"] * 2]


def test_several_gpus_take_the_peer_that_shards():
    assert "benchmarks.peers.torch_gpt" in compare.command("torch", [], 1)
    words = compare.command("torch", ["--config=llama3_8b"], 4)
    assert "--nproc-per-node=4" in words and words[-2:] == ["benchmarks.peers.torch_fsdp", "--config=llama3_8b"]


def test_record_is_found_after_other_lines():
    assert compare.parse('hello {x}\nmegajax a: {"step_seconds": 2}\nbye') == {"step_seconds": 2}
    with pytest.raises(ValueError, match="no result"):
        compare.parse("Traceback")


def test_contender_that_fails_is_reported_and_ends_the_run_if_it_is_ours(tmp_path):
    output = tmp_path / "result.json"
    result = json.loads(json.dumps(RESULT | {"measurements": {}}))
    compare.compare(result, ["megajax", "limit"], FAILING, str(output))
    assert json.loads(output.read_text())["problems"] == {"megajax": "exit status 2, it printed no result"}


def test_loop_counts_lines_after_the_warm_up_once_they_last():
    lines = [{"step": 1}, {"step": 10, "step_seconds": 0.5}, *({"step": s, "step_seconds": 0.4} for s in (20, 30, 40))]
    assert counted(lines[:3], seconds=8) == []
    assert counted(lines[:4], seconds=8) == lines[2:4]


def test_train_step_reports_windows_and_a_loss_that_stays_alive(capsys):
    train_step(["--config=gpt_tiny", "--optimizer.name=adamw",
                "--model.num_layers=1", "--model.embed_dim=32", "--model.num_heads=2",
                "--model.mlp_dim=64", "--model.vocab_size=128", "--training.sequence_length=32",
                "--training.global_batch_size=8", "--mesh.data=8", "--seconds=0.3", "--windows=2"])  # fmt: skip
    found = compare.parse(capsys.readouterr().out)
    assert len(found["windows"]) == 2 and found["device"] == "8 x cpu" and isinstance(found["peak_memory_bytes"], int)
    # Dozens of steps on batches that differ; ln 128 = 4.85 is what can be known of random tokens.
    assert abs(found["loss"] - found["first_loss"]) < 0.1


def test_readme_shows_what_was_measured():
    root = Path(__file__).parents[2]
    names = ("gpt_1p3b", "llama3_8b_8layers", "llama3_8b")
    found = [json.loads((root / "benchmarks" / "measured" / f"{name}.json").read_text()) for name in names]
    assert results.summary(found) in (root / "README.md").read_text()
    assert results.table(found) in (root / "docs" / "speed.md").read_text()
