"""What is saved and what is in which slot: in SQLite for all processes of a machine, in memory for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from slot_cache import index as index_module
from slot_cache import report
from slot_cache.index import (
    SCHEMA,
    CacheRow,
    Index,
    IndexThread,
    MemoryIndex,
    SlotRow,
    SqliteIndex,
    default_state_dir,
    open_index,
)

SPAWN = multiprocessing.get_context("spawn")
BOUND = 10.0
"""Seconds that no single call may take here, whatever holds the database; a healthy one takes less than 0.01."""


def cache(key: str = "t_1", **more: Any) -> CacheRow:
    row = CacheRow("/saves", key, "smol", "model-a", 10, 2720, "c" * 32, "s" * 32, b"\0chain\xff", 5.5, 6.5, 2, 0.25)
    return replace(row, **more)


def slot(number: int = 0, **more: Any) -> SlotRow:
    row = SlotRow(
        "http://llama:8080",
        number,
        "t_1",
        "owner",
        "/saves",
        "smol",
        7,
        99,
        True,
        False,
        42,
        "model-a",
        "boot-1",
        b"\xff\0",
    )
    return replace(row, **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "index.sqlite3"


@pytest.fixture(params=["memory", "sqlite"])
def index(request: pytest.FixtureRequest, path: Path) -> Iterator[Index]:
    made: Index = MemoryIndex() if request.param == "memory" else SqliteIndex(path)
    yield made
    made.close()


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far."""
    caplog.set_level(logging.DEBUG, report.logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "BUSY_SECONDS", 0.05)


def names_in(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def every_call(index: Index) -> list[Any]:
    """Call each method once; what the reading ones answer."""
    index.put_cache(cache())
    index.put_cache(cache(pending=True))
    index.used_cache("/saves", "t_1", 1.0)
    index.put_slot(slot())
    answers = [index.cache("/saves", "t_1"), index.caches(), index.slot("http://llama:8080", 0)]
    index.drop_slot("http://llama:8080", 0)
    index.drop_cache("/saves", "t_1")
    return answers


# saved caches


def test_what_is_put_comes_back_as_it_was(index: Index) -> None:
    index.put_cache(cache())
    index.put_cache(cache("t_2", checksum="", sample="", chain=b"", created=0.0, used=0.0, uses=0, seconds=0.0))
    assert index.cache("/saves", "t_1") == [cache()]
    assert sorted(index.caches(), key=lambda row: row.key) == [
        cache(),
        cache("t_2", checksum="", sample="", chain=b"", created=0.0, used=0.0, uses=0, seconds=0.0),
    ]


def test_what_was_never_put_is_not_there(index: Index) -> None:
    index.put_cache(cache())
    assert index.cache("/saves", "t_2") == index.cache("/other", "t_1") == []
    assert index.slot("http://llama:8080", 0) is None


def test_folders_do_not_share_their_caches(index: Index) -> None:
    index.put_cache(cache())
    index.put_cache(cache(folder="/other", tokens=3))
    index.drop_cache("/saves", "t_1")
    assert index.caches() == [cache(folder="/other", tokens=3)]


def test_a_new_row_takes_the_place_of_the_old(index: Index) -> None:
    index.put_cache(cache())
    index.put_cache(cache(tokens=11, model="model-b"))
    assert index.cache("/saves", "t_1") == [cache(tokens=11, model="model-b")]


def test_a_pending_row_stands_beside_the_good_one(index: Index) -> None:
    index.put_cache(cache())
    index.put_cache(cache(tokens=11, pending=True))
    assert index.cache("/saves", "t_1") == [cache(), cache(tokens=11, pending=True)]
    assert len(index.caches()) == 2


def test_there_is_one_pending_row_at_most(index: Index) -> None:
    for tokens in (11, 12):
        index.put_cache(cache(tokens=tokens, pending=True))
    assert index.cache("/saves", "t_1") == [cache(tokens=12, pending=True)]


def test_the_final_row_ends_the_pending_one(index: Index) -> None:
    index.put_cache(cache())
    index.put_cache(cache(tokens=11, pending=True))
    index.put_cache(cache(tokens=11))
    assert index.cache("/saves", "t_1") == [cache(tokens=11)]


def test_a_use_is_noted_in_both_rows_and_nowhere_else(index: Index) -> None:
    for row in (cache(), cache(pending=True), cache("t_2")):
        index.put_cache(row)
    index.used_cache("/saves", "t_1", 77.0)
    index.used_cache("/saves", "t_3", 77.0)
    assert index.cache("/saves", "t_1") == [cache(used=77.0, uses=3), cache(used=77.0, uses=3, pending=True)]
    assert index.cache("/saves", "t_2") == [cache("t_2")]
    assert index.cache("/saves", "t_3") == []


def test_a_dropped_cache_is_gone_with_its_pending_row(index: Index) -> None:
    for row in (cache(), cache(pending=True), cache("t_2")):
        index.put_cache(row)
    index.drop_cache("/saves", "t_1")
    index.drop_cache("/saves", "t_1")
    assert index.caches() == [cache("t_2")]


def test_what_was_read_does_not_change_later(index: Index) -> None:
    index.put_cache(cache())
    before = index.cache("/saves", "t_1")
    before.append(cache("t_9"))
    index.used_cache("/saves", "t_1", 77.0)
    assert before[0] == cache()
    assert index.cache("/saves", "t_1") == [cache(used=77.0, uses=3)]


@pytest.mark.parametrize("odd", ["it's", 'a"b', "x' OR '1'='1", "a\0b", "\N{SNOWMAN}", "", "%", "_", "-- x", "a\nb"])
def test_names_are_kept_as_they_are(index: Index, odd: str) -> None:
    index.put_cache(cache())
    index.put_cache(cache(odd, folder=odd, route=odd, model=odd, checksum=odd))
    assert index.cache(odd, odd) == [cache(odd, folder=odd, route=odd, model=odd, checksum=odd)]
    index.put_slot(slot(server=odd, key=odd, owner=odd, route=odd))
    assert index.slot(odd, 0) == slot(server=odd, key=odd, owner=odd, route=odd)
    index.drop_cache(odd, odd)
    assert index.caches() == [cache()]


def test_a_large_fingerprint_is_kept(index: Index) -> None:
    chain = os.urandom(400_000)
    index.put_cache(cache(chain=chain))
    assert index.cache("/saves", "t_1")[0].chain == chain


# slots


def test_a_slot_comes_back_as_it_was(index: Index) -> None:
    index.put_slot(slot())
    index.put_slot(slot(1, key=None, owner=None, model="", boot="", chain=b"", dirty=False, whole=True))
    assert index.slot("http://llama:8080", 0) == slot()
    found = index.slot("http://llama:8080", 1)
    assert found == slot(1, key=None, owner=None, model="", boot="", chain=b"", dirty=False, whole=True)
    assert found.dirty is False and found.whole is True


def test_a_slot_is_known_once(index: Index) -> None:
    index.put_slot(slot())
    index.put_slot(slot(key="t_2", tokens=1))
    assert index.slot("http://llama:8080", 0) == slot(key="t_2", tokens=1)


def test_slots_of_other_servers_and_other_numbers_are_others(index: Index) -> None:
    for row in (slot(), slot(1, key="t_2"), slot(server="http://other:8080", key="t_3")):
        index.put_slot(row)
    index.drop_slot("http://llama:8080", 0)
    index.drop_slot("http://llama:8080", 5)
    assert index.slot("http://llama:8080", 0) is None
    assert index.slot("http://llama:8080", 1) == slot(1, key="t_2")
    assert index.slot("http://other:8080", 0) == slot(server="http://other:8080", key="t_3")


# the end


def test_a_closed_index_finds_nothing_and_raises_nothing(index: Index) -> None:
    index.put_cache(cache())
    index.put_slot(slot())
    index.close()
    index.close()
    assert index.cache("/saves", "t_1") == index.caches() == []
    assert index.slot("http://llama:8080", 0) is None


def test_calls_of_a_closed_index_that_write_raise_nothing(path: Path) -> None:
    index = SqliteIndex(path)
    index.close()
    assert every_call(index) == [[], [], None]


def test_what_sqlite_keeps_outlives_the_process(path: Path) -> None:
    first = SqliteIndex(path)
    first.put_cache(cache())
    first.put_cache(cache(tokens=11, pending=True))
    first.put_slot(slot())
    first.close()
    again = SqliteIndex(path)
    assert again.cache("/saves", "t_1") == [cache(), cache(tokens=11, pending=True)]
    assert again.slot("http://llama:8080", 0) == slot()
    again.close()


@pytest.mark.parametrize(
    "row",
    [cache(tokens=10**30), cache(route="\ud800"), cache(seconds=float("nan")), cache(chain="text")],
    ids=["a number too large", "half a character", "no number", "another type"],
)
def test_a_row_that_cannot_be_kept_costs_nobody_anything(index: Index, said: Callable[[], list[str]], row: Any) -> None:
    index.put_cache(cache("t_2"))
    index.put_cache(row)  # raises nothing
    assert index.cache("/saves", "t_2") == [cache("t_2")]
    assert not any("damaged" in line for line in said())


# several at once


def test_two_connections_see_each_other(path: Path) -> None:
    one, other = SqliteIndex(path), SqliteIndex(path)
    one.put_cache(cache())
    assert other.cache("/saves", "t_1") == [cache()]
    other.used_cache("/saves", "t_1", 9.0)
    other.put_slot(slot())
    assert one.cache("/saves", "t_1") == [cache(used=9.0, uses=3)]
    assert one.slot("http://llama:8080", 0) == slot()
    one.drop_slot("http://llama:8080", 0)
    assert other.slot("http://llama:8080", 0) is None
    one.close()
    other.put_cache(cache(tokens=11))
    assert other.caches() == [cache(tokens=11)]
    other.close()


def _write_many(path: Path, name: str, count: int) -> None:
    index = SqliteIndex(path)
    for number in range(count):
        index.put_cache(cache(f"{name}_{number}"))
        index.used_cache("/saves", "shared", float(number))
        index.put_slot(slot(number % 3, key=name))
    index.close()


def test_two_processes_lose_nothing_of_each_other(path: Path) -> None:
    mine = SqliteIndex(path)
    mine.put_cache(cache("shared", uses=0))
    others = [SPAWN.Process(target=_write_many, args=(path, name, 100)) for name in ("a", "b")]
    for other in others:
        other.start()
    while any(other.is_alive() for other in others):
        assert isinstance(mine.caches(), list)
    for other in others:
        other.join(60)
        assert other.exitcode == 0
    keys = {row.key for row in mine.caches()}
    assert keys == {"shared"} | {f"{name}_{number}" for name in "ab" for number in range(100)}
    assert mine.cache("/saves", "shared")[0].uses == 200
    found = mine.slot("http://llama:8080", 0)
    assert found is not None and found.key in ("a", "b")
    mine.close()


def test_many_may_open_a_new_index_at_the_same_time(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / str(number) / "index.sqlite3"
        start = threading.Barrier(6)

        def open_it(start: threading.Barrier = start, path: Path = path) -> Index:
            start.wait(30)
            return open_index(path.parent)

        with ThreadPoolExecutor(6) as pool:
            indexes = [done.result(30) for done in [pool.submit(open_it) for _ in range(6)]]
        indexes[0].put_cache(cache())
        assert [index.caches() for index in indexes] == [[cache()]] * 6
        for index in indexes:
            index.close()


# a database that another connection holds


@contextlib.contextmanager
def held(path: Path, how: str) -> Iterator[None]:
    """Another connection that does not let go."""
    other = sqlite3.connect(path, isolation_level=None, timeout=BOUND)
    try:
        if how == "EXCLUSIVE MODE":  # as a tool that repairs or a copy that is not WAL: not even reading is possible
            other.execute("PRAGMA journal_mode = DELETE")
            how = "EXCLUSIVE"
        other.execute(f"BEGIN {how}")
        yield
        other.execute("ROLLBACK")
    finally:
        other.close()


def test_writing_into_a_held_database_fails_in_time_without_an_error(
    path: Path, said: Callable[[], list[str]], impatient: None
) -> None:
    index = SqliteIndex(path)
    index.put_cache(cache("t_2"))
    writing: list[Callable[[], None]] = [
        lambda: index.put_cache(cache()),
        lambda: index.used_cache("/saves", "t_2", 1.0),
        lambda: index.drop_cache("/saves", "t_2"),
        lambda: index.put_slot(slot()),
        lambda: index.drop_slot("http://llama:8080", 0),
    ]
    with held(path, "IMMEDIATE"):
        for call in writing:
            started = time.monotonic()
            call()
            assert time.monotonic() - started < BOUND
            assert index.caches() == [cache("t_2")]  # reading goes on
    assert len(said()) == 1
    index.put_cache(cache())
    assert index.cache("/saves", "t_1") == [cache()]
    index.close()


@pytest.mark.parametrize("how", ["IMMEDIATE", "EXCLUSIVE", "EXCLUSIVE MODE"])
def test_a_database_that_is_held_is_done_without(
    path: Path, said: Callable[[], list[str]], impatient: None, how: str
) -> None:
    index = SqliteIndex(path)
    if how == "EXCLUSIVE MODE":
        index.close()
        SqliteIndex(path).close()
    with held(path, how):
        started = time.monotonic()
        if how == "EXCLUSIVE MODE":
            other = open_index(path.parent)
            assert isinstance(other, MemoryIndex)
            other.close()
        else:
            for _ in range(3):
                every_call(index)
        assert time.monotonic() - started < 20 * BOUND
    assert len(said()) == 1
    index.close()
    again = SqliteIndex(path)
    every_call(again)
    again.put_cache(cache())
    assert again.caches() == [cache()]
    again.close()


def test_a_second_time_that_it_is_held_is_said_again(
    path: Path, said: Callable[[], list[str]], impatient: None
) -> None:
    index = SqliteIndex(path)
    for times in (1, 2):
        with held(path, "IMMEDIATE"):
            index.put_cache(cache())
            index.put_slot(slot())
        assert len(said()) == times
        index.put_slot(slot())
    index.close()


# a database that is damaged


def _random(path: Path) -> None:
    path.write_bytes(os.urandom(9000))


def _truncated(path: Path) -> None:
    index = SqliteIndex(path)
    for number in range(200):
        index.put_cache(cache(f"t_{number}", chain=os.urandom(500)))
    index.close()
    os.truncate(path, path.stat().st_size // 2)


def _only_a_head(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "something").write_text("x")


def _other_tables(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE caches (x)")
    other.execute(f"PRAGMA user_version = {SCHEMA}")
    other.close()


DAMAGE = [_random, _truncated, _only_a_head, _empty, _other_tables]


@pytest.mark.parametrize("damage", [*DAMAGE, _folder], ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_database_is_made_anew(
    path: Path, said: Callable[[], list[str]], damage: Callable[[Path], None]
) -> None:
    path.parent.mkdir()
    damage(path)
    index = open_index(path.parent)
    assert isinstance(index, SqliteIndex)
    index.caches()  # what is only found now is made good now
    index.slot("http://llama:8080", 0)
    index.put_cache(cache())
    index.put_slot(slot())
    assert index.cache("/saves", "t_1") == [cache()]
    assert index.slot("http://llama:8080", 0) == slot()
    index.close()
    again = SqliteIndex(path)
    assert again.caches() == [cache()]
    again.close()
    if damage is not _empty:  # which is a new database
        assert len(said()) == 1
        assert str(path) not in said()[0]
        assert len([name for name in names_in(path.parent) if ".damaged-" in name]) >= 1


def test_a_database_that_is_damaged_while_it_is_open_is_made_anew(path: Path, said: Callable[[], list[str]]) -> None:
    index = SqliteIndex(path)
    _fill_and_damage(index, path)
    index.caches()
    index.put_cache(cache())
    assert index.cache("/saves", "t_1") == [cache()]
    assert len(said()) == 1
    index.close()


def test_two_processes_agree_again_after_damage(path: Path) -> None:
    one, other = SqliteIndex(path), SqliteIndex(path)
    _fill_and_damage(one, path)
    other.caches()
    other.put_cache(cache("from the other"))
    one.caches()
    one.put_cache(cache("from the one"))
    for index in (one, other):
        assert {row.key for row in index.caches()} == {"from the one", "from the other"}
        index.close()


def _fill_and_damage(index: SqliteIndex, path: Path) -> None:
    for number in range(50):
        index.put_cache(cache(f"old_{number}", chain=os.urandom(3000)))
    helper = sqlite3.connect(path)
    helper.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    helper.close()
    writer = sqlite3.connect(path)  # makes the open connection read the file again
    writer.execute("DELETE FROM slots")
    writer.execute("INSERT INTO slots SELECT 's', 1, '', '', '', '', 1, 1, 1, 1, 1, '', '', '', NULL, 0")
    writer.commit()
    writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    writer.close()
    with path.open("r+b") as file:
        file.write(os.urandom(path.stat().st_size))


def test_what_is_put_aside_is_not_lost(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"no database" * 1000)
    SqliteIndex(path).close()
    (aside,) = [name for name in names_in(path.parent) if ".damaged-" in name]
    assert (path.parent / aside).read_bytes() == b"no database" * 1000


# versions


def test_a_newer_schema_is_left_alone(path: Path, said: Callable[[], list[str]]) -> None:
    first = SqliteIndex(path)
    first.put_cache(cache())
    first.close()
    newer = sqlite3.connect(path)
    newer.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    newer.execute("ALTER TABLE caches ADD COLUMN extra TEXT")
    newer.commit()
    newer.close()
    index = open_index(path.parent)
    assert isinstance(index, MemoryIndex)
    assert every_call(index)[0]
    assert len(said()) == 1
    look = sqlite3.connect(path)
    assert look.execute("PRAGMA user_version").fetchone() == (SCHEMA + 1,)
    assert look.execute("SELECT key, extra FROM caches").fetchall() == [("t_1", None)]
    look.close()
    assert not any(".damaged-" in name for name in names_in(path.parent))


def test_a_database_without_a_schema_gets_one(path: Path) -> None:
    path.parent.mkdir()
    old = sqlite3.connect(path)
    old.execute("CREATE TABLE notes (text)")
    old.execute("INSERT INTO notes VALUES ('kept')")
    old.commit()
    old.close()
    index = SqliteIndex(path)
    index.put_cache(cache())
    index.close()
    look = sqlite3.connect(path)
    assert look.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    assert look.execute("SELECT text FROM notes").fetchall() == [("kept",)]
    assert look.execute("SELECT key FROM caches").fetchall() == [("t_1",)]
    look.close()


def test_a_migration_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SqliteIndex(path).close()
    monkeypatch.setattr(index_module, "SCHEMA", SCHEMA + 1)
    monkeypatch.setattr(
        index_module, "_MIGRATIONS", [*index_module._MIGRATIONS, ["CREATE TABLE good (x)", "CREATE TABLE caches (x)"]]
    )
    with pytest.raises(sqlite3.OperationalError):
        SqliteIndex(path)
    look = sqlite3.connect(path)
    assert look.execute("PRAGMA user_version").fetchone() == (SCHEMA,)
    assert look.execute("SELECT name FROM sqlite_master WHERE name = 'good'").fetchall() == []
    look.close()


def test_the_next_migration_keeps_what_is_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SqliteIndex(path)
    first.put_cache(cache())
    first.close()
    monkeypatch.setattr(index_module, "SCHEMA", SCHEMA + 1)
    monkeypatch.setattr(
        index_module, "_MIGRATIONS", [*index_module._MIGRATIONS, ["ALTER TABLE caches ADD COLUMN host TEXT DEFAULT ''"]]
    )
    index = SqliteIndex(path)
    assert index.caches() == [cache()]
    index.put_cache(cache("t_2"))
    assert len(index.caches()) == 2
    index.close()


# where it lies


def test_nobody_else_may_read_it(path: Path) -> None:
    umask = os.umask(0)
    try:
        index = SqliteIndex(path)
        index.put_cache(cache())
        assert path.parent.stat().st_mode & 0o777 == 0o700
        names = names_in(path.parent)
        assert {"index.sqlite3", "index.sqlite3-wal"} <= names
        assert {(path.parent / name).stat().st_mode & 0o777 for name in names} == {0o600}
        index.close()
    finally:
        os.umask(umask)


def test_a_state_folder_that_is_there_keeps_its_mode(path: Path) -> None:
    path.parent.mkdir(mode=0o750)
    SqliteIndex(path).close()
    assert path.parent.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("home", ["", "relative/path", None])
def test_the_state_folder_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str | None
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if home is None:
        monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", home)
    assert default_state_dir() == tmp_path / ".local" / "state" / "slot-cache"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert default_state_dir() == tmp_path / "xdg" / "slot-cache"
    index = open_index(None)
    assert isinstance(index, SqliteIndex)
    assert index.path == tmp_path / "xdg" / "slot-cache" / "index.sqlite3"
    index.close()


def test_where_there_can_be_no_folder_the_index_is_in_memory(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    (tmp_path / "file").write_text("x")
    index = open_index(tmp_path / "file" / "state")
    assert isinstance(index, MemoryIndex)
    assert every_call(index)[0] == [cache(used=1.0, uses=3), cache(used=1.0, uses=3, pending=True)]
    assert len(said()) == 1
    assert str(tmp_path) not in said()[0]


_READ_ONLY = """
import logging, os, sys, unicodedata
from pathlib import Path
from slot_cache.index import CacheRow, SlotRow, open_index
logging.basicConfig(format="%(message)s", stream=sys.stdout)
if os.geteuid() == 0:
    os.seteuid(65534)  # root may write everywhere
index = open_index(Path(sys.argv[1]))
for _ in range(3):
    index.put_cache(CacheRow("/saves", "t_2", "r", "m", 1, 1))
    index.used_cache("/saves", "t_1", 1.0)
    index.put_slot(SlotRow("s", 0, None, None, "", "", 0, 0, False, False, 0))
    index.drop_slot("s", 0)
    index.drop_cache("/saves", "t_2")
    print("found", [row.key for row in index.caches()], index.slot("s", 0))
index.close()
"""


@pytest.mark.parametrize("made_before", [False, True])
def test_a_folder_that_is_read_only_is_done_without(made_before: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # unlike tmp_path it may be seen by another user
        state = Path(name) / "state"
        state.mkdir()
        if made_before:
            index = SqliteIndex(state / "index.sqlite3")
            index.put_cache(cache())
            index.close()
            (state / "index.sqlite3").chmod(0o444)
        state.chmod(0o555)
        done = subprocess.run(
            [sys.executable, "-c", _READ_ONLY, str(state)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len([line for line in lines if line.startswith("slot-cache: ")]) == 1, lines
        assert len([line for line in lines if line.startswith("found [")]) == 3


# killed while it writes


_WRITER = """
import itertools, sys
from pathlib import Path
from slot_cache.index import CacheRow, SlotRow, SqliteIndex
index = SqliteIndex(Path(sys.argv[1]))
for number in itertools.count():
    row = CacheRow("/saves", f"k{number % 7}", "r", "m", number, number, chain=bytes(number % 5000))
    index.put_cache(CacheRow(**{**row.__dict__, "pending": True}))
    index.put_cache(row)
    index.put_slot(SlotRow("s", number % 3, f"k{number % 7}", None, "/saves", "r", number, number, True, True, 0))
    index.drop_cache("/saves", f"k{(number + 3) % 7}")
    if not number:
        print("ready", flush=True)
"""


def test_a_process_killed_while_it_writes_leaves_a_good_database(path: Path, said: Callable[[], list[str]]) -> None:
    reader = SqliteIndex(path)
    for number in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        for _ in range(1 + number * 3):  # somewhere, after so much work of ours
            for row in reader.caches():
                assert row.tokens == row.size and len(row.chain) == row.tokens % 5000
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
        writer.stdout.close()
        index = SqliteIndex(path)
        rows = index.caches()
        assert rows and len({(row.key, row.pending) for row in rows}) == len(rows)
        index.put_cache(cache("after"))
        assert index.cache("/saves", "after") == [cache("after")]
        index.drop_cache("/saves", "after")
        index.close()
    assert reader._db is not None
    found = [row[0] for row in reader._db.execute("PRAGMA integrity_check")]
    # SQLite 3.40 takes columns of a table WITHOUT ROWID for others there
    assert [line for line in found if not line.startswith("NULL value in ")] in ([], ["ok"])
    reader.close()
    assert said() == []
    assert not any(".damaged-" in name for name in names_in(path.parent))


# the thread


async def test_calls_are_made_in_their_order_and_not_on_the_loop(path: Path) -> None:
    thread = IndexThread(SqliteIndex(path))
    here = threading.get_ident()
    ran: list[int] = []

    def note(number: int) -> int:
        assert threading.get_ident() != here
        ran.append(number)
        return number

    assert await asyncio.gather(*(thread.call(note, number) for number in range(50))) == list(range(50))
    assert ran == list(range(50))
    thread.close()


async def test_what_was_called_before_the_close_is_done(path: Path) -> None:
    thread = IndexThread(SqliteIndex(path))
    calls = [asyncio.ensure_future(thread.call(thread.index.put_cache, cache(f"t_{n}"))) for n in range(20)]
    await asyncio.sleep(0)
    thread.close()
    await asyncio.gather(*calls)
    again = SqliteIndex(path)
    assert len(again.caches()) == 20
    again.close()


# the same in memory and in SQLite


_keys = st.sampled_from(["t_1", "t_2", "u_1"])
_folders = st.sampled_from(["/saves", "/other"])
_servers = st.sampled_from(["http://a:1", "http://b:1"])
_cache_rows = st.builds(
    CacheRow,
    folder=_folders,
    key=_keys,
    route=st.text(max_size=5).filter(lambda text: text.isprintable()),
    model=st.sampled_from(["a", "b"]),
    tokens=st.integers(0, 2**40),
    size=st.integers(0, 2**60),
    checksum=st.sampled_from(["", "c"]),
    sample=st.sampled_from(["", "s"]),
    chain=st.binary(max_size=20),
    created=st.floats(allow_nan=False, allow_infinity=False),
    used=st.floats(0, 2e9),
    uses=st.integers(0, 1000),
    seconds=st.floats(0, 1e6),
    pending=st.booleans(),
)
_slot_rows = st.builds(
    SlotRow,
    server=_servers,
    slot=st.integers(0, 2),
    key=st.none() | _keys,
    owner=st.none() | st.text("abc", max_size=3),
    folder=_folders,
    route=st.text(max_size=5).filter(lambda text: text.isprintable()),
    task=st.integers(0, 2**40),
    tokens=st.integers(0, 2**40),
    dirty=st.booleans(),
    whole=st.booleans(),
    saved_tokens=st.integers(0, 2**40),
    model=st.sampled_from(["", "a"]),
    boot=st.sampled_from(["", "x"]),
    chain=st.binary(max_size=20),
)


class SameInBoth(RuleBasedStateMachine):
    """SqliteIndex, through two connections of which either may be closed and opened anew, behaves as MemoryIndex."""

    folder: Path
    number = 0

    @initialize()
    def begin(self) -> None:
        type(self).number += 1
        self.path = self.folder / str(self.number) / "index.sqlite3"
        self.memory = MemoryIndex()
        self.sqlite = [SqliteIndex(self.path), SqliteIndex(self.path)]
        self.turn = 0

    def both(self, name: str, *args: Any) -> None:
        self.turn += 1
        one, other = getattr(self.memory, name)(*args), getattr(self.sqlite[self.turn % 2], name)(*args)
        assert one == other

    @rule(row=_cache_rows)
    def put_cache(self, row: CacheRow) -> None:
        self.both("put_cache", row)
        self.same()

    @rule(folder=_folders, key=_keys, when=st.floats(0, 2e9))
    def used_cache(self, folder: str, key: str, when: float) -> None:
        self.both("used_cache", folder, key, when)
        self.same()

    @rule(folder=_folders, key=_keys)
    def drop_cache(self, folder: str, key: str) -> None:
        self.both("drop_cache", folder, key)
        self.same()

    @rule(row=_slot_rows)
    def put_slot(self, row: SlotRow) -> None:
        self.both("put_slot", row)
        self.same()

    @rule(server=_servers, slot=st.integers(0, 2))
    def drop_slot(self, server: str, slot: int) -> None:
        self.both("drop_slot", server, slot)
        self.same()

    @rule(which=st.integers(0, 1))
    def open_anew(self, which: int) -> None:
        self.sqlite[which].close()
        self.sqlite[which] = SqliteIndex(self.path)
        self.same()

    def same(self) -> None:
        for sqlite in self.sqlite:
            assert sorted(self.memory.caches(), key=repr) == sorted(sqlite.caches(), key=repr)
        for folder in ("/saves", "/other"):
            for key in ("t_1", "t_2", "u_1"):
                self.both("cache", folder, key)
        for server in ("http://a:1", "http://b:1"):
            for number in range(3):
                self.both("slot", server, number)

    def teardown(self) -> None:
        for sqlite in getattr(self, "sqlite", ()):
            sqlite.close()


def test_sqlite_behaves_as_memory(tmp_path: Path) -> None:
    machine = type("SameInBoth", (SameInBoth,), {"folder": tmp_path})
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None))
