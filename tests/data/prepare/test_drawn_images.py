"""Drawn conversations: the sound has what the answers say, and the files hold both kinds of media."""

import numpy as np
import pytest

from megajax.audio import wav
from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import IndexedDataset
from megajax.data.indexed.images import ImageTable
from megajax.data.prepare import drawn_images
from megajax.data.prepare.drawn_images import AUDIO, COUNTS_SPOKEN, HERTZ, IMAGE, draw_with_sound, prepare_drawn
from megajax.images.decode import size_of

pytest.importorskip("PIL")


def heard(samples: np.ndarray) -> tuple[int, float]:
    """(number of beeps, frequency of the loudest one in Hz)."""
    loudness = np.convolve(np.abs(samples), np.ones(160) / 160, "same")
    is_beep = loudness > 0.03
    begins = np.flatnonzero(np.diff(is_beep, prepend=False) & is_beep)
    spectrum = np.abs(np.fft.rfft(samples))
    return len(begins), float(np.argmax(spectrum) / len(samples) * wav.RATE)


def test_sound_is_what_the_answers_say():
    questions = set()
    for number in range(120):
        media, question, answer = draw_with_sound(number)
        questions.add(question)
        assert set(media) == {
            "same?": {IMAGE, AUDIO}, "heard?": {IMAGE, AUDIO}, "beeps?": {AUDIO}, "tone?": {AUDIO}
        }.get(question, {IMAGE})  # fmt: skip
        if AUDIO in media:
            data, size = media[AUDIO]
            assert wav.check(data, "x") == size
            count, hertz = heard(wav.decode(data, "x"))
            assert question != "beeps?" or answer == COUNTS_SPOKEN[count - 1]
            assert question != "tone?" or HERTZ[answer][0] - 30 < hertz < HERTZ[answer][1] + 30
    assert questions == {"high?", "low?", "digit?", "beeps?", "tone?", "same?", "heard?"}


@pytest.mark.parametrize("tokenizer", ["bytes:<image>", "bytes:<image>,<audio>"])
def test_files_have_the_media_of_their_texts(tokenizer, tmp_path, monkeypatch):
    few = {"train": (0, 12), "eval": (1_000_000, 1_000_006)}
    monkeypatch.setattr(drawn_images, "NUMBERS", few)
    monkeypatch.setattr(drawn_images, "NUMBERS_WITH_SOUND", few)
    train, held_out, _ = prepare_drawn(DataConfig(source="drawn", tokenizer=tokenizer, cache_dir=str(tmp_path)))
    assert len(IndexedDataset(held_out).document_indices) == 7
    texts = IndexedDataset(train)
    table = ImageTable(train)
    kinds = []
    for d in range(12):
        tokens = texts.read(int(texts.document_indices[d]))
        sizes = table.sizes[table.first[d] : table.first[d + 1]]
        assert (np.where(sizes[:, 1] > 0, 257, 258) == tokens[tokens >= 257]).all()
        kinds += tokens[tokens >= 257].tolist()
    assert set(kinds) == ({257, 258} if "<audio>" in tokenizer else {257})
    for i, size in enumerate(table.sizes.tolist()):
        check = size_of if size[1] else wav.check
        assert check(table.read(i), "x") == tuple(size)
