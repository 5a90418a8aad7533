"""Where an operation is run: on several meshes, and inside a stage of a pipeline."""

import jax
import numpy as np
import pytest
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
