"""A second process finds what the first one compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import jax, jax.numpy as jnp
from megajax.mesh.processes import use_compilation_cache
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
use_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jax.random.normal(jax.random.key(0), (512, 512))
y = jax.jit(lambda x: jnp.tanh(x @ x).sum(), compiler_options={"xla_gpu_enable_triton_gemm": False})(x)
hits = events.count("/jax/compilation_cache/cache_hits")
print(hits, events.count("/jax/compilation_cache/cache_misses"), float(y).hex())
"""


@pytest.mark.gpu
def test_second_process_compiles_nothing_and_computes_the_same(tmp_path):
    def run() -> list[str]:
        # The tests before this one hold most of the GPU's memory.
        environment = {**os.environ, "HOME": str(tmp_path), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-c", PROGRAM]
        root = Path(__file__).parents[2]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, second = run(), run()
    assert int(first[0]) == 0 and int(first[1]) > 0
    assert int(second[0]) == int(first[1]) and int(second[1]) == 0
    assert second[2] == first[2]
