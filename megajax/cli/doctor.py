"""What a bug report needs: megajax doctor

Prints devices, versions, installed extras, the cache of compiled programs, free
disk and memory, and how long a small compilation and a matmul take. Begin a
bug report with the first line. Whatever fails is marked FAILED, and the exit
status is then 1.
"""

import importlib.metadata
import platform
import re
import shutil
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import megajax
from megajax.fields.suggestions import did_you_mean
from megajax.terminal.one_line import in_one_line
from megajax.training.reporting.console import Console, format_bytes, format_number_of, format_seconds

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tensorstore")
PYPROJECT = Path(megajax.__file__).parents[1] / "pyproject.toml"


def main(arguments: list[str]) -> None:
    if arguments in (["--help"], ["-h"]):
        print(__doc__.rstrip())
        return
    if arguments:
        raise ValueError(f"megajax doctor {arguments[0]}: there are no options{did_you_mean(arguments[0], ['--help'])}")
    devices, works = _tried(_devices)
    versions = f"Python {platform.python_version()}, jax {_version('jax')}, jaxlib {_version('jaxlib')}"
    rows = [("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))]
    for name, check in CHECKS.items():
        text, is_fine = _tried(check)
        works &= is_fine
        rows.append((name, text))
    Console().card(f"megajax {megajax.__version__}, {versions}, {devices}, {platform.platform(terse=True)}", rows)
    if not works:
        raise SystemExit(1)


def _tried(check: Callable[[], str]) -> tuple[str, bool]:
    """-> (what it found or why it failed, whether it worked)."""
    try:
        return check(), True
    except Exception as error:  # of any library: this is what the doctor is for
        return f"FAILED: {in_one_line(error)}", False


def _devices() -> str:
    import jax

    from megajax.terminal.announce import announced

    with announced("starting the devices"):
        devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _extras() -> str:
    installed = []
    others = []
    for extra, packages in extras().items():
        missing = [name for name in packages if _version(name) == "missing"]
        if not missing:
            installed.append(extra)
        elif len(missing) == len(packages):
            others.append(extra)
        else:
            others.append(f"{extra} (lacks {', '.join(missing)})")
    return f"{', '.join(installed) or 'none'}; not installed: {', '.join(others) or 'none'}"


def extras() -> dict[str, list[str]]:
    """Extra -> names of its packages, as pyproject.toml says, or, without a clone, the metadata of the package."""
    if PYPROJECT.is_file():
        found = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    else:
        metadata = importlib.metadata.metadata("megajax")
        found = {name: [] for name in metadata.get_all("Provides-Extra", ())}
        for line in metadata.get_all("Requires-Dist", ()):
            if named := re.search(r"extra == ['\"]([\w-]+)", line):
                found[named[1]].append(line)

    def packages(extra: str) -> list[str]:
        names = []
        for requirement in found[extra]:
            ((name, parts),) = re.findall(r"^([\w.-]+)(?:\[([\w,-]+)\])?", requirement)
            if name == "megajax":
                names += [package for part in parts.split(",") for package in packages(part)]
            else:
                names.append(f"jax-{parts}-plugin" if name == "jax" else name)
        return sorted(set(names))

    return {extra: packages(extra) for extra in found}


def _compiled() -> str:
    import jax

    from megajax.mesh.processes import COMPILATION_CACHE, use_compilation_cache

    use_compilation_cache()
    folder = Path(getattr(jax.config, "jax_compilation_cache_dir", None) or COMPILATION_CACHE).expanduser()
    files = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return f"{folder}: {format_number_of(len(files), 'file')}, {format_bytes(sum(files))}"


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return f"{format_bytes(usage.free)} of {format_bytes(usage.total)} free in {Path.cwd()}"


def _memory() -> str:
    from megajax.planning.memory import host_memory

    total, available = host_memory()
    return f"{format_bytes(available)} of {format_bytes(total)} free"


def _flags() -> str:
    from megajax.mesh.processes import xla_flags

    return " ".join(f"{name}={value}" for name, value in xla_flags().items()) or "none"


def _matmul() -> str:
    """A matmul that keeps a device busy for some milliseconds."""
    import jax
    import jax.numpy as jnp

    is_cpu = jax.default_backend() == "cpu"
    size, dtype = (1024, jnp.float32) if is_cpu else (8192, jnp.bfloat16)
    x = jnp.ones((size, size), dtype)
    started = time.perf_counter()
    multiply = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile()
    compiling = time.perf_counter() - started
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        multiply(x).block_until_ready()
        seconds.append(time.perf_counter() - started)
    speed = 2 * size**3 / min(seconds) / 1e12
    return (
        f"{size} x {size} in {dtype.__name__}: {format_seconds(min(seconds))}, {speed:.3g} TFLOP/s; compiled in "
        f"{format_seconds(compiling)}"
    )


CHECKS = {
    "extras": _extras,
    "compiled programs": _compiled,
    "disk": _disk,
    "memory": _memory,
    "XLA_FLAGS": _flags,
    "matmul": _matmul,
}
