"""GPT samples with the neighbours of their chunks (RETRO, Borgeaud et al. 2021, https://arxiv.org/abs/2112.04426).

Chunk u of a sample is its tokens [u * chunk_length, (u + 1) * chunk_length), wherever documents begin. Its neighbours
are those of the latest chunk of the document grid (data/indexed/neighbours.py) that ends with the last token of u, or
before it in the same document: they depend on no token after u. What may not be read is left out here: neighbours from
a document of the sample, and what follows a neighbour in the file beyond its own document.

T = sequence_length, m = inputs.chunk_length below.
"""

import dataclasses
import os

import numpy as np

from megajax.data.indexed.neighbours import NO_CHUNK, NUM_KEPT, NeighbourTable, neighbours_path
from megajax.data.samples.dataset import Part, SampleDataset, TokenSource
from megajax.data.samples.gpt import GptDataset, GptFormat, split_ranges
from megajax.data.samples.mock import MockIndexedDataset
from megajax.retrieval.inputs import NeighbourInputs


@dataclasses.dataclass(frozen=True)
class RetroFormat(GptFormat):
    inputs: NeighbourInputs = NeighbourInputs()
    split: tuple[float, ...] = (1, 0, 0)
    """Of the documents that the run reads."""
    trains: bool = True
    """Whether the samples are trained on: a database holds all training documents and no others."""

    def build(
        self, indexed: TokenSource, part: Part, num_samples: int, sequence_length: int, seed: int, cache_dir: str
    ) -> "RetroDataset":
        kind = MockRetroDataset if isinstance(indexed, MockIndexedDataset) else RetroDataset
        return kind(indexed, part, num_samples, sequence_length, seed, self, cache_dir)


class RetroDataset(SampleDataset[RetroFormat]):
    """As GptDataset, and neighbour_tokens int32 [T / m, count, length]: of each chunk the nearest chunks of the
    database and what follows them in their documents, then NO_TOKEN; where neighbours are missing, NO_TOKEN alone.

    Attributes: `text`, the samples without neighbours; `neighbours`, the table of the dataset, None for mock documents.
    Raises ValueError, with the command that builds it, if there is no PREFIX.neighbours, or one with another database
    than the training documents of the run.
    """

    neighbours: NeighbourTable | None = None

    def prepare(self) -> None:
        inputs = self.sample_format.inputs
        if self.sequence_length % inputs.chunk_length:
            raise ValueError(
                f"training.sequence_length={self.sequence_length} is not divisible by the {inputs.chunk_length} tokens "
                f"of a chunk; use {inputs.chunk_length * max(1, self.sequence_length // inputs.chunk_length)}"
            )
        if inputs.count > NUM_KEPT:
            raise ValueError(f"the model reads {inputs.count} neighbours of a chunk; a database gives up to {NUM_KEPT}")
        self.text = GptDataset(
            self.indexed,
            self.part,
            self.num_samples,
            self.sequence_length,
            self.seed,
            self.sample_format,
            self.cache_dir,
        )
        self.tokens_per_epoch = self.text.tokens_per_epoch
        self.neighbours = self._opened()

    def _opened(self) -> NeighbourTable | None:
        path = neighbours_path(self.indexed.prefix)
        if not os.path.isfile(path):
            raise ValueError(f"data.paths: {path} does not exist, which the model reads; {self._way_out(None)}")
        table = NeighbourTable(self.indexed.prefix)
        length = self.sample_format.inputs.chunk_length
        if table.grid.chunk_length != length:
            raise ValueError(
                f"data.paths: {path} has chunks of {table.grid.chunk_length} tokens, the model reads chunks of "
                f"{length}; {self._way_out(table)}"
            )
        begin, end = table.documents
        if not self._holds_what_is_trained_on(table):
            raise ValueError(
                f"data.split: {path} finds neighbours in documents {begin} to {end} of "
                f"{table.database.indexed.prefix}, which are not the training documents of this run; "
                f"{self._way_out(table)}"
            )
        return table

    def _holds_what_is_trained_on(self, table: NeighbourTable) -> bool:
        if not table.is_own:
            return table.documents == split_ranges(self.sample_format.split, len(table.database.indexed))[0]
        # the rest of what is evaluated is compared where it is trained on
        return table.documents == self.part if self.sample_format.trains else table.documents[1] <= self.part[0]

    def _way_out(self, table: NeighbourTable | None) -> str:
        """The command that builds the file for this run."""
        begin, end = self.part
        training = end if self.sample_format.trains else begin
        options = f" --split={training},{len(self.indexed) - training},0"
        if table is not None and not table.is_own:
            split = ",".join(f"{share:g}" for share in self.sample_format.split)
            options = f" --database={table.database.indexed.prefix} --split={split}"
        elif not training:
            options = " --database=PREFIX_OF_TRAINING_DATA --split=1,0,0"
        if table is not None and "model" in table.facts["embedder"]:
            options += f" --embed={table.facts['embedder']['model']}"
        length = self.sample_format.inputs.chunk_length
        if length != NeighbourInputs().chunk_length:
            options += f" --chunk_length={length}"
        return f"build it with megajax retrieve build {self.indexed.prefix}{options}"

    def __len__(self) -> int:
        return len(self.text)

    def sample(self, i: int) -> dict[str, np.ndarray]:
        return self.text[i] | {"neighbour_tokens": self._neighbour_tokens(i)}

    def _neighbour_tokens(self, i: int) -> np.ndarray:
        inputs = self.sample_format.inputs
        table = self.neighbours
        assert table is not None
        spans = [span for span in self.text.spans(i) if span[1] < span[2]]
        ends = np.cumsum([end - begin for _, begin, end in spans])
        chunks = []
        for last in range(inputs.chunk_length - 1, self.sequence_length, inputs.chunk_length):
            number = int(np.searchsorted(ends, last, side="right"))
            document, _, end = spans[number]
            chunks.append(table.grid.last_complete(document, end - int(ends[number]) + last))
        found = table[np.array(chunks)]
        if table.is_own:
            of_sample = np.isin(table.database.documents(found), [document for document, _, _ in spans])
            found = np.where(of_sample, NO_CHUNK, found)
        nearest = np.argsort(found == NO_CHUNK, axis=1, kind="stable")[:, : inputs.count]
        return table.database.tokens(np.take_along_axis(found, nearest, axis=1), inputs.length)


class MockRetroDataset(RetroDataset):
    """Mock documents, with random tokens as neighbours."""

    def _opened(self) -> None:
        return None

    def _neighbour_tokens(self, i: int) -> np.ndarray:
        inputs = self.sample_format.inputs
        shape = self.sequence_length // inputs.chunk_length, inputs.count, inputs.length
        return np.random.default_rng((self.seed, i)).integers(0, self.sample_format.vocab_size or 1, shape, np.int32)
