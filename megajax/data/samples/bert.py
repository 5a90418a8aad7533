"""BERT samples: `[CLS] A [SEP] B [SEP]`, of which 15 % of the tokens are predicted.

A and B are two parts of consecutive sentences of one document. The task on them is `next_sentence`:

| value | B is | label 1 |
|---|---|---|
| nsp (Devlin et al. 2018) | with probability 1/2 text of another document | B is from another document |
| sop (Lan et al. 2019; what Megatron does) | with probability 1/2 the half before A | A and B are swapped |
| none | absent: `[CLS] A [SEP]` | |

Of the tokens chosen (masking.py), 80 % become [MASK], 10 % a random id, 10 % are unchanged (Devlin et al. 2018, section
3.1).
Source: Megatron-LM, megatron/core/datasets/bert_dataset.py. T = sequence_length below.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import numpy as np

from megajax.data.samples.gpt import TokenSource, check_token_ids
from megajax.data.samples.masking import Masking, choose_spans, pad, span_mask, trim
from megajax.data.samples.sentence_runs import SentenceRuns

MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


@dataclasses.dataclass(frozen=True, eq=False)
class BertFormat:
    """The special tokens, and the content of a sample."""

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    vocab_size: int
    """Number of ids of the tokenizer; random replacements are drawn from them, excluding special tokens."""
    next_sentence: Literal["nsp", "sop", "none"] = "nsp"
    masking: Masking = Masking()
    short_sequence_probability: float = 0.1
    """Fraction of the samples that are truncated to a random length (Devlin et al. 2018, appendix A.2)."""

    @property
    def special_ids(self) -> tuple[int, int, int, int]:
        return self.cls_id, self.sep_id, self.mask_id, self.pad_id

    def check(self, sequence_length: int) -> None:
        """Raises ValueError with the way out."""
        names = ("cls_id", "sep_id", "mask_id", "pad_id")
        for name, token in zip(names, self.special_ids, strict=True):
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"BertFormat.{name}={token} is not one of the {self.vocab_size} ids of the vocabulary; "
                    "use a tokenizer with [CLS], [SEP], [MASK] and [PAD]"
                )
            if self.special_ids.count(token) > 1:
                raise ValueError(f"BertFormat.{name}={token} is also another special token; give each a different id")
        if self.vocab_size == len(names):
            raise ValueError(f"BertFormat.vocab_size={self.vocab_size} leaves no id for text")
        if self.next_sentence not in ("nsp", "sop", "none"):
            raise ValueError(f"BertFormat.next_sentence={self.next_sentence!r} is not known; use nsp, sop or none")
        if not 0 <= self.short_sequence_probability <= 1:
            raise ValueError(
                f"BertFormat.short_sequence_probability={self.short_sequence_probability} must lie between 0 and 1"
            )
        shortest = 3 if self.next_sentence == "none" else 5
        if sequence_length < shortest:
            raise ValueError(
                f"sequence_length={sequence_length} leaves no room for text besides [CLS] and [SEP]; "
                f"use at least {shortest} with next_sentence={self.next_sentence}"
            )
        self.masking.check(self.vocab_size)

    of_documents: ClassVar[bool] = True
    is_plain_text: ClassVar[bool] = False

    def build(self, *arguments: Any, **options: Any) -> "BertDataset":
        return BertDataset(*arguments, sample_format=self, **options)


class BertDataset:
    """Random access: sample i is a pure function of (sequences, num_samples, sequence_length, seed, i).

    indexed: where the sentences are read from.
    document_range: (begin, end), the documents of this split. With nsp and sop a document of a single sequence has no
    second segment and is not used, not even as the random B; with none every document is used.
    num_samples: at least this many, in whole epochs; None is one epoch.
    cache_dir: where the list of the samples is kept; None keeps it in memory.

    `dataset[i]` is a dict of arrays [T]: tokens int32; labels int32, the original id where it is to be predicted, else
    0; loss_mask float32, 1 there; positions int32; segment_ids int32, 1, and 0 where padded; token_types int32, 0 for
    `[CLS] A [SEP]` and padding, 1 for `B [SEP]`; and, unless none, next_sentence int32 [], the label.
    `tokens_per_epoch`: text tokens of the documents used. Where nsp draws B elsewhere, the half of the run it replaces
    is not read in that epoch. Pickles as its arguments.
    """

    def __init__(
        self,
        indexed: TokenSource,
        document_range: tuple[int, int],
        num_samples: int | None,
        sequence_length: int,
        seed: int,
        *,
        sample_format: BertFormat,
        cache_dir: str | None,
    ):
        self.indexed = indexed
        self._arguments = (indexed, document_range, num_samples, sequence_length, seed), sample_format, cache_dir
        sample_format.check(sequence_length)
        self.sequence_length = sequence_length
        self.seed = seed
        self.sample_format = sample_format
        two_segments = sample_format.next_sentence != "none"
        self.text_length = sequence_length - (3 if two_segments else 2)
        self.runs = SentenceRuns(
            indexed,
            document_range,
            num_samples,
            seed,
            max_tokens=self.text_length,
            min_sentences=2 if two_segments else 1,
            short_probability=sample_format.short_sequence_probability,
            cache_dir=cache_dir,
        )
        if sample_format.next_sentence == "nsp" and len(self.runs.documents) < 2:
            raise ValueError(
                f"data.split: only 1 of the documents {document_range[0]} to {document_range[1]} of {indexed.prefix} "
                "has 2 sentences; next_sentence=nsp needs another to draw from: use sop or none, or more data"
            )
        self.tokens_per_epoch = self.runs.tokens_per_epoch
        self._is_special = np.isin(np.arange(sample_format.vocab_size), sample_format.special_ids)
        self._ordinary_ids = np.flatnonzero(~self._is_special).astype(np.int32)

    def __reduce__(self):
        return _rebuild, self._arguments

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        i = int(i)
        form = self.sample_format
        length = self.sequence_length
        sentences = self.runs.read(i)
        rng = np.random.default_rng([self.seed, i])
        first, second, label = self._segments(i, sentences, rng)
        parts = [[form.cls_id], first, [form.sep_id]] + ([] if second is None else [second, [form.sep_id]])
        text = np.concatenate(parts)
        check_token_ids(text, form.vocab_size, self.runs.indexed, self.runs.sequences(i))
        text = text.astype(np.int32)
        tokens, chosen = self._mask(text, rng)
        positions = np.arange(length, dtype=np.int32)
        sample = {
            "tokens": pad(tokens, length, form.pad_id),
            "labels": pad(np.where(chosen, text, np.int32(0)), length, 0),
            "loss_mask": pad(chosen.astype(np.float32), length, 0),
            "positions": positions,
            "segment_ids": (positions < len(text)).astype(np.int32),
            "token_types": ((positions >= len(first) + 2) & (positions < len(text))).astype(np.int32),
        }
        if label is not None:
            sample["next_sentence"] = np.array(label, np.int32)
        return sample

    def _segments(
        self, i: int, sentences: list[np.ndarray], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray | None, int | None]:
        """(A, B, label), trimmed to text_length tokens together."""
        if self.sample_format.next_sentence == "none":
            return trim(np.concatenate(sentences), self.text_length, rng), None, None
        pivot = int(rng.integers(1, len(sentences)))
        first = np.concatenate(sentences[:pivot])
        second = np.concatenate(sentences[pivot:])
        label = int(rng.random() < 0.5)
        if label and self.sample_format.next_sentence == "sop":
            first, second = second, first
        elif label:
            # as long as the part it replaces, so that the length does not reveal the label
            second = np.concatenate(self.runs.read_elsewhere(i, len(second), rng))
        # Lengths after repeatedly removing a token from the longer of the two until both fit.
        capacity = self.text_length
        kept = min(len(second), max(capacity // 2, capacity - len(first)))
        return trim(first, capacity - kept, rng), trim(second, kept, rng), label

    def _mask(self, text: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32, whether each is to be predicted) of a text with its special tokens, both as long as it."""
        spans = choose_spans(text, self._is_special[text], self.sample_format.masking, rng, apart=False)
        chosen = span_mask(spans, len(text))
        where = np.flatnonzero(chosen)
        draws = rng.random(len(where))
        random_ids = self._ordinary_ids[rng.integers(len(self._ordinary_ids), size=len(where))]
        replaced = np.where(draws < MASKED_SHARE + RANDOM_SHARE, random_ids, text[where])
        replaced[draws < MASKED_SHARE] = self.sample_format.mask_id
        tokens = text.copy()
        tokens[where] = replaced
        return tokens, chosen


def _rebuild(positional: tuple, sample_format: BertFormat, cache_dir: str | None) -> BertDataset:
    return BertDataset(*positional, sample_format=sample_format, cache_dir=cache_dir)
