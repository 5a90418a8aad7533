"""Which pages of the pool are free, which sequences share a page, and which prefixes are still in pages.

A page holds the keys and values of `page_size` consecutive tokens of a sequence, in all layers. They depend on these
tokens, on all before them and on the adapter, so a whole page is known by a hash of all: another sequence that begins
the same way uses the same pages (Zheng et al. 2024, https://arxiv.org/abs/2312.07104). A page without users remains
known until it is needed; the least recently used one is taken first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np


class PagePool:
    def __init__(self, num_pages: int, page_size: int, *, caches_prefixes: bool = True):
        self.num_pages = num_pages
        self.page_size = page_size
        self.caches_prefixes = caches_prefixes
        self._users = [0] * num_pages
        self._digest_of: dict[int, bytes] = {}
        """Of the pages whose contents are known."""
        self._page_of: dict[bytes, int] = {}
        self._unknown = list(range(num_pages - 1, -1, -1))
        """Pages without users and without known contents."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Pages without users and with known contents, the least recently used first."""

    @property
    def num_free(self) -> int:
        return len(self._unknown) + len(self._unused)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Pages with one user each. Raises KeyError for more than num_free."""
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._unknown:
            page = self._unknown.pop()
        else:
            page, _ = self._unused.popitem(last=False)
            self._forget(page)
        self._users[page] = 1
        return page

    def match(self, tokens: Sequence[int], adapter: str | None = None) -> list[int]:
        """The pages of the longest known beginning of the tokens, each with one user more.

        The last token is never part of it: it has to be computed to know what follows.
        """
        found = []
        for digest in self._digests(tokens, (len(tokens) - 1) // self.page_size, adapter):
            page = self._page_of.get(digest)
            if page is None:
                break
            found.append(page)
        for page in found:
            self._users[page] += 1
            self._unused.pop(page, None)
        return found

    def register(self, tokens: Sequence[int], pages: Sequence[int], first: int = 0, adapter: str | None = None) -> None:
        """Makes the whole pages of these tokens known, from page `first` on. Pages whose contents are known already are
        skipped."""
        count = min(len(tokens) // self.page_size, len(pages))
        if count <= first or pages[count - 1] in self._digest_of:
            return
        for number, digest in enumerate(self._digests(tokens, count, adapter)):
            page = pages[number]
            if number >= first and page not in self._digest_of and digest not in self._page_of:
                self._digest_of[page] = digest
                self._page_of[digest] = page

    def digest(self, page: int) -> bytes:
        """Hash of the tokens up to the end of a page whose contents are known."""
        return self._digest_of[page]

    def release(self, pages: Sequence[int]) -> None:
        """Removes one user of each page."""
        for page in reversed(pages):  # the end of a sequence is of less use than its beginning
            assert self._users[page] > 0, f"page {page} has no user"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if page not in self._digest_of:
                self._unknown.append(page)
            else:
                self._unused[page] = None

    def forget(self) -> None:
        """No contents are known any more."""
        for page in range(self.num_pages):
            self._forget(page)
        self._unknown += self._unused
        self._unused.clear()

    def _forget(self, page: int) -> None:
        digest = self._digest_of.pop(page, None)
        if digest is not None:
            del self._page_of[digest]

    def _digests(self, tokens: Sequence[int], count: int, adapter: str | None):
        """Of the first `count` pages: each depends on the adapter and on all tokens up to its end."""
        digest = b"" if adapter is None else hashlib.blake2b(adapter.encode(), digest_size=16).digest()
        for page in range(count if self.caches_prefixes else 0):
            part = np.asarray(tokens[page * self.page_size : (page + 1) * self.page_size], np.int32)
            digest = hashlib.blake2b(digest + part.tobytes(), digest_size=16).digest()
            yield digest


class KeptStates:
    """Which states of sequences are kept, for layers whose state is not in pages.

    A state belongs to the end of a whole page and is known by the hash of that page, but exists for few of them,
    because it is as large as many pages. The least recently used one is replaced.
    """

    def __init__(self, num_slots: int):
        """num_slots: states that the device has room for."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        """The least recently used first."""

    def longest(self, digests: Sequence[bytes]) -> tuple[int, int | None]:
        """Of the pages of a beginning: (how many there are up to the last kept state, its slot)."""
        for count in range(len(digests), 0, -1):
            slot = self._slot_of.get(digests[count - 1])
            if slot is not None:
                self._slot_of.move_to_end(digests[count - 1])
                return count, slot
        return 0, None

    def keep(self, digest: bytes) -> int | None:
        """The slot for a state, which calls after the one that computes it can use; None if it is kept already."""
        if digest in self._slot_of:
            return None
        if not self._free:
            self._free.append(self._slot_of.popitem(last=False)[1])
        self._slot_of[digest] = self._free.pop()
        return self._slot_of[digest]

    def forget(self) -> None:
        """No state is kept any more."""
        self._free += self._slot_of.values()
        self._slot_of.clear()
