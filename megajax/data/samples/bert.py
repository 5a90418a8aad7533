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
from typing import ClassVar, Literal

import numpy as np

from megajax.data.samples.dataset import Part, TokenSource
from megajax.data.samples.masking import Masking, choose_spans, pad, span_mask, trim
from megajax.data.samples.sentence_runs import SentenceDataset

MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


@dataclasses.dataclass(frozen=True)
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

    of_documents: ClassVar[bool] = True
    is_plain_text: ClassVar[bool] = False

    def build(
        self, indexed: TokenSource, part: Part, num_samples: int, sequence_length: int, seed: int, cache_dir: str
    ) -> "BertDataset":
        return BertDataset(indexed, part, num_samples, sequence_length, seed, self, cache_dir)


class BertDataset(SentenceDataset[BertFormat]):
    """A part is documents, whose sequences are sentences. With nsp and sop a document of a single sequence has no
    second segment and is not used, not even as the random B; with none every document is used.

    `dataset[i]` is a dict of arrays [T]: tokens int32; labels int32, the original id where it is to be predicted, else
    0; loss_mask float32, 1 there; positions int32; segment_ids int32, 1, and 0 where padded; token_types int32, 0 for
    `[CLS] A [SEP]` and padding, 1 for `B [SEP]`; and, unless none, next_sentence int32 [], the label.
    `tokens_per_epoch`: text tokens of the documents used. Where nsp draws B elsewhere, the half of the run it replaces
    is not read in that epoch.
    """

    def prepare(self) -> None:
        form = self.sample_format
        two_segments = form.next_sentence != "none"
        num_special = 3 if two_segments else 2
        self.text_length = self.sequence_length - num_special
        if self.text_length < num_special - 1:
            raise ValueError(
                f"sequence_length={self.sequence_length} leaves no room for text besides [CLS] and [SEP]; "
                f"use at least {2 * num_special - 1} with next_sentence={form.next_sentence}"
            )
        self.prepare_runs(
            max_tokens=self.text_length,
            min_sentences=2 if two_segments else 1,
            short_probability=form.short_sequence_probability,
        )
        if form.next_sentence == "nsp" and len(self.documents) < 2:
            raise ValueError(
                f"data.split: only 1 of the documents {self.part[0]} to {self.part[1]} of {self.indexed.prefix} has "
                "2 sentences; next_sentence=nsp needs another to draw from: use sop or none, or more data"
            )
        self._is_special = np.isin(np.arange(form.vocab_size), form.special_ids)
        self._ordinary_ids = np.flatnonzero(~self._is_special).astype(np.int32)

    def sample(self, i: int) -> dict[str, np.ndarray]:
        form = self.sample_format
        length = self.sequence_length
        sentences = self.sentences(i)
        rng = np.random.default_rng([self.seed, i])
        first, second, label = self._segments(i, sentences, rng)
        parts = [[form.cls_id], first, [form.sep_id]] + ([] if second is None else [second, [form.sep_id]])
        text = np.concatenate(parts)
        self.check_ids(text, form.vocab_size, self.sequences(i))
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
            second = np.concatenate(self.sentences_elsewhere(i, len(second), rng))
        # Lengths after repeatedly removing a token from the longer of the two until both fit.
        capacity = self.text_length
        kept = min(len(second), max(capacity // 2, capacity - len(first)))
        return trim(first, capacity - kept, rng), trim(second, kept, rng), label

    def _mask(self, text: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32, whether each is to be predicted) of a text with its special tokens, both as long as it."""
        spans = choose_spans(self._is_special[text], self.sample_format.masking, rng, apart=False)
        chosen = span_mask(spans, len(text))
        where = np.flatnonzero(chosen)
        draws = rng.random(len(where))
        random_ids = self._ordinary_ids[rng.integers(len(self._ordinary_ids), size=len(where))]
        replaced = np.where(draws < MASKED_SHARE + RANDOM_SHARE, random_ids, text[where])
        replaced[draws < MASKED_SHARE] = self.sample_format.mask_id
        tokens = text.copy()
        tokens[where] = replaced
        return tokens, chosen
