"""The sequences that wait for a row and pages: clients take turns, and so do the requests of a client."""

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol


class Owner(NamedTuple):
    """Who waits for a sequence."""

    client: Hashable = None
    request: Hashable = None
    """Of the client; its prompts and their samples are admitted one after the other."""


class Owned(Protocol):
    owner: Owner


class WaitingLine:
    """Yields, as `first`, what was put in front; then one sequence of each client in turn, from its requests in turn.
    Every operation takes constant time."""

    def __init__(self):
        self._front: OrderedDict[Owned, None] = OrderedDict()
        self._clients: OrderedDict[Hashable, OrderedDict[Hashable, OrderedDict[Owned, None]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self):
        of_requests = itertools.chain.from_iterable(requests.values() for requests in self._clients.values())
        return itertools.chain(self._front, *of_requests)

    def __iadd__(self, sequences: Iterable[Owned]) -> "WaitingLine":
        for sequence in sequences:
            client, request = sequence.owner
            requests = self._clients.setdefault(client, OrderedDict())
            requests.setdefault(request, OrderedDict())[sequence] = None
            self._count += 1
        return self

    def put_in_front(self, sequence: Owned) -> None:
        self._front[sequence] = None
        self._front.move_to_end(sequence, last=False)
        self._count += 1

    @property
    def first(self) -> Owned:
        if self._front:
            return next(iter(self._front))
        requests = next(iter(self._clients.values()))
        return next(iter(next(iter(requests.values()))))

    def admit(self, sequence: Owned) -> None:
        """Removes a sequence, which was the first; it is then the turn of others."""
        is_in_front = sequence in self._front
        self.remove(sequence)
        client, request = sequence.owner
        requests = self._clients.get(client)
        if requests is None or is_in_front:
            return
        self._clients.move_to_end(client)
        if request in requests:
            requests.move_to_end(request)

    def remove(self, sequence: Owned) -> None:
        self._count -= 1
        if sequence in self._front:
            del self._front[sequence]
            return
        client, request = sequence.owner
        requests = self._clients[client]
        del requests[request][sequence]
        if not requests[request]:
            del requests[request]
        if not requests:
            del self._clients[client]
