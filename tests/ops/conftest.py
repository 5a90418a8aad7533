"""Where an operation is run: on several meshes, and inside a stage of a pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

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


@pytest.fixture
def interpreted(monkeypatch):
    """Runs the kernels on CPU. JAX's interpreter does not support register layouts, transposed operands of wgmma,
    accumulators with an initial value, TMA with addition, or dynamic memory spaces; they are replaced by plain reads,
    products and writes. It also requires every thread to observe every phase of a barrier, although the loading thread
    does not need the last ones. Compiling for Hopper shows whether the GPU supports the kernels, tests/gpu whether they
    are right there."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
    from jax._src.state import primitives as state
    from jax._src.state.types import TransformedRef, TransposeTransform

    def read(operand):
        if isinstance(operand, TransformedRef) and isinstance(operand.transforms[-1], TransposeTransform):
            return TransformedRef(operand.ref, operand.transforms[:-1])[...].T
        return operand[...]

    def wgmma(sum_ref, a, b):
        product = jnp.dot(read(a), read(b), preferred_element_type=jnp.float32)
        state.ref_set(sum_ref, None, state.ref_get(sum_ref, None) + product)

    copy = plgpu.copy_smem_to_gmem

    def copy_or_add(source, target, reduction_op=None, commit_group=True):
        if reduction_op is None:
            copy(source, target)
        else:
            swap_in = functools.partial(swapped_in, target)
            jax.lax.while_loop(lambda left: jnp.any(left != 0), swap_in, swap_in(source[...]))

    def swapped_in(target, left):
        """Swaps keep the sum of all that was added: what another thread adds between these two comes back."""
        total = state.ref_swap(target, None, jnp.zeros_like(left)) + left
        return state.ref_swap(target, None, total)

    def deallocate(barrier):
        with barrier.cv:
            barrier.ref_count -= 1

    in_gmem = gpu_callbacks.is_gmem_memory_space
    monkeypatch.setattr(gpu_callbacks, "is_gmem_memory_space", lambda space: space is None or in_gmem(space))
    monkeypatch.setattr(plgpu, "RefUnion", lambda *refs: refs)
    load = lambda ref, wait_n=0: state.ref_get(ref, None)
    monkeypatch.setattr(shared_memory.Barrier, "deallocate", deallocate)
    monkeypatch.setattr(plgpu, "copy_smem_to_gmem", copy_or_add)
    monkeypatch.setattr(plgpu, "load", lambda ref, index=(), *, layout, optimized=True: ref[index])
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
    iota = lambda dtype, shape, dim, layout: jax.lax.broadcasted_iota(dtype, shape, dim)
    monkeypatch.setattr(plgpu, "broadcasted_iota", iota)
    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda count: None)
    monkeypatch.setattr(plgpu, "commit_smem_to_gmem_group", lambda: None)
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", load)
    monkeypatch.setattr(primitives, "wgmma_accumulator_load", load)
    monkeypatch.setattr(primitives, "wgmma_accumulator_store", lambda ref, value: state.ref_set(ref, None, value))
    return params.InterpretGPUParams(uninitialized_memory="nan", out_of_bounds_reads="raise")


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
