"""The models behind a llama-swap, and what is saved before it swaps.

llama-swap starts a llama-server for each model, and stops others when one needs their place; which ones, its own
configuration says. So before a model that is not running is asked for, every running one is saved; llama-swap's
addresses are `/upstream/<model>/...` for a model's own server (a call there starts it) and `/running`.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

from slot_cache import report
from slot_cache.events import Event
from slot_cache.index import IndexThread
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.locks import SlotLock
from slot_cache.router import LOAD_SECONDS, POLL_FIRST_SECONDS, POLL_MOST_SECONDS, VICTIM_SECONDS
from slot_cache.slot_book import BUSY_SECONDS
from slot_cache.switcher import NoTurnError, SlotSwitcher, Vacated


class SwapTracker:
    """The models behind one llama-swap.

    Args:
        server: llama-swap itself.
        index: passed on to the models' switchers.
        name: its name in the index and for locks.
        lock_folder: as for `SlotSwitcher`.
        clock: seconds, for waits.
        tell: is told what happens.
    """

    def __init__(
        self,
        server: LlamaServer,
        index: IndexThread,
        *,
        name: str,
        lock_folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.server = server
        self._tell = tell
        self._index = index
        self._name = name
        self._lock_folder = lock_folder
        self._clock = clock
        self._switchers: dict[str, SlotSwitcher] = {}
        self._swapping = asyncio.Lock()
        self._running: list[str] = []
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self._swap_lock = SlotLock(lock_folder, f"{digest}-swap")

    @property
    def switchers(self) -> dict[str, SlotSwitcher]:
        """The models that were asked for, and their slots."""
        return self._switchers

    @property
    def loaded(self) -> list[str]:
        """The models that ran when llama-swap was last asked."""
        return self._running

    async def canonical(self, model: str) -> str:
        """The model's name. llama-swap knows its aliases itself; two names for one model are two models here."""
        return model

    def switcher(self, model: str) -> SlotSwitcher:
        """The slots of a model."""
        found = self._switchers.get(model)
        if found is None:
            found = self._switchers[model] = SlotSwitcher(
                self.server.upstream(model),
                self._index,
                name=f"{self._name}#{model}",
                lock_folder=self._lock_folder,
                clock=self._clock,
                host=_Host(self, model),
                tell=self._tell,
            )
        return found

    async def aclose(self) -> None:
        """End the background work and close the connections."""
        for switcher in self._switchers.values():
            await switcher.aclose()
        await self.server.aclose()

    async def is_running(self, model: str) -> bool:
        """Whether the model's server runs. Asking does not start it."""
        self._running = sorted(await self.server.running())
        return model in self._running

    async def ready(self, model: str, deadline: float, abandoned: Callable[[], bool]) -> None:
        """Return when the model runs; what may be stopped for it is saved first. As `RouterTracker.ready`."""
        if await self.is_running(model):
            return
        async with self._swapping:
            if not await self._swap_lock.acquire(max(deadline - self._clock(), 0.001)):
                raise NoTurnError("another worker swaps models")
            try:
                while not (await self.is_running(model) or abandoned() or await self._swapped_in(model, deadline)):
                    if self._clock() > deadline:
                        raise NoTurnError("the other models did not become free")
            finally:
                self._swap_lock.release()

    async def _swapped_in(self, model: str, deadline: float) -> bool:
        """Save every running model, then start the wanted one. Returns False if one of them was busy."""
        taken: list[tuple[str, Vacated]] = []
        running = set(await self.server.running())
        try:
            for other in sorted(running - {model}):
                vacated = await self.switcher(other).vacate(max(min(VICTIM_SECONDS, deadline - self._clock()), 0.001))
                if vacated is None:
                    await asyncio.sleep(BUSY_SECONDS)
                    return False
                taken.append((other, vacated))
            report.info("%s start %s", self.server.shown, report.shown(model))
            self._tell(Event("load", server=self.server.shown, words=report.shown(model)))
            await self._start(model)
            running = set(await self.server.running())
            return True
        finally:
            for other, vacated in taken:
                vacated.end(gone=other not in running)

    async def _start(self, model: str) -> None:
        """Have a model's server started, by asking after its health."""
        server, started, pause = self.switcher(model).server, self._clock(), POLL_FIRST_SECONDS
        while True:
            try:
                await server.health()
                return
            except LlamaServerError as error:
                if error.fault != "timeout":  # it is no model of llama-swap's, or it did not come up
                    raise
                if self._clock() - started > LOAD_SECONDS:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_MOST_SECONDS)


class _Host:
    """llama-swap, as one of its models' switcher sees it."""

    def __init__(self, tracker: SwapTracker, model: str) -> None:
        self._tracker = tracker
        self._model = model

    async def ready(self, deadline: float, abandoned: Callable[[], bool]) -> None:
        await self._tracker.ready(self._model, deadline, abandoned)

    async def loaded(self) -> bool:
        return await self._tracker.is_running(self._model)

    def lost(self) -> None:
        pass
