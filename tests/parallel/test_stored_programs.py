"""Compiled programs are found by what they follow from, and by nothing else."""

import dataclasses
import functools
import logging
import os
import pickle
import secrets
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from megajax.mesh import compat, stored_programs
from megajax.mesh.stored_programs import ADDRESS, FOLDER, StoredPrograms


@dataclasses.dataclass(frozen=True)
class Described:
    width: int
    function: object = None


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder, while programs are stored."""
    monkeypatch.setattr(StoredPrograms, "enabled", True)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / FOLDER
    jax.config.update("jax_compilation_cache_dir", before)


def compiled_double(shape: int) -> jax.stages.Compiled:
    number = secrets.randbits(31)  # so that JAX's own cache does not have it: what comes from there is not stored
    double = jax.jit(lambda tree: {"twice": 2 * tree["a"], "number": jnp.int32(number)})
    return double.lower({"a": jnp.zeros(shape)}).compile()


def get(mesh, model, shape: int) -> tuple[bool, list[float]]:
    """-> (whether the program was compiled, its result)."""
    compiled = []

    def compile_it():
        compiled.append(True)
        return compiled_double(shape)

    programs = StoredPrograms(mesh, model)
    program = programs.get(("double", shape), compile_it)
    programs.store()
    return bool(compiled), program({"a": jnp.ones(shape)})["twice"].tolist()


def test_a_program_is_compiled_once_for_all_that_it_follows_from(cache, make_test_mesh):
    mesh = make_test_mesh()
    assert get(mesh, Described(1), 2) == (True, [2.0, 2.0])
    assert get(mesh, Described(1), 2) == (False, [2.0, 2.0])
    assert get(mesh, Described(1), 3) == (True, [2.0, 2.0, 2.0])
    assert get(mesh, Described(2), 2)[0]
    assert get(make_test_mesh(tensor=2), Described(1), 2)[0]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert get(mesh, Described(1), 2)[0]
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert len(list(cache.iterdir())) == 5
    assert not get(mesh, Described(1), 2)[0]


def test_programs_are_stored_when_none_has_been_called_for_a_while(cache, make_test_mesh, monkeypatch):
    def num_stored() -> int:
        return sum(not path.suffix for path in cache.iterdir()) if cache.exists() else 0

    monkeypatch.setattr(stored_programs, "QUIET_SECONDS", 3.0)
    programs = StoredPrograms(make_test_mesh(), Described(1))
    for shape in (2, 3):
        programs.get(("double", shape), functools.partial(compiled_double, shape))
    for _ in range(40):
        programs.note_call()
        time.sleep(0.1)
    assert num_stored() == 0
    deadline = time.monotonic() + 120
    while num_stored() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_damaged_file_is_compiled_again(cache, make_test_mesh, caplog):
    mesh = make_test_mesh()
    get(mesh, Described(1), 2)
    (path,) = cache.iterdir()
    path.write_bytes(path.read_bytes()[:100])
    assert get(mesh, Described(1), 2) == (True, [2.0, 2.0])
    assert f"{path} is not used" in caplog.text
    assert not get(mesh, Described(1), 2)[0]


def test_a_file_of_another_user_is_not_used(cache, make_test_mesh, monkeypatch, caplog):
    get(make_test_mesh(), Described(1), 2)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert get(make_test_mesh(), Described(1), 2)[0]
    assert "it belongs to another user" in caplog.text


@pytest.mark.parametrize("why", ["address", "no folder", "JAX caches nothing", "not enabled"])
def test_nothing_is_stored(why, cache, make_test_mesh, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    model = Described(1, function=object() if why == "address" else None)
    if why == "no folder":
        jax.config.update("jax_compilation_cache_dir", None)
    if why == "JAX caches nothing":
        settings = {"jax_compilation_cache_dir": str(cache), "jax_enable_compilation_cache": False}
        monkeypatch.setattr(compat, "setting", settings.get)
    if why == "not enabled":
        monkeypatch.setattr(StoredPrograms, "enabled", False)
    for _ in range(2):
        was_compiled, result = get(make_test_mesh(), model, 2)
        assert was_compiled
        assert np.array_equal(result, [2, 2])
    assert not cache.exists()
    assert ("no lasting description" in caplog.text) == (why == "address")


def test_every_recipe_has_a_lasting_description_and_goes_to_other_processes():
    for name in configs.recipes():
        config = configs.recipe(name)
        parts = (config.model, config.precision, config.execution)
        assert ADDRESS not in repr(parts), name
        assert pickle.loads(pickle.dumps(parts)) == parts, name
