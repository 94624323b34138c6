"""Leases that nobody gave back: while somebody waits for a slot, it is found that the request in it has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from slot_cache import report
from slot_cache.leases import Lease, LeaseQueue, Slot
from slot_cache.llama_server import LlamaServerError
from slot_cache.slot_book import SlotBook
from slot_cache.state import Ending

LOST_AFTER_SECONDS = 5.0
UNSEEN_AFTER_SECONDS = 30.0
LOST_CONFIRM_SECONDS = 1.0
"""A lease that nobody gave back, while somebody waits: the slot is looked at from `LOST_AFTER_SECONDS` after its request
was let go, and is free when it is idle twice, `LOST_CONFIRM_SECONDS` apart. Where the server has not seen the request at
all, it may still be on its way: `UNSEEN_AFTER_SECONDS`."""


class LostLeases:
    """Finds them.

    Args:
        queue: the slots, and who waits for them.
        book: looks at the slots.
        shown: the server, for the log.
        start: starts a task that is ended with the owner.
    """

    def __init__(
        self,
        queue: LeaseQueue,
        book: SlotBook,
        *,
        shown: str,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._queue = queue
        self._book = book
        self._shown = shown
        self._start = start

    def watch(self, slot: Slot) -> None:
        """Have an eye on a slot for as long as somebody has it."""
        if slot.watch is None or slot.watch.done():
            slot.watch = self._start(self._find_lost_lease(slot))

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
            held = self._queue.clock() - lease.sent_at
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
                idle_since = self._queue.clock()
                await asyncio.sleep(LOST_CONFIRM_SECONDS)
            else:
                report.info("%s slot %d: its request ended without a word, the slot is free", self._shown, slot.number)
                slot.disturbed = slot.disturbed or seen  # nothing tells who has used it last
                lease.release(Ending.BROKEN)
                return
