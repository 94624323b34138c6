"""The saved caches of one route: files that llama-server writes, what the index knows of them, and the limits on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slot_cache import checksum
from slot_cache.eviction import CacheFile, Policy, files_to_drop, over_alone
from slot_cache.index import CacheRow, IndexThread
from slot_cache.matching import Known, continues
from slot_cache.state import Saved, Want

SAFE_KEY = re.compile(r"[A-Za-z0-9_-]{1,120}")

PART_SECONDS = 60.0
"""A .part file that nobody has written to for so long is what a broken save left."""

SWEEP_SECONDS = 300.0
"""How often the folder is looked through for such files, at most."""

_KEY_ENDING = re.compile(r"_[0-9a-f]{32}\Z")


class FolderError(Exception):
    """The folder did not do what it should; the message says what, without a path of the user's text."""


class NotTheFolderError(FolderError):
    """The file that the server has just written is not in the folder."""


@dataclass(frozen=True)
class Lookup:
    """The answer to "is there a cache to restore?": it, or why what is there will not do.

    Attributes:
        saved: the cache, checked.
        problem: `damaged`: the file was not what was saved, it has been deleted; `other model`: another model wrote it;
            `unknown`: there is a file that the index knows nothing of.
    """

    saved: Saved | None = None
    problem: Literal["", "damaged", "other model", "unknown"] = ""


@dataclass(frozen=True)
class Enforced:
    """What keeping the limits came to: the files deleted, and one that is over the limit all alone."""

    dropped: tuple[CacheFile, ...] = ()
    alone_over: CacheFile | None = None


class CacheFolder:
    """The saved caches of a route.

    With a `path`, the server's --slot-save-path as this process sees it, every file is checked against the index before
    it is used, one that vanishes by hand is noticed, a save is complete when it gets its name, and the limits hold.
    Without one, what the index knows must do. No method blocks the event loop; none raises but `FolderError`.

    Args:
        index: what is saved.
        tag: the beginning of the file names of this route.
        route: the model_name.
        server: the server's address, which stands for the folder where that cannot be seen.
        path: the folder, or None.
        max_files: the most files, 0 for no limit.
        max_bytes: the most bytes, 0 for no limit.
        verify: `full` reads every file whole before it is restored, `fast` only where that is cheap.
        min_tokens: a cache with fewer is not worth a file.
        evict: which file goes first when a limit is passed: `cost`, the one that saves least, or `lru`.
    """

    def __init__(
        self,
        index: IndexThread,
        *,
        tag: str,
        route: str,
        server: str,
        path: Path | None,
        max_files: int = 0,
        max_bytes: int = 0,
        verify: Literal["full", "fast"] = "fast",
        min_tokens: int = 64,
        evict: Policy = "cost",
    ) -> None:
        self.index = index
        self.tag = tag
        self.route = route
        self.path = Path(os.path.realpath(path)) if path is not None else None
        self.server = server
        self.max_files = max_files
        self.max_bytes = max_bytes
        self.verify = verify
        self.min_tokens = min_tokens
        self.evict = evict
        self._news = 0
        self._changes = -1
        self._known: dict[str, list[Known]] = {}
        self._by_session: dict[str | None, list[Known]] = {}
        self._swept = float("-inf")
        self._proved = False
        self._saving: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._hash_rate = 0.0
        self._restore_rate = 0.0

    @property
    def id(self) -> str:
        """What the index knows the folder by."""
        return self.server if self.path is None else str(self.path)

    def saving(self, key: str) -> asyncio.Lock:
        """What a save of `key` holds from its beginning to its commit: two slots do not write one file at a time."""
        lock = self._saving.get(key)
        if lock is None:
            lock = self._saving[key] = asyncio.Lock()
        return lock

    def blind(self) -> None:
        """Give up looking at the files: the path turned out not to be the server's folder."""
        self.path = None

    def saved_name(self, key: str) -> str:
        """The name of a saved cache's file."""
        if not SAFE_KEY.fullmatch(key):
            raise FolderError("a key with characters that no file name may have")
        return f"{key}.bin"

    def name_to_save(self, key: str) -> str:
        """The name the server is to write a save to: not the final one, where a rename can follow."""
        name = self.saved_name(key)
        return name if self.path is None else f"{name}.part"

    async def look_up(self, key: str, model: str) -> Lookup:
        """Whether there is a cache of `key` that may be restored into `model`: the file is read and checked."""
        rows = await self._rows(key)
        if not rows:
            there = self.path is not None and await asyncio.to_thread((self.path / self.saved_name(key)).exists)
            return Lookup(problem="unknown" if there else "")
        if all(row.model != model for row in rows):
            return Lookup(problem="other model")
        if self.path is None:
            return Lookup(_saved(rows[0]))
        row = await self._row_of_file(key, rows)
        if row is None:  # another process may just have saved it anew
            rows = await self._rows(key)
            row = await self._row_of_file(key, rows)
        if row is None:
            vanished = not await asyncio.to_thread((self.path / self.saved_name(key)).exists)
            await self.forget(key)
            return Lookup(problem="" if vanished else "damaged")
        if row.pending:  # a process died between the name and the record, or is just there
            row = replace(row, pending=False)
            await self.index.call(self.index.index.put_cache, row)
        return Lookup(_saved(row)) if row.model == model else Lookup(problem="other model")

    async def known(self, model: str) -> list[Known]:
        """What is saved of the route by `model`, as the index knows it; the files are not looked at."""
        await self._remember()
        return self._known.get(model, [])

    async def _remember(self) -> None:
        changes = await self.index.call(self.index.index.changes)
        if changes < 0 or changes != self._changes:
            self._known, self._by_session = await self.index.call(self._read_known)
            self._changes = changes

    def _read_known(self) -> tuple[dict[str, list[Known]], dict[str | None, list[Known]]]:
        """What is saved, by model and by session. In the thread of the index, for there may be thousands."""
        by_model: dict[str, list[Known]] = {}
        by_session: dict[str | None, list[Known]] = {}
        for row in self.index.index.caches_of(self.id, self.tag):
            cache = Known(row.key, row.session, row.owner, row.chain, row.tokens, row.size, row.used, row.rewound)
            by_model.setdefault(row.model, []).append(cache)
            by_session.setdefault(row.session, []).append(cache)
        return by_model, by_session

    async def hear(self, news: int) -> None:
        """Learn what other processes have saved, once for each count of news."""
        if news != self._news:
            self._news = news
            await self._remember()

    def knows_better(self, want: Want, key: str, shared: int) -> bool:
        """Whether another cache than `key` was known lately of which a request continues more than `shared` links. Looks at
        nothing but memory."""
        return any(
            cache.key != key and continues(want, cache.session, cache.owner, cache.chain, shared + 1)
            for cache in self._by_session.get(want.session, ())
        )

    async def _rows(self, key: str) -> list[CacheRow]:
        return await self.index.call(self.index.index.cache, self.id, key)

    async def _row_of_file(self, key: str, rows: list[CacheRow]) -> CacheRow | None:
        if self.path is None or not rows:
            return None
        whole = any(row.checksum for row in rows) and self._whole_is_cheap(max(row.size for row in rows))
        try:
            sums = await asyncio.to_thread(self._take, self.path / self.saved_name(key), whole)
        except OSError:
            return None
        return next((row for row in rows if fits(row, sums)), None)

    async def commit(
        self,
        key: str,
        tokens: int,
        size: int,
        model: str,
        chain: bytes,
        seconds: float,
        *,
        session: str | None = None,
        owner: str | None = None,
        rewound: bool = False,
    ) -> None:
        """Take a save that the server has answered as good: from now on it is the saved cache of `key`.

        Whenever the process may die here, the file that has the name is one that the index can tell is good.

        Args:
            key: whose.
            tokens: what the server said it saved.
            size: bytes that it said it wrote.
            model: the fingerprint of the model.
            chain: the packed fingerprint of the prompt.
            seconds: the prefill it stands for, 0 if not known.
            session: the key of its session's first cache, None for a conversation without a session.
            owner: the LiteLLM key that its tokens belong to, None if not known.
            rewound: as in `slot_cache.state.Resident`.

        Raises:
            NotTheFolderError: the file is not there, nor was that of any save before.
            FolderError: its size is not what the server said, or it cannot be read or renamed. A good file that was
                there before is still there.
        """
        now = time.time()
        rows = await self._rows(key)
        if any(row.pending for row in rows):  # what a process that died has left: which of both is the file?
            await self.look_up(key, model)
            rows = await self._rows(key)
        uses = max((row.uses for row in rows), default=0)
        row = CacheRow(
            self.id,
            key,
            self.route,
            model,
            tokens,
            size,
            chain=chain,
            created=now,
            used=now,
            uses=uses,
            seconds=seconds,
            session=session,
            owner=owner,
            rewound=rewound,
        )
        if self.path is not None:
            part, name = self.path / self.name_to_save(key), self.path / self.saved_name(key)
            try:
                sums = await asyncio.to_thread(self._take, part, self._whole_is_cheap(size))
            except FileNotFoundError:
                problem = "the file that the server says it wrote is not in save_path"
                raise (FolderError if self._proved else NotTheFolderError)(problem) from None
            except OSError as error:
                raise FolderError(f"the file cannot be read: {error.strerror}") from None
            if sums.size != size:
                raise FolderError(f"the server says it wrote {size} bytes, the file has {sums.size}")
            row = replace(row, sample=sums.sample, checksum=sums.whole)
            if not await self.index.call(self.index.index.put_cache, replace(row, pending=True)):
                raise FolderError("it cannot be recorded")
            try:
                await asyncio.to_thread(os.replace, part, name)
            except OSError as error:
                raise FolderError(f"the file cannot be renamed: {error.strerror}") from None
            self._proved = True
        await self.index.call(self.index.index.put_cache, row)

    async def discard_part(self, key: str) -> None:
        """Delete what a save that was not good has left, if it can be seen."""
        if self.path is not None:
            await asyncio.to_thread(_delete, self.path / self.name_to_save(key))

    async def has_room(self, size: float) -> bool:
        """Whether the folder's disk has room for a save of so many bytes, as far as that can be seen."""
        return self.path is None or await asyncio.to_thread(_has_room, self.path, size)

    async def restored(self, key: str, size: int, seconds: float) -> None:
        """Note that the cache of `key` was used just now, and how long the server took for its bytes."""
        if seconds > 0:
            self._restore_rate = _mean(self._restore_rate, size / seconds)
        await self.index.call(self.index.index.used_cache, self.id, key, time.time())

    async def forget(self, key: str) -> bool:
        """Delete the cache of `key`: it is of no use. It is not asked for again, also where its file cannot be deleted.

        Returns:
            whether a file was deleted.
        """
        deleted = self.path is not None and await asyncio.to_thread(_delete, self.path / self.saved_name(key))
        await self.index.call(self.index.index.drop_cache, self.id, key)
        return deleted

    async def files(self) -> list[CacheFile]:
        """The saved caches of the route as they are on disk, in no order; empty where they cannot be seen."""
        if self.path is None:
            return []
        files = await asyncio.to_thread(list_files, self.path, self.tag)
        rows = {row.key: row for row in await self.index.call(self.index.index.caches_of, self.id, self.tag)}
        return [_told(file, rows.get(file.key)) for file in files]

    async def enforce_limits(self, protected: Collection[str]) -> Enforced:
        """Delete files, the one cheapest to lose first, until both limits hold, but never one of the keys in `protected`."""
        if self.path is None or not (self.max_files or self.max_bytes):
            return Enforced()
        files = await self.files()
        drop = files_to_drop(files, self.max_files, self.max_bytes, protected, policy=self.evict, now=time.time())
        dropped = [file for file in drop if await self.forget(file.key)]
        return Enforced(tuple(dropped), over_alone(files, self.max_bytes))

    @property
    def needs_sweep(self) -> bool:
        """Whether `sweep` has not been called for `SWEEP_SECONDS`, or never."""
        return self.path is not None and time.monotonic() - self._swept >= SWEEP_SECONDS

    async def sweep(self) -> int:
        """Delete what broken saves have left, and forget what has vanished. Returns how many."""
        if self.path is None:
            return 0
        self._swept = time.monotonic()
        swept = await asyncio.to_thread(_sweep_parts, self.path, self.tag)
        rows = await self.index.call(self.index.index.caches)  # before the files: a save between them is in both
        rows = [row for row in rows if row.folder == self.id and tag_of(row.key) == self.tag]
        begun = {row.key for row in rows if row.pending and time.time() - row.created < PART_SECONDS}
        for key in {row.key for row in rows} - begun:
            if self.path is not None and not await asyncio.to_thread((self.path / self.saved_name(key)).exists):
                await self.index.call(self.index.index.drop_cache, self.id, key)
                swept += 1
        return swept

    def _whole_is_cheap(self, size: int) -> bool:
        """Whether reading all of a file costs less than a tenth of its restore, by what both took so far."""
        if self.verify == "full" or size <= checksum.WHOLE_BYTES:
            return True
        return 0 < 10 * self._restore_rate <= self._hash_rate

    def _take(self, file: Path, whole: bool) -> checksum.Checksums:
        started = time.perf_counter()
        sums = checksum.take(file, whole=whole)
        took = time.perf_counter() - started
        if whole and took > 0 and sums.size > checksum.WHOLE_BYTES:
            self._hash_rate = _mean(self._hash_rate, sums.size / took)
        return sums


def fits(row: CacheRow, sums: checksum.Checksums) -> bool:
    """Whether a file is the one that the index has recorded."""
    return row.size == sums.size and row.sample == sums.sample and row.checksum in ("", sums.whole or row.checksum)


def tag_of(key: str) -> str:
    """The route's tag of a key."""
    return _KEY_ENDING.sub("", key)


def list_files(folder: Path, tag: str | None) -> list[CacheFile]:
    """The saved caches in a folder: of one route, or (None) of all. Blocks; an unreadable folder has none."""
    found = []
    name = re.compile((r"[A-Za-z0-9_-]+" if tag is None else re.escape(tag)) + r"_[0-9a-f]{32}\.bin")
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    info = entry.stat(follow_symlinks=False)
                    found.append(CacheFile(entry.name[: -len(".bin")], info.st_size, info.st_mtime))
    return found


def _told(file: CacheFile, row: CacheRow | None) -> CacheFile:
    if row is None:
        return file
    used = max(file.used, row.used)
    return replace(file, used=used, tokens=row.tokens, seconds=row.seconds, uses=row.uses)


def _saved(row: CacheRow) -> Saved:
    return Saved(row.tokens, row.size, row.chain, row.rewound)


def _mean(old: float, new: float) -> float:
    return new if old == 0 else 0.7 * old + 0.3 * new


def _delete(file: Path) -> bool:
    try:
        file.unlink()
    except OSError:
        return False
    return True


def _has_room(folder: Path, size: float) -> bool:
    try:
        return shutil.disk_usage(folder).free > size
    except OSError:
        return True


def _sweep_parts(folder: Path, tag: str) -> int:
    name = re.compile(re.escape(tag) + r"_[0-9a-f]{32}\.bin\.part")
    swept = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if name.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > PART_SECONDS:
                        swept += _delete(folder / entry.name)
    return swept
