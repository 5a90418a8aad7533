"""A database of neighbours of text: megajax retrieve build PREFIX ... [options], query PREFIX --text=TEXT, and
report --run=DIR

  build    finds the neighbours of the chunks of each PREFIX.bin and writes PREFIX.neighbours, which models that read
           neighbours train on, and PREFIX.embeddings. A build that was killed goes on where it stopped.
  query    prints the chunks of a database that are nearest to a text, each with its score and its document
  report   prints the loss of a trained model on held-out text with neighbours, with random ones and without, by how
           much of the text its neighbours give away

docs/retrieval.md says what neighbours are, and which never are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import numpy as np

from megajax.data.config import DataConfig
from megajax.data.indexed.dataset import prefix_of
from megajax.data.indexed.neighbours import NO_CHUNK, NUM_KEPT, NeighbourTable
from megajax.data.tokenizers.load import load_tokenizer
from megajax.fields.ranges import NonNegativeFloat, PositiveInt, Probability, Range
from megajax.mesh.processes import use_compilation_cache
from megajax.retrieval.build import CHUNK_LENGTH, MAX_OVERLAP, build
from megajax.retrieval.database import Database
from megajax.retrieval.inputs import NeighbourInputs
from megajax.retrieval.report import report
from megajax.retrieval.text_embedder import TextEmbedder
from megajax.terminal.command_line import POSITIONAL, choose, errors_in_one_line
from megajax.training.reporting.console import log_to_stderr


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """Find the neighbours of the chunks of datasets."""

    prefixes: Annotated[tuple[str, ...], POSITIONAL]
    """Prefixes of .bin and .idx files."""
    split: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] = DataConfig.split
    """data.split of the run: only the training documents are in the database."""
    database: str | None = None
    """Prefix of the database; default: each prefix is its own."""
    embed: str | None = None
    """Run or Hugging Face folder of a BERT that embeds the chunks; default: a hash of their tokens."""
    max_overlap: Probability = MAX_OVERLAP
    """A neighbour with more than this share of the 13-grams of a text is a copy, and dropped; 1: keep all."""
    index: str = ""
    """An index of faiss, such as IVF4096,PQ32, for more than about 10 million chunks; default: exact search."""
    chunk_length: PositiveInt = CHUNK_LENGTH
    """Tokens of a chunk."""

    def __call__(self) -> None:
        for prefix in map(prefix_of, self.prefixes):
            build(
                prefix,
                split=self.split,
                database=self.database,
                chunk_length=self.chunk_length,
                embedder=TextEmbedder(self.embed, prefix) if self.embed else None,
                max_overlap=self.max_overlap,
                index=self.index,
            )
            table = NeighbourTable(prefix)
            found = table[np.arange(len(table.grid))] != NO_CHUNK
            begin, end = table.documents
            print(
                f"{prefix}.neighbours: {len(table.grid):,} chunks with {found.sum(1).mean():.1f} of {NUM_KEPT} "
                f"neighbours on average, from documents {begin:,} to {end:,} of {table.database.indexed.prefix}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Query:
    """Print the chunks of a database that are nearest to a text."""

    prefix: Annotated[str, POSITIONAL]
    """Prefix of a .neighbours file."""
    text: str
    """The text; of a longer one than a chunk its end."""
    count: Annotated[int, Range(at_least=1, at_most=1000)] = 5
    """Chunks to print."""

    def __call__(self) -> None:
        prefix = prefix_of(self.prefix)
        length = NeighbourTable(prefix).grid.chunk_length
        spec = DataConfig(source="indexed", paths=(prefix,)).with_tokenizer(vocab_size=1).tokenizer
        tokenizer = load_tokenizer(spec)
        database = Database.open(prefix, NeighbourInputs(chunk_length=length))
        scores, chunks = database.nearest([np.array(tokenizer.encode(self.text)[-length:], np.int32)], self.count)
        for score, chunk in zip(scores[0], chunks[0], strict=True):
            if chunk == NO_CHUNK:
                break
            document = int(database.grid.documents(chunk))
            tokens = database.grid.tokens(chunk, length)
            print(
                f"{score:.3f}  document {document}, chunk {chunk}: {tokenizer.decode(tokens[tokens >= 0].tolist())!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Print what neighbours gain, by how much of the text they give away."""

    run: str
    """Directory of a run of a model that reads neighbours."""
    baseline: str | None = None
    """Directory of a run of a plain model on the same data, with the same tokenizer."""
    samples: Annotated[int, Range(at_least=8)] = 128
    """Held-out samples to read."""

    def __call__(self) -> None:
        rows = report(self.run, self.baseline, self.samples)
        losses = [name for name in rows[-1] if name not in ("overlap", "chunks")]
        print(f"| 13-grams in neighbours | chunks | {' | '.join(losses)} |")
        print("|---" * (2 + len(losses)) + "|")
        for row, name in zip(rows, names_of(rows), strict=True):
            cells = [f"{row[loss]:.3f}" if loss in row else "-" for loss in losses]
            print(f"| {name} | {row['chunks']:,} | {' | '.join(cells)} |")


def names_of(rows: Sequence[dict[str, float]]) -> list[str]:
    return ["none", *(f"up to {row['overlap']:.0%}" for row in rows[1:-2]), "more", "all"]


COMMANDS = {"build": Build, "query": Query, "report": Report}


def main(arguments: Sequence[str] | None = None) -> None:
    log_to_stderr()
    with errors_in_one_line():
        command = choose(COMMANDS, arguments, "megajax retrieve", __doc__)
        use_compilation_cache()
        command()


if __name__ == "__main__":
    main()
