"""`slot-cache why`: what changes at the front of prompts, so that they are computed again, and what would help."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from slot_cache.cli.output import Output
from slot_cache.findings import Finding, read_findings
from slot_cache.index import default_state_dir

Subparsers = argparse._SubParsersAction  # argparse has no public name for it


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    summary = "tell what changes at the front of every prompt, so that it is computed again"
    parser = subparsers.add_parser("why", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument("session", nargs="?", default="", metavar="SESSION", help="a session's key, or a part of it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--state-dir", type=Path, default=None, help="the folder of the index (the setting state_dir)")
    parser.set_defaults(run=_why)


def _why(arguments: argparse.Namespace) -> int:
    folder = (arguments.state_dir or default_state_dir()).expanduser()
    found = [one for one in read_findings(folder) if arguments.session in one.session]
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    out = Output()
    if not found:
        out.line("no prompt was found that changes at its front again and again")
    for number, one in enumerate(found):
        if number:
            out.line()
        _tell(out, one)
    return 0


def _tell(out: Output, one: Finding) -> None:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.found))
    out.line(f"{one.route}, {one.session or 'a conversation without a session'}, {when}")
    out.line(
        f"  message {one.message} ({one.role}) differed in {one.times} of its requests from about character {one.start} "
        f"to {one.end} of {one.chars}: {one.shape}"
    )
    if one.tokens:
        spent = f", in {one.seconds:.1f} s" if one.seconds else ""
        out.line(f"  about {one.tokens:,} tokens behind it were computed again{spent}")
    out.line(f"  this would help: {one.rule}")
