"""Reads files of torch and torch.distributed.checkpoint without executing code in them.

Such files are pickles, and a pickle may name any function and have it called. Here a name is looked up only if it is
that of a tensor, of torch's own description of a checkpoint, or argparse.Namespace; whatever else a file names becomes
an object that does nothing.
"""

import argparse
import functools
import io
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

METADATA = ".metadata"
_DESCRIPTION = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
}  # fmt: skip


def load(file: Path | io.BytesIO) -> Any:
    """Reads a file of torch.save; tensors are on the CPU, and read lazily from a file on disk.

    Raises ValueError for a file that cannot be read as data alone.
    """
    try:
        unknown = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        known = [(_inert(name), name) for name in unknown if name != "argparse.Namespace"]
        if isinstance(file, io.BytesIO):
            file.seek(0)
        with torch.serialization.safe_globals([argparse.Namespace, *known]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=isinstance(file, Path))
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{file if isinstance(file, Path) else 'an object'} cannot be read ({_line(error)})") from None


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as a NumPy array, including bfloat16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(jnp.bfloat16)
    return tensor.numpy()


class DistributedFiles:
    """A folder of torch.distributed.checkpoint, written by any number of processes."""

    def __init__(self, folder: Path):
        """Raises ValueError if the folder cannot be read."""
        self._folder = folder
        try:
            self._reader = _Reader(folder)
            self._entries = dict(self._reader.read_metadata().state_dict_metadata)
            self._of_tensors = {
                key: entry for key, entry in self._entries.items() if isinstance(entry, TensorStorageMetadata)
            }
        except Exception as error:  # unpickling a damaged file raises many types, MemoryError among them
            raise ValueError(f"{folder / METADATA} cannot be read ({_line(error)})") from None

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """{key: (shape, dtype)}. Raises ValueError if a part of a tensor is missing, or its description is damaged."""
        found = {}
        for key, entry in self._of_tensors.items():
            try:
                is_whole = sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)
                found[key] = (tuple(entry.size), to_numpy(torch.empty(0, dtype=entry.properties.dtype)).dtype)
            except (TypeError, AttributeError) as error:
                raise ValueError(f"{self._folder / METADATA} is damaged at {key} ({_line(error)})") from None
            if not is_whole:
                raise ValueError(f"{self._folder}: parts of {key} are missing; copy the whole folder")
        return found

    def array(self, key: str, at: tuple[int, ...] = ()) -> np.ndarray:
        """tensor[at], of which alone is read what its writers stored together."""
        entry = self._of_tensors[key]
        sizes = (*[1] * len(at), *entry.size[len(at) :])
        part = ChunkStorageMetadata(torch.Size((*at, *[0] * (len(entry.size) - len(at)))), torch.Size(sizes))
        items = create_read_items_for_chunk_list(key, entry, [part])
        target = torch.empty(sizes, dtype=entry.properties.dtype)
        self._read(key, _Planner(target, items))
        return to_numpy(target).reshape(entry.size[len(at) :])

    def object(self, key: str) -> Any:
        state = {key: io.BytesIO()}
        self._read(key, _ObjectPlanner(flatten_state_dict=False, flatten_sharded_tensors=False), state)
        return state[key]

    def _read(self, key: str, planner: dcp.LoadPlanner, state: dict | None = None) -> None:
        try:
            with warnings.catch_warnings(action="ignore"):  # that there is one process
                dcp.load(state or {}, storage_reader=self._reader, planner=planner, no_dist=True)
        except (dcp.CheckpointException, OSError, RuntimeError) as error:
            raise ValueError(f"{self._folder}: {key} cannot be read ({_line(error)}); copy the whole folder") from None


class _Reader(dcp.FileSystemReader):
    """Replaces torch's reader, which could execute code in the metadata."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @functools.cached_property
    def _metadata(self) -> Metadata:
        with open(Path(self.path) / METADATA, "rb") as file:
            return _MetadataUnpickler(file).load()


class _Planner(dcp.DefaultLoadPlanner):
    """Reads the given items into one tensor."""

    def __init__(self, target: torch.Tensor, items: list[ReadItem]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._target = target
        self._items = items

    def create_local_plan(self) -> dcp.LoadPlan:
        return dcp.LoadPlan(self._items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._target


class _ObjectPlanner(dcp.DefaultLoadPlanner):
    """Replaces torch's unpickler, which could execute code in objects."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load(value)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _DESCRIPTION.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _inert(f"{module}.{name}")


def _inert(name: str) -> type:
    """An inert placeholder for the class of this name."""

    def ignore(self, *args: Any, **kwargs: Any) -> None:
        pass

    return type(name, (), {"__init__": ignore, "__setstate__": ignore})


def _line(error: BaseException) -> str:
    """One line of the error, without torch's advice to execute the file."""
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"
