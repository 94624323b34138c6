"""The command line `slot-cache`. Each subcommand is a module of this folder with a `register` function."""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from slot_cache import __version__

COMMANDS = ("demo", "bench", "simulate", "caches", "doctor", "why", "monitor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        code: int = arguments.run(arguments)
        return code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slot-cache", description="Save and restore llama-server's slots behind a LiteLLM proxy: tools around it."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"slot_cache.cli.{name}").register(subparsers)
    return parser


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Being told to end is like Ctrl-C: everything that was started is put away."""
    raise KeyboardInterrupt
