"""Models that read images: LLaVA, Gemma 3, Qwen-VL."""

import dataclasses

from megajax.checkpoint.config import CheckpointConfig
from megajax.config import Config
from megajax.data.config import DataConfig
from megajax.images.processor_files import HALF, PROCESSORS
from megajax.images.rules import ImageRule
from megajax.layers.attention.rope import RopeConfig
from megajax.mesh.config import MeshConfig
from megajax.models.audio_tower import AudioConfig
from megajax.models.execution import ExecutionConfig
from megajax.models.multimodal import MultimodalConfig
from megajax.models.tower import TowerConfig
from megajax.optim.config import OptimizerConfig
from megajax.precision import PrecisionConfig
from megajax.tasks.conversations import Conversations
from megajax.training.config import TrainingConfig


def vlm_tiny() -> Config:
    """A model of 0.5 M parameters that answers questions about bar charts and digits, drawn when the run starts.

    Hardware: 2 CPU cores, and Pillow (pip install 'megajax[images]'). Measured: 99.4 % of held-out answers right after
    54 s of steps (130 s of processor time in all); with the images of other conversations 7.7 %, with grey ones 5.8 %
    (2 idle cores, jax 0.10.2, 2026-11-24).
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


def mimo_tiny() -> Config:
    """A model of 0.6 M parameters that answers questions about bar charts and digits, about beeps, and about both,
    drawn when the run starts.

    Hardware: 2 CPU cores, and Pillow (pip install 'megajax[images]'). Measured: 93.1 % of held-out answers right after
    2 min 28 s of steps (3 min 7 s in all, 351 s of processor time); with the images and sounds of other conversations
    21.2 %, with grey images 32.5 %, with silent clips 61.9 %: half of the questions are about images alone, a sixth
    about sound alone (2 cores, jax 0.10.2, 2026-11-24).
    Command: python train.py --config=mimo_tiny
    """
    tiny = vlm_tiny()
    assert isinstance(tiny.model, MultimodalConfig)
    audio = AudioConfig(
        num_layers=2, embed_dim=64, num_heads=4, mlp_dim=192, merge=2, project_dim=128, blocks=1, frames=128
    )
    return dataclasses.replace(
        tiny,
        model=dataclasses.replace(tiny.model, vocab_size=259, image_token=257, audio=audio, audio_token=258),
        data=DataConfig(source="drawn", tokenizer="bytes:<image>,<audio>"),
        training=dataclasses.replace(tiny.training, steps=500),
    )


def llava_7b() -> Config:
    """LLaVA-1.5 7B (Liu et al. 2023, https://arxiv.org/abs/2310.03744): Vicuna with CLIP-L/14 at 336 pixels, whose last
    layer is not used; 576 tokens an image.

    Hardware: 8 GPUs of 80 GB. Not measured. Data: preprocess --conversations --image_token='<image>'. With the weights:
    --config=hugging_face:DIR.
    Command: python train.py --config=llava_7b --data.paths=PREFIX
    """
    return Config(
        model=MultimodalConfig(
            num_layers=32,
            embed_dim=4096,
            num_heads=32,
            mlp_dim=11008,
            vocab_size=32064,
            position="rope",
            max_positions=4096,
            norm="rmsnorm",
            norm_epsilon=1e-5,
            activation="swiglu",
            biases=(),
            tied_embeddings=False,
            image_token=32000,
            vision=TowerConfig(
                num_layers=23,
                embed_dim=1024,
                num_heads=16,
                mlp_dim=4096,
                activation="quick_gelu",
                norm_epsilon=1e-5,
                image=dataclasses.replace(PROCESSORS["CLIPImageProcessor"], size=336, patch_size=14, merge=1),
                patch_bias=False,
                class_token=True,
                table=24,
                embedding_norm=True,
                final_norm=False,
                project_dim=4096,
                blocks=2,
                patches=640,
            ),
        ),
        mesh=MeshConfig(fsdp=8),
        data=DataConfig(source="mock"),
        task=Conversations(on_misfit="skip"),
        execution=ExecutionConfig(recompute="selective"),
        optimizer=OptimizerConfig(learning_rate=2e-5, min_learning_rate=2e-6, warmup_steps=150, weight_decay=0.0),
        training=TrainingConfig(
            steps=5000, global_batch_size=128, microbatch_size=4, sequence_length=2048, eval_every_steps=500
        ),
    )


def gemma3_4b() -> Config:
    """Gemma 3 4B (Gemma Team 2025, https://arxiv.org/abs/2503.19786): SigLIP at 896 pixels, 4,096 patches averaged to
    256 tokens, which see each other.

    Hardware: 8 GPUs of 80 GB. Not measured.
    Command: python train.py --config=gemma3_4b --data.paths=PREFIX
    """
    return Config(
        model=MultimodalConfig(
            num_layers=34,
            pattern="w5f",
            embed_dim=2560,
            num_heads=8,
            num_kv_heads=4,
            head_dim=256,
            mlp_dim=10240,
            vocab_size=262208,
            position="rope",
            max_positions=131072,
            rope=RopeConfig(base=1e6, local_base=1e4, scaling="linear", factor=8.0),
            norm="rmsnorm_1p",
            norm_epsilon=1e-6,
            norm_placement="sandwich",
            qk_norm=True,
            activation="geglu_tanh",
            biases=(),
            window=1024,
            attention_multiplier=1 / 16,
            embedding_multiplier=2560**0.5,
            image_token=262144,
            image_attention="bidirectional",
            vision=TowerConfig(
                num_layers=27,
                embed_dim=1152,
                num_heads=16,
                mlp_dim=4304,
                image=dataclasses.replace(PROCESSORS["Gemma3ImageProcessor"], size=896, patch_size=14, merge=4),
                table=64,
                merged_by_mean=True,
                project_norm="merged",
                project_norm_kind="rmsnorm_1p",
                project_bias=False,
                blocks=2,
                patches=4096,
            ),
        ),
        mesh=MeshConfig(fsdp=8),
        data=DataConfig(source="mock"),
        task=Conversations(on_misfit="skip"),
        execution=ExecutionConfig(recompute="full"),
        optimizer=OptimizerConfig(learning_rate=1e-5, min_learning_rate=1e-6, warmup_steps=150),
        training=TrainingConfig(
            steps=5000, global_batch_size=64, microbatch_size=8, sequence_length=4096, eval_every_steps=500
        ),
    )


def qwen3_vl_8b() -> Config:
    """Qwen3-VL 8B (Qwen Team 2025): images at their own size, deep layers of the tower added to the first layers of the
    text, positions of time, row and column.

    Hardware: 8 GPUs of 80 GB. Not measured.
    Command: python train.py --config=qwen3_vl_8b --data.paths=PREFIX
    """
    return Config(
        model=MultimodalConfig(
            num_layers=36,
            embed_dim=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            mlp_dim=12288,
            vocab_size=151936,
            position="rope",
            max_positions=262144,
            rope=RopeConfig(base=5e6, sections=(24, 20, 20), sections_interleaved=True),
            norm="rmsnorm",
            norm_epsilon=1e-6,
            qk_norm=True,
            activation="swiglu",
            biases=(),
            tied_embeddings=False,
            image_token=151655,
            vision=TowerConfig(
                num_layers=27,
                embed_dim=1152,
                num_heads=16,
                mlp_dim=4304,
                image=dataclasses.replace(
                    PROCESSORS["Qwen2VLImageProcessor"],
                    patch_size=16,
                    merge=2,
                    min_pixels=2**16,
                    max_pixels=2**20,
                    mean=HALF,
                    std=HALF,
                ),
                frames=2,
                table=48,
                rotary=True,
                final_norm=False,
                project_norm="patch",
                project_dim=4608,
                deep_layers=(8, 16, 24),
                blocks=2,
                patches=4096,
            ),
        ),
        mesh=MeshConfig(fsdp=8),
        data=DataConfig(source="mock"),
        task=Conversations(on_misfit="skip"),
        execution=ExecutionConfig(recompute="full"),
        optimizer=OptimizerConfig(learning_rate=1e-5, min_learning_rate=1e-6, warmup_steps=150),
        training=TrainingConfig(
            steps=5000, global_batch_size=64, microbatch_size=8, sequence_length=4096, eval_every_steps=500
        ),
    )
