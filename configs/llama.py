"""Llama 3 (Dubey et al. 2024): RMSNorm, SwiGLU, grouped-query attention, rotary embedding."""

import dataclasses

from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig


def llama3_8b() -> Config:
    """Llama 3 8B, sequence 8192.

    Hardware: 8 GPUs of one host with 80 GB or more, fsdp 8.
    Command: python train.py --config=llama3_8b
    """
    return Config(
        model=_llama3(num_layers=32, embed_dim=4096, num_heads=32, mlp_dim=14336),
        mesh=MeshConfig(data=-1, fsdp=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:128256"),
        optimizer=OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=8, sequence_length=8192),
    )


def llama3_8b_fp8() -> Config:
    """Llama 3 8B with FP8 matmuls in all layers, sequence 8192.

    Hardware: 8 H100 or H200 of one host, fsdp 8 (docs/low_precision.md).
    Command: python train.py --config=llama3_8b_fp8
    """
    return dataclasses.replace(llama3_8b(), precision=PrecisionConfig(recipe="fp8", high_layers=(0, 0)))


def llama3_8b_8layers() -> Config:
    """8 of the 32 layers of Llama 3 8B and a quarter of its vocabulary, sequence 4096: the wide one-GPU benchmark.

    Hardware: one H100. Measured: 44.6k tokens/s, MFU 58.1 % (attention in full), 183.6 ms per step, 36.1 GiB (bare
    step; one H100 80GB, jax 0.11.2, 2026-11-21, commit 9b4544b). Nothing is padded: 32064 is 501 * 64.
    Command: python train.py --config=llama3_8b_8layers
    """
    llama = _llama3(num_layers=8, embed_dim=4096, num_heads=32, mlp_dim=14336)
    return Config(
        model=dataclasses.replace(llama, vocab_size=128256 // 4, vocab_multiple=64),
        mesh=MeshConfig(fsdp=-1),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:32064"),
        optimizer=OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=200),
        training=TrainingConfig(steps=10_000, global_batch_size=2, sequence_length=4096),
    )


def llama3_8b_128k() -> Config:
    """Llama 3 8B with sequences of 131,072 tokens, each split over the 8 GPUs of a host.

    Hardware: 8 GPUs with 80 GB or more, context 8 (docs/context.md). Compiled for 8 H100: 42.9 GiB (jaxlib 0.11.2). On
    4 H200 with context 4: 3.0k tokens/s/GPU, MFU 45 % counted causally (commit 7952425).
    Command: python train.py --config=llama3_8b_128k
    """
    config = llama3_8b()
    return dataclasses.replace(
        config,
        execution=ExecutionConfig(recompute="norm,activation,mlp", scan_layers=True),
        mesh=MeshConfig(data=-1, context=8),
        training=dataclasses.replace(config.training, global_batch_size=1, sequence_length=131_072),
    )


def llama3_70b() -> Config:
    """Llama 3 70B, sequence 8192.

    Hardware: 8 hosts of 8 H100, tensor 8 within hosts, fsdp 8 between hosts.
    Command: srun python train.py --config=llama3_70b
    """
    return Config(
        model=_llama3(num_layers=80, embed_dim=8192, num_heads=64, mlp_dim=28672),
        execution=ExecutionConfig(recompute="full"),
        mesh=MeshConfig(fsdp=8, tensor=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:128256"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1.5e-5, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=128, microbatch_size=2, sequence_length=8192),
    )


def _llama3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int) -> DecoderConfig:
    return DecoderConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        mlp_dim=mlp_dim,
        vocab_size=128256,
        position="rope",
        rope=RopeConfig(base=500_000.0),
        norm="rmsnorm",
        activation="swiglu",
        biases=(),
        tied_embeddings=False,
    )
