"""GPT-2 and GPT-3 shaped models: LayerNorm, GELU, learned positions."""

import dataclasses

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig


def gpt_tiny() -> Config:
    """A 1 M parameter GPT on the source code of Python's standard library: a minute or two on a laptop.

    Hardware: 2 CPU cores. Every mesh axis may be 2; data and fsdp also 8. The optimizer is tuned for so few tokens.
    Measured: 21k tokens/s, 1.709 bits per byte after 33 s (2 idle cores, jax 0.10.2, 2026-11-28).
    Command: python train.py --config=gpt_tiny
    """
    return Config(
        model=DecoderConfig(
            num_layers=4,
            embed_dim=128,
            num_heads=2,
            vocab_size=2048,
            max_positions=256,
            position="rope",
            norm="rmsnorm",
            activation="swiglu",
            mlp_dim=384,
            biases=(),
            qk_norm=True,
        ),
        mesh=MeshConfig(data=-1),
        precision=PrecisionConfig(compute="float32"),
        data=DataConfig(source="text", text=("stdlib",), tokenizer="sentencepiece:2048"),
        optimizer=OptimizerConfig(
            name="muon",
            momentum=0.8,
            learning_rate=1.5e-2,
            min_learning_rate=1e-4,
            schedule="linear",
            warmup_steps=10,
            weight_decay=0.1,
            groups=("embedding learning_rate_scale=4",),
        ),
        training=TrainingConfig(
            steps=80,
            global_batch_size=16,
            sequence_length=256,
            log_every_steps=10,
            eval_every_steps=40,
            eval_steps=8,
            sample_prompt="def ",
        ),
        checkpoint=CheckpointConfig(every_steps=40),
    )


def gpt2_124m() -> Config:
    """GPT-2 small (Radford et al. 2019), 124 M parameters, with batches of about half a million tokens.

    Hardware: one GPU. Data: any; --data.source=text --data.text=stdlib --data.tokenizer=sentencepiece:16384 for
    the sources of Python itself.
    Measured: 537k tokens/s, MFU 46.4 % (43.3 % causal), 122.1 ms per bare step of 64 x 1024 tokens (one H100 80GB,
    jax 0.11.2, 2026-11-27, commit 67b592f0); loss 10.93 -> 2.99 in 400 such steps on Python sources (commit 5e4a439).
    Command: python train.py --config=gpt2_124m --data.paths=PREFIX
    """
    return Config(
        model=DecoderConfig(dropout=0.0, activation="gelu_tanh", vocab_size=50257, max_positions=1024),
        mesh=MeshConfig(data=-1),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=6e-4, min_learning_rate=6e-5, warmup_steps=700),
        training=TrainingConfig(
            steps=19_000, global_batch_size=512, microbatch_size=32, sequence_length=1024, eval_every_steps=500
        ),
    )


def gpt2_124m_speed() -> Config:
    """gpt2_124m tuned for short runs: NorMuon (Li et al. 2025) with a linear decay, rotary positions, normalised
    queries and keys, squared ReLU (So et al. 2021), in the manner of the GPT-2 speed runs (modded-nanogpt).

    Hardware: one GPU. What each part brings, and what brought nothing: docs/speed.md, Time to a loss.
    Measured: 576k tokens/s; held-out loss 3.258 on 48 M tokens of Python sources, where gpt2_124m has 3.337 after 400
    such steps (one H100 80GB, jax 0.11.2, 2026-11-27, commit 051dd901 with --optimizer.name=normuon).
    Command: python train.py --config=gpt2_124m_speed
    """
    return Config(
        model=DecoderConfig(
            vocab_size=16384,
            max_positions=1024,
            position="rope",
            norm="rmsnorm",
            biases=(),
            qk_norm=True,
            activation="squared_relu",
        ),
        mesh=MeshConfig(data=-1),
        data=DataConfig(source="text", text=("stdlib",), tokenizer="sentencepiece:16384"),
        optimizer=OptimizerConfig(
            name="normuon", learning_rate=6e-3, min_learning_rate=0.0, schedule="linear", warmup_steps=10
        ),
        training=TrainingConfig(
            steps=80, global_batch_size=64, sequence_length=1024, log_every_steps=10, eval_every_steps=20, eval_steps=16
        ),
    )


def gpt_1p3b() -> Config:
    """A GPT of 24 layers and width 2048, 16 heads of 128, RMSNorm, rotary, untied embeddings: the one-GPU benchmark.

    Hardware: one H100. Measured: 62.7k tokens/s, MFU 57.6 % (attention in full), 261.4 ms per step, 45.7 GiB (bare step
    and training loop; one H100 80GB, jax 0.11.2, 2026-11-21, commit 9b4544b).
    Command: python train.py --config=gpt_1p3b
    """
    gpt = _gpt3(num_layers=24, embed_dim=2048, num_heads=16, sequence_length=2048)
    return Config(
        model=dataclasses.replace(gpt, position="rope", norm="rmsnorm"),
        mesh=MeshConfig(fsdp=-1),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=2e-4, min_learning_rate=2e-5, warmup_steps=200),
        training=TrainingConfig(steps=10_000, global_batch_size=8, sequence_length=2048),
    )


def gpt3_7b() -> Config:
    """Megatron-LM's own performance test gpt3_7b_tp4_pp1_memory_speed: 7 B, sequence 8192, vocabulary 131072.

    Hardware: 8 GPUs of one host, tensor 4 x fsdp 2 as Megatron runs it
    (its golden value: 7,348 tokens/s/GPU on 8 H100).
    Command: python train.py --config=gpt3_7b
    """
    return Config(
        model=DecoderConfig(
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=16384,
            vocab_size=131072,
            max_positions=8192,
            tied_embeddings=False,
            biases=("norm",),
        ),
        execution=ExecutionConfig(recompute="selective"),
        mesh=MeshConfig(fsdp=2, tensor=4),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:131072"),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, min_learning_rate=1e-5, warmup_steps=100),
        training=TrainingConfig(steps=5_000, global_batch_size=8, sequence_length=8192),
    )


def gpt3_7b_pipeline() -> Config:
    """gpt3_7b as a pipeline, like Megatron-LM's gpt3_7b_tp1_pp4: 4 stages, 8 virtual stages, data 2.

    Hardware: 8 GPUs of one host (Megatron's golden value: 7,119 tokens/s/GPU on 8 H100).
    Measured: 9,845 tokens/s/GPU on 4 H200 with data 1 and half the batch (docs/pipeline.md).
    Command: python train.py --config=gpt3_7b_pipeline
    """
    config = gpt3_7b()
    return dataclasses.replace(
        config,
        execution=ExecutionConfig(),
        mesh=MeshConfig(data=2, pipeline=4, virtual_stages=8),
        training=dataclasses.replace(config.training, microbatch_size=1),
    )


def gpt_22b() -> Config:
    """The 22 B model of Korthikanti et al. 2022 (table 3): 48 layers, width 6144, sequence 2048.

    Hardware: 8 hosts of 8 H100, tensor 8 within hosts, fsdp 8 between hosts.
    Command: srun python train.py --config=gpt_22b
    """
    return Config(
        model=_gpt3(num_layers=48, embed_dim=6144, num_heads=64, sequence_length=2048),
        execution=ExecutionConfig(recompute="selective"),
        mesh=MeshConfig(fsdp=8, tensor=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=1e-4, min_learning_rate=1e-5, warmup_steps=500),
        training=TrainingConfig(steps=50_000, global_batch_size=256, microbatch_size=8, sequence_length=2048),
    )


def gpt_175b() -> Config:
    """GPT-3 (Brown et al. 2020): 96 layers, width 12288, sequence 2048, batch 1536.

    Hardware: 128 hosts of 8 H100, tensor 8 within hosts, fsdp 128 between hosts.
    Command: srun python train.py --config=gpt_175b
    """
    return Config(
        model=_gpt3(num_layers=96, embed_dim=12288, num_heads=96, sequence_length=2048),
        execution=ExecutionConfig(recompute="full"),
        mesh=MeshConfig(fsdp=128, tensor=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock"),
        optimizer=OptimizerConfig(learning_rate=6e-5, min_learning_rate=6e-6, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=1536, sequence_length=2048),
    )


def _gpt3(num_layers: int, embed_dim: int, num_heads: int, sequence_length: int) -> DecoderConfig:
    return DecoderConfig(
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        vocab_size=50257,
        vocab_multiple=1024,
        max_positions=sequence_length,
        activation="gelu_tanh",
        biases=("norm",),
        tied_embeddings=False,
    )
