"""A real router with room for fewer models than it has, through a real LiteLLM proxy with one wildcard route."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_server import NAMES, RouterServer, build_models, find_binary

import house
from clients import Reply, Session
from fake_router import FakeRouter
from relay import Call, Relay
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import CALLBACK
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.request import route_tag

BINARY, WHY_NOT = find_binary()
pytestmark = [pytest.mark.real, pytest.mark.skipif(BINARY is None, reason=f"no real router: {WHY_NOT}")]

MANY = (*NAMES, "delta", "epsilon")
ORDER = ["alpha", "beta", "gamma", "alpha", "beta", "alpha", "gamma", "beta"]
EXACT = ("-ub", "1")
"""Prompts are computed token by token: with a cache the answers are the same as without one."""
WORDS = "what was said before; " * 25
CASES = [("unset", None, None, 4), ("one", 1, None, 1), ("two", 2, None, 2), ("four", 4, None, 4), ("none", 0, None, 5)]
CASES += [("fewer", 4, 2, 2)]
"""A route's prefix, the router's --models-max, the route's models_max, how many may be loaded."""

NAIVE = '''
from slot_cache.hook import SlotCacheHook
from slot_cache.router import RouterTracker, next_to_go
from slot_cache.servers import Servers


class LetsTheRouterChoose(RouterTracker):
    """Saves the model whose turn it is to go, and has the router make the room."""

    async def _make_room(self, running, *_):
        self._can_unload = False
        for candidate in next_to_go(running, self._uses)[:1]:
            vacated = await self.switcher(candidate.name).vacate(0.0)
            if vacated is not None:
                vacated.end(gone=False)
        return []


class ServersOfNaiveRouters(Servers):
    async def switcher(self, request, settings, index):
        found = await super().switcher(request, settings, index)
        for router in self.routers.values():
            router.__class__ = LetsTheRouterChoose
        return found


class Naive(SlotCacheHook):
    def __init__(self):
        super().__init__()
        self._servers.__class__ = ServersOfNaiveRouters

    async def async_pre_call_deployment_hook(self, kwargs, call_type):
        info = kwargs.get("model_info") or {}
        if "slot_cache_naive" not in info:
            return None
        kwargs = {**kwargs, "model_info": {**info, "slot_cache": info["slot_cache_naive"]}}
        return await super().async_pre_call_deployment_hook(kwargs, call_type)

    # LiteLLM looks for these in the class itself
    async_post_call_streaming_iterator_hook = SlotCacheHook.async_post_call_streaming_iterator_hook
    async_post_call_response_headers_hook = SlotCacheHook.async_post_call_response_headers_hook


handler = Naive()
'''


@dataclass(frozen=True)
class House:
    """The proxy. Each route has a relay of its own, which a test makes lead to its router."""

    folder: Path
    models: Path
    many: Path
    saved: Path
    relays: dict[str, Relay]
    proxy: LiteLLMProxy

    @contextlib.contextmanager
    def router(self, route: str, *, models_max: int | None = 2, many: bool = False) -> Iterator[RouterServer]:
        models = self.many if many else self.models
        router = RouterServer(models, self.folder, models_max=models_max, save_path=self.saved, arguments=EXACT)
        with router:
            self.relays[route].target = router.base_url
            try:
                yield router
            finally:
                self.relays[route].target = ""

    def client(self) -> httpx.AsyncClient:
        return open_client(self.proxy.url, self.proxy.key, timeout=120.0)

    def file(self, talk: Talk) -> Path:
        session = sha256(talk.session.name.encode()).hexdigest()[:32]
        return self.saved / f"{route_tag(talk.session.route)}_{session}.bin"

    def tokens_saved(self, talk: Talk) -> int:
        """How many tokens the session's file holds, 0 without one."""
        with contextlib.suppress(FileNotFoundError), self.file(talk).open("rb") as file:
            return int(struct.unpack("<I", file.read(12)[8:])[0]) - 4
        return 0


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("router")
    saved = folder / "saved"
    models, many = build_models(folder / "models"), build_models(folder / "many", MANY)
    names = ["*", "idle", "naive", *(case[0] for case in CASES)]
    with contextlib.ExitStack() as stack:
        relays = {name: stack.enter_context(Relay()) for name in names}
        options: dict[str, dict[str, Any]] = {name: {"save_path": str(saved)} for name in names}
        options["idle"]["save_idle_seconds"] = 1
        for name, _, setting, _ in CASES:
            if setting is not None:
                options[name]["models_max"] = setting
        routes = []
        for name in names:
            params = {"model": "openai/*", "api_base": f"{relays[name].base_url}/v1", "api_key": "none"}
            info = {"slot_cache_naive" if name == "naive" else "slot_cache": options[name]}
            routes.append(
                {"model_name": "*" if name == "*" else f"{name}/*", "litellm_params": params, "model_info": info}
            )
        callbacks = [CALLBACK, "naive.handler"]
        proxy = stack.enter_context(house.proxy(folder, *routes, callbacks=callbacks, modules={"naive": NAIVE}))
        yield House(folder, models, many, saved, relays, proxy)
        log = proxy.log_path.read_text()
        assert "internal fault" not in log
        assert "Traceback" not in log


class Talk:
    """A conversation with a model, and what each turn reused of the prompt of the one before."""

    def __init__(self, route: str, model: str, name: str = "") -> None:
        self.model = model
        self.session = Session(f"{route}-{model}-{name}", model if route == "*" else f"{route}/{model}")
        self.prompt_tokens = 0
        self.reuse: list[float] = []
        self.asked: list[tuple[str, str]] = []
        """prompts and answers"""

    async def turn(self, client: httpx.AsyncClient, *, stream: bool = True) -> Reply:
        text = f"{self.session.name}: {WORDS}" if not self.asked else "and then?"
        prompt = self.session.prompt(("user", text))
        reply = await self.session.ask(client, text, stream=stream)
        if self.prompt_tokens:
            self.reuse.append(reply.cached_tokens / self.prompt_tokens)
        self.prompt_tokens = reply.prompt_tokens
        self.asked.append((prompt, reply.text))
        return reply


def talks(route: str, models: tuple[str, ...] = NAMES, names: str = "a") -> dict[tuple[str, str], Talk]:
    return {(model, name): Talk(route, model, name) for model in models for name in names}


async def tell(router: RouterServer, path: str, body: dict[str, Any]) -> httpx.Response:
    """A stranger's request, on a connection of its own: the router closes them after an answer without a word."""
    async with open_client(router.base_url) as client:
        answer = await client.post(path, json=body)
    answer.raise_for_status()
    return answer


async def are_right(router: RouterServer, talking: dict[tuple[str, str], Talk]) -> None:
    """The last answer of each session is the one that its model gives without a cache."""
    for talk in talking.values():
        prompt, answer = talk.asked[-1]
        body = {"model": talk.model, "prompt": prompt, "n_predict": 16, "temperature": 0, "cache_prompt": False}
        truth = (await tell(router, "/completion", body)).json()
        assert truth["timings"]["cache_n"] == 0
        assert truth["content"] == answer


def chosen_by_itself(router: RouterServer) -> int:
    """How often the router made the room itself."""
    log = router.log_path.read_text()
    return log.count("removing LRU") + log.count("evicting idle LRU")


async def test_every_model_that_returns_finds_its_cache(routed: House) -> None:
    talking = talks("*")
    outcomes = []
    with routed.router("*") as router:
        async with routed.client() as client:
            for number, model in enumerate(ORDER):
                reply = await talking[model, "a"].turn(client, stream=number % 2 == 0)
                outcomes.append(reply.outcome)
                assert len(router.loaded()) <= 2
        assert chosen_by_itself(router) == 0
        await are_right(router, talking)
    restored = ["restored", "restored", "resident", "restored", "restored"]
    assert outcomes == ["cold"] * 3 + restored
    reuse = [part for talk in talking.values() for part in talk.reuse]
    print("reuse", sorted(round(part, 4) for part in reuse))
    assert len(reuse) == 5
    assert min(reuse) >= 0.95


async def test_a_version_that_lets_the_router_choose_loses_a_cache(routed: House) -> None:
    talking = talks("naive")
    with routed.router("naive") as router:
        async with routed.client() as client:
            for model in ORDER:
                await talking[model, "a"].turn(client)
        assert chosen_by_itself(router) > 0
    reuse = [part for talk in talking.values() for part in talk.reuse]
    print("reuse of the version that lets the router choose", sorted(round(part, 4) for part in reuse))
    assert min(reuse) < 0.1


@pytest.mark.parametrize(("route", "models_max", "setting", "most"), CASES)
async def test_no_more_are_loaded_than_the_limit(
    routed: House, route: str, models_max: int | None, setting: int | None, most: int
) -> None:
    talking = talks(route, MANY)
    loaded = []
    with routed.router(route, models_max=models_max, many=True) as router:
        told = router.props()["max_instances"]
        assert told == (4 if models_max is None else models_max)
        async with routed.client() as client:
            for model in [*MANY, *MANY[:3], MANY[4], MANY[0]]:
                await talking[model, "a"].turn(client)
                loaded.append(len(router.loaded()))
        assert chosen_by_itself(router) == 0
        assert max(loaded) == most
        await are_right(router, talking)
    reuse = [part for talk in talking.values() for part in talk.reuse]
    print(route, "reuse", sorted(round(part, 4) for part in reuse))
    assert len(reuse) == 5
    assert min(reuse) >= 0.95


@pytest.mark.parametrize("again", [False, True])
async def test_different_models_are_asked_for_at_once(routed: House, again: bool) -> None:
    """Two sessions a model, three requests at once; `again`: the proxy does not know what is loaded already."""
    talking = talks("*", names="cd" if again else "ab")
    at_once = asyncio.Semaphore(3)
    with routed.router("*") as router:
        if again:
            for model in NAMES[:2]:
                await tell(router, "/completion", {"model": model, "prompt": "who?", "n_predict": 4})
        async with routed.client() as client:

            async def session(talk: Talk) -> list[str | None]:
                outcomes = []
                for number in range(4):
                    async with at_once:
                        outcomes.append((await talk.turn(client, stream=number % 2 == 0)).outcome)
                return outcomes

            order = [talking[model, name] for name in ("cd" if again else "ab") for model in ("gamma", "alpha", "beta")]
            outcomes = await asyncio.wait_for(asyncio.gather(*(session(talk) for talk in order)), 60)
        assert chosen_by_itself(router) == 0
        await are_right(router, talking)
    assert "unmanaged" not in {outcome for of_one in outcomes for outcome in of_one}
    reuse = [part for talk in talking.values() for part in talk.reuse]
    print("reuse at concurrency 3", sorted(round(part, 4) for part in reuse))
    assert len(reuse) == 18
    assert min(reuse) >= 0.95


async def test_clients_that_leave_while_room_is_made(routed: House) -> None:
    """Their requests hold nothing, and whoever stays finds his cache."""
    talking = talks("*", names="l")
    left = 0
    with routed.router("*") as router:
        async with routed.client() as client:
            for model in NAMES:
                await talking[model, "l"].turn(client)
            for number, model in enumerate(ORDER * 2):
                leaver = Session(f"leaver-{number}", NAMES[(number + 1) % 3])
                left += await leaver.leave(client, "I am gone", stream=number % 2 == 0)
                await asyncio.wait_for(talking[model, "l"].turn(client), 60)
            await asyncio.wait_for(asyncio.gather(*(talk.turn(client) for talk in talking.values())), 60)
        await are_right(router, talking)
    reuse = [part for talk in talking.values() for part in talk.reuse]
    print("reuse beside clients that leave", sorted(round(part, 4) for part in reuse))
    assert left >= 8
    assert min(reuse) >= 0.95


async def test_a_stranger_makes_the_router_unload_models(routed: House) -> None:
    """No request fails, and whatever was saved when it was lost is found."""
    talking = talks("*", names="s")
    found = []
    with routed.router("*") as router:
        async with routed.client() as client:
            for number, model in enumerate([*ORDER, *ORDER]):
                talk = talking[model, "s"]
                saved = routed.tokens_saved(talk)
                reply = await talk.turn(client)
                if saved:
                    found.append(reply.cached_tokens / saved)
                    assert reply.outcome in ("restored", "resident")
                else:
                    assert reply.outcome in ("cold", "resident")
                if number % 3 == 1:
                    await tell(
                        router, "/completion", {"model": NAMES[number % 2 + 1], "prompt": "who?", "n_predict": 4}
                    )
                if number % 5 == 4 and model in router.loaded():
                    await tell(router, "/models/unload", {"model": model})
        assert chosen_by_itself(router) > 0
        await are_right(router, talking)
    print("reuse of what was saved", sorted(round(part, 4) for part in found))
    assert len(found) >= 5
    assert min(found) >= 0.95


async def test_an_idle_save_never_loads_a_model(routed: House) -> None:
    relay = routed.relays["idle"]
    talk = Talk("idle", "alpha")
    with routed.router("idle") as router:
        async with routed.client() as client:
            await talk.turn(client)
            await relay.until(lambda: relay.count("save"))
            await relay.until(lambda: relay.calls[-1].status is not None)
            seen = len(relay.calls)
            await talk.turn(client)
            await relay.until(lambda: _looked_at_since(relay.calls[seen:]))  # the idle save is due then
            seen = len(relay.calls)
            await tell(router, "/models/unload", {"model": "alpha"})
            asked = ("props", "slots", "save")
            await relay.until(lambda: any(c.status == 400 and c.kind in asked for c in relay.calls[seen:]))
            assert router.loads("alpha") == 1
            await asyncio.to_thread(router.wait_until_unloaded)
            assert (await talk.turn(client)).outcome == "restored"
            assert router.loads("alpha") == 2
    assert routed.tokens_saved(talk) > 0


def _looked_at_since(calls: list[Call]) -> bool:
    """Whether the slots were looked at after the last request."""
    last = max((number for number, call in enumerate(calls) if call.kind == "request"), default=len(calls))
    return any(call.kind == "slots" and call.answered for call in calls[last:])


async def what_it_says(client: httpx.AsyncClient) -> list[tuple[Any, ...]]:
    """A round of calls, and what each came to: the status, the words of an error, the names in a good answer."""
    told: list[tuple[Any, ...]] = []

    async def ask(method: str, path: str, **body: Any) -> Any:
        # a connection each: they are closed without a word
        async with httpx.AsyncClient(base_url=client.base_url, trust_env=False, timeout=60.0) as fresh:
            answer = await fresh.request(method, path, json=body or None)
        found = answer.json()
        error = found.get("error", {}) if isinstance(found, dict) else {}
        told.append((method, path, body.get("model"), answer.status_code, error.get("message"), error.get("type")))
        return found

    async def states() -> dict[str, str]:
        return {entry["id"]: entry["status"]["value"] for entry in (await ask("GET", "/models"))["data"]}

    async def until(name: str, status: str) -> None:
        started = time.monotonic()
        while (await states())[name] != status:
            assert time.monotonic() - started < 20
            told.pop()
            await asyncio.sleep(0.02)
        told.pop()

    async def chat(name: str) -> None:
        await ask("POST", "/completion", model=name, prompt="who?", n_predict=2)

    await states()
    props = await ask("GET", "/props")
    told.append((props["role"], props["max_instances"]))
    await ask("GET", "/slots")
    await ask("GET", "/slots?model=alpha&autoload=false")
    await ask("GET", "/props?model=alpha&autoload=false")
    await ask("POST", "/slots/0?action=save&autoload=false", model="alpha", filename="agree.bin")
    await ask("POST", "/slots/0?action=erase", model="zeta")
    await chat("zeta")
    await ask("POST", "/models/load", model="zeta")
    await ask("POST", "/models/unload", model="zeta")
    await ask("POST", "/models/unload", model="alpha")
    told.append(("states", sorted((await states()).items())))
    for name in ("alpha", "beta"):
        await chat(name)
    told.append(("states", sorted((await states()).items())))
    await ask("POST", "/models/load", model="alpha")
    await ask("GET", "/slots?model=alpha&autoload=false")
    await chat("gamma")  # a GET is no use: alpha goes
    told.append(("states", sorted((await states()).items())))
    await ask("POST", "/slots/0?action=save&autoload=false", model="beta", filename="agree.bin")
    await chat("alpha")  # a save is a use: gamma goes
    told.append(("states", sorted((await states()).items())))
    await ask("POST", "/models/unload", model="beta")
    await until("beta", "unloaded")
    await ask("POST", "/models/load", model="beta")
    await until("beta", "loaded")
    entries = {entry["id"]: entry for entry in (await ask("GET", "/models"))["data"]}
    told.append(("meta", sorted(name for name in NAMES if "meta" in entries[name])))
    await ask("POST", "/models/load", model="broken")
    await until("broken", "unloaded")
    status = next(e["status"] for e in (await ask("GET", "/models"))["data"] if e["id"] == "broken")
    told.append(("broken", status.get("failed"), status.get("exit_code")))
    await chat("broken")
    return told


async def test_the_fake_says_what_the_real_one_says(tmp_path: Path) -> None:
    models = build_models(tmp_path / "models")
    (models / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with RouterServer(models, tmp_path, models_max=2) as router:
        async with httpx.AsyncClient(base_url=router.base_url) as client:
            real = await what_it_says(client)
    fake = FakeRouter((*NAMES, "broken"), save_dir=tmp_path / "fake", max_instances=2)
    fake["broken"].fails = True
    async with fake.serve() as base_url, httpx.AsyncClient(base_url=base_url) as client:
        assert await what_it_says(client) == real
    await fake.aclose()
