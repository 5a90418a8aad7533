"""The compiler options of decoding programs; tests/inference/test_compiled_for_hopper.py sees what they do."""

import dataclasses

import pytest

from megajax.inference import executor
from megajax.inference.executor import IN_GRAPHS, LARGEST_JOINED, WHOLE_LOOP, decode_options
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.training.compiler_options import accepted

CONFIG = DecoderConfig(num_layers=1, embed_dim=128, num_heads=4, head_dim=64, num_kv_heads=2, mlp_dim=256,
                       vocab_size=100, position="rope", activation="swiglu", bias=False)  # fmt: skip


@pytest.mark.parametrize(
    ("mlp_dim", "tensor", "num_rows", "wanted"),
    [
        (256, 1, 32, {LARGEST_JOINED: "1000", IN_GRAPHS: WHOLE_LOOP}),
        (256, 1, 64, {}),
        (256, 2, 2, {LARGEST_JOINED: "1000"}),
        (192, 1, 2, {LARGEST_JOINED: "1000", IN_GRAPHS: WHOLE_LOOP}),
        (192, 2, 2, {LARGEST_JOINED: "0"}),
        (200, 1, 64, {LARGEST_JOINED: "0"}),
    ],
)
def test_few_rows_join_products_where_the_widths_of_a_device_allow_it_and_run_as_a_graph_on_one_device(
    mlp_dim, tensor, num_rows, wanted, make_test_mesh, monkeypatch
):
    mesh = make_test_mesh(tensor=tensor)
    model = Model(dataclasses.replace(CONFIG, mlp_dim=mlp_dim))
    assert decode_options(model, mesh, num_rows) == {}  # on CPU
    monkeypatch.setattr(executor, "NVIDIA", mesh.devices.flat[0].device_kind)
    assert decode_options(model, mesh, num_rows) == wanted


def test_jaxlib_knows_the_options(make_test_mesh):
    options = {LARGEST_JOINED: "1000", IN_GRAPHS: WHOLE_LOOP}
    assert accepted(options, make_test_mesh()) == options
