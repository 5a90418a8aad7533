"""Training runs of the tests of this folder."""

import json
from pathlib import Path

import jax
import numpy as np

from megajax import run
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig
from megajax.models.model import Model
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig


def toy_config(run_dir: Path, mesh: MeshConfig, training: dict, **sections) -> Config:
    """Of a few logged steps in float32 on mock documents, with evaluations and checkpoints every two steps."""
    how = dict(global_batch_size=8, log_every_steps=1, eval_every_steps=2, eval_steps=1) | training
    return Config(
        mesh=mesh,
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="mock", tokenizer="null:63", cache_dir=str(run_dir.parent / "cache")),
        optimizer=OptimizerConfig(learning_rate=1e-2, min_learning_rate=1e-3),
        training=TrainingConfig(**how),
        checkpoint=CheckpointConfig(every_steps=2),
        run_dir=str(run_dir),
        **sections,
    )


def run_of(config: Config, monkeypatch) -> list[dict]:
    """-> lines of metrics.jsonl of the run on the devices that its mesh needs."""
    devices = jax.devices()[: config.mesh.num_devices]
    with monkeypatch.context() as patched:
        patched.setattr(jax, "devices", lambda *_: devices)
        patched.setattr(jax, "device_count", lambda *_: len(devices))
        assert run.train(config) in ("finished", "interrupted")
    text = (Path(config.run_dir) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


LENGTH = 16


def batch() -> dict:
    tokens = np.random.default_rng(0).integers(0, 63, (2, LENGTH + 1), dtype=np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (2, LENGTH))
    ones = np.ones((2, LENGTH), np.float32)
    return dict(tokens=tokens[:, :-1], labels=tokens[:, 1:], positions=positions, loss_weights=ones)


def loss_of(model: Model, weights: dict) -> float:
    """Of `batch`."""
    return float(jax.jit(lambda weights: model.loss(weights, batch(), Language()).main)(weights))
