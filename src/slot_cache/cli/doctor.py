"""`slot-cache doctor`: what is wrong with a set-up, and what to change."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from slot_cache.cli.output import Output
from slot_cache.deployments import ConfigError, Deployment, read_config, secrets_of_url
from slot_cache.doctor import LEVELS, Finding, Level, check_config, exit_code, worst
from slot_cache.examine import Plan, examine
from slot_cache.llama_server import base_url_of
from slot_cache.settings import SettingsError, read_settings

_STYLES = {"ok": "green", "unknown": "dim", "note": "cyan", "warning": "yellow", "error": "red"}
_SHORTEST_SECRET = 4
_WIDTH = 105


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check a config.yaml, its servers and folders",
        description=(
            "Checks each route of a LiteLLM config.yaml that asks for slot_cache, or one server: settings, server, key, "
            "slots, --slot-save-path and save_path, room, idle slots, sleep, router limits, state folder, build, clock. It "
            "wakes no server that sleeps and loads no model."
        ),
        epilog="exit code: 0 nothing worse than a note, 1 warnings, 2 errors, or the configuration cannot be read",
    )
    parser.add_argument("config", nargs="?", type=Path, help="LiteLLM's config.yaml (default: config.yaml)")
    parser.add_argument("--server", metavar="URL", help="one llama-server, in place of a config.yaml")
    parser.add_argument(
        "--save-path", metavar="DIR", help="with --server: its --slot-save-path as it is seen from here"
    )
    parser.add_argument("--api-key", help="with --server: its key (default: the variable LLAMA_API_KEY)")
    parser.add_argument("--state-dir", type=Path, default=None, help="the folder of the index (the setting state_dir)")
    parser.add_argument(
        "--write", action="store_true", help="also save an idle slot, and look for the file in save_path and remove it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine and print. Returns the exit code."""
    if arguments.server is not None and arguments.config is not None:
        print("either a config.yaml or --server", file=sys.stderr)
        return 2
    if arguments.server is None and (arguments.save_path is not None or arguments.api_key is not None):
        print("--save-path and --api-key go with --server", file=sys.stderr)
        return 2
    findings, secrets = _of_server(arguments) if arguments.server is not None else _of_config(arguments)
    findings = [_without(finding, secrets) for finding in findings]
    if arguments.json:
        print(json.dumps({"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    return exit_code(findings)


def _of_config(arguments: argparse.Namespace) -> tuple[list[Finding], frozenset[str]]:
    path = arguments.config or Path("config.yaml")
    try:
        config = read_config(path, os.environ)
    except (ConfigError, ValueError) as error:  # a path that the system does not take is a ValueError
        why = "Nothing else can be checked."
        return [Finding("error", "config", str(path), str(error), why, "the file that the proxy is given")], frozenset()
    findings = list(check_config(config, str(path)))
    findings += _examined(arguments, config.deployments)
    return findings, config.secrets


def _of_server(arguments: argparse.Namespace) -> tuple[list[Finding], frozenset[str]]:
    key = arguments.api_key or os.environ.get("LLAMA_API_KEY") or None
    secrets = frozenset([key] if key else []) | frozenset(secrets_of_url(arguments.server))
    given = {} if arguments.save_path is None else {"save_path": arguments.save_path}
    try:
        settings = read_settings("--server", given)
        base_url = base_url_of(arguments.server)
    except SettingsError as error:
        return [Finding("error", "settings", "--server", str(error))], secrets
    except ValueError:
        what = "it is no http or https URL with a host"
        return [Finding("error", "server", "--server", what, fix="--server http://127.0.0.1:8080")], secrets
    return _examined(arguments, [Deployment("--server", "*", base_url, key, settings, configured=False)]), secrets


def _examined(arguments: argparse.Namespace, deployments: Sequence[Deployment]) -> list[Finding]:
    state_dir = arguments.state_dir.expanduser() if arguments.state_dir is not None else None
    return asyncio.run(examine(Plan(deployments, state_dir, arguments.write, os.environ)))


def _without(finding: Finding, secrets: Iterable[str]) -> Finding:
    """The finding with no secret in it, wherever it may have come from."""
    hidden = sorted((secret for secret in secrets if len(secret) >= _SHORTEST_SECRET), key=len, reverse=True)

    def clean(text: str) -> str:
        for secret in hidden:
            if secret.lower() != "none":
                text = text.replace(secret, "***")
        return "".join(char if char.isprintable() else "?" for char in text)

    return replace(
        finding,
        where=clean(finding.where),
        what=clean(finding.what),
        why=clean(finding.why),
        fix=clean(finding.fix),
    )


def _print(findings: Sequence[Finding]) -> None:
    output = Output()
    for where in dict.fromkeys(finding.where for finding in findings):
        output.line(where, "bold")
        for finding in findings:
            if finding.where == where:
                _print_one(output, finding)
    counts = Counter(finding.level for finding in findings)
    output.line(", ".join(_counted(counts[level], level) for level in reversed(LEVELS)), _STYLES[worst(findings)])


def _print_one(output: Output, finding: Finding) -> None:
    first, *others = textwrap.wrap(f"{finding.check}: {finding.what}", _WIDTH, break_on_hyphens=False)
    output.line(f"  {finding.level:<9}{first}", _STYLES[finding.level])
    texts = [*others]
    if finding.level != "ok":
        for text in (finding.why, f"-> {finding.fix}" if finding.fix else ""):
            texts += textwrap.wrap(
                text, _WIDTH, break_on_hyphens=False, subsequent_indent="   " * text.startswith("->")
            )
    for text in texts:
        output.line(f"{'':11}{text}")


def _counted(count: int, level: Level) -> str:
    several = count != 1 and level in ("error", "warning", "note")
    return f"{count} {level}{'s' if several else ''}"
