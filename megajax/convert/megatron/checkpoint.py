"""Checkpoints of Megatron Core, with whole parameters: joined over the tensor and pipeline ranks that wrote them.

SAVE/iter_0000010/ is one iteration of a run, SAVE/latest_checkpointed_iteration.txt names the newest. Formats:
torch_dist (torch.distributed.checkpoint: whole tensors, layers numbered or stacked) and torch (a file for each rank).
"""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.convert.megatron.parameters import VOCABULARY

logger = logging.getLogger("megajax")

TRACKER = "latest_checkpointed_iteration.txt"
RANK_FILE = "model_optim_rng.pt"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"  # where newer versions keep what was in common.pt
EMBEDDING, OUTPUT = VOCABULARY
# Along which dim the ranks of a tensor parallel group divide an array; the others are whole on each of them.
_SPLIT = {
    r"(embedding\.word_embeddings|output_layer)\.weight": 0,
    r".*\.linear_(qkv|fc1)\.(weight|bias)": 0,
    r".*\.linear_(proj|fc2)\.weight": 1,
    r".*\.softmax_offset": 0,
}
_NO_PARAMETERS = re.compile(r"(.*\.)?(optimizer|_extra_state)(\.|/|$)")
_STACKED = re.compile(r"(decoder\.layers\.)(?!\d)(.*)")
_NUMBERED = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")
_GATE = re.compile(r".*\.linear_fc1\.(weight|bias)_w")  # by itself; the up projection then ends in _v


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Read when numpy asks for its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    folder: Path
    iteration: int
    arguments: Mapping[str, Any]
    """Those that Megatron was started with."""
    parameters: Mapping[str, StoredArray]
    """Whole, by Megatron's names with the numbers that layers have in the whole model."""


def open_checkpoint(path: str | Path, iteration: int | None = None) -> Checkpoint:
    """path: SAVE, or one iteration in it; iteration: default the newest.

    Raises ValueError if there is none, if it is incomplete, or of another format, and if torch is not installed.
    """
    folder = _find_folder(Path(path), iteration)
    try:
        from megajax.convert.megatron import files
    except ImportError:
        raise ValueError(
            "torch is not installed, with which Megatron's checkpoints are read; pip install 'megajax[megatron]' "
            "(torch's build for the CPU is enough)"
        ) from None
    if any(folder.glob("mp_rank_*")):
        return _open_rank_files(folder, files.load, files.to_numpy)
    if not (folder / "metadata.json").is_file():  # written last
        raise ValueError(f"{folder} has neither metadata.json (torch_dist) nor mp_rank_* (torch): it is incomplete, "
                         "or of a format that is not read here (fsdp_dtensor, torch_dcp)")  # fmt: skip
    backend = json.loads((folder / "metadata.json").read_text()).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(f"{folder}: sharded_backend={backend} is not read here; save it as torch_dist")
    return _open_distributed(folder, files)


def _find_folder(path: Path, iteration: int | None) -> Path:
    if path.name == "release" or re.fullmatch(r"iter_\d+", path.name):
        folder = path
    elif iteration is not None:
        folder = path / f"iter_{iteration:07d}"
    else:
        tracker = path / TRACKER
        if not tracker.is_file():
            raise ValueError(f"from={path}: {tracker} does not exist; give the folder that Megatron saved to (--save), "
                             "or one iter_* in it")  # fmt: skip
        newest = tracker.read_text().strip()
        if newest != "release" and not newest.isdecimal():
            raise ValueError(f"from={path}: {tracker} names no iteration ({newest[:20]!r}); use --iteration=N")
        folder = path / ("release" if newest == "release" else f"iter_{int(newest):07d}")
    if not folder.is_dir():
        raise ValueError(f"from={path}: {folder} does not exist")
    return folder


def _arguments(common: Any, folder: Path) -> dict[str, Any]:
    if not isinstance(common, Mapping) or not hasattr(common.get("args"), "__dict__"):
        raise ValueError(f"{folder} does not hold the arguments that Megatron was started with, which say what the "
                         "model is")  # fmt: skip
    return vars(common["args"])


# ----------------------------------------------------------------------------- torch_dist


def _open_distributed(folder: Path, files: Any) -> Checkpoint:
    stored = files.DistributedFiles(folder)
    if (folder / COMMON_FILE).is_file():
        common = files.load(folder / COMMON_FILE)
    elif COMMON_KEY in stored:
        (common,) = stored.object(COMMON_KEY)
    else:
        raise ValueError(f"{folder} has neither {COMMON_FILE} nor {COMMON_KEY}: it is incomplete")
    tensors = {key: form for key, form in stored.tensors.items() if not _NO_PARAMETERS.match(key)}
    parameters = whole_layers(tensors, stored.array)
    return Checkpoint(folder, common.get("iteration", 0), _arguments(common, folder), parameters)


def whole_layers(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], read: Callable[[str], np.ndarray]
) -> dict[str, StoredArray]:
    """Tensors as torch_dist names them, with their (shape, dtype) -> one array for each parameter of each layer."""
    found: dict[str, StoredArray] = {}
    for key, (shape, dtype) in tensors.items():
        stacked = _STACKED.fullmatch(key)
        if stacked:
            prefix, rest = stacked.groups()
            for n in range(shape[0]):
                found[f"{prefix}{n}.{rest}"] = StoredArray(shape[1:], dtype, lambda key=key, n=n: read(key)[n])
        else:
            found[key] = StoredArray(shape, dtype, lambda key=key: read(key))
    for name in [name for name in found if _GATE.fullmatch(name)]:
        whole = name.removesuffix("_w")
        gate = found.pop(name)
        up = found.pop(f"{whole}_v")
        shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
        found[whole] = StoredArray(shape, gate.dtype, lambda parts=(gate, up): np.concatenate(parts))
    return found


# ----------------------------------------------------------------------------- torch


def _open_rank_files(folder: Path, load: Callable[[Path], Any], to_numpy: Callable[[Any], np.ndarray]) -> Checkpoint:
    names = [path.name for path in folder.glob("mp_rank_*")]
    first = load(folder / min(names) / RANK_FILE)
    arguments = _arguments(first, folder)
    ranks = _ranks(folder, names, arguments)
    # stages[pipeline rank][tensor rank]: the chunks of layers there, each {name: tensor}
    stages = [[_chunks(load(folder / name / RANK_FILE), folder / name) for name in stage] for stage in ranks]
    order = [
        [chunks[number] for chunks in stage]  # of each tensor rank
        for number in range(len(stages[0][0]))
        for stage in stages
    ]
    gated = bool(arguments.get("swiglu"))
    parameters: dict[str, StoredArray] = {}
    for shards in numbered(order):
        for name, arrays in shards.items():
            parameters[name] = joined_array(name, [_stored(array, to_numpy) for array in arrays], gated)
    if not arguments.get("untie_embeddings_and_output_weights") and OUTPUT in parameters:
        _check_same(OUTPUT, [parameters[EMBEDDING], parameters.pop(OUTPUT)])  # the copy of the last stage
    return Checkpoint(folder, first.get("iteration", 0), arguments, parameters)


def _ranks(folder: Path, names: Sequence[str], arguments: Mapping[str, Any]) -> list[list[str]]:
    """Names of the folders of the tensor ranks of each pipeline stage."""
    tensor = arguments.get("tensor_model_parallel_size") or 1
    pipeline = arguments.get("pipeline_model_parallel_size") or 1
    ranks = [
        [f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "") for t in range(tensor)] for p in range(pipeline)
    ]
    wanted = [name for stage in ranks for name in stage]
    if missing := [name for name in wanted if name not in names]:
        raise ValueError(f"{folder}: {', '.join(missing[:4])} of {len(wanted)} ranks is missing; copy the whole folder")
    if extra := sorted(set(names) - set(wanted)):
        raise ValueError(f"{folder}: {', '.join(extra[:4])} is not of tensor x pipeline = {tensor} x {pipeline} ranks, "
                         "which the arguments name")  # fmt: skip
    return ranks


def _chunks(state: Mapping[str, Any], where: Path) -> list[dict[str, Any]]:
    """Of virtual stages: model0, model1, ..."""
    chunks = [state["model"]] if "model" in state else []
    while f"model{len(chunks)}" in state:
        chunks.append(state[f"model{len(chunks)}"])
    if not chunks or "language_model" in chunks[0]:
        raise ValueError(f"{where} holds a model of before Megatron Core; convert it with Megatron's "
                         "tools/checkpoint/convert.py first")  # fmt: skip
    return [
        {name: array for name, array in chunk.items() if hasattr(array, "shape") and not _NO_PARAMETERS.match(name)}
        for chunk in chunks
    ]


def _stored(tensor: Any, to_numpy: Callable[[Any], np.ndarray]) -> StoredArray:
    return StoredArray(tuple(tensor.shape), to_numpy(tensor[:0]).dtype, lambda: to_numpy(tensor))


def numbered(order: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, list[Any]]]:
    """order: the tensor ranks of each chunk of layers, as the chunks follow one another in the model; in each chunk
    layers are numbered from 0 -> {name with the number in the whole model: arrays of the ranks} of each chunk.

    Raises ValueError if the ranks of a chunk do not have the same parameters.
    """
    found = []
    layers_before = 0
    for ranks in order:
        chunk = {}
        numbers = set()
        for name in ranks[0]:
            if any(name not in rank for rank in ranks):
                raise ValueError(f"{name} is not on all tensor ranks: the files are not of one checkpoint")
            renamed = name
            if match := _NUMBERED.fullmatch(name):
                prefix, number, rest = match.groups()
                numbers.add(number)
                renamed = f"{prefix}{int(number) + layers_before}{rest}"
            chunk[renamed] = [rank[name] for rank in ranks]
        found.append(chunk)
        layers_before += len(numbers)
    return found


def joined_array(name: str, shards: Sequence[StoredArray], gated: bool) -> StoredArray:
    """The whole array from those of the tensor parallel ranks, in their order. gated: linear_fc1 of each rank is its
    part of the gate above its part of the up projection."""
    dim = next((dim for pattern, dim in _SPLIT.items() if re.fullmatch(pattern, name)), None)
    first = shards[0]
    if len(shards) == 1:
        return first
    if dim is None:
        _check_same(name, shards)
        return first
    shape = list(first.shape)
    shape[dim] = sum(shard.shape[dim] for shard in shards)

    def read() -> np.ndarray:
        parts = [np.asarray(shard) for shard in shards]
        if gated and ".linear_fc1." in name:
            halves = [np.split(part, 2) for part in parts]
            parts = [half for group in zip(*halves, strict=True) for half in group]
        return np.concatenate(parts, dim)

    return StoredArray(tuple(shape), first.dtype, read)


def _check_same(name: str, arrays: Sequence[StoredArray]) -> None:
    """Megatron keeps several copies of it, and so do we: the first."""
    first = np.asarray(arrays[0])
    if any(not np.array_equal(first, np.asarray(other)) for other in arrays[1:]):
        logger.warning("%s is not the same on all ranks that have a copy of it: that of the first is taken", name)
