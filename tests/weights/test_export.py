"""An exported run is served as the run that it came from, from the same numbers, and cannot be trained."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import run
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.convert.export import main
from megajax.data.config import DataConfig
from megajax.inference.engine import Engine
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.models.decoder import DecoderConfig
from megajax.models.model import Model
from megajax.parallel.schedule import make_stages
from megajax.training.config import TrainingConfig
from megajax.weights.export import export

PIPELINE = MeshConfig(pipeline=2, virtual_stages=2, fsdp=2)
CONFIG = Config(
    model=DecoderConfig(num_layers=4, embed_dim=16, num_heads=4, mlp_dim=32, vocab_size=258, max_positions=16),
    training=TrainingConfig(sequence_length=16),
    data=DataConfig(source="mock", tokenizer="bytes"),
)


def _draw(rng, a):
    return rng.standard_normal(a.shape).astype(a.dtype)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Steps 1 and 2 of a run with an interleaved pipeline, float32 on disk."""
    run_dir, mesh = tmp_path_factory.mktemp("run"), make_mesh(PIPELINE, jax.devices()[: PIPELINE.num_devices])
    (run_dir / "config.json").write_text(CONFIG.to_json())
    (run_dir / "tokenizer_config.json").write_text("{}")
    model = Model(CONFIG.model, CONFIG.precision, stages=make_stages(PIPELINE, CONFIG.model.num_layers))
    rows = {kind: rows.tolist() for kind, rows in model.layer_rows.items()}
    with Checkpointer(run_dir, CheckpointConfig()) as checkpointer:
        for step in (1, 2):
            draw = functools.partial(_draw, np.random.default_rng(step))
            params = jax.device_put(jax.tree.map(draw, model.abstract_weights), model.shardings(mesh))
            checkpointer.save(step, params, {"m": params["embedding"]}, {"step": step, "layer_rows": rows})
    return run_dir


@pytest.mark.parametrize(("step", "dtype"), [(None, None), (1, "bfloat16")])
def test_an_exported_run_is_served_from_the_same_numbers(step, dtype, run_dir, tmp_path):
    out = tmp_path / "out"
    assert export(run_dir, out, step, dtype) == (step or 2)
    got, want = Engine.from_run(out, MeshConfig(tensor=2)), Engine.from_run(run_dir, MeshConfig(tensor=2), step)
    jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
    meta = json.loads((out / "checkpoints" / str(step or 2) / "meta" / "metadata").read_text())
    dtypes = {path: saved for path, (saved, _) in meta["digests"]["params"].items()}
    assert set(meta["digests"]) == {"params"} and dtypes["['embedding']"] == (dtype or "float32")
    assert dtypes["['final_norm']['scale']"] == "float32"
    assert meta["layer_rows"] == {kind: [0, 1, 2, 3] for kind in meta["layer_rows"]}
    assert os.readlink(out / "latest") == f"checkpoints/{step or 2}" and (out / "tokenizer_config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_exported_run_is_verified_as_any_other(run_dir, tmp_path):
    export(run_dir, tmp_path / "out")
    _flip_bits(tmp_path / "out")
    with pytest.raises(ValueError, match="out/checkpoints/2 .*use another step"):
        export(tmp_path / "out", tmp_path / "again")
    assert not list(tmp_path.glob("again*"))


def _flip_bits(run_dir):
    files = [path for path in (run_dir / "checkpoints" / "2" / "params").rglob("*") if path.is_file()]
    for file in files:
        content = bytearray(file.read_bytes())
        for part in range(1, 8):
            content[len(content) * part // 8] ^= 16
        file.write_bytes(content)


def test_an_exported_run_cannot_be_trained(run_dir, tmp_path):
    export(run_dir, tmp_path / "out", dtype="bfloat16")
    with pytest.raises(ValueError, match="holds exported parameters.*--checkpoint.start_from"):
        run.check(dataclasses.replace(CONFIG, run_dir=str(tmp_path / "out")))


def test_what_cannot_be_exported_is_refused_and_nothing_is_left(run_dir, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="output=.*there exists"):
        export(run_dir, tmp_path / "there")
    with pytest.raises(ValueError, match="step=7 is not in .*; there are 1, 2"):
        export(run_dir, tmp_path / "out", step=7)
    with pytest.raises(SystemExit, match="2"):
        main([f"--run={tmp_path / 'nowhere'}", f"--output={tmp_path / 'out'}"])
    assert "give the directory of a run" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_the_command_says_what_it_wrote(run_dir, tmp_path, capsys):
    main([f"--run={run_dir}", f"--output={tmp_path / 'out'}", "--step=1", "--dtype=bfloat16"])
    assert "step 1" in capsys.readouterr().out
    with Checkpointer(tmp_path / "out", None) as checkpointer:
        model = Model(CONFIG.model, CONFIG.precision)
        alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        target = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=alone), model.abstract_weights
        )
        assert checkpointer.restore_params(1, target, model.layer_rows)["embedding"].dtype == jnp.float32
