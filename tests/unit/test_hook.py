"""The callback, driven as LiteLLM drives it, on every road that a request may take."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import respx
from litellm.integrations.custom_logger import CustomLogger
from litellm.types.utils import CallTypes

import slot_cache
from fake_llama_server import Completion, FakeLlamaServer
from slot_cache import hook as hook_module
from slot_cache import index as index_module
from slot_cache import last_prompts, lost_leases, prompt_reading, report, servers, turns
from slot_cache import switcher as switcher_module
from slot_cache.ended_requests import EndedRequests
from slot_cache.findings import read_findings
from slot_cache.hook import MANAGED_CALLS, NOTE_SECONDS, SlotCacheHook
from slot_cache.state import Outcome
from slot_cache.switcher import SlotSwitcher
from slot_cache.turns import TOKEN
from slot_cache.unsteady import Finder

BASE = "http://llama:8080"
CHAT, TEXT = CallTypes.acompletion, CallTypes.atext_completion
MESSAGES, RESPONSES = CallTypes.anthropic_messages, CallTypes.aresponses
WORDS = "correct horse battery staple"

Kwargs = dict[str, Any]


class Road:
    """A proxy with the hook, as far as the hook can tell."""

    def __init__(self, fake: FakeLlamaServer, folder: Path) -> None:
        self.fake = fake
        self.hook = SlotCacheHook()
        self.options: dict[str, Any] = {
            "save_path": str(fake.save_dir),
            "state_dir": str(folder / "state"),
            "min_tokens": 1,
            "slot": 0,
        }
        self.prompts: dict[str, str] = {}

    def kwargs(
        self, session: str | None = "s", options: object = ..., metadata: str = "metadata", **more: Any
    ) -> Kwargs:
        """What LiteLLM gives the hook for a request."""
        return {
            "model": "openai/smol",
            "api_base": f"{BASE}/v1",
            "api_key": "none",
            "model_info": {"id": "d1", "slot_cache": self.options if options is ... else options},
            "messages": [{"role": "user", "content": f"{session}: {WORDS}"}],
            "litellm_call_id": "c1",
            metadata: {"model_group": "smol"},
            "proxy_server_request": {"headers": {} if session is None else {"x-session-id": session}},
            **more,
        }

    async def pre(self, kwargs: Kwargs, call_type: Any = CHAT) -> Kwargs | None:
        work = self.hook.async_pre_call_deployment_hook(kwargs=kwargs, call_type=call_type)
        return await asyncio.wait_for(work, 10)

    async def succeeds(self, kwargs: Kwargs, call_type: Any = CHAT, response: Any = None) -> None:
        await self.hook.async_post_call_success_deployment_hook(kwargs, response, call_type)

    async def fails(self, kwargs: Kwargs, call_type: Any = CHAT) -> None:
        await self.hook.async_post_call_failure_deployment_hook(
            MappingProxyType(kwargs), RuntimeError("no"), call_type, fallback_depth=None
        )

    async def answered(self, kwargs: Kwargs, response: Any = None) -> None:
        await self.hook.async_post_call_success_hook(data=kwargs, user_api_key_dict=None, response=response)

    async def failed(self, kwargs: Kwargs) -> None:
        await self.hook.async_post_call_failure_hook(
            request_data=kwargs, original_exception=RuntimeError("no"), user_api_key_dict=None, traceback_str=""
        )

    async def logged(self, kwargs: Kwargs, response: Any = None, cache_hit: bool | None = None) -> None:
        known = {name: kwargs[name] for name in ("metadata", "litellm_metadata") if name in kwargs}
        event = {"litellm_params": known, "litellm_call_id": kwargs["litellm_call_id"], "cache_hit": cache_hit}
        await self.hook.async_log_success_event(event, response, None, None)

    def stream(self, kwargs: Kwargs, chunks: AsyncIterator[Any]) -> Any:
        return self.hook.async_post_call_streaming_iterator_hook(
            user_api_key_dict=None, response=chunks, request_data=kwargs
        )

    async def headers(self, kwargs: Kwargs) -> dict[str, str] | None:
        """What the client is told, without numbers."""
        told = await self.all_headers(kwargs)
        numbers = ("-ms", "-tokens")
        return None if told is None else {name: told[name] for name in told if not name.endswith(numbers)}

    async def all_headers(self, kwargs: Kwargs) -> dict[str, str] | None:
        return await self.hook.async_post_call_response_headers_hook(
            data=kwargs, user_api_key_dict=None, response=None, request_headers={}, litellm_call_info={}
        )

    async def served(self, session: str = "s") -> Completion:
        """The server's part: the conversation goes on in the slot."""
        prompt = self.prompts.get(session, f"{session}> ") + "and then? "
        done = await self.fake.complete(prompt, slot=0)
        assert done.text == self.fake.truth(prompt)
        self.prompts[session] = prompt + done.text
        return done

    async def chat(self, session: str = "s", **more: Any) -> str:
        """A whole chat request; returns its outcome."""
        kwargs = self.kwargs(session, **more)
        sent = await self.pre(kwargs)
        assert sent is not None
        response = usage_of(await self.served(session))
        await self.succeeds(sent, CHAT, response)
        outcome = await self.headers(kwargs)
        await self.answered(kwargs, response)
        await self.logged(kwargs, response)
        assert outcome is not None
        return outcome["x-slot-cache"]

    @property
    def switcher(self) -> SlotSwitcher:
        (switcher,) = self.hook._servers.switchers.values()
        return switcher

    @property
    def is_free(self) -> bool:
        return not any(switcher.leased() for switcher in self.hook._servers.switchers.values())

    async def quiet(self) -> None:
        for switcher in self.hook._servers.switchers.values():
            while tasks := [task for task in switcher._tasks if "lost" not in str(task.get_coro())]:
                await asyncio.wait(tasks, timeout=5)


def usage(prompt: int, cached: int) -> SimpleNamespace:
    details = SimpleNamespace(cached_tokens=cached)
    return SimpleNamespace(usage=SimpleNamespace(prompt_tokens=prompt, prompt_tokens_details=details))


def usage_of(done: Completion) -> SimpleNamespace:
    return usage(done.n_prompt, done.cached)


@contextlib.asynccontextmanager
async def opened_road(folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int) -> AsyncIterator[Road]:
    for variable in ("LLAMA_SLOT", "LLAMA_SLOT_SAVE_PATH", "LLAMA_SAVE_IDLE_SECONDS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "xdg"))
    fake = FakeLlamaServer(slots=slots, save_dir=folder / "saves")
    with respx.mock(assert_all_called=False) as router:
        fake.mount(router, BASE)
        road = Road(fake, folder)
        yield road
        fake.clear()
        await road.hook.aclose()


@pytest.fixture
async def road(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Road]:
    async with opened_road(tmp_path, monkeypatch, slots=1) as road:
        yield road


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What was logged; of requests at once."""
    monkeypatch.setattr(EndedRequests, "_log", lambda self, loop, *line: report.info(*line))
    caplog.set_level("INFO", report.logger.name)
    return lambda: [
        record.getMessage().removeprefix("slot-cache: ")
        for record in caplog.records
        if record.name == report.logger.name and record.levelname != "DEBUG"
    ]


def request_lines(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("request ")]


# what LiteLLM looks for


HOOKS = [
    "async_pre_call_deployment_hook",
    "async_post_call_success_deployment_hook",
    "async_post_call_failure_deployment_hook",
    "async_post_call_success_hook",
    "async_post_call_failure_hook",
    "async_post_call_streaming_iterator_hook",
    "async_post_call_response_headers_hook",
    "async_log_success_event",
]


@pytest.mark.parametrize("name", HOOKS)
def test_litellm_finds_the_hook_in_the_class_itself(name: str) -> None:
    assert name in SlotCacheHook.__dict__


@pytest.mark.parametrize(
    "name", [name for name in vars(CustomLogger) if name in SlotCacheHook.__dict__ and name[0] != "_"]
)
def test_a_hook_has_the_parameters_that_litellm_passes(name: str) -> None:
    ours = inspect.signature(getattr(SlotCacheHook, name)).parameters
    theirs = inspect.signature(getattr(CustomLogger, name)).parameters
    assert list(ours) == list(theirs)
    assert [one.kind for one in ours.values()] == [one.kind for one in theirs.values()]
    needed = [one.name for one in theirs.values() if one.default is one.empty]
    assert [one.name for one in ours.values() if one.default is one.empty] == needed
    both = getattr(SlotCacheHook, name), getattr(CustomLogger, name)
    assert len({inspect.iscoroutinefunction(one) for one in both}) == 1
    assert len({inspect.isasyncgenfunction(one) for one in both}) == 1


def test_every_hook_is_one_that_litellm_has() -> None:
    ours = {name for name in SlotCacheHook.__dict__ if name.startswith(("async_", "log_"))}
    assert set(HOOKS) <= ours
    assert all(hasattr(CustomLogger, name) for name in ours)


def test_the_calls_that_are_managed_are_call_types_of_litellm() -> None:
    assert {"acompletion", "atext_completion", "anthropic_messages", "aresponses"} == MANAGED_CALLS
    assert {one.value for one in CallTypes} >= MANAGED_CALLS


def test_there_is_one_instance_in_a_process() -> None:
    assert isinstance(slot_cache.proxy_handler_instance, SlotCacheHook)
    assert slot_cache.proxy_handler_instance is slot_cache.proxy_handler_instance
    assert slot_cache.SlotCacheHook is SlotCacheHook


# a chat completion


async def test_a_request_is_pinned_to_its_slot_until_it_is_answered(road: Road) -> None:
    kwargs = road.kwargs()
    sent = await road.pre(kwargs)
    assert sent is not None
    assert sent["extra_body"] == {"id_slot": 0}
    assert {name: value for name, value in sent.items() if name != "extra_body"} == kwargs
    assert road.switcher.leased() == [0]
    await road.succeeds(sent)
    assert road.is_free
    await road.answered(kwargs)
    await road.logged(kwargs)
    assert road.is_free


async def test_each_session_finds_its_cache_again(road: Road) -> None:
    assert [await road.chat("a"), await road.chat("a")] == ["cold", "resident"]
    assert [await road.chat("b"), await road.chat("a"), await road.chat("b")] == ["cold", "restored", "restored"]


async def test_sessions_of_two_keys_are_kept_apart(road: Road) -> None:
    for who in ("1", "2"):
        kwargs = road.kwargs("a")
        kwargs["metadata"]["user_api_key_hash"] = who
        await road.pre(kwargs)
        assert await road.headers(kwargs) == {"x-slot-cache": "cold"}
        await road.served("a")
        await road.succeeds(kwargs)
    assert road.fake.count("erase") >= 1


@pytest.mark.parametrize("options", [{"slot": 1}, {"slot": 0}])
async def test_the_slot_is_that_of_the_settings(road: Road, options: dict[str, int]) -> None:
    road.fake.restart(slots=2)
    sent = await road.pre(road.kwargs(options={**road.options, **options}))
    assert sent is not None
    assert sent["extra_body"] == {"id_slot": options["slot"]}


async def test_extra_body_is_kept(road: Road) -> None:
    given = {"cache_prompt": True, "top_k": 5}
    sent = await road.pre(road.kwargs(extra_body=given))
    assert sent is not None
    assert sent["extra_body"] == {**given, "id_slot": 0}
    assert given == {"cache_prompt": True, "top_k": 5}


@pytest.mark.parametrize("extra_body", [None, "x", []])
async def test_an_extra_body_that_is_none_is_made(road: Road, extra_body: object) -> None:
    sent = await road.pre(road.kwargs(extra_body=extra_body))
    assert sent is not None
    assert sent["extra_body"] == {"id_slot": 0}


async def test_a_slot_that_the_client_chose_is_replaced(road: Road) -> None:
    sent = await road.pre(road.kwargs(id_slot=7, extra_body={"id_slot": 8}))
    assert sent is not None
    assert "id_slot" not in sent
    assert sent["extra_body"] == {"id_slot": 0}


async def test_two_requests_with_the_same_call_id_are_two_requests(road: Road) -> None:
    first, second = road.kwargs("a"), road.kwargs("b")
    assert first["litellm_call_id"] == second["litellm_call_id"]
    await road.pre(first)
    waiting = asyncio.ensure_future(road.pre(second))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await road.served("a")
    await road.succeeds(first)
    await waiting
    assert road.switcher.leased() == [0]
    await road.succeeds(first)
    await road.failed(first)
    assert road.switcher.leased() == [0]
    await road.succeeds(second)
    assert road.is_free


async def test_a_request_without_a_session_takes_its_turn(road: Road) -> None:
    kwargs = road.kwargs(None)
    sent = await road.pre(kwargs)
    assert sent is not None
    assert sent["extra_body"] == {"id_slot": 0}
    assert await road.headers(kwargs) == {"x-slot-cache": "cold"}
    await road.succeeds(kwargs)
    assert road.is_free


# streams


async def chunks(count: int = 3, fail: BaseException | None = None, gate: asyncio.Event | None = None) -> Any:
    for number in range(count):
        yield number
    if gate is not None:
        await gate.wait()
    if fail is not None:
        raise fail


async def test_a_stream_is_passed_on_and_its_end_frees_the_slot(road: Road) -> None:
    kwargs = road.kwargs(stream=True)
    await road.pre(kwargs)
    await road.served()
    seen = []
    async for chunk in road.stream(kwargs, chunks()):
        assert road.switcher.leased() == [0]
        seen.append(chunk)
    assert seen == [0, 1, 2]
    assert road.is_free
    assert await road.chat() == "resident"


async def test_the_answer_to_a_stream_s_request_is_not_its_end(road: Road) -> None:
    kwargs = road.kwargs(stream=True)
    await road.pre(kwargs)
    stream = road.stream(kwargs, chunks())
    await road.answered(kwargs, stream)
    assert road.switcher.leased() == [0]
    await stream.aclose()


async def test_a_client_that_leaves_in_a_stream_frees_the_slot(road: Road) -> None:
    kwargs = road.kwargs(stream=True)
    await road.pre(kwargs)
    stream = road.stream(kwargs, chunks())
    assert await anext(stream) == 0
    await stream.aclose()
    assert road.is_free


async def test_so_does_one_whose_task_is_cancelled(road: Road) -> None:
    kwargs = road.kwargs(stream=True)
    await road.pre(kwargs)
    last = asyncio.Event()

    async def consume() -> None:
        async for chunk in road.stream(kwargs, chunks(gate=asyncio.Event())):
            if chunk == 2:
                last.set()

    consumer = asyncio.ensure_future(consume())
    await last.wait()
    assert road.switcher.leased() == [0]
    consumer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await consumer
    assert road.is_free


async def test_a_stream_that_fails_frees_the_slot_and_fails(road: Road) -> None:
    kwargs = road.kwargs(stream=True)
    await road.pre(kwargs)
    with pytest.raises(RuntimeError, match="gone"):
        async for _ in road.stream(kwargs, chunks(fail=RuntimeError("gone"))):
            pass
    assert road.is_free


async def test_a_stream_that_was_never_begun_is_found_when_somebody_waits(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_leases, "LOST_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(lost_leases, "LOST_CONFIRM_SECONDS", 0.01)
    kwargs = road.kwargs("a", stream=True)
    await road.pre(kwargs)
    await road.served("a")
    never = road.stream(kwargs, chunks())
    assert await road.chat("b") == "cold"
    assert road.is_free
    await never.aclose()


async def test_a_stream_that_is_not_ours_is_passed_on(road: Road) -> None:
    kwargs = road.kwargs(options=False)
    assert [chunk async for chunk in road.stream(kwargs, chunks())] == [0, 1, 2]


async def test_other_requests_go_on_while_a_stream_is_read_slowly(road: Road) -> None:
    kwargs = road.kwargs("a", stream=True)
    await road.pre(kwargs)
    stream = road.stream(kwargs, chunks())
    assert await anext(stream) == 0
    waiting = asyncio.ensure_future(road.pre(road.kwargs("b")))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert [chunk async for chunk in stream] == [1, 2]
    assert await waiting is not None


# failures


async def test_a_failure_frees_the_slot_and_another_try_takes_it_again(road: Road) -> None:
    kwargs = road.kwargs()
    first = await road.pre(kwargs)
    assert first is not None
    await road.fails(first)
    assert road.is_free
    again = await road.pre(kwargs)
    assert again is not None
    assert road.switcher.leased() == [0]
    await road.succeeds(again)
    await road.answered(kwargs)
    assert road.is_free


async def test_another_try_takes_the_slot_from_one_whose_end_was_not_told(road: Road) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    assert await road.pre(kwargs) is not None
    assert road.switcher.leased() == [0]
    await road.succeeds(kwargs)
    assert road.is_free


async def test_a_try_that_waits_long_for_its_turn_still_gives_it_back(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(hook_module, "USAGE_SECONDS", 0.05)
    kwargs, other = road.kwargs("a"), road.kwargs("b")
    await road.pre(kwargs)
    await road.fails(kwargs)
    await road.pre(other)
    again = asyncio.ensure_future(road.pre(kwargs))
    await asyncio.sleep(0.3)  # longer than a request is remembered after its end
    assert request_lines(said()) == []
    await road.succeeds(other)
    assert await again is not None
    await asyncio.sleep(0.3)
    await road.succeeds(kwargs, response=usage_of(await road.served("a")))
    assert road.is_free
    lines = [line for line in request_lines(said()) if "cold" in line and "reused 0" in line]
    assert len(lines) == 1


async def test_a_try_that_takes_long_is_logged_when_it_ends(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(hook_module, "USAGE_SECONDS", 0.05)
    kwargs = road.kwargs("a")
    await road.pre(kwargs)
    await road.fails(kwargs)
    await road.pre(kwargs)
    await asyncio.sleep(0.2)
    assert request_lines(said()) == []
    stream = road.stream(kwargs, chunks())
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.2)
    assert len(request_lines(said())) == 1


@pytest.mark.parametrize("told", [True, False], ids=["failure told", "not told"])
async def test_a_fallback_to_a_route_that_is_not_ours_frees_the_slot(road: Road, told: bool) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    if told:
        await road.fails(kwargs)
    elsewhere = {**kwargs, "model_info": {"id": "d2"}, "api_base": "http://elsewhere/v1"}
    assert await road.pre(elsewhere) is None
    assert road.is_free
    assert await road.headers(kwargs) in (None, {"x-slot-cache": "unmanaged"})
    await road.succeeds(elsewhere)
    await road.answered(elsewhere)


async def test_a_fallback_to_another_of_our_routes_takes_its_slot(road: Road) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.fails(kwargs)
    kwargs["metadata"]["model_group"] = "other"
    assert await road.pre({**kwargs, "model_info": {"id": "d2", "slot_cache": road.options}}) is not None
    assert road.switcher.leased() == [0]
    await road.succeeds(kwargs)
    assert road.is_free
    await road.quiet()
    (await road.pre(road.kwargs("next")))
    names = [call.filename or "" for call in road.fake.calls if call.action == "save"]
    assert all(name.startswith("other-") for name in names)


async def test_a_request_that_fails_before_it_was_sent_frees_the_slot(road: Road) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.failed(kwargs)
    assert road.is_free


async def test_a_failure_that_is_told_twice_is_one(road: Road, said: Callable[[], list[str]]) -> None:
    kwargs, other = road.kwargs("a"), road.kwargs("b")
    await road.pre(kwargs)
    await road.fails(kwargs)
    await road.pre(other)
    await road.failed(kwargs)
    assert road.switcher.leased() == [0]
    assert len(request_lines(said())) == 1


async def test_what_a_broken_request_left_does_not_replace_what_is_saved(road: Road) -> None:
    await road.chat("a")
    await road.chat("b")
    await road.chat("a")
    await road.chat("b")
    (file,) = [file for file in road.fake.save_dir.iterdir() if b"a\0\0\0>\0\0\0" in file.read_bytes()]
    good = file.read_bytes()
    kwargs = road.kwargs("a")
    await road.pre(kwargs)
    await road.fake.complete("a> ", slot=0)
    await road.fails(kwargs)
    await road.chat("b")
    assert file.read_bytes() == good


# the other APIs


@pytest.mark.parametrize(
    ("call_type", "metadata"),
    [(TEXT, "metadata"), (RESPONSES, "litellm_metadata"), (MESSAGES, "litellm_metadata"), (CHAT, "litellm_metadata")],
)
async def test_every_api_is_pinned(road: Road, call_type: CallTypes, metadata: str) -> None:
    kwargs = road.kwargs(metadata=metadata)
    sent = await road.pre(kwargs, call_type)
    assert sent is not None
    assert sent["extra_body"] == {"id_slot": 0}
    await road.succeeds(sent, call_type)
    assert road.is_free


async def test_a_call_type_may_be_text(road: Road) -> None:
    assert await road.pre(road.kwargs(), "acompletion") is not None


async def test_the_call_inside_messages_shares_its_slot(road: Road) -> None:
    kwargs = road.kwargs(metadata="litellm_metadata")
    outer = await road.pre(kwargs, MESSAGES)
    assert outer is not None
    looks = road.fake.count("slots")
    inner = await road.pre({**outer, "input": []}, RESPONSES)
    assert inner is not None
    assert inner["extra_body"] == outer["extra_body"] == {"id_slot": 0}
    assert road.fake.count("slots") == looks
    await road.served()
    await road.succeeds(inner, RESPONSES)
    assert road.is_free
    await road.succeeds(outer, MESSAGES)
    await road.answered(kwargs)
    assert road.is_free


async def test_messages_are_tried_again_with_the_call_inside(road: Road) -> None:
    kwargs = road.kwargs(metadata="litellm_metadata")
    for told in (True, False):
        await road.pre(kwargs, MESSAGES)
        await road.pre(kwargs, RESPONSES)
        if told:
            await road.fails(kwargs, RESPONSES)
            await road.fails(kwargs, MESSAGES)
            assert road.is_free
    assert await road.pre(kwargs, MESSAGES) is not None
    assert await road.pre(kwargs, RESPONSES) is not None
    assert road.switcher.leased() == [0]
    await road.succeeds(kwargs, RESPONSES)
    assert road.is_free


@pytest.mark.parametrize(
    "call_type",
    [
        CallTypes.aembedding,
        CallTypes.aimage_generation,
        CallTypes.aspeech,
        CallTypes.atranscription,
        CallTypes.arerank,
        CallTypes.amoderation,
        CallTypes.completion,
        None,
        "something new",
    ],
)
async def test_everything_else_is_left_alone(road: Road, call_type: Any) -> None:
    kwargs = road.kwargs()
    before = dict(kwargs["metadata"])
    assert await road.pre(kwargs, call_type) is None
    assert kwargs["metadata"] == before
    assert road.fake.calls == []
    assert await road.headers(kwargs) is None


@pytest.mark.parametrize("options", [None, False])
async def test_a_route_that_does_not_ask_is_left_alone(
    road: Road, options: object, said: Callable[[], list[str]]
) -> None:
    kwargs = road.kwargs(options=options)
    assert await road.pre(kwargs) is None
    assert await road.pre({**kwargs, "model_info": None}) is None
    assert await road.pre({name: value for name, value in kwargs.items() if name != "model_info"}) is None
    await road.succeeds(kwargs)
    await road.answered(kwargs)
    await road.logged(kwargs)
    assert road.fake.calls == []
    assert said() == []


# LiteLLM's own cache


async def test_an_answer_from_litellm_s_cache_frees_the_slot(road: Road) -> None:
    await road.chat()
    await road.quiet()
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.answered(kwargs, SimpleNamespace(usage=SimpleNamespace(prompt_tokens=1000)))
    assert road.is_free
    await road.logged(kwargs, SimpleNamespace(usage=SimpleNamespace(prompt_tokens=1000)), cache_hit=True)
    await road.quiet()
    assert await road.chat() == "resident"


async def test_so_does_a_stream_from_litellm_s_cache(road: Road, said: Callable[[], list[str]]) -> None:
    await road.chat("a")
    await road.quiet()
    kwargs = road.kwargs("b", stream=True)
    await road.pre(kwargs)
    assert [chunk async for chunk in road.stream(kwargs, chunks())] == [0, 1, 2]
    assert road.is_free
    await road.logged(kwargs, SimpleNamespace(usage=SimpleNamespace(prompt_tokens=1000)), cache_hit=True)
    await road.quiet()
    assert len(request_lines(said())) == 2
    assert "reused -" in request_lines(said())[1]
    assert await road.chat("a") == "resident"


# what is wrong is said once


async def test_bad_settings_are_said_once_and_the_route_is_passed_through(
    road: Road, said: Callable[[], list[str]]
) -> None:
    for _ in range(3):
        assert await road.pre(road.kwargs(options={"slot": -1})) is None
    (line,) = said()
    for part in ("'smol'", "option slot is -1", "whole number"):
        assert part in line
    assert road.fake.calls == []


async def test_bad_settings_of_two_routes_are_said_of_both(road: Road, said: Callable[[], list[str]]) -> None:
    for route in ("one", "two"):
        kwargs = road.kwargs(options={"slot": -1})
        kwargs["model_info"].pop("id")
        kwargs["metadata"]["model_group"] = route
        assert await road.pre(kwargs) is None
    assert ["'one'" in line for line in said()] == [True, False]
    assert ["'two'" in line for line in said()] == [False, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"api_base": None}, "no api_base"),
        ({"api_base": "ftp://x"}, "no http or https URL"),
        ({"api_base": "http://llama:port"}, "no http or https URL"),
        ({"metadata": {}}, "without a route"),
        ({"metadata": None}, "without a route"),
    ],
)
async def test_what_a_route_lacks_is_said_once(
    road: Road, said: Callable[[], list[str]], change: dict[str, Any], words: str
) -> None:
    for _ in range(3):
        assert await road.pre({**road.kwargs(), **change}) is None
    (line,) = said()
    assert words in line


async def test_what_two_routes_lack_is_said_of_both(road: Road, said: Callable[[], list[str]]) -> None:
    for route in ("one", "two", "one"):
        kwargs = road.kwargs(api_base=None)
        kwargs["metadata"]["model_group"] = route
        assert await road.pre(kwargs) is None
    assert [("'one'" in line, "'two'" in line) for line in said()] == [(True, False), (False, True)]


async def test_limits_without_a_folder_are_said_to_be_of_no_use(road: Road, said: Callable[[], list[str]]) -> None:
    options = {"max_files": 3, "state_dir": road.options["state_dir"]}
    for _ in range(3):
        kwargs = road.kwargs(options=options)
        await road.pre(kwargs)
        await road.succeeds(kwargs)
    assert sum("need save_path" in line for line in said()) == 1


async def test_a_route_s_name_cannot_forge_a_line(road: Road, said: Callable[[], list[str]]) -> None:
    for options, change in ((..., {"api_base": None}), ({"slot": -1}, {}), ({"max_gib": 1}, {})):
        kwargs = road.kwargs(options=options, **change)
        kwargs["metadata"]["model_group"] = "x\nforged " + "r" * 10_000
        await road.pre(kwargs)
        await road.succeeds(kwargs)
    assert said()
    assert all("\n" not in line for line in said())
    assert all(len(line) < 1000 for line in said())


# a fault of ours is never one of the request


def bug(*args: Any, **more: Any) -> Any:
    raise ZeroDivisionError(WORDS)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (hook_module, "read_request"),
        (hook_module, "read_settings"),
        (prompt_reading, "fingerprint"),
        (hook_module, "tell_difference"),
        (servers, "same_server_key"),
        (servers, "CacheFolder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_bug_before_a_request_lets_it_go_on(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]], module: ModuleType, name: str
) -> None:
    if name == "tell_difference":
        await road.chat()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, bug)
        for _ in range(3):
            kwargs = road.kwargs()
            assert await road.pre(kwargs) is None
            await road.succeeds(kwargs)
            await road.answered(kwargs)
    bugs = [line for line in said() if "ZeroDivisionError" in line]
    assert len(bugs) == 1
    assert WORDS not in bugs[0]
    assert road.is_free
    assert await road.chat() in ("cold", "resident")


async def test_without_an_index_requests_are_managed_all_the_same(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(servers, "open_index", bug)
    assert [await road.chat("a"), await road.chat("b"), await road.chat("a")] == ["cold", "cold", "restored"]
    bugs = [line for line in said() if "ZeroDivisionError" in line]
    assert len(bugs) == 1
    assert WORDS not in bugs[0]


async def test_a_bug_in_a_switch_lets_the_request_go_on(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(switcher_module, "make_plan", bug)
        kwargs = road.kwargs()
        assert await road.pre(kwargs) is None
        assert await road.headers(kwargs) == {"x-slot-cache": "unmanaged"}
        await road.succeeds(kwargs)
    assert sum("ZeroDivisionError" in line for line in said()) >= 1
    assert await road.chat() == "cold"


async def test_a_bug_after_a_request_frees_the_slot_and_raises_nothing(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[Callable[[Kwargs], Awaitable[Any]]] = [
        lambda kwargs: road.succeeds(kwargs, response=usage(9, 3)),
        lambda kwargs: road.answered(kwargs, usage(9, 3)),
        road.fails,
        road.failed,
    ]
    monkeypatch.setattr(hook_module, "usage_of", bug)
    for way in ways:
        kwargs = road.kwargs()
        await road.pre(kwargs)
        await way(kwargs)
        assert road.is_free
        await road.logged(kwargs, usage(9, 3))


class Odd:
    """An answer that does not like to be asked."""

    @property
    def usage(self) -> Any:
        raise RuntimeError(WORDS)


@pytest.mark.parametrize(
    "response", [Odd(), None, 7, "text", {}, {"usage": None}, {"usage": 7}, {"usage": {"prompt_tokens": "9"}}]
)
async def test_an_odd_answer_frees_the_slot_all_the_same(road: Road, response: Any) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.succeeds(kwargs, response=response)
    assert road.is_free
    await road.answered(kwargs, response)
    await road.logged(kwargs, response)


ODD_KWARGS: list[Kwargs] = [
    {},
    {"model_info": 7},
    {"model_info": {"slot_cache": True}},
    {"model_info": {"slot_cache": True}, "metadata": 7, "litellm_metadata": []},
    {"model_info": {"slot_cache": True}, "metadata": {TOKEN: 7}, "litellm_params": 7},
    {"model_info": {"slot_cache": True}, "metadata": {"model_group": "m", TOKEN: ["x"]}, "api_base": 7},
    {"model_info": {"slot_cache": True}, "metadata": {"model_group": "\ud800"}, "api_base": "http://[", "messages": 7},
]


@pytest.mark.parametrize("kwargs", ODD_KWARGS)
async def test_odd_arguments_are_no_matter(road: Road, kwargs: Kwargs) -> None:
    assert await road.pre(kwargs) is None
    await road.succeeds(kwargs)
    await road.fails(kwargs)
    await road.answered(kwargs)
    await road.failed(kwargs)
    await road.hook.async_log_success_event(kwargs, None, None, None)
    assert await road.headers(kwargs) is None


@pytest.mark.parametrize(
    "messages",
    [None, 7, "text", [7], [{"role": "\ud800", "content": "x"}], [{"role": "user", "content": "\ud800"}]],
    ids=ascii,
)
async def test_odd_messages_are_managed_like_any_other(road: Road, messages: Any) -> None:
    assert await road.pre(road.kwargs(messages=messages)) is not None


async def test_a_long_prompt_is_managed_like_any_other(road: Road, said: Callable[[], list[str]]) -> None:
    for content in (WORDS * 5000, WORDS * 5000 + "!"):
        kwargs = road.kwargs(messages=[{"role": "user", "content": content}])
        assert await road.pre(kwargs) is not None
        await road.succeeds(kwargs, response=usage_of(await road.served()))
    assert "message 1 (user) is the same for its first" in request_lines(said())[1]


async def test_to_be_cancelled_in_the_queue_is_passed_on(road: Road) -> None:
    await road.pre(road.kwargs("a"))
    waiting = asyncio.ensure_future(road.pre(road.kwargs("b")))
    await asyncio.sleep(0.02)
    assert road.switcher.waiting(0) == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert road.switcher.waiting(0) == 0


async def test_a_server_that_is_gone_lets_the_request_go_on(road: Road, said: Callable[[], list[str]]) -> None:
    road.fake.crash()
    for _ in range(3):
        kwargs = road.kwargs()
        assert await road.pre(kwargs) is None
        assert await road.headers(kwargs) == {"x-slot-cache": "unmanaged"}
        await road.fails(kwargs)
        await road.failed(kwargs)
    assert sum("go on without a switch" in line for line in said()) == 1
    assert len(request_lines(said())) == 3
    assert all("unmanaged" in line for line in request_lines(said()))


async def test_a_key_that_is_refused_is_a_warning(road: Road, said: Callable[[], list[str]]) -> None:
    road.fake.api_key = "sk-llama"
    for _ in range(2):
        kwargs = road.kwargs(api_key="sk-wrong")
        assert await road.pre(kwargs) is None
        await road.fails(kwargs)
    (line,) = [line for line in said() if "401" in line]
    assert "check the route's api_key" in line
    assert "sk-wrong" not in line
    assert await road.pre(road.kwargs(api_key="sk-llama")) is not None


async def test_a_process_without_a_home_works_without_an_index_on_disk(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(index_module.Path, "home", homeless)
    del road.options["state_dir"]
    assert await road.pre(road.kwargs()) is not None


async def test_a_state_folder_that_cannot_be_written_is_done_without(road: Road, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    road.options["state_dir"] = str(tmp_path / "file" / "state")
    assert [await road.chat("a"), await road.chat("a"), await road.chat("b")] == ["cold", "resident", "cold"]
    assert await road.chat("a") == "restored"


async def test_the_gauges_are_told_in_the_next_event_loop_too(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    await road.chat()
    await asyncio.sleep(2 * NOTE_SECONDS)
    last = road.hook._loop = asyncio.new_event_loop()
    road.hook._note_soon(road.switcher)
    last.close()
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(road.hook.tally, "now", lambda *how: told.append(how))
    await road.chat()
    await asyncio.sleep(2 * NOTE_SECONDS)
    assert told


async def test_another_event_loop_is_left_alone(road: Road, said: Callable[[], list[str]]) -> None:
    await road.chat()
    answers: list[Any] = []

    def elsewhere() -> None:
        answers.append(asyncio.run(road.hook.async_pre_call_deployment_hook(road.kwargs(), CHAT)))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join, 10)
    assert answers == [None]
    assert any("another event loop" in line for line in said())
    assert await road.chat() == "resident"


# what is told


@pytest.mark.parametrize("outcome", ["cold", "resident", "restored"])
async def test_the_client_is_told_the_outcome(road: Road, outcome: str) -> None:
    await road.chat("a") if outcome != "cold" else None
    await road.chat("b") if outcome == "restored" else None
    kwargs = road.kwargs("a")
    await road.pre(kwargs)
    assert await road.headers(kwargs) == {"x-slot-cache": outcome}
    assert outcome in {one.value for one in Outcome}


async def test_a_line_is_written_when_the_answer_is_on_its_way(road: Road, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", report.logger.name)
    written = asyncio.Event()
    caplog.handler.addFilter(lambda record: "request " not in record.getMessage() or written.set() or True)
    await road.chat("a")
    assert not written.is_set()
    await asyncio.wait_for(written.wait(), 5)


async def test_each_request_has_one_line(road: Road, said: Callable[[], list[str]]) -> None:
    for session in ("a", "a", "b", "a"):
        await road.chat(session)
    lines = request_lines(said())
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["cold", "resident", "cold", "restored"]
    done = road.fake.truth("a> and then? ")
    assert len(done) == 4
    assert "reused 0, computed 13, waited " in lines[0]
    assert "reused 16, computed 11, waited " in lines[1]
    assert "the prompt is the same" in lines[1]
    assert "same" not in lines[2]


async def test_a_line_tells_where_the_prompt_differs(road: Road, said: Callable[[], list[str]]) -> None:
    first = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    more = [*first, {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}]
    other = [{"role": "system", "content": "be cruel"}, *more[1:]]
    for messages in (first, more, other, first):
        await road.chat(messages=messages)
    told = [line.partition("; ")[2] for line in request_lines(said())]
    assert told == [
        "",
        "the first 2 messages are the same, 2 new messages follow",
        "the first 0 messages are the same, message 1 (system) is the same for its first 0 of 8 characters",
        "the first 2 messages are the same, the end was cut",
    ]


async def test_another_try_is_not_compared_with_the_first(road: Road, said: Callable[[], list[str]]) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.fails(kwargs)
    await road.pre(kwargs)
    await road.succeeds(kwargs, response=usage_of(await road.served()))
    (line,) = request_lines(said())
    assert "same" not in line


async def test_a_request_that_never_had_a_usage_has_its_line_in_the_end(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(hook_module, "USAGE_SECONDS", 0.05)
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.succeeds(kwargs)
    assert request_lines(said()) == []
    await asyncio.sleep(0.3)
    (line,) = request_lines(said())
    assert "reused -, computed -" in line


async def test_what_is_remembered_of_requests_is_forgotten(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_module, "USAGE_SECONDS", 0.02)
    for number in range(5):
        await road.chat(f"s{number}")
        kwargs = road.kwargs()
        await road.pre(kwargs)
        await road.fails(kwargs)
        await road.failed(kwargs)
    await asyncio.sleep(0.3)
    assert len(road.hook._turns) == 0


async def test_only_so_many_requests_and_prompts_are_remembered(road: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURNS", 20)
    monkeypatch.setattr(last_prompts, "PROMPTS", 5)
    holder = road.kwargs("holder")
    await road.pre(holder)
    for number in range(50):
        loose = road.kwargs(f"s{number}", options={**road.options, "queue_seconds": 0.001})
        await road.pre(loose)
        await road.fails(loose)
    assert len(road.hook._turns) <= 21
    assert len(road.hook._prompts) <= 5
    await road.succeeds(holder)
    assert road.is_free


Usage = tuple[Any, str]
USAGES: dict[str, Usage] = {
    "chat": ({"usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 5}}}, "reused 5, computed 7"),
    "chat, nothing cached": ({"usage": {"prompt_tokens": 12, "prompt_tokens_details": None}}, "reused 0, computed 12"),
    "responses": (
        {"usage": {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 5}}},
        "reused 5, computed 7",
    ),
    "messages": ({"usage": {"input_tokens": 7, "cache_read_input_tokens": 5}}, "reused 5, computed 7"),
    "messages, all cached": ({"usage": {"input_tokens": 0, "cache_read_input_tokens": 5}}, "reused 5, computed 0"),
    "the last event of responses": (
        {"response": {"usage": {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 5}}}},
        "reused 5, computed 7",
    ),
    "an object": (usage(12, 5), "reused 5, computed 7"),
    "more cached than there is": (
        {"usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 9}}},
        "reused 9, computed 0",
    ),
}


@pytest.mark.parametrize(("response", "told"), USAGES.values(), ids=USAGES.keys())
async def test_the_server_s_count_is_told(road: Road, said: Callable[[], list[str]], response: Any, told: str) -> None:
    kwargs = road.kwargs()
    await road.pre(kwargs)
    await road.succeeds(kwargs, response=response)
    (line,) = request_lines(said())
    assert told in line


async def test_a_stream_s_count_is_told_by_the_log_event(road: Road, said: Callable[[], list[str]]) -> None:
    response = {"usage": {"prompt_tokens": 12, "prompt_tokens_details": {"cached_tokens": 5}}}
    for early in (True, False):
        kwargs = road.kwargs(stream=True)
        await road.pre(kwargs)
        stream = road.stream(kwargs, chunks())
        await anext(stream)
        if early:
            await road.logged(kwargs, response)
            assert road.switcher.leased() == [0]
        async for _ in stream:
            pass
        if not early:
            await road.logged(kwargs, response)
        await road.logged(kwargs, response)
    assert ["reused 5, computed 7" in line for line in request_lines(said())] == [True, True]


async def test_no_line_tells_anything_that_a_client_wrote(road: Road, said: Callable[[], list[str]]) -> None:
    asked = road.kwargs(
        f"{WORDS}-session",
        messages=[
            {"role": "system", "content": WORDS},
            {"role": WORDS, "content": WORDS, "name": WORDS},
            {"role": "assistant", "tool_calls": [{"function": {"name": WORDS, "arguments": WORDS}}]},
        ],
        tools=[{"type": "function", "function": {"name": WORDS}}],
        api_key="sk-secret-key",
    )
    for number in range(3):
        kwargs = {**asked, "metadata": {"model_group": "smol", "user_api_key_hash": "0123secrethash"}}
        kwargs["messages"] = [*asked["messages"][: number + 1], {"role": WORDS, "content": str(number)}]
        await road.pre(kwargs)
        await road.succeeds(kwargs, response=usage_of(await road.served()))
        await road.answered(kwargs)
        await road.quiet()
        if number == 1:
            road.fake.fail("slots", "500")
    assert len(request_lines(said())) == 3
    text = "\n".join(said())
    for secret in (*WORDS.split(), "sk-secret-key", "0123secrethash"):
        assert secret not in text


async def test_useless_restores_are_learned_from_the_answers(road: Road, said: Callable[[], list[str]]) -> None:
    """The first starts a lesson: from then on slots are rewound before they are saved; the next one ends it."""
    await road.chat("a")
    await road.chat("b")
    outcomes, warnings = [], []
    for session in ("a", "b", "a", "b"):
        kwargs = road.kwargs(session)
        sent = await road.pre(kwargs)
        assert sent is not None
        outcomes.append(await road.headers(kwargs))
        done = await road.served(session)
        await road.succeeds(sent, response=usage(done.n_prompt, 0))
        await road.quiet()
        warnings.append(sum("--swa-full" in line for line in said()))
    assert outcomes == [{"x-slot-cache": outcome} for outcome in ("restored", "cold", "restored", "cold")]
    assert warnings == [0, 0, 1, 1]
    assert road.fake.count("template") == 3 * 2


# prompts that hold still


LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={}; "
CODE = [{"type": "text", "text": "You are Claude Code."}]
ASKED = [{"role": "user", "content": "hello"}]


def claude(road: Road, checksum: str, **more: Any) -> Kwargs:
    system = [{"type": "text", "text": LINE.format(checksum)}, *CODE]
    return road.kwargs(metadata="litellm_metadata", messages=ASKED, system=system, max_tokens=9, **more)


def steady(road: Road, *rules: Any, claude_code: bool = True) -> None:
    road.options["steady"] = {"claude_code": claude_code, "rules": list(rules)}


async def test_claude_code_s_line_is_taken_out_of_what_is_sent_and_fingerprinted(
    road: Road, said: Callable[[], list[str]]
) -> None:
    for checksum in ("fa690", "1b2c3"):
        kwargs = claude(road, checksum)
        sent = await road.pre(kwargs, MESSAGES)
        assert sent is not None
        assert sent["system"] == CODE
        assert sent["extra_body"] == {"id_slot": 0}
        assert kwargs["system"][0]["text"] == LINE.format(checksum)
        unchanged = [name for name in kwargs if name != "system"]
        assert all(sent[name] is kwargs[name] for name in unchanged)
        inner = {**sent, "instructions": CODE[0]["text"], "input": ASKED}
        again = await road.pre(inner, RESPONSES)
        assert again == inner
        headers = await road.headers(kwargs)
        assert headers is not None
        assert headers["x-slot-cache-steadied"] == "claude_code"
        await road.succeeds(sent, MESSAGES, usage_of(await road.served()))
        await road.answered(kwargs)
        await road.logged(kwargs)
    assert "the prompt is the same" in request_lines(said())[1]
    assert road.hook.counts == {"steadied": 2, "steadied_claude_code": 2}


async def test_a_system_prompt_of_which_nothing_is_left_is_not_sent(road: Road) -> None:
    kwargs = road.kwargs(system=LINE.format("0"))
    sent = await road.pre(kwargs, MESSAGES)
    assert sent is not None
    assert "system" not in sent
    assert "system" in kwargs


async def test_the_line_stays_where_it_is_asked_to(road: Road) -> None:
    steady(road, claude_code=False)
    kwargs = claude(road, "fa690")
    sent = await road.pre(kwargs, MESSAGES)
    assert sent is not None
    assert sent["system"] is kwargs["system"]
    assert await road.headers(kwargs) == {"x-slot-cache": "cold"}
    assert not road.hook.counts


async def test_what_no_rule_matches_goes_out_as_it_is(road: Road) -> None:
    steady(road, "times", "uuids", "git_status")
    kwargs = road.kwargs(tools=[{"name": "f"}])
    sent = await road.pre(kwargs)
    assert sent is not None
    assert all(sent[name] is kwargs[name] for name in kwargs)
    assert await road.headers(kwargs) == {"x-slot-cache": "cold"}


MOVES = {"name": "clock", "pattern": r"at [0-9]+", "do": "move", "where": ["system", "first_user"]}


async def test_the_call_inside_of_another_one_is_not_changed_again(road: Road) -> None:
    steady(road, MOVES)
    kwargs = road.kwargs(metadata="litellm_metadata", messages=[{"role": "user", "content": "at 5, what?"}])
    sent = await road.pre(kwargs, MESSAGES)
    assert sent is not None
    assert sent["messages"] == [{"role": "user", "content": ", what?\n\nat 5"}]
    inner = {**sent, "input": sent["messages"]}
    again = await road.pre(inner, RESPONSES)
    assert again is not None
    assert again["input"] is inner["input"]


async def test_the_call_inside_is_not_changed_again_when_there_is_no_slot_either(road: Road) -> None:
    steady(road, MOVES)
    road.fake.crash()
    kwargs = road.kwargs(metadata="litellm_metadata", messages=[{"role": "user", "content": "at 5, what?"}])
    sent = await road.pre(kwargs, MESSAGES)
    assert sent is not None
    assert sent["messages"] == [{"role": "user", "content": ", what?\n\nat 5"}]
    assert "extra_body" not in sent
    assert await road.pre({**sent, "input": sent["messages"]}, RESPONSES) is None
    assert await road.headers(kwargs) == {"x-slot-cache": "unmanaged", "x-slot-cache-steadied": "clock"}


async def test_another_attempt_is_made_to_hold_still_in_the_same_way(road: Road) -> None:
    steady(road, {**MOVES, "do": "freeze"})
    first = road.kwargs(messages=[{"role": "system", "content": "at 1"}, *ASKED])
    await road.pre(first)
    await road.succeeds(first)
    kwargs = road.kwargs(messages=[{"role": "system", "content": "at 2"}, *ASKED])
    for _ in range(2):
        sent = await road.pre(kwargs)
        assert sent is not None
        assert sent["messages"][0]["content"] == "at 1"
        await road.fails(kwargs)
    assert road.hook.counts == {"steadied": 1, "steadied_clock": 1}


async def test_sessions_and_keys_do_not_see_each_other_s_frozen_texts(road: Road) -> None:
    steady(road, {**MOVES, "do": "freeze"})
    texts = []
    for number, (session, key) in enumerate([("a", "1"), ("b", "1"), ("a", "2"), (None, "1"), (None, "2"), ("a", "1")]):
        kwargs = road.kwargs(session, messages=[{"role": "system", "content": f"at {number}"}, *ASKED])
        kwargs["metadata"]["user_api_key_hash"] = key
        sent = await road.pre(kwargs)
        assert sent is not None
        texts.append(sent["messages"][0]["content"])
        await road.succeeds(kwargs)
    assert texts == ["at 0", "at 1", "at 2", "at 3", "at 4", "at 0"]


async def test_a_long_prompt_is_made_to_hold_still_as_well(road: Road) -> None:
    kwargs = road.kwargs(messages=[{"role": "system", "content": LINE.format("0") + "\n" + WORDS * 5000}, *ASKED])
    sent = await road.pre(kwargs)
    assert sent is not None
    assert sent["messages"][0]["content"] == WORDS * 5000


async def test_another_route_s_answer_is_not_said_to_be_steadied(road: Road) -> None:
    kwargs = claude(road, "fa690")
    await road.pre(kwargs, MESSAGES)
    await road.fails(kwargs, MESSAGES)
    assert await road.pre({**kwargs, "model_info": {}}, MESSAGES) is None
    assert await road.headers(kwargs) == {"x-slot-cache": "unmanaged"}


async def test_what_is_frozen_or_moved_is_kept_nowhere_but_in_memory(
    road: Road, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    secret = "Xyzzy"
    steady(road, {**MOVES, "name": "m", "pattern": f"{secret}-m [0-9]+"}, {**MOVES, "pattern": secret, "do": "freeze"})
    for number in range(5):
        rows = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}] * number + ASKED
        system = {"role": "system", "content": f"{secret} {number} {secret}-m {number} {WORDS * 20}"}
        await road.chat(messages=[system, *rows])
    await road.chat("other")
    await road.quiet()
    assert road.hook.counts["steadied_m"] == 5
    assert not any(secret in line for line in said())
    for file in (tmp_path / "state").rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(prompt_reading, "steadied"), (Finder, "see"), (Finder, "charge")],
    ids=["steadied", "see", "charge"],
)
async def test_a_fault_of_a_rule_or_of_the_finder_fails_no_request(
    road: Road, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]], owner: object, name: str
) -> None:
    monkeypatch.setattr(owner, name, bug)
    for _ in range(3):
        assert await road.chat() in ("cold", "resident")
    assert sum("ZeroDivisionError" in line for line in said()) == 1


async def test_a_place_that_changes_again_and_again_is_told_once(road: Road, said: Callable[[], list[str]]) -> None:
    rows: list[Any] = []
    for number in range(6):
        rows += [{"role": "user", "content": f"{number}?"}]
        system = f"{WORDS} at 10:0{number}:00. {WORDS * 30}"
        await road.chat(messages=[{"role": "system", "content": system}, *rows])
        rows += [{"role": "assistant", "content": "yes"}]
    (line,) = [line for line in said() if "differs in" in line]
    assert line.startswith("route 'smol': a conversation's message 1 (system) differs in 3 of its requests")
    assert "(a time)" in line
    assert "steady: {rules: [times]}" in line
    assert not any(word in line for word in WORDS.split())
    assert road.hook.counts == {"unsteady": 1}
    folder = Path(road.options["state_dir"])
    for _ in range(100):
        if read_findings(folder):
            break
        await asyncio.sleep(0.01)
    (found,) = read_findings(folder)
    assert (found.route, found.role, found.shape, found.times) == ("smol", "system", "a time", 3)
    assert not any(word in (folder / "unsteady.json").read_text() for word in WORDS.split())


async def test_what_a_rule_holds_still_is_not_told(road: Road, said: Callable[[], list[str]]) -> None:
    steady(road, "times")
    rows: list[Any] = []
    for number in range(6):
        rows += [{"role": "user", "content": f"{number}?"}]
        await road.chat(messages=[{"role": "system", "content": f"at 10:0{number}:00. {WORDS * 30}"}, *rows])
        rows += [{"role": "assistant", "content": "yes"}]
    assert not [line for line in said() if "differs in" in line]
    assert road.hook.counts["steadied_times"] == 6
