"""Checksums of saved caches: of the whole file where that is cheap, else of its head, its tail and samples between.

XXH3 (128 bits): not against forgery, which whoever can write the folder needs no collision for, but against files that
were cut short, damaged or swapped; several GB/s, so that checking does not eat what restoring saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

WHOLE_BYTES = 4 * 2**20
"""A file up to this size is always checked whole: about a millisecond."""

EDGE_BYTES = 256 * 2**10
SAMPLES = 64
SAMPLE_BYTES = 4 * 2**10

_CHUNK = 2**20


@dataclass(frozen=True)
class Checksums:
    """Hex digests of a file: `sample` always, `whole` where it was asked for ("" if not)."""

    size: int
    sample: str
    whole: str = ""


def take(path: Path, *, whole: bool) -> Checksums:
    """Read the checksums of a file. Raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        sample = xxhash.xxh3_128(size.to_bytes(8, "little"))
        for start, length in _sampled(size):
            file.seek(start)
            sample.update(file.read(length))
        if not whole:
            return Checksums(size, sample.hexdigest())
        full = xxhash.xxh3_128()
        file.seek(0)
        while chunk := file.read(_CHUNK):
            full.update(chunk)
        return Checksums(size, sample.hexdigest(), full.hexdigest())


def _sampled(size: int) -> list[tuple[int, int]]:
    """The (start, length) of what the sample reads."""
    if size <= 2 * EDGE_BYTES:
        return [(0, size)]
    middle = size - 2 * EDGE_BYTES
    step = middle / SAMPLES
    between = [(EDGE_BYTES + int(number * step), SAMPLE_BYTES) for number in range(SAMPLES)]
    return [(0, EDGE_BYTES), *between, (size - EDGE_BYTES, EDGE_BYTES)]
