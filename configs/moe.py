"""Mixtures of experts: Mixtral (Jiang et al. 2024), Qwen3 (Yang et al. 2025), DeepSeek-V3 (DeepSeek-AI 2024)."""

import dataclasses
import math
from typing import cast

from configs.gpt import gpt_tiny
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.layers.attention.latent import LatentConfig
from megajax.layers.attention.rope import RopeConfig
from megajax.layers.feed_forward.moe import MoeConfig
from megajax.layers.feed_forward.router import RouterConfig
from megajax.mesh.config import MeshConfig
from megajax.models.decoder import DecoderConfig
from megajax.models.execution import ExecutionConfig
from megajax.optim.config import OptimizerConfig
from megajax.tasks.language import Language
from megajax.training.config import TrainingConfig


def moe_tiny() -> Config:
    """gpt_tiny with 8 experts of half its feed-forward width, 2 per token: the same active size on the same text.

    Hardware: 2 CPU cores; --mesh.expert=2 splits the experts over 2 devices.
    Measured: 1.709 bits per byte, as gpt_tiny (jax 0.10.2, 2026-11-28).
    Command: python train.py --config=moe_tiny
    """
    config = gpt_tiny()
    dense = cast(DecoderConfig, config.model)
    moe = MoeConfig(
        num_experts=8,
        expert_dim=dense.width_of_mlp // 2,
        router=RouterConfig(top_k=2, aux_loss=0.01, aux_loss_scope="sequence"),
    )
    return dataclasses.replace(config, model=dataclasses.replace(dense, moe=moe))


def mixtral_8x7b() -> Config:
    """Mixtral 8x7B: 8 experts, 2 per token, 46.7 B parameters, 12.9 B active; sequence 4096.

    Hardware: 8 hosts of 8 H100, one expert per GPU, fsdp 8 between hosts. Not measured.
    Command: srun python train.py --config=mixtral_8x7b
    """
    return Config(
        model=DecoderConfig(
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            mlp_dim=14336,
            vocab_size=32000,
            position="rope",
            rope=RopeConfig(base=1_000_000.0),
            norm="rmsnorm",
            activation="swiglu",
            biases=(),
            tied_embeddings=False,
            moe=MoeConfig(num_experts=8, router=RouterConfig(top_k=2, aux_loss=0.02)),
        ),
        execution=ExecutionConfig(recompute="selective"),
        mesh=MeshConfig(fsdp=8, expert=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:32000"),
        optimizer=OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=256, microbatch_size=1, sequence_length=4096),
    )


def qwen3_30b_a3b() -> Config:
    """Qwen3-30B-A3B: 128 experts of width 768, 8 per token, 30.5 B parameters, 3.3 B active.

    Hardware: 4 hosts of 8 H100, 16 experts per GPU, fsdp 4 between hosts. Not measured.
    Command: srun python train.py --config=qwen3_30b_a3b
    """
    return Config(
        model=DecoderConfig(
            num_layers=48,
            embed_dim=2048,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            mlp_dim=6144,
            vocab_size=151936,
            position="rope",
            rope=RopeConfig(base=1_000_000.0),
            norm="rmsnorm",
            norm_epsilon=1e-6,
            qk_norm=True,
            activation="swiglu",
            biases=(),
            tied_embeddings=False,
            moe=MoeConfig(num_experts=128, expert_dim=768, router=RouterConfig(top_k=8, aux_loss=0.001)),
        ),
        execution=ExecutionConfig(recompute="selective"),
        mesh=MeshConfig(fsdp=4, expert=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:151936"),
        optimizer=OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=256, microbatch_size=1, sequence_length=4096),
    )


def deepseek_v3() -> Config:
    """DeepSeek-V3: 671 B parameters, 37 B active, and 11.6 B of multi-token prediction; 256 experts; sequence 4096.

    Source: arXiv 2412.19437, section 4.2, with the YaRN wavelengths of the released weights.
    Hardware: 128 hosts of 8 H100, 4 experts of each layer per GPU, fsdp 16 between hosts. Not measured.
    Command: srun python train.py --config=deepseek_v3
    """
    yarn = RopeConfig(
        base=10000.0, interleaved=True, scaling="yarn", factor=40.0, original_length=4096, attention_factor=1.0
    )
    router = RouterConfig(
        top_k=8,
        score="sigmoid",
        scale=2.5,
        groups=(8, 4),
        bias_update_rate=1e-3,
        aux_loss=1e-4,
        aux_loss_scope="sequence",
    )
    return Config(
        model=DecoderConfig(
            num_layers=61,
            pattern="d3e58",
            embed_dim=7168,
            num_heads=128,
            head_dim=128,
            mlp_dim=18432,
            vocab_size=129280,
            position="rope",
            rope=yarn,
            norm="rmsnorm",
            norm_epsilon=1e-6,
            activation="swiglu",
            biases=(),
            tied_embeddings=False,
            # YaRN's factor on the scores of a head of 128 + 64 entries.
            attention_multiplier=(0.1 * math.log(yarn.factor) + 1) ** 2 / math.sqrt(192),
            latent=LatentConfig(kv_rank=512, q_rank=1536),
            moe=MoeConfig(num_experts=256, expert_dim=2048, shared_dim=2048, router=router),
            mtp_layers=1,
            init_std=0.006,
        ),
        execution=ExecutionConfig(recompute="full"),
        mesh=MeshConfig(fsdp=16, expert=64),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:129280"),
        optimizer=OptimizerConfig(learning_rate=2.2e-4, min_learning_rate=2.2e-5, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=15360, microbatch_size=1, sequence_length=4096),
    )


def moonlight_16b_a3b() -> Config:
    """Moonlight-16B-A3B (Liu et al. 2025): layers like DeepSeek-V3's; 16.0 B parameters, 2.9 B active; sequence 8192.

    Source: arXiv 2502.16982, appendix, and the released weights.
    Hardware: 4 hosts of 8 H100, 8 experts of each layer per GPU, fsdp 4 between hosts. Not measured.
    Command: srun python train.py --config=moonlight_16b_a3b
    """
    router = RouterConfig(
        top_k=6, score="sigmoid", scale=2.446, bias_update_rate=1e-3, aux_loss=1e-3, aux_loss_scope="sequence"
    )
    return Config(
        model=DecoderConfig(
            num_layers=27,
            pattern="de26",
            embed_dim=2048,
            num_heads=16,
            head_dim=128,
            mlp_dim=11264,
            vocab_size=163840,
            position="rope",
            rope=RopeConfig(base=50_000.0, interleaved=True),
            norm="rmsnorm",
            norm_epsilon=1e-5,
            activation="swiglu",
            biases=(),
            tied_embeddings=False,
            latent=LatentConfig(kv_rank=512, norm_epsilon=1e-6),
            moe=MoeConfig(num_experts=64, expert_dim=1408, shared_dim=2816, router=router),
        ),
        execution=ExecutionConfig(recompute="selective"),
        mesh=MeshConfig(fsdp=4, expert=8),
        task=Language(cross_document_attention=True),
        data=DataConfig(source="mock", tokenizer="null:163840"),
        optimizer=OptimizerConfig(name="muon", learning_rate=4.2e-4, min_learning_rate=4.2e-5, warmup_steps=2000),
        training=TrainingConfig(steps=100_000, global_batch_size=2048, microbatch_size=1, sequence_length=8192),
    )


def deepseek_v3_3layers() -> Config:
    """DeepSeek-V3 cut for one GPU: 1 dense layer, 2 with experts, 1 of multi-token prediction; 2.9 B parameters.

    2.1 B parameters are active: 2 of 8 experts per token. All widths are those of the whole model; vocabulary 32768.

    Hardware: 1 H100 80 GB. Not measured.
    Command: python train.py --config=deepseek_v3_3layers
    """
    config = deepseek_v3()
    whole = cast(DecoderConfig, config.model)
    router = dataclasses.replace(whole.moe.router, top_k=2, groups=(4, 2))
    moe = dataclasses.replace(whole.moe, num_experts=8, router=router)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(whole, num_layers=3, pattern="dee", vocab_size=32768, moe=moe),
        execution=ExecutionConfig(recompute="norm,qkv,mlp"),
        mesh=MeshConfig(),
        data=dataclasses.replace(config.data, tokenizer="null:32768"),
        training=dataclasses.replace(config.training, global_batch_size=1),
    )
