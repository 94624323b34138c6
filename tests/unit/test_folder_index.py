"""Saved caches when processes die, files change under them, and two processes share one folder and one index."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from slot_cache import folder as folder_module
from slot_cache import index as index_module
from slot_cache.folder import PART_SECONDS, CacheFolder, FolderError, Lookup
from slot_cache.housekeeping import entries
from slot_cache.index import IndexThread, SqliteIndex
from slot_cache.request import route_tag
from slot_cache.state import Saved

TAG = route_tag("smol")
MODEL, OTHER_MODEL = "a" * 32, "b" * 32
SERVER = "http://llama:8080"


def key(number: int) -> str:
    return f"{TAG}_{number:032x}"


K, L = key(1), key(2)


class Process:
    """One process's view of the folder: an index and a folder of its own."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.saves = root / "saves"
        self.closed = False
        self.saves.mkdir(exist_ok=True)
        self.sqlite = SqliteIndex(root / "state" / "index.sqlite3")
        self.thread = IndexThread(self.sqlite)
        self.folder = CacheFolder(
            self.thread, **({"tag": TAG, "route": "smol", "server": SERVER, "path": self.saves} | options)
        )

    async def save(self, name: str, data: bytes, tokens: int, model: str = MODEL) -> None:
        """What the server and the switcher do."""
        (self.saves / self.folder.name_to_save(name)).write_bytes(data)
        await self.folder.commit(name, tokens, len(data), model, b"", 0.0)

    async def found(self, name: str, model: str = MODEL) -> Saved | None:
        return (await self.folder.look_up(name, model)).saved

    def file(self, name: str) -> Path:
        return self.saves / f"{name}.bin"

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.thread.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def process(**options: Any) -> Process:
        started.append(Process(tmp_path, **options))
        return started[-1]

    yield process
    for each in started:
        each.close()


class Died(BaseException):
    """The process ends here."""


@contextlib.contextmanager
def steps(
    process: Process, before: Callable[[int], Awaitable[None]], after: Callable[[int], Awaitable[None]]
) -> Iterator[list[str]]:
    """Call `before(n)` and `after(n)` around the nth thing that the process does on disk; the list tells what they are."""
    done: list[str] = []
    to_thread, call = asyncio.to_thread, IndexThread.call
    aside = False

    async def counted(name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        nonlocal aside
        if aside:  # what is done in between does not count
            return await work()
        number = len(done)
        done.append(name)
        aside = True
        try:
            await before(number)
            result = await work()
            await after(number)
        finally:
            aside = False
        return result

    async def in_thread(function: Any, *args: Any) -> Any:
        return await counted(getattr(function, "__name__", "?"), lambda: to_thread(function, *args))

    async def in_index(self: IndexThread, function: Any, *args: Any) -> Any:
        if self is not process.thread:
            return await call(self, function, *args)
        return await counted(function.__name__, lambda: call(self, function, *args))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder_module.asyncio, "to_thread", in_thread)
        patched.setattr(IndexThread, "call", in_index)
        yield done


async def nothing(number: int) -> None:
    pass


def dies_at(step: int) -> Callable[[int], Awaitable[None]]:
    async def dies(number: int) -> None:
        if number == step:
            raise Died

    return dies


async def count_steps(process: Process, work: Callable[[], Awaitable[Any]]) -> list[str]:
    with steps(process, nothing, nothing) as done:
        await work()
    return done


OLD, NEW, NEWEST = b"old" * 900, b"new!" * 900, b"newer" * 900


async def sound(process: Process, name: str, versions: dict[bytes, int]) -> Saved | None:
    """What `look_up` finds; it is one of the versions, and the file is that one."""
    saved = await process.found(name)
    if saved is not None:
        data = process.file(name).read_bytes()
        assert versions.get(data) == saved.tokens
        assert len(data) == saved.size
    return saved


# a process that dies during a save


async def test_a_save_has_these_steps(start: Callable[..., Process]) -> None:
    """The tests here stop at each of them: there must be some."""
    process = start()
    done = await count_steps(process, lambda: process.save(K, OLD, 3))
    assert done.count("put_cache") == 2 and "replace" in done and "_take" in done
    assert done.index("put_cache") < done.index("replace") < len(done) - 1


@pytest.mark.parametrize("old", [False, True], ids=["the first save", "a later one"])
async def test_wherever_a_process_dies_in_a_save_there_is_a_good_one(start: Callable[..., Process], old: bool) -> None:
    count = len(await count_steps(start(), lambda: start().save(L, OLD, 3))) or 10
    for step in range(max(count, 8)):
        for moment in ("before", "after"):
            first = start()
            await first.folder.forget(K)
            if old:
                await first.save(K, OLD, 3)
            dying = start()
            hooks = (dies_at(step), nothing) if moment == "before" else (nothing, dies_at(step))
            with steps(dying, *hooks), contextlib.suppress(Died):
                await dying.save(K, NEW, 5)
            survivor = start()
            saved = await sound(survivor, K, {OLD: 3, NEW: 5})
            if old:
                assert saved is not None, f"{moment} step {step}: both are lost"
            assert await sound(survivor, K, {OLD: 3, NEW: 5}) == saved
            await survivor.save(K, NEWEST, 7)
            assert await sound(survivor, K, {NEWEST: 7}) == Saved(7, len(NEWEST))
            assert [row.pending for row in survivor.sqlite.cache(survivor.folder.id, K)] == [False]


async def test_wherever_two_processes_die_one_after_the_other_there_is_a_good_one(
    start: Callable[..., Process],
) -> None:
    for one in range(6):
        for two in range(6):
            first = start()
            await first.folder.forget(K)
            await first.save(K, OLD, 3)
            for step, data, tokens in ((one, NEW, 5), (two, NEWEST, 7)):
                dying = start()
                with steps(dying, dies_at(step), nothing), contextlib.suppress(Died):
                    await dying.save(K, data, tokens)
                dying.close()
            saved = await sound(start(), K, {OLD: 3, NEW: 5, NEWEST: 7})
            assert saved is not None, f"died at steps {one} and {two}: all are lost"


async def test_wherever_a_process_dies_in_a_look_up_the_cache_is_there(start: Callable[..., Process]) -> None:
    for step in range(6):
        for moment in ("before", "after"):
            first = start()
            await first.save(K, OLD, 3)
            with steps(first, nothing, dies_at(3)), contextlib.suppress(Died):  # named, not recorded
                await first.save(K, NEW, 5)
            dying = start()
            hooks = (dies_at(step), nothing) if moment == "before" else (nothing, dies_at(step))
            with steps(dying, *hooks), contextlib.suppress(Died):
                await dying.found(K)
            assert await sound(start(), K, {OLD: 3, NEW: 5}) == Saved(5, len(NEW))


async def test_a_save_that_was_cut_off_leaves_its_part_and_the_good_one(start: Callable[..., Process]) -> None:
    process = start()
    await process.save(K, OLD, 3)
    (process.saves / process.folder.name_to_save(K)).write_bytes(NEW[:100])  # the server, or this process, died
    again = start()
    assert await sound(again, K, {OLD: 3}) == Saved(3, len(OLD))
    await again.folder.sweep()
    assert (again.saves / f"{K}.bin.part").exists()  # it may still be written
    os.utime(again.saves / f"{K}.bin.part", (1.0, 1.0))
    assert await again.folder.sweep() == 1
    assert not (again.saves / f"{K}.bin.part").exists()
    assert await sound(again, K, {OLD: 3}) == Saved(3, len(OLD))


_SAVER = """
import asyncio, itertools, os, random, sys
from pathlib import Path
from slot_cache.folder import CacheFolder
from slot_cache.index import IndexThread, SqliteIndex

root, tag = Path(sys.argv[1]), sys.argv[2]


async def work(seed):
    pick = random.Random(seed)
    index = IndexThread(SqliteIndex(root / "state" / "index.sqlite3"))
    folder = CacheFolder(index, tag=tag, route="smol", server="s", path=root / "saves", max_files=4)
    for number in itertools.count(1):
        key = f"{tag}_{pick.randrange(5):032x}"
        tokens = pick.randrange(1, 10**6)
        data = f"{key} {tokens} ".encode() * pick.randrange(1, 2000)
        (root / "saves" / folder.name_to_save(key)).write_bytes(data)
        await folder.commit(key, tokens, len(data), "m" * 32, b"", 0.0)
        if number % 5 == 0:
            await folder.look_up(key, "m" * 32)
        if number % 7 == 0:
            await folder.enforce_limits({key})
            await folder.sweep()


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(work(int(line)))
        finally:
            os._exit(1)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
async def test_a_process_killed_at_any_moment_of_its_work_leaves_good_caches(tmp_path: Path) -> None:
    """Fifty times; what it saves tells whose it is and how many tokens it has."""
    (tmp_path / "saves").mkdir()
    pick = random.Random(5)
    parent = subprocess.Popen(  # noqa: ASYNC220 - it is there at once
        [sys.executable, "-c", _SAVER, str(tmp_path), TAG],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert parent.stdin is not None and parent.stdout is not None
    seen = 0
    try:
        for number in range(50):
            parent.stdin.write(f"{number}\n")
            child = int(parent.stdout.readline())
            time.sleep(pick.uniform(0.0, 0.06))  # noqa: ASYNC251 - the moment is what is tested
            os.kill(child, signal.SIGKILL)
            assert parent.stdout.readline() == "ended\n"
            process = Process(tmp_path)
            for entry in entries(process.sqlite, verify=True):
                assert entry.state in ("ok", "missing"), entry
            for other in range(5):
                saved = await process.found(key(other), "m" * 32)
                if saved is not None:
                    seen += 1
                    data = process.file(key(other)).read_bytes()
                    assert data.startswith(f"{key(other)} {saved.tokens} ".encode())
                    assert len(data) == saved.size
                else:
                    assert not process.file(key(other)).exists()
            process.close()
    finally:
        parent.kill()
        parent.wait(30)
        parent.stdin.close()
        parent.stdout.close()
    assert seen > 20


# an index that cannot be written


async def test_a_save_that_cannot_be_recorded_leaves_the_good_one(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "BUSY_SECONDS", 0.05)
    process = start()
    await process.save(K, OLD, 3)
    other = sqlite3.connect(process.root / "state" / "index.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with contextlib.suppress(FolderError):
        await process.save(K, NEW, 5)
    assert process.file(K).exists()
    other.execute("ROLLBACK")
    other.close()
    assert await sound(process, K, {OLD: 3, NEW: 5}) is not None
    await process.save(K, NEWEST, 7)
    assert await sound(process, K, {NEWEST: 7}) is not None


async def test_a_look_up_while_the_index_is_locked_raises_nothing(
    start: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "BUSY_SECONDS", 0.05)
    process = start()
    await process.save(K, OLD, 3)
    other = sqlite3.connect(process.root / "state" / "index.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert await process.found(K) == Saved(3, len(OLD))
    await process.folder.restored(K, len(OLD), 0.1)
    process.file(L).write_bytes(b"x")
    assert await process.folder.look_up(L, MODEL) == Lookup(problem="unknown")
    await process.folder.forget(K)
    await process.folder.sweep()
    other.execute("ROLLBACK")
    other.close()
    assert await process.found(K) is None


async def test_what_a_lost_index_knew_is_not_restored_and_saved_anew(start: Callable[..., Process]) -> None:
    process = start()
    await process.save(K, OLD, 3)
    process.close()
    shutil.rmtree(process.root / "state")
    again = start()
    assert await again.folder.look_up(K, MODEL) == Lookup(problem="unknown")
    await again.save(K, NEW, 5)
    assert await sound(again, K, {NEW: 5}) == Saved(5, len(NEW))


# files that somebody changed


async def test_files_swapped_between_sessions_are_not_restored(start: Callable[..., Process]) -> None:
    process = start()
    await process.save(K, b"one" * 1000, 3)
    await process.save(L, b"two" * 1000, 3)  # of the same size
    between = process.saves / "between"
    process.file(K).rename(between)
    process.file(L).rename(process.file(K))
    between.rename(process.file(L))
    assert await process.folder.look_up(K, MODEL) == Lookup(problem="damaged")
    assert await process.folder.look_up(L, MODEL) == Lookup(problem="damaged")
    assert list(process.saves.iterdir()) == []


async def test_an_older_save_put_in_place_of_the_newer_is_not_restored(start: Callable[..., Process]) -> None:
    """From a backup: it was good once, but it is not what is recorded."""
    process = start()
    await process.save(K, OLD, 3)
    backup = process.file(K).read_bytes()
    await process.save(K, NEW, 5)
    process.file(K).write_bytes(backup)
    assert (await process.folder.look_up(K, MODEL)).problem == "damaged"


async def test_another_model_s_file_in_its_place_is_not_restored(start: Callable[..., Process]) -> None:
    process = start()
    await process.save(K, OLD, 3, MODEL)
    await process.save(L, NEW, 5, OTHER_MODEL)
    process.file(K).write_bytes(NEW)
    assert await process.found(K, MODEL) is None
    assert await process.found(L, MODEL) is None
    assert await process.found(L, OTHER_MODEL) == Saved(5, len(NEW))


async def test_a_model_that_comes_back_finds_its_cache(start: Callable[..., Process]) -> None:
    process = start()
    await process.save(K, OLD, 3, MODEL)
    assert (await process.folder.look_up(K, OTHER_MODEL)).problem == "other model"
    assert await process.found(K, MODEL) == Saved(3, len(OLD))


@pytest.mark.parametrize("model", [MODEL, OTHER_MODEL])
async def test_a_save_cut_off_between_two_models_is_that_of_the_file(start: Callable[..., Process], model: str) -> None:
    for step, tokens, writer in ((2, 3, MODEL), (4, 5, OTHER_MODEL)):
        process = start()
        await process.save(K, OLD, 3, MODEL)
        with steps(process, dies_at(step), nothing), contextlib.suppress(Died):
            await process.save(K, NEW, 5, OTHER_MODEL)
        again = start()
        assert await again.found(K, model) == (
            Saved(tokens, len(OLD if tokens == 3 else NEW)) if model == writer else None
        )
        assert again.file(K).exists()


# two processes


async def test_what_one_process_saves_restores_and_forgets_the_other_knows(start: Callable[..., Process]) -> None:
    one, other = start(), start()
    await one.save(K, OLD, 3)
    assert await other.found(K) == Saved(3, len(OLD))
    await other.save(K, NEW, 5)
    assert await one.found(K) == Saved(5, len(NEW))
    await one.folder.forget(K)
    assert await other.folder.look_up(K, MODEL) == Lookup()


async def test_whenever_the_other_process_looks_during_a_save_the_new_one_is_there_after_it(
    start: Callable[..., Process],
) -> None:
    count = 6
    for old in (False, True):
        for step in range(count):
            one, other = start(), start()
            await one.folder.forget(K)
            if old:
                await one.save(K, OLD, 3)

            async def looks(number: int, step: int = step, other: Process = other) -> None:
                if number == step:
                    await sound(other, K, {OLD: 3, NEW: 5})

            with steps(one, looks, nothing):
                await one.save(K, NEW, 5)
            assert await sound(other, K, {NEW: 5}) == Saved(5, len(NEW)), f"looked before step {step}"


async def test_if_the_other_process_looks_all_the_time_a_save_is_not_lost(start: Callable[..., Process]) -> None:
    one, other = start(), start()
    await one.save(K, OLD, 3)

    async def looks(number: int) -> None:
        await sound(other, K, {OLD: 3, NEW: 5})

    with steps(one, looks, looks):
        await one.save(K, NEW, 5)
    assert await sound(other, K, {NEW: 5}) == Saved(5, len(NEW))


async def test_what_the_other_process_has_just_used_is_not_dropped(start: Callable[..., Process]) -> None:
    one, other = start(max_files=2), start(max_files=2)
    for number in (1, 2, 3):
        await one.save(key(number), OLD, 3)
        os.utime(one.file(key(number)), (number, number))
    row = {row.key: row for row in one.sqlite.caches()}
    for number in (1, 2, 3):  # as if they had been saved long ago
        one.sqlite.put_cache(type(row[K])(**{**row[key(number)].__dict__, "used": float(number)}))
    await other.folder.restored(key(1), len(OLD), 0.1)
    enforced = await one.folder.enforce_limits(())
    assert [file.key for file in enforced.dropped] == [key(2)]
    assert await other.found(key(1)) is not None


async def test_two_processes_that_keep_the_limits_at_once_keep_enough(start: Callable[..., Process]) -> None:
    one, other = start(max_files=3), start(max_files=3)
    for number in range(8):
        await one.save(key(number), OLD, 3)
        os.utime(one.file(key(number)), (number, number))
    await asyncio.gather(one.folder.enforce_limits({key(7)}), other.folder.enforce_limits({key(7)}))
    left = {number for number in range(8) if one.file(key(number)).exists()}
    assert len(left) == 3 and 7 in left
    assert {row.key for row in other.sqlite.caches()} == {key(number) for number in left}


async def test_a_sweep_during_the_other_s_save_costs_nothing(start: Callable[..., Process]) -> None:
    for step in range(6):
        one, other = start(), start()
        await one.folder.forget(K)

        async def sweeps(number: int, step: int = step, other: Process = other) -> None:
            if number == step:
                await other.folder.sweep()

        with steps(one, sweeps, nothing):
            await one.save(K, NEW, 5)
        assert await sound(one, K, {NEW: 5}) == Saved(5, len(NEW)), f"swept before step {step}"


async def test_a_save_that_was_begun_and_left_long_ago_is_not_kept_for_ever(start: Callable[..., Process]) -> None:
    process = start()
    with steps(process, dies_at(3), nothing), contextlib.suppress(Died):  # recorded as pending, not named
        await process.save(K, OLD, 3)
    assert [row.pending for row in process.sqlite.caches()] == [True]
    (row,) = process.sqlite.caches()
    process.sqlite.put_cache(type(row)(**{**row.__dict__, "created": time.time() - 10 * PART_SECONDS}))
    os.utime(process.saves / f"{K}.bin.part", (1.0, 1.0))
    again = start()
    await again.folder.sweep()
    assert again.sqlite.caches() == []
    assert list(again.saves.iterdir()) == []


# all of that in any order


class Folders(RuleBasedStateMachine):
    """Two processes on one folder, of which either may die anywhere, and somebody who changes files."""

    base: Path

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.root = Path(tempfile.mkdtemp(dir=self.base))
        self.processes: list[Process] = []
        self.versions: dict[bytes, tuple[str, int, str]] = {}
        self.good: dict[str, set[bytes]] = {}
        """what may be found under a key: one of these must be, unless the file was changed by hand"""
        self.count = 0

    @initialize(verify=st.sampled_from(["fast", "full"]))
    def begin(self, verify: str) -> None:
        self.processes = [Process(self.root, verify=verify) for _ in range(2)]

    def run(self, work: Awaitable[Any]) -> Any:
        async def working() -> Any:
            return await work

        return self.loop.run_until_complete(working())

    def new_data(self, name: str, model: str, length: int) -> tuple[bytes, int]:
        self.count += 1
        data = f"{self.count} ".encode() * length
        self.versions[data] = (name, self.count, model)
        return data, self.count

    @rule(
        which=st.integers(0, 1),
        name=st.sampled_from([K, L]),
        model=st.sampled_from([MODEL, MODEL, OTHER_MODEL]),
        length=st.integers(1, 300),
    )
    def save(self, which: int, name: str, model: str, length: int) -> None:
        data, tokens = self.new_data(name, model, length)
        self.run(self.processes[which].save(name, data, tokens, model))
        self.good[name] = {data}

    @rule(
        which=st.integers(0, 1),
        name=st.sampled_from([K, L]),
        length=st.integers(1, 300),
        step=st.integers(0, 6),
        early=st.booleans(),
    )
    def dies_in_a_save(self, which: int, name: str, length: int, step: int, early: bool) -> None:
        self.look(1 - which, name)  # what the last one that died has left is made good before
        data, tokens = self.new_data(name, MODEL, length)
        process = self.processes[which]
        hooks = (dies_at(step), nothing) if early else (nothing, dies_at(step))
        with steps(process, *hooks), contextlib.suppress(Died):
            self.run(process.save(name, data, tokens, MODEL))
        process.close()
        self.processes[which] = Process(self.root)
        if name in self.good:
            self.good[name].add(data)
        elif process.file(name).exists() and process.file(name).read_bytes() == data:
            self.good[name] = {data}
        self.look(which, name)

    @rule(which=st.integers(0, 1), name=st.sampled_from([K, L]))
    def look(self, which: int, name: str) -> None:
        process = self.processes[which]
        for model in (MODEL, OTHER_MODEL):
            lookup = self.run(process.folder.look_up(name, model))
            file = process.file(name)
            if lookup.saved is not None:
                data = file.read_bytes()
                assert self.versions[data] == (name, lookup.saved.tokens, model)
                assert lookup.saved.size == len(data)
            if name in self.good:
                assert file.exists(), "a good save is gone"
                data = file.read_bytes()
                assert data in self.good[name]
                assert (lookup.saved is not None) == (self.versions[data][2] == model)
                self.good[name] = {data}
            elif lookup.problem == "damaged":
                assert not file.exists()

    @rule(
        name=st.sampled_from([K, L]),
        how=st.sampled_from(["gone", "cut", "flip", "swap", "junk"]),
        at=st.integers(0, 10**6),
    )
    def change_by_hand(self, name: str, how: str, at: int) -> None:
        file, other = (self.processes[0].file(each) for each in (name, L if name == K else K))
        data = file.read_bytes() if file.exists() else b""
        if how == "swap":
            if data and other.exists():
                file.write_bytes(other.read_bytes())
                other.write_bytes(data)
                self.good.clear()
            return
        self.good.pop(name, None)
        if how == "gone":
            file.unlink(missing_ok=True)
        elif how == "junk" or not data:
            file.write_bytes(b"junk")
        elif how == "cut":
            file.write_bytes(data[: at % len(data)])
        else:
            at %= len(data)
            file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])

    @rule(which=st.integers(0, 1), name=st.sampled_from([K, L]))
    def forget(self, which: int, name: str) -> None:
        self.run(self.processes[which].folder.forget(name))
        self.good.pop(name, None)
        assert not self.processes[which].file(name).exists()

    @rule(which=st.integers(0, 1))
    def sweep(self, which: int) -> None:
        self.run(self.processes[which].folder.sweep())

    def teardown(self) -> None:
        for process in self.processes:
            process.close()
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        shutil.rmtree(self.root, ignore_errors=True)


def test_a_cache_that_is_found_is_what_was_saved(tmp_path: Path) -> None:
    machine = type("Folders", (Folders,), {"base": tmp_path})
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))
