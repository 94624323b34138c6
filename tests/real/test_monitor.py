"""The monitor beside a real llama-server with four slots and a real LiteLLM proxy: what it says is so, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import house
from slot_cache.lab import configs
from slot_cache.lab.chat import Conversation, open_client
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer
from terminal import Terminal

pytestmark = pytest.mark.real

SLOTS = 4
PROMPT, ANSWER = 9000, 2000
SOURCE = str(Path(__file__).resolve().parents[2] / "src")


@dataclass(frozen=True)
class House:
    """The route `managed` leads to a server with four slots, whose log tells each token."""

    server: EmbeddedServer
    proxy: LiteLLMProxy

    @property
    def words(self) -> list[str]:
        return ["--server", self.server.base_url, "--log", str(self.server.log_path)]

    @property
    def env(self) -> dict[str, str]:
        return {"PYTHONPATH": SOURCE, "LITELLM_MASTER_KEY": self.proxy.key}


@pytest.fixture(scope="module")
def four_slots(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("monitor")
    # small portions, so that the server has time to answer while it computes a prompt
    options = {"slots": SLOTS, "verbosity": 5, "ctx": SLOTS * 16384, "n_batch": 128, "n_ubatch": 1}
    with house.server(talker, folder, **options) as server:
        managed = configs.route("managed", server.base_url, slot_cache={"save_path": str(folder / "saved")})
        with house.proxy(folder, managed) as proxy:
            yield House(server, proxy)


@pytest_asyncio.fixture
async def direct(four_slots: House) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(four_slots.server.base_url) as opened:
        yield opened


class Looks:
    """`slot-cache monitor --json` and what it has said so far."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "slot_cache", "monitor", "--json", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **env})
        self.told: list[dict[str, Any]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.told.append(json.loads(line))

    def slots(self, number: int) -> list[dict[str, Any]]:
        """What was said of a slot, look by look."""
        found = []
        for look in list(self.told):
            for server in look["servers"]:
                found += [slot for slot in server["slots"] if slot["id"] == number]
        return found

    async def until(self, condition: Callable[[dict[str, Any]], object], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self.told and condition(self.told[-1])):
            assert time.monotonic() < deadline, self.told[-1:]
            assert self._process.poll() is None
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self._process.terminate()
        assert self._process.wait(20) == 130


@contextlib.contextmanager
def looking(words: list[str], env: dict[str, str]) -> Iterator[Looks]:
    looks = Looks(words, env)
    try:
        yield looks
    finally:
        looks.close()


async def complete(client: httpx.AsyncClient, slot: int, prompt: int, answer: int) -> dict[str, Any]:
    """Have a slot compute a prompt of so many tokens and generate so many."""
    text = (f"Chronicle {slot}. " + "a fox and a crow; " * prompt)[:prompt]
    body = {"prompt": text, "n_predict": answer, "id_slot": slot, "temperature": 0, "ignore_eos": True}
    response = await client.post("/completion", json=body)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def off(shown: float | None, measured: float) -> float:
    """How far a speed that was shown is from the measured one, as a share of it."""
    assert shown is not None
    return abs(shown - measured) / measured


async def test_speeds_and_texts_are_those_of_the_answers(
    four_slots: House, direct: httpx.AsyncClient, record_property: Callable[[str, object], None]
) -> None:
    """The log tells everything; without it, /slots once a second tells nearly as much."""
    number = 3
    with (
        looking([*four_slots.words, "--rate", "0.1"], four_slots.env) as both,
        looking(["--server", four_slots.server.base_url, "--rate", "0.1"], four_slots.env) as alone,
    ):
        await both.until(lambda look: all(source["up"] for source in look["sources"].values()))
        await alone.until(lambda look: look["sources"]["server"]["up"])
        answer = await complete(direct, number, PROMPT, ANSWER)
        timings = answer["timings"]
        for looks in (both, alone):
            await looks.until(lambda look: look["servers"][0]["slots"][number]["state"] == "idle")
        measured = {
            name: timings[f"{kind}_per_second"] for name, kind in (("prefill", "prompt"), ("decode", "predicted"))
        }
        worst = {}
        for title, looks in (("log", both), ("slots", alone)):
            last = looks.slots(number)[-1]
            for name, speed in measured.items():
                worst[f"{title} {name}"] = off(last[f"{name}_speed"], speed)
        decoding = [look for look in both.slots(number) if look["state"] == "decode"]
        live = decoding[-1]["decode_speed"]  # the last one before the server told its own
        worst["log decode, while it ran"] = off(live, measured["decode"])
        record_property(f"slot {number}", {**measured, **worst})
        print(number, {name: round(value, 3) for name, value in {**measured, **worst}.items()})
        assert worst["log prefill"] < 0.01
        assert worst["log decode"] < 0.01
        assert worst["log decode, while it ran"] < 0.1
        assert worst["slots prefill"] < 0.1
        assert worst["slots decode"] < 0.1
        texts = [look["text"] for look in decoding]
        assert len(texts) > 3
        assert all(text and text in answer["content"] for text in texts)
        assert both.slots(number)[-1]["text"] == answer["content"][-80:]
        prefilling = [look["progress"] for look in both.slots(number) if look["state"] == "prefill"]
        assert any(0.05 < share < 0.95 for share in prefilling if share is not None)


async def test_four_slots_at_once(four_slots: House, direct: httpx.AsyncClient) -> None:
    with looking([*four_slots.words, "--rate", "0.1"], four_slots.env) as looks:
        await looks.until(lambda look: all(source["up"] for source in look["sources"].values()))
        answers = await asyncio.gather(*(complete(direct, number, 500, 1500) for number in range(SLOTS)))
        cached = [answer["tokens_cached"] for answer in answers]
        await looks.until(lambda look: [slot["tokens"] for slot in look["servers"][0]["slots"]] == cached)
        await looks.until(lambda look: all(slot["state"] == "idle" for slot in look["servers"][0]["slots"]))
        together = [
            look for look in looks.told if [s["state"] for s in look["servers"][0]["slots"]] == ["decode"] * SLOTS
        ]
        assert together
        for number, answer in enumerate(answers):
            last = looks.slots(number)[-1]
            assert off(last["decode_speed"], answer["timings"]["predicted_per_second"]) < 0.01
            assert last["text"] == answer["content"][-80:]


async def test_it_goes_on_when_everything_was_killed(four_slots: House) -> None:
    """In a terminal of 80x24, then 200x50: switches are events, what is away is named, what comes back is shown."""
    server, proxy = four_slots.server, four_slots.proxy
    with Terminal(80, 24) as terminal:
        words = ["monitor", "--proxy", proxy.url, *four_slots.words, "--rate", "0.2"]
        terminal.start([sys.executable, "-m", "slot_cache", *words], four_slots.env)

        def sees(*parts: str) -> bool:
            assert terminal.process is not None
            assert terminal.process.poll() is None
            screen = "\n".join(terminal.frame())
            return all(part in screen for part in parts)

        await asyncio.to_thread(terminal.until, lambda: sees("server up", "log up", "proxy up"))
        await converse(proxy, "one", "two", "three", "four", "five", "one")
        await asyncio.to_thread(terminal.until, lambda: sees("switch", "saved", "restored"))
        assert all(len(line) <= 80 for line in terminal.frame())

        terminal.resize(200, 50)
        await asyncio.to_thread(terminal.until, lambda: len(terminal.frame()) == 50)
        server.kill()
        moved = server.log_path.with_suffix(".1")
        server.log_path.rename(moved)
        await asyncio.to_thread(terminal.until, lambda: sees("server DOWN", "log DOWN", "proxy up"))
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(terminal.until, lambda: sees("server up", "log up", "the server is ready"))
        os.truncate(server.log_path, 0)  # copytruncate

        proxy.kill()
        await asyncio.to_thread(terminal.until, lambda: sees("proxy DOWN", "server up"))
        terminal.resize(80, 24)
        await asyncio.to_thread(proxy.start)
        await asyncio.to_thread(terminal.until, lambda: sees("proxy up"), 40.0)
        await converse(proxy, "six")
        await asyncio.to_thread(terminal.until, lambda: sees("tokens computed in", "+ 40"))
        assert all(len(line) <= 80 for line in terminal.frame())
        terminal.press("q")
        assert await asyncio.to_thread(terminal.wait) == 0
        assert terminal.attributes() == terminal.found


async def converse(proxy: LiteLLMProxy, *sessions: str) -> None:
    async with open_client(proxy.url, proxy.key) as client:
        for session in sessions:
            conversation = Conversation(session, f"The book of {session}. " * 40, "managed")
            await conversation.turn(client, "Go on.", 40, extra_body={"ignore_eos": True})


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_in_tmux(four_slots: House, tmp_path: Path) -> None:
    """A terminal emulator that is not ours sees the same, at both sizes."""
    socket = ["tmux", "-L", f"slot-cache-{os.getpid()}", "-f", "/dev/null"]

    def tmux(*words: str) -> str:
        return subprocess.run([*socket, *words], check=True, capture_output=True, text=True, timeout=20).stdout

    def screen() -> list[str]:
        return tmux("capture-pane", "-p", "-t", "monitor").split("\n")

    def until(condition: Callable[[list[str]], object]) -> list[str]:
        deadline = time.monotonic() + 20
        while not condition(shown := screen()):
            assert time.monotonic() < deadline, "\n".join(shown)
            time.sleep(0.1)
        return shown

    env = [word for name, value in four_slots.env.items() for word in ("-e", f"{name}={value}")]
    command = [sys.executable, "-m", "slot_cache", "monitor", *four_slots.words, "--rate", "0.2"]
    tmux("new-session", "-d", "-s", "monitor", "-x", "80", "-y", "24", *env, *command)
    try:
        tmux("set-option", "-t", "monitor", "status", "off")
        shown = until(lambda lines: "server up  log up" in lines[0])
        assert shown[2].split()[:3] == ["#", "state", "tokens"]
        tmux("resize-window", "-t", "monitor", "-x", "200", "-y", "50")
        shown = until(lambda lines: len(lines[0].rstrip()) > 190)
        assert "text" in shown[2]
        assert any(line.startswith("q quit") for line in shown[45:51])
        tmux("resize-window", "-t", "monitor", "-x", "80", "-y", "24")
        until(lambda lines: 70 < len(lines[0].rstrip()) <= 80 and lines[23].startswith("q quit"))
        tmux("send-keys", "-t", "monitor", "q")
        deadline = time.monotonic() + 20
        while subprocess.run([*socket, "has-session"], capture_output=True, timeout=20).returncode == 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        subprocess.run([*socket, "kill-server"], capture_output=True, timeout=20)
