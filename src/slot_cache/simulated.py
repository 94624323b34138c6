"""Pure: what a replay of a trace is made of: requests, slots, caches and their files, and indexes that find a prompt's
caches and waiters by what it begins with, without looking at all there are."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil

from slot_cache.eviction import CacheFile
from slot_cache.matching import CONTINUES_PART
from slot_cache.plan import MOST_PASSES, WaiterView, choose_waiter
from slot_cache.prompt import links

_LINK_BYTES = 8


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrived: seconds since any moment.
        prompt: its tokens, at least 1.
        output: tokens of the answer.
        chain: a link for every block of the prompt, packed; see `chain_of`.
    """

    arrived: float
    prompt: int
    output: int
    chain: bytes


def chain_of(ids: Iterable[int]) -> bytes:
    """The packed chain of a prompt's block ids: 8 bytes each, and each link covers all ids before it.

    Args:
        ids: whole numbers of at most 64 bits.
    """
    chain = bytearray()
    link = b""
    for number in ids:
        link = blake2b(link + number.to_bytes(8, "big"), digest_size=_LINK_BYTES).digest()
        chain += link
    return bytes(chain)


@dataclass(frozen=True)
class Saved:
    """A cache's file, and what it holds of the conversation."""

    file: CacheFile
    chain: bytes


@dataclass(eq=False)
class Cache:
    """A conversation's cache, in a slot or on disk: what it holds now, and its file."""

    key: str
    chain: bytes = b""
    tokens: int = 0
    resident: bool = False
    in_use: bool = False
    dirty: bool = True
    saved: Saved | None = None
    saved_tokens: int = 0  # how many of its tokens its file holds


@dataclass(eq=False)
class Slot:
    """A slot of the server."""

    number: int
    cache: Cache | None = None
    free: bool = True
    used: float = 0.0  # the end of the last request


class Prefixes:
    """The caches that hold a link, for every link."""

    def __init__(self) -> None:
        self._caches: dict[bytes, dict[Cache, None]] = {}

    def add(self, cache: Cache, chain: bytes, first: int = 1) -> None:
        """Make a cache known by its links from number `first` (counted from 1) on; it becomes the latest one there."""
        for link in _links(chain, first):
            self._caches.setdefault(link, {})[cache] = None

    def remove(self, cache: Cache, chain: bytes, first: int = 1) -> None:
        """What `add` did is undone; nothing happens where it did not."""
        for link in _links(chain, first):
            caches = self._caches.get(link)
            if caches is not None:
                caches.pop(cache, None)
                if not caches:
                    del self._caches[link]

    def longest(self, chain: bytes) -> Iterator[tuple[int, dict[Cache, None]]]:
        """The links of a chain that caches hold, the last one first: its number, and the caches in the order they came."""
        for number in range(links(chain), 0, -1):
            caches = self._caches.get(chain[(number - 1) * _LINK_BYTES : number * _LINK_BYTES])
            if caches:
                yield number, caches


class Lenders:
    """The saved caches that hold a link, for every link, the one with the smallest file first."""

    def __init__(self) -> None:
        self._files: dict[bytes, list[tuple[int, int, Cache, bytes]]] = {}
        self._added = 0

    def add(self, cache: Cache, saved: Saved) -> None:
        """A file was written. Nothing need be said when it is gone: that is seen by its cache."""
        self._added += 1
        entry = (saved.file.size, self._added, cache, saved.chain)
        for link in _links(saved.chain):
            heapq.heappush(self._files.setdefault(link, []), entry)

    def best(self, chain: bytes) -> tuple[Cache, int] | None:
        """The cache whose file holds the longest beginning of a chain, and how many links; among equals the smallest."""
        for number in range(links(chain), 0, -1):
            link = chain[(number - 1) * _LINK_BYTES : number * _LINK_BYTES]
            files = self._files.get(link)
            while files:
                _, _, cache, held = files[0]
                if cache.saved is not None and cache.saved.chain is held:
                    return cache, number
                heapq.heappop(files)
            if files is not None:
                del self._files[link]
        return None


@dataclass(eq=False)
class Waiter:
    """A request that waits, and how often it was passed."""

    request: TraceRequest
    passed: int = 0


class Queue:
    """The requests that wait, first come first."""

    def __init__(self) -> None:
        self._waiting: dict[Waiter, None] = {}
        self._by_link: dict[bytes, dict[Waiter, None]] = {}

    def add(self, request: TraceRequest) -> None:
        """It waits from now on, behind all others."""
        waiter = Waiter(request)
        self._waiting[waiter] = None
        for link in _links(request.chain):
            self._by_link.setdefault(link, {})[waiter] = None

    def sharing(self, chain: bytes) -> Iterator[Waiter]:
        """Those that begin with enough of a chain to continue it, first come first."""
        half = enough(chain)
        return iter(self._by_link.get(chain[(half - 1) * _LINK_BYTES : half * _LINK_BYTES], {}))

    def take(self, at_home: Waiter | None) -> TraceRequest | None:
        """Who is next, when the free slot holds the conversation of `at_home`; the others that it passes are passed once
        more. None: nobody waits."""
        waiters: list[Waiter] = []
        for waiter in self._waiting:  # only as far as it matters to `choose_waiter`
            waiters.append(waiter)
            if at_home is None or waiter is at_home or waiter.passed >= MOST_PASSES:
                break
        chosen = choose_waiter([WaiterView(waiter.passed, waiter is at_home) for waiter in waiters])
        if chosen is None:
            return None
        for waiter in waiters[:chosen]:
            waiter.passed += 1
        self._remove(waiters[chosen])
        return waiters[chosen].request

    def _remove(self, waiter: Waiter) -> None:
        del self._waiting[waiter]
        for link in _links(waiter.request.chain):
            waiters = self._by_link[link]
            waiters.pop(waiter, None)
            if not waiters:
                del self._by_link[link]


def _links(chain: bytes, first: int = 1) -> Iterator[bytes]:
    for start in range((first - 1) * _LINK_BYTES, len(chain), _LINK_BYTES):
        yield chain[start : start + _LINK_BYTES]


def enough(chain: bytes) -> int:
    """How many links of a cache's chain a request must share to continue it (`matching.continues`)."""
    return max(ceil(CONTINUES_PART * links(chain)), 1)
