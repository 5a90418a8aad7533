"""Batches of a Python iterable: texts, tokenized and packed as they come, or ready batches."""

import collections
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from megajax.data.samples.gpt import GptFormat
from megajax.data.tokenizers.tokenizer import Tokenizer


class Position(NamedTuple):
    """Where an iterable has been read to."""

    num_items: int
    """Of this pass over it."""
    left: tuple[np.ndarray, ...]
    """Documents, or their ends, that no sample holds yet."""
    state: Any
    """Of its state_dict; None: it has none."""


class IterableSource:
    """The BatchSource of an iterable, for one process.

    Its items are texts, or rows with a `text`, whose tokens follow each other in samples of T + 1, with an end of
    document between them; or batches, {name: array [B, ...]} with the B of the step. It is read in its own order, and
    again when it ends, unless it is an iterator or has a state.

    `restore` continues after what was read: with load_state_dict if the iterable has it and a state_dict of JSON
    values, as those of the package datasets do, otherwise by reading it from its beginning and passing over what was
    read.
    """

    reads_weights = False

    def __init__(
        self,
        iterable: Iterable,
        schedule: Callable[[int], tuple[int, int, int]],
        tokenizer: Tokenizer,
        form_of: Callable[[], Any],
        sequence_length: int,
    ):
        """form_of: the SampleFormat of the task. Raises ValueError for what is not iterable."""
        if not isinstance(iterable, Iterable) or isinstance(iterable, str | Mapping):
            raise ValueError(f"batches={iterable!r:.60} is no iterable of texts or batches; give a list or a generator")
        self._iterable: Any = iterable
        self._has_state = hasattr(iterable, "load_state_dict")
        try:
            json.dumps(self._state())
        except TypeError as error:
            raise ValueError(f"batches: their state_dict is no JSON ({error}); give iter(...) of them") from None
        self._schedule = schedule
        self._tokenizer = tokenizer
        self._form_of = form_of
        self._length = sequence_length
        self._num_items = 0
        self._left: collections.deque[np.ndarray] = collections.deque()
        self._positions: dict[int, Position] = {}

    def batches(
        self, start: int, stop: int, rows_of: Callable[[int], np.ndarray], weights: Callable[[], dict]
    ) -> Iterator[dict[str, np.ndarray]]:
        items = self._items()
        self._positions = {start: self._position()}
        for step in range(start, stop):
            _, num_microbatches, size = self._schedule(step)
            batch = self._batch(items, num_microbatches * size)
            self._positions[step + 1] = self._position()
            self._positions.pop(step - 2, None)  # batches are made up to two steps ahead
            yield {
                name: array.reshape(num_microbatches, size, *array.shape[1:])[:, rows_of(size)]
                for name, array in batch.items()
            }

    def saved(self, step: int) -> dict[str, Any]:
        position = self._positions[step]
        return position._asdict() | {"left": [ids.tolist() for ids in position.left]}

    def restore(self, saved: dict[str, Any]) -> None:
        self._num_items = saved["num_items"]
        self._left.extend(np.array(ids, np.int32) for ids in saved["left"])
        if (saved["state"] is not None) != self._has_state:
            raise ValueError("batches: the run began with another kind of iterable, by its state_dict; give that again")
        if self._has_state:
            self._iterable.load_state_dict(saved["state"])

    def _state(self) -> Any:
        return self._iterable.state_dict() if self._has_state else None

    def _position(self) -> Position:
        return Position(self._num_items, tuple(self._left), self._state())

    def _items(self) -> Iterator[Any]:
        passed_over = 0 if self._has_state else self._num_items
        iterator = iter(self._iterable)
        is_repeatable = iterator is not self._iterable and not self._has_state
        found = sum(1 for _ in itertools.islice(iterator, passed_over))
        if found < passed_over:
            raise ValueError(
                f"batches: the iterable has {found} items, and the run has read {passed_over}; give the one that it "
                "began with, from its beginning"
            )
        while True:
            for item in iterator:
                self._num_items += 1
                yield item
            if not is_repeatable or not self._num_items:
                raise ValueError(f"batches: the iterable has ended after {self._num_items} items; lower training.steps")
            self._num_items = 0
            iterator = iter(self._iterable)

    def _batch(self, items: Iterator[Any], size: int) -> dict[str, np.ndarray]:
        if not self._left:
            item = next(items)
            if isinstance(item, Mapping) and "text" not in item:
                return self._checked(item, size)
            self._left.append(self._encoded(item))
        form = self._form_of()
        if not isinstance(form, GptFormat):
            raise ValueError("batches: texts are for task.kind=language; give batches {name: array} like run.batch(0)")
        samples = [form.arrays(*self._sample(items)) for _ in range(size)]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def _checked(self, item: Mapping, size: int) -> dict[str, np.ndarray]:
        batch = {name: np.asarray(array) for name, array in item.items()}
        if wrong := {name: array.shape for name, array in batch.items() if array.shape[:1] != (size,)}:
            raise ValueError(f"batches: a batch of this step has {size} sequences, and not {wrong}")
        return batch

    def _sample(self, items: Iterator[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(the next T + 1 tokens, of which the last is also the first of the next sample; the lengths of the parts of
        documents in them)."""
        parts = []
        missing = self._length + 1
        while missing:
            if not self._left:
                self._left.append(self._encoded(next(items)))
            document = self._left.popleft()
            parts.append(document[:missing])
            if len(document) >= missing:
                self._left.appendleft(document[missing - 1 :])
            missing -= len(parts[-1])
        return np.concatenate(parts), np.array([len(part) for part in parts])

    def _encoded(self, item: Any) -> np.ndarray:
        text = item.get("text") if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            raise ValueError(
                f"batches: item {self._num_items} is {type(item).__name__}; give texts, rows with a text, or batches "
                "{name: array}, all of one kind"
            )
        ids = self._tokenizer.encode(text)
        return np.array(ids + [self._tokenizer.eod_id] * (self._tokenizer.eod_id is not None), np.int32)
