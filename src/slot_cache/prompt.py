"""Fingerprints of prompts: what two prompts share and where they part, told without keeping any text.

A prompt is a row of messages, a message a row of pieces (text, a tool call, an image), and a piece is cut into blocks of
`BLOCK_CHARS` characters. Each block's hash covers the one before it, so two prompts share exactly as many leading blocks
as their chains are equal. Chat, Anthropic messages and responses requests give the same chain where they say the same.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

BLOCK_CHARS = 256
"""Characters of a block: where two prompts part is known to within so many."""

_LINK_BYTES = 8

_ROLES = frozenset({"tools", "system", "user", "assistant", "tool", "prompt"})
"""Roles that are told; one that a client made up is text of the client."""


FINE_CHARS = 32
FINE_UNTIL = 512
"""A bare prompt is one text that grows: its last block changes with each turn. So that a short one is known again, its
first `FINE_UNTIL` characters are cut into blocks of `FINE_CHARS`."""


def _end_of(role: str, block: int) -> int:
    """Where a block of a piece ends, in characters."""
    fine = FINE_UNTIL // FINE_CHARS if role == "prompt" else 0
    if block < fine:
        return (block + 1) * FINE_CHARS
    return fine * FINE_CHARS + (block + 1 - fine) * BLOCK_CHARS


def _blocks_of(role: str, chars: int) -> int:
    fine = FINE_UNTIL if role == "prompt" else 0
    if chars <= fine:
        return max(1, -(-chars // FINE_CHARS))
    return max(1, fine // FINE_CHARS - (-(chars - fine) // BLOCK_CHARS))


@dataclass(frozen=True)
class Span:
    """One message of a prompt: who speaks, and the lengths of its pieces in characters."""

    role: str
    pieces: tuple[int, ...]

    @property
    def chars(self) -> int:
        """The message's length in characters."""
        return sum(self.pieces)

    @property
    def blocks(self) -> int:
        """How many blocks of the chain it takes."""
        return sum(_blocks_of(self.role, chars) for chars in self.pieces)

    def chars_of(self, blocks: int) -> int:
        """How many characters its first blocks hold."""
        total = 0
        for chars in self.pieces:
            taken = min(blocks, _blocks_of(self.role, chars))
            total += min(_end_of(self.role, taken - 1), chars) if taken > 0 else 0
            blocks -= taken
        return total


@dataclass(frozen=True)
class Prompt:
    """A prompt's fingerprint: 8 bytes for every `BLOCK_CHARS` characters, and no text.

    Attributes:
        packed: the links of the chain, one after the other.
        spans: the messages.
    """

    packed: bytes
    spans: tuple[Span, ...]

    @property
    def preamble(self) -> int:
        """How many links the tools and system messages at its beginning take."""
        total = 0
        for span in self.spans:
            if span.role not in ("tools", "system"):
                break
            total += span.blocks
        return total

    @property
    def chars(self) -> int:
        """The prompt's length in characters."""
        return sum(span.chars for span in self.spans)

    @property
    def opening(self) -> bytes:
        """The links up to and including the first user message: what a conversation says again in every request."""
        total = 0
        for span in self.spans:
            if span.role not in ("tools", "system", "user"):
                break
            total += span.blocks
            if span.role == "user":
                break
        return self.packed[: total * _LINK_BYTES]

    @property
    def chain(self) -> tuple[bytes, ...]:
        """The links."""
        return tuple(_link(self.packed, number) for number in range(len(self.packed) // _LINK_BYTES))


@dataclass(frozen=True)
class _Piece:
    role: str
    kind: str
    text: str


def fingerprint(request: Mapping[str, Any]) -> Prompt:
    """The fingerprint of a request's prompt: of `messages` (chat or Anthropic, with `system`), `input` (responses, with
    `instructions`) or `prompt`, and of `tools`.

    Whatever is of an unknown shape counts as its JSON. Takes about 2 ms for a million characters. Raises nothing.
    """
    chain: list[bytes] = []
    spans: list[Span] = []
    link = b""
    for role, pieces in _messages(request):
        for piece in pieces:
            link = _digest(link, f"{role}\0{piece.kind}".encode("utf-8", "surrogatepass"))
            start = 0
            for number in range(_blocks_of(role, len(piece.text))):
                end = _end_of(role, number)
                block, start = piece.text[start:end], end
                link = _digest(link, block.encode("utf-8", "surrogatepass"))
                chain.append(link)
        spans.append(Span(role if role in _ROLES else "unknown", tuple(len(piece.text) for piece in pieces)))
    return Prompt(b"".join(chain), tuple(spans))


def pieces_of(request: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """The messages of a request's prompt, in order: who speaks, and the texts of its pieces. One for each span."""
    for role, pieces in _messages(request):
        yield role if role in _ROLES else "unknown", [piece.text for piece in pieces]


def shared_blocks(one: Prompt, other: Prompt) -> int:
    """How many leading blocks two prompts share."""
    return shared_links(one.packed, other.packed)


def shared_links(one: bytes, other: bytes) -> int:
    """How many leading links two packed chains share. Takes microseconds."""
    low, high = 0, min(len(one), len(other)) // _LINK_BYTES
    while low < high:  # a link covers all before it: those that are equal come first
        middle = (low + high + 1) // 2
        if _link(one, middle - 1) == _link(other, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


def shares(one: bytes, other: bytes, count: int) -> bool:
    """Whether two packed chains share at least so many leading links, one or more. Much quicker than to count them."""
    at = (count - 1) * _LINK_BYTES
    return len(one) >= at + _LINK_BYTES and other.startswith(one[at : at + _LINK_BYTES], at)


def shared_chain(one: bytes, other: bytes) -> bytes:
    """The packed chain of what two prompts begin with."""
    return one[: shared_links(one, other) * _LINK_BYTES]


def links(packed: bytes) -> int:
    """How many links a packed chain has."""
    return len(packed) // _LINK_BYTES


def shared_part(packed: bytes, other: bytes) -> float:
    """The share of the blocks of one packed chain that another one begins with; 1.0 for an empty one."""
    total = links(packed)
    return shared_links(packed, other) / total if total else 1.0


def _link(packed: bytes, number: int) -> bytes:
    return packed[number * _LINK_BYTES : (number + 1) * _LINK_BYTES]


@dataclass(frozen=True)
class Parting:
    """Where a prompt first differs from another one: the number of the message, counted from 0 (as many as it has: it does
    not), and how many of its characters come before that."""

    message: int
    chars: int


def parting(last: Prompt, now: Prompt) -> Parting:
    """Where `now` first differs from `last`."""
    same, rest = _same_messages(last, now, shared_blocks(last, now))
    chars = sum(span.chars for span in now.spans[:same])
    return Parting(same, chars + (now.spans[same].chars_of(rest) if same < len(now.spans) else 0))


def tell_difference(last: Prompt, now: Prompt) -> str:
    """In words, where a prompt first differs from the last one of its session."""
    shared = shared_blocks(last, now)
    same, rest = _same_messages(last, now, shared)
    if same == len(now.spans):
        if len(last.packed) == len(now.packed):
            return "the prompt is the same"
        return f"the first {_count(same, 'message')} are the same, the end was cut"
    if same == len(last.spans):
        new = len(now.spans) - same
        return f"the first {_count(same, 'message')} are the same, {_count(new, 'new message')} follow{'s' if new == 1 else ''}"
    span = now.spans[same]
    return (
        f"the first {_count(same, 'message')} are the same, message {same + 1} ({span.role}) is the same for its first "
        f"{span.chars_of(rest)} of {span.chars} characters"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _same_messages(last: Prompt, now: Prompt, blocks: int) -> tuple[int, int]:
    """How many whole messages two prompts share, that share so many blocks, and how many blocks are left of the next."""
    same = 0
    for one, other in zip(last.spans, now.spans, strict=False):
        if one != other or one.blocks > blocks:
            break
        same += 1
        blocks -= one.blocks
    return same, blocks


def _digest(link: bytes, data: bytes) -> bytes:
    return blake2b(link + data, digest_size=_LINK_BYTES).digest()


def _messages(request: Mapping[str, Any]) -> Iterator[tuple[str, list[_Piece]]]:
    """The messages, in order; neighbouring pieces of the assistant are one message in every shape."""
    role, pieces = "", []  # type: tuple[str, list[_Piece]]
    for piece, starts in _pieces(request):
        if pieces and (piece.role != role or (starts and piece.role != "assistant")):
            yield role, pieces
            pieces = []
        role = piece.role
        pieces.append(piece)
    if pieces:
        yield role, pieces


def _pieces(request: Mapping[str, Any]) -> Iterator[tuple[_Piece, bool]]:
    """Every piece of the prompt, and whether a message starts with it."""
    tools = request.get("tools")
    if isinstance(tools, Sequence) and not isinstance(tools, str) and tools:
        for tool in tools:
            yield _Piece("tools", "tool", _json(_tool(tool))), False
    for name in ("system", "instructions"):
        if request.get(name):
            yield from _starting(_content("system", request[name]))
    if "messages" in request:
        yield from _rows(request["messages"])
    elif "input" in request:
        yield from _rows(request["input"])
    elif "prompt" in request:
        prompt = request["prompt"]
        yield _Piece("prompt", "text", prompt if isinstance(prompt, str) else _json(prompt)), True


def _rows(rows: object) -> Iterator[tuple[_Piece, bool]]:
    if isinstance(rows, str):
        rows = [{"role": "user", "content": rows}]
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        rows = [rows]
    for row in rows:
        yield from _starting(_row(row))


def _starting(pieces: Iterable[_Piece]) -> Iterator[tuple[_Piece, bool]]:
    """Mark the first piece, and each tool's answer, as the beginning of a message."""
    last = ""
    for piece in pieces:
        yield piece, piece.role != last or piece.role == "tool"
        last = piece.role


def _row(row: object) -> Iterator[_Piece]:
    if not isinstance(row, Mapping):
        yield _Piece("unknown", "json", _json(row))
        return
    kind = row.get("type")
    if kind == "function_call":
        yield _call(row.get("name"), row.get("arguments"))
        return
    if kind == "function_call_output":
        yield _Piece("tool", "text", _plain(row.get("output")))
        return
    if kind == "reasoning":
        yield _Piece("assistant", "reasoning", _plain(row.get("summary") or row.get("content")))
        return
    if kind not in (None, "message") and "content" not in row:
        yield _Piece("assistant" if str(kind).endswith("_call") else "unknown", "json", _json(row))
        return
    role = row.get("role")
    role = "system" if role == "developer" else role if isinstance(role, str) else "unknown"
    if role in ("tool", "function"):
        yield _Piece("tool", "text", _plain(row.get("content")))
        return
    reasoning = row.get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        yield _Piece(role, "reasoning", reasoning)
    yield from _content(role, row.get("content"))
    if isinstance(row.get("function_call"), Mapping):  # the form before tool_calls
        yield _call(row["function_call"].get("name"), row["function_call"].get("arguments"))
    calls = row.get("tool_calls")
    if isinstance(calls, Sequence) and not isinstance(calls, str):
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                yield _call(function.get("name"), function.get("arguments"))
            else:
                yield _Piece("assistant", "call", _json(call))


def _content(role: str, content: object) -> Iterator[_Piece]:
    if content is None or content == "" or content == []:
        return
    if isinstance(content, str):
        yield _Piece(role, "text", content)
        return
    if not isinstance(content, Sequence):
        yield _Piece(role, "json", _json(content))
        return
    for block in content:
        if isinstance(block, str):
            yield _Piece(role, "text", block)
            continue
        if not isinstance(block, Mapping):
            yield _Piece(role, "json", _json(block))
            continue
        kind = block.get("type")
        text = block.get("text")
        if isinstance(text, str):
            yield _Piece(role, "text", text)
        elif kind == "tool_use":
            yield _call(block.get("name"), block.get("input"))
        elif kind == "tool_result":
            yield _Piece("tool", "text", _plain(block.get("content")))
        elif kind == "thinking":
            yield _Piece(role, "reasoning", _plain(block.get("thinking")))
        else:
            yield _Piece(role, "media", _media(block))


def _call(name: object, arguments: object) -> _Piece:
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON (yet), or too deep: as it is
            arguments = json.loads(arguments)
    return _Piece("assistant", "call", f"{name}\0{_json(arguments)}")


def _tool(tool: object) -> object:
    """A tool's definition in one shape: chat nests it in `function`, Anthropic says `input_schema`."""
    if not isinstance(tool, Mapping):
        return tool
    function = tool.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, Mapping) else tool
    if "name" not in inner:
        return dict(tool)
    schema = inner.get("parameters", inner.get("input_schema"))
    return [inner.get("name"), inner.get("description"), schema]


def _plain(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [block.get("text") if isinstance(block, Mapping) else block for block in content]
        if all(isinstance(text, str) for text in texts):
            return "\n".join(str(text) for text in texts)
    return "" if content is None else _json(content)


def _media(block: Mapping[str, Any]) -> str:
    """The hash of an image, a sound or a file, the same for its data in any shape."""
    for name in ("image_url", "source", "input_audio", "file", "file_data"):
        inner = block.get(name)
        if isinstance(inner, Mapping):
            inner = inner.get("url") or inner.get("data") or inner.get("file_data") or inner
        if isinstance(inner, str) and inner:
            data = inner.partition(";base64,")[2] or inner
            return blake2b(data.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return blake2b(_json(block).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _json(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr)
    except (TypeError, ValueError, RecursionError):
        return repr(type(value))
