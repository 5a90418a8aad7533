"""Samples for supervised fine-tuning: whole conversations packed into T + 1 tokens, with a loss on the answers only.

Each document of the indexed dataset is a conversation; its sequences are context, answer, context, answer, ...
(empty ones keep them alternating), and only tokens of answers are learnt. T = sequence_length below. packing.py
chooses the conversations of each sample.

A conversation may have images and clips of sound (data/indexed/images.py), which are its media. In the file one token
stands for each; a sample has as many as the model reads (media/rows.py). A medium is never cut.
"""

import dataclasses
import functools
import logging
import multiprocessing
import os
from typing import ClassVar, Literal

import numpy as np

from megajax.data.indexed.images import ImageTable, image_table_path
from megajax.data.indexed.index_cache import content_hash, load_or_build
from megajax.data.indexed.meta import read_meta
from megajax.data.samples.dataset import Part, SampleDataset, TokenSource
from megajax.data.samples.mock import MockConversations, MockImages
from megajax.data.samples.packing import PackedMedia, Views, build_indices
from megajax.data.tokenizers.tokenizer import Tokenizer
from megajax.media.kinds import IMAGE
from megajax.media.rows import TEXT, MediaInputs, expanded, of_kind

logger = logging.getLogger("megajax")
PAD = 0  # token and label of padding


@dataclasses.dataclass(frozen=True)
class SftFormat:
    """The treatment of conversations that do not fit."""

    on_misfit: Literal["raise", "skip", "truncate"] = "raise"
    """What to do with a conversation longer than T + 1 tokens: refuse it, skip it, or truncate it. One without an
    answer to learn (after truncation) is refused by raise, and skipped otherwise."""
    vocab_size: int | None = None
    """Token ids must be below this; None: not checked."""
    media: tuple[MediaInputs, ...] = ()
    """How the model reads images and clips of sound, those that it reads."""

    of_documents: ClassVar[bool] = True
    is_plain_text: ClassVar[bool] = False

    def mock(self, tokenizer: Tokenizer) -> MockConversations:
        """Documents for data.source=mock."""
        images = of_kind(self.media, IMAGE)
        tokens = tuple(inputs.token for inputs in self.media)
        return MockConversations(
            tokenizer.vocab_size, tokenizer.eod_id, None if images is None else images.token, tokens
        )

    def build(
        self, indexed: TokenSource, part: Part, num_samples: int, sequence_length: int, seed: int, cache_dir: str
    ) -> "SftDataset":
        return SftDataset(indexed, part, num_samples, sequence_length, seed, self, cache_dir)


class SftDataset(SampleDataset[SftFormat]):
    """A part is documents, each a conversation. `dataset[i]` is a dict of arrays [T]: tokens and labels int32;
    loss_mask float32, 1 where the label is a token of an answer; positions int32, from 0 in each conversation;
    segment_ids int32, 1, 2, ... for conversations and 0 for padding. The last token of a conversation has the label
    PAD, without loss. For a model that reads media also the arrays of MultimodalConfig.inputs; a token of a medium is
    not learnt.
    Attributes: tokens_per_epoch, of the used conversations after truncation; num_conversations, used; num_long, skipped
    or truncated; num_unanswered, skipped.
    Raises ValueError with document number and length for a misfit, and if no conversation is left.
    """

    def prepare(self) -> None:
        begin, end = self.part
        boundaries = np.asarray(self.indexed.document_indices[begin : end + 1])
        lengths = np.asarray(self.indexed.lengths[boundaries[0] : boundaries[-1]])
        self.images = self._open_table()
        of_media = {}
        if self.images is not None:
            first = np.asarray(self.images.first[begin : end + 1])
            of_media = {
                "images": content_hash(first),
                "image_sizes": content_hash(np.asarray(self.images.sizes[first[0] : first[-1]])),
                "media": [dataclasses.asdict(inputs) for inputs in self.sample_format.media],
            }
        arrays = load_or_build(
            self.cache_dir,
            "sft",
            {
                "lengths": content_hash(lengths),
                "boundaries": content_hash(boundaries),
                "range": [begin, end],
                "num_samples": self.num_samples,
                "sequence_length": self.sequence_length,
                "seed": self.seed,
                "on_misfit": self.sample_format.on_misfit,
                **of_media,
            },
            lambda: self._build(boundaries, lengths),
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.num_conversations, self.tokens_per_epoch, self.num_long, self.num_unanswered = arrays["counts"].tolist()
        # Worker processes build the dataset too: one line per run is enough.
        if multiprocessing.parent_process() is None and self.num_long + self.num_unanswered:
            logger.warning(
                "%s: of %d conversations, %d are longer than %d tokens%s (%s), %d have no answer to learn (left out)",
                self.indexed.prefix,
                end - begin,
                self.num_long,
                self.sequence_length + 1,
                "" if self.images is None else " or have more images or clips than fit",
                "cut, or left out if they have some" if self.sample_format.on_misfit == "truncate" else "left out",
                self.num_unanswered,
            )

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    @property
    def samples_per_epoch(self) -> float:
        """Not from the tokens: samples are not all full."""
        return len(self) * self.num_conversations / len(self.document_index)

    def _open_table(self) -> ImageTable | MockImages | None:
        """Of the media of the data, if the model reads any."""
        if isinstance(self.indexed, MockConversations):
            return self.indexed.images
        path = image_table_path(self.indexed.prefix)
        if not os.path.isfile(path):
            return None
        if not self.sample_format.media:
            raise ValueError(
                f"data.paths: {path} has images, which this model does not read; use one of model.kind=multimodal"
            )
        table = ImageTable(self.indexed.prefix)
        if len(table.first) != len(self.indexed.document_indices):
            raise ValueError(
                f"data.paths: {path} is of {len(table.first) - 1} documents, and {self.indexed.prefix}.idx has "
                f"{len(self.indexed.document_indices) - 1}; preprocess the data again"
            )
        meta = read_meta(self.indexed.prefix) or {}
        for inputs in self.sample_format.media:
            kind = inputs.kind
            found = meta.get(f"{kind.name}_id")
            if found not in (None, inputs.token):
                raise ValueError(
                    f"data.paths: in {self.indexed.prefix} {kind.plural} are the token {found} ({meta[kind.token]}), "
                    f"and model.{kind.token}={inputs.token}; use --model.{kind.token}={found}"
                )
        return table

    def sample(self, i: int) -> dict[str, np.ndarray]:
        documents = self._documents(i)
        text, answer, segments = self._read(documents)
        of_media = {}
        if self.sample_format.media:
            text, answer, segments, of_media = self._with_media(i, documents, text, answer, segments)
        return self._arrays(text, answer, segments) | of_media

    def _arrays(self, text: np.ndarray, answer: np.ndarray, segments: np.ndarray) -> dict[str, np.ndarray]:
        length = len(text)
        starts = np.flatnonzero(np.diff(segments, prepend=0))
        missing = self.sequence_length + 1 - length
        text = np.pad(text, (0, missing), constant_values=PAD)
        segments = np.pad(segments, (0, missing))
        positions = np.arange(self.sequence_length + 1, dtype=np.int32)
        positions[:length] -= starts.astype(np.int32)[segments[:length] - 1]
        positions[length:] = 0
        # token and label belong to the same conversation
        within = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
        return {
            "tokens": text[:-1],
            "labels": np.where(within, text[1:], np.int32(PAD)),
            "loss_mask": (within & np.pad(answer, (0, missing))[1:]).astype(np.float32),
            "positions": positions[:-1],
            "segment_ids": segments[:-1],
        }

    def _documents(self, i: int) -> np.ndarray:
        begin, end = self.sample_index[i : i + 2].tolist()
        return self.document_index[begin:end]

    def _with_media(
        self, i: int, documents: np.ndarray, text: np.ndarray, answer: np.ndarray, segments: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """The same arrays with all tokens of the media, which are no answers, and the arrays of the media."""
        media = self.sample_format.media
        # By conversation and kind.
        numbers = [self._by_kind(document) for document in documents.tolist()]
        parts = [
            expanded(text[segments == conversation], list(zip(media, map(self._sizes, mine), strict=True)))
            for conversation, mine in enumerate(numbers, 1)
        ]
        counts = np.concatenate([part.counts for part in parts])
        length = self.sequence_length

        def filled(array: np.ndarray, value: int) -> np.ndarray:
            """Of T tokens: the last one of a sample is only a label."""
            padding = [(0, max(length - len(array), 0))] + [(0, 0)] * (array.ndim - 1)
            return np.pad(array, padding, constant_values=value)[:length].astype(np.int32)

        arrays = {"position_ids": filled(np.concatenate([part.positions for part in parts]), 0)}
        is_answer = np.repeat(answer, counts)
        for at, inputs in enumerate(media):
            used = np.concatenate([mine[at] for mine in numbers])
            firsts = np.cumsum([0, *(len(mine[at]) for mine in numbers[:-1])])
            pairs = zip((part.numbers[at] for part in parts), firsts, strict=True)
            medium = np.concatenate([np.where(number > 0, number + first, 0) for number, first in pairs])
            read = functools.partial(self._views, inputs, used)
            blocks = inputs.blocks_of(self._sizes(used), read, first=i)
            index = np.full(len(medium), TEXT, np.int32)
            index[medium > 0] = blocks.pop("index")
            arrays |= {inputs.kind.index: filled(index, TEXT)} | blocks
            if inputs.sees_itself:
                arrays["block_ids"] = filled(medium, 0)
            is_answer &= medium == 0
        return np.concatenate([part.tokens for part in parts]), is_answer, np.repeat(segments, counts), arrays

    def _by_kind(self, document: int) -> list[np.ndarray]:
        """Numbers of the media of a document, of each kind that the model reads."""
        media = self.sample_format.media
        if self.images is None:
            return [np.zeros(0, np.int64)] * len(media)
        numbers = np.arange(*self.images.first[document : document + 2].tolist())
        sizes = self._sizes(numbers)
        found = [numbers[inputs.layouts.owns(sizes)] for inputs in media]
        if sum(map(len, found)) < len(numbers):
            unread = next(n for n in numbers.tolist() if not any(n in mine for mine in found))
            raise ValueError(
                f"data.paths: {self.images.name(unread)} is of a kind that this model does not read; it reads "
                f"{' and '.join(inputs.kind.plural for inputs in media)}"
            )
        return found

    def _sizes(self, numbers: np.ndarray) -> np.ndarray:
        return np.zeros((0, 2), np.int32) if self.images is None else np.asarray(self.images.sizes[numbers])

    def _views(self, inputs: MediaInputs, used: np.ndarray, at: int) -> list[np.ndarray]:
        assert self.images is not None
        number = int(used[at])
        size, views = inputs.layouts.read(self.images.read(number), self.images.name(number))
        if size != tuple(self.images.sizes[number].tolist()):
            raise ValueError(
                f"data.paths: {self.images.name(number)} has another size than when {self.indexed.prefix} was written; "
                "preprocess the data again"
            )
        return views

    def _read(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(text int32, whether a token belongs to an answer bool, conversation number from 1 int32), each [<= T + 1];
        a token for each image."""
        first, last = (self.indexed.document_indices[documents + edge].tolist() for edge in (0, 1))
        sequences = []
        answers = []
        numbers = []
        for number, (low, high) in enumerate(zip(first, last, strict=True), 1):
            sequences += range(low, high)
            answers += [position % 2 == 1 for position in range(high - low)]
            numbers += [number] * (high - low)
        lengths = self.indexed.lengths[sequences]
        # Only a sample with one truncated conversation is longer.
        kept = slice(self.sequence_length + 1)
        text = np.concatenate([self.indexed.read(sequence) for sequence in sequences])[kept]
        self.check_ids(text, self.sample_format.vocab_size, sequences)
        return (
            text.astype(np.int32),
            np.repeat(answers, lengths)[kept],
            np.repeat(np.array(numbers, np.int32), lengths)[kept],
        )

    def _build(self, boundaries: np.ndarray, lengths: np.ndarray) -> dict[str, np.ndarray]:
        begin, end = self.part
        capacity = self.sequence_length + 1
        on_misfit = self.sample_format.on_misfit
        sizes, learnable = survey(lengths, boundaries - boundaries[0], capacity)
        has_media = np.zeros(len(sizes), bool)
        views: list[Views] | None = None
        fits = np.ones(len(sizes), bool)
        if self.images is not None:
            by_kind = [self._by_kind(document) for document in range(begin, end)]
            sizes += np.array([self._num_added(mine) for mine in by_kind], np.int64)
            views = [self._views_of(mine) for mine in by_kind]
            has_media = np.array([any(found) for found in views])
            fits = np.array([self._fits(found) for found in views])
        long = (sizes > capacity) | ~fits
        skip = on_misfit == "skip"
        used = learnable & ~(long if skip else long & has_media)
        if not used.any():
            raise ValueError(
                f"data.paths: of documents {begin} to {end} of {self.indexed.prefix} none is a conversation with an "
                f"answer within {capacity} tokens; was the file written for fine-tuning, with contexts and "
                "answers as sequences?"
            )
        if on_misfit == "raise":
            room = f"more than sequence_length + 1 = {capacity}"
            if self.images is not None:
                for inputs in self.sample_format.media:
                    room += f" or more {inputs.kind.plural} than {inputs.room} hold"
            self._refuse(long, sizes, room)
            self._refuse(~learnable, sizes, "and no answer to learn")
        sizes = np.minimum(sizes, capacity)
        media = None
        if views is not None:
            media = PackedMedia(views, self.sample_format.media).part(np.flatnonzero(used).tolist())
        document_index, sample_index = build_indices(
            begin + np.flatnonzero(used), sizes[used], self.num_samples, capacity, self.seed, media
        )
        # count each once: as long if it is skipped for that, else as unanswered
        num_long = (long if skip else long & learnable).sum()
        num_unanswered = (~learnable & ~long if skip else ~learnable).sum()
        counts = np.array([used.sum(), sizes[used].sum(), num_long, num_unanswered], np.int64)
        return {"document_index": document_index, "sample_index": sample_index, "counts": counts}

    def _num_added(self, by_kind: list[np.ndarray]) -> int:
        """Tokens of these media, without the ones that stand for them in the file."""
        pairs = zip(self.sample_format.media, by_kind, strict=True)
        return sum(int(inputs.num_tokens(self._sizes(mine)).sum()) - len(mine) for inputs, mine in pairs)

    def _views_of(self, by_kind: list[np.ndarray]) -> Views:
        pairs = zip(self.sample_format.media, by_kind, strict=True)
        return tuple(inputs.views(self._sizes(mine)) for inputs, mine in pairs)

    def _fits(self, views: Views) -> bool:
        return all(inputs.fits(mine) for inputs, mine in zip(self.sample_format.media, views, strict=True))

    def _refuse(self, wrong: np.ndarray, sizes: np.ndarray, what: str) -> None:
        if wrong.any():
            first = int(wrong.argmax())
            raise ValueError(
                f"data.paths: document {self.part[0] + first} of {self.indexed.prefix} has {sizes[first]} "
                f"tokens, {what} ({wrong.sum()} of {len(wrong)} documents); use task.on_misfit=skip or truncate"
            )


def survey(lengths: np.ndarray, boundaries: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens int64 [C], whether there is an answer to learn bool [C]) of conversations.

    lengths: int32 [S], of the sequences; boundaries: int64 [C + 1], from 0, in sequences. Only the first `capacity`
    tokens can be learnt, except the first of a conversation, which nothing predicts.
    """
    edges = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    starts = edges[boundaries[:-1]]
    sizes = np.diff(edges[boundaries])
    document = np.repeat(np.arange(len(sizes)), np.diff(boundaries))
    is_answer = (np.arange(len(lengths)) - boundaries[document]) % 2 == 1
    begins = np.maximum(edges[:-1] - starts[document], 1)
    ends = np.minimum(edges[1:] - starts[document], capacity)
    return sizes, np.bincount(document[is_answer & (begins < ends)], minlength=len(sizes)) > 0
