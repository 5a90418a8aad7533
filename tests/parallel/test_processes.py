"""What a process sets up before it touches a device."""

import ctypes
import importlib.util
import os
import platform
import types

import jax
import pytest

from megajax.mesh import allocators, processes
from megajax.mesh.config import MeshConfig, make_mesh

NAMES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS", "KUBERNETES_SERVICE_HOST")


@pytest.mark.parametrize(
    ("platforms", "plugins", "libc", "keeps"),
    [("cpu", object(), "glibc", True), (None, None, "glibc", True), (None, object(), "glibc", False),
     ("cpu", None, "", False)],
)  # fmt: skip
def test_freed_memory_is_kept_on_a_cpu_alone(platforms, plugins, libc, keeps, monkeypatch):
    settings = {}
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes.compat, "setting", lambda name: platforms)
    monkeypatch.setattr(processes.compat, "use_gloo", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: plugins)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(mallopt=settings.__setitem__))
    allocators.keep_freed_memory_without_gpu()
    processes.initialize_processes()
    assert bool(settings) == keeps


def test_jax_may_take_as_much_of_a_gpu_as_plans_count_with(monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    make_mesh(MeshConfig(), jax.devices()[:1])
    assert os.environ[name] == str(allocators.USABLE_MEMORY)
    monkeypatch.setenv(name, "0.5")
    allocators.use_gpu_memory()
    assert os.environ[name] == "0.5"
