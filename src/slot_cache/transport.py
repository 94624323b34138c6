"""httpx's own transport, over asyncio's own sockets.

A look at the slots stands before every request, and a third of its cost was anyio, which httpcore uses by default and which
asks at each step whether it was cancelled. `slot-cache bench` and tests/real/test_one_slot.py measure what is left.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx
from aiohappyeyeballs import start_connection

KEPT_SECONDS = 4.0
"""llama-server closes a connection that was not used for 5 s."""

HAPPY_EYEBALLS_SECONDS = 0.25
"""When the next address of a name is tried beside one that does not answer (RFC 8305)."""


def new_transport(base_url: str) -> httpx.AsyncHTTPTransport:
    """A transport for one server. It belongs to one event loop, and may have 16 connections; a few are kept."""
    plain = base_url.startswith("http://")
    limits: dict[str, Any] = {
        "max_connections": 16,
        "max_keepalive_connections": 4,
        "keepalive_expiry": KEPT_SECONDS,
    }
    transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(**limits), trust_env=False, verify=not plain)
    if plain and isinstance(getattr(transport, "_pool", None), httpcore.AsyncConnectionPool):
        # httpx has no parameter for the backend
        transport._pool = httpcore.AsyncConnectionPool(**limits, network_backend=SocketBackend())
    return transport


class SocketBackend(httpcore.AsyncNetworkBackend):
    """Connections of asyncio, without TLS."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            return _Stream(*await asyncio.wait_for(_connect(host, port), timeout))
        except asyncio.TimeoutError:
            raise httpcore.ConnectTimeout from None
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from None

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    connected = await start_connection(found, happy_eyeballs_delay=HAPPY_EYEBALLS_SECONDS)
    try:
        return await asyncio.open_connection(sock=connected)
    except BaseException:
        connected.close()
        raise


class _Stream(httpcore.AsyncNetworkStream):
    """Time-outs of single reads and writes are left to the caller, who bounds the whole call."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise httpcore.ReadError(str(error)) from None

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._writer.write(buffer)
            await self._writer.drain()
        except OSError as error:
            raise httpcore.WriteError(str(error)) from None

    async def aclose(self) -> None:
        self._writer.transport.abort()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable":  # httpcore asks whether the server has closed it
            return self._reader.at_eof()
        return None
