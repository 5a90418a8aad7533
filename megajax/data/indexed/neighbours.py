"""`PREFIX.neighbours`: of each chunk of the documents of `PREFIX.bin` its nearest chunks in a database.

A database is the training documents of a dataset, of the same or of another prefix. Each document, of one sequence, is
cut into consecutive chunks of the same number of tokens, of which the last may be shorter. Chunks are numbered through
the file, so they do not depend on seed, sequence length or blend of a run. The file (data/indexed/blocks.py) has a row
of NUM_KEPT int32 for each chunk: numbers of chunks of the database, the nearest first, never of the same document, and
NO_CHUNK where there are fewer. megajax/retrieval/build.py writes it.
"""

import os
from typing import Any

import numpy as np

from megajax.data.indexed.blocks import REBUILD, BlockFile
from megajax.data.indexed.dataset import IndexedDataset, prefix_of
from megajax.retrieval.inputs import NO_TOKEN

NUM_KEPT = 20
NO_CHUNK = -1


class ChunkGrid:
    """Chunk c of a dataset is tokens [begin, begin + chunk_length) of a document, or up to its end; all from its .idx.

    Attributes: `first` int64 [documents + 1], the number of the first chunk of each document; len: chunks.
    """

    def __init__(self, indexed: IndexedDataset, chunk_length: int):
        if len(indexed.document_indices) != len(indexed) + 1 or (np.diff(indexed.document_indices) != 1).any():
            raise ValueError(
                f"retrieval: documents of {indexed.prefix}.idx have several sequences, and neighbours are those of "
                "whole documents; preprocess the text again without --split_sentences and --conversations"
            )
        self.indexed = indexed
        self.chunk_length = chunk_length
        lengths = indexed.lengths.astype(np.int64)
        self._ends = np.cumsum(lengths)
        self._begins = self._ends - lengths
        self.first = np.concatenate([[0], np.cumsum(-(-lengths // chunk_length))])

    def __len__(self) -> int:
        return int(self.first[-1])

    def documents(self, chunks: np.ndarray) -> np.ndarray:
        """The document of each chunk, int64."""
        return np.searchsorted(self.first, chunks, side="right") - 1

    def tokens(self, chunks: np.ndarray, length: int) -> np.ndarray:
        """Each chunk and what follows it in its document, in all `length` tokens, and then NO_TOKEN: int32 [...,
        length]. NO_CHUNK: NO_TOKEN alone."""
        documents = self.documents(np.maximum(chunks, 0))
        begins = self._begins[documents] + (chunks - self.first[documents]) * self.chunk_length
        places = begins[..., None] + np.arange(length)
        found = (places < self._ends[documents][..., None]) & (chunks != NO_CHUNK)[..., None]
        tokens = self.indexed.flat()[np.where(found, places, 0)].astype(np.int32)
        return np.where(found, tokens, NO_TOKEN)

    def last_complete(self, document: int, offset: int) -> int:
        """The latest chunk of a document that ends with its token `offset`, or before; NO_CHUNK: none does."""
        if offset + 1 == self.indexed.lengths[document]:
            return int(self.first[document + 1]) - 1
        number = (offset + 1) // self.chunk_length
        return int(self.first[document]) + number - 1 if number else NO_CHUNK


def neighbours_path(prefix: str | os.PathLike) -> str:
    return prefix_of(prefix) + ".neighbours"


class NeighbourTable:
    """Reader of `PREFIX.neighbours`.

    Attributes: `grid` of the dataset; `database`, the grid of the dataset whose `documents` (begin, end) are the
    database; `is_own`, whether that is the same dataset; `facts` of the writer.

    Raises ValueError, naming the file, if it does not exist or is damaged, or belongs to other tokens.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = prefix_of(prefix)
        self._file = BlockFile(neighbours_path(prefix))
        self.facts: dict[str, Any] = self._file.facts
        of_database = os.path.join(os.path.dirname(self.prefix), self.facts["database"])
        self.is_own = self.facts["database"] == os.path.basename(self.prefix)
        self.grid = self._grid(self.prefix, "fingerprint")
        self.database = self.grid if self.is_own else self._grid(of_database, "database_fingerprint")
        self.documents: tuple[int, int] = tuple(self.facts["documents"])

    def _grid(self, prefix: str, fact: str) -> ChunkGrid:
        indexed = IndexedDataset(prefix)
        if indexed.fingerprint() != self.facts[fact]:
            raise ValueError(f"retrieval: {self._file.path} was built for another {prefix}.bin; {REBUILD}")
        return ChunkGrid(indexed, self.facts["chunk_length"])

    def fingerprint(self) -> str:
        return self._file.fingerprint()

    def __getitem__(self, chunks: np.ndarray) -> np.ndarray:
        """chunks: int [n] of `grid`, or NO_CHUNK -> int32 [n, NUM_KEPT] of `database`."""
        found = np.full((len(chunks), NUM_KEPT), NO_CHUNK, np.int32)
        exists = chunks != NO_CHUNK
        found[exists] = self._file.read(chunks[exists])
        return found
