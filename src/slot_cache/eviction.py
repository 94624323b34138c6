"""Pure: which cache in a slot, and which saved file, is cheapest to lose.

Both scores say the same thing: seconds of work that losing the cache would cost, times how soon it is likely to be wanted
again. Of a cache that has lain unused for `t` seconds nothing is known but that; the longer it has lain, the longer it will
(the time until its next use is about as long as the time since its last). So the chance that it is wanted in the next
moment falls as 1 / (t + T), where T keeps a cache that was used just now from counting without bound. The cache with the
lowest score goes first. With equal costs that is "the one used longest ago"; a long context that takes a minute to compute
outlives a burst of small fresh ones, until it has lain as many times longer as it is dearer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import log2
from typing import Literal

SLOT_RECENCY_SECONDS = 60.0
"""T of slots: the pauses within a conversation are of this size."""

FILE_RECENCY_SECONDS = 60.0
"""T of files. It must be short beside the time in which the disk fills once: files younger than T are told apart by their
use alone, and conversations that have ended, but were restored often, would push out those that go on. (Of an hour, traces
that fill the disk in minutes got up to a quarter less reuse than with `lru`; see `slot-cache simulate`.)"""

UNNOTICED_SECONDS = 0.05
"""A shorter wait before an answer begins is not noticed."""

PREFILL_TOKENS_PER_SECOND = 500.0
RESTORE_BYTES_PER_SECOND = 500e6
BYTES_PER_TOKEN = 128 * 1024.0
"""What is assumed where nothing was measured yet: an 8B model on a small GPU, and an ordinary SSD."""


@dataclass(frozen=True)
class Speeds:
    """What was measured of a server and its model; 0: not measured yet.

    Attributes:
        prefill: tokens per second that it computes.
        restore: bytes per second that it restores.
        token_bytes: bytes of a saved token.
    """

    prefill: float = 0.0
    restore: float = 0.0
    token_bytes: float = 0.0

    def compute_seconds(self, tokens: float) -> float:
        """Seconds to compute so many tokens."""
        return tokens / (self.prefill or PREFILL_TOKENS_PER_SECOND)

    def restore_seconds(self, tokens: float) -> float:
        """Seconds to restore so many tokens."""
        return tokens * (self.token_bytes or BYTES_PER_TOKEN) / (self.restore or RESTORE_BYTES_PER_SECOND)

    def restoring_pays(self, restored: float, useful: float) -> bool:
        """Whether restoring a file of so many tokens is quicker than computing the part of them that is of use.

        Where one of both was not measured yet it is tried; and a restore that nobody would notice (`UNNOTICED_SECONDS`) is
        not weighed: what was measured of so short times says little on a busy machine.
        """
        if not (self.prefill and self.restore and self.token_bytes):
            return True
        takes = self.restore_seconds(restored)
        return takes < UNNOTICED_SECONDS or takes < self.compute_seconds(useful)


def slot_score(tokens: int, saved_tokens: int, idle_seconds: float, speeds: Speeds) -> float:
    """What losing a resident cache costs, by how soon it may be wanted: (seconds) / (seconds); the lowest goes first.

    The cost is the time to have it back: to restore what is saved of it and compute the rest, or to compute all of it.

    Args:
        tokens: how many it holds.
        saved_tokens: how many of them its file holds, 0 without one.
        idle_seconds: since its last use.
        speeds: what was measured.
    """
    saved = min(saved_tokens, tokens)
    cost = speeds.compute_seconds(tokens)
    if saved:
        cost = min(cost, speeds.restore_seconds(saved) + speeds.compute_seconds(tokens - saved))
    return cost / (max(idle_seconds, 0.0) + SLOT_RECENCY_SECONDS)


@dataclass(frozen=True)
class CacheFile:
    """A saved cache on disk.

    Attributes:
        key: its name without .bin.
        size: in bytes.
        used: when it was last saved or restored, seconds since the epoch.
        tokens: how many it holds, 0 if not known.
        seconds: the prefill it stands for, 0 if not known.
        uses: how often it was restored.
    """

    key: str
    size: int
    used: float
    tokens: int = 0
    seconds: float = 0.0
    uses: int = 0


Policy = Literal["cost", "lru"]


def file_score(file: CacheFile, now: float) -> float:
    """What a file saves, per byte it takes, by how soon it may be wanted; the lowest goes first.

    Seconds of prefill, times log2(2 + uses) (what was wanted again and again is wanted again; the tenth time says less than
    the second, and one that is new has its chance), per byte, over its age. A file that nothing is known of cannot be restored and has 0.
    """
    seconds = file.seconds or file.tokens / PREFILL_TOKENS_PER_SECOND
    idle = max(now - file.used, 0.0)
    return seconds * log2(2 + file.uses) / max(file.size, 1) / (idle + FILE_RECENCY_SECONDS)


def files_to_drop(
    files: Iterable[CacheFile],
    max_files: int,
    max_bytes: int,
    protected: Collection[str] = (),
    *,
    policy: Policy = "lru",
    now: float = 0.0,
) -> list[CacheFile]:
    """The files to delete so that both limits hold, in this order. 0 is no limit.

    Args:
        files: what there is.
        max_files, max_bytes: the limits.
        protected: keys that count but are never dropped, so the limits may stay passed; see `over_alone`.
        policy: `lru`: the file used longest ago goes first; `cost`: the one with the lowest `file_score`.
        now: seconds since the epoch, for `cost`.
    """
    rows = list(files)
    if policy == "cost":
        in_order = sorted(rows, key=lambda file: (file_score(file, now), file.used, file.key))
    else:
        in_order = sorted(rows, key=lambda file: (file.used, file.key))
    count, total = len(rows), sum(file.size for file in rows)
    drop = []
    for file in in_order:
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
