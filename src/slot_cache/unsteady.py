"""Finds what a client changes at the front of every request: which message, from where to where, and what it costs.

Of the early part of a prompt (tools, system, first user message) a conversation keeps the hashes of small blocks, in
memory only. When that part differs in a later request, the place is found to within `BLOCK` characters at either end,
also where what stands there has changed its length: the blocks behind it are looked for in the text that is at hand. A
place that differs again and again, while what surrounds it stays, is told with the shape of what stands there now, and
with the rule that would help. No text is kept.

Hashes are Python's own, salted for each process: they tell nothing elsewhere.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from slot_cache.prompt import Prompt, pieces_of
from slot_cache.steady import CLAUDE_CODE, READY

BLOCK = 16
"""Characters of a block of the early part."""

MESSAGE_CHARS = 16_384
EARLY_CHARS = 65_536
"""So many characters of a message, and of all of the early part, are looked at."""

WINDOW = 2048
"""What changes is at most so long; what stands behind it is looked for so far."""

TIMES = 3
"""A place is told of when it has differed from the request before so many times."""

_SESSIONS = 2000
_BLOCKS = 2_000_000
_TRACKS = 4
_PLACES = 16
_NEAR = 64
_SURE = 2
_ROLES = ("tools", "system", "user")


@dataclass
class Place:
    """A place in the early part of a conversation that has changed.

    Attributes:
        message: the message's number, from 1.
        role: who speaks there.
        start: the first character that may differ, in the last request.
        end: the character behind the last one that may differ.
        chars: the message's length.
        shape: what stands there, such as `5 hex digits`.
        rule: the rule that would help, as it is written in a configuration.
        times: how often it differed from the request before.
        behind: the part of the prompt that stands behind it, from 0 to 1.
        tokens: about how many tokens behind it were computed again, so far as known.
        seconds: how long that took, so far as known.
        due: it is told when it has differed so many times, and again when twice as many.
    """

    message: int
    role: str
    start: int
    end: int
    chars: int
    shape: str
    rule: str
    times: int = 0
    behind: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    due: int = TIMES

    def tell(self) -> str:
        """It in words."""
        cost = f"; about {self.tokens} tokens behind it were computed again" if self.tokens else ""
        spent = f" in {self.seconds:.1f} s" if self.tokens and self.seconds else ""
        return (
            f"message {self.message} ({self.role}) differs in {self.times} of its requests from about character "
            f"{self.start} to {self.end} of {self.chars} ({self.shape}), and is the same around it{cost}{spent}; "
            f"this would help: {self.rule}"
        )


@dataclass(eq=False)
class _Track:
    """The early part of one conversation's last prompt."""

    early: bytes
    """a hash of the fingerprint up to the first user message"""
    messages: tuple[_Sketch, ...]
    places: list[Place] = field(default_factory=list)
    tokens: int = 0

    @property
    def blocks(self) -> int:
        return sum(len(sketch.blocks) for sketch in self.messages)


@dataclass(frozen=True)
class _Sketch:
    role: str
    chars: int
    blocks: array[int]


@dataclass(frozen=True)
class _Text:
    role: str
    text: str
    pieces: tuple[int, ...]
    chars: int


@dataclass(frozen=True)
class Seen:
    """What one request showed: the places that it differs at from the one before, the first one first."""

    places: tuple[Place, ...]
    track: _Track


class Finder:
    """The early parts of the conversations of this process, so many sessions and so many blocks (of 8 bytes) at most.

    Safe to use from several threads.
    """

    def __init__(self, sessions: int = _SESSIONS, blocks: int = _BLOCKS) -> None:
        self._sessions: OrderedDict[str, list[_Track]] = OrderedDict()
        self._most, self._most_blocks, self._blocks = sessions, blocks, 0
        self._lock = threading.Lock()

    def see(self, session: str, request: Mapping[str, Any], prompt: Prompt, by_content: bool = False) -> Seen:
        """Compare a request with the one before of its conversation.

        Args:
            session: whose request it is; which of its conversations, its content tells.
            request: what holds the prompt.
            prompt: its fingerprint.
            by_content: `session` names no conversation: its first user message tells which one it is.

        Takes microseconds where the early part is as it was, else about a millisecond.
        """
        early = blake2b(prompt.opening, digest_size=16).digest()
        if by_content:
            session = f"{session} {hash(_first_said(request))}"
        with self._lock:
            tracks = self._sessions.pop(session, [])
            self._sessions[session] = tracks
            for number, track in enumerate(tracks):
                if track.early == early:
                    tracks.insert(0, tracks.pop(number))
                    return Seen((), track)
            before = sum(track.blocks for track in tracks)
            seen = self._changed(tracks, early, _early_texts(request), prompt)
            self._blocks += sum(track.blocks for track in tracks) - before
            while len(self._sessions) > self._most or (self._blocks > self._most_blocks and len(self._sessions) > 1):
                _, forgotten = self._sessions.popitem(last=False)
                self._blocks -= sum(track.blocks for track in forgotten)
            return seen

    def _changed(self, tracks: list[_Track], early: bytes, texts: Sequence[_Text], prompt: Prompt) -> Seen:
        """A request whose early part none of a session's conversations had: which one it is of, and what is new in it."""
        best: tuple[int, _Track, list[_Change]] | None = None
        for track in tracks:
            compared = _compare(track.messages, texts)
            if compared is not None and (best is None or compared[0] > best[0]):
                best = (compared[0], track, compared[1])
        sketches = tuple(_sketch(text) for text in texts)
        if best is None:
            track = _Track(early, sketches)
            tracks.insert(0, track)
            del tracks[_TRACKS:]
            return Seen((), track)
        _, track, changes = best
        track.early, track.messages = early, sketches
        tracks.remove(track)
        tracks.insert(0, track)
        goes_on = any(span.role == "assistant" for span in prompt.spans)
        places = tuple(
            _note(track, change, texts, prompt)
            for change in changes
            if goes_on or texts[change.message].role != "user"  # another question is another conversation
        )
        return Seen(places, track)

    def charge(self, seen: Seen, tokens: int, computed: int, seconds: float) -> list[Place]:
        """Note what a request has cost when its answer is there: its tokens, how many were computed, and for how long.

        Returns the places that are now to be told: at the third time, and whenever that has doubled, for who keeps count.
        """
        with self._lock:
            last, seen.track.tokens = seen.track.tokens, tokens or seen.track.tokens
            if not seen.places:
                return []
            first = seen.places[0]  # all that was computed again stands behind the first one
            again = min(computed, int(last * first.behind))
            if again > 0:
                first.tokens += again
                first.seconds += seconds * again / computed
            due = [place for place in seen.places if place.times >= place.due]
            for place in due:
                place.due *= 2
            return due


@dataclass(frozen=True)
class _Change:
    """Characters `start` to `end` of a message of the request are not those of the one before."""

    message: int
    start: int
    end: int


def _first_said(request: Mapping[str, Any]) -> str:
    rows = {name: request[name] for name in ("messages", "input", "prompt") if name in request}
    return next(("".join(pieces) for role, pieces in pieces_of(rows) if role in ("user", "prompt")), "")


def _early_texts(request: Mapping[str, Any]) -> list[_Text]:
    texts: list[_Text] = []
    left = EARLY_CHARS
    for role, pieces in pieces_of(request):
        if role not in _ROLES:
            break
        most = min(MESSAGE_CHARS, left)
        text = "".join(pieces)
        texts.append(_Text(role, text[:most], tuple(map(len, pieces)), len(text)))
        left -= min(len(text), most)
        if role == "user":
            break
    return texts


def _sketch(text: _Text) -> _Sketch:
    return _Sketch(text.role, text.chars, array("q", _hashes(text.text)))


def _hashes(text: str) -> list[int]:
    return [hash(text[start : start + BLOCK]) for start in range(0, len(text), BLOCK)]


def _compare(old: Sequence[_Sketch], new: Sequence[_Text]) -> tuple[int, list[_Change]] | None:
    """How many characters two early parts share, and where they differ; None if they are of two conversations."""
    if [one.role for one in old] != [one.role for one in new]:
        return None
    total, shared, changes = 0, 0, []  # type: tuple[int, int, list[_Change]]
    for number, (one, other) in enumerate(zip(old, new, strict=True)):
        same, found, closed = _differences(one, other)
        if not closed:  # to the end of the message: what surrounds it is the next one
            start, end = found.pop()
            if number + 1 < len(new) and max(one.chars, end) - start <= WINDOW:
                found.append((start, end))
        changes += [_Change(number, start, end) for start, end in found]
        total += max(len(other.text), 1)
        shared += same
    return (shared, changes) if shared * 2 >= total else None


def _differences(old: _Sketch, new: _Text) -> tuple[int, list[tuple[int, int]], bool]:
    """Characters that are the same, where the others are, and whether the messages are the same at their ends."""
    blocks, text = old.blocks, new.text
    cut = len(text) < new.chars or len(blocks) * BLOCK < old.chars
    old_at, new_at, same = 0, 0, 0
    found: list[tuple[int, int]] = []
    while True:
        while old_at < len(blocks) and hash(text[new_at : new_at + BLOCK]) == blocks[old_at]:
            length = min(BLOCK, len(text) - new_at)
            same += length
            new_at += length
            old_at += 1
            if new_at >= len(text):
                break
        if old_at >= len(blocks) and new_at >= len(text):
            return same, found, True
        if cut and (old_at + _SURE >= len(blocks) or new_at + _SURE * BLOCK >= len(text)):
            return same, found, True  # what follows is not looked at
        again = _again(blocks, old_at, text, new_at) if len(found) < _PLACES else None
        if again is None:
            found.append((new_at, len(text)))
            return same, found, False
        found.append((new_at, again[1]))
        old_at, new_at = again


def _again(blocks: array[int], old_at: int, text: str, new_at: int) -> tuple[int, int] | None:
    """The first place from where on text and blocks are the same again: the block's number and the character's."""
    where: dict[int, list[int]] = {}
    for number in range(old_at, min(old_at + WINDOW // BLOCK, len(blocks))):
        where.setdefault(blocks[number], []).append(number)
    best: tuple[int, int] | None = None
    least = WINDOW  # the nearest in both: texts repeat themselves, and not only here
    for start in range(new_at, min(new_at + WINDOW, len(text))):
        if start - new_at >= least:
            break
        for number in where.get(hash(text[start : start + BLOCK]), ()):
            far = max(start - new_at, (number - old_at) * BLOCK)
            if far < least and _goes_on(blocks, number, text, start):
                best, least = (number, start), far
    return best


def _goes_on(blocks: array[int], number: int, text: str, start: int) -> bool:
    """Whether a text is that of the blocks from a place on, for as long as is enough to be sure."""
    sure = range(1, min(_SURE + 1, len(blocks) - number))
    return start + len(sure) * BLOCK < len(text) and all(
        hash(text[start + more * BLOCK : start + (more + 1) * BLOCK]) == blocks[number + more] for more in sure
    )


def _note(track: _Track, change: _Change, texts: Sequence[_Text], prompt: Prompt) -> Place:
    text = texts[change.message]
    for place in track.places:
        if (
            place.message == change.message + 1
            and place.start - _NEAR <= change.end
            and change.start <= place.end + _NEAR
        ):
            break
    else:
        place = Place(change.message + 1, text.role, change.start, change.end, text.chars, "", "")
        track.places.append(place)
        del track.places[:-_PLACES]
    # what has a field of many digits may differ in its last ones now and in all of them at another time
    near = place.times and abs(place.start - change.start) <= _NEAR and abs(place.end - change.end) <= _NEAR
    place.start = min(place.start, change.start) if near else change.start
    place.end = max(place.end, change.end) if near else change.end
    place.chars, place.times = text.chars, place.times + 1
    place.shape = shape_of(text.text, place.start, place.end)
    place.rule = _rule_for(text, place.start, place.end)
    total = sum(span.chars for span in prompt.spans)
    before = sum(span.chars for span in prompt.spans[: change.message]) + change.start
    place.behind = 1 - before / total if total else 0.0
    return place


_SHAPES = (
    ("a UUID", re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")),
    ("a date and a time", re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:T|,? )\d{1,2}:\d\d(?::\d\d)?")),
    ("a time", re.compile(r"\d{1,2}:\d\d(?::\d\d)?")),
    ("a date", re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[/.]\d{1,2}[/.]\d{4}|\d{1,2}/\d{1,2}/\d{2}")),
    ("hex digits", re.compile(r"(?<![0-9A-Za-z])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{3,64}(?![0-9A-Za-z])")),
    ("digits", re.compile(r"\d{1,64}")),
)


def shape_of(text: str, start: int, end: int) -> str:
    """What stands at a place, without saying it: `a date`, `5 hex digits`, `30 characters`."""
    while start > 0 and end - start < 200 and _joins(text[start - 1]):
        start -= 1
    while end < len(text) and end - start < 240 and _joins(text[end]):
        end += 1
    rest, told = text[start : min(end, start + 400)], []  # type: tuple[str, list[str]]
    for name, pattern in _SHAPES:
        longest = max((len(found[0]) for found in pattern.finditer(rest)), default=0)
        if not longest:
            continue
        rest = pattern.sub(" ", rest)
        told.append(f"{longest} {name}" if name.endswith("digits") else name)
    return " and ".join(told[:2]) if told else f"{end - start} characters"


def _joins(char: str) -> bool:
    return char.isalnum() or char in "-:.+_/"


def _rule_for(text: _Text, start: int, end: int) -> str:
    """The rule that would hold a place still, as it is written in a configuration."""
    where = "first_user" if text.role == "user" else text.role
    at = 0
    for chars in text.pieces:
        if at + chars > start:
            break
        at += chars
    else:
        chars = 0
    piece = text.text[at : at + chars]
    for rule in (CLAUDE_CODE, *READY.values()):
        if any(one + at < end and start < other + at for one, other in rule.pattern.spans(piece)):
            if rule is CLAUDE_CODE:
                return "steady: {claude_code: true}"
            if where in rule.where:
                return f"steady: {{rules: [{rule.name}]}}"
            return f"steady: {{rules: [{{name: {rule.name}, where: {where}}}]}}"
    return f"steady: {{rules: [{{name: ..., where: {where}, pattern: ..., do: freeze}}]}}"
