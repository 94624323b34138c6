"""Fixtures of the tests that live in a house (house.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from talker import build_talker


@pytest.fixture(scope="session")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny dense model whose answers show what it has seen; see talker.py."""
    return build_talker(tmp_path_factory.mktemp("talker") / "talker.gguf")
