"""Every test runs on CPU with 8 virtual devices, unless pytest is called with `-m gpu`; no silent type promotion."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
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
    if version("jaxlib").startswith("0.10."):  # a third of the time; others end a process that gives them this flag
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # And what one test has compiled, another one or its processes need not compile again; a later session does.
    programs = tempfile.TemporaryDirectory(prefix="megajax-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import pytest

from megajax.mesh import compat
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops import matmul
from megajax.ops.attention_backends import BACKENDS

gc.set_threshold(50_000, 20, 50)  # while the tests were imported, looking for cycles took 3 of 11 s
matmul.MIN_JOINED_ROWS = 64  # so that small training batches take the path of large ones
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(scope="session")
def make_test_mesh():
    """Sizes of the axes -> a mesh over the first devices."""

    def make(**sizes: int):
        config = MeshConfig(**sizes)
        return make_mesh(config, jax.devices()[: config.num_devices])

    return make


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
