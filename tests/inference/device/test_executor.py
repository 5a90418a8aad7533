"""The compiler options of the engine's programs, of which tests/inference/test_compiled_for_hopper.py sees what they
do; and programs that an earlier start has compiled."""

import dataclasses
import logging
import pickle
import secrets

import jax
import jax.numpy as jnp
import pytest

from megajax.inference.device import compiler_options
from megajax.inference.device.compiler_options import (
    IN_GRAPHS,
    LARGEST_JOINED,
    READS_PARTS,
    TRITON_PRODUCTS,
    TUNING,
    WHOLE_LOOP,
    WITH_MAILBOXES,
    decode_options,
    prefill_options,
)
from megajax.inference.engine import Engine, ServingConfig
from megajax.inference.tokens.sampling import Sampling
from megajax.mesh.lowering import Job, Unlowered, lowering
from megajax.mesh.stored_programs import StoredPrograms
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from megajax.training.compiler_options import accepted

CONFIG = DecoderConfig(num_layers=1, embed_dim=128, num_heads=4, head_dim=64, num_kv_heads=2, mlp_dim=256,
                       vocab_size=100, position="rope", activation="swiglu", biases=("norm",))  # fmt: skip

SERVING = ServingConfig(max_rows=1, max_batch_tokens=16, num_pages=8)

CUBLAS = {LARGEST_JOINED: "0", TRITON_PRODUCTS: "False"}
UNTUNED = CUBLAS | {TUNING: "0"}
TRITON = {LARGEST_JOINED: "0"}
GRAPH = {IN_GRAPHS: WHOLE_LOOP, READS_PARTS: "False"}


def params_of(inputs: str | None) -> dict:
    """With a matrix in 8 bits, and inputs in this form, unless it is None."""
    matrix = jnp.ones((32, 32))
    up = QuantizedWeight.of(matrix, 1, WeightFormat("int8", inputs)) if inputs else matrix
    return {"norm": matrix[0], "up": up}


@pytest.mark.parametrize(
    ("mlp_dim", "tensor", "num_rows", "inputs", "wanted"),
    [
        (256, 1, 32, None, {LARGEST_JOINED: "1000"} | GRAPH),
        (256, 1, 64, None, CUBLAS | GRAPH),
        (256, 1, 64, "dynamic", CUBLAS | GRAPH),
        (256, 1, 64, "unchanged", TRITON | GRAPH),
        (256, 2, 2, None, {LARGEST_JOINED: "1000"}),
        (192, 1, 2, None, {LARGEST_JOINED: "1000"} | GRAPH),
        (192, 2, 2, None, TRITON),
        (200, 1, 2, None, TRITON | GRAPH),
    ],
)
def test_few_rows_join_products_where_the_widths_of_a_device_allow_it_and_one_device_decodes_in_a_graph(
    mlp_dim, tensor, num_rows, inputs, wanted, make_test_mesh, monkeypatch
):
    mesh = make_test_mesh(tensor=tensor)
    model = Model(dataclasses.replace(CONFIG, mlp_dim=mlp_dim))
    params = params_of(inputs)
    assert decode_options(model, params, mesh, num_rows) == {}  # on CPU
    monkeypatch.setattr(compiler_options, "NVIDIA", mesh.devices.flat[0].device_kind)
    assert decode_options(model, params, mesh, num_rows) == wanted


@pytest.mark.parametrize(
    ("inputs", "num_tokens", "wanted"),
    [(None, 64, UNTUNED), ("unchanged", 256, TRITON), ("unchanged", 4096, UNTUNED), ("dynamic", 64, UNTUNED)],
)
def test_prompts_are_one_graph_and_tune_products_only_for_few_tokens_and_8_bits(
    inputs, num_tokens, wanted, make_test_mesh, monkeypatch
):
    mesh = make_test_mesh()
    assert prefill_options(params_of(inputs), mesh, num_tokens) == {}  # on CPU
    monkeypatch.setattr(compiler_options, "NVIDIA", mesh.devices.flat[0].device_kind)
    assert prefill_options(params_of(inputs), mesh, num_tokens) == wanted | GRAPH


def test_jaxlib_knows_the_options(make_test_mesh):
    options = {LARGEST_JOINED: "1000"} | UNTUNED | GRAPH | WITH_MAILBOXES
    assert accepted(options, make_test_mesh()) == options


def test_programs_that_another_process_lowers_generate_the_same(make_test_mesh, monkeypatch):
    mesh = make_test_mesh(tensor=2)
    model = Model(CONFIG)
    exported = []

    def elsewhere(program: Unlowered) -> jax.stages.Lowered:
        found = pickle.loads(pickle.dumps(Job.of(program))).export()
        exported.append(len(found[0]))
        return program.lower_exported(*found)

    def generated() -> list[int]:
        engine = Engine(model, model.init(0, mesh), mesh, None, serving=SERVING)
        engine.warm_up()
        return engine.generate_tokens([[1, 2, 3]], Sampling(max_tokens=4, seed=5))[0]

    expected = generated()
    monkeypatch.setattr(lowering, "lower", elsewhere)
    assert generated() == expected
    assert len(exported) == 3


def test_a_second_engine_lowers_nothing_that_the_first_one_has_compiled(tmp_path, make_test_mesh, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    mesh = make_test_mesh(tensor=2)
    # A number that no other program has: what comes from JAX's own cache is not stored.
    model = Model(dataclasses.replace(CONFIG, attention_soft_cap=1 + secrets.randbelow(10**9) / 10**8))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    monkeypatch.setattr(StoredPrograms, "enabled", True)

    def generated() -> tuple[list[int], int]:
        """-> (tokens, calls whose programs need not be compiled)."""
        params = model.init(0, mesh)
        engine = Engine(model, params, mesh, None, serving=SERVING)
        engine.warm_up()
        engine.executor.stored.store()
        return engine.generate_tokens([[1, 2, 3]], Sampling(max_tokens=4, temperature=0.0))[
            0
        ], engine.executor.stored.num_found

    try:
        tokens, none = generated()
        assert none == 0
        assert generated() == (tokens, 3)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert "3 of them were compiled by an earlier start" in caplog.text
