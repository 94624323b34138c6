"""Pure: replay a trace of requests against slots and a disk that are made up, with the decisions that the product takes.

Which slot a request has (`plan.order_slots`), who waits (`plan.choose_waiter`), what goes first from slots and disk
(`eviction.slot_score`, `eviction.files_to_drop`) and whether a restore pays (`eviction.Speeds`) is the product's own code;
here are only the clock, the slots and the files that it decides about. No I/O, no clock but the trace's.

What is assumed: a trace has no sessions and no owners, so a conversation is known by its content alone, and what several
conversations begin with is not told apart from what is theirs. A slot is busy while a cache is saved or restored, the rest
of the prompt is computed and the answer is generated; slots do not slow each other down, and a save takes as long as a
restore. Only whole blocks of earlier prompts are reused: the tokens of an answer have no ids of their own in a trace, so
that it is a little less than a server reuses.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from math import ceil, inf

from slot_cache.eviction import (
    BYTES_PER_TOKEN,
    PREFILL_TOKENS_PER_SECOND,
    RESTORE_BYTES_PER_SECOND,
    CacheFile,
    Policy,
    Speeds,
    files_to_drop,
    slot_score,
)
from slot_cache.plan import SlotView, order_slots
from slot_cache.prompt import shared_links
from slot_cache.simulated import Cache, Lenders, Prefixes, Queue, Saved, Slot, TraceRequest, Waiter, enough
from slot_cache.state import Outcome

BLOCK_TOKENS = 512
"""Tokens that one id of a trace stands for."""

ASSUMED = Speeds(PREFILL_TOKENS_PER_SECOND, RESTORE_BYTES_PER_SECOND, BYTES_PER_TOKEN)
DECODE_TOKENS_PER_SECOND = 30.0
_LOOK_AT_WAITERS = 16


@dataclass(frozen=True)
class World:
    """What a trace is replayed against.

    Attributes:
        slots: how many.
        max_bytes, max_files: the limits of the saved caches, 0 for none.
        speeds: prefill, restore (and save) and bytes of a token; all of them are known.
        decode: tokens per second that a slot generates.
        block: tokens that one id of the trace stands for.
    """

    slots: int = 4
    max_bytes: int = 50 * 2**30
    max_files: int = 0
    speeds: Speeds = ASSUMED
    decode: float = DECODE_TOKENS_PER_SECOND
    block: int = BLOCK_TOKENS


@dataclass
class Result:
    """What a replay came to.

    Attributes:
        requests: how many.
        outcomes: how many of them were resident, restored, donor and cold.
        prompt_tokens, reused_tokens: of all prompts, and how many of them needed not be computed.
        plain_seconds: to compute all prompts whole.
        prefill_seconds: to compute what was not reused.
        restore_seconds, save_seconds: spent on files.
        bytes_read, bytes_written: of files.
        evicted: how many files were deleted for the limits.
        waits: seconds that each request waited for a slot, in the order in which they were served.
    """

    requests: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    plain_seconds: float = 0.0
    prefill_seconds: float = 0.0
    restore_seconds: float = 0.0
    save_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    evicted: int = 0
    waits: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that was reused."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def saved_seconds(self) -> float:
        """Prefill that was not needed, less the time spent on restores and saves: below 0, it did harm."""
        return self.plain_seconds - self.prefill_seconds - self.restore_seconds - self.save_seconds

    @property
    def mean_wait(self) -> float:
        """Seconds."""
        return sum(self.waits) / len(self.waits) if self.waits else 0.0

    def wait_of(self, part: float) -> float:
        """The shortest wait, in seconds, that so great a part of the requests did not pass (0.95: the p95)."""
        return sorted(self.waits)[max(ceil(part * len(self.waits)), 1) - 1] if self.waits else 0.0


def simulate(requests: Iterable[TraceRequest], world: World, policy: Policy = "cost") -> Result:
    """Serve the requests, in the order of their arrival, and tell what it took.

    Takes about 0.1 ms a request, and with a limit of the disk that is reached up to 2 µs for every saved cache and request.

    Args:
        requests: in any order.
        world: what they meet.
        policy: what goes first from slots and disk; `lru`: what was used longest ago.
    """
    replay = _Replay(world, policy)
    for request in sorted(requests, key=lambda request: request.arrived):
        replay.arrive(request)
    return replay.finish()


@dataclass(frozen=True)
class _Start:
    """What a request starts from: so many links, of a file that is restored or of what the slot holds."""

    outcome: Outcome
    links: int = 0
    restore: Cache | None = None


class _Replay:
    def __init__(self, world: World, policy: Policy) -> None:
        self._world, self._policy = world, policy
        self._slots = [Slot(number) for number in range(world.slots)]
        self._ends: list[tuple[float, int]] = []  # when each busy slot comes free
        self._queue = Queue()
        self._continuing = Prefixes()  # a cache by those of its links that are enough of it to continue it
        self._lenders = Lenders()
        self._saved: dict[str, Cache] = {}
        self._saved_bytes = 0
        self._caches = 0
        self._result = Result()

    def arrive(self, request: TraceRequest) -> None:
        """A request comes; those that came before it must have arrived."""
        self._run_until(request.arrived)
        if any(slot.free for slot in self._slots):
            self._serve(request, request.arrived)
        else:
            self._queue.add(request)

    def finish(self) -> Result:
        """Serve those that wait still."""
        self._run_until(inf)
        return self._result

    def _run_until(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            end, number = heapq.heappop(self._ends)
            slot = self._slots[number]
            slot.free = True
            if slot.cache is not None:
                slot.cache.in_use = False
            request = self._queue.take(self._at_home(slot.cache))
            if request is not None:
                self._serve(request, end)

    def _at_home(self, cache: Cache | None) -> Waiter | None:
        """The first of those that wait whose conversation a cache is. Only the first few that it may be are looked at."""
        if cache is None:
            return None
        candidates = islice(self._queue.sharing(cache.chain), _LOOK_AT_WAITERS)
        return next((waiter for waiter in candidates if self._continued(waiter.request.chain)[0] is cache), None)

    def _continued(self, chain: bytes) -> tuple[Cache | None, int]:
        """The rule of `matching.continued`: the cache a request continues, and how many links they share."""
        for number, caches in self._continuing.longest(chain):
            for cache in reversed(caches):
                if not cache.in_use:
                    return cache, number
        return None, 0

    def _serve(self, request: TraceRequest, now: float) -> None:
        cache, shared = self._continued(request.chain)
        views = [
            SlotView(
                slot.number,
                shared=shared if cache is not None and slot.cache is cache else 0,
                empty=slot.cache is None,
                score=self._score(slot, now),
            )
            for slot in self._slots
            if slot.free
        ]
        slot = self._slots[order_slots(views)[0]]
        seconds = 0.0
        if cache is not None and slot.cache is cache:
            start = _Start(Outcome.RESIDENT, shared)
        else:
            start, seconds = self._switch(slot, request, cache, shared, now)
        reused = self._tokens(start.links, request.prompt)
        seconds += self._world.speeds.compute_seconds(request.prompt - reused) + request.output / self._world.decode
        self._put(request, slot, cache, shared)
        slot.free = False
        slot.used = now + seconds
        heapq.heappush(self._ends, (slot.used, slot.number))
        self._count(request, start.outcome, reused, now)

    def _score(self, slot: Slot, now: float) -> float:
        if self._policy == "lru" or slot.cache is None:
            return slot.used
        return slot_score(slot.cache.tokens, slot.cache.saved_tokens, now - slot.used, self._world.speeds)

    def _switch(
        self, slot: Slot, request: TraceRequest, cache: Cache | None, shared: int, now: float
    ) -> tuple[_Start, float]:
        """Put away what a slot holds and restore what helps; returns what the request starts from, and the seconds."""
        seconds = 0.0
        start, lender = self._start(slot, request, cache, shared)
        needed = {one.key for one in (start.restore, cache) if one is not None}
        if lender is not None:
            seconds += self._save(lender, now, needed)
        if slot.cache is not None:
            if slot.cache.dirty:
                seconds += self._save(slot.cache, now, needed)
            self._leave(slot.cache)
            slot.cache = None
        if start.restore is not None:
            seconds += self._restore(start.restore, now)
        return start, seconds

    def _start(
        self, slot: Slot, request: TraceRequest, cache: Cache | None, shared: int
    ) -> tuple[_Start, Cache | None]:
        """What a request that is not resident starts from, and the resident of another slot that is to be saved for it."""
        pays = self._world.speeds.restoring_pays
        in_place = 0 if slot.cache is None else shared_links(request.chain, slot.cache.chain)

        def useful(count: int) -> int:
            return self._tokens(count, request.prompt) - self._tokens(in_place, request.prompt)

        if cache is not None and cache.saved is not None and pays(cache.saved.file.tokens, useful(shared)):
            return _Start(Outcome.RESTORED, shared, cache), None
        best = in_place
        start = _Start(Outcome.DONOR if in_place else Outcome.COLD, in_place)
        found = self._lenders.best(request.chain)  # the rule of `matching.donor_of`
        if found is not None:
            donor, count = found
            overwritten = donor is slot.cache and donor.dirty  # what the slot holds is put in the place of that file
            worth = donor.saved is not None and pays(donor.saved.file.tokens, useful(count))
            if count > best and worth and not overwritten:
                best, start = count, _Start(Outcome.DONOR, count, donor)
        lender = None
        for other in self._slots:
            if other is slot or not other.free or other.cache is None or not other.cache.dirty:
                continue
            count = shared_links(request.chain, other.cache.chain)
            # It is written first, which takes as long as reading it.
            if count > best and pays(2 * other.cache.tokens, useful(count)):
                best, start, lender = count, _Start(Outcome.DONOR, count, other.cache), other.cache
        return start, lender

    def _put(self, request: TraceRequest, slot: Slot, cache: Cache | None, shared: int) -> None:
        """The slot holds the request's conversation from now on."""
        if cache is None:
            self._caches += 1
            cache = Cache(f"{self._caches:08x}")
        else:
            self._forget(cache)
            cache.saved_tokens = min(cache.saved_tokens, self._tokens(shared, request.prompt))
        cache.tokens = request.prompt + request.output
        cache.resident = cache.in_use = cache.dirty = True
        self._know(cache, request.chain)
        slot.cache = cache

    def _save(self, cache: Cache, now: float, needed: set[str]) -> float:
        """Write a cache's file, unless it is quicker to compute; returns the seconds it took."""
        speeds = self._world.speeds
        if not speeds.restoring_pays(cache.tokens, cache.tokens):
            return 0.0
        uses = cache.saved.file.uses if cache.saved is not None else 0
        self._drop(cache)
        size = int(cache.tokens * speeds.token_bytes)
        file = CacheFile(cache.key, size, now, cache.tokens, speeds.compute_seconds(cache.tokens), uses)
        cache.saved, cache.saved_tokens, cache.dirty = Saved(file, cache.chain), cache.tokens, False
        self._saved[cache.key] = cache
        self._saved_bytes += size
        self._lenders.add(cache, cache.saved)
        self._result.bytes_written += size
        seconds = speeds.restore_seconds(cache.tokens)
        self._result.save_seconds += seconds
        self._keep_limits(now, needed | {cache.key})
        return seconds

    def _keep_limits(self, now: float, protected: set[str]) -> None:
        world = self._world
        too_many = world.max_files and len(self._saved) > world.max_files
        if not too_many and not (world.max_bytes and self._saved_bytes > world.max_bytes):
            return
        files = [cache.saved.file for cache in self._saved.values() if cache.saved is not None]
        for file in files_to_drop(files, world.max_files, world.max_bytes, protected, policy=self._policy, now=now):
            cache = self._saved[file.key]
            self._drop(cache)
            self._result.evicted += 1
            if not cache.resident:
                self._forget(cache)

    def _restore(self, cache: Cache, now: float) -> float:
        """Read a cache's file; returns the seconds it took."""
        if cache.saved is None:
            return 0.0
        file = cache.saved.file
        cache.saved = replace(cache.saved, file=replace(file, used=now, uses=file.uses + 1))
        self._result.bytes_read += file.size
        seconds = self._world.speeds.restore_seconds(file.tokens)
        self._result.restore_seconds += seconds
        return seconds

    def _drop(self, cache: Cache) -> None:
        """A cache's file is gone."""
        if cache.saved is None:
            return
        del self._saved[cache.key]
        self._saved_bytes -= cache.saved.file.size
        cache.saved, cache.saved_tokens, cache.dirty = None, 0, True

    def _leave(self, cache: Cache) -> None:
        """A cache is in its slot no longer: what its file holds is left of it."""
        cache.resident = False
        if cache.saved is None:
            self._forget(cache)
        elif cache.dirty:
            self._forget(cache)
            cache.tokens = cache.saved_tokens = cache.saved.file.tokens
            cache.dirty = False
            self._know(cache, cache.saved.chain)

    def _know(self, cache: Cache, chain: bytes) -> None:
        cache.chain = chain
        self._continuing.add(cache, chain, enough(chain))

    def _forget(self, cache: Cache) -> None:
        self._continuing.remove(cache, cache.chain, enough(cache.chain))

    def _tokens(self, count: int, prompt: int) -> int:
        """Tokens of so many blocks of a prompt; its last token is computed in any case."""
        return min(count * self._world.block, prompt - 1)

    def _count(self, request: TraceRequest, outcome: Outcome, reused: int, now: float) -> None:
        result, speeds = self._result, self._world.speeds
        result.requests += 1
        result.outcomes[outcome] += 1
        result.prompt_tokens += request.prompt
        result.reused_tokens += reused
        result.plain_seconds += speeds.compute_seconds(request.prompt)
        result.prefill_seconds += speeds.compute_seconds(request.prompt - reused)
        result.waits.append(now - request.arrived)
