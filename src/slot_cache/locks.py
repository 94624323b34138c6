"""The right of one process to switch a slot, against the other workers and proxies of the machine.

A lock is a file that the kernel frees when its process dies. A process that has to wait does so in the kernel, in a
thread; nothing polls. Before the lock itself a process takes a turnstile, so that one that gives the lock up and wants
it again at once comes after one that was waiting: two processes take turns. Who holds the lock leaves a mark in its file:
a process that finds its own mark there knows that nobody has had the lock since.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from pathlib import Path

import portalocker

_MARK_BYTES = 16


def digest_of(name: str) -> str:
    """A server's name as part of a lock's: the same in every process, and for those who only look."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


class SlotLock:
    """A lock between processes. For one owner at a time within a process.

    Args:
        folder: where the lock's files are made; None for a lock that is always free.
        name: letters, digits, `_` and `-`.

    Attributes:
        unshared: while it is held: no other owner has had it since it was held here the last time.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._paths = None if folder is None else (folder / f"{name}.turn", folder / f"{name}.lock")
        self._held: _Held | None = None
        self._mark = os.urandom(_MARK_BYTES)
        self._seen = b""
        self.unshared = folder is None

    async def acquire(self, seconds: float) -> bool:
        """Wait for the lock, at most so long. Returns whether it is held now; without a folder it always is.

        Raises:
            OSError: the lock's files cannot be used; then there is nothing to wait for.
        """
        if self._paths is None:
            return True
        return self._take(_try(self._paths) or await _wait(self._paths, seconds))

    def try_acquire(self) -> bool:
        """Take the lock if it is free. Microseconds. Raises OSError as `acquire` does."""
        if self._paths is None:
            return True
        return self._take(_try(self._paths))

    def touched(self) -> bool:
        """Whether another owner has had the lock, or has it, since it was held here. Microseconds; for one not held."""
        if self._paths is None:
            return False
        try:
            descriptor = os.open(self._paths[1], os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return self._seen != b""
        try:
            return os.pread(descriptor, _MARK_BYTES, 0) != self._seen
        except OSError:
            return True
        finally:
            os.close(descriptor)

    def taken(self) -> bool:
        """Whether another owner has the lock, or is about to have it. Microseconds; for one not held."""
        if self._paths is None:
            return False
        try:
            held = _try(self._paths)
        except OSError:
            return False
        if held is not None:
            held.free()
        return held is None

    def _take(self, held: _Held | None) -> bool:
        self._held = held
        if held is None:
            return False
        self.unshared = held.mark() == self._mark and self._seen == self._mark
        self._seen = self._mark if self.unshared or held.leave(self._mark) else b""
        return True

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
        turn.free()
        return False

    def release(self) -> None:
        """Free the lock. Never fails; does nothing if it is not held."""
        if self._held is not None:
            self._held.free()
            self._held = None


class _Held:
    """A file that is locked, as long as somebody knows of it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def mark(self) -> bytes:
        """What the last owner has left in the file; nothing where that cannot be read."""
        try:
            return os.pread(self._descriptor, _MARK_BYTES, 0) if self._descriptor is not None else b""
        except OSError:
            return b""

    def leave(self, mark: bytes) -> bool:
        """Leave a mark in the file. Returns whether it is there."""
        try:
            return self._descriptor is not None and os.pwrite(self._descriptor, mark, 0) == len(mark)
        except OSError:
            return False

    def free(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with contextlib.suppress(OSError, portalocker.exceptions.LockException):
                portalocker.unlock(descriptor)  # a child that is just being started may have the file open still
            os.close(descriptor)

    def __del__(self) -> None:
        self.free()


def _try(paths: tuple[Path, Path]) -> _Held | None:
    turn = _locked(paths[0], wait=False)
    if turn is None:
        return None
    try:
        return _locked(paths[1], wait=False)
    finally:
        turn.free()


def _block(paths: tuple[Path, Path]) -> _Held | None:
    turn = _locked(paths[0], wait=True)
    try:
        return _locked(paths[1], wait=True)
    finally:
        if turn is not None:
            turn.free()


def _locked(path: Path, *, wait: bool) -> _Held | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held = _Held(descriptor)
    flags = portalocker.LockFlags.EXCLUSIVE
    try:
        portalocker.lock(descriptor, flags if wait else flags | portalocker.LockFlags.NON_BLOCKING)
    except portalocker.exceptions.AlreadyLocked:
        held.free()
        return None
    except portalocker.exceptions.LockException as error:
        held.free()
        raise OSError(f"the lock file cannot be locked: {type(error).__name__}") from None
    except BaseException:
        held.free()
        raise
    return held


class _Waiting:
    """What the thread that waits and the task that awaits it agree on: who has the lock when it comes."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held: _Held | None = None
        self._over = False

    def arrived(self, held: _Held | None) -> bool:
        """The lock is here. Returns whether somebody still wants it; else it is free again."""
        with self._mutex:
            if self._over:
                if held is not None:
                    held.free()
                return False
            self._held = held
            return True

    def end(self) -> _Held | None:
        """Nobody awaits it any more. Returns the lock, if it came."""
        with self._mutex:
            self._over = True
            held, self._held = self._held, None
            return held


async def _wait(paths: tuple[Path, Path], seconds: float) -> _Held | None:
    """Block in a thread. A lock that comes too late, or for nobody, is freed at once."""
    loop = asyncio.get_running_loop()
    waiting = _Waiting()
    over: asyncio.Future[None] = loop.create_future()

    def finish(failure: OSError | None) -> None:
        if not over.done():
            if failure is not None:
                over.set_exception(failure)
            else:
                over.set_result(None)

    def work() -> None:
        failure = None
        try:
            wanted = waiting.arrived(_block(paths))
        except OSError as error:
            failure, wanted = error, True
        if wanted:
            try:
                loop.call_soon_threadsafe(finish, failure)
            except RuntimeError:  # the loop is closed
                held = waiting.end()
                if held is not None:
                    held.free()

    threading.Thread(target=work, name="slot-cache-lock", daemon=True).start()
    timer = loop.call_later(seconds, finish, None)
    try:
        await over
        return waiting.end()
    except BaseException:
        held = waiting.end()
        if held is not None:
            held.free()
        raise
    finally:
        timer.cancel()
