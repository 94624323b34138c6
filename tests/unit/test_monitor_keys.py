"""Keys, and a terminal that is left as it was found."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.monitor.keys import ENTER_SCREEN, LEAVE_SCREEN, MOST_PENDING, KeyParser
from terminal import Terminal

SOURCE = str(Path(__file__).resolve().parents[2] / "src")

PROGRAM = """
import os, sys, time
from slot_cache.monitor.keys import Terminal
with Terminal(0, 1, lambda: os.write(1, b"<resumed>")):
    os.write(1, b"<ready>")
    {what}
"""

WAIT = "os.read(0, 1)"


def started(terminal: Terminal, what: str) -> None:
    """Run a program that does `what` while it has the terminal."""
    program = PROGRAM.format(what=what)
    terminal.start([sys.executable, "-c", program], {"PYTHONPATH": SOURCE})
    terminal.until(lambda: b"<ready>" in terminal.output)


def given_back(terminal: Terminal) -> bool:
    return terminal.attributes() == terminal.found and terminal.output.rstrip().count(LEAVE_SCREEN) > 0


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (b"qp+-=_", ["q", "p", "+", "-", "+", "-"]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", ["up", "down", "up", "down"]),
        (b"\r\n\x1bOM", ["enter", "enter", "enter"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[15~\x1b[1;5Aq", ["q"]),  # keys that nobody knows
        (b"\x1b[<0;3;3M\x1bxq", ["q"]),
        (b"\x03", ["q"]),
        ("äq".encode(), ["q"]),
        (b"\x1b\x1b[A", ["up"]),
    ],
)
def test_keys(typed: bytes, keys: list[str]) -> None:
    assert KeyParser().feed(typed) == keys


def test_a_sequence_in_pieces_is_one_key() -> None:
    parser = KeyParser()
    assert [parser.feed(b"\x1b["), parser.feed(b"A"), parser.feed(b"q")] == [[], ["up"], ["q"]]
    assert parser.feed(b"\x1b[" + b"1;" * MOST_PENDING) == []
    assert parser.feed(b"q") == ["q"]  # what never ends is given up


@given(st.lists(st.binary(max_size=20), max_size=10))
def test_no_input_raises_or_is_kept(chunks: list[bytes]) -> None:
    parser = KeyParser()
    for chunk in chunks:
        parser.feed(chunk)
        assert len(parser._rest) <= MOST_PENDING


def test_the_end_gives_the_terminal_back() -> None:
    with Terminal() as terminal:
        started(terminal, WAIT)
        assert terminal.attributes() != terminal.found
        assert ENTER_SCREEN in terminal.output
        terminal.press("x")
        assert terminal.wait() == 0
        assert given_back(terminal)


@pytest.mark.parametrize("what", ["raise RuntimeError", "sys.exit(3)", "raise KeyboardInterrupt"])
def test_whatever_is_raised_gives_the_terminal_back(what: str) -> None:
    with Terminal() as terminal:
        started(terminal, what)
        assert terminal.wait() != 0
        assert given_back(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT])
def test_signals_give_the_terminal_back(number: signal.Signals, tmp_path: Path) -> None:
    """In the monitor itself, which takes these signals."""
    log = tmp_path / "x.log"
    log.touch()
    with Terminal() as terminal:
        command = [sys.executable, "-m", "slot_cache", "monitor", "--log", str(log)]
        terminal.start(command, {"PYTHONPATH": SOURCE})
        terminal.until(lambda: "log up" in "".join(terminal.frame()))
        assert terminal.process is not None
        terminal.process.send_signal(number)
        assert terminal.wait() == 130
        assert given_back(terminal)


def test_a_terminal_that_is_gone_ends_the_monitor(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.touch()
    with Terminal() as terminal:
        command = [sys.executable, "-m", "slot_cache", "monitor", "--log", str(log)]
        terminal.start(command, {"PYTHONPATH": SOURCE})
        terminal.until(terminal.frame)
        os.close(terminal.master)
        assert terminal.wait() == 130


def test_a_stopped_process_gives_the_terminal_back_and_takes_it_again(tmp_path: Path) -> None:
    """Under a shell with job control: Ctrl-Z, and fg."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(what=f"{WAIT}; {WAIT}"))
    with Terminal() as terminal:
        terminal.start(["bash", "--norc", "--noprofile", "-i"], {"PYTHONPATH": SOURCE, "PS1": "<shell>"})
        terminal.until(lambda: b"<shell>" in terminal.output)
        terminal.press(f"{sys.executable} {program}\n")
        terminal.until(lambda: b"<ready>" in terminal.output)
        terminal.press("\x1a")
        terminal.until(lambda: b"Stopped" in terminal.output)
        assert terminal.output.index(LEAVE_SCREEN) < terminal.output.index(b"Stopped")
        terminal.press("fg\n")
        terminal.until(lambda: b"<resumed>" in terminal.output)
        assert terminal.output.count(ENTER_SCREEN) == 2
        terminal.press("xy")
        terminal.until(lambda: terminal.output.count(LEAVE_SCREEN) == 2)
