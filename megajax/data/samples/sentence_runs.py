"""The text of BERT and T5 samples: runs of consecutive sentences of one document.

Runs are built greedily, as by Megatron's build_mapping: sentences are added until the target length is reached, which
is the longest text of a sample or, with probability `short_probability`, a random shorter one.

Source: Megatron-LM, megatron/core/datasets/helpers.cpp; the order of the samples is our own.
"""

import numpy as np

from megajax.data.indexed.index_cache import content_hash, load_or_build
from megajax.data.samples.dataset import F, SampleDataset

# The loop over runs reads Python integers; a block of them takes 40 MB.
WALK_BLOCK = 1 << 20


class SentenceDataset(SampleDataset[F]):
    """Samples of the text of runs of sentences of one document. A part is documents.

    Attributes: `rows` int [N, 4] (first sequence, first token in it, last sequence, end token in it), `documents`
    int64 [used documents], ascending.
    """

    def prepare_runs(self, *, max_tokens: int, min_sentences: int, short_probability: float) -> None:
        """max_tokens: the longest text of a sample. min_sentences: 1, or 2 if a text has two segments. Documents with
        fewer sentences are not used, and a run that would leave fewer sentences behind includes them. With
        min_sentences = 1 a sequence longer than max_tokens is split into pieces of max_tokens, so that documents of one
        sequence are used entirely. Each epoch uses every sentence once, in a different order.

        Raises ValueError if no document has enough sentences.
        """
        begin, end = self.part
        options = dict(max_tokens=max_tokens, min_sentences=min_sentences)
        boundaries = np.asarray(self.indexed.document_indices[begin : end + 1])
        lengths = np.asarray(self.indexed.lengths[boundaries[0] : boundaries[-1]])
        arrays = load_or_build(
            self.cache_dir,
            "sentences",
            {
                "lengths": content_hash(lengths),
                "boundaries": content_hash(boundaries),
                "range": [begin, end],
                "num_samples": self.num_samples,
                "seed": self.seed,
                "short_probability": short_probability,
                **options,
            },
            lambda: build_runs(
                lengths, boundaries, begin, self.num_samples, self.seed, short_probability=short_probability, **options
            ),
        )
        # plain arrays over the maps: indexing an np.memmap costs several times more
        self.rows = np.asarray(arrays["rows"])
        self.documents = np.asarray(arrays["documents"])
        if not len(self.documents):
            raise ValueError(
                f"data.split: none of the documents {begin} to {end} of {self.indexed.prefix} has {min_sentences} "
                "non-empty sentences, which a sample needs; "
                + ("write it with --split_sentences or use next_sentence=none, " if min_sentences > 1 else "")
                + "give the split a larger share, or more data"
            )
        self.tokens_per_epoch = int(arrays["tokens_per_epoch"])

    def __len__(self) -> int:
        return len(self.rows)

    def sentences(self, i: int) -> list[np.ndarray]:
        """Tokens of the non-empty sentences of run i, as stored."""
        first, offset, last, end = self.rows[i].tolist()
        if first == last:
            return [self.indexed.read(first, offset, end - offset)]
        middle = [self.indexed.read(sequence) for sequence in range(first + 1, last)]
        sentences = [self.indexed.read(first, offset), *middle, self.indexed.read(last, 0, end)]
        return [sentence for sentence in sentences if len(sentence)]

    def sequences(self, i: int) -> range:
        """Those that run i reads."""
        return range(self.rows[i, 0], self.rows[i, 2] + 1)

    def sentences_elsewhere(self, i: int, num_tokens: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Consecutive sentences of a random document other than that of run i, until they reach `num_tokens`.

        They start at a random sentence and may end early, with the document. Needs two documents.
        """
        own = np.searchsorted(self.indexed.document_indices, self.rows[i, 0], side="right") - 1
        other = int(rng.integers(len(self.documents) - 1))
        other += other >= np.searchsorted(self.documents, own)
        begin, end = self.indexed.document_indices[self.documents[other] :][:2].tolist()
        sentences = begin + np.flatnonzero(self.indexed.lengths[begin:end])
        sentences = sentences[int(rng.integers(len(sentences))) :][:num_tokens]
        count = np.searchsorted(np.cumsum(self.indexed.lengths[sentences]), num_tokens) + 1
        return [self.indexed.read(sentence) for sentence in sentences[:count].tolist()]


def build_runs(
    lengths: np.ndarray,
    boundaries: np.ndarray,
    first_document: int,
    num_samples: int | None,
    seed: int,
    *,
    max_tokens: int,
    min_sentences: int,
    short_probability: float,
) -> dict[str, np.ndarray]:
    """`rows`, `documents` and `tokens_per_epoch` of SentenceDataset.

    lengths int32 [sequences] of the split; boundaries int64 [documents + 1], sequence numbers in the whole file;
    first_document: number of the split's first document in the whole file.
    10 million sentences take 1 to 3 s per epoch and 1 to 2 GB; only the loop over runs is in Python.
    """
    num_documents = len(boundaries) - 1
    owners = np.repeat(np.arange(num_documents), np.diff(boundaries))
    enough = np.bincount(owners[lengths > 0], minlength=num_documents) >= min_sentences
    sentences = np.flatnonzero((lengths > 0) & enough[owners])
    sizes = lengths[sentences].astype(np.int64)
    tokens_per_epoch = np.array(sizes.sum())
    documents = first_document + np.flatnonzero(enough)

    # A unit is a sentence or, if sentences may be split, a piece of one.
    offsets = np.zeros(len(sentences), np.int64)
    if min_sentences == 1:
        pieces = -(-sizes // max_tokens)
        firsts = np.repeat(np.cumsum(pieces) - pieces, pieces)
        sentences = np.repeat(sentences, pieces)
        sizes = np.repeat(sizes, pieces)
        offsets = (np.arange(len(firsts)) - firsts) * max_tokens
        sizes = np.minimum(sizes - offsets, max_tokens)
    units_per_document = np.bincount(owners[sentences], minlength=num_documents)
    document_ends = np.repeat(np.cumsum(units_per_document), units_per_document)
    sequences = boundaries[0] + sentences
    wide = boundaries[-1] > np.iinfo(np.int32).max

    blocks = []
    rows = np.zeros((0, 4), np.int64)
    total = 0
    epoch = 0
    while epoch == 0 or (num_samples is not None and 0 < total < num_samples):
        # [seed, i] is the stream of sample i
        rng = np.random.default_rng([seed, epoch, 1])
        if epoch == 0 or short_probability > 0:
            firsts, ends = _group(sizes, document_ends, max_tokens, min_sentences, short_probability, rng)
            lasts = ends - 1
            rows = [sequences[firsts], offsets[firsts], sequences[lasts], offsets[lasts] + sizes[lasts]]
            rows = np.stack(rows, axis=1).astype(np.int64 if wide else np.int32)
        blocks.append(rows[rng.permutation(len(rows))])
        total += len(rows)
        epoch += 1
    return {"rows": np.concatenate(blocks), "documents": documents, "tokens_per_epoch": tokens_per_epoch}


def _group(
    sizes: np.ndarray,
    document_ends: np.ndarray,
    max_tokens: int,
    min_units: int,
    short_probability: float,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """(first units, end units) int64 [runs] of one epoch; sizes and document_ends int64 [units]."""
    targets = np.full(len(sizes), max_tokens)
    short = np.flatnonzero(rng.random(len(sizes)) < short_probability)
    targets[short] = rng.integers(min(2, max_tokens), max_tokens + 1, len(short))
    # The end of a run for every unit it could start at; each unit has its own target.
    ends = np.cumsum(sizes)
    stops = np.searchsorted(ends, ends - sizes + targets) + 1
    stops = np.maximum(stops, np.arange(min_units, min_units + len(sizes)))
    stops = np.where(document_ends - stops < min_units, document_ends, stops)
    firsts = []
    unit = 0
    for block in range(0, len(stops), WALK_BLOCK):
        following = stops[block : block + WALK_BLOCK].tolist()
        block_end = block + len(following)
        while unit < block_end:
            firsts.append(unit)
            unit = following[unit - block]
    firsts = np.array(firsts, np.int64)
    return firsts, stops[firsts]
