"""Runs a command and ends all of its processes when stdin ends: `python -I guard.py GRACE_SECONDS COMMAND...`.

For programs that start processes of their own. The guard must lead a process group (start_new_session=True); everything
that is in it ends with the command, or GRACE_SECONDS after stdin's end at the latest. Only the standard library, and run as a
file, so that it is small and imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading


def main(grace_seconds: float, command: list[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, unlike SIG_IGN, is not passed on to the command
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    ended = threading.Event()

    def wait_for_stdin() -> None:
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGTERM)
        ended.set()

    def wait_for_child() -> None:
        child.wait()
        ended.set()

    threading.Thread(target=wait_for_stdin, daemon=True).start()
    threading.Thread(target=wait_for_child, daemon=True).start()
    ended.wait()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_seconds)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
