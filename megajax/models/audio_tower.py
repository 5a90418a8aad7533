"""Encoders of sound like Whisper's (Radford et al. 2022, https://arxiv.org/abs/2212.04356): two convolutions over a
log-mel spectrogram, sinusoidal positions, and transformer layers.

Dimensions: B blocks, P frames of a block, of 20 ms each, M mels, C width of the encoder.
Clips of any length are packed one after another in a block; audio/layout.py says how the convolutions stay exact.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.audio.layout import FIELD, STRIDE, TAPS, ClipLayouts
from megajax.fields.ranges import MAY_CHANGE, Epsilon, PositiveInt
from megajax.layers.layer import Flops
from megajax.layers.linear import Linear
from megajax.layers.norm import Norm
from megajax.media.kinds import AUDIO
from megajax.models.modality import Encoder, ModalityConfig
from megajax.ops import activation as nonlinearity
from megajax.ops.activation import activate


@dataclasses.dataclass(frozen=True)
class AudioConfig(ModalityConfig):
    """A section of a model; with num_layers=0 the model reads no sound."""

    activation: nonlinearity.Activation = "gelu"
    """Feed-forward activation; that of the convolutions is gelu."""
    norm_epsilon: Epsilon = 1e-5
    """Added to the variance."""
    mels: Literal[80, 128] = 80
    """Bands of the spectrogram (Whisper large-v3: 128)."""
    merge: PositiveInt = 2
    """Adjacent frames that become one token of the text: 2 in Qwen2-Audio, by their mean, 8 in Ultravox."""
    positions: PositiveInt = 1500
    """Frames that the encoder has positions for; longer clips are cut into pieces of this length (Whisper: 30 s)."""
    frames: PositiveInt = dataclasses.field(default=1500, metadata=MAY_CHANGE)
    """Frames of a block, of 20 ms each."""

    kind = AUDIO

    @property
    def block_size(self) -> int:
        return self.frames

    @property
    def merged(self) -> int:
        return self.merge

    @property
    def layouts(self) -> ClipLayouts:
        return ClipLayouts(self.mels, self.merge, self.positions)

    @property
    def attention_options(self) -> dict[str, Any]:
        return dict(qkv_bias=True, key_bias=False)

    @property
    def embed_flops(self) -> Flops:
        return Flops(2 * TAPS * self.embed_dim * (TAPS * self.mels + self.embed_dim))

    def build(self, embed_dim: int, init_std: float, dtype: jnp.dtype, rngs: nnx.Rngs) -> "AudioTower":
        return AudioTower(self, embed_dim, init_std, dtype, rngs=rngs)

    def check(self, prefix: str = "model.audio.") -> None:
        super().check(prefix)
        if self.embed_dim % 2 or self.embed_dim < 4:
            raise ValueError(f"{prefix}embed_dim={self.embed_dim} must be even and at least 4: positions are pairs")


class AudioTower(Encoder):
    """All of an encoder of sound but its layers, which are a stack of the model."""

    def __init__(self, config: AudioConfig, embed_dim: int, init_std: float, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        """embed_dim: of the text."""
        self.config = config
        self.dtype = dtype
        C = config.embed_dim
        self.first = Linear((TAPS, config.mels), (C,), ("pixels", "pixels", "embed"), init_std, rngs=rngs)
        self.second = Linear((TAPS, C), (C,), ("pixels", "embed", "head_dim"), init_std, rngs=rngs)
        for linear in (self.first, self.second):
            linear.add_bias_parameter(rngs)
        self.final_norm = Norm(config.norm_config, C, rngs=rngs)
        super().__init__(config, embed_dim, init_std, rngs=rngs)

    def embed(self, batch: dict) -> jax.Array:
        """frames float32 [B, P, FIELD M], frame_places int32 [B, P, 3] -> [B, P, C]."""
        frames = batch["frames"].astype(self.dtype)
        _, place_BP, count_BP = jnp.moveaxis(batch["frame_places"], -1, 0)
        fields_BPFM = frames.reshape(*frames.shape[:2], FIELD, self.config.mels)
        fields_BPTTM = jnp.stack([fields_BPFM[:, :, tap : tap + TAPS] for tap in range(TAPS)], 2)
        y_BPTC = _gelu(self.first(fields_BPTTM))
        # The second convolution is padded with zeros, not with what the first one makes of zeros.
        mel_frame_BPT = STRIDE * place_BP[..., None] + np.arange(TAPS) - 1
        is_inside_BPT = (mel_frame_BPT >= 0) & (mel_frame_BPT < count_BP[..., None])
        x_BPC = _gelu(self.second(jnp.where(is_inside_BPT[..., None], y_BPTC, 0)))
        return x_BPC + sinusoids(place_BP, self.config.embed_dim).astype(self.dtype)

    def layer_inputs(self, batch: dict) -> dict:
        return {"view_ids": batch["frame_places"][..., 0]}

    def last(self, x_BPC: jax.Array, batch: dict) -> jax.Array:
        """Frames after the end of a piece, of its last token, are zeros."""
        is_frame_BP1 = (batch["frame_places"][..., 0] > 0)[..., None]
        return jnp.where(is_frame_BP1, self.final_norm(x_BPC), 0)


def _gelu(x: jax.Array) -> jax.Array:
    return activate(x[..., None, :], "gelu")


def sinusoids(place: jax.Array | np.ndarray, width: int) -> jax.Array:
    """Positions [...] -> float32 [..., width]: sines, then cosines, of wavelengths from 2 pi to 2 pi * 10,000."""
    half = width // 2
    rates = np.exp(-np.log(10_000) / (half - 1) * np.arange(half)).astype(np.float32)
    angles = place[..., None].astype(jnp.float32) * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
