"""What the datasets of samples share: what they read, how they are pickled, and what they refuse."""

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import numpy as np

F = TypeVar("F")
Part = tuple[int, int]
"""(begin, end)."""


class TokenSource(Protocol):
    """What samples are read from: IndexedDataset, MockIndexedDataset.

    `document_indices` int64 [documents + 1] are the boundaries of the documents, in sequences.
    """

    prefix: str
    lengths: np.ndarray
    document_indices: np.ndarray
    dtype: np.dtype

    def __len__(self) -> int: ...
    def fingerprint(self) -> str: ...
    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class SampleDataset(Generic[F]):
    """Random access: sample i is a pure function of (tokens, part, num_samples, sequence_length, seed, i), a dict of
    arrays.

    indexed: where the tokens are read from. part: (begin, end), the sequences or documents of this split. num_samples:
    at least this many, in whole epochs; None is one epoch. cache_dir: where the arrays that determine the order are
    kept; None keeps them in memory. Pickles as its arguments: a worker process maps the cached arrays again instead of
    receiving them.
    """

    tokens_per_epoch: int

    def __init__(
        self,
        indexed: TokenSource,
        part: Part,
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        sample_format: F,
        cache_dir: str | None,
    ):
        self._arguments = indexed, part, num_samples, sequence_length, seed, sample_format, cache_dir
        self.indexed = indexed
        self.part = part
        self.num_samples = num_samples
        self.sequence_length = sequence_length
        self.seed = seed
        self.sample_format = sample_format
        self.cache_dir = cache_dir
        if indexed.dtype.kind not in "iu":
            raise ValueError(f"data.paths: {indexed.prefix}.bin holds {indexed.dtype}, not token ids")
        self.prepare()

    @property
    def samples_per_epoch(self) -> float:
        return self.tokens_per_epoch / self.sequence_length

    def prepare(self) -> None:
        """Finds the order of the samples, and `tokens_per_epoch`."""
        raise NotImplementedError

    def sample(self, i: int) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)} samples")
        return self.sample(int(i))

    def __reduce__(self):
        return type(self), self._arguments

    def check_ids(self, tokens: np.ndarray, vocab_size: int | None, sequences: Iterable[int]) -> None:
        """Raises ValueError, with the document, if a token of a sample is not an id of the vocabulary. None: not
        checked. sequences: what the sample was read from."""
        if vocab_size is None or (tokens.max() < vocab_size and tokens.min() >= 0):
            return
        where = f"{self.indexed.prefix}.bin"
        for sequence in sequences:
            wrong = np.flatnonzero(~np.isin(self.indexed.read(sequence), np.arange(vocab_size)))
            if len(wrong):
                document = np.searchsorted(self.indexed.document_indices, sequence, side="right") - 1
                where += f", document {document}, token {wrong[0]} of sequence {sequence}"
                break
        raise ValueError(
            f"data.paths: {where}: token ids {tokens.min()} to {tokens.max()} do not fit data.tokenizer's {vocab_size} "
            "ids; name the tokenizer that wrote the file"
        )
