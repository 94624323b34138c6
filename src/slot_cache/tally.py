"""What one process has counted since its start, for those who look: the status, the events, the metrics."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

from slot_cache.state import Outcome
from slot_cache.why import Recomputed

MOST_RECOMPUTED = 100
"""Of so many requests it is told why they reused less than they could."""

SAVED_BY = (
    "tokens reused by requests whose outcome was restored or donor, at the prefill speed measured of the same server and "
    "model (nothing is counted while that is not known), without what the switches took; resident requests do not count: "
    "the server has these tokens by itself"
)


@dataclass
class Tally:
    """Counts of requests, and the last ones that were computed again.

    Attributes:
        started: seconds since the epoch.
        requests: by outcome.
        reused, computed: tokens of prompts.
        waited: seconds.
        seconds_saved: prefill, as `SAVED_BY` says.
        recomputed: the last ones, the newest at the end.
    """

    started: float = field(default_factory=time.time)
    requests: Counter[str] = field(default_factory=lambda: Counter({outcome.value: 0 for outcome in Outcome}))
    reused: int = 0
    computed: int = 0
    waited: float = 0.0
    seconds_saved: float = 0.0
    recomputed: deque[Recomputed] = field(default_factory=lambda: deque(maxlen=MOST_RECOMPUTED))
