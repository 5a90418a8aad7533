"""How the processes of a run find each other, virtual devices, and the cache of compiled programs.

With allocators.py the only file that decides by environment variables.
"""

import hashlib
import logging
import os
import platform
import re
from pathlib import Path

import jax
import jaxlib

from megajax.mesh import compat
from megajax.mesh.allocators import keep_freed_memory
from megajax.terminal.announce import announced

logger = logging.getLogger("megajax")

COMPILATION_CACHE = "~/.cache/megajax/compilation"
CPU_CACHE_SECONDS = 0.1  # loading a program takes 0.06 to 0.09 s


def initialize_processes() -> None:
    """Connects the processes of a multi-process run; does nothing in a single process.

    JAX recognises Slurm, Open MPI and Kubernetes; this function adds torchrun's MASTER_ADDR, MASTER_PORT, WORLD_SIZE
    and RANK. With LOCAL_RANK each process uses only that GPU. Call before anything touches a device.

    JAX aborts the process (SIGABRT) if the others have not connected after 5 minutes, and later if one of them has not
    been heard from for 100 s, or connects again.
    """
    env = os.environ
    is_cpu = compat.setting("jax_platforms") == "cpu"
    if is_cpu:
        compat.use_gloo()
        keep_freed_memory()
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
    if compat.setting("jax_compilation_cache_dir") is not None:
        return
    is_cpu = jax.default_backend() == "cpu"
    try:
        folder = Path(folder).expanduser()
        if is_cpu:
            folder = folder / cpu_cache_name(cpu_features(), os.environ.get("XLA_FLAGS", ""))
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


def cpu_features() -> str:
    """What XLA's compiler may depend on: model and instructions, as Linux names them on x86 and Arm."""
    names = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")
    try:
        first, *_ = Path("/proc/cpuinfo").read_text().split("\n\n")
    except OSError:  # macOS and others
        return f"{platform.machine()} {platform.processor()}"
    fields = (line.partition(":") for line in first.splitlines())
    return "\n".join(f"{name.strip()}:{value}" for name, _, value in fields if name.strip() in names)
