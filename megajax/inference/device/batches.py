"""Turns what the scheduler decides into the arrays of a call, padded to one of a few shapes.

Letters as in inference/device/programs.py.
"""

import operator
from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from megajax.inference.device.image_features import EncodeBatch, ImageFeatures
from megajax.inference.device.programs import (
    Beside,
    Chooser,
    DecodeBatch,
    HostBeside,
    HostChooser,
    HostDecodeBatch,
    HostPrefillBatch,
    PrefillBatch,
)
from megajax.inference.scheduling.images import PromptImages
from megajax.inference.scheduling.work import Chunk, Decode, Prefill, Run, Sequence
from megajax.inference.shapes import fitting
from megajax.inference.shapes import sizes as sizes_between
from megajax.inference.tokens.sampling import PROMPT_TOKEN, RowSampling, Sampling
from megajax.layers.attention.kv_cache import PoolSizes
from megajax.layers.lora import NO_ADAPTER
from megajax.media.rows import TEXT

MIN_CHUNK = 16  # tokens of the smallest prefill program
# The same on a GPU, what decodes beside them included. 64 and 256 tokens took 8.7 and 9.8 ms, beside 64 sequences 128
# and 256 took 12.7 and 13.8 (Llama-3 8B on one H100).
GPU_MIN_TOKENS = 256
GPU_TILE = 64  # rows of those of products that so few have
# The smaller calls with prompts have room for FEW_BESIDE sequences or twice as many, ..., and up to MOST_WITH_FEW rows,
# in steps of STEPS_WITH_FEW times that room. With steps of 128 instead of 256 rows, 20 requests/s took 7.9 to 8.7
# instead of 8.8 to 8.9 ms a token, and 33 instead of 34 to the first one; with room for 128 besides 64 and 256, 30
# requests/s took 10.3 instead of 11.6 ms a token, and 38 instead of 46 to the first one (Llama-3 8B, one H200 each).
FEW_BESIDE = 64
STEPS_WITH_FEW = 2
MOST_WITH_FEW = 1024
# For a single row, XLA computes small products as a multiplication and a sum, and wrote the products of the key and
# value matrices to memory: 8 MiB each in every layer of Llama-3 8B (compiled for H100, jaxlib 0.11.2).
MIN_ROWS = 2
# Of larger programs: 8, and 32 times powers of two. Four rows take 1 % longer with eight than with four (Llama-3 8B on
# one H200), and sixteen take longer than thirty-two (10.0 and 8.7 ms on one H100).
NEXT_ROWS = 8
DOUBLED_ROWS = 32
MIN_TABLE = 16  # pages of the smallest table, where its size matters
MAX_CHUNKS = 16  # sequences whose prompts one call computes


class PrefillShape(NamedTuple):
    tokens: int
    """Of prompts."""
    pages: int
    """Of the sequences of these prompts together."""
    rows_beside: int
    """Sequences that are decoded as well."""


class Shapes(NamedTuple):
    """The shapes of calls: one program each."""

    page_size: int
    num_chunks: int
    """Sequences whose prompts one call computes."""
    rows: list[int]
    """Rows of a decoding step."""
    tables: list[int]
    """Pages of each of them."""
    prefill: list[PrefillShape]
    """For each number of prompt tokens one in which the longest sequence ends with them, and perhaps one for prompts
    alone that begin here."""

    @staticmethod
    def of(
        sizes: PoolSizes, max_length: int, max_batch_tokens: int, has_kernel: bool, *, mixes: bool = False
    ) -> "Shapes":
        """max_length: maximum tokens of a sequence. has_kernel: whether attention reads only the pages of a sequence;
        the reference gathers the whole table, so the size of the table matters. mixes: whether calls with prompts
        decode as well."""
        table = -(-max_length // sizes.page_size)
        num_chunks = min(MAX_CHUNKS, sizes.num_rows)
        least = GPU_MIN_TOKENS if has_kernel else MIN_CHUNK
        # By twos, long prompts took 114 ms to the first token, by fours 131 (Llama-3 8B on one H100, 20 requests/s).
        totals = sizes_between(least, max_batch_tokens, 2 if mixes else 4)
        beside = _beside(sizes.num_rows, totals) if mixes else {(tokens, 0) for tokens in totals}
        chunks = sorted({tokens for tokens, _ in beside})

        def pages(tokens: int) -> int:
            return -(-tokens // sizes.page_size) + num_chunks

        prefill = {PrefillShape(tokens, table + pages(tokens), rows) for tokens, rows in beside}
        for total in (totals[0], totals[-1]) if mixes else totals:
            tokens = max((tokens for tokens in chunks if tokens <= total), default=chunks[0])
            prefill.add(PrefillShape(tokens, pages(tokens), 0))
        smallest = {min(rows, sizes.num_rows) for rows in (MIN_ROWS, NEXT_ROWS)}
        gpu_rows = sorted({*smallest, *sizes_between(DOUBLED_ROWS, sizes.num_rows)})
        return Shapes(
            page_size=sizes.page_size,
            num_chunks=num_chunks,
            rows=gpu_rows if has_kernel else sizes_between(1, sizes.num_rows, 4),
            tables=[table] if has_kernel else sorted({min(MIN_TABLE, table), table}),
            prefill=sorted(prefill),
        )

    @property
    def decode(self) -> list[tuple[int, int]]:
        """Of decoding: (rows, pages of each)."""
        return [(rows, pages) for rows in self.rows for pages in self.tables]

    @property
    def chunks(self) -> list[int]:
        """Prompt tokens of a call."""
        return sorted({shape.tokens for shape in self.prefill})

    @property
    def most_pages(self) -> int:
        """Of the sequences of a call with prompts together."""
        return max(shape.pages for shape in self.prefill)

    @property
    def rows_beside(self) -> int:
        """The largest number of sequences that a call with prompts decodes; 0: none."""
        return max(shape.rows_beside for shape in self.prefill)

    def stages(self) -> list["Shapes"]:
        """What to compile first, what next, ..., up to all shapes: each stage has those before it.

        Every stage serves every request: with the first one, of two programs, sequences are decoded few at a time,
        prompts are computed in small chunks, and short ones take as long as the longest.
        """
        chunks = self.chunks
        smallest = [shape for shape in self.prefill if shape.tokens == chunks[0]]
        longest = max(smallest, key=lambda shape: shape.pages)
        found: list[Shapes] = [self._replace(rows=self.rows[:1], tables=self.tables[-1:], prefill=[longest])]
        for end in range(1, max(len(self.rows), len(chunks)) + 1):
            prefill = [shape for shape in self.prefill if shape.tokens in chunks[:end]]
            found.append(self._replace(rows=self.rows[:end], prefill=prefill))
        return found

    def fitting_decode(self, num_rows: int, num_pages: int) -> tuple[int, int]:
        return fitting(num_rows, self.rows), fitting(num_pages, self.tables)

    def fitting_prefill(self, num_tokens: int, num_pages: int, num_rows: int = 0) -> PrefillShape:
        """The smallest one that is large enough."""
        least = (num_tokens, num_pages, num_rows)
        enough = (shape for shape in self.prefill if all(map(operator.ge, shape, least)))
        return min(enough, key=lambda shape: (shape.tokens + shape.rows_beside, shape.rows_beside, shape.pages))


def _beside(num_rows: int, totals: Items[int]) -> set[tuple[int, int]]:
    """(prompt tokens, rows beside) of calls. totals: of those with room for all num_rows, both together.

    Both are together as many as the tiles of products divide (beside 256 sequences 4,096 prompt tokens took 98 ms and
    alone 78: Llama-3 8B on one H100). For smaller calls the room matters: with 64 and 256 alone, a prompt of 512 tokens
    beside 65 sequences was computed with 1,024 rows.
    """

    def size(total: int, rows: int) -> tuple[int, int]:
        room = -(-rows // GPU_TILE) * GPU_TILE
        return max(total, 2 * room) - room, rows

    with_all = {size(total, num_rows) for total in totals if total > MOST_WITH_FEW or total in (totals[0], totals[-1])}
    most_tokens, _ = max(with_all)  # which any number of sequences may be beside
    most_with_few = min(MOST_WITH_FEW, totals[-1])
    fewer = [rows for rows in sizes_between(FEW_BESIDE, num_rows) if rows < num_rows]
    with_few = set()
    for rows in fewer or [num_rows]:
        step = STEPS_WITH_FEW * -(-rows // GPU_TILE) * GPU_TILE
        with_few |= {size(total, rows) for total in range(2 * step, most_with_few + 1, step)}
    return with_all | {(tokens, rows) for tokens, rows in with_few if tokens <= most_tokens}


class Batches:
    """Makes the arrays of calls."""

    def __init__(
        self,
        sizes: PoolSizes,
        shapes: Shapes,
        vocab_size: int,
        inputs: Collection[str] = (),
        features: ImageFeatures | None = None,
        adapters: Items[str] = (),
    ):
        """inputs: names of what the model reads (ModelConfig.inputs). features: of the images of prompts. adapters:
        names of those that the model has."""
        self.sizes = sizes
        self.shapes = shapes
        self.vocab_size = vocab_size
        self.inputs = frozenset(inputs)
        self.features = features
        self._adapters = {name: number for number, name in enumerate(adapters)}
        self._latest: dict[int, tuple[tuple[Sequence, ...], RowSampling[np.ndarray]]] = {}
        """Of the last call with this number of rows: its sequences, and their settings."""

    # ------------------------------------------------------------------ decoding

    def decode(self, work: Decode) -> tuple[HostDecodeBatch, HostChooser]:
        """A row for each run, and for each token of its draft."""
        num_rows = sum(1 + len(run.draft) for run in work.runs)
        longest = max(len(run.sequence.pages) for run in work.runs)
        return self._decode(work.runs, *self.shapes.fitting_decode(num_rows, longest))

    def _decode(self, runs: Items[Run], num_rows: int, num_pages: int) -> tuple[HostDecodeBatch, HostChooser]:
        rows = [(run, offset) for run in runs for offset in range(1 + len(run.draft))]
        found = []
        table_BP = np.zeros((num_rows, num_pages), np.int32)
        for number, (run, offset) in enumerate(rows):
            sequence = run.sequence
            newest = sequence.tokens[run.start] if run.start < len(sequence.tokens) else -1
            token = run.draft[offset - 1] if offset else newest
            found.append((token, run.start + offset, run.start + run.count))
            table_BP[number, : len(sequence.pages)] = sequence.pages
        padding = [(0, 0, 0)] * (num_rows - len(rows))
        tokens_B, positions_B, ends_B = np.array(found + padding, np.int32).T.copy()
        sequences = [run.sequence for run, _ in rows]
        deltas_B = self._deltas(sequences, num_rows)
        adapters_B = self._no_adapters(num_rows)
        if adapters_B is not None:
            adapters_B[: len(rows)] = [self._adapter(sequence) for sequence in sequences]
        batch = DecodeBatch(tokens_B, positions_B, ends_B, table_BP, deltas_B, adapters_B)
        return batch, self.chooser(sequences, num_rows)

    def _no_adapters(self, length: int) -> np.ndarray | None:
        return np.full(length, NO_ADAPTER, np.int32) if self._adapters else None

    def _adapter(self, sequence: Sequence) -> int:
        name = sequence.request.sampling.adapter
        return NO_ADAPTER if name is None else self._adapters[name]

    def _deltas(self, sequences: Items[Sequence], num_rows: int) -> np.ndarray | None:
        if "position_ids" not in self.inputs:
            return None
        deltas = [0 if sequence.images is None else sequence.images.delta for sequence in sequences]
        return np.array(deltas + [0] * (num_rows - len(deltas)), np.int32)

    def empty_decode(self, num_rows: int, num_pages: int) -> tuple[HostDecodeBatch, HostChooser]:
        return self._decode([], num_rows, num_pages)

    def full_decode(self, num_rows: int, num_pages: int, num_steps: int) -> tuple[HostDecodeBatch, HostChooser]:
        """Rows of no sequence, which go on for num_steps, at most a page, to measure a call."""
        batch, chooser = self.empty_decode(num_rows, num_pages)
        self._fill_rows(batch, 0, num_steps)
        return batch, chooser

    def _fill_rows(self, batch: HostDecodeBatch, first_page: int, num_steps: int) -> None:
        number_B = np.arange(len(batch.tokens_B), dtype=np.int32)
        batch.tokens_B[:] = number_B % self.vocab_size
        batch.ends_B[:] = num_steps
        batch.table_BP[:, 0] = (first_page + number_B) % self.sizes.num_pages

    # ------------------------------------------------------------------ prompts

    def prefill(self, work: Prefill) -> tuple[HostPrefillBatch, HostChooser, HostBeside | None]:
        """The tokens of all chunks, one after the other."""
        num_tokens = sum(chunk.end - chunk.start for chunk in work.chunks)
        num_pages = sum(self._num_pages(chunk) for chunk in work.chunks)
        shape = self.shapes.fitting_prefill(num_tokens, num_pages, len(work.beside))
        batch = self._padding(shape.tokens, shape.pages)
        last = [chunk for chunk in work.chunks if chunk.is_last]
        token = 0
        page = 0
        for chunk in work.chunks:
            here = slice(token, token + chunk.end - chunk.start)
            self._fill(batch, chunk, here, page)
            if chunk.is_last:
                batch.last_M[last.index(chunk)] = here.stop - 1
            token = here.stop
            page += self._num_pages(chunk)
        # The padding attends to nothing, with bounds that do not decrease.
        batch.lower_T[token:] = batch.upper_T[token:] = batch.upper_T[token - 1]
        beside = self._beside(work.beside, shape.rows_beside)
        return batch, self.chooser([chunk.sequence for chunk in last], self.shapes.num_chunks), beside

    def empty_prefill(
        self, length: int, num_pages: int, num_rows: int
    ) -> tuple[HostPrefillBatch, HostChooser, HostBeside | None]:
        chooser = self.chooser([], self.shapes.num_chunks)
        return self._padding(length, num_pages), chooser, self._beside([], num_rows)

    def full_prefill(
        self, length: int, num_pages: int, num_rows: int
    ) -> tuple[HostPrefillBatch, HostChooser, HostBeside | None]:
        """One prompt of this length, of no sequence, to measure a call."""
        batch, chooser, beside = self.empty_prefill(length, num_pages, num_rows)
        size = self.sizes.page_size
        num_used = min(-(-length // size), self.sizes.num_pages, num_pages)
        number_T = np.arange(length, dtype=np.int32)
        batch.tokens_T[:] = number_T % self.vocab_size
        batch.positions_T[:] = number_T % (self.shapes.tables[-1] * size)
        batch.slots_T[: num_used * size] = number_T[: num_used * size]
        batch.upper_T[:] = np.minimum(number_T + 1, num_used * size)
        batch.lower_T[num_used * size :] = num_used * size
        batch.table_P[:num_used] = np.arange(num_used)
        if beside is not None:
            self._fill_rows(beside.batch, num_used, 1)
        return batch, chooser, beside

    def _beside(self, runs: Items[Run], num_rows: int) -> HostBeside | None:
        return Beside(*self._decode(runs, num_rows, self.shapes.tables[-1])) if num_rows else None

    def empty_images(self, count: int, size: int) -> EncodeBatch:
        assert self.features is not None
        return self.features.empty(count, size)

    def _num_pages(self, chunk: Chunk) -> int:
        """Of its sequence up to its end."""
        return -(-chunk.end // self.sizes.page_size)

    def _padding(self, length: int, num_pages: int) -> HostPrefillBatch:
        def full(value: int = 0) -> np.ndarray:
            return np.full(length, value, np.int32)

        # Slots that do not exist, and that no row beside has.
        slots_T = np.arange(length, dtype=np.int32) + (self.sizes.num_slots + self.sizes.num_rows)
        arrays = (full(), full(), slots_T, full(self.sizes.num_rows), full(), full(), full())
        of_images = dict(
            image_T=full(TEXT) if "image_index" in self.inputs else None,
            position_ids_T3=np.zeros((length, 3), np.int32) if "position_ids" in self.inputs else None,
            ahead_T=full() if "block_ids" in self.inputs else None,
        )
        ends = np.zeros(self.shapes.num_chunks, np.int32)
        adapters_T = self._no_adapters(length)
        return PrefillBatch(*arrays, np.zeros(num_pages, np.int32), ends, **of_images, adapters_T=adapters_T)

    def _fill(self, batch: HostPrefillBatch, chunk: Chunk, here: slice, first_page: int) -> None:
        sequence = chunk.sequence
        size = self.sizes.page_size
        num_pages = self._num_pages(chunk)
        positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
        pages = np.array(sequence.pages[:num_pages], np.int32)
        batch.tokens_T[here] = sequence.tokens[chunk.start : chunk.end]
        batch.positions_T[here] = positions
        batch.slots_T[here] = pages[positions // size] * size + positions % size
        batch.rows_T[here] = sequence.row
        batch.lower_T[here] = first_page * size
        batch.upper_T[here] = first_page * size + positions + 1
        batch.table_P[first_page : first_page + num_pages] = pages
        following = sequence.tokens[chunk.start + 1 : chunk.end + 1]
        batch.targets_T[here.start : here.start + len(following)] = following
        if batch.position_ids_T3 is not None:
            batch.position_ids_T3[here] = self._position_ids(sequence, positions)
        if batch.adapters_T is not None:
            batch.adapters_T[here] = self._adapter(sequence)
        if sequence.images is not None:
            self._fill_images(batch, chunk, here, sequence.images)

    def _position_ids(self, sequence: Sequence, positions: np.ndarray) -> np.ndarray:
        images = sequence.images
        if images is None:
            return positions[:, None]
        length = len(images.position_ids)
        in_prompt = images.position_ids[np.minimum(positions, length - 1)]
        return np.where((positions < length)[:, None], in_prompt, positions[:, None] + images.delta)

    def _fill_images(self, batch: HostPrefillBatch, chunk: Chunk, here: slice, images: PromptImages) -> None:
        """What the tokens of the chunk that belong to images read; those after the prompt are text."""
        assert self.features is not None and batch.image_T is not None
        of_chunk = batch.image_T[here]
        ahead = None if batch.ahead_T is None else batch.ahead_T[here]
        numbers = images.numbers[chunk.start : chunk.end]
        for number in np.unique(numbers[numbers > 0]).tolist():
            mine = np.flatnonzero(numbers == number)
            image = images.images[number - 1]
            of_chunk[mine] = self.features.slots(image, images.places[chunk.start + mine])
            if ahead is not None:
                ahead[mine] = images.span(number)[1] - 1 - (chunk.start + mine)

    # ------------------------------------------------------------------ sampling

    def penalties(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
        """What penalties and bias depend on: counts int32 and bias float32 [V], as in Rows."""
        counts_V = np.zeros(self.vocab_size, np.int32)
        prompt = sequence.request.prompt
        counts_V[[token for token in prompt if 0 <= token < self.vocab_size]] = PROMPT_TOKEN
        np.add.at(counts_V, sequence.tokens[len(prompt) :], 1)
        bias_V = np.zeros(self.vocab_size, np.float32)
        for token, bias in sequence.request.sampling.logit_bias.items():
            bias_V[token] = bias
        return counts_V, bias_V

    def chooser(self, sequences: Items[Sequence], num_rows: int) -> HostChooser:
        """One row per sequence, then padding."""
        padding = num_rows - len(sequences)
        rows_B = np.array([sequence.row for sequence in sequences] + [self.sizes.num_rows] * padding, np.int32)
        mask_BW = np.zeros((num_rows, -(-self.vocab_size // 32)), np.uint32)
        has_mask_B = np.zeros(num_rows, bool)
        for number, sequence in enumerate(sequences):
            if sequence.matcher is not None:
                mask_BW[number] = sequence.matcher.mask()
                has_mask_B[number] = True
        return Chooser(rows_B, self._sampling(sequences, num_rows), mask_BW, has_mask_B)

    def _sampling(self, sequences: Items[Sequence], num_rows: int) -> RowSampling[np.ndarray]:
        """Made once for a call after the other with the same sequences."""
        known, sampling = self._latest.get(num_rows, ((), None))
        if sampling is None or len(known) != len(sequences) or any(map(operator.is_not, known, sequences)):
            padding = num_rows - len(sequences)
            settings = [sequence.request.sampling for sequence in sequences] + [Sampling(temperature=0.0)] * padding
            indices = [sequence.index for sequence in sequences] + [0] * padding
            sampling = RowSampling.of(settings, indices)
            self._latest[num_rows] = (tuple(sequences), sampling)
        return sampling
