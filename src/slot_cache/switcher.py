"""The slots of one server: what is put into them before a request is sent, and what is kept of it afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from slot_cache import report
from slot_cache.clearing import Clearing
from slot_cache.continuing import choose_donor, known_of, left_by, name_cache, shared_with
from slot_cache.events import Event
from slot_cache.eviction import slot_score
from slot_cache.folder import CacheFolder
from slot_cache.gone import Gone
from slot_cache.host import Host
from slot_cache.idle_slots import IdleSlots
from slot_cache.index import IndexThread
from slot_cache.leases import (
    SAFE_SECONDS,
    Granted,
    Lease,
    LeaseQueue,
    NoTurnError,
    Slot,
    Which,
    of_keys,
    within_reason,
)
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.lost_leases import LostLeases
from slot_cache.matching import Donor, Known
from slot_cache.model import Identity
from slot_cache.plan import Plan, SlotView, make_plan, order_slots
from slot_cache.prompt import links, shared_links, shared_part
from slot_cache.rewind import Conversation
from slot_cache.rewinder import Rewinder
from slot_cache.slot_actions import SlotActions
from slot_cache.slot_book import BUSY_PAUSES, BUSY_SECONDS, Look, SlotBook
from slot_cache.slot_files import SlotFiles
from slot_cache.state import Ending, Outcome, Resident, SlotReading, Want
from slot_cache.vacating import Vacated, Vacating

__all__ = ["Granted", "Host", "Lease", "NoTurnError", "SlotSwitcher", "Vacated"]

LOOSE_SECONDS = 600.0
"""A request that went on without a slot is taken to be at the server for so long at most, if its end is not told."""

MOVES = 3
"""How often a request may be moved to a better slot before it is sent."""


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
        tell: is told what happens.

    Attributes:
        gone: what became of caches that are not there any more.
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
        tell: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.server = server
        self.gone = Gone()
        self.name = name
        self.role_known = False
        self._index = index
        self._lock_folder = lock_folder
        self._clock = clock
        self._host = host
        self._once = report.Once()
        self.actions = SlotActions(server, self._once, clock, tell, self._given_up)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loose: dict[Lease, float] = {}
        self._queue = LeaseQueue(
            name=name,
            lock_folder=lock_folder,
            order=self._order,
            at_home=lambda lease, slot: self._shares(lease, slot) > 0,
            granted=self._granted,
            no_locks=self._no_locks,
            start=self._task,
            clock=clock,
        )
        self._book = SlotBook(
            server,
            self.actions,
            self._queue,
            index,
            name=name,
            lock_folder=lock_folder,
            clock=clock,
            gone=self.gone,
            tell=tell,
        )
        server.has_a_reason = self._book.has_a_reason
        self._files = SlotFiles(
            self.actions, self._book, gone=self.gone, host=host, once=self._once, start=self._task, tell=tell
        )
        self._clearing = Clearing(self._queue, self._book, self.actions, self._files, self._put_away)
        self._idle = IdleSlots(
            server, self._queue, self._book, self._clearing, host=host, put_away=self._put_away, start=self._task
        )
        self._lost = LostLeases(self._queue, self._book, shown=server.shown, start=self._task)
        self._rewinder = Rewinder(server, self.actions, self._book)
        self._vacating = Vacating(
            server,
            self._queue,
            self._book,
            self._files,
            self._clearing,
            hold=self._hold,
            give_back=self._end_hold,
        )

    @property
    def slots(self) -> dict[int, Slot]:
        """The slots that are known, by number. To be read only."""
        return self._queue.slots

    def resident(self, slot: int) -> Resident | None:
        """What the slot held when this process last had it, as far as is known."""
        return self.slots[slot].resident if slot in self.slots else None

    def leased(self) -> list[int]:
        """The slots that are leased now."""
        return [number for number, slot in self.slots.items() if slot.lease is not None]

    def waiting(self, slot: int | None = None) -> int:
        """How many requests of this process wait: for this slot too, or for any."""
        return self._queue.waiting(None if slot is None else self._queue.slot(slot))

    def waiters(self) -> list[tuple[Lease, float]]:
        """The requests of this process that wait, in the order in which they came, and for how many seconds."""
        return [(lease, self._clock() - since) for lease, since in self._queue.waiters()]

    def ago(self, moment: float) -> float:
        """Seconds since a moment on the switcher's clock."""
        return self._clock() - moment

    @property
    def identity(self) -> Identity | None:
        """The server's model, as it was last told."""
        return self._book.identity

    @property
    def count(self) -> int | None:
        """How many slots the server has, None until that is known."""
        return self._queue.count

    def scores(self) -> dict[int, float]:
        """What losing the cache in each slot would cost, by its number (`eviction.slot_score`)."""
        return {number: self._score(slot) for number, slot in self.slots.items()}

    @property
    def clears_idle(self) -> bool:
        """Whether it must be taken that a task's start empties the server's idle slots."""
        return self._clearing.expected

    async def aclose(self) -> None:
        """End the background work, free the locks, close the connections. Nothing is saved.

        What is released or asked for later is not looked at any more; such a request goes on without a slot.
        """
        self._queue.closed = True
        self._queue.dismiss("this process ends")
        for slot in self.slots.values():
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
        while self._tasks:  # one that ends may have begun another
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for slot in self.slots.values():
            self._queue.unlock(slot)
        await self.server.aclose()

    async def acquire(
        self, which: Which, want: Want, folder: CacheFolder, *, queue_seconds: float, idle_seconds: float = 0.0
    ) -> Lease:
        """Wait for a slot of `which`, then put the wanted cache into it.

        Neither a fault of the server nor a wait of more than `queue_seconds` is an error here: the lease then says
        `UNMANAGED`, has no slot, and the request goes on without one; it must be released all the same. When the caller
        is cancelled, it leaves the queue, or the switch that has begun is carried to its end and the slot given back then.

        Raises:
            asyncio.CancelledError: the caller was cancelled; it holds nothing.
        """
        lease = Lease(self, self._queue.allowed(which)[0], want, folder, idle_seconds, which)
        if self._queue.closed:
            return self._loosen(lease, "this process ends")
        if folder.needs_sweep:
            self._task(self._files.sweep(folder))
        asked = self._clock()
        if self.actions.hung:
            return self._loosen(lease, "the server did not answer a moment ago")
        try:
            await self._take(lease, queue_seconds)
        except NoTurnError as error:
            lease.waited = self._clock() - asked
            return self._loosen(lease, str(error))
        look = None
        if self._host is None and not self.clears_idle:
            look = self._book.begin_look()  # while others of the loop have their turn, the server answers
        switch = self._task(self._switch(lease, folder, asked + queue_seconds, look))
        if look is not None:
            switch.add_done_callback(look.drop)
        try:
            await asyncio.shield(switch)
        except asyncio.CancelledError:
            lease.abandoned = True
            switch.add_done_callback(lambda _: lease.release(Ending.UNSENT))
            raise
        lease.waited = self._clock() - asked
        if lease.granted.outcome is Outcome.UNMANAGED:
            self._give_back(lease, Ending.UNSENT)
            return self._loosen(lease, lease.granted.why)
        lease.sent_at = self._clock()
        if self._queue.waiting() or self._lock_folder is not None:
            self._lost.watch(lease.place)
        return lease

    def _loosen(self, lease: Lease, why: str) -> Lease:
        """Let a request go on without a slot; whatever slot it ends up in is no longer what we left there."""
        lease.granted = Granted(Outcome.UNMANAGED, why)
        lease.key = None
        self._loose[lease] = self._clock()
        for slot in self.slots.values():
            slot.disturbed = True
            if slot.resident is not None and slot.resident.mark is None:
                slot.resident = None  # what that request leaves could not be told from it
        return lease

    def ended(self, lease: Lease, ending: Ending, conversation: Conversation | None) -> None:
        """As `LeaseOwner` says."""
        lease.done.set()
        lease.safe.set()
        self._clearing.leave(lease)
        if self._loose.pop(lease, None) is None:
            self._give_back(lease, ending, conversation)

    @property
    def rewinds(self) -> bool:
        """Whether slots are rewound after their requests."""
        return self._files.rewinds

    def rewinds_after(self, lease: Lease) -> bool:
        """As `LeaseOwner` says."""
        return self.rewinds or (
            lease.restored > 0 and lease.identity is not None and not self.actions.kind(lease.identity)
        )

    def learned(self, lease: Lease, reused: int, computed: int, prefill_seconds: float | None) -> None:
        """As `LeaseOwner` says."""
        if prefill_seconds is not None:
            self.actions.learn_prefill(computed, prefill_seconds)
        if lease.restored and lease.identity is not None:
            learned = self.actions.learn_use(lease.identity, lease.restored, reused, lease.restored_rewound)
            lease.restored = 0
            if learned:
                self._task(self._index.call(self._index.index.put_kind, lease.identity.kind_key, learned))
        conversation, lease.conversation = lease.conversation, None
        slot = lease.place
        if conversation is not None and self.rewinds and slot.resident is not None and slot.resident.key == lease.key:
            hold = self._hold_of(slot)
            if slot.lease is None and not slot.yielding and self._queue.try_take(hold):
                self._task(self._rewind(slot, hold, conversation, lease.idle_seconds))

    def _given_up(self, identity: Identity) -> None:
        """Write down that the model is neither saved nor restored any more, for those who ask what is wrong."""
        if identity.boot:
            self._task(self._index.call(self._index.index.put_kind, identity.useless_key(self.name), identity.boot))

    # who has which slot

    async def _take(self, lease: Lease, seconds: float, *, first: bool = False) -> None:
        if self._queue.try_take(lease):
            return
        for slot in self._queue.allowed(lease.which):
            self._lost.watch(slot)
        await self._queue.take(lease, seconds, first=first)

    def _granted(self, slot: Slot, lease: Lease) -> None:
        oldest = self._clock() - LOOSE_SECONDS
        self._loose = {loose: since for loose, since in self._loose.items() if since > oldest}
        slot.disturbed = bool(self._loose)

    def _give_back(self, lease: Lease, ending: Ending, conversation: Conversation | None = None) -> None:
        slot = lease.place
        if slot.lease is not lease:
            return
        slot.used = self._clock()
        if ending is not Ending.UNSENT and lease.granted.outcome is not Outcome.UNMANAGED:
            slot.resident = None if slot.disturbed else _left_by(lease, ending)
            slot.home = lease.folder
            slot.empty, slot.seen_idle = False, None
            slot.perhaps_busy = ending is Ending.BROKEN
            slot.requests, slot.last = slot.requests + 1, lease.granted.outcome
        slot.idle_tries = 0
        if conversation is not None and ending is Ending.ANSWERED and slot.resident is not None:
            if self.rewinds:
                hold = slot.lease = self._hold_of(slot)
                slot.epoch += 1
                self._task(self._rewind(slot, hold, conversation, lease.idle_seconds))
                return
            if lease.restored:
                lease.conversation = conversation
        sent = ending is not Ending.UNSENT
        self._free(slot, lambda: self._idle.settle(slot, slot.epoch, lease.idle_seconds, sent))

    def _free(self, slot: Slot, otherwise: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Nobody has the slot any more: the next one here, another process, or else what is to be done then."""
        slot.lease = None
        slot.epoch += 1
        if self._queue.closed:
            return
        if self._queue.must_yield(slot):
            slot.yielding = True
            self._task(self._yield(slot, otherwise))
        elif not self._queue.hand_on(slot):
            self._task(otherwise())

    async def _yield(self, slot: Slot, otherwise: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Leave the slot to another process that waits for it."""
        try:
            await self._mark(slot)
            await self._book.write_down(slot)
        finally:
            slot.yielding = False
            self._queue.unlock(slot)
            taken = self._queue.hand_on(slot) or self._queue.waiting(slot) > 0
        if not taken:
            await otherwise()

    async def _mark(self, slot: Slot) -> None:
        """Look at what the last request has left, so that a stranger's use is noticed later."""
        try:
            reading = await self._book.look(slot.number)
        except LlamaServerError:
            slot.resident = None
            return
        if reading.processing:
            slot.resident = None
        else:
            self._book.judge(slot, reading)

    def _order(self, lease: Lease, free: list[Slot]) -> list[Slot]:
        return [self.slots[number] for number in order_slots(self._view(lease, slot) for slot in free)]

    def _view(self, lease: Lease, slot: Slot) -> SlotView:
        return SlotView(
            slot.number,
            shared=self._shares(lease, slot),
            empty=slot.empty and slot.resident is None,
            busy=slot.strangers,
            score=self._score(slot),
        )

    def _shares(self, lease: Lease, slot: Slot) -> int:
        return shared_with(lease.want, slot.resident)

    def _score(self, slot: Slot) -> float:
        resident = slot.resident
        if resident is None or resident.key is None:
            return 0.0
        tokens = resident.mark.tokens if resident.mark else resident.tokens_before
        return slot_score(tokens, resident.saved_tokens, self._clock() - slot.used, self.actions.speeds)

    # the switch

    async def _switch(self, lease: Lease, folder: CacheFolder, deadline: float, look: Look | None) -> None:
        """Carry out the plan for a lease that was just granted. Raises nothing; `lease.granted` tells the result."""
        try:
            if self._host is not None:
                await self._host.ready(deadline, lambda: lease.abandoned)
            reading = await self._find_place(lease, deadline, look)
            lease.granted = await self._switched(lease, folder, reading)
            if lease.inside:
                lease.safe.set()
                await self._clearing.put_others_away(lease)
        except LlamaServerError as error:
            self.actions.fault(error)
            lease.granted = Granted(Outcome.UNMANAGED, str(error))
        except NoTurnError as error:
            lease.granted = Granted(Outcome.UNMANAGED, str(error))
        except Exception as error:  # a fault of ours is never one of the request
            self._once.bug("switch", error)
            lease.granted = Granted(Outcome.UNMANAGED, f"internal fault {type(error).__name__}")
            lease.place.resident = None
        finally:
            lease.safe.set()
            if lease.inside and (lease.granted.outcome is Outcome.UNMANAGED or lease.abandoned):
                self._clearing.leave(lease)
        if lease.inside:
            self._task(self._clearing.see_start(lease))
        if self.actions.hung:
            self._queue.dismiss("the server did not answer")

    async def _find_place(self, lease: Lease, deadline: float, look: Look | None) -> SlotReading:
        """Wait until the lease's slot is idle, or move it to a better one that is. On a server that clears idle slots the
        lease is inside the gate then. The first look may have been begun already."""
        pauses = iter(BUSY_PAUSES)
        moves = 0
        while True:
            if lease.abandoned:
                raise NoTurnError("the client left")
            gated = self.clears_idle
            if gated and not lease.inside:
                look = None  # what was seen before is out of date inside
                await self._clearing.enter(lease, deadline, lambda: self._look_at_place(lease, deadline))
            reading = await self._look_at_place(lease, deadline, look)
            look = None
            if reading is not None and moves < MOVES and self._move(lease):
                moves += 1
                continue
            if reading is not None and not reading.processing:
                if gated or not self.clears_idle:
                    return reading
                continue  # only now it is known that there is a gate
            self._clearing.leave(lease)
            if reading is not None and self._clock() > deadline:
                raise NoTurnError("the slot did not become free")
            await asyncio.sleep(next(pauses, BUSY_SECONDS))

    async def _look_at_place(self, lease: Lease, deadline: float, look: Look | None = None) -> SlotReading | None:
        """Compare the lease's slot with what we remember of it. None: look once more, the lease has another slot, or the
        model had to be loaded again."""
        slot = lease.place
        await self._book.read_up(slot)
        await self._book.refresh()
        try:
            reading = await self._book.look(slot.number, look)
        except LlamaServerError as error:
            if not isinstance(lease.which, int) and slot.number >= (self._queue.count or 1):
                await self._retake(lease, deadline)
                return None
            if self._host is not None and error.status == 400 and not lease.unloaded:
                lease.unloaded = True  # behind our back
                self._host.lost()
                await self._host.ready(deadline, lambda: lease.abandoned)
                return None
            raise
        self.actions.works_again()
        slot.strangers = reading.processing and not slot.perhaps_busy
        if slot.strangers:
            slot.resident = None
        if not reading.processing:
            slot.perhaps_busy = False
            lease.reading = reading
            self._book.judge(slot, reading)
        return reading

    async def _retake(self, lease: Lease, deadline: float) -> None:
        """The server was started again with fewer slots: wait for one that there is."""
        gone = lease.place
        self._clearing.leave(lease)
        self._free(gone, lambda: self._idle.let_go(gone, gone.epoch))
        await self._queue.take(lease, max(deadline - self._clock(), 0.001), first=True)

    def _move(self, lease: Lease) -> bool:
        """Change to a free slot that is better of its kind: one with (more of) the conversation, an empty one, an idle one."""
        place = lease.place
        if isinstance(lease.which, int):
            return False
        others = [
            slot
            for slot in self._queue.allowed(lease.which)
            if slot.lease is None and not slot.yielding and slot.scout is None
        ]
        views = {slot.number: self._view(lease, slot) for slot in [place, *others]}
        best = order_slots(views.values())[0]
        here, there = views[place.number], views[best]
        if (there.rank, -there.shared) >= (here.rank, -here.shared) or not self._queue.move(lease, self.slots[best]):
            return False
        self._free(place, lambda: self._idle.settle(place, place.epoch, lease.idle_seconds, False))
        return True

    # the plan and what comes of it

    async def _switched(self, lease: Lease, folder: CacheFolder, reading: SlotReading) -> Granted:
        slot, want = lease.place, lease.want
        await folder.hear(self._book.news)
        if self._is_there(lease, folder):
            return Granted(Outcome.RESIDENT, tokens=reading.tokens)
        if not want.knows_itself and not self._files.worth_saving(slot):
            plan = make_plan(want, slot.resident, None, reading)
            if plan.erase and not self.actions.off:
                await self._files.erase(slot)
            return Granted(plan.outcome)
        identity = lease.identity = await self._book.identify(slot)
        works = self.actions.works_for(identity)
        at_home = self._shares(lease, slot) > 0
        if works and not at_home and self._files.worth_saving(slot):
            await self._files.save(slot, {want.key} if want.key else set())
        if not at_home:
            lease.safe.set()  # nobody waits for us while we wait for them
            await self._until_safe(lease)
        known = await folder.known(identity.model) if works and want.knows_itself else []
        mine = self._continue(lease, known)
        want = replace(want, key=lease.key)
        saved = (
            await self._files.look_up(lease.key, identity, folder) if works and mine and lease.key is not None else None
        )
        if saved is not None and self.rewinds and not (saved.rewound and shared_part(saved.chain, want.chain) == 1.0):
            saved = None  # such a model reuses nothing of a cache that the prompt does not continue to its end
        plan = make_plan(want, slot.resident, saved, reading, slot.min_tokens)
        donor = self._donor(lease, [] if self.rewinds else known, plan) if works else None
        if at_home and plan.save and works and self._files.worth_saving(slot):
            await self._files.save(slot, {key for key in (want.key, donor.cache.key if donor else None) if key})
        outcome, tokens = plan.outcome, reading.tokens if plan.outcome is Outcome.RESIDENT else 0
        if plan.restore and saved is not None and not self.actions.hung:
            lease.saved_tokens = saved.tokens
            outcome, tokens = await self._files.restore(lease, want, folder, saved, reading, identity), saved.tokens
        elif donor is not None and not self.actions.hung:
            outcome, tokens = await self._start_from(lease, want, donor, folder, reading, identity)
        if plan.erase and outcome is Outcome.COLD and not (self.actions.hung or self.actions.off):
            await self._files.erase(slot)
        if self.actions.hung:
            return Granted(Outcome.UNMANAGED, "the server did not answer")
        if outcome is Outcome.COLD and want.key is not None:
            report.info("%s slot %d: miss %s", self.server.shown, slot.number, want.key)
        return Granted(outcome, tokens=0 if outcome is Outcome.COLD else tokens)

    async def _until_safe(self, lease: Lease) -> None:
        """Where the conversation that the request continues is just being saved in a slot that another one has got: wait."""
        for slot in list(self.slots.values()):
            holder = slot.lease
            if (
                slot is not lease.place
                and holder is not None
                and not holder.safe.is_set()
                and self._shares(lease, slot)
            ):
                await within_reason(holder.safe)

    def _is_there(self, lease: Lease, folder: CacheFolder) -> bool:
        """Whether the slot holds all of the conversation that the request continues; then nothing else is looked at."""
        resident, want = lease.place.resident, lease.want
        if resident is None or resident.key is None or not resident.whole or not self._shares(lease, lease.place):
            return False
        if want.key is None:
            shared = links(resident.chain)
            if shared_links(want.chain, resident.chain) < shared or folder.knows_better(want, resident.key, shared):
                return False
            lease.key = resident.key
        return True

    def _continue(self, lease: Lease, known: list[Known]) -> bool:
        """Find the cache that the request continues, or name a new one. Returns whether it may be saved already."""
        want, place = lease.want, lease.place
        others = [slot for slot in self.slots.values() if slot is not place]
        here = known_of(want, [place.resident], time.time())
        elsewhere = [slot.resident for slot in others if slot.resident is not None]
        named = name_cache(want, here, elsewhere, known, of_keys(others))
        lease.key = named.key
        if named.found:
            for slot in others:
                if slot.resident is not None and slot.resident.key == named.key:
                    slot.resident = None  # what is left there is an old copy
        return named.perhaps_saved

    def _donor(self, lease: Lease, known: list[Known], plan: Plan) -> Donor | None:
        """What a request without a cache of its own starts from, if anything."""
        want, place = lease.want, lease.place
        if plan.outcome is not Outcome.COLD or not want.chain or lease.key is None:
            return None
        free = [slot for slot in self.slots.values() if slot is not place and slot.lease is None and not slot.yielding]
        now = time.time()
        here = known_of(want, [place.resident], now)
        others = [*known_of(want, [slot.resident for slot in free], now), *known]
        fewest = lease.folder.min_tokens if lease.folder else 0
        return choose_donor(want, here, others, fewest, self.actions.speeds)

    async def _start_from(
        self, lease: Lease, want: Want, donor: Donor, folder: CacheFolder, reading: SlotReading, identity: Identity
    ) -> tuple[Outcome, int]:
        slot, key = lease.place, donor.cache.key
        if not donor.cache.size and slot.resident is not None and slot.resident.key == key:
            return Outcome.DONOR, donor.tokens  # the server reuses what is in the slot by itself
        if not donor.cache.size:  # it is in another slot
            for other in self.slots.values():
                if other.resident is not None and other.resident.key == key and other.lease is None:
                    await self._put_away(other)
                    break
        saved = await self._files.look_up(key, identity, folder)
        if saved is None or self.actions.hung:
            return Outcome.COLD, 0
        outcome = await self._files.restore(lease, want, folder, saved, reading, identity, donor=key)
        return (Outcome.DONOR, donor.tokens) if outcome is Outcome.RESTORED else (outcome, 0)

    # slots held for work of our own

    async def _put_away(self, slot: Slot) -> bool:
        """Take a slot that is free and save what is dirty in it. Returns whether nothing is left to be saved."""
        lease = self._hold_of(slot)
        if slot.lease is not None or slot.yielding or slot.home is None or not self._queue.try_take(lease):
            return True  # somebody uses it, and will see to it
        saved = False
        try:
            saved = await self._files.save_idle(slot)
        except LlamaServerError as error:
            if self._host is None or error.status != 400:  # 400: a router has unloaded the model
                self.actions.fault(error)
        except Exception as error:
            self._once.bug("idle save", error)
        finally:
            if self.actions.hung:
                self._queue.dismiss("the server did not answer")
            self._end_hold(slot)
        return saved

    def _hold_of(self, slot: Slot) -> Lease:
        """A lease for work of our own."""
        return Lease(self, slot, Want(None), slot.home, 0.0, slot.number)

    def _end_hold(self, slot: Slot) -> None:
        """Give back a slot that was held for work of our own; what is in it stays as `slot.resident` says."""
        if slot.lease is not None:
            slot.lease.active = False
            slot.lease.safe.set()
        self._free(slot, lambda: self._idle.let_go(slot, slot.epoch))

    async def _rewind(self, slot: Slot, hold: Lease, conversation: Conversation, idle_seconds: float) -> None:
        """Send the slot back to where the conversation's next turn goes on, before anybody else has it."""
        try:
            if self.clears_idle:
                await self._clearing.enter(hold, self._clock() + SAFE_SECONDS)
                await self._clearing.put_others_away(hold)
            await self._rewinder.rewind(slot, conversation)
        except (LlamaServerError, NoTurnError) as error:
            self._once.warn(("rewind", self.server.base_url), "%s rewind failed: %s", self.server.shown, error)
            slot.resident, slot.perhaps_busy = None, True
        except Exception as error:
            self._once.bug("rewind", error)
            slot.resident = None
        finally:
            self._clearing.leave(hold)
            hold.active = False
            hold.safe.set()
            self._free(slot, lambda: self._idle.settle(slot, slot.epoch, idle_seconds, sent=slot.perhaps_busy))

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
        return await self._vacating.vacate(wait, first=first, asleep=asleep)

    async def _hold(self, slot: Slot, wait: float, first: bool) -> bool:
        """Take a slot for work of our own. Returns whether we have it."""
        lease = self._hold_of(slot)
        if wait <= 0:
            if not self._queue.try_take(lease):
                return False
        else:
            try:
                await self._take(lease, wait, first=first)
            except NoTurnError:
                return False
        held = False
        try:
            await self._book.read_up(slot)
            held = True
        finally:
            if not held:
                self._end_hold(slot)
        return True

    def _no_locks(self, error: OSError) -> None:
        self._once.warn(("lock",), "no locks between workers: %s", error)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _left_by(lease: Lease, ending: Ending) -> Resident:
    return left_by(
        lease.want,
        lease.key,
        ending,
        lease.place.resident,
        reading=lease.reading,
        identity=lease.identity,
        saved_tokens=lease.saved_tokens,
    )
