"""In company: other callbacks that raise, call ids that clients choose, LiteLLM's own retries and fallbacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

import house
from clients import APIS, Api, RequestFailed, Session, api_of
from relay import Relay
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import CALLBACK, route
from slot_cache.lab.proxy import LiteLLMProxy

pytestmark = pytest.mark.real

AT_ONCE = 4.0
"""Seconds. A slot that nobody gave back is noticed after 6."""

MISCHIEF = '''
from litellm.integrations.custom_logger import CustomLogger


def asked(data, where):
    sent = data.get("proxy_server_request") or {}
    return (sent.get("headers") or {}).get("x-mischief") == where


class Mischief(CustomLogger):
    """Raises where a request's header says so."""

    async def async_pre_call_deployment_hook(self, kwargs, call_type):
        if asked(kwargs, "before"):
            raise RuntimeError("mischief")

    async def async_post_call_success_hook(self, data, user_api_key_dict, response):
        if asked(data, "after"):
            raise RuntimeError("mischief")

    async def async_post_call_streaming_iterator_hook(self, user_api_key_dict, response, request_data):
        count = 0
        async for chunk in response:
            count += 1
            if count > 3 and asked(request_data, "within"):
                raise RuntimeError("mischief")
            yield chunk


handler = Mischief()
'''


@dataclass(frozen=True)
class House:
    """Two servers of one slot: `managed` and `shaky` lead to the first, each by a relay, `steady` to the second."""

    relay: Relay
    shaky: Relay
    steady: Relay
    proxy: LiteLLMProxy


@pytest.fixture(scope="module")
def company(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("company")
    with (
        house.server(talker, folder / "first") as first,
        house.server(talker, folder / "second") as second,
        Relay(first.base_url) as relay,
        Relay(first.base_url) as shaky,
        Relay(second.base_url) as steady,
        house.proxy(
            folder,
            route("managed", relay.base_url, slot_cache=True),
            route("shaky", shaky.base_url, slot_cache=True),
            route("steady", steady.base_url, slot_cache=True),
            route("retried", shaky.base_url, slot_cache=True),
            callbacks=[CALLBACK, "mischief.handler"],
            modules={"mischief": MISCHIEF},
            router_settings={"fallbacks": [{"shaky": ["steady"]}], "model_group_retry_policy": RETRIES},
        ) as proxy,
    ):
        yield House(relay, shaky, steady, proxy)


RETRIES = {"retried": {"InternalServerErrorRetries": 2}}


@pytest_asyncio.fixture
async def client(company: House) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(company.proxy.url, company.proxy.key) as opened:
        yield opened


@pytest.mark.parametrize(
    ("where", "stream"),
    [("before", False), ("before", True), ("after", False), ("within", True)],
    ids=["before", "before a stream", "after", "within a stream"],
)
@pytest.mark.parametrize("api", APIS)
async def test_another_callback_that_raises(
    company: House, client: httpx.AsyncClient, api: Api, where: str, stream: bool
) -> None:
    troubled, next_one = (Session(f"{number} {api} {where} {stream}", "managed") for number in range(2))
    before = await troubled.ask(client, f"{troubled.name} " * 20, api=api)
    with company.relay.paced():
        with pytest.raises((RequestFailed, httpx.RemoteProtocolError)):
            await troubled.ask(
                client,
                "Trouble.",
                api=api,
                stream=stream,
                tokens=500 if where == "within" else 16,
                headers={"x-mischief": where},
            )
        started = time.monotonic()
        reply = await next_one.ask(client, f"{next_one.name} " * 20, api=api)
        seconds = time.monotonic() - started
    print(f"{api}, {where}: the next session was answered after {seconds:.2f} s")
    assert seconds < AT_ONCE
    assert reply.outcome == "cold"
    again = await troubled.ask(client, "And now?", api=api)
    assert again.outcome == "restored"
    assert again.cached_tokens >= before.prompt_tokens


async def test_requests_with_the_same_call_id_are_kept_apart(company: House, client: httpx.AsyncClient) -> None:
    async def one(name: str) -> None:
        session = Session(name, "managed")
        last = 0
        for turn in range(5):
            api, stream = api_of(name, turn), turn % 2 == 0
            reply = await session.ask(
                client, f"{name} {turn} " * 20, api=api, stream=stream, headers={"x-litellm-call-id": "one-id-for-all"}
            )
            assert reply.cached_tokens >= 0.99 * last
            assert reply.outcome == "restored" if turn else reply.outcome == "cold"
            last = reply.prompt_tokens

    await asyncio.gather(*(one(name) for name in "ABCD"))


async def test_retries(company: House, client: httpx.AsyncClient) -> None:
    session, other = Session("retried", "retried"), Session("other", "retried")
    last = await session.ask(client, "Retried. " * 20)
    await other.ask(client, "Other. " * 20)
    first = len(company.shaky.calls)
    company.shaky.fail("request", "500", times=2)
    reply, other_reply = await asyncio.gather(session.ask(client, "Again."), other.ask(client, "Again."))
    assert company.shaky.count("request", first) == 4
    assert [reply.outcome, other_reply.outcome].count("unmanaged") == 0
    assert reply.cached_tokens >= last.prompt_tokens
    assert (await session.ask(client, "Once more.")).cached_tokens >= reply.prompt_tokens


async def test_fallback(company: House, client: httpx.AsyncClient) -> None:
    session, other = Session("falls", "shaky"), Session("other", "shaky")
    company.shaky.fail("request", "500", times=2)
    first = await session.ask(client, "Falls. " * 20)
    second = await session.ask(client, "Falls again.")
    company.shaky.heal()
    assert (first.outcome, second.outcome) == ("cold", "resident")
    assert second.cached_tokens >= first.prompt_tokens
    started = time.monotonic()
    assert (await other.ask(client, "Other. " * 20)).outcome == "cold"
    assert (await Session("other", "steady").ask(client, "Other. " * 20)).outcome == "cold"
    assert time.monotonic() - started < AT_ONCE
