"""What one process has counted since its start, and tells those who look: the status, the events, the metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from slot_cache import metrics, report
from slot_cache.events import Event, Events
from slot_cache.state import Outcome
from slot_cache.why import Recomputed

MOST_RECOMPUTED = 100
"""Of so many requests it is told why they reused less than they could."""

SAVED_BY = (
    "tokens reused by requests whose outcome was restored or donor, at the prefill speed measured of the same server and "
    "model (nothing is counted while that is not known), without what their switches took; resident requests do not count: "
    "the server has these tokens by itself"
)


@dataclass
class Tally:
    """Counts of requests, and the last ones that were computed again. Nothing here raises.

    Attributes:
        started: seconds since the epoch.
        requests: by outcome.
        reused, computed: tokens of prompts.
        waited: seconds.
        seconds_saved: prefill, as `SAVED_BY` says.
        recomputed: the last ones, the newest at the end.
        events: those who listen.
    """

    started: float = field(default_factory=time.time)
    requests: Counter[str] = field(default_factory=lambda: Counter({outcome.value: 0 for outcome in Outcome}))
    reused: int = 0
    computed: int = 0
    waited: float = 0.0
    seconds_saved: float = 0.0
    recomputed: deque[Recomputed] = field(default_factory=lambda: deque(maxlen=MOST_RECOMPUTED))
    events: Events = field(default_factory=Events)
    _once: report.Once = field(default_factory=report.Once)

    def note(self, event: Event) -> None:
        """Something has happened."""
        try:
            if event.kind == "request":
                self.requests[event.outcome or "-"] += 1
                self.reused += event.reused or 0
                self.computed += event.computed or 0
                self.waited += event.seconds or 0.0
            if self.events.heard:
                self.events.tell(event)
            if (counted := metrics.shared()) is not None:
                counted.note(event)
        except Exception as error:
            self._once.bug("counting", error)

    def spared(self, route: str, seconds: float) -> None:
        """A request of a route has spared so many seconds of prefill; fewer than none, where the switch took longer."""
        self.seconds_saved += seconds
        try:
            if (counted := metrics.shared()) is not None:
                counted.spared(route, seconds)
        except Exception as error:
            self._once.bug("counting", error)

    def now(self, server: str, busy: int, waiting: int, prefill: float) -> None:
        """How things are at a server, see `metrics.Metrics.now`."""
        try:
            if (counted := metrics.shared()) is not None:
                counted.now(server, busy, waiting, prefill)
        except Exception as error:
            self._once.bug("counting", error)

    def stored(self, route: str, files: int, size: int) -> None:
        """What is saved of a route."""
        try:
            if (counted := metrics.shared()) is not None:
                counted.stored(route, files, size)
        except Exception as error:
            self._once.bug("counting", error)
