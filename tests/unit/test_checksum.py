"""Checksums of saved caches: what they notice, and what the sample does not look at."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from slot_cache import checksum
from slot_cache.checksum import EDGE_BYTES, SAMPLE_BYTES, SAMPLES, WHOLE_BYTES, Checksums, take


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checksum") / "cache.bin"


def of(file: Path, data: bytes, *, whole: bool = True) -> Checksums:
    file.write_bytes(data)
    return take(file, whole=whole)


def flipped(data: bytes, at: int, bit: int = 0) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


SMALL = random.Random(1).randbytes(700)
LARGE = random.Random(2).randbytes(2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES * 4)
"""Larger than all that the sample reads of it."""


def test_the_same_bytes_have_the_same_checksums(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    for data in (b"", SMALL, LARGE):
        assert of(file, data) == of(other, data)


def test_the_whole_checksum_is_xxh3_of_the_bytes(file: Path) -> None:
    for data in (b"", SMALL, LARGE, bytes(3 * 2**20 + 1)):
        sums = of(file, data)
        assert (sums.size, sums.whole) == (len(data), xxhash.xxh3_128_hexdigest(data))


def test_the_whole_checksum_is_taken_where_it_is_asked_for(file: Path) -> None:
    asked, not_asked = of(file, LARGE), of(file, LARGE, whole=False)
    assert asked.whole and not not_asked.whole
    assert asked.sample == not_asked.sample


def test_every_truncation_is_noticed(file: Path) -> None:
    good = of(file, SMALL)
    sums = {of(file, SMALL[:length]) for length in range(len(SMALL))}
    assert good not in sums
    assert (
        len({s.sample for s in sums} | {good.sample}) == len({s.whole for s in sums} | {good.whole}) == len(SMALL) + 1
    )


def test_every_extension_is_noticed(file: Path) -> None:
    good = of(file, SMALL)
    for more in (b"\0", b"\0" * 100, SMALL, b"x"):
        longer = of(file, SMALL + more)
        assert longer.sample != good.sample and longer.whole != good.whole


def test_zeros_of_another_length_are_another_file(file: Path) -> None:
    """The tail of a hole looks like any other part of it: the length counts."""
    sizes = [0, 1, 36, 1000, 2 * EDGE_BYTES, 2 * EDGE_BYTES + 1, 2 * EDGE_BYTES + 2, 4 * EDGE_BYTES, 4 * EDGE_BYTES + 1]
    assert len({of(file, bytes(size)).sample for size in sizes}) == len(sizes)


def test_every_flipped_bit_of_a_small_file_is_noticed(file: Path) -> None:
    data = SMALL[:120]
    good = of(file, data)
    for at in range(len(data)):
        for bit in range(8):
            bad = of(file, flipped(data, at, bit))
            assert bad.sample != good.sample and bad.whole != good.whole


EDGES = [
    0,
    1,
    EDGE_BYTES - 1,
    EDGE_BYTES,  # the first sample between begins here
    EDGE_BYTES + SAMPLE_BYTES - 1,
    len(LARGE) - EDGE_BYTES,
    len(LARGE) - 2,
    len(LARGE) - 1,
]


@pytest.mark.parametrize("at", EDGES)
def test_a_bit_flipped_in_head_or_tail_of_a_large_file_is_noticed(file: Path, at: int) -> None:
    good, bad = of(file, LARGE), of(file, flipped(LARGE, at))
    assert bad.sample != good.sample and bad.whole != good.whole


@pytest.mark.parametrize("at", [EDGE_BYTES + SAMPLE_BYTES, len(LARGE) - EDGE_BYTES - 1])
def test_a_bit_flipped_between_the_samples_is_noticed_by_the_whole_checksum_only(file: Path, at: int) -> None:
    good, bad = of(file, LARGE), of(file, flipped(LARGE, at))
    assert bad.sample == good.sample and bad.whole != good.whole


def test_the_sample_looks_at_as_many_places_as_it_says(file: Path) -> None:
    """A damaged stretch as long as the gap between two samples is always noticed."""
    good = of(file, LARGE, whole=False)
    gap = (len(LARGE) - 2 * EDGE_BYTES) // SAMPLES + 1
    for start in range(EDGE_BYTES, len(LARGE) - EDGE_BYTES - gap, gap // 3):
        bad = LARGE[:start] + bytes(byte ^ 255 for byte in LARGE[start : start + gap]) + LARGE[start + gap :]
        assert of(file, bad, whole=False).sample != good.sample


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        SAMPLE_BYTES,
        EDGE_BYTES - 1,
        EDGE_BYTES,
        2 * EDGE_BYTES - 1,
        2 * EDGE_BYTES,
        2 * EDGE_BYTES + 1,
        2 * EDGE_BYTES + SAMPLES,
        2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES,
        WHOLE_BYTES,
        WHOLE_BYTES + 1,
    ],
)
def test_what_is_sampled_lies_in_the_file_and_covers_both_ends(size: int) -> None:
    places = checksum._sampled(size)
    assert places[0][0] == 0
    assert sum(places[-1]) == size
    assert all(0 <= start <= size and length >= 0 for start, length in places)
    assert all(start + length <= size for start, length in (places[0], places[-1]))
    covered = bytearray(size)
    for start, length in places:
        covered[start : start + length] = b"\1" * (min(start + length, size) - start)
    assert len(covered) == size
    if size <= 2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES:
        assert all(covered)


@pytest.mark.parametrize("size", [2 * EDGE_BYTES, 2 * EDGE_BYTES + 1, 2 * EDGE_BYTES + 65])
def test_a_file_just_larger_than_its_edges_is_sampled_whole(file: Path, size: int) -> None:
    data = LARGE[:size]
    good = of(file, data, whole=False)
    for at in (0, size // 2 - 1, size // 2, EDGE_BYTES, size - 1):
        assert of(file, flipped(data, min(at, size - 1)), whole=False).sample != good.sample


def test_a_huge_file_is_sampled_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huge = tmp_path / "huge.bin"
    with huge.open("wb") as file:
        file.truncate(2**40)
    read = []
    xxh3_128 = xxhash.xxh3_128

    class Counting:
        def __init__(self, *data: bytes) -> None:
            self._digest = xxh3_128(*data)

        def update(self, data: bytes) -> None:
            read.append(len(data))
            self._digest.update(data)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr(checksum.xxhash, "xxh3_128", Counting)
    first = take(huge, whole=False)
    assert first.size == 2**40
    assert sum(read) <= 2 * EDGE_BYTES + SAMPLES * SAMPLE_BYTES
    with huge.open("r+b") as file:
        file.seek(2**40 - 1)
        file.write(b"x")
    assert take(huge, whole=False).sample != first.sample
    os.truncate(huge, 2**40 - 1)
    assert take(huge, whole=False).sample != first.sample


def test_a_file_that_shrinks_while_it_is_read_is_read_to_its_new_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shrinks.bin"
    file.write_bytes(LARGE)
    good = take(file, whole=True)
    places = checksum._sampled

    def shrinks(size: int) -> list[tuple[int, int]]:
        os.truncate(file, 1000)
        return places(size)

    monkeypatch.setattr(checksum, "_sampled", shrinks)
    sums = take(file, whole=True)
    assert sums.sample != good.sample and sums.whole != good.whole


@pytest.mark.parametrize("what", ["nothing", "folder"])
def test_what_is_no_file_raises_oserror(tmp_path: Path, what: str) -> None:
    if what == "folder":
        (tmp_path / "x").mkdir()
    with pytest.raises(OSError):
        take(tmp_path / "x", whole=True)


@given(data=st.binary(max_size=300), other=st.binary(max_size=300))
@example(data=b"", other=b"\0")
@example(data=b"\0", other=b"\0\0")
def test_two_files_are_the_same_if_their_bytes_are(file: Path, data: bytes, other: bytes) -> None:
    one, two = of(file, data), of(file, other)
    assert (one == two) == (one.sample == two.sample) == (one.whole == two.whole) == (data == other)


@given(
    edge=st.integers(1, 40),
    samples=st.integers(1, 10),
    length=st.integers(1, 20),
    data=st.binary(max_size=400),
    at=st.integers(0, 10_000),
    bit=st.integers(0, 7),
)
def test_a_flip_in_a_sampled_place_is_noticed_and_the_whole_checksum_notices_all(
    file: Path, edge: int, samples: int, length: int, data: bytes, at: int, bit: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("EDGE_BYTES", edge), ("SAMPLES", samples), ("SAMPLE_BYTES", length)):
            patched.setattr(checksum, name, value)
        good = of(file, data)
        assert of(file, data) == good
        if not data:
            return
        at %= len(data)
        bad = of(file, flipped(data, at, bit))
        sampled = any(start <= at < start + count for start, count in checksum._sampled(len(data)))
        assert (bad.sample != good.sample) == sampled
        assert bad.whole != good.whole
        if at < edge or at >= len(data) - edge:
            assert sampled
