"""starts.jsonl of a run: one line per start, with devices and versions."""

import time
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from megajax.mesh import compat
from megajax.mesh.processes import xla_flags


def start_record(mesh: Mesh, compiler_options: dict[str, str]) -> dict[str, Any]:
    """A line of starts.jsonl: devices, versions and compiler options, to compare speeds later."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "processes": jax.process_count(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "cudnn": compat.cudnn_version(),
        "compiler_options": compiler_options,
        "xla_flags": xla_flags(),
    }
