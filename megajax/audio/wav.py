"""Reads WAV files: PCM of 16 bits at 16 kHz, which needs the standard library alone."""

import io
import wave

import numpy as np

RATE = 16_000
"""Samples a second of all sound that models read."""
SHORTEST = RATE // 100
"""Samples of the shortest clip."""


def decode(data: bytes, name: str) -> np.ndarray:
    """The samples of a WAV file, float32 between -1 and 1; of stereo, the mean of both channels.

    name: of the file, for messages. Raises ValueError if the data is empty, damaged, cut short, of another rate or
    width of samples, or has more than two channels.
    """
    if not data:
        raise ValueError(f"{name}: the clip is empty")
    try:
        with wave.open(io.BytesIO(data)) as file:
            form = file.getparams()
            content = file.readframes(form.nframes)
    except (wave.Error, EOFError, RuntimeError) as error:
        raise ValueError(f"{name}: no WAV file of PCM samples, or damaged ({error})") from None
    if form.sampwidth != 2 or form.nchannels > 2:
        raise ValueError(
            f"{name}: a clip of {form.nchannels} channels and {8 * form.sampwidth} bits; convert it to mono or stereo "
            "of 16 bits, as ffmpeg -i FILE -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav does"
        )
    if form.framerate != RATE:
        raise ValueError(
            f"{name}: a clip of {form.framerate} samples a second; convert it to {RATE}, as ffmpeg -i FILE -ar {RATE} "
            "OUT.wav does"
        )
    if len(content) < 2 * form.nchannels * form.nframes:
        raise ValueError(f"{name}: the clip ends before its {form.nframes} samples; copy it again")
    if form.nframes < SHORTEST:
        raise ValueError(f"{name}: a clip of {form.nframes} samples is shorter than {SHORTEST} (10 ms); leave it out")
    channels = np.frombuffer(content, "<i2").reshape(-1, form.nchannels)
    return channels.mean(1, dtype=np.float32) / np.float32(2**15)


def check(data: bytes, name: str) -> tuple[int, int]:
    """(number of samples, 0), the size of a clip. Raises ValueError whenever `decode` does."""
    return len(decode(data, name)), 0


def encode(samples: np.ndarray) -> bytes:
    """A mono WAV file of samples between -1 and 1."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(np.clip(np.rint(samples * 2**15), -(2**15), 2**15 - 1).astype("<i2").tobytes())
    return file.getvalue()
