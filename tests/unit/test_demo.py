"""The demo's pure parts: rows, summary, text."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slot_cache.cli import main
from slot_cache.cli.demo import (
    AFTER_KILL,
    BEFORE_KILL,
    QUESTIONS,
    SESSIONS,
    proxy_config,
    serve_lines,
    summary_rows,
    system_prompt,
    turn_row,
    turn_style,
    wait_for_save,
)
from slot_cache.cli.numbers import milliseconds, share, span, times
from slot_cache.cli.output import Column, Output, Table
from slot_cache.lab.chat import Turn
from slot_cache.lab.stats import Sample, Totals, totals


def turn(prompt: int, cached: int, ttft: float = 0.5, outcome: str | None = None) -> Turn:
    return Turn(prompt, cached, 4, ttft, ttft + 0.1, "text", outcome)


def test_every_session_gets_every_turn() -> None:
    played = [name for order in (*BEFORE_KILL, *AFTER_KILL) for name in order]
    assert all(played.count(name) == len(QUESTIONS) for name in SESSIONS)
    assert len({system_prompt(name) for name in SESSIONS}) == len(SESSIONS)


def test_totals_count_returning_turns_only() -> None:
    result = totals([[turn(100, 0), turn(150, 100, 0.2), turn(200, 50, 0.3)], [turn(80, 80)]])
    assert result == Totals(
        turns=4, returning=2, prompt_tokens=350, computed_tokens=200, ttft_seconds=0.5, reuse=150 / 250
    )


def test_reuse_is_never_more_than_the_previous_prompt() -> None:
    assert totals([[turn(100, 0), turn(150, 120)]]).reuse == 1.0
    assert totals([[turn(100, 0)]]).reuse is None


def test_turn_row() -> None:
    assert turn_row("harbour", 2, turn(1234, 1200, 0.126)) == ("harbour", "2", "-", "1,234", "1,200", "0.13 s")
    assert turn_row("harbour", 2, turn(1, 1, 1, "restored"))[2] == "restored"


@pytest.mark.parametrize(
    ("cached", "first", "style"), [(0, True, ""), (19, False, "red"), (90, False, "green"), (90, True, "green")]
)
def test_turn_style(cached: int, first: bool, style: str) -> None:
    assert turn_style(turn(100, cached), first=first) == style


def test_summary_rows() -> None:
    without = Totals(12, 9, 10_500, 9_000, 20.0, 0.138)
    with_plugin = Totals(12, 9, 10_500, 450, 1.0, 1.0)
    rows = {row[0]: row[1:] for row in summary_rows(without, with_plugin)}
    assert rows["tokens computed"] == ("9,000", "450", "20.0 x")
    assert rows["TTFT, all together"] == ("20.00 s", "1.00 s", "20.0 x")
    assert rows["reuse of the last prompt"] == ("0.14", "1.00", "")


def test_summary_of_nothing() -> None:
    nothing = Totals(0, 0, 0, 0, 0.0, None)
    assert all("-" in row[1:] or "" in row[1:] for row in summary_rows(nothing, nothing))


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (0.0, "0.00"), (0.996, "0.99"), (0.9999, "0.99"), (1.0, "1.00"), (1 / 3, "0.33")]
)
def test_share_never_rounds_up_to_one(value: float | None, text: str) -> None:
    assert share(value) == text


def test_numbers() -> None:
    assert [milliseconds(value) for value in (1.234, -1.234, 12.34, 1234.5)] == [
        "1.23 ms",
        "-1.23 ms",
        "12.3 ms",
        "1,234 ms",
    ]
    assert times(3, 2) == "1.5 x"
    assert times(3, 0) == "-"
    assert span(Sample(3, 2.0, 1.0, 30.0)) == "2.00 ms (1.00 ms to 30.0 ms)"


def test_table_is_plain_and_aligned_outside_a_terminal() -> None:
    stream = io.StringIO()
    table = Table(Output(stream), [Column("session", 8, right=False), Column("tokens", 8)])
    table.row("a", "1,234", style="green")
    table.row("[b]", "5")
    assert stream.getvalue().splitlines() == [
        "session     tokens",
        "--------  --------",
        "a            1,234",
        "[b]              5",
    ]


def test_step_is_a_line_outside_a_terminal() -> None:
    stream = io.StringIO()
    with Output(stream).step("starting") as detail:
        detail("still")
    assert stream.getvalue() == "starting ...\n"


def test_proxy_config_with_and_without_the_plugin(tmp_path: Path) -> None:
    with_plugin = proxy_config("http://127.0.0.1:1", tmp_path)
    without = proxy_config("http://127.0.0.1:1", None)
    assert "slot_cache" in str(with_plugin)
    assert "slot_cache" not in str(without)


def test_serve_lines_hold_a_curl_line_to_copy(tmp_path: Path) -> None:
    text = "\n".join(serve_lines("http://127.0.0.1:4000", "sk-1", "http://127.0.0.1:8080", tmp_path, tmp_path / "log"))
    assert "curl -i http://127.0.0.1:4000/v1/chat/completions -H 'Authorization: Bearer sk-1' \\\n" in text
    assert '-d \'{"model": "smol", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]}\'' in text


async def test_wait_for_save(tmp_path: Path) -> None:
    now = time.time()
    assert not await wait_for_save(tmp_path, now, timeout=0)
    saved = tmp_path / "a.bin"
    saved.touch()
    os.utime(saved, (now - 5, now - 5))
    assert not await wait_for_save(tmp_path, now, timeout=0)
    os.utime(saved, (now + 1, now + 1))
    assert await wait_for_save(tmp_path, now, timeout=5)


def test_command_line_without_and_with_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0
    assert capsys.readouterr().out.startswith("slot-cache ")


def test_command_line_does_not_import_litellm() -> None:
    code = (
        "import sys, slot_cache.cli as cli; cli._parser(); "
        "print(*({'litellm', 'xllamacpp', 'openai'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
