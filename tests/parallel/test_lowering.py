"""Programs that another process lowers are those that this one would have made."""

import functools
import logging
import os
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, as_completed, wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.lowering import LOWERING, Lowering, Unlowered
from megajax.mesh.sharding import constrain

SECONDS = 120  # in which another process starts
log = logging.getLogger("megajax")


def doubled(tag: str, state: dict, scale: jax.Array) -> tuple[dict, jax.Array]:
    log.info("traced %s", tag)
    x = constrain(state["x"], "batch", None)
    return {"x": x * 2, "none": None}, (x @ x.T).sum() * scale


def raises(only_outside: int | None, state: dict, scale: jax.Array) -> tuple[dict, jax.Array]:
    if os.getpid() != only_outside:
        raise ValueError("no such function")
    return doubled("here", state, scale)


def ends(only_outside: int, state: dict, scale: jax.Array) -> tuple[dict, jax.Array]:
    if os.getpid() != only_outside:
        os._exit(1)
    return doubled("here", state, scale)


def program(mesh: Mesh, function) -> Unlowered:
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    shardings = ({"x": x.sharding, "none": None}, scale.sharding)
    return Unlowered(function, ({"x": x}, scale), mesh, donated=(0,), out_shardings=shardings)


def results(compiled, mesh: Mesh) -> tuple[dict, jax.Array]:
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    state = {"x": jax.device_put(x, NamedSharding(mesh, P("data")))}
    return compiled(state, jax.device_put(np.float32(3), NamedSharding(mesh, P())))


def one_device() -> Mesh:
    return make_mesh(MeshConfig(), jax.devices()[:1])


def lowered_by_both(given: Unlowered) -> list[jax.stages.Lowered]:
    """[in this process, in another one, which lowers it twice while this one is busy]."""
    lowering = Lowering(num_processes=1)
    with ThreadPoolExecutor(3) as threads, lowering.processes():
        with LOWERING:
            jobs = [threads.submit(lowering.lower, given) for _ in range(3)]
            finished = as_completed(jobs, SECONDS)
            elsewhere = [next(finished), next(finished)]
        here = next(job for job in jobs if job not in elsewhere)
        return [here.result(), elsewhere[0].result()]


@pytest.mark.parametrize("num_devices", [1, 4])
def test_programs_are_the_same(num_devices, caplog):
    mesh = make_mesh(MeshConfig(data=num_devices), jax.devices()[:num_devices])
    given = program(mesh, functools.partial(doubled, f"for {num_devices}"))
    with caplog.at_level(logging.INFO, "megajax"):
        here, there = [lowered.compile() for lowered in lowered_by_both(given)]
    # By the other process, whose second message is not passed on, and by this one.
    assert caplog.messages == [f"traced for {num_devices}"] * 2
    assert there.input_shardings == here.input_shardings
    assert there.memory_analysis().alias_size_in_bytes == here.memory_analysis().alias_size_in_bytes > 0
    (expected, of_all), (found, total) = results(here, mesh), results(there, mesh)
    assert found["none"] is None
    assert found["x"].sharding == expected["x"].sharding
    np.testing.assert_array_equal(found["x"], expected["x"])
    assert total == of_all > 0


@pytest.mark.parametrize("function", [functools.partial(each, os.getpid()) for each in (raises, ends)])
def test_what_another_process_cannot_lower(function, caplog):
    mesh = one_device()
    lowering = Lowering(num_processes=1)
    given = program(mesh, function)
    with ThreadPoolExecutor(2) as threads, lowering.processes():
        with LOWERING:
            jobs = [threads.submit(lowering.lower, given) for _ in range(2)]
            deadline = time.monotonic() + SECONDS
            while not caplog.messages and time.monotonic() < deadline:
                assert not wait(jobs, 0.1, FIRST_COMPLETED).done
        found = [results(job.result().compile(), mesh)[1] for job in jobs]
        assert found[0] == found[1] > 0
    assert "has failed and is not used again" in caplog.text


def test_errors_of_a_program_are_raised():
    lowering = Lowering(num_processes=0)
    given = program(one_device(), functools.partial(raises, None))
    for _ in range(2):  # and the next one does not wait for ever
        with pytest.raises(ValueError, match="no such function"):
            lowering.lower(given)
