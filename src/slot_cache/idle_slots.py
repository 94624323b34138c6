"""Slots that nobody waits for: what their last request has left is looked at, other processes may have them, and what stays
unused is saved after a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from slot_cache.clearing import Clearing
from slot_cache.host import Host
from slot_cache.leases import LeaseQueue, Slot
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.slot_book import BUSY_PAUSES, BUSY_SECONDS, SlotBook

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


class IdleSlots:
    """What is done with the slots of one server when their requests have ended.

    Args:
        server: the server.
        queue: the slots.
        book: what is in them.
        clearing: whether the server clears idle slots, and whether a request is about to start.
        host: what loads the server's model, if it is one of a router.
        put_away: takes a slot that is free and saves what is dirty in it; returns whether nothing is left to be saved.
        start: starts a task that is ended with the owner.
    """

    def __init__(
        self,
        server: LlamaServer,
        queue: LeaseQueue,
        book: SlotBook,
        clearing: Clearing,
        *,
        host: Host | None,
        put_away: Callable[[Slot], Awaitable[bool]],
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._server = server
        self._queue = queue
        self._book = book
        self._clearing = clearing
        self._host = host
        self._put_away = put_away
        self._start = start

    async def settle(self, slot: Slot, epoch: int, idle_seconds: float, sent: bool) -> None:
        """Nobody waits: mark what the request has left, let other processes have the slot, wait for the idle save.

        Args:
            slot: the slot.
            epoch: its epoch when the request had ended; once it is another one, somebody else sees to the slot.
            idle_seconds: when the idle save is due, 0: never.
            sent: a request was sent there.
        """
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
                    gone = await self._server.sleeping()
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
        if self._clearing.expected and self._clearing.starting and slot.home is not None:
            await self._put_away(slot)  # somebody is about to start
            return
        self._plan_idle_save(slot, idle_seconds)
        await self.let_go(slot, epoch)

    async def let_go(self, slot: Slot, epoch: int) -> None:
        """Let other processes have a slot of which all is known."""
        if slot.locked and slot.epoch == epoch:
            await self._book.write_down(slot)
            if slot.epoch == epoch:
                self._queue.unlock(slot)

    def _plan_idle_save(self, slot: Slot, idle_seconds: float) -> None:
        if self._clearing.expected:
            idle_seconds = min(idle_seconds or CLEARING_IDLE_SECONDS, CLEARING_IDLE_SECONDS)
        resident = slot.resident
        if idle_seconds > 0 and resident is not None and resident.key is not None and resident.dirty:
            slot.idle_timer = asyncio.get_running_loop().call_later(
                idle_seconds, lambda: self._start(self._idle_save(slot, slot.epoch, idle_seconds))
            )

    async def _idle_save(self, slot: Slot, epoch: int, idle_seconds: float) -> None:
        """Save what nobody has used for a while. Does not wake the server, and waits for nobody."""
        if slot.epoch != epoch:
            return
        tries = slot.idle_tries + 1
        if not await self._put_away(slot) and slot.lease is None and tries < IDLE_TRIES:
            slot.idle_tries = tries
            self._plan_idle_save(slot, idle_seconds)
