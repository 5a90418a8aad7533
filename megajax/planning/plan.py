"""--plan: memory and step time of a run, without a GPU.

Weights and optimizer state are exact, from shapes and shardings. Where the CUDA wheels are installed the train step is
compiled for the planned GPU and the compiler reports its allocations; otherwise activations are estimated. Times are
estimates, printed with their assumptions.
"""

import dataclasses
import re
import resource
import string
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from megajax.mesh import compat
from megajax.mesh.allocators import USABLE_MEMORY
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.devices import DEVICES, Device, utilisation
from megajax.mesh.processes import use_compiler_without_gpu
from megajax.models.model import Model
from megajax.parallel.schedule import bubble, make_table
from megajax.planning.card import described_precision, described_size
from megajax.planning.memory import (
    activation_bytes,
    host_memory,
    memory_per_device,
    memory_rows,
    state_bytes,
    unsplit_rows,
)
from megajax.planning.step_time import (
    ACTIVATION_PASSES,
    ATTENTION_EFFICIENCY,
    EXPERT_WEIGHT_BYTES,
    FP8_EFFICIENCY,
    GPUS_PER_HOST,
    HOP_SECONDS,
    HOST_BANDWIDTH,
    LINK_EFFICIENCY,
    MATMUL_EFFICIENCY,
    NETWORK_BANDWIDTH,
    Times,
    low_share,
    step_times,
)
from megajax.training.batches import step_arguments
from megajax.training.compiler_options import compiler_options
from megajax.training.config import TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.console import (
    format_bytes,
    format_count,
    format_flops,
    format_number_of,
    format_seconds,
)

UNEVEN_LOAD = 1.5  # of the fullest device, over the mean: shown beside the even one
MAX_VIRTUAL_DEVICES = 8  # plans of larger meshes are not compared with the memory of this machine
COMPILED_FOR = ("H100", "H200")


def plan_device(name: str) -> Device:
    """Raises ValueError for an unknown device."""
    known = {device.name.lower(): device for device in DEVICES}
    if name.lower() not in known:
        raise ValueError(f"--plan={name} is unknown; use one of {', '.join(known)}")
    return known[name.lower()]


def plan_rows(
    program: Program,
    training: TrainingConfig,
    device: Device,
    price: float | None = None,
    *,
    compiles: bool = True,
) -> list[tuple[str, str]]:
    """(name, value) rows for Console.card. price: per GPU-hour.
    compiles: compile for the device if the CUDA wheels are installed, in a process that has not used a device yet."""
    model = program.model
    mesh_config = program.mesh_config
    compiles = compiles and device.name in COMPILED_FOR and compat.gpu_compiler_installed()
    memory, host = memory_per_device(program, training)
    rows = _model_rows(model, mesh_config, training, device)
    rows += [("precision", described_precision(program)), *memory_rows(memory, host), *unsplit_rows(program)]
    if compiles:
        mesh = make_mesh(mesh_config, devices_without_gpu(mesh_config.num_devices, device))
        compiled, seconds = compile_step(dataclasses.replace(program, mesh=mesh), training)
        analysis = compiled.memory_analysis()
        total = device_peak_bytes(analysis)
        rows += [
            ("compiled", f"for {device.name} without a GPU in {format_seconds(seconds)}, jax {jax.__version__}: "
                         f"arguments {format_bytes(analysis.argument_size_in_bytes)}, temporary "
                         f"{format_bytes(analysis.temp_size_in_bytes)}, peak {format_bytes(total)} per device"),
            ("collectives", _collectives(compiled.as_text())),
        ]  # fmt: skip
    else:
        total = sum(memory.values())
        reason = "" if device.name in COMPILED_FOR else f" (the compiler is set up for {', '.join(COMPILED_FOR)} only)"
        rows.append(
            ("compiled", f"no, activations are estimated; pip install -e '.[cuda13]' compiles for H100{reason}")
        )
    times = step_times(program, training, device, host)
    rows += _time_rows(program, training, device, times, has_host=bool(host))
    rows += _run_rows(training, mesh_config, times.step, price)
    usable = USABLE_MEMORY * device.memory_bytes
    verdict = "fits" if total <= usable else "does not fit"
    rows.append(("verdict", f"{verdict}: {format_bytes(total)} of {format_bytes(usable)} usable per {device.name}"))
    rows += _cpu_rows(program, training)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return rows + [("host memory used by planning", format_bytes(peak_bytes))]


def _model_rows(model: Model, mesh: MeshConfig, training: TrainingConfig, device: Device) -> list[tuple[str, str]]:
    length = training.sequence_length
    schedule = training.schedule(mesh)
    batch = schedule(training.steps)
    flops = [format_flops(model.flops_per_token(length, causal=causal)) for causal in (False, True)]
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes().items() if size > 1)
    return [
        ("parameters", f"{described_size(model)} ({model.num_parameters():,})"),
        ("FLOPs per token", f"{flops[0]} (attention counted in full), {flops[1]} (causal)"),
        *model.config.notes(length).items(),
        ("devices", f"{mesh.num_devices} x {device.name}: {axes or 'one device'}"),
        ("batch", f"{batch.size} x {length} tokens in "
                  f"{format_number_of(batch.num_microbatches, 'microbatch', 'microbatches')} of "
                  f"{format_number_of(batch.microbatch // mesh.batch_shards, 'sequence')} per data shard"),
        ("pipeline bubble", _bubble(model, batch.num_microbatches)),
    ]  # fmt: skip


def _cpu_rows(program: Program, training: TrainingConfig) -> list[tuple[str, str]]:
    """Memory on this machine's CPU, if the mesh could consist of virtual devices."""
    num_devices = program.mesh_config.num_devices
    if num_devices > MAX_VIRTUAL_DEVICES:
        return []
    on_device, on_host = state_bytes(program)
    activations, offloaded = activation_bytes(program.model, program.mesh_config, training, on_gpu=False)
    needed = num_devices * (sum(on_device.values()) + sum(on_host.values()) + activations + offloaded)
    total, _ = host_memory()
    verdict = "fits" if needed <= total else "does not fit"
    return [("on this machine's CPU", f"{verdict}: about {format_bytes(needed)} of {format_bytes(total)}")]


def _bubble(model: Model, num_microbatches: int) -> str:
    stages = model.stages
    if stages is None:
        return "0 (one stage)"
    table = make_table(stages.num_ranks, num_microbatches, stages.num_chunks)
    part = bubble(stages.num_ranks, num_microbatches, stages.num_chunks)
    chunks = f" in {stages.num_chunks} chunks" if stages.num_chunks > 1 else ""
    sizes = sorted({len(stage) for chunk in stages.layers for stage in chunk})
    return (
        f"{part:.1%} of the step (1F1B, {stages.num_ranks} stages{chunks} of "
        f"{' or '.join(map(str, sizes))} layers, {num_microbatches} microbatches, up to {table.num_slots} in flight)"
    )


# ----------------------------------------------------------------------------- the compiler


def devices_without_gpu(count: int, device: Device) -> list:
    """Devices that only the compiler can use; this process must not have used a device yet."""
    template = string.Template((Path(__file__).parent / "gpu_target.pbtxt").read_text())
    numbers = {"memory_bandwidth": int(device.memory_bandwidth), "memory_bytes": int(device.memory_bytes)}
    use_compiler_without_gpu()
    return compat.compile_only_devices(count, template.substitute(numbers, name=device.name))


def compile_step(program: Program[Mesh], training: TrainingConfig) -> tuple[Any, float]:
    """-> (jax.stages.Compiled of the train step, seconds). The mesh has real devices, or those of
    devices_without_gpu."""
    start = time.perf_counter()
    mesh = program.mesh
    options = compiler_options(program.model, mesh, offload_state=program.optimizer.config.offload_state)
    # Compile-only devices have no host memory: a sharding over them would lose its memory kind.
    parts = (program.model, program.task, program.optimizer, mesh.abstract_mesh, program.mesh_config, options)
    abstract = Program(*parts)
    with jax.set_mesh(mesh):
        step = abstract.train_step(training)
        compiled = step.lower(*step_arguments(abstract, training, training.steps, mesh)).compile()
    return compiled, time.perf_counter() - start


def device_peak_bytes(analysis) -> int:
    """analysis: memory_analysis() of a compiled step, whose peak includes arguments in host memory."""
    return analysis.peak_memory_in_bytes - analysis.host_argument_size_in_bytes


def _collectives(program: str) -> str:
    kinds = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"
    found = Counter(re.findall(rf" ({kinds})(?:-start)?\(", program))
    counts = ", ".join(f"{count} {kind}" for kind, count in found.items())
    return f"{counts} in the program (a loop body counts once)" if counts else "none"


# ----------------------------------------------------------------------------- time


def _time_rows(
    program: Program, training: TrainingConfig, device: Device, times: Times, *, has_host: bool
) -> list[tuple[str, str]]:
    """has_host: activations or optimizer state are offloaded to the host."""
    model = program.model
    length = training.sequence_length
    device = device.computing_in(model.precision.compute)
    overlapped = {True: " (overlaps with compute)", False: ""}
    network = ", ".join(
        f"{t.axis} {format_bytes(t.bytes)} in {format_seconds(t.seconds)}{overlapped[t.hidden]}" for t in times.traffic
    )
    rate = training.global_batch_size * length / times.step / program.mesh_config.num_devices

    def mfu(causal: bool) -> str:
        return f"{utilisation(model.flops_per_token(length, causal=causal), rate, device):.1%}"

    idle = f", bubble {format_seconds(times.idle)}" if times.idle else ""
    uneven = []
    if program.mesh_config.expert > 1 and times.routed:
        uneven = [("uneven experts", f"{format_seconds(times.routed * (UNEVEN_LOAD - 1))} more if the fullest device "
                                     f"has {UNEVEN_LOAD} times the mean load")]  # fmt: skip
    return [
        ("network per step", network or "none"),
        ("step time, estimate", f"{format_seconds(times.step)}: compute {format_seconds(times.compute)}, optimizer "
                                f"{format_seconds(times.update)}, exposed communication "
                                f"{format_seconds(times.exposed)}{idle}"),
        *uneven,
        ("speed, estimate", f"{format_count(rate)} tokens/s per device, MFU {mfu(False)} (full), {mfu(True)} (causal)"),
        *_low_precision_rows(model, device),
        ("assumptions", _assumptions(device, model, has_host=has_host, sends_to_experts=bool(uneven))),
    ]  # fmt: skip


def _low_precision_rows(model: Model, device: Device) -> list[tuple[str, str]]:
    precision = model.precision
    if not precision.is_low:
        return []
    share = low_share(model, device)
    peak = device.fp8_peak_flops
    text = (
        f"{share:.0%} of the matmul FLOPs at {FP8_EFFICIENCY:.0%} of the FP8 peak, {peak / 1e12:.0f} TFLOP/s; MFU "
        f"counts the {precision.compute} peak"
        if share and peak
        else f"emulated on {device.name}: operands are rounded, matmuls are {precision.compute}, and a step takes "
        "longer than with --precision.recipe=bf16"
    )
    return [("low precision", f"{precision.recipe}: {text}")]


def _assumptions(device: Device, model: Model, *, has_host: bool, sends_to_experts: bool) -> str:
    """device: with the peak FLOP/s of the compute dtype."""
    assumptions = [
        f"matmuls at {MATMUL_EFFICIENCY:.0%} and causal attention at {ATTENTION_EFFICIENCY:.0%} of the "
        f"{model.precision.compute} peak, {device.peak_flops / 1e12:.0f} TFLOP/s",
        f"{ACTIVATION_PASSES} reads or writes of each activation at {device.memory_bandwidth / 1e12:.2f} TB/s",
        f"{LINK_EFFICIENCY * device.link_bandwidth / 1e9:.0f} GB/s inside a host of {GPUS_PER_HOST}, "
        f"{NETWORK_BANDWIDTH / 1e9:.0f} GB/s per GPU between hosts, and {1e6 * HOP_SECONDS:.0f} us from host to host",
        "communication of fsdp, data and ring overlaps with compute and slows it; that of tensor, pipeline, gathers "
        "and all-to-all over context does not overlap",
    ]
    assumptions += ["tokens to experts do not overlap either, and their load is even"] if sends_to_experts else []
    if any(parameter.num_experts > 1 for parameter in model.parameters):
        assumptions.append(f"{EXPERT_WEIGHT_BYTES} bytes of memory traffic per weight of an expert and microbatch")
    assumptions += [f"{HOST_BANDWIDTH / 1e9:.0f} GB/s to and from the host, not overlapped"] if has_host else []
    return "; ".join(assumptions)


def _run_rows(
    training: TrainingConfig, mesh: MeshConfig, step_seconds: float, price: float | None
) -> list[tuple[str, str]]:
    """Totals of the run at the speed of its full batch, without compiling, evaluating and saving."""
    tokens = training.schedule(mesh).num_samples(training.steps) * training.sequence_length
    seconds = tokens / (training.global_batch_size * training.sequence_length) * step_seconds
    hours = seconds / 3600 * mesh.num_devices
    count = format_count(tokens)
    cost = f", {hours * price:,.0f} at {price:g} per GPU-hour" if price is not None else ""
    return [
        ("whole run, estimate", f"{count} tokens in {training.steps:,} steps: {format_seconds(seconds)}, "
                                f"{hours:,.{0 if hours >= 100 else 1}f} GPU-hours{cost}"),
    ]  # fmt: skip
