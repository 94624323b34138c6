"""The tables of `slot-cache bench`, one a section. All times are medians; n is the number of samples behind each."""

from __future__ import annotations

from collections.abc import Mapping

from slot_cache.cli.numbers import milliseconds, share, span, times
from slot_cache.cli.output import Column, Output, Table
from slot_cache.lab.measure import (
    LoadResult,
    LoadRow,
    OverheadResult,
    PrefillResult,
    SharedResult,
    SlotsResult,
    SwitchResult,
)


def print_prefill(output: Output, result: PrefillResult) -> None:
    _title(output, "TTFT by prompt length, through the proxy (medians)")
    titles = (
        "prompt tokens",
        "n",
        "cold",
        "resident",
        "restored",
        "cold/restored",
        "reused (resident)",
        "reused (restored)",
    )
    table = Table(output, [Column(title, 9) for title in titles])
    for row in result.rows:
        table.row(
            f"{row.prompt_tokens:,.0f}",
            str(row.cold_ms.count),
            milliseconds(row.cold_ms.median),
            milliseconds(row.resident_ms.median),
            milliseconds(row.restored_ms.median),
            times(row.cold_ms.median, row.restored_ms.median),
            share(row.resident_reuse),
            share(row.restored_reuse),
        )


def print_switch(output: Output, result: SwitchResult) -> None:
    _title(output, "Cost of a switch (medians; save and restore as the server reports them)")
    titles = (
        "tokens",
        "MB",
        "n",
        "save",
        "restore",
        "save MB/s",
        "restore MB/s",
        "request, resident",
        "switched",
        "added",
    )
    table = Table(output, [Column(title, 8) for title in titles])
    for row in result.rows:
        table.row(
            f"{row.tokens:,}",
            f"{row.bytes / 1e6:.1f}",
            str(row.switched_ms.count),
            milliseconds(row.save_ms.median),
            milliseconds(row.restore_ms.median),
            f"{row.save_mb_per_second:,.0f}",
            f"{row.restore_mb_per_second:,.0f}",
            milliseconds(row.resident_ms.median),
            milliseconds(row.switched_ms.median),
            milliseconds(row.added_ms),
        )
        if row.switched_reuse < 0.9:
            output.line(f"  only {share(row.switched_reuse)} of the prompt was reused after the switch", "yellow")


def print_overhead(output: Output, result: OverheadResult) -> None:
    _title(output, "What the plugin adds to a request of a resident session")
    output.line(
        f"without {span(result.without_ms)}, with {span(result.with_ms)}; "
        f"{result.pairs} pairs, {result.prompt_tokens} prompt tokens"
    )
    output.line(f"median difference of a pair: {result.added_ms:+.2f} ms", "bold")


def print_load(output: Output, result: LoadResult) -> None:
    first = result.rows[0]
    _title(output, f"{first.sessions} sessions at once, {first.turns} turns each (medians)")
    table = _comparison(output, *_LOAD_TITLES, "of the first")
    for row in result.rows:
        quotient = times(row.wall_seconds.median, first.wall_seconds.median, digits=2)
        table.row(row.label, *_load_cells(row), quotient)


def print_slots(output: Output, result: SlotsResult) -> None:
    first = result.rows[0]
    _title(output, f"{first.sessions} sessions at once in {result.slots} slots, {first.turns} turns each (medians)")
    table = _comparison(output, *_LOAD_TITLES, outcomes=True)
    for row in result.rows:
        table.row(row.label, *_load_cells(row), _outcomes(row.outcomes))


def print_shared(output: Output, result: SharedResult) -> None:
    first = result.rows[0]
    _title(
        output,
        f"New sessions with a common system prompt of {first.prefix_tokens:,} tokens, others in between (medians)",
    )
    table = _comparison(output, "n", "reused of it", "least", "TTFT, first", "TTFT, new", outcomes=True)
    for row in result.rows:
        table.row(
            row.label,
            str(row.ttft_ms.count),
            share(row.reuse),
            share(row.least_reuse),
            milliseconds(row.first_ms),
            milliseconds(row.ttft_ms.median),
            _outcomes(row.outcomes),
        )


_LOAD_TITLES = ("n", "reuse", "tokens computed", "TTFT", "wall time")


def _load_cells(row: LoadRow) -> tuple[str, ...]:
    return (
        str(row.wall_seconds.count),
        share(row.reuse),
        f"{row.computed_tokens:,.0f}",
        milliseconds(row.ttft_ms.median),
        f"{row.wall_seconds.median:.1f} s",
    )


def _comparison(output: Output, *titles: str, outcomes: bool = False) -> Table:
    """A table whose rows have names, and perhaps the outcomes in the last column."""
    last = [Column("outcomes", right=False)] if outcomes else []
    return Table(output, [Column("", 31, right=False), *(Column(title, 9) for title in titles), *last])


def _outcomes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "-"


def _title(output: Output, text: str) -> None:
    output.line()
    output.line(text, "bold")
