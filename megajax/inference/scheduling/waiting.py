"""The order in which sequences that wait for a row and pages get them.

The client with the fewest running sequences goes first, and of its requests the one with the fewest; equal ones take
turns. So a request gets a second row when every other one that waits has a first.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Owner(NamedTuple):
    """Who waits for a sequence."""

    client: Hashable = None
    request: Hashable = None
    """Of the client; its prompts and their samples are admitted one after the other."""


class Owned(Protocol):
    @property
    def tokens(self) -> list[int]: ...

    @property
    def owner(self) -> Owner: ...


S = TypeVar("S", bound=Owned)


class _Turns:
    """What waits, by its key, and how many run of each key, also of those that nothing waits of."""

    def __init__(self):
        self.num_running: Counter[Hashable] = Counter()
        self.num_shared = 0
        """Keys of which several run."""
        self._waiting: dict[int, OrderedDict[Hashable, Any]] = {}  # number running -> key -> what waits

    @property
    def first(self) -> Any:
        return next(iter(self._waiting[min(self._waiting)].values()))

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def __bool__(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self.num_running)

    def get(self, key: Hashable, new: Any) -> Any:
        """What waits of a key, which becomes `new` if nothing does."""
        return self._waiting.setdefault(self.num_running[key], OrderedDict()).setdefault(key, new)

    def pop(self, key: Hashable) -> Any:
        """None if nothing waits."""
        keys = self._waiting.get(self.num_running[key], {})
        found = keys.pop(key, None)
        if found is not None and not keys:
            del self._waiting[self.num_running[key]]
        return found

    def count(self, key: Hashable, change: int) -> None:
        """More or fewer run of a key, whose turn is then after those of others."""
        waiting = self.pop(key)
        self.num_shared -= self.num_running[key] > 1
        self.num_running[key] += change
        self.num_shared += self.num_running[key] > 1
        if waiting is not None:
            self.get(key, waiting)
        if not self.num_running[key]:
            del self.num_running[key]


class WaitingLine(Generic[S]):
    """Every operation takes a time that does not depend on how many wait."""

    def __init__(self):
        self._clients = _Turns()
        self._requests: dict[Hashable, _Turns] = {}  # of each client
        self._count = 0
        self.num_tokens = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return self._count

    def __iadd__(self, sequences: Iterable[S]) -> "WaitingLine[S]":
        for sequence in sequences:
            self._of_request(sequence)[sequence] = None
            self._count += 1
            self.num_tokens += len(sequence.tokens)
        return self

    def put_back(self, sequence: S) -> None:
        """Before the others of its request."""
        self += [sequence]
        self._of_request(sequence).move_to_end(sequence, last=False)

    def _of_request(self, sequence: S) -> OrderedDict[S, None]:
        client, request = sequence.owner
        requests = self._requests.setdefault(client, _Turns())
        return self._clients.get(client, requests).get(request, OrderedDict())

    @property
    def first(self) -> S:
        return next(iter(self._clients.first.first))

    def runs(self, client: Hashable) -> bool:
        """Whether anything of the client runs."""
        return self._clients.num_running[client] > 0

    def may_take_a_place(self, owner: Owner) -> bool:
        """Whether nothing of a client runs, and several of another; or nothing of its request, and several of another
        of the client."""
        client, request = owner
        if not self.runs(client):
            return self._clients.num_shared > 0
        requests = self._requests[client]
        return not requests.num_running[request] and requests.num_shared > 0

    def admit(self, sequence: S) -> None:
        """A sequence that waits runs from now on."""
        self.remove(sequence)
        self._count_running(sequence, 1)

    def left(self, sequence: S) -> None:
        """A sequence does not run any more."""
        self._count_running(sequence, -1)

    def _count_running(self, sequence: S, change: int) -> None:
        client, request = sequence.owner
        requests = self._requests.setdefault(client, _Turns())
        requests.count(request, change)
        self._clients.count(client, change)
        if not requests:
            del self._requests[client]

    def remove(self, sequence: S) -> None:
        """A sequence does not wait any more."""
        client, request = sequence.owner
        sequences = self._of_request(sequence)
        del sequences[sequence]
        self._count -= 1
        self.num_tokens -= len(sequence.tokens)
        requests = self._requests[client]
        if not sequences:
            requests.pop(request)
        if not requests.is_waiting:
            self._clients.pop(client)
        if not requests:
            del self._requests[client]
