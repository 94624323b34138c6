"""`slot-cache why SESSION`: why requests of a conversation were computed again, the last ones."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from slot_cache.cli.caches import _printable, _since, _whole, _with_index
from slot_cache.folder import tag_of
from slot_cache.index import Index
from slot_cache.request import session_digest
from slot_cache.why import Recomputed

_HEX = re.compile(r"[0-9a-f]{32}")

Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    summary = "why requests were computed again that could have been reused"
    parser = subparsers.add_parser("why", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "session",
        nargs="?",
        metavar="SESSION",
        help="the client's session id, or the 32 hex digits that stand for it, or a cache's key; without it: of all",
    )
    parser.add_argument("-n", type=_whole, default=20, metavar="N", help="print the last N (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", type=Path, default=None, help="the folder of the index (the setting state_dir)")
    parser.set_defaults(run=lambda arguments: _with_index(arguments, _why))


def of_session(notes: Iterable[Recomputed], session: str, owners: Iterable[str]) -> list[Recomputed]:
    """The notes of one session, told by the client's id for it, its digits, or a cache's key.

    Args:
        owners: the LiteLLM keys' hashes that are known: with them the digits of an id are others for each key.
    """
    digits = {session_digest(session, owner) for owner in {"", *owners}}
    if _HEX.fullmatch(session):
        digits.add(session)
    return [
        note
        for note in notes
        if session in (note.key, note.session) or _digits(note.key) in digits or _digits(note.session) in digits
    ]


def _digits(key: str | None) -> str:
    return "" if key is None else key.removeprefix(f"{tag_of(key)}_")


def _why(arguments: argparse.Namespace, index: Index) -> int:
    notes = index.recomputed()
    if arguments.session is not None:
        owners = {note.owner for note in notes} | {row.owner for row in index.caches() if row.owner}
        notes = of_session(notes, arguments.session, owners)
    notes = notes[: arguments.n]
    if arguments.json:
        print(json.dumps([asdict(note) for note in notes]))
        return 0
    now = time.time()
    for note in notes:
        print(
            f"{_since(now - note.at)} ago, {_printable(note.route)}, {note.outcome}, reused {note.reused:,}, computed "
            f"{note.computed:,} ({note.key or 'no cache'}): {note.words}"
        )
    if not notes:
        print("nothing was computed again that could have been reused")
    return 0
