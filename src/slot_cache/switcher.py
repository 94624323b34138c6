"""The slots of one server: who may use each (leases), and the switches between conversations."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from slot_cache import report
from slot_cache.folder import CacheFolder, FolderError
from slot_cache.llama_server import UNKNOWN_BYTES_PER_TOKEN, LlamaServer, LlamaServerError
from slot_cache.plan import Found, judge, make_plan, worth_saving
from slot_cache.state import Ending, Mark, Outcome, Resident, SlotReading, Want

HUNG_SECONDS = 5.0
"""After a call timed out, requests go on without a switch for so long before the server is asked again."""

OFF_SECONDS = 60.0
"""After the server said that it does not do slot actions (501), it is not asked for one for so long."""

LOST_AFTER_SECONDS = 5.0
UNSEEN_AFTER_SECONDS = 30.0
LOST_CONFIRM_SECONDS = 1.0
"""A lease that nobody gave back, while somebody waits: the slot is looked at from `LOST_AFTER_SECONDS` after its request
was let go, and is free when it is idle twice, `LOST_CONFIRM_SECONDS` apart. Where the server has not seen the request at
all, it may still be on its way: `UNSEEN_AFTER_SECONDS`."""

LOOSE_SECONDS = 600.0
"""A request that went on without a slot is taken to be at the server for so long at most, if its end is not told."""

BUSY_FIRST_SECONDS = 0.01
BUSY_MOST_SECONDS = 0.5
"""How often a slot that somebody else's request keeps busy is looked at while one of ours waits: at first, at most."""


@dataclass(frozen=True)
class Granted:
    """What a lease came with: the outcome so far, and why a slot is not managed, if it is not."""

    outcome: Outcome
    why: str = ""


@dataclass
class _Slot:
    number: int
    lease: Lease | None = None
    waiters: deque[tuple[asyncio.Future[None], Lease]] = field(default_factory=deque)
    resident: Resident | None = None
    home: CacheFolder | None = None
    """the folder of the resident's route"""
    disturbed: bool = False
    """a request of ours that has no slot was at the server meanwhile, and may have used this one"""
    perhaps_busy: bool = False
    """its last request was broken off: the server may need a moment, or the rest of a batch, to notice"""
    epoch: int = 0
    """grows whenever the slot is taken or given back; what was begun before is out of date"""
    idle_timer: asyncio.TimerHandle | None = None
    idle_tries: int = 0
    watch: asyncio.Task[None] | None = None


class Lease:
    """The right to use a slot. `release` gives it back; whoever got a lease must see to that, on every road.

    Attributes:
        granted: what the switch came to; the slot is pinned only if the outcome is not `UNMANAGED`.
        slot: the slot's number.
        waited: seconds from asking to the end of the switch.
    """

    def __init__(
        self, switcher: SlotSwitcher, slot: _Slot, want: Want, folder: CacheFolder, idle_seconds: float
    ) -> None:
        self.want = want
        self.granted = Granted(Outcome.UNMANAGED)
        self.waited = 0.0
        self.active = True
        self.sent_at: float | None = None
        self._switcher = switcher
        self._slot = slot
        self._folder = folder
        self._idle_seconds = idle_seconds
        self._reading: SlotReading | None = None

    @property
    def slot(self) -> int:
        return self._slot.number

    def release(self, ending: Ending) -> None:
        """Give the slot back; the next waiter has it at once. A plain call that never fails; a second one does nothing."""
        if self.active:
            self.active = False
            self._switcher._ended(self, ending)


class _NoTurn(Exception):
    """The slot did not become free in the time a request may wait for it, or its server is gone."""


class SlotSwitcher:
    """The slots of one llama-server.

    One lease per slot at a time; requests for a slot are served in the order in which they came. While its lease is
    held nobody else switches a slot. All methods belong to one event loop.

    Args:
        server: the server.
        clock: seconds, for waits.
    """

    def __init__(self, server: LlamaServer, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.server = server
        self._clock = clock
        self._once = report.Once()
        self._slots: dict[int, _Slot] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hung_until = 0.0
        self._off_until = 0.0
        self._bytes_per_token: dict[str, float] = {}
        self._loose: dict[Lease, float] = {}

    def resident(self, slot: int) -> Resident | None:
        """What the slot holds, as far as is known."""
        return self._slots[slot].resident if slot in self._slots else None

    def leased(self) -> list[int]:
        """The slots that are leased now."""
        return [number for number, slot in self._slots.items() if slot.lease is not None]

    def waiting(self, slot: int) -> int:
        """How many requests wait for the slot."""
        entry = self._slots.get(slot)
        return 0 if entry is None else sum(not future.done() for future, _ in entry.waiters)

    async def aclose(self) -> None:
        """End the background work and the connections. Nothing is saved."""
        for slot in self._slots.values():
            if slot.idle_timer is not None:
                slot.idle_timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
        slot = self._slots.setdefault(number, _Slot(number))
        lease = Lease(self, slot, want, folder, idle_seconds)
        asked = self._clock()
        if asked < self._hung_until:
            return self._loosen(lease, "the server did not answer a moment ago")
        try:
            await self._take(slot, lease, queue_seconds)
        except _NoTurn as error:
            lease.waited = self._clock() - asked
            return self._loosen(lease, str(error))
        switch = self._task(self._switch(slot, lease, asked + queue_seconds))
        try:
            await asyncio.shield(switch)
        except asyncio.CancelledError:
            switch.add_done_callback(lambda _: lease.release(Ending.UNSENT))
            raise
        lease.waited = self._clock() - asked
        if lease.granted.outcome is Outcome.UNMANAGED:
            self._give_back(lease, Ending.UNSENT)
            return self._loosen(lease, lease.granted.why)
        lease.sent_at = self._clock()
        if slot.waiters:
            self._watch(slot)
        return lease

    def _loosen(self, lease: Lease, why: str) -> Lease:
        """Let a request go on without a slot; whatever slot it ends up in is no longer what we left there."""
        lease.granted = Granted(Outcome.UNMANAGED, why)
        self._loose[lease] = self._clock()
        for slot in self._slots.values():
            slot.disturbed = True
        return lease

    def _ended(self, lease: Lease, ending: Ending) -> None:
        if self._loose.pop(lease, None) is None:
            self._give_back(lease, ending)

    # the queue

    async def _take(self, slot: _Slot, lease: Lease, queue_seconds: float) -> None:
        if slot.lease is None:
            self._grant(slot, lease)
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        entry = (turn, lease)
        slot.waiters.append(entry)
        timer = loop.call_later(queue_seconds, _expire, turn)
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
        slot.epoch += 1
        if slot.idle_timer is not None:
            slot.idle_timer.cancel()
            slot.idle_timer = None

    def _give_back(self, lease: Lease, ending: Ending) -> None:
        slot = lease._slot
        if slot.lease is not lease:
            return
        if ending is not Ending.UNSENT and lease.granted.outcome is not Outcome.UNMANAGED:
            before, reading = slot.resident, lease._reading
            slot.resident = Resident(
                key=lease.want.key,
                owner=lease.want.owner,
                dirty=True,
                task_before=reading.task if reading else None,
                before=replace(before, before=None) if before else None,
                whole=ending is Ending.ANSWERED,
                saved_tokens=before.saved_tokens if before and before.key == lease.want.key else 0,
            )
            slot.home = lease._folder
            slot.perhaps_busy = ending is Ending.BROKEN
            if slot.disturbed:
                slot.resident = None
        slot.lease = None
        slot.epoch += 1
        slot.idle_tries = 0
        if not self._hand_on(slot):
            self._task(self._settle(slot, slot.epoch, lease._idle_seconds))

    def _hand_on(self, slot: _Slot) -> bool:
        while slot.waiters:
            turn, waiter = slot.waiters.popleft()
            if not turn.done():
                self._grant(slot, waiter)
                turn.set_result(None)
                return True
        return False

    def _watch(self, slot: _Slot) -> None:
        if slot.watch is None or slot.watch.done():
            slot.watch = self._task(self._find_lost_lease(slot))

    async def _find_lost_lease(self, slot: _Slot) -> None:
        idle_since: float | None = None
        watched: Lease | None = None
        while slot.waiters and slot.lease is not None:
            lease = slot.lease
            if lease is not watched or lease.sent_at is None:
                watched, idle_since = lease, None
                await asyncio.sleep(LOST_AFTER_SECONDS)
                continue
            held = self._clock() - lease.sent_at
            if held < LOST_AFTER_SECONDS:
                await asyncio.sleep(LOST_AFTER_SECONDS - held)
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
                lease.release(Ending.BROKEN)
                return

    # the switch

    async def _switch(self, slot: _Slot, lease: Lease, deadline: float) -> None:
        """Carry out the plan for a lease that was just granted. Raises nothing; `lease.granted` tells the result."""
        try:
            lease.granted = await self._switched(slot, lease, deadline)
        except LlamaServerError as error:
            self._fault(error)
            lease.granted = Granted(Outcome.UNMANAGED, str(error))
            slot.resident = None
        except _NoTurn as error:
            lease.granted = Granted(Outcome.UNMANAGED, str(error))
        except Exception as error:  # a fault of ours is never one of the request
            self._once.warn(("bug", type(error).__name__), "switch failed: %s", type(error).__name__)
            lease.granted = Granted(Outcome.UNMANAGED, f"internal fault {type(error).__name__}")
            slot.resident = None

    async def _switched(self, slot: _Slot, lease: Lease, deadline: float) -> Granted:
        reading = await self._look_until_idle(slot, deadline)
        if self._once.over(("server", self.server.base_url)):
            report.info("%s answers again", self.server.shown)
        slot.perhaps_busy = False
        found, slot.resident = judge(slot.resident, reading)
        if found is Found.RESTARTED:
            report.info("%s slot %d: the server was restarted", self.server.shown, slot.number)
        lease._reading = reading
        want, folder = lease.want, lease._folder
        actions_on = self._clock() >= self._off_until
        resident_wanted = want.key is not None and slot.resident is not None and slot.resident.key == want.key
        ask_disk = (
            want.key is not None and actions_on and not (resident_wanted and slot.resident and slot.resident.whole)
        )
        saved = await folder.find(want.key) if ask_disk and want.key is not None else None
        plan = make_plan(want, slot.resident, saved, reading)
        if plan.save and actions_on:
            await self._save(slot, protect=want.key)
            if self._clock() < self._hung_until:
                return Granted(Outcome.UNMANAGED, "the server did not answer")
        if plan.erase and actions_on:
            await self._erase(slot)
        if plan.restore and want.key is not None and saved is not None:
            outcome = await self._restore(slot, want.key, want.owner, saved.bytes, folder, reading)
            if self._clock() < self._hung_until:
                return Granted(Outcome.UNMANAGED, "the server did not answer")
        else:
            outcome = plan.outcome
            if outcome is Outcome.COLD and want.key is not None:
                report.info("%s slot %d: miss %s", self.server.shown, slot.number, want.key)
        return Granted(outcome)

    async def _look(self, number: int) -> SlotReading:
        readings = await self.server.slots()
        for reading in readings:
            if reading.id == number:
                return reading
        raise LlamaServerError("refused", f"the server has no slot {number}, it has {len(readings)}")

    async def _look_until_idle(self, slot: _Slot, deadline: float) -> SlotReading:
        pause = BUSY_FIRST_SECONDS
        while True:
            try:
                reading = await self._look(slot.number)
            except LlamaServerError as error:
                patient = error.fault == "timeout" and (slot.perhaps_busy or len(self.leased()) > 1)
                if not patient or self._clock() > deadline or not await self.server.alive():
                    raise
                continue
            if not reading.processing:
                return reading
            if self._clock() > deadline:
                raise _NoTurn("the slot did not become free")
            if not slot.perhaps_busy:
                slot.resident = None  # somebody else is in there
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, BUSY_MOST_SECONDS)

    async def _save(self, slot: _Slot, protect: str | None = None) -> bool:
        """Save the resident; it must be worth it. Returns whether there is a good save now."""
        resident, folder = slot.resident, slot.home
        if resident is None or resident.key is None or resident.mark is None or folder is None:
            return False
        key = resident.key
        where = ("save", self.server.base_url)
        started = self._clock()
        try:
            answer = await self.server.save(
                slot.number, folder.name_to_save(key), resident.mark.tokens * self._expected_per_token(folder)
            )
        except LlamaServerError as error:
            self._action_fault("save", key, error)
            return False
        problem = None
        if answer.tokens < resident.mark.tokens:
            problem = f"{answer.tokens} tokens were saved of {resident.mark.tokens}"
        else:
            try:
                await folder.commit(key, answer.tokens, answer.bytes)
            except FolderError as error:
                problem = str(error)
        if problem is not None:
            await folder.discard_part(key)
            self._once.warn((*where, folder.tag), "%s save failed %s: %s", self.server.shown, key, problem)
            if "not in save_path" in problem:
                folder.blind()
                return await self._save(slot, protect)
            return False
        self._once.over((*where, folder.tag))
        self._once.over(where)
        slot.resident = replace(resident, dirty=False, saved_tokens=answer.tokens, whole=True)
        self._bytes_per_token[folder.tag] = answer.bytes / answer.tokens
        report.info(
            "%s save %s: %d tokens, %.1f MB, %.3f s",
            self.server.shown,
            key,
            answer.tokens,
            answer.bytes / 1e6,
            self._clock() - started,
        )
        self._task(self._enforce_limits(folder, {key} if protect is None else {key, protect}))
        return True

    async def _restore(
        self, slot: _Slot, key: str, owner: str, size: int, folder: CacheFolder, reading: SlotReading
    ) -> Outcome:
        started = self._clock()
        slot.resident = None
        try:
            answer = await self.server.restore(slot.number, folder.saved_name(key), float(size))
        except LlamaServerError as error:
            self._action_fault("restore", key, error)
            if error.status == 400:
                await folder.forget(key)
            return Outcome.COLD
        if answer.tokens <= 0:
            self._once.warn(("restore", self.server.base_url), "%s restore failed %s: empty", self.server.shown, key)
            await folder.forget(key)
            return Outcome.COLD
        self._once.over(("restore", self.server.base_url))
        slot.resident = Resident(
            key=key,
            owner=owner,
            mark=Mark(reading.task, answer.tokens) if reading.task is not None else None,
            saved_tokens=answer.tokens,
        )
        slot.home = folder
        await folder.used(key)
        report.info(
            "%s restore %s: %d tokens, %.1f MB, %.3f s",
            self.server.shown,
            key,
            answer.tokens,
            answer.bytes / 1e6,
            self._clock() - started,
        )
        return Outcome.RESTORED

    async def _erase(self, slot: _Slot) -> None:
        slot.resident = None
        try:
            await self.server.erase(slot.number)
        except LlamaServerError as error:
            self._action_fault("erase", "-", error)
        else:
            report.info("%s slot %d: erased, its tokens belong to another key", self.server.shown, slot.number)

    def _expected_per_token(self, folder: CacheFolder) -> float:
        return self._bytes_per_token.get(folder.tag, UNKNOWN_BYTES_PER_TOKEN)

    # after a request

    async def _settle(self, slot: _Slot, epoch: int, idle_seconds: float) -> None:
        """Mark what the request has left, so that a stranger's use is noticed later; then wait for the idle save."""
        pause = BUSY_FIRST_SECONDS
        try:
            for _ in range(12):  # a request that was broken off may still be running for a moment
                reading = await self._look(slot.number)
                if slot.epoch != epoch:
                    return
                if not reading.processing:
                    _, slot.resident = judge(slot.resident, reading)
                    slot.perhaps_busy = False
                    break
                if not slot.perhaps_busy:
                    slot.resident = None
                    return
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, BUSY_MOST_SECONDS)
                if slot.epoch != epoch:
                    return
        except LlamaServerError:
            if slot.epoch != epoch:
                return
        self._plan_idle_save(slot, idle_seconds)

    def _plan_idle_save(self, slot: _Slot, idle_seconds: float) -> None:
        resident = slot.resident
        if idle_seconds > 0 and resident is not None and resident.key is not None and resident.dirty:
            slot.idle_timer = asyncio.get_running_loop().call_later(
                idle_seconds, lambda: self._task(self._idle_save(slot, slot.epoch, idle_seconds))
            )

    async def _idle_save(self, slot: _Slot, epoch: int, idle_seconds: float) -> None:
        if slot.epoch != epoch or slot.lease is not None or slot.home is None or self._clock() < self._off_until:
            return
        lease = Lease(self, slot, Want(None), slot.home, idle_seconds)
        self._grant(slot, lease)
        saved = False
        tries = slot.idle_tries + 1
        try:
            if (await self.server.props()).sleeping:
                slot.resident = None
                return
            reading = await self._look(slot.number)
            if reading.processing:
                slot.resident = None
                return
            _, slot.resident = judge(slot.resident, reading)
            saved = worth_saving(slot.resident) and await self._save(slot)
        except LlamaServerError as error:
            self._fault(error)
        except Exception as error:
            self._once.warn(("bug", type(error).__name__), "idle save failed: %s", type(error).__name__)
        finally:
            lease.active = False
            slot.lease = None
            slot.epoch += 1
            if not self._hand_on(slot) and not saved and tries < 3:
                slot.idle_tries = tries
                self._plan_idle_save(slot, idle_seconds)

    async def _enforce_limits(self, folder: CacheFolder, protected: set[str]) -> None:
        enforced = await folder.enforce_limits(protected)
        for file in enforced.dropped:
            report.info("delete %s: %.1f MB, over the route's limit", file.key, file.bytes / 1e6)
        if enforced.alone_over is not None:
            self._once.warn(
                ("alone", folder.tag),
                "one cache alone is over max_gib: %s has %.1f MB",
                enforced.alone_over.key,
                enforced.alone_over.bytes / 1e6,
            )

    # faults

    def _fault(self, error: LlamaServerError) -> None:
        if error.fault == "timeout":
            self._hung_until = self._clock() + HUNG_SECONDS
            for slot in self._slots.values():
                for turn, _ in slot.waiters:
                    if not turn.done():
                        turn.set_exception(_NoTurn("the server did not answer"))
        cure = ""
        if error.status == 401:
            cure = " (the key was refused: check the route's api_key)"
        elif error.status == 501:
            cure = " (start llama-server with --slots)"
        self._once.warn(
            ("server", self.server.base_url),
            "%s: %s%s; requests go on without a switch",
            self.server.shown,
            error,
            cure,
        )

    def _action_fault(self, action: str, key: str, error: LlamaServerError) -> None:
        cure = ""
        if error.status == 501:
            self._off_until = self._clock() + OFF_SECONDS
            cure = " (start llama-server with --slot-save-path)"
        elif error.fault == "timeout":
            self._hung_until = self._clock() + HUNG_SECONDS
        self._once.warn(
            (action, self.server.base_url), "%s %s failed %s: %s%s", self.server.shown, action, key, error, cure
        )

    def _task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _expire(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_exception(_NoTurn("the slot did not become free"))
