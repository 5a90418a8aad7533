"""Joins the parameters of Megatron Core's tensor and pipeline ranks, which each wrote a file (the format torch)."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.weights.megatron.rows import EMBEDDING, OUTPUT, SEQUENCE_TO_SEQUENCE_OUTPUT

logger = logging.getLogger("megajax")

RANK_FILE = "model_optim_rng.pt"
# Along which dim the ranks of a tensor parallel group divide an array; the others are whole on each of them.
_SPLIT = {
    r"embedding\.word_embeddings\.weight": 0,
    r"(lm_head\.)?output_layer\.(weight|bias)": 0,
    r".*\.linear_(qkv|q|kv|fc1)\.(weight|bias)": 0,
    r".*\.(linear_(q|q_down|q_up|kv_down|kv_up)_proj|eh_proj)\.weight": 0,
    r".*\.linear_(proj|fc2)\.weight": 1,
    r".*\.softmax_offset": 0,
    r".*\.mixer\.(A_log|D|dt_bias|norm\.weight)": 0,
    r".*\.mixer\.(in_proj\.weight|conv1d\.(weight|bias))\.\w+": 0,
    r".*\.mixer\.out_proj\.weight": 1,
}
NO_PARAMETERS = re.compile(r"(.*\.)?(optimizer|_extra_state|(local|global)_tokens_per_expert|ga_steps)(\.|/|$)")
_NUMBERED = re.compile(r"((?:encoder|decoder)\.layers\.)(\d+)(\..*)")
# Experts of torch: modules, matrices of a grouped layer, or all matrices of an older one side by side.
_LOCAL = re.compile(r"(.*\.mlp\.experts\.)(?:local_experts\.(\d+)\.(.*)|(linear_fc[12]\.weight)(\d+))")
_SIDE_BY_SIDE = re.compile(r"(.*\.mlp\.experts\.)weight([12])")
_MIXER = re.compile(r"(.*\.mixer\.)(?:in_proj\.weight|conv1d[._](weight|bias))")


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Read when numpy asks for its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.read() if dtype is None else self.read().astype(dtype)


Parameters = Mapping[str, StoredArray]


def joined_parameters(
    folder: Path,
    arguments: Mapping[str, Any],
    load: Callable[[Path], Any],
    to_numpy: Callable[[Any], np.ndarray],
) -> dict[str, StoredArray]:
    """The whole parameters of the ranks in a folder. arguments: that Megatron was started with.

    Raises ValueError if a rank is missing, or if they are not of one checkpoint.
    """
    ranks = _ranks(folder, [path.name for path in folder.glob("mp_rank_*")], arguments)
    # stages[pipeline rank]: {rank: chunks of layers there, each {name: array}}
    stages = [
        {rank: _chunks(load(folder / name / RANK_FILE), folder / name, to_numpy) for rank, name in stage.items()}
        for stage in ranks
    ]
    num_chunks = len(next(iter(stages[0].values())))
    order = [
        whole_stage({rank: chunks[number] for rank, chunks in stage.items()}, arguments)
        for number in range(num_chunks)
        for stage in stages
    ]
    gated = bool(arguments.get("swiglu"))
    parameters = {
        name: joined_array(name, arrays, gated, _latent_rows(name, arguments))
        for chunk in numbered(order)
        for name, arrays in chunk.items()
    }
    for output in (OUTPUT, SEQUENCE_TO_SEQUENCE_OUTPUT):
        if not arguments.get("untie_embeddings_and_output_weights") and output in parameters:
            _check_same(output, [parameters[EMBEDDING], parameters.pop(output)])  # the copy of the last stage
    return parameters


class Rank(NamedTuple):
    tensor: int
    expert: int


def _ranks(folder: Path, names: Sequence[str], arguments: Mapping[str, Any]) -> list[dict[Rank, str]]:
    """Folders of the ranks of each pipeline stage. Of tensor and expert ranks not every pair need exist, since the
    experts may be split over fewer tensor ranks than the rest."""
    tensor, pipeline, expert = (
        arguments.get(f"{kind}_model_parallel_size") or 1 for kind in ("tensor", "pipeline", "expert")
    )
    stages = [
        {
            Rank(t, e): f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "") + (f"_{e:03d}" if expert > 1 else "")
            for t in range(tensor)
            for e in range(expert)
        }
        for p in range(pipeline)
    ]
    all_names = {name for stage in stages for name in stage.values()}
    of_experts = arguments.get("expert_tensor_parallel_size") or tensor
    missing = []
    for stage in stages:
        here = [rank for rank, name in stage.items() if name in names]
        missing += [stage[Rank(t, 0)] for t in range(tensor) if not any(rank.tensor == t for rank in here)]
        wanted = {(e, t % of_experts) for e in range(expert) for t in range(tensor)}
        found = {(rank.expert, rank.tensor % of_experts) for rank in here}
        missing += [stage[Rank(t, e)] for e, t in sorted(wanted - found)]
    if missing:
        missing = list(dict.fromkeys(missing))
        raise ValueError(
            f"{folder}: {', '.join(missing[:4])} of {len(all_names)} ranks is missing; copy the whole folder"
        )
    if extra := sorted(set(names) - all_names):
        sizes = f"tensor x pipeline x expert = {tensor} x {pipeline} x {expert}"
        raise ValueError(f"{folder}: {', '.join(extra[:4])} is not of {sizes} ranks, which the arguments name")
    return [{rank: name for rank, name in stage.items() if name in names} for stage in stages]


def _chunks(state: Mapping[str, Any], where: Path, to_numpy: Callable[[Any], np.ndarray]) -> list[dict]:
    """Of virtual stages: model0, model1, ..."""
    chunks = [state["model"]] if "model" in state else []
    while f"model{len(chunks)}" in state:
        chunks.append(state[f"model{len(chunks)}"])
    if not chunks or "language_model" in chunks[0]:
        raise ValueError(f"{where} holds a model of before Megatron Core; convert it with Megatron's "
                         "tools/checkpoint/convert.py first")  # fmt: skip
    return [
        with_mixer_parts(
            {
                name: _stored(array, to_numpy)
                for name, array in chunk.items()
                if hasattr(array, "shape") and not NO_PARAMETERS.match(name)
            }
        )
        for chunk in chunks
    ]


def _stored(tensor: Any, to_numpy: Callable[[Any], np.ndarray]) -> StoredArray:
    return StoredArray(tuple(tensor.shape), to_numpy(tensor[:0]).dtype, lambda: to_numpy(tensor))


def with_mixer_parts(parameters: Parameters) -> dict[str, StoredArray]:
    """The parts of the two Mamba arrays by themselves, as torch_dist has them: each tensor rank has its own piece of
    every part, z, x, B, C and dt of the input projection, and x, B and C of the convolution."""
    found = {}
    for name, array in parameters.items():
        match = _MIXER.fullmatch(name)
        if match is None:
            found[name] = array
            continue
        prefix, of_convolution = match.groups()
        heads = parameters[f"{prefix}dt_bias"].shape[0]
        channels = parameters[f"{prefix}out_proj.weight"].shape[1]
        whole = channels if of_convolution else 2 * channels + heads
        shared = (array.shape[0] - whole) // 2
        sizes = {"x": channels, "B": shared, "C": shared}
        if of_convolution:
            name = f"{prefix}conv1d.{of_convolution}"  # conv1d_ in newer versions
        else:
            sizes = {"z": channels, **sizes, "dt": heads}
        start = 0
        for part, size in sizes.items():
            found[f"{name}.{part}"] = _rows(array, start, size)
            start += size
    return found


def _rows(array: StoredArray, start: int, size: int) -> StoredArray:
    return StoredArray((size, *array.shape[1:]), array.dtype, lambda: np.asarray(array)[start : start + size])


def whole_stage(ranks: dict[Rank, Parameters], arguments: Mapping[str, Any]) -> dict[str, list[StoredArray]]:
    """The parameters of the ranks of a stage -> {name: arrays of the tensor ranks that share it}; experts have the
    numbers that they have in the whole model."""
    tensor = {rank.tensor: parameters for rank, parameters in reversed(ranks.items())}
    whole = _shared([_without_experts(tensor[t]) for t in sorted(tensor)])
    num_experts = arguments.get("num_experts")
    if not num_experts:
        return whole
    num_local = num_experts // (arguments.get("expert_model_parallel_size") or 1)
    of_experts = arguments.get("expert_tensor_parallel_size") or len(tensor)
    for number in sorted({rank.expert for rank in ranks}):
        parts = {
            rank.tensor % of_experts: _experts(parameters, number * num_local, num_local)
            for rank, parameters in reversed(ranks.items())
            if rank.expert == number
        }
        whole |= _shared([parts[t] for t in sorted(parts)])
    return whole


def _shared(ranks: Sequence[Parameters]) -> dict[str, list[StoredArray]]:
    """Raises ValueError if the ranks do not have the same parameters."""
    for name in ranks[0]:
        if any(name not in rank for rank in ranks):
            raise ValueError(f"{name} is not on all tensor ranks: the files are not of one checkpoint")
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def _without_experts(parameters: Parameters) -> dict[str, StoredArray]:
    return {name: array for name, array in parameters.items() if ".mlp.experts." not in name}


def _experts(parameters: Parameters, first: int, count: int) -> dict[str, StoredArray]:
    """The matrices of each expert of a rank. first: number of the first of its `count` experts."""
    found = {}
    for name, array in parameters.items():
        if match := _LOCAL.fullmatch(name):
            prefix, number, rest, grouped, grouped_number = match.groups()
            found[f"{prefix}local_experts.{first + int(number or grouped_number)}.{rest or grouped}"] = array
        elif match := _SIDE_BY_SIDE.fullmatch(name):
            prefix, number = match.groups()
            for n in range(count):
                matrix = _side_by_side(array, n, count, is_first=number == "1")
                found[f"{prefix}local_experts.{first + n}.linear_fc{number}.weight"] = matrix
    return found


def _side_by_side(array: StoredArray, number: int, count: int, *, is_first: bool) -> StoredArray:
    """[out, in] of an expert in weight1, [experts, in, out] as [in, experts * out], or weight2, [experts * in, out]."""
    rows, columns = array.shape
    shape = (count, rows, columns // count) if is_first else (count, rows // count, columns)
    return StoredArray(shape[:0:-1], array.dtype, lambda: np.asarray(array).reshape(shape)[number].T)


def numbered(order: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chunks of layers as they follow one another in the model, in each of which layers are numbered from 0 -> the
    same with the numbers in the whole model."""
    found = []
    layers_before: Counter[str] = Counter()  # of each stack
    for chunk in order:
        renamed = {}
        layers = set()
        for name, arrays in chunk.items():
            if match := _NUMBERED.fullmatch(name):
                prefix, number, rest = match.groups()
                layers.add((prefix, number))
                name = f"{prefix}{int(number) + layers_before[prefix]}{rest}"
            renamed[name] = arrays
        found.append(renamed)
        layers_before.update(prefix for prefix, _ in layers)
    return found


def _latent_rows(name: str, arguments: Mapping[str, Any]) -> int | None:
    """Rows of a projection to latents; None: another array."""
    if name.endswith(".linear_q_down_proj.weight"):
        return arguments["q_lora_rank"]
    if name.endswith(".linear_kv_down_proj.weight"):
        return arguments["kv_lora_rank"] + arguments["qk_pos_emb_head_dim"]
    return None


def joined_array(name: str, shards: Sequence[StoredArray], gated: bool, num_rows: int | None = None) -> StoredArray:
    """The whole array from those of the tensor parallel ranks, in their order. gated: linear_fc1 of each rank is its
    part of the gate above its part of the up projection. num_rows: of the whole array, where that decides whether the
    ranks divide it (Megatron's own layers) or have copies (Transformer Engine's)."""
    dim = next((dim for pattern, dim in _SPLIT.items() if re.fullmatch(pattern, name)), None)
    first = shards[0]
    if len(shards) == 1:
        return first
    if dim is None or first.shape[0] == num_rows:
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
