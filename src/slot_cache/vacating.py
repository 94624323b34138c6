"""All slots of a server are taken at once and saved, because its model is about to be unloaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from slot_cache.clearing import Clearing
from slot_cache.leases import LeaseQueue, Slot
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.slot_book import SlotBook
from slot_cache.slot_files import SlotFiles
from slot_cache.state import SlotReading


class Vacated:
    """The slots of a server, taken and saved, because its model is about to go."""

    def __init__(self, slots: list[Slot], give_back: Callable[[Slot], None]) -> None:
        self._slots = slots
        self._give_back = give_back

    def end(self, *, gone: bool) -> None:
        """Give the slots back. With `gone` they are empty now. A plain call; a second one does nothing."""
        slots, self._slots = self._slots, []
        for slot in slots:
            if gone:
                slot.resident = None
            self._give_back(slot)


class Vacating:
    """Takes and saves them.

    Args:
        server: the server.
        queue: the slots.
        book: what is in them.
        files: saves it.
        clearing: whether the server clears idle slots.
        hold: takes a slot for work of our own, waiting so many seconds (in turn, or as the next one); returns whether it has it.
        give_back: gives such a slot back.
    """

    def __init__(
        self,
        server: LlamaServer,
        queue: LeaseQueue,
        book: SlotBook,
        files: SlotFiles,
        clearing: Clearing,
        *,
        hold: Callable[[Slot, float, bool], Awaitable[bool]],
        give_back: Callable[[Slot], None],
    ) -> None:
        self._server = server
        self._queue = queue
        self._book = book
        self._files = files
        self._clearing = clearing
        self._hold = hold
        self._give_back = give_back

    async def vacate(self, wait: float, *, first: bool, asleep: bool) -> Vacated | None:
        """As `SlotSwitcher.vacate` says."""
        written = await self._book.written()
        numbers = {*self._queue.slots, *written}
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
                if self._clearing.expected and not asleep:  # those that we wait for wait until nothing can be lost here
                    await self._files.save_idle(slot)
                    if slot.lease is not None:
                        slot.lease.safe.set()
            readings = {} if asleep else {reading.id: reading for reading in await self._readings()}
            if any(reading.processing for reading in readings.values()):
                return None
            for slot in taken:
                await self._save(slot, readings.get(slot.number))
            done = True
            return Vacated(taken, self._give_back)
        finally:
            if not done:
                for slot in taken:
                    self._give_back(slot)

    async def _readings(self) -> list[SlotReading]:
        try:
            return await self._server.slots()
        except LlamaServerError as error:
            if error.status != 400:
                raise
            return []  # it is unloaded already

    async def _save(self, slot: Slot, reading: SlotReading | None) -> None:
        if reading is None:
            slot.resident = None
            return
        self._book.judge(slot, reading)
        await self._files.save_if_worth(slot)
