"""Prompts that are made to hold still, on a real llama-server and LiteLLM proxy."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import yaml

import house
from clients import APIS, Api, ClaudeCode, Reply, Session, recorded, send
from relay import Call, Relay
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import route
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.steady import READY

pytestmark = pytest.mark.real

FREEZE = {"name": "times", "do": "freeze", "for": "1h"}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "claude-code" / "config.yaml"
RULES: dict[str, Any] = {
    "default": True,
    "off": {"claude_code": False},
    "freeze": {"rules": [FREEZE]},
    "move": {"rules": ["times"]},
    "all": {"rules": list(READY)},
}


@dataclass(frozen=True)
class House:
    """One route for each of `RULES`, and `pinned` (no plugin, slot 0), to one server with one slot behind `relay`."""

    relay: Relay
    proxy: LiteLLMProxy

    def requests(self, since: int) -> list[Call]:
        return [call for call in self.relay.calls[since:] if call.kind == "request"]


@pytest.fixture(scope="module")
def steady(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("steady")
    with house.server(talker, folder) as server, Relay(server.base_url) as relay:
        routes = [route("pinned", relay.base_url, id_slot=0)]
        for name, rules in RULES.items():
            options = {"save_path": str(folder / "saved"), "steady": rules}
            routes.append(route(name, relay.base_url, slot_cache=options))
        for entry in routes:
            entry["litellm_params"]["model"] = "openai/talker"
        (local,) = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["model_list"]
        local["litellm_params"]["api_base"] = f"{relay.base_url}/v1"
        local["model_info"]["slot_cache"]["save_path"] = str(folder / "saved")
        routes.append(local)
        with house.proxy(folder, *routes) as proxy:
            yield House(relay, proxy)


@pytest_asyncio.fixture
async def client(steady: House) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(steady.proxy.url, steady.proxy.key) as opened:
        yield opened


def reuse(replies: Sequence[Reply]) -> list[float]:
    """The part of each previous prompt that was not computed again."""
    return [min(now.cached_tokens / last.prompt_tokens, 1.0) for last, now in itertools.pairwise(replies)]


async def logged(steady: House, pattern: str) -> list[tuple[str, ...]]:
    """What the proxy's log says that fits, as soon as there is something: LiteLLM tells usages a moment later."""
    for _ in range(50):
        if found := re.findall(pattern, steady.proxy.log_path.read_text()):
            return found
        await asyncio.sleep(0.1)
    return []


async def two_sessions(client: httpx.AsyncClient, name: str, turns: int) -> list[list[Reply]]:
    sessions = [ClaudeCode(f"{name:0>8}-0000-4000-8000-00000000000{number}", name) for number in range(2)]
    replies: list[list[Reply]] = [[], []]
    for turn in range(turns):
        for number, session in enumerate(sessions):
            replies[number].append(await session.turn(client, f"{number}{turn}: look at this and do it well. " * 6))
            if turn == turns // 2:
                await session.title(client)
    return replies


async def test_claude_code(steady: House, client: httpx.AsyncClient) -> None:
    first = len(steady.relay.calls)
    replies = await two_sessions(client, "default", 10)
    shares = [share for session in replies for share in reuse(session)]
    print(f"two sessions of Claude Code, 10 turns each, on one slot: least reuse {min(shares):.3f}")
    assert min(shares) >= 0.95
    assert {reply.steadied for session in replies for reply in session} == {"claude_code"}
    requests = steady.requests(first)
    assert len(requests) == 22
    assert not any(b"x-anthropic-billing-header" in call.data for call in requests)
    assert sum(b"You are Claude Code." in call.data for call in requests) == 22
    assert sum(b"Reads a file and gives back its lines" in call.data for call in requests) == 20

    without = await two_sessions(client, "off", 4)
    shares = [share for session in without for share in reuse(session)]
    print(f"without the rule: {min(shares):.3f} to {max(shares):.3f}")
    assert max(shares) < 0.2
    assert {reply.steadied for session in without for reply in session} == {None}
    ((start, end, shape, rule),) = await logged(
        steady, r"route 'off': .*\(system\) differs in 3 .* character (\d+) to (\d+) of \d+ \((.*?)\).* help: (.*)"
    )
    print(f"found: characters {start} to {end} ({shape}); {rule}")
    line = ClaudeCode("any", "any").line()
    first_digit, last_digit = line.index(".37.") + 4, len(line) - 1
    assert first_digit - 64 <= int(start) <= first_digit and last_digit <= int(end) <= last_digit + 64
    assert "hex digits" in shape
    assert rule == "steady: {claude_code: true}"


@pytest.mark.parametrize(
    ("name", "route_", "steadied"),
    [
        ("claude-code", "local", ["claude_code", "claude_code", "claude_code,git_status"]),
        ("codex", "local", [None, None]),
        ("opencode", "local", [None, None, None]),
        ("open-webui", "move", ["times", None, "times"]),
    ],
)
async def test_recorded_requests_of_clients(
    steady: House, client: httpx.AsyncClient, name: str, route_: str, steadied: list[str | None]
) -> None:
    """Through examples/claude-code/config.yaml, Open WebUI's through a route with the rule that README names for it."""
    first = len(steady.relay.calls)
    replies = []
    for request in recorded(name):
        request["body"]["model"] = route_
        replies.append(await send(client, request))
    reused = replies[-1].cached_tokens / replies[0].prompt_tokens
    print(f"{name}: {[reply.outcome for reply in replies]}, the second request reuses {reused:.3f} of the first")
    assert len(steady.requests(first)) == len(replies)
    assert not any(b"x-anthropic-billing-header" in call.data for call in steady.requests(first))
    assert replies[-1].outcome == ("restored" if len(replies) == 3 else "resident")
    assert reused >= 0.95
    assert [reply.steadied for reply in replies] == steadied


WORDS = "Be kind and brief, and think before you say something. " * 60


def front(api: Api, session: Session, turn: int) -> tuple[str, dict[str, Any]]:
    """A clock at the front of the system prompt, where an API has it."""
    time = f"2026-11-30 18:{turn + 10}:{turn * 7 % 60:02}"
    system = f"You are {session.name}. Current time: {time}\n{WORDS}"  # no other session has a beginning to give
    if api == "messages":
        return time, {"system": system}
    if api == "responses":
        return time, {"instructions": system}
    session.said[:1] = [("system", system)]
    return time, {}


def last_user(body: dict[str, Any]) -> str:
    rows = body.get("messages") or body["input"]
    return json.dumps([row for row in rows if row.get("role") == "user"][-1])


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
@pytest.mark.parametrize("name", ["freeze", "move", "off"])
async def test_a_clock_in_the_system_prompt(steady: House, client: httpx.AsyncClient, name: str, api: Api) -> None:
    session = Session(f"{name} {api}", name, [("system", "")] if api == "chat" else [])
    replies = []
    for turn in range(10 if name != "off" else 4):
        time, options = front(api, session, turn)
        first = len(steady.relay.calls)
        replies.append(await session.ask(client, f"{turn}: go on, please. " * 3, api=api, **options))
        (call,) = steady.requests(first)
        told = last_user(call.body)
        if name == "move":
            assert f"Current time: {time}" in told
            assert call.data.count(time.encode()) == 1
        elif name == "freeze":
            assert call.data.count(b"2026-11-30 18:10:00") == 1
            assert time not in told
    shares = reuse(replies)
    print(f"a clock in the system prompt, {name}, {api}: least reuse {min(shares):.3f}")
    assert max(shares) < 0.2 if name == "off" else min(shares) >= 0.95
    wanted = {"freeze": {None, "times"}, "move": {"times"}, "off": {None}}
    assert {reply.steadied for reply in replies} == wanted[name]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_what_no_rule_matches_goes_out_byte_for_byte(
    steady: House, client: httpx.AsyncClient, api: Api, stream: bool
) -> None:
    said = [("system", "Be kind, since 2025-01-02."), ("user", "12:30?"), ("assistant", "At 18:46:15 it is.")]
    bodies = []
    for name in ("pinned", "all"):
        first = len(steady.relay.calls)
        session = Session("bytes", name, list(said) if api != "messages" else said[1:])
        options = {"system": [{"type": "text", "text": said[0][1]}]} if api == "messages" else {}
        reply = await session.ask(client, "id: 123, now 18:46:15", api=api, stream=stream, **options)
        assert reply.steadied is None
        (call,) = steady.requests(first)
        bodies.append(call.data)
    assert bodies[0] == bodies[1]


async def test_a_place_that_changes_is_told_with_what_would_help(steady: House, client: httpx.AsyncClient) -> None:
    log = steady.proxy.log_path
    before = len(log.read_text())
    session = Session("grows", "default", [("system", WORDS)])
    for turn in range(8):
        await session.ask(client, f"{turn}: go on, please.")
    assert "differs in" not in log.read_text()[before:]

    session = Session("changes", "default", [("system", "")])
    for turn in range(8):
        session.said[:1] = [("system", f"{WORDS[:550]} (run {turn * 7919 + 10000}) {WORDS[550:]}")]
        await session.ask(client, f"{turn}: go on, please.")
    told = await logged(
        steady,
        r"message 1 \(system\) differs in (\d+) of its requests from about character (\d+) to (\d+) of \d+ "
        r"\(5 digits\).*about (\d+) tokens behind it were computed again in ([\d.]+) s; this would help: (.*)",
    )
    ((times, start, end, tokens, seconds, rule),) = told
    print(f"found: characters {start} to {end} (it is at 557 to 562), {tokens} tokens, {seconds} s; {rule}")
    assert (times, rule) == ("3", "steady: {rules: [{name: ..., where: system, pattern: ..., do: freeze}]}")
    assert 557 - 64 <= int(start) <= 557 and 562 <= int(end) <= 562 + 64
    assert int(tokens) > 2 * len(WORDS) * 0.8
