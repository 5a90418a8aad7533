"""Models that read images: LLaVA, Gemma 3, Qwen-VL."""

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.images.processor_files import HALF
from megajax.images.rules import ImageRule
from megajax.mesh.config import MeshConfig
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.conversations import Conversations
from megajax.training.config import TrainingConfig


def vlm_tiny() -> Config:
    """A model of 0.4 M parameters that reads bar charts and handwritten-like digits, drawn when the run starts.

    Command: python train.py --config=vlm_tiny
    """
    return Config(
        model=MultimodalConfig(
            num_layers=3,
            embed_dim=96,
            num_heads=4,
            mlp_dim=256,
            vocab_size=258,
            position="rope",
            norm="rmsnorm",
            activation="swiglu",
            biases=(),
            image_token=257,
            vision=TowerConfig(
                num_layers=2,
                embed_dim=64,
                num_heads=4,
                mlp_dim=192,
                image=ImageRule(resize="squash", size=32, patch_size=4, merge=2, mean=HALF, std=HALF),
                table=8,
                project_dim=128,
                blocks=5,
                patches=64,
            ),
        ),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="drawn"),
        task=Conversations(rates_answers=True),
        optimizer=OptimizerConfig(
            name="muon", momentum=0.95, learning_rate=7e-3, min_learning_rate=1e-4, warmup_steps=20, weight_decay=0.1
        ),
        training=TrainingConfig(
            steps=400,
            global_batch_size=16,
            sequence_length=140,
            log_every_steps=20,
            eval_every_steps=100,
            eval_steps=8,
        ),
        checkpoint=CheckpointConfig(every_steps=100),
    )
