"""A run that was interrupted is, bit for bit, the run that was not."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import configs
from megajax import run
from megajax.checkpoint.checkpointer import Checkpointer
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig, make_mesh
from megajax.mesh.sharding import with_shardings
from megajax.models.model import Model
from megajax.precision import PrecisionConfig
from megajax.training.config import LaunchConfig

pytestmark = pytest.mark.fault

STEPS = 6


def tiny(run_dir: Path, exit_at_step: int | None = None, **training) -> Config:
    """gpt_tiny made smaller still, with dropout, accumulation and FP8, on mock documents."""
    config = configs.recipe("gpt_tiny")
    model = dataclasses.replace(
        config.model, num_layers=2, embed_dim=16, mlp_dim=32, vocab_size=64, dropout=0.1, tied_embeddings=False
    )
    length = dict(steps=STEPS, global_batch_size=16, microbatch_size=1, sequence_length=32, sample_prompt="")
    every = dict(log_every_steps=1, eval_every_steps=3, eval_steps=2)
    return dataclasses.replace(
        config,
        model=model,
        precision=PrecisionConfig(recipe="fp8", compute="float32", high_layers=(1, 0)),
        mesh=dataclasses.replace(config.mesh, data=2, fsdp=2, tensor=2),
        data=DataConfig(source="mock", tokenizer="null:64", split=(8, 1, 1), cache_dir=str(run_dir.parent / "cache")),
        training=dataclasses.replace(config.training, **length, **every, **training),
        launch=LaunchConfig(exit_at_step=exit_at_step),
        optimizer=dataclasses.replace(config.optimizer, name="adamw", learning_rate=3e-3, warmup_steps=2),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=100),
        run_dir=str(run_dir),
    )


def losses(run_dir: Path) -> list[tuple[int, str, str]]:
    """(step, loss, evaluation loss) of each line, floats in hexadecimal."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    exact = lambda value: "" if value is None else float(value).hex()
    return [(line["step"], exact(line.get("loss")), exact(line.get("eval_loss"))) for line in lines]


def final_params(config: Config):
    model = Model(config.model, config.precision)
    with Checkpointer(config.run_dir, None) as checkpointer:
        target = with_shardings(model.abstract_weights, model.shardings(make_mesh(config.mesh)))
        return jax.device_get(checkpointer.restore_params(STEPS, target, model.layer_rows))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    config = tiny(tmp_path_factory.mktemp("runs") / "uninterrupted")
    assert run.train(config) == "finished"
    return config


def test_resume_gives_identical_losses_and_parameters(uninterrupted, tmp_path):
    assert run.train(tiny(tmp_path / "run", exit_at_step=2)) == "interrupted"
    resumed = tiny(tmp_path / "run")
    assert run.train(resumed) == "finished"
    assert run.train(resumed) == "already finished"
    assert losses(tmp_path / "run") == losses(Path(uninterrupted.run_dir))
    for got, want in zip(
        jax.tree.leaves(final_params(resumed)), jax.tree.leaves(final_params(uninterrupted)), strict=True
    ):
        assert got.tobytes() == want.tobytes()


@pytest.mark.slow
def test_another_seed_gives_another_run(uninterrupted, tmp_path):
    """The same seed gives the same, as the run above that was interrupted."""
    run.train(tiny(tmp_path / "other", seed=99, exit_at_step=1))
    assert losses(tmp_path / "other")[0] != losses(Path(uninterrupted.run_dir))[0]


@pytest.mark.parametrize("sizes", [
    pytest.param(dict(fsdp=4, context=2), marks=pytest.mark.slow), dict(pipeline=2, data=2, fsdp=2),
], ids=str)  # fmt: skip
def test_resume_on_another_mesh_sees_the_same_data(uninterrupted, sizes, tmp_path):
    run.train(tiny(tmp_path / "run", exit_at_step=2))
    resumed = dataclasses.replace(tiny(tmp_path / "run"), mesh=MeshConfig(**sizes))
    assert run.train(resumed) == "finished"
    got, want = losses(tmp_path / "run"), losses(Path(uninterrupted.run_dir))
    as_floats = lambda rows: [float.fromhex(loss or evaluation) for _, loss, evaluation in rows]
    # Sums over other splits, in float32, through six optimizer steps; few move an element to another FP8 number.
    np.testing.assert_allclose(as_floats(got), as_floats(want), rtol=1e-5)
