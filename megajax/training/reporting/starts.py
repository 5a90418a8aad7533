"""starts.jsonl of a run: one line each time it starts, with what it ran on."""

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
    """What a start of the run ran on, for whoever compares speeds later: a line of starts.jsonl."""
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
    """When the run was started for the first time, in seconds since 1970; now, if nothing says when."""
    path = run_dir / "starts.jsonl"
    try:
        with path.open() as file:
            return datetime.fromisoformat(json.loads(file.readline())["time"]).timestamp()
    except FileNotFoundError:
        return time.time()
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read (%s): goodput counts from this start on", path, error)
        return time.time()
