"""Kernels that are compiled beside their program."""

import jax
import jax.numpy as jnp
import pytest

from megajax.mesh.kernels import compile_kernels

PROGRAM = """
import logging, sys
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from megajax.mesh import compat
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.kernels import compile_kernels
from megajax.ops.norm import residual_norm
from megajax.planning.plan import devices_without_gpu, plan_device

logging.basicConfig(stream=sys.stdout)
logging.getLogger("megajax").setLevel(logging.INFO)
mesh = make_mesh(MeshConfig(), devices_without_gpu(1, plan_device("h100")))
def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

@jax.jit
def layers(x, scale):
    for _ in range(3):
        x = residual_norm(x, None, scale, None, 1e-5)[1]
    return jnp.sum(x.astype(jnp.float32))

arguments = array((4, 512, 1024), jnp.bfloat16), array((1024,), jnp.float32)
with jax.set_mesh(mesh):
    both = jax.jit(jax.grad(layers, (0, 1)))
    lowered = both.lower(*arguments)
    for kernel, inputs in compat.kernels_of(lowered):
        print([str(like.dtype) for like in inputs])
    threads = compile_kernels(lowered, mesh)
    for thread in threads:
        thread.join()
    print(len(threads))
"""


@pytest.mark.cuda_wheels
def test_each_kernel_of_a_program_compiles_alone_for_hopper(compile_for_hopper):
    lines = compile_for_hopper(PROGRAM)
    assert not any("one after the other" in line or "does not compile alone" in line for line in lines)
    kernels = [line for line in lines if line.startswith("[")]
    assert int(lines[-1]) == len(kernels) == 2  # forward and backward, in each of three layers
    assert all("bfloat16" in line and "float32" in line for line in kernels)


def test_other_devices_compile_none(make_test_mesh):
    mesh = make_test_mesh()
    with jax.set_mesh(mesh):
        assert compile_kernels(jax.jit(jnp.sin).lower(jnp.ones(3)), mesh) == []
