"""What most tests with real programs live in: a llama-server behind a relay, and a LiteLLM proxy in front of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slot_cache.lab import configs
from slot_cache.lab.chat import open_client
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions
from warm import WarmProxy

TEMPLATE_TOKENS = 6
"""What all chats have in common: `<|im_start|>user` and a new line."""


def server(model: Path, folder: Path, **options: Any) -> EmbeddedServer:
    """A llama-server of a tiny model that is to be started: one slot, no RAM cache, saves in folder/saved."""
    defaults: dict[str, Any] = {"model": model, "save_path": folder / "saved", "threads": 1, "ctx": 32768}
    return EmbeddedServer(ServerOptions(**(defaults | options)), folder=folder)


@contextlib.contextmanager
def proxy(
    folder: Path,
    *routes: dict[str, Any],
    callbacks: Sequence[str] = (configs.CALLBACK,),
    modules: Mapping[str, str] | None = None,
    litellm_settings: Mapping[str, Any] | None = None,
    router_settings: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[LiteLLMProxy]:
    """A running LiteLLM proxy with these routes and callbacks.

    modules   source of Python modules that lie beside config.yaml, by their names without .py
    """
    config = configs.config(*routes)
    config["litellm_settings"] |= {"callbacks": list(callbacks), **(litellm_settings or {})}
    config["router_settings"] |= router_settings or {}
    started = WarmProxy(config, folder=folder, extra_env={"XDG_STATE_HOME": str(folder / "state"), **(env or {})})
    home = folder / f"proxy-{started.port}"
    home.mkdir(parents=True)
    for name, source in (modules or {}).items():
        (home / f"{name}.py").write_text(source)
    with started:
        yield started


async def answers_without_cache(base_url: str, prompts: Iterable[str], tokens: int) -> dict[str, str]:
    """What a server answers to each prompt when it computes all of it: `tokens` tokens at temperature 0."""
    answers = {}
    async with open_client(base_url) as client:
        for prompt in prompts:
            body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False}
            answer = (await client.post("/completion", json=body)).json()
            assert answer["timings"]["cache_n"] == 0
            answers[prompt] = answer["content"]
    return answers
