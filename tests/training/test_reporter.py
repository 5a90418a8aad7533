"""Skipped updates are said with their samples, and too many in a row end the run."""

import pytest

from megajax.training.batch_schedule import BatchSchedule
from megajax.training.reporter import Reporter


class Lines:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def step(self, *_):
        pass


def reporter(console, most_skipped):
    return Reporter(
        0, num_steps=100, every_steps=10, sequence_length=4, schedule=BatchSchedule(8, None, None),
        flops_per_token=lambda *_, **__: 1.0, num_devices=1, most_skipped=most_skipped, console=console, writer=None,
    )  # fmt: skip


def run(console, most_skipped, skipped):
    it, total = reporter(console, most_skipped), 0
    for step, one in enumerate(skipped, start=1):
        total += one
        loss = float("nan") if one else 1.0
        it.dispatched(step, {"loss": loss, "grad_norm": loss, "skipped": one, "total_skipped": total}, 0.1)
    it.flush()


@pytest.mark.fault
def test_a_skipped_update_names_its_samples_at_once_and_not_at_the_next_line_of_metrics():
    console = Lines()
    run(console, 3, [0, 0, 1, 0, 1, 1, 0])
    notes = [note for note in console.notes if "skipped" in note]
    assert [note.split(":")[0] for note in notes] == ["step 3", "step 5", "step 6"]
    assert "samples 16 to 23 (1 skipped in all)" in notes[0] and "loss nan" in notes[0]


@pytest.mark.fault
def test_too_many_in_a_row_end_the_run():
    with pytest.raises(RuntimeError, match="3 updates in a row were skipped, up to step 7"):
        run(Lines(), 3, [0, 1, 1, 0, 1, 1, 1, 1])
    run(Lines(), 0, [1] * 50)
