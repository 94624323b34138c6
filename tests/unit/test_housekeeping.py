"""Looking after saved caches from outside the proxy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slot_cache import checksum
from slot_cache.housekeeping import CacheEntry, entries, over_limits, remove, stale
from slot_cache.index import CacheRow, Index, MemoryIndex, SqliteIndex
from slot_cache.request import route_tag

TAG, OTHER_TAG = route_tag("smol"), route_tag("big")
SERVER = "http://llama:8080"


def key(number: int, tag: str = TAG) -> str:
    return f"{tag}_{number:032x}"


@pytest.fixture(params=["memory", "sqlite"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Index]:
    made: Index = MemoryIndex() if request.param == "memory" else SqliteIndex(tmp_path / "state" / "index.sqlite3")
    yield made
    made.close()


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    path = tmp_path / "saves"
    path.mkdir()
    return path


Save = Callable[..., CacheRow]


@pytest.fixture
def save(index: Index, saves: Path) -> Save:
    """Write a file and record it."""

    def saved(
        number: int = 1, data: bytes = b"data" * 100, tag: str = TAG, route: str = "smol", **more: Any
    ) -> CacheRow:
        name = key(number, tag)
        (saves / f"{name}.bin").write_bytes(data)
        sums = checksum.take(saves / f"{name}.bin", whole=True)
        row = CacheRow(str(saves), name, route, "model-a", 7, len(data), sums.whole, sums.sample, created=1.0, used=1.0)
        row = replace(row, **more)
        index.put_cache(row)
        return row

    return saved


def entry(number: int = 1, **more: Any) -> CacheEntry:
    made = CacheEntry("/saves", key(number), "smol", 7, 400, 0, "model-a", 0.0, 1.0, float(number), "ok")
    return replace(made, **more)


def states(index: Index, *, verify: bool = False) -> dict[str, str]:
    return {found.key: found.state for found in entries(index, verify=verify)}


# what is there


def test_there_is_nothing_in_an_empty_index(index: Index) -> None:
    assert entries(index) == entries(index, verify=True) == []


def test_an_entry_tells_what_the_index_knows(index: Index, save: Save, saves: Path) -> None:
    save(1, tokens=11, uses=3, seconds=0.5, created=10.0, used=20.0)
    expected = CacheEntry(str(saves), key(1), "smol", 11, 400, 3, "model-a", 0.5, 10.0, 20.0, "ok")
    assert entries(index) == entries(index, verify=True) == [expected]
    assert expected.session == f"{1:032x}"


def test_entries_come_by_folder_and_the_last_used_first(index: Index, save: Save, tmp_path: Path) -> None:
    for number, used in ((1, 5.0), (2, 9.0), (3, 7.0)):
        save(number, used=used)
    index.put_cache(CacheRow(SERVER, key(4), "smol", "m", 1, 1, used=99.0))
    index.put_cache(CacheRow(str(tmp_path / "aaa"), key(5), "smol", "m", 1, 1, used=1.0))
    assert [found.key for found in entries(index)] == [key(5), key(2), key(3), key(1), key(4)]


def damaged(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "flipped":
        file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif how == "cut":
        file.write_bytes(data[:-1])
    elif how == "longer":
        file.write_bytes(data + b"x")
    elif how == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        file.mkdir()


@pytest.mark.parametrize(
    ("how", "quick", "verified"),
    [
        ("flipped", "ok", "damaged"),
        ("cut", "damaged", "damaged"),
        ("longer", "damaged", "damaged"),
        ("empty", "damaged", "damaged"),
        ("a folder", "damaged", "damaged"),
    ],
)
def test_a_file_that_is_not_what_was_saved_is_damaged(
    index: Index, save: Save, saves: Path, how: str, quick: str, verified: str
) -> None:
    save(1)
    save(2)
    damaged(saves / f"{key(1)}.bin", how)
    assert states(index) == {key(1): quick, key(2): "ok"}
    assert states(index, verify=True) == {key(1): verified, key(2): "ok"}
    assert (saves / f"{key(1)}.bin").exists()  # looking deletes nothing


def test_a_file_that_is_gone_is_missing(index: Index, save: Save, saves: Path) -> None:
    save(1)
    (saves / f"{key(1)}.bin").unlink()
    assert states(index) == states(index, verify=True) == {key(1): "missing"}


def test_a_folder_that_is_gone_has_only_missing_files(index: Index, save: Save, saves: Path) -> None:
    save(1)
    (saves / f"{key(1)}.bin").unlink()
    saves.rmdir()
    assert states(index) == states(index, verify=True) == {key(1): "missing"}


def test_what_cannot_be_seen_is_unseen(index: Index) -> None:
    index.put_cache(CacheRow(SERVER, key(1), "smol", "m", 7, 400))
    assert states(index) == states(index, verify=True) == {key(1): "unseen"}


def test_a_file_beside_them_that_nobody_recorded_is_unknown(index: Index, save: Save, saves: Path) -> None:
    save(1)
    for name in (f"{key(2)}.bin", f"{key(3, OTHER_TAG)}.bin", "precious.bin", f"{key(4)}.bin.part", "model.gguf"):
        (saves / name).write_bytes(b"xx")
    os.utime(saves / f"{key(2)}.bin", (5.0, 5.0))
    assert states(index) == {key(1): "ok", key(2): "unknown", key(3, OTHER_TAG): "unknown"}
    (unknown,) = [found for found in entries(index) if found.key == key(2)]
    assert unknown == CacheEntry(str(saves), key(2), "", 0, 2, 0, "", 0.0, 5.0, 5.0, "unknown")


def test_a_checksum_of_samples_will_do(index: Index, save: Save) -> None:
    save(1, checksum="")
    assert states(index, verify=True) == {key(1): "ok"}
    save(2, sample="f" * 32, checksum="")
    assert states(index, verify=True)[key(2)] == "damaged"


@pytest.mark.parametrize("named", [False, True], ids=["before the rename", "after it"])
@pytest.mark.parametrize("verify", [False, True])
def test_of_a_save_that_was_cut_off_the_row_counts_that_the_file_is(
    index: Index, save: Save, saves: Path, named: bool, verify: bool
) -> None:
    file = saves / f"{key(1)}.bin"
    newer = save(1, b"newer" * 100, tokens=9)
    older = save(1, b"old" * 100, tokens=3)
    index.put_cache(replace(newer, pending=True))
    if named:
        file.write_bytes(b"newer" * 100)
    (found,) = entries(index, verify=verify)
    assert (found.state, found.tokens, found.size) == (
        ("ok", newer.tokens, newer.size) if named else ("ok", older.tokens, older.size)
    )


def test_a_first_save_that_was_cut_off_is_missing(index: Index, save: Save, saves: Path) -> None:
    row = save(1)
    index.drop_cache(row.folder, row.key)
    index.put_cache(replace(row, pending=True))
    assert states(index) == {key(1): "ok"}  # named, not recorded yet
    (saves / f"{key(1)}.bin").unlink()
    assert states(index) == {key(1): "missing"}


# what may go


def test_caches_of_another_model_than_the_latest_are_stale() -> None:
    found = [
        entry(1, created=1.0, model="old"),
        entry(2, created=2.0, model="older"),
        entry(3, created=3.0, model="new"),
        entry(4, created=2.5, model="new"),
    ]
    assert stale(found) == found[:2]
    assert stale(found[2:]) == []


def test_routes_and_folders_are_stale_each_for_itself() -> None:
    found = [
        entry(1, created=1.0, model="a"),
        entry(2, created=9.0, model="b", route="big"),
        entry(3, created=9.0, model="c", folder="/other"),
    ]
    assert stale(found) == []
    later = entry(4, created=5.0, model="d")
    assert stale([*found, later]) == [found[0]]


def test_what_is_missing_is_stale_and_what_is_unknown_or_damaged_is_not() -> None:
    gone = entry(1, state="missing")
    unknown = entry(2, state="unknown", route="", model="")
    broken = entry(3, state="damaged")
    unseen = entry(4, state="unseen")
    assert stale([gone, unknown, broken, unseen]) == [gone]


def test_nothing_is_stale_of_nothing() -> None:
    assert stale([]) == []
    assert stale([entry(1, state="unknown", route="", model="")]) == []


def test_over_the_limits_is_what_was_used_longest_ago() -> None:
    found = [entry(number, size=100) for number in (3, 1, 2, 4)]
    assert {e.key for e in over_limits(found, 2, 0)} == {key(1), key(2)}
    assert {e.key for e in over_limits(found, 0, 150)} == {key(1), key(2), key(3)}
    assert {e.key for e in over_limits(found, 3, 399)} == {key(1)}
    assert over_limits(found, 0, 0) == over_limits(found, 4, 400) == []


def test_limits_hold_for_each_route_and_folder() -> None:
    found = [
        entry(1),
        entry(2),
        entry(3, key=key(3, OTHER_TAG), route="big"),
        entry(4, folder="/other"),
    ]
    assert [e.key for e in over_limits(found, 1, 0)] == [key(1)]


def test_unknown_files_count_for_the_limits_of_the_route_whose_name_they_have() -> None:
    found = [entry(1), entry(2, state="unknown", route="", model=""), entry(3)]
    assert [e.key for e in over_limits(found, 2, 0)] == [key(1)]


def test_what_is_missing_does_not_count_for_the_limits() -> None:
    found = [entry(1), entry(2, state="missing"), entry(3)]
    assert over_limits(found, 2, 0) == []


# removing


def test_what_is_removed_is_gone_from_disk_and_index(index: Index, save: Save, saves: Path) -> None:
    save(1)
    save(2)
    first = next(found for found in entries(index) if found.key == key(1))
    assert remove(index, first) is True
    assert not (saves / f"{key(1)}.bin").exists()
    assert states(index) == {key(2): "ok"}
    assert remove(index, first) is False


def test_what_is_missing_or_unseen_is_removed_from_the_index(index: Index, save: Save, saves: Path) -> None:
    save(1)
    (saves / f"{key(1)}.bin").unlink()
    index.put_cache(CacheRow(SERVER, key(2), "smol", "m", 7, 400))
    for found in entries(index):
        assert remove(index, found) is False
    assert index.caches() == []


def test_an_unknown_file_can_be_removed(index: Index, save: Save, saves: Path) -> None:
    save(1)
    (saves / f"{key(2)}.bin").write_bytes(b"x")
    unknown = next(found for found in entries(index) if found.state == "unknown")
    assert remove(index, unknown) is True
    assert states(index) == {key(1): "ok"}


def test_what_cannot_be_deleted_stays_in_the_index(index: Index, save: Save, saves: Path) -> None:
    save(1)
    damaged(saves / f"{key(1)}.bin", "a folder")
    (found,) = entries(index)
    with pytest.raises(OSError):
        remove(index, found)
    assert states(index) == {key(1): "damaged"}


def test_a_save_of_the_same_name_meanwhile_is_removed_with_its_record(index: Index, save: Save, saves: Path) -> None:
    """Whoever removes means the key; nothing is left half."""
    save(1)
    (found,) = entries(index)
    row = save(1, b"newer" * 10)
    index.put_cache(replace(row, pending=True))
    assert remove(index, found) is True
    assert index.caches() == [] and not (saves / f"{key(1)}.bin").exists()
