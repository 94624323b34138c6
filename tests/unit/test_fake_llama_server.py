"""The fake llama-server: its answers are those recorded from a real one, and it keeps the facts that were measured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from fake_llama_server import FakeLlamaServer, Kind, Refused, render, tokenize

FIXTURES = Path(__file__).parents[1] / "fixtures" / "llama-server"
BASE_URL = "http://llama:8080"


def recorded(name: str) -> Any:
    return json.loads((FIXTURES / f"{name}.json").read_text())


def shape(value: Any) -> Any:
    """Keys and types."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value]
    return "number" if isinstance(value, (int, float)) and not isinstance(value, bool) else type(value).__name__


@asynccontextmanager
async def client_of(fake: FakeLlamaServer, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    router = respx.MockRouter(assert_all_called=False)
    fake.mount(router, BASE_URL)
    with router:
        async with httpx.AsyncClient(base_url=BASE_URL, **options) as client:
            yield client


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def chat(client: httpx.AsyncClient, text: str, slot: int | None = 0, n: int = 4, **more: Any) -> httpx.Response:
    body = {"messages": user(text), "max_tokens": n, "temperature": 0} | more
    return await client.post("/v1/chat/completions", json=body if slot is None else body | {"id_slot": slot})


async def act(client: httpx.AsyncClient, action: str, filename: str | None = None, slot: int = 0) -> httpx.Response:
    body = {} if filename is None else {"filename": filename}
    return await client.post(f"/slots/{slot}?action={action}", json=body)


async def slot_of(client: httpx.AsyncClient, slot: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/slots")).json()[slot]
    return found


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


# --------------------------------------------------------------------------------------------------------------------
# as recorded


async def test_answers_to_calls_for_slots_are_as_recorded(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path, n_ctx=2048)
    async with client_of(fake) as client:
        assert (await client.get("/slots")).json() == [
            slot | {"n_ctx": 2048} for slot in recorded("slots_never_used")["body"]
        ]
        first = await chat(client, "hello")
        assert shape(first.json()) == shape(recorded("chat_completion")["body"])
        for name, call, count in (
            ("save", act(client, "save", "a.bin"), "n_saved"),
            ("restore", act(client, "restore", "a.bin"), "n_restored"),
            ("erase", act(client, "erase"), "n_erased"),
        ):
            answer = await call
            expected = recorded(name)
            assert answer.status_code == expected["status"] == 200
            assert shape(answer.json()) == shape(expected["body"])
            assert answer.json()[count] == first.json()["usage"]["total_tokens"] - 1
        assert (await act(client, "save", "empty.bin")).json() == recorded("save_of_empty_slot")["body"] | {
            "timings": {"save_ms": pytest.approx(0.1)}
        }
        assert (tmp_path / "empty.bin").stat().st_size == recorded("save_of_empty_slot")["body"]["n_written"] == 40


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("restore_missing_file", lambda c: act(c, "restore", "none.bin")),
        ("bad_action", lambda c: act(c, "copy")),
        ("bad_filename", lambda c: act(c, "save", "../a.bin")),
    ],
)
async def test_errors_are_as_recorded(
    name: str, call: Callable[[httpx.AsyncClient], Coroutine[Any, Any, httpx.Response]], tmp_path: Path
) -> None:
    async with client_of(FakeLlamaServer(save_dir=tmp_path)) as client:
        answer = await call(client)
    assert (answer.status_code, answer.json()) == (recorded(name)["status"], recorded(name)["body"])


async def test_refusals_are_as_recorded(tmp_path: Path) -> None:
    async def check(name: str, answer: httpx.Response) -> None:
        assert (answer.status_code, answer.json()) == (recorded(name)["status"], recorded(name)["body"])

    async with client_of(FakeLlamaServer(save_dir=tmp_path, slot_save_path=False)) as client:
        await check("no_slot_save_path", await act(client, "save", "a.bin"))
        await check("erase_no_slot_save_path", await act(client, "erase"))
    async with client_of(FakeLlamaServer(save_dir=tmp_path, slots_endpoint=False)) as client:
        await check("no_slots_endpoint", await client.get("/slots"))
        assert (await act(client, "save", "a.bin")).status_code == recorded("save_no_slots_endpoint")["status"] == 200
    fake = FakeLlamaServer(save_dir=tmp_path, api_key="secret")
    async with client_of(fake) as client:
        await check("no_api_key", await client.get("/slots"))
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/slots", headers={"Authorization": "Bearer secret"})).status_code == 200
    assert [c.status for c in fake.calls] == [401, 200, 200]


async def test_slots_are_as_recorded(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path)

    async def told(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Slot 0 as it is and as it was recorded: shape and parameters agree."""
        slot, expected = await slot_of(client), recorded(name)["body"][0]
        assert shape(slot) == shape(expected)
        for varies in ("n_ctx", "id_task", "n_prompt_tokens"):
            del slot[varies], expected[varies]
        for varies in ("max_tokens", "n_predict", "ignore_eos"):
            del slot["params"][varies], expected["params"][varies]
        return slot, expected

    async with client_of(fake) as client:
        done = await chat(client, "hello")
        slot, expected = await told("slots_after_request")
        assert slot == expected
        n = (await slot_of(client))["n_prompt_tokens"]
        assert n == done.json()["usage"]["total_tokens"] - 1
        await act(client, "save", "a.bin")
        await act(client, "erase")
        slot, expected = await told("slots_after_erase")
        assert slot == expected
        assert (await slot_of(client))["n_prompt_tokens"] == 0
        await act(client, "restore", "a.bin")
        slot, expected = await told("slots_after_restore")
        assert slot == expected
        assert (await slot_of(client))["n_prompt_tokens"] == n
        await act(client, "restore", "missing.bin")
        slot, expected = await told("slots_after_failed_restore")
        assert slot == expected
        assert (await slot_of(client))["n_prompt_tokens"] == 0


async def test_slots_at_work_are_as_recorded(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path, n_ctx=8192, prefill_seconds_per_token=0.0001)
    async with client_of(fake) as client:
        fake.gate = asyncio.Event()
        task = asyncio.create_task(chat(client, "x" * 5000, slot=1, n=300))
        await fake.until(lambda: len(fake.slots[1].tokens) > 0)
        slot, expected = await slot_of(client, 1), recorded("slots_while_prefilling")["body"][1]
        assert shape(slot) == shape(expected)
        for name in ("is_processing", "n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache"):
            assert slot[name] == expected[name]  # one batch of 2048 is being computed
        assert slot["next_token"][0] == expected["next_token"][0] | {"n_remain": 300}
        await fake.until_processing(1)
        fake.gate.set()
        fake.decode_seconds_per_token = 0.001
        await fake.until(lambda: len(fake.slots[1].tokens) > 5019 + 50)
        slot, expected = await slot_of(client, 1), recorded("slots_while_decoding")["body"][1]
        assert shape(slot) == shape(expected)
        told = slot["next_token"][0]
        assert told["has_next_token"] and told["n_decoded"] + told["n_remain"] == 300
        # as recorded, give or take the token that is on its way
        assert slot["n_prompt_tokens"] - slot["n_prompt_tokens_processed"] - told["n_decoded"] in (-1, 0)
        task.cancel()


async def test_props_and_models_are_as_recorded(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path, n_ctx=2048, model_path="/models/m.gguf")
    async with client_of(fake) as client:
        props = (await client.get("/props")).json()
        expected = recorded("props")["body"]
        assert shape(props) == shape(expected)
        assert props["default_generation_settings"] == expected["default_generation_settings"]
        assert (props["total_slots"], props["is_sleeping"]) == (2, False)
        assert props["model_path"] == props["model_alias"] == "/models/m.gguf"
        models = (await client.get("/v1/models")).json()
        assert shape(models) == shape(recorded("v1_models")["body"])
        assert models["data"][0]["id"] == "/models/m.gguf"
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/nothing")).status_code == 404


# --------------------------------------------------------------------------------------------------------------------
# reuse, and the oracle


async def test_what_is_common_is_reused_but_never_all(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    assert (await fake.complete("hello")).cached == 0
    assert (await fake.complete("hello")).cached == 4  # one token is always computed
    assert (await fake.complete("help")).cached == 3
    done = await fake.complete("world", n_predict=7)
    assert (done.n_prompt, done.cached, done.n_slot) == (5, 0, 11)
    assert fake.slots[0].tokens == (*b"world", *done.tokens[:-1])
    assert (await fake.complete("world" + done.text)).cached == 11


async def test_answers_are_those_of_a_server_without_a_cache(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    for prompt in ("hello", "hello", "hello world", "hell", "other", user("hi")):
        assert (await fake.complete(prompt)).text == fake.truth(prompt)
    async with client_of(fake) as client:
        answer = await chat(client, "hi", n=9)
        assert text_of(answer) == fake.truth(user("hi"), 9)
        assert text_of(answer) != fake.truth(user("ho"), 9)
    assert tokenize(render(user("hi")))[:6] == (256, *b"user\n")


async def test_a_restored_cache_gives_the_same_answer(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    async with client_of(fake) as client:
        await chat(client, "a conversation")
        saved = (await act(client, "save", "a.bin")).json()
        assert saved["n_written"] == (tmp_path / "a.bin").stat().st_size == fake.file_size(saved["n_saved"])
        assert len(fake.tokens_in_file("a.bin") or ()) == saved["n_saved"]
        await chat(client, "another")
        restored = (await act(client, "restore", "a.bin")).json()
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        again = await chat(client, "a conversation")
        assert again.json()["timings"]["prompt_n"] == 1
        assert text_of(again) == fake.truth(user("a conversation"))


async def test_a_file_of_another_model_of_the_same_shape_is_taken_and_the_answer_is_wrong(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello world")
    async with client_of(fake) as client:
        await act(client, "save", "a.bin")
        fake.restart(model_path="/models/b.gguf")
        assert (await act(client, "restore", "a.bin")).status_code == 200
        done = await fake.complete("hello world")
        assert done.cached == 10
        assert done.text != fake.truth("hello world")
        await act(client, "erase")
        assert (await fake.complete("hello world")).text == fake.truth("hello world")
        other = FakeLlamaServer(save_dir=tmp_path, shape="other")
    async with client_of(other) as client:
        assert (await act(client, "restore", "a.bin")).status_code == 400


@pytest.mark.parametrize("at", [-1, -2000, -100])
async def test_a_bit_flipped_in_the_data_goes_unnoticed_and_the_answer_is_wrong(at: int, tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello world")
    async with client_of(fake) as client:
        await act(client, "save", "a.bin")
        data = bytearray((tmp_path / "a.bin").read_bytes())
        data[at] ^= 4
        (tmp_path / "a.bin").write_bytes(data)
        assert (await act(client, "restore", "a.bin")).status_code == 200
        # the whole file is continued: what was generated is part of it
        prompt = "hello world" + fake.truth("hello world")[:3] + "!"
        done = await fake.complete(prompt)
        assert done.cached == 14
        assert done.text != fake.truth(prompt)


async def test_a_file_cut_in_its_data_kills_the_server(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello world")
    async with client_of(fake) as client:
        await act(client, "save", "a.bin")
        data = (tmp_path / "a.bin").read_bytes()
        (tmp_path / "a.bin").write_bytes(data[:-1])
        assert fake.tokens_in_file("a.bin") is None
        with pytest.raises(httpx.RemoteProtocolError):
            await act(client, "restore", "a.bin")
        await fake.until(lambda: not fake.is_up)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")
        with pytest.raises(Refused):
            await fake.complete("hello")
        fake.restart()
        assert (fake.crashes, fake.restarts) == (1, 1)
        assert (await client.get("/health")).status_code == 200
        assert fake.slots[0].tokens == ()
        (tmp_path / "a.bin").write_bytes(data[:40])  # cut in the tokens: refused
        assert (await act(client, "restore", "a.bin")).status_code == 400
    milder = FakeLlamaServer(save_dir=tmp_path, short_file_crashes=False, damage_lasts=True)
    (tmp_path / "a.bin").write_bytes(data[:-1])
    async with client_of(milder) as client:
        assert (await act(client, "restore", "a.bin")).status_code == 400
        assert (await milder.complete("hello")).text != milder.truth("hello")  # damage that only a restart cures
        milder.restart()
        assert (await milder.complete("hello")).text == milder.truth("hello")


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("reuse", "continues", "parts"), [("dense", 406, 402), ("swa", 0, 0), ("hybrid", 406, 0)], ids=lambda x: str(x)
)
async def test_what_is_reused_after_a_restore(
    reuse: Any, continues: int, parts: int, in_file: bool, tmp_path: Path
) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, reuse=reuse, checkpoints_in_file=in_file)
    first = await fake.complete("abcd" * 100, n_predict=7)
    tokens = [*b"abcd" * 100, *first.tokens[:-1]]
    async with client_of(fake) as client:
        await act(client, "save", "a.bin")
        for prompt, expected in (([*tokens, *b"more"], continues), ([*tokens[:402], *b"else"], parts)):
            await act(client, "restore", "a.bin")
            done = await fake.complete(prompt)
            if in_file and reuse != "dense":  # the checkpoint four tokens before the end of the prompt
                expected = max(expected, 395 if reuse == "swa" else 396)
            assert done.cached == expected
            assert done.text == fake.truth(prompt)


async def test_a_hybrid_model_that_was_rewound_before_the_save_is_reused(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, reuse="hybrid")
    talk = user("a long question " * 100)
    async with client_of(fake) as client:
        body: dict[str, Any] = {"messages": talk, "max_tokens": 8, "id_slot": 0}
        await client.post("/v1/chat/completions", json=body)
        rewind = body | {"add_generation_prompt": False, "n_predict": 0}
        rewound = (await client.post("/v1/chat/completions", json=rewind)).json()
        assert rewound["timings"]["cache_n"] > 1000
        n = (await act(client, "save", "a.bin")).json()["n_saved"]
        assert n == rewound["usage"]["prompt_tokens"]
        await act(client, "erase")
        await act(client, "restore", "a.bin")
        talk = [*talk, {"role": "assistant", "content": "an answer"}, *user("more")]
        following = (await client.post("/v1/chat/completions", json=body | {"messages": talk})).json()
        assert following["timings"]["cache_n"] == n


# --------------------------------------------------------------------------------------------------------------------
# slots and tasks


async def test_task_ids(tmp_path: Path) -> None:
    """Every call that reaches the queue takes one, and so does every batch that is computed."""
    fake = FakeLlamaServer(save_dir=tmp_path)
    async with client_of(fake) as client:
        await chat(client, "hello")
        assert (await slot_of(client))["id_task"] == 0
        await client.get("/health")
        await client.get("/props")
        await chat(client, "hello", n=1)
        assert (await slot_of(client))["id_task"] == 1 + 4 + 1
        for call in (act(client, "save", "a.bin"), act(client, "restore", "a.bin"), act(client, "erase")):
            await call
            assert (await slot_of(client))["id_task"] == 6
        before = fake.slots[0].id_task
        await chat(client, "hello")
        assert (fake.slots[0].id_task or 0) > (before or 0)
        fake.restart()
        assert (await slot_of(client)).keys() == {"id", "n_ctx", "speculative", "is_processing"}
        await chat(client, "hello")
        assert fake.slots[0].id_task == 1


async def test_a_slot_never_used_does_not_tell_of_a_restore(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello")
    async with client_of(fake) as client:
        await act(client, "save", "a.bin")
        fake.restart()
        assert (await act(client, "restore", "a.bin")).json()["n_restored"] == 8
        assert "n_prompt_tokens" not in await slot_of(client)
        assert (await fake.complete("hello")).cached == 4


async def test_the_id_of_a_slot_wraps(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path)
    async with client_of(fake) as client:
        await chat(client, "hello", slot=5)
        assert fake.slots[1].tokens and not fake.slots[0].tokens
        saved = (await act(client, "save", "a.bin", slot=7)).json()
        assert (saved["id_slot"], saved["n_saved"]) == (7, 27)
        assert (await act(client, "erase", slot=-1)).json() == {"id_slot": -1, "n_erased": 27}


async def test_without_id_slot_the_most_alike_is_taken_else_the_one_used_longest_ago(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=3, save_dir=tmp_path)
    taken = [(await fake.complete(text)).slot for text in ("aaaa", "bbbb", "cccc", "aaab", "dddd", "bbbc")]
    assert taken == [2, 1, 0, 2, 1, 0]
    gate = asyncio.Event()
    holders = [asyncio.create_task(fake.complete("x", slot=i, gate=gate)) for i in range(3)]
    for i in range(3):
        await fake.until_processing(i)
    waiting = asyncio.create_task(fake.complete("y"))
    await fake.until(lambda: fake.parked == 1)
    gate.set()
    await asyncio.gather(*holders)
    assert (await waiting).text == fake.truth("y")


async def test_idle_slots_are_cleared_when_a_request_starts(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=3, save_dir=tmp_path, clears_idle_slots=True)
    gate = asyncio.Event()
    await fake.complete("one", slot=0)
    held = asyncio.create_task(fake.complete("two", slot=1, gate=gate))
    await fake.until_processing(1)
    assert [len(s.tokens) for s in fake.slots] == [0, 3, 0]
    await fake.complete("three", slot=2)
    assert [len(s.tokens) for s in fake.slots] == [0, 3, 8]  # the busy one is not cleared
    gate.set()
    await held
    async with client_of(fake) as client:
        assert (await act(client, "save", "a.bin")).json()["n_written"] == 36


async def test_calls_for_a_busy_slot_are_parked_and_one_is_let_go_each_time_a_request_ends(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path)
    gate = asyncio.Event()
    order: list[str] = []

    async def note(name: str, work: Coroutine[Any, Any, Any]) -> None:
        await work
        order.append(name)

    async with client_of(fake) as client:
        calls = [
            note("first", fake.complete("one", slot=0, gate=gate)),
            note("save", act(client, "save", "a.bin")),
            note("save 1", act(client, "save", "b.bin")),
            note("second", fake.complete("two", slot=0)),
        ]
        tasks = []
        for n, call in enumerate(calls):
            tasks.append(asyncio.create_task(call))
            await (fake.until_processing() if n == 0 else fake.until(lambda n=n: fake.parked == n))  # type: ignore[misc]
        assert (await client.get("/health")).status_code == 200
        assert (await slot_of(client))["is_processing"]
        assert (await act(client, "erase", slot=1)).status_code == 200  # another slot is free
        gate.set()
        await asyncio.gather(*tasks[:2], tasks[3])
        assert order == ["first", "second", "save"]  # one pinned to the slot goes before those that wait longer
        assert fake.parked == 1 and not fake.is_busy
        await fake.complete("three", slot=1)  # any slot will do
        await tasks[2]
    assert fake.tokens_in_file("a.bin") == fake.tokens_in_file("b.bin")
    assert fake.actions() == ["save", "save", "health", "slots", "erase"]


async def test_a_prompt_too_long_is_refused_and_the_slot_keeps_its_tokens(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, n_ctx=100)
    await fake.complete("hello")
    async with client_of(fake) as client:
        answer = await chat(client, "x" * 100)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "exceed_context_size_error"
        assert (answer.json()["error"]["n_prompt_tokens"], answer.json()["error"]["n_ctx"]) == (119, 100)
    assert len(fake.slots[0].tokens) == 8
    full = await fake.complete("y" * 90, n_predict=50)
    assert (len(full.tokens), full.n_slot) == (10, 99)
    assert full.text == fake.truth("y" * 90, 50)


async def test_sleep(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello")
    async with client_of(fake) as client:
        fake.sleep()
        for path in ("/health", "/v1/models", "/props"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/props")).json()["is_sleeping"] is True
        assert fake.wakes == 0
        assert "id_task" not in await slot_of(client)
        assert (await client.get("/props")).json()["is_sleeping"] is False
        for n, call in enumerate((act(client, "erase"), act(client, "save", "a.bin"), chat(client, "hello"))):
            fake.sleep()
            await call
            assert fake.wakes == n + 2
    assert fake.slots[0].id_task is not None and fake.slots[0].id_task > 4  # it goes on counting


# --------------------------------------------------------------------------------------------------------------------
# streams, and clients that leave


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_streams_tell_the_whole_answer_and_what_was_reused(path: str, tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    body: dict[str, Any] = {"stream": True, "max_tokens": 5, "max_output_tokens": 5}
    body |= {"messages": user("hello"), "prompt": render(user("hello")), "input": "hello"}
    body |= {"stream_options": {"include_usage": True}}
    async with client_of(fake) as client:
        for cached in (0, 23):
            async with client.stream("POST", path, json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
            events = [json.loads(line.removeprefix("data: ")) for line in lines]
            pieces = [e["delta"] for e in events if e.get("type") == "response.output_text.delta"]
            pieces += [e["delta"]["text"] for e in events if e.get("type") == "content_block_delta"]
            for event in events:
                for choice in event.get("choices", []):
                    pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            assert "".join(pieces) == fake.truth(user("hello"), 5)
            usages = [e.get("usage") or e.get("response", {}).get("usage") for e in events]
            usages += [e["message"]["usage"] for e in events if "message" in e]
            told = json.dumps(usages)
            assert f'"cached_tokens": {cached}' in told or f'"cache_read_input_tokens": {cached}' in told


async def test_the_first_event_comes_with_the_first_token(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    fake.gate = asyncio.Event()
    async with (
        client_of(fake) as client,
        client.stream(
            "POST", "/v1/chat/completions", json={"messages": user("hello"), "stream": True, "max_tokens": 2}
        ) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        lines = answer.aiter_lines()

        async def take() -> str:
            return await lines.__anext__()

        first = asyncio.create_task(take())
        await fake.until_processing()
        assert not first.done()
        fake.gate.set()
        assert '"role":"assistant"' in await first


async def test_a_stream_that_its_client_left_ends_with_the_next_token(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, decode_seconds_per_token=0.001, leave_poll_seconds=60)
    async with client_of(fake) as client:
        body = {"messages": user("hello"), "stream": True, "max_tokens": 4000}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            await answer.aiter_lines().__anext__()
        await fake.until_idle()
    assert len(fake.slots[0].tokens) < 1000


async def test_a_client_that_left_without_a_stream_is_noticed_when_the_server_was_quiet(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, leave_poll_seconds=0.05)
    fake.gate = asyncio.Event()
    async with client_of(fake) as client:
        task = asyncio.create_task(chat(client, "hello"))
        await fake.until_processing()
        task.cancel()
        for _ in range(20):
            await client.get("/slots")  # each answer to anybody puts it off
            await asyncio.sleep(0.01)
        assert fake.is_busy
        await fake.until_idle()
        assert not fake.gate.is_set()
        assert fake.calls[0].status == 0
    assert len(fake.slots[0].tokens) == 24  # what was computed stays


async def test_a_parked_call_whose_client_left_is_forgotten(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, leave_poll_seconds=0.01)
    gate = asyncio.Event()
    async with client_of(fake) as client:
        held = asyncio.create_task(fake.complete("hello", gate=gate))
        await fake.until_processing()
        task = asyncio.create_task(act(client, "erase"))
        await fake.until(lambda: fake.parked == 1)
        task.cancel()
        await fake.until(lambda: fake.parked == 0)
        gate.set()
        assert (await held).text == fake.truth("hello")
    assert len(fake.slots[0].tokens) == 8


async def test_a_cancelled_completion_frees_its_slot(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    task = asyncio.create_task(fake.complete("hello", gate=asyncio.Event()))
    await fake.until_processing()
    task.cancel()
    await fake.until_idle()
    assert (await fake.complete("hello")).cached == 4


async def test_time_passes_when_told_to(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, n_ctx=8192, prefill_seconds_per_token=0.00001, switch_seconds=0.05)
    async with client_of(fake) as client:
        timings = (await chat(client, "x" * 5000)).json()["timings"]
        assert 40 < timings["prompt_ms"] < 1000
        save = asyncio.create_task(act(client, "save", "a.bin"))
        await fake.until(lambda: fake.count("save") == 1)
        begin = asyncio.get_running_loop().time()
        await asyncio.gather(client.get("/health"), client.get("/slots"), save)  # slots are told after the switch
        assert asyncio.get_running_loop().time() - begin > 0.03


# --------------------------------------------------------------------------------------------------------------------
# faults


async def test_faults_in_this_process(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    async with client_of(fake) as client:
        fake.fail("slots", "drop", times=2)
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError, match="Server disconnected without sending a response"):
                await client.get("/slots")
        assert (await client.get("/slots")).status_code == 200
        fake.fail("*", "refuse", times=None)
        for path in ("/slots", "/props"):
            with pytest.raises(httpx.ConnectError):
                await client.get(path)
        fake.clear()
        for kind, status in (("500", 500), ("503", 503)):
            fake.fail("slots", kind)  # type: ignore[arg-type]
            answer = await client.get("/slots")
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)
        fake.fail("slots", "garbage")
        with pytest.raises(ValueError, match="Expecting value"):
            (await client.get("/slots")).json()
        fake.fail("slots", "wrong_shape")
        assert isinstance((await client.get("/slots")).json(), dict)
        fake.fail("props", "wrong_shape")
        assert isinstance((await client.get("/props")).json(), list)
        fake.fail("slots", "wrong_types")
        assert (await slot_of(client))["n_ctx"] == "4096 pieces"
        fake.fail("slots", "cut")
        with pytest.raises(ValueError):
            (await client.get("/slots")).json()
        assert fake.count("slots", status=200) == 5
        assert fake.count("slots", status=0) == 3


async def test_a_call_that_hangs(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    async with client_of(fake) as client:
        fake.fail("slots", "hang", times=None)
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/slots", timeout=0.05)
        hanging = asyncio.create_task(client.get("/slots"))
        await fake.until(lambda: fake.count("slots") == 2)
        assert (await client.get("/health")).status_code == 200
        fake.clear()
        assert (await hanging).status_code == 200
        fake.fail("save", "hang")
        hanging = asyncio.create_task(act(client, "save", "a.bin"))
        await fake.until(lambda: fake.count("save") == 1)
        hanging.cancel()
        await asyncio.wait([hanging])
        assert hanging.cancelled() and not (tmp_path / "a.bin").exists()
        fake.fail("erase", "hang")
        hanging = asyncio.create_task(act(client, "erase"))
        await fake.until(lambda: fake.count("erase") == 1)
        fake.restart()
        with pytest.raises(httpx.RemoteProtocolError):
            await hanging


async def test_faults_of_a_save(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello world")
    size, tokens = fake.file_size(14), (*b"hello world", *map(ord, fake.truth("hello world")[:3]))
    async with client_of(fake) as client:

        async def save(kind: Kind) -> tuple[dict[str, Any], int]:
            fake.fail("save", kind, seconds=0.01)
            told: dict[str, Any] = (await act(client, "save", "a.bin")).json()
            return told, (tmp_path / "a.bin").stat().st_size

        told, on_disk = await save("short_file")
        assert (told["n_saved"], told["n_written"]) == (14, size) and on_disk < size
        told, on_disk = await save("wrong_count")
        assert (told["n_saved"], told["n_written"], on_disk) == (7, size, size)
        told, on_disk = await save("late")
        assert fake.tokens_in_file("a.bin") == tokens
        (tmp_path / "a.bin").unlink()
        with pytest.raises(httpx.RemoteProtocolError):
            await save("drop")
        assert not (tmp_path / "a.bin").exists()
        with pytest.raises(httpx.RemoteProtocolError):
            await save("drop_after")
        assert fake.tokens_in_file("a.bin") == tokens
        told, on_disk = await save("empty_save")
        assert (told["n_saved"], told["n_written"], on_disk) == (0, 36, 36)
        assert fake.slots[0].tokens == ()
        await fake.complete("hello world")
        with pytest.raises(httpx.RemoteProtocolError):
            await save("crash")
        assert 0 < (tmp_path / "a.bin").stat().st_size < size
        assert not fake.is_up


async def test_a_restart_just_before_the_answer(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    await fake.complete("hello")
    held = asyncio.create_task(fake.complete("hello", gate=asyncio.Event()))
    await fake.until_processing()
    async with client_of(fake) as client:
        fake.fail("save", "restart")
        assert (await act(client, "save", "a.bin")).json()["n_saved"] == 0
    await asyncio.wait([held])
    assert type(held.exception()).__name__ == "Disconnected"
    assert (fake.restarts, fake.slots[0].id_task) == (1, None)


async def test_a_stream_that_breaks(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, leave_poll_seconds=0.01)
    async with client_of(fake) as client:
        fake.fail("chat", "cut")
        pieces = []
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
            async with client.stream(
                "POST", "/v1/chat/completions", json={"messages": user("hello"), "stream": True, "max_tokens": 50}
            ) as answer:
                pieces = [piece async for piece in answer.aiter_text()]
        assert not any("DONE" in piece for piece in pieces)
        await fake.until_idle()


# --------------------------------------------------------------------------------------------------------------------
# on a real port


async def test_served_on_a_port(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path)
    async with fake.serve() as base_url, httpx.AsyncClient(base_url=base_url) as client:
        assert text_of(await chat(client, "hello")) == fake.truth(user("hello"))
        answer = await chat(client, "hello", stream=True, stream_options={"include_usage": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"cached_tokens":23' in answer.text
        assert (await act(client, "save", "ä.bin")).json()["filename"] == "ä.bin"
        assert (await client.get("/nothing")).headers["connection"] == "close"


async def test_faults_on_a_port(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path, leave_poll_seconds=0.01)
    async with fake.serve() as base_url, httpx.AsyncClient(base_url=base_url, timeout=5) as client:
        fake.fail("slots", "drop")
        with pytest.raises(httpx.RemoteProtocolError, match="Server disconnected without sending a response"):
            await client.get("/slots")
        fake.fail("slots", "refuse")
        with pytest.raises(httpx.TransportError):
            await client.get("/slots")
        assert (await client.get("/slots")).status_code == 200
        fake.fail("*", "refuse", times=None)
        with pytest.raises(httpx.TransportError):  # the connection of before, closed
            await client.get("/slots")
        with pytest.raises(httpx.ConnectError):
            await client.get("/slots")
        fake.clear()
        assert (await client.get("/slots")).status_code == 200
        fake.fail("slots", "hang")
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/slots", timeout=0.05)
        fake.gate = asyncio.Event()
        leaver = asyncio.create_task(chat(client, "hello"))
        await fake.until_processing()
        leaver.cancel()
        await fake.until_idle()
        fake.gate.set()
        fake.fail("chat", "cut")
        with pytest.raises(httpx.RemoteProtocolError):
            await chat(client, "hello", stream=True, n=50)
        await fake.until_idle()
        fake.gate = asyncio.Event()
        lost = asyncio.create_task(chat(client, "hello"))
        await fake.until_processing()
        fake.restart()
        with pytest.raises(httpx.TransportError):
            await lost
        assert (await slot_of(client)).get("id_task") is None  # the same port, a new process
        fake.crash()
        with pytest.raises(httpx.TransportError):
            await client.get("/health")
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_connections_end(tmp_path: Path) -> None:
    """After a number of requests and after a time without: what a pooled client sees only at its next call."""
    fake = FakeLlamaServer(save_dir=tmp_path)
    async with fake.serve(keep_alive_seconds=0.05, keep_alive_requests=3) as base_url:
        host, port = base_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        heads = []
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            await reader.readexactly(15)
        assert [b"Connection: close" in head for head in heads] == [False, False, True]
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
