"""`PREFIX.images`: which images and clips of sound the documents of `PREFIX.bin` and `PREFIX.idx` have, in the order of
the text, and where their bytes lie. An image here is either.

Images stay where they are: each is a file, or a part of one, such as a member of a tar. The file is five arrays of
numpy's format (.npy), one after another, for D documents and I images in F files:

| array | content |
|---|---|
| int64 [D + 1] | boundaries of the documents, in images, starting with 0 |
| int32 [I, 2] | height and width in pixels, upright by the EXIF orientation; of a clip its samples and 0 |
| int64 [I, 3] | number of the file, offset in it and size in bytes; of a whole file, 0 and its size |
| int64 [F, 2] | end of the file's name in the array below, size of the file in bytes |
| uint8 | names of the files, UTF-8: relative to the folder of PREFIX if they share more than the root with it |

A file that images of several documents come from has one entry for each run of them. All arrays are memory-mapped:
opening 10 million images reads their boundaries only.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from megajax.data.indexed.dataset import prefix_of
from megajax.data.temporary import open_temporary, rename

# Of the arrays, in order: dtype and shape without the first dim.
COLUMNS = {
    "first": ("<i8", ()),
    "sizes": ("<i4", (2,)),
    "places": ("<i8", (3,)),
    "files": ("<i8", (2,)),
    "names": ("|u1", ()),
}


class ImagePlace(NamedTuple):
    """Where the bytes of an image lie, and its size in pixels; of a clip of sound the number of samples and 0."""

    path: str
    offset: int
    num_bytes: int
    file_bytes: int
    """Size of the whole file."""
    height: int
    width: int


def image_table_path(prefix: str | os.PathLike) -> str:
    """The file that a dataset has if its documents have images."""
    return prefix_of(prefix) + ".images"


class ImageTable:
    """Memory-mapped reader of `PREFIX.images`, opened by the prefix.

    Attributes: `first` int64 [documents + 1], boundaries of the documents in images: document d has the images
    first[d] to first[d + 1] - 1; `sizes` int32 [images, 2], height and width. Raises ValueError, naming the file, if it
    does not exist or is damaged. Pickles as its prefix.
    """

    def __init__(self, prefix: str | os.PathLike):
        self.prefix = prefix_of(prefix)
        self._path = image_table_path(prefix)
        self._folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isfile(self._path):
            raise ValueError(
                f"images: file {self._path} does not exist; build it with python -m megajax.data.preprocess "
                "--conversations --image_token"
            )
        self.first, self.sizes, self._places, self._files, self._names = self._read_arrays()
        self._check()

    def _read_arrays(self) -> list[np.ndarray]:
        if not os.path.getsize(self._path):  # which cannot be mapped
            self._refuse("it is empty")
        # plain arrays over the map: indexing an np.memmap costs several times more
        content = np.memmap(self._path, np.uint8, "r").view(np.ndarray)
        arrays = []
        with open(self._path, "rb") as file:
            for name, (dtype, dims) in COLUMNS.items():
                try:
                    np.lib.format.read_magic(file)
                    shape, _, found = np.lib.format.read_array_header_1_0(file)
                except ValueError as error:
                    self._refuse(f"the array {name} has no header ({error})")
                if found != np.dtype(dtype) or shape[1:] != dims or len(shape) != 1 + len(dims):
                    self._refuse(f"the array {name} is {found} {list(shape)}")
                begin = file.tell()
                end = begin + found.itemsize * int(np.prod(shape))
                if end > len(content):
                    self._refuse(f"it has {len(content)} bytes, the array {name} ends at {end}")
                arrays.append(content[begin:end].view(found).reshape(shape))
                file.seek(end)
        return arrays

    def _check(self) -> None:
        if len(self._places) != len(self.sizes):
            self._refuse(f"it has {len(self.sizes)} sizes and {len(self._places)} places")
        first = self.first
        if not len(first) or first[0] != 0 or first[-1] != len(self) or (first[1:] < first[:-1]).any():
            self._refuse(f"the document boundaries do not ascend from 0 to its {len(self)} images")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"images: {self._path} is damaged: {what}; copy or build it again")

    def __len__(self) -> int:
        """Number of images."""
        return len(self.sizes)

    def __reduce__(self):
        return type(self), (self.prefix,)

    def fingerprint(self) -> str:
        """SHA-256 of the file: names, places and sizes of the images, and sizes of their files, but no pixels. Takes
        about 0.7 s a GB; a million images with names of 40 characters have 0.1 GB."""
        with open(self._path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def name(self, i: int) -> str:
        """For messages: the path of image i, and the offset of a part of a file."""
        path, offset, num_bytes, file_bytes = self._place(i)
        return path if num_bytes == file_bytes else f"{path} at byte {offset}"

    def read(self, i: int) -> bytes:
        """The bytes of image i, as stored. Raises ValueError, naming the file, if it is not there, or not as large as
        when the table was written."""
        path, offset, num_bytes, file_bytes = self._place(i)
        try:
            with open(path, "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) != file_bytes:
                    self._refuse_file(path, f"has {size} bytes, and had {file_bytes}")
                file.seek(offset)
                data = file.read(num_bytes)
        except OSError as error:
            self._refuse_file(path, f"cannot be read ({error.strerror}), but was there")
        if len(data) < num_bytes:
            self._refuse(f"image {i} ends after its file {path}")
        return data

    def check_files(self) -> None:
        """Raises ValueError, naming the file, if one of the files with images is missing or has another size than when
        the table was written."""
        for number in range(len(self._files)):
            path = self._file_path(number)
            size = os.path.getsize(path) if os.path.isfile(path) else None
            if size is None:
                self._refuse_file(path, "does not exist, but did")
            if size != self._files[number, 1]:
                self._refuse_file(path, f"has {size} bytes, and had {self._files[number, 1]}")

    def _place(self, i: int) -> tuple[str, int, int, int]:
        number, offset, num_bytes = self._places[i].tolist()
        if not 0 <= number < len(self._files):
            self._refuse(f"image {i} is in file {number} of {len(self._files)}")
        return self._file_path(number), offset, num_bytes, int(self._files[number, 1])

    def _file_path(self, number: int) -> str:
        begin = int(self._files[number - 1, 0]) if number else 0
        name = self._names[begin : int(self._files[number, 0])].tobytes()
        return os.path.normpath(os.path.join(self._folder, os.fsdecode(name)))

    def _refuse_file(self, path: str, what: str) -> NoReturn:
        raise ValueError(
            f"images: {path} {what} when {self._path} was written; put the file back, or preprocess the data again"
        )


class ImageTableWriter:
    """Writes `PREFIX.images` in constant memory: a context manager whose file appears, by rename, when the block ends
    without an exception."""

    def __init__(self, prefix: str | os.PathLike):
        self._path = image_table_path(prefix)
        self._folder = os.path.dirname(os.path.abspath(self._path))
        self.num_images = 0
        self._num_files = 0
        self._num_names = 0
        self._num_rows = dict.fromkeys(COLUMNS, 0)
        self._last_file: tuple[str, int] | None = None

    def __enter__(self) -> "ImageTableWriter":
        os.makedirs(self._folder, exist_ok=True)
        self._parts = {name: open_temporary(f"{self._path}.{name}") for name in COLUMNS}
        self._append("first", [0])
        return self

    def __exit__(self, kind, error, traceback) -> None:
        try:
            if kind is None:
                self._join()
        finally:
            for part in self._parts.values():
                os.remove(part.name)
                part.close()

    def add(self, documents: Sequence[Sequence[ImagePlace]]) -> None:
        """Appends documents, each with its images, none or several."""
        columns: dict[str, list] = {name: [] for name in COLUMNS}
        for images in documents:
            for image in images:
                if (image.path, image.file_bytes) != self._last_file:
                    self._last_file = image.path, image.file_bytes
                    name = os.fsencode(self._stored_name(image.path))
                    self._num_names += len(name)
                    self._num_files += 1
                    columns["names"] += name
                    columns["files"].append((self._num_names, image.file_bytes))
                columns["places"].append((self._num_files - 1, image.offset, image.num_bytes))
                columns["sizes"].append((image.height, image.width))
            self.num_images += len(images)
            columns["first"].append(self.num_images)
        for name, rows in columns.items():
            self._append(name, rows)

    def _stored_name(self, path: str) -> str:
        path = os.path.abspath(path)
        return os.path.relpath(path, self._folder) if os.path.commonpath([path, self._folder]) != os.sep else path

    def _append(self, name: str, rows: Sequence) -> None:
        self._parts[name].write(np.asarray(rows, COLUMNS[name][0]).tobytes())
        self._num_rows[name] += len(rows)

    def _join(self) -> None:
        out = open_temporary(self._path)
        try:
            for name, (dtype, dims) in COLUMNS.items():
                header = {"descr": dtype, "fortran_order": False, "shape": (self._num_rows[name], *dims)}
                np.lib.format.write_array_header_1_0(out, header)
                self._parts[name].seek(0)
                shutil.copyfileobj(self._parts[name], out)
            rename(out, self._path)
        finally:
            if os.path.exists(out.name):
                os.remove(out.name)
            out.close()
