"""Fill in the middle: rearranges documents so that a left-to-right model learns to fill gaps.

A document is cut at two random places into prefix P, middle M and suffix S, and becomes
- PSM: `prefix_id` P `suffix_id` S `middle_id` M, or
- SPM: `prefix_id` `suffix_id` S `middle_id` P M (the paper's second variant: one model learns both orders).

Source: Bavarian et al. 2022, https://arxiv.org/abs/2207.14255; Megatron-LM, megatron/training/datasets/fim_dataset.py.
As in Megatron, each part of a document within a sample is treated as a document, its end token remains at the end, and
the sample is finally truncated to its length: each rearranged document pushes three tokens off the end.
Unlike Megatron,
- cuts are between tokens. Megatron cuts the decoded text between characters and encodes the pieces again, which the
  paper found better for gaps within a word; samples here have no text.
- random numbers depend on the sample. Megatron's depend on the order of reading, and change when a run resumes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class FillInTheMiddle:
    """Which documents are rearranged, and the tokens that mark their parts."""

    rate: float
    """Probability that a document is rearranged."""
    spm_rate: float
    """Probability that it becomes SPM instead of PSM."""
    prefix_id: int
    middle_id: int
    suffix_id: int

    def check(self) -> None:
        """Raises ValueError if two of the tokens are the same."""
        ids = (self.prefix_id, self.middle_id, self.suffix_id)
        if len(set(ids)) < len(ids):
            raise ValueError(f"task.fim_tokens: {ids} must be three different tokens")


def rearrange(
    documents: Sequence[np.ndarray], form: FillInTheMiddle, eod_id: int | None, key: tuple[int, int]
) -> list[np.ndarray]:
    """The documents [length], each unchanged or rearranged and three tokens longer.

    key: (seed, sample), determines the random numbers. eod_id: remains last if it is a document's last token.
    """
    # A counter-based generator takes a third of the time of np.random.default_rng to start.
    rng = np.random.Generator(np.random.Philox(key=np.array(key, np.uint64)))
    return [
        _rearrange_document(document, form, eod_id, rng) if rng.random() < form.rate else document
        for document in documents
    ]


def _rearrange_document(
    document: np.ndarray, form: FillInTheMiddle, eod_id: int | None, rng: np.random.Generator
) -> np.ndarray:
    end = len(document) - (eod_id is not None and len(document) > 0 and document[-1] == eod_id)
    return np.concatenate([*(_reorder(document[:end], form, rng) if end else []), document[end:]])


def _reorder(tokens: np.ndarray, form: FillInTheMiddle, rng: np.random.Generator) -> list[np.ndarray]:
    low, high = sorted(rng.integers(len(tokens) + 1, size=2).tolist())
    prefix = tokens[:low]
    middle = tokens[low:high]
    suffix = tokens[high:]
    marks = np.array([form.prefix_id, form.suffix_id, form.middle_id], np.int32)
    if rng.random() < form.spm_rate:
        return [marks[:2], suffix, marks[2:], prefix, middle]
    return [marks[:1], prefix, marks[1:2], suffix, marks[2:], middle]
