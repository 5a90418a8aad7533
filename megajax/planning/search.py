"""--plan=search:N: the meshes of N GPUs that fit, ranked by estimated step time.

Memory and time are estimated without a compiler, so plan or measure the best few.
"""

import dataclasses
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console as RichConsole
from rich.progress import Progress

from megajax.mesh.allocators import USABLE_MEMORY
from megajax.mesh.config import AXES, MeshConfig
from megajax.mesh.devices import Device, utilisation
from megajax.models.execution import ExecutionConfig
from megajax.models.model import Model
from megajax.parallel.schedule import Stages, bubble, make_stages
from megajax.planning.memory import activation_bytes, state_bytes
from megajax.planning.plan import plan_device
from megajax.planning.step_time import GPUS_PER_HOST, step_times
from megajax.training.reporting.console import Console, format_bytes, format_seconds

if TYPE_CHECKING:
    from megajax.config import Config

logger = logging.getLogger("megajax")

MAX_DEVICES = 1_000_000
MIN_CONTEXT_TOKENS = 2048  # per device and sequence: the search does not split sequences further
MICROBATCHES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Candidate:
    config: "Config"
    bytes: int
    """Per device."""
    step_seconds: float = math.inf
    """Infinite if it does not fit."""


@dataclasses.dataclass(frozen=True)
class Found:
    best: list[Candidate]
    """The best configuration of each mesh that fits, fastest first."""
    num_tried: int
    """Number of configurations: meshes, microbatch sizes and recompute policies."""
    smallest: Candidate
    """The configuration that needs least memory."""
    num_indivisible: int
    """Number of meshes whose batch shards do not divide training.global_batch_size."""


def search(
    config: "Config", num_devices: int, device: Device, watch: Callable[[list[MeshConfig]], Iterable[MeshConfig]] = iter
) -> Found:
    """For each mesh keeps the fastest configuration; of those within 1 %, the accuracy of an estimate, the simplest.

    watch: wraps the iteration over the meshes, to show progress. Raises ValueError for a config that is invalid on
    every mesh, and if none of these meshes can run it.
    """
    if not 1 <= num_devices <= MAX_DEVICES:
        raise ValueError(f"--plan=search:{num_devices}: the number of GPUs must be from 1 to {MAX_DEVICES}")
    planned = dataclasses.replace(config, data=config.data.for_plan())
    dataclasses.replace(planned, mesh=MeshConfig()).check()
    meshes = list(meshes_of(config, num_devices))
    batch_size = config.training.global_batch_size
    divisible = [mesh for mesh in meshes if batch_size % mesh.batch_shards == 0]
    estimator = _Estimator(device)
    best = []
    for mesh in watch(divisible):
        if fitting := estimator.fitting(planned, mesh):
            fastest = min(fitting, key=_preference)
            best.append(dataclasses.replace(fastest, config=dataclasses.replace(fastest.config, data=config.data)))
    if estimator.smallest is None:
        why = estimator.refusal or f"no mesh of them divides training.global_batch_size={batch_size}"
        raise ValueError(
            f"--plan=search:{num_devices}: no mesh of {num_devices} GPUs works ({why}); use another number"
        )
    best.sort(key=lambda candidate: candidate.step_seconds)
    return Found(best, estimator.num_tried, estimator.smallest, len(meshes) - len(divisible))


class _Estimator:
    def __init__(self, device: Device):
        self._device = device
        self._usable_bytes = USABLE_MEMORY * device.memory_bytes
        self.num_tried = 0
        self.smallest: Candidate | None = None
        self.refusal: ValueError | None = None
        """The latest reason why a configuration cannot run."""
        # Building a model takes longer than all its estimates.
        self._models: dict[tuple[Stages | None, ExecutionConfig], Model] = {}

    def fitting(self, config: "Config", mesh: MeshConfig) -> list[Candidate]:
        """The configurations of a mesh that fit, with their times. The state, which they share, is estimated first: if
        it alone is too large, nothing else is estimated."""
        found = []
        checked = {}  # {execution: (config, program)}; what else differs between candidates is the microbatch size
        state = None
        for candidate in _candidates(config, mesh):
            if state is not None and sum(state[0].values()) > self._usable_bytes:
                self.num_tried += 1
                continue
            training = candidate.training
            try:
                training.check_on(mesh)
                if candidate.execution not in checked:
                    of_mesh = candidate.check_on(mesh.num_devices)
                    checked[candidate.execution] = of_mesh, self._program(of_mesh)
            except ValueError as error:
                self.refusal = error
                continue
            self.num_tried += 1
            of_mesh, program = checked[candidate.execution]
            state = state or state_bytes(program)
            activations, offloaded = activation_bytes(program.model, mesh, training)
            candidate = dataclasses.replace(of_mesh, training=training)
            estimate = Candidate(candidate, sum(state[0].values()) + activations)
            if self.smallest is None or estimate.bytes < self.smallest.bytes:
                self.smallest = estimate
            if estimate.bytes <= self._usable_bytes:
                times = step_times(program, training, self._device, state[1] | {"activations": offloaded})
                found.append(dataclasses.replace(estimate, step_seconds=times.step))
        return found

    def _program(self, config: "Config"):
        key = make_stages(config.mesh, config.model.num_stage_layers), config.execution
        if key not in self._models:
            self._models[key] = config.make_model()
        return config.make_program(model=self._models[key])


def _preference(candidate: Candidate) -> tuple:
    """Sort key of the configurations of a mesh: smaller is better."""
    recompute = ("none", "selective", "full").index(candidate.config.execution.recompute_of(0))
    return (round(math.log(candidate.step_seconds) * 100), recompute, candidate.bytes)


def print_search(name: str, config: "Config", request: str) -> None:
    """Searches and prints the ten best meshes; shows progress in a terminal. request: search:NUMBER[:GPU]."""
    _, number, kind = (request + "::").split(":")[:3]
    if not number.isdecimal():
        raise ValueError(f"--plan={request}: for how many GPUs? --plan=search:64, or search:64:h200")
    device = plan_device(kind or "h100")
    config.mesh.check()  # it is not used, but 0 devices on an axis are a mistake
    if not sys.stderr.isatty():
        logger.info("searching the meshes of %s GPUs", number)
    with Progress(console=RichConsole(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        watch = functools.partial(progress.track, description=f"meshes of {number} GPUs")
        rows = search_rows(config, int(number), device, watch=watch)
    Console().card(f"meshes for {name}", rows)


def search_rows(
    config: "Config", num_devices: int, device: Device, most: int = 10, watch: Callable = iter
) -> list[tuple[str, str]]:
    """(name, value) rows for Console.card."""
    found = search(config, num_devices, device, watch)
    fit = f"{len(found.best)} meshes fit" if len(found.best) != 1 else "1 mesh fits"
    rows = [
        ("devices", f"{num_devices} x {device.name}"),
        ("searched", f"{found.num_tried:,} configurations tried; {fit}"),
    ]
    length = config.training.sequence_length
    flops = config.make_model().flops_per_token(length, causal=False)
    rated = device.computing_in(config.precision.compute)
    for number, candidate in enumerate(found.best[:most], start=1):
        mesh = candidate.config.mesh
        training = candidate.config.training
        rate = training.global_batch_size * length / candidate.step_seconds / num_devices
        batch = training.schedule(mesh)(training.steps)
        idle = bubble(mesh.pipeline, batch.num_microbatches, mesh.virtual_stages)
        words = [f"{format_seconds(candidate.step_seconds)}, MFU {utilisation(flops, rate, rated):.1%}",
                 f"{format_bytes(candidate.bytes)} per device"]  # fmt: skip
        words += [f"bubble {idle:.1%}"] if idle else []
        rows.append((f"{number}.", f"{', '.join(words)}: {' '.join(overrides_of(config, candidate.config))}"))
    if not found.best:
        rows.append(("verdict", _why_nothing_fits(config, found, device)))
    return rows


def _why_nothing_fits(config: "Config", found: Found, device: Device) -> str:
    usable = format_bytes(USABLE_MEMORY * device.memory_bytes)
    needed = f"nothing fits: the smallest needs {format_bytes(found.smallest.bytes)} of {usable} usable per device"
    ways = ["more GPUs"]
    if found.num_indivisible:
        size = config.training.global_batch_size
        needed += f"; {found.num_indivisible} meshes do not divide training.global_batch_size={size}"
        ways.append("a batch size that more meshes divide")
    if not config.optimizer.offload_state:
        ways.append("--optimizer.offload_state=True")
    return f"{needed}; use {', or '.join(ways)}"


def meshes_of(config: "Config", num_devices: int) -> Iterator[MeshConfig]:
    """All meshes with tensor, pipeline and context a power of two, and data times fsdp the rest; an expert axis only
    for models with experts, and the default schedule and layout."""
    num_layers = config.model.num_stage_layers
    longest = max(config.training.sequence_length // MIN_CONTEXT_TOKENS, 1)

    def sizes(most: int) -> list[int]:
        return [2**n for n in range(most.bit_length()) if 2**n <= most and num_devices % 2**n == 0]

    plain = dataclasses.replace(config, mesh=MeshConfig())
    num_experts = max((p.num_experts for p in plain.make_model().parameters), default=1)
    axes = (sizes(GPUS_PER_HOST), sizes(num_layers), sizes(longest), sizes(num_experts))
    for tensor, pipeline, context, expert in itertools.product(*axes):
        rest, left = divmod(num_devices, tensor * pipeline * context * expert)
        if left or rest == 0:
            continue
        for fsdp in [size for size in range(1, rest + 1) if rest % size == 0]:
            chunks = [n for n in CHUNKS if n == 1 or num_layers % (pipeline * n) == 0]
            for virtual_stages in chunks if pipeline > 1 else (1,):
                yield MeshConfig(
                    data=rest // fsdp, fsdp=fsdp, tensor=tensor, pipeline=pipeline, context=context, expert=expert,
                    virtual_stages=virtual_stages,
                )  # fmt: skip


def _candidates(config: "Config", mesh: MeshConfig) -> "Iterator[Config]":
    no_accumulation = () if mesh.pipeline > 1 else (None,)
    execution = config.execution
    modules = execution.recompute if execution.recompute_of(0) == "selective" else "selective"  # those of the recipe
    policies = ("full", modules, "none")  # the smallest first
    for recompute, microbatch in itertools.product(policies, (*MICROBATCHES, *no_accumulation)):
        yield dataclasses.replace(
            config,
            mesh=mesh,
            execution=dataclasses.replace(execution, recompute=recompute, recompute_every=1),
            training=dataclasses.replace(config.training, microbatch_size=microbatch),
            optimizer=dataclasses.replace(config.optimizer, shard_over_data=mesh.data > 1),
        )


def overrides_of(base: "Config", found: "Config") -> list[str]:
    """Command-line overrides that turn `base` into `found`: all fields that differ. Axes larger than 1, the microbatch
    size and the recompute policy are always included."""
    words = []
    for section in ("mesh", "training", "execution", "optimizer"):
        before = getattr(base, section)
        after = getattr(found, section)
        for field in dataclasses.fields(after):
            value = getattr(after, field.name)
            shown = section == "mesh" and field.name in AXES and value > 1
            shown |= field.name in ("microbatch_size", "recompute")
            if shown or value != getattr(before, field.name):
                words.append(f"--{section}.{field.name}={value}")
    return words
