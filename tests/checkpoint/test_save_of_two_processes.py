"""A save that fails on all processes of a run is seen before the next one succeeds; of that each reads its part."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import resource, sys, time
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.processes import initialize_processes

initialize_processes()
mesh = make_mesh(MeshConfig(fsdp=2), jax.devices())
draw = lambda: jax.random.normal(jax.random.key(0), (2048, 1024))
tree = {"w": jax.jit(draw, out_shardings=NamedSharding(mesh, P("fsdp")))()}
usual = resource.getrlimit(resource.RLIMIT_FSIZE)
with Checkpointer(sys.argv[1], CheckpointConfig(keep=0)) as checkpointer:
    save = lambda step: checkpointer.save(step, tree, {"m": tree["w"]}, {"step": step})
    save(1)
    checkpointer.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))  # as a full disk: no file grows above 1 kB
    save(2)
    end = time.monotonic() + 120
    while not checkpointer.failed_saves and time.monotonic() < end:
        checkpointer.check()
        time.sleep(0.05)
    seen = checkpointer.failed_saves
    resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    save(3)
    checkpointer.wait()
    print("seen", seen, "failed", checkpointer.failed_saves, "steps", checkpointer.steps())
    num_read = lambda: int(open("/proc/self/io").read().split()[1])  # rchar: bytes, from wherever they come
    before, like = num_read(), jax.ShapeDtypeStruct(tree["w"].shape, "float32", sharding=tree["w"].sharding)
    checkpointer.restore(3, {"w": like}, {"m": like}, {})
    print("read", (num_read() - before) / (2 * tree["w"].nbytes))
"""


@pytest.mark.fault
def test_it_is_counted_while_training_goes_on_and_the_next_one_succeeds_of_which_each_reads_half(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "JAX_PLATFORMS": "cpu"}
    common |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run")]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command, env=os.environ | common | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert "seen 1 failed 1 steps [1, 3]" in out, out + err[-3000:]
            assert 0.4 < float(out.split("read")[1]) < 0.6  # of the arrays; the other half is for the other process
    finally:
        for process in processes:
            process.kill()
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"1", "3"}
