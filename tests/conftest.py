"""Every test runs on CPU with 8 virtual devices, unless pytest is called with `-m gpu`; no silent type promotion."""

import gc
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

# The workers of `pytest -n` inherit the environment.
if "PYTEST_XDIST_WORKER" not in os.environ and "gpu" in sys.argv:
    # Compiling takes the time here too: XLA takes the first kernel that it knows for a product, instead of the fastest.
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # several workers share a GPU
elif "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Compiling is what tests spend their time on: the code need not be fast.
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
    if version("jaxlib").startswith("0.10."):  # others may end a process that gives them a flag they do not know
        flags.append("--xla_cpu_use_fusion_emitters=false")  # a third of the time
        # A busy machine may take more than 40 s to run all eight devices as far as a collective.
        flags.append("--xla_cpu_collective_call_terminate_timeout_seconds=300")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # Threads of XLA. A device blocks one for each independent collective that waits; with the default, one per device,
    # none may be left for the device that the others wait for.
    os.environ["NPROC"] = "32"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reads from the hub

import jax
import pytest

from megajax.mesh import compat
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.lowering import lowering
from megajax.mesh.processes import cpu_cache_name, cpu_features
from megajax.mesh.stored_programs import StoredPrograms
from megajax.ops import matmul
from megajax.ops.attention_backends import BACKENDS

gc.set_threshold(50_000, 20, 50)  # while the tests were imported, looking for cycles took 3 of 11 s
StoredPrograms.enabled = False  # tests replace functions
lowering.num_processes = 0
matmul.MIN_JOINED_ROWS = 64  # so that small training batches take the path of large ones
jax.config.update("jax_numpy_dtype_promotion", "strict")

PROGRAMS = Path("~/.cache/megajax/tests").expanduser()
MAX_PROGRAM_BYTES = 2**30  # one run of the suite adds about 100 MB


def keep_latest(folder: Path, max_bytes: int) -> None:
    """Removes the files that have not been read for the longest time. JAX's own limit reads the folder for each program
    that it adds: 0.3 s where there are 10,000."""
    files = [(path.stat(), path) for path in folder.rglob("*") if path.is_file()]
    total = sum(stat.st_size for stat, _ in files)
    for stat, path in sorted(files, key=lambda file: file[0].st_atime):
        if total <= max_bytes:
            return
        path.unlink(missing_ok=True)
        total -= stat.st_size


if os.environ.get("JAX_PLATFORMS") == "cpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What a test has compiled, other tests, their processes and later sessions need not compile again. None of it can
    # be out of date: JAX finds a program by its whole text, the version of the compiler and its options, and each CPU
    # and each choice of flags has its own folder. A file that was cut off is compiled again, with a warning.
    keep_latest(PROGRAMS, MAX_PROGRAM_BYTES)
    programs = PROGRAMS / cpu_cache_name(cpu_features(), os.environ["XLA_FLAGS"])
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)  # for processes that are started, pytest's workers too
    jax.config.update("jax_compilation_cache_dir", str(programs))


@pytest.fixture(scope="session")
def make_test_mesh():
    """Sizes of the axes -> a mesh over the first devices."""

    def make(**sizes: int):
        config = MeshConfig(**sizes)
        return make_mesh(config, jax.devices()[: config.num_devices])

    return make


@pytest.fixture
def compiled():
    """Names of the programs that are compiled, or found compiled on disk, from here on."""
    names = []

    def listen(event: str, seconds: float, fun_name: str = "", **_) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def terminal():
    """SIGHUP is not ignored, here and in processes that are started, although the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def compile_for_hopper():
    """(program) -> the lines that it prints, in a process of its own that may compile for a GPU that is not there."""
    if not compat.gpu_compiler_installed():
        pytest.skip("needs the CUDA wheels: pip install -e '.[cuda13]'")

    def run(program: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
        command, root = [sys.executable, "-c", program], Path(__file__).parents[1]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run


@pytest.fixture
def stand_in(monkeypatch):
    """(backend of attention, attributes): registers it as one that supports all inputs, without a GPU, and has these
    attributes."""

    def register(backend, **attributes):
        attributes |= dict(problem=lambda self, inputs: "")
        monkeypatch.setitem(BACKENDS, backend.name, type("StandIn", (backend,), attributes)())

    return register
