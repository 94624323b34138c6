"""`slot-cache doctor` on real servers: what it says of each fault that can be had there, and that it disturbs nothing.

The folders of a disk that is full or may not be written are mounted; where that is not allowed, these tests are skipped.
No real build at hand is too old, and no disk here has another clock: there a proxy before the server says so (front.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from front import front
from router_server import ModelServer, RouterServer, build_models, find_binary
from saver import TAG, key

from house import server
from slot_cache.folder import CacheFolder
from slot_cache.index import CacheRow, IndexThread, SqliteIndex, open_index
from slot_cache.lab import configs
from slot_cache.lab.chat import open_client
from slot_cache.llama_server import LlamaServer, same_server_key
from slot_cache.rewind import Conversation
from slot_cache.state import Ending, Want
from slot_cache.switcher import SlotSwitcher

pytestmark = pytest.mark.real

BINARY, WHY_NOT = find_binary()
older = pytest.mark.skipif(BINARY is None, reason=f"no real llama-server: {WHY_NOT}")

GOOD = {"max_gib": 1, "save_idle_seconds": 30}
Found = dict[str, list[dict[str, str]]]


class Doctor:
    """Runs the command as people do, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.environ: dict[str, str] = {}

    def __call__(self, *arguments: object) -> tuple[int, Found]:
        command = [sys.executable, "-m", "slot_cache", "doctor", *map(str, arguments), "--json"]
        done = subprocess.run(
            [*command, "--state-dir", str(self.state)],
            env={**os.environ, **self.environ},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        found: Found = {}
        for finding in json.loads(done.stdout)["findings"]:
            found.setdefault(finding["check"], []).append(finding)
        return done.returncode, found

    def of_route(self, url: str, *arguments: str, key: str | None = None, **options: Any) -> tuple[int, Found]:
        """Of a config.yaml with one route."""
        return self.of_routes(url, *arguments, key=key, local=options)

    def of_routes(
        self, url: str, *arguments: str, key: str | None = None, **routes: dict[str, Any]
    ) -> tuple[int, Found]:
        """Of a config.yaml with several routes to one server: their options by their names."""
        entries = []
        for name, options in routes.items():
            settings = {"save_path": str(self.folder / "saved"), **GOOD, **options}
            entries.append(configs.route(name, url, api_key=settings.pop("key", key), slot_cache=settings))
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(configs.config(*entries)))
        return self(path, *arguments)


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    (tmp_path / "saved").mkdir(mode=0o700)
    return Doctor(tmp_path)


def levels(found: Found, check: str) -> list[str]:
    return [finding["level"] for finding in found.get(check, [])]


def bad(found: Found) -> set[str]:
    return {check for check in found if set(levels(found, check)) - {"ok", "unknown"}}


def of_the_route(found: Found, name: str) -> dict[str, str]:
    """What is worse than ok and was found at a route: the levels of the checks."""
    return {
        finding["check"]: finding["level"]
        for findings in found.values()
        for finding in findings
        if finding["where"] == f"route {name}" and finding["level"] not in ("ok", "unknown")
    }


def slots(url: str) -> list[tuple[int, Any, Any]]:
    told = httpx.get(f"{url}/slots", trust_env=False).json()
    return [(slot["id"], slot.get("id_task"), slot.get("n_prompt_tokens")) for slot in told]


def ask(url: str, **body: Any) -> None:
    httpx.post(f"{url}/completion", json={"n_predict": 4, **body}, trust_env=False, timeout=30).raise_for_status()


def text(found: Found, check: str) -> str:
    return " | ".join(f"{finding['what']}; {finding['fix']}" for finding in found.get(check, []))


@contextmanager
def mounted(point: Path, *arguments: str) -> Iterator[None]:
    """Something mounted at a folder, until the end of the test."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting is for root on Linux")
    mount(*arguments, str(point))
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(point)], check=True)


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")


# a good one


@pytest.mark.parametrize("slots", [1, 4])
def test_a_good_server(tiny_models: Path, tmp_path: Path, doctor: Doctor, slots: int) -> None:
    with server(tiny_models / "dense.gguf", tmp_path, slots=slots, api_keys=("sk-right",)) as running:
        for arguments in ([], ["--write"]):
            code, found = doctor.of_route(running.base_url, *arguments, key="sk-right")
            assert bad(found) == set() and code == 0, found
            for check in ("settings", "server", "key", "build", "slots", "slot-save-path", "folder", "room", "clock"):
                assert levels(found, check) == ["ok"], check
        for check in ("save", "save_path", "idle slots", "state folder"):
            assert levels(found, check) == ["ok"], check
    assert list((tmp_path / "saved").iterdir()) == []


# faults of the configuration and the server


def test_what_is_wrong_in_a_configuration(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with server(tiny_models / "dense.gguf", tmp_path, slots=2, api_keys=("sk-right",)) as running:
        code, found = doctor.of_routes(
            running.base_url,
            key="sk-right",
            good={},
            number={"max_files": -1},
            typo={"save_paht": "/saved"},
            swap={"backend": "llama-swap"},
            above={"slot": 2},
            many={"slots": 3},
            limitless={"max_gib": 0},
            unlocked={"key": None},
            elsewhere={"key": "sk-wrong"},
        )
        assert code == 2 and bad(found) == {"settings", "backend", "slot number", "limits", "key"}
        assert of_the_route(found, "good") == {} and "ok" in levels(found, "key")
        assert of_the_route(found, "number") == of_the_route(found, "typo") == {"settings": "error"}
        assert of_the_route(found, "swap") == {"backend": "error"}
        assert of_the_route(found, "above") == {"slot number": "error"} and "-np 3" in text(found, "slot number")
        assert of_the_route(found, "many") == {"slot number": "note"}
        assert levels(found, "limits") == ["note"] and "limitless" in text(found, "limits")
        assert levels(found, "key").count("error") == 2
        assert "refuses the key" in text(found, "key")
        (tmp_path / "saved").chmod(0o755)
        code, found = doctor.of_route(running.base_url)
        assert bad(found) == {"key", "privacy"} and "wants a key" in text(found, "key")


def test_a_server_that_was_stopped(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with server(tiny_models / "dense.gguf", tmp_path) as running:
        assert doctor.of_route(running.base_url)[0] == 0
        running.stop()
        code, found = doctor.of_route(running.base_url)
        assert bad(found) == {"server"} and code == 2 and "nobody answers" in text(found, "server")


def test_what_is_in_a_slot_stays_there(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with server(tiny_models / "dense.gguf", tmp_path) as running:
        ask(running.base_url, prompt="A conversation that must not be disturbed.", id_slot=0)
        before = slots(running.base_url)
        assert doctor.of_route(running.base_url, "--write")[0] == 0
        assert slots(running.base_url) == before
        code, found = doctor.of_route(running.base_url, "--write", save_path=str(tmp_path))  # not the server's folder
        assert "error" in levels(found, "save_path") and code == 2
        assert slots(running.base_url) == before


@pytest.mark.parametrize(
    ("options", "check"),
    [({"endpoint_slots": False}, "slots"), ({"save_path": None}, "slot-save-path")],
    ids=["no-slots", "no-save-path"],
)
def test_a_flag_that_is_missing(
    tiny_models: Path, tmp_path: Path, doctor: Doctor, options: dict[str, Any], check: str
) -> None:
    with server(tiny_models / "dense.gguf", tmp_path, **options) as running:
        code, found = doctor.of_route(running.base_url, "--write")
    assert bad(found) == {check} and levels(found, check) == ["error"] and code == 2


def test_a_folder_that_is_gone(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with server(tiny_models / "dense.gguf", tmp_path) as running:
        (tmp_path / "saved").rmdir()
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == {"save", "folder"} and code == 2
        (tmp_path / "saved").mkdir(mode=0o700)
        assert doctor.of_route(running.base_url, "--write")[0] == 0


def test_a_folder_that_may_not_be_written(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    saved, view = tmp_path / "saved", tmp_path / "view"
    view.mkdir()
    with server(tiny_models / "dense.gguf", tmp_path) as running, ExitStack() as mounts:
        mounts.enter_context(mounted(view, "--bind", str(saved)))
        mount("-o", "remount,bind,ro", str(view))  # as a volume of the proxy's container may be
        doctor.state, doctor.environ["NUM_WORKERS"] = view / "state", "4"
        code, found = doctor.of_route(running.base_url, save_path=str(view))
        assert bad(found) == {"folder", "state folder"} and code == 2
        assert levels(found, "folder") == levels(found, "state folder") == ["error"]
        doctor.state = tmp_path / "state"
        code, found = doctor.of_route(running.base_url, "--write", save_path=str(view))
        assert bad(found) == {"folder", "save_path"} and code == 2
        assert levels(found, "save") == ["ok"] and "cannot be deleted" in text(found, "save_path")
        mounts.enter_context(mounted(saved, "--bind", str(saved)))
        mount("-o", "remount,bind,ro", str(saved))
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == {"folder", "save"} and code == 2


def test_a_disk_without_room(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    saved = tmp_path / "saved"
    with (
        mounted(saved, "-t", "tmpfs", "-o", "size=512m,mode=700", "slots"),
        server(tiny_models / "dense.gguf", tmp_path) as running,
    ):
        code, found = doctor.of_route(running.base_url, "--write", max_gib=0.1)
        assert bad(found) == {"room"} and code == 1 and levels(found, "save") == ["ok"]
        code, found = doctor.of_route(running.base_url)
        assert bad(found) == {"room", "limits"} and code == 1 and "less than there is room" in text(found, "limits")
        mount("-o", "remount,size=8m", str(saved))
        code, found = doctor.of_route(running.base_url, max_gib=0.001)
        assert bad(found) == {"room"} and levels(found, "room") == ["error"] and code == 2
        with pytest.raises(OSError, match="No space"), (saved / "other").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        code, found = doctor.of_route(running.base_url, "--write", max_files=1, max_gib=0)
        assert bad(found) == {"room", "save"} and code == 2 and "not in the file" in text(found, "save")


def test_workers_without_a_folder_to_share(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "file").write_text("")
    with server(tiny_models / "dense.gguf", tmp_path) as running:
        doctor.environ["NUM_WORKERS"] = "4"
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == set() and code == 0 and "NUM_WORKERS is 4" in text(found, "state folder")
        doctor.state = tmp_path / "file"
        code, found = doctor.of_route(running.base_url)
        assert bad(found) == {"state folder"} and code == 2
        doctor.environ["NUM_WORKERS"] = "1"
        code, found = doctor.of_route(running.base_url)
        assert bad(found) == {"state folder"} and code == 1
        routes = [
            configs.route(name, running.base_url, slot_cache={"save_path": str(tmp_path / "saved"), "state_dir": name})
            for name in ("a", "b")
        ]
        doctor.state = tmp_path / "state"
        (tmp_path / "two.yaml").write_text(yaml.safe_dump(configs.config(*routes)))
        assert "warning" in levels(doctor(tmp_path / "two.yaml")[1], "state folder")


def test_clocks_that_differ(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    file = tmp_path / "saved" / f"{key('A')}.bin"
    with server(tiny_models / "dense.gguf", tmp_path) as running:
        save = {"filename": file.name}
        httpx.post(f"{running.base_url}/slots/0?action=save", json=save, trust_env=False).raise_for_status()
        assert bad(doctor.of_route(running.base_url)[1]) == set()
        os.utime(file, (time.time() + 900,) * 2)
        code, found = doctor.of_route(running.base_url)
        assert bad(found) == {"clock"} and code == 1
        file.unlink()

        def another_clock(path: str, told: Any) -> Any:
            if path.endswith("action=save"):
                os.utime(tmp_path / "saved" / told["filename"], (time.time() - 900,) * 2)
            return told

        with front(running.base_url, another_clock) as url:
            code, found = doctor.of_route(url, "--write")
        assert bad(found) == {"clock"} and code == 1 and "differs by 900 s" in text(found, "clock")
        index = SqliteIndex(tmp_path / "state" / "index.sqlite3")
        index.put_cache(CacheRow(str(file.parent), key("A"), "local", "", 1, 1, used=time.time() + 900))
        index.close()
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == {"clock"} and code == 1 and "set the clock" in text(found, "clock")


def test_builds_that_are_too_old(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    """The oldest build that can be had is one that was measured: a proxy before it says what older ones say."""

    def number(path: str, told: Any) -> Any:
        return told | {"build_info": "b9000-0123456"} if path == "/props" else told

    def marker(path: str, told: Any) -> Any:
        return told | {"media_marker": "<__media__>"} if path == "/props" else told

    def tokens(path: str, told: Any) -> Any:
        return (
            [{k: v for k, v in slot.items() if k != "n_prompt_tokens"} for slot in told] if path == "/slots" else told
        )

    with server(tiny_models / "dense.gguf", tmp_path) as running:
        ask(running.base_url, prompt="a slot that was never used tells nothing in any build", id_slot=0)
        for older_one, level, code in ((number, "note", 0), (marker, "warning", 1), (tokens, "error", 2)):
            with front(running.base_url, older_one) as url:
                told = doctor.of_route(url, "--write")
            assert (told[0], bad(told[1]), levels(told[1], "build")) == (code, {"build"}, [level])


def test_a_server_that_clears_idle_slots(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    options = {"slots": 4, "kv_unified": True, "cache_ram_mib": 100}
    with server(tiny_models / "dense.gguf", tmp_path, cache_idle_slots=True, **options) as running:
        assert levels(doctor.of_route(running.base_url)[1], "idle slots") == ["unknown"]
        code, found = doctor.of_route(running.base_url, "--write")
        assert levels(found, "idle slots") == ["note"] and code == 0
        assert all(not tokens for _, _, tokens in slots(running.base_url))
        ask(running.base_url, prompt="something to lose", id_slot=3)
        before = slots(running.base_url)
        assert levels(doctor.of_route(running.base_url, "--write")[1], "idle slots") == ["unknown"]
        assert slots(running.base_url) == before
    for spared in ({"cache_idle_slots": False}, {"cache_idle_slots": True, "cache_ram_mib": 0}):
        with server(tiny_models / "dense.gguf", tmp_path, **(options | spared)) as running:
            assert levels(doctor.of_route(running.base_url, "--write")[1], "idle slots") == ["ok"]


def test_a_server_that_sleeps(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with server(tiny_models / "dense.gguf", tmp_path, sleep_idle_seconds=1) as running:

        def asleep() -> bool:
            return bool(httpx.get(f"{running.base_url}/props", trust_env=False).json()["is_sleeping"])

        deadline = time.monotonic() + 20
        while not asleep():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        code, found = doctor.of_route(running.base_url, "--write", save_idle_seconds=0)
        assert bad(found) == {"sleep"} and code == 1
        assert asleep()


def test_a_busy_slot(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    body = {"prompt": "on and on", "n_predict": -1, "stream": True, "id_slot": 0, "ignore_eos": True}
    with (
        server(tiny_models / "dense.gguf", tmp_path, ctx=131072) as running,
        httpx.stream("POST", f"{running.base_url}/completion", json=body, trust_env=False, timeout=30) as stream,
    ):
        lines = stream.iter_lines()  # kept: it closes the stream when it goes
        next(lines)
        code, found = doctor.of_route(running.base_url, "--write")
        assert levels(found, "save") == ["unknown"] and levels(found, "slot-save-path") == ["ok"] and code == 0
        assert list((tmp_path / "saved").iterdir()) == []


# models


async def converse(server: ModelServer, folder: Path, turns: int = 4) -> list[int]:
    """Two conversations take turns in the one slot, as the proxy has them do, and the plugin learns what the model is like.
    Returns how much of each prompt was reused."""
    index = IndexThread(open_index(folder / "state"))
    name = same_server_key(server.base_url)
    switcher = SlotSwitcher(LlamaServer(server.base_url), index, name=name, lock_folder=folder / "state")
    caches = CacheFolder(index, tag=TAG, route="local", server=name, path=server.save_path)
    prompts = {who: f"{who} is who I am. " + "And then they went on, all the way to the sea. " * 60 for who in "AB"}
    reused = []
    try:
        async with open_client(server.base_url) as client:
            for _ in range(turns):
                for who, prompt in prompts.items():
                    lease = await switcher.acquire(0, Want(key(who)), caches, queue_seconds=60)
                    body = {"prompt": prompt, "n_predict": 4, "temperature": 0, "cache_prompt": True, "id_slot": 0}
                    timings = (await client.post("/completion", json=body)).json()["timings"]
                    reused.append(timings["cache_n"])
                    lease.release(Ending.ANSWERED, Conversation(prompt=prompt))
                    lease.learn(timings["cache_n"], timings["prompt_n"])
                    await asyncio.sleep(0)
                    prompts[who] += "The answer was another one. "
        await index.call(index.index.kind, "")  # what was written down before is in the database then
    finally:
        await switcher.aclose()
        index.close()
    return reused


@older
async def test_a_sliding_window(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with ModelServer(tiny_models / "swa.gguf", tmp_path) as running:
        assert levels(doctor.of_route(running.base_url)[1], "model") == ["unknown"]
        if max(await converse(running, tmp_path)) > 1000:
            pytest.skip("this llama-server saves context checkpoints: it reuses restores of sliding-window models")
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == {"model"} and code == 1 and "--swa-full" in text(found, "model")
        port = running.port
    with ModelServer(tiny_models / "swa.gguf", tmp_path, port=port, arguments=("--swa-full",)) as running:
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == set() and levels(found, "model") == ["unknown"] and code == 0
        assert max(await converse(running, tmp_path)) > 1000
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == set() and levels(found, "model") == ["ok"] and code == 0


@older
async def test_recurrent_layers(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with ModelServer(tiny_models / "hybrid.gguf", tmp_path) as running:
        if (await converse(running, tmp_path))[2] > 1000:
            pytest.skip("this llama-server saves context checkpoints: it reuses restores of hybrid models")
        code, found = doctor.of_route(running.base_url, "--write")
        assert (
            bad(found) == set() and levels(found, "model") == ["ok"] and code == 0 and "rewound" in text(found, "model")
        )
        port = running.port
    with ModelServer(tiny_models / "hybrid.gguf", tmp_path, port=port, arguments=("--ctx-checkpoints", "0")) as running:
        await converse(running, tmp_path)
        code, found = doctor.of_route(running.base_url, "--write")
        assert bad(found) == {"model"} and code == 1 and "--ctx-checkpoints" in text(found, "model")


# routers


@pytest.fixture
def router(tmp_path: Path) -> Callable[..., RouterServer]:
    if BINARY is None:
        pytest.skip(WHY_NOT)
    models = build_models(tmp_path / "models")
    return lambda **options: RouterServer(models, tmp_path, **options)


def test_a_router(tmp_path: Path, doctor: Doctor, router: Callable[..., RouterServer]) -> None:
    with router(models_max=2) as running:
        ask(running.base_url, model="alpha", prompt="hello")
        routes = [
            configs.route(name, running.base_url, slot_cache={"save_path": str(tmp_path / "saved"), **GOOD})
            for name in ("alpha", "beta")
        ]
        path = tmp_path / "router.yaml"
        path.write_text(yaml.safe_dump(configs.config(*routes)))
        for arguments in ([], ["--write"]):
            code, found = doctor(path, *arguments)
            assert bad(found) == set() and code == 0, found
            assert levels(found, "slot-save-path") == ["ok", "ok"]
        assert "ok" in levels(found, "save_path")
        assert levels(found, "sleep") == ["ok", "ok"] and levels(found, "idle slots") == ["ok", "ok"]
        assert levels(found, "cache-ram") == ["ok", "ok"] and levels(found, "models-max") == ["ok"]
        (tmp_path / "link").symlink_to(tmp_path / "saved")
        code, found = doctor.of_routes(
            running.base_url,
            above={"model": "beta", "models_max": 3},
            limitless={"model": "beta", "models_max": 0},
            below={"model": "beta", "models_max": 1},
            absent={},
            elsewhere={"model": "beta", "save_path": str(tmp_path)},
            linked={"model": "beta", "save_path": str(tmp_path / "link")},
        )
        assert of_the_route(found, "above") == of_the_route(found, "limitless") == {"models-max": "warning"}
        assert of_the_route(found, "below") == {"models-max": "note"}
        assert of_the_route(found, "absent") == {"models": "error"} and "alpha, beta" in text(found, "models")
        assert of_the_route(found, "elsewhere") == {"save_path": "warning"} and of_the_route(found, "linked") == {}
        assert running.loaded() == {"alpha"}

        def older_one(path: str, told: Any) -> Any:
            return (
                {name: value for name, value in told.items() if name != "max_instances"} if path == "/props" else told
            )

        with front(running.base_url, older_one) as url:
            code, found = doctor.of_route(url, model="beta")
            assert bad(found) == {"models-max"} and code == 1
    shared = ("-np", "4", "--kv-unified", "--no-slots", "--sleep-idle-seconds", "20", "--cache-ram", "-1")
    with router(models_max=0, arguments=shared) as running:
        code, found = doctor.of_routes(
            running.base_url,
            late={"model": "beta", "slot": 4},
            never={"model": "beta", "save_idle_seconds": 0},
            early={"model": "beta", "save_idle_seconds": 10},
        )
        assert bad(found) == {"sleep", "cache-ram", "idle slots", "slots", "slot number"} and code == 2
        assert of_the_route(found, "late") == {"sleep": "warning", "slot number": "error"}
        assert of_the_route(found, "never") == {"sleep": "warning"} and of_the_route(found, "early") == {}
        assert levels(found, "cache-ram") == ["warning"] and levels(found, "idle slots") == ["note"]
        assert levels(found, "slots") == ["error"]
        assert running.loaded() == set()
