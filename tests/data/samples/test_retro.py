"""Neighbours of samples: those of the latest chunk that has been read, and no token that the sample may not know."""

import dataclasses
import os
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.data.config import DataConfig
from megajax.data.datasets import Amounts
from megajax.data.indexed.blocks import write_blocks
from megajax.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter
from megajax.data.indexed.neighbours import NO_CHUNK, NUM_KEPT, NeighbourTable
from megajax.data.samples.gpt import GptDataset, GptFormat
from megajax.data.samples.mock import MockIndexedDataset
from megajax.data.samples.retro import RetroFormat
from megajax.retrieval.build import WHOLE, build
from megajax.retrieval.inputs import NO_TOKEN, NeighbourInputs
from megajax.tasks.language import Language

INPUTS = NeighbourInputs(chunk_length=8, count=2, length=16)
LENGTH = 32
RNG = np.random.default_rng(0)


def write(prefix, documents) -> str:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document([np.asarray(document)])
    return str(prefix)


def samples(prefix, part=None, length=LENGTH, seed=0, num_samples=None, **form):
    indexed = IndexedDataset(prefix)
    form = RetroFormat(**dict(inputs=INPUTS) | form)
    return form.build(indexed, part or (0, len(indexed)), num_samples, length, seed, cache_dir=None)


def with_neighbours(prefix, rows, documents, database=None) -> str:
    """Writes PREFIX.neighbours with these neighbours of each chunk, whatever their texts."""
    table = np.full((len(rows), NUM_KEPT), NO_CHUNK)
    for row, found in enumerate(rows):
        table[row, : len(found)] = found
    facts = {
        "chunk_length": INPUTS.chunk_length,
        "database": os.path.basename(database or prefix),
        "documents": documents,
        "fingerprint": IndexedDataset(prefix).fingerprint(),
        "database_fingerprint": IndexedDataset(database or prefix).fingerprint(),
        "embedder": {},
    }
    write_blocks(f"{prefix}.neighbours", facts, table.shape, "<i4", lambda begin, end: table[begin:end], 4)
    return prefix


@pytest.fixture
def built(tmp_path) -> tuple[str, list[np.ndarray]]:
    """10 to 40 tokens a document, of few ids: neighbours everywhere. Documents 0 to 15 are the database."""
    documents = [RNG.integers(1, 30, RNG.integers(10, 40)) for _ in range(20)]
    prefix = write(tmp_path / "x", documents)
    build(prefix, split=(16, 4, 0), chunk_length=8)
    return prefix, documents


def wanted(table: NeighbourTable, documents, dataset, i) -> np.ndarray:
    """One token after the other, from the documents themselves."""
    text = dataset.text
    stream = [(d, offset) for d in text.document_index.tolist() for offset in range(len(documents[d]))]
    start = int(text.shuffle_index[i]) * dataset.sequence_length
    stream = stream[start : start + dataset.sequence_length + 1]
    of_sample = {document for document, _ in stream}
    rows = []
    for last in range(7, dataset.sequence_length, 8):
        document, offset = stream[last]
        ends = [min(end, len(documents[document])) for end in range(8, len(documents[document]) + 8, 8)]
        complete = [number for number, end in enumerate(ends) if end <= offset + 1]
        found = []
        if complete:
            chunk = sum(-(-len(d) // 8) for d in documents[:document]) + complete[-1]
            for neighbour in table[np.array([chunk])][0].tolist():
                owner, number = 0, neighbour
                while neighbour != NO_CHUNK and number >= -(-len(documents[owner]) // 8):
                    number -= -(-len(documents[owner]) // 8)
                    owner += 1
                if neighbour != NO_CHUNK and owner not in of_sample:
                    found.append(documents[owner][number * 8 : number * 8 + 16].tolist())
        padded = [tokens + [NO_TOKEN] * (16 - len(tokens)) for tokens in found[:2]]
        rows.append(padded + [[NO_TOKEN] * 16] * (2 - len(padded)))
    return np.array(rows)


def test_a_sample_has_the_neighbours_of_the_chunks_that_it_has_read(built):
    prefix, documents = built
    table = NeighbourTable(prefix)
    trained, evaluated = samples(prefix, (0, 16)), samples(prefix, (16, 20), trains=False)
    plain = GptDataset(IndexedDataset(prefix), (0, 16), None, LENGTH, 0, GptFormat(), None)
    assert len(trained) == len(plain) > 5 and len(evaluated) > 1
    for i in range(len(trained)):
        sample = trained[i]
        found = sample.pop("neighbour_tokens")
        assert found.dtype == np.int32 and found.shape == (4, 2, 16)
        assert np.array_equal(found, wanted(table, documents, trained, i))
        assert all(np.array_equal(value, plain[i][name]) for name, value in sample.items())
    for i in range(len(evaluated)):
        found = evaluated[i]["neighbour_tokens"]
        assert np.array_equal(found, wanted(table, documents, evaluated, i))
    assert (found != NO_TOKEN).any()


def test_one_file_serves_every_seed_and_length(built):
    prefix, documents = built
    table = NeighbourTable(prefix)
    for seed, length in ((1, 16), (2, 32), (3, 64)):
        dataset = samples(prefix, (0, 16), length, seed, num_samples=40)  # several epochs
        for i in range(0, len(dataset), 7):
            assert np.array_equal(dataset[i]["neighbour_tokens"], wanted(table, documents, dataset, i))
    copy = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(copy[3]["neighbour_tokens"], dataset[3]["neighbour_tokens"])


def test_later_tokens_change_no_neighbours(built):
    """Of a document that is not in the database. No text has a copy: whether one is dropped depends on what follows."""
    prefix, documents = built
    lengths = [len(document) for document in documents]
    changed = 16 + int(np.argmax(lengths[16:]))

    def neighbours() -> tuple[np.ndarray, list[np.ndarray]]:
        build(prefix, split=(16, 4, 0), chunk_length=8)
        table = NeighbourTable(prefix)
        of_document = table[np.arange(*table.grid.first[[changed, changed + 1]])]
        dataset = samples(prefix, (16, 20), trains=False, num_samples=10)
        return of_document, [dataset[i] for i in range(len(dataset))]

    table_before, before = neighbours()
    documents[changed][22:] = 29 - documents[changed][22:] % 15
    write(prefix, documents)
    table_after, after = neighbours()
    assert np.array_equal(table_before[:2], table_after[:2])
    assert not np.array_equal(table_before[2], table_after[2])
    differs = False
    for one, other in zip(before, after, strict=True):
        same = np.cumsum(one["tokens"] != other["tokens"]) == 0
        num_same = int(same.sum()) // 8
        assert np.array_equal(one["neighbour_tokens"][:num_same], other["neighbour_tokens"][:num_same])
        differs |= not np.array_equal(one["neighbour_tokens"][num_same:], other["neighbour_tokens"][num_same:])
    assert differs


# ----------------------------------------------------------------------------- leaks


def test_what_follows_a_neighbour_ends_with_its_document(tmp_path):
    """The neighbour of each chunk is the last one of the document that is before that of the sample in the file."""
    prefix = write(tmp_path / "x", [range(100, 114), range(200, 233)])
    with_neighbours(prefix, [[], [], *[[1]] * 5], documents=[0, 1])
    assert 200 in IndexedDataset(prefix).flat()[8:24]  # what 16 tokens of the file would give
    [sample] = samples(prefix, part=(1, 2), trains=False)
    assert sample["tokens"][0] == 200
    assert (sample["neighbour_tokens"][:, 0] == [*range(108, 114), *[NO_TOKEN] * 10]).all()


def test_nothing_follows_the_last_chunk_and_a_missing_neighbour_is_no_chunk(tmp_path):
    database = write(tmp_path / "database", [range(100, 112)])
    prefix = write(tmp_path / "x", [range(200, 233)])
    with_neighbours(prefix, [[1], [0, 1], [], [1], []], [0, 1], database)
    [sample] = samples(prefix)
    first, last = [*range(100, 112), *[NO_TOKEN] * 4], [*range(108, 112), *[NO_TOKEN] * 12]
    none = [NO_TOKEN] * 16
    assert sample["neighbour_tokens"].tolist() == [[last, none], [first, last], [none, none], [last, none]]


def test_no_document_of_a_sample_is_a_neighbour_in_it(tmp_path):
    """Document d has the tokens 100 d to 100 d + 19, and every chunk of another document is a neighbour of a chunk."""
    prefix = write(tmp_path / "x", [100 * document + np.arange(20) for document in range(6)])
    rows = [[c for c in RNG.permutation(18) if c // 3 != chunk // 3] for chunk in range(18)]
    with_neighbours(prefix, rows, [0, 6])
    dataset = samples(prefix, num_samples=30)
    num_documents = num_found = 0
    for i in range(len(dataset)):
        found = dataset[i]["neighbour_tokens"]
        documents = set(np.concatenate([dataset[i]["tokens"], dataset[i]["labels"]]) // 100)
        assert not documents & set(found[found != NO_TOKEN] // 100)
        num_documents += len(documents)
        num_found += (found[:, 1, 0] != NO_TOKEN).sum()
    assert num_documents > 2 * len(dataset) and num_found > 2 * len(dataset)


# ----------------------------------------------------------------------------- runs


def datasets(data: DataConfig, num_eval_samples=3, **task):
    amounts = Amounts(sequence_length=LENGTH, seed=0, num_train_samples=10, num_eval_samples=num_eval_samples)
    return Language(**task).datasets(data, SimpleNamespace(neighbours=INPUTS), amounts)


@pytest.fixture
def data(built, tmp_path) -> DataConfig:
    return DataConfig("indexed", (built[0],), split=(8, 2, 0), tokenizer="null:100", cache_dir=str(tmp_path / "cache"))


def test_a_run_reads_neighbours_and_records_their_fingerprint(built, data):
    found = datasets(data)
    assert found.train[0]["neighbour_tokens"].shape == found.eval[0]["neighbour_tokens"].shape == (4, 2, 16)
    assert found.record["files"][0]["neighbours"] == NeighbourTable(built[0]).fingerprint()
    assert found.record["format"]["inputs"] == dataclasses.asdict(INPUTS)
    build(built[0], split=(16, 4, 0), chunk_length=8, max_overlap=0.25)
    assert datasets(data).record != found.record


def test_mock_documents_have_random_neighbours():
    mock = MockIndexedDataset(100, 99)
    form = RetroFormat(inputs=INPUTS, vocab_size=100)
    one, other = (form.build(mock, (0, 50), 8, LENGTH, seed, cache_dir=None) for seed in (0, 1))
    found = one[3]["neighbour_tokens"]
    assert found.shape == (4, 2, 16) and 0 <= found.min() < found.max() < 100
    assert np.array_equal(found, one[3]["neighbour_tokens"]) and (found != other[3]["neighbour_tokens"]).any()


def test_of_text_neighbours_are_found_when_a_run_starts(tmp_path):
    """The held-out file has neighbours in the training data, and none of its own."""
    for name in range(8):
        (tmp_path / f"{name}.txt").write_text(" ".join(f"word{i}" for i in RNG.integers(0, 30, 40)))
    data = DataConfig("text", text=(f"{tmp_path}/*.txt",), tokenizer="bytes", cache_dir=str(tmp_path / "cache"))
    found = datasets(data)
    train, held_out = found.train.indexed.prefix, found.eval.indexed.prefix
    assert train != held_out
    for dataset, prefix in ((found.train, train), (found.eval, held_out)):
        table = NeighbourTable(prefix)
        assert table.database.indexed.prefix == train and table.documents == (0, len(table.database.indexed))
        assert (dataset[0]["neighbour_tokens"] != NO_TOKEN).any()


@pytest.mark.parametrize("split, words", [
    ((17, 3, 0), "data.split: .*x.neighbours .* documents 0 to 16 of .*x, which are not the training documents of this"
        " run; build it with megajax retrieve build .*x --split=17,3,0 --chunk_length=8$"),
    ((15, 5, 0), "--split=15,5,0"),
])  # fmt: skip
def test_the_database_is_what_the_run_trains_on(split, words, data):
    with pytest.raises(ValueError, match=words):
        datasets(dataclasses.replace(data, split=split))


def test_what_is_evaluated_is_in_no_database(built, tmp_path):
    with pytest.raises(ValueError, match="documents 0 to 16 .* --split=12,8,0"):
        samples(built[0], (12, 20), trains=False)
    other = write(tmp_path / "other", built[1][:3])
    build(other, split=WHOLE, chunk_length=8)
    words = "other.neighbours .* not the training documents .*other --database=PREFIX_OF_TRAINING_DATA --split=1,0,0"
    with pytest.raises(ValueError, match=words):
        samples(other, trains=False)
    build(other, database=built[0], split=(16, 4, 0), chunk_length=8)
    with pytest.raises(ValueError, match=f"build {other} --database={built[0]} --split=1,0,0 --chunk_length=8$"):
        samples(other, trains=False, split=WHOLE)
    assert len(samples(other, trains=False, split=(16, 4, 0)))


def test_what_cannot_be_read_is_refused_with_the_way_out(built, data, tmp_path):
    prefix, documents = built
    other = write(tmp_path / "other", documents)
    with pytest.raises(ValueError, match=f"{other}.neighbours does not exist.*build {other} --split=16,4,0 --chunk"):
        samples(other, (0, 16))
    with pytest.raises(ValueError, match="chunks of 8 tokens, the model reads chunks of 64; .* --split=16,4,0$"):
        samples(prefix, (0, 16), length=64, inputs=NeighbourInputs())
    with pytest.raises(
        ValueError, match="training.sequence_length=20 is not divisible by the 8 tokens of a chunk; use 16"
    ):
        samples(prefix, (0, 16), length=20)
    with pytest.raises(ValueError, match="reads 21 neighbours of a chunk; a database gives up to 20"):
        samples(prefix, (0, 16), inputs=dataclasses.replace(INPUTS, count=21))
    with pytest.raises(ValueError, match="task.fim_rate=0.5 moves the text .*--task.fim_rate=0"):
        datasets(data, fim_rate=0.5)
