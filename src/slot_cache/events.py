"""What happens, as it happens, for those who listen: switches, saves, restores, ends of requests, faults. No text."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, Literal

MOST_WAITING_EVENTS = 500
"""So many events wait for one listener at most; a slower one loses the oldest, and is told how many."""

MOST_LISTENERS = 32

Kind = Literal["ask", "save", "restore", "erase", "switch", "request", "evict", "restart", "load", "unload", "fault"]


@dataclass(frozen=True)
class Event:
    """Something that has happened. What does not apply is None.

    Attributes:
        kind: `ask`: a request wants a slot; `save`, `restore`, `erase`: the server did so with a slot; `switch`: a request
            has its slot and goes to the server; `request`: it has ended and its usage is known; `evict`: a file was
            deleted to keep a limit; `restart`: a server was found started again; `load`, `unload`: a router's model;
            `fault`: something did not work.
        at: when, seconds since the epoch.
        server: the server's address, and the model where it is one of several.
        slot: the slot's number.
        key: the cache that it is about.
        session: 32 hex digits that stand for the session.
        route: the model_name.
        outcome: of a request.
        tokens: saved, restored, or there for the request.
        bytes: of the file.
        seconds: what it took; of a `switch` and a `request`, what the request waited.
        reused, computed: tokens of a request's prompt.
        cause: as in `why.CAUSES`; of a `fault`, what failed.
        words: more, for people.
    """

    kind: Kind
    server: str | None = None
    slot: int | None = None
    key: str | None = None
    session: str | None = None
    route: str | None = None
    outcome: str | None = None
    tokens: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    reused: int | None = None
    computed: int | None = None
    cause: str | None = None
    words: str | None = None
    at: float = field(default_factory=time.time)

    def told(self) -> dict[str, Any]:
        """As JSON has it: without what does not apply."""
        return {name: value for name in _NAMES if (value := getattr(self, name)) is not None}


_NAMES = tuple(entry.name for entry in fields(Event))


class Listener:
    """A queue of events for one who listens. Nobody waits for a slow one."""

    def __init__(self, most: int = MOST_WAITING_EVENTS) -> None:
        self._events: deque[Event] = deque(maxlen=most)
        self._lost = 0
        self._came = asyncio.Event()

    def put(self, event: Event) -> None:
        """Hand it an event; where there are too many already, the oldest is lost."""
        self._lost += len(self._events) == self._events.maxlen
        self._events.append(event)
        self._came.set()

    async def next(self, seconds: float) -> tuple[list[Event], int]:
        """What came since the last call, waited for so long at most, and how many events before that were lost."""
        try:
            await asyncio.wait_for(self._came.wait(), seconds)
        except asyncio.TimeoutError:
            return [], 0
        self._came.clear()
        events, lost = list(self._events), self._lost
        self._events.clear()
        self._lost = 0
        return events, lost


class Events:
    """Hands events to whoever listens. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def listen(self) -> Listener | None:
        """Begin to listen; None: too many do already. `leave` ends it."""
        if len(self._listeners) >= MOST_LISTENERS:
            return None
        listener = Listener()
        self._listeners.append(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """End listening."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def tell(self, event: Event) -> None:
        """Hand an event to all that listen. A plain call."""
        for listener in self._listeners:
            listener.put(event)
