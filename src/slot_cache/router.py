"""The models that a router has loaded, and who goes next.

A router (llama-server without a model) unloads the model used longest ago when another one needs its place, and the
caches in its slots with it. It counts every POST as a use, so saving the model that is about to go would make it the
newest, and the router would unload another one, unsaved. So the tracker makes the room itself: it picks the model to go,
takes its slots, saves them, has it unloaded, and has the wanted one loaded; only then the request goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from slot_cache import report
from slot_cache.events import Event
from slot_cache.index import IndexThread
from slot_cache.leases import NoTurnError
from slot_cache.llama_server import LlamaServer, LlamaServerError, Role, RouterModel
from slot_cache.model_tracker import ModelTracker
from slot_cache.slot_book import BUSY_SECONDS
from slot_cache.vacating import Vacated

OLD_ROUTER_MAX = 4
"""What an older router that does not tell its limit has by default."""

POLL_FIRST_SECONDS = 0.05
POLL_MOST_SECONDS = 1.0
"""How often a router is asked whether a model is loaded or unloaded by now: at first, at most."""

VICTIM_SECONDS = 5.0
"""How long room is awaited from one model before the router is looked at again."""

UNLOAD_SECONDS = 60.0
LOAD_SECONDS = 600.0
"""How long a model may take to go, and to come (from a slow disk)."""

LOOK_AGAIN_SECONDS = 1.0
"""How often a request that waits for its turn to have room made looks whether its model has come meanwhile."""

LOAD_GRACE_SECONDS = 3.0
"""How long after being told to load a model the router may still call it unloaded."""


def limit_of(role: Role, models_max: int | None) -> int:
    """The most models loaded at once: the setting, else what the router says, else an older router's default."""
    if models_max is not None:
        return models_max
    return OLD_ROUTER_MAX if role.max_instances is None else role.max_instances


def next_to_go(running: Iterable[RouterModel], uses: dict[str, float], busy: Iterable[str] = ()) -> list[RouterModel]:
    """Who goes first: the model used longest ago (never by us: before all others), those that are busy at the end.

    A model that is being loaded or unloaded is not among them.
    """
    waited_for = set(busy)
    settled = [model for model in running if _is_there(model.status)]
    return sorted(settled, key=lambda model: (model.name in waited_for, uses.get(model.name, 0.0), model.name))


def _is_there(status: str) -> bool:
    return status in ("loaded", "sleeping")


class RouterTracker(ModelTracker):
    """The models of one router.

    Args:
        server, index, name, lock_folder, clock, tell: as for `ModelTracker`.
        limit: the most models loaded at once, 0 for no limit.
    """

    lock_name = "router"

    def __init__(
        self,
        server: LlamaServer,
        index: IndexThread,
        *,
        name: str,
        limit: int,
        lock_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[Event], None] = lambda event: None,
    ) -> None:
        super().__init__(server, index, name=name, lock_folder=lock_folder, clock=clock, tell=tell)
        self.limit = limit
        self._names: dict[str, str] = {}
        self._loaded: set[str] = set()
        self._uses: dict[str, float] = {}
        self._can_unload = True

    @property
    def loaded(self) -> list[str]:
        """The models that are loaded, as far as this process knows without asking; the one used last comes last."""
        return sorted(self._loaded, key=lambda model: self._uses.get(model, 0.0))

    async def canonical(self, model: str) -> str:
        """The router's own name for a model, which may have been asked for by another."""
        if model not in self._names:
            models = await self.server.models()
            self._names = {alias: known.name for known in models for alias in known.aliases}
            self._names.update({known.name: known.name for known in models})
        if model in self._names:
            return self._names[model]
        raise LlamaServerError("refused", "the router has no such model", 404)

    async def may_be_asked(self, model: str) -> bool:
        """Always: every call carries autoload=false."""
        return True

    def server_of(self, model: str) -> LlamaServer:
        """The router, called for a model."""
        return self.server.for_model(model)

    async def ready(self, model: str, deadline: float, abandoned: Callable[[], bool]) -> None:
        """As `ModelTracker` says."""
        self._uses[model] = self._clock()
        if model in self._loaded:
            return
        if not await self._is_there(model) and await self._turn(model, deadline, abandoned):
            try:
                again = False
                while not await self._loaded_now(model, deadline, again):
                    again = True
                    if abandoned():
                        return
            finally:
                self._changing_lock.release()
                self._changing.release()
        if abandoned():
            return
        self._loaded.add(model)
        self._uses[model] = self._clock()

    async def _turn(self, model: str, deadline: float, abandoned: Callable[[], bool]) -> bool:
        """Wait for the turn to make room. Returns False when it is not needed any more.

        The caller holds a slot of the model, so whoever makes room must not be waited for when the model is there:
        it may be waiting for that very slot.
        """
        turn = asyncio.ensure_future(self._both_locks(deadline))
        try:
            while not turn.done():
                await asyncio.wait({turn}, timeout=LOOK_AGAIN_SECONDS)
                if not turn.done() and (abandoned() or await self._is_there(model)):
                    return False
        finally:
            if not turn.done():
                turn.cancel()
                await asyncio.wait({turn})
                if not turn.cancelled() and turn.exception() is None:
                    self._changing_lock.release()
                    self._changing.release()
        return turn.result()

    async def _both_locks(self, deadline: float) -> bool:
        try:
            await asyncio.wait_for(self._changing.acquire(), max(deadline - self._clock(), 0.001))
        except asyncio.TimeoutError:
            raise NoTurnError("another request has room made") from None
        held = False
        try:
            held = await self._changing_lock.acquire(max(deadline - self._clock(), 0.001))
        finally:
            if not held:
                self._changing.release()
        if not held:
            raise NoTurnError("another worker makes room")
        return True

    async def _is_there(self, model: str) -> bool:
        return any(known.name == model and _is_there(known.status) for known in await self.server.models())

    def lost(self, model: str) -> None:
        """The model was found unloaded: read the truth before the next request."""
        self._loaded.discard(model)

    async def _loaded_now(self, model: str, deadline: float, again: bool = False) -> bool:
        """One step on the way (`again`: not the first): whether the model is loaded now."""
        models = {known.name: known for known in await self.server.models()}
        self._loaded &= {name for name, known in models.items() if _is_there(known.status)}
        wanted = models.get(model)
        if wanted is None:
            raise LlamaServerError("refused", "the router has no such model", 404)
        if _is_there(wanted.status):
            return True
        if self._clock() > deadline:
            raise NoTurnError("there was no room for the model")
        if wanted.status != "unloaded":
            await self._until(model, lambda status: status != wanted.status, LOAD_SECONDS)
            return False
        running = [known for known in models.values() if known.status != "unloaded"]
        taken: list[tuple[str, Vacated]] = []
        try:
            if self.limit and len(running) >= self.limit:
                taken = await self._make_room(running, deadline, again)
                if self._can_unload:
                    return False
            report.info("%s load %s", self.server.shown, report.shown(model))
            self._tell(Event("load", server=self.server.shown, words=report.shown(model)))
            try:
                await self.server.load(model)
            except LlamaServerError as error:
                if error.status != 400:  # 400: it is running already
                    raise
            status = await self._until(model, _is_there, LOAD_SECONDS, grace=LOAD_GRACE_SECONDS)
            if not _is_there(status):
                raise LlamaServerError("refused", "the router could not load the model")
            if taken:
                models = {known.name: known for known in await self.server.models()}
                self._loaded &= {name for name, known in models.items() if _is_there(known.status)}
            return True
        finally:
            for name, vacated in taken:
                vacated.end(gone=name in models and models[name].status == "unloaded")

    async def _make_room(self, running: list[RouterModel], deadline: float, again: bool) -> list[tuple[str, Vacated]]:
        """Save and unload one model; or return for another look after a while.

        Returns:
            the slots of a router that cannot unload, to be given back when it has chosen.
        """
        busy = [name for name, switcher in self._switchers.items() if switcher.leased()]
        candidates = next_to_go(running, self._uses, busy)
        if not self._can_unload:
            taken = []
            for candidate in candidates:  # in the order of use, so that it stays the same: each save is a use
                if candidate.name not in busy:
                    vacated = await self.switcher(candidate.name).vacate(0.0)
                    if vacated is not None:
                        taken.append((candidate.name, vacated))
            return taken
        for candidate in candidates:
            if candidate.name not in busy and await self._unloaded(candidate, 0.0):
                return []
        for candidate in candidates:
            wait = max(min(VICTIM_SECONDS, deadline - self._clock()), 0.0)
            if await self._unloaded(candidate, wait, first=again):
                return []
        await asyncio.sleep(min(BUSY_SECONDS, max(deadline - self._clock(), 0.0)))
        return []

    async def _unloaded(self, victim: RouterModel, wait: float, first: bool = False) -> bool:
        """Take the slots of a model (within `wait` seconds), save them, unload it. Returns whether it is gone."""
        model = victim.name
        vacated = await self.switcher(model).vacate(wait, first=first, asleep=victim.status == "sleeping")
        if vacated is None:
            return False
        gone = False
        try:
            try:
                await self.server.unload(model)
            except LlamaServerError as error:
                if error.status == 404:
                    self._can_unload = False
                    return False
                if error.status != 400:  # 400: it is not running (any more)
                    raise
            status = await self._until(model, lambda status: status == "unloaded", UNLOAD_SECONDS)
            gone = status == "unloaded"
            if gone:
                self._loaded.discard(model)
                report.info("%s unloaded %s", self.server.shown, report.shown(model))
                self._tell(Event("unload", server=self.server.shown, words=report.shown(model)))
            return gone
        finally:
            vacated.end(gone=gone)

    async def _until(self, model: str, done: Callable[[str], bool], seconds: float, grace: float = 0.0) -> str:
        """Ask the router until a model's status will do, for so long at most. Returns the last status.

        With `grace` a status counts only when that has passed or it says that the model is there.
        """
        started, pause = self._clock(), POLL_FIRST_SECONDS
        while True:
            status, failed = "unloaded", False
            for known in await self.server.models():
                if known.name == model:
                    status, failed = known.status, known.failed
            spent = self._clock() - started
            if done(status) or spent > seconds or (grace and status == "unloaded" and (failed or spent > grace)):
                return status
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_MOST_SECONDS)
