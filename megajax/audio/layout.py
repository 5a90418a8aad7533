"""Where the frames of a clip are in a row of frames, and what its tokens in the text read: from its length alone.

An encoder frame is 20 ms. It sees five mel frames through two convolutions of three taps, the second with stride 2, and
carries all five, so that frames are encoded by themselves and packed like patches: what a convolution pads with zeros
at the ends of the clip is zero here, whatever stands beside it in the block. `places` of a frame are number of the
piece, number in the piece, and mel frames of the piece.

A clip longer than the encoder knows positions for is cut into pieces of that length, each encoded by itself.
"""

import dataclasses

import numpy as np

from megajax.audio.spectrogram import HOP, log_mel
from megajax.audio.wav import decode
from megajax.media.kinds import AUDIO
from megajax.media.rows import Layout, Layouts

STRIDE = 2
"""Mel frames of an encoder frame."""
TAPS = 3
FIELD = 2 * TAPS - 1
"""Mel frames that an encoder frame sees."""


@dataclasses.dataclass(frozen=True)
class ClipLayouts(Layouts):
    mels: int
    merge: int
    """Encoder frames that become one token; the last token of a piece may have fewer."""
    longest: int
    """Encoder frames of a piece."""

    kind = AUDIO

    @property
    def merged(self) -> int:
        return self.merge

    @property
    def value_dim(self) -> int:
        return FIELD * self.mels

    @property
    def view_size(self) -> int | None:
        return None

    def owns(self, sizes: np.ndarray) -> np.ndarray:
        return sizes[:, 1] == 0

    def layout(self, first: int, second: int) -> Layout:
        """first: number of samples. Raises ValueError for a clip without a mel frame."""
        pieces = [end - begin for begin, end in self._pieces(first)]
        places = []
        order = []
        num_frames = 0
        bounds = [0]
        for number, samples in enumerate(pieces, 1):
            mel_frames = samples // HOP
            count = -(-mel_frames // STRIDE)
            place = np.arange(-(-count // self.merged) * self.merged)
            is_frame = place < count
            columns = np.column_stack([np.full(len(place), number), place, np.full(len(place), mel_frames)])
            places.append(np.where(is_frame[:, None], columns, 0))
            order.append(np.where(is_frame, num_frames + place, -1))
            num_frames += count
            bounds.append(bounds[-1] + len(place))
        index = np.arange(bounds[-1] // self.merged)
        return Layout(
            np.concatenate(places).astype(np.int32),
            np.concatenate(order).astype(np.int32),
            index.astype(np.int32),
            np.repeat(index[:, None], 3, 1).astype(np.int32),
            len(index),
            np.array(bounds, np.int32),
        )

    def read(self, data: bytes, name: str) -> tuple[tuple[int, int], list[np.ndarray]]:
        samples = decode(data, name)
        try:
            pieces = self._pieces(len(samples))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return (len(samples), 0), [log_mel(samples[begin:end], self.mels) for begin, end in pieces]

    def rows(self, view: np.ndarray) -> np.ndarray:
        """[mel frames, mels] -> [encoder frames, FIELD * mels]."""
        padded = np.pad(view, ((TAPS - 1, TAPS), (0, 0)))
        fields = np.lib.stride_tricks.sliding_window_view(padded, FIELD, axis=0)[::STRIDE][: -(-len(view) // STRIDE)]
        return fields.swapaxes(1, 2).reshape(len(fields), -1)

    def _pieces(self, num_samples: int) -> list[tuple[int, int]]:
        """(begin, end) of each, in samples; a rest too short for a mel frame is left out."""
        if num_samples < HOP:
            raise ValueError(f"a clip of {num_samples} samples is shorter than a mel frame of {HOP}; leave it out")
        longest = self.longest * STRIDE * HOP
        edges = [*range(0, num_samples, longest), num_samples]
        return [(begin, end) for begin, end in zip(edges[:-1], edges[1:], strict=True) if end - begin >= HOP]
