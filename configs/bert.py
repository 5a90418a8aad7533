"""BERT: bidirectional encoders that learn from masked tokens."""

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh import MeshConfig
from megajax.models.bert import BertConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig


def bert_tiny() -> Config:
    """A 1 M parameter BERT on the source code of Python's standard library: minutes on a laptop.

    Hardware: 2 CPU cores. Every mesh axis may be 2.
    Command: python train.py --config=bert_tiny
    """
    return Config(
        model=BertConfig(
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            vocab_size=2048,
            max_positions=128,
            dropout=0.0,
            attention_dropout=0.0,
        ),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="text", text=("stdlib",), tokenizer="sentencepiece:2044", kind="masked_sop"),
        optimizer=OptimizerConfig(
            name="muon", momentum=0.95, learning_rate=1.5e-2, min_learning_rate=1e-4, warmup_steps=20, weight_decay=0.1
        ),
        training=TrainingConfig(
            steps=400,
            global_batch_size=32,
            sequence_length=128,
            log_every_steps=10,
            eval_every_steps=100,
            eval_steps=8,
        ),
        checkpoint=CheckpointConfig(every_steps=100),
    )
