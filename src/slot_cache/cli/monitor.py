"""`slot-cache monitor`: a dashboard in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from slot_cache.lab.extras import missing_extra
from slot_cache.llama_server import base_url_of
from slot_cache.monitor.options import Options

SECTION = "slot_cache_monitor"
KEYS = ("LITELLM_MASTER_KEY", "LITELLM_API_KEY")
SERVER_KEY = "LLAMA_API_KEY"
FASTEST, SLOWEST = 0.1, 3600.0


class SettingsError(ValueError):
    """The settings cannot be used; the message tells which and why."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "monitor",
        help="a dashboard in the terminal: slots, speeds, caches, events",
        description=(
            "Shows what the slots of a llama-server do, what is saved, and what happens. Each source is optional; one that goes "
            "away is tried again. Keys: q quit, p pause, + and - faster and slower, arrows pick a slot, enter its history."
        ),
        epilog=(
            f"Keys are better not written on the command line: the proxy's is read from {' or '.join(KEYS)}, "
            f"llama-server's from {SERVER_KEY}."
        ),
    )
    parser.add_argument("--proxy", metavar="URL", help="the LiteLLM proxy whose plugin is asked")
    parser.add_argument("--key", help=f"a key of the proxy (default: {', then '.join(KEYS)})")
    parser.add_argument("--server", metavar="URL", help="llama-server itself, or a router")
    parser.add_argument(
        "--log", metavar="PATH", help="llama-server's log: a path, or ssh://user@host/path (-lv 4, or 5 for the text)"
    )
    parser.add_argument("--rate", type=float, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"read the section {SECTION} of this config.yaml")
    parser.add_argument("--once", action="store_true", help="print it once; exit code 1 if a source is away")
    parser.add_argument("--json", action="store_true", help="print JSON, a line at each look; with --once one")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the monitor. Returns the exit code."""
    missing = missing_extra(("rich",))
    if missing:
        print(f"the monitor needs rich; {missing}", file=sys.stderr)
        return 1
    from slot_cache.monitor import app
    from slot_cache.monitor.sources import SourceError

    try:
        options = settings_of(arguments, os.environ)
        if not (arguments.once or arguments.json) and not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise SettingsError("this is no terminal; in a script: --once, --json")
        if not (arguments.once or arguments.json) and os.environ.get("TERM", "dumb") == "dumb":
            raise SettingsError("this terminal shows lines only (TERM): --once")
        return app.run(options, _print, once=arguments.once, as_json=arguments.json)
    except (SettingsError, SourceError) as error:
        print(f"slot-cache monitor: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more to be told at the exit
        return 0


def _print(line: str) -> None:
    print(line, flush=True)


def settings_of(arguments: argparse.Namespace, environ: os._Environ[str] | dict[str, str]) -> Options:
    """The options where they are given, else the section of config.yaml, else the environment. Raises SettingsError."""
    told = section(arguments.config, environ) if arguments.config is not None else {}
    for name in ("proxy", "key", "server", "log", "rate"):
        given = getattr(arguments, name)
        if given is not None:
            told[name] = given
    if not (told.get("proxy") or told.get("server") or told.get("log")):
        raise SettingsError(f"nothing to look at: give --proxy, --server, --log, or --config with a section {SECTION}")
    for name in ("proxy", "server"):
        if told.get(name):
            try:
                told[name] = base_url_of(str(told[name]))
            except ValueError:
                raise SettingsError(f"{name}: no http or https URL") from None
    rate = told.get("rate", 1.0)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not FASTEST <= rate <= SLOWEST:
        raise SettingsError(f"rate: a number of seconds from {FASTEST:g} to {SLOWEST:g}")
    told["rate"] = float(rate)
    told.setdefault("key", next((environ[name] for name in KEYS if environ.get(name)), None))
    told.setdefault("server_key", environ.get(SERVER_KEY) or None)
    return Options(**told)


def section(path: Path, environ: os._Environ[str] | dict[str, str]) -> dict[str, Any]:
    """The section of a config.yaml, {} where it has none; `os.environ/NAME` is read from there. Raises SettingsError."""
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no YAML"
        raise SettingsError(f"{path}: {reason}") from None
    told = loaded.get(SECTION) if isinstance(loaded, dict) else None
    if told is None:
        return {}
    if not isinstance(told, dict):
        raise SettingsError(f"{SECTION}: not a mapping")
    known = {field.name for field in fields(Options)}
    unknown = sorted(str(name) for name in told if name not in known)
    if unknown:
        raise SettingsError(f"{SECTION}: {', '.join(unknown)} is no setting; there are {', '.join(sorted(known))}")
    found: dict[str, Any] = {}
    for name, value in told.items():
        if name != "rate" and not isinstance(value, str):
            raise SettingsError(f"{SECTION}: {name} is no text")
        if isinstance(value, str) and value.startswith("os.environ/"):
            value = environ.get(value.removeprefix("os.environ/"))
        if value is not None:
            found[name] = value
    return found
