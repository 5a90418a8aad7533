"""The recipe to fine-tune the model of a Hugging Face folder: --config=hugging_face:DIR, or hugging_face:ORG/NAME."""

import dataclasses
from pathlib import Path

from megajax import hub
from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.mesh.config import MeshConfig
from megajax.optim.config import OptimizerConfig
from megajax.overrides import LORA_LEARNING_RATE
from megajax.training.config import TrainingConfig
from megajax.weights.hugging_face.adapter import open_folder

MAX_SEQUENCE = 4096


def fine_tuning(path: str) -> Config:
    """Sizes, weights and tokenizer are those of the folder, or of an adapter and its base; only --data.paths must be
    set, or --data.text for a classifier.

    Raises ValueError if the folder is not fully supported.
    """
    source_dir = Path(hub.local(path)).resolve()
    config = open_folder(source_dir).config
    factor = 1 if config.lora.rank is None else LORA_LEARNING_RATE
    source = "text" if "classes" in config.model.heads else "indexed"
    return dataclasses.replace(
        config,
        mesh=MeshConfig(fsdp=-1),
        data=dataclasses.replace(config.data, source=source),
        optimizer=OptimizerConfig(learning_rate=factor * 1e-5, min_learning_rate=factor * 1e-6, warmup_steps=100),
        training=TrainingConfig(
            steps=1000, global_batch_size=8, sequence_length=min(config.training.sequence_length, MAX_SEQUENCE)
        ),
        checkpoint=CheckpointConfig(start_from=str(source_dir)),
        run_dir=f"runs/{hub.short_name(path)}",
    )
