"""What XLA is told about the train step: a profile by chip, mesh, bytes of a layer and offload.

The options go to `jax.jit(compiler_options=...)`, not into XLA_FLAGS: they hold for the train step alone, and one that
the installed jaxlib does not know can be caught and left out, where an unknown name in XLA_FLAGS aborts the process.
What a person asks for counts more: `execution.compiler_options`, then XLA_FLAGS, then the profile. What each option is
worth here, `python -m benchmarks.settings.ablation --config=NAME` measures; names and defaults are in xla/xla.proto.
"""

import dataclasses
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import jaxlib
from jax.sharding import Mesh, SingleDeviceSharding

from megajax.mesh import xla_flags
from megajax.models.model import Model

logger = logging.getLogger("megajax")

DEFAULT_COMBINE_BYTES = 30 * 2**20  # XLA merges collectives up to this size, unless told otherwise


@dataclasses.dataclass(frozen=True)
class Target:
    """What the profile may depend on."""

    chip: str
    """As JAX names it: "NVIDIA H100 80GB HBM3", "cpu"."""
    num_devices: int
    layer_bytes: int
    """Weights of one layer in the compute dtype, as a device computes with them."""
    weight_shards: int
    """Devices that share one copy of the weights (mesh.fsdp times mesh.context)."""
    scanned: bool
    """The layers are a loop of the program, or lie in one over the microbatches of a pipeline."""
    has_ring: bool = False
    """Keys and values go around a ring beside the attention (mesh.context)."""
    offloads: bool = False
    """Activations or moments lie on the host between their uses."""
    deterministic: bool = False
    """The same bits in every run (execution.deterministic)."""

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
    """In a loop of layers no collective is merged with one of the next turn anyway."""
    return target.weight_shards > 1 and not target.scanned


PROFILE = (
    Option(
        "xla_gpu_enable_triton_gemm",
        value=lambda target: False,
        when=lambda target: any(name in target.chip for name in ("H100", "H200")),
        why="matmuls by cuBLAS alone, which then adds in place and applies the activation in its epilogue: "
        "185.2 -> 183.2 ms for 8 layers of Llama 8B on one H100, 793 -> 785 for all on 4 H200, on another machine "
        "801.4 -> 800.3 (jaxlib 0.11.2; benchmarks/README.md)",
    ),
    Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        value=lambda target: target.layer_shard_bytes,
        when=lambda target: _shares_unrolled_layers(target) and target.layer_shard_bytes < DEFAULT_COMBINE_BYTES,
        why="the threshold counts the shard that comes out: over 64 devices the default holds the gradients of 4.6 "
        "layers of Llama 8B, and those of 6 layers left in 4 pieces at the end of the backward pass, not layer by "
        "layer in 11 (compiled for H100, jaxlib 0.10.2)",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        value=lambda target: 8,
        when=lambda target: target.has_ring,
        why="keys, values and their gradients travel in four messages at once; by default one is under way at a time, "
        "and the attention of the step hides only the last (order of the compiled program for H100, jaxlib 0.10.2)",
    ),
    Option(
        "xla_gpu_enable_analytical_sol_latency_estimator",
        value=lambda target: False,
        when=lambda target: target.offloads and target.num_devices == 1,
        why="with it the scheduler puts matmuls of weight gradients off, to have work beside copies to the host, and "
        "keeps their operands: 26.4 GiB of temporary memory, not 10.6 (gpt_1p3b, full recompute, optimizer offloaded; "
        "compiled for H100, jaxlib 0.10.2). On a mesh it also hides collectives, and has to stay",
    ),
    Option(
        "xla_gpu_deterministic_ops",
        value=lambda target: True,
        when=lambda target: target.deterministic,
        why="scatters and cuDNN's attention add in one order, and which algorithm a matmul takes is not measured anew "
        "by each process",
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
    """For jit_train_step on this mesh: the profile, as far as jaxlib knows it and XLA_FLAGS leaves it open, and
    execution.compiler_options. Raises ValueError if jaxlib refuses something that was requested.

    offload_state: optimizer.offload_state.
    """
    target = target_of(model, mesh)
    target = dataclasses.replace(target, offloads=target.offloads or offload_state)
    ours = choose(PROFILE, target)
    theirs = parse(model.execution.compiler_options)
    in_environment = xla_flags()
    for name, value in theirs.items():
        if why := refusal(name, value, mesh):
            raise ValueError(f"execution.compiler_options: {name}={value} is refused by jaxlib {jaxlib.__version__} "
                             f"({why}); correct it or leave it out")  # fmt: skip
    for name, value in list(ours.items()):
        if name in theirs or name in in_environment:
            del ours[name]
        elif why := refusal(name, value, mesh):
            logger.info("compiler option %s=%s left out: jaxlib %s refuses it (%s)", name, value,
                        jaxlib.__version__, why)  # fmt: skip
            del ours[name]
    return ours | theirs


def parse(text: str) -> dict[str, str]:
    """'xla_gpu_a=1 xla_gpu_b=x,y' -> {name: value}, as XLA reads them. Raises ValueError for what is not NAME=VALUE."""
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
    """Why the installed jaxlib does not take the option, or "". Compiles a program of one addition (20 ms)."""
    scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(mesh.local_devices[0]))
    try:
        jax.jit(lambda x: x + 1, compiler_options={name: value}).lower(scalar).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
    return ""
