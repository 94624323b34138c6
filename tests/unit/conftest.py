"""For all unit tests: litellm is imported without asking the network for its prices, and respx answers for servers that have
a name; those that have an address listen on a socket."""

from __future__ import annotations

import os
from collections.abc import Iterator

import httpx
import pytest

from slot_cache import llama_server, transport

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(scope="session", autouse=True)
def respx_answers_for_names() -> Iterator[None]:
    def new_sender(base_url: str, over: httpx.AsyncBaseTransport | None = None) -> transport.Sender:
        named = not (httpx.URL(base_url).host or "-")[0].isdigit()
        return transport.HttpxSender(over) if named else transport.new_sender(base_url, over)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(llama_server, "new_sender", new_sender)
        yield
