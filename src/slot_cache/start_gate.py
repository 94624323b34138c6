"""The gate between putting a cache into a slot and the start of its request, for servers that clear idle slots.

Such a server empties every idle slot when a task starts in any. A cache that was just restored lies idle until its request
has arrived: were another one to start meanwhile, it would be gone. So one request at a time is between the two.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from slot_cache.locks import SlotLock


class StartGate:
    """Lets one request through at a time, across all processes that share the lock's folder.

    Args:
        folder: of the lock between processes, None for none.
        name: as for `SlotLock`.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._inside = asyncio.Lock()
        self._waiting = 0
        self._lock = SlotLock(folder, name)

    async def enter(self, seconds: float) -> bool:
        """Wait for the gate, at most so long. Returns whether the caller is inside now, and must `leave`.

        Raises:
            OSError: the lock between processes cannot be used; the caller is not inside.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        self._waiting += 1
        try:
            await asyncio.wait_for(self._inside.acquire(), seconds)
        except asyncio.TimeoutError:
            return False
        finally:
            self._waiting -= 1
        held = False
        try:
            held = await self._lock.acquire(max(until - loop.time(), 0.001))
        finally:
            if not held:
                self._inside.release()
        return held

    async def try_enter(self) -> bool:
        """Enter if nobody is inside or waits to enter. Does not wait.

        Raises:
            OSError: as `enter`.
        """
        if self._inside.locked() or self._waiting:
            return False
        await self._inside.acquire()  # at once, for nobody has it
        held = False
        try:
            held = self._lock.try_acquire()
        finally:
            if not held:
                self._inside.release()
        return held

    @property
    def occupied(self) -> bool:
        """Whether a request of this process is inside."""
        return self._inside.locked()

    def wanted(self) -> bool:
        """Whether somebody waits to enter. To be asked by who is inside."""
        return self._waiting > 0 or self._lock.contended()

    def leave(self) -> None:
        """Let the next one in. A plain call."""
        self._lock.release()
        self._inside.release()
