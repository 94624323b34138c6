"""Where the dashboard gets to know things. Each source is a task that goes on for ever: what goes away is tried again.

A source feeds a `Dashboard` and raises nothing but `CancelledError`. None of them writes, wakes or loads anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shlex
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import httpx

from slot_cache.monitor.logs import LogReader
from slot_cache.monitor.model import Dashboard
from slot_cache.monitor.text import clean

Result = TypeVar("Result")

FIRST_BACKOFF = 0.5
MOST_BACKOFF = 15.0
BUSY_SECONDS = 1.0
"""While a request runs /slots is not looked at more often: each look keeps requests alive that their client has given up."""

PATIENCE_SECONDS = 120.0
"""A server answers /slots between two batches of a prompt only, which takes as long as it takes."""

CONNECT_SECONDS = 3.0
PROPS_SECONDS = 5.0
STREAM_SECONDS = 60.0
"""A stream of events that is silent for so long is opened anew."""

MOST_BYTES = 16 * 2**20
LINE_BYTES = 64 * 1024
"""What is longer than that is no line of llama-server; its rest is skipped."""

READ_BYTES = 2**20
BACKLOG_BYTES = 64 * 1024
"""So much of what a log held before is read at the start."""

FAR_BEHIND_BYTES = 32 * 2**20
"""A log that grows faster than it is read: what lies further back is skipped."""

FILE_SECONDS = 0.1
SSH_LINES = 200
BACKLOG_SECONDS = 1.0
"""What comes so soon after the first line may be from before."""

QUIET_SECONDS = 15.0
"""An ssh that has neither failed nor brought a line by then has reached a log to which nothing is written."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\]")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class SourceError(ValueError):
    """What was asked for is no source; the message tells why."""


@dataclass
class Pace:
    """How often a source may look, in seconds. Changed by the keys while it runs."""

    seconds: float = 1.0


def backoff(failures: int) -> float:
    """Seconds to wait after so many failures in a row: longer each time, and not the same for all."""
    seconds: float = min(FIRST_BACKOFF * 2.0 ** min(failures, 10), MOST_BACKOFF)
    return seconds * random.uniform(0.8, 1.2)


async def forever(name: str, board: Dashboard, attempt: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
    """Run `attempt` again and again. It calls what it is given when it has heard from the source, and raises when that is away."""
    failures = 0

    def heard() -> None:
        nonlocal failures
        failures = 0
        board.source(name, True, "", time.time())

    board.source(name, None, "", time.time())
    while True:
        try:
            await attempt(heard)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a monitor that ends because of what it looks at is of no use
            board.source(name, False, described(error), time.time())
        await asyncio.sleep(backoff(failures))
        failures += 1


def described(error: Exception) -> str:
    """A fault in a few words, without addresses and keys."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return {401: "401: the key is missing or wrong", 403: "403: not allowed", 404: "404: not there"}.get(
            status, f"HTTP {status}"
        )
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, (httpx.TimeoutException, asyncio.TimeoutError)):
        return "no answer in time"
    if isinstance(error, SourceError):
        return clean(str(error))
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__


def open_client(base_url: str, key: str | None) -> httpx.AsyncClient:
    """A client that hands the key to this server only, and follows nobody elsewhere."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(PROPS_SECONDS, connect=CONNECT_SECONDS),
        limits=httpx.Limits(keepalive_expiry=3.0),
        trust_env=False,
        follow_redirects=False,
    )


async def get(client: httpx.AsyncClient, path: str, seconds: float, params: Mapping[str, str] | None = None) -> Any:
    """The JSON of an answer. Raises httpx's errors, and ValueError for what is no JSON."""
    timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
    try:
        return await within(seconds + CONNECT_SECONDS, _get(client, path, timeout, params))
    except (httpx.RemoteProtocolError, httpx.ReadError):  # a kept-alive connection that has ended meanwhile
        return await within(seconds + CONNECT_SECONDS, _get(client, path, timeout, params))


async def within(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. Raises asyncio.TimeoutError. Unlike wait_for of Python 3.11 it never loses a cancellation."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if task.cancelled():
        raise asyncio.TimeoutError
    return task.result()


async def _get(client: httpx.AsyncClient, path: str, timeout: httpx.Timeout, params: Mapping[str, str] | None) -> Any:
    async with client.stream("GET", path, params=params, timeout=timeout) as response:
        if response.status_code != 200:
            raise httpx.HTTPStatusError("", request=response.request, response=response)
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > MOST_BYTES:
                raise SourceError("the answer is too long")
    try:
        return json.loads(body)
    except RecursionError:
        raise SourceError("the answer is no JSON of a server") from None


# llama-server itself


class ServerSource:
    """llama-server's /props and /slots, or those of a router's loaded models. A server that sleeps is not asked for its slots."""

    name = "server"

    def __init__(self, board: Dashboard, base_url: str, key: str | None, pace: Pace) -> None:
        self._board, self._base_url, self._key, self._pace = board, base_url, key, pace

    async def run(self) -> None:
        await forever(self.name, self._board, self._attempt)

    async def once(self, looks: int = 1) -> None:
        """Look so many times, with the pause that a running request needs between two looks. Raises."""
        async with open_client(self._base_url, self._key) as client:
            for number in range(looks):
                if number:
                    await asyncio.sleep(BUSY_SECONDS)
                if not await self.look(client):
                    return

    async def _attempt(self, heard: Callable[[], None]) -> None:
        async with open_client(self._base_url, self._key) as client:
            while True:
                busy = await self.look(client)
                heard()
                await asyncio.sleep(max(self._pace.seconds, BUSY_SECONDS) if busy else self._pace.seconds)

    async def look(self, client: httpx.AsyncClient) -> bool:
        """Ask once. Returns whether a request runs."""
        props = _object(await get(client, "/props", PROPS_SECONDS))
        if props.get("role") == "router":
            return await self._look_at_models(client)
        self._props(None, props)
        if props.get("is_sleeping") is True:
            return False
        return self._slots(None, await get(client, "/slots", PATIENCE_SECONDS))

    async def _look_at_models(self, client: httpx.AsyncClient) -> bool:
        told = _object(await get(client, "/models", PROPS_SECONDS)).get("data")
        loaded = []
        for entry in told if isinstance(told, list) else []:
            status = entry.get("status") if isinstance(entry, dict) else None
            name = entry.get("id") if isinstance(entry, dict) else None
            if isinstance(status, dict) and status.get("value") == "loaded" and isinstance(name, str):
                loaded.append(name)
        self._board.gone(self._base_url, loaded)
        looks = [self._look_at_model(client, model) for model in loaded[:16]]
        results = await asyncio.gather(*looks, return_exceptions=True)
        return any(result is True for result in results)  # one that is going just now is no fault

    async def _look_at_model(self, client: httpx.AsyncClient, model: str) -> bool:
        params = {"model": model, "autoload": "false"}
        props = _object(await get(client, "/props", PROPS_SECONDS, params))
        self._props(model, props)
        if props.get("is_sleeping") is True:
            return False
        return self._slots(model, await get(client, "/slots", PATIENCE_SECONDS, params))

    def _props(self, model: str | None, props: Mapping[str, Any]) -> None:
        path = props.get("model_path")
        name = path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""
        self._board.props(self._base_url, model, name, props.get("is_sleeping") is True)

    def _slots(self, model: str | None, entries: Any) -> bool:
        if not isinstance(entries, list):
            raise SourceError("/slots is no list")
        self._board.slots(self._base_url, model, entries, time.time())
        return any(isinstance(entry, dict) and entry.get("is_processing") is True for entry in entries)


# the plugin


class PluginSource:
    """The plugin in a LiteLLM proxy: its status, looked at again and again, and what its stream of events tells at once."""

    name = "proxy"

    def __init__(self, board: Dashboard, base_url: str, key: str | None, pace: Pace) -> None:
        self._board, self._base_url, self._key, self._pace = board, base_url, key, pace

    async def run(self) -> None:
        """Go on for ever."""
        stream = asyncio.ensure_future(self._listen())
        try:
            await forever(self.name, self._board, self._attempt)
        finally:
            stream.cancel()

    async def once(self) -> None:
        """Look once. Raises."""
        async with open_client(self._base_url, self._key) as client:
            await self._status(client)

    async def _status(self, client: httpx.AsyncClient) -> None:
        self._board.status(_object(await get(client, "/slot-cache/status", PROPS_SECONDS)), time.time())

    async def _attempt(self, heard: Callable[[], None]) -> None:
        async with open_client(self._base_url, self._key) as client:
            while True:
                await self._status(client)
                heard()
                await asyncio.sleep(self._pace.seconds)

    async def _listen(self) -> None:
        """Follow the events. Without them the dashboard sees for itself what has changed in the status."""
        failures = 0
        while True:
            with contextlib.suppress(Exception):  # what is the matter with the proxy is told by the other one
                async with open_client(self._base_url, self._key) as client:
                    timeout = httpx.Timeout(STREAM_SECONDS, connect=CONNECT_SECONDS)
                    async with client.stream("GET", "/slot-cache/events", timeout=timeout) as response:
                        if response.status_code == 200:
                            self._board.streaming = True
                            failures = 0
                            async for kind, data in server_sent(response.aiter_bytes()):
                                self._event(kind, data)
            self._board.streaming = False
            await asyncio.sleep(backoff(failures))
            failures += 1

    def _event(self, kind: str, data: str) -> None:
        try:
            told = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(told, dict):
            return
        if isinstance(told.get("servers"), list):
            self._board.status(told, time.time())
        else:
            self._board.plugin_event({"kind": kind, **told}, time.time())


async def server_sent(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, str]]:
    """The events of a stream of server-sent events: their kind ("message" if not told) and their data."""
    kind, data, size = "message", [], 0  # type: str, list[str], int
    async for line in _lines(chunks):
        text = line.decode("utf-8", "replace").rstrip("\r")
        if not text:
            if data:
                yield kind, "\n".join(data)
            kind, data, size = "message", [], 0
            continue
        name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            size += len(value)
            if size > MOST_BYTES:
                raise SourceError("an event is too long")
            data.append(value)


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if len(rest) > MOST_BYTES:
            raise SourceError("a line is too long")
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        for line in lines:
            yield bytes(line)


# the log


class LineSplitter:
    """Bytes of a log, cut into lines. Of a line that is too long the beginning is kept."""

    def __init__(self, longest: int = LINE_BYTES) -> None:
        self._rest = b""
        self._longest = longest
        self._skipping = False

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole by now."""
        *lines, rest = (self._rest + data).split(b"\n")
        if lines and self._skipping:
            lines, self._skipping = lines[1:], False
        if self._skipping:
            rest = b""
        elif len(rest) > self._longest:
            lines.append(rest)
            rest, self._skipping = b"", True
        self._rest = rest
        return [line[: self._longest].decode("utf-8", "surrogateescape") for line in lines]

    def reset(self) -> None:
        """What comes next is the beginning of a line."""
        self._rest, self._skipping = b"", False


class _LogSource:
    name = "log"

    def __init__(self, board: Dashboard) -> None:
        self._board = board
        self._reader = LogReader()
        self._splitter = LineSplitter()

    async def run(self) -> None:
        await forever(self.name, self._board, self._attempt)

    async def _attempt(self, heard: Callable[[], None]) -> None:
        raise NotImplementedError

    def _take(self, data: bytes, *, past: bool = False) -> None:
        now = time.time()
        for line in self._splitter.feed(data):
            for event in self._reader.read(line):
                self._board.log(event, now, past=past)

    def _anew(self) -> None:
        """What comes next does not continue what came before."""
        self._splitter.reset()
        self._reader = LogReader()


class FileLog(_LogSource):
    """A log file on this machine, as it grows; when it is rotated, truncated or removed, what comes in its place."""

    def __init__(self, board: Dashboard, path: Path) -> None:
        super().__init__(board)
        self._path = path
        self._known = False

    async def once(self) -> None:
        """Read the end of what is there. Raises OSError."""
        with contextlib.closing(_Follower(self._path, at_end=True)) as follower:
            self._take(follower.read(), past=True)

    async def _attempt(self, heard: Callable[[], None]) -> None:
        first, self._known = not self._known, True
        with contextlib.closing(_Follower(self._path, at_end=first)) as follower:
            heard()
            self._anew()
            past = first
            while True:
                moved = follower.moved()
                data = follower.read()
                if data:
                    self._take(data, past=past)
                elif moved:
                    follower.reopen()
                    self._anew()
                    heard()
                else:
                    if moved is None:  # who has it open may go on writing
                        self._board.source(self.name, False, "No such file or directory", time.time())
                    past = False
                    await asyncio.sleep(FILE_SECONDS)
                if follower.jumped:
                    self._anew()
                await asyncio.sleep(0)


class _Follower:
    """The bytes that are appended to a file."""

    def __init__(self, path: Path, *, at_end: bool) -> None:
        self._path = path
        self._fd = -1
        self._place = 0
        self._before = b""
        self._seen = (0, 0)
        self.jumped = False
        self.reopen()
        if at_end:
            self._skip_to(os.fstat(self._fd).st_size - BACKLOG_BYTES)

    def reopen(self) -> None:
        """Begin with the file that has this name now. Raises OSError."""
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise SourceError("it is no file")
        self.close()
        self._fd, self._place, self._before, self.jumped = fd, 0, b"", False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def moved(self) -> bool | None:
        """Whether the name stands for another file now; None: for none."""
        here = os.fstat(self._fd)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return None
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)

    def read(self) -> bytes:
        """What has been appended, b"" for nothing. `jumped` tells whether it does not continue what was read before."""
        self.jumped = False
        told = os.fstat(self._fd)
        size, changed = told.st_size, (told.st_size, told.st_mtime_ns) != self._seen
        self._seen = (told.st_size, told.st_mtime_ns)
        if size < self._place or (changed and not self._continues()):  # copytruncate
            self._place, self._before, self.jumped = 0, b"", True
            with contextlib.suppress(OSError):  # a writer that goes on where it was leaves a hole
                self._place = os.lseek(self._fd, 0, os.SEEK_DATA)
        if size - self._place > FAR_BEHIND_BYTES:
            self._skip_to(size - BACKLOG_BYTES)
        data = os.pread(self._fd, READ_BYTES, self._place)
        self._place += len(data)
        self._before = (self._before + data)[-64:]
        return data

    def _continues(self) -> bool:
        """Whether the bytes before this place are still those that were read."""
        return os.pread(self._fd, len(self._before), self._place - len(self._before)) == self._before

    def _skip_to(self, place: int) -> None:
        if place > 0:
            skipped = os.pread(self._fd, BACKLOG_BYTES, place)
            self._place, self._before, self.jumped = place + skipped.find(b"\n") + 1, b"", True


@dataclass(frozen=True)
class Remote:
    """A log file on another machine."""

    host: str
    path: str
    user: str | None = None
    port: int | None = None

    def command(self, lines: int) -> list[str]:
        """The arguments of ssh: nothing of host, user and path can be taken for an option or a command, here or there."""
        target = f"{self.user}@{self.host}" if self.user else self.host
        options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
        options += ["-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes"]
        if self.port is not None:
            options += ["-p", str(self.port)]
        return ["ssh", *options, "--", target, f"exec tail -n {lines} -F -- {shlex.quote(self.path)}"]


def parse_remote(url: str) -> Remote:
    """`ssh://user@host:port/path`. User and port are left to ssh's own config where they are not given.

    Raises:
        SourceError: it is another URL, or holds what no name of a user, a host or a file does.
    """
    if not url.isprintable():
        raise SourceError("the ssh URL holds a control character")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise SourceError("the ssh URL is none: ssh://user@host:port/path") from None
    if parts.scheme != "ssh" or parts.query or parts.fragment or "?" in url or "#" in url:
        raise SourceError("the ssh URL is none: ssh://user@host:port/path (? and # in a path are %3F and %23)")
    credentials, at, place = parts.netloc.rpartition("@")
    if at and not _USER.fullmatch(credentials):
        raise SourceError("the ssh URL's user is refused: letters, digits, . _ and - only, and no password")
    host = place if port is None and not place.endswith(":") else place.rpartition(":")[0]
    if not _HOST.fullmatch(host) or ".." in host:
        raise SourceError("the ssh URL's host is refused: letters, digits, . _ and - only, and not at its beginning")
    path = unquote(parts.path, errors="surrogateescape")
    if len(path) < 2 or path.endswith("/"):
        raise SourceError("the ssh URL names no file: ssh://user@host/var/log/llama-server.log")
    if not path.isprintable():
        raise SourceError("the ssh URL's path holds a control character")
    return Remote(host.strip("[]"), path, credentials or None, port)


class SshLog(_LogSource):
    """A log file on another machine, through the system's ssh with its keys and its config."""

    def __init__(self, board: Dashboard, remote: Remote) -> None:
        super().__init__(board)
        self._remote = remote
        self._known = False

    async def once(self, seconds: float = 3.0) -> None:
        """Read the last lines, for so many seconds at most. Raises."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(seconds, self._attempt(lambda: None))

    async def _attempt(self, heard: Callable[[], None]) -> None:
        first = not self._known
        process = await asyncio.create_subprocess_exec(
            *self._remote.command(SSH_LINES if first else 0),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the monitor
        )
        said = asyncio.ensure_future(_last_words(process.stderr))
        quiet = asyncio.get_running_loop().call_later(QUIET_SECONDS, heard)
        try:
            self._anew()
            until: float | None = None
            while data := await _read(process.stdout):
                heard()
                self._known = True
                until = until or time.monotonic() + BACKLOG_SECONDS
                self._take(data, past=first and time.monotonic() < until)
            await process.wait()
            await asyncio.wait({said}, timeout=1.0)
            words = said.result() if said.done() else ""
            raise SourceError(words or f"ssh has ended ({process.returncode})")
        finally:
            quiet.cancel()
            said.cancel()
            await _end(process)


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    return b"" if stream is None else await stream.read(64 * 1024)


async def _last_words(stream: asyncio.StreamReader | None) -> str:
    """The last line of what a program has to say, which may be much."""
    words = b""
    while data := await _read(stream):
        words = (words + data)[-2000:]
    lines = [line for line in words.decode("utf-8", "replace").splitlines() if line.strip()]
    return clean(lines[-1])[:200] if lines else ""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    ended = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait({ended}, timeout=1.0)
    finally:
        if not ended.done():
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def log_source(board: Dashboard, where: str) -> FileLog | SshLog:
    """The source for `--log`. Raises SourceError."""
    if where.startswith("ssh:"):
        return SshLog(board, parse_remote(where))
    if "://" in where:
        raise SourceError("--log takes a path or ssh://user@host/path")
    return FileLog(board, Path(where).expanduser())


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SourceError("the answer is no object")
    return value
