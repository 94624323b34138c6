"""Who may use which slot: leases, those that wait for one, and the locks between processes. No call to a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slot_cache.folder import CacheFolder
from slot_cache.locks import SlotLock, digest_of
from slot_cache.model import Identity
from slot_cache.plan import WaiterView, choose_waiter
from slot_cache.rewind import Conversation
from slot_cache.state import Ending, Outcome, Resident, SlotReading, Want

TURNS_IN_A_ROW = 8
"""So many requests of one process use a slot in a row before another process that waits for it gets it."""

SCOUT_SECONDS = 3600.0
"""The wait for a lock that another process has is given up and begun anew after so long: a thread that nobody awaits any
more waits on in the kernel, so that there must be few of them."""

SAFE_SECONDS = 5.0
"""How long a request waits before its start for others that save what it would empty."""

Which = int | range | None
"""The slots that a request may use: one, the first so many, or (None) all that the server has."""


class NoTurnError(Exception):
    """No slot became free in the time a request may wait for it, or its server is gone."""


@dataclass(frozen=True)
class Granted:
    """What a lease came with: the outcome, and why there is no slot, if there is none.

    Attributes:
        outcome: where the request finds its prompt's cache.
        why: for `UNMANAGED`.
        tokens: how many tokens were there for it, 0 if not known.
    """

    outcome: Outcome
    why: str = ""
    tokens: int = 0


class LeaseOwner(Protocol):
    """What a lease tells of its request."""

    def ended(self, lease: Lease, ending: Ending, conversation: Conversation | None) -> None:
        """The request has ended."""

    def rewinds_after(self, lease: Lease) -> bool:
        """Whether its slot is rewound after the request, or may turn out to have to be."""

    def learned(self, lease: Lease, reused: int, computed: int, prefill_seconds: float | None) -> None:
        """What the server reported of it."""


class Lease:
    """The right to use a slot. `release` gives it back; whoever got a lease must see to that, on every road.

    Attributes:
        want: what it was taken for.
        granted: what the switch came to; with the outcome `UNMANAGED` there is no slot to pin the request to.
        key: the cache that its request continues or begins, None until that is known, or where there is none.
        waited: seconds from asking to the end of the switch.
        active: not released yet.
        taken_at: when it had its slot, on the queue's clock; None: it waits.
        sent_at: when its request was let go; None: it waits or is being switched.
        answering: a piece of the answer has come.
        tail: the last characters of the answer, where the route says `show_text`, else empty.
        safe: set when nothing would be lost if its slot were emptied now: it is saved, or its request is on the way.
    """

    def __init__(
        self, owner: LeaseOwner, place: Slot, want: Want, folder: CacheFolder | None, idle_seconds: float, which: Which
    ) -> None:
        self.want = want
        self.granted = Granted(Outcome.UNMANAGED)
        self.key = want.key
        self.waited = 0.0
        self.active = True
        self.which = which
        self.place = place
        self.folder = folder
        self.idle_seconds = idle_seconds
        self.abandoned = False
        self.taken_at: float | None = None
        self.sent_at: float | None = None
        self.answering = False
        self.tail = ""
        self.reading: SlotReading | None = None
        self.identity: Identity | None = None
        self.restored = 0
        self.restored_rewound = False
        self.saved_tokens = 0
        self.conversation: Conversation | None = None
        """kept until it is told what the server reused, where that decides whether the slot is rewound"""
        self.done = asyncio.Event()
        self.safe = asyncio.Event()
        self.inside = False
        self.unloaded = False
        self._owner = owner

    @property
    def slot(self) -> int:
        """The slot's number."""
        return self.place.number

    @property
    def wants_conversation(self) -> bool:
        """Whether `release` has a use for what the request has said."""
        return self.active and self._owner.rewinds_after(self)

    def release(self, ending: Ending, conversation: Conversation | None = None) -> None:
        """Give the slot back; the next waiter has it at once. A plain call that never fails; a second one does nothing."""
        if self.active:
            self.active = False
            self._owner.ended(self, ending, conversation)

    def learn(self, reused: int, computed: int, prefill_seconds: float | None = None) -> None:
        """Tell what the server reported of the request: tokens of the prompt reused and computed, and its time for these."""
        self._owner.learned(self, reused, computed, prefill_seconds)


@dataclass(eq=False)
class Slot:
    """A slot as this process knows it."""

    number: int
    lock: SlotLock
    locked: bool = False
    unread: bool = True
    """another process may have had it since: what was left there is not read yet"""
    turns: int = 0
    """leases granted since the lock between processes was taken"""
    lease: Lease | None = None
    resident: Resident | None = None
    """what it holds, as far as is known; while the lock is not held, the index may know better"""
    home: CacheFolder | None = None
    """the folder of the resident's route"""
    empty: bool = False
    """it was seen to hold nothing"""
    used: float = float("-inf")
    """when its last request ended"""
    requests: int = 0
    """how many requests of this process it has had"""
    last: Outcome | None = None
    """the outcome of the last one"""
    reading: SlotReading | None = None
    """what the server said when it was last looked at"""
    disturbed: bool = False
    """somebody else may have used it meanwhile: a request of ours that has no slot, or whoever came after one that ended
    without a word"""
    perhaps_busy: bool = False
    """its last request was broken off: the server may need a moment, or the rest of a batch, to notice"""
    strangers: bool = False
    """somebody else's request was seen in it"""
    seen_idle: int | None = None
    """the server's newest task when the resident was last seen idle"""
    yielding: bool = False
    """it is about to be left to another process"""
    epoch: int = 0
    """grows whenever the slot is taken or given back; what was begun before is out of date"""
    idle_timer: asyncio.TimerHandle | None = None
    idle_tries: int = 0
    watch: asyncio.Task[None] | None = None
    scout: asyncio.Task[None] | None = None
    """waits for the lock that another process holds"""

    @property
    def nobodys(self) -> bool:
        """This process has nothing to do with it right now."""
        return self.lease is None and not self.locked and not self.yielding

    @property
    def unmarked(self) -> bool:
        """Its last request has ended a moment ago, and what that has left was not looked at yet."""
        return self.resident is not None and self.resident.dirty and self.resident.mark is None

    @property
    def min_tokens(self) -> int:
        """A cache with fewer is not worth a file."""
        return 0 if self.home is None else self.home.min_tokens


@dataclass(eq=False)
class _Waiter:
    turn: asyncio.Future[None]
    lease: Lease
    until: float
    since: float
    passed: int = 0


@dataclass
class LeaseQueue:
    """The slots of a server and the requests that want them. All methods belong to one event loop.

    A request that may use a free slot has one at once; the others wait in the order in which they came, but one whose
    conversation is in the slot that falls free may go first, at most `MOST_PASSES` times past any other. A slot that
    another process has is waited for in a thread, once for all that wait here.

    Attributes:
        name: the server's name for locks.
        lock_folder: where these are; None: there is no other process.
        order: the free slots, the best for a lease first.
        at_home: whether a lease's conversation is in a slot.
        granted: told of each lease that has its slot now.
        no_locks: told that there can be no locks.
        start: starts a task that is ended with the owner.
        clock: seconds.
        count: how many slots the server has, None until that is known.
        closed: no task is started any more.
    """

    name: str
    lock_folder: Path | None
    order: Callable[[Lease, list[Slot]], list[Slot]]
    at_home: Callable[[Lease, Slot], bool]
    granted: Callable[[Slot, Lease], None]
    no_locks: Callable[[OSError], None]
    start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    clock: Callable[[], float]
    count: int | None = None
    closed: bool = False
    slots: dict[int, Slot] = field(default_factory=dict)
    _waiters: list[_Waiter] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """The server's name as part of a file's name."""
        return digest_of(self.name)

    def slot(self, number: int) -> Slot:
        """The slot of this number."""
        found = self.slots.get(number)
        if found is None:
            lock = SlotLock(self.lock_folder, f"{self.digest}-{number}")
            found = self.slots[number] = Slot(number, lock)
        return found

    def allowed(self, which: Which) -> list[Slot]:
        """The slots that a request may use. Until the server has said how many it has, it has one."""
        if isinstance(which, int):
            return [self.slot(which)]
        count = self.count or 1
        return [self.slot(number) for number in range(count if which is None else max(min(len(which), count), 1))]

    def waiting(self, slot: Slot | None = None) -> int:
        """How many requests wait: for this slot (too), or at all."""
        return sum(1 for waiter in self._live() if slot is None or slot in self.allowed(waiter.lease.which))

    def waiters(self) -> list[tuple[Lease, float]]:
        """The requests that wait, in the order in which they came, and since when."""
        return [(waiter.lease, waiter.since) for waiter in self._live()]

    def _live(self) -> list[_Waiter]:
        return [waiter for waiter in self._waiters if not waiter.turn.done()]

    async def take(self, lease: Lease, seconds: float, *, first: bool = False) -> None:
        """Wait for a slot, at most so long; `first`: before all that wait now. The lease's `place` is it.

        Raises:
            NoTurnError: there was none in time.
            asyncio.CancelledError: the caller was cancelled; it holds nothing.
        """
        if self.try_take(lease):
            return
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), lease, self.clock() + seconds, self.clock())
        self._waiters.insert(0 if first else len(self._waiters), waiter)
        timer = loop.call_later(seconds, _expire, waiter.turn, "the slot did not become free")
        try:
            self._scout_for(lease)
            await waiter.turn
        except BaseException:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                lease.release(Ending.UNSENT)  # it was handed to us in the very moment we were cancelled
            raise
        finally:
            timer.cancel()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def try_take(self, lease: Lease) -> bool:
        """Have a slot that is free now, the best one for the lease."""
        free = [slot for slot in self.allowed(lease.which) if slot.lease is None and not slot.yielding]
        return any(self._try_slot(slot, lease) for slot in (self.order(lease, free) if len(free) > 1 else free))

    def move(self, lease: Lease, slot: Slot) -> bool:
        """Have another slot, that is free now, in place of the lease's own. The old one must then be given on."""
        old = lease.place
        if slot.lease is not None or slot.yielding or not self._try_slot(slot, lease):
            return False
        old.lease = None
        old.epoch += 1
        return True

    def hand_on(self, slot: Slot) -> bool:
        """A slot is free: give it to one that waits for it. Returns whether somebody has it now."""
        if slot.lease is not None:
            return True
        waiters = [waiter for waiter in self._live() if slot in self.allowed(waiter.lease.which)]
        if slot.yielding or not waiters:
            return False
        chosen = choose_waiter([WaiterView(waiter.passed, self.at_home(waiter.lease, slot)) for waiter in waiters])
        if chosen is None or not self._try_slot(slot, waiters[chosen].lease):
            self._scout(slot)
            return False
        for waiter in waiters[:chosen]:
            waiter.passed += 1
        self._waiters.remove(waiters[chosen])
        waiters[chosen].turn.set_result(None)
        return True

    def hand_on_all(self) -> None:
        """Something has changed: give every free slot to one that waits for it."""
        for slot in list(self.slots.values()):
            if slot.lease is None and self._waiters:
                self.hand_on(slot)

    def must_yield(self, slot: Slot) -> bool:
        """Whether the slot should be left to another process now."""
        return slot.locked and slot.turns > TURNS_IN_A_ROW and slot.lock.contended()

    def dismiss(self, why: str) -> None:
        """Nobody waits any longer."""
        for waiter in self._waiters:
            _expire(waiter.turn, why)

    def unlock(self, slot: Slot) -> None:
        """Let other processes have the slot."""
        slot.locked = False
        slot.lock.release()

    def try_lock(self, slot: Slot) -> bool:
        """Have the lock between processes, if it is free."""
        if slot.locked:
            return True
        try:
            if not slot.lock.try_acquire():
                return False
            slot.unread |= not slot.lock.unshared
        except OSError as error:
            self.no_locks(error)
            slot.unread = True
        slot.locked, slot.turns = True, 0
        return True

    def _try_slot(self, slot: Slot, lease: Lease) -> bool:
        if slot.scout is not None or not self.try_lock(slot):
            return False  # another process has it
        slot.lease, lease.place = lease, slot
        if lease.taken_at is None:
            lease.taken_at = self.clock()
        slot.turns += 1
        slot.epoch += 1
        if slot.idle_timer is not None:
            slot.idle_timer.cancel()
            slot.idle_timer = None
        self.granted(slot, lease)
        return True

    # slots that another process has

    def _scout_for(self, lease: Lease) -> None:
        if self.lock_folder is None:
            return
        for slot in self.allowed(lease.which):
            self._scout(slot)

    def _scout(self, slot: Slot) -> None:
        """Where somebody waits here for a slot that another process has: wait for its lock. That goes on when nobody waits
        any longer, for the next one that does: a thread cannot be called back."""
        taken = slot.lease is not None or slot.locked or slot.yielding or self.closed
        if not taken and slot.scout is None and self.waiting(slot):
            slot.scout = self.start(self._await_lock(slot))
            slot.scout.add_done_callback(lambda _: self._scouted(slot))

    async def _await_lock(self, slot: Slot) -> None:
        try:
            slot.locked = await slot.lock.acquire(SCOUT_SECONDS)
            slot.unread |= not slot.lock.unshared
        except OSError as error:
            self.no_locks(error)
            slot.locked = slot.unread = True

    def _scouted(self, slot: Slot) -> None:
        slot.scout, slot.turns = None, 0
        if not slot.locked:
            self._scout(slot)
        elif not self.hand_on(slot):
            self.unlock(slot)


def _expire(turn: asyncio.Future[None], why: str) -> None:
    if not turn.done():
        turn.set_exception(NoTurnError(why))


def of_keys(slots: Iterable[Slot]) -> set[str]:
    """The caches that requests continue right now."""
    return {slot.lease.key for slot in slots if slot.lease is not None and slot.lease.key is not None}


async def within_reason(event: asyncio.Event) -> None:
    """Wait for what another request is to do, but not for ever."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), SAFE_SECONDS)
