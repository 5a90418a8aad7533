"""XLA compiler options of the train step: a profile chosen by chip, mesh, bytes per layer and offloading.

The options are passed to `jax.jit(compiler_options=...)`, not set in XLA_FLAGS: they apply to the train step alone, and
one that the installed jaxlib does not know can be left out, whereas an unknown name in XLA_FLAGS aborts the process. In
order of precedence: `execution.compiler_options`, XLA_FLAGS, the profile. `python -m benchmarks.settings.ablation
--config=NAME` measures the effect of each option; names and defaults are in xla/xla.proto.
"""

import dataclasses
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import Mesh, SingleDeviceSharding

from megajax.mesh.processes import xla_flags
from megajax.models.model import Model

logger = logging.getLogger("megajax")

DEFAULT_COMBINE_BYTES = 30 * 2**20  # XLA's default: collectives are combined up to this size


@dataclasses.dataclass(frozen=True)
class Target:
    """What the profile may depend on."""

    chip: str
    """As JAX names it: "NVIDIA H100 80GB HBM3", "cpu"."""
    num_devices: int
    layer_bytes: int
    """Weights of one layer in the compute dtype, as one device computes with them."""
    weight_shards: int
    """Number of shards of each weight (mesh.fsdp times mesh.context)."""
    scanned: bool
    """The layers run in a loop: a scan over layers, or over the microbatches of a pipeline."""
    has_ring: bool = False
    """Ring attention: keys and values are sent around a ring during the attention (mesh.context)."""
    offloads: bool = False
    """Activations or optimizer state are offloaded to the host."""
    deterministic: bool = False
    """Bitwise reproducible (execution.deterministic)."""

    @property
    def layer_shard_bytes(self) -> int:
        return self.layer_bytes // self.weight_shards


@dataclasses.dataclass(frozen=True)
class Option:
    name: str
    value: Callable[[Target], str | int | bool]
    when: Callable[[Target], bool]
    why: str


def _shares_unrolled_layers(target: Target) -> bool:
    """In a loop over layers, collectives of different iterations are never combined anyway."""
    return target.weight_shards > 1 and not target.scanned


PROFILE = (
    Option(
        "xla_gpu_enable_triton_gemm",
        value=lambda target: False,
        when=lambda target: any(name in target.chip for name in ("H100", "H200")),
        why="cuBLAS does all matmuls, and then accumulates in place and fuses the activation into its epilogue: "
        "185.2 -> 183.2 ms for 8 layers of Llama 8B on one H100, 793 -> 785 ms for all layers on 4 H200, on another "
        "machine 801.4 -> 800.3 ms (jaxlib 0.11.2; benchmarks/README.md)",
    ),
    Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=lambda target: target.layer_shard_bytes,
        when=lambda target: _shares_unrolled_layers(target) and target.layer_shard_bytes < DEFAULT_COMBINE_BYTES,
        why="the threshold counts the output shard: over 64 devices the default combines the gradients of 4.6 layers "
        "of Llama 8B, so that those of 6 layers were reduced in 4 collectives at the end of the backward pass instead "
        "of 11 collectives, layer by layer (compiled for H100, jaxlib 0.10.2)",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        value=lambda target: 8,
        when=lambda target: target.has_ring,
        why="keys, values and their gradients are sent as four concurrent messages; by default one is in flight at a "
        "time, and the attention overlaps with the last only (as scheduled for H100, jaxlib 0.10.2)",
    ),
    Option(
        "xla_gpu_enable_analytical_sol_latency_estimator",
        value=lambda target: False,
        when=lambda target: target.offloads and target.num_devices == 1,
        why="with it the scheduler delays matmuls of weight gradients, to overlap them with copies to the host, and "
        "keeps their operands: 26.4 GiB of temporary memory instead of 10.6 (gpt_1p3b, full recompute, optimizer "
        "offloaded; compiled for H100, jaxlib 0.10.2). On a mesh it also overlaps collectives and remains enabled",
    ),
    Option(
        "xla_gpu_deterministic_ops",
        value=lambda target: True,
        when=lambda target: target.deterministic,
        why="scatters and cuDNN's attention sum in a fixed order, and the algorithm of a matmul is not autotuned by "
        "each process",
    ),
)


def choose(options: tuple[Option, ...], target: Target) -> dict[str, str]:
    """{name: value} of the options that apply; none on anything but an NVIDIA GPU."""
    if "NVIDIA" not in target.chip:
        return {}
    return {option.name: str(option.value(target)) for option in options if option.when(target)}


def target_of(model: Model, mesh: Mesh) -> Target:
    in_layers = sum(parameter.computed(mesh.shape) for parameter in model.parameters if parameter.is_in_a_layer)
    itemsize = jnp.dtype(model.precision.compute_dtype).itemsize
    execution = model.execution
    return Target(
        chip=mesh.devices.flat[0].device_kind,
        num_devices=mesh.size,
        layer_bytes=int(in_layers * itemsize / model.num_layers),
        weight_shards=mesh.shape["fsdp"] * mesh.shape["context"],
        scanned=model.scans,
        has_ring=mesh.shape["context"] > 1 and execution.context_attention == "ring",
        offloads=bool(execution.offload),
        deterministic=execution.deterministic,
    )


def compiler_options(model: Model, mesh: Mesh, *, offload_state: bool = False) -> dict[str, str]:
    """Options of jit_train_step on this mesh: execution.compiler_options, and those of the profile that jaxlib accepts
    and XLA_FLAGS does not set. Raises ValueError if jaxlib refuses an option of execution.compiler_options.

    offload_state: optimizer.offload_state.
    """
    target = target_of(model, mesh)
    target = dataclasses.replace(target, offloads=target.offloads or offload_state)
    requested = parse(model.execution.compiler_options)
    for name, value in requested.items():
        if why := refusal(name, value, mesh):
            raise ValueError(f"execution.compiler_options: {name}={value} is refused by jaxlib {jaxlib.__version__} "
                             f"({why}); correct it or leave it out")  # fmt: skip
    chosen = choose(PROFILE, target).items()
    return accepted({name: value for name, value in chosen if name not in requested}, mesh) | requested


def accepted(options: dict[str, str], mesh: Mesh) -> dict[str, str]:
    """Those of the options that XLA_FLAGS does not set and jaxlib accepts; what it refuses is logged."""
    environment_flags = xla_flags()
    found = {}
    for name, value in options.items():
        if name in environment_flags:
            continue
        if why := refusal(name, value, mesh):
            logger.info("compiler option %s=%s left out: jaxlib %s refuses it (%s)", name, value,
                        jaxlib.__version__, why)  # fmt: skip
        else:
            found[name] = value
    return found


def parse(text: str) -> dict[str, str]:
    """'xla_gpu_a=1 xla_gpu_b=x,y' -> {name: value}, as XLA reads them. Raises ValueError for an entry that is not
    NAME=VALUE."""
    options = {}
    for entry in text.split():
        name, equals, value = entry.partition("=")
        if not equals or not name.startswith("xla_"):
            raise ValueError(
                f"execution.compiler_options: {entry!r} is not xla_NAME=VALUE; separate several by spaces, as in "
                "--execution.compiler_options='xla_gpu_enable_triton_gemm=False xla_gpu_graph_min_graph_size=10'"
            )
        options[name] = {"true": "True", "false": "False"}.get(value, value)
    return options


def refusal(name: str, value: str, mesh: Mesh) -> str:
    """Why the installed jaxlib refuses the option, or "". Compiles a program with one addition (20 ms)."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(mesh.local_devices[0]))
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    return ""
