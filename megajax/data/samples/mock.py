"""Megatron's mock data: 100,000 documents that count 1, 2, 3, ... and end in the end-of-document token.

No file is needed, and the documents equal those of Megatron's MockGPTLowLevelDataset, so loss curves can be compared.
Source: Megatron-LM, megatron/core/datasets/gpt_dataset.py. Conversations, for fine-tuning, are short, and about one
image of random pixels each if the model reads images.
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


# Heights and widths of images.
SIZES = ((480, 640), (640, 480), (336, 336), (768, 1024))
NUM_CONVERSATIONS = 20_000


class MockConversations:
    """Same interface as IndexedDataset: conversations of a question, 4 to 16 tokens, and an answer, 4 to 12 tokens, the
    last of them eod_id. images: None, or with an image token those that the questions begin with. reserved: ids that no
    text has."""

    prefix = "mock conversations"
    dtype = np.dtype(np.int64)

    def __init__(
        self, vocab_size: int, eod_id: int | None, image_token: int | None = None, reserved: tuple[int, ...] = ()
    ):
        self._arguments = vocab_size, eod_id, image_token, reserved
        rng = np.random.default_rng(SEED)
        questions = rng.integers(4, 17, NUM_CONVERSATIONS, dtype=np.int32)
        answers = rng.integers(4, 13, NUM_CONVERSATIONS, dtype=np.int32)
        self.lengths = np.stack([questions, answers], 1).reshape(-1)
        self.document_indices = 2 * np.arange(NUM_CONVERSATIONS + 1, dtype=np.int64)
        self.images = None if image_token is None else MockImages(rng.integers(0, len(SIZES), NUM_CONVERSATIONS))

    def __len__(self) -> int:
        return 2 * NUM_CONVERSATIONS

    def __reduce__(self):
        return type(self), self._arguments

    def fingerprint(self) -> str:
        return f"{self.prefix} of {self._arguments}"

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """As IndexedDataset.read."""
        vocab_size, eod_id, image_token, reserved = self._arguments
        tokens = np.random.default_rng((SEED, sequence)).integers(0, vocab_size, int(self.lengths[sequence]))
        tokens[np.isin(tokens, reserved)] = next(token for token in range(vocab_size) if token not in reserved)
        if sequence % 2 == 0 and image_token is not None:
            tokens[0] = image_token
        if sequence % 2 == 1 and eod_id is not None:
            tokens[-1] = eod_id
        return tokens[offset : None if length is None else offset + length]


class MockImages:
    """Same interface as ImageTable, an image a document."""

    def __init__(self, kinds: np.ndarray):
        """kinds: int [images], numbers of SIZES."""
        self.first = np.arange(len(kinds) + 1, dtype=np.int64)
        self.sizes = np.array(SIZES, np.int32)[kinds]

    def name(self, i: int) -> str:
        return f"mock image {i}"

    def fingerprint(self) -> str:
        return "mock images"

    def read(self, i: int) -> bytes:
        height, width = self.sizes[i].tolist()
        pixels = np.random.default_rng((SEED, i)).integers(0, 256, (height, width, 3), np.uint8)
        return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()
