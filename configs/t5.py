"""T5: encoder-decoders that learn to write the missing spans of a text."""

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig
from megajax.models.encoder_decoder import EncoderDecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.spans import Spans
from megajax.training.config import TrainingConfig


def t5_tiny() -> Config:
    """A 1.3 M parameter T5 v1.1 on the source code of Python's standard library: minutes on a laptop.

    Hardware: 2 CPU cores. data, fsdp and tensor may be 2.
    Measured: eval_loss 3.750, accuracy 0.324 after 400 steps (jax 0.10.2, 2026-11-22); docs/t5.md says what of it the
    encoder contributes. The speed was not measured: other programs used the machine.
    Command: python train.py --config=t5_tiny
    """
    return Config(
        model=EncoderDecoderConfig(
            num_layers=2,
            embed_dim=128,
            num_heads=4,
            head_dim=32,
            mlp_dim=256,
            vocab_size=2176,
            decoder_length=32,
            activation="geglu_tanh",
            tied_embeddings=False,
        ),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        task=Spans(),
        data=DataConfig(source="text", text=("stdlib",), tokenizer="sentencepiece:2048"),
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


def t5_base() -> Config:
    """T5 v1.1 base (Shazeer 2020; Raffel et al. 2019): 248 M parameters, 512 tokens in, 128 out.

    Hardware: one GPU. The published model had 1 M steps of 2048 texts and Adafactor.
    Command: python train.py --config=t5_base --data.paths=PREFIX
    """
    return Config(
        model=EncoderDecoderConfig(mlp_dim=2048, activation="geglu_tanh", tied_embeddings=False),
        mesh=MeshConfig(data=-1),
        task=Spans(),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=5e-4, min_learning_rate=5e-5, warmup_steps=2_000),
        training=TrainingConfig(
            steps=100_000, global_batch_size=512, microbatch_size=64, sequence_length=512, eval_every_steps=1_000
        ),
    )


def t5_11b() -> Config:
    """T5 v1.0 11B (Raffel et al. 2019): 24 + 24 layers, 128 heads of 128 over a width of 1024, feed-forward 65536.

    Hardware: 4 hosts of 8 H100, tensor 8 within hosts, fsdp 4 between hosts.
    Command: srun python train.py --config=t5_11b --data.paths=PREFIX
    """
    return Config(
        model=EncoderDecoderConfig(num_layers=24, embed_dim=1024, num_heads=128, head_dim=128, mlp_dim=65536),
        execution=ExecutionConfig(recompute="full", scan_layers=True),
        mesh=MeshConfig(fsdp=4, tensor=8),
        task=Spans(),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=2e-4, min_learning_rate=2e-5, warmup_steps=10_000),
        training=TrainingConfig(
            steps=500_000, global_batch_size=2048, microbatch_size=32, sequence_length=512, eval_every_steps=1_000
        ),
    )
