"""T5 samples: the encoder reads a text with spans cut out, the decoder writes the spans (Raffel et al. 2019, 3.1.4).

| text | Thank you **for inviting** me to your party **last** week |
|---|---|
| encoder_tokens | Thank you `<0>` me to your party `<1>` week |
| tokens | `bos` `<0>` for inviting `<1>` last |
| labels | `<0>` for inviting `<1>` last `eos` |

`<0>`, `<1>`, ... are sentinels: ids used for nothing else. At least one token separates two spans.
Source: Megatron-LM, megatron/core/datasets/t5_dataset.py. Te = sequence_length, Td = decoder_length below.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from megajax.data.samples.dataset import Part, TokenSource
from megajax.data.samples.masking import Masking, choose_spans, pad, span_mask, trim
from megajax.data.samples.sentence_runs import SentenceDataset


@dataclasses.dataclass(frozen=True)
class T5Format:
    """The special tokens, and the content of a sample."""

    bos_id: int
    """First token of the decoder; T5 itself uses pad."""
    eos_id: int
    pad_id: int
    sentinel_ids: tuple[int, ...]
    """In the order of the spans of a text; those of T5 count down from the end of the vocabulary."""
    vocab_size: int
    decoder_length: int
    """Td. Spans that do not fit remain in the encoder's text: 0.15 * Te tokens and the sentinels, about 0.2 * Te in
    total, should fit."""
    masking: Masking = Masking(max_ngram=10)

    of_documents: ClassVar[bool] = True
    is_plain_text: ClassVar[bool] = False

    def build(
        self, indexed: TokenSource, part: Part, num_samples: int, sequence_length: int, seed: int, cache_dir: str
    ) -> "T5Dataset":
        return T5Dataset(indexed, part, num_samples, sequence_length, seed, self, cache_dir)


class T5Dataset(SentenceDataset[T5Format]):
    """A part is documents, which may be split into sentences or not. sequence_length: Te, the longest text and the
    length of the encoder; the decoder's is in the format.

    `dataset[i]` is a dict of arrays. [Te]: encoder_tokens int32, encoder_segment_ids int32 (1, and 0 where padded),
    encoder_positions int32. [Td]: tokens int32, labels int32, loss_mask float32 (1, and 0 where padded), positions
    int32, segment_ids int32 (as loss_mask). If sentinels or decoder_length run out, fewer spans are masked.
    `tokens_per_epoch`: text tokens of the documents.
    """

    def prepare(self) -> None:
        form = self.sample_format
        if form.eos_id in (form.bos_id, form.pad_id):
            raise ValueError(f"T5Format.eos_id={form.eos_id} is also bos_id or pad_id; give it a different id")
        if self.sequence_length < 2 or form.decoder_length < 3:
            raise ValueError(
                f"sequence_length={self.sequence_length}, T5Format.decoder_length={form.decoder_length}: use at least "
                "2 and 3, a span of one token"
            )
        self.prepare_runs(max_tokens=self.sequence_length, min_sentences=1, short_probability=0.0)
        ids = np.arange(form.vocab_size)
        self._is_special = np.isin(ids, (form.bos_id, form.eos_id, form.pad_id))
        self._is_sentinel = np.isin(ids, form.sentinel_ids)
        self._sentinels = np.array(form.sentinel_ids, np.int32)

    def sample(self, i: int) -> dict[str, np.ndarray]:
        form = self.sample_format
        sentences = self.sentences(i)
        rng = np.random.default_rng([self.seed, i])
        text = self._text(i, sentences, rng)
        spans = self._spans(text, rng)
        chosen = span_mask(spans, len(text))
        begins = spans[:, 0]
        sizes = spans[:, 1] - spans[:, 0]
        sentinels = self._sentinels[: len(spans)]
        # a sentinel replaces the first token of its span
        encoder = text.copy()
        kept = ~chosen
        encoder[begins] = sentinels
        kept[begins] = True
        encoder = encoder[kept]
        target = np.insert(text[chosen], np.cumsum(sizes) - sizes, sentinels)
        encoder_positions = np.arange(self.sequence_length, dtype=np.int32)
        positions = np.arange(form.decoder_length, dtype=np.int32)
        real = positions <= len(target)
        return {
            "encoder_tokens": pad(encoder, self.sequence_length, form.pad_id),
            "encoder_segment_ids": (encoder_positions < len(encoder)).astype(np.int32),
            "encoder_positions": encoder_positions,
            "tokens": pad(np.append(np.int32(form.bos_id), target), form.decoder_length, form.pad_id),
            "labels": pad(np.append(target, np.int32(form.eos_id)), form.decoder_length, form.pad_id),
            "loss_mask": real.astype(np.float32),
            "positions": positions,
            "segment_ids": real.astype(np.int32),
        }

    def _text(self, i: int, sentences: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """int32, at most Te tokens, trimmed at both ends."""
        text = trim(np.concatenate(sentences), self.sequence_length, rng)
        self.check_ids(text, self.sample_format.vocab_size, self.sequences(i))
        if self._is_sentinel[text].any():
            raise ValueError(
                f"data.paths: {self.indexed.prefix}.bin holds the id {text[self._is_sentinel[text]][0]}, which is one "
                "of T5Format.sentinel_ids; use ids that do not occur in text"
            )
        return text.astype(np.int32)

    def _spans(self, text: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Spans [spans, 2] in text order, as many as there are sentinels for and fit the decoder."""
        spans = choose_spans(self._is_special[text], self.sample_format.masking, rng, apart=True)
        decoder_lengths = 1 + np.cumsum(spans[:, 1] - spans[:, 0] + 1)
        fitting = np.searchsorted(decoder_lengths, self.sample_format.decoder_length, side="right")
        return np.sort(spans[: min(fitting, len(self._sentinels))], axis=0)
