"""The monitor: sources, dashboard, screen and keys together."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from slot_cache.monitor.keys import KeyParser, Terminal
from slot_cache.monitor.model import Dashboard, SlotView
from slot_cache.monitor.options import Options
from slot_cache.monitor.sources import FileLog, Pace, PluginSource, ServerSource, SshLog, described, log_source
from slot_cache.monitor.text import clean
from slot_cache.monitor.view import TEXT_CHARACTERS, Look, Screen, selectable

RATES = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
DRAWS_PER_SECOND = 10.0


Source = ServerSource | PluginSource | FileLog | SshLog


class Monitor:
    """One monitor. `SourceError` for a `log` that is none."""

    def __init__(self, options: Options) -> None:
        self.pace = Pace(options.rate)
        self.board = Dashboard(options.server)
        self.sources: list[Source] = []
        if options.server is not None:
            self.sources.append(ServerSource(self.board, options.server, options.server_key, self.pace))
        if options.log is not None:
            self.sources.append(log_source(self.board, options.log))
        if options.proxy is not None:
            self.sources.append(PluginSource(self.board, options.proxy, options.key, self.pace))
        for source in self.sources:
            self.board.source(source.name, None, "", time.time())
        self.look = Look(rate=options.rate)
        self._frozen: Dashboard | None = None
        self._changed = asyncio.Event()
        self._code: int | None = None

    # for scripts

    async def once(self) -> None:
        """Look once at every source, and twice at a server where a request runs: its speed is a difference."""
        await asyncio.gather(*(self._once(source) for source in self.sources))

    async def _once(self, source: Source) -> None:
        look: Callable[[], Awaitable[None]] = source.once
        if isinstance(source, ServerSource):
            look = lambda: source.once(looks=2)  # noqa: E731 (it is that look, twice)
        try:
            await look()
        except Exception as error:
            self.board.source(source.name, False, described(error), time.time())
        else:
            self.board.source(source.name, True, "", time.time())

    async def lines(self, write: Callable[[str], None]) -> None:
        """Write a JSON object at every look, for ever."""
        tasks = [asyncio.ensure_future(source.run()) for source in self.sources]
        try:
            while True:
                await asyncio.sleep(self.pace.seconds)
                write(json.dumps(snapshot(self.board, time.time())))
        finally:
            await _cancel(tasks)

    # for people

    async def show(self, input_fd: int, output_fd: int, *, plain: bool = False) -> int:
        """Draw until somebody ends it. Returns 0 for q, 130 for a signal."""
        loop = asyncio.get_running_loop()
        self.look = replace(self.look, plain=plain)
        parser = KeyParser()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._end, 130)
        loop.add_signal_handler(signal.SIGWINCH, self._changed.set)

        def redraw() -> None:
            loop.call_soon_threadsafe(self._changed.set)

        def read() -> None:
            try:
                data = os.read(input_fd, 1024)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            if not data:  # the terminal is gone
                loop.remove_reader(input_fd)
                self._end(130)
            for key in parser.feed(data):
                self.press(key)

        tasks = [asyncio.ensure_future(source.run()) for source in self.sources]
        try:
            with Terminal(input_fd, output_fd, redraw):
                loop.add_reader(input_fd, read)
                try:
                    while self._code is None:
                        self._draw(output_fd)
                        self._changed.clear()
                        with contextlib.suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(self._changed.wait(), max(self.pace.seconds, 1 / DRAWS_PER_SECOND))
                finally:
                    loop.remove_reader(input_fd)
        finally:
            await _cancel(tasks)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH):
                loop.remove_signal_handler(number)
        return self._code

    def press(self, key: str) -> None:
        """A key was pressed."""
        look, board = self.look, self._frozen or self.board
        if key == "q":
            self._end(0)
        elif key == "p":
            self._frozen = None if look.paused else copy.deepcopy(self.board)
            self.look = replace(look, paused=not look.paused)
        elif key in ("+", "-"):
            faster = [rate for rate in reversed(RATES) if rate < look.rate]
            slower = [rate for rate in RATES if rate > look.rate]
            chosen = (faster if key == "+" else slower) or [look.rate]
            self.pace.seconds = chosen[0]
            self.look = replace(look, rate=chosen[0])
        elif key in ("up", "down", "k", "j"):
            count = selectable(board)
            if count:
                step = -1 if key in ("up", "k") else 1
                now = look.selected if look.selected is not None else (-1 if step > 0 else count)
                self.look = replace(look, selected=min(max(now + step, 0), count - 1))
        elif key == "enter":
            if look.selected is not None and look.selected < selectable(board):
                self.look = replace(look, history=not look.history)
        elif key == "escape":
            self.look = replace(look, history=False, selected=look.selected if look.history else None)
        self._changed.set()

    def _end(self, code: int) -> None:
        self._code = code if self._code is None else self._code
        self._changed.set()

    def _draw(self, output_fd: int) -> None:
        size = _size(output_fd)
        board = self._frozen or self.board
        text = frame(Screen(board, self.look, time.time(), size=size), size)
        data = b"\x1b[H" + text.replace("\n", "\x1b[K\r\n").encode("utf-8", "replace") + b"\x1b[K\x1b[J"
        with contextlib.suppress(BlockingIOError):
            while data:
                data = data[os.write(output_fd, data) :]


def frame(screen: Screen, size: tuple[int, int]) -> str:
    """A screen as text with the colours that this terminal has."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=size[0], height=size[1], legacy_windows=False)
    console.print(screen, end="")
    return stream.getvalue()


def _size(fd: int) -> tuple[int, int]:
    try:
        columns, lines = os.get_terminal_size(fd)
    except OSError:
        columns, lines = 80, 24
    return (columns or 80, lines or 24)


async def _cancel(tasks: Iterable[asyncio.Future[Any]]) -> None:
    waiting = set(tasks)
    while waiting:  # one may be lost in a library
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=0.5)


def snapshot(board: Dashboard, now: float) -> dict[str, Any]:
    """The dashboard as JSON."""
    return {
        "now": now,
        "sources": {source.name: {"up": source.up, "detail": source.detail} for source in board.sources.values()},
        "waiting": board.waiting,
        "servers": [
            {
                "address": server.address,
                "model": server.model,
                "name": server.name,
                "sleeping": server.sleeping,
                "waiting": server.waiting,
                "flags": list(server.flags),
                "slots": [_slot(slot) for _, slot in sorted(server.slots.items())],
            }
            for server in board.shown
        ],
        "routes": [asdict(route) for route in board.routes],
        "totals": None if board.totals is None else {**asdict(board.totals), "requests": dict(board.totals.requests)},
        "events": [asdict(event) for event in board.events],
    }


_SLOT_FIELDS = (
    *("id", "state", "tokens", "context", "task", "prompt_tokens", "cached", "progress", "decoded", "remaining"),
    *(
        "prefill_speed",
        "decode_speed",
        "session",
        "key",
        "holder",
        "route",
        "messages",
        "outcome",
        "dirty",
        "score",
        "next_to_go",
    ),
)


def _slot(slot: SlotView) -> dict[str, Any]:
    return {**{name: getattr(slot, name) for name in _SLOT_FIELDS}, "text": clean(slot.text)[-TEXT_CHARACTERS:]}


def run(options: Options, write: Callable[[str], None], *, once: bool, as_json: bool) -> int:
    """Run a monitor in this terminal, or have `write` print lines of JSON. Raises SourceError."""
    return asyncio.run(_run(options, write, once=once, as_json=as_json))


async def _run(options: Options, write: Callable[[str], None], *, once: bool, as_json: bool) -> int:
    monitor = Monitor(options)
    if once:
        await monitor.once()
        if as_json:
            write(json.dumps(snapshot(monitor.board, time.time())))
        else:
            print_once(monitor.board)
        return 0 if all(source.up for source in monitor.board.sources.values()) else 1
    if as_json:
        await monitor.lines(write)
    plain = "utf" not in (sys.stdout.encoding or "").lower()
    return await monitor.show(sys.stdin.fileno(), sys.stdout.fileno(), plain=plain)


def print_once(board: Dashboard) -> None:
    """The dashboard as it is now, as plain lines in a pipe."""
    console = Console(soft_wrap=False)
    width = console.size.width if console.is_terminal else 120
    plain = "utf" not in (console.encoding or "").lower()
    size = (width, 40 + selectable(board) * 2)
    console = Console(width=width)
    console.print(Screen(board, Look(plain=plain, keys=False), time.time(), size=size, fill=False))
