"""Servers that clear idle slots: such a server empties every idle slot when a task starts in any.

So requests go to it one at a time, through a gate: what is dirty in other slots is saved before one is let go, and the next
one comes in when that one has started.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from slot_cache.leases import SAFE_SECONDS, Lease, LeaseQueue, NoTurnError, Slot, within_reason
from slot_cache.llama_server import LlamaServerError
from slot_cache.slot_actions import SlotActions
from slot_cache.slot_book import BUSY_PAUSES, SlotBook
from slot_cache.slot_files import SlotFiles
from slot_cache.start_gate import StartGate
from slot_cache.state import SlotReading

START_PAUSES = (0.01, 0.01, 0.02, 0.04, 0.08, 0.16, 0.3, 0.5, 0.9)
"""When it is looked whether a request has started that was let go; after the last of these pauses it is taken that it has."""

NEARLY_OVER_TOKENS = 16
"""A request with so few tokens left may end before another one has started, and lose what it has left in its slot."""


class Clearing:
    """Sees that nothing is lost when a request starts on such a server.

    Args:
        queue: the slots and who has them.
        book: what is in them, and whether the server clears idle ones.
        actions: whether the server hangs.
        files: saves what is in a slot that is held.
        put_away: takes a slot that is free and saves what is dirty in it; returns whether nothing is left to be saved.
    """

    def __init__(
        self,
        queue: LeaseQueue,
        book: SlotBook,
        actions: SlotActions,
        files: SlotFiles,
        put_away: Callable[[Slot], Awaitable[bool]],
    ) -> None:
        self._queue = queue
        self._book = book
        self._actions = actions
        self._files = files
        self._put_away = put_away
        self._gate = StartGate(queue.lock_folder, f"{queue.digest}-start")

    @property
    def expected(self) -> bool:
        """Whether it must be taken that a task's start empties the server's idle slots."""
        return self._book.clears is not False and (self._queue.count or 1) > 1

    @property
    def starting(self) -> bool:
        """Whether a request of this process is inside the gate."""
        return self._gate.occupied

    async def enter(
        self, lease: Lease, deadline: float, look: Callable[[], Awaitable[SlotReading | None]] | None = None
    ) -> None:
        """Wait until the lease is inside the gate.

        Args:
            lease: it must `leave`.
            deadline: on the queue's clock.
            look: looks at the lease's slot; if it must wait, what is dirty there is saved first, before others start. None:
                nothing is.

        Raises:
            LlamaServerError: the server does not answer.
            NoTurnError: others did not start in time.
        """
        try:
            lease.inside = await self._gate.try_enter()
            if not lease.inside:
                if look is not None:
                    await self._save_first(lease, look)
                lease.safe.set()
                lease.inside = await self._gate.enter(max(deadline - self._queue.clock(), 0.001))
            if not lease.inside:
                raise NoTurnError("other requests did not start")
            if self._actions.hung:
                raise NoTurnError("the server did not answer")
        except OSError as error:
            self._queue.no_locks(error)

    def leave(self, lease: Lease) -> None:
        """Let the next one in. A plain call; one that is not inside does nothing."""
        if lease.inside:
            lease.inside = False
            self._gate.leave()

    async def see_start(self, lease: Lease) -> None:
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
            self.leave(lease)

    async def _save_first(self, lease: Lease, look: Callable[[], Awaitable[SlotReading | None]]) -> None:
        """Save what is dirty in the lease's slot before others start, while it waits for the gate."""
        slot = lease.place
        reading = await look()
        if reading is not None and not reading.processing:
            await self._files.save_if_worth(slot)
        if self._queue.lock_folder is not None and reading is not None and slot.lease is lease:
            await self._book.give_up(slot, reading)
        lease.safe.set()

    async def put_others_away(self, lease: Lease) -> None:
        """See that what is dirty in idle slots is saved, for the start of a request empties them; at the end stands a look
        that found nothing to be done, so that little time is left for another request to end.

        Raises:
            LlamaServerError: the server does not answer.
        """
        until = self._queue.clock() + SAFE_SECONDS
        failed: set[Slot] = set()
        while await self._put_some_away(lease, failed) and self._queue.clock() < until:
            if self._actions.hung:
                raise LlamaServerError("timeout", "a save timed out")

    async def _put_some_away(self, lease: Lease, failed: set[Slot]) -> bool:
        """Do what is to be done now, but for the slots that it has failed for. Returns whether there was anything."""
        acted = await self._others_end()
        if acted:
            await asyncio.sleep(BUSY_PAUSES[1])
        await self._book.refresh()
        for other in await self._ending(lease):
            acted = True
            await within_reason(other.done)
        for slot in list(self._queue.slots.values()):
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
                await within_reason(holder.safe)  # it has its slot from one that has just ended
        return acted

    def _is_unsaved(self, slot: Slot) -> bool:
        return slot.unmarked or self._files.worth_saving(slot)

    async def _ending(self, lease: Lease) -> list[Lease]:
        """The leases whose requests end just now, or have ended at the server, though we were not told so yet."""
        sent = [
            (slot, slot.lease)
            for slot in self._queue.slots.values()
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
        taken = [slot for slot in self._queue.slots.values() if slot.nobodys and slot.lock.taken()]
        if not taken:
            return False
        rows = await self._book.written()
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


def _is_nearly_over(reading: SlotReading) -> bool:
    """Whether the answer may end before another request has started."""
    return reading.remaining is not None and reading.remaining <= NEARLY_OVER_TOKENS
