"""Imports LiteLLM once, which takes seconds, and becomes a LiteLLM proxy again and again: run by warm.py.

It reads lines of JSON, each the arguments, environment, folder and log of a proxy, forks, and answers the number of the
process that has become that proxy. When there is nothing more to read it ends, and all of those with it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
from typing import Any


def main() -> None:
    import litellm.proxy.proxy_cli
    import litellm.proxy.proxy_server  # noqa: F401  # imported here so that it need not be later

    children: set[int] = set()

    def bury(*_: object) -> None:
        for number in list(children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(number, os.WNOHANG)[0]:
                    children.discard(number)

    signal.signal(signal.SIGCHLD, bury)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        number = os.fork()
        if number == 0:
            become(order)
        children.add(number)
        print(number, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in children:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(number, signal.SIGKILL)


def become(order: dict[str, Any]) -> None:
    """Be the proxy, in a group of its own. Never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.chdir(order["folder"])
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((null, 0), (log, 1), (log, 2)):
            os.dup2(here, there)
        faulthandler.enable()  # stderr is the log now
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["litellm", *order["arguments"]]
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a file, as always here
        from litellm import run_server

        run_server()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
