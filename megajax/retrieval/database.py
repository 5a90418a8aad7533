"""A database as a function of chunks that are not in a file: for queries, and for a model that generates."""

import os
from collections.abc import Sequence

import numpy as np

from megajax.data.indexed.neighbours import NO_CHUNK, ChunkGrid, NeighbourTable
from megajax.inference.shapes import power_of_two
from megajax.retrieval.build import Embedder, embedded, hash_embedder
from megajax.retrieval.inputs import NO_TOKEN, NeighbourInputs
from megajax.retrieval.search import NO_DOCUMENT, NO_ROW, ExactIndex
from megajax.retrieval.text_embedder import TextEmbedder


class Database:
    """Attributes: `grid`, the chunks of its dataset; `inputs`, what `neighbours_of` returns."""

    def __init__(self, grid: ChunkGrid, documents: tuple[int, int], embedder: Embedder, inputs: NeighbourInputs):
        """documents: (begin, end), those of the dataset that are in the database. Searches exactly."""
        self.grid = grid
        self.inputs = inputs
        self._embedder = embedder
        self._first, last = grid.first[list(documents)].tolist()
        vectors = embedded(grid, embedder).array(self._first, last)
        self._index = ExactIndex(vectors, grid.documents(np.arange(self._first, last)))

    @classmethod
    def open(cls, prefix: str | os.PathLike, inputs: NeighbourInputs = NeighbourInputs()) -> "Database":
        """The database of `prefix.neighbours`, with its embedder. Raises ValueError if it is missing or damaged."""
        table = NeighbourTable(prefix)
        if table.database.chunk_length != inputs.chunk_length:
            raise ValueError(
                f"retrieval: {prefix} has chunks of {table.database.chunk_length} tokens, the model reads chunks of "
                f"{inputs.chunk_length}; build it again: megajax retrieve build {prefix} "
                f"--chunk_length={inputs.chunk_length}"
            )
        facts = table.facts["embedder"]
        if facts["kind"] == "hash":
            embedder: Embedder = hash_embedder(table.database, table.documents)
        else:
            embedder = TextEmbedder(facts["model"], table.database.indexed.prefix)
        return cls(table.database, table.documents, embedder, inputs)

    def nearest(self, chunks: Sequence[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
        """chunks: int32 [up to chunk_length] each -> (scores float32, chunks int64 of `grid`) [n, count], NO_CHUNK
        where there are no more."""
        padded = np.full((power_of_two(len(chunks)), self.grid.chunk_length), NO_TOKEN, np.int32)
        for row, chunk in enumerate(chunks):
            padded[row, : len(chunk)] = chunk
        scores, rows = self._index.search(self._embedder.embed(padded), np.full(len(padded), NO_DOCUMENT), count)
        found = np.where(rows == NO_ROW, NO_CHUNK, rows + self._first)
        return scores[: len(chunks)], found[: len(chunks)]

    def neighbours_of(self, chunks: Sequence[np.ndarray]) -> np.ndarray:
        """chunks: int32 [up to chunk_length] each -> int32 [n, inputs.count, inputs.length], as neighbour_tokens of a
        sample: the nearest chunks and what follows them in their documents, then NO_TOKEN."""
        _, found = self.nearest(chunks, self.inputs.count)
        return self.grid.tokens(found, self.inputs.length)
