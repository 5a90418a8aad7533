"""The table of a dataset's images: random access, and errors for files that are not what they were."""

import os
import pickle

import numpy as np
import pytest

from megajax.data.indexed.images import ImagePlace, ImageTable, ImageTableWriter


def write(prefix, documents):
    with ImageTableWriter(prefix) as writer:
        for begin in range(0, len(documents), 2):  # as batches do
            writer.add(documents[begin : begin + 2])
    return ImageTable(prefix)


@pytest.fixture
def places(tmp_path):
    """Two whole files and two parts of a third one, in documents with 1, 0, 3 and 1 images."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    contents = {"a.jpg": b"first", "ü b.png": b"second one", "c.tar": b"....third..fourth...."}
    for name, content in contents.items():
        (folder / name).write_bytes(content)

    def place(name, offset, size, height, width):
        return ImagePlace(str(folder / name), offset, size, len(contents[name]), height, width)

    first, second = place("a.jpg", 0, 5, 3, 4), place("ü b.png", 0, 10, 70_000, 1)
    third, fourth = place("c.tar", 4, 5, 5, 6), place("c.tar", 11, 6, 7, 8)
    return [[first], [], [third, second, fourth], [first]]


def test_the_images_of_each_document_are_read_back(places, tmp_path):
    table = write(tmp_path / "data" / "x", places)
    assert table.first.tolist() == [0, 1, 1, 4, 5]
    assert table.sizes.dtype == np.int32
    assert table.sizes.tolist() == [[3, 4], [5, 6], [70_000, 1], [7, 8], [3, 4]]
    assert [table.read(i) for i in range(len(table))] == [b"first", b"third", b"second one", b"fourth", b"first"]
    folder = tmp_path / "pictures"
    assert [table.name(i) for i in range(4)] == [
        f"{folder}/a.jpg", f"{folder}/c.tar at byte 4", f"{folder}/ü b.png", f"{folder}/c.tar at byte 11",
    ]  # fmt: skip
    table.check_files()
    assert os.listdir(tmp_path / "data") == ["x.images"]


def test_files_are_found_after_the_folder_has_moved(places, tmp_path, monkeypatch):
    write(tmp_path / "data" / "x", places)
    (tmp_path / "moved").mkdir()
    for name in ("data", "pictures"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    monkeypatch.chdir(tmp_path / "moved")
    table = pickle.loads(pickle.dumps(ImageTable("data/x")))
    assert table.read(3) == b"fourth"


def test_a_table_is_mapped_not_loaded(places, tmp_path):
    table = write(tmp_path / "x", places * 50_000)
    assert len(table.first) == 200_001
    assert table.read(250_000 - 2) == b"fourth"
    assert len(pickle.dumps(table)) < 500

    def mapped(array):
        return isinstance(array, np.memmap) or (isinstance(array, np.ndarray) and mapped(array.base))

    assert mapped(table.first)
    assert mapped(table.sizes)


def test_a_dataset_without_images_has_an_empty_table(tmp_path):
    table = write(tmp_path / "x", [[], [], []])
    assert (len(table), table.first.tolist(), table.sizes.shape) == (0, [0, 0, 0, 0], (0, 2))


def test_equal_images_have_equal_fingerprints(places, tmp_path):
    found = [
        write(tmp_path / name, documents).fingerprint() for name, documents in zip("xy", [places] * 2, strict=True)
    ]
    assert found[0] == found[1] == ImageTable(tmp_path / "x.idx").fingerprint()
    taller = [[places[0][0]._replace(height=9)], *places[1:]]
    assert write(tmp_path / "z", taller).fingerprint() != found[0]


@pytest.mark.fault
def test_a_file_that_is_missing_or_has_changed_is_refused_by_name(places, tmp_path):
    table = write(tmp_path / "x", places)
    tar = tmp_path / "pictures" / "c.tar"
    tar.write_bytes(tar.read_bytes() + b".")
    for read in (lambda: table.read(1), table.check_files):
        with pytest.raises(ValueError, match=r"c\.tar has 22 bytes, and had 21 when .*x\.images was written; put the"):
            read()
    (tmp_path / "pictures" / "a.jpg").unlink()
    for read in (lambda: table.read(0), table.check_files):
        with pytest.raises(ValueError, match=r"a\.jpg .*but .* when .*x\.images was written"):
            read()
    assert table.read(2) == b"second one"


@pytest.mark.fault
def test_a_damaged_table_is_refused_by_name(places, tmp_path):
    write(tmp_path / "x", places)
    path = tmp_path / "x.images"
    content = path.read_bytes()
    for size in [0, 5, 60, 130, 200, 300, len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"x\.images is damaged: .*; copy or build it again"):
            ImageTable(tmp_path / "x")
    boundaries = np.array([0, 1, 1, 4, 5]).tobytes()
    assert boundaries in content
    path.write_bytes(content.replace(boundaries, np.array([0, 1, 0, 4, 5]).tobytes()))
    with pytest.raises(ValueError, match="boundaries do not ascend from 0 to its 5 images"):
        ImageTable(tmp_path / "x")
    path.unlink()
    with pytest.raises(ValueError, match=r"x\.images does not exist; build it with"):
        ImageTable(tmp_path / "x")


def test_an_unfinished_table_leaves_nothing_behind(places, tmp_path):
    with pytest.raises(RuntimeError), ImageTableWriter(tmp_path / "out" / "x") as writer:
        writer.add(places)
        raise RuntimeError
    assert os.listdir(tmp_path / "out") == []
