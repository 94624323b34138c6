"""A llama-server that does not do what it should: its clients get what they would have got without the plugin."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import house
from clients import APIS, Reply, RequestFailed, Session
from fake_llama_server import FakeLlamaServer
from relay import Fault, Kind, Relay
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import route
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer

pytestmark = pytest.mark.real

AT_MOST = 8.0
"""Seconds that a request may take more because of a fault: 5, and something for a machine that has much to do."""

KINDS: tuple[Kind, ...] = ("slots", "props", "save", "restore")
FAULTS: tuple[Fault, ...] = ("hang", "drop", "garbage", "wrong", "500")
PLACES = (*(f"{fault}-{kind}" for fault in FAULTS for kind in KINDS), "queue-slots", "queue-save", "gone", "stuck")
PLACES += ("key", "no-slots", "no-save-path", "slot-5", "settings", "embeddings", "restarted", "look")


Fakes = Callable[[str], Awaitable[FakeLlamaServer]]


@dataclass
class House:
    """A proxy with a relay and two routes for each place: `place` with the plugin and `place-plain` without."""

    folder: Path
    talker: Path
    relays: dict[str, Relay] = field(default_factory=dict)
    proxy: LiteLLMProxy = field(init=False)

    @contextmanager
    def server(self, place: str, **options: Any) -> Iterator[EmbeddedServer]:
        """A real server at a place."""
        folder = self.folder / place
        with house.server(self.talker, folder, **options) as server:
            self.relays[place].target = server.base_url
            yield server

    def warnings(self, text: str) -> list[str]:
        """The plugin's warnings and errors that hold the text, in the proxy's log."""
        lines = self.proxy.log_path.read_text(errors="replace").splitlines()
        ours = [line for line in lines if "slot-cache: " in line and ":INFO: " not in line]
        return [line for line in ours if text in line]


@pytest.fixture(scope="module")
def places(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    built = House(tmp_path_factory.mktemp("faults"), talker)
    routes: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for place in PLACES:
            relay = built.relays[place] = stack.enter_context(Relay())
            options: Any = {"slot-5": {"slot": 5}, "settings": {"slotz": 3, "max_files": -1}}.get(place, True)
            routes.append(route(place, relay.base_url, slot_cache=options, api_key="wrong" if place == "key" else None))
            routes.append(route(f"{place}-plain", relay.base_url, api_key="wrong" if place == "key" else None))
        routes.append(route("right-key", built.relays["key"].base_url, slot_cache=True, api_key="right"))
        for entry in routes:
            entry["litellm_params"]["timeout"] = 3 if entry["model_name"].startswith("stuck") else 60
        built.proxy = stack.enter_context(house.proxy(built.folder, *routes))
        yield built


@pytest_asyncio.fixture
async def client(places: House) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(places.proxy.url, places.proxy.key) as opened:
        yield opened


@pytest_asyncio.fixture
async def fake(places: House, tmp_path: Path) -> AsyncIterator[Fakes]:
    """Starts a fake server at a place."""
    async with AsyncExitStack() as stack:

        async def start(place: str) -> FakeLlamaServer:
            started = FakeLlamaServer(save_dir=tmp_path / place)
            places.relays[place].target = await stack.enter_async_context(started.serve())
            return started

        yield start


async def timed(asking: Any) -> tuple[Reply, float]:
    started = time.monotonic()
    return await asking, time.monotonic() - started


async def outcome_or_status(client: httpx.AsyncClient, route: str, **options: Any) -> str | int | None:
    """What the plugin's header says of a request, or the status of a failed one."""
    try:
        return (await Session("whoever", route).ask(client, "Hello?", **options)).outcome
    except RequestFailed as failed:
        return failed.status


@pytest.mark.parametrize("fault", FAULTS)
async def test_slot_calls_that_fail(places: House, client: httpx.AsyncClient, fake: Fakes, fault: Fault) -> None:
    """Two sessions ask by turns, so that each kind of call is needed, while one kind of call fails."""

    async def one(kind: Kind) -> list[float]:
        place = f"{fault}-{kind}"
        server = await fake(place)
        sessions = [Session(name, place) for name in ("one", "two")]
        for session in sessions:
            session.said = [("user", session.name * 100), ("assistant", "Yes.")]
        seconds = []
        with places.relays[place].failing(kind, fault=fault):
            for turn in range(4):
                session = sessions[turn % 2]
                text = f"Question {turn}."
                truth = server.truth(session.prompt(("user", text)), 16)
                api, stream = APIS[turn], turn % 2 == 1
                reply, took = await timed(session.ask(client, text, api=api, stream=stream))
                assert reply.text == truth
                seconds.append(took)
            assert places.relays[place].count(kind) > 0
        return seconds

    took = await asyncio.gather(*(one(kind) for kind in KINDS))
    for kind, seconds in zip(KINDS, took, strict=True):
        print(f"{kind} calls {fault}: " + ", ".join(f"{value:.2f} s" for value in seconds))
        assert max(seconds) < AT_MOST


@pytest.mark.parametrize("kind", ["slots", "save"])
async def test_clients_that_wait_while_the_server_hangs(
    places: House, client: httpx.AsyncClient, fake: Fakes, kind: Kind
) -> None:
    place = f"queue-{kind}"
    server = await fake(place)
    await Session("first", place).ask(client, "Hello. " * 50)
    with places.relays[place].failing(kind, fault="hang"):
        asking = [Session(f"{number}", place).ask(client, f"{number}. Hello. " * 50) for number in range(8)]
        done = await asyncio.gather(*map(timed, asking))
    print(f"8 clients at once while {kind} calls hang: " + ", ".join(f"{seconds:.2f} s" for _, seconds in done))
    assert max(seconds for _, seconds in done) < AT_MOST
    for number, (reply, _) in enumerate(done):
        assert reply.text == server.truth([{"role": "user", "content": f"{number}. Hello. " * 50}], 16)


async def test_look_after_a_request_that_fails_once(places: House, client: httpx.AsyncClient) -> None:
    """What the request has left in the slot is not lost for that."""
    relay = places.relays["look"]
    with places.server("look"):
        session, other = (Session(f"{number} is looked at", "look") for number in range(2))
        with relay.paced(20_000):
            async with session.open_stream(client, "1 " * 200) as pieces:
                await anext(pieces)
                relay.fail("slots", "500", times=1)
                said = "".join([piece async for piece in pieces])
        await relay.until(lambda: any(call.kind == "slots" and call.status == 500 for call in relay.calls))
        assert (await other.ask(client, "2 " * 200)).outcome == "cold"
        reply = await session.ask(client, "1 " * 200)
    assert reply.outcome == "restored"
    assert reply.cached_tokens >= reply.prompt_tokens - 1
    assert reply.text.endswith(said)


async def test_server_that_is_gone(places: House, client: httpx.AsyncClient) -> None:
    place = "gone"
    with places.server(place) as server:
        assert await outcome_or_status(client, place) == "cold"
        server.kill()
        started = time.monotonic()
        statuses = [await outcome_or_status(client, name) for name in (place, f"{place}-plain")]
        assert time.monotonic() - started < 2 * AT_MOST
        assert statuses[0] == statuses[1]
        assert isinstance(statuses[0], int)
        server.start()
        assert await outcome_or_status(client, place) in ("cold", "restored")


async def test_server_that_hangs_altogether(places: House, client: httpx.AsyncClient) -> None:
    place = "stuck"
    with places.server(place):
        everything: tuple[Kind, ...] = ("slots", "props", "health", "other", "save", "restore", "request")
        with places.relays[place].failing(*everything, fault="hang"):
            asking = [outcome_or_status(client, name) for name in (place, f"{place}-plain")]
            (status, seconds), (plain_status, plain_seconds) = await asyncio.gather(*map(timed, asking))
        print(f"a server that hangs: {plain_status} after {plain_seconds:.1f} s, with the plugin {seconds:.1f} s")
        assert status == plain_status
        assert isinstance(status, int)
        assert seconds - plain_seconds < AT_MOST


async def test_api_key_that_is_refused(places: House, client: httpx.AsyncClient) -> None:
    relay = places.relays["key"]
    with places.server("key", api_keys=("right",)):
        assert await outcome_or_status(client, "key") == await outcome_or_status(client, "key-plain") == 401
        session, other = (Session(f"{number} with the right key", "right-key") for number in range(2))
        assert (await session.ask(client, "1 " * 200)).outcome == "cold"
        assert (await session.ask(client, "Again.")).outcome == "resident"
        await relay.until(lambda: relay.calls[-1].kind == "slots" and relay.calls[-1].answered)  # it was looked at
        assert await outcome_or_status(client, "key") == 401
        assert (await other.ask(client, "2 " * 200)).outcome == "cold"
        assert (await session.ask(client, "Again.")).outcome == "restored"  # a wrong key made nobody lose anything
    assert len(places.warnings("api_key")) in (1, 2)  # said again after the right key was taken


async def test_server_without_slots_endpoint(places: House, client: httpx.AsyncClient) -> None:
    with places.server("no-slots", endpoint_slots=False):
        for _ in range(3):
            assert await outcome_or_status(client, "no-slots") == "unmanaged"
    assert len(places.warnings("start llama-server with --slots")) == 1


async def test_server_without_save_path(places: House, client: httpx.AsyncClient) -> None:
    """Nothing can be saved, but whoever is in the slot stays there."""
    with places.server("no-save-path", save_path=None):
        sessions = [Session(f"{number} here", "no-save-path") for number in range(2)]
        outcomes = [
            (await session.ask(client, f"{number} " * 200)).outcome
            for session in sessions
            for number in (session.name[0], "more")
        ]
        relay = places.relays["no-save-path"]
        assert outcomes == ["cold", "resident", "cold", "resident"]
        assert relay.count("save") == 1
        assert relay.count("restore") == 0
    assert len(places.warnings("start llama-server with --slot-save-path")) == 1


async def test_slot_that_does_not_exist(places: House, client: httpx.AsyncClient) -> None:
    with places.server("slot-5"):
        for _ in range(2):
            assert await outcome_or_status(client, "slot-5") == "unmanaged"
        (pinned,) = {
            str((call.body or {}).get("id_slot")) for call in places.relays["slot-5"].calls if call.kind == "request"
        }
        assert pinned == "None"
    assert len(places.warnings("no slot 5")) == 1


async def test_wrong_settings_of_one_route_do_not_disturb_another(places: House, client: httpx.AsyncClient) -> None:
    with places.server("settings"):
        relay = places.relays["settings"]
        for _ in range(3):
            assert await outcome_or_status(client, "settings") is None
        assert relay.count("slots") == 0
    said = places.warnings("route 'settings'")
    assert len(said) == 1
    assert all(word in said[0] for word in ("slotz", "max_files", "-1"))
    with places.server("restarted"):
        assert await outcome_or_status(client, "restarted") in ("cold", "resident")


async def test_embeddings_are_left_alone(places: House, client: httpx.AsyncClient) -> None:
    with places.server("embeddings"):
        relay = places.relays["embeddings"]
        answers = [
            await client.post("/v1/embeddings", json={"model": name, "input": "Hello"}, headers={"X-Session-ID": "s"})
            for name in ("embeddings", "embeddings-plain")
        ]
        calls = [call for call in relay.calls if call.kind != "other"]
        assert len(calls) >= 2
        assert {call.path for call in calls} == {"/v1/embeddings"}
        assert not [call for call in calls if "id_slot" in call.body]
        assert answers[0].status_code == answers[1].status_code
        assert "x-slot-cache" not in answers[0].headers


async def test_server_that_was_started_again(places: House, client: httpx.AsyncClient) -> None:
    with places.server("restarted") as server:
        sessions = [Session(f"{number} before", "restarted") for number in range(2)]
        last = {}
        for session in sessions:
            last[session.name] = await session.ask(client, f"{session.name[0]} " * 200)
        server.kill()
        server.start()
        first = await sessions[0].ask(client, "And now?")
        assert first.outcome == "restored"
        assert first.cached_tokens >= last[sessions[0].name].prompt_tokens
        second = await sessions[1].ask(client, "And now?")  # it was in the slot, and never saved
        assert second.outcome == "cold"
        assert (await sessions[1].ask(client, "And now?")).outcome == "resident"
