"""Conversations about images that are drawn: bar charts ("high?" -> the colour of the highest bar) and digits ("digit?"
-> its name). Small enough to learn on a laptop, and held-out ones cannot be answered without looking.

Each image is drawn by Pillow from its number, with bars, digits, colours and places at random; training and evaluation
have different numbers.
"""

import hashlib
import io
import os
from typing import TYPE_CHECKING

import numpy as np

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
    from PIL import ImageDraw

SIDE = 32
COLOURS = {
    "red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "gold": (230, 180, 40), "black": (30, 30, 30),
}  # fmt: skip
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IMAGE = "<image>"
NUMBERS = {"train": (0, 24_000), "eval": (1_000_000, 1_002_000)}
# Increase when the same numbers would give other images.
FORMAT = 1


def prepare_drawn(config: DataConfig) -> tuple[str, str, str]:
    """(prefix of the training data, prefix of the held-out data, tokenizer spec), drawn on the first call.

    Cached in `data.cache_dir/drawn-HASH/`. Raises ValueError for a tokenizer without the special token <image>, and
    without Pillow.
    """
    require_pillow()
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer.token_id(IMAGE) is None:
        raise ValueError(f"data.tokenizer={config.tokenizer} has no {IMAGE}; use --data.tokenizer=bytes:{IMAGE}")
    key = hashlib.sha256(f"{FORMAT} {tokenizer.identity}".encode()).hexdigest()[:16]
    folder = os.path.join(config.cache_dir, f"drawn-{key}")

    def build(temporary: str) -> None:
        for part, numbers in NUMBERS.items():
            with announced(f"drawing {numbers[1] - numbers[0]:,} images"):
                _write(os.path.join(temporary, part), range(*numbers), tokenizer, config.tokenizer)

    build_once(folder, build, "the same images")
    return os.path.join(folder, "train"), os.path.join(folder, "eval"), config.tokenizer


def draw(number: int) -> tuple[bytes, str, str]:
    """-> (PNG, question, answer)."""
    from PIL import Image, ImageDraw  # optional

    rng = np.random.default_rng(number)
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.integers(215, 256, 3).tolist()))
    draw_question = _bars if number % 2 else _digit
    question, answer = draw_question(ImageDraw.Draw(image), rng)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue(), question, answer


def _bars(canvas: "ImageDraw.ImageDraw", rng: np.random.Generator) -> tuple[str, str]:
    names = rng.permutation(list(COLOURS))[:4].tolist()
    heights = rng.permutation(np.arange(4, 29, 3))[:4].tolist()
    for place, (name, height) in enumerate(zip(names, heights, strict=True)):
        canvas.rectangle([8 * place + 1, SIDE - height, 8 * place + 6, SIDE - 1], fill=COLOURS[name])
    if rng.integers(2):
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
    drawn = [draw(number) for number in numbers]
    path = prefix + ".png"
    with open(path, "wb") as file:
        file.writelines(png for png, _, _ in drawn)
    total = os.path.getsize(path)
    image = tokenizer.token_id(IMAGE)
    dtype = np.uint16 if tokenizer.vocab_size < 2**16 else np.int32
    offset = 0
    num_bytes = 0
    with IndexedDatasetWriter(prefix, dtype) as texts, ImageTableWriter(prefix) as images:
        for png, question, answer in drawn:
            end = [] if tokenizer.eod_id is None else [tokenizer.eod_id]
            sequences = [[image, *tokenizer.encode(question)], [*tokenizer.encode(answer), *end]]
            texts.add_document([np.array(sequence, dtype) for sequence in sequences])
            images.add([[ImagePlace(path, offset, len(png), total, SIDE, SIDE)]])
            offset += len(png)
            num_bytes += len(question) + len(answer)
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
        "image_id": image,
        "num_images": len(drawn),
        "images_sha256": ImageTable(prefix).fingerprint(),
    }
    counts = dict(
        num_documents=texts.num_documents, num_sequences=texts.num_sequences, num_tokens=texts.num_tokens,
        num_bytes=num_bytes,
    )  # fmt: skip
    inputs = [dict.fromkeys(COUNTS, 0) | {"path": "drawn", "sha256": None} | counts]
    write_meta(prefix, make_meta(facts, inputs, str(np.dtype(dtype)), texts.digest.hexdigest()))
