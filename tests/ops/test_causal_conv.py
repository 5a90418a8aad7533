"""The causal convolution against its definition in float64, and its kernels in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.mesh import compat
from megajax.ops.causal_conv import causal_conv

B, T, W = 2, 24, 4
# Documents that end at the border of a piece, inside one, and after one token.
STARTS = np.zeros((B, T), bool)
STARTS[0, [3, 8, 9, 20]] = True
STARTS[1, [16]] = True


def test_convolution_reads_the_last_tokens_of_its_document():
    """Value and gradients, with and without documents, in pieces stored in another order."""
    rng = np.random.default_rng(1)
    arrays = rng.normal(size=(B, T, 6)), rng.normal(size=(W, 6)), rng.normal(size=6)
    d_y = rng.normal(size=(B, T, 6))
    pieces = (0, 3, 1, 2)
    order = np.arange(T).reshape(4, -1)[list(pieces)].ravel()

    def expected(x, kernel, bias, ids):
        total = bias
        for back in range(W):
            is_read = (np.arange(T) >= back) & (np.roll(ids, back, 1) == ids)
            total += jnp.where(is_read[..., None], jnp.roll(x, back, 1) * kernel[W - 1 - back], 0)
        return total / (1 + jnp.exp(-total))

    def before(array):
        padded = jnp.concatenate([jnp.zeros_like(array[:, : W - 1]), array], 1)
        return jnp.stack([padded[:, n * 6 : n * 6 + W - 1] for n in pieces], 1)

    def found(x, kernel, bias, ids):
        segments = (jnp.asarray(ids[:, order]), before(jnp.asarray(ids))) if ids.any() else None
        y = causal_conv(x[:, order], kernel, bias, before_BI=before(x), segments=segments, axes=(None,))
        return y[:, order.argsort()]

    @jax.jit
    def both(*arrays):
        results = []
        for ids in (np.zeros((B, T), np.int32), STARTS.cumsum(1).astype(np.int32)):
            for function in (found, expected):
                y, vjp = jax.vjp(functools.partial(function, ids=ids), *arrays)
                results.append((y, vjp(jnp.asarray(d_y))))
        return results

    with jax.enable_x64(True):
        whole, expected_whole, packed, expected_packed = both(*map(jnp.asarray, arrays))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(close, (whole, packed), (expected_whole, expected_packed))


@pytest.mark.parametrize("length, channels, has_bias, is_packed", [(24, 128, True, True), (32, 256, False, False)])
def test_the_interpreted_kernels_convolve(interpreted, length, channels, has_bias, is_packed):
    """Several tiles, documents that end at the border of one and before the sequence, and two blocks of channels."""
    kernel = pytest.importorskip("pallas_kernels.causal_conv")
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, d_out = draw(B, length, channels), draw(B, length, channels)
    before = draw(B, W - 1, channels)
    weights = draw(W, channels, dtype=jnp.float32)
    bias = draw(channels, dtype=jnp.float32) if has_bias else None
    ids = ids_before = segments = None
    if is_packed:
        starts = rng.random((B, length)) < 0.2
        starts[:, 8] = True
        ids = jnp.asarray(np.cumsum(starts, 1) + 1, jnp.int32)
        ids_before = jnp.asarray([[0, 1, 1], [0, 0, 0]], jnp.int32)
        segments = (ids, ids_before[:, None])

    def convolution(x, weights, bias, before):
        return causal_conv(x, weights, bias, before_BI=before[:, None], segments=segments, axes=(None,))

    exact = [None if a is None else a.astype(jnp.float32) for a in (x, weights, bias, before)]
    wanted, vjp = jax.vjp(convolution, *exact)
    d_x, d_weights, d_bias, d_before = vjp(d_out.astype(jnp.float32))
    inputs = kernel.Inputs(x, weights, bias, before, ids, ids_before)
    found = (kernel.forward(inputs, interpret=interpreted), *kernel.backward(inputs, d_out, interpret=interpreted))
    for got, want, dtype in zip(
        found, (wanted, d_x, d_before, d_weights, d_bias), [jnp.bfloat16] * 3 + [jnp.float32] * 2, strict=True
    ):
        if want is None:
            assert got is None
            continue
        assert got.dtype == dtype and got.shape == want.shape
        difference = np.asarray(got, np.float64) - np.asarray(want, np.float64)
        limit = 2**-8 if dtype == jnp.bfloat16 else 1e-5
        assert np.linalg.norm(difference) <= limit * np.linalg.norm(np.asarray(want, np.float64))


def test_where_there_are_kernels_they_run_on_every_mesh(mesh, monkeypatch):
    """With stand-ins for them: pieces, channels and sums over devices, as without them."""
    kernels = pytest.importorskip("pallas_kernels.causal_conv")
    batch, length, heads, width, pieces = 4, 64, 4, 128, (0, 3, 1, 2, 4, 5, 6, 7)
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, d_out = draw(batch, length, heads, width), draw(batch, length, heads, width)
    before = draw(batch, len(pieces), W - 1, heads, width)
    weights, bias = draw(W, heads, width, dtype=jnp.float32), draw(heads, width, dtype=jnp.float32)
    ids = jnp.asarray(np.cumsum(rng.random((batch, length)) < 0.2, 1), jnp.int32)
    segments = (ids, jnp.zeros((batch, len(pieces), W - 1), jnp.int32))

    def run(x, weights, bias, before, d_out):
        def convolution(*arrays):
            x, weights, bias, before = arrays
            return causal_conv(x, weights, bias, before_BI=before, segments=segments, axes=("heads", None))

        out, vjp = jax.vjp(convolution, x, weights, bias, before)
        return out, *vjp(d_out)

    arrays = (x, weights, bias, before, d_out)
    wanted = jax.jit(functools.partial(run))(*arrays)
    calls = []

    def plain(x, weights, bias, before, ids, ids_before):
        segments = (ids, ids_before[:, None])
        return causal_conv(x, weights, bias, before_BI=before[:, None], segments=segments, axes=(None,))

    def forward(inputs):
        calls.append(inputs.x_STC.shape)
        with monkeypatch.context() as patched:
            patched.setattr(compat, "mosaic_problem", lambda: "stands in for the kernel")
            return plain(*inputs)

    def backward(inputs, d_out):
        x, weights, bias, before, *ids = inputs
        with monkeypatch.context() as patched:
            patched.setattr(compat, "mosaic_problem", lambda: "stands in for the kernel")
            _, vjp = jax.vjp(lambda *arrays: plain(*arrays, *ids), x, weights, bias, before)
            d_x, d_weights, d_bias, d_before = vjp(d_out)
        return d_x, d_before, d_weights, d_bias

    monkeypatch.setattr(compat, "mosaic_problem", lambda: "")
    monkeypatch.setattr(kernels, "forward", forward)
    monkeypatch.setattr(kernels, "backward", backward)
    found = jax.jit(functools.partial(run))(*arrays)
    assert calls
    for got, want in zip(found, wanted, strict=True):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-3 * np.abs(want).max())


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import activation_spec
from megajax.ops.causal_conv import causal_conv
from megajax.planning.plan import devices_without_gpu, plan_device

B, T, H, P, W = 4, 1024, 8, 128, 4

def loss(x, kernel, bias, before, ids, ids_before):
    axes = ("heads", None)
    y = causal_conv(x, kernel, bias, before_BI=before, segments=(ids, ids_before), axes=axes)
    return jnp.sum(y.astype(jnp.float32) ** 2)

for config, I in ((MeshConfig(fsdp=2, tensor=2), 1), (MeshConfig(context=2, tensor=2), 4)):
    mesh = make_mesh(config, devices_without_gpu(4, plan_device("h100")))
    with jax.set_mesh(mesh):
        def array(dtype, axes, *shape):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, activation_spec(shape, axes)))
        arrays = [
            array(jnp.bfloat16, ("batch", "time", "heads", None), B, T, H, P),
            array(jnp.float32, (None, "heads", None), W, H, P),
            array(jnp.float32, ("heads", None), H, P),
            array(jnp.bfloat16, ("batch", "time", None, "heads", None), B, I, W - 1, H, P),
            array(jnp.int32, ("batch", "time"), B, T),
            array(jnp.int32, ("batch", "time", None), B, I, W - 1),
        ]
        text = jax.jit(jax.value_and_grad(loss, argnums=range(4))).lower(*arrays).compile().as_text()
    print(text.count('custom_call_target="mosaic_gpu'), text.count("all-gather"), text.count("all-to-all"))
"""


@pytest.mark.cuda_wheels
def test_kernels_compile_for_hopper_on_meshes(compile_for_hopper):
    assert compile_for_hopper(PROGRAM) == ["2 0 0", "2 0 0"]
