"""The right of one process to switch a slot, against the other workers and proxies of the machine.

A lock is a file that the kernel frees when its process dies. A process that has to wait does so in the kernel, in a
thread; nothing polls. Before the lock itself a process takes a turnstile, so that one that gives the lock up and wants
it again at once comes after one that was waiting: two processes take turns.
"""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import portalocker


class SlotLock:
    """A lock between processes. For one owner at a time within a process.

    Args:
        folder: where the lock's files are made; None for a lock that is always free.
        name: letters, digits, `_` and `-`.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._paths = None if folder is None else (folder / f"{name}.turn", folder / f"{name}.lock")
        self._held: int | None = None

    async def acquire(self, seconds: float) -> bool:
        """Wait for the lock, at most so long. Returns whether it is held now; without a folder it always is.

        Raises:
            OSError: the lock's files cannot be used; then there is nothing to wait for.
        """
        if self._paths is None:
            return True
        held = _try(self._paths)
        if held is None:
            held = await _wait(self._paths, seconds)
        self._held = held
        return held is not None

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Microseconds. Raises OSError as `acquire` does."""
        if self._paths is None:
            return True
        self._held = _try(self._paths)
        return self._held is not None

    def contended(self) -> bool:
        """Whether another process waits for the lock while it is held here. Microseconds."""
        if self._paths is None:
            return False
        try:
            turn = _locked(self._paths[0], wait=False)
        except OSError:
            return False
        if turn is None:
            return True
        os.close(turn)
        return False

    def release(self) -> None:
        """Free the lock. Never fails; does nothing if it is not held."""
        if self._held is not None:
            os.close(self._held)  # the kernel frees it with the last descriptor
            self._held = None


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try(paths: tuple[Path, Path]) -> int | None:
    turn = _locked(paths[0], wait=False)
    if turn is None:
        return None
    try:
        return _locked(paths[1], wait=False)
    finally:
        os.close(turn)


def _block(paths: tuple[Path, Path]) -> int:
    turn = _locked(paths[0], wait=True)
    assert turn is not None
    try:
        held = _locked(paths[1], wait=True)
        assert held is not None
        return held
    finally:
        os.close(turn)


def _locked(path: Path, *, wait: bool) -> int | None:
    descriptor = _open(path)
    flags = portalocker.LockFlags.EXCLUSIVE
    try:
        portalocker.lock(descriptor, flags if wait else flags | portalocker.LockFlags.NON_BLOCKING)
    except portalocker.exceptions.AlreadyLocked:
        os.close(descriptor)
        return None
    except portalocker.exceptions.LockException as error:
        os.close(descriptor)
        raise OSError(f"the lock file cannot be locked: {type(error).__name__}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


async def _wait(paths: tuple[Path, Path], seconds: float) -> int | None:
    """Block in a thread. One that comes too late, or for nobody, frees the lock at once."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[int | None] = loop.create_future()

    def deliver(held: int | None, failure: OSError | None) -> None:
        if result.done():
            if held is not None:
                os.close(held)
        elif failure is not None:
            result.set_exception(failure)
        else:
            result.set_result(held)

    def work() -> None:
        held, failure = None, None
        try:
            held = _block(paths)
        except OSError as error:
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, held, failure)
        except RuntimeError:  # the loop is closed
            if held is not None:
                os.close(held)

    threading.Thread(target=work, name="slot-cache-lock", daemon=True).start()
    timer = loop.call_later(seconds, deliver, None, None)
    try:
        return await result
    except asyncio.CancelledError:
        if result.done() and not result.cancelled() and result.exception() is None:
            held = result.result()  # it came in the very moment we were cancelled
            if held is not None:
                os.close(held)
        raise
    finally:
        timer.cancel()
