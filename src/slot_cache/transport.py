"""How calls get to a server: one HTTP/1.1 request, one whole answer, on a connection that is kept.

A look at the slots stands before every request. Half of what it cost were the layers of a general HTTP client, so that calls
without TLS use h11, which httpx is built upon, on asyncio's own sockets; those with TLS are left to httpx. What is sent is
httpx's `Request`, and what goes wrong are httpx's errors. `slot-cache bench` and tests/real/test_one_slot.py measure it.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

import h11
import httpx
from aiohappyeyeballs import start_connection

KEPT_SECONDS = 4.0
"""llama-server closes a connection that was not used for 5 s."""

MOST_KEPT = 4
MOST_CONNECTIONS = 16
"""So many connections to one server are kept while nothing is asked, and there are at once."""

HAPPY_EYEBALLS_SECONDS = 0.25
"""When the next address of a name is tried beside one that does not answer (RFC 8305)."""

MOST_BYTES = 16 * 2**20
"""No answer of a llama-server that is asked here is as long."""

T = TypeVar("T")


class TooLongError(Exception):
    """An answer of more than `MOST_BYTES`."""


class Begun(Protocol):
    """A request that was sent, whose answer is awaited later. `drop` must be called in the end, whatever became of it."""

    async def answer(self) -> tuple[int, bytes]:
        """As `Sender.send`; to be called once at most."""

    def drop(self) -> None:
        """Give up what is not answered yet. Never fails."""


class Sender(Protocol):
    """Sends requests to one server. It belongs to one event loop."""

    def begin(self, request: httpx.Request) -> Begun | None:
        """Send a request at once, where that needs no wait; None: it was not sent. Never fails."""

    async def send(self, request: httpx.Request, *, fresh: bool = False) -> tuple[int, bytes]:
        """Send a request and read all of its answer. Only connecting has a time-out of its own, the request's.

        Args:
            request: it may be sent again and again.
            fresh: on a new connection.

        Returns:
            the status and the body.

        Raises:
            httpx.HTTPError: there is no whole answer.
            TooLongError: it is longer than `MOST_BYTES`.
        """

    async def aclose(self) -> None:
        """Close the connections."""


def new_sender(base_url: str, transport: httpx.AsyncBaseTransport | None = None) -> Sender:
    """What sends to a server, over httpx's `transport` if there is one."""
    if transport is None and base_url.startswith("http://"):
        return PlainSender()
    return HttpxSender(transport)


def unheard(task: asyncio.Task[T]) -> asyncio.Task[T]:
    """A task whose error is no news when nobody is left to ask for it."""
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


class HttpxSender:
    """Leaves all to httpx."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._transport = transport
        self._client = self._new_client()

    def _new_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(
            max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_KEPT, keepalive_expiry=KEPT_SECONDS
        )
        return httpx.AsyncClient(transport=self._transport, limits=limits, trust_env=False)

    def begin(self, request: httpx.Request) -> Begun:
        return _Ahead(asyncio.get_running_loop().create_task(self.send(request)))

    async def send(self, request: httpx.Request, *, fresh: bool = False) -> tuple[int, bytes]:
        if not fresh:
            return await _sent(self._client, request)
        async with self._new_client() as client:
            return await _sent(client, request)

    async def aclose(self) -> None:
        await self._client.aclose()


class _Ahead:
    """A task that sends."""

    def __init__(self, task: asyncio.Task[tuple[int, bytes]]) -> None:
        self._task = task

    async def answer(self) -> tuple[int, bytes]:
        return await self._task

    def drop(self) -> None:
        unheard(self._task).cancel()


async def _sent(client: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
    response = await client.send(request, stream=True)
    try:
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MOST_BYTES:
                raise TooLongError
        return response.status_code, bytes(body)
    finally:
        await response.aclose()


class PlainSender:
    """HTTP/1.1 without TLS. When its event loop was closed it begins anew in the next."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: list[_Connection] = []
        self._room = asyncio.Semaphore(MOST_CONNECTIONS)
        self._closed = False

    async def send(self, request: httpx.Request, *, fresh: bool = False) -> tuple[int, bytes]:
        self._enter_loop()
        async with self._room:
            connection = (None if fresh else self._take()) or await _connect(request)
            try:
                connection.start(request)
                return await connection.finish()
            finally:
                self._give_back(connection)

    def begin(self, request: httpx.Request) -> Begun | None:
        self._enter_loop()
        connection = self._take()
        if connection is None:
            return None
        try:
            connection.start(request)
        except httpx.HTTPError:
            connection.close()
            return None
        return _Started(connection, self._give_back)

    async def aclose(self) -> None:
        self._closed = True
        while self._kept:
            self._kept.pop().close()

    def _enter_loop(self) -> None:
        """What there was in another loop is of no use here, and closed with it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            while self._kept:
                self._kept.pop().close()
            self._loop, self._room = loop, asyncio.Semaphore(MOST_CONNECTIONS)

    def _take(self) -> _Connection | None:
        """The connection that was used last, if that is not too long ago."""
        while self._kept:
            connection = self._kept.pop()
            if connection.usable and connection.silent:
                return connection
            connection.close()
        return None

    def _give_back(self, connection: _Connection) -> None:
        if connection.usable and not self._closed and len(self._kept) < MOST_KEPT:
            self._kept.append(connection)
        else:
            connection.close()


class _Started:
    """A connection upon which a request was sent."""

    def __init__(self, connection: _Connection, give_back: Callable[[_Connection], None]) -> None:
        self._connection: _Connection | None = connection
        self._give_back = give_back

    async def answer(self) -> tuple[int, bytes]:
        assert self._connection is not None
        try:
            return await self._connection.finish()
        finally:
            self.drop()

    def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._give_back(connection)


async def _connect(request: httpx.Request) -> _Connection:
    seconds = request.extensions.get("timeout", {}).get("connect")
    host, port = request.url.raw_host.decode("ascii"), request.url.port or 80
    opening = asyncio.get_running_loop().create_task(_open(host, port))
    try:  # not `wait_for`, which until Python 3.12 forgets that it was cancelled when the connection is just made
        if not (await asyncio.wait({opening}, timeout=seconds))[0]:
            raise httpx.ConnectTimeout("the server lets nobody in")
        return opening.result()
    except OSError as error:
        raise httpx.ConnectError(str(error)) from None
    except BaseException:
        opening.cancel()
        opening.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(opening: asyncio.Task[_Connection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


async def _open(host: str, port: int) -> _Connection:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    connected = await start_connection(found, happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS)
    try:
        return (await loop.create_connection(_Connection, sock=connected))[1]
    except BaseException:
        connected.close()
        raise


class _Connection(asyncio.Protocol):
    """One connection: one request at a time, `start` and `finish`."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._used = self._loop.time()
        self._busy = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # of a TCP connection

    def data_received(self, data: bytes) -> None:
        if self._busy:
            self._receive(data)
        else:
            self.close()  # nothing was asked: whatever this answers, it is not the next request

    def eof_received(self) -> None:
        self._receive(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._error = exc
        self._wake()

    def _receive(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
        except RuntimeError as error:  # data after its end
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # the caller's side

    @property
    def usable(self) -> bool:
        """Whether it may be asked (once more)."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and not self._busy
            and self._loop.time() - self._used < KEPT_SECONDS
        )

    @property
    def silent(self) -> bool:
        """Whether nothing has come that nobody asked for, nor the server's end, since the loop last had its turn."""
        if self._transport is None:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket"), select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close it at once."""
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                self._transport.abort()
            self._transport = None

    def start(self, request: httpx.Request) -> None:
        """Send a request. Until its answer is complete, and for ever if that fails, the connection is busy: not usable."""
        self._busy = True
        try:
            self._send(request)
        except h11.LocalProtocolError as error:
            raise httpx.LocalProtocolError(str(error)) from None

    async def finish(self) -> tuple[int, bytes]:
        """Read all of the answer."""
        try:
            answer = await self._read()
        except h11.RemoteProtocolError as error:
            raise httpx.RemoteProtocolError(str(error)) from None
        done = self._http.our_state is h11.DONE and self._http.their_state is h11.DONE
        if done and not self._http.trailing_data[0] and not self._unsent:
            self._http.start_next_cycle()
            self._used, self._busy = self._loop.time(), False
        return answer

    @property
    def _unsent(self) -> int:
        """The bytes that the server has not taken: it has answered without reading all of the request."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _send(self, request: httpx.Request) -> None:
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        body = [h11.Data(data=content)] if (content := request.read()) else []
        events: list[h11.Event] = [head, *body, h11.EndOfMessage()]
        data = b"".join(self._http.send(event) or b"" for event in events)
        if self._transport is None or self._transport.is_closing():
            raise httpx.WriteError("the connection is closed")
        self._transport.write(data)

    async def _read(self) -> tuple[int, bytes]:
        status, body = 0, bytearray()
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response):
                status = event.status_code
                if any(name == b"content-encoding" and value != b"identity" for name, value in event.headers):
                    raise httpx.RemoteProtocolError("an encoded answer, which was not asked for")
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MOST_BYTES:
                    raise TooLongError
            elif isinstance(event, h11.EndOfMessage):
                return status, bytes(body)
            elif event is h11.NEED_DATA:
                await self._more()
            elif not isinstance(event, h11.InformationalResponse):
                raise httpx.RemoteProtocolError("the server has closed the connection without an answer")

    async def _more(self) -> None:
        if self._transport is None or self._error is not None:
            raise httpx.ReadError(str(self._error or "the connection is closed"))
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None
