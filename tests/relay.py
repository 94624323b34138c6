"""A relay between LiteLLM and a llama-server: it writes down every call that passes, and fails those it is told to.

    with Relay(server.base_url) as relay:
        ... relay.base_url ...                      # what LiteLLM is given as the server
        relay.calls                                 # what came by, in order
        with relay.failing("slots", "hang"): ...    # faults, for calls of a kind

It lives in a thread of its own, so it may outlive the event loop of a test, and adds a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qs, urlsplit

Kind = Literal["slots", "save", "restore", "erase", "props", "health", "request", "other"]
Fault = Literal[
    "hang",  # no answer until the fault is over; then the connection is closed
    "drop",  # the connection is closed without an answer
    "garbage",  # 200, and no JSON
    "wrong",  # 200, and JSON of another shape
    "500",
]
T = TypeVar("T")


@dataclass
class Call:
    """One call.

    Attributes:
        kind: what it asks for; `request` is whatever computes.
        at: when its head had been read (time.monotonic).
        data: its body.
        status: the HTTP status, once its answer has begun.
        answered: the whole answer was passed on.
    """

    kind: Kind
    method: str
    path: str
    at: float
    data: bytes = b""
    status: int | None = None
    answered: bool = False

    @property
    def body(self) -> Any:
        """Its body, which is JSON; None for none."""
        return json.loads(self.data) if self.data else None


class Relay:
    """See the module. `target` may be changed at any time: new connections go there, or, while it is "", nowhere."""

    def __init__(self, target: str = "", port: int = 0) -> None:
        self.target = target
        self.calls: list[Call] = []
        self.bytes_per_second: float | None = None
        """How fast answers to `request`s are passed on; None: as they come. The tiny models generate faster than LiteLLM
        can take it: its event loop then comes to nothing else for seconds, not even to notice that a client has left."""
        self.request_delay = 0.0
        """Seconds that every `request` is on its way."""
        self._port = port
        self._faults: dict[Kind, tuple[Fault, int | None]] = {}
        self._over = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: set[asyncio.Task[None]] = set()
        self._watchers: set[Callable[[], None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def kinds(self, since: int = 0) -> list[Kind]:
        """The kinds of the calls from number `since` on."""
        return [call.kind for call in self.calls[since:]]

    def count(self, kind: Kind, since: int = 0) -> int:
        """How many calls of a kind came by, from number `since` on."""
        return self.kinds(since).count(kind)

    async def until(self, condition: Callable[[], T], timeout: float = 60.0) -> T:
        """Return what `condition` says as soon as that is something; it is asked whenever a call came or was answered."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def notify() -> None:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                loop.call_soon_threadsafe(changed.set)

        async def wait() -> T:
            while not (found := condition()):
                await changed.wait()
                changed.clear()
            return found

        self._watchers.add(notify)
        try:
            return await asyncio.wait_for(wait(), timeout)
        finally:
            self._watchers.discard(notify)

    def request_with(self, text: str) -> Call | None:
        """The call that computes and whose body holds `text`, one of the last 100; None if there is none so far."""
        wanted = text.encode()
        return next((call for call in self.calls[:-101:-1] if call.kind == "request" and wanted in call.data), None)

    def fail(self, kind: Kind, fault: Fault, times: int | None = None) -> None:
        """Make calls of a kind fail: the next `times`, None: all until `heal`."""
        self._faults[kind] = (fault, times)

    def heal(self) -> None:
        """End all faults; what hangs is dropped."""
        self._faults.clear()

        def wake() -> None:
            self._over.set()
            self._over = asyncio.Event()

        self._loop.call_soon_threadsafe(wake)

    @contextlib.contextmanager
    def failing(self, *kinds: Kind, fault: Fault) -> Iterator[None]:
        """As `fail`, for a while."""
        for kind in kinds:
            self.fail(kind, fault)
        try:
            yield
        finally:
            self.heal()

    @contextlib.contextmanager
    def paced(self, bytes_per_second: float = 50_000) -> Iterator[None]:
        """Pass answers on no faster than that, for a while; a streamed token takes about 250 bytes."""
        self.bytes_per_second = bytes_per_second
        try:
            yield
        finally:
            self.bytes_per_second = None

    def __enter__(self) -> Relay:
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._accept, "127.0.0.1", self._port))
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        async def close() -> None:
            assert self._server is not None
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: its requests one by one, each passed on upon a connection of its own."""
        requests: asyncio.Queue[tuple[bytes, Call] | None] = asyncio.Queue()
        reading = asyncio.create_task(_read_requests(reader, requests))
        coming = asyncio.create_task(requests.get())
        passing: asyncio.Task[bool] | None = None
        try:
            while (request := await coming) is not None:
                data, call = request
                self.calls.append(call)
                self._changed()
                coming = asyncio.create_task(requests.get())
                passing = asyncio.create_task(self._answer(data, call, writer))
                await asyncio.wait({passing, coming}, return_when=asyncio.FIRST_COMPLETED)
                if coming.done() and coming.result() is None:
                    return  # the client left
                if not await passing:
                    return
        finally:
            for task in (reading, coming, passing):
                if task is not None:
                    task.cancel()

    async def _answer(self, data: bytes, call: Call, writer: asyncio.StreamWriter) -> bool:
        """Have a request answered. Returns whether its answer was complete, so that the connection may go on."""
        fault = self._fault_for(call.kind)
        if fault == "hang":
            await self._over.wait()
            return False
        if fault == "drop" or not self.target:
            return False
        if fault is not None:
            call.status, content = _wrong_answer(fault, call)
            head = f"HTTP/1.1 {call.status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
            writer.write(head.encode() + b"\r\n\r\n" + content)
            await writer.drain()
            return True
        if call.kind == "request" and self.request_delay:
            await asyncio.sleep(self.request_delay)
        target = urlsplit(self.target)
        try:
            from_upstream, upstream = await asyncio.open_connection(target.hostname, target.port)
        except OSError:
            return False
        try:
            upstream.write(data)
            await upstream.drain()
            return await self._pass_on(from_upstream, writer, call)
        except OSError:
            return False
        finally:
            upstream.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call) -> bool:
        """Pass an answer on as it comes. Returns whether it was complete."""
        head = await reader.readuntil(b"\r\n\r\n")
        call.status = int(head[9:12])
        self._changed()
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        missing = int(length[1]) if length else None
        writer.write(head)
        end = b""
        while missing != 0 and end != b"\r\n0\r\n\r\n":
            pace = self.bytes_per_second if call.kind == "request" else None
            data = await reader.read(1024 if pace else 1 << 16)
            if not data:
                return False
            writer.write(data)
            await writer.drain()
            if missing is not None:
                missing -= len(data)
            else:
                end = (end + data)[-7:]
            if pace:
                await asyncio.sleep(len(data) / pace)
        call.answered = True
        self._changed()
        return True

    def _changed(self) -> None:
        for notify in list(self._watchers):
            notify()

    def _fault_for(self, kind: Kind) -> Fault | None:
        fault, times = self._faults.get(kind, (None, None))
        if fault is not None and times is not None:
            if times <= 1:
                del self._faults[kind]
            else:
                self._faults[kind] = (fault, times - 1)
        return fault


def _wrong_answer(fault: Fault, call: Call) -> tuple[int, bytes]:
    if fault == "500":
        return 500, b'{"error": {"code": 500, "message": "Internal error", "type": "server_error"}}'
    if fault == "garbage":
        return 200, b"<html>nothing of use"
    return 200, b'{"slots": 1}' if call.kind == "slots" else b'[{"n_saved": "many"}]'


async def _read_requests(reader: asyncio.StreamReader, requests: asyncio.Queue[tuple[bytes, Call] | None]) -> None:
    try:
        while True:
            requests.put_nowait(await _read_request(reader))
    except (OSError, EOFError, ValueError):
        requests.put_nowait(None)


async def _read_request(reader: asyncio.StreamReader) -> tuple[bytes, Call]:
    head = await reader.readuntil(b"\r\n\r\n")
    at = time.monotonic()
    line, *lines = head.decode("latin-1").split("\r\n")
    method, path, _ = line.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    raw = body = b""
    if "chunked" in headers.get("transfer-encoding", ""):
        size = 1
        while size:
            size_line = await reader.readuntil(b"\r\n")
            size = int(size_line.split(b";")[0], 16)
            data = await reader.readexactly(size + 2)
            raw += size_line + data
            body += data[:-2]
    else:
        raw = body = await reader.readexactly(int(headers.get("content-length", 0)))
    return head + raw, Call(_kind(method, path), method, path, at, body)


def _kind(method: str, path: str) -> Kind:
    url = urlsplit(path)
    first = url.path.strip("/").split("/")[0]
    action = parse_qs(url.query).get("action", [""])[0]
    known: dict[str, Kind] = {"save": "save", "restore": "restore", "erase": "erase", "slots": "slots"}
    known |= {"props": "props", "health": "health"}
    return known.get(action or first, "request" if method == "POST" else "other")
