"""`slot-cache ls`, `rm`, `prune` and `verify`: the saved caches, while the proxy runs."""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from slot_cache.cli.output import Column, Output, Table
from slot_cache.housekeeping import CacheEntry, entries, over_limits, remove, stale
from slot_cache.index import Index, SqliteIndex, default_state_dir

_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_COLUMNS = (
    Column("route", 16, right=False),
    Column("session", 32, right=False),
    Column("tokens"),
    Column("size", 9),
    Column("saved", 6),
    Column("used", 6),
    Column("uses"),
    Column("model", 8, right=False),
    Column("state", 7, right=False),
)

Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the four commands."""
    _command(subparsers, "ls", _ls, "list the saved caches")
    rm = _command(subparsers, "rm", _rm, "delete saved caches")
    which = rm.add_mutually_exclusive_group(required=True)
    which.add_argument("keys", nargs="*", default=[], metavar="KEY", help="a cache's key (route tag and session)")
    which.add_argument("--route", help="all caches of a route")
    which.add_argument("--all", action="store_true", help="all caches")
    prune = _command(subparsers, "prune", _prune, "delete what is over a limit, old or stale")
    prune.add_argument("--max-gib", type=_positive, default=0.0, help="the most GiB that a route's caches may take")
    prune.add_argument("--max-files", type=_whole, default=0, help="the most caches that a route may have")
    prune.add_argument("--older-than", type=_age, help="not used for so long: 90m, 12h, 7d, 2w")
    prune.add_argument(
        "--stale", action="store_true", help="written by another model than the route's latest save, or without a file"
    )
    _command(
        subparsers, "verify", _verify, "check every file against the index; exit code 1 if one is not what was saved"
    )


def _command(
    subparsers: Subparsers[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace, Index], int],
    summary: str,
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", type=Path, default=None, help="the folder of the index (the setting state_dir)")
    parser.set_defaults(run=lambda arguments: _with_index(arguments, run))
    return parser


def _with_index(arguments: argparse.Namespace, run: Callable[[argparse.Namespace, Index], int]) -> int:
    path = (arguments.state_dir or default_state_dir()).expanduser() / "index.sqlite3"
    if not path.exists():
        print(f"there is no index at {path}: nothing was saved yet, or state_dir is another folder", file=sys.stderr)
        return 1
    try:
        index = SqliteIndex(path)
    except (OSError, sqlite3.Error) as error:
        print(f"the index at {path} cannot be opened: {error}", file=sys.stderr)
        return 1
    try:
        return run(arguments, index)
    finally:
        index.close()


def _ls(arguments: argparse.Namespace, index: Index) -> int:
    _show(arguments, entries(index))
    return 0


def _verify(arguments: argparse.Namespace, index: Index) -> int:
    found = entries(index, verify=True)
    _show(arguments, found)
    bad = [entry for entry in found if entry.state in ("damaged", "missing")]
    if not arguments.json:
        print(f"{sum(entry.state == 'ok' for entry in found)} of {len(found)} caches are what was saved")
    return 1 if any(entry.state == "damaged" for entry in bad) else 0


def _rm(arguments: argparse.Namespace, index: Index) -> int:
    found = entries(index)
    if arguments.all:
        chosen = found
    elif arguments.route is not None:
        chosen = [entry for entry in found if entry.route == arguments.route]
    else:
        chosen = [entry for entry in found if entry.key in set(arguments.keys)]
        missing = set(arguments.keys) - {entry.key for entry in chosen}
        if missing:
            print(f"no such cache: {', '.join(sorted(missing))}", file=sys.stderr)
            return 1
    return _delete(arguments, index, chosen)


def _prune(arguments: argparse.Namespace, index: Index) -> int:
    if not (arguments.max_gib or arguments.max_files or arguments.older_than is not None or arguments.stale):
        print("say what may go: --max-gib, --max-files, --older-than or --stale", file=sys.stderr)
        return 2
    found = entries(index)
    chosen = stale(found) if arguments.stale else []
    if arguments.older_than is not None:
        oldest = time.time() - arguments.older_than
        chosen += [entry for entry in found if entry.used < oldest]
    rest = [entry for entry in found if entry not in chosen]
    chosen += over_limits(rest, arguments.max_files, int(arguments.max_gib * 2**30))
    return _delete(arguments, index, list(dict.fromkeys(chosen)))


def _delete(arguments: argparse.Namespace, index: Index, chosen: Sequence[CacheEntry]) -> int:
    code = 0
    removed = []
    for entry in chosen:
        try:
            remove(index, entry)
        except OSError as error:
            print(f"{entry.key} cannot be deleted: {error.strerror}", file=sys.stderr)
            code = 1
        else:
            removed.append(entry)
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in removed]))
    else:
        for entry in removed:
            print(f"deleted {entry.key}")
        print(f"{len(removed)} deleted, {sum(entry.size for entry in removed) / 1e6:,.1f} MB")
    return code


def _show(arguments: argparse.Namespace, found: Sequence[CacheEntry]) -> None:
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in found]))
        return
    table = Table(Output(), _COLUMNS)
    now = time.time()
    for entry in found:
        table.row(
            _printable(entry.route or "-"),
            entry.session,
            f"{entry.tokens:,}",
            f"{entry.size / 1e6:,.1f} MB",
            _since(now - entry.created),
            _since(now - entry.used),
            str(entry.uses),
            entry.model[:8] or "-",
            entry.state,
        )
    if not found:
        print("nothing is saved")


def _printable(text: str) -> str:
    """A route's name comes from clients: no control characters into a terminal."""
    return "".join(char if char.isprintable() else "?" for char in text)[:60]


def _since(seconds: float) -> str:
    for unit in ("w", "d", "h", "m"):
        if seconds >= 2 * _SECONDS[unit]:
            return f"{seconds / _SECONDS[unit]:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def _age(text: str) -> float:
    match = _AGE.fullmatch(text.strip().lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; allowed: a number with s, m, h, d or w, like 12h")
    return float(match[1]) * _SECONDS[match[2]]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB; allowed: more than 0")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of files; allowed: 1 or more")
    return int(text)
