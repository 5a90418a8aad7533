"""How layers become a stack: loops over what repeats, each layer drawn as its own config says."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers.layer import Saved, Terms
from megajax.layers.linear import Linear
from megajax.layers.loops import Loop, loops_of
from megajax.layers.rows import MAX_PADDED, rows_of, unstack
from megajax.layers.stack import Stack


@dataclasses.dataclass(frozen=True)
class Toy:
    """Its letter is all that distinguishes it from others when it runs."""

    letter: str = "a"
    init_std: float = 1.0
    size: int = 64
    kind: str = "toy"
    saved: Saved | None = None

    def build(self, rngs):
        return ToyLayer(self, rngs)


class ToyLayer(nnx.Module):
    def __init__(self, config, rngs):
        self.matrix = Linear((config.size,), (config.size,), ("embed", "mlp"), config.init_std, rngs=rngs)

    def __call__(self, x, inputs, cache, key):
        return jnp.tanh(self.matrix(x)), cache, Terms()


@pytest.mark.parametrize("letters, loops", [
    ("aaaa", [(0, 1, 4)]),
    ("abababab", [(0, 2, 4)]),
    ("aaabaaab", [(0, 4, 2)]),
    ("dddmmmmm", [(0, 1, 3), (3, 1, 5)]),
    ("dmamama", [(0, 1, 1), (1, 2, 3)]),
    ("ababa", [(0, 2, 2), (4, 1, 1)]),
    ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ("a", [(0, 1, 1)]),
])  # fmt: skip
def test_a_stack_is_cut_into_the_patterns_that_repeat(letters, loops):
    assert loops_of([Toy(letter) for letter in letters]) == [Loop(*loop) for loop in loops]


def test_each_layer_is_drawn_as_its_own_config_says():
    layers = [Toy(init_std=1.0), Toy("b", init_std=1.0), Toy(init_std=0.01)]
    drawn = np.asarray(Stack(layers, scan=False, rngs=nnx.Rngs(0)).toy.matrix.weight[...])
    np.testing.assert_allclose(drawn.std((1, 2)), [1.0, 1.0, 0.01], rtol=0.05)
    # A layer does not depend on what the others are.
    alike = np.asarray(Stack([Toy()] * 3, scan=False, rngs=nnx.Rngs(0)).toy.matrix.weight[...])
    np.testing.assert_array_equal(drawn[:2], alike[:2])


def test_layers_of_one_kind_must_have_the_same_parameters():
    layers = [Toy(), Toy(size=32)]
    with pytest.raises(
        ValueError, match="layers 0 and 1 are both of kind 'toy'.*matrix is .*64.*and .*32.*different kinds"
    ):
        jax.eval_shape(lambda: Stack(layers, scan=False, rngs=nnx.Rngs(0)).toy.matrix.weight[...])


@pytest.mark.parametrize("num_layers", [1, MAX_PADDED, MAX_PADDED + 1])
def test_the_gradient_of_unstacked_layers_is_that_of_indexing(num_layers):
    array = jnp.arange(num_layers * 6, dtype=jnp.bfloat16).reshape(num_layers, 2, 3)

    def loss(rows):
        return sum(jnp.sum((number + 1) * row.astype(jnp.float32) ** 2) for number, row in enumerate(rows))

    of_rows = jax.grad(lambda array: loss(unstack(array)))(array)
    as_read = jax.grad(lambda array: loss([row.read() for row in rows_of(array)]))(array)
    by_index = jax.grad(lambda array: loss([array[number] for number in range(num_layers)]))(array)
    assert of_rows.dtype == as_read.dtype == jnp.bfloat16
    np.testing.assert_array_equal(of_rows, by_index)
    np.testing.assert_array_equal(as_read, by_index)


def test_a_loop_over_recomputed_layers_keeps_no_copies_of_their_parameters():
    """For layers that are not in a loop: python -m benchmarks.compiled."""
    graph, state = nnx.split(Stack([Toy(size=8, saved=Saved((), ()))] * 6, scan=True, rngs=nnx.Rngs(0)))

    def loss(state, x):
        return nnx.merge(graph, state)(x, {})[0].sum()

    program = jax.make_jaxpr(jax.grad(loss))(state, jnp.ones((2, 8)))
    forward = next(equation for equation in program.eqns if equation.primitive.name == "scan")
    assert {a.aval.shape for a in forward.outvars} == {(2, 8), (6, 2, 8)}
