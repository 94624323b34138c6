"""Some hundred requests of every kind at once, and much that goes wrong: nothing may be left over, nothing mixed up."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import house
from clients import Reply, RequestFailed, Session, api_of
from relay import Fault, Kind, Relay
from slot_cache.lab.configs import route
from slot_cache.lab.proxy import LiteLLMProxy

pytestmark = pytest.mark.real

SESSIONS, REQUESTS, AT_ONCE = 10, 200, 8
TOKENS = 16
CONTEXT = 6000
SLOT_CALLS: tuple[Kind, ...] = ("slots", "props", "save", "restore")
FAULTS: tuple[Fault, ...] = ("500", "garbage", "drop")


@dataclass(frozen=True)
class House:
    """The route `soak`, whose failures are tried once more and then fall back to `backup`, a server of its own."""

    relay: Relay
    proxy: LiteLLMProxy


@pytest.fixture(scope="module")
def soaking(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("soak")
    options = {"n_ubatch": 1, "ctx": CONTEXT}  # answers do not depend on what is in the cache: see talker.py
    with (
        house.server(talker, folder / "first", **options) as first,
        house.server(talker, folder / "backup", **options) as backup,
        Relay(first.base_url) as relay,
        house.proxy(
            folder,
            route("soak", relay.base_url, slot_cache={"save_path": str(folder / "first/saved")}),
            route("backup", backup.base_url, slot_cache=True),
            litellm_settings={"cache": True, "cache_params": {"type": "local", "mode": "default_off"}},
            router_settings={
                "fallbacks": [{"soak": ["backup"]}],
                "model_group_retry_policy": {"soak": {"InternalServerErrorRetries": 1}},
            },
        ) as proxy,
    ):
        yield House(relay, proxy)


@dataclass
class Soak:
    """What was asked and told."""

    client: httpx.AsyncClient
    relay: Relay
    told: dict[str, str] = field(default_factory=dict)
    """answers by prompt"""
    counts: Counter[str] = field(default_factory=Counter)
    asked: int = 0

    async def something(self, session: Session, rng: random.Random) -> None:
        """A request of a session, of a kind that chance chooses."""
        way = rng.choices(list(WAYS), list(WAYS.values()))[0]
        self.asked += 1
        text = f"{session.name} {self.asked} " + "".join(rng.choices("abcdefgh ", k=20))
        api, stream = api_of(session.name, rng.randrange(3)), rng.random() < 0.5
        try:
            if way == "turn":
                await self.turn(session, text, api=api, stream=stream)
            elif way == "leaves in mid-stream":
                left = await session.leave(self.client, text, api=api, tokens=3000, after=rng.randint(1, 8))
                self.counts["left"] += left
            elif way == "leaves at once":
                self.counts["left"] += await session.leave(self.client, text, api=api, stream=stream, tokens=60)
            elif way == "leaves at the server":
                seen = lambda: self.relay.until(lambda: self.relay.request_with(text))  # noqa: E731
                left = await session.leave(self.client, text, api=api, stream=stream, tokens=60, when=seen)
                self.counts["left"] += left
            elif way == "too long":
                await session.ask(self.client, text + "x" * CONTEXT, api=api, stream=stream, remember=False)
            elif way == "times out":
                await session.ask(self.client, text, api=api, tokens=800, remember=False, timeout=0.2)
            elif way == "server fails":
                self.relay.fail("request", "500", times=rng.randint(1, 2))
                await self.turn(session, text, api=api, stream=stream)
            elif way == "slot call fails":
                self.relay.fail(rng.choice(SLOT_CALLS), rng.choice(FAULTS), times=1)
                await self.turn(session, text, api=api, stream=stream)
            else:
                await self.cached(f"The same {rng.randint(1, 4)}.", stream)
            self.counts[way] += 1
        except RequestFailed as failed:
            streamed = stream or way == "leaves in mid-stream"
            if failed.status == 500 and api == "completions" and streamed:
                way = NOT_RETRIED
            self.counts[f"{way}: {failed.status}"] += 1

    async def cached(self, text: str, stream: bool) -> None:
        """A request that LiteLLM itself may know the answer of."""
        before = len(self.relay.calls)
        asker = Session("asks the same", "soak")
        reply = await asker.ask(self.client, text, stream=stream, tokens=TOKENS, cache={"use-cache": True})
        self.told[Session("", "").prompt(("user", text))] = reply.text
        sent = [call for call in self.relay.calls[before:] if call.kind == "request" and text.encode() in call.data]
        self.counts["cache hits"] += not sent

    async def turn(self, session: Session, text: str, **options: Any) -> Reply:
        prompt = session.prompt(("user", text))
        reply = await session.ask(self.client, text, tokens=TOKENS, **options)
        self.told[prompt] = reply.text
        self.counts[f"outcome {reply.outcome}"] += 1
        return reply


WAYS = {
    "turn": 40,
    "leaves in mid-stream": 8,
    "leaves at once": 8,
    "leaves at the server": 8,
    "too long": 5,
    "times out": 5,
    "server fails": 6,
    "slot call fails": 6,
    "cached": 8,
}


NOT_RETRIED = "streamed completions, which LiteLLM neither retries nor lets fall back"


async def test_soak(soaking: House, talker: Path, tmp_path: Path) -> None:
    relay, proxy = soaking.relay, soaking.proxy
    async with httpx.AsyncClient(
        base_url=proxy.url,
        headers={"Authorization": f"Bearer {proxy.key}"},
        timeout=120,
        limits=httpx.Limits(max_keepalive_connections=0),  # LiteLLM may close one at the very moment it is used again
        trust_env=False,
    ) as client:
        soak = Soak(client, relay)
        sessions = [Session(f"{letter}-soaks", "soak") for letter in "ABCDEFGHIJ"]
        for session in sessions:  # warm
            await soak.turn(session, f"{session.name} begins.", api=api_of(session.name, 0))
        before = memory_of(proxy)
        started = time.monotonic()
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(session: Session, seed: int) -> None:
            rng = random.Random(seed)
            while soak.asked < REQUESTS:
                async with turns:
                    await soak.something(session, rng)

        with relay.paced(200_000):
            await asyncio.wait_for(asyncio.gather(*(one(session, seed) for seed, session in enumerate(sessions))), 240)
        seconds = time.monotonic() - started
        relay.heal()
        last_tokens = [0] * SESSIONS
        for number in (0, 1):
            for index, session in enumerate(sessions):
                started = time.monotonic()
                reply = await soak.turn(session, f"And at last, {number}?", api=api_of(session.name, number))
                assert time.monotonic() - started < 5  # nobody has the slot
                assert reply.outcome in ("resident", "restored")
                # the very last turns may have been answered by the other server, or their save may have failed
                assert reply.cached_tokens >= (last_tokens[index] if number else reply.prompt_tokens / 2)
                last_tokens[index] = reply.prompt_tokens
        after = memory_of(proxy)
    print(f"{soak.asked} requests in {seconds:.1f} s: {dict(sorted(soak.counts.items()))}")
    print(f"memory of the proxy: {before / 1e6:.0f} MB, afterwards {after / 1e6:.0f} MB")
    assert {what.partition(": ")[0] for what in soak.counts if ": " in what} <= {"too long", "times out", NOT_RETRIED}
    assert soak.counts["too long: 400"] > 0
    assert soak.counts["times out: 408"] > 0
    assert all(soak.counts[way] for way in WAYS if way not in ("too long", "times out"))
    assert soak.counts["cache hits"] > 0
    assert after - before < 250e6  # LiteLLM alone takes 100 MB for these
    prompts = list(soak.told)
    chosen = prompts[-SESSIONS:] + random.Random(0).sample(prompts[:-SESSIONS], 10)
    with house.server(talker, tmp_path, n_ubatch=1, ctx=CONTEXT, save_path=None) as server:
        truth = await house.answers_without_cache(server.base_url, chosen, TOKENS)
    assert {prompt: soak.told[prompt] for prompt in chosen} == truth


def memory_of(proxy: LiteLLMProxy) -> int:
    """Bytes of real memory of the proxy's processes."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            group = int(stat.read_text().rpartition(")")[2].split()[2])
            status = (stat.parent / "status").read_text()
        except OSError:
            continue
        if group == proxy.pid:
            total += sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))
    return total
