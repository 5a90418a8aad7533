"""A search tries the meshes of a number of GPUs, leaves out what does not fit, and predicts what a plan predicts."""

import dataclasses
import re

import pytest

import configs
from megajax.cli import train
from megajax.models.decoder import DecoderConfig
from megajax.optim.optimizer import Optimizer
from megajax.overrides import override
from megajax.planning.plan import plan_device
from megajax.planning.search import overrides_of, search


@pytest.fixture(scope="module")
def found():
    config = override(configs.recipe("gpt3_7b"), ["--model.num_layers=4", "--training.sequence_length=4096"])
    return search(config, 4, plan_device("h100"))


def test_meshes_are_different_have_all_devices_and_are_ranked(found):
    best = found.best
    assert found.num_tried > len(best) > 10
    assert len({candidate.config.mesh for candidate in best}) == len(best)
    assert all(candidate.config.mesh.num_devices == 4 for candidate in best)
    seconds = [candidate.step_seconds for candidate in best]
    assert seconds == sorted(seconds)
    kinds = {axis for candidate in best for axis, size in candidate.config.mesh.sizes().items() if size > 1}
    assert kinds == {"data", "fsdp", "tensor", "pipeline", "context"}


def test_every_candidate_may_be_run(found):
    for candidate in found.best:
        assert candidate.config.check_on(4).mesh == candidate.config.mesh


def test_shown_overrides_plan_to_the_same_time_and_memory(capsys):
    """Pasted after the recipe as they are printed: what the recipe sets and the row does not have is named too."""
    words = ["--config=gpt3_7b", "--model.num_layers=4", "--training.sequence_length=4096"]
    train.main([*words, "--plan=search:4:a100"])  # a GPU for which a plan needs no compiler
    rows = re.findall(r"^  \d+\. +([\d.]+ \w+), MFU [\d.]+%, .*?: (--.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 10
    for seconds, overrides in rows[::4]:
        train.main([*words, *overrides.split(), "--plan=a100"])
        card = capsys.readouterr().out
        assert f"step time, estimate           {seconds}: " in card and "4 x A100" in card


def test_overrides_name_all_that_a_search_changed(found):
    config = override(
        configs.recipe("gpt3_7b_pipeline"),
        ["--model.num_layers=4", "--training.sequence_length=4096", "--execution.recompute_every=2",
         "--mesh.pipeline_layout=t|t|t|t|||||" + "|" * 23],
    )  # fmt: skip
    for candidate in found.best[::3]:
        overrides = overrides_of(config, dataclasses.replace(config, mesh=candidate.config.mesh))
        assert override(config, overrides).mesh == candidate.config.mesh


def test_what_fits_nowhere_is_reported_with_what_is_missing(capsys):
    train.main(["--config=gpt_175b", "--plan=search:1"])
    verdict = capsys.readouterr().out
    assert re.search(
        r"nothing fits: the smallest needs 2\.\d+ TiB of 73.6 GiB usable per device; use more GPUs", verdict
    )
    train.main(["--config=gpt_175b", "--training.global_batch_size=7", "--plan=search:8"])
    verdict = capsys.readouterr().out
    assert re.search(r"\d+ meshes do not divide training.global_batch_size=7; use .* a batch size that more", verdict)


def test_state_that_does_not_fit_is_not_planned_further(monkeypatch):
    def fail(*_):
        raise AssertionError("a time was estimated")

    monkeypatch.setattr("megajax.planning.search.step_times", fail)
    found = search(configs.recipe("gpt_175b"), 2, plan_device("h100"))
    assert not found.best and found.num_tried > 50 and found.smallest.bytes > 1e12


def test_layers_and_optimizer_state_are_made_a_few_times_for_many_meshes(monkeypatch):
    """A search of 1,024 GPUs for gpt_175b makes thousands of configurations."""
    made = []
    make_stacks, init = DecoderConfig.make_stacks, Optimizer.init
    monkeypatch.setattr(DecoderConfig, "make_stacks", lambda *args: made.append("layers") or make_stacks(*args))
    monkeypatch.setattr(Optimizer, "init", lambda *args: made.append("state") or init(*args))
    config = override(configs.recipe("gpt3_7b"), ["--model.num_layers=5", "--model.num_kv_heads=4"])
    found = search(config, 16, plan_device("h100"))
    assert len(found.best) > 30 and found.num_tried > 200
    assert made.count("layers") < 8 and made.count("state") < 40


@pytest.mark.parametrize("words, message", [
    (["--plan=search:4", "--model.num_heads=7"], "model.embed_dim=128 is not divisible by model.num_heads=7"),
    (["--plan=search:4", "--model.norm_epsilon=0"], "model.norm_epsilon=0.0 must be"),
    (["--plan=search:3"], "--plan=search:3: no mesh of 3 GPUs works .* training.global_batch_size=16"),
    (["--plan=search:1000000007"], "--plan=search:1000000007: the number of GPUs must be from 1 to"),
])  # fmt: skip
def test_what_no_mesh_can_run_is_refused_with_the_reason(words, message):
    with pytest.raises(ValueError, match=message):
        train.main(["--config=gpt_tiny", *words])


@pytest.mark.parametrize("device", ["search", "search:x", "search:0"])
def test_number_of_gpus_has_to_be_said(device):
    with pytest.raises(ValueError, match="--plan=search"):
        train.main(["--config=gpt_tiny", f"--plan={device}"])
