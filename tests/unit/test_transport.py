"""slot_cache.transport against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from slot_cache import transport as module
from slot_cache.llama_server import LlamaServer
from slot_cache.transport import Begun, HttpxSender, PlainSender, Sender, TooLongError, new_sender

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
                    request = await reader.readuntil(b"\r\n\r\n")
                    if b"Content-Length: " in request:
                        request += await reader.readexactly(int(request.split(b"Content-Length: ")[1].split()[0]))
                    self.requests.append(request)
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


@dataclass
class Line:
    """A sender and the peer's address."""

    url: str
    sender: Sender = field(default_factory=PlainSender)

    async def get(self, path: str = "/", *, fresh: bool = False) -> tuple[int, bytes]:
        timeout = {"timeout": httpx.Timeout(5, connect=0.5).as_dict()}
        return await self.sender.send(httpx.Request("GET", self.url + path, extensions=timeout), fresh=fresh)


@contextlib.asynccontextmanager
async def listening(peer: Peer) -> AsyncIterator[Line]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    line = Line(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield line
    finally:
        await line.sender.aclose()
        server.close()


async def until_closed(peer: Peer) -> None:
    while peer.writers:
        peer.closed.clear()
        await peer.closed.wait()


async def test_tls_and_transports_of_httpx_are_left_to_httpx() -> None:
    for sender, kind in [
        (new_sender("http://llama"), PlainSender),
        (new_sender("https://llama"), HttpxSender),
        (new_sender("http://llama", httpx.MockTransport(lambda _: httpx.Response(200))), HttpxSender),
    ]:
        assert type(sender) is kind
        await sender.aclose()


async def test_calls_share_a_connection() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        for _ in range(3):
            assert await line.get("/slots?model=a+b") == (200, b"[]")
    assert peer.connections == 1
    assert peer.requests[0].startswith(b"GET /slots?model=a+b HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_a_body_is_sent_whole() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        text = "a" * 3_000_000
        request = httpx.Request("POST", f"{line.url}/completion", json={"prompt": text})
        for _ in range(2):
            assert await line.sender.send(request) == (200, b"[]")
    assert peer.connections == 1
    assert [len(request) > len(text) and request.endswith(b'aa"}') for request in peer.requests] == [True, True]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n[\r\n1\r\n]\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 2\r\n\r\n[]",
    ],
    ids=["chunked", "informed before", "encoded as it is"],
)
async def test_answers_of_all_shapes(answer: bytes) -> None:
    peer = Peer(answer)
    async with listening(peer) as line:
        assert [await line.get() for _ in range(2)] == [(200, b"[]")] * 2
    assert peer.connections == 1


async def test_an_answer_that_ends_with_its_connection() -> None:
    peer = Peer(b"HTTP/1.1 404 Not Found\r\n\r\nnothing", b"")
    peer.answer_when.clear()
    async with listening(peer) as line:
        call = asyncio.create_task(line.get())
        await peer.asked.wait()
        for writer in peer.writers:
            writer.write(peer.answers[0])
            writer.close()
        assert await call == (404, b"nothing")
        peer.answer_when.set()
        peer.answers = [OK]
        assert await line.get() == (200, b"[]")
    assert peer.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        OK + b"HTTP/1.1 500 what nobody asked for\r\n\r\n",
    ],
    ids=["says so", "HTTP/1.0", "says more"],
)
async def test_a_connection_that_is_not_to_be_kept_is_closed(answer: bytes) -> None:
    peer = Peer(answer)
    async with listening(peer) as line:
        assert [await line.get() for _ in range(2)] == [(200, b"[]")] * 2
        await until_closed(peer)
    assert peer.connections == 2


async def test_what_comes_unasked_is_not_the_next_answer() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        await line.get()
        for writer in list(peer.writers):
            writer.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
        await until_closed(peer)
        assert await line.get() == (200, b"[]")
    assert peer.connections == 2


@pytest.mark.parametrize("begun", [False, True])
async def test_what_came_unasked_while_the_loop_was_held_up_is_not_the_next_answer(begun: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line(f"http://127.0.0.1:{listener.getsockname()[1]}")
        call = asyncio.create_task(line.get())
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        peer, _ = await loop.sock_accept(listener)
        await loop.sock_recv(peer, 10_000)
        await loop.sock_sendall(peer, OK)
        await call
        peer.send(OK.replace(b"[]", b"{}"))
        time.sleep(0.05)  # noqa: ASYNC251  # the loop is held up
        if begun:
            assert begin(line) is None
        else:
            call = asyncio.create_task(line.get())
            other, _ = await loop.sock_accept(listener)
            await loop.sock_recv(other, 10_000)
            await loop.sock_sendall(other, OK)
            assert await call == (200, b"[]")
            other.close()
        peer.close()
        await line.sender.aclose()


async def test_a_connection_whose_server_did_not_read_all_of_a_request_is_not_used_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        line = Line(f"http://127.0.0.1:{listener.getsockname()[1]}")
        request = httpx.Request("POST", f"{line.url}/completion", content=b"a" * 30_000_000)
        call = asyncio.create_task(line.sender.send(request))
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        peer, _ = await loop.sock_accept(listener)
        await loop.sock_recv(peer, 10_000)
        await loop.sock_sendall(peer, OK.replace(b"200 OK", b"413 Too Large"))
        assert await call == (413, b"[]")
        assert begin(line) is None
        peer.close()
        await line.sender.aclose()


def test_a_sender_is_used_in_the_next_loop_when_its_own_was_closed() -> None:
    sender = PlainSender()

    async def ask() -> tuple[Begun | None, tuple[int, bytes]]:
        peer = Peer(OK)
        server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
        line = Line(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", sender)
        try:
            return begin(line), (await asyncio.gather(*(line.get() for _ in range(module.MOST_CONNECTIONS + 1))))[0]
        finally:
            server.close()

    assert [asyncio.run(ask()) for _ in range(2)] == [(None, (200, b"[]"))] * 2
    asyncio.run(sender.aclose())


async def test_calls_at_once_have_connections_of_their_own() -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as line:
        calls = [asyncio.create_task(line.get()) for _ in range(module.MOST_CONNECTIONS + 5)]
        while len(peer.requests) < module.MOST_CONNECTIONS:
            peer.asked.clear()
            await peer.asked.wait()
        assert peer.connections == module.MOST_CONNECTIONS
        peer.answer_when.set()
        assert [await call for call in calls] == [(200, b"[]")] * len(calls)
        while len(peer.writers) > module.MOST_KEPT:
            peer.closed.clear()
            await peer.closed.wait()
        assert await line.get() == (200, b"[]")
    await until_closed(peer)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"what?\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nx: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
    ids=["closes", "no http", "bad chunk", "bad length", "another protocol", "encoded", "a long header"],
)
async def test_what_is_no_answer_is_an_error_of_httpx_and_the_connection_is_closed(answer: bytes) -> None:
    peer = Peer(answer, OK)
    async with listening(peer) as line:
        with pytest.raises(httpx.RemoteProtocolError):
            await line.get()
        await peer.closed.wait()
        assert await line.get() == (200, b"[]")
    assert peer.connections == 2


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1"], ids=["nothing", "a half"])
@pytest.mark.parametrize("how", ["closed", "reset"])
async def test_a_connection_that_breaks_is_an_error_of_httpx(sent: bytes, how: str) -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as line:
        call = asyncio.create_task(line.get())
        await peer.asked.wait()
        for writer in list(peer.writers):
            writer.write(sent)
            if how == "reset":
                writer.transport.abort()
            else:
                writer.close()
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
            await call
        peer.answer_when.set()


async def test_an_answer_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    peer = Peer(b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b" " * 101)
    async with listening(peer) as line:
        with pytest.raises(TooLongError):
            await line.get()
        await until_closed(peer)


async def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        await line.get()
        for writer in list(peer.writers):
            writer.close()
        await peer.closed.wait()
        assert await line.get() == (200, b"[]")
    assert peer.connections == 2


async def test_a_connection_that_was_not_used_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        await line.get()
        monkeypatch.setattr(module, "KEPT_SECONDS", -1.0)
        assert await line.get() == (200, b"[]")
        await until_closed(peer)
    assert peer.connections == 2


async def test_a_new_connection_where_one_is_asked_for() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        for _ in range(2):
            assert await line.get(fresh=True) == (200, b"[]")
    assert peer.connections == 2


@pytest.mark.parametrize("when", ["connecting", "answering"])
async def test_a_cancelled_call_leaves_nothing_open(when: str) -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as line:
        call = asyncio.create_task(line.get())
        if when == "answering":
            await peer.asked.wait()
        else:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        peer.answer_when.set()
        await until_closed(peer)
        assert await line.get() == (200, b"[]")


async def test_a_call_that_is_cancelled_in_the_moment_of_the_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._open

    async def then_cancelled(host: str, port: int) -> object:
        connection = await real(host, port)
        asyncio.get_running_loop().call_soon(call.cancel)
        return connection

    monkeypatch.setattr(module, "_open", then_cancelled)
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as line:
        call = asyncio.create_task(line.get())
        ended, _ = await asyncio.wait({call}, timeout=1)
        call.cancel()
        peer.answer_when.set()
        assert ended
        assert call.cancelled()
        await until_closed(peer)


async def test_a_call_that_is_on_its_way_when_the_sender_is_closed_leaves_nothing_open() -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as line:
        call = asyncio.create_task(line.get())
        await peer.asked.wait()
        await line.sender.aclose()
        peer.answer_when.set()
        assert await call == (200, b"[]")
        await until_closed(peer)


# requests that are begun


def begin(line: Line) -> Begun | None:
    return line.sender.begin(httpx.Request("GET", line.url))


async def test_what_is_begun_is_sent_at_once_and_answered_later() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        assert begin(line) is None  # it would have to connect
        await line.get()
        peer.asked.clear()
        begun = begin(line)
        assert begun is not None
        await peer.asked.wait()
        assert await line.get() == (200, b"[]")  # on another connection
        assert await begun.answer() == (200, b"[]")
        begun.drop()
        begun.drop()
        assert [await line.get() for _ in range(2)] == [(200, b"[]")] * 2
    assert peer.connections == 2


@pytest.mark.parametrize("answered", [False, True])
async def test_what_is_dropped_is_not_the_next_answer(answered: bool) -> None:
    peer = Peer(OK, OK.replace(b"[]", b"{}"), OK)
    async with listening(peer) as line:
        await line.get()
        peer.asked.clear()
        if not answered:
            peer.answer_when.clear()
        begun = begin(line)
        assert begun is not None
        await peer.asked.wait()
        begun.drop()
        peer.answer_when.set()
        await until_closed(peer)
        assert await line.get() == (200, b"[]")
    assert peer.connections == 2


async def test_what_was_begun_and_breaks_is_an_error_of_httpx() -> None:
    peer = Peer(OK, b"", OK)
    async with listening(peer) as line:
        await line.get()
        begun = begin(line)
        assert begun is not None
        with pytest.raises(httpx.RemoteProtocolError):
            await begun.answer()
        begun.drop()
        assert await line.get() == (200, b"[]")
    assert peer.connections == 2


async def test_a_cancelled_wait_for_what_was_begun_leaves_nothing_open() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        await line.get()
        peer.answer_when.clear()
        begun = begin(line)
        assert begun is not None
        waiting = asyncio.create_task(begun.answer())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        begun.drop()
        peer.answer_when.set()
        await until_closed(peer)


async def test_what_no_header_can_hold_is_not_begun() -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        await line.get()
        assert line.sender.begin(httpx.Request("GET", line.url, headers={"x": "a\nb"})) is None
        await until_closed(peer)


async def test_httpx_begins_in_a_task() -> None:
    asked = asyncio.Event()
    answer = asyncio.Event()

    async def serve(_: httpx.Request) -> httpx.Response:
        asked.set()
        await answer.wait()
        return httpx.Response(200, content=b"[]")

    sender = HttpxSender(httpx.MockTransport(serve))
    begun = sender.begin(httpx.Request("GET", "https://llama/"))
    await asked.wait()
    answer.set()
    assert await begun.answer() == (200, b"[]")
    begun.drop()
    answer.clear()
    dropped = sender.begin(httpx.Request("GET", "https://llama/"))
    dropped.drop()
    with pytest.raises(asyncio.CancelledError):
        await dropped.answer()
    await sender.aclose()


@pytest.mark.parametrize("seed", range(4))
async def test_every_answer_is_that_of_its_own_request(seed: int) -> None:
    """Many calls at once, cancelled and dropped at any moment, of a server that closes, cuts, and sends in pieces."""
    draw = random.Random(seed)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while (how := draw.random()) > 0.1:
                body = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body) + (0.4 < how < 0.5), body)
                if how < 0.4:
                    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
                    answer = (
                        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\nX-Trailer: a\r\n\r\n"
                    )
                size = 7 if how < 0.7 else len(answer)
                for start in range(0, len(answer), size):
                    writer.write(answer[start : start + size])
                    await asyncio.sleep(0)
                await writer.drain()
                if 0.4 < how < 0.5 or how > 0.95:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    sender, ended = PlainSender(), Counter[str]()

    async def call(number: int) -> None:
        request = httpx.Request("GET", f"{url}/{number}")
        begun = sender.begin(request) if draw.random() < 0.5 else None
        work = asyncio.ensure_future(sender.send(request) if begun is None else begun.answer())
        try:
            if draw.random() < 0.4:
                for _ in range(draw.randrange(30)):
                    await asyncio.sleep(0)
                work.cancel()
            assert await work == (200, b"/%d" % number)
            ended["answered"] += 1
        except (asyncio.CancelledError, httpx.HTTPError) as error:
            ended[type(error).__name__] += 1
        finally:
            if begun is not None:
                begun.drop()

    for first in range(0, 600, 25):
        await asyncio.gather(*(call(number) for number in range(first, first + 25)))
    assert sum(ended.values()) == 600
    assert ended["answered"] > 200
    assert ended["CancelledError"] > 50
    assert len({id(kept) for kept in sender._kept}) == len(sender._kept) <= module.MOST_KEPT
    for _ in range(module.MOST_CONNECTIONS):  # each was given back
        await asyncio.wait_for(sender._room.acquire(), 1)
    await sender.aclose()
    server.close()


# connecting


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(httpx.ConnectError):
            await Line(f"http://127.0.0.1:{taken.getsockname()[1]}").get()


async def test_a_name_that_there_is_not() -> None:
    with pytest.raises(httpx.ConnectError):
        await Line("http://no-such-host.invalid").get()


async def test_a_server_that_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(module, "start_connection", never)
    with pytest.raises(httpx.ConnectTimeout):
        await Line("http://127.0.0.1:1").get()


async def test_the_next_address_is_tried_when_nobody_listens_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(OK)
    async with listening(peer) as line:
        port = httpx.URL(line.url).port
        addresses = [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")
        ]

        async def two(*_: object, **__: object) -> list[object]:
            return list(addresses)

        monkeypatch.setattr(type(asyncio.get_running_loop()), "getaddrinfo", two)
        line.url = f"http://two-addresses:{port}"
        assert await line.get() == (200, b"[]")


async def test_what_a_llama_server_is_sent() -> None:
    """The key, or, as httpx's clients have it, the name and password of the address; and no wish for a packed answer."""
    peer = Peer(OK)
    async with listening(peer) as line:
        for base_url, key in [(line.url, "sk-1"), (line.url.replace("http://", "http://user:word@"), None)]:
            server = LlamaServer(base_url, key)
            assert [await server.slots() for _ in range(2)] == [[], []]
            await server.aclose()
    assert peer.connections == 2
    heads = [request.decode().split("\r\n") for request in peer.requests]
    assert [line for head in heads for line in head if line.startswith("Authorization")] == [
        *["Authorization: Bearer sk-1"] * 2,
        *["Authorization: Basic dXNlcjp3b3Jk"] * 2,
    ]
    assert all("Accept-Encoding: identity" in head for head in heads)
