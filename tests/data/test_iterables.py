"""Batches of an iterable: texts follow each other without a gap, and a resumed source goes on where it was."""

import itertools

import datasets
import numpy as np
import pytest

from megajax.data.iterables import IterableSource
from megajax.data.samples.gpt import GptFormat
from megajax.data.tokenizers.tokenizer import BytesTokenizer

T, STEPS = 8, 7
TEXTS = ["a", "bcd" * 9, "", "efghij", "kl" * 20, "m"]
TOKENIZER = BytesTokenizer()


def schedule(step: int) -> tuple[int, int, int]:
    """Two microbatches of 2, then of 3."""
    return 0, 2, 2 if step < 3 else 3


def source(iterable, form=GptFormat()) -> IterableSource:
    return IterableSource(iterable, schedule, TOKENIZER, lambda: form, T)


def batches_of(found: IterableSource, start: int = 0, stop: int = STEPS):
    return found.batches(start, stop, np.arange, lambda: {})


def ready():
    for step in itertools.count():
        size = 2 * schedule(step)[2]
        yield {"tokens": np.full((size, T), step, np.int32)}


KINDS = {
    "list": lambda: TEXTS,
    "generator": lambda: (text for text in TEXTS * 9),
    "rows": lambda: [{"text": text, "id": 1} for text in TEXTS],
    "datasets": lambda: datasets.Dataset.from_dict({"text": TEXTS}).to_iterable_dataset().repeat(9),
    "batches": ready,
}


@pytest.mark.parametrize("kind", ["list", "generator", "rows", "datasets"])
def test_samples_are_the_texts_one_after_another(kind):
    stream = [ids for text in TEXTS * 9 for ids in (*TOKENIZER.encode(text), TOKENIZER.eod_id)]
    document = np.repeat(np.arange(len(TEXTS) * 9), [len(text) + 1 for text in TEXTS * 9])
    first = 0
    for step, batch in enumerate(batches_of(source(KINDS[kind]()))):
        _, num_microbatches, size = schedule(step)
        assert all(array.shape == (num_microbatches, size, T) for array in batch.values())
        rows = {name: array.reshape(-1, T) for name, array in batch.items()}
        for row in range(num_microbatches * size):
            assert rows["tokens"][row].tolist() == stream[first : first + T]
            assert rows["labels"][row].tolist() == stream[first + 1 : first + T + 1]
            numbers = document[first : first + T]
            np.testing.assert_array_equal(np.diff(rows["segment_ids"][row]), np.diff(numbers))
            first += T


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_goes_on_after_any_step(kind):
    wanted = list(batches_of(source(KINDS[kind]())))
    for step in range(STEPS):
        first = source(KINDS[kind]())
        for _ in itertools.islice(batches_of(first), step + 1):  # a step ahead, as a loop reads
            pass
        resumed = source(KINDS[kind]())
        resumed.restore(first.saved(step))
        for batch, other in zip(batches_of(resumed, step), wanted[step:], strict=True):
            assert batch.keys() == other.keys()
            for name, array in batch.items():
                np.testing.assert_array_equal(array, other[name])


def test_another_iterable_is_not_taken_for_the_one_that_was_read():
    resumed = source(TEXTS)
    resumed.restore({"num_items": 9, "left": [], "state": None})
    with pytest.raises(ValueError, match="the iterable has 6 items, and the run has read 9; give the one"):
        next(batches_of(resumed))
    with pytest.raises(ValueError, match="the run began with another kind of iterable"):
        source(KINDS["datasets"]()).restore({"num_items": 0, "left": [], "state": None})


def test_what_is_no_text_and_no_batch_is_refused():
    for iterable, message in (
        ("text", "batches='text' is no iterable of texts or batches"),
        (7, "batches=7 is no iterable"),
        ([1, 2], "item 1 is int; give texts"),
        ([{"text": None}], "item 1 is dict"),
        (["a" * 40, {"tokens": 1}], "item 2 is dict"),
        ([{"tokens": np.zeros((3, T))}], r"a batch of this step has 4 sequences, and not {'tokens': \(3, 8\)}"),
        ([], "the iterable has ended after 0 items; lower training.steps"),
        (iter(["abc"] * 9), "the iterable has ended after 9 items; lower training.steps"),
    ):
        with pytest.raises(ValueError, match=message):
            list(batches_of(source(iterable)))
    with pytest.raises(ValueError, match="texts are for task.kind=language"):
        list(batches_of(source(["abc"], form=None)))
