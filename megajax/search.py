"""--plan=search:N: which meshes of N GPUs fit, ranked by the predicted time of a step.

Memory and time are the estimates of a plan without a compiler, so the best few are worth planning or measuring.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from megajax.config import Config
from megajax.devices import Device, utilisation
from megajax.mesh import AXES, MeshConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.parallel.schedule import Stages, bubble, make_stages
from megajax.planning.memory import memory_per_device
from megajax.planning.plan import USABLE_MEMORY
from megajax.planning.step_time import GPUS_PER_HOST, step_times
from megajax.training.reporting.console import format_bytes, format_seconds

MAX_DEVICES = 1_000_000
MIN_CONTEXT_TOKENS = 2048  # of a sequence on a device; shorter parts are not worth splitting
MICROBATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "full")


@dataclasses.dataclass(frozen=True)
class Candidate:
    config: Config
    step_seconds: float
    bytes: int
    """Of a device."""


def search(config: Config, num_devices: int, device: Device) -> tuple[list[Candidate], int]:
    """-> (the best of each mesh that fits, fastest first; how many were tried).

    Of those that are equally fast to 1 %, which is less than an estimate knows, the plainest comes first.
    Raises ValueError for a config that no mesh makes valid, and if none of these meshes can run it.
    """
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ValueError(f"--plan=search:{num_devices}: the number of GPUs must be from 1 to {MAX_DEVICES}")
    dataclasses.replace(config, mesh=MeshConfig()).check()

    @functools.cache
    def model_of(stages: Stages | None, execution: ExecutionConfig) -> Model:
        training = config.training
        patterns = dict(trained=training.trained, frozen=training.frozen)
        return Model(config.model, config.precision, execution, stages=stages, **patterns)

    found = []
    tried = 0
    refusal: object = f"no mesh of them divides training.global_batch_size={config.training.global_batch_size}"
    for candidate in _candidates(config, num_devices):
        try:
            candidate = candidate.check_on(num_devices)
        except ValueError as error:
            refusal = error
            continue
        tried += 1
        stages = make_stages(candidate.mesh, candidate.model.num_layers_in_all)
        program = candidate.make_program(model=model_of(stages, candidate.execution))
        memory, host = memory_per_device(program, candidate.training)
        if sum(memory.values()) <= USABLE_MEMORY * device.memory_bytes:
            times = step_times(program, candidate.training, device, host)
            found.append(Candidate(candidate, times.step, sum(memory.values())))
    if not tried:
        raise ValueError(
            f"--plan=search:{num_devices}: no mesh of {num_devices} GPUs works ({refusal}); use another number"
        )
    return _best_of_each_mesh(found), tried


def _best_of_each_mesh(found: list[Candidate]) -> list[Candidate]:
    def order(one: Candidate):
        mesh = one.config.mesh
        axes = sum(size > 1 for size in mesh.sizes().values())
        return (round(math.log(one.step_seconds) * 100), axes, mesh.virtual_stages,
                RECOMPUTE.index(one.config.execution.recompute), one.bytes)  # fmt: skip

    best = {}
    for one in sorted(found, key=order):
        best.setdefault(one.config.mesh, one)
    return list(best.values())


def search_rows(config: Config, num_devices: int, device: Device, most: int = 10) -> list[tuple[str, str]]:
    """(name, value) rows for Console.card."""
    found, tried = search(config, num_devices, device)
    rows = [("devices", f"{num_devices} x {device.name}"), ("tried", f"{tried} ways, {len(found)} meshes fit")]
    length = config.training.sequence_length
    flops = config.make_model().flops_per_token(length, causal=False)
    for number, one in enumerate(found[:most], start=1):
        mesh = one.config.mesh
        training = one.config.training
        rate = training.global_batch_size * length / one.step_seconds / num_devices
        batch = training.schedule(mesh)(training.steps)
        idle = bubble(mesh.pipeline, batch.num_microbatches, mesh.virtual_stages)
        words = [f"{format_seconds(one.step_seconds)}, MFU {utilisation(flops, rate, device):.1%}",
                 f"{format_bytes(one.bytes)} a device"]  # fmt: skip
        words += [f"bubble {idle:.1%}"] if idle else []
        rows.append((f"{number}.", f"{', '.join(words)}: {' '.join(_overrides(one.config))}"))
    if not found:
        rows.append(("verdict", "nothing fits: more GPUs, or --optimizer.offload_state=True"))
    return rows


def _candidates(config: Config, num_devices: int) -> Iterator[Config]:
    """All splits in powers of two and what is left of them; no expert axis, and the default schedule and layout."""
    length = config.training.sequence_length
    num_layers = config.model.num_layers_in_all
    longest = max(length // MIN_CONTEXT_TOKENS, 1)

    def sizes(most: int) -> list[int]:
        return [2**n for n in range(most.bit_length()) if 2**n <= most and num_devices % 2**n == 0]

    axes = itertools.product(sizes(GPUS_PER_HOST), sizes(num_layers), sizes(longest))
    for tensor, pipeline, context in axes:
        rest, left = divmod(num_devices, tensor * pipeline * context)
        if left or rest == 0 or config.training.global_batch_size % rest:  # those are the batch shards
            continue
        for fsdp in [size for size in range(1, rest + 1) if rest % size == 0]:
            chunks = [n for n in CHUNKS if n == 1 or num_layers % (pipeline * n) == 0]
            for virtual_stages in chunks if pipeline > 1 else (1,):
                mesh = MeshConfig(
                    data=rest // fsdp, fsdp=fsdp, tensor=tensor, pipeline=pipeline, context=context,
                    virtual_stages=virtual_stages,
                )  # fmt: skip
                whole = () if pipeline > 1 else (None,)
                for microbatch, recompute in itertools.product((*whole, *MICROBATCHES), RECOMPUTE):
                    yield dataclasses.replace(
                        config,
                        mesh=mesh,
                        execution=dataclasses.replace(config.execution, recompute=recompute, recompute_every=1),
                        training=dataclasses.replace(config.training, microbatch_size=microbatch),
                        optimizer=dataclasses.replace(config.optimizer, shard_over_data=rest > fsdp),
                    )


def _overrides(config: Config) -> list[str]:
    """The fields that a search sets, as on the command line."""
    mesh = config.mesh
    words = []
    for name in (*AXES, "virtual_stages"):
        words.append(f"--mesh.{name}={getattr(mesh, name)}" if getattr(mesh, name) > 1 else "")
    words += [
        f"--training.microbatch_size={config.training.microbatch_size}",
        f"--execution.recompute={config.execution.recompute}",
        "--optimizer.shard_over_data=True" if config.optimizer.shard_over_data else "",
    ]
    return [word for word in words if word]
