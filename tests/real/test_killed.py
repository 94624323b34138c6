"""A process that saves is killed at random moments; what it leaves is whole, and nobody's but its own."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from saver import NAMES, TAG, prompt

import house
from slot_cache.housekeeping import entries
from slot_cache.index import SqliteIndex
from slot_cache.lab import configs
from slot_cache.lab.chat import open_client

pytestmark = pytest.mark.real

KILLS = int(os.environ.get("SLOT_CACHE_KILLS", "8"))
"""How often: `SLOT_CACHE_KILLS=100` for the whole of it."""

PROXY_KILLS = int(os.environ.get("SLOT_CACHE_KILLS", "5"))
"""A whole proxy takes longer to start."""

TOKENS = 8


async def test_a_process_killed_while_it_saves_leaves_only_good_files(talker: Path, tmp_path: Path) -> None:
    pick = random.Random(1)
    answers: dict[str, str] = {}
    outcomes: list[str] = []
    with house.server(talker, tmp_path, n_ubatch=1) as server:
        for number in range(KILLS):
            lines = _run_until_killed(server.base_url, tmp_path, number, pick.uniform(0.0, 0.8))
            for line in lines:
                outcome, text, answer = line.split("\t")
                outcomes.append(outcome)
                answers[text] = answer
            index = SqliteIndex(tmp_path / "state" / "index.sqlite3")
            try:
                found = entries(index, verify=True)
            finally:
                index.close()
            # "unknown" is a file whose first save was not recorded: it is never restored
            assert {entry.state for entry in found} <= {"ok", "unknown"}, f"after kill {number}"
            assert all(entry.key.startswith(TAG) for entry in found)
        right = await house.answers_without_cache(server.base_url, answers, TOKENS)
    wrong = [text[:1] for text, answer in answers.items() if answer != right[text]]
    print(f"{KILLS} kills, {len(outcomes)} requests: { ({name: outcomes.count(name) for name in set(outcomes)}) }")
    assert not wrong
    assert outcomes.count("restored") >= KILLS // 2


def _run_until_killed(base_url: str, folder: Path, seed: int, seconds: float) -> list[str]:
    """Run the saver, kill it (-9) so long after its first request; return the lines it has printed whole."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("saver.py")), base_url, str(folder), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    rest = child.stdout.read()
    child.wait()
    timer.cancel()
    return [line for line in (first + rest).split("\n")[:-1] if line.count("\t") == 2]


async def test_a_proxy_killed_while_it_saves_leaves_only_good_files(talker: Path, tmp_path: Path) -> None:
    """The whole of LiteLLM around it: every other time at a random moment, else when a save has just begun."""
    pick = random.Random(2)
    saved, state = tmp_path / "saved", tmp_path / "state" / "slot-cache"
    answers: dict[str, str] = {}
    outcomes: list[str] = []
    mid_save = 0
    with ExitStack() as stack:
        server = stack.enter_context(house.server(talker, tmp_path, n_ubatch=1))
        options = {"save_path": str(saved), "min_tokens": 0}
        route = configs.route("managed", server.base_url, slot_cache=options)
        proxy = stack.enter_context(house.proxy(tmp_path, route))
        for number in range(PROXY_KILLS):
            proxy.start()
            stop = threading.Event()
            async with open_client(proxy.url, proxy.key) as client:
                first = asyncio.Event()
                chats = [
                    asyncio.create_task(_chat(client, random.Random(f"{number} {n}"), first, answers, outcomes))
                    for n in range(2)
                ]
                await first.wait()
                if number % 2:
                    await asyncio.sleep(pick.uniform(0.0, 0.6))
                else:
                    await asyncio.to_thread(_when_a_save_begins, saved, stop, pick.uniform(0.0, 0.003))
                proxy.kill()
                stop.set()
                await asyncio.gather(*chats)
            mid_save += any(saved.glob("*.part"))
            index = SqliteIndex(state / "index.sqlite3")
            try:
                found = entries(index, verify=True)
            finally:
                index.close()
            assert {entry.state for entry in found} <= {"ok", "unknown"}, f"after kill {number}"
        right = await house.answers_without_cache(server.base_url, answers, TOKENS)
    wrong = [text[:1] for text, answer in answers.items() if answer != right[text]]
    told = {name: outcomes.count(name) for name in sorted(set(outcomes))}
    print(f"{PROXY_KILLS} kills, {mid_save} of them left a save half done; {len(outcomes)} requests: {told}")
    assert not wrong
    assert outcomes.count("restored") >= PROXY_KILLS // 2


async def _chat(
    client: httpx.AsyncClient,
    pick: random.Random,
    first: asyncio.Event,
    answers: dict[str, str],
    outcomes: list[str],
) -> None:
    """Ask for one conversation after another until the proxy is gone."""
    while True:
        who = pick.choice(NAMES)
        text = prompt(who, pick.randrange(300))
        body = {"model": "managed", "prompt": text, "max_tokens": TOKENS, "temperature": 0}
        try:
            answer = await client.post("/v1/completions", json=body, headers={"X-Session-ID": f"killed-{who}"})
        except httpx.TransportError:
            return
        assert answer.status_code == 200, answer.text
        answers[text] = answer.json()["choices"][0]["text"]
        outcomes.append(answer.headers["x-slot-cache"])
        first.set()


def _when_a_save_begins(folder: Path, stop: threading.Event, later: float) -> None:
    """Return so many seconds after the server has begun to write a file."""
    old = set(folder.glob("*.part"))
    until = time.monotonic() + 20
    while not stop.wait(0.0005) and time.monotonic() < until:
        if set(folder.glob("*.part")) - old:
            stop.wait(later)
            return
