"""Text of others, made safe for a terminal."""

from __future__ import annotations

import re

_ESCAPES = re.compile(
    r"\x1b\[[0-?]{0,64}[ -/]{0,16}[@-~]"  # colours, cursor movements
    r"|[\x1b][\]PX^_][^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)?"  # titles, links, the clipboard
    r"|\x1b[ -/]{0,4}[0-~]"
)


def without_escapes(text: str) -> str:
    """The text without the escape sequences that are whole."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text


def clean(text: str) -> str:
    """One line that does nothing to a terminal: no escape sequences, no control characters, nothing that turns its direction.

    White space is a blank, and bytes that were no UTF-8 are a replacement character.
    """
    if text.isascii() and text.isprintable():
        return text
    decoded = text.encode("utf-8", "surrogateescape" if _only_bytes(text) else "replace").decode("utf-8", "replace")
    return "".join(char if char.isprintable() else " " if char.isspace() else "" for char in without_escapes(decoded))


def _only_bytes(text: str) -> bool:
    """Whether every surrogate in the text stands for a byte that was no UTF-8."""
    return not any("\ud800" <= char <= "\udfff" and not "\udc80" <= char <= "\udcff" for char in text)
