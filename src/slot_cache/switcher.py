"""The slots of one server: what is put into them before a request is sent, and what is kept of it afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slot_cache import report
from slot_cache.events import Event
from slot_cache.eviction import slot_score
from slot_cache.folder import CacheFolder, tag_of
from slot_cache.gone import Gone
from slot_cache.index import IndexThread
from slot_cache.leases import Granted, Lease, LeaseQueue, NoTurnError, Slot, Which, of_keys
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.matching import Donor, Known, continued, continues, donor_of
from slot_cache.model import Identity
from slot_cache.plan import Plan, SlotView, make_plan, order_slots, worth_saving
from slot_cache.prompt import links, shared_chain, shared_links, shared_part
from slot_cache.rewind import Conversation, find_point
from slot_cache.slot_actions import SlotActions
from slot_cache.slot_book import SlotBook
from slot_cache.start_gate import StartGate
from slot_cache.state import Ending, Mark, Outcome, Resident, Saved, SlotReading, Want

__all__ = ["Granted", "Host", "Lease", "NoTurnError", "SlotSwitcher", "Vacated"]

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

SETTLE_SECONDS = 0.01
"""The answer is on its way first; then its slot is looked at. A next request has looked at it itself by then."""

SETTLE_LOOKS = 6
"""How often, with those pauses, a slot is looked at after its request was broken off, or where the server does not answer,
while nobody waits for it."""

FAILED_LOOKS = 3
"""After so many looks that the server did not answer for another reason than that it was busy, what a request has left
cannot be told any more from what somebody else has left there meanwhile."""

IDLE_TRIES = 3
"""How often an idle save that failed is tried again."""

CLEARING_IDLE_SECONDS = 2.0
"""On a server that clears idle slots a changed cache is saved when nobody has used it for so long: longer than the pause
between two calls of an agent, so that one conversation alone does not write a file at each turn."""

START_PAUSES = (0.01, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.5, 0.9)
"""When it is looked whether a request has started that was let go; after the last of these pauses it is taken that it has."""

SAFE_SECONDS = 5.0
"""How long a request waits before its start for others that save what it would empty."""

NEARLY_OVER_TOKENS = 16
"""A request with so few tokens left may end before another one has started, and lose what it has left in its slot."""

MOVES = 3
"""How often a request may be moved to a better slot before it is sent."""


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
        self._tell = tell
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
        self._gate = StartGate(lock_folder, f"{self._queue.digest}-start")

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
        return self._book.clears is not False and (self._queue.count or 1) > 1

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
            self._task(self._sweep(folder))
        asked = self._clock()
        if self.actions.hung:
            return self._loosen(lease, "the server did not answer a moment ago")
        try:
            await self._take(lease, queue_seconds)
        except NoTurnError as error:
            lease.waited = self._clock() - asked
            return self._loosen(lease, str(error))
        switch = self._task(self._switch(lease, folder, asked + queue_seconds))
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
            self._watch(lease.place)
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
        self._leave(lease)
        if self._loose.pop(lease, None) is None:
            self._give_back(lease, ending, conversation)

    @property
    def rewinds(self) -> bool:
        """Whether slots are rewound after their requests."""
        return self.actions.needs_rewind(self._book.identity)

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
            self._watch(slot)
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
            slot.resident = None if slot.disturbed else _left_by(lease, ending, slot.resident)
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
        self._free(slot, lambda: self._settle(slot, slot.epoch, lease.idle_seconds, sent))

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
        """How many links of its chain a request shares with the cache in a slot, if it continues it, else 0."""
        want, resident = lease.want, slot.resident
        if resident is None or resident.key is None:
            return 0
        if want.key is not None:
            return int(resident.key == want.key)
        if tag_of(resident.key) != want.tag:
            return 0  # routes share nothing but what the server does by itself
        return continues(want, resident.session, resident.owner, resident.chain)

    def _score(self, slot: Slot) -> float:
        resident = slot.resident
        if resident is None or resident.key is None:
            return 0.0
        tokens = resident.mark.tokens if resident.mark else resident.tokens_before
        return slot_score(tokens, resident.saved_tokens, self._clock() - slot.used, self.actions.speeds)

    async def _rewind(self, slot: Slot, hold: Lease, conversation: Conversation, idle_seconds: float) -> None:
        """Send the slot back to where the conversation's next turn goes on, before anybody else has it."""
        try:
            if self.clears_idle:
                await self._enter(hold, self._clock() + SAFE_SECONDS, save_first=False)
                await self._put_others_away(hold)
            await self._rewound(slot, conversation)
        except (LlamaServerError, NoTurnError) as error:
            self._once.warn(("rewind", self.server.base_url), "%s rewind failed: %s", self.server.shown, error)
            slot.resident, slot.perhaps_busy = None, True
        except Exception as error:
            self._once.bug("rewind", error)
            slot.resident = None
        finally:
            self._leave(hold)
            hold.active = False
            hold.safe.set()
            self._free(slot, lambda: self._settle(slot, slot.epoch, idle_seconds, sent=slot.perhaps_busy))

    async def _rewound(self, slot: Slot, conversation: Conversation) -> None:
        reading = await self._book.look(slot.number)
        if reading.processing:
            return
        self._book.judge(slot, reading)
        identity = await self._book.identify(slot)
        if slot.resident is None or not self.actions.needs_rewind(identity):
            return

        async def render(messages: Sequence[Any], answer_begins: bool) -> str | None:
            try:
                return await self.server.render(
                    messages, conversation.tools, conversation.template, answer_begins=answer_begins
                )
            except LlamaServerError as error:
                if error.fault != "refused":
                    raise
                return None  # the template has no words for it

        point = await find_point(conversation, render)
        if point is None:
            return
        seconds = self.actions.rewind_seconds(reading.tokens, point.whole)
        try:
            had, computed = await self.server.rewind(slot.number, point.text, seconds)
        except LlamaServerError as error:
            if error.fault == "timeout" and await self.server.alive():
                self.actions.rewind_too_slow(identity, seconds, point.whole)
            raise
        self.actions.rewound(identity, had, computed, point.whole)
        reading = await self._book.look(slot.number)
        if reading.task is not None and not reading.processing:
            mark = Mark(reading.task, reading.tokens)
            slot.resident = replace(slot.resident, mark=mark, dirty=True, whole=True, rewound=True)

    # leases that nobody gave back

    def _watch(self, slot: Slot) -> None:
        if slot.watch is None or slot.watch.done():
            slot.watch = self._task(self._find_lost_lease(slot))

    async def _find_lost_lease(self, slot: Slot) -> None:
        """Free the slot of a lease whose request has ended without a word. Asks the server only while somebody waits."""
        idle_since: float | None = None
        watched: Lease | None = None
        while slot.lease is not None:
            lease = slot.lease
            if lease is not watched or lease.sent_at is None:
                watched, idle_since = lease, None
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            held = self._clock() - lease.sent_at
            if held < LOST_AFTER_SECONDS or not (self._queue.waiting(slot) or slot.lock.contended()):
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            try:
                reading = await self._book.look(slot.number)
            except LlamaServerError:
                idle_since = None
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            if slot.lease is not lease:
                continue
            seen = lease.reading is None or reading.task != lease.reading.task
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

    async def _switch(self, lease: Lease, folder: CacheFolder, deadline: float) -> None:
        """Carry out the plan for a lease that was just granted. Raises nothing; `lease.granted` tells the result."""
        try:
            if self._host is not None:
                await self._host.ready(deadline, lambda: lease.abandoned)
            reading = await self._find_place(lease, deadline)
            lease.granted = await self._switched(lease, folder, reading)
            if lease.inside:
                lease.safe.set()
                await self._put_others_away(lease)
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
                self._leave(lease)
        if lease.inside:
            self._task(self._see_start(lease))
        if self.actions.hung:
            self._queue.dismiss("the server did not answer")

    async def _find_place(self, lease: Lease, deadline: float) -> SlotReading:
        """Wait until the lease's slot is idle, or move it to a better one that is. On a server that clears idle slots the
        lease is inside the gate then."""
        pauses = iter(BUSY_PAUSES)
        moves = 0
        while True:
            if lease.abandoned:
                raise NoTurnError("the client left")
            gated = self.clears_idle
            if gated and not lease.inside:
                await self._enter(lease, deadline)
            reading = await self._look_at_place(lease, deadline)
            if reading is not None and moves < MOVES and self._move(lease):
                moves += 1
                continue
            if reading is not None and not reading.processing:
                if gated or not self.clears_idle:
                    return reading
                continue  # only now it is known that there is a gate
            self._leave(lease)
            if reading is not None and self._clock() > deadline:
                raise NoTurnError("the slot did not become free")
            await asyncio.sleep(next(pauses, BUSY_SECONDS))

    async def _look_at_place(self, lease: Lease, deadline: float) -> SlotReading | None:
        """Compare the lease's slot with what we remember of it. None: look once more, the lease has another slot, or the
        model had to be loaded again."""
        slot = lease.place
        await self._book.read_up(slot)
        await self._book.refresh()
        try:
            reading = await self._book.look(slot.number)
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
        self._leave(lease)
        self._free(gone, lambda: self._let_go(gone, gone.epoch))
        await self._queue.take(lease, max(deadline - self._clock(), 0.001), first=True)

    def _move(self, lease: Lease) -> bool:
        """Change to a free slot that is better of its kind: one with the conversation, an empty one, one that is idle."""
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
        if views[best].rank >= views[place.number].rank or not self._queue.move(lease, self.slots[best]):
            return False
        self._free(place, lambda: self._settle(place, place.epoch, lease.idle_seconds, False))
        return True

    # servers that clear idle slots

    async def _enter(self, lease: Lease, deadline: float, *, save_first: bool = True) -> None:
        try:
            lease.inside = await self._gate.try_enter()
            if not lease.inside:
                if save_first:
                    await self._save_first(lease, deadline)
                lease.safe.set()
                lease.inside = await self._gate.enter(max(deadline - self._clock(), 0.001))
            if not lease.inside:
                raise NoTurnError("other requests did not start")
            if self.actions.hung:
                raise NoTurnError("the server did not answer")
        except OSError as error:
            self._no_locks(error)

    def _leave(self, lease: Lease) -> None:
        if lease.inside:
            lease.inside = False
            self._gate.leave()

    async def _see_start(self, lease: Lease) -> None:
        """Leave the gate when the request of a lease has started, has ended, or takes too long to arrive."""
        try:
            for pause in START_PAUSES:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(lease.done.wait(), pause)
                if not lease.active:
                    return
                if not self._gate.wanted():
                    continue
                with contextlib.suppress(LlamaServerError):
                    reading = await self._book.look(lease.slot)
                    if reading.processing or lease.reading is None or reading.task != lease.reading.task:
                        return
        finally:
            self._leave(lease)

    async def _save_first(self, lease: Lease, deadline: float) -> None:
        """Save what is dirty in the lease's slot before others start, while it waits for the gate."""
        slot = lease.place
        reading = await self._look_at_place(lease, deadline)
        if reading is not None and not reading.processing:
            await self._save_if_worth(slot)
        if self._lock_folder is not None and reading is not None and slot.lease is lease:
            await self._book.give_up(slot, reading)
        lease.safe.set()

    async def _put_others_away(self, lease: Lease) -> None:
        """See that what is dirty in idle slots is saved, for the start of a request empties them; at the end stands a look
        that found nothing to be done, so that little time is left for another request to end."""
        until = self._clock() + SAFE_SECONDS
        failed: set[Slot] = set()
        while await self._put_some_away(lease, failed) and self._clock() < until:
            if self.actions.hung:
                raise LlamaServerError("timeout", "a save timed out")

    async def _put_some_away(self, lease: Lease, failed: set[Slot]) -> bool:
        """Do what is to be done now, but for the slots that it has failed for. Returns whether there was anything."""
        acted = await self._others_end()
        if acted:
            await asyncio.sleep(BUSY_PAUSES[1])
        await self._book.refresh()
        for other in await self._ending(lease):
            acted = True
            await _within_reason(other.done)
        for slot in list(self.slots.values()):
            holder = slot.lease
            if holder is None:
                if slot.yielding or slot in failed or not self._is_unsaved(slot):
                    continue
                if not slot.locked and slot.lock.taken():
                    continue  # another process has it, and saves it
                acted = True
                if not await self._put_away(slot) or (slot.lease is None and self._is_unsaved(slot)):
                    failed.add(slot)
            elif holder is not lease and not holder.safe.is_set():
                acted = True
                await _within_reason(holder.safe)  # it has its slot from one that has just ended
        return acted

    def _is_unsaved(self, slot: Slot) -> bool:
        return slot.unmarked or self._worth_saving(slot)

    async def _ending(self, lease: Lease) -> list[Lease]:
        """The leases whose requests end just now, or have ended at the server, though we were not told so yet."""
        sent = [
            (slot, slot.lease)
            for slot in self.slots.values()
            if slot.lease is not None and slot.lease is not lease and slot.lease.sent_at is not None
        ]
        if not sent:
            return []
        readings = {reading.id: reading for reading in await self._book.look_at_all()}
        ending = []
        for slot, other in sent:
            reading = readings.get(slot.number)
            if (
                reading is None
                or slot.lease is not other
                or other.reading is None
                or other.reading.task == reading.task
            ):
                continue
            if not reading.processing or _is_nearly_over(reading):
                ending.append(other)
        return ending

    async def _others_end(self) -> bool:
        """Whether another process has a slot whose request ends just now, or has left there what it has not saved yet."""
        taken = [slot for slot in self.slots.values() if slot.nobodys and slot.lock.taken()]
        if not taken:
            return False
        rows = {row.slot: row for row in await self._index.call(self._index.index.slots, self.name)}
        readings = {reading.id: reading for reading in await self._book.look_at_all()}
        for slot in taken:
            reading, row = readings.get(slot.number), rows.get(slot.number)
            if reading is None or not reading.tokens:
                continue
            if reading.processing:
                if _is_nearly_over(reading):
                    return True
            elif row is None or row.dirty or (row.task, row.tokens) != (reading.task, reading.tokens):
                return True
        return False

    # the plan and what comes of it

    async def _switched(self, lease: Lease, folder: CacheFolder, reading: SlotReading) -> Granted:
        slot, want = lease.place, lease.want
        if self._is_there(lease, folder):
            return Granted(Outcome.RESIDENT, tokens=reading.tokens)
        if not want.knows_itself and not self._worth_saving(slot):
            plan = make_plan(want, slot.resident, None, reading)
            if plan.erase and not self.actions.off:
                await self._erase(slot)
            return Granted(plan.outcome)
        identity = lease.identity = await self._book.identify(slot)
        works = self.actions.works_for(identity)
        at_home = self._shares(lease, slot) > 0
        if works and not at_home and self._worth_saving(slot):
            await self._save(slot, {want.key} if want.key else set())
        if not at_home:
            lease.safe.set()  # nobody waits for us while we wait for them
            await self._until_safe(lease)
        known = await folder.known(identity.model) if works and want.knows_itself else []
        mine = self._continue(lease, known)
        want = replace(want, key=lease.key)
        saved = await self._look_up(lease.key, identity, folder) if works and mine and lease.key is not None else None
        if saved is not None and self.rewinds and not (saved.rewound and shared_part(saved.chain, want.chain) == 1.0):
            saved = None  # such a model reuses nothing of a cache that the prompt does not continue to its end
        plan = make_plan(want, slot.resident, saved, reading, slot.min_tokens)
        donor = self._donor(lease, [] if self.rewinds else known, plan) if works else None
        if at_home and plan.save and works and self._worth_saving(slot):
            await self._save(slot, {key for key in (want.key, donor.cache.key if donor else None) if key})
        outcome, tokens = plan.outcome, reading.tokens if plan.outcome is Outcome.RESIDENT else 0
        if plan.restore and saved is not None and not self.actions.hung:
            lease.saved_tokens = saved.tokens
            outcome, tokens = await self._restore(lease, want, folder, saved, reading, identity), saved.tokens
        elif donor is not None and not self.actions.hung:
            outcome, tokens = await self._start_from(lease, want, donor, folder, reading, identity)
        if plan.erase and outcome is Outcome.COLD and not (self.actions.hung or self.actions.off):
            await self._erase(slot)
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
                await _within_reason(holder.safe)

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
        if want.key is not None or not want.chain:
            lease.key = want.key or want.session
            if want.key is None and lease.key in of_keys(slot for slot in self.slots.values() if slot is not place):
                lease.key = None  # nothing tells whether it is the same conversation
            return True
        here = [*self._residents(want, place), *known]
        others = [slot for slot in self.slots.values() if slot is not place and slot.resident is not None]
        left = {slot.resident.key for slot in others if slot.resident is not None and slot.resident.key is not None}
        dirty = {slot.resident.key for slot in others if slot.resident is not None and slot.resident.dirty}
        in_use = of_keys(self.slots.values()) | {key for key in dirty if key is not None}
        found = continued(want, here, in_use)
        if found is not None:
            lease.key = found.key
            for slot in others:
                if slot.resident is not None and slot.resident.key == found.key:
                    slot.resident = None  # what is left there is an old copy
            return True
        taken = in_use | left | {cache.key for cache in here}
        if want.session is not None and want.session not in taken:
            lease.key = want.session
            return True  # of another model, perhaps
        lease.key = f"{want.tag}_{uuid.uuid4().hex}"
        return False

    def _residents(self, want: Want, *slots: Slot) -> list[Known]:
        """What is in these slots, as far as it is of the request's route."""
        found = []
        for slot in slots:
            resident = slot.resident
            if resident is None or resident.key is None or resident.mark is None:
                continue
            if tag_of(resident.key) == want.tag:
                found.append(
                    Known(
                        resident.key,
                        resident.session,
                        resident.owner,
                        resident.chain,
                        resident.mark.tokens,
                        used=time.time(),
                    )
                )
        return found

    def _donor(self, lease: Lease, known: list[Known], plan: Plan) -> Donor | None:
        """What a request without a cache of its own starts from, if that is quicker than to compute it."""
        want, place = lease.want, lease.place
        if plan.outcome is not Outcome.COLD or not want.chain or lease.key is None:
            return None
        others = [
            slot for slot in self.slots.values() if slot is not place and slot.lease is None and not slot.yielding
        ]
        here = donor_of(want, self._residents(want, place))
        found = donor_of(want, [*self._residents(want, place, *others), *known])
        fewest = max(lease.folder.min_tokens if lease.folder else 0, 1)
        if found is None or found.tokens < fewest:
            return None
        if here is not None and here.links >= found.links:
            return here
        more = found.tokens - (here.tokens if here is not None else 0)
        calls = 1 if found.cache.size else 2  # one that is in another slot only is saved first
        return found if self.actions.speeds.restoring_pays(calls * found.cache.tokens, more) else here

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
        saved = await self._look_up(key, identity, folder)
        if saved is None or self.actions.hung:
            return Outcome.COLD, 0
        outcome = await self._restore(lease, want, folder, saved, reading, identity, donor=key)
        return (Outcome.DONOR, donor.tokens) if outcome is Outcome.RESTORED else (outcome, 0)

    async def _look_up(self, key: str, identity: Identity, folder: CacheFolder) -> Saved | None:
        found = await folder.look_up(key, identity.model)
        if found.problem in ("damaged", "other model"):
            self.gone.note(key, found.problem)
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

    async def _save(self, slot: Slot, protected: set[str]) -> bool:
        """Save the resident; it must be worth it. Returns whether there is a good save now."""
        resident, folder = slot.resident, slot.home
        if resident is None or resident.key is None or folder is None or not resident.model:
            return False
        after = await self.actions.save(slot.number, resident, folder)
        if after is None:
            self.gone.note(resident.key, "save failed")
            return False
        self.gone.back(resident.key)
        slot.resident = after
        self._task(self._tidy(folder, protected | {resident.key}))
        return True

    async def _restore(
        self,
        lease: Lease,
        want: Want,
        folder: CacheFolder,
        saved: Saved,
        reading: SlotReading,
        identity: Identity,
        donor: str | None = None,
    ) -> Outcome:
        slot = lease.place
        slot.resident = slot.seen_idle = None
        await self._book.write_down(slot)  # should this process die now, nobody may think that it is what it was
        slot.resident = await self.actions.restore(slot.number, want, saved, folder, reading, identity, donor)
        if slot.resident is None:
            return Outcome.COLD
        slot.home, slot.empty = folder, False
        if shared_part(saved.chain, want.chain) >= 0.5:
            lease.restored, lease.restored_rewound = saved.tokens, saved.rewound
        return Outcome.RESTORED

    async def _erase(self, slot: Slot) -> None:
        slot.resident = None
        await self._book.write_down(slot)
        await self.actions.erase(slot.number, "its tokens may belong to another key")

    async def _sweep(self, folder: CacheFolder) -> None:
        swept = await folder.sweep()
        if swept:
            report.info("route %s: %d left-overs of broken saves and vanished files", report.shown(folder.route), swept)

    async def _tidy(self, folder: CacheFolder, protected: set[str]) -> None:
        enforced = await folder.enforce_limits(protected)
        for file in enforced.dropped:
            self.actions.counts["evictions"] += 1
            self.gone.note(file.key, "evicted")
            self._tell(
                Event(
                    "evict",
                    server=self.server.shown,
                    key=file.key,
                    route=folder.route,
                    tokens=file.tokens,
                    bytes=file.size,
                )
            )
            report.info("delete %s: %.1f MB, over the route's limit", file.key, file.size / 1e6)
        if enforced.alone_over is not None:
            self._once.warn(
                ("alone", folder.tag),
                "one cache alone is over max_gib: %s has %.1f MB",
                enforced.alone_over.key,
                enforced.alone_over.size / 1e6,
            )

    def _no_locks(self, error: OSError) -> None:
        self._once.warn(("lock",), "no locks between workers: %s", error)

    # after a request

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

    async def _settle(self, slot: Slot, epoch: int, idle_seconds: float, sent: bool) -> None:
        """Nobody waits: mark what the request has left, let other processes have the slot, wait for the idle save."""
        if sent and not (slot.locked and slot.lock.contended()):
            await asyncio.sleep(SETTLE_SECONDS)
            if slot.epoch != epoch:
                return
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
                    reading = await self._book.look(slot.number)
            except LlamaServerError as error:  # a time-out is nothing: a batch of another slot's prompt may be long
                failed += error.fault != "timeout"
            if slot.epoch != epoch:
                return
            if gone or failed >= FAILED_LOOKS:
                slot.resident = None  # to look would load or wake it; or it is too late to tell whose that is
                break
            if reading is not None and not reading.processing:
                self._book.judge(slot, reading)
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
        if self.clears_idle and self._gate.occupied and slot.home is not None:
            await self._put_away(slot)  # somebody is about to start
            return
        self._plan_idle_save(slot, idle_seconds)
        if not slot.locked:
            return
        await self._book.write_down(slot)
        if slot.epoch == epoch:
            self._queue.unlock(slot)

    def _plan_idle_save(self, slot: Slot, idle_seconds: float) -> None:
        if self.clears_idle:
            idle_seconds = min(idle_seconds or CLEARING_IDLE_SECONDS, CLEARING_IDLE_SECONDS)
        resident = slot.resident
        if idle_seconds > 0 and resident is not None and resident.key is not None and resident.dirty:
            slot.idle_timer = asyncio.get_running_loop().call_later(
                idle_seconds, lambda: self._task(self._idle_save(slot, slot.epoch, idle_seconds))
            )

    async def _idle_save(self, slot: Slot, epoch: int, idle_seconds: float) -> None:
        """Save what nobody has used for a while. Does not wake the server, and waits for nobody."""
        if slot.epoch != epoch:
            return
        tries = slot.idle_tries + 1
        if not await self._put_away(slot) and slot.lease is None and tries < IDLE_TRIES:
            slot.idle_tries = tries
            self._plan_idle_save(slot, idle_seconds)

    async def _put_away(self, slot: Slot) -> bool:
        """Take a slot that is free and save what is dirty in it. Returns whether nothing is left to be saved."""
        lease = self._hold_of(slot)
        if slot.lease is not None or slot.yielding or slot.home is None or not self._queue.try_take(lease):
            return True  # somebody uses it, and will see to it
        saved = False
        try:
            saved = await self._saved_idle(slot)
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
        self._free(slot, lambda: self._let_go(slot, slot.epoch))

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
        numbers = {*self.slots, *(row.slot for row in rows)}
        if not asleep:  # another worker may have taken one of which nothing is written down yet
            numbers |= {reading.id for reading in await self._readings()}
        taken: list[Slot] = []
        done = False
        try:
            for number in sorted(numbers):
                slot = self._queue.slot(number)
                if not await self._hold(slot, wait, first):
                    return None
                taken.append(slot)
                if self.clears_idle and not asleep:  # those that we wait for wait until nothing can be lost here
                    await self._saved_idle(slot)
                    if slot.lease is not None:
                        slot.lease.safe.set()
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

    async def _hold(self, slot: Slot, wait: float, first: bool = False) -> bool:
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

    async def _save_before_end(self, slot: Slot, reading: SlotReading | None) -> None:
        if reading is None:
            slot.resident = None
            return
        self._book.judge(slot, reading)
        await self._save_if_worth(slot)

    async def _save_if_worth(self, slot: Slot) -> None:
        """Save what is in a slot that was just looked at, if that is of use with the model that the server runs now."""
        if self._worth_saving(slot):
            identity = await self._book.identify(slot)
            if self.actions.works_for(identity) and self._worth_saving(slot):
                await self._save(slot, set())

    async def _saved_idle(self, slot: Slot) -> bool:
        await self._book.read_up(slot)
        if self._host is not None and not await self._host.loaded():
            slot.resident = None
            return True
        identity = await self._book.identify(slot)
        if identity.sleeping:
            slot.resident = None
        elif not self.actions.works_for(identity):
            return False
        else:
            reading = await self._book.look(slot.number)
            if reading.processing:
                slot.resident = None
            else:
                self._book.judge(slot, reading)
                if self._worth_saving(slot):
                    return await self._save(slot, set())
        return True

    def _worth_saving(self, slot: Slot) -> bool:
        resident = slot.resident
        if resident is None or resident.mark is None or not worth_saving(resident, slot.min_tokens):
            return False
        if self.rewinds and not resident.rewound:
            return False  # a restore would be of no use
        return self.actions.speeds.restoring_pays(resident.mark.tokens, resident.mark.tokens)

    async def _let_go(self, slot: Slot, epoch: int) -> None:
        if slot.locked and slot.epoch == epoch:
            await self._book.write_down(slot)
            if slot.epoch == epoch:
                self._queue.unlock(slot)

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class Vacated:
    """The slots of a server, taken and saved, because its model is about to go."""

    def __init__(self, switcher: SlotSwitcher, slots: list[Slot]) -> None:
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
    want, reading, identity = lease.want, lease.reading, lease.identity
    same = before if before is not None and before.key is not None and before.key == lease.key else None
    chain = want.chain
    if (
        ending is not Ending.ANSWERED and same is not None
    ):  # how far it came is not known: what both begin with is there
        chain = shared_chain(same.chain, want.chain) or chain
    return Resident(
        key=lease.key,
        session=want.session,
        owner=want.owner,
        dirty=True,
        task_before=reading.task if reading else None,
        tokens_before=before.mark.tokens if before and before.mark else reading.tokens if reading else 0,
        before=replace(before, before=None) if before else None,
        whole=ending is Ending.ANSWERED,
        saved_tokens=max(same.saved_tokens if same else 0, lease.saved_tokens),
        model=identity.model if identity else same.model if same else "",
        boot=identity.boot if identity else same.boot if same else "",
        chain=chain,
    )


async def _within_reason(event: asyncio.Event) -> None:
    """Wait for what another request is to do, but not for ever."""
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), SAFE_SECONDS)


def _is_nearly_over(reading: SlotReading) -> bool:
    """Whether the answer may end before another request has started."""
    return reading.remaining is not None and reading.remaining <= NEARLY_OVER_TOKENS
