"""Two processes save what one restores, and the other way round; each machine's own snapshot outlives a kill -9."""

import json
import os
import shutil

import numpy as np
import pytest
from launch import losses, metrics, run, saved_steps, started

LENGTH = ["--training.steps=8", "--optimizer.schedule=constant"]
TOLERANCE = 1e-5  # float32 sums of the same numbers in another order


def test_two_processes_and_one_take_turns_on_other_meshes(tmp_path):
    """The digests, which every restore verifies, say that parameters and optimizer are what was saved."""
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    run(alone, *LENGTH, "--mesh.data=2", "--mesh.fsdp=2", devices_each=4)
    two = dict(num_processes=2, devices_each=2)
    run(run_dir, *LENGTH, "--mesh.data=2", "--mesh.fsdp=2", "--training.exit_at_step=3", **two)
    best = [
        "--training.eval_every_steps=3",
        "--training.eval_steps=1",
        "--checkpoint.keep=1",
        "--checkpoint.keep_best=1",
    ]
    one = run(run_dir, *LENGTH, "--mesh.tensor=2", "--mesh.data=1", *best, "--training.exit_at_step=6", devices_each=2)
    both = run(run_dir, *LENGTH, "--mesh.fsdp=4", "--mesh.data=1", "--optimizer.shard_over_data=False", **two)
    assert "resuming from step 3" in one and "resuming from step 6" in both and "is not used" not in one + both
    assert saved_steps(run_dir) == [6, 8]  # 3 was not evaluated
    assert os.readlink(run_dir / "latest") == "checkpoints/8"
    meta = json.loads((run_dir / "checkpoints" / "6" / "meta" / "metadata").read_text())
    assert [meta["eval_loss"]] == [line["eval_loss"] for line in metrics(run_dir) if "eval_loss" in line]
    got, want = losses(run_dir), losses(alone)
    assert list(got) == list(want)
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=TOLERANCE)


@pytest.mark.fault
def test_killed_processes_go_on_from_the_newest_snapshot_that_all_of_them_have_bit_for_bit(tmp_path):
    """The checkpoint is older: what was trained after the snapshot is trained again."""
    run_dir, fast, two = tmp_path / "run", tmp_path / "fast", dict(num_processes=2, devices_each=1)
    local = [f"--checkpoint.local_dir={fast}", "--checkpoint.local_every_steps=10"]
    arguments = ["--training.steps=100000", "--optimizer.schedule=constant", "--mesh.fsdp=2", *local]
    run(run_dir, *arguments, "--training.exit_at_step=3", devices_each=2)
    with started(run_dir, *arguments, **two) as processes:
        processes[0].wait_for_step(run_dir, 33)
        for process in processes:
            process.popen.kill()
    before = losses(run_dir)
    newest = max(int(path.parent.name) for path in fast.glob("*/*/process_0"))
    for lost in fast.glob(f"*/{newest}/process_1"):
        shutil.rmtree(lost)
    output = run(run_dir, *arguments, f"--training.exit_at_step={max(before) + 3}", **two)
    start = newest - 10
    assert f"the local snapshot {newest} is not used: another process says why" in output
    assert f"step {start} is taken from the local snapshot" in output and f"resuming from step {start} " in output
    assert 3 < start < max(before) and saved_steps(run_dir) == [3, start, max(before) + 3]
    after = losses(run_dir)
    assert {step: float(after[step]).hex() for step in before} == {step: float(before[step]).hex() for step in before}
    assert not any(fast.iterdir())  # older than the checkpoint at the end
