"""The weighted activation of experts' rows equals its formula, value and gradients, on every mesh, by XLA and by the
kernel; and the kernel, interpreted, equals the formula."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.mesh import compat
from megajax.mesh.sharding import rows_spec
from megajax.ops.activation import kernel_problem
from megajax.ops.choice import log_choice
from megajax.ops.weighted_activation import weighted_activation
from pallas_kernels import gated as kernel

R, F = 16, 8  # on 8 devices
SIZES = np.array([1, 0, 2, 2, 1, 1, 0, 2], np.int32)  # of 2 rows each
CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)  # float32, tanh and exp of XLA
FUNCTIONS = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def formula(wide_R2F, weights_R, is_filled_R, function):
    hidden_RF = FUNCTIONS[function](wide_R2F[:, 0]) * wide_R2F[:, 1] * weights_R[:, None]
    return jnp.where(is_filled_R[:, None], hidden_RF, 0)


def both_passes(run, wide_R2F, weights_R, d_hidden_RF):
    hidden_RF, vjp = jax.vjp(run, wide_R2F, weights_R)
    return hidden_RF, *vjp(d_hidden_RF)


def drawn(rows, width, is_filled_R):
    """wide, with zeros in empty rows, as the grouped matmul gives it; weights; the gradient of hidden."""
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((rows, 2, width)) * is_filled_R[:, None, None]
    arrays = wide, rng.random(rows), rng.standard_normal((rows, width))
    return [a.astype(np.float32) for a in arrays]


@pytest.fixture(params=["xla", "kernel"])
def backend(request, monkeypatch):
    """The kernel needs a Hopper GPU: here something with the same results stands for it."""
    if request.param == "xla":
        return

    def forward(wide, weights, count, *, function):
        return formula(wide, weights, jnp.arange(len(wide)) < count, function)

    def backward(wide, weights, count, d_hidden, *, function):
        weights = compat.vary(weights, compat.varying_axes(wide))  # else JAX sums the gradient over `tensor` itself
        return both_passes(lambda *of: forward(*of, count, function=function), wide, weights, d_hidden)[1:]

    monkeypatch.setattr(compat, "mosaic_problem", lambda: "")
    monkeypatch.setattr(kernel, "problem", lambda *_: "")
    monkeypatch.setattr(kernel, "forward", forward)
    monkeypatch.setattr(kernel, "backward", backward)


def test_value_and_gradients_equal_the_formula(mesh, backend):
    num_devices = mesh.size // mesh.shape["tensor"] // mesh.shape["pipeline"]
    rows = R // num_devices
    sizes = SIZES.reshape(num_devices, -1).sum(1).astype(np.int32)
    is_filled = (np.arange(rows) < sizes[:, None]).ravel()
    given = drawn(R, F, is_filled)
    wanted = both_passes(lambda *of: formula(*of, is_filled, "silu"), *given)
    run = lambda *given: both_passes(lambda *of: weighted_activation(*of, sizes, "swiglu"), *given)
    jax.tree.map(CLOSE, jax.jit(run)(*given), wanted)


def test_value_and_gradients_equal_the_formula_in_a_pipeline_stage(on_stages, backend):
    is_filled = np.arange(R) % (R // 2) < np.repeat([5, 3], R // 2)
    given = drawn(R, F, is_filled)
    wanted = both_passes(lambda *of: formula(*of, is_filled, "gelu_tanh"), *given)

    def run(*given):
        return both_passes(lambda *of: weighted_activation(*of, np.int32([5, 3]), "geglu_tanh"), *given)

    for stage in on_stages(run, *given):
        jax.tree.map(CLOSE, stage, wanted)


@pytest.mark.parametrize("name", ["gelu", "relu", "squared_relu"])
def test_other_activations_are_left_to_xla(name, backend, caplog):
    log_choice.cache_clear()
    caplog.set_level(logging.INFO, "megajax")
    wide = jnp.ones((4, 1, 8), jnp.bfloat16)
    out = weighted_activation(wide, jnp.full(4, 0.5), jnp.int32([4]), name)
    assert out.shape == (4, 8) and out.dtype == jnp.bfloat16
    reason = compat.mosaic_problem() or f"activation {name}"
    assert [record.getMessage() for record in caplog.records] == [f"activation of experts: XLA ({reason})"]


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "reason"),
    [
        (8192, 14336, jnp.bfloat16, ""),
        (2000, 768, jnp.float16, ""),
        (8192, 768, jnp.float32, "dtype float32"),
        (8192, 200, jnp.bfloat16, "width 200"),
        (1000, 768, jnp.bfloat16, "1000 rows"),
    ],
)
def test_kernel_says_why_it_refuses(rows, width, dtype, reason):
    assert kernel.problem(rows, width, jnp.dtype(dtype)) == reason


def test_kernel_is_chosen_by_the_rows_and_the_width_of_a_device(make_test_mesh, monkeypatch):
    seen = []
    monkeypatch.setattr(compat, "mosaic_problem", lambda: "")
    monkeypatch.setattr(kernel, "problem", lambda *of_device: seen.append(of_device) or "a test")
    wide = jax.ShapeDtypeStruct((4096, 2, 512), jnp.bfloat16)
    with jax.set_mesh(make_test_mesh(expert=2, fsdp=2, tensor=2)):
        assert kernel_problem(wide, rows_spec(None, "mlp"), "swiglu") == "a test"
    assert seen == [(1024, 256, jnp.bfloat16)]


# ----------------------------------------------------------------------------- the kernel


# 2 blocks. Whole pieces and a rest; a rest alone; whole pieces alone, all rows empty.
@pytest.mark.parametrize(
    ("rows", "count", "width", "function"),
    [(5, 3, 2176, "silu"), (4, 4, 384, "gelu_tanh"), (4, 2, 384, "gelu"), (3, 0, 1024, "silu")],
)
def test_interpreted_kernel_equals_the_formula(rows, count, width, function, monkeypatch, interpreter):
    monkeypatch.setattr(plgpu, "load", lambda ref, index=(), *, layout, optimized=True: ref[index])
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, layout: x)
    monkeypatch.setattr(kernel, "NUM_SMS", 1)
    monkeypatch.setattr(kernel, "BLOCKS_PER_SM", 2)
    is_filled = np.arange(rows) < count
    wide, weights, d_hidden = drawn(rows, width, is_filled)
    wide, d_hidden = (jnp.asarray(a, jnp.bfloat16) for a in (wide, d_hidden))
    how = dict(function=function, interpret=interpreter)
    hidden = kernel.forward(wide, weights, jnp.int32(count), **how)
    d_wide, d_weights = kernel.backward(wide, weights, jnp.int32(count), d_hidden, **how)
    exact = [a.astype(jnp.float32) for a in (wide, weights, d_hidden)]
    wanted = both_passes(lambda *of: formula(*of, is_filled, function), *exact)
    for got, want, dtype in zip(
        (hidden, d_wide, d_weights), wanted, (jnp.bfloat16, jnp.bfloat16, jnp.float32), strict=True
    ):
        assert got.dtype == dtype
        # Rounded once; the interpreter's float32 sums differ by their order.
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=1e-4)
    for parts, unweighted in ((2, lambda wide: FUNCTIONS[function](wide[:, 0]) * wide[:, 1]),
                              (1, lambda wide: FUNCTIONS[function](wide[:, 0]))):  # fmt: skip
        (want,) = jax.vjp(unweighted, exact[0][:, :parts])[1](exact[2])
        for with_sums in (False, True):
            d_wide, sums = kernel.unweighted_backward(wide[:, :parts], d_hidden, with_sums=with_sums, **how)
            np.testing.assert_allclose(d_wide.astype(jnp.float32), want, rtol=2**-8, atol=1e-4)
        np.testing.assert_allclose(sums, want.sum(0), rtol=1e-5, atol=1e-4)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.weighted_activation import weighted_activation
from megajax.planning.plan import devices_without_gpu, plan_device
from megajax.mesh.sharding import rows_spec

mesh = make_mesh(MeshConfig(expert=2, tensor=2), devices_without_gpu(4, plan_device("h100")))

def run(wide, weights, sizes, d_hidden, name):
    hidden, vjp = jax.vjp(lambda wide, weights: weighted_activation(wide, weights, sizes, name), wide, weights)
    return hidden, vjp(d_hidden)

def array(shape, dtype, *axes):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows_spec(*axes)))

for width in (256, 2304, 28672):
    for name in ("swiglu", "geglu", "geglu_tanh"):
        with jax.set_mesh(mesh):
            wide = array((4096, 2, width), jnp.bfloat16, None, "mlp")
            others = array((4096,), jnp.float32), array((8,), jnp.int32), array((4096, width), jnp.bfloat16, "mlp")
            text = jax.jit(run, static_argnums=4).lower(wide, *others, name).compile().as_text()
        print(width, name, text.count('custom_call_target="mosaic_gpu'))
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper_on_a_mesh(compile_for_hopper):
    lines = [line.split() for line in compile_for_hopper(PROGRAM)]
    assert len(lines) == 9 and {line[-1] for line in lines} == {"2"}  # forward, backward
