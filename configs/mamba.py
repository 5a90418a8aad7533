"""Mamba-2, gated delta nets, and their hybrids with attention and MLPs (megajax/models/hybrid.py)."""

import dataclasses

from configs.gpt import gpt_tiny
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.layers.recurrent.delta_net import DeltaNetConfig
from megajax.layers.recurrent.mamba import MambaConfig
from megajax.mesh.config import MeshConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.hybrid import HybridConfig
from megajax.optim.config import OptimizerConfig
from megajax.training.config import TrainingConfig

_MAMBA = MambaConfig(head_dim=32, state_dim=64, chunk=64)


def mamba2_tiny() -> Config:
    """A 1 M parameter Mamba-2 on the source code of Python's standard library, beside gpt_tiny: minutes on a laptop.

    Hardware: 2 CPU cores. The data and batches are those of gpt_tiny, which with this optimizer and as many steps, and
    without qk_norm, ends at 1.730 bits per byte.
    Measured: 1.612 bits per byte after 150 steps (a busy machine, so without times; jax 0.10.2, 2026-11-23).
    Command: python train.py --config=mamba2_tiny
    """
    config = _tiny(num_layers=7, pattern="M", mamba=_MAMBA)
    # On two busy cores the step compiles in 6 instead of 28 s (11,400 instead of 38,900 lines of HLO), and runs no
    # slower.
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, scan_layers=True))


def hybrid_tiny() -> Config:
    """A 1 M parameter hybrid, Mamba-2 with one attention layer and MLPs, beside gpt_tiny: minutes on a laptop.

    Hardware: 2 CPU cores. The data and batches are those of gpt_tiny, which with this optimizer and as many steps, and
    without qk_norm, ends at 1.730 bits per byte.
    Measured: 1.553 bits per byte after 150 steps and 5 min 10 s of CPU time, compilation and evaluations included (a
    busy machine, so without the time of a step; jax 0.10.2, 2026-11-23).
    Command: python train.py --config=hybrid_tiny
    """
    return _tiny(num_layers=7, pattern="M-M*-M-", mamba=_MAMBA)


def delta_net_tiny() -> Config:
    """A 1 M parameter hybrid as hybrid_tiny, with gated delta nets instead of Mamba-2: minutes on a laptop.

    Hardware: 2 CPU cores. The data and batches are those of gpt_tiny.
    Measured: 1.609 bits per byte after 150 steps (a busy machine, so without times; jax 0.10.2, 2026-11-23).
    Command: python train.py --config=delta_net_tiny
    """
    delta_net = DeltaNetConfig(value_head_dim=32, num_key_heads=2, key_head_dim=32, chunk=32)
    return _tiny(num_layers=7, pattern="G-G*-G-", delta_net=delta_net)


def mamba2_130m() -> Config:
    """Mamba-2 of 130 M parameters as published (Dao and Gu 2024), with batches of half a million tokens.

    Hardware: one GPU.
    Measured: 175k tokens/s, MFU 14.7 %, 187.0 ms per bare step of 16 x 2048 tokens (one H100 80GB, jax 0.11.2,
    2026-11-28, commit cf2e0d89). The step compiles in 54 s.
    Command: python train.py --config=mamba2_130m --data.paths=PREFIX
    """
    return Config(
        model=_mamba2(num_layers=24, embed_dim=768),
        mesh=MeshConfig(data=-1),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=3e-3, min_learning_rate=1e-5, warmup_steps=500, weight_decay=0.1),
        training=TrainingConfig(steps=4_800, global_batch_size=256, microbatch_size=16, sequence_length=2048),
    )


def mamba2_2p7b() -> Config:
    """Mamba-2 of 2.7 B parameters as published (Dao and Gu 2024).

    Hardware: 8 GPUs of one host, weights and optimizer sharded. Measured with 8 layers on one GPU (docs/mamba.md).
    Command: python train.py --config=mamba2_2p7b --data.paths=PREFIX
    """
    return Config(
        model=_mamba2(num_layers=64, embed_dim=2560),
        execution=ExecutionConfig(recompute="selective"),
        mesh=MeshConfig(fsdp=8),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=8e-4, min_learning_rate=1e-5, warmup_steps=1000, weight_decay=0.1),
        training=TrainingConfig(steps=50_000, global_batch_size=256, microbatch_size=8, sequence_length=2048),
    )


def hybrid_8b() -> Config:
    """The sizes of Nemotron-H 8B (NVIDIA 2025, arXiv 2504.03624): 24 Mamba-2, 4 attention and 24 MLP layers.

    Hardware: 8 GPUs of one host, tensor 2 x fsdp 4. Measured with 4 layers on one GPU (docs/mamba.md).
    Command: python train.py --config=hybrid_8b --data.paths=PREFIX
    """
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    return Config(
        model=HybridConfig(
            num_layers=len(pattern),
            pattern=pattern,
            mamba=MambaConfig(num_heads=128, num_groups=8, dt_min=1e-3),
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=21504,
            activation="squared_relu",
            vocab_size=131072,
            position="none",
            norm="rmsnorm",
            biases=(),
            tied_embeddings=False,
        ),
        execution=ExecutionConfig(recompute="full"),
        mesh=MeshConfig(fsdp=4, tensor=2),
        data=DataConfig(source="mock", tokenizer="null:131072"),
        optimizer=OptimizerConfig(learning_rate=8e-4, min_learning_rate=8e-6, warmup_steps=1000, weight_decay=0.1),
        training=TrainingConfig(steps=100_000, global_batch_size=768, microbatch_size=4, sequence_length=8192),
    )


def _tiny(num_layers: int, pattern: str, **recurrent) -> Config:
    gpt = gpt_tiny()
    model = HybridConfig(
        num_layers=num_layers,
        pattern=pattern,
        **recurrent,
        embed_dim=128,
        num_heads=4,
        mlp_dim=384,
        vocab_size=2048,
        position="none",
        norm="rmsnorm",
        activation="swiglu",
        biases=(),
    )
    optimizer = dataclasses.replace(gpt.optimizer, momentum=0.95, schedule="cosine", groups=())
    training = dataclasses.replace(gpt.training, steps=150, eval_every_steps=50)
    checkpoint = dataclasses.replace(gpt.checkpoint, every_steps=50)
    return dataclasses.replace(gpt, model=model, optimizer=optimizer, training=training, checkpoint=checkpoint)


def _mamba2(num_layers: int, embed_dim: int) -> HybridConfig:
    return HybridConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        vocab_size=50277,
        vocab_multiple=16,
        position="none",
        norm="rmsnorm",
        biases=(),
    )
