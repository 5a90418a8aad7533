"""The compiler options of the engine's programs; tests/inference/test_compiled_for_hopper.py sees what they do."""

import dataclasses

import jax.numpy as jnp
import pytest

from megajax.inference.device import executor
from megajax.inference.device.executor import (
    IN_GRAPHS,
    LARGEST_JOINED,
    TRITON_PRODUCTS,
    WHOLE_LOOP,
    decode_options,
    prefill_options,
)
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.quantization.weights import QuantizedWeight, WeightFormat
from megajax.training.compiler_options import accepted

CONFIG = DecoderConfig(num_layers=1, embed_dim=128, num_heads=4, head_dim=64, num_kv_heads=2, mlp_dim=256,
                       vocab_size=100, position="rope", activation="swiglu", biases=("norm",))  # fmt: skip


@pytest.mark.parametrize(
    ("mlp_dim", "tensor", "num_rows", "wanted"),
    [
        (256, 1, 32, {LARGEST_JOINED: "1000", IN_GRAPHS: WHOLE_LOOP}),
        (256, 1, 64, {IN_GRAPHS: WHOLE_LOOP}),
        (256, 2, 2, {LARGEST_JOINED: "1000"}),
        (192, 1, 2, {LARGEST_JOINED: "1000", IN_GRAPHS: WHOLE_LOOP}),
        (192, 2, 2, {LARGEST_JOINED: "0"}),
        (200, 1, 64, {LARGEST_JOINED: "0", IN_GRAPHS: WHOLE_LOOP}),
    ],
)
def test_few_rows_join_products_where_the_widths_of_a_device_allow_it_and_one_device_decodes_in_a_graph(
    mlp_dim, tensor, num_rows, wanted, make_test_mesh, monkeypatch
):
    mesh = make_test_mesh(tensor=tensor)
    model = Model(dataclasses.replace(CONFIG, mlp_dim=mlp_dim))
    assert decode_options(model, mesh, num_rows) == {}  # on CPU
    monkeypatch.setattr(executor, "NVIDIA", mesh.devices.flat[0].device_kind)
    assert decode_options(model, mesh, num_rows) == wanted


@pytest.mark.parametrize(
    ("inputs", "num_tokens", "only_cublas"),
    [(None, 256, False), (None, 4096, True), ("unchanged", 256, False), ("dynamic", 64, True)],
)
def test_prompts_are_one_graph_and_tune_no_triton_products_that_take_long(
    inputs, num_tokens, only_cublas, make_test_mesh, monkeypatch
):
    mesh = make_test_mesh()
    matrix = jnp.ones((32, 32))
    params = {
        "norm": matrix[0],
        "up": QuantizedWeight.of(matrix, 1, WeightFormat("int8", inputs)) if inputs else matrix,
    }
    assert prefill_options(params, mesh, num_tokens) == {}  # on CPU
    monkeypatch.setattr(executor, "NVIDIA", mesh.devices.flat[0].device_kind)
    wanted = {TRITON_PRODUCTS: "False"} if only_cublas else {}
    assert prefill_options(params, mesh, num_tokens) == wanted | {IN_GRAPHS: WHOLE_LOOP}


def test_jaxlib_knows_the_options(make_test_mesh):
    options = {LARGEST_JOINED: "1000", IN_GRAPHS: WHOLE_LOOP, TRITON_PRODUCTS: "False"}
    assert accepted(options, make_test_mesh()) == options
