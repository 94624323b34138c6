"""The slots of one server: who may use each (leases), and the switches between conversations."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from slot_cache import report
from slot_cache.folder import CacheFolder, tag_of
from slot_cache.index import IndexThread, SlotRow
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.locks import SlotLock
from slot_cache.model import Identity
from slot_cache.plan import Found, judge, make_plan, worth_saving
from slot_cache.prompt import shared_part
from slot_cache.slot_actions import SlotActions
from slot_cache.state import Ending, Mark, Outcome, Resident, Saved, SlotReading, Want

LOST_AFTER_SECONDS = 5.0
UNSEEN_AFTER_SECONDS = 30.0
LOST_CONFIRM_SECONDS = 1.0
"""A lease that nobody gave back, while somebody waits: the slot is looked at from `LOST_AFTER_SECONDS` after its request
was let go, and is free when it is idle twice, `LOST_CONFIRM_SECONDS` apart. Where the server has not seen the request at
all, it may still be on its way: `UNSEEN_AFTER_SECONDS`."""

LOOSE_SECONDS = 600.0
"""A request that went on without a slot is taken to be at the server for so long at most, if its end is not told."""

BUSY_PAUSES = (0.01, 0.03, 0.1, 0.3)
BUSY_SECONDS = 1.3
"""When a slot is looked at again that a request without our lease keeps busy: a few times soon, for a stream that was
broken off is noticed at its next token, then seldom. The server notices that a client which awaits a whole answer has
left only when it has had no other call for a second; looking more often would keep such a request alive."""

SETTLE_LOOKS = 6
"""How often, with those pauses, a slot is looked at after its request was broken off, or where the server does not answer,
while nobody waits for it."""

FAILED_LOOKS = 3
"""After so many looks that the server did not answer for another reason than that it was busy, what a request has left
cannot be told any more from what somebody else has left there meanwhile."""

TURNS_IN_A_ROW = 8
"""So many requests of one process use a slot in a row before another process that waits for it gets it."""

IDLE_TRIES = 3
"""How often an idle save that failed is tried again."""


@dataclass(frozen=True)
class Granted:
    """What a lease came with: the outcome, and why there is no slot, if there is none."""

    outcome: Outcome
    why: str = ""


@dataclass
class _Slot:
    number: int
    lock: SlotLock
    locked: bool = False
    turns: int = 0
    """leases granted since the lock between processes was taken"""
    lease: Lease | None = None
    waiters: deque[tuple[asyncio.Future[None], Lease]] = field(default_factory=deque)
    resident: Resident | None = None
    """what it holds, as far as is known; counts only while `locked`, else the index has it"""
    home: CacheFolder | None = None
    """the folder of the resident's route"""
    disturbed: bool = False
    """somebody else may have used it meanwhile: a request of ours that has no slot, or whoever came after one that ended
    without a word"""
    perhaps_busy: bool = False
    """its last request was broken off: the server may need a moment, or the rest of a batch, to notice"""
    epoch: int = 0
    """grows whenever the slot is taken or given back; what was begun before is out of date"""
    idle_timer: asyncio.TimerHandle | None = None
    idle_tries: int = 0
    watch: asyncio.Task[None] | None = None

    @property
    def min_tokens(self) -> int:
        """A cache with fewer is not worth a file."""
        return 0 if self.home is None else self.home.min_tokens


class Lease:
    """The right to use a slot. `release` gives it back; whoever got a lease must see to that, on every road.

    Attributes:
        want: what it was taken for.
        granted: what the switch came to; with the outcome `UNMANAGED` there is no slot to pin the request to.
        waited: seconds from asking to the end of the switch.
        active: not released yet.
    """

    def __init__(
        self, switcher: SlotSwitcher, slot: _Slot, want: Want, folder: CacheFolder | None, idle_seconds: float
    ) -> None:
        self.want = want
        self.granted = Granted(Outcome.UNMANAGED)
        self.waited = 0.0
        self.active = True
        self._switcher = switcher
        self._slot = slot
        self._folder = folder
        self._idle_seconds = idle_seconds
        self._abandoned = False
        self._sent_at: float | None = None
        self._reading: SlotReading | None = None
        self._identity: Identity | None = None
        self._restored = 0
        self._saved_tokens = 0

    @property
    def slot(self) -> int:
        """The slot's number."""
        return self._slot.number

    def release(self, ending: Ending) -> None:
        """Give the slot back; the next waiter has it at once. A plain call that never fails; a second one does nothing."""
        if self.active:
            self.active = False
            self._switcher._ended(self, ending)

    def learn(self, reused: int, computed: int, prefill_seconds: float | None = None) -> None:
        """Tell what the server reported of the request: tokens of the prompt reused and computed, and its time for these."""
        actions = self._switcher.actions
        if prefill_seconds is not None:
            actions.learn_prefill(computed, prefill_seconds)
        if self._restored and self._identity is not None:
            actions.learn_use(self._identity, self._restored, reused)
            self._restored = 0


class NoTurnError(Exception):
    """The slot did not become free in the time a request may wait for it, or its server is gone."""


class Host(Protocol):
    """What keeps a server's model loaded: a router. A server that runs a model of its own has none."""

    async def ready(self, deadline: float, abandoned: Callable[[], bool]) -> None:
        """Return when the model is loaded; or when `abandoned` says that nobody waits for it any more.

        Raises:
            LlamaServerError: it cannot be.
            NoTurnError: it was not until `deadline`.
        """

    async def loaded(self) -> bool:
        """Whether the model may be asked for without loading it."""

    def lost(self) -> None:
        """The model was found not loaded."""


class SlotSwitcher:
    """The slots of one llama-server.

    One lease per slot at a time, across all processes that share `lock_folder`; the requests of a process are served in
    the order in which they came. While its lease is held nobody else switches a slot. All methods belong to one event
    loop.

    Args:
        server: the server.
        index: where what is in the slots is written down for other processes, and for after a restart.
        name: the server's name in the index and for locks, the same for every process.
        lock_folder: the folder of the locks between processes; None: there is no other process.
        clock: seconds, for waits.
        host: what loads the server's model, if it is one of a router.

    Attributes:
        role_known: the server has said that it is no router.
    """

    def __init__(
        self,
        server: LlamaServer,
        index: IndexThread,
        *,
        name: str,
        lock_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        host: Host | None = None,
    ) -> None:
        self.server = server
        self.name = name
        self.role_known = False
        self._index = index
        self._lock_folder = lock_folder
        self._clock = clock
        self._host = host
        self._once = report.Once()
        self.actions = SlotActions(server, self._once, clock)
        self._slots: dict[int, _Slot] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loose: dict[Lease, float] = {}
        self._identity: Identity | None = None
        self._closed = False

    def _slot(self, number: int) -> _Slot:
        slot = self._slots.get(number)
        if slot is None:
            lock = SlotLock(self._lock_folder, f"{hashlib.sha256(self.name.encode()).hexdigest()[:16]}-{number}")
            slot = self._slots[number] = _Slot(number, lock)
        return slot

    def resident(self, slot: int) -> Resident | None:
        """What the slot held when this process last had it, as far as is known."""
        return self._slots[slot].resident if slot in self._slots else None

    def leased(self) -> list[int]:
        """The slots that are leased now."""
        return [number for number, slot in self._slots.items() if slot.lease is not None]

    def waiting(self, slot: int) -> int:
        """How many requests of this process wait for the slot."""
        entry = self._slots.get(slot)
        return 0 if entry is None else sum(not turn.done() for turn, _ in entry.waiters)

    async def aclose(self) -> None:
        """End the background work, free the locks, close the connections. Nothing is saved.

        What is released or asked for later is not looked at any more; such a request goes on without a slot.
        """
        self._closed = True
        self._dismiss("this process ends")
        for slot in self._slots.values():
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self._slots.values():
            slot.lock.release()
            slot.locked = False
        await self.server.aclose()

    async def acquire(
        self, number: int, want: Want, folder: CacheFolder, *, queue_seconds: float, idle_seconds: float = 0.0
    ) -> Lease:
        """Wait for the slot, then put the wanted cache into it.

        Neither a fault of the server nor a wait of more than `queue_seconds` is an error here: the lease then says
        `UNMANAGED`, has no slot, and the request goes on without one; it must be released all the same. When the caller
        is cancelled, it leaves the queue, or the switch that has begun is carried to its end and the slot given back then.

        Raises:
            asyncio.CancelledError: the caller was cancelled; it holds nothing.
        """
        slot = self._slot(number)
        lease = Lease(self, slot, want, folder, idle_seconds)
        if self._closed:
            return self._loosen(lease, "this process ends")
        if folder.needs_sweep:
            self._task(self._sweep(folder))
        asked = self._clock()
        if self.actions.hung:
            return self._loosen(lease, "the server did not answer a moment ago")
        try:
            await self._take(slot, lease, queue_seconds)
        except NoTurnError as error:
            lease.waited = self._clock() - asked
            return self._loosen(lease, str(error))
        switch = self._task(self._switch(slot, lease, folder, asked + queue_seconds))
        try:
            await asyncio.shield(switch)
        except asyncio.CancelledError:
            lease._abandoned = True
            switch.add_done_callback(lambda _: lease.release(Ending.UNSENT))
            raise
        lease.waited = self._clock() - asked
        if lease.granted.outcome is Outcome.UNMANAGED:
            self._give_back(lease, Ending.UNSENT)
            return self._loosen(lease, lease.granted.why)
        lease._sent_at = self._clock()
        if slot.waiters or self._lock_folder is not None:
            self._watch(slot)
        return lease

    def _loosen(self, lease: Lease, why: str) -> Lease:
        """Let a request go on without a slot; whatever slot it ends up in is no longer what we left there."""
        lease.granted = Granted(Outcome.UNMANAGED, why)
        self._loose[lease] = self._clock()
        for slot in self._slots.values():
            slot.disturbed = True
            if slot.resident is not None and slot.resident.mark is None:
                slot.resident = None  # what that request leaves could not be told from it
        return lease

    def _ended(self, lease: Lease, ending: Ending) -> None:
        if self._loose.pop(lease, None) is None:
            self._give_back(lease, ending)

    # the queue

    async def _take(self, slot: _Slot, lease: Lease, queue_seconds: float, first: bool = False) -> None:
        if slot.lease is None:
            self._grant(slot, lease)
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = (turn, lease)
        if first:
            slot.waiters.appendleft(entry)
        else:
            slot.waiters.append(entry)
        timer = loop.call_later(queue_seconds, _expire, turn, "the slot did not become free")
        self._watch(slot)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                lease.release(Ending.UNSENT)  # it was handed to us in the very moment we were cancelled
            raise
        finally:
            timer.cancel()
            if entry in slot.waiters:
                slot.waiters.remove(entry)

    def _grant(self, slot: _Slot, lease: Lease) -> None:
        oldest = self._clock() - LOOSE_SECONDS
        self._loose = {loose: since for loose, since in self._loose.items() if since > oldest}
        slot.disturbed = bool(self._loose)
        slot.lease = lease
        slot.turns += 1
        slot.epoch += 1
        if slot.idle_timer is not None:
            slot.idle_timer.cancel()
            slot.idle_timer = None

    def _give_back(self, lease: Lease, ending: Ending) -> None:
        slot = lease._slot
        if slot.lease is not lease:
            return
        if ending is not Ending.UNSENT and lease.granted.outcome is not Outcome.UNMANAGED:
            slot.resident = None if slot.disturbed else _left_by(lease, ending, slot.resident)
            slot.home = lease._folder
            slot.perhaps_busy = ending is Ending.BROKEN
        slot.lease = None
        slot.epoch += 1
        slot.idle_tries = 0
        if not self._closed and not self._hand_on(slot):
            self._task(self._settle(slot, slot.epoch, lease._idle_seconds, sent=ending is not Ending.UNSENT))

    def _hand_on(self, slot: _Slot) -> bool:
        while slot.waiters:
            turn, waiter = slot.waiters.popleft()
            if not turn.done():
                self._grant(slot, waiter)
                turn.set_result(None)
                return True
        return False

    # leases that nobody gave back

    def _watch(self, slot: _Slot) -> None:
        if slot.watch is None or slot.watch.done():
            slot.watch = self._task(self._find_lost_lease(slot))

    async def _find_lost_lease(self, slot: _Slot) -> None:
        """Free the slot of a lease whose request has ended without a word. Asks the server only while somebody waits."""
        idle_since: float | None = None
        watched: Lease | None = None
        while slot.lease is not None:
            lease = slot.lease
            if lease is not watched or lease._sent_at is None:
                watched, idle_since = lease, None
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            held = self._clock() - lease._sent_at
            if held < LOST_AFTER_SECONDS or not (slot.waiters or slot.lock.contended()):
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            try:
                reading = await self._look(slot.number)
            except LlamaServerError:
                idle_since = None
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            if slot.lease is not lease:
                continue
            seen = lease._reading is None or reading.task != lease._reading.task
            if reading.processing or not (seen or held >= UNSEEN_AFTER_SECONDS):
                idle_since = None
                await asyncio.sleep(LOST_AFTER_SECONDS)
            elif idle_since is None:
                idle_since = self._clock()
                await asyncio.sleep(LOST_CONFIRM_SECONDS)
            else:
                report.info(
                    "%s slot %d: its request ended without a word, the slot is free", self.server.shown, slot.number
                )
                slot.disturbed = slot.disturbed or seen  # nothing tells who has used it last
                lease.release(Ending.BROKEN)
                return

    # the switch

    async def _switch(self, slot: _Slot, lease: Lease, folder: CacheFolder, deadline: float) -> None:
        """Carry out the plan for a lease that was just granted. Raises nothing; `lease.granted` tells the result."""
        try:
            lease.granted = await self._switched(slot, lease, folder, deadline)
        except LlamaServerError as error:
            self.actions.fault(error)
            lease.granted = Granted(Outcome.UNMANAGED, str(error))
        except NoTurnError as error:
            lease.granted = Granted(Outcome.UNMANAGED, str(error))
        except Exception as error:  # a fault of ours is never one of the request
            self._once.bug("switch", error)
            lease.granted = Granted(Outcome.UNMANAGED, f"internal fault {type(error).__name__}")
            slot.resident = None
        if self.actions.hung:
            self._dismiss("the server did not answer")

    async def _switched(self, slot: _Slot, lease: Lease, folder: CacheFolder, deadline: float) -> Granted:
        want = lease.want
        await self._lock(slot, deadline)
        if self._host is not None:
            await self._host.ready(deadline, lambda: lease._abandoned)
        if lease._abandoned:
            return Granted(Outcome.UNMANAGED, "the client left")
        try:
            reading = await self._look_until_idle(slot, deadline)
        except LlamaServerError as error:
            if self._host is None or error.status != 400:
                raise
            self._host.lost()  # unloaded behind our back
            await self._host.ready(deadline, lambda: lease._abandoned)
            reading = await self._look_until_idle(slot, deadline)
        self.actions.works_again()
        slot.perhaps_busy = False
        lease._reading = reading
        self._judge(slot, reading)
        resident = slot.resident
        if want.key is not None and resident is not None and resident.key == want.key and resident.whole:
            return Granted(Outcome.RESIDENT)
        if want.key is None and not worth_saving(resident, slot.min_tokens):
            plan = make_plan(want, resident, None, reading)
            if plan.erase and not self.actions.off:
                await self._erase(slot)
            return Granted(plan.outcome)
        identity = lease._identity = await self._identify(slot)
        works = self.actions.works_for(identity)
        saved = await self._look_up(want.key, identity, folder) if works and want.key is not None else None
        plan = make_plan(want, slot.resident, saved, reading, slot.min_tokens)
        if plan.save and works:
            await self._save(slot, {want.key} if want.key else set())
        outcome = plan.outcome
        if plan.restore and saved is not None and not self.actions.hung:
            lease._saved_tokens = saved.tokens
            outcome = await self._restore(slot, lease, folder, saved, reading, identity)
        if plan.erase and outcome is Outcome.COLD and not (self.actions.hung or self.actions.off):
            await self._erase(slot)
        if self.actions.hung:
            return Granted(Outcome.UNMANAGED, "the server did not answer")
        if outcome is Outcome.COLD and want.key is not None:
            report.info("%s slot %d: miss %s", self.server.shown, slot.number, want.key)
        return Granted(outcome)

    def _judge(self, slot: _Slot, reading: SlotReading) -> None:
        found, slot.resident = judge(slot.resident, reading)
        if found is Found.RESTARTED:
            report.info(
                "%s slot %d: the server was started again, or slept: its slots are empty",
                self.server.shown,
                slot.number,
            )
            self.actions.restarted()
            self._identity = None

    async def _look(self, number: int) -> SlotReading:
        readings = await self.server.slots()
        for reading in readings:
            if reading.id == number:
                return reading
        raise LlamaServerError("refused", f"the server has no slot {number}, it has {len(readings)}")

    async def _look_until_idle(self, slot: _Slot, deadline: float) -> SlotReading:
        pauses = iter(BUSY_PAUSES)
        while True:
            try:
                reading = await self._look(slot.number)
            except LlamaServerError as error:
                if error.fault != "timeout" or self._clock() > deadline or not await self._has_a_reason(slot):
                    raise
                continue
            if not reading.processing:
                return reading
            if self._clock() > deadline:
                raise NoTurnError("the slot did not become free")
            if not slot.perhaps_busy:
                slot.resident = None  # somebody else is in there
            await asyncio.sleep(next(pauses, BUSY_SECONDS))

    async def _has_a_reason(self, slot: _Slot) -> bool:
        """Whether a server that does not answer in time is busy with what we know of: a batch of a prompt, or waking up."""
        if slot.perhaps_busy or len(self.leased()) > 1:
            return await self.server.alive()
        try:
            return await self.server.sleeping()
        except LlamaServerError:
            return False

    async def _identify(self, slot: _Slot) -> Identity:
        """Ask which model the server runs. What another process or model of it computed is not in the slot any more."""
        identity = await self.server.identity(self._identity)
        if self._identity is not None and identity.boot != self._identity.boot:
            self.actions.restarted()
        self._identity = identity
        resident = slot.resident
        if (
            resident is not None
            and resident.model
            and (resident.model, resident.boot) != (identity.model, identity.boot)
        ):
            slot.resident = None
        return identity

    async def _look_up(self, key: str, identity: Identity, folder: CacheFolder) -> Saved | None:
        found = await folder.look_up(key, identity.model)
        if found.problem == "damaged":
            self.actions.counts["damaged files"] += 1
            report.logger.warning("slot-cache: delete %s: the file is not what was saved", key)
        elif found.problem == "other model":
            self.actions.counts["other model"] += 1
            self._once.warn(
                ("other model", folder.tag, identity.model),
                "%s: what is saved for route %s is another model's and is not restored; this one is %s",
                self.server.shown,
                report.shown(folder.route),
                report.shown(identity.name),
            )
        return found.saved

    async def _save(self, slot: _Slot, protected: set[str]) -> bool:
        """Save the resident; it must be worth it. Returns whether there is a good save now."""
        resident, folder = slot.resident, slot.home
        if resident is None or resident.key is None or folder is None or not resident.model:
            return False
        after = await self.actions.save(slot.number, resident, folder)
        if after is None:
            return False
        slot.resident = after
        self._task(self._tidy(folder, protected | {resident.key}))
        return True

    async def _restore(
        self,
        slot: _Slot,
        lease: Lease,
        folder: CacheFolder,
        saved: Saved,
        reading: SlotReading,
        identity: Identity,
    ) -> Outcome:
        slot.resident = None
        await self._write_down(slot)  # should this process die now, nobody may think that it is what it was
        slot.resident = await self.actions.restore(slot.number, lease.want, saved, folder, reading, identity)
        if slot.resident is None:
            return Outcome.COLD
        slot.home = folder
        if shared_part(saved.chain, lease.want.chain) >= 0.5:
            lease._restored = saved.tokens
        return Outcome.RESTORED

    async def _erase(self, slot: _Slot) -> None:
        slot.resident = None
        await self._write_down(slot)
        await self.actions.erase(slot.number, "its tokens may belong to another key")

    async def _sweep(self, folder: CacheFolder) -> None:
        swept = await folder.sweep()
        if swept:
            report.info("route %s: %d left-overs of broken saves and vanished files", report.shown(folder.route), swept)

    async def _tidy(self, folder: CacheFolder, protected: set[str]) -> None:
        enforced = await folder.enforce_limits(protected)
        for file in enforced.dropped:
            self.actions.counts["evictions"] += 1
            report.info("delete %s: %.1f MB, over the route's limit", file.key, file.size / 1e6)
        if enforced.alone_over is not None:
            self._once.warn(
                ("alone", folder.tag),
                "one cache alone is over max_gib: %s has %.1f MB",
                enforced.alone_over.key,
                enforced.alone_over.size / 1e6,
            )

    # what other processes are told

    async def _lock(self, slot: _Slot, deadline: float) -> None:
        """Have the lock between processes, and know what is in the slot."""
        if slot.locked and slot.turns > TURNS_IN_A_ROW and slot.lock.contended():
            await self._mark(slot)
            await self._unlock(slot)
        if slot.locked:
            return
        try:
            if not await slot.lock.acquire(max(deadline - self._clock(), 0.001)):
                raise NoTurnError("another worker kept the slot")
        except OSError as error:
            self._no_locks(error)
        slot.locked, slot.turns = True, 1
        await self._read_up(slot)

    def _no_locks(self, error: OSError) -> None:
        self._once.warn(("lock",), "no locks between workers: %s", error)

    async def _unlock(self, slot: _Slot) -> None:
        await self._write_down(slot)
        slot.locked = False
        slot.lock.release()

    async def _read_up(self, slot: _Slot) -> None:
        row = await self._index.call(self._index.index.slot, self.name, slot.number)
        known = slot.resident
        if row is None:
            slot.resident = None
        elif known is None or known.key != row.key or known.mark != Mark(row.task, row.tokens):
            slot.resident = _resident_of(row)
            slot.home = self._home_of(row, slot.home)

    async def _write_down(self, slot: _Slot) -> None:
        row = _row_of(self.name, slot)
        if row is None:
            await self._index.call(self._index.index.drop_slot, self.name, slot.number)
        else:
            await self._index.call(self._index.index.put_slot, row)

    def _home_of(self, row: SlotRow, last: CacheFolder | None) -> CacheFolder | None:
        """The folder of a cache that another process, or this one before, has left in a slot. Its limits are not known."""
        if row.key is None:
            return None
        tag = tag_of(row.key)
        if last is not None and (last.id, last.tag) == (row.folder, tag):
            return last
        path = Path(row.folder) if row.folder.startswith("/") else None
        return CacheFolder(self._index, tag=tag, route=row.route, server=self.name, path=path)

    # after a request

    async def _mark(self, slot: _Slot) -> None:
        """Look at what the last request has left, so that a stranger's use is noticed later."""
        try:
            reading = await self._look(slot.number)
        except LlamaServerError:
            slot.resident = None
            return
        if reading.processing:
            slot.resident = None
        else:
            self._judge(slot, reading)

    async def _settle(self, slot: _Slot, epoch: int, idle_seconds: float, sent: bool) -> None:
        """Nobody waits: mark what the request has left, let other processes have the slot, wait for the idle save."""
        pauses, failed = iter(BUSY_PAUSES), 0
        known = not sent and (slot.resident is None or slot.resident.mark is not None)
        for number in range(0 if known else SETTLE_LOOKS):
            reading, gone = None, False
            try:
                if self._host is not None:
                    gone = not await self._host.loaded()
                elif number or not sent:  # it may have fallen asleep since
                    gone = await self.server.sleeping()
                if not gone:
                    reading = await self._look(slot.number)
            except LlamaServerError as error:  # a time-out is nothing: a batch of another slot's prompt may be long
                failed += error.fault != "timeout"
            if slot.epoch != epoch:
                return
            if gone or failed >= FAILED_LOOKS:
                slot.resident = None  # to look would load or wake it; or it is too late to tell whose that is
                break
            if reading is not None and not reading.processing:
                self._judge(slot, reading)
                slot.perhaps_busy = False
                break
            if reading is not None and not slot.perhaps_busy:
                slot.resident = None  # somebody else is in there
                break
            if number + 1 < SETTLE_LOOKS:
                await asyncio.sleep(next(pauses, BUSY_SECONDS))
                if slot.epoch != epoch:
                    return
        if slot.epoch != epoch:
            return
        self._plan_idle_save(slot, idle_seconds)
        if not slot.locked:
            return
        await self._write_down(slot)
        if slot.epoch == epoch:
            slot.locked = False
            slot.lock.release()

    def _plan_idle_save(self, slot: _Slot, idle_seconds: float) -> None:
        resident = slot.resident
        if idle_seconds > 0 and resident is not None and resident.key is not None and resident.dirty:
            slot.idle_timer = asyncio.get_running_loop().call_later(
                idle_seconds, lambda: self._task(self._idle_save(slot, slot.epoch, idle_seconds))
            )

    async def _idle_save(self, slot: _Slot, epoch: int, idle_seconds: float) -> None:
        """Save what nobody has used for a while. Does not wake the server, and waits for nobody."""
        if slot.epoch != epoch or slot.lease is not None or slot.home is None:
            return
        self._grant(slot, Lease(self, slot, Want(None), slot.home, idle_seconds))
        tries, saved = slot.idle_tries + 1, False
        try:
            saved = await self._saved_idle(slot)
        except LlamaServerError as error:
            if self._host is None or error.status != 400:  # 400: a router has unloaded the model
                self.actions.fault(error)
        except Exception as error:
            self._once.bug("idle save", error)
        finally:
            if self.actions.hung:
                self._dismiss("the server did not answer")
            self._end_hold(slot)
            if slot.lease is None and not saved and tries < IDLE_TRIES:
                slot.idle_tries = tries
                self._plan_idle_save(slot, idle_seconds)

    def _end_hold(self, slot: _Slot) -> None:
        """Give back a slot that was held for work of our own; what is in it stays as `slot.resident` says."""
        if slot.lease is not None:
            slot.lease.active = False
        slot.lease = None
        slot.epoch += 1
        if not self._closed and not self._hand_on(slot):
            self._task(self._let_go(slot, slot.epoch))

    async def vacate(self, wait: float, *, first: bool = False, asleep: bool = False) -> Vacated | None:
        """Take every slot of the server at once and save what is dirty: its model is about to be unloaded.

        Args:
            wait: seconds to wait for requests of ours, in turn; 0: take what is free now.
            first: be the next in turn: it has waited before.
            asleep: the model sleeps, its slots are empty; it is not asked, for that would wake it.

        Returns:
            the slots; `end` must be called. None if one is in use, by us, by another worker or by somebody else.

        Raises:
            LlamaServerError: the server does not answer. Nothing is held then.
        """
        rows = await self._index.call(self._index.index.slots, self.name)
        numbers = {*self._slots, *(row.slot for row in rows)}
        if not asleep:  # another worker may have taken one of which nothing is written down yet
            numbers |= {reading.id for reading in await self._readings()}
        taken: list[_Slot] = []
        done = False
        try:
            for number in sorted(numbers):
                slot = self._slot(number)
                if not await self._hold(slot, wait, first):
                    return None
                taken.append(slot)
            readings = {} if asleep else {reading.id: reading for reading in await self._readings()}
            if any(reading.processing for reading in readings.values()):
                return None
            for slot in taken:
                await self._save_before_end(slot, readings.get(slot.number))
            done = True
            return Vacated(self, taken)
        finally:
            if not done:
                for slot in taken:
                    self._end_hold(slot)

    async def _readings(self) -> list[SlotReading]:
        try:
            return await self.server.slots()
        except LlamaServerError as error:
            if error.status != 400:
                raise
            return []  # it is unloaded already

    async def _hold(self, slot: _Slot, wait: float, first: bool = False) -> bool:
        lease = Lease(self, slot, Want(None), slot.home, 0.0)
        if slot.lease is None:
            self._grant(slot, lease)
        else:
            if wait <= 0:
                return False
            try:
                await self._take(slot, lease, wait, first)
            except NoTurnError:
                return False
        if slot.locked:
            return True
        held = False
        try:
            held = await slot.lock.acquire(wait) if wait > 0 else slot.lock.try_acquire()
            if held:
                slot.locked, slot.turns = True, 1
                await self._read_up(slot)
        except OSError as error:
            self._no_locks(error)
            held = slot.locked = True
        finally:
            if not held:
                self._end_hold(slot)
        return held

    async def _save_before_end(self, slot: _Slot, reading: SlotReading | None) -> None:
        if reading is None:
            slot.resident = None
            return
        self._judge(slot, reading)
        if worth_saving(slot.resident, slot.min_tokens):
            identity = await self._identify(slot)
            if self.actions.works_for(identity) and worth_saving(slot.resident, slot.min_tokens):
                await self._save(slot, set())

    async def _saved_idle(self, slot: _Slot) -> bool:
        if not slot.locked:
            try:
                if not slot.lock.try_acquire():
                    return True  # another process uses it, and will see to it
            except OSError as error:
                self._no_locks(error)
            slot.locked = True
            await self._read_up(slot)
        if self._host is not None and not await self._host.loaded():
            slot.resident = None
            return True
        identity = await self._identify(slot)
        if identity.sleeping:
            slot.resident = None
        elif self.actions.works_for(identity):
            reading = await self._look(slot.number)
            if reading.processing:
                slot.resident = None
            else:
                self._judge(slot, reading)
                if worth_saving(slot.resident, slot.min_tokens):
                    return await self._save(slot, set())
        return True

    async def _let_go(self, slot: _Slot, epoch: int) -> None:
        if slot.locked and slot.epoch == epoch:
            await self._write_down(slot)
            if slot.epoch == epoch:
                slot.locked = False
                slot.lock.release()

    def _dismiss(self, why: str) -> None:
        """Nobody waits for a slot any longer."""
        for slot in self._slots.values():
            for turn, _ in slot.waiters:
                _expire(turn, why)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Vacated:
    """The slots of a server, taken and saved, because its model is about to go."""

    def __init__(self, switcher: SlotSwitcher, slots: list[_Slot]) -> None:
        self._switcher = switcher
        self._slots = slots

    def end(self, *, gone: bool) -> None:
        """Give the slots back. With `gone` they are empty now. A plain call; a second one does nothing."""
        slots, self._slots = self._slots, []
        for slot in slots:
            if gone:
                slot.resident = None
            self._switcher._end_hold(slot)


def _left_by(lease: Lease, ending: Ending, before: Resident | None) -> Resident:
    """What a request has left in its slot, not looked at yet."""
    want, reading, identity = lease.want, lease._reading, lease._identity
    same = before if before is not None and before.key is not None and before.key == want.key else None
    return Resident(
        key=want.key,
        owner=want.owner,
        dirty=True,
        task_before=reading.task if reading else None,
        tokens_before=before.mark.tokens if before and before.mark else reading.tokens if reading else 0,
        before=replace(before, before=None) if before else None,
        whole=ending is Ending.ANSWERED,
        saved_tokens=max(same.saved_tokens if same else 0, lease._saved_tokens),
        model=identity.model if identity else same.model if same else "",
        boot=identity.boot if identity else same.boot if same else "",
        chain=want.chain,
    )


def _row_of(server: str, slot: _Slot) -> SlotRow | None:
    resident = slot.resident
    if resident is None or resident.mark is None or slot.home is None:
        return None
    return SlotRow(
        server=server,
        slot=slot.number,
        key=resident.key,
        owner=resident.owner,
        folder=slot.home.id,
        route=slot.home.route,
        task=resident.mark.task,
        tokens=resident.mark.tokens,
        dirty=resident.dirty,
        whole=resident.whole,
        saved_tokens=resident.saved_tokens,
        model=resident.model,
        boot=resident.boot,
        chain=resident.chain,
    )


def _resident_of(row: SlotRow) -> Resident:
    return Resident(
        key=row.key,
        owner=row.owner,
        dirty=row.dirty,
        mark=Mark(row.task, row.tokens),
        whole=row.whole,
        saved_tokens=row.saved_tokens,
        model=row.model,
        boot=row.boot,
        chain=row.chain,
    )


def _expire(turn: asyncio.Future[None], why: str) -> None:
    if not turn.done():
        turn.set_exception(NoTurnError(why))
