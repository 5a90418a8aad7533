"""Orders without a sort: they equal those of a sort, whatever is equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.ranking import BLOCK, FEW_ROWS, ONE_BLOCK, ends_of, in_order, largest
from pallas_kernels import top_k as kernel


@pytest.mark.parametrize("count", [1, 300, ONE_BLOCK, ONE_BLOCK + 1, 9 * BLOCK])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_places_are_those_of_a_stable_sort(count, length):
    numbers = np.random.default_rng(count).integers(length, size=count, dtype=np.int32)
    places, found_ends = (np.asarray(a) for a in jax.jit(in_order, static_argnums=1)(numbers, length))
    np.testing.assert_array_equal(np.argsort(places), np.argsort(numbers, stable=True))
    ends = np.cumsum(np.bincount(numbers, minlength=length))
    np.testing.assert_array_equal(found_ends, ends)
    np.testing.assert_array_equal(ends_of(jnp.asarray(numbers), length), ends)


def values_of(num_rows: int, num_values: int) -> np.ndarray:
    """With equal ones, and groups of experts that are not to be chosen."""
    values = np.random.default_rng(num_rows).integers(-20, 20, size=(num_rows, num_values)).astype(np.float32)
    values[:, : num_values // 4] = -np.inf
    return values


@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_the_largest_are_those_of_a_stable_sort(num_rows):
    values = values_of(num_rows, 60)
    np.testing.assert_array_equal(largest(jnp.asarray(values), 9), np.argsort(-values, 1, stable=True)[:, :9])


@pytest.mark.parametrize("num_rows", [2, FEW_ROWS + 1])
def test_a_row_of_nan_has_numbers_of_values(num_rows):
    """A router that is NaN must not seem to choose no expert: its weights, which are NaN too, would not be read."""
    found = np.asarray(largest(jnp.full((num_rows, 60), jnp.nan), 9))
    assert (found >= 0).all() and (found < 60).all()


@pytest.mark.parametrize("num_values, count", [(64, 1), (192, 9)])
def test_interpreted_kernel_finds_the_largest(num_values, count, interpreted):
    values = values_of(3, num_values)
    found = kernel.top_k(jnp.asarray(values), count, interpret=interpreted)
    np.testing.assert_array_equal(found, np.argsort(-values, 1, stable=True)[:, :count])


def test_kernel_says_why_it_refuses():
    assert kernel.problem(128, jnp.dtype(jnp.float32)) == ""
    assert kernel.problem(8, jnp.dtype(jnp.float32)) == "8 values"
    assert kernel.problem(128, jnp.dtype(jnp.bfloat16)) == "dtype bfloat16"
