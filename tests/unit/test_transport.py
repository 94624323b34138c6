"""slot_cache.transport against real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from slot_cache import transport as module
from slot_cache.transport import KEPT_CONNECTIONS, MOST_BYTES, SocketTransport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]"


class Peer:
    """A server that answers each request on a connection with the next of `answers` and then as with the last; b"" closes."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.closed = asyncio.Event()
        self.asked = asyncio.Event()
        self.answer_when = asyncio.Event()
        self.answer_when.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = next((int(v) for k, v in _fields(head) if k == b"content-length"), 0)
                    self.requests.append(head + await reader.readexactly(length))
                    self.asked.set()
                    await self.answer_when.wait()
                    answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                    if not answer:
                        return
                    writer.write(answer)
                    await writer.drain()
                    if b"Connection: close" in answer or b"HTTP/1.0" in answer:
                        return
        finally:
            self.open -= 1
            self.closed.set()
            writer.close()


def _fields(head: bytes) -> list[tuple[bytes, bytes]]:
    pairs = [line.split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line]
    return [(name.strip().lower(), value.strip()) for name, value in pairs]


@contextlib.asynccontextmanager
async def listening(peer: Peer, **options: object) -> AsyncIterator[tuple[httpx.AsyncClient, SocketTransport, str]]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, **options)  # type: ignore[arg-type]  # ssl= only
    port = server.sockets[0].getsockname()[1]
    transport = SocketTransport()
    try:
        async with httpx.AsyncClient(transport=transport) as client:
            yield client, transport, f"http://127.0.0.1:{port}"
    finally:
        server.close()


async def test_calls_share_a_connection() -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, _, url):
        for _ in range(3):
            answer = await client.get(f"{url}/slots", params={"model": "a b"})
            assert (answer.status_code, answer.json()) == (200, [])
        answer = await client.post(f"{url}/slots/0?action=save", json={"filename": "x.bin"})
        assert answer.status_code == 200
    assert peer.connections == 1
    assert peer.requests[0].startswith(b"GET /slots?model=a+b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert peer.requests[3].startswith(b"POST /slots/0?action=save HTTP/1.1\r\n")
    assert peer.requests[3].endswith(b'\r\n\r\n{"filename":"x.bin"}')


async def test_calls_at_once_have_connections_of_their_own_and_few_are_kept() -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as (client, transport, url):
        calls = [asyncio.create_task(client.get(url)) for _ in range(KEPT_CONNECTIONS + 3)]
        while len(peer.requests) < len(calls):
            peer.asked.clear()
            await peer.asked.wait()
        peer.answer_when.set()
        assert [(await call).status_code for call in calls] == [200] * len(calls)
        assert peer.connections == len(calls)
        assert len(transport._kept) == KEPT_CONNECTIONS
        while peer.open > KEPT_CONNECTIONS:
            peer.closed.clear()
            await peer.closed.wait()
    while peer.open:
        peer.closed.clear()
        await peer.closed.wait()


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n[1\r\n1\r\n]\r\n0\r\n\r\n", b"[1]"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[1]", b"[1]"),
        (b"HTTP/1.0 200 OK\r\n\r\n[1]", b"[1]"),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\n[1]", b"[1]"),
        (b"HTTP/1.1 503 Loading\r\nContent-Length: 3\r\n\r\n[1]", b"[1]"),
        (b"HTTP/1.1 204 Nothing\r\n\r\n", b""),
    ],
    ids=["chunked", "continue", "http 1.0", "close", "503", "204"],
)
async def test_answers_of_many_shapes(answer: bytes, content: bytes) -> None:
    peer = Peer(answer)
    async with listening(peer) as (client, _, url):
        for _ in range(2):
            got = await client.get(url)
            assert (got.status_code, got.content) == (int(answer.rpartition(b"HTTP/1")[2][3:6]), content)
    assert peer.connections == (2 if b"close" in answer or b"HTTP/1.0" in answer else 1)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n[]", httpx.RemoteProtocolError),
        (b"what?\r\n\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000, httpx.RemoteProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n[]", httpx.DecodingError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(MOST_BYTES + 1), httpx.DecodingError),
    ],
    ids=["closes", "short", "no http", "bad chunk", "headers", "compressed", "long"],
)
async def test_what_is_no_answer_is_an_error_of_httpx_and_the_connection_is_closed(
    answer: bytes, error: type[Exception]
) -> None:
    peer = Peer(answer, OK)
    async with listening(peer) as (client, transport, url):
        with pytest.raises(error):
            await client.get(url)
        assert transport._kept == []
        await peer.closed.wait()
        assert (await client.get(url)).json() == []
    assert peer.connections == 2


async def test_a_connection_that_the_server_has_closed_is_not_used_again() -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, transport, url):
        await client.get(url)
        reader = transport._kept[0][0]._reader
        for task in asyncio.all_tasks():
            if task.get_coro().__qualname__ == "Peer.serve":  # type: ignore[union-attr]  # a coroutine, as all here
                task.cancel()
        await asyncio.wait_for(reader.read(1), 5)  # its end
        assert (await client.get(url)).json() == []
    assert peer.connections == 2


async def test_an_old_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, _, url):
        await client.get(url)
        now = module.monotonic() + module.KEPT_SECONDS + 0.01
        monkeypatch.setattr(module, "monotonic", lambda: now)
        await client.get(url)
    assert peer.connections == 2


@pytest.mark.parametrize("when", ["connecting", "answering"])
async def test_a_cancelled_call_leaves_nothing_open(when: str) -> None:
    peer = Peer(OK)
    peer.answer_when.clear()
    async with listening(peer) as (client, transport, url):
        call = asyncio.create_task(client.get(url))
        if when == "answering":
            await peer.asked.wait()
        else:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert transport._kept == []
        peer.answer_when.set()
        if peer.connections:
            await peer.closed.wait()
        assert (await client.get(url)).json() == []


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with httpx.AsyncClient(transport=SocketTransport()) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(f"http://127.0.0.1:{taken.getsockname()[1]}/")


async def test_a_name_that_there_is_not() -> None:
    async with httpx.AsyncClient(transport=SocketTransport()) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("http://no-such-host.invalid/")


async def test_a_server_that_lets_nobody_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(module, "start_connection", never)
    async with httpx.AsyncClient(transport=SocketTransport()) as client:
        with pytest.raises(httpx.ConnectTimeout):
            await client.get("http://127.0.0.1:1/", timeout=httpx.Timeout(5, connect=0.01))


async def test_the_next_address_is_tried_beside_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = Peer(OK)
    async with listening(peer) as (client, _, url):
        port = httpx.URL(url).port
        loop = asyncio.get_running_loop()
        dead = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", port))  # nobody listens there
        alive = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))

        async def two(*_: object, **__: object) -> list[object]:
            return [dead, alive]

        monkeypatch.setattr(type(loop), "getaddrinfo", two)
        assert (await client.get(f"http://two-addresses:{port}/")).json() == []


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """The files of a certificate for localhost, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pkcs8, clear = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, pkcs8, clear))
    return paths


async def test_tls(tmp_path: Path) -> None:
    """A certificate that the machine trusts is taken, another is not."""
    certificate, key = make_certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    peer = Peer(OK)
    async with listening(peer, ssl=tls) as (client, transport, url):
        url = url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await client.get(url)
        transport._tls = ssl.create_default_context(cafile=certificate)
        for _ in range(2):
            assert (await client.get(url)).json() == []
    assert len(peer.requests) == 2
