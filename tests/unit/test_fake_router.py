"""The fake router itself: the shapes as recorded, the habits as measured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_router import FakeRouter

INVALID = "invalid_request_error"


class Client:
    """Says what a call came to: its status and its body."""

    def __init__(self, router: FakeRouter) -> None:
        self.http = httpx.AsyncClient(base_url="http://router", transport=router.transport())

    async def get(self, path: str) -> tuple[int, Any]:
        answer = await self.http.get(path)
        return answer.status_code, answer.json()

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        answer = await self.http.post(path, json=body)
        return answer.status_code, answer.json()


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(save_dir=tmp_path, max_instances=2, aliases={"alpha": ("a",)})
    for name in ("alpha", "beta", "gamma"):
        router[name].load_seconds = router[name].unload_seconds = 0.01
    yield router
    await router.aclose()


@pytest.fixture
def client(router: FakeRouter) -> Client:
    return Client(router)


def refused(message: str) -> tuple[int, Any]:
    return 400, {"error": {"code": 400, "message": message, "type": INVALID}}


async def test_its_props(client: Client) -> None:
    assert await client.get("/props") == (
        200,
        {
            "role": "router",
            "max_instances": 2,
            "models_autoload": True,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui_settings": {},
            "build_info": "b0-unknown",
            "cors_proxy_enabled": False,
        },
    )


async def test_an_older_one_does_not_tell_its_limit(client: Client, router: FakeRouter) -> None:
    router.tells_limit = False
    assert "max_instances" not in (await client.get("/props"))[1]


async def test_its_models(client: Client, router: FakeRouter) -> None:
    await router.load("alpha")
    status, body = await client.get("/models")
    assert (status, body["object"]) == (200, "list")
    alpha, beta, _ = body["data"]
    assert (alpha["id"], alpha["aliases"], alpha["status"]["value"]) == ("alpha", ["a"], "loaded")
    assert alpha["meta"]["n_ctx"] == 4096
    assert (beta["id"], beta["aliases"], beta["status"]["value"]) == ("beta", [], "unloaded")
    assert "meta" not in beta
    assert (await client.get("/v1/models"))[1] == body


async def test_what_it_refuses(client: Client, router: FakeRouter) -> None:
    not_found = (404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})
    not_loaded = refused("model is not loaded")
    assert await client.get("/slots") == refused("model name is missing from the request")
    assert await client.get("/slots?model=alpha&autoload=false") == not_loaded
    assert await client.get("/props?model=alpha&autoload=false") == not_loaded
    save = {"model": "beta", "filename": "x.bin"}
    assert await client.post("/slots/0?action=save&autoload=false", **save) == not_loaded
    assert await client.post("/slots/0?action=erase", model="zeta") == refused("model 'zeta' not found")
    assert await client.post("/models/load", model="zeta") == not_found
    assert await client.post("/models/unload", model="zeta") == refused("model is not found")
    assert await client.post("/models/unload", model="alpha") == refused("model is not running")
    await router.load("alpha")
    assert await client.post("/models/load", model="alpha") == refused("model is already running")
    router.can_unload = False
    assert await client.post("/models/unload", model="alpha") == not_found
    assert router.loaded() == {"alpha"}


async def test_a_model_comes_and_goes(client: Client, router: FakeRouter) -> None:
    assert await client.post("/models/load", model="alpha") == (200, {"success": True})
    assert router.status()["alpha"] == "loading"
    assert await client.get("/slots?model=alpha&autoload=false") == refused("model is not loaded")
    status, slots = await client.get("/slots?model=alpha")  # waits for it
    assert (status, [slot["id"] for slot in slots]) == (200, [0])
    assert await client.post("/models/unload", model="alpha") == (200, {"success": True})
    assert router.status()["alpha"] != "loaded"
    await router.until(lambda: router.status()["alpha"] == "unloaded")
    assert await client.get("/slots?model=alpha&autoload=false") == refused("model is not loaded")


async def test_a_poll_without_autoload_false_loads(client: Client, router: FakeRouter) -> None:
    assert (await client.get("/slots?model=alpha"))[0] == 200
    assert router.loaded() == {"alpha"}


async def test_a_post_is_a_use_and_a_get_is_not(client: Client, router: FakeRouter) -> None:
    """As measured: chat alpha, chat beta, save alpha, chat gamma, and beta is gone."""
    for name in ("alpha", "beta"):
        assert (await client.post("/completion", model=name, prompt="who?", n_predict=2))[0] == 200
    assert (await client.get("/slots?model=alpha&autoload=false"))[0] == 200
    await router.load("gamma")
    assert router.loaded() == {"beta", "gamma"}
    saved = await client.post("/slots/0?action=save&autoload=false", model="beta", filename="x.bin")
    assert saved[1]["n_saved"] > 0
    await router.load("alpha")
    assert router.loaded() == {"alpha", "beta"}


async def test_a_busy_model_does_not_go(router: FakeRouter) -> None:
    gate = asyncio.Event()
    requests = []
    for name in ("alpha", "beta"):
        requests.append(asyncio.ensure_future(router.complete(name, "who?", gate=gate)))
        await router.until(lambda name=name: router[name].server.is_busy)
    gamma = asyncio.ensure_future(router.load("gamma"))
    await asyncio.sleep(0.05)
    assert router.loaded() == {"alpha", "beta"}
    gate.set()
    await asyncio.gather(gamma, *requests)
    assert router.loaded() == {"beta", "gamma"}


async def test_what_it_unloads_is_lost(router: FakeRouter) -> None:
    done = await router.complete("alpha", "who are you?", slot=0)
    again = await router.complete("alpha", f"who are you?{done.text} and you?", slot=0)
    assert again.cached == done.n_slot
    await router.unload("alpha")
    assert (await router.complete("alpha", "who are you?", slot=0)).cached == 0
    assert router["alpha"].loads == 2


async def test_a_load_that_fails(client: Client, router: FakeRouter) -> None:
    router["alpha"].fails = True
    status, body = await client.post("/completion", model="alpha", prompt="who?")
    assert (status, body["error"]["message"]) == (500, "model name=alpha failed to load")
    entry = (await client.get("/models"))[1]["data"][0]
    assert (entry["status"]["value"], entry["status"]["failed"], entry["status"]["exit_code"]) == ("unloaded", True, 1)
    router["alpha"].fails = False
    assert (await client.post("/completion", model="a", prompt="who?", n_predict=2))[0] == 200
    assert "failed" not in (await client.get("/models"))[1]["data"][0]["status"]


async def test_a_sleeping_model_is_told_as_such(client: Client, router: FakeRouter) -> None:
    await router.load("alpha")
    router["alpha"].server.sleep()
    assert router.status()["alpha"] == "sleeping"
    assert (await client.get("/props?model=alpha&autoload=false"))[1]["is_sleeping"] is True
    assert router["alpha"].server.wakes == 0
    await client.get("/slots?model=alpha&autoload=false")
    assert router["alpha"].server.wakes == 1


async def test_each_start_has_another_boot(client: Client, router: FakeRouter) -> None:
    await router.load("alpha")
    first = (await client.get("/props?model=alpha"))[1]["media_marker"]
    await router.unload("alpha")
    await router.load("alpha")
    assert (await client.get("/props?model=alpha"))[1]["media_marker"] != first


async def test_no_limit(tmp_path: Path) -> None:
    router = FakeRouter("abcdef", save_dir=tmp_path, max_instances=0)
    for name in "abcdef":
        router[name].load_seconds = 0.0
        await router.load(name)
    assert router.loaded() == set("abcdef")
    await router.aclose()


async def test_over_a_real_port(router: FakeRouter) -> None:
    async with router.serve() as base_url, httpx.AsyncClient(base_url=base_url, trust_env=False) as client:
        body = {"model": "alpha", "prompt": "who?", "n_predict": 3, "stream": True}
        async with client.stream("POST", "/completion", json=body) as response:
            lines = [json.loads(line[5:]) async for line in response.aiter_lines() if line.startswith("data: {")]
    assert "".join(line["content"] for line in lines) == router["alpha"].server.truth("who?", 3)
