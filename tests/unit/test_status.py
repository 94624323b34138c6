"""What is told to those who look: status, events, headers, metadata, endpoints. No server is asked for it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from starlette.requests import Request
from test_hook import BASE, RESPONSES, Road, opened_road, usage, usage_of
from test_router import real_road

from slot_cache import endpoints, metrics
from slot_cache.endpoints import add_to, mount, stream
from slot_cache.events import MOST_LISTENERS, Event, Events, Listener
from slot_cache.hook import SlotCacheHook
from slot_cache.prompt import fingerprint
from slot_cache.shown_text import SHOWN_CHARS, tail, text_of
from slot_cache.state import SlotReading
from slot_cache.status import SLOT_STATES, SlotStatus, Status
from slot_cache.why import Said

SECRET = "zanzibar"


@pytest.fixture
async def road(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Road]:
    async with opened_road(tmp_path, monkeypatch, slots=2) as road:
        yield road


async def long_turn(road: Road, name: str, count: int, reused: int, *, known: bool = True) -> None:
    """A request with so many messages, of which the server says that it reused so many tokens; `known`: by a session id."""
    messages = [{"role": "user", "content": f"{name} {n} " * 100} for n in range(count)]
    kwargs = road.kwargs(name if known else None, messages=messages)
    await road.pre(kwargs)
    await road.served(name)
    await road.succeeds(kwargs, response=usage(600 * count, reused))
    await road.quiet()


async def only_slot(hook: SlotCacheHook, number: int = 0) -> SlotStatus:
    (server,) = (await hook.status()).servers
    return next(slot for slot in server.slots if slot.id == number)


async def pieces(*texts: str) -> AsyncIterator[Any]:
    for text in texts:
        yield SimpleNamespace(choices=[SimpleNamespace(delta=SimpleNamespace(content=text, tool_calls=None))])


# the status


async def test_the_status_tells_slots_caches_and_totals_and_asks_no_server(road: Road) -> None:
    assert (await road.hook.status()).servers == []
    for session in ("a", "b", "a"):
        await road.chat(session)
        await road.quiet()
    before = len(road.fake.calls)
    status = await road.hook.status()
    assert len(road.fake.calls) == before
    assert Status.model_validate_json(status.model_dump_json()) == status
    (server,) = status.servers
    assert (server.server, server.model, server.waiting, server.waits) == (BASE, None, 0, [])
    assert (server.counts["saves"], server.counts["restores"]) == (2, 1)
    slot = server.slots[0]
    assert (slot.state, slot.route, slot.requests, slot.last_outcome) == ("idle", "smol", 3, "restored")
    assert (slot.key, slot.messages, slot.holder) == (f"smol-ec2b18d8_{slot.session}", 1, None)
    assert slot.dirty
    assert slot.tokens > slot.saved_tokens > 0
    (route,) = status.routes
    assert (route.route, route.folder, route.files) == ("smol", str(road.fake.save_dir), 2)
    assert route.bytes == sum(cache.bytes for cache in route.caches) > 0
    assert {cache.session for cache in route.caches} >= {slot.session}
    totals = status.totals
    assert totals.requests == {"resident": 0, "restored": 1, "donor": 0, "cold": 2, "unmanaged": 0}
    assert totals.tokens_reused + totals.tokens_computed == sum(prompt for prompt in (13, 13, 27))
    assert (totals.saves, totals.restores, totals.failures) == (2, 1, {})


async def test_what_a_slot_does_is_told_while_it_does_it(road: Road) -> None:
    road.options["show_text"] = True
    kwargs = road.kwargs("a", stream=True)
    await road.pre(kwargs)
    slot = await only_slot(road.hook)
    assert (slot.state, slot.text, slot.holder) == ("prefill", "", slot.holder)
    assert slot.holder is not None
    assert slot.holder_seconds is not None
    waiting = asyncio.ensure_future(road.pre(road.kwargs("b")))
    await asyncio.sleep(0.05)
    (server,) = (await road.hook.status()).servers
    assert [(wait.route, wait.slots, wait.seconds >= 0) for wait in server.waits] == [("smol", "0", True)]
    answer = road.stream(kwargs, pieces("x" * 100, SECRET))
    await anext(answer)
    await anext(answer)
    slot = await only_slot(road.hook)
    assert slot.state == "decode"
    assert slot.text == "x" * (SHOWN_CHARS - len(SECRET)) + SECRET
    await answer.aclose()
    assert SECRET not in (await road.hook.status()).model_dump_json()
    await waiting


async def test_without_show_text_no_text_is_told_or_kept(road: Road) -> None:
    kwargs = road.kwargs("a", stream=True, messages=[{"role": "user", "content": SECRET * 40}])
    await road.pre(kwargs)
    answer = road.stream(kwargs, pieces(SECRET, SECRET))
    await anext(answer)
    status = await road.hook.status()
    assert status.servers[0].slots[0].state == "decode"
    assert SECRET not in status.model_dump_json()
    await answer.aclose()


async def test_idle_slots_and_caches_are_the_same_for_every_worker(road: Road, tmp_path: Path) -> None:
    other = Road(road.fake, tmp_path)
    try:
        await other.chat("b")
        await other.quiet()
        await road.chat("c")
        await road.chat("a")
        await road.quiet()
        mine, theirs = await only_slot(road.hook), await only_slot(other.hook)
        assert (theirs.key, theirs.tokens, theirs.state) == (mine.key, mine.tokens, "idle")
        assert (mine.requests, theirs.requests) == (2, 1)
        assert (await road.hook.status()).routes[0].files == (await other.hook.status()).routes[0].files == 1
    finally:
        await other.hook.aclose()


async def test_the_cheapest_of_two_idle_caches_goes_next(road: Road) -> None:
    del road.options["slot"]
    first, second = road.kwargs("a"), road.kwargs("b", messages=[{"role": "user", "content": "quite another thing"}])
    for kwargs in (first, second):
        sent = await road.pre(kwargs)
        assert sent is not None
        done = await road.fake.complete(f"{id(kwargs)}" * 20, slot=sent["extra_body"]["id_slot"])
        await road.succeeds(kwargs, response=usage_of(done))
    await road.quiet()
    slots = (await road.hook.status()).servers[0].slots
    assert [slot.state for slot in slots] == ["idle", "idle"]
    lowest = min(slots, key=lambda slot: slot.score)
    assert [slot.next_to_go for slot in slots] == [slot is lowest for slot in slots]


@pytest.mark.parametrize(
    ("before", "reading", "state"),
    [
        (None, None, "prefill"),
        (SlotReading(0, False, 4, 30), SlotReading(0, False, 4, 30), "prefill"),
        (SlotReading(0, False, 4, 30), SlotReading(0, True, 5, 30), "prefill"),
        (SlotReading(0, False, 4, 30), SlotReading(0, True, 5, 30, 100), "decode"),
        (SlotReading(0, False, 4, 30), SlotReading(0, True, 4, 30, 100), "prefill"),
    ],
)
async def test_a_look_made_for_others_tells_that_an_answer_comes(
    road: Road, before: SlotReading | None, reading: SlotReading | None, state: str
) -> None:
    kwargs = road.kwargs("a")
    await road.pre(kwargs)
    slot = road.switcher.slots[0]
    assert slot.lease is not None
    slot.reading, slot.lease.reading = reading, before
    assert (await only_slot(road.hook)).state == state


async def test_a_router_s_models_are_told(tmp_path: Path) -> None:
    async with real_road(tmp_path, limit=1) as (road, router):
        events = road.hook.tally.events.listen()
        assert events is not None
        for model in ("alpha", "beta"):
            await road.chat(router, model)
        status = await road.hook.status()
        kinds = [event.kind for event in (await events.next(1.0))[0]]
    (told,) = status.routers
    assert (told.server, told.kind, told.limit, told.loaded) == (road.base_url, "router", 1, ["beta"])
    assert [(server.server, server.model) for server in status.servers] == [
        (road.base_url, "alpha"),
        (road.base_url, "beta"),
    ]
    assert [route.route for route in status.routes] == ["alpha", "beta"]
    assert [kind for kind in kinds if kind in ("load", "save", "unload")] == ["load", "save", "unload", "load"]


def test_every_field_of_the_status_is_told_in_words() -> None:
    schema = Status.model_json_schema()
    plain = {"id", "tokens", "bytes", "saves", "restores", "route", "outcome", "kind", "slots", "servers", "routers", "routes", "totals", "speeds"}  # fmt: skip
    for name, model in {"Status": schema, **schema["$defs"]}.items():
        for field, told in model["properties"].items():
            assert field in plain or told.get("description"), f"{name}.{field}"
    assert set(schema["$defs"]["SlotStatus"]["properties"]["state"]["enum"]) == set(SLOT_STATES)


# headers and metadata


async def test_the_headers_tell_what_is_known(road: Road) -> None:
    kwargs = road.kwargs("a")
    await road.pre(kwargs)
    assert set(await road.all_headers(kwargs) or {}) == {"x-slot-cache", "x-slot-cache-wait-ms"}
    await road.succeeds(kwargs, response=usage(12, 5))
    headers = await road.all_headers(kwargs)
    assert headers is not None
    assert int(headers.pop("x-slot-cache-wait-ms")) >= 0
    assert headers == {
        "x-slot-cache": "cold",
        "x-slot-cache-reused-tokens": "5",
        "x-slot-cache-computed-tokens": "7",
    }


@pytest.mark.parametrize("name", ["metadata", "litellm_metadata"])
async def test_logging_integrations_are_told(road: Road, name: str) -> None:
    kwargs = road.kwargs("a", metadata=name)
    kwargs[name]["spend_logs_metadata"] = {"mine": 1}
    await road.pre(kwargs, RESPONSES)
    await road.succeeds(kwargs, RESPONSES, usage(12, 5))
    told = kwargs[name]["spend_logs_metadata"]
    assert told["mine"] == 1
    assert told["slot_cache"] == kwargs[name]["slot_cache"]
    assert json.loads(json.dumps(told["slot_cache"])) == {
        "outcome": "cold",
        "wait_ms": told["slot_cache"]["wait_ms"],
        "reused_tokens": 5,
        "computed_tokens": 7,
    }


# why


async def test_why_a_conversation_was_computed_again_is_told_and_written_down(road: Road) -> None:
    long = [{"role": "user" if n % 2 == 0 else "assistant", "content": f"{SECRET} {n} " * 60} for n in range(5)]
    kwargs = road.kwargs("a", messages=long)
    await road.pre(kwargs)
    await road.succeeds(kwargs, response=usage(2000, 0))
    edited = [long[0], long[1], {**long[2], "content": "other " * 100}, *long[3:], {"role": "user", "content": "more"}]
    again = road.kwargs("a", messages=edited)
    await road.pre(again)
    await road.succeeds(again, response=usage(2100, 900))
    (told,) = (await road.hook.status()).recomputed
    assert (told.cause, told.message, told.reused, told.computed, told.again) == ("edited", 3, 900, 1200, 1100)
    assert told.from_token == pytest.approx(2100 * 2 / 5.5, rel=0.2)
    assert SECRET not in told.why
    assert again["metadata"]["slot_cache"]["computed_again"] == "edited"
    await road.quiet()
    assert road.hook._servers.index is not None
    (note,) = road.hook._servers.index.index.recomputed()
    assert (note.cause, note.key, note.route, note.owner) == ("edited", told.key, "smol", "")


async def test_what_happened_to_a_cache_is_known_when_it_is_missed(road: Road) -> None:
    """Its file was deleted to keep the limit: the next request says so."""
    road.options["max_files"] = 1

    for session in ("a", "b", "c"):  # a is saved for b, b for c: then a's file goes
        await long_turn(road, session, 1, 0)
    await long_turn(road, "a", 2, 0)
    (told,) = (await road.hook.status()).recomputed
    assert (told.cause, told.outcome, told.message) == ("evicted", "cold", None)


async def test_a_restart_of_the_server_is_the_reason(road: Road) -> None:
    await long_turn(road, "a", 1, 0)
    road.fake.restart()
    await long_turn(road, "a", 2, 0)
    (told,) = (await road.hook.status()).recomputed
    assert (told.cause, told.message, told.again) == ("restarted", None, 600)
    await long_turn(road, "a", 3, 1200)
    assert len((await road.hook.status()).recomputed) == 1


async def test_a_stranger_in_the_slot_is_the_reason(road: Road) -> None:
    await long_turn(road, "a", 1, 0)
    await road.fake.complete("somebody else's prompt", slot=0)
    await long_turn(road, "a", 2, 0)
    (told,) = (await road.hook.status()).recomputed
    assert told.cause == "foreign"


async def test_another_model_is_the_reason(road: Road) -> None:
    await long_turn(road, "a", 1, 0)
    await long_turn(road, "b", 1, 0)  # a is saved
    road.fake.restart(model_path="/models/other.gguf", weights="other")
    await long_turn(road, "a", 2, 0)
    (told,) = (await road.hook.status()).recomputed
    assert told.cause == "other model"


async def test_a_save_that_failed_is_the_reason(road: Road) -> None:
    await long_turn(road, "a", 1, 0)
    road.fake.fail("save", "500", times=None)
    await long_turn(road, "b", 1, 0)
    road.fake.clear()
    await long_turn(road, "a", 2, 0)
    (told,) = (await road.hook.status()).recomputed
    assert told.cause == "save failed"


async def test_a_request_that_had_no_slot_says_so(road: Road) -> None:
    await long_turn(road, "a", 1, 0)
    road.fake.fail("slots", "500", times=None)
    kwargs = road.kwargs("a", messages=[{"role": "user", "content": f"a {n} " * 100} for n in range(2)])
    await road.pre(kwargs)
    await road.succeeds(kwargs, response=usage(1200, 0))
    (told,) = (await road.hook.status()).recomputed
    assert (told.cause, told.outcome) == ("unmanaged", "unmanaged")
    assert "500" in told.why


async def test_a_conversation_without_a_session_finds_out_too(road: Road) -> None:
    road.options["max_files"] = 1

    for name in ("a", "b", "c"):
        await long_turn(road, name, 3, 0, known=False)
    await long_turn(road, "a", 4, 0, known=False)
    (told,) = (await road.hook.status()).recomputed
    assert (told.cause, told.session, told.message) == ("evicted", None, None)


# events


async def test_a_switch_is_told_in_the_order_in_which_it_happens(road: Road) -> None:
    await road.chat("a")
    await road.chat("b")
    listener = road.hook.tally.events.listen()
    assert listener is not None
    await road.chat("a")
    events, lost = await listener.next(1.0)
    assert lost == 0
    assert [event.kind for event in events] == ["ask", "save", "restore", "switch", "request"]
    ask, save, restore, switch, request = events
    assert ask.key == restore.key == switch.key == request.key != save.key
    assert (switch.outcome, request.outcome, request.reused) == ("restored", "restored", restore.tokens)
    assert save.bytes
    assert restore.seconds is not None
    assert [event.at for event in events] == sorted(event.at for event in events)
    json.dumps([event.told() for event in events])


async def test_a_slow_listener_loses_the_oldest_events_and_is_told_how_many() -> None:
    listener = Listener(most=3)
    for number in range(10):
        listener.put(Event("save", tokens=number))
    events, lost = await listener.next(1.0)
    assert ([event.tokens for event in events], lost) == ([7, 8, 9], 7)
    assert await listener.next(0.001) == ([], 0)


def test_only_so_many_may_listen() -> None:
    events = Events()
    listeners = [events.listen() for _ in range(MOST_LISTENERS)]
    assert None not in listeners
    assert events.listen() is None
    events.leave(listeners[0] or Listener())
    assert events.listen() is not None


async def test_a_stream_begins_with_the_status_and_ends_with_its_reader(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "HEARTBEAT_SECONDS", 0.1)
    events = road.hook.tally.events
    listener = events.listen()
    assert listener is not None
    reader = stream(road.hook, listener, tick=0.02)
    first = await anext(reader)
    kind, data = first.rstrip().split("\ndata: ")
    assert kind == "event: status"
    assert Status.model_validate_json(data).servers == []
    events.tell(Event("evict", tokens=3))
    assert '"kind": "evict"' in await anext(reader)
    assert (await anext(reader)).startswith("event: status")
    assert await anext(reader) == ": heartbeat\n\n"
    for _ in range(600):
        events.tell(Event("evict"))
    while not (sent := await anext(reader)).startswith("event: lost"):
        pass
    assert sent == 'event: lost\ndata: {"lost": 100}\n\n'
    await reader.aclose()
    assert not events.heard


async def test_streams_end_when_the_proxy_is_told_to_stop(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(should_exit=False)
    monkeypatch.setattr(endpoints.signal, "getsignal", lambda number: SimpleNamespace(__self__=server))
    listener = road.hook.tally.events.listen()
    assert listener is not None
    reader = stream(road.hook, listener, tick=0.01)
    await anext(reader)
    server.should_exit = True
    assert [sent async for sent in reader] == []


# the endpoints


async def check(request: Request) -> None:
    key = request.headers.get("authorization")
    if key is None:
        raise ModuleNotFoundError("prisma")  # LiteLLM without its database client
    if key == "Bearer mine":
        return
    raise HTTPException({"Bearer less": 403, "Bearer many": 429}.get(key, 400), SECRET)


@pytest.mark.parametrize("path", ["status", "events", "metrics"])
@pytest.mark.parametrize(
    ("key", "code"), [(None, 401), ("wrong", 401), ("less", 403), ("many", 429)], ids=lambda value: str(value)
)
async def test_nothing_is_told_without_a_key(road: Road, path: str, key: str | None, code: int) -> None:
    app = FastAPI()
    add_to(app, road.hook, check)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        answer = await client.get(f"/slot-cache/{path}", headers=headers)
    assert answer.status_code == code
    assert set(answer.json()) == {"error"}
    for word in (SECRET, "slot", "version", "prisma"):
        assert word not in answer.text


async def test_with_a_key_everything_is_told(road: Road) -> None:
    await road.chat("a")
    app = FastAPI()
    add_to(app, road.hook, check)
    headers = {"authorization": "Bearer mine"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://proxy", headers=headers
    ) as client:
        assert Status.model_validate((await client.get("/slot-cache/status")).json()).totals.requests["cold"] == 1
        told = await client.get("/slot-cache/metrics")
        assert told.headers["content-type"].startswith("text/plain")
        assert 'slot_cache_requests_total{outcome="cold",route="smol"}' in told.text
        assert {line.split("{")[0].split(" ")[0][:11] for line in told.text.splitlines() if line[0] != "#"} == {
            "slot_cache_"
        }
        for _ in range(MOST_LISTENERS):
            road.hook.tally.events.listen()
        assert (await client.get("/slot-cache/events")).status_code == 503


def test_the_endpoints_are_added_once_and_only_to_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, endpoints.PROXY_MODULE, raising=False)
    hook = SlotCacheHook()
    assert not mount(hook)
    proxy, auth = ModuleType("proxy"), ModuleType("auth")
    proxy.app = FastAPI()  # type: ignore[attr-defined]  # what the proxy's module has
    auth.user_api_key_auth = check  # type: ignore[attr-defined]  # likewise
    monkeypatch.setitem(sys.modules, endpoints.PROXY_MODULE, proxy)
    monkeypatch.setitem(sys.modules, "litellm.proxy.auth.user_api_key_auth", auth)
    assert mount(hook)
    assert mount(SlotCacheHook())
    assert [path for path in proxy.app.openapi()["paths"] if "slot-cache" in path] == [
        "/slot-cache/status",
        "/slot-cache/events",
        "/slot-cache/metrics",
    ]


# text


@pytest.mark.parametrize(
    "piece",
    [
        {"choices": [{"delta": {"content": "some"}}]},
        {"choices": [{"delta": {"reasoning_content": "some"}}]},
        {"choices": [{"text": "some"}]},
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"text": "some"}}\n\n',
        {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "some"}},
        {"type": "response.output_text.delta", "delta": "some"},
    ],
)
def test_the_text_of_a_piece(piece: Any) -> None:
    assert text_of(piece) == "some"
    assert tail("a" * 200, piece) == "a" * (SHOWN_CHARS - 4) + "some"


@pytest.mark.parametrize(
    "piece", [None, 3, {}, b"data: {", "data: [DONE]", {"choices": []}, {"choices": [None]}, {"delta": 3}]
)
def test_a_piece_without_text(piece: Any) -> None:
    assert text_of(piece) == ""


# what it costs


@pytest.mark.parametrize("finding", [False, True], ids=["nothing to explain", "with a reason"])
async def test_looking_costs_a_request_little(road: Road, monkeypatch: pytest.MonkeyPatch, finding: bool) -> None:
    """All that a request pays for status, events, metrics and the question why: its part in the hook, without the request."""
    await road.chat("a")
    kwargs = road.kwargs("a")
    await road.pre(kwargs)
    turn = road.hook._turns.find(kwargs)
    assert turn is not None
    if finding:
        turn.last, turn.same = (
            Said(fingerprint({"messages": [{"role": "user", "content": "x" * 100_000}] * 20}), 500),
            True,
        )
    await road.succeeds(kwargs, response=usage(2700, 0))
    assert (len(road.hook.tally.recomputed) == 1) is finding
    hook, switcher = road.hook, road.switcher
    listener = hook.tally.events.listen()
    assert listener is not None
    monkeypatch.setattr(hook._ended, "_start", lambda work: work.close())  # it is written down in another thread
    hook._ended._stored_at = float("inf")

    def once() -> None:
        hook._log_with(kwargs["metadata"], turn)
        for kind in ("ask", "save", "restore", "switch"):
            hook.tally.note(Event(kind, server="s", slot=0, key=turn.request.key, tokens=3, bytes=5, seconds=0.1))  # type: ignore[arg-type]  # one of its kinds
        hook._note_now(switcher)
        hook._ended.count(turn)
        hook._note_now(switcher)

    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            once()
        best = min(best, (time.perf_counter() - started) / 50)
    print(f"status, events and metrics cost a request {best * 1e6:.0f} us")
    assert best < 0.0002


async def test_counting_goes_on_without_prometheus_client(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_shared", [])
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert metrics.shared() is None
    await road.chat("a")
    assert (await road.hook.status()).totals.requests["cold"] == 1
