"""Log-mel spectrograms as Whisper reads them (Radford et al. 2022, https://arxiv.org/abs/2212.04356): 100 mel frames a
second, each of 25 ms, in 80 or 128 bands up to 8 kHz.

Of the same samples the numbers are those of transformers' WhisperFeatureExtractor. Whisper itself pads every clip with
silence to 30 s before this; here a clip has as many mel frames as it is long, and so as little to compute as to store.
Padding changes the last two mel frames of the clip, which see silence after it instead of its reflection, and adds what
the encoder then attends to: an encoder trained with padding reads such a clip slightly otherwise. A clip that is 30 s
long, padded or not, is read exactly as by Whisper.
"""

import functools

import numpy as np

from megajax.audio.wav import RATE

HOP = RATE // 100
"""Samples between mel frames."""
WINDOW = RATE // 40
"""Samples of a mel frame."""
TOP = 8000.0  # Hz
SHORTEST = WINDOW // 2 + 1  # samples that can be reflected at both ends
SILENCE = -1.5  # of a clip of zeros


def log_mel(samples: np.ndarray, num_mels: int) -> np.ndarray:
    """float32 [samples] -> float32 [mel frames, mels], one frame for each HOP samples.

    log10 of the power in each band, at most 8 below the largest of the clip, plus 4, over 4. The clip is reflected at
    both ends; one shorter than SHORTEST samples is first padded with silence.
    """
    num_frames = len(samples) // HOP
    samples = np.pad(samples, (0, max(SHORTEST - len(samples), 0)))
    padded = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:num_frames]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(frames * hann)) ** 2
    levels = np.log10(np.maximum(power @ mel_filters(num_mels), 1e-10))
    return ((np.maximum(levels, levels.max() - 8) + 4) / 4).astype(np.float32)


@functools.cache
def mel_filters(num_mels: int) -> np.ndarray:
    """[frequencies, mels]: triangles whose corners are equally far apart on the mel scale of Slaney (1998), each with
    the same area."""
    corners = _hertz(np.linspace(0, _mel(TOP), num_mels + 2))
    frequencies = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies - low) / (centre - low)
    falling = (high - frequencies) / (high - centre)
    return np.maximum(np.minimum(rising, falling), 0) * 2 / (high - low)


# Linear below 1 kHz, then 27 mels for each factor of 6.4.
_KNEE = 1000.0
_PER_MEL = 200 / 3
_STEP = np.log(6.4) / 27


def _mel(hertz: float) -> float:
    return _KNEE / _PER_MEL + np.log(hertz / _KNEE) / _STEP if hertz > _KNEE else hertz / _PER_MEL


def _hertz(mels: np.ndarray) -> np.ndarray:
    beyond = np.maximum(mels - _KNEE / _PER_MEL, 0)
    return np.where(beyond > 0, _KNEE * np.exp(_STEP * beyond), _PER_MEL * mels)
