"""The chunked gated delta rule against its definition, one token at a time, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.gated_delta import gated_delta, gated_delta_step

B, T, H, P, N = 2, 24, 4, 3, 5
# Documents that end inside a chunk, at its border, and after one token.
STARTS = np.zeros((B, T), bool)
STARTS[0, [3, 8, 9, 20]] = True
STARTS[1, [16]] = True


def arguments(groups: int, dtype) -> dict:
    rng = np.random.default_rng(0)
    arrays = dict(
        q=rng.normal(size=(B, T, groups, N)),
        k=rng.normal(size=(B, T, groups, N)),
        v=rng.normal(size=(B, T, H, P)),
        log_decay=-np.logaddexp(0, rng.normal(size=(B, T, H))),
        beta=rng.random((B, T, H)),
        state=rng.normal(size=(B, H, P, N)),
    )
    return {name: jnp.asarray(array, dtype) for name, array in arrays.items()}


def recurrence(q, k, v, log_decay, beta, state, starts):
    """S_t = a_t S_(t-1) + beta_t (v_t - a_t S_(t-1) k_t) k_t^T, y_t = S_t q_t, with q and k of length 1."""
    q, k = (jnp.repeat(m / jnp.sqrt(jnp.sum(m * m, -1, keepdims=True) + 1e-6), H // m.shape[2], 2) for m in (q, k))

    def step(S, token):
        q, k, v, log_decay, beta, start = token
        S = jnp.where(start[:, None, None, None], 0, S) * jnp.exp(log_decay)[..., None, None]
        error = v - jnp.einsum("bhpn,bhn->bhp", S, k)
        S = S + jnp.einsum("bh,bhp,bhn->bhpn", beta, error, k)
        return S, jnp.einsum("bhpn,bhn->bhp", S, q) / N**0.5

    tokens = tuple(jnp.moveaxis(m, 1, 0) for m in (q, k, v, log_decay, beta, jnp.asarray(starts)))
    S, y = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(y, 0, 1), S


def chunked(q, k, v, log_decay, beta, state, starts, *, chunk, pieces=(0,)):
    starts = None if starts is None else jnp.asarray(starts)
    return gated_delta(q, k, v, log_decay, beta, chunk=chunk, starts_BT=starts, state_BHPN=state, pieces=pieces)


def with_gradients(function, arrays: dict, starts):
    """Jitted results, and gradients of a function of all of them."""

    def loss(arrays):
        results = function(**arrays, starts=starts)
        return sum(jnp.sum(jnp.sin(result.astype(results[1].dtype))) for result in results), results

    (_, results), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arrays)
    return {"y": results[0], "last": results[1]} | gradients


def in_pieces(*, starts, **arrays):
    """As stored over `context`: the pieces of a device are the first and the last of those left."""
    pieces = (0, 3, 1, 2)
    order = np.arange(T).reshape(4, -1)[list(pieces)].ravel()
    state = arrays.pop("state")
    arrays = {name: array[:, order] for name, array in arrays.items()}
    y, last = chunked(**arrays, state=state, starts=starts[:, order], chunk=4, pieces=pieces)
    return y[:, order.argsort()], last


@pytest.mark.parametrize("groups, run", [(2, functools.partial(chunked, chunk=7)), (1, in_pieces)], ids=["one", "many"])
def test_chunks_equal_the_recurrence(groups, run):
    """chunk=7 does not divide T, and chunk=4 not the 6 tokens of a piece: last chunks are padded."""
    with jax.enable_x64(True):
        arrays = arguments(groups, jnp.float64)
        found = with_gradients(run, arrays, STARTS)
        wanted = with_gradients(recurrence, arrays, STARTS)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-10, atol=1e-10, err_msg=name)


def test_a_step_is_one_token_of_the_sequence_and_bfloat16_is_close():
    arrays = arguments(2, jnp.float32)
    run = jax.jit(functools.partial(chunked, starts=None, chunk=8))
    y, last = run(**arrays)
    rounded, last_rounded = run(**{name: a.astype(jnp.bfloat16) if name in "qkv" else a for name, a in arrays.items()})
    assert rounded.dtype == jnp.bfloat16 and last_rounded.dtype == jnp.float32
    assert np.abs(rounded.astype(jnp.float32) - y).max() < 3 * 2**-8 * np.abs(y).max()  # a few roundings to 8 bits
    state = arrays.pop("state")
    step = jax.jit(gated_delta_step)
    for t in range(T):
        y_t, state = step(*(array[:, t] for array in arrays.values()), state)
        np.testing.assert_allclose(y_t, y[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, last, rtol=1e-5, atol=1e-5)


def test_gradients_in_bfloat16_are_close():
    arrays = arguments(2, jnp.float32)
    rounded = {name: a.astype(jnp.bfloat16) if name in "qkv" else a for name, a in arrays.items()}
    arrays = {name: a.astype(jnp.float32) for name, a in rounded.items()}
    run = functools.partial(chunked, chunk=8)
    wanted = with_gradients(run, arrays, STARTS)
    for name, array in with_gradients(run, rounded, STARTS).items():
        error = np.linalg.norm(array.astype(jnp.float32) - wanted[name])
        assert error < 3 * 2**-8 * np.linalg.norm(wanted[name]), name


def test_repeated_keys_stay_accurate():
    """The inverse of the system is exact here, but its powers have entries of 1e17: a text that repeats one token."""
    length = 64
    ones = jnp.ones((1, length, 1, 1), jnp.float32)
    v = jnp.asarray(np.random.default_rng(0).normal(size=(1, length, 1, 1)), jnp.float32)
    run = jax.jit(functools.partial(gated_delta, chunk=length))
    y, _ = run(ones, ones, v, jnp.zeros((1, length, 1)), jnp.ones((1, length, 1)))
    np.testing.assert_allclose(y, v, rtol=1e-4, atol=1e-4)  # the state holds the newest value, to EPSILON per token


@pytest.mark.parametrize("reverse", [False, True])
def test_the_interpreted_kernel_equals_a_loop(interpreted, reverse):
    """Two tiles of rows; what is added to the state is what makes it the gradient of the other direction."""
    kernel = pytest.importorskip("pallas_kernels.recurrence")
    num_chunks, num_heads, rows, width, chunk = 3, 2, 128, 64, 32
    rng = np.random.default_rng(0)

    def draw(*shape, dtype=jnp.bfloat16):
        return jnp.asarray(rng.normal(size=shape) / 8, dtype)

    x = draw(num_chunks, num_heads, rows, chunk)
    first, second = (draw(num_chunks, num_heads, width, chunk) for _ in range(2))
    added = draw(num_chunks, num_heads, rows, width) if reverse else None
    decay = jnp.asarray(rng.random((num_chunks, num_heads)), jnp.float32)
    state = start = draw(num_heads, rows, width, dtype=jnp.float32)
    found = kernel.recurrence(x, first, second, decay, added, start, reverse=reverse, interpret=interpreted)

    written, before = [None] * num_chunks, [None] * num_chunks
    for j in reversed(range(num_chunks)) if reverse else range(num_chunks):
        before[j] = state.astype(jnp.bfloat16)
        product = jnp.einsum("mpn,mnq->mpq", before[j], first[j], preferred_element_type=jnp.float32)
        written[j] = (x[j].astype(jnp.float32) + product).astype(jnp.bfloat16)
        state = state * decay[j][:, None, None]
        state += jnp.einsum("mpq,mnq->mpn", written[j], second[j], preferred_element_type=jnp.float32)
        state += 0 if added is None else added[j].astype(jnp.float32)
    for array, wanted in zip(found, (jnp.stack(written), jnp.stack(before), state), strict=True):
        assert array.dtype == wanted.dtype
        difference = array.astype(jnp.float32) - wanted.astype(jnp.float32)
        assert np.abs(difference).max() < 2**-7 * np.abs(wanted.astype(jnp.float32)).max()


def test_the_interpreted_kernel_inverts(interpreted):
    kernel = pytest.importorskip("pallas_kernels.triangular")
    rng = np.random.default_rng(0)
    systems = np.stack([np.ones((64, 64)), rng.uniform(-1, 1, (64, 64)) / 4])  # also what repeats one token
    found = kernel.inverse(jnp.asarray(systems, jnp.float32), interpret=interpreted)
    wanted = np.linalg.inv(np.eye(64) + np.tril(systems, -1))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=1.01 * 2**-8, atol=2**-14)


PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import activation_spec
from megajax.ops.gated_delta import gated_delta
from megajax.planning.plan import devices_without_gpu, plan_device

B, T, H, N = 4, 1024, 8, 128

def loss(q, k, v, log_decay, beta, pieces):
    y, last = gated_delta(q, k, v, log_decay, beta, chunk=64, pieces=pieces)
    return jnp.sum(y.astype(jnp.float32)) + jnp.sum(last)

for config, pieces in ((MeshConfig(fsdp=2, tensor=2), (0,)), (MeshConfig(context=2, tensor=2), (0, 3, 1, 2))):
    mesh = make_mesh(config, devices_without_gpu(4, plan_device("h100")))
    with jax.set_mesh(mesh):
        def array(dtype, *dims):
            spec = activation_spec((B, T, H, *dims), ("batch", "time", "heads", *[None] * len(dims)))
            return jax.ShapeDtypeStruct((B, T, H, *dims), dtype, sharding=NamedSharding(mesh, spec))
        arrays = [array(jnp.bfloat16, N)] * 3 + [array(jnp.float32)] * 2
        run = jax.jit(jax.grad(loss, argnums=range(5)), static_argnums=5)
        text = run.lower(*arrays, pieces).compile().as_text()
    print(text.count('custom_call_target="mosaic_gpu'), text.count(" while("), text.count(f"bf16[16,{B}"))
"""


@pytest.mark.cuda_wheels
def test_kernel_compiles_for_hopper_on_a_mesh(compile_for_hopper):
    """Forward and backward, twice with pieces; no loop over chunks is left, and no device has all sequences."""
    lines = [[int(number) for number in line.split()] for line in compile_for_hopper(PROGRAM)]
    assert [line[0] for line in lines] == [3, 5] and not any(line[1] for line in lines)
