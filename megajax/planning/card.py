"""The start-up card: what will be trained, on what, and what it will need."""

import jax
import jax.numpy as jnp

from megajax.data.datasets import Datasets
from megajax.models.model import Model
from megajax.planning.memory import memory_per_device, memory_rows, unsplit_rows
from megajax.training.config import TrainingConfig
from megajax.training.program import Program
from megajax.training.reporting.console import format_count, format_flops, format_number_of

SHOWN_SOURCES = 8


def startup_rows(program: Program, training: TrainingConfig, datasets: Datasets) -> list[tuple[str, str]]:
    """(name, value) rows for Console.card."""
    model = program.model
    mesh = program.mesh
    length = training.sequence_length
    tokens = training.global_batch_size * length
    memory, host = memory_per_device(program, training)
    axes = " x ".join(f"{axis} {size}" for axis, size in program.mesh_config.sizes().items() if size > 1)
    processes = format_number_of(jax.process_count(), "process", "processes")
    flops = [format_flops(model.flops_per_token(length, causal=causal)) for causal in (False, True)]
    return [
        ("parameters", described_size(model)),
        ("FLOPs per token", f"{flops[0]} (attention counted in full), {flops[1]} (causal)"),
        *model.config.notes(length).items(),
        ("devices", f"{mesh.size} x {mesh.devices.flat[0].device_kind}, {processes}"),
        ("mesh", axes or "one device"),
        ("precision", described_precision(program)),
        *memory_rows(memory, host),
        *unsplit_rows(program),
        ("batch", f"{training.global_batch_size} x {length} = {format_count(tokens)} tokens per step"),
        *_data_rows(datasets, training.steps),
        ("compiler options", " ".join(f"{name}={value}" for name, value in program.compiler_options.items()) or "none"),
    ]  # fmt: skip


def described_size(model: Model) -> str:
    """The number of parameters and, with experts, of those that each token uses; of those that are trained, if not all
    are."""
    total = model.num_parameters()
    trained = sum(parameter.size for parameter in model.parameters if parameter.is_trained)
    experts = any(parameter.num_experts > 1 for parameter in model.parameters)
    active = f", {format_count(model.num_active_parameters())} active" if experts else ""
    return format_count(total) + active + (f", {format_count(trained)} trained" if trained < total else "")


def _parameters(model: Model) -> str:
    if model.trains_adapters:
        weights = zip(jax.tree.leaves(model.abstract_weights), jax.tree.leaves(model.records), strict=True)
        found = {leaf.dtype.name for leaf, record in weights if record.role == "matrix"}
        return f"adapters float32, frozen matrices {' and '.join(sorted(found))}"
    if model.precision.params == "float32":
        return "parameters float32"
    return f"matrices {model.precision.params} with remainders, other parameters float32"


def described_precision(program: Program) -> str:
    """Number formats of parameters and computation, of sums over devices, and of moments if they are rounded."""
    model = program.model
    compute = jnp.dtype(model.precision.compute_dtype).name
    parts = [_parameters(model), f"compute {compute}{_low_matmuls(model)}"]
    if program.mesh.size > 1:
        reduced = "float32" if model.precision.has_float32_gradients else compute
        parts.append(f"gradients of matrices summed over devices in {reduced}")
    moments = program.optimizer.config.moments
    return ", ".join(parts + ([f"moments {moments}"] if moments != "float32" else []))


def _low_matmuls(model: Model) -> str:
    precision = model.precision
    if not precision.is_low:
        return ""
    named = {"of layers": precision.low_matrices, "of the output layer": precision.head_recipe}
    where = " and ".join(name for name, is_low in named.items() if is_low)
    has_experts = any(parameter.num_experts > 1 for parameter in model.parameters)
    experts = f", of experts {precision.compute}" if has_experts else ""
    return f", matmuls {where} {precision.recipe}{experts}"


def _data_rows(datasets: Datasets, steps: int) -> list[tuple[str, str]]:
    """The datasets of a run and their epochs; if there are many, those read most often."""
    if not datasets.sources:
        return [("data", "batches that the program gives")]
    if datasets.is_mock:
        return [("data", "mock: documents that count 1, 2, 3, ...; name your own with --data.text or --data.paths")]
    sources = sorted(datasets.sources, key=lambda source: -source.epochs)
    total = sum(source.num_samples for source in sources)
    in_steps = f"in {format_number_of(steps, 'step')}"
    if len(sources) == 1:
        epochs = f"{sources[0].epochs:.2f} epochs {in_steps}"
        return [("data", f"{format_count(datasets.train_tokens_per_epoch)} tokens per epoch, {epochs}")]
    rows = [
        ("", f"{source.name}: {source.num_samples / total:.1%}, {source.epochs:.2f} epochs of "
             f"{format_count(source.tokens_per_epoch)} tokens")
        for source in sources[:SHOWN_SOURCES]
    ]  # fmt: skip
    more = f", {len(sources) - SHOWN_SOURCES} more read less often" if len(sources) > SHOWN_SOURCES else ""
    return [("data", f"{len(sources)} datasets {in_steps}{more}"), *rows]
