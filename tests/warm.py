"""Real LiteLLM proxies that start in one second: forked from a process that has imported LiteLLM already."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from slot_cache.lab.process import child_environment
from slot_cache.lab.proxy import FOREIGN_SETTINGS, LiteLLMProxy

READ_AT_IMPORT = frozenset({"PROMETHEUS_MULTIPROC_DIR"})
"""An environment with these is told to nobody who has imported LiteLLM already."""


class Kitchen:
    """The process that the proxies are forked from. It starts with the first of them, and ends with this process."""

    def __init__(self) -> None:
        self._warm: subprocess.Popen[str] | None = None

    def fork(self, order: dict[str, Any]) -> int:
        if self._warm is None or self._warm.poll() is not None:
            environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "INFO"}
            self._warm = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm_child.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=child_environment(environment, drop=FOREIGN_SETTINGS),
                start_new_session=True,  # Ctrl-C is for those who started it
            )
            self._read()
        assert self._warm.stdin is not None
        self._warm.stdin.write(json.dumps(order) + "\n")
        self._warm.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self._warm is not None and self._warm.stdout is not None
        line = self._warm.stdout.readline()
        if not line:
            raise RuntimeError("LiteLLM could not be imported")
        return line

    def close(self) -> None:
        if self._warm is not None:
            assert self._warm.stdin is not None
            self._warm.stdin.close()
            self._warm.wait()
            self._warm = None


kitchen = Kitchen()


class _Forked:
    """What a LiteLLMProxy needs of its child: the part of Popen's that it uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin = self
        self._end = os.pidfd_open(pid)
        self._ended = False

    def poll(self) -> int | None:
        if not self._ended and select.select([self._end], [], [], 0)[0]:
            self._ended = True
            os.close(self._end)
        return 0 if self._ended else None

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("litellm", timeout)
            select.select([self._end], [], [], left)
        self._signal(signal.SIGKILL)  # what it may have started itself
        return 0

    def close(self) -> None:
        """End in good order, as whoever closes Popen's stdin has it."""
        if self.poll() is None:
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class WarmProxy(LiteLLMProxy):
    """A LiteLLMProxy that need not import LiteLLM."""

    def _spawn(self, arguments: list[str], home: Path, environment: dict[str, str]) -> Any:
        if not hasattr(os, "pidfd_open") or READ_AT_IMPORT & set(environment) or self.num_workers > 1:
            return super()._spawn(arguments, home, environment)
        order = {"arguments": arguments, "folder": str(home), "log": str(self.log_path), "environment": environment}
        return _Forked(kitchen.fork(order))
