"""Models with recurrent layers: their restores are reused where slots are rewound before they are saved.

llama.cpp saves the context checkpoints, with which such restores are reused as they are, since some build after b11434. So
most of this needs llama-server's own program as `make llama-server` builds it; what a newer one does, the last test tells.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from router_server import ModelServer, RouterServer, find_binary

import house
from clients import Api, Reply, Session, count_tokens
from relay import Call, Relay
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import CALLBACK, route
from slot_cache.lab.proxy import LiteLLMProxy
from talker import build_hybrid_caller, build_hybrid_talker

BINARY, WHY_NOT = find_binary()
pytestmark = pytest.mark.real
older = pytest.mark.skipif(BINARY is None, reason=f"no real llama-server: {WHY_NOT}")

TURNS = 6
LENGTH = 1500
LESSON = "was not reused: its slots are rewound"
TOO_DEAR = "keeps no context checkpoints"
LEARNING = 2
"""So many returning turns, one of each conversation, are spent on learning what the model is like."""

NEVER_REWINDS = """
from slot_cache.hook import SlotCacheHook
from slot_cache.servers import Servers


class ServersThatAreNotRewound(Servers):
    async def switcher(self, request, settings, index):
        switcher = await super().switcher(request, settings, index)
        switcher.actions.needs_rewind = lambda identity: False
        switcher.actions._stop = lambda identity, why: None
        return switcher


class NeverRewinds(SlotCacheHook):
    def __init__(self):
        super().__init__()
        self._servers.__class__ = ServersThatAreNotRewound

    async def async_pre_call_deployment_hook(self, kwargs, call_type):
        info = kwargs.get("model_info") or {}
        if "slot_cache_never_rewinds" not in info:
            return None
        kwargs = {**kwargs, "model_info": {**info, "slot_cache": info["slot_cache_never_rewinds"]}}
        return await super().async_pre_call_deployment_hook(kwargs, call_type)

    # LiteLLM looks for these in the class itself
    async_post_call_streaming_iterator_hook = SlotCacheHook.async_post_call_streaming_iterator_hook
    async_post_call_response_headers_hook = SlotCacheHook.async_post_call_response_headers_hook


handler = NeverRewinds()
"""

DROPS_REASONING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m.content or '' -}}
{%- for call in m.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""
"""As Qwen3's: reasoning stays in the history only since the last message of the user, in a loop of tool calls."""

CALL = "<TOCAL>"
CALLS_AT_ONCE = (
    DROPS_REASONING.replace("assistant\\n<think>\\n' }}{% endif -%}", "assistant\\n' }}{% endif -%}")
    .replace("<think>", "<!-- ")
    .replace("</think>", " -->")
    .replace("<tool_call>", CALL)
    .replace("</tool_call>", CALL.replace("<", "</"))
)
"""The same for a model that calls a tool without a thought."""


@dataclass
class House:
    """The routes `managed` and `idle` (which saves when idle) lead to `relay`, `never` (which never rewinds) to `other`."""

    folder: Path
    models: Path
    relay: Relay
    other: Relay
    proxy: LiteLLMProxy
    names: Iterator[int] = field(default_factory=lambda: itertools.count())

    def model(self, kind: str = "hybrid") -> Path:
        """A model that has not been seen before."""
        path = self.folder / f"{kind}-{next(self.names)}.gguf"
        shutil.copyfile(self.models / f"{kind}.gguf", path)
        return path

    def server(self, model: Path, *arguments: str) -> ModelServer:
        server = ModelServer(model, self.folder, save_path=self.folder / "saved", arguments=arguments)
        self.relay.target = self.other.target = server.base_url
        return server

    def log(self) -> str:
        return self.proxy.log_path.read_text()


@pytest.fixture(scope="module")
def home(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("hybrid")
    options = {"save_path": str(folder / "saved")}
    with Relay() as relay, Relay() as other:
        never = route("never", other.base_url) | {"model_info": {"slot_cache_never_rewinds": options}}
        with house.proxy(
            folder,
            route("managed", relay.base_url, slot_cache=options),
            route("idle", relay.base_url, slot_cache={**options, "save_idle_seconds": 0.1}),
            never,
            callbacks=[CALLBACK, "never_rewinds.handler"],
            modules={"never_rewinds": NEVER_REWINDS},
        ) as proxy:
            yield House(folder, tiny_models, relay, other, proxy)
            log = proxy.log_path.read_text()
    assert "internal fault" not in log
    assert "Traceback" not in log


@pytest_asyncio.fixture
async def client(home: House) -> AsyncIterator[httpx.AsyncClient]:
    async with open_client(home.proxy.url, home.proxy.key) as opened:
        yield opened


@dataclass
class Talk:
    """A conversation, and what each returning turn reused of its previous prompt."""

    session: Session
    scripted: bool = False
    """its history has other answers than were given, as with a client that leaves the reasoning out"""
    reuse: list[float] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    async def turn(self, client: httpx.AsyncClient, *, length: int = LENGTH, **options: Any) -> Reply:
        text = words_of(f"{self.session.name[0]}{len(self.replies)}-", length)
        reply = await self.session.ask(client, text, remember=not self.scripted, tokens=40, **options)
        if self.scripted:
            self.session.said += [("user", text), ("assistant", f"So it is, {len(self.replies)} times.")]
        if self.replies:
            self.reuse.append(reply.cached_tokens / self.replies[-1].prompt_tokens)
        self.replies.append(reply)
        return reply


def words_of(name: str, length: int) -> str:
    """A text that differs from every other name's in its first characters and all along."""
    numbers = (f"{name}{number * 7919 % 1000} " for number in itertools.count())
    text = ""
    while len(text) < length:
        text += next(numbers)
    return text[:length]


def talks(of: str, what: str, names: str = "AB", scripted: bool = False) -> list[Talk]:
    return [Talk(Session(f"{name} {what}", of), scripted) for name in names]


async def take_turns(client: httpx.AsyncClient, talking: Sequence[Talk], turns: int = TURNS, **options: Any) -> None:
    for _ in range(turns):
        for talk in talking:
            await talk.turn(client, **options)


def reuse_of(talking: Sequence[Talk], skip: int = 0) -> list[float]:
    """What the returning turns reused, in the order in which they came, but for the first `skip`."""
    return list(itertools.chain.from_iterable(zip(*(talk.reuse for talk in talking), strict=True)))[skip:]


def rewinds(calls: Sequence[Call]) -> list[str]:
    """The calls that only rewinding makes."""
    return [call.path for call in calls if call.path.startswith(("/apply-template", "/completion"))]


def shown(parts: Sequence[float]) -> list[float]:
    return [round(part, 3) for part in parts]


@older
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_returning_turns_reuse_their_previous_prompt(
    home: House, client: httpx.AsyncClient, api: Api, stream: bool
) -> None:
    talking = talks("managed", f"{api} {stream}")
    before = home.log().count(LESSON)
    with home.server(home.model()):
        await take_turns(client, talking, api=api, stream=stream)
    reuse = reuse_of(talking)
    print(f"{api}, {'stream' if stream else 'whole'}: reuse {shown(reuse)}")
    assert len(reuse) == 2 * TURNS - 2
    assert min(reuse[LEARNING:]) >= 0.9
    assert home.log().count(LESSON) == before + 1


@older
async def test_without_rewinding_nothing_is_reused(home: House, client: httpx.AsyncClient) -> None:
    talking = talks("never", "never", scripted=True)
    with home.server(home.model()):
        await take_turns(client, talking)
    print(f"without rewinding: reuse {shown(reuse_of(talking))}")
    assert [reply.outcome for talk in talking for reply in talk.replies[1:]] == ["restored"] * (2 * TURNS - 2)
    assert max(reuse_of(talking)) == 0.0


@older
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_template_that_drops_reasoning(home: House, client: httpx.AsyncClient, stream: bool) -> None:
    template = home.folder / "drops-reasoning.jinja"
    template.write_text(DROPS_REASONING)
    found = {}
    for of in ("managed", "never"):
        talking = talks(of, f"reasoning {stream}", scripted=True)
        with home.server(home.model(), "--jinja", "--chat-template-file", str(template)):
            await take_turns(client, talking, stream=stream)
        found[of] = reuse_of(talking)
        print(f"{of}, a template that drops reasoning: reuse {shown(found[of])}")
    assert min(found["managed"][LEARNING:]) >= 0.9
    assert max(found["never"]) == 0.0


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look into the book of a day.",
            "parameters": {
                "type": "object",
                "properties": {"day": {"type": "integer", "enum": [1]}},
                "required": ["day"],
            },
        },
    }
]


class Loop:
    """A conversation in which the model is made to call a tool at each turn but the last of a task."""

    def __init__(self, of: str, name: str) -> None:
        self.of, self.name = of, name
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": f"{name} is who I am."}]
        self.reuse: list[float] = []
        """inside the loops, of the previous prompt"""
        self.kept: list[float] = []
        """after a loop, of what the template keeps: up to the last message of the user"""
        self.prompt_tokens = self.user_tokens = 0

    async def turn(self, client: httpx.AsyncClient, number: int, *, stream: bool) -> None:
        if number % 3 == 0:
            self.messages.append({"role": "user", "content": words_of(f"{self.name[0]}{number}-", LENGTH)})
        last = number % 3 == 2
        body = {"model": self.of, "messages": self.messages, "tools": TOOLS, "max_tokens": 100, "temperature": 0}
        body |= {"tool_choice": "none" if last else "required", "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        headers = {"X-Session-ID": self.name}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        called, usage = _told(answer.text) if stream else _told(f"data: {answer.text}")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        if number % 3:
            self.reuse.append(cached / self.prompt_tokens)
        elif self.user_tokens:
            self.kept.append(cached / self.user_tokens)
        self.prompt_tokens = usage["prompt_tokens"]
        if number % 3 == 0:
            self.user_tokens = self.prompt_tokens
        assert called == (not last)
        thought = "I should look into the book before I say anything. " * 4
        if last:
            self.messages.append({"role": "assistant", "content": f"So it is, {number} times."})
            return
        call = {"id": f"call{number:05}", "type": "function", "function": {"name": "look", "arguments": '{"day": 1}'}}
        said = {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [call]}
        result = {
            "role": "tool",
            "tool_call_id": call["id"],
            "content": words_of(f"{self.name[0]}t{number}-", LENGTH // 2),
        }
        self.messages += [said, result]


def _told(text: str) -> tuple[bool, dict[str, Any]]:
    """Whether an answer, whole or streamed, calls a tool, and its usage."""
    called, usage = False, {}
    for line in text.splitlines():
        if not line.startswith("data: ") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[6:])
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            called |= bool((choice.get("message") or choice.get("delta") or {}).get("tool_calls"))
    return called, usage


@older
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_loop_of_tool_calls(home: House, client: httpx.AsyncClient, stream: bool) -> None:
    """The template keeps reasoning inside the loop, so that the tool's result continues it, and drops it afterwards."""
    assert len(CALLS_AT_ONCE) < len(DROPS_REASONING)
    template = home.folder / "calls-at-once.jinja"
    template.write_text(CALLS_AT_ONCE)
    loops = [Loop("managed", f"{name} loop {stream}") for name in "AB"]
    first = len(home.relay.calls)
    model = build_hybrid_caller(home.folder / f"caller-{stream}.gguf", CALL)
    with home.server(model, "--jinja", "--chat-template-file", str(template)):
        for number in range(2 * TURNS):
            for loop in loops:
                await loop.turn(client, number, stream=stream)
    reuse = list(itertools.chain.from_iterable(zip(*(loop.reuse for loop in loops), strict=True)))
    kept = list(itertools.chain.from_iterable(loop.kept for loop in loops))
    print(f"loops of tool calls: reuse {shown(reuse)}, after a loop of what the template keeps {shown(kept)}")
    reached = [call.body for call in home.relay.calls[first:] if call.path.startswith("/v1/chat")]
    assert any("reasoning_content" in message for message in reached[-1]["messages"])
    assert any("tool_calls" in message for message in reached[-1]["messages"])
    assert min(reuse[LEARNING:]) >= 0.9
    assert min(kept) >= 0.9


def _saved_since(calls: Sequence[Call], talk: Talk) -> bool:
    """Whether a save was answered since the last request of a conversation was rewound."""
    said = talk.session.said[-2][1].encode()
    rewound = [n for n, call in enumerate(calls) if call.path.startswith("/completion") and said in call.data]
    return bool(rewound) and any(call.kind == "save" and call.status for call in calls[rewound[-1] :])


@older
async def test_the_server_is_killed_and_started_again(home: House, client: httpx.AsyncClient) -> None:
    talking = talks("idle", "killed")
    relay, before = home.relay, len(home.relay.calls)
    with home.server(home.model()) as server:
        await take_turns(client, talking, 3)
        reuse: list[float] = []
        for number in range(TURNS - 3):
            for talk in talking:
                await talk.turn(client, stream=number % 2 == 0)
                await relay.until(lambda: _saved_since(relay.calls[before:], talk))  # noqa: B023
                server.kill()
                server.start()
                reuse.append(talk.reuse[-1])
    print(f"each turn upon a server that was killed since: reuse {shown(reuse)}")
    assert min(reuse) >= 0.9
    assert all(talk.replies[-1].outcome == "restored" for talk in talking)


@older
async def test_a_model_once_learned_is_never_taught_again(home: House) -> None:
    """Not even over a restart of the proxy."""
    talking = talks("managed", "restarted")
    model = home.model()
    with home.server(model):
        async with open_client(home.proxy.url, home.proxy.key) as client:
            await take_turns(client, talking, 4)
        before = home.log().count(LESSON)
        first = len(home.relay.calls)
        home.proxy.restart()
        others = talks("managed", "new", names="CD")
        async with open_client(home.proxy.url, home.proxy.key) as client:
            await take_turns(client, talking, 2)
            await take_turns(client, others, 3)
        assert rewinds(home.relay.calls[first:])
    reuse = reuse_of(talking)[-3:]  # what the last one of the four has left may not have been written down
    print(f"upon a restarted proxy: reuse {shown(reuse)}, of new conversations {shown(reuse_of(others))}")
    assert min(reuse) >= 0.9
    assert min(reuse_of(others)) >= 0.9
    assert home.log().count(LESSON) == before


@older
async def test_a_dense_model_costs_no_more(home: House, client: httpx.AsyncClient) -> None:
    talking = talks("managed", "dense", scripted=True)
    first = len(home.relay.calls)
    with home.server(home.model("dense")):
        await take_turns(client, talking)
    reuse = reuse_of(talking)
    print(f"dense: reuse {shown(reuse)}, {len(home.relay.calls) - first} calls")
    assert min(reuse) >= 0.9
    assert rewinds(home.relay.calls[first:]) == []


@older
async def test_a_server_without_checkpoints_is_noticed_once(home: House, client: httpx.AsyncClient) -> None:
    talking = talks("managed", "no checkpoints", scripted=True)
    first, before = len(home.relay.calls), home.log().count(TOO_DEAR)
    with home.server(home.model(), "--ctx-checkpoints", "0"):
        await take_turns(client, talking, TURNS)
    calls = home.relay.calls[first:]
    print(f"without checkpoints: {len(rewinds(calls))} calls to rewind: {rewinds(calls)}")
    assert home.log().count(TOO_DEAR) == before + 1
    assert sum(path.startswith("/completion") for path in rewinds(calls)) == 1
    dear = next(number for number, call in enumerate(calls) if call.path.startswith("/completion"))
    after = [call.kind for call in calls[dear + 1 :]]
    assert after.count("request") >= 2 * TURNS - 4
    assert not {"save", "restore"} & set(after)


@older
async def test_two_slots(home: House, client: httpx.AsyncClient) -> None:
    talking = talks("managed", "two slots", names="ABC", scripted=True)
    with home.server(home.model(), "-np", "2", "-c", "65536"):
        await take_turns(client, talking)
    reuse = reuse_of(talking)
    print(f"three conversations on two slots: reuse {shown(reuse)}")
    assert min(reuse[4:]) >= 0.9


@older
async def test_answers_are_those_of_a_server_that_computes_everything(
    home: House, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    model = build_hybrid_talker(tmp_path / "talker.gguf")
    talking = [Talk(Session(f"{chr(65 + n % 26)}{n} truth", "managed"), scripted=n % 2 == 0) for n in range(50)]
    answers: dict[str, str] = {}
    apis: tuple[Api, ...] = ("chat", "messages", "responses")
    with home.server(model, "-ub", "1") as server:
        for number in range(3):
            for talk in talking:
                text = words_of(f"{talk.session.name.split()[0]}-{number}-", 200)
                prompt = talk.session.prompt(("user", text))
                api = apis[(number + len(answers)) % 3]
                reply = await talk.session.ask(
                    client, text, remember=not talk.scripted, tokens=24, api=api, stream=len(answers) % 2 == 0
                )
                if talk.scripted:
                    talk.session.said += [("user", text), ("assistant", f"So it is, {number} times.")]
                if talk.replies:
                    talk.reuse.append(reply.cached_tokens / talk.replies[-1].prompt_tokens)
                talk.replies.append(reply)
                assert reply.prompt_tokens == count_tokens(prompt)
                answers[prompt] = reply.text
        right = await house.answers_without_cache(server.base_url, answers, 24)
    wrong = [prompt for prompt, answer in answers.items() if answer != right[prompt]]
    last = [talk.reuse[-1] for talk in talking]
    print(
        f"{len(answers)} answers of 50 conversations, {len(wrong)} of them wrong, {len(set(right.values()))} different"
    )
    print(f"reuse of the last turns: {min(last):.3f} to {max(last):.3f}")
    assert not wrong
    assert len(set(right.values())) >= len(right) / 2  # they depend on what was said
    assert min(last) >= 0.9


@older
async def test_models_of_a_router(home: House, client: httpx.AsyncClient, tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for name in ("alpha", "beta"):
        shutil.copyfile(home.models / "hybrid.gguf", models / f"{name}.gguf")
    saved = tmp_path / "saved"
    with Relay() as relay, RouterServer(models, tmp_path, models_max=1, save_path=saved) as router:
        relay.target = router.base_url
        routes = [route(name, relay.base_url, slot_cache={"save_path": str(saved)}) for name in ("alpha", "beta")]
        with house.proxy(tmp_path, *routes) as proxy:
            talking = [Talk(Session(f"{name} router", name), scripted=True) for name in ("alpha", "beta")]
            async with open_client(proxy.url, proxy.key) as own:
                await take_turns(own, talking, 5)
    reuse = reuse_of(talking)
    print(f"two models of a router that loads one: reuse {shown(reuse)}")
    assert min(reuse[2 * LEARNING :]) >= 0.9


async def test_a_server_that_saves_checkpoints_has_nothing_to_rewind(home: House, client: httpx.AsyncClient) -> None:
    talking = talks("managed", "newer", scripted=True)
    first = len(home.relay.calls)
    with house.server(home.model(), home.folder) as server:
        home.relay.target = server.base_url
        await take_turns(client, talking)
    reuse = reuse_of(talking)
    print(f"a server that saves checkpoints: reuse {shown(reuse)}")
    assert min(reuse) >= 0.9
    assert rewinds(home.relay.calls[first:]) == []
