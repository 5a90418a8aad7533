"""Files of tensors: read as views of the mapped file, written in the same way at places that are known before.

The format (https://huggingface.co/docs/safetensors): 8 bytes with the length of a JSON header, the header {name:
{dtype, shape, data_offsets}}, then the tensors. The safetensors package validates files before they are read; it can
only write whole files from memory, hence the writer here.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9  # maximum size of a file; a larger tensor has its own file
ALIGNMENT = 64
DTYPES = {
    "F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8), "I32": np.dtype(np.int32), "I64": np.dtype(np.int64),
}  # fmt: skip
# Arrays that older versions saved, and that follow from config.json.
BUFFERS = (
    ".position_ids",
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
)


class TensorForm(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """All tensors of a folder, by name, read lazily; without BUFFERS."""

    def __init__(self, folder: Path, files: Sequence[Path] = ()):
        """files: by default those with the weights of a model. Raises ValueError for a folder without such files, and
        for damaged files or unsupported dtypes."""
        self.forms: dict[str, TensorForm] = {}
        self._locations: dict[str, tuple[Path, int]] = {}
        for path in files or _files(folder):
            self._open(path)

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of the mapped file."""
        path, offset = self._locations[name]
        form = self.forms[name]
        return np.memmap(path, form.dtype, "r", offset, form.shape) if form.nbytes else np.empty(form.shape, form.dtype)

    def _open(self, path: Path) -> None:
        _check(path)
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__" or name.endswith(BUFFERS):
                continue
            if entry["dtype"] not in DTYPES:
                raise ValueError(
                    f"{path}: {name} is {entry['dtype']}, supported are {', '.join(DTYPES)}; convert the folder to "
                    "bfloat16 first"
                )
            if name in self.forms:
                raise ValueError(f"{path}: {name} is in {self._locations[name][0].name} too; remove one of them")
            self.forms[name] = TensorForm(tuple(entry["shape"]), DTYPES[entry["dtype"]])
            self._locations[name] = (path, 8 + length + entry["data_offsets"][0])


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{index} cannot be read ({error!r}); download it again") from None
        for name in names:
            if not isinstance(name, str) or Path(name).name != name or not 0 < len(os.fsencode(name)) < 256:
                raise ValueError(f"{index} names {str(name)[:60]!r}, which must be the name of a file in {folder}")
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ValueError(f"{index} names {', '.join(missing)}, not in {folder}; download all files")
        return [folder / name for name in names]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if any(folder.glob("pytorch_model*.bin")):
        raise ValueError(
            f"{folder} has only pytorch_model.bin, which can run code when it is read; load it with transformers once "
            "and save_pretrained(DIR), which writes safetensors"
        )
    raise ValueError(f"{folder} has neither {SINGLE} nor {INDEX}; give a folder with the weights")


def _check(path: Path) -> None:
    try:
        import safetensors
    except ImportError:
        raise ValueError(f"{path} needs the package safetensors; pip install 'megajax[hugging_face]'") from None
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged ({error}); download it again") from None


class ShardWriter:
    """Writes tensors of known shapes and dtypes to files, in any order."""

    def __init__(
        self, folder: Path, forms: Mapping[str, TensorForm], shard_bytes: int = SHARD_BYTES, single: str = SINGLE
    ):  # fmt: skip
        """Creates the files, with tensors in the order of `forms`, and an index if there are several; the name of one
        is `single`."""
        shards = _shards(forms, shard_bytes)
        names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        names = [single] if len(shards) == 1 else names
        self._forms = forms
        self._locations: dict[str, tuple[Path, int]] = {}
        for name, shard in zip(names, shards, strict=True):
            self._create(folder / name, shard)
        if len(shards) > 1:
            total = sum(form.nbytes for form in forms.values())
            weight_map = {name: self._locations[name][0].name for name in sorted(forms)}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def __getitem__(self, name: str) -> np.ndarray:
        """A view of the mapped file, to be written to."""
        path, offset = self._locations[name]
        form = self._forms[name]
        return np.memmap(path, form.dtype, "r+", offset, form.shape)

    def _create(self, path: Path, shard: list[str]) -> None:
        header: dict = {"__metadata__": {"format": "pt"}}  # required by transformers
        codes = {dtype: code for code, dtype in DTYPES.items()}
        end = 0
        for name in shard:
            form = self._forms[name]
            offsets = [end, end + form.nbytes]
            header[name] = {"dtype": codes[form.dtype], "shape": list(form.shape), "data_offsets": offsets}
            end = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        for name in shard:
            self._locations[name] = (path, 8 + len(text) + header[name]["data_offsets"][0])
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)  # a mapped file cannot say that the disk is full


def _shards(forms: Mapping[str, TensorForm], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    free_bytes = shard_bytes
    for name, form in forms.items():
        if shards[-1] and form.nbytes > free_bytes:
            shards.append([])
            free_bytes = shard_bytes
        shards[-1].append(name)
        free_bytes -= form.nbytes
    return shards
