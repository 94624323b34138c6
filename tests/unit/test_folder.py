"""The saved caches of one route on disk."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slot_cache import checksum
from slot_cache import folder as folder_module
from slot_cache.eviction import CacheFile
from slot_cache.folder import CacheFolder, Enforced, FolderError, Lookup, NotTheFolderError, tag_of
from slot_cache.index import CacheRow, Index, IndexThread, MemoryIndex, SqliteIndex
from slot_cache.request import route_tag
from slot_cache.state import Saved

TAG = route_tag("smol")
MODEL, OTHER_MODEL = "a" * 32, "b" * 32
SERVER = "http://llama:8080"


def key(number: int, tag: str = TAG) -> str:
    return f"{tag}_{number:032x}"


K = key(1)


@pytest.fixture(params=["memory", "sqlite"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IndexThread]:
    made: Index = MemoryIndex() if request.param == "memory" else SqliteIndex(tmp_path / "state" / "index.sqlite3")
    thread = IndexThread(made)
    yield thread
    thread.close()


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    path = tmp_path / "saves"
    path.mkdir()
    return path


Make = Callable[..., CacheFolder]


@pytest.fixture
def make(index: IndexThread, saves: Path) -> Make:
    def made(**options: Any) -> CacheFolder:
        return CacheFolder(index, **({"tag": TAG, "route": "smol", "server": SERVER, "path": saves} | options))

    return made


@pytest.fixture
def folder(make: Make) -> CacheFolder:
    return make()


def put(path: Path, name: str, data: bytes | int = 1000, used: float | None = None) -> Path:
    file = path / name
    file.write_bytes(b"x" * data if isinstance(data, int) else data)
    if used is not None:
        os.utime(file, (used, used))
    return file


def seen(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


async def save(
    folder: CacheFolder,
    name: str = K,
    data: bytes | int = 2000,
    tokens: int = 7,
    model: str = MODEL,
    chain: bytes = b"",
) -> None:
    data = b"x" * data if isinstance(data, int) else data
    if folder.path is not None:
        put(folder.path, folder.name_to_save(name), data)
    await folder.commit(name, tokens, len(data), model, chain, 0.0)


async def found(folder: CacheFolder, name: str = K, model: str = MODEL) -> Saved | None:
    return (await folder.look_up(name, model)).saved


# names


def test_a_save_goes_beside_the_good_file_where_it_can_be_renamed(folder: CacheFolder) -> None:
    assert folder.saved_name(K) == f"{K}.bin"
    assert folder.name_to_save(K) == f"{K}.bin.part"


def test_a_save_gets_its_name_at_once_where_it_cannot(make: Make) -> None:
    blind = make(path=None)
    assert blind.name_to_save(K) == blind.saved_name(K) == f"{K}.bin"


@pytest.mark.parametrize("odd", ["", "../x", "a/b", "a.b", "a b", "a\n", "a\0", "\N{SNOWMAN}", "x" * 121])
async def test_a_key_that_is_no_plain_name_is_refused(folder: CacheFolder, saves: Path, odd: str) -> None:
    for call in (folder.saved_name, folder.name_to_save):
        with pytest.raises(FolderError):
            call(odd)
    works = (
        folder.look_up(odd, MODEL),
        folder.forget(odd),
        folder.discard_part(odd),
        folder.commit(odd, 1, 1, "", b"", 0),
    )
    for work in works:
        with pytest.raises(FolderError) as caught:
            await work
        assert not odd or odd not in str(caught.value)
    assert seen(saves) == set()


@pytest.mark.parametrize("route", ["smol", "a/b", "x" * 50, f"{TAG}_x"])
def test_the_tag_of_a_key_is_that_of_its_route(route: str) -> None:
    assert tag_of(key(7, route_tag(route))) == route_tag(route)


def test_two_ways_to_the_same_folder_are_one(make: Make, saves: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saves)
    assert make(path=tmp_path / "link").id == make(path=saves / ".." / "saves").id == make().id


# a save


async def test_a_save_that_is_whole_becomes_the_saved_cache(folder: CacheFolder, saves: Path) -> None:
    await save(folder, data=2000, tokens=3, chain=b"chain")
    assert seen(saves) == {f"{K}.bin"}
    assert await folder.look_up(K, MODEL) == Lookup(Saved(3, 2000, b"chain"))


async def test_a_new_save_takes_the_place_of_the_old(folder: CacheFolder, saves: Path) -> None:
    await save(folder, data=2000, tokens=3)
    await save(folder, data=3000, tokens=5)
    assert await found(folder) == Saved(5, 3000)
    assert seen(saves) == {f"{K}.bin"}


@pytest.mark.parametrize("written", [None, 0, 1999, 2001], ids=["missing", "empty", "short", "long"])
async def test_a_save_that_is_not_whole_is_refused_and_the_good_one_is_kept(
    folder: CacheFolder, saves: Path, written: int | None
) -> None:
    await save(folder, data=b"good" * 1000, tokens=5)
    if written is not None:
        put(saves, f"{K}.bin.part", written)
    with pytest.raises(FolderError) as caught:
        await folder.commit(K, 3, 2000, MODEL, b"", 0.0)
    assert str(saves) not in str(caught.value)
    assert await found(folder) == Saved(5, 4000)
    assert (saves / f"{K}.bin").read_bytes() == b"good" * 1000


async def test_what_is_wrong_with_a_save_is_told(folder: CacheFolder, saves: Path) -> None:
    with pytest.raises(NotTheFolderError, match="not in save_path"):
        await folder.commit(K, 3, 2000, MODEL, b"", 0.0)
    put(saves, f"{K}.bin.part", 1999)
    with pytest.raises(FolderError, match=r"2000 bytes.* has 1999"):
        await folder.commit(K, 3, 2000, MODEL, b"", 0.0)
    (saves / f"{key(2)}.bin.part").mkdir()
    with pytest.raises(FolderError, match="cannot be read"):
        await folder.commit(key(2), 3, 2000, MODEL, b"", 0.0)
    (saves / f"{key(3)}.bin").mkdir()
    put(saves, f"{key(3)}.bin.part", 2000)
    with pytest.raises(FolderError, match="cannot be renamed"):
        await folder.commit(key(3), 3, 2000, MODEL, b"", 0.0)


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("renamed", [False, True], ids=["before the rename", "after it"])
async def test_a_process_that_dies_during_a_save_leaves_a_good_one(
    folder: CacheFolder, make: Make, saves: Path, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    await save(folder, data=b"old" * 1000, tokens=3)
    replace_file = os.replace

    def dies(source: Path, target: Path) -> None:
        if renamed:
            replace_file(source, target)
        raise Died

    with monkeypatch.context() as patched:
        patched.setattr(folder_module.os, "replace", dies)
        with pytest.raises(Died):
            await save(folder, data=b"newer" * 1000, tokens=5)
    after = make()
    assert await found(after) == (Saved(5, 5000) if renamed else Saved(3, 3000))
    assert await found(after) == (Saved(5, 5000) if renamed else Saved(3, 3000))
    await save(after, data=6000, tokens=6)
    assert await found(after) == Saved(6, 6000)


async def test_a_save_that_could_not_be_renamed_leaves_the_old_one(
    folder: CacheFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(folder, data=b"old" * 1000, tokens=3)

    def refuses(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(folder_module.os, "replace", refuses)
        with pytest.raises(FolderError, match="Permission denied"):
            await save(folder, data=5000, tokens=5)
    assert await found(folder) == Saved(3, 3000)


async def test_there_is_a_whole_file_at_every_moment_of_a_save(
    folder: CacheFolder, saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(folder, data=3000)
    sizes = []
    replace_file = os.replace

    def watched(source: Path, target: Path) -> None:
        sizes.append((saves / f"{K}.bin").stat().st_size)
        replace_file(source, target)
        sizes.append((saves / f"{K}.bin").stat().st_size)

    monkeypatch.setattr(folder_module.os, "replace", watched)
    await save(folder, data=2000)
    assert sizes == [3000, 2000]


async def test_what_a_bad_save_has_left_is_discarded_and_nothing_else(folder: CacheFolder, saves: Path) -> None:
    for name in (f"{K}.bin", f"{K}.bin.part", f"{key(2)}.bin.part"):
        put(saves, name)
    await folder.discard_part(K)
    await folder.discard_part(K)
    assert seen(saves) == {f"{K}.bin", f"{key(2)}.bin.part"}


@pytest.mark.parametrize(("free", "room"), [(999, False), (1000, False), (1001, True)])
async def test_a_save_needs_room_on_the_disk(
    folder: CacheFolder, make: Make, monkeypatch: pytest.MonkeyPatch, free: int, room: bool
) -> None:
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: _Usage(free))
    assert await folder.has_room(1000) is room
    assert await make(path=None).has_room(1000)


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


async def test_room_that_cannot_be_seen_is_taken_to_be_there(make: Make, tmp_path: Path) -> None:
    assert await make(path=tmp_path / "gone").has_room(1e18)


# looking up


async def test_there_is_nothing_at_first(folder: CacheFolder) -> None:
    assert await folder.look_up(K, MODEL) == Lookup()


async def test_a_file_that_nobody_has_recorded_is_not_restored(folder: CacheFolder, saves: Path) -> None:
    put(saves, f"{K}.bin")
    assert await folder.look_up(K, MODEL) == Lookup(None, "unknown")
    assert seen(saves) == {f"{K}.bin"}


async def test_a_file_that_vanished_by_hand_is_noticed(folder: CacheFolder, saves: Path) -> None:
    await save(folder)
    (saves / f"{K}.bin").unlink()
    assert await folder.look_up(K, MODEL) == Lookup()
    put(saves, f"{K}.bin", 2000)
    assert (await folder.look_up(K, MODEL)).problem == "unknown"


async def test_another_model_s_cache_is_not_restored_and_not_deleted(folder: CacheFolder, saves: Path) -> None:
    await save(folder, model=MODEL)
    assert await folder.look_up(K, OTHER_MODEL) == Lookup(None, "other model")
    assert await found(folder, model=MODEL) is not None
    await save(folder, model=OTHER_MODEL, tokens=9)
    assert await folder.look_up(K, MODEL) == Lookup(None, "other model")


DATA = bytes(range(256)) * 8


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "data",
    [b"", DATA[:-1], DATA + b"x", DATA[:36], flipped(DATA, 0), flipped(DATA, 1000), flipped(DATA, -1 % len(DATA))],
    ids=["emptied", "cut short", "longer", "a save of nothing", "flipped in the head", "in the middle", "in the tail"],
)
async def test_a_file_that_is_not_what_was_saved_is_deleted(folder: CacheFolder, saves: Path, data: bytes) -> None:
    await save(folder, data=DATA)
    put(saves, f"{K}.bin", data)
    assert await folder.look_up(K, MODEL) == Lookup(None, "damaged")
    assert seen(saves) == set()
    assert await folder.look_up(K, MODEL) == Lookup()


async def test_files_that_were_swapped_are_not_what_was_saved(folder: CacheFolder, saves: Path) -> None:
    await save(folder, K, DATA)
    await save(folder, key(2), DATA[::-1])
    (saves / f"{K}.bin").rename(saves / "between")
    (saves / f"{key(2)}.bin").rename(saves / f"{K}.bin")
    (saves / "between").rename(saves / f"{key(2)}.bin")
    assert (await folder.look_up(K, MODEL)).problem == "damaged"
    assert (await folder.look_up(key(2), MODEL)).problem == "damaged"


@pytest.mark.parametrize(
    ("verify", "at", "noticed"),
    [
        ("full", 0, True),
        ("full", 600, True),
        ("full", -1, True),
        ("fast", 0, True),
        ("fast", -1, True),
        ("fast", 600, False),
    ],
)
async def test_a_large_file_is_read_whole_where_that_is_asked_for(
    make: Make, saves: Path, monkeypatch: pytest.MonkeyPatch, verify: str, at: int, noticed: bool
) -> None:
    for name, size in (("WHOLE_BYTES", 1000), ("EDGE_BYTES", 100), ("SAMPLES", 2), ("SAMPLE_BYTES", 10)):
        monkeypatch.setattr(checksum, name, size)
    folder = make(verify=verify)
    await save(folder, data=DATA)
    put(saves, f"{K}.bin", flipped(DATA, at % len(DATA)))
    assert ((await folder.look_up(K, MODEL)).problem == "damaged") is noticed


async def test_a_cache_that_another_process_saved_is_found(folder: CacheFolder, make: Make) -> None:
    other = make()
    await save(other, tokens=3)
    assert await found(folder) == Saved(3, 2000)
    await save(other, data=4000, tokens=4)
    assert await found(folder) == Saved(4, 4000)


async def test_a_forgotten_cache_is_gone_and_no_other(folder: CacheFolder, saves: Path) -> None:
    await save(folder, K)
    await save(folder, key(2))
    await folder.forget(K)
    await folder.forget(K)
    assert await folder.look_up(K, MODEL) == Lookup()
    assert seen(saves) == {f"{key(2)}.bin"}


async def test_what_is_no_file_is_not_restored(folder: CacheFolder, saves: Path) -> None:
    await save(folder)
    (saves / f"{K}.bin").unlink()
    (saves / f"{K}.bin").mkdir()
    assert await found(folder) is None


# listing and limits


ODD = [
    f"{route_tag('smol2')}_{1:032x}.bin",
    f"{route_tag('smol/')}_{1:032x}.bin",
    f"{route_tag(TAG + '_x')}_{1:032x}.bin",
    f"x{TAG}_{1:032x}.bin",
    f"{TAG}_x{1:032x}.bin",
    f"{TAG}_{TAG}_{1:032x}.bin",
    f"{TAG}_{1:031x}.bin",
    f"{TAG}_{1:033x}.bin",
    f"{TAG}_{'A' * 32}.bin",
    f"{TAG}_{1:032x}.bin.bak",
    f"{TAG}_{1:032x}.BIN",
    f"{TAG}_{1:032x}",
    f"{TAG}.bin",
    "model.gguf",
    ".bin",
]


async def test_only_files_of_the_route_are_listed(folder: CacheFolder, saves: Path) -> None:
    for name in [*ODD, f"{K}.bin.part"]:
        put(saves, name)
    put(saves, f"{key(7)}.bin", 70, used=1234.0)
    assert await folder.files() == [CacheFile(key(7), 70, 1234.0)]


async def test_folders_and_links_are_not_listed(folder: CacheFolder, saves: Path) -> None:
    (saves / f"{key(1)}.bin").mkdir()
    (saves / f"{key(2)}.bin").symlink_to(put(saves, "precious"))
    (saves / f"{key(3)}.bin").symlink_to(saves / "nothing")
    assert await folder.files() == []


async def test_a_restored_cache_is_the_newest(folder: CacheFolder, saves: Path) -> None:
    for number in (1, 2, 3):
        await save(folder, key(number))
        os.utime(saves / f"{key(number)}.bin", (number, number))
    await folder.restored(key(1), 2000, 0.01)
    assert max(await folder.files(), key=lambda file: file.used).key == key(1)


async def test_a_folder_that_is_not_there_is_empty(make: Make, tmp_path: Path) -> None:
    gone = make(path=tmp_path / "gone", max_files=1)
    assert await gone.files() == []
    assert await gone.look_up(K, MODEL) == Lookup()
    assert await gone.enforce_limits(()) == Enforced()
    assert await gone.sweep() == 0
    await gone.forget(K)
    await gone.restored(K, 1, 1.0)
    await gone.discard_part(K)


async def test_limits_drop_the_files_used_longest_ago(make: Make, saves: Path) -> None:
    folder = make(max_files=2)
    for number in (3, 1, 2, 4):
        put(saves, f"{key(number)}.bin", used=1000.0 + number)
    enforced = await folder.enforce_limits(())
    assert [file.key for file in enforced.dropped] == [key(1), key(2)]
    assert seen(saves) == {f"{key(3)}.bin", f"{key(4)}.bin"}
    assert await folder.enforce_limits(()) == Enforced()


async def test_what_the_limits_drop_is_forgotten(make: Make) -> None:
    folder = make(max_files=1)
    await save(folder, key(1))
    await save(folder, key(2))
    await folder.enforce_limits({key(2)})
    assert await folder.look_up(key(1), MODEL) == Lookup()
    assert await found(folder, key(2)) is not None


async def test_limits_count_bytes(make: Make, saves: Path) -> None:
    folder = make(max_bytes=10_000)
    for number in (1, 2, 3):
        put(saves, f"{key(number)}.bin", 4000, used=1000.0 + number)
    assert [file.key for file in (await folder.enforce_limits(())).dropped] == [key(1)]


async def test_a_protected_file_stays(make: Make, saves: Path) -> None:
    folder = make(max_files=1)
    for number in (1, 2, 3):
        put(saves, f"{key(number)}.bin", used=1000.0 + number)
    await folder.enforce_limits({key(1), key(3)})
    assert seen(saves) == {f"{key(1)}.bin", f"{key(3)}.bin"}


async def test_one_that_is_over_the_limit_alone_is_told(make: Make, saves: Path) -> None:
    folder = make(max_bytes=10_000)
    put(saves, f"{K}.bin", 10_001, used=1000.0)
    assert await folder.enforce_limits({K}) == Enforced((), CacheFile(K, 10_001, 1000.0))
    assert seen(saves) == {f"{K}.bin"}


async def test_without_limits_nothing_is_dropped(folder: CacheFolder, saves: Path) -> None:
    for number in range(50):
        put(saves, f"{key(number)}.bin")
    assert await folder.enforce_limits(()) == Enforced()
    assert len(seen(saves)) == 50


async def test_limits_and_sweeps_never_touch_another_route_s_files(make: Make, saves: Path) -> None:
    folder = make(max_files=1, max_bytes=1)
    for name in ODD:
        put(saves, name, 1000, used=1.0)
        put(saves, f"{name}.part", 1000, used=1.0)
    put(saves, f"{key(7)}.bin", used=2.0)
    put(saves, f"{key(8)}.bin", used=3.0)
    await folder.enforce_limits({key(8)})
    await folder.sweep()
    # a file that has one of our names and .part is ours
    assert seen(saves) == {*ODD, *(f"{name}.part" for name in ODD), f"{key(8)}.bin"}


async def test_what_is_no_file_does_not_count_for_the_limits(make: Make, saves: Path) -> None:
    folder = make(max_files=2)
    for number, used in ((1, 1.0), (2, 9000.0)):
        (saves / f"{key(number)}.bin").mkdir()
        os.utime(saves / f"{key(number)}.bin", (used, used))
    for number in (3, 4, 5):
        put(saves, f"{key(number)}.bin", used=1000.0 + number)
    enforced = await folder.enforce_limits(())
    assert [file.key for file in enforced.dropped] == [key(3)]


async def test_a_file_that_cannot_be_deleted_is_not_said_to_be(
    make: Make, saves: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(max_files=1)
    put(saves, f"{key(1)}.bin", used=1.0)
    put(saves, f"{key(2)}.bin", used=2.0)

    def refuses(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuses)
    assert (await folder.enforce_limits(())).dropped == ()
    await folder.forget(key(1))
    await folder.discard_part(key(1))


# sweeping


async def test_only_old_left_overs_are_swept(folder: CacheFolder, saves: Path) -> None:
    put(saves, f"{key(1)}.bin.part", used=time.time() - folder_module.PART_SECONDS - 10)
    put(saves, f"{key(2)}.bin.part")
    put(saves, f"{key(3)}.bin", used=1.0)
    assert await folder.sweep() == 1
    assert seen(saves) == {f"{key(2)}.bin.part", f"{key(3)}.bin"}


async def test_what_vanished_is_swept_from_the_index(folder: CacheFolder, saves: Path, index: IndexThread) -> None:
    await save(folder, key(1))
    await save(folder, key(2))
    (saves / f"{key(1)}.bin").unlink()
    assert await folder.sweep() == 1
    assert [row.key for row in await index.call(index.index.caches)] == [key(2)]


async def test_a_sweep_leaves_other_routes_and_folders_alone(make: Make, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    others = [
        (make(tag=route_tag("smol2")), key(1, route_tag("smol2"))),
        (make(tag=route_tag(f"{TAG}_x")), key(1, route_tag(f"{TAG}_x"))),
        (make(path=elsewhere), K),
        (make(path=None), K),
    ]
    for other, name in others:
        await save(other, name)
    assert await make().sweep() == 0
    for other, name in others:
        assert await found(other, name) is not None


async def test_a_save_during_a_sweep_is_not_swept(
    folder: CacheFolder, saves: Path, index: IndexThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(folder, key(2))
    (row,) = await index.call(index.index.cache, folder.id, key(2))
    listed, known = folder_module.list_files, index.index.caches
    thread = threading.Lock()
    saved: list[str] = []

    def save_now() -> None:
        """A save that is complete just after the first look of the sweep, whichever that is."""
        with thread:
            if not saved:
                saved.append(K)
                (saves / f"{K}.bin").write_bytes((saves / f"{key(2)}.bin").read_bytes())
                index.index.put_cache(replace(row, key=K))

    def list_and_save(path: Path, tag: str | None) -> list[CacheFile]:
        files = listed(path, tag)
        save_now()
        return files

    def know_and_save() -> list[CacheRow]:
        rows = known()
        save_now()
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "list_files", list_and_save)
        patch.setattr(index.index, "caches", know_and_save)
        await folder.sweep()
    assert saved == [K]
    assert await found(folder, K) is not None


async def test_a_sweep_is_due_from_time_to_time(
    folder: CacheFolder, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.needs_sweep
    await folder.sweep()
    assert not folder.needs_sweep
    now = time.monotonic()
    monkeypatch.setattr(folder_module.time, "monotonic", lambda: now + folder_module.SWEEP_SECONDS + 1)
    assert folder.needs_sweep
    assert not make(path=None).needs_sweep


# where the files cannot be seen


async def test_a_blind_folder_knows_what_was_saved(make: Make) -> None:
    blind = make(path=None, max_files=1)
    assert await blind.look_up(K, MODEL) == Lookup()
    await save(blind, tokens=3)
    assert await found(blind) == Saved(3, 2000)
    assert await found(make(path=None)) == Saved(3, 2000)
    assert (await blind.look_up(K, OTHER_MODEL)).problem == "other model"
    assert await found(make(path=None, server="http://other:8080")) is None
    await blind.discard_part(K)
    await blind.restored(K, 1, 1.0)
    assert await blind.files() == []
    assert await blind.enforce_limits(()) == Enforced()
    assert await blind.sweep() == 0
    await blind.forget(K)
    assert await blind.look_up(K, MODEL) == Lookup()


async def test_a_folder_made_blind_touches_no_file(folder: CacheFolder, saves: Path) -> None:
    await save(folder)
    folder.blind()
    assert await found(folder) is None
    await folder.commit(K, 4, 4000, MODEL, b"", 0.0)
    assert await found(folder) == Saved(4, 4000)
    await folder.forget(K)
    assert seen(saves) == {f"{K}.bin"}


# the event loop


async def test_no_file_is_touched_on_the_event_loop(make: Make, saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(max_files=1)
    here = threading.get_ident()
    touched: set[str] = set()

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def elsewhere(*args: Any, **more: Any) -> Any:
            assert threading.get_ident() != here, f"{name} blocks the event loop"
            touched.add(name)
            return original(*args, **more)

        monkeypatch.setattr(module, name, elsewhere)

    put(saves, f"{K}.bin.part", 2000)
    watch(folder_module.os, "scandir")
    watch(folder_module.os, "replace")
    watch(folder_module.shutil, "disk_usage")
    watch(checksum, "take")
    watch(Path, "unlink")
    watch(Path, "exists")
    await folder.commit(K, 3, 2000, MODEL, b"", 0.0)
    await folder.look_up(K, MODEL)
    await folder.look_up(key(2), MODEL)
    await folder.restored(K, 2000, 0.1)
    await folder.has_room(1)
    await folder.files()
    await folder.enforce_limits({K})
    await folder.sweep()
    await folder.discard_part(K)
    await folder.forget(K)
    assert touched == {"scandir", "replace", "disk_usage", "take", "unlink", "exists"}


async def test_many_may_ask_at_once(folder: CacheFolder) -> None:
    await asyncio.gather(*(save(folder, key(number), number + 1000, number + 1) for number in range(40)))
    answers = await asyncio.gather(*(found(folder, key(number)) for number in range(40)))
    assert answers == [Saved(number + 1, number + 1000) for number in range(40)]
