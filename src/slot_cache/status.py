"""`GET /slot-cache/status`: what this process knows of its servers, slots and caches, without asking a server.

The models here are the format. Numbers of one process count what went through that process since it started; what is in
the slots and what is saved comes from the index, which the workers of a machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from slot_cache import __version__
from slot_cache.folder import CacheFolder, tag_of
from slot_cache.index import CacheRow, IndexThread, SlotRow
from slot_cache.leases import Lease, Slot
from slot_cache.llama_server import shown_url
from slot_cache.llama_swap import SwapTracker
from slot_cache.router import RouterTracker
from slot_cache.switcher import SlotSwitcher
from slot_cache.tally import SAVED_BY, Tally

SLOT_STATES = ("switch", "prefill", "decode", "busy", "idle", "empty", "unknown")
"""What a slot is doing, see `SlotStatus.state`."""

MOST_CACHES = 200
"""So many saved caches of a route are told one by one, those used last; all are counted."""

MOST_WAITING = 100
"""So many of those that wait for one server are told one by one."""

SlotState = Literal["switch", "prefill", "decode", "busy", "idle", "empty", "unknown"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SlotStatus(_Model):
    """One slot."""

    id: int = Field(description="the slot's number")
    state: SlotState = Field(
        description="switch: a request of this worker has it, and its cache is being put there (or saved); prefill: its "
        "request was sent and nothing of the answer has come yet (of an answer that is not streamed, until it is there); "
        "decode: the answer is coming; busy: somebody else's request was seen in it at the last look; idle: it holds a "
        "cache and no request of this worker has it; empty: it was seen to hold nothing; unknown: not looked at yet"
    )
    key: str | None = Field(description="the cache in it (a file's name without .bin); None: nobody's, or none")
    session: str | None = Field(description="32 hex digits that stand for the session; None: without one")
    route: str | None = Field(description="the model_name of its cache, None without one")
    messages: int | None = Field(
        description="messages of the last prompt of this conversation; None: that went through another worker"
    )
    tokens: int = Field(description="tokens that it holds, prompt and answer, as last seen")
    context: int = Field(description="tokens that it has room for, 0: not seen yet")
    used: float | None = Field(description="tokens / context, 0 to 1; None: not known")
    requests: int = Field(description="requests of this worker that it has had since the worker's start")
    dirty: bool = Field(description="what it holds has changed since its last save, or was never saved")
    saved_tokens: int = Field(description="tokens of the last good save of its cache, 0 for none")
    last_outcome: str | None = Field(description="outcome of the last request of this worker in it")
    idle_seconds: float | None = Field(description="since the last request of this worker ended; None: none did")
    score: float = Field(description="what losing its cache would cost, by recency; the lowest goes first")
    next_to_go: bool = Field(description="of the idle slots with a cache it has the lowest score")
    holder: str | None = Field(description="the cache that the request continues which has the slot now, where known")
    holder_seconds: float | None = Field(description="since that request got the slot; None: nobody has it")
    text: str = Field(default="", description="with show_text: the last 80 characters generated; else empty")


class WaitingStatus(_Model):
    """A request of this worker that waits for a slot."""

    key: str | None = Field(description="the first cache of its session, None without a session")
    route: str | None = Field(description="the model_name")
    seconds: float = Field(description="since it began to wait")
    slots: str = Field(description="the slots that it may use: all, a number, or the first so many (0-3)")


class SpeedsStatus(_Model):
    """What this worker has measured; 0: not measured yet."""

    prefill: float = Field(description="tokens per second that the server computes of prompts")
    restore: float = Field(description="bytes per second that it restores; 0 also when that was long ago")
    token_bytes: float = Field(description="bytes of a saved token")


class ServerStatus(_Model):
    """A server and one model of it."""

    server: str = Field(description="the address, without user and password")
    model: str | None = Field(
        description="the router's (or llama-swap's) name for the model; None: a server of its own"
    )
    name: str = Field(description="the model file's name, empty: not asked yet")
    fingerprint: str = Field(description="the model's fingerprint as in the index, empty: not asked yet")
    build: str = Field(description="the server's build, empty: not asked yet, or not told")
    kind: str = Field(
        description="what was learned of the model: plain (its restores are reused), rewind (those of slots that were "
        "rewound are), trial (that is being found out), stopped (they are not, nothing is saved); empty: nothing yet"
    )
    sleeping: bool = Field(description="the server had unloaded its model when it was last asked")
    clears_idle: bool = Field(description="it must be taken that a task's start empties the server's idle slots")
    hung: bool = Field(description="it let a call time out a moment ago; requests go on without a switch")
    off: bool = Field(description="it said a moment ago that it does no slot actions")
    slot_count: int | None = Field(description="how many slots it has, None: not seen yet")
    slots: list[SlotStatus]
    waiting: int = Field(description="requests of this worker that wait for a slot")
    waits: list[WaitingStatus] = Field(description=f"they, in their order, the first {MOST_WAITING}")
    speeds: SpeedsStatus = Field(description="what this worker has measured")
    counts: dict[str, int] = Field(
        description="how often this worker did what since its start: saves, restores, erasures, rewinds, evictions, and "
        "failures by kind (failed saves, failed restores, server timeout, damaged files, useless restores ...)"
    )


class RouterStatus(_Model):
    """A router of llama.cpp, or a llama-swap."""

    server: str = Field(description="the address, without user and password")
    kind: Literal["router", "llama-swap"]
    limit: int | None = Field(description="the most models loaded at once, 0: no limit; None: it decides itself")
    loaded: list[str] = Field(
        description="the models that are loaded as far as this worker knows, of a router the one used last at the end"
    )


class CacheStatus(_Model):
    """A saved cache."""

    key: str = Field(description="its file's name without .bin")
    session: str | None = Field(description="32 hex digits that stand for its session, None without one")
    tokens: int
    bytes: int
    created: float = Field(description="when it was saved, seconds since the epoch")
    used: float = Field(description="when it was last saved or restored, seconds since the epoch")
    uses: int = Field(description="how often it was restored")
    seconds: float = Field(description="the prefill it stands for, 0: not known")
    fingerprint: str = Field(description="of the model that wrote it")


class RouteStatus(_Model):
    """The saved caches of a route."""

    route: str = Field(description="the model_name")
    server: str | None = Field(description="the server's address where the folder cannot be seen, else None")
    folder: str | None = Field(description="the save_path, None: it cannot be seen")
    files: int = Field(description="how many caches are saved")
    bytes: int = Field(description="how many bytes they take")
    max_files: int | None = Field(description="the limit, 0: none; None: this worker has had no request of the route")
    max_bytes: int | None = Field(description="the limit, 0: none; None: as for max_files")
    caches: list[CacheStatus] = Field(description=f"those used last come first, at most {MOST_CACHES}")


class RecomputedStatus(_Model):
    """A request that reused less than it could, and why."""

    at: float = Field(description="when it had ended, seconds since the epoch")
    key: str | None = Field(description="the cache that it continued or began")
    session: str | None = Field(description="32 hex digits that stand for its session")
    route: str
    outcome: str
    cause: str = Field(description="a word of why.CAUSES")
    why: str = Field(description="in words")
    message: int | None = Field(description="the first message that differs, counted from 1; None: none does")
    from_token: int | None = Field(description="about how many tokens of the prompt come before that; None: not known")
    reused: int = Field(description="tokens reused")
    computed: int = Field(description="tokens computed")
    again: int = Field(description="about how many of these had been computed before")
    seconds: float | None = Field(description="what that cost, about; None: the speed is not known")


class TotalsStatus(_Model):
    """What this worker did since its start."""

    requests: dict[str, int] = Field(description="by outcome: resident, restored, donor, cold, unmanaged")
    tokens_reused: int = Field(description="tokens of prompts that servers had already")
    tokens_computed: int = Field(description="tokens of prompts that they computed")
    wait_seconds: float = Field(description="what requests waited for slots and switches, added up")
    prefill_seconds_saved: float = Field(description="prefill that restored caches have spared")
    prefill_seconds_saved_by: str = Field(description="how that is estimated, in words")
    saves: int
    restores: int
    evictions: int = Field(description="files deleted to keep the limits")
    failures: dict[str, int] = Field(description="by kind, as in ServerStatus.counts")


class Status(_Model):
    """The answer of `GET /slot-cache/status`."""

    version: str = Field(description="of litellm-slot-cache")
    worker: int = Field(
        description="the pid of the worker process that answered: with several workers each tells of itself, but for what "
        "is in idle slots and what is saved"
    )
    started: float = Field(description="when the worker began to count, seconds since the epoch")
    now: float = Field(description="the worker's clock, seconds since the epoch")
    servers: list[ServerStatus]
    routers: list[RouterStatus]
    routes: list[RouteStatus]
    totals: TotalsStatus
    recomputed: list[RecomputedStatus] = Field(description="the last ones of this worker, the newest first")


async def build_status(
    *,
    switchers: Mapping[str, SlotSwitcher],
    routers: Mapping[str, RouterTracker | SwapTracker],
    folders: Iterable[CacheFolder],
    index: IndexThread | None,
    tally: Tally,
    messages: Callable[[str], int | None],
) -> Status:
    """The status of this process. Reads the index, and asks no server.

    Args:
        switchers: of the servers with a model of their own.
        routers: of the others.
        folders: of the routes that this process has had requests of.
        index: None: no request has needed it yet.
        tally: what was counted.
        messages: how many messages the last prompt of a cache had, None if not known.
    """
    pairs = [(switcher, None) for switcher in switchers.values()] + [
        (switcher, model) for router in routers.values() for model, switcher in sorted(router.switchers.items())
    ]  # type: list[tuple[SlotSwitcher, str | None]]
    rows: dict[str, list[SlotRow]] = {}
    saved: list[CacheRow] = []
    if index is not None:
        for switcher, _ in pairs:
            rows[switcher.name] = await index.call(index.index.slots, switcher.name)
        saved = await index.call(index.index.overview)
    servers = [_server(switcher, model, rows.get(switcher.name, []), messages) for switcher, model in pairs]
    return Status(
        version=__version__,
        worker=os.getpid(),
        started=tally.started,
        now=time.time(),
        servers=servers,
        routers=[_router(router) for router in routers.values()],
        routes=_routes(saved, folders),
        totals=_totals(tally, servers),
        recomputed=[
            RecomputedStatus(
                at=entry.at,
                key=entry.key,
                session=session_of(entry.session),
                route=entry.route,
                outcome=entry.outcome,
                cause=entry.cause,
                why=entry.words,
                message=entry.message,
                from_token=entry.from_token,
                reused=entry.reused,
                computed=entry.computed,
                again=entry.again,
                seconds=entry.seconds,
            )
            for entry in reversed(tally.recomputed)
        ],
    )


def session_of(key: str | None) -> str | None:
    """The digits that stand for a session, from the key of its first cache."""
    return None if key is None else key.removeprefix(f"{tag_of(key)}_")


def _server(
    switcher: SlotSwitcher, model: str | None, rows: list[SlotRow], messages: Callable[[str], int | None]
) -> ServerStatus:
    identity = switcher.identity
    written = {row.slot: row for row in rows}
    scores = switcher.scores()
    numbers = sorted({*switcher.slots, *written})
    told = [_slot(switcher, number, written.get(number), scores.get(number, 0.0), messages) for number in numbers]
    candidates = [slot for slot in told if slot.state == "idle" and slot.key is not None]
    next_to_go = min(candidates, key=lambda slot: (slot.score, slot.id)).id if len(candidates) > 1 else None
    waiters = switcher.waiters()
    speeds = switcher.actions.speeds
    kind = ""
    if identity is not None:
        kind = "stopped" if identity.model in switcher.actions.stopped() else switcher.actions.kind(identity)
    return ServerStatus(
        server=shown_url(switcher.server.base_url),
        model=model,
        name=identity.name if identity else "",
        fingerprint=identity.model if identity else "",
        build=identity.build if identity else "",
        kind=kind,
        sleeping=identity.sleeping if identity else False,
        clears_idle=switcher.clears_idle,
        hung=switcher.actions.hung,
        off=switcher.actions.off,
        slot_count=switcher.count,
        slots=[slot.model_copy(update={"next_to_go": slot.id == next_to_go}) for slot in told],
        waiting=len(waiters),
        waits=[_waiting(lease, seconds) for lease, seconds in waiters[:MOST_WAITING]],
        speeds=SpeedsStatus(prefill=speeds.prefill, restore=speeds.restore, token_bytes=speeds.token_bytes),
        counts=dict(switcher.actions.counts),
    )


def _slot(
    switcher: SlotSwitcher, number: int, row: SlotRow | None, score: float, messages: Callable[[str], int | None]
) -> SlotStatus:
    slot = switcher.slots.get(number)
    resident = slot.resident if slot is not None else None
    lease = slot.lease if slot is not None else None
    reading = slot.reading if slot is not None else None
    context = reading.context if reading is not None else 0
    mine = slot is not None and (lease is not None or slot.locked)
    if row is not None and not mine:  # the index knows at least as well
        key, session, tokens, dirty, saved = row.key, row.session, row.tokens, row.dirty, row.saved_tokens
        route: str | None = row.route
    else:
        key, session = (resident.key, resident.session) if resident else (None, None)
        tokens = reading.tokens if reading is not None else 0
        if resident is not None:
            tokens = resident.mark.tokens if resident.mark else max(tokens, resident.tokens_before)
        dirty, saved = (resident.dirty, resident.saved_tokens) if resident else (False, 0)
        route = slot.home.route if slot is not None and slot.home is not None and key is not None else None
    if lease is not None and lease.folder is not None and lease.granted.tokens:
        tokens = max(tokens, lease.granted.tokens)
    shown = (lease.key if lease is not None else None) or key
    return SlotStatus(
        id=number,
        state=_state(slot, lease, key),
        key=key,
        session=session_of(session),
        route=route,
        messages=messages(shown) if shown is not None else None,
        tokens=tokens,
        context=context,
        used=min(tokens / context, 1.0) if context else None,
        requests=slot.requests if slot is not None else 0,
        dirty=dirty,
        saved_tokens=saved,
        last_outcome=slot.last.value if slot is not None and slot.last is not None else None,
        idle_seconds=switcher.ago(slot.used) if slot is not None and slot.requests and lease is None else None,
        score=score,
        next_to_go=False,
        holder=lease.key if lease is not None else None,
        holder_seconds=switcher.ago(lease.taken_at) if lease is not None and lease.taken_at is not None else None,
        text=lease.tail if lease is not None else "",
    )


def _state(slot: Slot | None, lease: Lease | None, key: str | None) -> SlotState:
    if lease is not None:
        return "switch" if lease.sent_at is None else "decode" if lease.answering else "prefill"
    if slot is not None and slot.strangers:
        return "busy"
    if key is not None:
        return "idle"
    if slot is None or slot.reading is None:
        return "unknown"
    return "empty" if slot.reading.tokens == 0 or slot.reading.task is None else "idle"


def _waiting(lease: Lease, seconds: float) -> WaitingStatus:
    which = lease.which
    first = "" if which is None else str(which) if isinstance(which, int) else f"0-{len(which) - 1}"
    return WaitingStatus(
        key=lease.key or lease.want.session,
        route=lease.folder.route if lease.folder is not None else None,
        seconds=seconds,
        slots=first or "all",
    )


def _router(router: RouterTracker | SwapTracker) -> RouterStatus:
    swap = isinstance(router, SwapTracker)
    return RouterStatus(
        server=shown_url(router.server.base_url),
        kind="llama-swap" if swap else "router",
        limit=None if isinstance(router, SwapTracker) else router.limit,
        loaded=router.loaded,
    )


def _routes(saved: Iterable[CacheRow], folders: Iterable[CacheFolder]) -> list[RouteStatus]:
    rows: dict[tuple[str, str], list[CacheRow]] = {}
    names: dict[tuple[str, str], str] = {}
    limits: dict[tuple[str, str], CacheFolder] = {}
    for folder in folders:
        where = (folder.id, folder.tag)
        limits[where], names[where] = folder, folder.route
        rows.setdefault(where, [])
    for row in saved:
        where = (row.folder, tag_of(row.key))
        rows.setdefault(where, []).append(row)
        names.setdefault(where, row.route)
    found = []
    for (place, tag), caches in sorted(rows.items()):
        folder_seen, known = place.startswith("/"), limits.get((place, tag))
        found.append(
            RouteStatus(
                route=names[place, tag],
                server=None if folder_seen else shown_url(place),
                folder=place if folder_seen else None,
                files=len(caches),
                bytes=sum(row.size for row in caches),
                max_files=known.max_files if known is not None else None,
                max_bytes=known.max_bytes if known is not None else None,
                caches=[_cache(row) for row in sorted(caches, key=lambda row: -row.used)[:MOST_CACHES]],
            )
        )
    return found


def _cache(row: CacheRow) -> CacheStatus:
    return CacheStatus(
        key=row.key,
        session=session_of(row.session),
        tokens=row.tokens,
        bytes=row.size,
        created=row.created,
        used=row.used,
        uses=row.uses,
        seconds=row.seconds,
        fingerprint=row.model,
    )


_NO_FAILURES = frozenset({"saves", "restores", "erasures", "rewinds", "evictions"})


def _totals(tally: Tally, servers: Iterable[ServerStatus]) -> TotalsStatus:
    counts: dict[str, int] = {}
    for server in servers:
        for name, number in server.counts.items():
            counts[name] = counts.get(name, 0) + number
    return TotalsStatus(
        requests=dict(tally.requests),
        tokens_reused=tally.reused,
        tokens_computed=tally.computed,
        wait_seconds=tally.waited,
        prefill_seconds_saved=tally.seconds_saved,
        prefill_seconds_saved_by=SAVED_BY,
        saves=counts.get("saves", 0),
        restores=counts.get("restores", 0),
        evictions=counts.get("evictions", 0),
        failures={name: number for name, number in counts.items() if name not in _NO_FAILURES},
    )
