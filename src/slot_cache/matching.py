"""Pure: which cache a prompt continues, and which other one holds the longest beginning of it (the donor)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil

from slot_cache.prompt import links, shared_links, shares
from slot_cache.state import Want

CONTINUES_PART = 0.5
"""A prompt continues a cache when it begins with at least this part of what the cache holds."""


@dataclass(frozen=True)
class Known:
    """A cache that a request may continue or start from.

    Attributes:
        key: its file's name without .bin.
        session: the key of its session's first cache, None for a conversation without a session.
        owner: the LiteLLM key that its tokens belong to, None if not known.
        chain: the packed fingerprint of its prompt.
        tokens: how many tokens it holds.
        size: bytes of its file, 0 if it is not saved.
        used: when it was last used; the later of two that do equally well is taken.
        rewound: as in `slot_cache.state.Resident`.
    """

    key: str
    session: str | None
    owner: str | None
    chain: bytes
    tokens: int = 0
    size: int = 0
    used: float = 0.0
    rewound: bool = False


@dataclass(frozen=True)
class Donor:
    """A cache that holds a beginning of the prompt: so many links of its chain, about so many tokens."""

    cache: Known
    links: int
    tokens: int


def continues(want: Want, session: str | None, owner: str | None, chain: bytes, at_least: int = 1) -> int:
    """How many links of its chain a request shares with a cache that it continues; 0 if it does not continue it, or shares
    fewer than `at_least`.

    It does when both are of the same session (or of none, and of the same owner), the request begins with at least
    `CONTINUES_PART` of what the cache holds, and shares more than the tools and system messages, which two conversations
    of one program have in common too.
    """
    if session != want.session or (session is None and owner != want.owner):
        return 0
    more_than = 0 if links(want.chain) == want.preamble else want.preamble
    fewest = max(at_least, more_than + 1, ceil(CONTINUES_PART * links(chain)))
    return shared_links(want.chain, chain) if shares(want.chain, chain, fewest) else 0


def continued(want: Want, caches: Iterable[Known], in_use: Collection[str] = ()) -> Known | None:
    """The cache that a request continues: the one it shares most with, then the one used last.

    Args:
        want: the request; its chain is known.
        caches: what there is, resident and saved.
        in_use: keys that other requests continue right now.
    """
    best: Known | None = None
    rank: tuple[int, float] = (0, 0.0)
    for cache in caches:
        if cache.key in in_use:
            continue
        shared = continues(want, cache.session, cache.owner, cache.chain, max(rank[0], 1))
        if shared and (best is None or (shared, cache.used) > rank):
            best, rank = cache, (shared, cache.used)
    return best


def donor_of(want: Want, caches: Iterable[Known]) -> Donor | None:
    """The cache that holds the longest beginning of the prompt, of the same owner; among equals the smallest file."""
    best: Donor | None = None
    for cache in caches:
        fewest = 1 if best is None else best.links
        if cache.owner != want.owner or not shares(want.chain, cache.chain, fewest):
            continue
        shared = shared_links(want.chain, cache.chain) if shares(want.chain, cache.chain, fewest + 1) else fewest
        if best is None or (shared, -cache.size) > (best.links, -best.cache.size):
            best = Donor(cache, shared, cache.tokens * shared // links(cache.chain))
    return best
