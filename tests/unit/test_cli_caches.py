"""`slot-cache ls`, `rm`, `prune` and `verify`."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slot_cache import checksum
from slot_cache.cli import main
from slot_cache.index import CacheRow, SqliteIndex
from slot_cache.request import route_tag

SERVER = "http://llama:8080"
MODEL, OTHER_MODEL = "a" * 32, "b" * 32


def key(number: int, route: str = "smol") -> str:
    return f"{route_tag(route)}_{number:032x}"


class House:
    """A state folder and a folder of saves."""

    def __init__(self, root: Path) -> None:
        self.state, self.saves = root / "state", root / "saves"
        self.saves.mkdir()

    def save(self, number: int, data: bytes = b"data" * 250, route: str = "smol", **more: Any) -> str:
        name = key(number, route)
        file = self.saves / f"{name}.bin"
        file.write_bytes(data)
        sums = checksum.take(file, whole=True)
        now = time.time()
        fields = {"model": MODEL, "tokens": 1234, "created": now, "used": now, "uses": 2, "seconds": 0.5}
        row = CacheRow(
            folder=str(self.saves),
            key=name,
            route=route,
            size=len(data),
            checksum=sums.whole,
            sample=sums.sample,
            **(fields | more),
        )
        self.put(row)
        return name

    def put(self, row: CacheRow) -> None:
        index = SqliteIndex(self.state / "index.sqlite3")
        index.put_cache(row)
        index.close()

    def keys(self) -> set[str]:
        index = SqliteIndex(self.state / "index.sqlite3")
        try:
            return {row.key for row in index.caches()}
        finally:
            index.close()

    def files(self) -> set[str]:
        return {entry.name.removesuffix(".bin") for entry in self.saves.iterdir()}


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


@pytest.fixture
def run(house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`slot-cache ...` with the house's state folder."""
    monkeypatch.setattr("signal.signal", lambda *args: None)

    def command(*arguments: str, state: Path | None = None) -> Result:
        try:
            code = main([*arguments, "--state-dir", str(state or house.state)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return command


COMMANDS = [["ls"], ["verify"], ["rm", "--all"], ["rm", key(1)], ["prune", "--stale"]]


# where there is nothing


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_without_an_index_it_says_so(house: House, run: Run, command: list[str]) -> None:
    done = run(*command)
    assert done.code == 1
    assert done.out == ""
    assert "there is no index" in done.err and str(house.state) in done.err
    assert not house.state.exists()  # asking makes nothing


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["rm", "--all"], ["prune", "--stale"]], ids=" ".join)
def test_an_empty_index_is_no_error(house: House, run: Run, command: list[str]) -> None:
    SqliteIndex(house.state / "index.sqlite3").close()
    assert run(*command).code == 0
    done = run(*command, "--json")
    assert done.code == 0 and done.json == []
    assert done.err == ""


def test_an_empty_list_is_said(house: House, run: Run) -> None:
    SqliteIndex(house.state / "index.sqlite3").close()
    assert run("ls").out == "nothing is saved\n"


@pytest.mark.parametrize("command", [["ls"], ["verify"], ["rm", "--all"], ["prune", "--stale"]], ids=" ".join)
def test_an_index_of_a_newer_version_is_left_alone(house: House, run: Run, command: list[str]) -> None:
    house.save(1)
    newer = sqlite3.connect(house.state / "index.sqlite3")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    done = run(*command)
    assert done.code == 1 and done.out == ""
    assert "cannot be opened" in done.err and "99" in done.err
    assert house.files() == {key(1)}


def test_the_state_folder_of_the_user_is_the_default(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(house.state.parent / "xdg"))
    house.state = house.state.parent / "xdg" / "slot-cache"
    house.save(1)
    assert main(["ls", "--json"]) == 0
    assert [entry["key"] for entry in json.loads(capsys.readouterr().out)] == [key(1)]


def test_a_state_folder_may_begin_with_the_home_folder(
    house: House, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setenv("HOME", str(house.state.parent))
    house.save(1)
    assert main(["ls", "--json", "--state-dir", "~/state"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


# ls


def test_ls_is_a_table(house: House, run: Run) -> None:
    house.save(1, b"x" * 2_500_000, created=time.time() - 7200.5, used=time.time() - 180.5)
    house.save(2, route="big", tokens=5, uses=0, model="")
    done = run("ls")
    assert done.code == 0 and done.err == ""
    title, line, *rows = done.out.splitlines()
    assert title.split() == ["route", "session", "tokens", "size", "saved", "used", "uses", "model", "state"]
    assert set(line) == {"-", " "}
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["smol"] == ["smol", f"{1:032x}", "1,234", "2.5", "MB", "2h", "3m", "2", MODEL[:8], "ok"]
    assert cells["big"] == ["big", f"{2:032x}", "5", "0.0", "MB", "0s", "0s", "0", "-", "ok"]


def test_the_last_used_comes_first(house: House, run: Run) -> None:
    for number, used in ((1, 100.0), (2, 300.0), (3, 200.0)):
        house.save(number, used=used)
    assert [entry["key"] for entry in run("ls", "--json").json] == [key(2), key(3), key(1)]


def test_ls_as_json_tells_everything(house: House, run: Run) -> None:
    house.save(1, created=10.0, used=20.0)
    assert run("ls", "--json").json == [
        {
            "folder": str(house.saves),
            "key": key(1),
            "route": "smol",
            "tokens": 1234,
            "size": 1000,
            "uses": 2,
            "model": MODEL,
            "seconds": 0.5,
            "created": 10.0,
            "used": 20.0,
            "state": "ok",
        }
    ]


def test_ls_tells_states(house: House, run: Run) -> None:
    for number in (1, 2, 3):
        house.save(number)
    (house.saves / f"{key(1)}.bin").unlink()
    (house.saves / f"{key(2)}.bin").write_bytes(b"short")
    (house.saves / f"{key(4)}.bin").write_bytes(b"x")
    house.put(CacheRow(SERVER, key(5), "smol", MODEL, 1, 1))
    done = run("ls", "--json")
    assert done.code == 0
    assert {entry["key"]: entry["state"] for entry in done.json} == {
        key(1): "missing",
        key(2): "damaged",
        key(3): "ok",
        key(4): "unknown",
        key(5): "unseen",
    }
    shown = [line.split()[-1] for line in run("ls").out.splitlines()[2:]]
    assert sorted(shown) == ["damaged", "missing", "ok", "unknown", "unseen"]


@pytest.mark.parametrize(
    "route", ["\x1b[31mred\x1b[0m", "two\nlines", "bell\a", "\x9b31m", "back\b\b", "x" * 500, "\u202egnp", "tab\there"]
)
def test_a_route_s_name_does_nothing_to_a_terminal(house: House, run: Run, route: str) -> None:
    house.save(1, route=route)
    for command in (["ls"], ["verify"]):
        done = run(*command)
        assert all(char.isprintable() or char == "\n" for char in done.out)
        assert len(done.out.splitlines()) <= 4
        assert max(map(len, done.out.splitlines())) < 250
    assert run("ls", "--json").json[0]["route"] == route  # there it is data
    done = run("rm", "--route", route)
    assert done.code == 0 and all(char.isprintable() or char == "\n" for char in done.out)
    assert house.keys() == set()


@pytest.mark.parametrize(
    ("age", "shown"),
    [
        (0, "0s"),
        (119, "119s"),
        (121, "2m"),
        (7199, "120m"),
        (7201, "2h"),
        (172_801, "2d"),
        (1_209_601, "2w"),
        (-50, "0s"),
    ],
)
def test_ages_are_short(house: House, run: Run, age: float, shown: str) -> None:
    now = time.time()
    house.save(1, created=now - age - 0.2, used=now - age - 0.2)
    assert run("ls").out.splitlines()[2].split()[5] == shown


# verify


def test_verify_of_good_files(house: House, run: Run) -> None:
    house.save(1)
    house.save(2)
    done = run("verify")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "2 of 2 caches are what was saved"


def test_verify_reads_every_byte(house: House, run: Run) -> None:
    house.save(1)
    house.save(2)
    file = house.saves / f"{key(1)}.bin"
    data = bytearray(file.read_bytes())
    data[500] ^= 1
    file.write_bytes(data)
    assert run("ls", "--json").code == 0
    done = run("verify")
    assert done.code == 1
    assert "1 of 2 caches are what was saved" in done.out
    done = run("verify", "--json")
    assert done.code == 1
    assert {entry["key"]: entry["state"] for entry in done.json} == {key(1): "damaged", key(2): "ok"}
    assert house.files() == {key(1), key(2)}  # it deletes nothing


@pytest.mark.parametrize("state", ["missing", "unknown", "unseen"])
def test_what_is_no_damage_is_no_failure_of_verify(house: House, run: Run, state: str) -> None:
    house.save(1)
    if state == "missing":
        house.save(2)
        (house.saves / f"{key(2)}.bin").unlink()
    elif state == "unknown":
        (house.saves / f"{key(2)}.bin").write_bytes(b"x")
    else:
        house.put(CacheRow(SERVER, key(2), "smol", MODEL, 1, 1))
    done = run("verify")
    assert done.code == 0
    assert state in done.out and "1 of 2 caches are what was saved" in done.out


# rm


def test_rm_deletes_the_caches_that_are_named(house: House, run: Run) -> None:
    for number in (1, 2, 3):
        house.save(number)
    done = run("rm", key(1), key(3))
    assert done.code == 0 and done.err == ""
    assert sorted(done.out.splitlines()) == ["2 deleted, 0.0 MB", f"deleted {key(1)}", f"deleted {key(3)}"]
    assert house.files() == house.keys() == {key(2)}


def test_rm_of_one_that_is_not_there_deletes_nothing(house: House, run: Run) -> None:
    house.save(1)
    done = run("rm", key(1), key(9))
    assert done.code == 1 and done.out == ""
    assert done.err == f"no such cache: {key(9)}\n"
    assert house.files() == {key(1)}


@pytest.mark.parametrize("name", ["../saves/x", "/etc/passwd", "*", "", ".", key(1)[:-1], f"{key(1)}.bin"])
def test_rm_takes_no_other_names(house: House, run: Run, name: str) -> None:
    house.save(1)
    assert run("rm", name).code == 1
    assert house.files() == {key(1)}


def test_rm_of_a_route(house: House, run: Run) -> None:
    house.save(1)
    house.save(2)
    house.save(3, route="big")
    assert run("rm", "--route", "smol").code == 0
    assert house.files() == house.keys() == {key(3, "big")}
    done = run("rm", "--route", "nobody")
    assert done.code == 0 and "0 deleted" in done.out


def test_rm_of_all_leaves_other_files(house: House, run: Run) -> None:
    house.save(1)
    house.save(2, route="big")
    (house.saves / f"{key(7)}.bin").write_bytes(b"unknown")
    for name in ("model.gguf", "precious.bin", f"{key(8)}.bin.part"):
        (house.saves / name).write_bytes(b"x")
    done = run("rm", "--all", "--json")
    assert done.code == 0
    assert {entry["key"] for entry in done.json} == {key(1), key(2, "big"), key(7)}
    assert house.keys() == set()
    assert house.files() == {"model.gguf", "precious", f"{key(8)}.bin.part"}


def test_rm_as_json_tells_what_it_deleted(house: House, run: Run) -> None:
    house.save(1)
    (entry,) = run("rm", key(1), "--json").json
    assert (entry["key"], entry["size"]) == (key(1), 1000)


def test_what_cannot_be_deleted_is_told_and_the_rest_is_deleted(house: House, run: Run) -> None:
    house.save(1)
    house.save(2)
    (house.saves / f"{key(1)}.bin").unlink()
    (house.saves / f"{key(1)}.bin").mkdir()
    done = run("rm", "--all", "--json")
    assert done.code == 1
    assert key(1) in done.err and "cannot be deleted" in done.err and str(house.saves) not in done.err
    assert [entry["key"] for entry in done.json] == [key(2)]
    assert house.keys() == {key(1)}


# prune


def test_prune_keeps_the_files_used_last(house: House, run: Run) -> None:
    for number in range(5):
        house.save(number, used=float(number))
    house.save(9, route="big", used=0.0)
    assert run("prune", "--max-files", "2").code == 0
    assert house.files() == house.keys() == {key(3), key(4), key(9, "big")}
    assert run("prune", "--max-files", "2", "--json").json == []


def test_prune_keeps_so_many_gib(house: House, run: Run) -> None:
    for number in range(3):
        house.save(number, used=float(number))
    assert run("prune", "--max-gib", f"{2100 / 2**30:.12f}").code == 0
    assert house.files() == {key(1), key(2)}


@pytest.mark.parametrize("age", ["90m", "1.5h", "5400s", " 1H ", "0.05d", "0.005w"])
def test_prune_deletes_what_is_old(house: House, run: Run, age: str) -> None:
    house.save(1, used=time.time() - 7200)
    house.save(2, used=time.time() - 60)
    assert run("prune", "--older-than", age).code == 0
    assert house.files() == {key(2)}


def test_prune_deletes_what_another_model_wrote_and_forgets_what_is_gone(house: House, run: Run) -> None:
    house.save(1, model=OTHER_MODEL, created=1.0)
    house.save(2, created=2.0)
    house.save(3, created=2.0)
    (house.saves / f"{key(3)}.bin").unlink()
    house.save(4, route="big", model=OTHER_MODEL, created=1.0)
    done = run("prune", "--stale", "--json")
    assert done.code == 0
    assert {entry["key"] for entry in done.json} == {key(1), key(3)}
    assert house.files() == house.keys() == {key(2), key(4, "big")}


def test_what_is_asked_for_twice_is_deleted_once(house: House, run: Run) -> None:
    house.save(1, model=OTHER_MODEL, created=1.0, used=1.0)
    house.save(2, used=2.0)
    done = run("prune", "--stale", "--older-than", "1h", "--max-files", "1")
    assert done.code == 0
    assert "2 deleted" in done.out
    house.save(3, used=time.time())
    house.save(4, used=time.time() + 1, model=OTHER_MODEL, created=1.0)
    done = run("prune", "--stale", "--max-files", "1", "--json")
    assert [entry["key"] for entry in done.json] == [key(4)]  # the limit counts what is left


def test_prune_must_be_told_what_may_go(house: House, run: Run) -> None:
    house.save(1)
    done = run("prune")
    assert done.code == 2 and "--older-than" in done.err
    assert house.files() == {key(1)}


# wrong usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["rm"],
        ["rm", "--all", "--route", "smol"],
        ["rm", key(1), "--all"],
        ["rm", "--route"],
        ["prune", "--max-files", "0"],
        ["prune", "--max-files", "-1"],
        ["prune", "--max-files", "two"],
        ["prune", "--max-files", "1.5"],
        ["prune", "--max-gib", "0"],
        ["prune", "--max-gib", "-1"],
        ["prune", "--max-gib", "nan"],
        ["prune", "--max-gib", "inf"],
        ["prune", "--max-gib", "much"],
        ["prune", "--older-than", "12"],
        ["prune", "--older-than", "-1h"],
        ["prune", "--older-than", "1y"],
        ["prune", "--older-than", ""],
        ["ls", "--everything"],
        ["ls", "extra"],
        ["verify", "extra"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_and_does_nothing(house: House, run: Run, arguments: list[str]) -> None:
    house.save(1, used=1.0)
    done = run(*arguments)
    assert done.code == 2
    assert done.err.startswith("usage: slot-cache") and done.out == ""
    assert house.files() == {key(1)}


# while the proxy runs


def test_they_work_while_another_process_writes(house: House, run: Run) -> None:
    house.save(0)
    stop = threading.Event()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            index = SqliteIndex(house.state / "index.sqlite3")
            number = 100
            while not stop.is_set():
                number = 100 + (number + 1) % 50
                index.put_cache(CacheRow(str(house.saves), key(number), "smol", MODEL, 1, 1, used=1.0))
                index.drop_cache(str(house.saves), key(number))
            index.close()
        except BaseException as error:
            failed.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in range(1, 15):
            house.save(number)
            assert key(number) in {entry["key"] for entry in run("ls", "--json").json}
            assert run("verify", "--json").code == 0
            assert run("rm", key(number)).code == 0
            assert key(number) not in house.files()
            assert run("prune", "--stale").code == 0
    finally:
        stop.set()
        writer.join(30)
    assert not failed
    assert house.keys() - {key(number) for number in range(100, 150)} == {key(0)}


@contextlib.contextmanager
def _held(house: House) -> Iterator[None]:
    other = sqlite3.connect(house.state / "index.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def test_looking_does_not_need_to_write(house: House, run: Run) -> None:
    house.save(1)
    with _held(house):
        assert [entry["key"] for entry in run("ls", "--json").json] == [key(1)]
        assert run("verify").code == 0


def test_the_program_can_be_run_and_has_its_exit_codes(house: House) -> None:
    house.save(1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def program(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "slot_cache", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = program("ls", "--json", "--state-dir", str(house.state))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)) == 1
    assert program("ls", "--state-dir", str(house.state / "nowhere")).returncode == 1
    assert program("prune", "--state-dir", str(house.state)).returncode == 2
    assert program("rm", "--state-dir", str(house.state)).returncode == 2
    (house.saves / f"{key(1)}.bin").write_bytes(b"x")
    assert program("verify", "--state-dir", str(house.state)).returncode == 1
