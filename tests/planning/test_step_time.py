"""Times of --plan against the steps that were measured."""

import dataclasses
import re
from pathlib import Path

import pytest

import configs
from benchmarks.estimates import estimates, summary
from megajax.mesh.config import MeshConfig
from megajax.overrides import override
from megajax.planning.plan import plan_device
from megajax.planning.step_time import HOP_SECONDS, NETWORK_BANDWIDTH, step_times

ROOT = Path(__file__).parents[2]


def test_readme_says_how_far_the_estimates_are_from_what_was_measured():
    found = estimates()
    sentence = summary(found)
    assert re.search(r"\d+ steps", sentence)[0] in (ROOT / "README.md").read_text()
    assert sentence in (ROOT / "README.md").read_text()
    assert max(abs(estimate.error) for estimate in found) < 0.17
    small = [estimate for estimate in found if "gpt2_124m" in estimate.command]
    assert len(small) == 3
    devices = {estimate.device for estimate in found}
    assert devices == {"1 x NVIDIA H100 80GB HBM3", "1 x NVIDIA H200", "2 x NVIDIA H200", "4 x NVIDIA H200"}


def times(*overrides, name="gpt2_124m"):
    config = override(configs.recipe(name), ["--mesh.data=1", *overrides])
    return step_times(config.make_program(), config.training, plan_device("h100"), {})


def test_float32_is_rated_at_its_own_peak():
    # 67 TFLOP/s instead of 989, and twice the bytes of each activation.
    assert times("--precision.compute=float32").compute > 8 * times().compute


def test_narrow_models_wait_for_memory():
    wide = ["--model.embed_dim=3072", "--model.num_heads=48", "--model.vocab_size=200000"]  # four times all
    # Matmuls are 16 times as many, activations 4 times.
    assert 4 < times(*wide).compute / times().compute < 0.9 * 16


def test_recomputed_activations_are_written_again():
    none, full = (times(f"--execution.recompute={policy}") for policy in ("none", "selective"))
    assert full.compute > 1.02 * none.compute


def test_microbatches_cost_the_sum_of_the_gradients():
    batch = "--training.global_batch_size=64"
    one, many = (times(batch, f"--training.microbatch_size={size}").compute for size in (64, 1))
    model = configs.recipe("gpt2_124m").make_model()
    assert many - one == pytest.approx(
        64 * 12 * model.num_parameters() / plan_device("h100").memory_bandwidth, rel=1e-3
    )


def test_microbatches_read_and_write_the_gathered_weights_of_experts():
    def compute(microbatch_size: int) -> float:
        sizes = ["--mesh.fsdp=2", "--mesh.expert=1", "--model.num_layers=1", "--training.global_batch_size=16"]
        return times(*sizes, f"--training.microbatch_size={microbatch_size}", name="qwen3_30b_a3b").compute

    model = override(configs.recipe("qwen3_30b_a3b"), ["--model.num_layers=1"]).make_model()
    experts = 128 * 3 * 2048 * 768
    # From 2 to 4 microbatches: 12 bytes for the sum of each gradient of the half that a device stores.
    added = 2 * (20 * experts + 12 * model.num_parameters() / 2)
    assert compute(2) - compute(4) == pytest.approx(added / plan_device("h100").memory_bandwidth, rel=1e-3)


def test_fp8_is_rated_at_its_own_peak_and_emulated_formats_as_slower():
    def step(*overrides):
        return times("--mesh.fsdp=1", "--precision.high_layers=0,0", *overrides, name="llama3_8b_8layers")

    bf16, fp8, mxfp8 = (step(f"--precision.recipe={recipe}") for recipe in ("bf16", "fp8", "mxfp8"))
    assert 1.2 < bf16.compute / fp8.compute < 1.5
    assert bf16.compute < mxfp8.compute
    ends = step("--precision.recipe=fp8", "--precision.high_layers=1,1").compute
    assert ends - fp8.compute == pytest.approx((bf16.compute - fp8.compute) / 4, rel=0.01)
    gathered = {
        recipe: sum(t.bytes for t in step(f"--precision.recipe={recipe}", "--mesh.fsdp=8",
                                          "--training.global_batch_size=16").traffic if t.axis == "fsdp")
        for recipe in ("bf16", "fp8")
    }  # fmt: skip
    # Of 8 layers with 218 million weights each, 1 byte instead of 2 in both passes, of which 7/8 are sent.
    assert gathered["bf16"] - gathered["fp8"] == pytest.approx(2 * 8 * 218.1e6 * 7 / 8, rel=0.001)


@pytest.mark.parametrize("mesh, hops", [
    (dict(fsdp=8), {"fsdp": 0}),
    (dict(fsdp=32), {"fsdp": 3 * 3}),
    (dict(fsdp=4, tensor=8), {"fsdp": 3 * 3}),
    (dict(data=16, fsdp=8), {"fsdp": 0, "data": 2 * 4}),
    (dict(pipeline=4, data=2, fsdp=16), {"fsdp": 3 * 1 / 4, "data": 2 * 1 / 4}),
])  # fmt: skip
def test_a_collective_waits_for_its_hosts_one_after_the_other(mesh, hops):
    """Of a layer: two gathers of its weights and a scatter of its gradients in a ring, one sum of them in a tree."""
    config = override(configs.recipe("gpt3_7b"), ["--training.global_batch_size=128", "--training.microbatch_size=1"])
    config = dataclasses.replace(config, mesh=MeshConfig(**mesh)).for_plan()
    program = config.make_program()
    num_microbatches = config.training.schedule(config.mesh)(1).num_microbatches
    traffic = {one.axis: one for one in step_times(program, config.training, plan_device("h100"), {}).traffic}
    for axis, wanted in hops.items():
        found = traffic[axis]
        times = num_microbatches if axis == "fsdp" else 1
        assert found.num_hops / program.model.num_layers == pytest.approx(wanted * times)
        bandwidth = found.bytes / (found.seconds - found.num_hops * HOP_SECONDS)
        assert bandwidth == pytest.approx(NETWORK_BANDWIDTH if found.num_hops else 360e9)
