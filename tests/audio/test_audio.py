"""Sound: WAV files, spectrograms as Whisper's, and clips cut into frames that carry what convolutions see."""

import io
import wave

import numpy as np
import pytest

from megajax.audio import wav
from megajax.audio.layout import ClipLayouts
from megajax.audio.spectrogram import HOP, SILENCE, log_mel
from megajax.media.kinds import AUDIO
from megajax.media.rows import MediaInputs

RNG = np.random.default_rng(0)


def wav_of(samples: np.ndarray, rate: int = wav.RATE, width: int = 2) -> bytes:
    """samples: integers [samples, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1])
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(samples.astype({1: "u1", 2: "<i2"}[width]).tobytes())
    return file.getvalue()


def test_a_wav_file_is_read_as_written_and_stereo_as_the_mean():
    samples = RNG.integers(-(2**15), 2**15, (500, 2))
    mono = wav.decode(wav_of(samples[:, :1]), "x")
    assert mono.dtype == np.float32
    np.testing.assert_array_equal(mono, samples[:, 0].astype(np.float32) / 2**15)
    np.testing.assert_array_equal(wav.decode(wav_of(samples), "x"), samples.sum(1).astype(np.float32) / 2**16)
    np.testing.assert_array_equal(wav.decode(wav.encode(mono), "x"), mono)


@pytest.mark.parametrize("data, message", [
    (b"", "x.wav: the clip is empty"),
    (b"RIFF....", "x.wav: no WAV file of PCM samples, or damaged"),
    (wav_of(np.zeros((400, 1)))[:-10], "x.wav: the clip ends before its 400 samples"),
    (wav_of(np.zeros((400, 1)), rate=44100), "x.wav: a clip of 44100 samples a second; convert it to 16000"),
    (wav_of(np.zeros((400, 1)), width=1), "x.wav: a clip of 1 channels and 8 bits; convert it"),
    (wav_of(np.zeros((400, 3))), "x.wav: a clip of 3 channels and 16 bits; convert it"),
    (wav_of(np.zeros((159, 1))), "x.wav: a clip of 159 samples is shorter than 160"),
])  # fmt: skip
def test_other_files_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        wav.decode(data, "x.wav")


@pytest.mark.parametrize("num_mels", [80, 128])
def test_spectrograms_are_those_of_transformers(num_mels):
    """Padded to 30 s, as Whisper reads clips, and as long as they are, as models here read them."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.WhisperFeatureExtractor(feature_size=num_mels)
    for length in (201, 1_234, 16_000):
        samples = (0.1 * RNG.standard_normal(length) * np.sin(np.arange(length) / 50)).astype(np.float32)
        for padding, padded in (("do_not_pad", samples), ("max_length", np.pad(samples, (0, 480_000 - length)))):
            want = theirs(samples, sampling_rate=wav.RATE, padding=padding, return_tensors="np").input_features[0].T
            found = log_mel(padded, num_mels)
            # torch computes in float32.
            np.testing.assert_allclose(found, want, rtol=0, atol=3e-5)


def test_a_tone_is_in_its_band_and_silence_is_blank():
    assert (log_mel(np.zeros(1600, np.float32), 80) == SILENCE).all() and AUDIO.blank_value == SILENCE
    loudest = []
    for hertz in (200, 600, 1000, 6400):
        spectrogram = log_mel(np.sin(2 * np.pi * hertz / wav.RATE * np.arange(3200)).astype(np.float32), 80)
        (band,) = np.unique(spectrogram[1:-2].argmax(1))  # the ends are reflected
        loudest.append(int(band))
    # 80 bands of equal width in mels, of which 1 kHz is at 15, 6.4 kHz at 42 and 8 kHz at 45.2.
    mels = np.array([3, 9, 15, 42]) / 45.245 * 81 - 1
    assert np.abs(np.array(loudest) - mels).max() < 0.6


def test_a_frame_carries_the_mel_frames_around_it_and_zeros_beyond_the_ends():
    layouts = ClipLayouts(mels=80, merge=4, longest=100)
    view = RNG.normal(0, 1, (11, 80)).astype(np.float32)
    rows = layouts.rows(view).reshape(-1, 5, 80)
    assert len(rows) == 6
    for place, row in enumerate(rows):
        for at, mel_frame in enumerate(range(2 * place - 2, 2 * place + 3)):
            want = view[mel_frame] if 0 <= mel_frame < 11 else np.zeros(80)
            np.testing.assert_array_equal(row[at], want)
    layout = layouts.of(11 * HOP + 5, 0)
    np.testing.assert_array_equal(layout.places[:, 0], [1] * 6 + [0] * 2)
    np.testing.assert_array_equal(layout.places[:6], [(1, place, 11) for place in range(6)])
    assert len(layout.index) == 2


def test_a_long_clip_is_cut_into_pieces_whose_tokens_follow_each_other():
    layouts = ClipLayouts(mels=80, merge=2, longest=10)
    num_samples = 45 * HOP + 100  # two pieces of 20 mel frames, one of 5
    samples = RNG.normal(0, 0.1, num_samples)
    size, views = layouts.read(wav.encode(samples), "x")
    assert size == (num_samples, 0) and [len(view) for view in views] == [20, 20, 5]
    inputs = MediaInputs(layouts, token=9, blocks=2, block_size=14)
    assert inputs.views(np.array([size])) == [10, 10, 4]
    blocks = inputs.blocks_of(np.array([size]), lambda _: views)
    np.testing.assert_array_equal(blocks["index"], [*range(5), *range(7, 12), 5, 6])
    places = blocks["frame_places"]
    for view, block, number in zip(views, (0, 1, 0), (1, 1, 2), strict=True):
        mine = places[block, :, 0] == number
        np.testing.assert_array_equal(blocks["frames"][block][mine], layouts.rows(view))
    assert layouts.of(20 * HOP + 159, 0).bounds.tolist() == [0, 10]  # the rest has no mel frame
    with pytest.raises(ValueError, match="a clip of 100 samples is shorter than a mel frame"):
        layouts.of(100, 0)
