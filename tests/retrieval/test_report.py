"""The report scores whole chunks, and counts what their neighbours give away."""

import numpy as np

from megajax.retrieval import report
from megajax.retrieval.inputs import NO_TOKEN


def test_a_chunk_is_scored_by_its_own_tokens():
    """Of chunks of 4 tokens the second is tokens 4 to 7, the labels of places 3 to 6."""
    loss = np.arange(12.0)[None]
    np.testing.assert_array_equal(report.by_chunk(loss, 4), [[np.mean([3, 4, 5, 6]), np.mean([7, 8, 9, 10])]])


def test_overlaps_are_those_with_the_neighbours_of_the_chunk_before():
    """The second chunk of 16 tokens is a copy of a neighbour of the first, but for its beginning."""
    tokens = np.arange(48, dtype=np.int32)[None]
    neighbours = np.full((1, 3, 2, 32), NO_TOKEN, np.int32)
    neighbours[0, 0, 1, :24] = np.arange(8, 32)  # tokens 8 to 31: 12 of the 16 13-grams that end in the second chunk
    neighbours[0, 1, 0, :24] = np.arange(100, 124)
    np.testing.assert_allclose(report.chunk_overlaps(tokens, neighbours, 16), [[12 / 16, 0.0]])


def test_rows_are_means_of_buckets():
    arrays = {"overlap": np.array([0, 0, 0.04, 0.5, 0.9]), "own": np.array([1.0, 3, 5, 7, 9])}
    rows = report.rows_of(arrays)
    assert [row["chunks"] for row in rows] == [2, 1, 0, 2, 5]
    assert [row.get("own") for row in rows] == [2.0, 5.0, None, 8.0, 5.0]
