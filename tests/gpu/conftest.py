"""One GPU, and the choices that operations log."""

import logging

import jax
import pytest

from megajax.mesh.config import MeshConfig, make_mesh
from megajax.ops.choice import log_choice


@pytest.fixture
def one_gpu(caplog):
    """The mesh of one GPU, set; caplog has each choice of this test, as if it were the first."""
    log_choice.cache_clear()
    caplog.set_level(logging.INFO, "megajax")
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        yield mesh
    log_choice.cache_clear()
