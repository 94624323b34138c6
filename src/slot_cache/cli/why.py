"""`slot-cache why`: what changes at the front of prompts, and why requests were computed again that could have been reused."""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from slot_cache.cli.caches import _printable, _since, _whole
from slot_cache.cli.output import Output
from slot_cache.findings import Finding, read_findings
from slot_cache.folder import tag_of
from slot_cache.index import SqliteIndex, default_state_dir
from slot_cache.request import session_digest
from slot_cache.why import Recomputed

_HEX = re.compile(r"[0-9a-f]{32}")

Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    summary = "why prompts were computed again: what changes at their front, and what became of their caches"
    parser = subparsers.add_parser("why", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "session",
        nargs="?",
        default="",
        metavar="SESSION",
        help="the client's session id, or the 32 hex digits that stand for it, or a cache's key; without it: of all",
    )
    parser.add_argument("-n", type=_whole, default=20, metavar="N", help="of the requests the last N (default: 20)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", type=Path, default=None, help="the folder of the index (the setting state_dir)")
    parser.set_defaults(run=_why)


def is_of(session: str, owners: Iterable[str], *keys: str | None) -> bool:
    """Whether one of the keys is of a session, told by the client's id for it, its digits, or a key.

    Args:
        session: "" for every session.
        owners: the LiteLLM keys' hashes that are known: with them the digits of an id are others for each key.
    """
    digits = {session_digest(session, owner) for owner in {"", *owners}}
    if _HEX.fullmatch(session):
        digits.add(session)
    return not session or any(key and (key == session or _digits(key) in digits) for key in keys)


def _digits(key: str) -> str:
    return key.removeprefix(f"{tag_of(key)}_")


def _why(arguments: argparse.Namespace) -> int:
    folder: Path = (arguments.state_dir or default_state_dir()).expanduser()
    try:
        notes, owners = _read(folder / "index.sqlite3")
    except (OSError, sqlite3.Error) as error:
        print(f"the index in {folder} cannot be opened: {error}", file=sys.stderr)
        return 1
    places = [one for one in read_findings(folder) if is_of(arguments.session, owners, one.session)]
    notes = [note for note in notes if is_of(arguments.session, owners, note.key, note.session)][: arguments.n]
    if arguments.json:
        told = {"unsteady": [asdict(one) for one in places], "recomputed": [asdict(note) for note in notes]}
        print(json.dumps(told, indent=2))
        return 0
    out = Output()
    if not places:
        out.line("no prompt was found that changes at its front again and again")
    for number, one in enumerate(places):
        if number:
            out.line()
        _tell_place(out, one)
    out.line()
    if not notes:
        out.line("no request was found that computed again what could have been reused")
    for note in notes:
        _tell_request(out, note)
    return 0


def _read(path: Path) -> tuple[list[Recomputed], set[str]]:
    """The notes of the index, and the owners that it knows."""
    if not path.exists():
        return [], set()
    index = SqliteIndex(path)
    try:
        notes = index.recomputed()
        return notes, {note.owner for note in notes} | {row.owner for row in index.overview() if row.owner}
    finally:
        index.close()


def _tell_place(out: Output, one: Finding) -> None:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.found))
    out.line(f"{_printable(one.route)}, {one.session or 'a conversation without a session'}, {when}")
    out.line(
        f"  message {one.message} ({one.role}) differed in {one.times} of its requests from about character {one.start} "
        f"to {one.end} of {one.chars}: {one.shape}"
    )
    if one.tokens:
        spent = f", in {one.seconds:.1f} s" if one.seconds else ""
        out.line(f"  about {one.tokens:,} tokens behind it were computed again{spent}")
    out.line(f"  this would help: {one.rule}")


def _tell_request(out: Output, note: Recomputed) -> None:
    out.line(
        f"{_since(time.time() - note.at)} ago, {_printable(note.route)}, {note.outcome}, reused {note.reused:,}, computed "
        f"{note.computed:,} ({note.key or 'no cache'}): {note.words}"
    )
