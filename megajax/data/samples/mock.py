"""Megatron's mock data: 100,000 documents that count 1, 2, 3, ... and end in the end-of-document token.

No file is needed, and the documents equal those of Megatron's MockGPTLowLevelDataset, so loss curves can be compared.
Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py.
"""

import numpy as np

NUM_DOCUMENTS = 100_000
MAX_LENGTH = 4096
SEED = 0


class MockIndexedDataset:
    """Same interface as IndexedDataset. Document of length L: (1, 2, ..., L - 1) modulo vocab_size, then eod_id."""

    prefix = "mock data"
    dtype = np.dtype(np.int64)

    def __init__(self, vocab_size: int, eod_id: int | None):
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        rng = np.random.default_rng(SEED)
        self.lengths = rng.integers(low=1, high=MAX_LENGTH, size=NUM_DOCUMENTS, dtype=np.int32)
        self.document_indices = np.arange(NUM_DOCUMENTS + 1, dtype=np.int64)

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def __reduce__(self):
        return type(self), (self.vocab_size, self.eod_id)

    def fingerprint(self) -> str:
        """As for an IndexedDataset: identifies the tokens."""
        return f"{self.prefix} of {self.vocab_size} ids, {self.eod_id} at the end of a document"

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens [offset, offset + length) of one document, int64 [length]; None: to the end."""
        total = int(self.lengths[sequence])
        end = total if length is None else offset + length
        if not 0 <= offset <= end <= total:
            raise IndexError(f"tokens [{offset}, {end}) of mock document {sequence}: it has {total} tokens")
        tokens = np.arange(offset + 1, end + 1) % self.vocab_size
        if end == total and end > offset and self.eod_id is not None:
            tokens[-1] = self.eod_id
        return tokens
