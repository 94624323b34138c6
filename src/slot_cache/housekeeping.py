"""Looking after saved caches from outside the proxy: what is there, whether it is whole, what may go.

Works on the index and the folders that it names, while proxies run: they notice what is gone. Everything here blocks.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slot_cache import checksum
from slot_cache.eviction import CacheFile, files_to_drop
from slot_cache.folder import fits, list_files, tag_of
from slot_cache.index import CacheRow, Index

State = Literal["ok", "missing", "damaged", "unseen", "unknown"]


@dataclass(frozen=True)
class CacheEntry:
    """A saved cache, as the index and its folder tell of it.

    Attributes:
        folder: the save_path, or the server's address where the folder cannot be seen.
        key, route: as in `CacheRow`; the route is "" for a file that the index does not know.
        tokens, size, uses, model, seconds: as in `CacheRow`.
        created, used: seconds since the epoch.
        state: `ok`; `missing`: no such file; `damaged`: not the file that was saved; `unseen`: its folder cannot be seen
            from here; `unknown`: a file that the index does not know, it is never restored.
    """

    folder: str
    key: str
    route: str
    tokens: int
    size: int
    uses: int
    model: str
    seconds: float
    created: float
    used: float
    state: State

    @property
    def session(self) -> str:
        """The 32 hex digits that stand for the session."""
        return self.key[-32:]


def entries(index: Index, *, verify: bool = False) -> list[CacheEntry]:
    """Every saved cache of the index, and the unknown files beside them; by folder, then the one used last first.

    Args:
        index: the index.
        verify: read every file whole; else only its size is compared.
    """
    rows: dict[tuple[str, str], list[CacheRow]] = defaultdict(list)
    for row in index.caches():
        rows[row.folder, row.key].append(row)
    found = [_entry(candidates, verify) for candidates in rows.values()]
    for folder in {folder for folder, _ in rows if folder.startswith("/")}:
        for file in list_files(Path(folder), None):
            if (folder, file.key) not in rows:
                found.append(
                    CacheEntry(folder, file.key, "", 0, file.size, 0, "", 0.0, file.used, file.used, "unknown")
                )
    return sorted(found, key=lambda entry: (entry.folder, -entry.used, entry.key))


def stale(found: Sequence[CacheEntry]) -> list[CacheEntry]:
    """The caches of another model than the one that wrote the latest save of their route and folder, and the missing."""
    latest: dict[tuple[str, str], CacheEntry] = {}
    for entry in found:
        where = (entry.folder, entry.route)
        if entry.route and (where not in latest or entry.created > latest[where].created):
            latest[where] = entry
    return [
        entry
        for entry in found
        if entry.state == "missing" or (entry.route and entry.model != latest[entry.folder, entry.route].model)
    ]


def over_limits(found: Iterable[CacheEntry], max_files: int, max_bytes: int) -> list[CacheEntry]:
    """What would have to go for every route to keep the limits (0: no limit), the one used longest ago first."""
    routes: dict[tuple[str, str], list[CacheEntry]] = defaultdict(list)
    for entry in found:
        if entry.state != "missing":
            routes[entry.folder, tag_of(entry.key)].append(entry)
    drop = []
    for caches in routes.values():
        files = [CacheFile(entry.key, entry.size, entry.used) for entry in caches]
        keys = {file.key for file in files_to_drop(files, max_files, max_bytes)}
        drop += [entry for entry in caches if entry.key in keys]
    return drop


def remove(index: Index, entry: CacheEntry) -> bool:
    """Delete a cache's file and its record. Returns whether there was a file; without a visible folder there is none.

    Raises:
        OSError: there is a file and it cannot be deleted; the record stays.
    """
    deleted = False
    if entry.folder.startswith("/"):
        with contextlib.suppress(FileNotFoundError):
            (Path(entry.folder) / f"{entry.key}.bin").unlink()
            deleted = True
    index.drop_cache(entry.folder, entry.key)
    return deleted


def _entry(rows: list[CacheRow], verify: bool) -> CacheEntry:
    row, state = _state(rows, verify)
    return CacheEntry(
        row.folder,
        row.key,
        row.route,
        row.tokens,
        row.size,
        row.uses,
        row.model,
        row.seconds,
        row.created,
        row.used,
        state,
    )


def _state(rows: list[CacheRow], verify: bool) -> tuple[CacheRow, State]:
    """The row that counts (a pending one only if the file is it), and the state of the file."""
    ordered = sorted(rows, key=lambda row: row.pending)
    first = ordered[0]
    if not first.folder.startswith("/"):
        return first, "unseen"
    file = Path(first.folder) / f"{first.key}.bin"
    try:
        if verify:
            sums = checksum.take(file, whole=True)
            match = next((row for row in ordered if fits(row, sums)), None)
        else:
            size = file.stat().st_size
            match = next((row for row in ordered if row.size == size), None)
    except FileNotFoundError:
        return first, "missing"
    except OSError:
        return first, "damaged"
    return (match, "ok") if match is not None else (first, "damaged")
