"""`slot-cache doctor` on real servers: what it says of each fault that can be had there, and that it disturbs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from router_server import RouterServer, build_models, find_binary

from house import server
from slot_cache.lab import configs

pytestmark = pytest.mark.real

GOOD = {"max_gib": 1, "save_idle_seconds": 30}
Found = dict[str, list[dict[str, str]]]


class Doctor:
    """Runs the command as people do, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: object) -> tuple[int, Found]:
        command = [sys.executable, "-m", "slot_cache", "doctor", *map(str, arguments), "--json"]
        done = subprocess.run(
            [*command, "--state-dir", str(self.folder / "state")], capture_output=True, text=True, timeout=60
        )
        assert done.stderr == ""
        found: Found = {}
        for finding in json.loads(done.stdout)["findings"]:
            found.setdefault(finding["check"], []).append(finding)
        return done.returncode, found

    def of_route(self, url: str, *arguments: str, key: str | None = None, **options: Any) -> tuple[int, Found]:
        """Of a config.yaml with one route."""
        settings = {"save_path": str(self.folder / "saved"), **GOOD, **options}
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(configs.config(configs.route("local", url, api_key=key, slot_cache=settings))))
        return self(path, *arguments)


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    (tmp_path / "saved").mkdir(mode=0o700)
    return Doctor(tmp_path)


def levels(found: Found, check: str) -> list[str]:
    return [finding["level"] for finding in found.get(check, [])]


def bad(found: Found) -> set[str]:
    return {check for check in found if set(levels(found, check)) - {"ok", "unknown"}}


def slots(url: str) -> list[tuple[int, Any, Any]]:
    told = httpx.get(f"{url}/slots", trust_env=False).json()
    return [(slot["id"], slot.get("id_task"), slot.get("n_prompt_tokens")) for slot in told]


def ask(url: str, **body: Any) -> None:
    httpx.post(f"{url}/completion", json={"n_predict": 4, **body}, trust_env=False, timeout=30).raise_for_status()


def test_a_good_server(tiny_models: Path, tmp_path: Path, doctor: Doctor) -> None:
    with server(tiny_models / "dense.gguf", tmp_path, slots=2, api_keys=("sk-right",)) as running:
        code, found = doctor.of_route(running.base_url, "--write", key="sk-right")
        assert bad(found) == set() and code == 0
        for check in ("key", "build", "slots", "slot-save-path", "save", "save_path", "idle slots", "folder", "room"):
            assert levels(found, check) == ["ok"], check
        code, found = doctor.of_route(running.base_url, "--write", key="sk-wrong")
        assert bad(found) == {"key"} and code == 2
        code, found = doctor.of_route(running.base_url, "--write", key="sk-right", slot=2)
        assert bad(found) == {"slot number"} and code == 2
    code, found = doctor.of_route(running.base_url)
    assert bad(found) == {"server"} and code == 2
    assert list((tmp_path / "saved").iterdir()) == []


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


@pytest.fixture
def router(tmp_path: Path) -> Callable[..., RouterServer]:
    binary, why = find_binary()
    if binary is None:
        pytest.skip(why)
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
        code, found = doctor.of_route(running.base_url, models_max=3)
        assert "warning" in levels(found, "models-max") and levels(found, "models") == ["error"]
        assert running.loaded() == {"alpha"}
    with router(models_max=0, arguments=("--sleep-idle-seconds", "20", "--cache-ram", "-1")) as running:
        code, found = doctor.of_route(running.base_url, model="beta")
        assert bad(found) == {"sleep", "cache-ram"} and code == 1
        assert running.loaded() == set()
