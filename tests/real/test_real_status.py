"""What a real proxy tells those who look: status, events, headers, metrics, and why a prompt was computed again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import house
from clients import APIS, PATHS, Api, Session
from relay import Relay
from slot_cache.cli import main
from slot_cache.lab import configs
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import CALLBACK, route
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.status import Status

pytestmark = pytest.mark.real

LOGGER = '''
import json
from litellm.integrations.custom_logger import CustomLogger


class Logger(CustomLogger):
    """Writes down what LiteLLM hands to its logging integrations."""

    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        payload = kwargs.get("standard_logging_object") or {}
        told = (payload.get("metadata") or {}).get("spend_logs_metadata")
        with open("logged.jsonl", "a") as file:
            file.write(json.dumps(told) + "\\n")


handler = Logger()
'''


@dataclass(frozen=True)
class House:
    """The route `managed` leads to `relay`, behind which is a llama-server with one slot."""

    relay: Relay
    proxy: LiteLLMProxy

    @property
    def state(self) -> Path:
        return self.proxy.folder / "state" / "slot-cache"


@pytest.fixture(scope="module")
def one_slot(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("status")
    with house.server(talker, folder) as server, Relay(server.base_url) as relay:
        options = {"save_path": str(folder / "saved"), "show_text": True}
        with house.proxy(
            folder,
            route("managed", relay.base_url, slot_cache=options),
            callbacks=[CALLBACK, "logger.handler"],
            modules={"logger": LOGGER},
        ) as proxy:
            yield House(relay, proxy)


@pytest_asyncio.fixture
async def client(one_slot: House) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(one_slot.proxy.url, one_slot.proxy.key) as opened:
        yield opened


async def status_of(client: httpx.AsyncClient) -> Status:
    answer = await client.get("/slot-cache/status")
    assert answer.status_code == 200
    return Status.model_validate(answer.json())


@pytest.mark.parametrize("path", ["status", "events", "metrics"])
@pytest.mark.parametrize("key", [None, "sk-wrong", "nonsense"])
async def test_nothing_is_told_without_the_key(one_slot: House, path: str, key: str | None) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=one_slot.proxy.url, headers=headers) as stranger:
        answer = await stranger.get(f"/slot-cache/{path}")
    assert answer.status_code == 401
    assert set(answer.json()) == {"error"}
    assert "slot" not in answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", APIS)
async def test_every_answer_says_it(one_slot: House, client: httpx.AsyncClient, api: Api, stream: bool) -> None:
    session = Session(f"headers {api} {stream}", "managed")
    await session.ask(client, f"{api} {stream} " * 30, api=api, stream=stream)
    body = session.body("and then?", api, stream, 16)
    async with client.stream("POST", PATHS[api], json=body, headers=session.headers) as answer:
        told = {name: value for name, value in answer.headers.items() if name.startswith("x-slot-cache")}
        await answer.aread()
    assert b"slot_cache" not in one_slot.relay.calls[-1].data + one_slot.relay.calls[-2].data  # what LiteLLM logs
    assert told["x-slot-cache"] == "resident"
    assert 0 <= int(told["x-slot-cache-wait-ms"]) < 10_000
    if stream:
        assert set(told) == {"x-slot-cache", "x-slot-cache-wait-ms"}
    else:
        assert int(told["x-slot-cache-reused-tokens"]) > 250
        assert 0 < int(told["x-slot-cache-computed-tokens"]) < 100


async def test_logging_integrations_are_told(one_slot: House, client: httpx.AsyncClient) -> None:
    log = one_slot.proxy.folder / f"proxy-{one_slot.proxy.port}" / "logged.jsonl"
    before = len(log.read_text().splitlines()) if log.exists() else 0
    await Session("logged", "managed").ask(client, "logged " * 40)
    ends = time.monotonic() + 10
    while not log.exists() or len(lines := log.read_text().splitlines()) <= before:
        assert time.monotonic() < ends
        await asyncio.sleep(0.05)
    told = json.loads(lines[-1])["slot_cache"]
    assert told["outcome"] in ("cold", "donor")
    assert told["reused_tokens"] + told["computed_tokens"] > 280
    assert told["wait_ms"] >= 0


@contextlib.asynccontextmanager
async def listening(client: httpx.AsyncClient) -> AsyncIterator[list[tuple[str, dict[str, Any]]]]:
    """The events that are sent while the block runs: their kinds and data."""
    heard: list[tuple[str, dict[str, Any]]] = []
    begun = asyncio.Event()

    async def listen() -> None:
        kind = ""
        async with client.stream("GET", "/slot-cache/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            async for line in answer.aiter_lines():
                if line.startswith("event: "):
                    kind = line[7:]
                elif line.startswith("data: "):
                    heard.append((kind, json.loads(line[6:])))
                    begun.set()

    task = asyncio.ensure_future(listen())
    try:
        await asyncio.wait_for(begun.wait(), 10)
        yield heard
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_events_tell_a_switch_in_order(client: httpx.AsyncClient) -> None:
    first, second = Session("events one", "managed"), Session("events two", "managed")
    await first.ask(client, "one of them " * 30)
    await second.ask(client, "and the other " * 30)
    async with listening(client) as heard:
        reply = await first.ask(client, "and then?")
        await asyncio.sleep(1.5)
    assert heard[0][0] == "status"
    events = [data for kind, data in heard if kind == "event"]
    assert [event["kind"] for event in events] == ["ask", "save", "restore", "switch", "request"]
    _, save, restore, switch, request = events
    assert save["key"] != restore["key"] == switch["key"] == request["key"]
    assert (switch["outcome"], request["reused"]) == ("restored", reply.cached_tokens)
    assert save["bytes"] > 0
    after = Status.model_validate([data for kind, data in heard if kind == "status"][-1])
    assert after.servers[0].slots[0].key == request["key"]
    assert after.servers[0].slots[0].last_outcome == "restored"


async def test_the_status_follows_a_stream_and_asks_the_server_nothing(
    one_slot: House, client: httpx.AsyncClient
) -> None:
    session = Session("followed", "managed")
    one_slot.relay.bytes_per_second = 20_000
    try:
        async with session.open_stream(client, "followed " * 30, tokens=200) as pieces:
            said = "".join([await anext(pieces) for _ in range(20)])
            calls = len(one_slot.relay.calls)
            slot = (await status_of(client)).servers[0].slots[0]
            assert len(one_slot.relay.calls) == calls
            assert slot.state == "decode"
            assert slot.holder is not None
            async for piece in pieces:
                said += piece
            assert slot.text
            assert slot.text in said
    finally:
        one_slot.relay.bytes_per_second = None
    await asyncio.sleep(1.0)
    slot = (await status_of(client)).servers[0].slots[0]
    assert (slot.state, slot.text, slot.messages, slot.context) == ("idle", "", 1, 32768)
    assert slot.tokens >= 270 + 200


async def test_why_a_prompt_was_computed_again(
    one_slot: House, client: httpx.AsyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session("to be edited", "managed")
    for turn in range(4):
        await session.ask(client, f"turn {turn} of it " * 40)
    role, text = session.said[4]
    session.said[4] = (role, f"edited {text}")
    reply = await session.ask(client, "and then?")
    lost = reply.prompt_tokens - reply.cached_tokens
    for _ in range(50):
        note = (await status_of(client)).recomputed[0]
        if note.reused == reply.cached_tokens:
            break
        await asyncio.sleep(0.1)
    print(f"{note.why}; really {lost} computed from {reply.cached_tokens} on")
    assert (note.cause, note.message) == ("edited", 5)
    assert note.from_token == pytest.approx(reply.cached_tokens, abs=300)
    assert note.again == pytest.approx(lost, abs=100)
    assert note.seconds is not None
    assert main(["why", "to be edited", "--state-dir", str(one_slot.state)]) == 0
    told = capsys.readouterr().out
    assert note.why in told
    print(told)
    log = one_slot.proxy.log_path.read_text()
    assert f"computed again: {note.why}" in log


async def test_a_server_that_was_started_again_is_the_reason(
    one_slot: House, client: httpx.AsyncClient, talker: Path
) -> None:
    session = Session("of two servers", "managed")
    await session.ask(client, "before the restart " * 40)
    first = one_slot.relay.target
    with house.server(talker, one_slot.proxy.folder) as other:
        one_slot.relay.target = other.base_url
        try:
            reply = await session.ask(client, "and after it")
            for _ in range(50):
                note = (await status_of(client)).recomputed[0]
                if note.computed == reply.prompt_tokens - reply.cached_tokens:
                    break
                await asyncio.sleep(0.1)
        finally:
            one_slot.relay.target = first
    print(note.why)
    assert (note.cause, note.message) == ("restarted", None)
    assert note.again == pytest.approx(len("before the restart ") * 40, abs=60)


async def test_the_fields_are_told_with_the_proxy_s_own_api(client: httpx.AsyncClient) -> None:
    told = (await client.get("/openapi.json")).json()
    assert "/slot-cache/status" in told["paths"]
    assert told["components"]["schemas"]["SlotStatus"]["properties"]["score"]["description"]


async def test_metrics_where_litellm_has_none(client: httpx.AsyncClient) -> None:
    await Session("counted", "managed").ask(client, "counted " * 30)
    answer = await client.get("/slot-cache/metrics")
    assert answer.status_code == 200
    assert 'slot_cache_prompt_tokens_total{route="managed",source="computed"}' in answer.text
    assert (await client.get("/metrics/")).status_code == 404


async def test_a_proxy_ends_though_somebody_listens(talker: Path, tmp_path: Path) -> None:
    options = {"save_path": str(tmp_path / "saved")}
    with house.proxy(tmp_path, route("managed", "http://127.0.0.1:9", slot_cache=options)) as proxy:
        async with open_client(proxy.url, proxy.key) as client, listening(client):
            started = time.monotonic()
            await asyncio.to_thread(proxy.stop)
            took = time.monotonic() - started
    print(f"stopped in {took:.1f} s")
    assert took < 4.5  # it is killed after 5


async def test_litellm_s_own_metrics_show_ours_of_all_workers(talker: Path, tmp_path: Path) -> None:
    with house.server(talker, tmp_path) as server:
        config = configs.config(route("managed", server.base_url, slot_cache={"save_path": str(tmp_path / "saved")}))
        config["litellm_settings"]["callbacks"] = [CALLBACK, "prometheus"]
        (tmp_path / "samples").mkdir()
        environment = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "samples")}
        with LiteLLMProxy(config, folder=tmp_path, num_workers=2, extra_env=environment) as proxy:
            workers: dict[int, int] = {}
            session = Session("of two workers", "managed")
            for turn in range(12):
                async with open_client(proxy.url, proxy.key) as client:  # each on a connection of its own
                    await session.ask(client, f"turn {turn}")
                    status = await status_of(client)
                    workers[status.worker] = sum(status.totals.requests.values())
                    keys = {slot.key for slot in status.servers[0].slots} if status.servers else set()
            print(f"requests by worker: {workers}; keys seen last: {len(keys)}")
            async with open_client(proxy.url, proxy.key) as client:
                for path in ("/metrics/", "/slot-cache/metrics"):
                    told = (await client.get(path)).text
                    counts = [
                        float(line.rpartition(" ")[2])
                        for line in told.splitlines()
                        if line.startswith("slot_cache_requests_total{")
                    ]
                    assert sum(counts) == 12
                assert "litellm_" not in told
