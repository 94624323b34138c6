"""A program in a pseudo terminal of its own, and what it shows there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

FRAME = re.compile(rb"\x1b\[H((?:(?!\x1b\[H).)*?)\x1b\[J", re.S)
LAST = b"\0the end\0"
STYLES = re.compile(r"\x1b\[[0-9;]*[mK]")


class Terminal:
    """A pseudo terminal; `start` runs a program in it as its session's leader, as a terminal emulator does."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.master, self.slave = pty.openpty()
        self.found = self.attributes()
        self.process: subprocess.Popen[bytes] | None = None
        self._seen = b""
        self._lock = threading.Lock()
        self.resize(columns, lines)
        threading.Thread(target=self._read, daemon=True).start()

    def attributes(self) -> list[Any]:
        """How the terminal is set: echo, line buffer, signals."""
        return termios.tcgetattr(self.slave)

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        def lead() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        fds = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.process = subprocess.Popen(
            command, env={**os.environ, "TERM": "xterm-256color", **(env or {})}, preexec_fn=lead, **fds
        )

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if self.process is not None:
            self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    @property
    def output(self) -> bytes:
        """All that was written so far."""
        with self._lock:
            return self._seen.replace(LAST, b"")

    def frame(self) -> list[str]:
        """The lines of the last whole picture."""
        frames = FRAME.findall(self.output)
        return [STYLES.sub("", line) for line in frames[-1].decode().replace("\r", "").split("\n")] if frames else []

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        """Wait for a condition. Raises TimeoutError, which tells what is to be seen."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(self.frame()) or self.output[-3000:].decode(errors="replace"))
            time.sleep(0.02)

    def wait(self, seconds: float = 20.0) -> int:
        """The exit code of the program; all of its output has been read then."""
        assert self.process is not None
        code = self.process.wait(seconds)
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(self.slave, LAST)
            self.until(lambda: self._seen.endswith(LAST))
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.slave)
        with contextlib.suppress(OSError):
            os.close(self.master)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(self.master, 65536):
                with self._lock:
                    self._seen += data
