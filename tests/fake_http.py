"""Just enough of an HTTP server, with the habits of llama-server's. Used by fake_llama_server.py."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Stream(Protocol):
    """The pieces of an answer; whoever takes them closes it, whether it has come to its end or not."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    async def __anext__(self) -> bytes: ...
    async def aclose(self) -> None: ...


@dataclass
class Answer:
    status: int
    body: bytes = b""
    content_type: str = "application/json; charset=utf-8"
    stream: Stream | None = None


class Disconnected(Exception):
    """The server closes the connection without an answer."""


class Refused(Exception):
    """Nobody listens."""


Handler = Callable[[str, str, Mapping[str, str], bytes], Awaitable["Answer"]]


class HttpServer:
    """Listens on the loopback address.

    As with the real one a connection ends after 5 s without a request, after 100 requests and after an error; and after
    a stream, there without a word in the headers (the real one does so more often than not).
    """

    def __init__(self, handler: Handler, port: int, keep_alive_seconds: float, keep_alive_requests: int) -> None:
        self.handler = handler
        self.keep_alive_seconds, self.keep_alive_requests = keep_alive_seconds, keep_alive_requests
        self.connections: set[_Connection] = set()
        self._socket: socket.socket | None = None
        self._server: asyncio.Task[asyncio.Server] | None = None
        self.port = port

    def listen(self, on: bool) -> None:
        """Begins or ends to listen, always on the same port; a connection made meanwhile is refused."""
        if on and self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", self.port))
            self._socket.listen(128)
            self._socket.setblocking(False)
            self.port = self._socket.getsockname()[1]
            loop = asyncio.get_running_loop()
            self._server = loop.create_task(loop.create_server(lambda: _Connection(self), sock=self._socket))
        elif not on and self._socket is not None:
            if self._server is not None and self._server.done() and not self._server.cancelled():
                self._server.result().close()
            elif self._server is not None:
                self._server.cancel()
            self._socket.close()
            self._socket = self._server = None
            self.drop_connections()

    def drop_connections(self) -> None:
        for connection in list(self.connections):
            connection.drop()

    async def close(self) -> None:
        self.listen(False)
        busy = [c.task for c in self.connections if c.task is not None]
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._requests = 0
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.server.connections.add(self)
        self._wait_for_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        if self._idle is not None:
            self._idle.cancel()
        if self.task is not None:
            self.task.cancel()  # the client left

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.task is None:
            self._next()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _wait_for_more(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle = loop.call_later(self.server.keep_alive_seconds, self.drop)

    def _next(self) -> None:
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body, done, rest = _unchunk(rest)
            if not done:
                return
        else:
            size = int(headers.get("content-length", "0"))
            if len(rest) < size:
                return
            body, rest = rest[:size], rest[size:]
        self._buffer = rest
        if self._idle is not None:
            self._idle.cancel()
        method, target, _ = first.split(" ", 2)
        self._requests += 1
        self.task = asyncio.get_running_loop().create_task(self._serve(method, target, headers, body))

    async def _serve(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        last = self._requests >= self.server.keep_alive_requests or headers.get("connection", "").lower() == "close"
        try:
            answer = await self.server.handler(method, target, headers, body)
            last = last or answer.status >= 400
            await self._send(answer, last)
            last = last or answer.stream is not None
        except asyncio.CancelledError:
            last = True
            if self._transport is not None and not self._transport.is_closing():
                raise
        except Disconnected:
            last = True
        except Refused:
            last = True
            if self._transport is not None:
                self._transport.abort()
        except BaseException:
            last = True
            raise
        finally:
            self.task = None
            if self._transport is not None and last:
                self._transport.close()
        if self._transport is not None and not self._transport.is_closing():
            self._wait_for_more()
            self._next()

    async def _send(self, answer: Answer, last: bool) -> None:
        assert self._transport is not None
        alive = f"timeout={self.server.keep_alive_seconds:g}, max={self.server.keep_alive_requests}"
        lines = [
            f"HTTP/1.1 {answer.status} {'OK' if answer.status < 400 else 'Error'}",
            "Server: llama.cpp",
            f"Content-Type: {answer.content_type}",
            "Connection: close" if last else f"Keep-Alive: {alive}",
            "Transfer-Encoding: chunked" if answer.stream is not None else f"Content-Length: {len(answer.body)}",
        ]
        self._transport.write("\r\n".join([*lines, "", ""]).encode() + (b"" if answer.stream else answer.body))
        if answer.stream is None:
            return
        try:
            async for piece in answer.stream:
                self._transport.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self._transport.write(b"0\r\n\r\n")
        finally:
            await answer.stream.aclose()


def _unchunk(data: bytes) -> tuple[bytes, bool, bytes]:
    body = b""
    while True:
        line, mark, data = data.partition(b"\r\n")
        if not mark:
            return body, False, data
        size = int(line.split(b";")[0], 16)
        if len(data) < size + 2:
            return body, False, data
        body, data = body + data[:size], data[size + 2 :]
        if size == 0:
            return body, True, data
