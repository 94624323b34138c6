"""Pure: what a request finds of its conversation in the slots, the cache it continues, begins or starts from, and what it
leaves behind. No I/O, no clock."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slot_cache.eviction import Speeds
from slot_cache.folder import tag_of
from slot_cache.matching import Donor, Known, continued, continues, donor_of
from slot_cache.model import Identity
from slot_cache.prompt import shared_chain
from slot_cache.state import Ending, Resident, SlotReading, Want


def shared_with(want: Want, resident: Resident | None) -> int:
    """How many links of its chain a request shares with the cache in a slot, if it continues it, else 0."""
    if resident is None or resident.key is None:
        return 0
    if want.key is not None:
        return int(resident.key == want.key)
    if tag_of(resident.key) != want.tag:
        return 0  # routes share nothing but what the server does by itself
    return continues(want, resident.session, resident.owner, resident.chain)


def known_of(want: Want, residents: Iterable[Resident | None], now: float) -> list[Known]:
    """What is in slots, as far as it is of the request's route."""
    return [
        Known(resident.key, resident.session, resident.owner, resident.chain, resident.mark.tokens, used=now)
        for resident in residents
        if resident is not None
        and resident.key is not None
        and resident.mark is not None
        and tag_of(resident.key) == want.tag
    ]


@dataclass(frozen=True)
class Named:
    """The cache that a request continues or begins.

    Attributes:
        key: None: nothing tells whether it is the same conversation as one that goes on just now.
        perhaps_saved: there may be a file of it already.
        found: it was found by what it holds; what is left of it in other slots is an old copy.
    """

    key: str | None
    perhaps_saved: bool = True
    found: bool = False


def name_cache(
    want: Want, here: Sequence[Known], elsewhere: Sequence[Resident], saved: Sequence[Known], in_use: Collection[str]
) -> Named:
    """Find the cache that a request continues, or name a new one.

    Args:
        want: the request.
        here: what is in its slot.
        elsewhere: what is in the others.
        saved: what is saved of its route.
        in_use: the caches that other requests continue right now.
    """
    if want.key is not None:
        return Named(want.key)
    if not want.chain:
        return Named(None if want.session in in_use else want.session)
    caches = [*here, *saved]
    left = {resident.key for resident in elsewhere if resident.key is not None}
    files = {cache.key: cache for cache in saved}
    dirty = {resident.key for resident in elsewhere if resident.key is not None and _is_newer(resident, files)}
    found = continued(want, caches, {*in_use, *dirty})
    if found is not None:
        return Named(found.key, found=True)
    if want.session is not None and want.session not in {*in_use, *left, *(cache.key for cache in caches)}:
        return Named(want.session)  # of another model, perhaps
    return Named(f"{want.tag}_{uuid.uuid4().hex}", perhaps_saved=False)


def _is_newer(resident: Resident, files: Mapping[str, Known]) -> bool:
    """Whether a slot holds what is not in the file of its cache, or more. What was dirty when it was last looked at may have
    been saved since, by another process that has taken the slot."""
    file = files.get(resident.key or "")
    if not resident.dirty or file is None or resident.mark is None:
        return resident.dirty
    return resident.mark.tokens > file.tokens or not file.chain.startswith(resident.chain)


def choose_donor(
    want: Want, here: Sequence[Known], others: Sequence[Known], min_tokens: int, speeds: Speeds
) -> Donor | None:
    """What a request without a cache of its own starts from, if that is quicker than to compute it.

    Args:
        want: the request; its chain is known.
        here: what is in its slot, which the server reuses by itself.
        others: what is in other free slots, and what is saved.
        min_tokens: fewer are not worth it.
        speeds: the server's.
    """
    at_hand = donor_of(want, here)
    found = donor_of(want, [*here, *others])
    if found is None or found.tokens < max(min_tokens, 1):
        return None
    if at_hand is not None and at_hand.links >= found.links:
        return at_hand
    more = found.tokens - (at_hand.tokens if at_hand is not None else 0)
    calls = 1 if found.cache.size else 2  # one that is in another slot only is saved first
    return found if speeds.restoring_pays(calls * found.cache.tokens, more) else at_hand


def left_by(
    want: Want,
    key: str | None,
    ending: Ending,
    before: Resident | None,
    *,
    reading: SlotReading | None,
    identity: Identity | None,
    saved_tokens: int,
) -> Resident:
    """What a request has left in its slot, not looked at yet.

    Args:
        want: what it came with.
        key: the cache that it continued or began.
        ending: how it ended.
        before: what was in the slot when it was sent.
        reading: what the server said of the slot then.
        identity: the server's model and process, if they were asked for.
        saved_tokens: how many tokens the cache's file holds, as far as was seen.
    """
    same = before if before is not None and before.key is not None and before.key == key else None
    chain = want.chain
    if (
        ending is not Ending.ANSWERED and same is not None
    ):  # how far it came is not known: what both begin with is there
        chain = shared_chain(same.chain, want.chain) or chain
    return Resident(
        key=key,
        session=want.session,
        owner=want.owner,
        dirty=True,
        task_before=reading.task if reading else None,
        tokens_before=before.mark.tokens if before and before.mark else reading.tokens if reading else 0,
        before=replace(before, before=None) if before else None,
        whole=ending is Ending.ANSWERED,
        saved_tokens=max(same.saved_tokens if same else 0, saved_tokens),
        model=identity.model if identity else same.model if same else "",
        boot=identity.boot if identity else same.boot if same else "",
        chain=chain,
    )
