"""What is sent to llama-server, and what is made of its answers, the bad ones as well."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from slot_cache import llama_server as module
from slot_cache.llama_server import (
    LlamaServer,
    LlamaServerError,
    Role,
    RouterModel,
    SwitchAnswer,
    base_url_of,
    same_server_key,
    shown_url,
)
from slot_cache.model import identity_of
from slot_cache.state import SlotReading

BASE = "http://llama:8080"
RECORDED = Path(__file__).parent.parent / "fixtures" / "llama-server"
KEY = "sk-llama-secret"


def recorded(name: str) -> httpx.Response:
    answer = json.loads((RECORDED / f"{name}.json").read_text())
    return httpx.Response(answer["status"], json=answer["body"])


@pytest.fixture
async def server() -> AsyncIterator[LlamaServer]:
    server = LlamaServer(BASE, KEY)
    yield server
    await server.aclose()


Call = Callable[[LlamaServer], Awaitable[Any]]
CALLS: dict[str, tuple[Call, str]] = {
    "slots": (lambda server: server.slots(), "slots_after_request"),
    "sleeping": (lambda server: server.sleeping(), "props"),
    "save": (lambda server: server.save(0, "a.bin", 0), "save"),
    "restore": (lambda server: server.restore(0, "a.bin", 0), "restore"),
    "erase": (lambda server: server.erase(0), "erase"),
}
every_call = pytest.mark.parametrize(("call", "good"), CALLS.values(), ids=CALLS.keys())


# good answers


@pytest.mark.parametrize(
    ("name", "readings"),
    [
        ("slots_never_used", [SlotReading(0, False, None, 0), SlotReading(1, False, None, 0)]),
        ("slots_after_request", [SlotReading(0, False, 1, 231), SlotReading(1, False, None, 0)]),
        ("slots_after_erase", [SlotReading(0, False, 1, 0), SlotReading(1, False, None, 0)]),
        ("slots_while_prefilling", [SlotReading(0, False, 0, 138), SlotReading(1, True, 9, 2048)]),
        ("slots_while_decoding", [SlotReading(0, False, 0, 138), SlotReading(1, True, 9, 232, remaining=198)]),
    ],
)
@respx.mock(base_url=BASE)
async def test_slots_are_read(
    respx_mock: respx.MockRouter, server: LlamaServer, name: str, readings: list[SlotReading]
) -> None:
    route = respx_mock.get("/slots").mock(recorded(name))
    assert await server.slots() == readings
    assert route.call_count == 1


@respx.mock(base_url=BASE)
async def test_a_negative_task_is_none(respx_mock: respx.MockRouter, server: LlamaServer) -> None:
    respx_mock.get("/slots").respond(json=[{"id": 0, "is_processing": False, "id_task": -1}])
    assert await server.slots() == [SlotReading(0, False, None, 0)]


@pytest.mark.parametrize(
    ("body", "sleeping"),
    [
        (recorded("props").json(), False),
        (recorded("router_props").json(), False),
        ({**recorded("props").json(), "is_sleeping": True}, True),
        ({}, False),
        ({"is_sleeping": "yes"}, False),
        ({"is_sleeping": 1}, False),
    ],
    ids=["awake", "router", "sleeping", "nothing told", "text", "a number"],
)
@respx.mock(base_url=BASE)
async def test_props_tell_whether_the_server_sleeps(
    respx_mock: respx.MockRouter, server: LlamaServer, body: Any, sleeping: bool
) -> None:
    respx_mock.get("/props").respond(json=body)
    assert await server.sleeping() is sleeping


PROPS = recorded("props").json()
MODELS = recorded("v1_models").json()


@respx.mock(base_url=BASE)
async def test_the_model_is_known_by_what_the_server_says_of_it(
    respx_mock: respx.MockRouter, server: LlamaServer
) -> None:
    respx_mock.get("/props").respond(json=PROPS)
    respx_mock.get("/v1/models").respond(json=MODELS)
    identity = await server.identity()
    assert identity == identity_of(PROPS, MODELS["data"][0])
    assert len(identity.model) == 32
    assert identity.name == PROPS["model_path"].rpartition("/")[2]
    assert not identity.sleeping


@respx.mock(base_url=BASE)
async def test_one_call_is_enough_while_the_same_process_answers(
    respx_mock: respx.MockRouter, server: LlamaServer
) -> None:
    props = respx_mock.get("/props").respond(json={**PROPS, "media_marker": "<__media_1__>"})
    models = respx_mock.get("/v1/models").respond(json=MODELS)
    known = await server.identity()
    props.respond(json={**PROPS, "media_marker": "<__media_1__>", "is_sleeping": True})
    again = await server.identity(known)
    assert again == replace(known, sleeping=True)
    assert models.call_count == 1
    props.respond(json={**PROPS, "media_marker": "<__media_2__>"})
    assert (await server.identity(known)).boot != known.boot
    assert models.call_count == 2


@pytest.mark.parametrize("marker", [None, "", "<__media__>", 7])
@respx.mock(base_url=BASE)
async def test_both_calls_are_made_where_the_process_is_not_told(
    respx_mock: respx.MockRouter, server: LlamaServer, marker: object
) -> None:
    respx_mock.get("/props").respond(json={**PROPS, "media_marker": marker})
    models = respx_mock.get("/v1/models").respond(json=MODELS)
    await server.identity(await server.identity())
    assert models.call_count == 2


@pytest.mark.parametrize(
    ("name", "action", "answer"),
    [
        ("save", "save", SwitchAnswer(231, 5326712, 2.563)),
        ("save_of_empty_slot", "save", SwitchAnswer(0, 40, 0.054)),
        ("restore", "restore", SwitchAnswer(231, 5326712, 1.039)),
    ],
)
@respx.mock(base_url=BASE)
async def test_a_save_and_a_restore_tell_tokens_and_bytes(
    respx_mock: respx.MockRouter, server: LlamaServer, name: str, action: str, answer: SwitchAnswer
) -> None:
    route = respx_mock.post("/slots/3", params={"action": action}).mock(recorded(name))
    assert await getattr(server, action)(3, "a.bin", 0) == answer
    request = route.calls.last.request
    assert request.url.query == f"action={action}".encode()
    assert json.loads(request.content) == {"filename": "a.bin"}


@respx.mock(base_url=BASE)
async def test_an_answer_without_timings_is_good_enough(respx_mock: respx.MockRouter, server: LlamaServer) -> None:
    respx_mock.post("/slots/0").respond(json={"n_saved": 3, "n_written": 400})
    assert await server.save(0, "a.bin", 0) == SwitchAnswer(3, 400, 0.0)


@respx.mock(base_url=BASE)
async def test_erase_needs_no_file_name(respx_mock: respx.MockRouter, server: LlamaServer) -> None:
    route = respx_mock.post("/slots/2", params={"action": "erase"}).mock(recorded("erase"))
    await server.erase(2)
    assert json.loads(route.calls.last.request.content) == {}


@respx.mock(base_url="http://llama/behind/a/proxy")
async def test_a_server_behind_a_path_is_reached(respx_mock: respx.MockRouter) -> None:
    respx_mock.get("/slots").mock(recorded("slots_never_used"))
    server = LlamaServer("http://llama/behind/a/proxy")
    assert len(await server.slots()) == 2
    await server.aclose()


@pytest.mark.parametrize(
    ("answer", "alive"),
    [
        (httpx.Response(200, json={"status": "ok"}), True),
        (httpx.Response(503, json={"error": {"message": "Loading model"}}), False),
        (httpx.ConnectError("no"), False),
        (httpx.ReadTimeout("no"), False),
    ],
)
@respx.mock(base_url=BASE)
async def test_alive_tells_whether_health_answers(
    respx_mock: respx.MockRouter, server: LlamaServer, answer: Any, alive: bool
) -> None:
    respx_mock.get("/health").mock(side_effect=[answer])
    assert await server.alive() is alive


# a router of models


@pytest.mark.parametrize(
    ("body", "role"),
    [
        (PROPS, Role("server")),
        (recorded("router_props").json(), Role("router", 2)),
        ({"role": "router"}, Role("router")),
        ({"role": "router", "max_instances": 0}, Role("router", 0)),
        ({"role": "router", "max_instances": "2"}, Role("router")),
        ({"role": "router", "max_instances": -1}, Role("router")),
        ({"max_instances": 2}, Role("server")),
        ({"role": 7}, Role("server")),
        ({}, Role("server")),
    ],
)
@respx.mock(base_url=BASE)
async def test_props_tell_whether_it_is_a_router(
    respx_mock: respx.MockRouter, server: LlamaServer, body: Any, role: Role
) -> None:
    respx_mock.get("/props").respond(json=body)
    assert await server.role() == role


@respx.mock(base_url=BASE)
async def test_a_server_without_props_that_tells_what_runs_is_a_llama_swap(
    respx_mock: respx.MockRouter, server: LlamaServer
) -> None:
    respx_mock.get("/props").respond(404)
    running = respx_mock.get("/running").respond(json={"running": []})
    assert await server.role() == Role("llama-swap")
    running.respond(404)
    assert (await fault_of(server.role())).status == 404


@pytest.mark.parametrize("status", [400, 401, 500, 503])
@respx.mock(base_url=BASE)
async def test_props_that_are_refused_tell_nothing(
    respx_mock: respx.MockRouter, server: LlamaServer, status: int
) -> None:
    respx_mock.get("/props").respond(status)
    assert (await fault_of(server.role())).status == status


@pytest.mark.parametrize(
    ("body", "models"),
    [
        ({"running": []}, []),
        (
            {"running": [{"model": "a", "state": "ready"}, {"model": "b", "state": "starting"}, {"model": "c"}]},
            ["a", "c"],
        ),
        ({"running": [7, {}, {"model": 7}]}, []),
    ],
)
@respx.mock(base_url=BASE)
async def test_a_llama_swap_tells_what_runs(
    respx_mock: respx.MockRouter, server: LlamaServer, body: Any, models: list[str]
) -> None:
    respx_mock.get("/running").respond(json=body)
    assert await server.running() == models


@pytest.mark.parametrize("body", [[], {}, {"running": None}, {"running": {}}])
@respx.mock(base_url=BASE)
async def test_what_runs_in_another_shape_is_nonsense(
    respx_mock: respx.MockRouter, server: LlamaServer, body: Any
) -> None:
    respx_mock.get("/running").respond(json=body)
    assert (await fault_of(server.running())).fault == "nonsense"


@pytest.mark.parametrize(
    ("name", "status"), [("router_models_loaded", "loaded"), ("router_models_unloaded", "unloaded")]
)
@respx.mock(base_url=BASE)
async def test_a_router_tells_its_models(
    respx_mock: respx.MockRouter, server: LlamaServer, name: str, status: str
) -> None:
    respx_mock.get("/models").mock(recorded(name))
    models = await server.models()
    assert models[0].name == "alpha"
    assert status in {model.status for model in models}
    assert not any(model.failed for model in models)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"id": "m", "status": {"value": "loaded"}, "aliases": ["n", "o"]}, [RouterModel("m", "loaded", ("n", "o"))]),
        ({"id": "m", "status": {"value": "unloaded", "failed": True}}, [RouterModel("m", "unloaded", failed=True)]),
        ({"id": "m", "status": {"value": "loaded"}, "aliases": "n"}, [RouterModel("m", "loaded")]),
        ({"id": "m", "status": "loaded"}, []),
        ({"id": "m"}, []),
        ({"id": 7, "status": {"value": "loaded"}}, []),
        (7, []),
        (None, []),
    ],
)
@respx.mock(base_url=BASE)
async def test_a_model_of_which_too_little_is_told_is_left_out(
    respx_mock: respx.MockRouter, server: LlamaServer, entry: Any, found: list[RouterModel]
) -> None:
    respx_mock.get("/models").respond(json={"data": [entry]})
    assert await server.models() == found


@pytest.mark.parametrize("action", ["load", "unload"])
@respx.mock(base_url=BASE)
async def test_a_router_is_told_to_load_and_unload(
    respx_mock: respx.MockRouter, server: LlamaServer, action: str
) -> None:
    route = respx_mock.post(f"/models/{action}").mock(recorded("router_unload"))
    await getattr(server, action)("alpha")
    assert json.loads(route.calls.last.request.content) == {"model": "alpha"}
    respx_mock.post(f"/models/{action}").mock(recorded("router_unload_again"))
    assert (await fault_of(getattr(server, action)("alpha"))).status == 400


@respx.mock(base_url=BASE)
async def test_every_call_for_a_model_names_it_and_loads_nothing(
    respx_mock: respx.MockRouter, server: LlamaServer
) -> None:
    alpha = server.for_model("alpha")
    slots = respx_mock.get("/slots").mock(recorded("router_slots"))
    props = respx_mock.get("/props").mock(recorded("props"))
    save = respx_mock.post("/slots/0").mock(recorded("router_save"))
    assert await alpha.slots() == [SlotReading(0, False, 0, 34)]
    await alpha.sleeping()
    await alpha.save(0, "r.bin", 0)
    for route in (slots, props):
        assert dict(route.calls.last.request.url.params) == {"model": "alpha", "autoload": "false"}
    assert dict(save.calls.last.request.url.params) == {"action": "save", "autoload": "false"}
    assert json.loads(save.calls.last.request.content) == {"filename": "r.bin", "model": "alpha"}
    assert save.calls.last.request.headers["authorization"] == f"Bearer {KEY}"
    await alpha.aclose()


@pytest.mark.parametrize("name", ["router_slots_unloaded", "router_save_unloaded", "router_unknown_model"])
@respx.mock(base_url=BASE)
async def test_a_model_that_is_not_loaded_is_refused(
    respx_mock: respx.MockRouter, server: LlamaServer, name: str
) -> None:
    respx_mock.route().mock(recorded(name))
    alpha = server.for_model("alpha")
    assert (await fault_of(alpha.slots())).status == 400
    assert (await fault_of(alpha.save(0, "r.bin", 0))).status == 400
    await alpha.aclose()


def test_a_model_s_name_is_shown_in_one_line() -> None:
    shown = LlamaServer(BASE).for_model("a\nb\x1b" + "c" * 500).shown
    assert shown.isprintable()
    assert len(shown) < 100


# the key


@every_call
@respx.mock(base_url=BASE)
async def test_the_key_is_sent(respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str) -> None:
    route = respx_mock.route().mock(recorded(good))
    await call(server)
    assert route.calls.last.request.headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("key", [None, ""])
@every_call
@respx.mock(base_url=BASE)
async def test_without_a_key_no_header_is_sent(
    respx_mock: respx.MockRouter, key: str | None, call: Call, good: str
) -> None:
    route = respx_mock.route().mock(recorded(good))
    server = LlamaServer(BASE, key)
    await call(server)
    assert "authorization" not in route.calls.last.request.headers
    await server.aclose()


@respx.mock(base_url=BASE)
async def test_a_key_that_changes_is_sent_from_then_on(respx_mock: respx.MockRouter, server: LlamaServer) -> None:
    route = respx_mock.get("/props").mock(recorded("props"))
    server.api_key = "sk-new"
    await server.sleeping()
    assert route.calls.last.request.headers["authorization"] == "Bearer sk-new"


# faults


async def fault_of(work: Awaitable[Any]) -> LlamaServerError:
    with pytest.raises(LlamaServerError) as caught:
        await work
    return caught.value


REFUSED = [
    ("no_api_key", 401),
    ("restore_missing_file", 400),
    ("bad_filename", 400),
    ("no_slot_save_path", 501),
    ("no_slots_endpoint", 501),
]


@every_call
@pytest.mark.parametrize(("name", "status"), REFUSED)
@respx.mock(base_url=BASE)
async def test_an_http_error_is_refused_with_its_status(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str, name: str, status: int
) -> None:
    route = respx_mock.route().mock(recorded(name))
    error = await fault_of(call(server))
    assert (error.fault, error.status) == ("refused", status)
    assert str(status) in str(error)
    assert route.call_count == 1


@every_call
@pytest.mark.parametrize("status", [201, 204, 302, 404, 413, 429, 500, 502, 503])
@respx.mock(base_url=BASE)
async def test_any_other_status_than_200_is_refused(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str, status: int
) -> None:
    route = respx_mock.route().respond(status, headers={"location": "http://elsewhere/"}, json=recorded(good).json())
    error = await fault_of(call(server))
    assert (error.fault, error.status) == ("refused", status)
    assert route.call_count == 1


@every_call
@pytest.mark.parametrize(
    ("raised", "fault"),
    [
        (httpx.ConnectTimeout("no"), "timeout"),
        (httpx.ReadTimeout("no"), "timeout"),
        (httpx.WriteTimeout("no"), "timeout"),
        (httpx.PoolTimeout("no"), "timeout"),
        (httpx.ConnectError("no"), "unreachable"),
        (httpx.UnsupportedProtocol("no"), "unreachable"),
        (httpx.LocalProtocolError("no"), "unreachable"),
        (httpx.DecodingError("no"), "unreachable"),
        (httpx.InvalidURL("no"), "unreachable"),
        (OSError("no"), "unreachable"),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, Exception) else part,
)
@respx.mock(base_url=BASE)
async def test_what_goes_wrong_on_the_way_is_told_and_not_tried_again(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str, raised: Exception, fault: str
) -> None:
    route = respx_mock.route().mock(side_effect=raised)
    error = await fault_of(call(server))
    assert (error.fault, error.status) == (fault, 0)
    assert route.call_count == 1


CLOSED = [httpx.RemoteProtocolError("Server disconnected"), httpx.ReadError("reset"), httpx.WriteError("broken pipe")]


@every_call
@pytest.mark.parametrize("raised", CLOSED, ids=lambda raised: type(raised).__name__)
@respx.mock(base_url=BASE)
async def test_a_closed_connection_is_tried_once_more(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str, raised: Exception
) -> None:
    route = respx_mock.route().mock(side_effect=[raised, recorded(good)])
    await call(server)
    assert route.call_count == 2
    first, second = (seen.request for seen in route.calls)
    assert (first.method, first.url, first.content) == (second.method, second.url, second.content)
    assert second.headers["authorization"] == f"Bearer {KEY}"


@every_call
@pytest.mark.parametrize("raised", CLOSED, ids=lambda raised: type(raised).__name__)
@respx.mock(base_url=BASE)
async def test_and_only_once_more(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str, raised: Exception
) -> None:
    route = respx_mock.route().mock(side_effect=raised)
    error = await fault_of(call(server))
    assert (error.fault, error.status) == ("unreachable", 0)
    assert route.call_count == 2


@respx.mock(base_url=BASE)
async def test_the_second_try_may_fail_in_another_way(respx_mock: respx.MockRouter, server: LlamaServer) -> None:
    respx_mock.get("/slots").mock(side_effect=[httpx.ReadError("reset"), httpx.ReadTimeout("no")])
    assert (await fault_of(server.slots())).fault == "timeout"


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "a page": b"<html>busy</html>",
    "half of it": b'[{"id": 0, "is_processi',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "a huge number": b"9" * 10_000,
}
WRONG: dict[str, Any] = {
    "null": None,
    "a number": 7,
    "text": "slots",
    "an empty object": {},
    "an error": {"error": {"code": 400, "message": "no", "type": "invalid_request_error"}},
    "a list of nothing": [None],
    "a list of numbers": [0],
    "a list of lists": [[]],
    "a list of empty objects": [{}],
    "no is_processing": [{"id": 0}],
    "no id": [{"is_processing": False}],
    "text for numbers": [{"id": "0", "is_processing": False}],
    "text for truth": [{"id": 0, "is_processing": "no"}],
    "text for tokens": [{"id": 0, "is_processing": False, "id_task": 1, "n_prompt_tokens": "9"}],
    "text for a task": [{"id": 0, "is_processing": False, "id_task": "1", "n_prompt_tokens": 9}],
    "null for tokens": [{"id": 0, "is_processing": False, "id_task": 1, "n_prompt_tokens": None}],
    "text for saved tokens": {"n_saved": "3", "n_written": 4, "n_restored": "3", "n_read": 4},
    "null for bytes": {"n_saved": 3, "n_written": None, "n_restored": 3, "n_read": None},
    "a fraction of a token": {"n_saved": 3.5, "n_written": 4, "n_restored": 3.5, "n_read": 4},
    "timings are a list": {"n_saved": 3, "n_written": 4, "n_restored": 3, "n_read": 4, "timings": []},
    "timings are text": {
        "n_saved": 3,
        "n_written": 4,
        "n_restored": 3,
        "n_read": 4,
        "timings": {"save_ms": "1", "restore_ms": "1"},
    },
}


@every_call
@pytest.mark.parametrize("body", GARBAGE.values(), ids=GARBAGE.keys())
@respx.mock(base_url=BASE)
async def test_what_is_no_json_is_nonsense(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, good: str, body: bytes
) -> None:
    respx_mock.route().respond(content=body)
    assert (await fault_of(call(server))).fault == "nonsense"


@pytest.mark.parametrize(
    "call", [CALLS[name][0] for name in ("slots", "save", "restore")], ids=["slots", "save", "restore"]
)
@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
@respx.mock(base_url=BASE)
async def test_another_shape_is_nonsense(
    respx_mock: respx.MockRouter, server: LlamaServer, call: Call, body: Any
) -> None:
    respx_mock.route().respond(json=body)
    assert (await fault_of(call(server))).fault == "nonsense"


NO_OBJECT = pytest.mark.parametrize("body", [None, 7, "props", [], [{}]])


@NO_OBJECT
@respx.mock(base_url=BASE)
async def test_props_that_are_no_object_are_nonsense(
    respx_mock: respx.MockRouter, server: LlamaServer, body: Any
) -> None:
    respx_mock.get("/props").respond(json=body)
    assert (await fault_of(server.sleeping())).fault == "nonsense"
    assert (await fault_of(server.identity())).fault == "nonsense"


@NO_OBJECT
@respx.mock(base_url=BASE)
async def test_models_that_are_no_object_are_nonsense(
    respx_mock: respx.MockRouter, server: LlamaServer, body: Any
) -> None:
    respx_mock.get("/props").respond(json=PROPS)
    respx_mock.get("/v1/models").respond(json=body)
    assert (await fault_of(server.identity())).fault == "nonsense"


@pytest.mark.parametrize(
    "models", [{}, {"data": None}, {"data": []}, {"data": [7]}, {"data": {}}, {"data": [{"meta": 7}]}]
)
@pytest.mark.parametrize("props", [{}, {"model_path": 7, "chat_template": "\ud800", "model_ftype": {}}])
@respx.mock(base_url=BASE)
async def test_a_model_that_is_hardly_told_of_has_an_identity_all_the_same(
    respx_mock: respx.MockRouter, server: LlamaServer, props: Any, models: Any
) -> None:
    respx_mock.get("/props").respond(content=json.dumps(props).encode())
    respx_mock.get("/v1/models").respond(json=models)
    first = await server.identity()
    assert first == await server.identity()
    assert len(first.model) == 32
    assert first.boot == ""


@every_call
@pytest.mark.parametrize(
    "bad",
    [
        httpx.Response(401, json={"error": {"message": f"Invalid API Key {KEY}"}}),
        httpx.Response(200, content=f"<html>{KEY}</html>".encode()),
        httpx.ConnectError(f"no {KEY}"),
        httpx.ReadTimeout(f"no {KEY}"),
        httpx.ReadError(f"no {KEY}"),
        ValueError(f"Bearer {KEY}"),
    ],
    ids=["refused", "nonsense", "unreachable", "timeout", "closed", "fault of ours"],
)
@respx.mock
async def test_no_error_tells_the_key_or_a_password(
    respx_mock: respx.MockRouter, call: Call, good: str, bad: Any
) -> None:
    respx_mock.route().mock(**({"return_value": bad} if isinstance(bad, httpx.Response) else {"side_effect": bad}))
    server = LlamaServer("http://user:word@llama:8080", KEY)
    error = await fault_of(call(server))
    for text in (str(error), repr(error), server.shown):
        assert KEY not in text
        assert "word" not in text
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    await server.aclose()


@pytest.mark.parametrize("key", ["sk-\N{SNOWMAN}", "sk-a\nb", "sk-a\0b"])
async def test_a_key_that_no_header_can_hold_is_a_fault_like_any_other(key: str) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]") as base_url:
        server = LlamaServer(base_url, key)
        error = await fault_of(server.slots())
        assert error.fault == "unreachable"
        assert key not in str(error)
        await server.aclose()


async def test_to_be_cancelled_is_no_fault() -> None:
    arrived = asyncio.Event()
    async with answering(b"", arrived=arrived) as base_url:
        server = LlamaServer(base_url)
        call = asyncio.ensure_future(server.slots())
        await asyncio.wait_for(arrived.wait(), 5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await server.aclose()


# time


@respx.mock(base_url=BASE)
async def test_a_look_may_take_its_time_and_no_more(respx_mock: respx.MockRouter, server: LlamaServer) -> None:
    route = respx_mock.get("/slots").mock(recorded("slots_never_used"))
    await server.slots()
    assert set(route.calls.last.request.extensions["timeout"].values()) == {module.LOOK_SECONDS}
    assert module.LOOK_SECONDS < 5


@pytest.mark.parametrize("action", ["save", "restore"])
@respx.mock(base_url=BASE)
async def test_a_switch_may_take_longer_the_more_bytes_there_are(
    respx_mock: respx.MockRouter, server: LlamaServer, action: str
) -> None:
    route = respx_mock.post("/slots/0").mock(recorded(action))
    taken = []
    for size in (0, 1e9, 20e9):
        await getattr(server, action)(0, "a.bin", size)
        taken.append(route.calls.last.request.extensions["timeout"])
    assert [times["read"] for times in taken] == [
        module.SWITCH_SECONDS + size / module.SLOWEST_BYTES_PER_SECOND for size in (0, 1e9, 20e9)
    ]
    assert taken[0]["read"] < 5 < 300 < taken[2]["read"]
    assert all(times["connect"] <= module.LOOK_SECONDS for times in taken)


@contextlib.asynccontextmanager
async def answering(
    head: bytes, then: bytes = b"", every: float = 0.05, arrived: asyncio.Event | None = None
) -> AsyncIterator[str]:
    """A server that answers with `head` at once, and then with `then` again and again for as long as anybody listens."""
    open_ones: set[asyncio.Task[Any]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_ones.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            if arrived is not None:
                arrived.set()
            writer.write(head)
            while then:
                await writer.drain()
                await asyncio.sleep(every)
                writer.write(then)
            await reader.read()
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        listening.close()
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("head", "then"),
    [
        pytest.param(b"", b"", id="says nothing"),
        pytest.param(OK, b"x-more: and more\r\n", id="header after header"),
        pytest.param(OK + b"content-length: 1000000\r\n\r\n", b" ", id="a body byte by byte"),
        pytest.param(OK + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n \r\n", id="chunk after chunk"),
    ],
)
async def test_a_server_that_never_comes_to_an_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, head: bytes, then: bytes
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    async with answering(head, then) as base_url:
        server = LlamaServer(base_url)
        error = await asyncio.wait_for(fault_of(server.slots()), 3)
        assert error.fault == "timeout"
        await server.aclose()


# addresses


@pytest.mark.parametrize(
    ("api_base", "base_url"),
    [
        ("http://llama:8080/v1", "http://llama:8080"),
        ("http://llama:8080/v1/", "http://llama:8080"),
        ("http://llama:8080", "http://llama:8080"),
        ("HTTP://Llama:8080/v1", "http://Llama:8080"),
        ("http://llama/x/v1/", "http://llama/x"),
        ("http://llama/v1/v1", "http://llama/v1"),
        ("http://[::1]:8080/v1", "http://[::1]:8080"),
    ],
)
def test_the_server_s_own_address_is_without_v1(api_base: str, base_url: str) -> None:
    assert base_url_of(api_base) == base_url
    assert base_url_of(base_url) == base_url or base_url.endswith("/v1")


@pytest.mark.parametrize(
    "api_base",
    [
        "",
        "llama",
        "llama:8080",
        "//llama",
        "file:///x",
        "http://",
        "http://:8080",
        "http://[::1",
        "http://a:b/v1",
        "http://a:70000",
    ],
)
def test_what_is_no_address_is_refused(api_base: str) -> None:
    with pytest.raises(ValueError):
        base_url_of(api_base)


@pytest.mark.parametrize(
    ("base_url", "shown"),
    [
        ("http://llama:8080", "http://llama:8080"),
        ("http://user:word@llama:8080/x", "http://llama:8080/x"),
        ("http://us@er:wo@rd@llama", "http://llama"),
        ("http://user:word@[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_an_address_is_shown_without_its_password(base_url: str, shown: str) -> None:
    assert shown_url(base_url) == shown


SAME = [
    ("http://llama", "http://llama:80"),
    ("https://llama", "https://llama:443"),
    ("http://llama:8080", "http://LLAMA:8080"),
    ("http://localhost:8080", "http://127.0.0.1:8080"),
    ("http://user:word@llama", "http://llama"),
    ("http://[2001:DB8::1]", "http://[2001:db8::1]"),
]
OTHERS = [
    ("http://llama", "https://llama"),
    ("http://llama", "http://llama:8080"),
    ("http://llama:80", "http://llama2:80"),
    ("http://llama/x", "http://llama/y"),
    ("http://llama", "http://llama.example.org"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_addresses_of_one_server_are_the_same(one: str, other: str) -> None:
    assert same_server_key(one) == same_server_key(other)


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_addresses_of_two_servers_are_not(one: str, other: str) -> None:
    assert same_server_key(one) != same_server_key(other)


def test_the_same_server_is_known_without_its_password() -> None:
    assert "word" not in same_server_key("http://user:word@llama")
