"""`slot-cache doctor`: each fault is found on a server that has it, and none on a good one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fake_http import Answer, HttpServer
from fake_llama_server import FakeLlamaServer
from fake_llama_swap import FakeLlamaSwap
from fake_router import FakeRouter, Model
from slot_cache import doctor
from slot_cache.cli import main
from slot_cache.deployments import MOST_BYTES
from slot_cache.doctor import Arguments, Finding, Folder, Route, RouterTold, State, Told, Trial, read_arguments
from slot_cache.examine import FILE, network_of
from slot_cache.index import SqliteIndex
from slot_cache.lab import configs
from slot_cache.llama_server import same_server_key
from slot_cache.locks import SlotLock
from slot_cache.model import identity_of
from slot_cache.settings import ENVIRONMENT, Settings
from slot_cache.state import SlotReading

GIB = 2**30
KEY = "sk-a-key-that-nobody-may-see"


class Result:
    """What the command printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def findings(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self.out)["findings"]
        return found

    def found(self, check: str) -> list[str]:
        """The levels of a check."""
        return [finding["level"] for finding in self.findings if finding["check"] == check]

    def worse_than_ok(self) -> list[dict[str, str]]:
        return [finding for finding in self.findings if finding["level"] not in ("ok", "unknown")]

    def text(self, check: str) -> str:
        return " | ".join(" ".join(finding.values()) for finding in self.findings if finding["check"] == check)


Doctor = Callable[..., Any]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own."""
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))
    for name in (*ENVIRONMENT.values(), "LLAMA_API_KEY", "NUM_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def doctor_of(home: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """`slot-cache doctor ...` in a thread, so that the fakes can answer meanwhile."""

    async def run(*arguments: object, as_json: bool = True) -> Result:
        words = ["doctor", *map(str, arguments), *(["--json"] if as_json else [])]

        def call() -> int:
            try:
                return main(words)
            except SystemExit as ended:
                return int(ended.code or 0)

        code = await asyncio.to_thread(call)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Any], Any]]:
    async with AsyncExitStack() as stack:

        async def start(fake: FakeLlamaServer | FakeRouter) -> str:
            return await stack.enter_async_context(fake.serve())

        yield start


@pytest.fixture
def saves(home: Path) -> Path:
    folder = home / "saves"
    folder.mkdir(mode=0o700)
    return folder


GOOD: dict[str, Any] = {"max_gib": 1, "save_idle_seconds": 30}


def write_config(home: Path, *routes: dict[str, Any], **more: Any) -> Path:
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump(configs.config(*routes) | more))
    return path


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def open_to_all(folder: Path) -> None:
    folder.chmod(0o755)


def one_route(home: Path, url: str, saves: Path, *, key: str | None = None, **options: Any) -> Path:
    slot_cache = {"save_path": str(saves), **GOOD, **options}
    return write_config(home, configs.route("local", url, api_key=key, slot_cache=slot_cache))


# a good one


async def test_a_good_setup_has_nothing_worse_than_ok(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves, api_key=KEY)
    await fake.complete("hello", slot=0)
    before = fake.slots[0].tokens
    done = await doctor_of(one_route(home, await serve(fake), saves, key=KEY), "--write")
    assert done.worse_than_ok() == []
    assert done.code == 0
    assert done.found("save_path") == ["ok"] and done.found("save") == ["ok"]
    assert files(saves) == []  # seen and removed
    assert fake.slots[0].tokens == before
    assert {"erase", "restore", "chat"}.isdisjoint(fake.actions())
    assert not (home / "state-home").exists()  # asking makes nothing


async def test_without_write_nothing_is_saved(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    done = await doctor_of(one_route(home, await serve(fake), saves))
    assert done.code == 0 and done.worse_than_ok() == []
    assert "--write" in done.text("save_path") and done.found("save_path") == ["unknown"]
    assert fake.count("save") == 0 and files(saves) == []


async def test_a_server_without_a_configuration(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves, api_key=KEY)
    url = await serve(fake)
    done = await doctor_of("--server", f"{url}/v1", "--save-path", saves, "--api-key", KEY, "--write")
    assert done.code == 0 and done.worse_than_ok() == []
    assert done.found("save_path") == ["ok"]
    assert (await doctor_of("--server", url)).found("key") == ["error"]


async def test_every_finding_tells_what_to_do(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves, slots_endpoint=False, slot_save_path=False)
    done = await doctor_of(one_route(home, await serve(fake), home / "absent", slot=7, max_gib=0))
    assert len(done.worse_than_ok()) >= 4
    for finding in done.worse_than_ok():
        assert finding["what"] and finding["why"] and finding["fix"], finding


# faults of a server


@pytest.mark.parametrize(
    ("options", "route", "check", "words"),
    [
        ({"api_key": KEY}, {}, "key", "wants a key"),
        ({"api_key": KEY}, {"key": "sk-another-one"}, "key", "refuses the key"),
        ({"slots_endpoint": False}, {}, "slots", "--no-slots"),
        ({"slot_save_path": False}, {}, "slot-save-path", "--slot-save-path DIR"),
        ({"slots": 2}, {"slot": 2}, "slot number", "-np 3"),
        ({}, {"backend": "llama-swap"}, "backend", "backend"),
        ({}, {"max_files": -1}, "settings", "a whole number"),
        ({}, {"no_such": 1}, "settings", "unknown option"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_an_error_is_found(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, options: Any, route: Any, check: str, words: str
) -> None:
    fake = FakeLlamaServer(save_dir=saves, **options)
    done = await doctor_of(one_route(home, await serve(fake), saves, **route), "--write")
    assert "error" in done.found(check)
    assert words in done.text(check)
    assert done.code == 2
    assert {finding["check"] for finding in done.worse_than_ok()} == {check}  # and nothing else


@pytest.mark.parametrize(
    ("where", "kind", "level"),
    [
        ("*", "hang", "error"),
        ("*", "refuse", "error"),
        ("*", "drop", "error"),
        ("props", "garbage", "error"),
        ("props", "wrong_shape", "error"),
        ("props", "500", "error"),
        ("health", "503", "warning"),
        ("props", "503", "warning"),
    ],
)
async def test_a_server_that_does_not_answer_as_it_should(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, where: Any, kind: Any, level: str
) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    url = await serve(fake)
    fake.fail(where, kind, None)
    started = time.monotonic()
    done = await doctor_of(one_route(home, url, saves), "--write")
    assert time.monotonic() - started < 10
    assert level in done.found("server")
    assert done.code == {"error": 2, "warning": 1}[level]
    fake.clear()


@pytest.mark.parametrize(("kind", "level"), [("garbage", "error"), ("wrong_types", "error"), ("500", "error")])
async def test_slots_that_answer_nonsense(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, kind: Any, level: str
) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    url = await serve(fake)
    fake.fail("slots", kind, None)
    done = await doctor_of(one_route(home, url, saves), "--write")
    assert done.found("slots") == [level] and fake.count("save") == 0


async def test_save_path_is_another_folder(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    other = home / "other"
    other.mkdir(mode=0o700)
    (other / FILE).write_bytes(b"x" * 36)  # what a doctor that was killed has left proves nothing
    fake = FakeLlamaServer(save_dir=saves)
    path = one_route(home, await serve(fake), other)
    done = await doctor_of(path, "--write")
    assert done.found("save_path") == ["error"] and "same mount" in done.text("save_path")
    assert FILE in done.text("save_path")
    assert [finding["check"] for finding in done.worse_than_ok()] == ["save_path"]
    assert files(other) == []
    assert (await doctor_of(path)).code == 0  # not tried, not known


async def test_two_servers_that_save_into_one_folder(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fakes = [FakeLlamaServer(save_dir=saves), FakeLlamaServer(save_dir=saves)]
    fakes[0].fail("save", "late", 1, seconds=0.3)  # the other one's file comes and goes meanwhile
    options = {"save_path": str(saves), **GOOD}
    routes = [configs.route(f"r{n}", await serve(fake), slot_cache=options) for n, fake in enumerate(fakes)]
    done = await doctor_of(write_config(home, *routes), "--write")
    assert done.worse_than_ok() == [] and done.found("save_path") == ["ok", "ok"]


@pytest.mark.parametrize("kind", ["500", "drop", "garbage"])
async def test_a_save_that_fails(home: Path, saves: Path, serve: Any, doctor_of: Doctor, kind: Any) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    url = await serve(fake)
    fake.fail("save", kind, None)
    done = await doctor_of(one_route(home, url, saves), "--write")
    assert done.found("save") == ["error"] and done.code == 2
    assert files(saves) == []


async def test_a_server_that_sleeps_is_not_woken(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    fake.sleep()
    url = await serve(fake)
    done = await doctor_of(one_route(home, url, saves, save_idle_seconds=0), "--write")
    assert done.found("sleep") == ["warning"] and "save_idle_seconds" in done.text("sleep")
    assert done.code == 1
    assert fake.is_sleeping and fake.wakes == 0 and set(fake.actions()) <= {"health", "props"}
    quiet = await doctor_of(one_route(home, url, saves, save_idle_seconds=30), "--write")
    assert quiet.found("sleep") == ["unknown"] and quiet.code == 0
    assert (await doctor_of("--server", url)).found("sleep") == ["note"]


async def test_a_busy_slot_is_left_alone(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    gate = asyncio.Event()
    request = asyncio.ensure_future(fake.complete("hello", slot=0, gate=gate))
    await fake.until_processing()
    done = await doctor_of(one_route(home, await serve(fake), saves), "--write")
    assert done.found("save") == ["unknown"] and done.code == 0
    assert fake.count("save") == 0 and fake.parked == 0
    gate.set()
    await request


async def test_a_large_file_is_not_written_just_to_try(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    await fake.complete("hello", slot=0)
    url = await serve(fake)
    done = await doctor_of("--server", url, "--write")  # nobody could remove it again
    assert done.found("save") == ["unknown"] and fake.count("save") == 0
    monkeypatch.setattr("slot_cache.examine._free", lambda path: 2**20)
    done = await doctor_of(one_route(home, url, saves), "--write")
    assert done.found("save") == ["unknown"] and fake.count("save") == 0


async def test_an_idle_slot_is_taken_beside_a_busy_one(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(2, save_dir=saves)
    gate = asyncio.Event()
    request = asyncio.ensure_future(fake.complete("hello", slot=0, gate=gate))
    await fake.until_processing()
    done = await doctor_of(one_route(home, await serve(fake), saves), "--write")
    assert done.found("save_path") == ["ok"]
    assert [call.slot for call in fake.calls if call.action == "save"] == [1]
    gate.set()
    await request


async def test_a_slot_that_a_proxy_has_is_left_alone(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(2, save_dir=saves)
    url = await serve(fake)
    state = home / "state-home" / "slot-cache"
    state.mkdir(parents=True)
    digest = hashlib.sha256(same_server_key(url).encode()).hexdigest()[:16]
    lock = SlotLock(state, f"{digest}-0")
    assert lock.try_acquire()
    try:
        done = await doctor_of(one_route(home, url, saves), "--write")
    finally:
        lock.release()
    assert done.found("save_path") == ["ok"]
    assert [call.slot for call in fake.calls if call.action == "save"] == [1]


@pytest.mark.parametrize(
    ("slots", "clears", "level", "words"),
    [(1, False, "ok", "one slot"), (4, True, "note", "--no-cache-idle-slots"), (2, False, "ok", "do not share")],
)
async def test_clearing_is_seen_by_trying(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, slots: int, clears: bool, level: str, words: str
) -> None:
    fake = FakeLlamaServer(slots, save_dir=saves, clears_idle_slots=clears)
    done = await doctor_of(one_route(home, await serve(fake), saves), "--write")
    assert done.found("idle slots") == [level] and words in done.text("idle slots")
    assert all(not slot.tokens for slot in fake.slots)  # what was tried is put away
    assert done.code == 0


async def test_clearing_is_not_tried_where_something_could_be_lost(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor
) -> None:
    fake = FakeLlamaServer(4, save_dir=saves, clears_idle_slots=True)
    await fake.complete("hello", slot=2)
    before = fake.slots[2].tokens
    done = await doctor_of(one_route(home, await serve(fake), saves), "--write")
    assert done.found("idle slots") == ["unknown"] and "by default" in done.text("idle slots")
    assert fake.slots[2].tokens == before and fake.count("chat") == 0


async def test_what_is_known_of_the_model(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    url = await serve(fake)
    path = one_route(home, url, saves)
    async with httpx.AsyncClient(base_url=url) as client:
        props, models = (await client.get("/props")).json(), (await client.get("/v1/models")).json()
    identity = identity_of(props, models["data"][0])
    index = SqliteIndex(home / "state-home" / "slot-cache" / "index.sqlite3")
    try:
        assert "learned from the first ones" in (await doctor_of(path)).text("model")
        for kind, words in (("plain", "are reused"), ("rewind", "rewound")):
            index.put_kind(identity.kind_key, kind)
            done = await doctor_of(path)
            assert words in done.text("model") and done.code == 0, kind
        useless = identity.useless_key(same_server_key(url))
        index.put_kind(useless, "the boot before")  # the server was started anew since, perhaps with other options
        assert (await doctor_of(path)).found("model") == ["ok"]
        index.put_kind(useless, identity.boot)
        done = await doctor_of(path)
        assert done.found("model") == ["warning"] and "--swa-full" in done.text("model") and done.code == 1
    finally:
        index.close()


# folders


async def test_a_folder_that_is_not_there(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    url = await serve(fake)
    done = await doctor_of(one_route(home, url, home / "absent"))
    assert done.found("folder") == ["error"] and done.code == 2
    assert not (home / "absent").exists()
    (home / "file").write_text("")
    assert "no folder" in (await doctor_of(one_route(home, url, home / "file"))).text("folder")


async def test_files_of_the_future_and_a_folder_for_all(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    file = saves / f"local-12345678_{'0' * 32}.bin"
    file.write_bytes(b"x")
    os.utime(file, (time.time() + 7200,) * 2)
    open_to_all(saves)
    done = await doctor_of(one_route(home, await serve(fake), saves, max_gib=0))
    assert "warning" in done.found("clock") and "s in the future" in done.text("clock")
    assert done.found("privacy") == ["note"] and done.found("limits") == ["note"]
    assert done.code == 1


async def test_an_index_that_is_damaged_is_left_as_it_is(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor
) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    path = one_route(home, await serve(fake), saves)
    state = home / "state-home" / "slot-cache"
    state.mkdir(parents=True)
    index = state / "index.sqlite3"
    index.write_bytes(b"no database at all" * 400)
    before = index.read_bytes()
    done = await doctor_of(path)
    assert done.found("index") == ["warning"] and done.code == 1
    assert index.read_bytes() == before and files(state) == ["index.sqlite3"]
    index.unlink()
    with sqlite3.connect(index) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    assert (await doctor_of(path)).found("index") == ["error"]


@pytest.mark.parametrize(
    ("folder", "settings", "check", "level"),
    [
        (Folder("/s", free=50 * GIB), {"max_gib": 20}, "room", "ok"),
        (Folder("/s", free=GIB // 2), {"max_files": 1}, "room", "warning"),
        (Folder("/s", free=3 * GIB, largest=2 * GIB), {"max_files": 1}, "room", "warning"),
        (Folder("/s", free=2**20), {"max_files": 1}, "room", "error"),
        (Folder("/s", free=3 * GIB, largest=4 * GIB), {"max_files": 1}, "room", "error"),
        (Folder("/s", free=50 * GIB), {"max_gib": 60}, "limits", "warning"),
        (Folder("/s", free=50 * GIB, used=20 * GIB), {"max_gib": 60}, "limits", ""),
        (Folder("/s", free=50 * GIB), {}, "limits", "note"),
        (Folder("/s", free=50 * GIB, writable=False), {"max_gib": 1}, "folder", "error"),
        (Folder("/s", free=50 * GIB, network="nfs4"), {"max_gib": 1}, "disk", "note"),
        (Folder("/s", free=50 * GIB, ahead=60), {"max_gib": 1}, "clock", "ok"),
    ],
)
def test_folders(folder: Folder, settings: dict[str, Any], check: str, level: str) -> None:
    found = list(doctor.check_folder(folder, [Route("r", Settings(**settings))]))
    assert [finding.level for finding in found if finding.check == check] == ([level] if level else [])


@pytest.mark.parametrize(
    ("state", "levels"),
    [
        (State(Folder("/s")), ["ok"]),
        (State(Folder("/s", network="nfs")), ["warning"]),
        (State(Folder("/s", network=None)), ["unknown"]),
        (State(Folder("/s", problem="gone")), ["warning"]),
        (State(Folder("/s", writable=False), workers=4), ["error"]),
        (State(Folder("/s"), workers=4), ["ok"]),
    ],
)
def test_the_folder_that_workers_share(state: State, levels: list[str]) -> None:
    found = [finding.level for finding in doctor.check_state(state) if finding.check == "state folder"]
    assert found == levels


def test_a_clock_that_was_set_back_shows_in_the_index() -> None:
    found = list(doctor.check_state(State(Folder("/s"), "ok", ahead=5000)))
    assert [finding.level for finding in found if finding.check == "clock"] == ["warning"]


MOUNTS = """21 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /mnt rw - nfs4 host:/x rw
31 30 0:41 / /mnt/disk\\040two rw - xfs /dev/sdb rw
a line that is none
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/srv", ""), ("/mnt/saves", "nfs4"), ("/mntx", ""), ("/mnt/disk two/saves", ""), ("/mnt", "nfs4")],
)
def test_disks_of_other_machines(path: str, kind: str) -> None:
    assert network_of(Path(path), MOUNTS) == kind
    assert network_of(Path(path), "") is None


# what only some builds or machines show


NEW = {"media_marker": "<__media_x__>", "total_slots": 1, "build_info": "b11549-abcdef"}
ROUTE = Route("r", Settings(save_path=Path("/s"), max_gib=1, save_idle_seconds=30))


def levels(found: Any, check: str) -> list[str]:
    return [finding.level for finding in found if finding.check == check]


@pytest.mark.parametrize(
    ("told", "level"),
    [
        (Told("s", props=NEW), "ok"),
        (Told("s", props=NEW | {"build_info": "b0-unknown"}), "ok"),
        (Told("s", props=NEW | {"build_info": "b9000-abc"}), "note"),
        (Told("s", props=NEW | {"media_marker": "<__media__>"}), "warning"),
        (Told("s", props={"total_slots": 1}), "warning"),
        (Told("s", props=NEW, counts_tokens=False), "error"),
    ],
)
def test_a_build_that_is_too_old(told: Told, level: str) -> None:
    assert levels(doctor.check_server(told, [ROUTE]), "build") == [level]


def test_a_server_that_all_can_reach_and_that_wants_no_key() -> None:
    assert levels(doctor.check_server(Told("s", props=NEW, open_to_all=True), [ROUTE]), "key") == ["note"]
    told = Told("s", props=NEW, open_to_all=True, key_given=True)
    assert levels(doctor.check_server(told, [ROUTE]), "key") == ["ok"]


def test_a_file_that_cannot_be_removed_and_a_clock_that_differs() -> None:
    trial = Trial(size=36, seen=True, removed=False, ahead=-900)
    found = list(doctor.check_server(Told("s", props=NEW, actions=True, trial=trial), [ROUTE]))
    assert levels(found, "save_path") == ["error"] and levels(found, "clock") == ["warning"]


def test_a_file_that_is_shorter_than_the_server_says() -> None:
    trial = Trial(size=36, seen=True, missing=36, removed=True)
    found = list(doctor.check_server(Told("s", props=NEW, actions=True, trial=trial), [ROUTE]))
    assert levels(found, "save") == ["error"] and levels(found, "save_path") == ["ok"]


@pytest.mark.parametrize(
    ("arguments", "idle", "level"),
    [
        (Arguments(), 0, "ok"),
        (Arguments(sleep_seconds=-1), 0, "ok"),
        (Arguments(sleep_seconds=60), 30, "ok"),
        (Arguments(sleep_seconds=60), 0, "warning"),
        (Arguments(sleep_seconds=60), 60, "warning"),
        (None, 0, "unknown"),
    ],
)
def test_sleep_before_the_idle_save(arguments: Arguments | None, idle: float, level: str) -> None:
    told = Told("s", props=NEW, arguments=arguments)
    assert levels(doctor.check_server(told, [Route("r", Settings(save_idle_seconds=idle))]), "sleep") == [level]


@pytest.mark.parametrize(
    ("args", "expected", "clears"),
    [
        (["llama-server", "--model", "x"], Arguments(), True),
        (["llama-server", "--parallel", "4"], Arguments(slots=4), False),
        (["llama-server", "-np", "-1"], Arguments(), True),
        (["llama-server", "-np", "4", "-kvu"], Arguments(slots=4, unified=True), True),
        (["llama-server", "--no-kv-unified"], Arguments(unified=False), False),
        (["llama-server", "--no-cache-idle-slots"], Arguments(cache_idle=False), False),
        (["llama-server", "--cache-ram", "0"], Arguments(cache_ram=0), False),
        (["llama-server", "-np", "1"], Arguments(slots=1), False),
        (["llama-server", "--no-slots"], Arguments(tells_slots=False), True),
        (
            ["llama-server", "--slot-save-path", "/s", "--sleep-idle-seconds", "9", "-cram", "x", "-np"],
            Arguments(save_path="/s", sleep_seconds=9),
            True,
        ),
    ],
)
def test_command_lines(args: list[str], expected: Arguments, clears: bool) -> None:
    assert read_arguments(args) == expected
    assert expected.clears_idle is clears


@pytest.mark.parametrize("args", [None, [], "llama-server", ["llama-server", 1], {}])
def test_what_is_no_command_line(args: object) -> None:
    assert read_arguments(args) is None


@pytest.mark.parametrize(("ram", "level"), [(-1, "warning"), (0, "ok"), (8192, "ok"), (None, "unknown")])
def test_the_servers_own_ram_cache(ram: int | None, level: str) -> None:
    told = Told("s", props=NEW, arguments=Arguments(cache_ram=ram))
    assert levels(doctor.check_server(told, [ROUTE]), "cache-ram") == [level]


def test_slots_that_are_more_than_there_are() -> None:
    told = Told("s", props=NEW, slots=(SlotReading(0, False, None, 0),))
    assert levels(doctor.check_server(told, [Route("r", Settings(slots=4))]), "slot number") == ["note"]


# routers


class TellingRouter(FakeRouter):
    """A router whose models' command lines are told, as the real one does."""

    arguments: tuple[str, ...] = ()

    def _entry(self, model: Model) -> dict[str, Any]:
        entry = super()._entry(model)
        entry["status"]["args"] += self.arguments
        return entry


def router_of(saves: Path, *arguments: str, **options: Any) -> TellingRouter:
    router = TellingRouter(save_dir=saves, **options)
    router.arguments = arguments
    return router


def line(saves: Path, *more: str) -> tuple[str, ...]:
    return "--slot-save-path", f"{saves}/", "--parallel", "1", *more


async def test_a_good_router(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    router = router_of(saves, *line(saves))
    url = await serve(router)
    await router.load("alpha")
    options = {"save_path": str(saves), **GOOD}
    path = write_config(home, *(configs.route(name, url, slot_cache=options) for name in ("alpha", "beta")))
    done = await doctor_of(path)
    assert done.worse_than_ok() == [] and done.code == 0
    assert router.status() == {"alpha": "loaded", "beta": "unloaded", "gamma": "unloaded"}
    assert not any(entry.startswith("POST") for entry in router.log)  # which it would take for a use
    tried = await doctor_of(path, "--write")
    assert tried.worse_than_ok() == [] and "ok" in tried.found("save_path")
    assert router["beta"].loads == 0 and files(saves) == []
    await router.aclose()


@pytest.mark.parametrize(
    ("arguments", "options", "check", "level"),
    [
        (("--parallel", "1"), {}, "slot-save-path", "error"),
        (("--slot-save-path", "/elsewhere", "-np", "1"), {}, "save_path", "warning"),
        (("-np", "1", "--sleep-idle-seconds", "10"), {}, "sleep", "warning"),
        ((), {}, "idle slots", "note"),
        (("-np", "1", "--cache-ram", "-1"), {}, "cache-ram", "warning"),
        (("-np", "1", "--no-slots"), {}, "slots", "error"),
        (("-np", "2"), {"slot": 2}, "slot number", "error"),
        (("-np", "1"), {"models_max": 3}, "models-max", "warning"),
        (("-np", "1"), {"models_max": 0}, "models-max", "warning"),
        (("-np", "1"), {"models_max": 1}, "models-max", "note"),
        (("-np", "1"), {"model": "absent"}, "models", "error"),
    ],
    ids=str,
)
async def test_a_fault_of_a_router(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, arguments: Any, options: Any, check: str, level: str
) -> None:
    router = router_of(saves, *arguments)
    route = configs.route("beta", await serve(router), slot_cache={"save_path": str(saves), **GOOD, **options})
    done = await doctor_of(write_config(home, route))
    assert level in done.found(check)
    assert router.loaded() == set()
    await router.aclose()


async def test_an_old_router_and_a_wildcard(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    router = router_of(saves, *line(saves), tells_limit=False)
    url = await serve(router)
    entry = configs.route("*", url, slot_cache={"save_path": str(saves), **GOOD})
    entry["litellm_params"]["model"] = "openai/*"
    done = await doctor_of(write_config(home, entry))
    assert done.found("models-max") == ["warning"] and "models_max: N" in done.text("models-max")
    assert {name for name in ("alpha", "beta", "gamma") if name in done.text("loaded")} == {"alpha", "beta", "gamma"}
    assert router.loaded() == set()
    await router.aclose()


async def test_the_models_name_is_what_litellm_makes_of_it(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor
) -> None:
    router = router_of(saves, *line(saves), names=("alpha", "org/beta"))
    url = await serve(router)
    routes = [configs.route(f"r{n}", url, slot_cache={"save_path": str(saves), **GOOD}) for n in range(3)]
    for route, asked in zip(routes, ("openai/org/beta", "hosted_vllm/alpha", "openai/beta"), strict=True):
        route["litellm_params"]["model"] = asked
    done = await doctor_of(write_config(home, *routes))
    assert [finding["where"] for finding in done.worse_than_ok()] == ["route r2"]
    assert "org/beta" in done.text("models")  # which names there are
    await router.aclose()


def test_a_router_that_tells_no_models() -> None:
    assert levels(doctor.check_router(RouterTold("s", 2), [ROUTE]), "models") == ["error"]


# the configuration


@pytest.mark.parametrize(
    "text",
    [
        "model_list: [",
        "\x00\x01\x02",
        "- a\n- list",
        "just text",
        "",
        "a: &a [*a]\nmodel_list: []",
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
        "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: [*e,*e,*e,*e,*e,*e,*e,*e,*e]",
        "model_list: 7",
        "model_list: [7]",
        "a: " + "[" * 5000,
        "a: !!python/object/apply:os.system [x]",
        "a: 2024-99-99",
        "a: !!int ''",
        "a: " + "9" * 5000,
        "? [a]\n: b",
        "include: [absent.yaml]",
        "include: 7",
        'include: ["a\\0b"]',
        "a: *nowhere",
        "a: 0x" + "f" * 5000,
        "x: " + "y" * MOST_BYTES,
    ],
    ids=lambda text: text[:24].encode("unicode_escape").decode(),
)
async def test_a_hostile_configuration(home: Path, doctor_of: Doctor, text: str) -> None:
    path = home / "config.yaml"
    path.write_bytes(text.encode())
    started = time.monotonic()
    done = await doctor_of(path)
    assert time.monotonic() - started < 10
    assert done.code == 2 and done.found("config") == ["error"]


async def test_bytes_that_are_no_text_and_files_that_are_none(home: Path, doctor_of: Doctor) -> None:
    (home / "bytes").write_bytes(b"\xff\xfe\xfa")
    for path in (home / "bytes", home / "absent", home, home / ("n" * 300)):
        done = await doctor_of(path)
        assert done.code == 2 and done.found("config") == ["error"]


@pytest.mark.parametrize(
    ("entry", "check"),
    [
        ({"model_name": 7, "litellm_params": 8, "model_info": {"slot_cache": True}}, "settings"),
        ({"model_info": {"slot_cache": "yes"}}, "settings"),
        ({"model_info": {"slot_cache": {"max_files": 10**100}}}, "config"),
        ({"litellm_params": {"api_base": "ftp://x"}, "model_info": {"slot_cache": True}}, "settings"),
        ({"litellm_params": {"api_base": "http://[x"}, "model_info": {"slot_cache": True}}, "settings"),
        ({"litellm_params": {"api_base": ["http://x"]}, "model_info": {"slot_cache": {}}}, "settings"),
        ({"model_info": [1]}, "routes"),
        ({"model_name": "a", "litellm_params": {}}, "routes"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else "",
)
async def test_entries_of_the_wrong_types(home: Path, doctor_of: Doctor, entry: Any, check: str) -> None:
    path = home / "config.yaml"
    path.write_text(yaml.safe_dump({"model_list": [entry]}))
    done = await doctor_of(path)
    assert done.code == 2 and "error" in done.found(check)


async def test_the_callback_is_missing(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves))
    route = configs.route("local", url, slot_cache={"save_path": str(saves), **GOOD})
    none = await doctor_of(write_config(home, route, litellm_settings={}))
    assert none.found("callback") == ["error"] and "slot_cache.proxy_handler_instance" in none.text("callback")
    other = await doctor_of(write_config(home, route, litellm_settings={"callbacks": ["my_hooks.instance"]}))
    assert other.found("callback") == ["warning"] and other.code == 1


async def test_values_from_the_environment(
    home: Path, saves: Path, serve: Any, doctor_of: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves, api_key=KEY))
    route = configs.route("local", url, slot_cache={"save_path": "os.environ/MY_SAVES", **GOOD})
    route["litellm_params"] |= {"api_base": "os.environ/MY_BASE", "api_key": "os.environ/MY_KEY"}
    path = write_config(home, route)
    done = await doctor_of(path)
    assert done.found("environment") == ["warning"] and "MY_BASE" in done.text("environment")
    for name, value in {"MY_SAVES": str(saves), "MY_BASE": f"{url}/v1", "MY_KEY": KEY}.items():
        monkeypatch.setenv(name, value)
    done = await doctor_of(path, "--write")
    assert done.worse_than_ok() == [] and done.found("save_path") == ["ok"]
    assert KEY not in done.out


async def test_included_files_are_read(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves))
    part = home / "parts" / "models.yaml"
    part.parent.mkdir()
    route = configs.route("local", url, slot_cache={"save_path": str(saves), **GOOD})
    part.write_text(yaml.safe_dump({"model_list": [route], "include": ["../config.yaml", "models.yaml"]}))
    path = write_config(home, include=["parts/models.yaml"], litellm_settings={"callbacks": configs.CALLBACK})
    done = await doctor_of(path)
    assert done.worse_than_ok() == [] and done.found("server") == ["ok"]


async def test_routes_that_contradict_each_other(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves))
    other = home / "other"
    options = [{"save_path": str(saves), **GOOD}, {"save_path": str(other), **GOOD, "state_dir": str(home / "s")}]
    routes = [configs.route(f"r{n}", url, slot_cache=option) for n, option in enumerate(options)]
    done = await doctor_of(write_config(home, *routes))
    assert "error" in done.found("save_path") and "error" in done.found("folder")
    assert "warning" in done.found("state folder")
    alone = configs.route("r", url, slot_cache={"max_files": 3})
    assert "warning" in (await doctor_of(write_config(home, alone))).found("limits")
    plain = await doctor_of(write_config(home, configs.route("r", url, slot_cache=True)), "--write")
    assert sorted(plain.found("save_path")) == ["note", "unknown"] and plain.code == 0


# secrets


@pytest.mark.parametrize("as_json", [True, False])
async def test_no_secret_is_printed(home: Path, saves: Path, serve: Any, doctor_of: Doctor, as_json: bool) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves, api_key="sk-what-the-server-wants"))
    with_password = url.replace("http://", "http://somebody:pass%2Fword-x@")
    routes = [
        configs.route("a", url, api_key=KEY, slot_cache={"save_path": str(saves), "model": KEY}),
        configs.route("b", with_password, api_key=KEY, slot_cache={"scope": KEY}),
        configs.route("c", with_password, api_key=KEY, slot_cache=True),
    ]
    path = write_config(home, *routes, general_settings={"master_key": "sk-the-master"})
    done = await doctor_of(path, "--write", as_json=as_json)
    assert done.code == 2
    for secret in (KEY, "pass%2Fword-x", "pass/word-x", "sk-the-master"):
        assert secret not in done.out + done.err
    assert "***" in done.out  # the wrong setting is told, without it
    done = await doctor_of("--server", with_password, "--api-key", KEY, as_json=as_json)
    assert KEY not in done.out and "word-x" not in done.out
    path.write_text(f"model_list: [\napi_key: {KEY}\n  - {KEY}: [")
    assert KEY not in (await doctor_of(path, as_json=as_json)).out


# the command


async def test_text_for_people(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves, slot_save_path=False))
    done = await doctor_of(one_route(home, url, saves), as_json=False)
    assert done.code == 2
    assert "  error    slot-save-path: it has no --slot-save-path" in done.out
    assert "-> llama-server --slot-save-path DIR" in done.out
    assert done.out.splitlines()[-1].startswith("1 error, 0 warnings, 0 notes, ")


async def test_wrong_usage(home: Path, doctor_of: Doctor) -> None:
    for words in (
        ["config.yaml", "--server", "http://x"],
        ["--save-path", "/s"],
        ["config.yaml", "--api-key", "k"],
    ):
        done = await doctor_of(*words)
        assert done.code == 2 and done.err and not done.out
    assert (await doctor_of("--server", "localhost:8080")).found("server") == ["error"]
    assert (await doctor_of("--server", "http://x", "--save-path", " ")).found("settings") == ["error"]


def test_exit_codes() -> None:
    def code(*levels: Any) -> int:
        return doctor.exit_code([Finding(level, "c", "w", "t") for level in levels])

    assert [code(), code("ok", "unknown", "note"), code("warning", "note"), code("warning", "error", "ok")] == [
        0,
        0,
        1,
        2,
    ]


def test_of_a_model_that_sleeps_nothing_is_guessed() -> None:
    told = Told("s", props=NEW | {"is_sleeping": True})
    found = list(doctor.check_server(told, [ROUTE]))
    assert doctor.worst(found) == "unknown"
    woken = replace(told, props=NEW, kind="plain", actions=True, slots=(SlotReading(0, False, None, 0),))
    assert doctor.worst(doctor.check_server(woken, [ROUTE])) == "unknown"


async def test_many_servers_that_hang_are_asked_at_once(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    fake.fail("*", "hang", None)
    url = await serve(fake)
    routes = [configs.route(f"r{n}", f"{url}/{n}", slot_cache={"max_gib": 1}) for n in range(6)]
    started = time.monotonic()
    done = await doctor_of(write_config(home, *routes))
    assert time.monotonic() - started < 4  # each takes a second to be given up
    assert done.found("server") == ["error"] * 6
    fake.clear()


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "x/" * 3000], ids=["long", "nul", "deep"])
async def test_paths_that_no_system_takes(home: Path, saves: Path, serve: Any, doctor_of: Doctor, name: str) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves))
    hostile = str(home / name)
    done = await doctor_of(one_route(home, url, home / name, state_dir=hostile), "--write")
    assert done.code == 2
    assert done.found("folder") == ["error"] and done.found("state folder") == ["warning"]


async def test_anchors_are_no_fault(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    url = await serve(FakeLlamaServer(save_dir=saves))
    route = "litellm_params: {model: openai/x, api_base: '%s'}, model_info: {slot_cache: %s}"
    options = json.dumps({"save_path": str(saves), **GOOD})
    (home / "config.yaml").write_text(
        f"litellm_settings: {{callbacks: {configs.CALLBACK}}}\nmodel_list:\n"
        f"- {{model_name: a, {route % (url, '&options ' + options)}}}\n"
        f"- {{model_name: b, {route % (url, '{<<: *options, max_files: 3}')}}}\n"
    )
    done = await doctor_of(home / "config.yaml", "--write")
    assert done.worse_than_ok() == [] and done.found("settings") == ["ok", "ok"]


async def test_a_server_that_computes_is_waited_for(home: Path, saves: Path, serve: Any, doctor_of: Doctor) -> None:
    fake = FakeLlamaServer(save_dir=saves)
    url = await serve(fake)
    fake.fail("slots", "late", 1, seconds=2.5)
    done = await doctor_of(one_route(home, url, saves))
    assert done.found("slots") == ["ok"] and done.code == 0


async def test_a_llama_swap_is_told_and_its_models_are_left_alone(home: Path, saves: Path, doctor_of: Doctor) -> None:
    swap = FakeLlamaSwap(("alpha", "beta"), save_dir=saves)
    server = HttpServer(swap.handle, 0, 5.0, 100)
    server.listen(True)
    url = f"http://127.0.0.1:{server.port}"
    done = await doctor_of(one_route(home, url, saves), "--write")
    assert done.worse_than_ok() == [] and "llama-swap" in done.text("server") and done.found("models") == ["unknown"]
    assert not any("/upstream/" in entry for entry in swap.log)
    done = await doctor_of(one_route(home, url, saves, backend="llama-server"))
    assert done.found("backend") == ["error"] and done.code == 2
    await server.close()


async def test_a_server_that_is_hostile(home: Path, saves: Path, doctor_of: Doctor) -> None:
    """What it says is printed as text, and nothing of it is believed blindly."""
    ansi = "\x1b[2J\r\nb1"
    props = {
        "default_generation_settings": 7,
        "total_slots": "many",
        "media_marker": ["x"],
        "build_info": {"a": ansi},
        "endpoint_slots": "no",
        "model_path": {"a": 1},
        "is_sleeping": "yes",
    }
    slots = [{"id": 2**80, "is_processing": False, "id_task": [1], "n_prompt_tokens": 2**80}] * 3
    told = {"/props": props, "/slots": slots, "/v1/models": {"data": [7, {"id": [], "meta": 9}]}}

    async def handle(method: str, target: str, headers: Any, body: bytes) -> Answer:
        answer = told.get(target.partition("?")[0], {})
        return Answer(200, json.dumps(answer).encode(), "application/json")

    server = HttpServer(handle, 0, 5.0, 100)
    server.listen(True)
    try:
        done = await doctor_of(one_route(home, f"http://127.0.0.1:{server.port}", saves), "--write", as_json=False)
        assert done.code == 2 and "\x1b" not in done.out and "\r" not in done.out
        told["/props"] = {"role": "router", "max_instances": 10**30, "total_slots": 0}
        told["/models"] = {"data": [{"id": ansi, "status": {"value": ansi, "args": ["-np", "9" * 5000]}}, 7, {"id": 7}]}
        done = await doctor_of(one_route(home, f"http://127.0.0.1:{server.port}", saves), "--write", as_json=False)
        assert done.code == 2 and "\x1b" not in done.out
    finally:
        await server.close()
