"""Where an operation is run: on several meshes, and inside a stage of a pipeline."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax import compat

MESHES = {
    "one device": {},
    "data fsdp tensor": {"data": 2, "fsdp": 2, "tensor": 2},
    "context expert tensor": {"context": 2, "expert": 2, "tensor": 2},
    "context": {"context": 8},
    "pipeline fsdp tensor": {"pipeline": 2, "fsdp": 2, "tensor": 2},
}


@pytest.fixture(params=MESHES)
def mesh(request, make_test_mesh):
    mesh = make_test_mesh(**MESHES[request.param])
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def interpreter(capfd):
    """Of GPU kernels, on CPU: memory begins as NaN, reads out of bounds raise, and a race of warpgroups, or with TMA,
    fails the test at its end (a missing fence between them does from jax 0.11 on)."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    yield params.InterpretGPUParams(uninitialized_memory="nan", out_of_bounds_reads="raise", detect_races=True)
    assert "RACE DETECTED" not in capfd.readouterr().out


STAGES = {"pipeline": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture
def on_stages(make_test_mesh):
    """(f, *arguments) -> [f(*arguments)] of each stage of a pipeline: a region manual over `pipeline` only, where
    fsdp 2 and tensor 2 are still XLA's."""

    def run(f, *arguments):
        def stage(*arguments):
            arguments = jax.tree.map(lambda a: jax.lax.pcast(a, ("pipeline",), to="varying"), arguments)
            return jax.tree.map(lambda a: a[None], f(*arguments))

        stages = jax.shard_map(stage, axis_names={"pipeline"}, in_specs=P(), out_specs=P("pipeline"))
        with jax.set_mesh(make_test_mesh(**STAGES)):
            both = jax.jit(stages)(*arguments)
        return [jax.tree.map(lambda a, number=number: np.asarray(a[number]), both) for number in range(2)]

    return run


@pytest.fixture
def over_stages(make_test_mesh):
    """(f, in_specs, out_specs, *arguments) -> f(*arguments), with what these split over `pipeline` split over the
    stages of on_stages."""

    def run(f, in_specs, out_specs, *arguments):
        stages = jax.shard_map(f, axis_names={"pipeline"}, in_specs=in_specs, out_specs=out_specs)
        with jax.set_mesh(make_test_mesh(**STAGES)):
            return jax.jit(stages)(*arguments)

    return run


@pytest.fixture
def compile_for_hopper():
    """(program) -> the lines that it prints, in a process of its own that may compile for a GPU that is not there."""
    if not compat.gpu_compiler_installed():
        pytest.skip("needs the CUDA wheels: pip install -e '.[cuda13]'")

    def run(program: str) -> list[str]:
        environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
        command, root = [sys.executable, "-c", program], Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run
