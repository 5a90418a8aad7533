"""Two processes save what one restores, and the other way round; each machine's own snapshot outlives a kill -9."""

import json
import os
import shutil

import pytest

from launch import (
    END,
    ENDLESS,
    EVALUATE,
    MESH,
    STEPS,
    TWO,
    assert_close,
    evaluations,
    losses,
    run,
    saved_steps,
    started,
)


@pytest.mark.fault
@pytest.mark.slow
def test_two_processes_and_one_take_turns_on_other_meshes(alone, begun_run):
    """The digests, which every restore verifies, say that parameters and optimizer are what was saved."""
    best = ["--checkpoint.keep=1", "--checkpoint.keep_best=1", "--launch.exit_at_step=8"]
    one = run(begun_run, *ENDLESS, *EVALUATE, "--mesh.tensor=2", "--mesh.data=1", *best, devices_each=2)
    other = ["--mesh.fsdp=4", "--mesh.data=1", "--optimizer.shard_over_data=False"]
    both = run(begun_run, *ENDLESS, *EVALUATE, END, *other, **TWO)
    assert "resuming from step 5" in one and "resuming from step 8" in both and "is not used" not in one + both
    assert saved_steps(begun_run) == [8, STEPS]  # 3 and 5 were not evaluated
    assert os.readlink(begun_run / "latest") == f"checkpoints/{STEPS}"
    meta = json.loads((begun_run / "checkpoints" / "8" / "meta" / "metadata").read_text())
    assert meta["eval_loss"] == evaluations(begun_run)[8]
    assert_close(losses(begun_run), alone[0])
    assert_close(evaluations(begun_run), alone[1])


@pytest.mark.fault
@pytest.mark.slow
def test_killed_processes_go_on_from_the_newest_snapshot_that_all_of_them_have_bit_for_bit(begun_run, tmp_path):
    """The checkpoint is older: what was trained after the snapshot is trained again."""
    fast = tmp_path / "fast"
    arguments = [*MESH, *ENDLESS, f"--checkpoint.local_dir={fast}", "--checkpoint.local_every_steps=10"]
    with started(begun_run, *arguments, **TWO) as processes:
        processes[0].wait_for_step(begun_run, 33)
        for process in processes:
            process.popen.kill()
    before = losses(begun_run)
    newest = max(int(path.parent.name) for path in fast.glob("*/*/process_0"))
    for lost in fast.glob(f"*/{newest}/process_1"):
        shutil.rmtree(lost)
    output = run(begun_run, *arguments, f"--launch.exit_at_step={max(before) + 3}", **TWO)
    start = newest - 10
    assert f"the local snapshot {newest} is not used: another process could not read it, and says why" in output
    assert f"step {start} is restored from the local snapshot" in output and f"resuming from step {start} " in output
    assert 5 < start < max(before) and saved_steps(begun_run) == [5, start, max(before) + 3]
    after = losses(begun_run)
    assert {step: float(after[step]).hex() for step in before} == {step: float(before[step]).hex() for step in before}
    assert not any(fast.iterdir())  # older than the checkpoint at the end
