"""Builds `PREFIX.embeddings`, a vector of each chunk, and `PREFIX.neighbours` (data/indexed/neighbours.py) from them.

The database is the training documents, by the split of the run, of the same or of another prefix. Neighbours are never
of the document of the chunk, nor copies of the text that they are for: see MAX_OVERLAP. Both files are written block by
block, and a build that was killed goes on with the next one.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from megajax.data.indexed.blocks import BlockFile, write_blocks
from megajax.data.indexed.dataset import IndexedDataset, prefix_of
from megajax.data.indexed.neighbours import NO_CHUNK, NUM_KEPT, ChunkGrid, neighbours_path
from megajax.data.samples.gpt import split_ranges
from megajax.retrieval.hash_embedder import HashEmbedder
from megajax.retrieval.inputs import NeighbourInputs
from megajax.retrieval.overlap import GRAM, overlaps
from megajax.retrieval.search import NO_DOCUMENT, NO_ROW, ExactIndex, FaissIndex, VectorIndex, loaded_faiss
from megajax.terminal.announce import announced

CHUNK_LENGTH = NeighbourInputs().chunk_length
WHOLE = (1.0, 0.0, 0.0)
MAX_OVERLAP = 0.5
"""A neighbour is a copy if, with what follows it, it has more than this share of the 13-grams of the chunk, or of those
that end in the next chunk: by default more than half, so that a quotation is none. All neighbours from a document with
a copy are dropped, since other chunks of it may be copies of what comes later."""
# Of which NUM_KEPT are left, if as many overlap less.
NUM_CANDIDATES = 2 * NUM_KEPT
BLOCK_ROWS = 1 << 16
# Chunks that are searched for at a time; also the shape of programs.
NUM_QUERIES = 1024


class Embedder(Protocol):
    facts: dict[str, Any]
    """JSON values that determine the vectors."""
    width: int

    def embed(self, chunks: np.ndarray) -> np.ndarray:
        """int32 [n, chunk_length], NO_TOKEN for padding -> float16 [n, width] of length 1."""


def build(
    prefix: str,
    *,
    split: Sequence[float],
    database: str | None = None,
    chunk_length: int = CHUNK_LENGTH,
    embedder: Embedder | None = None,
    max_overlap: float = MAX_OVERLAP,
    index: str = "",
    block_rows: int = BLOCK_ROWS,
) -> None:
    """Writes `prefix.neighbours`, unless it is there and intact.

    split: shares of training, evaluation and test documents of the database (data.split). database: its prefix; None:
    `prefix`. embedder: None: HashEmbedder of the database. index: of faiss (search.py FaissIndex); empty: exact.
    """
    if index:
        loaded_faiss(index)  # chunks may take hours to embed before it is needed
    prefix = prefix_of(prefix)
    database = prefix_of(database or prefix)
    grid = ChunkGrid(IndexedDataset(prefix), chunk_length)
    is_own = os.path.realpath(prefix) == os.path.realpath(database)
    source = grid if is_own else ChunkGrid(IndexedDataset(database), chunk_length)
    documents = split_ranges(split, len(source.indexed))[0] or (0, 0)
    first, last = source.first[list(documents)].tolist()
    if first == last or not len(grid):
        raise ValueError(f"split={tuple(split)} leaves no text of {database} to find neighbours in for {prefix}")
    if len(source) > np.iinfo(np.int32).max:
        raise ValueError(f"{database} has {len(source):,} chunks, more than int32 numbers; use a longer chunk_length")
    embedder = embedder or hash_embedder(source, documents)

    @functools.cache
    def prepared() -> tuple[np.ndarray, VectorIndex]:
        queries = embedded(grid, embedder, block_rows)
        vectors = queries if is_own else embedded(source, embedder, block_rows)
        with announced("indexing the database"):
            of_database = vectors.array(first, last), source.documents(np.arange(first, last))
            return queries.array(0, len(grid)), FaissIndex(index, *of_database) if index else ExactIndex(*of_database)

    def nearest(begin: int, end: int) -> np.ndarray:
        """-> int32 [end - begin, NUM_KEPT]. All programs have the same shapes: rows of padding are cut off."""
        queries, searched = prepared()
        chunks = np.full(NUM_QUERIES, NO_CHUNK)
        chunks[: end - begin] = np.arange(begin, end)
        own = grid.documents(chunks) if is_own else np.full(NUM_QUERIES, NO_DOCUMENT)
        _, rows = searched.search(queries[chunks], own, NUM_CANDIDATES)
        found = np.where(rows == NO_ROW, NO_CHUNK, rows + first)
        copies = _shares(grid.tokens(chunks, 2 * chunk_length), source.tokens(found, 2 * chunk_length)) > max_overlap
        copied = np.where(copies, source.documents(found), NO_DOCUMENT)
        dropped = (source.documents(found)[..., None] == copied[:, None]).any(axis=2)
        found = np.where(dropped, NO_CHUNK, found)
        order = np.argsort(found == NO_CHUNK, axis=1, kind="stable")[:, :NUM_KEPT]
        return np.take_along_axis(found, order, axis=1)[: end - begin].astype(np.int32)

    def compute(begin: int, end: int) -> np.ndarray:
        return np.concatenate([nearest(at, min(at + NUM_QUERIES, end)) for at in range(begin, end, NUM_QUERIES)])

    facts = {
        "chunk_length": chunk_length,
        "database": os.path.relpath(database, os.path.dirname(prefix) or "."),
        "documents": list(documents),
        "fingerprint": grid.indexed.fingerprint(),
        "database_fingerprint": source.indexed.fingerprint(),
        "embedder": embedder.facts,
        "max_overlap": max_overlap,
        "index": index,
    }
    with announced(f"finding neighbours of {len(grid):,} chunks of {prefix}"):
        write_blocks(neighbours_path(prefix), facts, (len(grid), NUM_KEPT), "<i4", compute, block_rows)


def hash_embedder(source: ChunkGrid, documents: tuple[int, int]) -> HashEmbedder:
    """Of a database: these documents of a dataset."""

    def parts() -> Iterator[np.ndarray]:
        first, last = source.first[list(documents)].tolist()
        for begin in range(first, last, BLOCK_ROWS):
            yield source.tokens(np.arange(begin, min(begin + BLOCK_ROWS, last)), source.chunk_length)

    return HashEmbedder(parts, {"database": source.indexed.fingerprint(), "documents": list(documents)})


def embedded(grid: ChunkGrid, embedder: Embedder, block_rows: int = BLOCK_ROWS) -> BlockFile:
    """`PREFIX.embeddings`, float16 [chunks, width], which is built unless it is there and intact."""

    def compute(begin: int, end: int) -> np.ndarray:
        return embedder.embed(grid.tokens(np.arange(begin, end), grid.chunk_length))

    path = grid.indexed.prefix + ".embeddings"
    facts = {
        "chunk_length": grid.chunk_length,
        "fingerprint": grid.indexed.fingerprint(),
        "embedder": embedder.facts,
    }
    with announced(f"embedding {len(grid):,} chunks of {grid.indexed.prefix}"):
        write_blocks(path, facts, (len(grid), embedder.width), "<f2", compute, block_rows)
    return BlockFile(path)


def _shares(texts: np.ndarray, neighbours: np.ndarray) -> np.ndarray:
    """texts: int32 [Q, 2 m], chunks of m tokens and what follows; neighbours: int32 [Q, K, 2 m] -> float32 [Q, K], the
    larger of the shares of 13-grams of the chunk and of those that end in what follows it."""
    length = texts.shape[1] // 2
    of_chunk = overlaps(texts[:, :length], neighbours)
    of_next = overlaps(texts[:, max(length - GRAM + 1, 0) :], neighbours)
    return np.maximum(*jax.device_get((of_chunk, of_next)))
