"""Loss curves of precision recipes: the same run but for the recipe, and what its curve is compared with."""

import json

import pytest

from benchmarks import precision_curves
from benchmarks.command_line import read_config
from benchmarks.precision_curves import Curve
from megajax.config import differences

TINY = (
    "--model.num_layers=3",
    "--model.embed_dim=32",
    "--model.num_heads=2",
    "--model.max_positions=32",
    "--training.sequence_length=32",
    "--training.steps=12",
    "--training.eval_steps=1",
    "--optimizer.warmup_steps=2",
)


def curve(losses: list[float], validation_loss: float) -> Curve:
    return Curve(losses, validation_loss, step_seconds=0.01, compile_seconds=20.0)


def test_recipes_train_alike_but_for_the_recipe(monkeypatch):
    config = read_config("gpt2_124m", [*precision_curves.SETTINGS, "--precision.high_layers=0,0", "--mesh.data=2"])
    monkeypatch.setattr(precision_curves.jax, "device_count", lambda: 2)
    fp8 = precision_curves.config_of(config, "fp8")
    assert differences(config, fp8) == ["precision.recipe: bf16 -> fp8"]
    twice = precision_curves.config_of(config, "bf16_two_microbatches")
    assert (twice.precision.recipe, twice.training.microbatch_size) == ("bf16", 2)


def test_a_shorter_run_is_compared_at_its_own_last_steps():
    losses = [5.0] * 100 + [4.0] * 100 + [2.0] * 100
    measured = {"bf16": curve(losses, 2.0), "nvfp4": curve([5.0] * 100 + [4.4] * 100, 4.0)}
    found = precision_curves.record("command", measured)
    assert found["summaries"]["bf16"]["final_loss"] == 2.0
    assert found["summaries"]["nvfp4"]["gap"] == pytest.approx(0.1)
    assert "| nvfp4 (emulated) | 200 | 4.4000 | +10.00% | 4.0000 | - | 10.0 ms |" in precision_curves.table(
        found["summaries"]
    )
    assert len(found["losses"]["bf16"]) == len(found["steps"]) == 30


def test_no_recipe_trains_longer_than_the_reference(monkeypatch, capsys):
    speeds = {"bf16": 30, "fp8": 50, "nvfp4": 20}  # steps that the time would allow

    def measure(config, seconds, num_steps):
        return curve([4.0] * min(speeds[config.precision.recipe], num_steps), 3.0)

    monkeypatch.setattr(precision_curves, "measure", measure)
    monkeypatch.setattr(precision_curves, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(precision_curves.jax, "clear_caches", lambda: None)
    precision_curves.main(["--recipes=bf16,fp8,nvfp4"])
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[-3:]]
    assert [(row[1], row[5]) for row in rows] == [("30", "-"), ("30", "+0.00%"), ("20", "-")]


@pytest.mark.slow
def test_the_first_losses_are_those_of_the_reference_within_the_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    precision_curves.main([*TINY, "--recipes=bf16,fp8", "--data.text=stdlib", f"--output={tmp_path}/found.json"])
    found = json.loads((tmp_path / "found.json").read_text())
    bf16, fp8 = found["losses"].values()
    assert bf16 != fp8
    assert fp8 == pytest.approx(bf16, rel=0.01)
    assert found["summaries"]["fp8"]["validation_loss"] > 0
