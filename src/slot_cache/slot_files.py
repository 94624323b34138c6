"""What is in slots is saved to files, and files are restored into slots.

`slot_actions` carries a save or restore out; here it is decided whether one is of use, and what is known of the slot, of the
folder and of lost caches is kept at what is true.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from slot_cache import report
from slot_cache.events import Event
from slot_cache.folder import CacheFolder
from slot_cache.gone import Gone
from slot_cache.host import Host
from slot_cache.leases import Lease, Slot
from slot_cache.model import Identity
from slot_cache.plan import worth_saving
from slot_cache.prompt import shared_part
from slot_cache.slot_actions import SlotActions
from slot_cache.slot_book import SlotBook
from slot_cache.state import Outcome, Saved, SlotReading, Want


class SlotFiles:
    """The way between the slots of one server and their caches' files. A caller of what is async holds the slot.

    Args:
        actions: carries saves, restores and erasures out.
        book: what is in the slots.
        gone: told of caches that are not there any more, or are again.
        host: what loads the server's model, if it is one of a router.
        once: for warnings.
        start: starts a task that is ended with the owner.
        tell: is told what happens.
    """

    def __init__(
        self,
        actions: SlotActions,
        book: SlotBook,
        *,
        gone: Gone,
        host: Host | None,
        once: report.Once,
        start: Callable[[Coroutine[Any, Any, None]], object],
        tell: Callable[[Event], None],
    ) -> None:
        self._actions = actions
        self._book = book
        self._gone = gone
        self._host = host
        self._once = once
        self._start = start
        self._tell = tell
        self._shown = actions.server.shown

    @property
    def rewinds(self) -> bool:
        """Whether slots are rewound after their requests."""
        return self._actions.needs_rewind(self._book.identity)

    # saves

    def worth_saving(self, slot: Slot) -> bool:
        """Whether a save of what is in a slot would be of use."""
        resident = slot.resident
        if resident is None or resident.mark is None or not worth_saving(resident, slot.min_tokens):
            return False
        if self.rewinds and not resident.rewound:
            return False  # a restore would be of no use
        return self._actions.speeds.restoring_pays(resident.mark.tokens, resident.mark.tokens)

    async def save(self, slot: Slot, protected: set[str]) -> bool:
        """Save the resident; it must be worth it. Returns whether there is a good save now.

        Args:
            slot: the slot.
            protected: caches whose files are not deleted to make room for it.
        """
        resident, folder = slot.resident, slot.home
        if resident is None or resident.key is None or folder is None or not resident.model:
            return False
        after = await self._actions.save(slot.number, resident, folder)
        if after is None:
            self._gone.note(resident.key, "save failed")
            return False
        self._gone.back(resident.key)
        slot.resident = after
        self._start(self._tidy(folder, protected | {resident.key}))
        return True

    async def save_if_worth(self, slot: Slot) -> None:
        """Save what is in a slot that was just looked at, if that is of use with the model that the server runs now."""
        if self.worth_saving(slot):
            identity = await self._book.identify(slot)
            if self._actions.works_for(identity) and self.worth_saving(slot):
                await self.save(slot, set())

    async def save_idle(self, slot: Slot) -> bool:
        """Look at a slot that was idle and save what is dirty in it; a server that sleeps is not woken for it.

        Returns whether nothing is left to be saved.
        """
        await self._book.read_up(slot)
        if self._host is not None and not await self._host.loaded():
            slot.resident = None
            return True
        identity = await self._book.identify(slot)
        if identity.sleeping:
            slot.resident = None
        elif not self._actions.works_for(identity):
            return False
        else:
            reading = await self._book.look(slot.number)
            if reading.processing:
                slot.resident = None
            else:
                self._book.judge(slot, reading)
                if self.worth_saving(slot):
                    return await self.save(slot, set())
        return True

    # restores

    async def look_up(self, key: str, identity: Identity, folder: CacheFolder) -> Saved | None:
        """The file of a cache, if there is one that this model may restore."""
        found = await folder.look_up(key, identity.model)
        if found.problem in ("damaged", "other model"):
            self._gone.note(key, found.problem)
        if found.problem == "damaged":
            self._actions.counts["damaged files"] += 1
            report.logger.warning("slot-cache: delete %s: the file is not what was saved", key)
        elif found.problem == "other model":
            self._actions.counts["other model"] += 1
            self._once.warn(
                ("other model", folder.tag, identity.model),
                "%s: what is saved for route %s is another model's and is not restored; this one is %s",
                self._shown,
                report.shown(folder.route),
                report.shown(identity.name),
            )
        return found.saved

    async def restore(
        self,
        lease: Lease,
        want: Want,
        folder: CacheFolder,
        saved: Saved,
        reading: SlotReading,
        identity: Identity,
        donor: str | None = None,
    ) -> Outcome:
        """Restore what was looked up into the lease's slot: the cache of `want`, or as its beginning that of `donor`.

        Returns `RESTORED`, or `COLD` where it failed.
        """
        slot = lease.place
        slot.resident = slot.seen_idle = None
        await self._book.write_down(slot)  # should this process die now, nobody may think that it is what it was
        slot.resident = await self._actions.restore(slot.number, want, saved, folder, reading, identity, donor)
        if slot.resident is None:
            return Outcome.COLD
        slot.home, slot.empty = folder, False
        if shared_part(saved.chain, want.chain) >= 0.5:
            lease.restored, lease.restored_rewound = saved.tokens, saved.rewound
        return Outcome.RESTORED

    async def erase(self, slot: Slot) -> None:
        """Empty a slot whose tokens the next request must not see."""
        slot.resident = None
        await self._book.write_down(slot)
        await self._actions.erase(slot.number, "its tokens may belong to another key")

    # the folder

    async def sweep(self, folder: CacheFolder) -> None:
        """Clear up what a process that died has left in a folder."""
        swept = await folder.sweep()
        if swept:
            report.info("route %s: %d left-overs of broken saves and vanished files", report.shown(folder.route), swept)

    async def _tidy(self, folder: CacheFolder, protected: set[str]) -> None:
        enforced = await folder.enforce_limits(protected)
        for file in enforced.dropped:
            self._actions.counts["evictions"] += 1
            self._gone.note(file.key, "evicted")
            self._tell(
                Event(
                    "evict",
                    server=self._shown,
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
