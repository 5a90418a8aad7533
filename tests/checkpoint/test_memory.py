"""What saving and restoring take beside the arrays themselves."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig

mib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # the highest that it has been
step, folder = sys.argv[1:]
shapes = {f"w{number}": (8, 1024, 1024) for number in range(16)}  # 32 MiB each
config = CheckpointConfig() if step == "save" else None
arrays = {}
if step == "save":
    arrays = {name: jnp.full(shape, number, jnp.float32) for number, (name, shape) in enumerate(shapes.items())}
    jax.block_until_ready(arrays)
before = mib()
with Checkpointer(folder, config) as checkpointer:
    if step == "save":
        checkpointer.write(1, {"params": arrays, "optimizer": {"count": jnp.zeros(())}}, {"layer_rows": {}})
        checkpointer.wait()
    else:
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place) for name, shape in shapes.items()}
        arrays = jax.block_until_ready(checkpointer.restore_params(1, like, {}))
        assert float(arrays["w7"][0, 0, 0]) == 7
print(mib() - before)
"""


def test_saving_holds_the_arrays_once_more_and_restoring_no_more_than_that(tmp_path):
    def more_memory(step: str) -> float:
        words = [sys.executable, "-c", PROGRAM, step, str(tmp_path)]
        flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        root = Path(__file__).parents[2]
        done = subprocess.run(words, cwd=root, env=os.environ | flags, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return float(done.stdout)

    saving, restoring = more_memory("save"), more_memory("restore")
    # MiB, of 512: a copy to write while training goes on; the arrays themselves, and what their digests take on a CPU.
    assert saving < 1.25 * 512 and restoring < 2.25 * 512
