"""The servers that requests have gone to: the slots of each, the folders of their routes, and the process's one index.

All are made by the first request that needs them.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from slot_cache import report
from slot_cache.events import Event
from slot_cache.folder import CacheFolder
from slot_cache.index import Index, IndexThread, MemoryIndex, SqliteIndex, open_index
from slot_cache.llama_server import LlamaServer, LlamaServerError, Role, same_server_key
from slot_cache.llama_swap import SwapTracker
from slot_cache.request import CacheRequest
from slot_cache.router import RouterTracker, limit_of
from slot_cache.settings import Settings
from slot_cache.switcher import SlotSwitcher

FOLDERS = 4_000
"""How many routes' folders are remembered at most."""


class Servers:
    """The servers of one process.

    Args:
        once: for warnings.
        tell: is told what happens at them.

    Attributes:
        switchers: of the servers with a model of their own.
        routers: of the others.
        index: the process's index; None: no request has needed it yet.
    """

    def __init__(self, once: report.Once, tell: Callable[[Event], None]) -> None:
        self.switchers: dict[str, SlotSwitcher] = {}
        self.routers: dict[str, RouterTracker | SwapTracker] = {}
        self.index: IndexThread | None = None
        self._folders: OrderedDict[tuple[str, ...], CacheFolder] = OrderedDict()
        self._state_dir: Path | None = None
        self._opening: asyncio.Future[Index] | None = None
        self._once = once
        self._tell = tell

    @property
    def folders(self) -> list[CacheFolder]:
        """The folders of the routes; the one used last is the last one."""
        return list(self._folders.values())

    @property
    def state_folder(self) -> Path | None:
        """Where the index is on disk; None: it is not."""
        index = self.index.index if self.index is not None else None
        return index.path.parent if isinstance(index, SqliteIndex) else None

    def all_switchers(self) -> list[SlotSwitcher]:
        """Those of the routers' models too."""
        routed = [switcher for router in self.routers.values() for switcher in router.switchers.values()]
        return [*self.switchers.values(), *routed]

    async def aclose(self) -> None:
        """End all background work and close the connections."""
        for switcher in self.switchers.values():
            await switcher.aclose()
        for router in self.routers.values():
            await router.aclose()
        if self.index is not None:
            self.index.close()

    async def open_index(self, settings: Settings) -> IndexThread:
        """The process's one index, opened in a thread by the first request that needs it."""
        wanted = settings.state_dir
        if self._opening is None:
            self._state_dir = wanted
            self._opening = asyncio.ensure_future(asyncio.to_thread(open_index, wanted))
        elif wanted != self._state_dir:
            self._once.warn(("state_dir",), "state_dir differs between routes: the first one counts")
        if self.index is None:
            try:
                index = await asyncio.shield(self._opening)
            except Exception as error:
                self._once.bug("index", error)
                index = MemoryIndex()
            if self.index is None:
                self.index = IndexThread(index)
        return self.index

    async def switcher(self, request: CacheRequest, settings: Settings, index: IndexThread) -> SlotSwitcher:
        """The slots for a request: those of its server, or of its model where the server is a router.

        Raises:
            LlamaServerError: a router does not answer, or has no such model.
        """
        name = same_server_key(request.base_url)
        locks = index.index.path.parent if isinstance(index.index, SqliteIndex) else None
        router = self.routers.get(name)
        switcher = self.switchers.get(name)
        if router is None and switcher is None:
            server = LlamaServer(request.base_url, request.api_key)
            switcher = self.switchers[name] = SlotSwitcher(server, index, name=name, lock_folder=locks, tell=self._tell)
        if router is None and switcher is not None:
            switcher.server.api_key = request.api_key
            if switcher.role_known or switcher.actions.hung:
                return switcher
            try:
                role = await switcher.server.role() if settings.backend != "llama-swap" else Role("llama-swap")
            except LlamaServerError as error:
                if error.fault == "timeout":
                    switcher.actions.fault(error)
                return switcher  # the slots will tell what is wrong, and the role is asked for again next time
            switcher.role_known = True
            if role.kind == "server" or (role.kind == "llama-swap" and settings.backend == "llama-server"):
                return switcher
            router = self.routers.get(name)
            if router is None:
                if role.kind == "llama-swap":
                    router = SwapTracker(switcher.server, index, name=name, lock_folder=locks, tell=self._tell)
                else:
                    limit = limit_of(role, settings.models_max)
                    router = RouterTracker(
                        switcher.server, index, name=name, limit=limit, lock_folder=locks, tell=self._tell
                    )
                self.routers[name] = router
                self.switchers.pop(name, None)
        assert router is not None
        router.server.api_key = request.api_key
        switcher = router.switcher(await router.canonical(request.model))
        switcher.server.api_key = request.api_key
        return switcher

    def folder(self, request: CacheRequest, settings: Settings, index: IndexThread) -> CacheFolder:
        """The saved caches of a request's route."""
        server = same_server_key(request.base_url)
        where = (request.tag, server if settings.save_path is None else str(settings.save_path))
        folder = self._folders.get(where)
        if folder is None:
            if settings.save_path is None and (settings.max_files or settings.max_bytes):
                self._once.warn(
                    ("limits", request.tag),
                    "route %s: max_files and max_gib need save_path",
                    report.shown(request.route),
                )
            folder = self._folders[where] = CacheFolder(
                index,
                tag=request.tag,
                route=request.route,
                server=server,
                path=settings.save_path,
                max_files=settings.max_files,
                max_bytes=settings.max_bytes,
                verify=settings.verify,
                min_tokens=settings.min_tokens,
                evict=settings.evict,
            )
            while len(self._folders) > FOLDERS:
                self._folders.popitem(last=False)
        self._folders.move_to_end(where)
        return folder
