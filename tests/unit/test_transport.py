"""slot_cache.transport against real sockets, as httpx is used with it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import httpcore
import httpx
import pytest
import respx

from slot_cache import transport as module
from slot_cache.transport import SocketBackend, new_transport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


class Peer:
    """A server that answers each request on a connection with the next of `answers` and then as with the last; b"" closes."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.writers: set[asyncio.StreamWriter] = set()
        self.closed = asyncio.Event()
        self.asked = asyncio.Event()
        self.answer_when = asyncio.Event()
        self.answer_when.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                    self.asked.set()
                    await self.answer_when.wait()
                    answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                    if not answer:
                        return
                    writer.write(answer)
                    await writer.drain()
        finally:
            self.writers.discard(writer)
            self.closed.set()
            writer.close()


@contextlib.asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with httpx.AsyncClient(transport=new_transport(url)) as client:
            yield client, url
    finally:
        server.close()


def test_it_is_httpx_s_own_with_another_backend() -> None:
    """If httpx keeps its pool elsewhere one day, looks only take longer; this tells."""
    pool = new_transport("http://127.0.0.1:1")._pool
    assert isinstance(pool, httpcore.AsyncConnectionPool)
    assert isinstance(pool._network_backend, SocketBackend)


def test_tls_is_left_to_httpx() -> None:
    pool = new_transport("https://127.0.0.1:1")._pool
    assert isinstance(pool, httpcore.AsyncConnectionPool)
    assert not isinstance(pool._network_backend, SocketBackend)


async def test_calls_share_a_connection() -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, url):
        for _ in range(3):
            answer = await client.get(f"{url}/slots", params={"model": "a b"})
            assert (answer.status_code, answer.json()) == (200, [])
    assert peer.connections == 1
    assert peer.requests[0].startswith(b"GET /slots?model=a+b HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_calls_at_once_have_connections_of_their_own() -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as (client, url):
        calls = [asyncio.create_task(client.get(url)) for _ in range(7)]
        while len(peer.requests) < len(calls):
            peer.asked.clear()
            await peer.asked.wait()
        peer.answer_when.set()
        assert [(await call).status_code for call in calls] == [200] * len(calls)
        assert peer.connections == len(calls)
    while peer.writers:
        peer.closed.clear()
        await peer.closed.wait()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"what?\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", httpx.RemoteProtocolError),
    ],
    ids=["closes", "no http", "bad chunk"],
)
async def test_what_is_no_answer_is_an_error_of_httpx_and_the_connection_is_closed(
    answer: bytes, error: type[Exception]
) -> None:
    peer = Peer(answer, OK)
    async with listening(peer) as (client, url):
        with pytest.raises(error):
            await client.get(url)
        await peer.closed.wait()
        assert (await client.get(url)).json() == []
    assert peer.connections == 2


async def test_a_connection_that_is_reset_is_an_error_of_httpx() -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as (client, url):
        call = asyncio.create_task(client.get(url))
        await peer.asked.wait()
        for writer in list(peer.writers):
            writer.transport.abort()
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await call
        peer.answer_when.set()


async def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, url):
        await client.get(url)
        for writer in list(peer.writers):
            writer.close()
        await peer.closed.wait()
        assert (await client.get(url)).json() == []
    assert peer.connections == 2


@pytest.mark.parametrize("when", ["connecting", "answering"])
async def test_a_cancelled_call_leaves_nothing_open(when: str) -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as (client, url):
        call = asyncio.create_task(client.get(url))
        if when == "answering":
            await peer.asked.wait()
        else:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        peer.answer_when.set()
        if peer.connections:
            await peer.closed.wait()
        assert (await client.get(url)).json() == []


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        async with httpx.AsyncClient(transport=new_transport(url)) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)


async def test_a_name_that_there_is_not() -> None:
    async with httpx.AsyncClient(transport=new_transport("http://no-such-host.invalid/")) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://no-such-host.invalid/")


async def test_a_server_that_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(module, "start_connection", never)
    async with httpx.AsyncClient(transport=new_transport("http://127.0.0.1:1/")) as client:
        with pytest.raises(httpx.ConnectTimeout):
            await client.get("http://127.0.0.1:1/", timeout=httpx.Timeout(5, connect=0.01))


async def test_the_next_address_is_tried_when_nobody_listens_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, url):
        port = httpx.URL(url).port
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")
        ]

        async def two(*_: object, **__: object) -> list[object]:
            return list(addresses)

        monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", two)
        assert (await client.get(f"http://two-addresses:{port}/")).json() == []


@respx.mock
async def test_fakes_of_respx_stand_before_it(respx_mock: respx.MockRouter) -> None:
    respx_mock.get("http://llama:8080/slots").respond(json=[])
    async with httpx.AsyncClient(transport=new_transport("http://llama:8080")) as client:
        assert (await client.get("http://llama:8080/slots")).json() == []
