"""How weights get from a step of a run to the devices: layer by layer, verified, and in the place of others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

from joined import arrays_of
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.config import Config
from megajax.inference.device import weights
from megajax.inference.load import open_model
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.precision import PrecisionConfig

LAYERS = 24
MODEL = DecoderConfig(
    num_layers=LAYERS, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=100, max_positions=64,
    position="rope", norm="rmsnorm", activation="swiglu", biases=(), tied_embeddings=False,
)  # fmt: skip
FLOAT32 = PrecisionConfig(params="float32", compute="float32")
LARGEST = 4 * 32 * 100  # bytes


def save(run_dir, params: dict, precision: PrecisionConfig = FLOAT32, layer_rows: np.ndarray | None = None) -> None:
    """As step 1 of a run."""
    config = Config(model=MODEL, precision=precision)
    data = dataclasses.replace(config.data, tokenizer="null:100")
    config = dataclasses.replace(config, data=data)
    (run_dir / "config.json").write_text(config.to_json())
    rows = np.arange(LAYERS) if layer_rows is None else layer_rows
    with Checkpointer(run_dir, config.checkpoint) as checkpointer:
        meta = {"layer_rows": {"layers.dense": rows.tolist()}}
        checkpointer.save(1, params, {"count": jnp.int32(0)}, meta)


@pytest.fixture(scope="module")
def params():
    return Model(MODEL, FLOAT32).init(0)


@pytest.fixture(scope="module")
def run_dir(params, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    save(run_dir, params)
    return run_dir


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.fixture
def peaks(monkeypatch):
    """Bytes of all arrays, each time an array of a layer has been read."""
    found = []
    original = weights.Loader.checked

    def checked(*arguments):
        found.append(nbytes(jax.live_arrays()))
        return original(*arguments)

    monkeypatch.setattr(weights.Loader, "checked", checked)
    return found


@pytest.mark.parametrize("dtype", ["compute", "int8"])
def test_devices_hold_little_more_than_the_result(dtype, run_dir, peaks):
    opened = open_model(run_dir, weights=dtype)
    before = nbytes(jax.live_arrays())
    result = opened.restore()
    assert len(peaks) == 9 * LAYERS + 3
    # What is read ahead, and the one that is being cast; the arrays at the end are small.
    assert max(peaks) - before < nbytes(result) + (weights.READERS + 2) * 4 * 32 * 64 < 1.5 * nbytes(result)
    if dtype == "compute":
        jax.tree.map(np.testing.assert_array_equal, opened.model.stacked(result), Model(MODEL).stacked(result))


def test_arrays_are_those_that_were_saved_whatever_the_layout(params, run_dir, tmp_path):
    """As one array for all layers; on a mesh; and in the rows of a pipeline, with padding."""
    expected = jax.tree.map(np.asarray, params)
    for mesh in (MeshConfig(), MeshConfig(tensor=2, fsdp=2)):
        found = open_model(run_dir, mesh).restore(joins=True)
        joined = found["layers"]["dense"]["attention"]["query"][0].weight
        assert joined.addressable_shards[0].data.size == joined.size // mesh.num_devices
        jax.tree.map(np.testing.assert_array_equal, arrays_of(found, MODEL), expected)
    rows = np.array([[*range(6), -1], [*range(12, 18), -1], [*range(6, 12), -1], [*range(18, 24), -1]])
    save(tmp_path, params | {"layers": jax.tree.map(lambda a: a[rows], params["layers"])}, layer_rows=rows)
    opened = open_model(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, arrays_of(opened.restore(joins=True), MODEL), expected)


def test_new_weights_take_the_place_of_the_old_ones(run_dir, peaks):
    opened = open_model(run_dir)
    old = opened.restore(joins=True)
    before = nbytes(jax.live_arrays())
    new = opened.restore(replaced=old, joins=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
    assert max(peaks) < before + LARGEST < before + nbytes(new) / 10


def test_a_step_has_a_chunk_for_each_layer(run_dir):
    kvstore = {"driver": "ocdbt", "base": f"file://{run_dir}/checkpoints/1/params/", "path": "layers.dense.mlp.up/"}
    array = tensorstore.open({"driver": "auto", "kvstore": kvstore}, read=True).result()
    assert array.shape == (LAYERS, 32, 64) and array.chunk_layout.read_chunk.shape == (1, 32, 64)


def test_numbers_that_are_not_finite_are_refused(params, tmp_path):
    damaged = jax.tree.map(np.array, params)
    damaged["layers"]["dense"]["mlp"]["up"][3, 5, 7] = np.nan
    save(tmp_path, jax.device_put(damaged))
    for read in (
        open_model(tmp_path).restore,
        open_model(tmp_path, weights="int8").restore,
        open_model(tmp_path).check,
    ):
        with pytest.raises(ValueError, match="layers.dense.mlp.up of layer 3 has numbers that are not finite"):
            read()
