"""The neighbours of the chunks of a dataset: the nearest ones, and never those that may not be read."""

import subprocess
import sys

import numpy as np
import pytest

from megajax.data.indexed.blocks import BlockFile, write_blocks
from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.indexed.neighbours import NO_CHUNK, NUM_KEPT, ChunkGrid, NeighbourTable
from megajax.retrieval.build import WHOLE, build
from megajax.retrieval.hash_embedder import HashEmbedder
from megajax.retrieval.inputs import NO_TOKEN
from megajax.retrieval.overlap import overlaps
from megajax.retrieval.search import NO_DOCUMENT, NO_ROW, ExactIndex, FaissIndex

RNG = np.random.default_rng(0)


def write(prefix, documents) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document([np.asarray(document)])
    return str(prefix)


def table_of(prefix, **options) -> NeighbourTable:
    build(prefix, **dict(split=WHOLE, chunk_length=8) | options)
    return NeighbourTable(prefix)


def documents_of(table: NeighbourTable, document: int) -> set[int]:
    """Of the neighbours of the chunks of a document."""
    found = table[np.arange(*table.grid.first[[document, document + 1]])]
    return set(table.database.documents(found[found != NO_CHUNK]).tolist())


# ----------------------------------------------------------------------------- the grid


def test_the_grid_cuts_documents_into_chunks_and_copies_nothing(tmp_path):
    prefix = write(tmp_path / "x", [range(10), [], range(100, 108), range(200, 203)])
    grid = ChunkGrid(IndexedDataset(prefix), 4)
    assert grid.first.tolist() == [0, 3, 3, 5, 6]
    assert grid.documents(np.arange(6)).tolist() == [0, 0, 0, 2, 2, 3]
    tokens = grid.tokens(np.array([0, 2, 3, 5, NO_CHUNK]), 6)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [8, 9, *[NO_TOKEN] * 4],  # and not what the next document begins with
        [100, 101, 102, 103, 104, 105],
        [200, 201, 202, *[NO_TOKEN] * 3],
        [NO_TOKEN] * 6,
    ]
    # tokens 0 to 9 of document 0: its chunks end with tokens 3, 7 and 9
    assert [grid.last_complete(0, offset) for offset in range(10)] == [NO_CHUNK] * 3 + [0] * 4 + [1] * 2 + [2]
    assert [grid.last_complete(2, offset) for offset in (2, 3, 7)] == [NO_CHUNK, 3, 4]


def test_documents_of_several_sequences_are_refused(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([np.arange(3), np.arange(3)])
    with pytest.raises(ValueError, match="several sequences.*without --split_sentences"):
        build(str(tmp_path / "x"), split=WHOLE)


# ----------------------------------------------------------------------------- what is found


def test_exact_search_equals_a_sort_of_all_scores():
    """Small integers, so that scores are exact and many are equal: of those the lower row comes first."""
    vectors = RNG.integers(-2, 3, (10_000, 16)).astype(np.float16)  # two blocks
    documents = RNG.integers(0, 50, len(vectors))
    queries = RNG.integers(-2, 3, (32, 16)).astype(np.float16)
    own = np.where(np.arange(32) < 16, np.arange(32), NO_DOCUMENT)
    scores, rows = ExactIndex(vectors, documents).search(queries, own, 30)
    want = queries.astype(np.float32) @ vectors.astype(np.float32).T
    want[documents == own[:, None]] = -np.inf
    order = np.argsort(-want, axis=1, kind="stable")[:, :30]
    assert np.array_equal(rows, order)
    assert np.array_equal(scores, np.take_along_axis(want, order, axis=1))


def test_a_small_database_gives_fewer():
    vectors = np.eye(3, 4, dtype=np.float16)
    _, rows = ExactIndex(vectors, np.array([0, 0, 1])).search(vectors, np.array([0, 1, NO_DOCUMENT]), 4)
    assert rows.tolist() == [[2, *[NO_ROW] * 3], [1, 0, NO_ROW, NO_ROW], [2, 0, 1, NO_ROW]]


def test_chunks_with_the_same_rare_tokens_are_near():
    """All chunks have the same frequent tokens; that of row i has rare ones of row i + 10 too."""
    rare = RNG.permutation(1000)[:40].reshape(10, 4)
    chunks = np.concatenate([np.concatenate([rare, np.tile([1001, 1002, 1003], (10, 1))], axis=1)] * 2).astype(np.int32)
    chunks[10:, 5] = NO_TOKEN
    vectors = HashEmbedder(lambda: [chunks], {}).embed(chunks)
    assert vectors.dtype == np.float16
    np.testing.assert_allclose(np.linalg.norm(vectors.astype(np.float64), axis=1), 1, rtol=1e-3)
    scores = vectors[:10].astype(np.float32) @ vectors[10:].astype(np.float32).T
    assert np.array_equal(scores.argmax(1), np.arange(10))
    assert np.diag(scores).min() > 0.7 > 0.3 > (scores - 2 * np.eye(10)).max()  # noise: 1 / sqrt(384)
    assert not HashEmbedder(lambda: [chunks], {}).embed(np.full((1, 7), NO_TOKEN, np.int32)).any()


def test_neighbours_are_the_nearest_chunks_of_other_documents(tmp_path):
    documents = [RNG.integers(0, 40, RNG.integers(1, 60)) for _ in range(30)]
    prefix = write(tmp_path / "x", documents)
    table = table_of(prefix)
    grid = table.grid
    chunks = np.arange(len(grid))
    vectors = BlockFile(prefix + ".embeddings").array(0, len(grid)).astype(np.float32)
    scores = vectors @ vectors.T
    scores[grid.documents(chunks)[:, None] == grid.documents(chunks)] = -np.inf
    found = table[chunks]
    assert found.shape == (len(grid), NUM_KEPT)
    # 1e-6: sums of 384 products in another order
    want = -np.sort(-scores, axis=1)[:, :NUM_KEPT]
    np.testing.assert_allclose(np.take_along_axis(scores, found, axis=1), want, atol=1e-6)


def test_only_training_documents_are_in_the_database(tmp_path):
    """Document 9 is to be evaluated on, and would be the nearest of document 0."""
    documents = [RNG.integers(0, 30_000, 24) for _ in range(10)]
    documents[9][::2] = documents[0][::2]
    prefix = write(tmp_path / "x", documents)
    assert 9 in documents_of(table_of(prefix), 0)
    table = table_of(prefix, split=(8, 2, 0))
    assert table.documents == (0, 8)
    assert documents_of(table, 0) and all(max(documents_of(table, document)) < 8 for document in range(10))


def test_never_its_own_document(tmp_path):
    """Every document repeats itself, so that its own chunks are the nearest by far."""
    prefix = write(tmp_path / "x", [np.tile(RNG.integers(0, 60_000, 8), 4) for _ in range(5)])
    table = table_of(prefix)
    assert all(documents_of(table, document) == set(range(5)) - {document} for document in range(5))


@pytest.mark.parametrize("shift", [0, 5, 32])
def test_documents_with_copies_are_dropped(shift, tmp_path):
    """A copy of a document without its beginning: without 32 tokens the first chunk itself is not copied."""
    documents = [RNG.integers(0, 60_000, 160) for _ in range(4)]
    documents[3] = documents[0][shift:]
    prefix = write(tmp_path / "x", documents)
    options = dict(chunk_length=32)
    assert documents_of(table_of(prefix, max_overlap=1.0, **options), 0) == {1, 2, 3}
    assert documents_of(table_of(prefix, **options), 0) == {1, 2}
    # tokens in common are not yet a copy
    documents[3] = RNG.permutation(documents[0])
    assert documents_of(table_of(write(tmp_path / "x", documents), **options), 0) == {1, 2, 3}


def test_overlaps_count_grams_of_13():
    texts = RNG.integers(0, 2, (6, 40)).astype(np.int32)
    neighbours = RNG.integers(0, 2, (6, 3, 40)).astype(np.int32)
    neighbours[:, 1, 5:30] = texts[:, 3:28]
    neighbours[:, 2, 20:] = NO_TOKEN
    texts[2, 20:] = texts[3, 5:] = NO_TOKEN  # the latter has no gram

    def grams(tokens):
        parts = [tuple(tokens[i : i + 13]) for i in range(len(tokens) - 12)]
        return [part for part in parts if NO_TOKEN not in part]

    def share(text, neighbour):
        known = set(grams(neighbour))
        return np.mean([gram in known for gram in grams(text)] or [0])

    want = [
        [share(text.tolist(), near.tolist()) for near in rows] for text, rows in zip(texts, neighbours, strict=True)
    ]
    assert max(want[0]) > 0.4 and max(want[3]) == 0
    np.testing.assert_allclose(overlaps(texts, neighbours), want, rtol=1e-6)


def test_another_dataset_may_be_the_database(tmp_path):
    texts = [RNG.integers(0, 60_000, 20) for _ in range(3)]
    database = write(tmp_path / "database", texts)
    (tmp_path / "other").mkdir()
    prefix = write(tmp_path / "other" / "x", [RNG.permutation(text) for text in texts])
    table = table_of(prefix, database=database)
    assert not table.is_own and len(table.database) == 9
    first = table[np.arange(len(table.grid))][:, 0]
    assert np.array_equal(table.database.documents(first), table.grid.documents(np.arange(len(table.grid))))


# ----------------------------------------------------------------------------- files


class Killed(Exception):
    pass


class Mortal(HashEmbedder):
    """Dies after some calls."""

    lives = 100

    def embed(self, chunks):
        if not self.lives:
            raise Killed
        self.lives -= 1
        return super().embed(chunks)


def test_a_killed_build_goes_on_at_the_next_block_and_gives_identical_bytes(tmp_path):
    documents = [RNG.integers(0, 90, 50) for _ in range(10)]
    names = [write(tmp_path / name / "x", documents) for name in "ab"]
    chunks = ChunkGrid(IndexedDataset(names[0]), 8).tokens(np.arange(70), 8)
    options = dict(split=WHOLE, chunk_length=8, block_rows=16)  # 5 blocks
    build(names[0], embedder=Mortal(lambda: [chunks], {}), **options)
    mortal = Mortal(lambda: [chunks], {})
    mortal.lives = 2
    with pytest.raises(Killed):
        build(names[1], embedder=mortal, **options)
    assert not (tmp_path / "b" / "x.embeddings").exists()
    mortal.lives = 3  # what is left
    build(names[1], embedder=mortal, **options)
    assert mortal.lives == 0
    for part in ("embeddings", "neighbours"):
        one, other = (tmp_path / name / f"x.{part}" for name in "ab")
        assert one.read_bytes() == other.read_bytes(), part
    assert not list(tmp_path.glob("*/*.partial"))


def test_a_block_that_was_not_written_whole_is_computed_again(tmp_path):
    """The process is killed in the middle of block 1, and block 0 is damaged meanwhile."""
    path = str(tmp_path / "x")
    program = f"""
import os, signal
import numpy as np
from megajax.data.indexed.blocks import write_blocks
def compute(begin, end):
    if begin:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.full((end - begin, 2), begin)
write_blocks({path!r}, {{"a": 1}}, (10, 2), "<i4", compute, 4)
"""
    killed = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert killed.returncode == -9 and not (tmp_path / "x").exists()
    computed = []

    def compute(begin, end):
        computed.append(begin)
        return np.full((end - begin, 2), begin)

    partial = bytearray((tmp_path / "x.partial").read_bytes())
    partial[4096 + 3 * 32 + 5] ^= 1
    (tmp_path / "x.partial").write_bytes(partial)
    write_blocks(path, {"a": 1}, (10, 2), "<i4", compute, 4)
    assert computed == [0, 4, 8]
    assert BlockFile(path).array(0, 10)[:, 0].tolist() == [0] * 4 + [4] * 4 + [8] * 2
    write_blocks(path, {"a": 1}, (10, 2), "<i4", compute, 4)
    assert computed == [0, 4, 8]
    write_blocks(path, {"a": 2}, (10, 2), "<i4", compute, 4)  # other facts: from the start
    assert computed == [0, 4, 8] * 2


def test_a_damaged_block_is_refused_when_it_is_read_and_repaired_by_a_build(tmp_path):
    prefix = write(tmp_path / "x", [RNG.integers(0, 90, 50) for _ in range(4)])
    table_of(prefix, block_rows=16)
    path = tmp_path / "x.neighbours"
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + b"\x07")
    table = NeighbourTable(prefix)
    assert (table[np.arange(16)] != NO_CHUNK).any()
    with pytest.raises(ValueError, match="^retrieval: .*x.neighbours is damaged: rows 16 to 28 .* retrieve build$"):
        table[np.arange(28)]
    table_of(prefix, block_rows=16)
    assert path.read_bytes() == intact
    path.write_bytes(intact[:-80])
    with pytest.raises(ValueError, match=r"x.neighbours is damaged: it has \d+ bytes"):
        NeighbourTable(prefix)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="x.neighbours is damaged: it has no header"):
        NeighbourTable(prefix)


def test_other_tokens_than_those_of_the_build_are_refused(tmp_path):
    prefix = write(tmp_path / "x", [RNG.integers(0, 90, 50) for _ in range(4)])
    table_of(prefix)
    write(prefix, [RNG.integers(0, 90, 50) for _ in range(4)])
    with pytest.raises(ValueError, match="x.neighbours was built for another .*x.bin; build it again"):
        NeighbourTable(prefix)


# ----------------------------------------------------------------------------- faiss


def test_without_faiss_an_index_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    prefix = write(tmp_path / "x", [RNG.integers(0, 90, 50) for _ in range(4)])
    with pytest.raises(ValueError, match=r"--index=Flat needs the package faiss; pip install 'megajax\[retrieval\]'"):
        build(prefix, split=WHOLE, index="Flat")


def test_an_index_of_faiss_finds_what_exact_search_finds():
    pytest.importorskip("faiss")
    vectors = RNG.standard_normal((2000, 16)).astype(np.float16)
    documents = np.arange(2000) // 4
    exact, _ = ExactIndex(vectors, documents).search(vectors[:100], documents[:100], 10)
    flat, rows = FaissIndex("Flat", vectors, documents).search(vectors[:100], documents[:100], 10)
    np.testing.assert_allclose(flat, exact, rtol=1e-5)
    assert (documents[rows] != documents[:100, None]).all()
    near, rows = FaissIndex("IVF8,Flat", vectors, documents).search(vectors[:100], documents[:100], 10)
    np.testing.assert_allclose(near, exact, rtol=1e-5)  # it visits all of the 8 cells
    for spec, words in (("Nonsense", "is no index of faiss"), ("IVF4096,Flat", "more cells than the 2000 chunks")):
        with pytest.raises(ValueError, match=words):
            FaissIndex(spec, vectors, documents)
