"""`slot-cache simulate`: what slots, a disk and a policy of that size would make of a trace of requests."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slot_cache.cli.output import Column, Output, Table
from slot_cache.cli.trace import TraceError, read_trace
from slot_cache.eviction import BYTES_PER_TOKEN, PREFILL_TOKENS_PER_SECOND, RESTORE_BYTES_PER_SECOND, Policy, Speeds
from slot_cache.simulation import BLOCK_TOKENS, DECODE_TOKENS_PER_SECOND, Result, World, simulate
from slot_cache.state import Outcome

_POLICIES: tuple[Policy, ...] = ("lru", "cost")
_OUTCOMES = (Outcome.RESIDENT, Outcome.RESTORED, Outcome.DONOR, Outcome.COLD)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="replay a trace of requests against slots and a disk, without a server",
        description=(
            "Replays a trace against slots and a disk of the given size, with the product's own decisions and without a "
            "server, and prints what was reused, the prefill saved and the bytes written, for both policies. TRACE is a file "
            "in the format of the Mooncake traces: one JSON object a line with timestamp (ms), input_length, output_length "
            "(tokens) and hash_ids (one for each block of 512 tokens; equal ids are equal beginnings)."
        ),
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the file")
    parser.add_argument("--slots", type=_whole(1, 4096), default=4, help="slots of the server (default: %(default)s)")
    parser.add_argument(
        "--disk-gib", type=_number(0, 1e9), default=50.0, help="GiB for saved caches, 0: no limit (default: 50)"
    )
    parser.add_argument(
        "--max-files", type=_whole(0, 10**9), default=0, help="the most saved caches, 0: no limit (default: 0)"
    )
    parser.add_argument(
        "--prefill-rate",
        type=_number(1e-3, 1e9),
        default=PREFILL_TOKENS_PER_SECOND,
        help="tokens per second that are computed (default: %(default)g)",
    )
    parser.add_argument(
        "--restore-rate",
        type=_number(1e-3, 1e9),
        default=RESTORE_BYTES_PER_SECOND / 1e6,
        help="MB per second of restores and saves (default: %(default)g)",
    )
    parser.add_argument(
        "--decode-rate",
        type=_number(1e-3, 1e9),
        default=DECODE_TOKENS_PER_SECOND,
        help="tokens per second that a slot generates (default: %(default)g)",
    )
    parser.add_argument(
        "--bytes-per-token",
        type=_number(1, 1e9),
        default=BYTES_PER_TOKEN,
        help="bytes of a saved token (default: 131072)",
    )
    parser.add_argument(
        "--block-tokens",
        type=_whole(1, 10**6),
        default=BLOCK_TOKENS,
        help="tokens of a block of the trace (default: %(default)s)",
    )
    parser.add_argument(
        "--policy",
        choices=(*_POLICIES, "both"),
        default="both",
        help="what goes first from slots and disk: lru: what was used longest ago; cost: what is cheapest to have back, by "
        "how long ago it was used (default: both, side by side)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replay and print. Returns 2 when the trace is none."""
    try:
        requests = read_trace(arguments.trace, arguments.block_tokens)
    except TraceError as error:
        print(error, file=sys.stderr)
        return 2
    world = World(
        slots=arguments.slots,
        max_bytes=int(arguments.disk_gib * 2**30),
        max_files=arguments.max_files,
        speeds=Speeds(arguments.prefill_rate, arguments.restore_rate * 1e6, arguments.bytes_per_token),
        decode=arguments.decode_rate,
        block=arguments.block_tokens,
    )
    policies = _POLICIES if arguments.policy == "both" else (arguments.policy,)
    results = {policy: simulate(requests, world, policy) for policy in policies}
    if arguments.json:
        report = {"world": asdict(world), "results": {policy: as_json(result) for policy, result in results.items()}}
        print(json.dumps(report, indent=2))
        return 0
    output = Output()
    for line in _head(arguments, [request.arrived for request in requests]):
        output.line(line)
    print_results(output, results)
    return 0


def as_json(result: Result) -> dict[str, Any]:
    """The result's numbers: counts, tokens, bytes and seconds."""
    return {
        "requests": result.requests,
        "outcomes": {outcome.value: result.outcomes[outcome] for outcome in _OUTCOMES},
        "prompt_tokens": result.prompt_tokens,
        "reused_tokens": result.reused_tokens,
        "hit_rate": result.hit_rate,
        "plain_seconds": result.plain_seconds,
        "prefill_seconds": result.prefill_seconds,
        "restore_seconds": result.restore_seconds,
        "save_seconds": result.save_seconds,
        "saved_seconds": result.saved_seconds,
        "bytes_written": result.bytes_written,
        "bytes_read": result.bytes_read,
        "evicted": result.evicted,
        "mean_wait": result.mean_wait,
        "p95_wait": result.wait_of(0.95),
    }


_ROWS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("requests", lambda result: f"{result.requests:,}"),
    *((f"  {one.value}", lambda result, one=one: f"{result.outcomes[one]:,}") for one in _OUTCOMES),
    ("prompt tokens", lambda result: f"{result.prompt_tokens:,}"),
    ("reused", lambda result: f"{result.hit_rate:.3f}"),
    ("prefill without caches", lambda result: _seconds(result.plain_seconds)),
    ("prefill", lambda result: _seconds(result.prefill_seconds)),
    ("restores", lambda result: _seconds(result.restore_seconds)),
    ("saves", lambda result: _seconds(result.save_seconds)),
    ("saved, net of both", lambda result: _seconds(result.saved_seconds)),
    ("written", lambda result: _gigabytes(result.bytes_written)),
    ("read", lambda result: _gigabytes(result.bytes_read)),
    ("files evicted", lambda result: f"{result.evicted:,}"),
    ("mean wait", lambda result: _seconds(result.mean_wait)),
    ("p95 wait", lambda result: _seconds(result.wait_of(0.95))),
)


def print_results(output: Output, results: Mapping[Policy, Result]) -> None:
    """A column for each policy."""
    table = Table(output, (Column("", 22, right=False), *(Column(policy, 14) for policy in results)))
    for title, text in _ROWS:
        table.row(title, *(text(result) for result in results.values()))


def _head(arguments: argparse.Namespace, arrived: list[float]) -> list[str]:
    disk = f"{arguments.disk_gib:g} GiB" if arguments.disk_gib else "any number of bytes"
    files = f" and {arguments.max_files:,} files" if arguments.max_files else ""
    slots = "1 slot" if arguments.slots == 1 else f"{arguments.slots:,} slots"
    return [
        f"{len(arrived):,} requests in {_seconds(max(arrived) - min(arrived))}; {slots}, {disk}{files} on disk",
        f"a slot computes {arguments.prefill_rate:,g} tokens/s and generates {arguments.decode_rate:,g}; saves and restores "
        f"{arguments.restore_rate:,g} MB/s, {arguments.bytes_per_token:,.10g} bytes a token",
    ]


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"


def _gigabytes(value: int) -> str:
    return f"{value / 1e9:,.1f} GB"


def _number(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not allowed; allowed: a number from {least:g} to {most:g}"
            )
        return value

    return number


def _whole(least: int, most: int) -> Callable[[str], int]:
    def whole(text: str) -> int:
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not allowed; allowed: a whole number from {least} to {most:,}"
            )
        return value

    return whole
