"""The place where numbers went non-finite is found, on small functions; what a mask hides is not."""

import jax
import jax.numpy as jnp
import numpy as np

from megajax.training.faults.nonfinite import find_origins

LAYERS = 6


def layers(function, xs, carry):
    return jax.lax.scan(lambda x, row: (function(x, row), None), carry, xs)[0]


def test_the_layer_of_a_scan_in_which_a_logarithm_of_zero_was_taken_is_named():
    scales = jnp.ones(LAYERS).at[3].set(0.0)

    def function(scales, x):
        return layers(lambda x, scale: x + jnp.log(x * scale), scales, x).sum()

    value, origins = find_origins(function, scales, jnp.full(4, 20.0))
    assert not np.isfinite(value)
    first = origins[0]
    assert first.primitive == "log" and not first.backward
    assert first.places[0].startswith("test_nonfinite.py:") and "<lambda>" in first.places[0]
    assert [(loop.iteration, loop.length) for loop in first.loops] == [(3, LAYERS)]
    assert first.output[:4] == ("float32", (4,), 0, 4) and first.inputs[0].largest == 0.0
    assert len(origins) == 1


def test_a_gradient_that_overflows_is_found_in_the_backward_pass_of_its_layer():
    scales = jnp.ones(LAYERS).at[2].set(1e25)

    def loss(scales, x):
        return layers(lambda x, scale: x * scale * scale, scales, x).sum()

    (value, gradient), origins = find_origins(jax.value_and_grad(loss, argnums=1), scales, jnp.zeros(4))
    assert value == 0 and not np.all(np.isfinite(gradient))
    assert origins[0].backward and origins[0].primitive == "mul" and "<lambda>" in origins[0].places[0]
    assert origins[0].loops[0].iteration == 2


def test_what_a_mask_hides_is_not_reported():
    def attention(x, mask):
        scores = jnp.where(mask, x, -jnp.inf)
        weights = jax.nn.softmax(scores)
        safe = jnp.where(x > 0, jnp.log(x), 0.0)
        return (weights * safe).sum()

    x = jnp.array([1.0, 2.0, 0.0, -1.0])
    value, origins = find_origins(jax.jit(attention), x, x > 0)
    assert np.isfinite(value) and origins == []


def test_a_row_that_is_masked_as_a_whole_is_the_origin_of_its_nan():
    x, mask = jnp.ones((2, 3)), jnp.array([[True, True, False], [False, False, False]])
    softmax = lambda x, mask: jax.nn.softmax(jnp.where(mask, x, -jnp.inf))
    _, origins = find_origins(jax.jit(softmax), x, mask)
    assert origins[0].output.num_nan == 3 and origins[0].primitive == "sub"
    assert "<lambda>" in origins[0].places[0]


def test_an_infinity_that_a_part_makes_of_nothing_is_a_constant():
    lowest = jax.jit(lambda: jnp.full(3, -jnp.inf))
    _, origins = find_origins(lambda x: (x + lowest(), jax.nn.softmax(lowest() * x)), jnp.ones(3))
    assert [origin.primitive for origin in origins] == ["sub"] and origins[0].output.num_nan == 3


def test_rules_of_custom_differentiation_and_remat_are_looked_into():
    @jax.custom_vjp
    def root(x):
        return jnp.sqrt(x)

    def backward(root_x, d_out):
        return (0.5 * d_out / root_x,)

    root.defvjp(lambda x: (root(x),) * 2, backward)

    def loss(x):
        return jax.checkpoint(lambda x: jnp.exp(root(x)).sum() * 1.0)(x)

    _, origins = find_origins(jax.value_and_grad(loss), jnp.zeros(3))
    assert origins[0].primitive == "div" and origins[0].output.num_inf == 3 and origins[0].backward
    assert "<lambda>" in origins[0].places[0]  # where the forward pass called it
    _, origins = find_origins(loss, jnp.full(3, -4.0))
    assert origins[0].primitive == "sqrt" and "root" in origins[0].places[0] and origins[0].output.num_nan == 3


def test_a_non_finite_argument_is_reported_with_its_path():
    arguments = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(2)}
    _, origins = find_origins(lambda a: a["w"].sum() + a["b"].sum(), arguments)
    assert [(origin.primitive, origin.places) for origin in origins] == [("argument", ("[0]['w']",))]


def test_only_origins_that_reach_a_result_count_and_come_in_order(make_test_mesh):
    """Also where the arrays are spread over a mesh, and one device divides by zero."""
    mesh = make_test_mesh(fsdp=8)
    place = lambda array, *spec: jax.device_put(array, jax.NamedSharding(mesh, jax.P(*spec)))
    x = place(jnp.arange(16.0).reshape(8, 2), "fsdp")

    def function(x):
        unused = jnp.log(x - x)
        local = jax.shard_map(lambda x: 1 / x, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))(x)
        return local.sum() + 0 * jnp.exp(1e4 + x).sum(), jnp.isfinite(unused)

    with jax.set_mesh(mesh):
        (value, _), origins = find_origins(function, x)
    assert np.isnan(value)
    assert [origin.primitive for origin in origins][:2] == ["shard_map", "exp"]
    assert origins[0].output.num_inf == 1 and origins[0].output.shape == (8, 2)
