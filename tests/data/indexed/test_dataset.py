"""The reader and writer of .bin/.idx against files that Megatron wrote."""

import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.indexed import dataset as indexed_dataset
from megajax.data.indexed.dataset import DTYPES, IndexedDataset, IndexedDatasetWriter, token_dtype

DATA = Path(__file__).parents[2] / "oracles" / "data"


@pytest.fixture
def copy(tmp_path) -> str:
    for suffix in (".bin", ".idx"):
        shutil.copy(DATA / f"a{suffix}", tmp_path)
    return str(tmp_path / "a")


@pytest.mark.parametrize("name, documents, tokens", [("a", 37, 1893), ("b", 11, 672), ("c", 23, 1023)])
def test_rewritten_files_are_byte_identical_to_megatrons(tmp_path, name, documents, tokens):
    source = IndexedDataset(DATA / name)
    assert (len(source), int(source.lengths.sum()), source.dtype) == (documents, tokens, np.uint16)
    with IndexedDatasetWriter(tmp_path / name, source.dtype) as writer:
        for begin, end in zip(source.document_indices, source.document_indices[1:], strict=False):
            writer.add_document([source.read(sequence) for sequence in range(begin, end)])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / (name + suffix)).read_bytes() == (DATA / (name + suffix)).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.bin", f"{name}.idx"]


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_every_dtype_and_several_sequences_a_document_round_trip(tmp_path, dtype):
    documents = [[[1, 2, 3], [4]], [[5, 6]], [], [[], [7]]]
    with IndexedDatasetWriter(tmp_path / "x", dtype) as writer:
        for document in documents:
            writer.add_document([np.array(sequence, dtype) for sequence in document])
    dataset = IndexedDataset(tmp_path / "x")
    assert dataset.dtype == dtype
    assert dataset.document_indices.tolist() == [0, 2, 3, 3, 5]
    assert [dataset.read(i).tolist() for i in range(len(dataset))] == [[1, 2, 3], [4], [5, 6], [], [7]]


def test_read_returns_the_slice_and_refuses_what_is_outside():
    dataset = IndexedDataset(DATA / "a")
    whole = dataset.read(3)
    assert np.array_equal(dataset.read(3, 1, 1), whole[1:2])
    assert np.array_equal(dataset.read(3, 1), whole[1:])
    for offset, length in ((0, len(whole) + 1), (len(whole) + 1, None)):
        with pytest.raises(IndexError, match="sequence 3"):
            dataset.read(3, offset, length)


def test_a_file_that_is_cut_while_it_is_read_is_named(copy, monkeypatch):
    monkeypatch.setattr(indexed_dataset, "CHECK_SECONDS", 0.0)
    dataset = IndexedDataset(copy)
    whole = dataset.read(3).copy()
    size = Path(copy + ".bin").stat().st_size
    os.truncate(copy + ".bin", 10)
    with pytest.raises(ValueError, match=rf"a\.bin was cut to 10 of {size} bytes while it was read; copy it again"):
        dataset.read(3)
    shutil.copy(DATA / "a.bin", copy + ".bin")
    assert np.array_equal(dataset.read(3), whole)


def test_a_bus_error_is_not_silent(copy):
    """That of a file which is cut between two looks at its size."""
    script = f"""
import os
from megajax.cli import run_command
from megajax.data.indexed.dataset import IndexedDataset

def read(_):
    dataset = IndexedDataset({copy!r})
    dataset.read(0)
    os.truncate({copy + ".bin"!r}, 0)
    dataset.read(0).sum()

run_command(read, [])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS and "Bus error" in done.stderr and "in read" in done.stderr


def test_pickle_carries_the_prefix_only():
    dataset = IndexedDataset(DATA / "a")
    blob = pickle.dumps(dataset)
    assert len(blob) < 500
    assert np.array_equal(pickle.loads(blob).read(5), dataset.read(5))


def test_optional_sequence_modes_are_ignored(copy):
    with open(copy + ".idx", "ab") as file:
        file.write(bytes(37))
    assert np.array_equal(IndexedDataset(copy).lengths, IndexedDataset(DATA / "a").lengths)


def _overwrite(path: str, offset: int, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


@pytest.mark.parametrize(
    "damage, file, message",
    [
        (lambda path: _overwrite(path, 0, b"NOTANIDX"), ".idx", "not a Megatron index"),
        (lambda path: _overwrite(path, 9, struct.pack("<Q", 2)), ".idx", "version 2"),
        (lambda path: _overwrite(path, 17, b"\x63"), ".idx", "dtype code 99"),
        (lambda path: Path(path).write_bytes(Path(path).read_bytes()[:-8]), ".idx", "774 bytes.* expects 782"),
        (lambda path: Path(path).write_bytes(b""), ".idx", "not a Megatron index"),
        (lambda path: Path(path).write_bytes(Path(path).read_bytes()[:-2]), ".bin", "3784 bytes.* expects 3786"),
        (lambda path: Path(path).unlink(), ".bin", "does not exist"),
    ],
)
@pytest.mark.fault
def test_damaged_files_are_refused_by_name(copy, damage, file, message):
    damage(copy + file)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(copy)
    assert copy + file in str(error.value)


def test_a_failed_write_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([[1, 2]])
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_ids_that_do_not_fit_are_refused(tmp_path):
    with (
        pytest.raises(ValueError, match="do not fit uint16"),
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        writer.add_document([[1, 70000]])


def test_token_dtype_switches_where_megatron_switches():
    assert (token_dtype(65499), token_dtype(65500)) == (np.uint16, np.int32)


def test_an_empty_dataset_can_be_written_and_read(tmp_path):
    with IndexedDatasetWriter(tmp_path / "x", np.uint16):
        pass
    assert len(IndexedDataset(tmp_path / "x")) == 0


@settings(max_examples=300, deadline=None)
@given(st.data())
@pytest.mark.fault
def test_any_damage_to_an_index_is_refused_or_harmless(data):
    """No crash, and never a token from outside the file: what can still be opened reads as lengths and file say."""
    content = bytearray((DATA / "b.idx").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 33) | st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "b.idx").write_bytes(content)
        Path(folder, "b.bin").symlink_to(DATA / "b.bin")
        try:
            dataset = IndexedDataset(Path(folder, "b"))
        except ValueError as error:
            assert "b.idx" in str(error)
            return
        read = [dataset.read(i) for i in range(len(dataset))]
        assert [len(tokens) for tokens in read] == dataset.lengths.tolist()
        assert b"".join(tokens.tobytes() for tokens in read) == (DATA / "b.bin").read_bytes()
        assert np.all(np.diff(dataset.document_indices) >= 0) and dataset.document_indices[-1] == len(dataset)
