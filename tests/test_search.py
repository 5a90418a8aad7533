"""A search tries the meshes of a number of GPUs, leaves out what does not fit, and predicts what a plan predicts."""

import re

import pytest

import configs
from megajax.cli import train
from megajax.config import override
from megajax.planning.plan import plan_device
from megajax.search import search


@pytest.fixture(scope="module")
def found():
    config = override(configs.recipe("gpt3_7b"), ["--model.num_layers=4", "--training.sequence_length=4096"])
    return search(config, 4, plan_device("h100"))


def test_meshes_are_different_have_all_devices_and_are_ranked(found):
    best, tried = found
    assert tried > len(best) > 10
    assert len({one.config.mesh for one in best}) == len(best)
    assert all(one.config.mesh.num_devices == 4 for one in best)
    seconds = [one.step_seconds for one in best]
    assert all(later > 0.98 * earlier for earlier, later in zip(seconds, seconds[1:], strict=False))
    kinds = {axis for one in best for axis, size in one.config.mesh.sizes().items() if size > 1}
    assert kinds == {"data", "fsdp", "tensor", "pipeline", "context"}


def test_every_candidate_may_be_run(found):
    for one in found[0]:
        assert one.config.check_on(4).mesh == one.config.mesh


def test_shown_overrides_plan_to_the_same_time(capsys):
    words = ["--config=gpt3_7b", "--model.num_layers=4", "--training.sequence_length=4096"]
    train.main([*words, "--plan=search:4:a100"])  # a GPU for which a plan needs no compiler
    rows = re.findall(r"^  \d+\. +([\d.]+ \w+), MFU [\d.]+%, .*?: (--.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 10
    for seconds, overrides in rows[::4]:
        train.main([*words, "--mesh.fsdp=1", "--mesh.tensor=1", *overrides.split(), "--plan=a100"])
        assert f"step time, estimate  {seconds}: " in capsys.readouterr().out


def test_what_fits_nowhere_is_said(capsys):
    train.main(["--config=gpt_175b", "--plan=search:1"])
    assert "nothing fits" in capsys.readouterr().out


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
