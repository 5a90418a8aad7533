"""What the log of a supervised run says of its deaths."""

import json

from benchmarks.reliability.soak import compare, resumptions

LOG = """
megajax: the run ended with signal SIGKILL after step 823
megajax: start 1 of 100000 in 5 s
resuming from step 820 of 18876
megajax: the run ended with signal SIGKILL after step 1420
megajax: start 2 of 100000 in 5 s
megajax: the run ended with exit status 1 after step 1420
resuming from step 1400 of 18876
"""


def test_steps_done_again_are_counted_from_where_each_start_went_on():
    assert resumptions("finished") == []
    # The second death was followed by a start that died before it went on from anywhere.
    assert resumptions(LOG) == [(823, 820), (1420, None), (1420, 1400)]


def test_one_other_bit_in_a_loss_or_a_digest_is_found(tmp_path):
    def write(name, losses, digest):
        meta = tmp_path / name / "checkpoints" / "3" / "meta"
        meta.mkdir(parents=True)
        (meta / "metadata").write_text(json.dumps({"digests": {"params": {"w": ["float32", digest]}}}))
        lines = [json.dumps({"step": step, "loss": loss}) + "\n" for step, loss in enumerate(losses, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        return tmp_path / name

    want = write("want", [3.0, 2.0, 1.0], 7)
    assert compare(write("equal", [3.0, 2.0, 1.0], 7), want, 3)["equal_losses"] == 3
    found = compare(write("other", [3.0, 2.0 + 2**-22, 1.0], 8), want, 3)
    assert found["steps_with_other_losses"] == [2] and not found["equal_digests"]
