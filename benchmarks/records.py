"""What the benchmarks write down beside their numbers, and how a recorded command is read again."""

import json
import shlex
import statistics
import subprocess
from pathlib import Path
from typing import Any

import jax
import jaxlib

from benchmarks.command_line import read_config, split
from megajax.config import Config
from megajax.overrides import RENAMED

ROOT = Path(__file__).parents[1]
OPTIONS = ("config", "seconds", "steps", "windows", "rounds", "peers")
"""Of the benchmarks; the rest of a command overrides the recipe."""


def record(name: str, found: list[float], device: str, versions: dict[str, str], **others) -> dict:
    """The record that a contender prints as one line of JSON; `benchmarks.compare` reads it. found: seconds per step
    in each window."""
    median = statistics.median(found)
    return {"name": name, "step_seconds": median, "windows": found, "device": device, "versions": versions, **others}


def jax_versions() -> dict[str, str]:
    return {"jax": jax.__version__, "jaxlib": jaxlib.__version__}


def devices(number: int | None = None) -> str:
    """For example "4 x NVIDIA H200". number: of devices; by default all."""
    return f"{number or jax.device_count()} x {jax.local_devices()[0].device_kind}"


def commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    found = git("rev-parse", "--short", "HEAD") or "unknown"
    return found + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def save(path: str, found: Any) -> None:
    """Writes JSON to a file, or does nothing without a name."""
    if path:
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


def saved(path: str | Path) -> list[dict]:
    """The records of a file, which holds one or a list of them."""
    content = json.loads(Path(path).read_text())
    return content if isinstance(content, list) else [content]


def config_of(command: str) -> Config:
    """What a recorded command measured; fields that have been renamed since are found."""
    values, rest = split(shlex.split(command), dict.fromkeys(OPTIONS, ""))
    renamed = {f"--{old}": f"--{new.partition('=')[0]}" for old, new in RENAMED.items()}
    overrides = [argument.partition("=") for argument in rest if argument.startswith("--")]
    return read_config(
        values["config"], [renamed.get(name, name) + equals + value for name, equals, value in overrides]
    )
