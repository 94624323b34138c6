"""Traces of requests as Mooncake publishes them: a JSON object a line, with `timestamp` (milliseconds), `input_length` and
`output_length` (tokens) and `hash_ids` (an id for each block of the prompt; equal ids are equal beginnings)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slot_cache.simulated import TraceRequest, chain_of

MAX_LINE_BYTES = 16 * 2**20
MAX_TOKENS = 10**8
MAX_TIMESTAMP = 10**15
MAX_ID = 2**63 - 1
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


class TraceError(Exception):
    """A file that is no trace: which file, which line, what is wrong and what is allowed."""


def read_trace(path: Path, block: int) -> list[TraceRequest]:
    """The requests of a trace, in the order of the file. Empty lines and other fields are passed over.

    Args:
        path: the file.
        block: tokens of a block.

    Raises:
        TraceError: the file cannot be read, a line is no request, or there is none.
    """
    try:
        with path.open("rb") as file:
            requests = [_numbered(path, number, line, block) for number, line in _lines(path, file)]
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    if not requests:
        raise TraceError(f"{path} holds no requests; allowed: one JSON object a line, with {', '.join(_FIELDS)}")
    return requests


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{path}, line {number}: too long; allowed: {MAX_LINE_BYTES // 2**20} MiB")
        if line.strip():
            yield number, line


def _numbered(path: Path, number: int, line: bytes, block: int) -> TraceRequest:
    try:
        return parse_request(line, block)
    except TraceError as error:
        raise TraceError(f"{path}, line {number}: {error}") from None


def parse_request(line: bytes, block: int) -> TraceRequest:
    """One line of a trace. Raises TraceError that says what is wrong and what is allowed."""
    row = _object(line)
    missing = [name for name in _FIELDS if name not in row]
    if missing:
        raise TraceError(f"no {', '.join(missing)}; needed: {', '.join(_FIELDS)}")
    prompt = _whole(row["input_length"], "input_length", 1, MAX_TOKENS)
    output = _whole(row["output_length"], "output_length", 0, MAX_TOKENS)
    return TraceRequest(_seconds(row["timestamp"]), prompt, output, chain_of(_ids(row["hash_ids"], prompt, block)))


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise TraceError(f"no UTF-8 (byte {error.start + 1} of the line)") from None
    try:
        row = json.loads(text)
    except RecursionError:
        raise TraceError("nested too deeply; allowed: one JSON object a line") from None
    except json.JSONDecodeError as error:
        raise TraceError(f"no JSON ({error.msg}, column {error.colno}); allowed: one JSON object a line") from None
    except ValueError:  # a number of thousands of digits
        raise TraceError("a number is too long; allowed: whole numbers of at most 64 bits") from None
    if not isinstance(row, dict):
        raise TraceError(f"{_shown(row)} is no JSON object; allowed: one object a line, with {', '.join(_FIELDS)}")
    return row


def _seconds(value: object) -> float:
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0 <= number <= MAX_TIMESTAMP:
        raise TraceError(f"timestamp: {_shown(value)}; allowed: milliseconds, a number from 0 to {MAX_TIMESTAMP:,}")
    return number / 1000


def _whole(value: object, name: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise TraceError(f"{name}: {_shown(value)}; allowed: a whole number from {least} to {most:,}")
    return value


def _ids(value: object, prompt: int, block: int) -> list[int]:
    if not isinstance(value, list):
        raise TraceError(f"hash_ids: {_shown(value)}; allowed: a list of whole numbers")
    most = math.ceil(prompt / block) + 1  # by the last one, programs that write traces differ
    if len(value) > most:
        raise TraceError(
            f"hash_ids: {len(value):,} ids; allowed: at most {most:,}, for {prompt:,} tokens in blocks of {block:,} "
            "(--block-tokens)"
        )
    return [_whole(number, f"hash_ids[{place}]", 0, MAX_ID) for place, number in enumerate(value)]


def _shown(value: object) -> str:
    """A value of a file as it may be printed: short, and nothing that a terminal obeys."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if not isinstance(value, str) else json.dumps(value[:41])
    return text if len(text) <= 42 else f"{text[:40]}..."
