"""A device whose copy of parameters or optimizer state is not that of the others is named."""

import jax
import numpy as np
import pytest

from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.optim.optimizer import Optimizer, OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.training.faults.replicas import compared_share, differing_devices
from megajax.training.state import new_state, state_shardings

MODEL = DecoderConfig(
    num_layers=2, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=100, vocab_multiple=4, max_positions=16
)


def make_state(mesh, shard_over_data):
    model = Model(MODEL, PrecisionConfig(compute="float32"))
    optimizer = Optimizer(OptimizerConfig(), model.trained)
    shardings = state_shardings(model, optimizer, mesh, shard_over_data)
    return new_state(model, optimizer, model.init(0, mesh), mesh, shardings)


@pytest.fixture(scope="module")
def mesh(make_test_mesh):
    return make_test_mesh(data=4, tensor=2)


@pytest.fixture(scope="module")
def state(mesh):
    return make_state(mesh, False)


def flipped(tree, path, devices, bit=0):
    """The tree with one bit of the array at the path flipped, in the copies of these devices."""

    def flip(part):
        raw = part.reshape(-1)[:1].view(np.uint8)
        raw ^= np.uint8(1 << bit)

    return changed(tree, path, devices, flip)


def changed(tree, path, devices, change):
    """The tree with the array at the path changed in place, in the copies of these devices."""

    def copied(where, leaf):
        if jax.tree_util.keystr(where) != path:
            return leaf
        parts = []
        for shard in leaf.addressable_shards:
            part = np.array(shard.data)
            if shard.device.id in devices:
                change(part)
            parts.append(jax.device_put(part, shard.device))
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)

    return jax.tree_util.tree_map_with_path(copied, tree)


def test_copies_that_are_equal_pass(state, mesh):
    assert differing_devices(state, mesh) == []
    assert 0 < compared_share(state) <= 1


MATRIX, BIAS = "['layers']['dense']['mlp']['up']", "['final_norm']['bias']"


@pytest.mark.fault
@pytest.mark.parametrize(
    "path",
    [f".params{MATRIX}", f".params{BIAS}", f".optimizer[0].mu{MATRIX}", f".optimizer[0].nu{BIAS}",
     ".optimizer[0].count", ".step"],
)  # fmt: skip
def test_one_flipped_bit_in_one_copy_names_its_device_and_the_array(path, state, mesh):
    """Each part has four copies, or eight."""
    assert differing_devices(flipped(state, path, {5}, bit=3), mesh) == [f"process 0, device 5 (cpu): {path}"]


@pytest.mark.fault
def test_a_copy_with_an_even_number_of_signs_flipped_is_found(state, mesh):
    path = f".params{MATRIX}"
    negated = changed(state, path, {5}, lambda part: np.negative(part, out=part))
    assert differing_devices(negated, mesh) == [f"process 0, device 5 (cpu): {path}"]


@pytest.mark.fault
def test_with_zero1_moments_are_compared_as_far_as_they_have_copies(mesh):
    state = make_state(mesh, True)
    assert differing_devices(state, mesh) == []
    # Of a bias two devices hold each quarter, and which of them is right cannot be said; of a matrix one each eighth.
    path = f".optimizer[0].mu{BIAS}"
    assert differing_devices(flipped(state, path, {5}), mesh) == [
        f"process 0, device {n} (cpu): {path}" for n in (4, 5)
    ]
    assert differing_devices(flipped(state, f".optimizer[0].mu{MATRIX}", {5}), mesh) == []
    path = f".params{MATRIX}"
    assert differing_devices(flipped(state, path, {5}), mesh) == [f"process 0, device 5 (cpu): {path}"]


@pytest.mark.fault
def test_of_two_copies_that_differ_both_are_named_and_of_several_arrays_all(make_test_mesh):
    mesh = make_test_mesh(data=2)
    state = make_state(mesh, False)
    lines = differing_devices(flipped(flipped(state, ".step", {1}), ".skipped", {1}), mesh)
    assert lines == [f"process 0, device {device} (cpu): .step, .skipped" for device in (0, 1)]


def test_what_no_other_device_holds_is_not_compared(make_test_mesh):
    mesh = make_test_mesh(fsdp=8)
    tree = {"w": jax.device_put(np.ones((8, 2), np.float32), jax.NamedSharding(mesh, jax.P("fsdp")))}
    assert compared_share(tree) == 0.0
    assert differing_devices(flipped(tree, "['w']", {3}), mesh) == []
