"""Lines of llama-server's log, of builds old and new, and what they tell.

    0.11.405.752 I slot print_timing: id  1 | task 0 | prompt eval time = 2333.49 ms / 691 tokens (...)
    slot process_toke: id  1 | task 0 | n_decoded = 3, n_remaining = 9, next token:   284 ' and'
    [52819] 0.04.970.179 I slot launch_slot_: id  0 | task 0 | processing task, is_child = 0

A log comes from another program and holds text of its clients: nothing here raises, whatever a line holds, and every pattern
takes time linear in the line.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeVar

from slot_cache.monitor.text import without_escapes

Kept = TypeVar("Kept")

MOST_CHARACTERS = 4096
"""What of a line is read: all that matters is at its beginning."""

MOST_CHILDREN = 64
PIECE_LINES = 8
"""A token that holds line breaks takes so many lines at most."""

_CHILD = re.compile(r"\[(\d{1,5})\] ?")
_STAMP = re.compile(r"(\d{1,6})\.(\d\d)\.(\d{3})\.(\d{3}) ([DIWE]) ")
_SLOT = re.compile(r"(?:slot|srv) +[\w()]{1,40}: id +(\d{1,6}) \| task (-?\d{1,12}) \| ?")
_MODULE = re.compile(r"(slot|srv|que|cmn|spec|res|main) +[\w():]{1,40}: ")
_FUNCTION = re.compile(r"\w{1,60}: ")

_TOKEN = re.compile(r"n_(?:gen|decoded) = (\d{1,9}), n_remaining = (-?\d{1,12}), next token: {1,8}-?\d{1,9} '")
_TIMING = re.compile(r" {0,12}(prompt eval|eval|total) time = {0,12}([\d.]{1,20}) ms / {0,12}(\d{1,9}) tokens")
_SPEED = re.compile(r"([\d.]{1,20}) tokens per second")
_PROMPT = re.compile(
    r"new prompt, n_ctx_slot = (\d{1,9}), .{0,60}(?:task\.n_tokens|n_prompt_tokens|num_tokens) = (\d{1,9})"
)
_CACHED = re.compile(
    r"(?:cached n_tokens = (\d{1,9}), |n_past = (\d{1,9}), )?(?:memory_seq_rm|kv cache rm) \[(\d{1,9}), end\)"
)
_PROGRESS = re.compile(
    r"prompt processing(?: progress)?, (?:n_tokens|n_past) = {0,12}(\d{1,9}), .{0,60}?progress = {0,4}([\d.]{1,12})"
)
_PROGRESS_SPEED = re.compile(r"t = {0,12}([\d.]{1,12}) s / {0,12}([\d.]{1,20}) tokens per second")
_DONE = re.compile(r"prompt (?:processing )?done, (?:n_tokens|n_past) = (\d{1,9})")
_RELEASED = re.compile(r"stop processing: (?:n_tokens|n_past) = (\d{1,9}), truncated = (\d)")
_STARTED = re.compile(r"processing task(?:, is_child = \d)?$")
_CHOSEN = re.compile(r"selected slot by (id|LRU|LCP similarity|lcp similarity)")
_CLEARED = re.compile(r"clearing (?:prompt|slot) with \d{1,9} tokens")
_NEW_SLOT = re.compile(r"new slot,? n_ctx(?:_slot)? = (\d{1,9})")
_SPAWNED = re.compile(r"spawning server instance with name=(\S{1,200}) on port (\d{1,5})")
_EXITED = re.compile(r"instance name=(\S{1,200}) exited")
_MODEL = re.compile(r"loading model '([^']{1,500})'")


@dataclass(frozen=True)
class Line:
    """What every event has.

    Attributes:
        child: the port of the router's child that wrote it, None for a server that is no child.
        at: seconds since that server started, by its own clock; None: the build does not tell.
    """

    child: int | None
    at: float | None


@dataclass(frozen=True)
class OfSlot(Line):
    """An event of one slot and, if it is not -1, one task."""

    slot: int
    task: int


@dataclass(frozen=True)
class Started(OfSlot):
    """A request has got the slot."""


@dataclass(frozen=True)
class Chosen(OfSlot):
    """Why the request has got this slot: `id`, `LRU` or `LCP similarity`."""

    how: str


@dataclass(frozen=True)
class Prompt(OfSlot):
    """The whole prompt's tokens, and the context of the slot."""

    context: int
    tokens: int


@dataclass(frozen=True)
class Cached(OfSlot):
    """So many tokens are there already."""

    tokens: int


@dataclass(frozen=True)
class Prefilling(OfSlot):
    """So many tokens of the prompt are there by now, which is `progress` (0 to 1) of it.

    seconds, speed   since its beginning, and tokens a second; None: the build does not tell
    """

    tokens: int
    progress: float
    seconds: float | None
    speed: float | None


@dataclass(frozen=True)
class Prefilled(OfSlot):
    """The prompt has been computed."""

    tokens: int


@dataclass(frozen=True)
class Token(OfSlot):
    """A token was generated. `text` may hold anything, halves of characters (as surrogates) and escape sequences too."""

    decoded: int
    remaining: int
    text: str


@dataclass(frozen=True)
class Timing(OfSlot):
    """What the server measured, at the end of a request."""

    phase: Literal["prefill", "decode", "total"]
    milliseconds: float
    tokens: int
    speed: float | None


@dataclass(frozen=True)
class Released(OfSlot):
    """The request has ended; so many tokens stay in the slot."""

    tokens: int
    truncated: bool


@dataclass(frozen=True)
class Cleared(OfSlot):
    """The slot was emptied."""


@dataclass(frozen=True)
class NewSlot(OfSlot):
    """A slot of a server that is starting."""

    context: int


@dataclass(frozen=True)
class AllIdle(Line):
    """No request runs."""


@dataclass(frozen=True)
class Lifecycle(Line):
    """The server itself: `starting`, `loading` (detail: the model), `ready`, `sleeping`, `waking`."""

    what: Literal["starting", "loading", "ready", "sleeping", "waking"]
    detail: str = ""


@dataclass(frozen=True)
class ChildStarted(Line):
    """A router has started a server for a model."""

    model: str
    port: int


@dataclass(frozen=True)
class ChildEnded(Line):
    """A router's server for a model has ended."""

    model: str


@dataclass(frozen=True)
class Warned(Line):
    """A line at the level W or E."""

    level: Literal["W", "E"]
    text: str


@dataclass(frozen=True)
class Other(Line):
    """A line of llama-server that tells nothing of interest here."""


@dataclass(frozen=True)
class SlotOther(OfSlot):
    """A line of a slot that tells nothing of interest here."""


@dataclass(frozen=True)
class Foreign(Line):
    """A line of another shape: the rest of a message of several lines, or somebody else's output."""


class LogReader:
    """Reads the lines of one log in their order. What it remembers is bounded.

    Two things span lines: a token that holds a line break, and the timings of old builds, whose first line alone names the slot.
    """

    def __init__(self) -> None:
        self._pending: OrderedDict[int | None, tuple[Token, int]] = OrderedDict()
        self._timed: OrderedDict[int | None, OfSlot] = OrderedDict()

    def read(self, line: str) -> list[Line]:
        """The events of a line, without its line break. There may be none yet, or two."""
        line = without_escapes(line[:MOST_CHARACTERS]).rstrip("\r\n").lstrip("\0")
        child, rest = _child(line)
        waiting = self._pending.pop(child, None)
        event = _event(child, rest)
        if waiting is None:
            return self._kept(child, event, rest)
        token, lines = waiting
        if not isinstance(event, Foreign):
            return [_with_text(token, token.text), *self._kept(child, event, rest)]
        closed = rest.endswith("'")
        token = _with_text(token, f"{token.text}\n{rest[:-1] if closed else rest}")
        if closed or lines >= PIECE_LINES:
            return [token]
        _put(self._pending, child, (token, lines + 1))
        return []

    def _kept(self, child: int | None, event: Line, rest: str) -> list[Line]:
        """Keep what the next lines belong to."""
        if isinstance(event, Token):
            if event.text.endswith("'"):
                return [_with_text(event, event.text[:-1])]
            _put(self._pending, child, (event, 1))
            return []
        if isinstance(event, Foreign):
            timed = self._timed.get(child)
            if timed is not None:
                timing = _timing(rest, timed)
                return [timing or event]
        elif isinstance(event, OfSlot) and "print_timing" in rest:
            _put(self._timed, child, OfSlot(event.child, event.at, event.slot, event.task))
        else:
            self._timed.pop(child, None)
        return [event]


def _put(kept: OrderedDict[int | None, Kept], child: int | None, value: Kept) -> None:
    kept[child] = value
    while len(kept) > MOST_CHILDREN:
        kept.popitem(last=False)


def _with_text(token: Token, text: str) -> Token:
    return Token(token.child, token.at, token.slot, token.task, token.decoded, token.remaining, text[:256])


def _child(line: str) -> tuple[int | None, str]:
    found = _CHILD.match(line)
    return (int(found[1]), line[found.end() :]) if found else (None, line)


def _event(child: int | None, line: str) -> Line:
    """What a line tells by itself. The text of a `Token` still has the quotation mark at its end, if it is on this line."""
    at, level = None, ""
    stamp = _STAMP.match(line)
    if stamp:
        minutes, seconds, milli, micro = (int(part) for part in stamp.groups()[:4])
        at, level = minutes * 60 + seconds + milli / 1e3 + micro / 1e6, stamp[5]
        line = line[stamp.end() :]
    slot = _SLOT.match(line)
    if slot:
        found = _slot_event(OfSlot(child, at, int(slot[1]), int(slot[2])), line[slot.end() :])
        if found is not None:
            return found
    module = _MODULE.match(line)
    if module:
        found_line = _server_event(child, at, line[module.end() :])
        if found_line is not None:
            return found_line
    if level in ("W", "E"):
        return Warned(child, at, "W" if level == "W" else "E", line[:400])
    if slot:
        return SlotOther(child, at, int(slot[1]), int(slot[2]))
    if module or stamp or _FUNCTION.match(line):
        return Other(child, at)
    return Foreign(child, at)


def _slot_event(of: OfSlot, text: str) -> OfSlot | None:
    at = (of.child, of.at, of.slot, of.task)
    if found := _TOKEN.match(text):
        return Token(*at, int(found[1]), int(found[2]), text[found.end() :])
    if timing := _timing(text, of):
        return timing
    if found := _PROGRESS.match(text):
        speed = _PROGRESS_SPEED.search(text, found.end())
        progress = _number(found[2])
        if progress is None:
            return None
        told = (_number(speed[1]), _number(speed[2])) if speed else (None, None)
        return Prefilling(*at, int(found[1]), min(progress, 1.0), *told)
    if _STARTED.match(text):
        return Started(*at)
    if found := _PROMPT.match(text):
        return Prompt(*at, int(found[1]), int(found[2]))
    if found := _CACHED.match(text):
        return Cached(*at, int(found[1] or found[2] or found[3]))
    if found := _DONE.match(text):
        return Prefilled(*at, int(found[1]))
    if found := _RELEASED.match(text):
        return Released(*at, int(found[1]), found[2] != "0")
    if found := _CHOSEN.match(text):
        return Chosen(*at, found[1])
    if _CLEARED.match(text):
        return Cleared(*at)
    if found := _NEW_SLOT.match(text):
        return NewSlot(*at, int(found[1]))
    return None


def _timing(text: str, of: OfSlot) -> Timing | None:
    found = _TIMING.match(text)
    milliseconds = _number(found[2]) if found else None
    if found is None or milliseconds is None:
        return None
    speed = _SPEED.search(text, found.end())
    phase: Literal["prefill", "decode", "total"] = (
        "prefill" if found[1] == "prompt eval" else "decode" if found[1] == "eval" else "total"
    )
    return Timing(
        of.child, of.at, of.slot, of.task, phase, milliseconds, int(found[3]), _number(speed[1]) if speed else None
    )


def _server_event(child: int | None, at: float | None, text: str) -> Line | None:
    if text == "all slots are idle":
        return AllIdle(child, at)
    if text.startswith("initializing ..."):
        return Lifecycle(child, at, "starting")
    if found := _MODEL.match(text):
        return Lifecycle(child, at, "loading", found[1])
    if text == "model loaded":
        return Lifecycle(child, at, "ready")
    if text.startswith("server is entering sleeping state"):
        return Lifecycle(child, at, "sleeping")
    if text.startswith("server is exiting sleeping state"):
        return Lifecycle(child, at, "waking")
    if found := _SPAWNED.match(text):
        return ChildStarted(child, at, found[1], int(found[2]))
    if found := _EXITED.match(text):
        return ChildEnded(child, at, found[1])
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
