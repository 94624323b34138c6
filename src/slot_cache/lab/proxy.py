"""A real LiteLLM proxy in processes of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from slot_cache.lab import guard
from slot_cache.lab.process import child_environment, close_and_wait, free_port, wait_until_healthy

START_SECONDS = 120.0
GRACE_SECONDS = 5.0
# What would make this proxy another one than its config says.
FOREIGN_SETTINGS = ("LITELLM_", "LLAMA_", "DATABASE_", "REDIS_", "CONFIG_FILE_PATH", "WORKER_CONFIG", "NUM_WORKERS")


class LiteLLMProxy:
    """A LiteLLM proxy that this process owns, made from a config (what config.yaml holds, as a dict).

    It ends, with its workers, with `stop`, at once with `kill`, and whenever this process ends. Its URL and key stay the same
    over `restart`. config.yaml, its log and its working directory are in `folder`, a temporary one that goes with `close`
    unless one is given.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        num_workers: int = 1,
        extra_env: Mapping[str, str] | None = None,
        port: int = 0,
        folder: Path | None = None,
    ) -> None:
        self.config = config
        self.num_workers = num_workers
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.key = f"sk-{secrets.token_hex(16)}"
        self._own_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="slot-cache-proxy-"))
        self.log_path = self.folder / f"litellm-{self.port}.log"
        self._extra_env = dict(extra_env or {})
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process group in which the proxy and its workers run."""
        return self._child.pid if self._child else None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start it and wait, at most `timeout` seconds, until it answers. Raises StartError.

        Does nothing when it is running.
        """
        if self.running:
            return
        # A folder with nothing but the config in it: LiteLLM looks for callback modules beside the config and in the cwd.
        home = self.folder / f"proxy-{self.port}"
        home.mkdir(parents=True, exist_ok=True)
        config_path = home / "config.yaml"
        config_path.write_text(yaml.safe_dump(dict(self.config), sort_keys=False, allow_unicode=True))
        arguments = ["--config", str(config_path), "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--num_workers", str(self.num_workers), "--telemetry", "False"]
        env = {
            "LITELLM_MASTER_KEY": self.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOG": "INFO",
            "XDG_STATE_HOME": str(self.folder / "state"),  # not the user's index
            **self._extra_env,
        }
        self._child = self._spawn(arguments, home, child_environment(env, drop=FOREIGN_SETTINGS))
        try:
            url = f"{self.url}/health/liveliness"
            wait_until_healthy("the LiteLLM proxy", url, lambda: self.running, self.log_path, timeout)
        except BaseException:
            self.kill()
            raise

    def _spawn(self, arguments: list[str], home: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", "from litellm import run_server; run_server()", *arguments]
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", str(guard.__file__), str(GRACE_SECONDS), *program],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=home,
                env=environment,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Let it end in good order; whatever is left of it after a few seconds is killed."""
        if self._child is not None and not close_and_wait(self._child, GRACE_SECONDS + 5):
            self.kill()
        self._child = None

    def kill(self) -> None:
        """End the proxy and its workers with SIGKILL."""
        if self._child is not None:
            if self._child.poll() is None:
                os.killpg(self._child.pid, signal.SIGKILL)
            close_and_wait(self._child, GRACE_SECONDS)
            self._child = None

    def restart(self) -> None:
        """Stop it and start it again: same URL, same key, nothing left in memory."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop it and remove its temporary folder."""
        self.stop()
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> LiteLLMProxy:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()  # nobody waits for good order after an error or Ctrl-C
        self.close()
