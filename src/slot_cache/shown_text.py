"""The last characters of an answer that is being generated, for routes that say `show_text`. Kept in memory only, while the
answer comes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SHOWN_CHARS = 80


def tail(before: str, piece: Any) -> str:
    """The last `SHOWN_CHARS` characters after one more piece of a stream, of any of the APIs."""
    return (before + text_of(piece))[-SHOWN_CHARS:]


def text_of(piece: Any) -> str:
    """The text in a piece of a stream; "" where there is none. Raises nothing that a piece's shape could cause."""
    if isinstance(piece, bytes):
        piece = piece.decode("utf-8", "replace")
    if isinstance(piece, str):
        return "".join(_of_event(_parsed(line[5:])) for line in piece.splitlines() if line.startswith("data:"))
    return _of_event(piece)


def _of_event(event: Any) -> str:
    choices = _get(event, "choices")
    if isinstance(choices, (list, tuple)):
        return "".join(_of_choice(choice) for choice in choices[:1])
    delta = _get(event, "delta")
    if isinstance(delta, str):
        kind = str(getattr(_get(event, "type"), "value", _get(event, "type")))
        return delta if kind.endswith("text.delta") else ""
    return _first(delta, "text", "thinking")


def _of_choice(choice: Any) -> str:
    return _first(_get(choice, "delta"), "content", "reasoning_content") or _first(choice, "text")


def _first(thing: Any, *names: str) -> str:
    for name in names:
        value = _get(thing, name)
        if isinstance(value, str) and value:
            return value
    return ""


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
