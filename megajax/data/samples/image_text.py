"""Pairs of an image and a text, for models that read both: a .jsonl file and the images it refers to.

A line is {"image": "cats/1.jpg", "text": "A cat."}, optionally with a "prompt" that the text answers. The image
is a file next to the .jsonl, or a member of an uncompressed tar file, "shard.tar:1.jpg".

Offsets of the lines and of the members of tar files are read once and cached; sample i then reads one line and one
image.
"""

import array
import dataclasses
import io
import itertools
import json
import logging
import os
import tarfile
from typing import Literal

import numpy as np

from megajax.data.indexed.index_cache import load_or_build
from megajax.data.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger("megajax")


@dataclasses.dataclass(frozen=True)
class ImageTextFormat:
    """Sizes and special tokens of a sample."""

    image_size: int
    """Height and width in pixels."""
    num_image_tokens: int
    """Number of positions that the model fills with image embeddings."""
    image_id: int
    """Token at these positions; no text may contain it."""
    pad_id: int = 0
    """Token and label of padding."""
    on_error: Literal["raise", "skip"] = "raise"
    """An unreadable pair stops the run (raise), or is replaced by the next readable one (skip)."""


class ImageTextDataset:
    """Random access: sample i is a pure function of (pairs, sequence_length, seed, i).

    path: the .jsonl file. line_range: (begin, end) of its non-blank lines, from 0 (`len(index_lines(...)[0])` is their
    number). num_samples: at least this many, in whole epochs; None is one epoch; each epoch is shuffled.
    cache_dir: where the indices are kept; None keeps them in memory.

    `dataset[i]` is a dict: image uint8 [S, S, 3], RGB, the square in the middle of the image resized (bicubic) to
    S = image_size; and arrays [T = sequence_length]: tokens int32, num_image_tokens times image_id, then prompt, text,
    end-of-document token, padding; labels int32; loss_mask float32, 1 where the label is a token of the text or the
    end; positions int32; segment_ids int32, 1, and 0 for padding. A text that is too long is truncated. Prompt and text
    are tokenized separately, without a separator.
    Attributes: broken, the lines (from 1) that this process found unreadable and replaced; tokens_per_epoch, including
    padding, because texts are only tokenized when they are read.
    Raises ValueError with file and line for a pair that cannot be read, and if none can.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        tokenizer: Tokenizer,
        line_range: tuple[int, int],
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        sample_format: ImageTextFormat,
        cache_dir: str | None,
    ):
        self._arguments = path, tokenizer, line_range, num_samples, sequence_length, seed, sample_format, cache_dir
        self.path = os.fspath(path)
        self.tokenizer = tokenizer
        self.line_range = line_range
        self.sequence_length = sequence_length
        self.sample_format = sample_format
        self.cache_dir = cache_dir
        _import_pillow()
        if tokenizer.eod_id is None:
            raise ValueError("data.tokenizer has no end-of-document token, which ends the text of an image")
        for field, least in (("image_size", 1), ("num_image_tokens", 1), ("image_id", 0), ("pad_id", 0)):
            if getattr(sample_format, field) < least:
                raise ValueError(f"data.{field}={getattr(sample_format, field)} must be at least {least}")
        if sample_format.num_image_tokens >= sequence_length:
            raise ValueError(
                f"data.num_image_tokens={sample_format.num_image_tokens} leaves no text in "
                f"training.sequence_length={sequence_length}; use a longer sequence"
            )
        self._starts, self._numbers = index_lines(self.path, cache_dir)
        begin, end = line_range
        if not 0 <= begin < end <= len(self._starts):
            raise ValueError(f"data.split: lines {begin} to {end} of {self.path}, which has {len(self._starts)}")
        self.tokens_per_epoch = (end - begin) * sequence_length
        num_epochs = 1 if num_samples is None else max(1, -(-num_samples // (end - begin)))
        description = {"range": [begin, end], "num_epochs": num_epochs, "seed": seed}
        arrays = load_or_build(cache_dir, "pairs", description, lambda: {"order": _order(begin, end, num_epochs, seed)})
        self.order = arrays["order"]
        self.broken: set[int] = set()
        self._members: dict[str, dict[str, np.ndarray]] = {}

    def __reduce__(self):
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)} samples")
        first = int(self.order[i])
        begin, end = self.line_range
        for pair in itertools.chain(range(first, end), range(begin, first)):
            try:
                return self._sample(pair)
            except ValueError as error:
                if self.sample_format.on_error == "raise":
                    raise ValueError(f"{error}; repair it or use data.on_error=skip") from None
                self._count(pair, error)
        raise ValueError(f"data.paths: {self.path}: none of the lines {begin} to {end} can be read")

    def _count(self, pair: int, error: ValueError) -> None:
        number = int(self._numbers[pair])
        if number not in self.broken:
            self.broken.add(number)
            logger.warning("replaced by the next pair (%d so far): %s", len(self.broken), error)

    def _sample(self, pair: int) -> dict[str, np.ndarray]:
        where = f"{self.path} line {int(self._numbers[pair])}"
        with open(self.path, "rb") as file:
            file.seek(int(self._starts[pair]))
            record = _parse(file.readline(), where)
        prompt, text = (self._encode(record, field, where) for field in ("prompt", "text"))
        form = self.sample_format
        length = self.sequence_length + 1
        context = [form.image_id] * form.num_image_tokens + prompt
        if len(context) >= length:
            raise ValueError(f"{where}: image and prompt have {len(context)} tokens, no text fits into {length}")
        ids = (context + text + [self.tokenizer.eod_id])[:length]
        stream = np.full(length, form.pad_id, np.int32)
        stream[: len(ids)] = np.array(ids, np.int32)
        index = np.arange(length, dtype=np.int32)
        labels = stream[1:].copy()
        # Image tokens are not predicted: they may have no logit.
        labels[: form.num_image_tokens - 1] = form.pad_id
        return {
            "image": self._pixels(record["image"], where),
            "tokens": stream[:-1],
            "labels": labels,
            "loss_mask": ((index >= len(context)) & (index < len(ids)))[1:].astype(np.float32),
            "positions": np.where(index < len(ids), index, 0)[:-1],
            "segment_ids": (index < len(ids))[:-1].astype(np.int32),
        }

    def _encode(self, record: dict, field: str, where: str) -> list[int]:
        try:
            record[field].encode()  # JSON can contain half of a surrogate pair, which is not text
            ids = self.tokenizer.encode(record[field])
        except ValueError as error:
            raise ValueError(f"{where}: {field} cannot be encoded ({error})") from None
        if self.sample_format.image_id in ids:
            raise ValueError(f"{where}: {field} contains the image token {self.sample_format.image_id}")
        return ids

    def _pixels(self, name: str, where: str) -> np.ndarray:
        """The central square of an image, uint8 [S, S, 3]."""
        pillow = _import_pillow()
        size = self.sample_format.image_size
        content = self._read(name, where)
        try:
            with pillow.open(io.BytesIO(content)) as image:
                short = min(image.size)
                left, top = ((side - short) / 2 for side in image.size)
                # Only the square is resized, because a long, thin image would become huge.
                square = (left, top, left + short, top + short)
                return np.array(image.convert("RGB").resize((size, size), pillow.Resampling.BICUBIC, box=square))
        except MemoryError:
            raise
        # Decoders of damaged files raise errors of many types, SyntaxError and struct.error among them.
        except Exception as error:
            raise ValueError(f"{where}: image {name} cannot be read ({type(error).__name__}: {error})") from None

    def _read(self, name: str, where: str) -> bytes:
        """Content of an image file. Errors of the machine (not of the data) remain OSErrors, which are not skipped."""
        folder = os.path.dirname(self.path)
        shard, found, member = name.partition(".tar:")
        try:
            if not found:
                with open(os.path.join(folder, name), "rb") as file:
                    return file.read()
            return self._read_member(os.path.join(folder, shard + ".tar"), member)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            raise ValueError(f"{where}: image {name}: no such file") from None
        except ValueError as error:
            raise ValueError(f"{where}: image {name}: {error}") from None

    def _read_member(self, shard: str, member: str) -> bytes:
        if shard not in self._members:
            self._members[shard] = index_members(shard, self.cache_dir)
        index = self._members[shard]
        key = member.encode()
        row = int(np.searchsorted(index["names"], key))
        if row == len(index["names"]) or index["names"][row] != key:
            raise ValueError(f"{shard} has no such member")
        with open(shard, "rb") as file:
            file.seek(int(index["offsets"][row]))
            return file.read(int(index["sizes"][row]))


def _import_pillow():
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("reading images needs the package pillow; pip install 'megajax[data]'") from None
    return Image


def _parse(line: bytes, where: str) -> dict[str, str]:
    """Fields image, prompt (empty where there is none) and text of a line."""
    try:
        record = json.loads(line)
    except ValueError as error:  # of JSON and of UTF-8
        raise ValueError(f"{where}: not JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: not an object with the fields image and text")
    record = {"prompt": "", **record}
    for field in ("image", "text", "prompt"):
        if not isinstance(record.get(field), str):
            raise ValueError(f"{where}: no string in the field {field!r}")
    if not record["text"]:
        raise ValueError(f"{where}: the text is empty: there is nothing to learn")
    return record


def _order(begin: int, end: int, num_epochs: int, seed: int) -> np.ndarray:
    """Pairs begin to end, shuffled with (seed, epoch) in each epoch: int32 [epochs * pairs]."""
    epochs = [np.random.default_rng((seed, epoch)).permutation(end - begin) for epoch in range(num_epochs)]
    return (begin + np.concatenate(epochs)).astype(np.int32)


def index_lines(path: str, cache_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(byte where it begins, number from 1) of every line that is not blank, int64 [lines] each."""
    arrays = load_or_build(cache_dir, "lines", _file_state(path), lambda: _find_lines(path))
    return arrays["starts"], arrays["numbers"]


def _find_lines(path: str) -> dict[str, np.ndarray]:
    starts = array.array("q")
    numbers = array.array("q")
    start = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                starts.append(start)
                numbers.append(number)
            start += len(line)
    return {"starts": np.array(starts, np.int64), "numbers": np.array(numbers, np.int64)}


def index_members(path: str, cache_dir: str | None) -> dict[str, np.ndarray]:
    """names (bytes, ascending), offsets and sizes (int64, in bytes) of the files in an uncompressed tar file."""
    return load_or_build(cache_dir, "members", _file_state(path), lambda: _find_members(path))


def _find_members(path: str) -> dict[str, np.ndarray]:
    try:
        with tarfile.open(path, "r:") as file:
            # as in tar itself, the last of several members with the same name counts
            found = {
                member.name.encode(errors="surrogateescape"): (member.offset_data, member.size)
                for member in file
                if member.isfile()
            }
    except tarfile.TarError as error:
        raise ValueError(f"{path} is not an uncompressed tar file ({error})") from None
    names = sorted(found)
    extents = np.array([found[name] for name in names], np.int64).reshape(-1, 2)
    return {"names": np.array(names, np.bytes_), "offsets": extents[:, 0], "sizes": extents[:, 1]}


def _file_state(path: str) -> dict:
    """Identifies a file and its version."""
    try:
        state = os.stat(path)
    except FileNotFoundError:
        raise ValueError(f"data.paths: file {path} does not exist") from None
    return {"path": os.path.abspath(path), "size": state.st_size, "modified_ns": state.st_mtime_ns}
