"""Fixtures for tests with real programs. What they start is ended when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from slot_cache.lab.models import smollm2 as smollm2_path
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions
from tiny_models import build_all
from warm import kitchen

hypothesis.settings.register_profile("same each time", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("same each time")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with dense.gguf, other.gguf, swa.gguf and hybrid.gguf; see tiny_models.py."""
    return build_all(tmp_path_factory.mktemp("models"))


BESIDE_OTHERS = ("test_lab", "test_demo_and_bench", "test_real_bench_kinds", "test_fake_agrees", "test_killed")
"""Tests of real programs that start more than they measure."""


class RealTestsTogether(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """With two workers (`make test`) one has the tests of real programs, but for a few, so that nearly always there is one
    llama-server at a time."""

    def _split_scope(self, nodeid: str) -> str:
        folder, _, name = nodeid.partition("::")[0].rpartition("/")
        if folder != "tests/real":
            return nodeid
        return "beside others" if name.removesuffix(".py") in BESIDE_OTHERS else "real"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return RealTestsTogether(config, log)


@pytest.fixture(scope="session", autouse=True)
def kitchen_closes() -> Iterator[None]:
    yield
    kitchen.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct."""
    return smollm2_path()


@pytest.fixture
def llama_server(tiny_models: Path, tmp_path: Path) -> Iterator[Callable[..., EmbeddedServer]]:
    """Starts a llama-server: llama_server(slots=2, ...), options as in ServerOptions.

    `model` is dense.gguf, and `save_path` the folder "saved" of the test's tmp_path, unless told otherwise.
    """
    with ExitStack() as stack:

        def start(**options: Any) -> EmbeddedServer:
            defaults = {"model": tiny_models / "dense.gguf", "save_path": tmp_path / "saved", "threads": 1}
            server = EmbeddedServer(ServerOptions(**(defaults | options)), folder=tmp_path)
            return stack.enter_context(server)

        yield start


@pytest.fixture
def litellm_proxy(tmp_path: Path) -> Iterator[Callable[..., LiteLLMProxy]]:
    """Starts a LiteLLM proxy: litellm_proxy(config, num_workers=..., extra_env=...)."""
    with ExitStack() as stack:

        def start(config: Mapping[str, Any], **options: Any) -> LiteLLMProxy:
            return stack.enter_context(LiteLLMProxy(config, folder=tmp_path, **options))

        yield start
