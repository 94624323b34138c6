"""The models behind a llama-swap, and what is saved before it swaps.

llama-swap starts a llama-server for each model, and stops others when one needs their place; which ones, its own
configuration says. So before a model that is not running is asked for, every running one is saved; llama-swap's
addresses are `/upstream/<model>/...` for a model's own server (a call there starts it) and `/running`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slot_cache import report
from slot_cache.events import Event
from slot_cache.leases import NoTurnError
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.model_tracker import ModelTracker
from slot_cache.router import LOAD_SECONDS, POLL_FIRST_SECONDS, POLL_MOST_SECONDS, VICTIM_SECONDS
from slot_cache.slot_book import BUSY_SECONDS
from slot_cache.vacating import Vacated


class SwapTracker(ModelTracker):
    """The models behind one llama-swap."""

    lock_name = "swap"
    _running: tuple[str, ...] = ()

    @property
    def loaded(self) -> list[str]:
        """The models that ran when llama-swap was last asked."""
        return list(self._running)

    async def canonical(self, model: str) -> str:
        """The model's name. llama-swap knows its aliases itself; two names for one model are two models here."""
        return model

    def server_of(self, model: str) -> LlamaServer:
        """A model's own server, through llama-swap."""
        return self.server.upstream(model)

    async def may_be_asked(self, model: str) -> bool:
        """Whether the model's server runs. Asking that does not start it."""
        self._running = tuple(sorted(await self.server.running()))
        return model in self._running

    async def ready(self, model: str, deadline: float, abandoned: Callable[[], bool]) -> None:
        """As `ModelTracker` says; what may be stopped for the model is saved first."""
        if await self.may_be_asked(model):
            return
        async with self._changing:
            if not await self._changing_lock.acquire(max(deadline - self._clock(), 0.001)):
                raise NoTurnError("another worker swaps models")
            try:
                while not (await self.may_be_asked(model) or abandoned() or await self._swapped_in(model, deadline)):
                    if self._clock() > deadline:
                        raise NoTurnError("the other models did not become free")
            finally:
                self._changing_lock.release()

    def lost(self, model: str) -> None:
        """llama-swap is asked before each use anyway."""

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
