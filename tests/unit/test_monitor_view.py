"""The lines of the monitor, at the sizes of terminals."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitor_world import HARBOUR, HARBOUR_KEY, NOON, ORCHARD, ORCHARD_KEY, SERVER, cache, reading, slot_status, status
from rich.console import Console

from slot_cache.monitor import logs
from slot_cache.monitor.model import Dashboard
from slot_cache.monitor.view import Look, Screen, render, selectable

TEXT = (
    "Once upon a time there was a lighthouse keeper who counted ships at night, and wrote each of them down in a book"
)


def board_of_four() -> Dashboard:
    """Four slots: one prefills, one decodes, one is idle and goes next, one is empty."""
    board = Dashboard(SERVER)
    for name in ("server", "log", "proxy"):
        board.source(name, True, "", NOON)
    board.props(SERVER, None, "model.gguf", sleeping=False)
    board.status(
        status(
            slot_status(0, key=HARBOUR_KEY, session=HARBOUR, messages=7, state="prefill", last_outcome="cold"),
            slot_status(1, key=ORCHARD_KEY, session=ORCHARD, messages=12, state="decode", score=31.25),
            slot_status(2, key="local-1_" + "0f" * 16, session="0f" * 16, messages=3, score=0.5, next_to_go=True),
            slot_status(3, state="empty"),
            caches=(cache(HARBOUR_KEY), cache(ORCHARD_KEY, bytes=50_000_000, uses=4)),
            server={"waiting": 2},
        ),
        NOON,
    )
    board.slots(SERVER, None, [reading(0), reading(1), reading(2, tokens=3900), reading(3)], NOON - 10)
    for event in (
        logs.Started(None, 1.0, 0, 9),
        logs.Prompt(None, 1.0, 0, 9, 4096, 2239),
        logs.Prefilling(None, 5.0, 0, 9, 1024, 0.46, 3.4, 301.2),
        logs.Started(None, 1.0, 1, 8),
        logs.Prompt(None, 1.0, 1, 8, 4096, 1000),
        *(
            logs.Token(None, 2 + n / 25, 1, 8, n + 1, 300 - n, word)
            for n, word in enumerate(re.findall(r"\S+ ?", TEXT))
        ),
    ):
        board.log(event, NOON)
    board.happened(NOON, "switch", "slot 1: abababab -> cdcdcdcd")
    board.happened(NOON, "save", "saved abababab: 1,092 tokens, 25.0 MB, 12.3 ms")
    return board


def lines(board: Dashboard, width: int, height: int, look: Look | None = None) -> list[str]:
    found = render(board, look or Look(), NOON, width, height)
    assert len(found) <= height
    assert all(line.cell_len <= width for line in found)
    return [line.plain.rstrip() for line in found]


def _words(line: str) -> str:
    return " ".join(line.split())


def test_80_by_24() -> None:
    shown = lines(board_of_four(), 80, 24)
    assert len(shown) == 24
    assert shown[0].startswith("slot-cache  server up  log up  proxy up")
    assert shown[1] == "4 slots, 2 busy, 2 waiting | reused 80% | 17 s of prefill saved"
    assert _words(shown[2]) == "# state session msg tokens context prefill/s decode/s n/left"
    assert shown[3] == f"-- model.gguf  {SERVER}  2 waiting  computes 400 tokens/s"
    assert _words(shown[4]) == "0 prefill 46% abababab 7 1,024 █░░░░ 25% 301 - -"
    assert _words(shown[6]) == "1 decode cdcdcdcd 12 1,023 █░░░░ 25% - 25.0 23/278"
    assert shown[7] == "     " + TEXT[-75:]
    assert _words(shown[8]) == "* 2 idle, cache 0f0f0f0f 3 3,900 █████ 95% - - -"
    assert _words(shown[10]) == "3 empty - - 0 ░░░░░ 0% - - -"
    assert shown[12].startswith("── caches on disk: 2 files, 71.5 MiB ─")
    assert shown[13] == " local: 2 files, 71.5 MiB of at most 20.0 GiB"
    assert any("slot 1: abababab -> cdcdcdcd" in line for line in shown)
    assert any("saved abababab: 1,092 tokens, 25.0 MB, 12.3 ms" in line for line in shown)
    assert shown[-1].startswith("q quit  p pause  +/- rate  up/down slot  enter history")


def test_200_by_50() -> None:
    shown = lines(board_of_four(), 200, 50)
    assert "3 resident, 5 restored, 2 cold" in shown[1]
    title = shown[2].split()
    assert title[-3:] == ["score", "outcome", "text"]
    assert shown[4].split()[-2:] == ["0.0", "cold"]
    assert shown[5].endswith(TEXT[-80:])
    assert "31.2" in shown[5]
    assert shown[6].startswith(" * 2")
    assert "0.5" in shown[6].split()
    assert any("cdcdcdcd" in line and "50.0 MB" in line and "restored 4 x" in line for line in shown)


def test_what_is_picked_and_its_history() -> None:
    board = board_of_four()
    board.happened(NOON, "request", "slot 2: something of its own", board.shown[0].slots[2])
    assert lines(board, 80, 24, Look(selected=2))[8].startswith(">* 2")
    shown = lines(board, 80, 24, Look(selected=2, history=True))
    assert any(line.startswith("── slot 2 | cache local-1_") for line in shown)
    assert any("something of its own" in line for line in shown)
    assert not any("caches on disk" in line for line in shown)


def test_sources_that_are_away_are_named() -> None:
    board = board_of_four()
    board.source("proxy", False, "401: the key is missing or wrong", NOON)
    shown = lines(board, 80, 24)
    assert "proxy DOWN" in shown[0]
    assert shown[2] == "proxy: 401: the key is missing or wrong"


def test_nothing_is_known_yet() -> None:
    board = Dashboard()
    board.source("server", None, "", NOON)
    shown = lines(board, 80, 24)
    assert "server ..." in shown[0]
    assert "no slots seen yet" in shown
    board.props(SERVER, None, "model.gguf", sleeping=True)
    assert "asleep: model.gguf" in lines(board, 80, 24)


def test_more_slots_than_lines() -> None:
    board = Dashboard()
    board.slots(SERVER, None, [reading(number, tokens=number) for number in range(100)], NOON)
    shown = lines(board, 80, 24)
    assert any("more slots" in line for line in shown)
    for selected in (0, 50, 99):
        shown = lines(board, 80, 24, Look(selected=selected))
        assert sum(line.startswith(f"> {selected:>2}") for line in shown) == 1
    assert selectable(board) == 100


def test_plain_signs_and_no_colours() -> None:
    stream = io.StringIO()
    board = board_of_four()
    Console(file=stream, width=80, color_system=None).print(Screen(board, Look(plain=True), NOON, size=(80, 24)))
    text = stream.getvalue()
    assert text.isascii()
    assert "\x1b" not in text
    assert "#.... " in text
    assert text.count("\n") == 23


def test_what_a_model_writes_does_nothing_to_the_terminal() -> None:
    board = board_of_four()
    hostile = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\r\n\ttext of " + "日本語" * 40
    for number, char in enumerate(hostile):  # an escape sequence in pieces
        board.log(logs.Token(None, None, 1, 8, number, 5, char), NOON)
    board.happened(NOON, "warning", hostile)
    board.shown[0].slots[0].session = hostile
    board.shown[0].name = hostile
    board.source("log", False, hostile, NOON)
    for width, height in ((80, 24), (200, 50)):
        for line in lines(board, width, height, Look(selected=1, history=True)):
            assert all(char.isprintable() for char in line)


@given(st.integers(1, 250), st.integers(1, 70), st.booleans(), st.none() | st.integers(0, 6), st.booleans())
def test_no_size_is_too_small_or_too_large(
    width: int, height: int, history: bool, selected: int | None, keys: bool
) -> None:
    look = Look(selected=selected, history=history, paused=True, keys=keys)
    for board in (BOARD, Dashboard()):
        assert lines(board, width, height, look)


BOARD = board_of_four()


@pytest.mark.parametrize("rate", [0.2, 1.0, 30.0])
def test_the_header_tells_the_rate_and_the_pause(rate: float) -> None:
    shown = lines(BOARD, 100, 24, replace(Look(), rate=rate, paused=True))
    assert f"every {rate:g} s" in shown[0]
    assert "PAUSED" in shown[0]
