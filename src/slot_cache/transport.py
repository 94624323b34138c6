"""httpx's calls to one server, over asyncio's own sockets.

A look at the slots stands before every request, and httpx's own transport (httpcore and anyio) takes three times as long
for it as this one: `slot-cache bench` and tests/real/test_one_slot.py measure what is left. HTTP itself is h11's, as there.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from time import monotonic

import h11
import httpx
from aiohappyeyeballs import start_connection

KEPT_CONNECTIONS = 4
"""So many unused connections are kept for the next calls."""

KEPT_SECONDS = 4.0
"""llama-server closes a connection that was not used for 5 s."""

MOST_BYTES = 16 * 2**20
"""No answer of a llama-server that is asked here is as long."""

HAPPY_EYEBALLS_SECONDS = 0.25
"""When the next address of a name is tried beside one that does not answer (RFC 8305)."""

_READ_BYTES = 65536


class SocketTransport(httpx.AsyncBaseTransport):
    """Calls of one event loop, HTTP/1.1, each answer read to its end at once. Of httpx's time-outs only `connect` counts: the
    caller bounds the whole call.

    Raises what httpx's own transport does: `ConnectError`, `ConnectTimeout`, `ReadError`, `WriteError`,
    `RemoteProtocolError`; and `DecodingError` for an answer of more than `MOST_BYTES` or a
    compressed one, as nobody asks for. A call that is cancelled or fails
    closes its connection.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[_Connection, float]] = []
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx says."""
        body = await request.aread()
        where = (request.url.scheme, request.url.host, request.url.port)
        connection = self._take(where) or await self._open(request)
        done = False
        try:
            status, headers, content = await connection.call(request, body)
            done = True
        finally:
            if done and connection.reusable() and not self._closed:
                self._keep(connection)
            else:
                connection.close()
        return httpx.Response(status, headers=headers, content=content)

    async def aclose(self) -> None:
        """Close the connections; one that is in use closes when its call is over."""
        self._closed = True
        while self._kept:
            self._kept.pop()[0].close()

    def _take(self, where: _Where) -> _Connection | None:
        now = monotonic()
        while self._kept:
            connection, since = self._kept.pop()
            if now - since < KEPT_SECONDS and connection.where == where and not connection.ended():
                return connection
            connection.close()
        return None

    def _keep(self, connection: _Connection) -> None:
        self._kept.append((connection, monotonic()))
        if len(self._kept) > KEPT_CONNECTIONS:
            self._kept.pop(0)[0].close()

    async def _open(self, request: httpx.Request) -> _Connection:
        url, tls = request.url, None
        if url.scheme == "https":
            if self._tls is None:
                self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
            tls = self._tls
        port = url.port or (443 if tls is not None else 80)
        seconds = request.extensions.get("timeout", {}).get("connect")
        try:
            opened = await asyncio.wait_for(_connect(url.host, port, tls), seconds)
        except asyncio.TimeoutError:
            raise httpx.ConnectTimeout("", request=request) from None
        except OSError as error:
            raise httpx.ConnectError(str(error), request=request) from None
        return _Connection(*opened, (url.scheme, url.host, url.port))


async def _connect(
    host: str, port: int, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sock = await start_connection(found, happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS)
    try:
        return await asyncio.open_connection(sock=sock, ssl=tls, server_hostname=host if tls is not None else None)
    except BaseException:
        sock.close()
        raise


_Where = tuple[str, str, "int | None"]


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: _Where) -> None:
        self.where = where
        self._reader = reader
        self._writer = writer
        self._state = h11.Connection(h11.CLIENT)

    async def call(self, request: httpx.Request, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        try:
            head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
            pieces = [self._state.send(head), self._state.send(h11.Data(body)) if body else b""]
            pieces.append(self._state.send(h11.EndOfMessage()))
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error), request=request) from None
        try:
            self._writer.write(b"".join(piece for piece in pieces if piece))
            await self._writer.drain()
        except OSError as error:
            raise httpx.WriteError(str(error), request=request) from None
        status, headers, answer = 0, list[tuple[bytes, bytes]](), bytearray()
        try:
            while True:
                event = self._state.next_event()
                if event is h11.NEED_DATA:
                    self._state.receive_data(await self._reader.read(_READ_BYTES))
                elif isinstance(event, h11.Response):
                    status, headers = event.status_code, event.headers.raw_items()
                    if dict(event.headers).get(b"content-encoding", b"identity") != b"identity":
                        raise httpx.DecodingError("the answer is compressed, which nobody asked for", request=request)
                elif isinstance(event, h11.Data):
                    answer += event.data
                    if len(answer) > MOST_BYTES:
                        raise httpx.DecodingError(f"the answer is longer than {MOST_BYTES} bytes", request=request)
                elif isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                    return status, headers, bytes(answer)
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error), request=request) from None
        except OSError as error:
            raise httpx.ReadError(str(error), request=request) from None

    def reusable(self) -> bool:
        """Whether the connection is ready for another call after this one."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        return not self.ended()

    def ended(self) -> bool:
        """Whether the server has closed it."""
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        with suppress(Exception):  # its loop may be over
            self._writer.transport.abort()
