"""Nearest vectors by inner product: exact, in blocks on a device of JAX, or an index of faiss.

Dimensions: Q queries, N vectors, W their width, K results, R vectors of a block.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 8192
NO_ROW = -1
NO_DOCUMENT = -1
# Cells of an inverted file that a query visits, and vectors a cell from which faiss learns it.
NUM_PROBES = 32
TRAINING_VECTORS = 256
FAISS_ROWS = 1 << 18


class VectorIndex(Protocol):
    def search(self, queries_QW: np.ndarray, documents_Q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (scores float32, rows int32) [Q, count], the nearest first, none of the document of the query (NO_DOCUMENT
        if it has none); NO_ROW where there are no more."""


class ExactIndex:
    """vectors: float16 [N, W]; documents: int [N], that of each. N * W * 2 bytes of device memory."""

    def __init__(self, vectors: np.ndarray, documents: np.ndarray):
        padding = -len(vectors) % BLOCK
        self._vectors = jnp.asarray(np.pad(vectors, ((0, padding), (0, 0)))).reshape(-1, BLOCK, vectors.shape[1])
        self._documents = jnp.asarray(np.pad(documents.astype(np.int32), (0, padding))).reshape(-1, BLOCK)
        self._count = len(vectors)

    def search(self, queries_QW: np.ndarray, documents_Q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        found = _search(
            jnp.asarray(queries_QW), jnp.asarray(documents_Q, jnp.int32), self._vectors, self._documents, self._count,
            count=count,
        )  # fmt: skip
        scores, rows = jax.device_get(found)
        return scores, np.where(np.isneginf(scores), NO_ROW, rows)


@functools.partial(jax.jit, static_argnames="count")
def _search(queries_QW, documents_Q, vectors_BRW, documents_BR, num_vectors, *, count: int):
    def merge(best, block):
        scores_QK, rows_QK = best
        number, vectors_RW, documents_R = block
        scores_QR = jax.lax.dot_general(
            queries_QW, vectors_RW, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        rows_R = number * BLOCK + jnp.arange(BLOCK)
        allowed_QR = (rows_R < num_vectors) & (documents_R != documents_Q[:, None])
        scores, chosen = jax.lax.top_k(jnp.where(allowed_QR, scores_QR, -jnp.inf), min(count, BLOCK))
        # of equal scores the lower row comes first, as in one sort of all
        scores, places = jax.lax.top_k(jnp.concatenate([scores_QK, scores], axis=1), count)
        return (scores, jnp.take_along_axis(jnp.concatenate([rows_QK, rows_R[chosen]], axis=1), places, axis=1)), None

    shape = len(queries_QW), count
    start = jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, NO_ROW, jnp.int32)
    numbers = jnp.arange(len(vectors_BRW), dtype=jnp.int32)
    return jax.lax.scan(merge, start, (numbers, vectors_BRW, documents_BR))[0]


def loaded_faiss(spec: str) -> Any:
    try:
        import faiss
    except ImportError:
        raise ValueError(f"--index={spec} needs the package faiss; pip install 'megajax[retrieval]'") from None
    return faiss


class FaissIndex:
    """As ExactIndex, with an index of faiss, such as IVF4096,PQ32 (its index_factory): less memory and time, some
    neighbours missed. Raises ValueError if the package is missing or does not know the index."""

    def __init__(self, spec: str, vectors: np.ndarray, documents: np.ndarray):
        faiss = loaded_faiss(spec)
        self._documents = documents
        try:
            self._index = faiss.index_factory(vectors.shape[1], spec, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError:
            raise ValueError(f"--index={spec} is no index of faiss; write for example IVF4096,PQ32") from None
        inverted = faiss.try_extract_index_ivf(self._index)
        cells = 1024 if inverted is None else inverted.nlist
        if len(vectors) < cells:
            raise ValueError(f"--index={spec} has more cells than the {len(vectors)} chunks; use fewer, or no index")
        step = max(1, len(vectors) // (TRAINING_VECTORS * cells))
        self._index.train(vectors[::step].astype(np.float32))
        for begin in range(0, len(vectors), FAISS_ROWS):
            self._index.add(vectors[begin : begin + FAISS_ROWS].astype(np.float32))
        if inverted is not None:
            inverted.nprobe = NUM_PROBES

    def search(self, queries_QW: np.ndarray, documents_Q: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        # those of its own document are most often the nearest, and dropped
        scores, rows = self._index.search(queries_QW.astype(np.float32), 2 * count)
        dropped = (rows == NO_ROW) | (self._documents[rows] == documents_Q[:, None])
        order = np.argsort(dropped, axis=1, kind="stable")[:, :count]
        rows = np.take_along_axis(np.where(dropped, NO_ROW, rows), order, axis=1).astype(np.int32)
        scores = np.take_along_axis(np.where(dropped, -np.inf, scores), order, axis=1)
        return scores, rows
