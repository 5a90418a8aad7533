"""Every test runs on CPU with 8 virtual devices, unless it is marked gpu; types are never promoted silently."""

import os

if "gpu" not in os.environ.get("PYTEST_ADDOPTS", ""):
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import pytest

from megajax.mesh import MeshConfig, make_mesh

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def make_test_mesh():
    """Sizes of the axes -> a mesh over the first devices."""

    def make(**sizes: int):
        config = MeshConfig(**sizes)
        return make_mesh(config, jax.devices()[: config.num_devices])

    return make
