"""Grouped matmul equals one product a group, its gradients too: any sizes, any mesh, inside a stage of a pipeline."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from megajax.mesh.sharding import local_experts_spec, rows_spec
from megajax.ops import grouped_matmul as op
from megajax.ops import grouped_tiles
from megajax.ops.grouped_matmul import LowRankSum, grouped_matmul
from megajax.ops.matmul import Float32Gradient
from pallas_kernels import grouped_matmul as kernel
from pallas_kernels.grouped_matmul import products, steps, weight_gradients

R, K, N, E = 64, 8, 12, 4
SIZES = {
    "even": [16, 16, 16, 16],
    "skewed": [1, 0, 50, 13],
    "room left": [3, 17, 0, 20],
    "all in one": [0, 0, 64, 0],
    "nothing": [0, 0, 0, 0],
}
# float32 in another order of additions
TOLERANCE = dict(rtol=1e-5, atol=1e-5)


def drawn(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_group(rows, matrices, sizes):
    """float64, one group after the other."""
    out = np.zeros((len(rows), matrices.shape[2]))
    start = 0
    for matrix, size in zip(matrices.astype(np.float64), sizes, strict=True):
        out[start : start + size] = rows[start : start + size] @ matrix
        start += size
    return out


@functools.cache
def compiled():
    """(rows, matrices, sizes, gradient of the result) -> (result, reference, gradients)."""

    def run(rows, matrices, sizes, d_out):
        out = grouped_tiles.forward(rows, [matrices], sizes)[:, 0]
        d_rows = grouped_tiles.input_gradient(d_out[:, None], [matrices], sizes)
        (d_matrices,) = grouped_tiles.weight_gradient(rows, d_out[:, None], sizes, dtype=jnp.float32)
        return out, op.reference(rows, matrices, sizes), d_rows, d_matrices

    return jax.jit(run)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_products_of_a_device_are_those_of_each_group(sizes):
    rows, matrices, d_out = drawn(0, R, K), drawn(1, E, K, N), drawn(2, R, N)
    out, reference, d_rows, d_matrices = compiled()(rows, matrices, np.array(sizes, np.int32), d_out)
    np.testing.assert_allclose(out, by_group(rows, matrices, sizes), **TOLERANCE)
    np.testing.assert_allclose(reference, out, **TOLERANCE)
    np.testing.assert_allclose(d_rows, by_group(d_out, matrices.swapaxes(1, 2), sizes), **TOLERANCE)
    ends = np.cumsum(sizes)
    wanted = [rows[end - size : end].T @ d_out[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    np.testing.assert_allclose(d_matrices, wanted, **TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 17, 1000])
def test_any_number_of_rows(num_rows):
    rows, matrices = drawn(0, num_rows, K), drawn(1, 3, K, N)
    sizes = np.array([num_rows // 3, num_rows - num_rows // 3, 0], np.int32)
    out = grouped_tiles.forward(rows, [matrices], sizes)[:, 0]
    np.testing.assert_allclose(out, by_group(rows, matrices, sizes), **TOLERANCE)


def test_sums_are_float32_and_results_of_the_dtype_of_the_rows():
    rows, matrices = jnp.ones((2048, 1), jnp.bfloat16), jnp.ones((1, 1, 8), jnp.bfloat16)
    sizes = jnp.array([2048], jnp.int32)
    assert grouped_tiles.forward(rows, [matrices], sizes).dtype == jnp.bfloat16
    d_out = jnp.ones((2048, 1, 8), jnp.bfloat16)
    (d_matrix,) = grouped_tiles.weight_gradient(rows, d_out, sizes, dtype=jnp.float32)
    np.testing.assert_array_equal(d_matrix, 2048.0)  # bfloat16 would stop at 256


MESHES = {
    "one device": {},
    "expert": {"expert": 4},
    "expert fsdp tensor": {"expert": 2, "fsdp": 2, "tensor": 2},
    "more shards than experts": {"fsdp": 8},
    "expert context data": {"expert": 2, "context": 2, "data": 2},
    "pipeline fsdp tensor": {"pipeline": 2, "fsdp": 2, "tensor": 2},
}


def both(rows, up, gate, down, sizes):
    """Two products of each kind, as the experts of a layer use them."""
    wide = grouped_matmul(rows, (gate, up), sizes, ("embed", "mlp"))
    return grouped_matmul(wide[:, 0] * wide[:, 1], (down,), sizes, ("mlp", "embed"))[:, 0]


SLOW = ("expert", "expert context data", "pipeline fsdp tensor")


@pytest.mark.parametrize("sizes", [
    pytest.param(sizes, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, sizes in MESHES.items()
])  # fmt: skip
def test_a_mesh_gives_the_same_result_and_gradients(sizes, make_test_mesh):
    mesh = make_test_mesh(**sizes)
    num_devices = mesh.size // mesh.shape["tensor"] // mesh.shape["pipeline"]
    num_local = E // mesh.shape["expert"]
    num_rows = 16
    local_sizes = np.random.default_rng(0).integers(0, num_rows // num_local + 1, (num_devices, num_local))
    rows, d_out = drawn(0, num_devices * num_rows, K), drawn(1, num_devices * num_rows, K)
    gate, up, down = drawn(2, E, K, N), drawn(3, E, K, N), drawn(4, E, N, K)
    # Device number -> which experts it has: rows go over data, fsdp, expert, context, in this order.
    rank = np.arange(num_devices) // mesh.shape["context"] % mesh.shape["expert"]

    def plain(rows, gate, up, down):
        out = []
        for device in range(num_devices):
            of_device = rows[device * num_rows : (device + 1) * num_rows]
            start = 0
            for number, size in enumerate(local_sizes[device]):
                expert = rank[device] * num_local + number
                x = of_device[start : start + size]
                out.append((x @ gate[expert]) * (x @ up[expert]) @ down[expert])
                start += size
            out.append(jnp.zeros((num_rows - start, K)))
        return jnp.concatenate(out)

    wanted, plain_vjp = jax.vjp(plain, rows, gate, up, down)
    with jax.set_mesh(mesh):
        axes = (("embed", "mlp"), ("embed", "mlp"), ("mlp", "embed"))
        specs = [local_experts_spec(("experts", *two), len(gate)) for two in axes]
        pairs = zip((gate, up, down), specs, strict=True)
        weights = [jax.device_put(w, NamedSharding(mesh, spec)) for w, spec in pairs]
        given = jax.device_put(rows, NamedSharding(mesh, rows_spec("embed")))

        @jax.jit
        def run(given, gate, up, down, sizes, d_out):
            out, vjp = jax.vjp(lambda rows, gate, up, down: both(rows, up, gate, down, sizes), given, gate, up, down)
            return out, vjp(d_out)

        out, gradients = run(given, *weights, local_sizes.ravel().astype(np.int32), d_out)
    np.testing.assert_allclose(out, wanted, **TOLERANCE)
    for found, gradient in zip(gradients, plain_vjp(d_out), strict=True):
        np.testing.assert_allclose(found, gradient, **TOLERANCE)


@pytest.mark.parametrize("sizes", [
    pytest.param(sizes, id=name, marks=pytest.mark.slow if name in SLOW else ()) for name, sizes in MESHES.items()
])  # fmt: skip
def test_a_low_rank_sum_multiplies_like_the_sum_on_every_mesh(sizes, make_test_mesh):
    """Of two weights side by side, and of one whose inputs `tensor` splits."""
    mesh = make_test_mesh(**sizes)
    num_devices = mesh.size // mesh.shape["tensor"] // mesh.shape["pipeline"]
    num_local = E // mesh.shape["expert"]
    local_sizes = np.random.default_rng(0).integers(0, 16 // num_local + 1, num_devices * num_local, dtype=np.int32)
    rows, d_out = drawn(0, num_devices * 16, K), drawn(1, num_devices * 16, K)
    weights = [drawn(seed, E, K, N) for seed in (2, 3)] + [drawn(4, E, N, K)]
    factors = [(drawn(5 + n, E, w.shape[1], 3), drawn(8 + n, E, 3, w.shape[2])) for n, w in enumerate(weights)]

    def apart(rows, factors):
        gate, up, down = (LowRankSum(w, *pair) for w, pair in zip(weights, factors, strict=True))
        return both(rows, up, gate, down, local_sizes)

    def merged(rows, factors):
        gate, up, down = (w + a @ b for w, (a, b) in zip(weights, factors, strict=True))
        return both(rows, up, gate, down, local_sizes)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, rows, factors):
        out, vjp = jax.vjp(function, rows, factors)
        return out, vjp(d_out)

    with jax.set_mesh(mesh):
        given = jax.device_put(rows, NamedSharding(mesh, rows_spec("embed")))
        found, wanted = (jax.tree.leaves(run(function, given, factors)) for function in (apart, merged))
    for one, other in zip(found, wanted, strict=True):
        # float32 in another order of additions, of products of four drawn numbers
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_a_stage_of_a_pipeline_gives_the_same(on_stages):
    rows, d_out = drawn(0, 2 * 16, K), drawn(1, 2 * 16, K)
    gate, up, down = drawn(2, E, K, N), drawn(3, E, K, N), drawn(4, E, N, K)
    sizes = np.array([3, 0, 5, 8] + [16, 0, 0, 0], np.int32)

    def run(rows, gate, up, down, d_out):
        out, vjp = jax.vjp(lambda rows, gate, up, down: both(rows, up, gate, down, sizes), rows, gate, up, down)
        return out, vjp(d_out)

    first, second = on_stages(run, rows, gate, up, down, d_out)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    wide = [[by_group(half, w, s) for w in (gate, up)] for half, s in ((rows[:16], sizes[:4]), (rows[16:], sizes[4:]))]
    hidden = [(g * u).astype(np.float32) for g, u in wide]
    wanted = np.concatenate([by_group(h, down, s) for h, s in zip(hidden, (sizes[:4], sizes[4:]), strict=True)])
    np.testing.assert_allclose(first[0], wanted, rtol=1e-4, atol=1e-4)


def test_gradients_leave_in_the_dtype_that_is_asked_for():
    rows, sizes = jnp.asarray(drawn(0, 16, K), jnp.bfloat16), jnp.array([16], jnp.int32)
    weight = jnp.ones((1, K, N))

    def gradient(wrap):
        loss = lambda w: grouped_matmul(rows, (wrap(w),), sizes, ("embed", "mlp")).astype(jnp.float32).sum() / 3
        return jax.grad(loss)(weight)

    wide, narrow = gradient(Float32Gradient), gradient(lambda w: w)
    assert wide.dtype == narrow.dtype == jnp.float32
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16).astype(jnp.float32))
    assert np.any(narrow != wide)


# ----------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("num_matrices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_the_formula(num_matrices, interpreted, monkeypatch):
    """Groups that begin and end inside a tile, and inside eight rows of it; one without rows, rows of no group; two
    tiles of columns; one block for all tiles, fewer stages than steps."""
    sizes_of_tiles = dict(NUM_SMS=1, STAGES=2, PANEL=1, COLUMNS=64 * num_matrices)
    for name, value in sizes_of_tiles.items():
        monkeypatch.setattr(steps, name, value)
        for module in (products, weight_gradients):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    sizes = np.array([70, 0, 3, 55], np.int32)
    num_rows, K, N = 256, 256, 128
    draw = lambda seed, *shape: jnp.asarray(drawn(seed, *shape), jnp.bfloat16)
    rows, d_out = draw(0, num_rows, K), draw(1, num_rows, num_matrices, N)
    matrices = [draw(2 + number, len(sizes), K, N) for number in range(num_matrices)]
    out = kernel.forward(rows, matrices, sizes, interpret=interpreted)
    d_rows = kernel.input_gradient(d_out, matrices, sizes, interpret=interpreted)
    d_matrices = kernel.weight_gradient(rows, d_out, sizes, dtype=jnp.float32, interpret=interpreted)

    in_float32 = jax.tree.map(lambda a: np.asarray(a, np.float32), (rows, d_out, matrices))
    rows, d_out, matrices = in_float32
    close = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=2**-7 * np.sqrt(K))
    close(np.asarray(out, np.float32), grouped_tiles.forward(rows, matrices, sizes))
    close(np.asarray(d_rows, np.float32), grouped_tiles.input_gradient(d_out, matrices, sizes))
    wanted = grouped_tiles.weight_gradient(rows, d_out, sizes, dtype=jnp.float32)
    for found, matrix in zip(d_matrices, wanted, strict=True):
        np.testing.assert_allclose(found, matrix, rtol=1e-4, atol=1e-4)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.grouped_matmul import grouped_matmul
from megajax.planning.plan import devices_without_gpu, plan_device
from megajax.mesh.sharding import local_experts_spec, rows_spec

mesh = make_mesh(MeshConfig(expert=2, tensor=2), devices_without_gpu(4, plan_device("h100")))

def run(rows, gate, up, sizes, d_out):
    out, vjp = jax.vjp(lambda *given: grouped_matmul(*given[:1], given[1:], sizes, ("embed", "mlp")), rows, gate, up)
    return out, vjp(d_out)

with jax.set_mesh(mesh):
    def array(shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    matrix = array((4, 256, 256), local_experts_spec(("experts", "embed", "mlp"), 4))
    rows, d_out = array((2000, 256), rows_spec("embed")), array((2000, 2, 256), rows_spec(None, "mlp"))
    sizes = array((4,), rows_spec(), jnp.int32)
    text = jax.jit(run).lower(rows, matrix, matrix, sizes, d_out).compile().as_text()
print(text.count('custom_call_target="mosaic_gpu'))
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper_on_a_mesh(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == ["3"]  # forward, input gradient, weight gradient
