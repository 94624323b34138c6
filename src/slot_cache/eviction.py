"""Pure: which saved caches go first when a route's limits are passed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CacheFile:
    """A saved cache on disk: its key, its size in bytes, and when it was last used (seconds since the epoch)."""

    key: str
    size: int
    used: float


def files_to_drop(
    files: Iterable[CacheFile], max_files: int, max_bytes: int, protected: Collection[str] = ()
) -> list[CacheFile]:
    """The files to delete so that both limits hold, the one used longest ago first. 0 is no limit.

    A protected file counts but is never dropped, so the limits may stay passed; see `over_alone`.
    """
    by_use = sorted(files, key=lambda file: (file.used, file.key))
    count, total = len(by_use), sum(file.size for file in by_use)
    drop = []
    for file in by_use:
        if not ((max_files and count > max_files) or (max_bytes and total > max_bytes)):
            break
        if file.key in protected:
            continue
        drop.append(file)
        count, total = count - 1, total - file.size
    return drop


def over_alone(files: Iterable[CacheFile], max_bytes: int) -> CacheFile | None:
    """The largest file, if it is over the limit all by itself."""
    largest = max(files, key=lambda file: file.size, default=None)
    return largest if largest is not None and max_bytes and largest.size > max_bytes else None
