"""Conversations about images that are drawn: bar charts ("high?" -> the colour of the highest bar) and digits ("digit?"
-> its name). Small enough to learn on a laptop, and held-out ones cannot be answered without looking.

With a tokenizer that has <audio>, half are about sound: beeps ("beeps?" -> their number; "tone?" -> low or high), beeps
and bars ("same?" -> whether there are as many), and bars whose sound is the question ("heard?" -> the colour of the
lowest bar for a low tone, of the highest for a high one).

Each conversation is drawn from its number (images by Pillow), with bars, digits, colours, places, tones and noise at
random; training and evaluation have different numbers.
"""

import hashlib
import io
import os
from typing import TYPE_CHECKING

import numpy as np

from megajax.audio import wav
from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import IndexedDatasetWriter
from megajax.data.indexed.images import ImagePlace, ImageTable, ImageTableWriter
from megajax.data.indexed.meta import COUNTS, make_meta, write_meta
from megajax.data.temporary import build_once
from megajax.data.tokenizers.load import load_tokenizer
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.images.decode import require_pillow
from megajax.terminal.announce import announced

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

SIDE = 32
COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "gold": (230, 180, 40), "black": (30, 30, 30),
}  # fmt: skip
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COUNTS_SPOKEN = ("one", "two", "three", "four")
HERTZ = {"low": (300, 500), "high": (1500, 2500)}
CLIP_SECONDS = (0.36, 0.44)
BEEP_SECONDS = 0.04  # and at least half of this before the next one
IMAGE = "<image>"
AUDIO = "<audio>"
NUMBERS = {"train": (0, 24_000), "eval": (1_000_000, 1_002_000)}
# Their clips take 100 MB.
NUMBERS_WITH_SOUND = NUMBERS | {"train": (0, 16_000)}
# Increase when the same numbers would give other images.
FORMAT = 1


def prepare_drawn(config: DataConfig) -> tuple[str, str, str]:
    """(prefix of the training data, prefix of the held-out data, tokenizer spec), drawn on the first call; with sound
    if the tokenizer has <audio>.

    Cached in `data.cache_dir/drawn-HASH/`. Raises ValueError for a tokenizer without the special token <image>, and
    without Pillow.
    """
    require_pillow()
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.token_id(IMAGE) is None:
        raise ValueError(f"data.tokenizer={config.tokenizer} has no {IMAGE}; use --data.tokenizer=bytes:{IMAGE}")
    key = hashlib.sha256(f"{FORMAT} {tokenizer.identity}".encode()).hexdigest()[:16]
    folder = os.path.join(config.cache_dir, f"drawn-{key}")

    makes_sound = tokenizer.token_id(AUDIO) is not None

    def build(temporary: str) -> None:
        for part, numbers in (NUMBERS_WITH_SOUND if makes_sound else NUMBERS).items():
            with announced(f"drawing {numbers[1] - numbers[0]:,} conversations"):
                _write(os.path.join(temporary, part), range(*numbers), tokenizer, config.tokenizer)

    build_once(folder, build, "the same images")
    return os.path.join(folder, "train"), os.path.join(folder, "eval"), config.tokenizer


def draw(number: int) -> tuple[bytes, str, str]:
    """-> (PNG, question, answer)."""
    rng = np.random.default_rng(number)
    image, canvas = _canvas(rng)
    draw_question = _bars if number % 2 else _digit
    question, answer = draw_question(canvas, rng)
    return _png(image), question, answer


Media = dict[str, tuple[bytes, tuple[int, int]]]
"""By the token: the bytes of a file, and the size as ImagePlace has it."""


def draw_alone(number: int) -> tuple[Media, str, str]:
    png, question, answer = draw(number)
    return {IMAGE: (png, (SIDE, SIDE))}, question, answer


def draw_with_sound(number: int) -> tuple[Media, str, str]:
    """-> (image, clip or both, question, answer)."""
    if number % 6 < 3:
        return draw_alone(number)
    rng = np.random.default_rng(number)
    count = int(rng.integers(len(COUNTS_SPOKEN)))
    tone = str(rng.choice(list(HERTZ)))
    media: Media = {}
    question, answer = ("beeps?", COUNTS_SPOKEN[count]) if rng.integers(2) else ("tone?", tone)
    if number % 6 > 3:
        image, canvas = _canvas(rng)
        if number % 6 == 4:
            question = "heard?"
            _, answer = _bars(canvas, rng, tone)
        else:
            shown = count if rng.integers(2) else int(rng.integers(len(COUNTS_SPOKEN)))
            question = "same?"
            answer = "yes" if shown == count else "no"
            _bars(canvas, rng, num_shown=shown + 1)
        media[IMAGE] = _png(image), (SIDE, SIDE)
    samples = _beeps(rng, count + 1, HERTZ[tone])
    media[AUDIO] = wav.encode(samples), (len(samples), 0)
    return media, question, answer


def _beeps(rng: np.random.Generator, count: int, hertz: tuple[int, int]) -> np.ndarray:
    """float64 [samples]: this many beeps of one tone and random loudness at random times, in noise."""
    samples = rng.normal(0, 0.005, int(wav.RATE * rng.uniform(*CLIP_SECONDS)))
    length = int(wav.RATE * BEEP_SECONDS)
    free = len(samples) - count * length * 3 // 2
    begins = np.sort(rng.integers(0, free, count)) + np.arange(count) * length * 3 // 2
    beep = np.sin(2 * np.pi * rng.uniform(*hertz) / wav.RATE * np.arange(length)) * np.hanning(length)
    for begin in begins:
        samples[begin : begin + length] += rng.uniform(0.2, 0.8) * beep
    return samples


def _canvas(rng: np.random.Generator) -> tuple["Image.Image", "ImageDraw.ImageDraw"]:
    from PIL import Image, ImageDraw  # optional

    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.integers(215, 256, 3).tolist()))
    return image, ImageDraw.Draw(image)


def _png(image: "Image.Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _bars(
    canvas: "ImageDraw.ImageDraw", rng: np.random.Generator, asked: str | None = None, num_shown: int = 4
) -> tuple[str, str]:
    """asked: high or low; None: one of them at random. Only the first num_shown of four bars are drawn."""
    names = rng.permutation(list(COLOURS))[:4].tolist()
    heights = rng.permutation(np.arange(4, 29, 3))[:4].tolist()
    for place, (name, height) in enumerate(zip(names[:num_shown], heights, strict=False)):
        canvas.rectangle([8 * place + 1, SIDE - height, 8 * place + 6, SIDE - 1], fill=COLOURS[name])
    asked = asked or ("high" if rng.integers(2) else "low")
    if asked == "high":
        return "high?", names[int(np.argmax(heights))]
    return "low?", names[int(np.argmin(heights))]


def _digit(canvas: "ImageDraw.ImageDraw", rng: np.random.Generator) -> tuple[str, str]:
    from PIL import ImageFont

    digit = int(rng.integers(10))
    colour = COLOURS[str(rng.choice(list(COLOURS)))]
    place = (int(rng.integers(5, 13)), int(rng.integers(-1, 4)))
    canvas.text(place, str(digit), fill=colour, font=ImageFont.load_default(int(rng.integers(24, 27))))
    return "digit?", DIGITS[digit]


def _write(prefix: str, numbers: range, tokenizer: Tokenizer, spec: str) -> None:
    makes_sound = tokenizer.token_id(AUDIO) is not None
    path = prefix + ".media"
    dtype = np.uint16 if tokenizer.vocab_size < 2**16 else np.int32
    end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
    places = []
    num_bytes = 0
    with IndexedDatasetWriter(prefix, dtype) as texts, open(path, "wb") as file:
        for number in numbers:
            media, question, answer = draw_with_sound(number) if makes_sound else draw_alone(number)
            sequences = [tokenizer.encode_template("".join(media) + question), [*tokenizer.encode(answer), *end]]
            texts.add_document([np.array(sequence, dtype) for sequence in sequences])
            places.append([(file.tell(), file.write(data), size) for data, size in media.values()])
            num_bytes += len(question) + len(answer)
    total = os.path.getsize(path)
    with ImageTableWriter(prefix) as table:
        for media in places:
            table.add([[ImagePlace(path, offset, length, total, *size) for offset, length, size in media]])
    of_sound = {"audio_token": AUDIO, "audio_id": tokenizer.token_id(AUDIO)} if makes_sound else {}
    facts = {
        "tokenizer": spec,
        "tokenizer_identity": tokenizer.identity,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "append_eod": True,
        "form": "conversations",
        "chat_template": None,
        "json_key": "text",
        "image_token": IMAGE,
        "image_id": tokenizer.token_id(IMAGE),
        "num_images": sum(map(len, places)),
        "images_sha256": ImageTable(prefix).fingerprint(),
        **of_sound,
    }
    counts = dict(
        num_documents=texts.num_documents, num_sequences=texts.num_sequences, num_tokens=texts.num_tokens,
        num_bytes=num_bytes,
    )  # fmt: skip
    inputs = [dict.fromkeys(COUNTS, 0) | {"path": "drawn", "sha256": None} | counts]
    write_meta(prefix, make_meta(facts, inputs, str(np.dtype(dtype)), texts.digest.hexdigest()))
