"""Checkpoints of Megatron Core, with whole parameters: joined over the tensor and pipeline ranks that wrote them.

SAVE/iter_0000010/ is one iteration of a run, SAVE/latest_checkpointed_iteration.txt names the newest. Formats:
torch_dist (torch.distributed.checkpoint: whole tensors, layers numbered or stacked) and torch (a file for each rank).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megajax.weights.megatron.ranks import NO_PARAMETERS, RANK_FILE, StoredArray, joined_parameters

TRACKER = "latest_checkpointed_iteration.txt"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"  # where newer versions keep what was in common.pt
_STACKED = re.compile(r"((?:encoder|decoder)\.layers\.)(?!\d)(.*)")
# Experts of torch_dist: one tensor with all, or a tensor for each.
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)experts\.(?:(\d+)\.)?(.*)")
_GATE = re.compile(r".*\.linear_fc1\.(weight|bias)_w")  # by itself; the up projection then ends in _v


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
        from megajax.weights.megatron import files
    except ImportError:
        raise ValueError(
            "torch is not installed, with which Megatron's checkpoints are read; pip install 'megajax[megatron]' "
            "(torch's build for the CPU is enough)"
        ) from None
    if any(folder.glob("mp_rank_*")):
        return _open_rank_files(folder, files)
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
    tensors = {key: form for key, form in stored.tensors.items() if not NO_PARAMETERS.match(key)}
    parameters = _without_alias(whole_layers(tensors, stored.array))
    return Checkpoint(folder, common.get("iteration", 0), _arguments(common, folder), parameters)


def whole_layers(
    tensors: Mapping[str, tuple[tuple[int, ...], np.dtype]], read: Callable[[str, tuple[int, ...]], np.ndarray]
) -> dict[str, StoredArray]:
    """Tensors as torch_dist names them, with their (shape, dtype) -> one array for each parameter of each layer and
    expert. read(key, at): tensor[at]."""
    found: dict[str, StoredArray] = {}
    for key, (shape, dtype) in tensors.items():
        for name, at in _places(key, shape):
            found[name] = StoredArray(shape[len(at) :], dtype, functools.partial(read, key, at))
    for name in [name for name in found if _GATE.fullmatch(name)]:
        whole = name.removesuffix("_w")
        gate = found.pop(name)
        up = found.pop(f"{whole}_v")
        shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
        found[whole] = StoredArray(shape, gate.dtype, lambda parts=(gate, up): np.concatenate(parts))
    return found


def _places(key: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, index in the tensor) of each parameter that a tensor holds."""
    places: list[tuple[str, tuple[int, ...]]] = [(key, ())]
    if stacked := _STACKED.fullmatch(key):
        prefix, rest = stacked.groups()
        places = [(f"{prefix}{n}.{rest}", (n,)) for n in range(shape[0])]
    if experts := _EXPERTS.fullmatch(key):
        number = experts[2]
        size = shape[len(places[0][1])]
        places = [
            (_EXPERTS.sub(rf"\g<1>local_experts.{n}.\g<3>", name), at if number else (*at, n))
            for name, at in places
            for n in ([int(number)] if number else range(size))
        ]
    return places


def _open_rank_files(folder: Path, files: Any) -> Checkpoint:
    first = files.load(min(folder.glob("mp_rank_*")) / RANK_FILE)
    arguments = _arguments(first, folder)
    parameters = joined_parameters(folder, arguments, files.load, files.to_numpy)
    return Checkpoint(folder, first.get("iteration", 0), arguments, _without_alias(parameters))


def _without_alias(parameters: Mapping[str, StoredArray]) -> dict[str, StoredArray]:
    """T5's output layer has two names."""
    return {name: array for name, array in parameters.items() if f"lm_head.{name}" not in parameters}
