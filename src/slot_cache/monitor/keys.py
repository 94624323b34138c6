"""The keyboard, read key by key, and a terminal that is left as it was found."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import termios
import tty
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

MOST_PENDING = 32
"""No key sends a longer sequence."""

_NAMES = {
    b"\r": "enter",
    b"\n": "enter",
    b"+": "+",
    b"=": "+",
    b"-": "-",
    b"_": "-",
    b"\x03": "q",  # where the terminal makes no signal of it
    b"\x04": "q",
    b"\x0c": "redraw",
}
_SEQUENCES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOM": "enter",
}

ENTER_SCREEN = b"\x1b[?1049h\x1b[?25l"
LEAVE_SCREEN = b"\x1b[0m\x1b[?25h\x1b[?1049l"


class KeyParser:
    """Bytes from a terminal -> names of keys: a character, or up, down, enter, escape, redraw. What it does not know is left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The keys that are whole by now. An escape character alone at the end is the key."""
        data, self._rest = self._rest + data, b""
        keys = []
        while data:
            if data[:1] != b"\x1b":
                name = _NAMES.get(data[:1]) or (chr(data[0]) if 0x20 < data[0] < 0x7F else None)
                keys += [name] if name else []
                data = data[1:]
                continue
            length = _length(data)
            if length is None:
                if data == b"\x1b":
                    keys.append("escape")
                elif len(data) <= MOST_PENDING:
                    self._rest = data
                break
            name = _SEQUENCES.get(data[:length])
            keys += [name] if name else []
            data = data[length:]
        return keys


def _length(data: bytes) -> int | None:
    """How long the escape sequence is that `data` begins with, None if its end has not come yet."""
    if len(data) < 2:
        return None
    if data[1:2] == b"O":
        return 3 if len(data) > 2 else None
    if data[1:2] != b"[":
        return 1 if data[1:2] == b"\x1b" else 2
    for place in range(2, len(data)):
        if 0x40 <= data[place] <= 0x7E:
            return place + 1
        if not 0x20 <= data[place] <= 0x3F:
            return place
    return None


class Terminal:
    """A terminal in the hands of a program that draws on it: no echo, no line buffer, a screen of its own.

    Used as a context manager. It is left as it was found when the block ends in whatever way, at the process's exit, and while
    the process is stopped (Ctrl-Z), after which it is taken again and `on_resume` called. Its attributes are restored only where
    they are still ours: in the foreground.
    """

    def __init__(
        self, input_fd: int, output_fd: int, on_resume: Callable[[], None] = lambda: None, *, screen: bool = True
    ) -> None:
        self._input, self._output, self._on_resume, self._screen = input_fd, output_fd, on_resume, screen
        self._found: list[Any] | None = None
        self._stop_handler: Any = None
        self._continue_handler: Any = None

    def __enter__(self) -> Terminal:
        self._stop_handler = signal.signal(signal.SIGTSTP, self._stop)
        self._continue_handler = signal.signal(signal.SIGCONT, self._resume)
        atexit.register(self.give_back)
        try:
            self.take()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back()
        atexit.unregister(self.give_back)
        signal.signal(signal.SIGTSTP, self._stop_handler)
        signal.signal(signal.SIGCONT, self._continue_handler)

    def take(self) -> None:
        """Make the terminal ours."""
        if self._found is not None:
            return
        found = termios.tcgetattr(self._input)
        self._found = found
        tty.setcbreak(self._input, termios.TCSADRAIN)
        self._write(ENTER_SCREEN)

    def give_back(self) -> None:
        """Make the terminal what it was. Does nothing when it is."""
        found, self._found = self._found, None
        if found is None:
            return
        self._write(LEAVE_SCREEN)
        with contextlib.suppress(termios.error, OSError, ValueError):
            termios.tcsetattr(self._input, termios.TCSADRAIN, found)

    def _write(self, data: bytes) -> None:
        if self._screen:
            with contextlib.suppress(OSError, ValueError):
                os.write(self._output, data)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # here the process stands still until SIGCONT
        self._resume(number, frame)  # where nobody could wake it the system does not stop it

    def _resume(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTSTP, self._stop)
        with contextlib.suppress(termios.error, OSError):
            if os.tcgetpgrp(self._input) == os.getpgrp():
                self.take()
        self._on_resume()
