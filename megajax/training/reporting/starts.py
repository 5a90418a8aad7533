"""starts.jsonl of a run: one line per start, with devices and versions."""

import json
import logging
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from megajax import compat
from megajax.mesh import xla_flags

logger = logging.getLogger("megajax")


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


def first_start(run_dir: Path) -> float:
    """When the run was first started, in seconds since 1970; now, if that is not recorded."""
    path = run_dir / "starts.jsonl"
    try:
        with path.open() as file:
            return datetime.fromisoformat(json.loads(file.readline())["time"]).timestamp()
    except FileNotFoundError:
        return time.time()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): goodput counts from this start", path, error)
        return time.time()
