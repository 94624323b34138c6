"""What the dashboard knows. It is fed with log events, with readings of /slots and with the plugin's status, and never asks.

Three sources may tell of the same slot. Of what a slot does the log knows first, then /slots, then the plugin; who sits there
only the plugin knows. Everything is bounded, and nothing that a source says raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slot_cache.llama_server import same_server_key, shown_url
from slot_cache.monitor import logs
from slot_cache.monitor.text import clean

MOST_SERVERS = 32
MOST_SLOTS = 256
MOST_EVENTS = 200
MOST_HISTORY = 50
MOST_CACHES = 500
MOST_TEXT = 320
"""Characters kept of what a slot generates; a quarter of them is shown."""

FRESH_SECONDS = 5.0
"""A source that has told of a slot in the last seconds is believed rather than one that knows less."""

State = Literal["unknown", "empty", "idle", "busy", "switch", "prefill", "decode"]
Kind = Literal["request", "switch", "save", "restore", "miss", "evict", "why", "warning", "server"]

_STATES: tuple[State, ...] = ("unknown", "empty", "idle", "busy", "switch", "prefill", "decode")


@dataclass(frozen=True)
class Happening:
    """A line of the events panel. `at` is seconds since the epoch; None: before the monitor began to look."""

    at: float | None
    kind: Kind
    text: str


@dataclass
class Speed:
    """Tokens a second since a counter was first seen: an average, as the server's own timings are."""

    first: tuple[float, int] | None = None
    last: tuple[float, int] | None = None

    def see(self, at: float, count: int) -> float | None:
        """Note that the counter stood at `count`; returns the speed, None while there is none to be told."""
        if self.first is None or self.last is None or count < self.last[1] or at < self.last[0]:
            self.first = (at, count)
        self.last = (at, count)
        tokens, seconds = count - self.first[1], at - self.first[0]
        return tokens / seconds if tokens > 0 and seconds > 0 else None

    def reset(self) -> None:
        self.first = self.last = None


@dataclass
class SlotView:
    """What is known of a slot. None: not known.

    Attributes:
        prompt_tokens, cached: of the last prompt, and how many of it were there.
        progress: 0 to 1 of the prompt.
        decoded, remaining: tokens of the answer.
        text: the end of what it generates, as it came.
        log_prefill, log_decode, slots_prefill, slots_decode: what is counted where; the server's clock is not ours.
        session, key: whose cache is in it; holder: who has it now, "new" for one that has no name yet.
        logged: the speeds that the log tells, so that nothing else has to.
    """

    id: int
    state: State = "unknown"
    tokens: int = 0
    context: int = 0
    task: int | None = None
    prompt_tokens: int | None = None
    cached: int | None = None
    progress: float | None = None
    decoded: int | None = None
    remaining: int | None = None
    prefill_speed: float | None = None
    decode_speed: float | None = None
    text: str = ""
    session: str | None = None
    key: str | None = None
    route: str | None = None
    messages: int | None = None
    holder: str | None = None
    outcome: str | None = None
    dirty: bool = False
    score: float | None = None
    next_to_go: bool = False
    history: deque[Happening] = field(default_factory=lambda: deque(maxlen=MOST_HISTORY))
    requests: int | None = None
    log_at: float = float("-inf")
    slots_at: float = float("-inf")
    log_prefill: Speed = field(default_factory=Speed)
    log_decode: Speed = field(default_factory=Speed)
    slots_prefill: Speed = field(default_factory=Speed)
    slots_decode: Speed = field(default_factory=Speed)
    logged: set[str] = field(default_factory=set)
    timings: dict[str, logs.Timing] = field(default_factory=dict)

    def begin(self) -> None:
        """Another request runs here."""
        self.progress = self.decoded = self.remaining = self.prompt_tokens = self.cached = None
        self.prefill_speed = self.decode_speed = None
        self.text = ""
        for speed in (self.log_prefill, self.log_decode, self.slots_prefill, self.slots_decode):
            speed.reset()
        self.logged.clear()
        self.timings.clear()

    @property
    def busy(self) -> bool:
        return self.state in ("busy", "switch", "prefill", "decode")


@dataclass
class ServerView:
    """A server, or one model of a router."""

    address: str
    model: str | None = None
    name: str = ""
    sleeping: bool = False
    waiting: int = 0
    slots: dict[int, SlotView] = field(default_factory=dict)
    prefill: float | None = None
    flags: tuple[str, ...] = ()

    def slot(self, number: int) -> SlotView:
        found = self.slots.get(number)
        if found is None:
            found = SlotView(number)
            if 0 <= number < MOST_SLOTS:
                self.slots[number] = found
        return found

    @property
    def title(self) -> str:
        return self.model or self.name or self.address


@dataclass(frozen=True)
class CacheView:
    """A saved cache."""

    key: str
    session: str | None
    route: str
    tokens: int
    size: int
    used: float
    uses: int
    created: float = 0.0


@dataclass(frozen=True)
class RouteView:
    """The saved caches of a route, and their limits (0: none, None: not known)."""

    route: str
    files: int
    size: int
    max_files: int | None
    max_bytes: int | None
    caches: tuple[CacheView, ...]


@dataclass
class SourceView:
    """A source: up, down, or (None) not heard of yet; and what is the matter with it."""

    name: str
    up: bool | None = None
    detail: str = ""


@dataclass(frozen=True)
class Totals:
    """What the plugin has done since its start."""

    requests: Mapping[str, int]
    reused: int
    computed: int
    seconds_saved: float
    saves: int
    restores: int


class Dashboard:
    """All of it. Times (`now`) are seconds of the epoch and come from outside."""

    def __init__(self, log_server: str | None = None) -> None:
        self.streaming = False
        """Whether the plugin's events are told by themselves; else they are seen in what has changed in its status."""
        self.servers: dict[tuple[str, str], ServerView] = {}
        self.sources: dict[str, SourceView] = {}
        self.events: deque[Happening] = deque(maxlen=MOST_EVENTS)
        self.routes: tuple[RouteView, ...] = ()
        self.totals: Totals | None = None
        self._log_server = log_server
        self._direct: str | None = None
        self._children: dict[int, str] = {}
        self._caches: dict[tuple[str, str], CacheView] | None = None
        self._failures: dict[str, int] | None = None
        self._told: float | None = None
        self._worker: object = None
        self._status_at = 0.0

    def server(self, address: str, model: str | None = None) -> ServerView:
        """The server at this address, made when it is new."""
        where = (_place(address), model or "")
        found = self.servers.get(where)
        if found is None:
            found = ServerView(_shown(address), model)
            if len(self.servers) < MOST_SERVERS:
                self.servers[where] = found
        return found

    @property
    def shown(self) -> list[ServerView]:
        """The servers that have slots or are all that is known."""
        told = [server for server in self.servers.values() if server.slots or server.sleeping]
        return told or list(self.servers.values())[:1]

    @property
    def waiting(self) -> int:
        return sum(server.waiting for server in self.servers.values())

    def happened(self, at: float | None, kind: Kind, text: str, slot: SlotView | None = None) -> None:
        """Note an event, in the history of a slot too."""
        entry = Happening(at, kind, clean(text[:400]))
        self.events.append(entry)
        if slot is not None:
            slot.history.append(entry)

    def source(self, name: str, up: bool | None, detail: str, now: float) -> None:
        """A source has come up, or gone away."""
        known = self.sources.setdefault(name, SourceView(name))
        if known.up is not up and up is not None and (known.up is not None or not up):
            self.happened(now, "server" if up else "warning", f"{name}: {'is back' if up else detail or 'is away'}")
        known.up, known.detail = up, detail
        if up is False and name == "server" and self._direct is not None:
            for server in self.servers.values():
                for slot in server.slots.values():
                    slot.slots_at = float("-inf")

    # llama-server's own /props and /slots

    def props(self, address: str, model: str | None, name: str, sleeping: bool) -> None:
        """What /props says."""
        server = self.server(address, model)
        self._direct = address
        server.name = name or server.name
        server.sleeping = sleeping
        if sleeping:
            for slot in server.slots.values():
                slot.begin()
                slot.state, slot.tokens = "empty", 0

    def gone(self, address: str, models: Iterable[str]) -> None:
        """The models of a router that are loaded are these; the slots of the others are no more."""
        kept, here = set(models), _place(address)
        for (where, model), server in self.servers.items():
            if where == here and model and model not in kept:
                server.slots.clear()

    def slots(self, address: str, model: str | None, entries: Iterable[Any], now: float) -> None:
        """What /slots says, at the time of its answer."""
        server = self.server(address, model)
        self._direct = address
        seen = set()
        for entry in list(entries)[:MOST_SLOTS]:
            if not isinstance(entry, dict) or _whole(entry.get("id")) is None:
                continue
            slot = server.slot(entry["id"])
            seen.add(slot.id)
            self._slot(slot, entry, now)
        for number in set(server.slots) - seen:
            del server.slots[number]

    def _slot(self, slot: SlotView, entry: Mapping[str, Any], now: float) -> None:
        slot.slots_at = now
        slot.context = _whole(entry.get("n_ctx")) or slot.context
        task, tokens = _whole(entry.get("id_task")), _whole(entry.get("n_prompt_tokens")) or 0
        told = entry.get("next_token")
        token = told[0] if isinstance(told, list) and told else told
        token = token if isinstance(token, dict) else {}
        decoded, remaining = _whole(token.get("n_decoded")) or 0, _whole(token.get("n_remain"))
        if now - slot.log_at < 1.0:  # it knows better, and this answer may have been under way
            slot.task = task if task is not None else slot.task
            return
        busy = entry.get("is_processing") is True
        if busy and (task != slot.task or not slot.busy):
            slot.begin()
        slot.task, slot.tokens = task, tokens
        if not busy:
            slot.state = "idle" if tokens else "empty"
            slot.remaining = slot.progress = None
        elif decoded:
            slot.state, slot.progress = "decode", None
            slot.decoded, slot.remaining = decoded, remaining
            slot.prompt_tokens = max(tokens - decoded, 0)
            speed = slot.slots_decode.see(now, decoded)
            if "decode" not in slot.logged:
                slot.decode_speed = speed or slot.decode_speed
        else:
            slot.state = "prefill"
            speed = slot.slots_prefill.see(now, tokens)
            if "prefill" not in slot.logged:
                slot.prefill_speed = speed or slot.prefill_speed
            if slot.prompt_tokens:
                slot.progress = min(tokens / slot.prompt_tokens, 1.0)

    # llama-server's log

    def log(self, event: logs.Line, now: float, *, past: bool = False) -> None:
        """A line of the log; `past`: it was there before the monitor began to look."""
        at = None if past else now
        if isinstance(event, logs.ChildStarted):
            self._children[event.port] = event.model
            while len(self._children) > logs.MOST_CHILDREN:
                del self._children[next(iter(self._children))]
            self.happened(at, "server", f"{event.model} is loaded")
            return
        if isinstance(event, logs.ChildEnded):
            self.happened(at, "server", f"{event.model} is unloaded")
            self._logged(None, event.model).slots.clear()
            return
        if isinstance(event, logs.Warned):
            self.happened(at, "warning", " ".join(event.text.split()))
            return
        if isinstance(event, (logs.Other, logs.Foreign)):
            return
        server = self._logged(event.child)
        if isinstance(event, logs.OfSlot):
            slot = server.slot(event.slot)
            slot.log_at = now if not past else slot.log_at
            self._slot_log(slot, event, now, at)
        elif isinstance(event, logs.AllIdle):
            for slot in server.slots.values():
                if slot.busy and slot.state != "switch":
                    self._idle(slot)
        elif isinstance(event, logs.Lifecycle):
            self._lifecycle(server, event, at)

    def _logged(self, child: int | None, model: str | None = None) -> ServerView:
        """The server that wrote a line of the log."""
        if child is not None:
            model = self._children.get(child, f"port {child}")
        if model is not None:
            known = [server for server in self.servers.values() if server.model == model]
            if len(known) == 1:
                return known[0]
        if self._log_server is not None:
            return self.server(self._log_server, model)
        if model is None and len(self.servers) == 1:
            return next(iter(self.servers.values()))
        return self.server("log", model)

    def _lifecycle(self, server: ServerView, event: logs.Lifecycle, at: float | None) -> None:
        words = {
            "starting": "the server starts",
            "ready": "the server is ready",
            "sleeping": "the server falls asleep",
            "waking": "the server wakes up",
        }
        server.sleeping = event.what == "sleeping"
        if event.what == "loading":
            server.name = event.detail.rpartition("/")[2] or server.name
            return
        self.happened(at, "server", words[event.what] + (f": {server.model}" if server.model else ""))
        if event.what in ("starting", "sleeping"):
            for slot in server.slots.values():
                slot.begin()
                slot.state, slot.tokens, slot.task = "empty", 0, None

    def _slot_log(self, slot: SlotView, event: logs.OfSlot, now: float, at: float | None) -> None:
        clock = event.at if event.at is not None else now
        if isinstance(event, logs.Started):
            slot.begin()
            slot.state, slot.task = "prefill", event.task
            slot.log_prefill.see(clock, 0)
        elif isinstance(event, logs.NewSlot):
            slot.begin()
            slot.context, slot.state, slot.tokens = event.context, "empty", 0
        elif isinstance(event, logs.Prompt):
            slot.state, slot.context, slot.prompt_tokens = "prefill", event.context, event.tokens
        elif isinstance(event, logs.Cached):
            if slot.cached is None:  # later ones, at the beginning of each batch, count what this prompt has brought
                slot.cached = event.tokens
                slot.log_prefill.reset()
            measured = slot.log_prefill.see(clock, event.tokens)
            if measured:
                slot.prefill_speed = measured
                slot.logged.add("prefill")
            self._prefill(slot, event.tokens)
        elif isinstance(event, logs.Prefilling):
            measured = event.speed or slot.log_prefill.see(clock, event.tokens)
            if measured:
                slot.prefill_speed = measured
                slot.logged.add("prefill")
            self._prefill(slot, event.tokens)
            slot.progress = event.progress
        elif isinstance(event, logs.Prefilled):
            self._prefill(slot, event.tokens)
        elif isinstance(event, logs.Token):
            if slot.state != "decode":
                slot.text = ""
                slot.log_decode.reset()
            slot.state, slot.progress = "decode", None
            slot.decoded, slot.remaining = event.decoded, event.remaining if event.remaining >= 0 else None
            if slot.prompt_tokens is not None:
                slot.tokens = slot.prompt_tokens + event.decoded
            slot.text = (slot.text + event.text)[-MOST_TEXT:]
            measured = slot.log_decode.see(clock, event.decoded)
            if measured:
                slot.decode_speed = measured
                slot.logged.add("decode")
        elif isinstance(event, logs.Timing):
            slot.timings[event.phase] = event
            slot.logged.add(event.phase)
            if event.phase == "prefill":
                slot.prefill_speed = event.speed or slot.prefill_speed
            elif event.phase == "decode":
                slot.decode_speed = event.speed if event.speed and event.tokens > 1 else slot.decode_speed
                slot.decoded = event.tokens
        elif isinstance(event, logs.Released):
            slot.tokens = event.tokens
            self._request_ended(slot, at)
            self._idle(slot)
        elif isinstance(event, logs.Cleared):
            slot.tokens = 0
            if not slot.busy:
                slot.state = "empty"

    def _prefill(self, slot: SlotView, tokens: int) -> None:
        slot.state, slot.tokens = "prefill", tokens
        slot.progress = min(tokens / slot.prompt_tokens, 1.0) if slot.prompt_tokens else None

    def _idle(self, slot: SlotView) -> None:
        slot.state = "idle" if slot.tokens else "empty"
        slot.remaining = slot.progress = None

    def _request_ended(self, slot: SlotView, at: float | None) -> None:
        prefill, decode = slot.timings.get("prefill"), slot.timings.get("decode")
        if prefill is None and decode is None:
            return
        parts = [f"slot {slot.id}:"]
        if prefill is not None:
            parts.append(f"{prefill.tokens:,} tokens computed in {prefill.milliseconds / 1e3:.2f} s{_rate(prefill)}")
            if slot.cached:
                parts.append(f"({slot.cached:,} were there)")
        if decode is not None:
            parts.append(f"+ {decode.tokens:,} generated{_rate(decode)}")
        self.happened(at, "request", " ".join(parts), slot)
        slot.timings.clear()

    # the plugin's status

    def status(self, told: Mapping[str, Any], now: float) -> None:
        """The answer of the plugin's /slot-cache/status. Unknown and malformed parts are left out."""
        first = self.streaming or self._worker != told.get("worker")  # another worker's counts are other counts
        self._worker = told.get("worker")
        servers = _objects(told.get("servers"))
        for entry in servers:
            address = entry.get("server")
            if isinstance(address, str):
                self._server_status(self._matching(address, entry, len(servers)), entry, now, first=first)
        self._routes_status(told, now)
        self._recomputed(told, now)
        totals = told.get("totals")
        if isinstance(totals, dict):
            self._totals(totals, now, first=first)

    def plugin_event(self, told: Mapping[str, Any], now: float) -> None:
        """An event of the plugin's stream."""
        kind, number = _text(told.get("kind")), _whole(told.get("slot"))
        at = _number(told.get("at")) or now
        who = short(_text(told.get("session")) or _text(told.get("key"))) or "no session"
        address, words = _text(told.get("server")), _text(told.get("words"))
        slot = self._slot_of(address, number)
        where = "" if number is None else f"slot {number}: "
        tokens, size, seconds = _whole(told.get("tokens")), _whole(told.get("bytes")), _number(told.get("seconds"))
        amounts = [f"{tokens:,} tokens"] if tokens is not None else []
        amounts += [f"{size / 1e6:,.1f} MB"] if size is not None else []
        amounts += [_lasting(seconds)] if seconds is not None else []
        if kind in ("save", "restore"):
            done: Kind = "save" if kind == "save" else "restore"
            self.happened(at, done, f"{where}{kind}d {who}: {', '.join(amounts)}", slot)
        elif kind == "switch":
            waited = f", waited {_lasting(seconds)}" if seconds else ""
            self.happened(at, "switch", f"{where}{who}{waited}{_after(words)}", slot)
        elif kind == "request":
            outcome, cause = _text(told.get("outcome")) or "-", _text(told.get("cause"))
            counts = [
                f"{name} {count:,}" for name in ("reused", "computed") if (count := _whole(told.get(name))) is not None
            ]
            ended: Kind = "why" if cause else "miss" if outcome == "cold" else "request"
            self.happened(at, ended, f"{where}{who} {', '.join([outcome, *counts])}{_after(words)}", slot)
        elif kind == "evict":
            self.happened(at, "evict", f"deleted {who}: {', '.join(amounts)}{_after(words)}")
        elif kind == "erase":
            self.happened(at, "evict", f"{where}erased{_after(words)}", slot)
        elif kind in ("restart", "load", "unload"):
            done_so = {"restart": "was started again", "load": "is loaded", "unload": "is unloaded"}[kind]
            self.happened(at, "server", f"{address or 'the server'} {done_so}{_after(words)}")
        elif kind == "fault":
            self.happened(at, "warning", words or _text(told.get("cause")) or "a fault")

    def _slot_of(self, address: str | None, number: int | None) -> SlotView | None:
        """The slot that an event of the plugin is about: by its address, else of the only server there is."""
        if number is None:
            return None
        named = [server for server in self.servers.values() if address and server.address == address.split(" ")[0]]
        if address and " " in address:
            named = [server for server in named if server.model == address.partition(" ")[2]]
        for server in named or (list(self.servers.values()) if len(self.servers) == 1 else []):
            if number in server.slots:
                return server.slots[number]
        return None

    def _matching(self, address: str, entry: Mapping[str, Any], servers: int) -> ServerView:
        """The server of the status; the one that is asked itself if the proxy knows it by another address."""
        model = entry.get("model") if isinstance(entry.get("model"), str) else None
        here = self._direct or self._log_server
        if here is not None and servers == 1 and model is None and _place(here) != _place(address):
            return self.server(here)
        return self.server(address, model)

    def _server_status(self, server: ServerView, entry: Mapping[str, Any], now: float, *, first: bool) -> None:
        server.name = _text(entry.get("name")) or server.name
        server.waiting = _whole(entry.get("waiting")) or 0
        if self._direct is None:
            server.sleeping = entry.get("sleeping") is True
        flags = tuple(name for name in ("hung", "off") if entry.get(name) is True)
        for flag in set(flags) - set(server.flags):
            text = "does not answer" if flag == "hung" else "does no slot actions"
            self.happened(now, "warning", f"{server.title} {text}: requests go on without a switch")
        server.flags = flags
        speeds = entry.get("speeds")
        if isinstance(speeds, dict):
            server.prefill = _number(speeds.get("prefill")) or None
        for told in _objects(entry.get("slots"))[:MOST_SLOTS]:
            number = _whole(told.get("id"))
            if number is not None:
                self._slot_status(server, server.slot(number), told, now, first=first)

    def _slot_status(
        self, server: ServerView, slot: SlotView, told: Mapping[str, Any], now: float, *, first: bool
    ) -> None:
        key, outcome, requests = _text(told.get("key")), _text(told.get("last_outcome")), _whole(told.get("requests"))
        session = _text(told.get("session"))
        if not first and key and key != slot.key and (slot.key or slot.requests is not None):
            before = short(slot.session or slot.key) or "nobody"
            self.happened(now, "switch", f"slot {slot.id}: {before} -> {short(session or key)}", slot)
        if not first and requests is not None and slot.requests is not None and requests > slot.requests and outcome:
            kind: Kind = "miss" if outcome == "cold" else "request"
            self.happened(now, kind, f"slot {slot.id}: {short(session or key) or 'no session'} {outcome}", slot)
        slot.key, slot.session, slot.outcome, slot.requests = key, session, outcome, requests
        held = told.get("holder_seconds") is not None
        slot.holder = (_text(told.get("holder")) or "new") if held else None
        slot.route, slot.messages = _text(told.get("route")), _whole(told.get("messages"))
        slot.dirty, slot.next_to_go = told.get("dirty") is True, told.get("next_to_go") is True
        slot.score = _number(told.get("score")) if key else None
        slot.context = slot.context or _whole(told.get("context")) or 0
        state: State = next((state for state in _STATES if state == told.get("state")), "unknown")
        fresh = now - max(slot.log_at, slot.slots_at) < FRESH_SECONDS
        if not fresh:
            slot.tokens = _whole(told.get("tokens")) or 0
            if state in ("prefill", "switch") and slot.state not in ("prefill", "switch"):
                slot.begin()
            slot.state = state
        elif state == "switch" and not slot.busy:
            slot.state = state
        text = _text(told.get("text"))
        if text and now - slot.log_at >= FRESH_SECONDS:
            slot.text = text[-MOST_TEXT:]

    def _routes_status(self, told: Mapping[str, Any], now: float) -> None:
        routes = []
        for entry in _objects(told.get("routes")):
            name = _text(entry.get("route")) or "-"
            caches = tuple(
                CacheView(
                    key=_text(cache.get("key")) or "",
                    session=_text(cache.get("session")),
                    route=name,
                    tokens=_whole(cache.get("tokens")) or 0,
                    size=_whole(cache.get("bytes")) or 0,
                    used=_number(cache.get("used")) or 0.0,
                    uses=_whole(cache.get("uses")) or 0,
                    created=_number(cache.get("created")) or 0.0,
                )
                for cache in _objects(entry.get("caches"))[:MOST_CACHES]
            )
            routes.append(
                RouteView(
                    name,
                    _whole(entry.get("files")) or 0,
                    _whole(entry.get("bytes")) or 0,
                    _whole(entry.get("max_files")),
                    _whole(entry.get("max_bytes")),
                    caches,
                )
            )
        self.routes = tuple(routes[:MOST_SERVERS])
        current = {(cache.route, cache.key): cache for route in self.routes for cache in route.caches}
        if self._caches is not None and not self.streaming:
            self._changes(self._caches, current, now)
        self._caches = current
        self._status_at = _number(told.get("now")) or now

    def _changes(
        self, before: Mapping[tuple[str, str], CacheView], after: Mapping[tuple[str, str], CacheView], now: float
    ) -> None:
        files = {route.route: route.files for route in self.routes}
        for where, cache in after.items():
            old = before.get(where)
            size = f"{cache.tokens:,} tokens, {cache.size / 1e6:,.1f} MB"
            if old is not None and cache.uses > old.uses:
                self.happened(now, "restore", f"restored {short(cache.session or cache.key)}: {size}")
            if cache.created > (old.created if old is not None else self._status_at):
                self.happened(now, "save", f"saved {short(cache.session or cache.key)}: {size}")
        for where in before.keys() - after.keys():
            if files.get(where[0], 0) == sum(1 for route, _ in after if route == where[0]):  # all of them are told
                cache = before[where]
                self.happened(now, "evict", f"deleted {short(cache.session or cache.key)}: {cache.size / 1e6:,.1f} MB")

    def _recomputed(self, told: Mapping[str, Any], now: float) -> None:
        entries = [(_number(entry.get("at")), entry) for entry in _objects(told.get("recomputed"))]
        newest = max((at for at, _ in entries if at is not None), default=0.0)
        if self._told is not None and not self.streaming:
            for at, entry in reversed(entries):
                if at is not None and at > self._told:
                    self._why(entry, at)
        self._told = max(newest, self._told or 0.0)

    def _why(self, entry: Mapping[str, Any], at: float) -> None:
        who = short(_text(entry.get("session")) or _text(entry.get("key"))) or "a request"
        again, seconds = _whole(entry.get("again")), _number(entry.get("seconds"))
        cost = f"; about {again:,} tokens again" if again else ""
        cost += f", {seconds:.1f} s" if seconds else ""
        key = _text(entry.get("key"))
        slot = next(
            (slot for server in self.servers.values() for slot in server.slots.values() if key and slot.key == key),
            None,
        )
        self.happened(at, "why", f"{who}: {_text(entry.get('why')) or 'computed again'}{cost}", slot)

    def _totals(self, told: Mapping[str, Any], now: float, *, first: bool) -> None:
        requests = told.get("requests")
        counts = {name: _whole(count) or 0 for name, count in requests.items()} if isinstance(requests, dict) else {}
        self.totals = Totals(
            counts,
            _whole(told.get("tokens_reused")) or 0,
            _whole(told.get("tokens_computed")) or 0,
            _number(told.get("prefill_seconds_saved")) or 0.0,
            _whole(told.get("saves")) or 0,
            _whole(told.get("restores")) or 0,
        )
        failed = told.get("failures")
        failures = {str(name): _whole(count) or 0 for name, count in failed.items()} if isinstance(failed, dict) else {}
        if self._failures is not None and not first:
            for name, count in failures.items():
                if count > self._failures.get(name, 0):
                    self.happened(now, "warning", f"{name}: {count}")
        self._failures = failures


def short(name: str | None) -> str:
    """A session or a cache's key, short enough for a table: the beginning of its digits, after its route's name."""
    if not name:
        return ""
    digits = name.rpartition("_")[2]
    return digits[:8] if len(digits) == 32 else name[:16]


def _shown(address: str) -> str:
    try:
        return shown_url(address)
    except ValueError:
        return "?"


def _place(address: str) -> str:
    """Equal for addresses of the same server, whatever a status holds for one."""
    try:
        return same_server_key(address)
    except ValueError:
        return address


def _lasting(seconds: float) -> str:
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.1f} s"


def _after(words: str | None) -> str:
    return f"; {words}" if words else ""


def _rate(timing: logs.Timing) -> str:
    return f" ({timing.speed:,.1f}/s)" if timing.speed and timing.tokens > 1 else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -1e300 < value < 1e300 else None


def _text(value: object) -> str | None:
    return value[:1000] if isinstance(value, str) and value else None


def _objects(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
