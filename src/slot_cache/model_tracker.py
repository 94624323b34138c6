"""What a router of llama.cpp and a llama-swap have in common here: many models, each with slots of its own."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from slot_cache.events import Event
from slot_cache.index import IndexThread
from slot_cache.llama_server import LlamaServer
from slot_cache.locks import SlotLock, digest_of
from slot_cache.switcher import SlotSwitcher


class ModelTracker(ABC):
    """The models of one server, and their slots.

    Args:
        server: the server itself.
        index: passed on to the models' switchers.
        name: the server's name in the index and for locks.
        lock_folder: as for `SlotSwitcher`.
        clock: seconds, for waits.
        tell: is told what happens.
    """

    lock_name: ClassVar[str]
    """what the lock between processes is called"""

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
        self._changing = asyncio.Lock()
        """held by who changes which models are loaded, here and, with the other one, in all processes"""
        self._changing_lock = SlotLock(lock_folder, f"{digest_of(name)}-{self.lock_name}")

    @property
    def switchers(self) -> dict[str, SlotSwitcher]:
        """The models that were asked for, and their slots."""
        return self._switchers

    @property
    @abstractmethod
    def loaded(self) -> list[str]:
        """The models that are loaded, as far as this process knows without asking."""

    @abstractmethod
    async def canonical(self, model: str) -> str:
        """The server's own name for a model, which may have been asked for by another.

        Raises:
            LlamaServerError: the server does not answer or has no such model.
        """

    @abstractmethod
    async def ready(self, model: str, deadline: float, abandoned: Callable[[], bool]) -> None:
        """Return when the model is loaded. The caller holds one of its slots, so that it does not go meanwhile.

        Args:
            model: the server's own name for it.
            deadline: on the tracker's clock.
            abandoned: whether nobody waits for it any more; then this returns early.

        Raises:
            LlamaServerError: the server does not answer, has no such model, or cannot load it.
            NoTurnError: there was no room until the deadline.
        """

    @abstractmethod
    async def may_be_asked(self, model: str) -> bool:
        """Whether a call to the model would not load it."""

    @abstractmethod
    def lost(self, model: str) -> None:
        """The model was found not loaded."""

    @abstractmethod
    def server_of(self, model: str) -> LlamaServer:
        """The server as it is called for one of its models."""

    def switcher(self, model: str) -> SlotSwitcher:
        """The slots of a model, by the server's own name for it."""
        found = self._switchers.get(model)
        if found is None:
            found = self._switchers[model] = SlotSwitcher(
                self.server_of(model),
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


class _Host:
    """The server, as one of its models' switcher sees it."""

    def __init__(self, tracker: ModelTracker, model: str) -> None:
        self._tracker = tracker
        self._model = model

    async def ready(self, deadline: float, abandoned: Callable[[], bool]) -> None:
        await self._tracker.ready(self._model, deadline, abandoned)

    async def loaded(self) -> bool:
        return await self._tracker.may_be_asked(self._model)

    def lost(self) -> None:
        self._tracker.lost(self._model)
