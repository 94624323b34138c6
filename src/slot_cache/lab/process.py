"""What the two kinds of child processes have in common: a port, a log, the end of it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import httpx


class StartError(RuntimeError):
    """A child process ended or did not answer in time; the message carries the end of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def tail(path: Path, lines: int = 30) -> str:
    """The last lines of a log file, "" when there is none."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def child_environment(extra: Mapping[str, str], *, drop: tuple[str, ...] = ()) -> dict[str, str]:
    """This process's environment for a child that finds the very same slot_cache package, and no proxy for localhost.

    Variables whose name starts with one of `drop` are left out, so that the user's settings do not change what is shown.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    source = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([source, *filter(None, [env.get("PYTHONPATH")])])
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"  # a crash is told in the log
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(["127.0.0.1,localhost", *filter(None, [env.get(name)])])
    return {**env, **extra}


def wait_until_healthy(what: str, url: str, alive: Callable[[], bool], log_path: Path, timeout: float) -> None:
    """Block until `url` answers 200. Raises StartError when the process ended or `timeout` seconds have passed."""
    deadline = time.monotonic() + timeout
    with httpx.Client(trust_env=False, timeout=2.0) as client:
        while True:
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if not alive():
                raise StartError(f"{what} ended while it was starting. The end of its log:\n{tail(log_path)}")
            if time.monotonic() > deadline:
                raise StartError(f"{what} did not answer in {timeout:.0f} s. The end of its log:\n{tail(log_path)}")
            time.sleep(0.05)


def close_and_wait(child: subprocess.Popen[bytes], timeout: float) -> bool:
    """Close the child's stdin, which asks it to end, and wait. False when it is still there after `timeout` seconds."""
    if child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True
