"""The saved caches of one route: files that llama-server writes, and the limits on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from slot_cache.eviction import CacheFile, files_to_drop, over_alone
from slot_cache.state import Saved

REMEMBERED = 10_000
"""How many saved caches' token counts are kept in memory for one route."""

SAFE_KEY = re.compile(r"[A-Za-z0-9_-]{1,120}")


class FolderError(Exception):
    """The folder did not do what it should; the message says what, without a path of the user's text."""


@dataclass(frozen=True)
class Enforced:
    """What keeping the limits came to: the files deleted, and one that is over the limit all alone."""

    dropped: tuple[CacheFile, ...] = ()
    alone_over: CacheFile | None = None


class CacheFolder:
    """The saved caches of a route.

    With a `path`, the server's --slot-save-path as this process sees it, the files there are the truth: one that appears
    or vanishes by hand is noticed, a save is complete when it gets its name, and the limits hold. Without one, only
    what this process has saved itself is known. No method blocks the event loop; none raises but `FolderError`.

    Args:
        tag: the beginning of the file names of this route.
        path: the folder, or None.
        max_files: the most files, 0 for no limit.
        max_bytes: the most bytes, 0 for no limit.
    """

    def __init__(self, tag: str, path: Path | None, max_files: int = 0, max_bytes: int = 0) -> None:
        self.tag = tag
        self.path = path
        self.max_files = max_files
        self.max_bytes = max_bytes
        self._remembered: OrderedDict[str, Saved] = OrderedDict()

    @property
    def visible(self) -> bool:
        """Whether the files can be looked at."""
        return self.path is not None

    def blind(self) -> None:
        """Give up looking at the files: the path turned out not to be the server's folder."""
        self.path = None
        self._remembered.clear()

    def saved_name(self, key: str) -> str:
        """The name of a saved cache's file."""
        if not SAFE_KEY.fullmatch(key):
            raise FolderError("a key with characters that no file name may have")
        return f"{key}.bin"

    def name_to_save(self, key: str) -> str:
        """The name the server is to write a save to: not the final one, where a rename can follow."""
        name = self.saved_name(key)
        return f"{name}.part" if self.visible else name

    async def find(self, key: str) -> Saved | None:
        """The saved cache of `key`, None if there is none."""
        remembered = self._remembered.get(key)
        if self.path is None:
            return remembered
        size = await asyncio.to_thread(_size, self.path / self.saved_name(key))
        if size is None:
            self._remembered.pop(key, None)
            return None
        return Saved(remembered.tokens if remembered else 0, size)

    async def commit(self, key: str, tokens: int, size: int) -> None:
        """Take a save that the server has answered as good: from now on it is the saved cache of `key`.

        Raises:
            FolderError: the file is not there, or its size is not what the server said, or it cannot be renamed.
                A good file that was there before is still there.
        """
        if self.path is not None:
            await asyncio.to_thread(_rename_checked, self.path, self.name_to_save(key), self.saved_name(key), size)
        self._remember(key, Saved(tokens, size))

    async def discard_part(self, key: str) -> None:
        """Delete what a save that was not good has left, if it can be seen."""
        if self.path is not None:
            await asyncio.to_thread(_delete, self.path / self.name_to_save(key))

    async def used(self, key: str) -> None:
        """Note that the cache of `key` was used just now."""
        if key in self._remembered:
            self._remembered.move_to_end(key)
        if self.path is not None:
            await asyncio.to_thread(_touch, self.path / self.saved_name(key))

    async def forget(self, key: str) -> None:
        """Delete the cache of `key`: it is of no use. Where the file cannot be seen, it is not asked for again."""
        self._remembered.pop(key, None)
        if self.path is not None:
            await asyncio.to_thread(_delete, self.path / self.saved_name(key))

    async def files(self) -> list[CacheFile]:
        """The saved caches of the route, in no order; empty where they cannot be seen."""
        return [] if self.path is None else await asyncio.to_thread(_list, self.path, self.tag)

    async def enforce_limits(self, protected: Collection[str]) -> Enforced:
        """Delete the files used longest ago until both limits hold, but never one of the keys in `protected`."""
        if self.path is None or not (self.max_files or self.max_bytes):
            return Enforced()
        return await asyncio.to_thread(_enforce, self.path, self.tag, self.max_files, self.max_bytes, protected)

    def _remember(self, key: str, saved: Saved) -> None:
        self._remembered[key] = saved
        self._remembered.move_to_end(key)
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except OSError:
        return None


def _rename_checked(folder: Path, part: str, name: str, size: int) -> None:
    written = _size(folder / part)
    if written is None:
        raise FolderError("the file that the server says it wrote is not in save_path")
    if written != size:
        raise FolderError(f"the server says it wrote {size} bytes, the file has {written}")
    try:
        os.replace(folder / part, folder / name)  # noqa: PTH105 - atomic by contract on every system
    except OSError as error:
        raise FolderError(f"the file cannot be renamed: {error.strerror}") from None


def _delete(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True


def _touch(file: Path) -> None:
    with contextlib.suppress(OSError):  # not ours to touch: its age stays that of its save
        os.utime(file)


def _list(folder: Path, tag: str) -> list[CacheFile]:
    found = []
    name = re.compile(re.escape(tag) + r"_[0-9a-f]{32}\.bin")
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not name.fullmatch(entry.name):
                    continue
                try:
                    info = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                found.append(CacheFile(entry.name[: -len(".bin")], info.st_size, info.st_mtime))
    except OSError:
        return []
    return found


def _enforce(folder: Path, tag: str, max_files: int, max_bytes: int, protected: Collection[str]) -> Enforced:
    files = _list(folder, tag)
    dropped = [
        file for file in files_to_drop(files, max_files, max_bytes, protected) if _delete(folder / f"{file.key}.bin")
    ]
    return Enforced(tuple(dropped), over_alone(files, max_bytes))
