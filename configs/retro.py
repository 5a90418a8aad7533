"""Decoders that read a database of text (RETRO)."""

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.retro import RetroConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.training.config import TrainingConfig


def retro_tiny() -> Config:
    """A small GPT that looks up the sources of Python's standard library while it reads them.

    Hardware: 2 CPU cores. Measured: 6.5k tokens/s, 1.320 bits per byte after 6 min 21 s of steps; loss 2.461, with the
    neighbours of other samples 2.471, without any 2.483 (2 cores, jax 0.10.2, 2026-11-24). The same decoder without
    retrieval has 2.462 (docs/retrieval.md).
    Command: python train.py --config=retro_tiny
    """
    return Config(
        model=RetroConfig(
            num_layers=4,
            embed_dim=128,
            num_heads=4,
            vocab_size=2048,
            position="rope",
            norm="rmsnorm",
            activation="swiglu",
            mlp_dim=384,
            biases=(),
            chunk_length=32,
            neighbour_length=64,
            retrieval_layers=(1, 3),
            encoder_layers=1,
        ),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="text", text=("stdlib",), tokenizer="sentencepiece:2048"),
        optimizer=OptimizerConfig(
            name="muon", momentum=0.95, learning_rate=1.5e-2, min_learning_rate=1e-4, warmup_steps=10, weight_decay=0.1
        ),
        training=TrainingConfig(
            steps=600, global_batch_size=16, sequence_length=256, log_every_steps=10, eval_every_steps=100, eval_steps=8
        ),
        checkpoint=CheckpointConfig(every_steps=200),
    )


def retro_2b() -> Config:
    """The size of Megatron-LM's example script for RETRO (Wang et al. 2023, https://arxiv.org/abs/2304.06762): 32
    layers of 2,048, every third of which reads two neighbours of 128 tokens.

    Hardware: 8 GPUs of 80 GB: compiled for H100, it needs 47.8 GiB of each. Speed: not measured.
    Data: preprocess --append_eod, then retrieve build.
    Command: python train.py --config=retro_2b --data.paths=PREFIX
    """
    return Config(
        model=RetroConfig(
            num_layers=32,
            embed_dim=2048,
            num_heads=32,
            vocab_size=50257,
            max_positions=2048,
            init_std=0.023,
            tied_embeddings=False,
        ),
        mesh=MeshConfig(fsdp=8),
        data=DataConfig(source="mock"),
        execution=ExecutionConfig(recompute="selective"),
        optimizer=OptimizerConfig(learning_rate=6e-4, min_learning_rate=6e-5, warmup_steps=800, weight_decay=0.1),
        training=TrainingConfig(
            steps=650_000, global_batch_size=256, microbatch_size=8, sequence_length=2048, eval_every_steps=2000
        ),
    )
