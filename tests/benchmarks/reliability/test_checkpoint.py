"""What a save costs, from what was measured of it."""

import json

import pytest

from benchmarks.reliability import checkpoint
from benchmarks.reliability.checkpoint import Save, summary

TINY = ["--config=gpt_tiny", "--optimizer.name=adamw",
        "--model.num_layers=1", "--model.embed_dim=32", "--model.num_heads=2",
        "--model.mlp_dim=64", "--model.vocab_size=128", "--training.sequence_length=32",
        "--training.global_batch_size=8", "--mesh.data=8"]  # fmt: skip


def test_a_save_costs_what_it_holds_the_loop_and_what_steps_are_slower_meanwhile():
    first, save = Save(9.0, 9.0, 0, None), Save(2.0, 30.0, 100, 0.25)
    assert save.lost_seconds(0.2) == pytest.approx(2 + 100 * 0.05)
    found = summary([first, save], 0.2)
    assert found["holding_seconds"] == 2.0 and found["share"]["10"] == pytest.approx(7 / 600)
    assert summary([first], 0.2)["lost_seconds"] == 9.0


def test_all_is_measured_and_written(tmp_path, capsys):
    local, output = tmp_path / "fast", tmp_path / "result.json"
    (tmp_path / "slow").mkdir()
    checkpoint.main([*TINY, "--seconds=0.01", "--saves=2", f"--folder={tmp_path / 'slow'}", f"--local_dir={local}",
                     f"--output={output}"])  # fmt: skip
    result = json.loads(output.read_text())
    assert result["num_bytes"] > 0 and len(result["saves"]) == len(result["local_saves"]) == 2
    assert all(result[name] > 0 for name in ("digest_seconds", "restore_seconds", "step_seconds"))
    assert all(save["writing_seconds"] >= save["holding_seconds"] > 0 for save in result["saves"])
    assert "| local snapshot |" in capsys.readouterr().out
    assert not any((tmp_path / "slow").iterdir()) and not any(local.iterdir())
