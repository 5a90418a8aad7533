"""The device mesh: six named axes over all devices of all processes, and how the processes find each other.

The only file that reads environment variables.
"""

import dataclasses
import hashlib
import logging
import math
import os
import platform
import re
from pathlib import Path
from typing import Literal

import jax
import jaxlib
import numpy as np
from jax.sharding import AxisType, Mesh

from megajax import compat
from megajax.announce import announced
from megajax.ranges import PositiveInt

logger = logging.getLogger("megajax")

COMPILATION_CACHE = "~/.cache/megajax/compilation"
CPU_CACHE_SECONDS = 0.1  # loading a program takes 0.06 to 0.09 s
# From the slowest network to the fastest: neighbours along the last axes are in one host.
AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
MOST_VIRTUAL_DEVICES = 16
"""To suggest on a CPU; a mesh for more devices is that of a model for which a CPU is too small."""

PipelineSchedule = Literal["gpipe", "1f1b"]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    data: int = 1
    """Replicas of the model; each takes its part of the batch. One axis may be -1: all remaining devices."""
    fsdp: int = 1
    """Devices that share one copy of parameters, gradients and optimizer state (ZeRO-3); also splits the batch."""
    tensor: int = 1
    """Devices that split heads, feed-forward width and vocabulary, and the sequence between layers
    (sequence parallelism, Korthikanti et al. 2022)."""
    pipeline: int = 1
    """Pipeline stages: each device holds some of the layers, and microbatches pass through all stages."""
    expert: int = 1
    """Devices that split the experts of a mixture, and the batch everywhere else."""
    context: int = 1
    """Devices that split each sequence, attention included; also shards parameters and optimizer state, like fsdp."""
    pipeline_schedule: PipelineSchedule = "1f1b"
    """Order of the microbatches: one forward, one backward (1f1b), or all forward first (gpipe)."""
    virtual_stages: PositiveInt = 1
    """Chunks of layers per pipeline device; more than one gives interleaved 1F1B, with a smaller bubble."""
    pipeline_layout: str = ""
    """Which layers each stage has, in Megatron's notation: "tt|ttt|t*4|tt"; empty: evenly."""

    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def batch_shards(self) -> int:
        """Parts into which the batch dim is split."""
        return self.data * self.fsdp * self.expert

    @property
    def weight_shards(self) -> int:
        """Devices that share one copy of the weights, not counting those that split the layers or their matrices."""
        return self.fsdp * self.context

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes().values())

    def check(self) -> None:
        """Raises ValueError for sizes that no mesh can have."""
        free = [axis for axis, size in self.sizes().items() if size == -1]
        for axis, size in self.sizes().items():
            if size < 1 and size != -1:
                raise ValueError(f"mesh.{axis}={size} must be a positive number, or -1 for all remaining devices")
        if len(free) > 1:
            raise ValueError(
                f"mesh.{free[0]}=-1 and mesh.{free[1]}=-1: only one axis may take the remaining devices; fix one"
            )
        if self.virtual_stages > 1 and self.pipeline_schedule == "gpipe":
            raise ValueError(
                f"mesh.virtual_stages={self.virtual_stages} needs --mesh.pipeline_schedule=1f1b; gpipe has one stage "
                "per device"
            )
        if self.pipeline == 1 and (self.virtual_stages > 1 or self.pipeline_layout):
            raise ValueError(
                f"mesh.virtual_stages={self.virtual_stages}, mesh.pipeline_layout={self.pipeline_layout!r}: there is "
                "no pipeline; set --mesh.pipeline, or remove them"
            )

    def resolve(self, num_devices: int) -> "MeshConfig":
        """The same mesh with the axis -1 filled in. Raises ValueError if it does not cover the devices exactly."""
        self.check()
        sizes = self.sizes()
        free = [axis for axis, size in sizes.items() if size == -1]
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if free and num_devices % fixed == 0:
            return dataclasses.replace(self, **{free[0]: num_devices // fixed})
        if free or fixed != num_devices:
            product = " * ".join(f"{axis}({size})" for axis, size in sizes.items() if size != 1) or "data(1)"
            ways = self._ways_out(num_devices, fixed)
            raise ValueError(f"mesh: {product} does not match the number of devices, {num_devices}; {ways}")
        return self

    def _ways_out(self, num_devices: int, fixed: int) -> str:
        """What makes the mesh match the devices. fixed: product of the sizes that are not -1."""
        sizes = self.sizes()
        has_free = -1 in sizes.values()
        ways = []
        if not has_free:
            # The axes that would have another size then; data, if all have size 1.
            order = sorted(sizes, key=lambda axis: (sizes[axis] == 1, axis != "data"))
            fitting = [axis for axis in order if num_devices % (fixed // sizes[axis]) == 0]
            ways += [f"use --mesh.{axis}=-1 for the rest of the devices" for axis in fitting[:1]]
        ways.append(f"start with {'a multiple of ' if has_free else ''}{fixed} devices")
        if fixed <= MOST_VIRTUAL_DEVICES:
            ways.append(f"try the mesh on a CPU: --launch.cpu_devices={fixed}")
        else:
            ways.append("see what the run needs: --plan; recipes that end in _tiny train on a CPU")
        return ", ".join(ways[:-1]) + ", or " + ways[-1]


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """Mesh with all six axes over `devices` (default: all). Raises ValueError if the sizes do not match."""
    devices = jax.devices() if devices is None else devices
    sizes = config.resolve(len(devices)).sizes()
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def initialize_processes() -> None:
    """Connects the processes of a multi-process run; does nothing in a single process.

    JAX recognises Slurm, Open MPI and Kubernetes; this function adds torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE
    and RANK. With LOCAL_RANK each process uses only that GPU. Call before anything touches a device.

    JAX aborts the process (SIGABRT) if the others have not connected after 5 minutes, and later if one of them has not
    been heard from for 100 s, or connects again.
    """
    env = os.environ
    is_cpu = jax.config.jax_platforms == "cpu"
    if is_cpu:
        compat.use_gloo()
    if int(env.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in env:
        local = [int(env["LOCAL_RANK"])] if "LOCAL_RANK" in env and not is_cpu else None
        logger.info("process %s of %s waits for the others to connect", env["RANK"], env["WORLD_SIZE"])
        jax.distributed.initialize(
            f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', '29500')}",
            num_processes=int(env["WORLD_SIZE"]),
            process_id=int(env["RANK"]),
            local_device_ids=local,
        )
    elif any(int(env.get(name, "1")) > 1 for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")) or (
        "JAX_COORDINATOR_ADDRESS" in env or "KUBERNETES_SERVICE_HOST" in env and "JOB_COMPLETION_INDEX" in env
    ):
        with announced("waiting for the other processes to connect"):
            jax.distributed.initialize()
    else:
        return
    logger.info("process %d of %d, %d devices", jax.process_index(), jax.process_count(), jax.device_count())


def use_cpu_devices(number: int) -> None:
    """Computes on the CPU alone, split into that many virtual devices, to try a mesh without GPUs; slow.

    Takes precedence over XLA_FLAGS. Raises ValueError if JAX has other devices already.
    """
    try:
        compat.use_virtual_cpu_devices(number)
    except RuntimeError:
        devices = jax.devices()
        if devices[0].platform != "cpu" or len(devices) != number:
            raise ValueError(
                f"launch.cpu_devices={number}: JAX has started on {len(devices)} x {devices[0].device_kind} already; "
                "ask for virtual devices before anything is computed (in a notebook: restart the kernel)"
            ) from None


def use_compiler_without_gpu() -> None:
    """Lets this process compile for GPUs that it does not have. Call before anything touches a device."""
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", "")
    jax.config.update("jax_platforms", "cuda,cpu")


def xla_flags() -> dict[str, str]:
    """{name: value} of the flags that the user set in XLA_FLAGS, or in the file that it names."""
    text = os.environ.get("XLA_FLAGS", "").strip()
    if text and not text.startswith("-"):
        text = Path(text).read_text()
    return dict(re.findall(r"--(\w+)(?:=(\S*))?", text))


def use_compilation_cache(folder: str | Path = COMPILATION_CACHE) -> None:
    """From now on, programs that take a second or more to compile for a GPU are cached in `folder`, and those that take
    a tenth of a second for a CPU in a folder of its own in there.

    JAX's own settings take precedence: JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE=false.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    is_cpu = jax.default_backend() == "cpu"
    try:
        folder = Path(folder).expanduser()
        if is_cpu:
            folder = folder / cpu_cache_name(_cpu_features(), os.environ.get("XLA_FLAGS", ""))
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("permission denied")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        logger.warning("compiled programs are not cached: %s cannot be written (%s)", folder, error)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if is_cpu:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CPU_CACHE_SECONDS)


def cpu_cache_name(features: str, flags: str) -> str:
    """Folder of the programs for one CPU: for JAX all CPUs are alike, and it would load a program with instructions
    that another one does not have (jax#38445). features: of the CPU; flags: of XLA."""
    described = "\n".join((jaxlib.__version__, features, flags))
    return f"cpu-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def _cpu_features() -> str:
    """What XLA's compiler may depend on: model and instructions, as Linux names them on x86 and Arm."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
    try:
        first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    except OSError:  # macOS and others
        return f"{platform.machine()} {platform.processor()}"
    fields = (line.partition(":") for line in first.splitlines())
    return "\n".join(f"{name.strip()}:{value}" for name, _, value in fields if name.strip() in names)
