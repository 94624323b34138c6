"""What is in the slots of one server: what the server says of them, and what is written down for other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slot_cache import report
from slot_cache.events import Event
from slot_cache.folder import CacheFolder, tag_of
from slot_cache.gone import Gone
from slot_cache.index import IndexThread, SlotRow
from slot_cache.leases import LeaseQueue, Slot
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.model import Identity
from slot_cache.plan import Found, judge
from slot_cache.slot_actions import SlotActions
from slot_cache.state import Mark, Resident, SlotReading
from slot_cache.transport import Begun

BUSY_PAUSES = (0.01, 0.03, 0.1, 0.3)
BUSY_SECONDS = 1.3
"""When a slot is looked at again that a request without our lease keeps busy: a few times soon, for a stream that was
broken off is noticed at its next token, then seldom. The server notices that a client which awaits a whole answer has
left only when it has had no other call for a second; looking more often would keep such a request alive."""


@dataclass(frozen=True)
class Look:
    """A look that was begun: the free slots as they were known then, and what the server was asked."""

    free: dict[int, tuple[int, Resident | None]]
    begun: Begun

    def drop(self, _: object = None) -> None:
        """It is over, or not wanted any more."""
        self.begun.drop()


class SlotBook:
    """Keeps `Slot.resident` and what else is known of each slot at what is true.

    Args:
        server: the server.
        actions: told when the server was started again, and of its model.
        queue: the slots.
        index: where what is in them is written down.
        name: the server's name there.
        lock_folder: the folder of the locks between processes; None: there is no other process.
        clock: seconds.
        gone: told of caches that are not there any more.
        tell: is told what happens.

    Attributes:
        identity: the server's model and process, as it was last told; None: not known.
        clears: whether a task's start empties the server's idle slots; None: not seen yet.
        news: grows whenever other processes turn out to have used slots.
    """

    def __init__(
        self,
        server: LlamaServer,
        actions: SlotActions,
        queue: LeaseQueue,
        index: IndexThread,
        *,
        name: str,
        lock_folder: Path | None,
        clock: Callable[[], float],
        gone: Gone,
        tell: Callable[[Event], None],
    ) -> None:
        self.identity: Identity | None = None
        self.clears: bool | None = None
        self.news = 0
        self._server = server
        self._actions = actions
        self._queue = queue
        self._index = index
        self._name = name
        self._lock_folder = lock_folder
        self._clock = clock
        self._gone = gone
        self._tell = tell
        self._newest = -1
        """the newest task that the last look has shown"""
        self._computing = False
        """the last look has shown a request at work"""

    def judge(self, slot: Slot, reading: SlotReading) -> None:
        """What a look tells of an idle slot."""
        before = slot.resident
        found, slot.resident = judge(before, reading)
        if slot.resident is None:
            self._gone.lost(before, found)
        slot.empty = slot.resident is None and (reading.task is None or reading.tokens == 0)
        mark = before.mark if before is not None else None
        untouched = mark is not None and mark.tokens > 0 and mark.task == reading.task
        ours = slot.locked or not slot.lock.touched()  # else another process may have put something there
        if (
            untouched and ours and slot.seen_idle is not None and slot.seen_idle < self._newest
        ):  # a task started elsewhere
            self.clears = reading.tokens == 0
        slot.seen_idle = self._newest if slot.resident is not None else None
        if found is Found.RESTARTED:
            report.info(
                "%s slot %d: the server was started again, or slept: its slots are empty",
                self._server.shown,
                slot.number,
            )
            self._tell(Event("restart", server=self._server.shown, slot=slot.number))
            self._actions.restarted()
            self.identity = None
            self.clears = None

    def begin_look(self) -> Look | None:
        """Ask the server, and look at the answer later (`look`); None where that would have to wait. A plain call that never
        fails. What it returns must be dropped in the end."""
        begun = self._server.begin_slots()
        return None if begun is None else Look(self._free(), begun)

    async def look(self, number: int, look: Look | None = None) -> SlotReading:
        """Look at one slot, by what was answered to `look` if that was begun."""
        readings = await self.look_at_all(number, look)
        for reading in readings:
            if reading.id == number:
                return reading
        raise LlamaServerError("refused", f"the server has no slot {number}, it has {len(readings)}")

    async def look_at_all(self, but: int | None = None, look: Look | None = None) -> list[SlotReading]:
        """Look at the slots; what is learned of the idle ones that nobody has is noted, but for one."""
        before = self._free() if look is None else look.free
        readings = await self._server.slots(None if look is None else look.begun)
        self._computing = any(reading.processing for reading in readings)
        self._newest = max((reading.task for reading in readings if reading.task is not None), default=-1)
        for reading in readings:
            slot = self._queue.slot(reading.id)
            slot.reading = reading
            known = before.get(reading.id) == (slot.epoch, slot.resident)
            if reading.id != but and known and slot.lease is None and not slot.yielding:
                self._note(slot, reading)
        gone = set(self._queue.slots) - {reading.id for reading in readings}
        for number in gone:  # the server was started again with fewer
            if self._queue.slots[number].lease is None:
                self._queue.slots[number].resident = None
        if self._queue.count != len(readings):
            self._queue.count = len(readings)
            self._queue.hand_on_all()
        return readings

    def _free(self) -> dict[int, tuple[int, Resident | None]]:
        """The slots that nobody has, and what tells later that they are as they were."""
        return {slot.number: (slot.epoch, slot.resident) for slot in self._queue.slots.values() if slot.lease is None}

    def _note(self, slot: Slot, reading: SlotReading) -> None:
        slot.strangers = reading.processing and not slot.perhaps_busy
        if slot.strangers:
            slot.resident = None
        elif not reading.processing:
            self.judge(slot, reading)

    async def has_a_reason(self) -> bool:
        """Whether a server that does not answer in time is busy with what we know of: a batch of a prompt, or waking up."""
        slots = self._queue.slots.values()
        sent = any(slot.lease is not None and slot.lease.sent_at is not None for slot in slots)
        if sent or self._computing or any(slot.perhaps_busy for slot in slots):
            return await self._server.alive()
        try:
            return await self._server.sleeping()
        except LlamaServerError:
            return False

    async def identify(self, slot: Slot) -> Identity:
        """Ask which model the server runs. What another process or model of it computed is not in the slot any more."""
        identity = await self._server.identity(self.identity)
        if self.identity is not None and identity.boot != self.identity.boot:
            self._actions.restarted()
        self.identity = identity
        if not self._actions.knows_kind(identity):
            kind = await self._index.call(self._index.index.kind, identity.kind_key)
            given_up = await self._index.call(self._index.index.kind, identity.useless_key(self._name))
            self._actions.recall_kind(identity, kind, given_up)
        resident = slot.resident
        if (
            resident is not None
            and resident.model
            and (resident.model, resident.boot) != (identity.model, identity.boot)
        ):
            self._gone.lost(resident, Found.RESTARTED)
            slot.resident = None
        return identity

    async def read_up(self, slot: Slot) -> None:
        """Learn what other processes have left in a slot whose lock was taken from them."""
        if slot.unread:
            self.news += 1
            self._heed(slot, await self._index.call(self._index.index.slot, self._name, slot.number))
            slot.unread = False

    async def refresh(self) -> None:
        """Learn what other processes have left in the free slots that they have used since."""
        first = self._queue.count is None
        if not first and (self._lock_folder is None or self._queue.count == 1):
            return
        touched = [slot for slot in self._queue.slots.values() if slot.nobodys and (slot.unread or slot.lock.touched())]
        if not (touched or first):
            return
        self.news += 1
        rows = await self.written()
        if first:
            touched += [self._queue.slot(number) for number in rows if number not in self._queue.slots]
        for slot in touched:
            if slot.nobodys:
                self._heed(slot, rows.get(slot.number))
                slot.unread = False  # whoever has it after this leaves a mark in its lock

    def _heed(self, slot: Slot, row: SlotRow | None) -> None:
        known, slot.seen_idle = slot.resident, None
        if row is None:
            slot.resident = None
        elif known is None or (known.key, known.mark, known.dirty) != (row.key, Mark(row.task, row.tokens), row.dirty):
            slot.resident = _resident_of(row)
            slot.home = self._home_of(row, slot.home)
            slot.used = self._clock()
            slot.strangers = False  # whoever has written it down was done

    async def give_up(self, slot: Slot, reading: SlotReading) -> None:
        """Record that other processes need not wait until what is in a slot is saved: it is, or cannot be."""
        row = row_of(self._name, slot)
        if row is None or row.dirty:
            row = SlotRow(
                self._name,
                slot.number,
                key=None,
                owner=None,
                folder="",
                route="",
                task=reading.task or 0,
                tokens=reading.tokens,
                dirty=False,
                whole=False,
                saved_tokens=0,
            )
        await self._index.call(self._index.index.put_slot, row)

    async def written(self) -> dict[int, SlotRow]:
        """What processes have written down of the slots, by number."""
        return {row.slot: row for row in await self._index.call(self._index.index.slots, self._name)}

    async def write_down(self, slot: Slot) -> None:
        """Record what is in a slot, for other processes and for after a restart."""
        row = row_of(self._name, slot)
        if row is None:
            await self._index.call(self._index.index.drop_slot, self._name, slot.number)
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
        return CacheFolder(self._index, tag=tag, route=row.route, server=self._name, path=path)


def row_of(server: str, slot: Slot) -> SlotRow | None:
    resident = slot.resident
    if resident is None or resident.mark is None or slot.home is None:
        return None
    return SlotRow(
        server=server,
        slot=slot.number,
        key=resident.key,
        session=resident.session,
        owner=resident.owner,
        rewound=resident.rewound,
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
        session=row.session,
        owner=row.owner,
        rewound=row.rewound,
        dirty=row.dirty,
        mark=Mark(row.task, row.tokens),
        whole=row.whole,
        saved_tokens=row.saved_tokens,
        model=row.model,
        boot=row.boot,
        chain=row.chain,
    )
