"""llama-server's own program in processes that can be killed: other builds than the one in the wheel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from slot_cache.lab import guard
from slot_cache.lab.process import child_environment, close_and_wait, free_port, wait_until_healthy

if TYPE_CHECKING:
    from typing_extensions import Self

BINARY_VARIABLE = "LLAMA_SERVER_BIN"
CONTEXT = 16384
START_SECONDS = 60.0
GRACE_SECONDS = 2.0


class ProgramServer:
    """llama-server's program with one model and one slot, a process that this one owns: it ends with `stop`, at once with
    `kill`, and whenever this process ends. start() after one of them starts it again at the same port.

    binary      the program
    model       the model's file
    folder      for its log and the saved caches
    arguments   more of the command line, stronger than what is set here
    """

    what = "llama-server"

    def __init__(
        self,
        binary: Path,
        model: Path,
        folder: Path,
        *,
        port: int = 0,
        save_path: Path | None = None,
        arguments: tuple[str, ...] = (),
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.binary = binary
        self.model = model
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.save_path = save_path or folder / "saved"
        self.log_path = folder / f"{self.what.split()[-1]}-{self.port}.log"
        self.arguments = arguments
        self.start_seconds = start_seconds
        self._child: subprocess.Popen[bytes] | None = None

    def _models(self) -> list[str]:
        return ["-m", str(self.model)]

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers. Raises StartError, also when the program cannot be run."""
        self.save_path.mkdir(parents=True, exist_ok=True)
        command = [str(self.binary), *self._models(), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--slot-save-path", f"{self.save_path}/"]
        command += ["-np", "1", "-c", str(CONTEXT), "--cache-ram", "0", "--no-warmup", *self.arguments]
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(guard.__file__), str(GRACE_SECONDS), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=child_environment({}, drop=("LLAMA_",)),
                start_new_session=True,
            )
        try:
            url = f"{self.base_url}/health"
            wait_until_healthy(self.what, url, lambda: self.running, self.log_path, self.start_seconds)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """End it at once (kill -9). `start` starts it again at the same port."""
        if self._child is not None:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
            self._child = None

    def stop(self) -> None:
        """End it and its models."""
        if self._child is not None:
            if not close_and_wait(self._child, GRACE_SECONDS + 3.0):
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
            self._child = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
