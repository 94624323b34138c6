"""Prometheus metrics, in prometheus_client's default registry: LiteLLM's own /metrics shows them too.

prometheus_client comes with litellm[proxy]; without it there are none. Label values are bounded: of each label so many
values are told, the others are "other", and no label has what a client wrote but a route's name.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from slot_cache.events import Event

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge, Metric

MOST_VALUES = 100
"""So many routes, and so many servers, have series of their own."""

READ_PAUSES = (0.02, 0.1, 0.3)
"""When the files of other workers are read again that could not be."""

PREFIX = "slot_cache_"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

_ACTIONS = frozenset({"save", "restore", "erase", "evict", "load", "unload", "restart"})


class _Values:
    """The values of one label."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def __call__(self, value: str | None) -> str:
        text = value or "-"
        known = self._known.get(text)
        if known is None:
            if len(self._known) >= MOST_VALUES:
                return "other"
            known = self._known[text] = "".join(char if char.isprintable() else "?" for char in text)[:120]
        return known


class Metrics:
    """The metrics of this process. There is one such object at most, see `shared`."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._route = _Values()
        self._server = _Values()
        self._now: dict[str, tuple[Gauge, Gauge]] = {}
        self.requests = Counter(
            "slot_cache_requests_total", "Requests that have ended, by outcome", ["route", "outcome"]
        )
        self.tokens = Counter(
            "slot_cache_prompt_tokens_total",
            "Tokens of prompts: reused by the server, or computed",
            ["route", "source"],
        )
        self.saved = Counter(
            "slot_cache_prefill_seconds_saved_total",
            "Prefill that restored caches have spared, estimated, without what the switches took",
            ["route"],
        )
        self.wait = Histogram(
            "slot_cache_wait_seconds", "What requests waited for a slot and the switch", ["route"], buckets=_SECONDS
        )
        self.again = Counter(
            "slot_cache_recomputed_tokens_total",
            "Tokens computed again that had been computed before",
            ["route", "cause"],
        )
        self.recomputed = Counter(
            "slot_cache_recomputed_requests_total", "Requests that reused less than they could", ["route", "cause"]
        )
        self.actions = Counter("slot_cache_actions_total", "Saves, restores and the like", ["server", "action"])
        self.bytes = Counter("slot_cache_action_bytes_total", "Bytes saved, restored and evicted", ["server", "action"])
        self.seconds = Histogram(
            "slot_cache_action_seconds", "What saves and restores took", ["server", "action"], buckets=_SECONDS
        )
        self.faults = Counter("slot_cache_faults_total", "What did not work, by kind", ["server", "kind"])
        self.busy = Gauge(
            "slot_cache_slots_busy", "Slots that requests have now", ["server"], multiprocess_mode="livesum"
        )
        self.waiting = Gauge(
            "slot_cache_waiting_requests", "Requests that wait for a slot now", ["server"], multiprocess_mode="livesum"
        )
        self.prefill = Gauge(
            "slot_cache_prefill_tokens_per_second", "Measured prefill speed", ["server"], multiprocess_mode="livemax"
        )
        self.files = Gauge("slot_cache_saved_files", "Saved caches", ["route"], multiprocess_mode="livemax")
        self.size = Gauge("slot_cache_saved_bytes", "Bytes of saved caches", ["route"], multiprocess_mode="livemax")

    def note(self, event: Event) -> None:
        """Count an event."""
        if event.kind == "request":
            route = self._route(event.route)
            self.requests.labels(route, event.outcome or "-").inc()
            self.wait.labels(route).observe(event.seconds or 0.0)
            if event.reused is not None and event.computed is not None:
                self.tokens.labels(route, "reused").inc(event.reused)
                self.tokens.labels(route, "computed").inc(event.computed)
            if event.cause is not None:
                self.recomputed.labels(route, event.cause).inc()
                self.again.labels(route, event.cause).inc(event.tokens or 0)
        elif event.kind == "fault":
            self.faults.labels(self._server(event.server), event.cause or "-").inc()
        elif event.kind in _ACTIONS:
            server = self._server(event.server)
            self.actions.labels(server, event.kind).inc()
            if event.bytes:
                self.bytes.labels(server, event.kind).inc(event.bytes)
            if event.seconds is not None:
                self.seconds.labels(server, event.kind).observe(event.seconds)

    def spared(self, route: str, seconds: float) -> None:
        """Count prefill that was spared; a switch that took longer than that spares none."""
        self.saved.labels(self._route(route)).inc(max(seconds, 0.0))

    def now(self, server: str, busy: int, waiting: int, prefill: float) -> None:
        """How things are at a server."""
        label = self._server(server)
        gauges = self._now.get(label)
        if gauges is None:
            gauges = self._now[label] = (self.busy.labels(label), self.waiting.labels(label))
        gauges[0].set(busy)
        gauges[1].set(waiting)
        if prefill:
            self.prefill.labels(label).set(prefill)

    def stored(self, route: str, files: int, size: int) -> None:
        """What is saved of a route."""
        label = self._route(route)
        self.files.labels(label).set(files)
        self.size.labels(label).set(size)


_shared: list[Metrics | None] = []


def shared() -> Metrics | None:
    """The metrics of this process, None without prometheus_client (or where it cannot have them)."""
    if not _shared:
        try:
            _shared.append(Metrics())
        except (ImportError, OSError, ValueError):  # ValueError: somebody has metrics of these names already
            _shared.append(None)
    return _shared[0]


def exposition() -> tuple[bytes, str]:
    """Our metrics as Prometheus reads them, and the content type: of all workers where PROMETHEUS_MULTIPROC_DIR is set.
    Blocks. Raises ImportError without prometheus_client."""
    from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

    for pause in READ_PAUSES:
        try:
            return generate_latest(_Ours(_registry())), CONTENT_TYPE_LATEST
        except struct.error:  # another worker has just made a file, and written nothing yet
            time.sleep(pause)
    return generate_latest(_Ours(_registry())), CONTENT_TYPE_LATEST


def _registry() -> CollectorRegistry:
    from prometheus_client import REGISTRY, CollectorRegistry

    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return REGISTRY
    from prometheus_client import multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # it has no annotations
    return registry


class _Ours:
    """A registry with our metrics of another one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        families: Iterable[Metric] = self._registry.collect()
        return (family for family in families if family.name.startswith(PREFIX))
