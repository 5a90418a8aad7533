"""What a model reads of a retrieval database (RETRO, Borgeaud et al. 2021, https://arxiv.org/abs/2112.04426)."""

import dataclasses

NO_TOKEN = -1
"""In `neighbour_tokens`: padding, which nothing attends to; a neighbour of padding alone is missing."""


@dataclasses.dataclass(frozen=True)
class NeighbourInputs:
    """A sample of T tokens has neighbour_tokens int32 [T / chunk_length, count, length]: of each chunk of the sample
    its neighbours, each a chunk of the database and what follows it in its document."""

    chunk_length: int = 64
    count: int = 2
    length: int = 128
