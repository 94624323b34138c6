"""Prompts that hold still: rules that take out, freeze or move what a client changes at the front of every request.

A prompt's cache is good up to the first token that differs. A rule names where it looks (system messages, tools, the first
user message), what it looks for, and what to do with it:

- `drop`: it is taken out;
- `freeze`: it is replaced by what stood there in the session's first request;
- `move`: it is taken out and added to the end of the last user message. What was added to a message stays with it in the
  requests that follow, or the next one would differ there.

Assistant messages and tool results are never touched, what is given is never changed, and a request that no rule matches
is given back as it is, the same object.

Expressions are matched by RE2 (google-re2), which takes time proportional to the text whatever the expression, and so
has no look-around and no back-references. Matches of one rule in one text, and characters of a text, are limited too,
since an expression that looks far ahead costs a pass for each match.

What is frozen or moved is text of the client, and has to be kept to be sent again: `FrozenTexts` keeps it in the memory
of the process, limited in number, length and time, and nowhere else.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import re2
import xxhash

Where = Literal["system", "tools", "first_user"]
Do = Literal["drop", "freeze", "move"]
Span = tuple[int, int]

LONGEST_TEXT = 1_000_000
"""A text with more characters is looked at no further than that."""

MOST_MATCHES = 64
"""So many matches of a rule in one text are heeded, the first ones."""

LONGEST_PATTERN = 1000
LARGEST_PROGRAM = 5000
"""Characters of an expression, and instructions that RE2 makes of it, at most."""

CONTEXT_CHARS = 64
"""A frozen text is known again by so many characters before and behind it."""

SESSION_SECONDS = 86_400.0
"""A session that has not been seen for so long is over: its frozen texts are forgotten."""

_ROUNDS = 8
_DEPTH = 12


class PatternError(ValueError):
    """An expression that cannot be used. The message says why."""


@dataclass(frozen=True)
class Pattern:
    """A compiled expression.

    Attributes:
        text: the expression as it was written.
        literal: what every match begins with or holds; where it is missing in a text, there is nothing to look for.
    """

    text: str
    literal: str
    _compiled: Any

    def spans(self, text: str) -> list[Span]:
        """Where it matches: the first group if there is one, else all of the match; nothing empty."""
        if self.literal not in text:
            return []
        found: list[Span] = []
        group = 1 if self._compiled.groups else 0
        try:
            for match in self._compiled.finditer(text, 0, LONGEST_TEXT):
                start, end = match.span(group)
                if end > start >= 0:
                    found.append((start, end))
                if len(found) >= MOST_MATCHES:
                    break
        except UnicodeEncodeError:  # half a character: no text that a server could be sent
            return []
        return found


def compile_pattern(text: str, literal: str | None = None) -> Pattern:
    """Compile an expression.

    Raises:
        PatternError: it is none, or too long, or matches the empty text.
    """
    if len(text) > LONGEST_PATTERN:
        raise PatternError(f"longer than {LONGEST_PATTERN} characters")
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text, options)
    except (re2.error, UnicodeEncodeError) as error:
        why = error.args[0] if error.args else error
        raise PatternError(why.decode(errors="replace") if isinstance(why, bytes) else str(why)) from None
    if compiled.programsize > LARGEST_PROGRAM:
        raise PatternError("too large: lower its repetitions")
    if compiled.search("") is not None:
        raise PatternError("it matches the empty text")
    return Pattern(text, literal_start(text) if literal is None else literal, compiled)


_META = frozenset("\\^$.|?*+()[]{}")


def literal_start(pattern: str) -> str:
    """The plain characters that every match of an expression begins with; "" where that is not plain to see."""
    if "|" in pattern:
        return ""
    end = next((number for number, char in enumerate(pattern) if char in _META), len(pattern))
    if end < len(pattern) and pattern[end] in "?*{":  # the last one may be missing
        end -= 1
    return pattern[: max(end, 0)]


@dataclass(frozen=True)
class Rule:
    """A rule, ready for use.

    Attributes:
        name: what it is called in the response header and in counters.
        where: the parts of the prompt that it looks at.
        do: what is done with what it finds.
        seconds: how long a frozen text is kept; None: as long as the session.
    """

    name: str
    where: frozenset[Where]
    pattern: Pattern
    do: Do
    seconds: float | None = None


_STAMP = (
    r"(?:"
    # 2026-11-30T18:46:15.123+01:00, 2026-11-30 18:46, 30.11.2026 18:46, 11/30/2026, 6:46:15 PM
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:T|,? +(?:at +)?)\d{1,2}:\d\d"
    # Mon Nov 30 18:46:15 UTC 2026, Monday, 30 November 2026 18:46, November 30, 2026 at 6:46 PM
    r"|(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6},? +)?"
    r"(?:\d{1,2}\.? +)?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}\.?,? +\d{1,4}(?:st|nd|rd|th)?"
    r"(?:,? +\d{4})?,? +(?:at +)?\d{1,2}:\d\d"
    # 18:46:15, 6:46 PM, and 18:46 with a label before it
    r"|\b\d{1,2}:\d\d:\d\d|\b\d{1,2}:\d\d ?[AaPp]\.?[Mm]\b"
    r"|\b(?:[Tt]ime|TIME|[Nn]ow|[Cc]lock)(?: is)?[:=]? *\d{1,2}:\d\d"
    r")"
    r"(?::\d\d)?(?:[.,]\d{1,9})?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?\(?(?:Z|[A-Z]{3,5}|(?:UTC|GMT)?[+-]\d\d?:?\d\d)\)?\b)?(?: \d{4}\b)?"
)

_LABEL = (
    r"(?:\b(?:(?:[Tt]he |[Tt]oday's )?(?:[Cc]urrent |[Ll]ocal )?(?:[Dd]ate|[Tt]ime|[Tt]imestamp|[Nn]ow)"
    r"(?: ?(?:and|&|/) ?time)?|[Tt]oday|[Ii]t)(?: is(?: now)?)?[:=]? {0,4})?"
)
"""The words before a time, which tell the model what it is: they move along with it."""

_UUID = r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"

CLAUDE_CODE = Rule(
    "claude_code",
    frozenset({"system"}),
    compile_pattern(
        r"\A(?:x-anthropic-billing-header:(?:[ \t]*[\w.-]+=[^;\s]*;?)*[ \t\r]*(?:\n+|\z))+",
        "x-anthropic-billing-header:",
    ),
    "drop",
)
"""The line with a checksum that Claude Code puts before its system prompt. It means nothing to a local model."""

READY: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("times", frozenset({"system"}), compile_pattern(_LABEL + _STAMP, ":"), "move"),
        Rule(
            "uuids",
            frozenset({"system"}),
            compile_pattern(r"\b[A-Za-z][A-Za-z0-9_. -]{0,30}[\"']?[:=] ?[\"']?(" + _UUID + ")", "-"),
            "freeze",
        ),
        Rule(
            "git_status",
            frozenset({"system"}),
            # to the end of the recent commits, each a line that starts with a hash
            compile_pattern(
                r"gitStatus: This is the git status at the start of the conversation\."
                r"[^\n]*\n(?:\n?(?:Current branch|Main branch|Git user)[^\n]*\n)*"
                r"(?:\n?Status:[^\n]*\n(?:[^\n]+\n)*)?(?:\n?Recent commits:[^\n]*(?:\n[0-9a-f]{7,40} [^\n]*)*)?",
            ),
            "freeze",
        ),
    )
}
"""Rules by name, for what is common. None of them is on unless it is asked for."""


class FrozenTexts:
    """Texts that are sent again in place of what a client sends now. In memory only.

    Safe to use from several threads.
    """

    def __init__(self, number: int = 10_000, chars: int = 8_000_000, longest: int = 64_000) -> None:
        self.number, self.chars, self.longest = number, chars, longest
        self._texts: OrderedDict[bytes, tuple[str, float, float]] = OrderedDict()
        self._chars = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def get(self, key: bytes, now: float) -> str | None:
        """The text of a key, if it is still kept."""
        with self._lock:
            return self._get(key, now)

    def put(self, key: bytes, text: str, now: float, seconds: float | None = None) -> None:
        """Keep a text for so long, or for as long as its session is seen. One that is too long is not kept."""
        with self._lock:
            self._put(key, text, now, seconds)

    def first(self, key: bytes, text: str, now: float, seconds: float | None = None) -> str:
        """The text that is kept for a key; if there is none, this one is from now on."""
        with self._lock:
            held = self._get(key, now)
            if held is None:
                self._put(key, text, now, seconds)
            return text if held is None else held

    def _get(self, key: bytes, now: float) -> str | None:
        found = self._texts.get(key)
        if found is None:
            return None
        text, ends, _ = found
        if now >= ends or now - found[2] >= SESSION_SECONDS:
            self._drop(key)
            return None
        self._texts[key] = (text, ends, now)
        self._texts.move_to_end(key)
        return text

    def _put(self, key: bytes, text: str, now: float, seconds: float | None) -> None:
        self._drop(key)
        if len(text) > self.longest:
            return
        self._texts[key] = (text, float("inf") if seconds is None else now + seconds, now)
        self._chars += len(text)
        while len(self._texts) > self.number or self._chars > self.chars:
            self._drop(next(iter(self._texts)))
        while self._texts and now - next(iter(self._texts.values()))[2] >= SESSION_SECONDS:
            self._drop(next(iter(self._texts)))

    def _drop(self, key: bytes) -> None:
        found = self._texts.pop(key, None)
        if found is not None:
            self._chars -= len(found[0])


def steadied(
    request: Mapping[str, Any],
    rules: Sequence[Rule],
    frozen: FrozenTexts,
    *,
    session: str,
    by_content: bool = False,
    now: float,
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """A request as the rules have it, and the names of the rules that did something.

    Args:
        request: what holds the prompt: `messages` with `system`, or `input` with `instructions`, and `tools`.
        rules: the rules, in order.
        frozen: what earlier requests had.
        session: whose request it is; texts of two sessions are never mixed.
        by_content: `session` names no conversation: its first user message tells which one it is.
        now: a clock, in seconds.

    Returns:
        The same object where nothing was to be done. Else a new mapping, which lacks a field (`system`, `instructions`)
        that nothing is left of, and shares with the given one what was not changed.
    """
    work = _Work(request, rules, frozen, session, by_content, now)
    return work.result()


class _Work:
    """One request on its way through the rules."""

    def __init__(
        self,
        request: Mapping[str, Any],
        rules: Sequence[Rule],
        frozen: FrozenTexts,
        session: str,
        by_content: bool,
        now: float,
    ) -> None:
        self.request, self.frozen, self.now = request, frozen, now
        self.rows_name = "messages" if "messages" in request else "input"
        rows = request.get(self.rows_name)
        self.rows: str | Sequence[Any] = rows if isinstance(rows, (str, list, tuple)) else ()
        self.last_user = _last_user(self.rows)
        self.rules = [rule for rule in rules if rule.do != "move" or self.last_user is not None]
        self.done: set[str] = set()
        self.moved: list[str] = []
        self.seen: Counter[bytes] = Counter()
        self.session, self.by_content = session, by_content
        self._salt: bytes | None = None

    def result(self) -> tuple[Mapping[str, Any], tuple[str, ...]]:
        changed: dict[str, Any] = {}
        if self._rules("tools") and self.request.get("tools"):
            self._note(changed, "tools", self._described(self.request["tools"], 0))
        if self._rules("system"):
            for name in ("system", "instructions"):
                if self.request.get(name):
                    self._note(changed, name, self._content(self.request[name], "system"))
        rows = self._rows()
        if self.moved:
            rows = self._with_moved(rows)
        if rows is not self.rows:
            changed[self.rows_name] = rows
        if all(self.request.get(name) == value for name, value in changed.items()):
            return self.request, ()  # also where what was moved stands where it stood
        kept = {name: value for name, value in {**self.request, **changed}.items() if value is not _NOTHING}
        return kept, tuple(dict.fromkeys(rule.name for rule in self.rules if rule.name in self.done))

    def _note(self, changed: dict[str, Any], name: str, value: Any) -> None:
        if value is not self.request[name]:
            changed[name] = value

    def _rules(self, where: Where) -> list[Rule]:
        return [rule for rule in self.rules if where in rule.where]

    # the messages

    def _rows(self) -> str | Sequence[Any]:
        if isinstance(self.rows, str):
            return self._text(self.rows, "first_user")
        system, first = self._rules("system"), bool(self._rules("first_user"))
        rows: list[Any] = []
        changed = False
        for row in self.rows:
            new: Any = row
            role = row.get("role") if isinstance(row, Mapping) else None
            if system and role in ("system", "developer"):
                new = self._row(row, "system")
            elif first and role == "user" and _says_something(row):
                new, first = self._row(row, "first_user"), False
            changed = changed or new is not row
            if new is not _NOTHING:
                rows.append(new)
        return rows if changed else self.rows

    def _row(self, row: Any, where: Where) -> Any:
        old = row.get("content")
        new = self._content(old, where)
        if new is old:
            return row
        if new is _NOTHING:
            return _NOTHING if where == "system" else {**row, "content": ""}
        return {**row, "content": new}

    def _content(self, content: Any, where: Where) -> Any:
        """A text, or a row of blocks, after the rules; `_NOTHING` where they leave nothing of it."""
        if isinstance(content, str):
            text = self._text(content, where)
            return text if text or not content else _NOTHING
        if not isinstance(content, (list, tuple)):
            return content
        blocks: list[Any] = []
        changed = False
        for block in content:
            old = _text_of(block)
            new = None if old is None else self._text(old, where)
            if new == old or new is None:
                blocks.append(block)
                continue
            changed = True
            if new:
                blocks.append(new if isinstance(block, str) else {**block, "text": new})
        if not changed:
            return content
        return blocks or _NOTHING

    def _described(self, value: Any, depth: int) -> Any:
        """Definitions of tools: every `description` in them is looked at."""
        if depth > _DEPTH:
            return value
        if isinstance(value, Mapping):
            new: dict[Any, Any] = {}
            for name, inner in value.items():
                said = name == "description" and isinstance(inner, str)
                new[name] = self._text(inner, "tools") if said else self._described(inner, depth + 1)
            return new if any(new[name] is not inner for name, inner in value.items()) else value
        if isinstance(value, (list, tuple)):
            row = [self._described(inner, depth + 1) for inner in value]
            return row if any(one is not other for one, other in zip(row, value, strict=True)) else value
        return value

    # one text

    def _text(self, text: str, where: Where) -> str:
        """A text after the rules; the same object where there was nothing to do."""
        rules = self._rules(where)
        cutting = [rule for rule in rules if rule.do != "freeze"]
        for _ in range(_ROUNDS):  # what is left may come together as something to be cut
            found = _found(text, cutting)
            for start, end, rule in found:
                self.done.add(rule.name)
                if rule.do == "move":
                    self.moved.append(text[start:end])
            if not found:
                break
            text = _without(text, found)
            if len(found) >= MOST_MATCHES:
                break
        found = _found(text, [rule for rule in rules if rule.do == "freeze"])
        return self._frozen(text, found, where) if found else text

    def _frozen(self, text: str, found: list[tuple[int, int, Rule]], where: Where) -> str:
        rest = _without(text, found)
        parts: list[str] = []
        done, cut = 0, 0
        for start, end, rule in found:
            place = start - cut
            before, behind = rest[max(place - CONTEXT_CHARS, 0) : place], rest[place : place + CONTEXT_CHARS]
            key = self._key("frozen", rule.name, where, before, behind)
            self.seen[key] += 1
            key = _digest(key, str(self.seen[key]))
            now = text[start:end]
            held = self.frozen.first(key, now, self.now, rule.seconds)
            if held != now:
                self.done.add(rule.name)
            parts += (text[done:start], held)
            done, cut = end, cut + end - start
        new = "".join((*parts, text[done:]))
        return text if new == text else new

    def _key(self, *parts: str) -> bytes:
        if self._salt is None:
            said = ""
            if self.by_content:
                said = self._first_said()
            self._salt = _digest(b"", self.session, said)
        return _digest(self._salt, *parts)

    def _first_said(self) -> str:
        """The first user message without what the rules would cut or freeze there."""
        if isinstance(self.rows, str):
            said = self.rows
        else:
            rows = (row for row in self.rows if isinstance(row, Mapping) and row.get("role") == "user")
            said = next((_said(row) for row in rows if _says_something(row)), "")
        return _without(said, _found(said, self._rules("first_user")))

    # what was moved

    def _with_moved(self, rows: str | Sequence[Any]) -> str | Sequence[Any]:
        """Add what was moved to the last user message, and to those before it what they had when they were the last."""
        moved = "\n".join(self.moved)
        if isinstance(rows, str):
            return f"{rows}\n\n{moved}"
        kind = "input_text" if self.rows_name == "input" else "text"
        last = _last_user(rows)
        new = list(rows)
        for number, row in enumerate(rows):
            if not (isinstance(row, Mapping) and row.get("role") == "user" and _says_something(row)):
                continue
            key = self._key("moved", _said(row))
            self.seen[key] += 1
            key = _digest(key, str(self.seen[key]))
            if number != last:
                held = self.frozen.get(key, self.now)
            elif number + 1 < len(rows):  # answers of tools follow: it was sent before
                held = self.frozen.first(key, moved, self.now)
            else:
                held = moved
                self.frozen.put(key, moved, self.now)
            if held is not None:
                new[number] = {**row, "content": _longer(row.get("content"), held, kind)}
        return new


_NOTHING: Any = type("_Nothing", (), {"__repr__": lambda self: "nothing"})()


def _found(text: str, rules: Sequence[Rule]) -> list[tuple[int, int, Rule]]:
    """Where rules match, in order, without overlaps: what starts first counts, then the rule that comes first."""
    found = [(start, number, end) for number, rule in enumerate(rules) for start, end in rule.pattern.spans(text)]
    kept: list[tuple[int, int, Rule]] = []
    done = 0
    for start, number, end in sorted(found):
        if start >= done:
            kept.append((start, end, rules[number]))
            done = end
    return kept


def _without(text: str, found: Sequence[tuple[int, int, Rule]]) -> str:
    parts, done = [], 0
    for start, end, _ in found:
        parts.append(text[done:start])
        done = end
    return "".join((*parts, text[done:]))


def _text_of(block: Any) -> str | None:
    """The text of a block of text, None for any other block."""
    if isinstance(block, str):
        return block
    if isinstance(block, Mapping) and block.get("type") in (None, "text", "input_text"):
        text = block.get("text")
        return text if isinstance(text, str) else None
    return None


def _says_something(row: Any) -> bool:
    """Whether a user message holds anything but results of tools."""
    content = row.get("content")
    if isinstance(content, (list, tuple)):
        return any(not (isinstance(block, Mapping) and block.get("type") == "tool_result") for block in content)
    return isinstance(content, str)


def _last_user(rows: str | Sequence[Any]) -> int | None:
    if isinstance(rows, str):
        return 0
    for number in range(len(rows) - 1, -1, -1):
        row = rows[number]
        if isinstance(row, Mapping) and row.get("role") == "user" and _says_something(row):
            return number
    return None


def _said(row: Mapping[str, Any]) -> str:
    content = row.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    return "\0".join(_text_of(block) or "" for block in content)


def _longer(content: Any, text: str, kind: str) -> Any:
    if isinstance(content, str):
        return f"{content}\n\n{text}" if content else text
    return [*content, {"type": kind, "text": text}]


def _digest(salt: bytes, *parts: str) -> bytes:
    made = xxhash.xxh3_128(salt)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)
    return made.digest()
