"""The fake llama-server against a real one: the same script of steps, the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_llama_server import FakeLlamaServer

pytestmark = pytest.mark.real

Fact = tuple[str, Any]
StartServer = Callable[..., Any]


class Player:
    """Plays steps on one server and writes down what is to be compared."""

    def __init__(self, client: httpx.AsyncClient, folder: Path) -> None:
        self.client, self.folder = client, folder
        self.facts: list[Fact] = []

    def note(self, step: str, *facts: Any) -> None:
        self.facts.append((step, facts))

    async def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = (await self.client.get("/slots")).json()
        return slots

    async def look(self, step: str) -> None:
        """GET /slots, all of it: of the parameters the names, and the values that a request sets."""
        told = []
        for slot in await self.slots():
            params = slot.pop("params", None)
            set_by_request = params and {k: params[k] for k in ("max_tokens", "n_predict", "stream", "temperature")}
            told.append((slot, set_by_request, params and sorted(params)))
        self.note(f"{step}: slots", told)

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **more)

    async def chat(self, step: str, content: Any, slot: int | None = 0, n: int = 4, **more: Any) -> str:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": n, "temperature": 0, "ignore_eos": True} | more
        if slot is not None:
            body["id_slot"] = slot
        answer = await self.post("/v1/chat/completions", body)
        told = answer.json()
        if answer.status_code != 200:
            self.note(step, answer.status_code, told)
            return ""
        timings = {k: told["timings"][k] for k in ("cache_n", "prompt_n", "predicted_n")}
        self.note(step, told["usage"], timings, told["choices"][0]["finish_reason"], sorted(told))
        await self.look(step)
        return str(told["choices"][0]["message"]["content"])

    async def text(self, step: str, prompt: str | Sequence[int], slot: int = 0, n: int = 4) -> list[int]:
        """A request through /completion; what it generated."""
        body = {"prompt": prompt, "n_predict": n, "id_slot": slot, "temperature": 0, "ignore_eos": True}
        answer = await self.post("/completion", body | {"return_tokens": True})
        told = answer.json()
        names = ("tokens_predicted", "tokens_evaluated", "tokens_cached", "id_slot", "stop_type")
        self.note(step, {k: told[k] for k in names}, told["timings"]["cache_n"], sorted(told))
        await self.look(step)
        tokens: list[int] = told["tokens"]
        return tokens

    async def act(self, action: str, filename: Any = None, slot: int | str = 0, look: bool = True) -> None:
        step = f"{action} {filename} slot {slot}"
        body = {} if filename is None else {"filename": filename}
        answer = await self.post(f"/slots/{slot}?action={action}", body)
        told = answer.json()
        if "timings" in told:
            told["timings"] = sorted(told["timings"])
        on_disk = None
        if action == "save" and answer.status_code == 200:
            on_disk = (self.folder / filename).stat().st_size
        self.note(step, answer.status_code, told, on_disk)
        if look:
            await self.look(step)


Script = Callable[[Player], Awaitable[None]]


@contextlib.asynccontextmanager
async def player(base_url: str, folder: Path) -> AsyncIterator[Player]:
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        yield Player(client, folder)


async def compare(script: Script, real: Any, fake: FakeLlamaServer) -> None:
    async with player(real.base_url, Path(real.options.save_path or ".")) as one:
        await script(one)
    async with fake.serve() as base_url, player(base_url, fake.save_dir) as other:
        await script(other)
    for (step, measured), (its_step, told) in zip(one.facts, other.facts, strict=True):
        assert its_step == step
        assert not list(differences(told, measured)), f"{step}: the fake (left) is not like the real server (right)"


def differences(left: Any, right: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(left, dict) and isinstance(right, dict):
        left, right = sorted(left.items()), sorted(right.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)) and len(left) == len(right):
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            yield from differences(x, y, f"{at}.{x[0] if isinstance(x, tuple) and len(x) == 2 else i}")
    elif left != right:
        yield at, left, right


async def until(question: Callable[[], Awaitable[bool]], answer: bool = True, every: float = 0.05) -> None:
    """Asks a server that cannot tell by itself."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 10
    while await question() is not answer:
        assert loop.time() < end
        await asyncio.sleep(every)


def fake_of(tmp_path: Path, **options: Any) -> FakeLlamaServer:
    return FakeLlamaServer(save_dir=tmp_path / "of the fake", **({"n_ctx": 4096} | options))


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


async def test_one_slot(llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        await p.look("never used")
        await p.act("save", "never.bin")
        await p.chat("first", "hello")
        await p.chat("the same again", "hello")
        await p.chat("longer", "hello world", n=1)
        await p.chat("nothing to generate", "hello world", n=0)
        await p.chat("no cache", "hello world", cache_prompt=False)
        await p.act("save", "a.bin")
        await p.chat("another", "y" * 100)
        await p.act("save", "b.bin")
        await p.act("restore", "a.bin")
        await p.chat("continues", turns("hello world", "and?", "more"))
        await p.act("restore", "b.bin")
        await p.act("restore", "missing.bin")
        await p.act("save", "empty.bin")
        await p.act("erase")
        await p.chat("something", "x")
        await p.act("restore", "empty.bin")
        await p.act("restore", "b.bin", slot=5)
        await p.act("erase", slot=-1)
        await p.chat("slot 5", "hello", slot=5)
        await p.chat("too long", "z" * 5000)
        await p.look("after too long")
        await p.chat("system", [{"role": "system", "content": "be brief"}, *turns("hi")])
        await p.chat("parts", [{"role": "user", "content": [{"type": "text", "text": t} for t in ("ab", "cd")]}])
        await p.chat("answer begun", turns("hi", "yes"))
        await p.chat("no generation prompt", "hi", add_generation_prompt=False, n_predict=0, n=0)
        await p.chat("two bytes a letter", "äöü€")
        await p.chat("several batches", "r" * 3800, n=2)
        await p.chat("until the context is full", "q" * 3900, n=1000)
        await p.chat("short again", "q" * 50)
        await p.text("text", "abc " * 20)
        await p.text("text, with marks", "<|im_start|>user\nabc<|im_end|>")
        await p.text("tokens", [1, 2, 3])
        await p.text("nothing", "")
        for health in ("/health", "/props", "/v1/models"):
            answer = await p.client.get(health)
            p.note(health, answer.status_code, sorted(answer.json()))
        await p.look("after all")

    await compare(script, llama_server(), fake_of(tmp_path))


async def test_errors(llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        await p.chat("something to lose", "hello")
        for name in ("../a.bin", "a/b.bin", ".", "..", "a..b", "", "a\\b", "a:b", "a*b", "a.", " a", "a ", "a\tb"):
            await p.act("save", name, look=False)
        for name in ("x.bin.part", ".hidden", "a b.bin", "ä.bin", "%61.bin", "n" * 255, "n" * 256):
            await p.act("save", name, look=False)
        for slot in ("abc", "1x", 2**40, -7):
            await p.act("erase", slot=slot, look=False)
        await p.act("copy", "a.bin")
        (p.folder / "folder.bin").mkdir()
        await p.act("save", "folder.bin", look=False)
        await p.act("restore", "folder.bin")
        for body in ({}, {"filename": 3}, [1]):
            answer = await p.post("/slots/0?action=save", body)
            p.note(f"save {body}", answer.status_code, answer.json()["error"]["type"])
        for content in (b"", b"nonsense"):
            answer = await p.client.post("/slots/0?action=save", content=content)
            p.note(f"save {content!r}", answer.status_code, answer.json()["error"]["type"])
        for chat in ({}, {"messages": "x"}, {"messages": [{"role": "user"}]}):
            answer = await p.post("/v1/chat/completions", chat)
            p.note(f"chat {chat}", answer.status_code, answer.json())
        for path in ("/slots/0", "/nothing"):
            answer = await p.client.get(path)
            p.note(path, answer.status_code, answer.json(), answer.headers.get("connection"))
        await p.look("after all")

    await compare(script, llama_server(), fake_of(tmp_path))


async def test_four_slots(llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        await p.chat("first, to the last slot", "hello one", slot=None)
        await p.chat("unlike, yet the frame is like", "completely different 123456", slot=None)
        await p.chat("pinned", "Q" * 60, slot=1)
        await p.chat("pinned beyond the last", "W" * 50, slot=6)
        await p.chat("to the most alike", "Q" * 60 + "x", slot=None)
        await p.text("pinned", "z" * 80, slot=0)
        await p.text("like none: used longest ago", "k" * 80, slot=-1)
        await p.text("like none: used longest ago", "m" * 80, slot=-1)
        await p.act("save", "a.bin", slot=1)
        await p.act("restore", "a.bin", slot=7)
        await p.act("save", "b.bin", slot=-1)
        await p.act("erase", slot=3)
        await p.act("save", "e.bin", slot=3)
        for n, slot in ((1, 0), (2, 0), (3, 1)):
            body = {"messages": turns("hi there you"), "max_tokens": 2, "id_slot": slot}
            answer = await p.post("/v1/messages", body)
            p.note(f"messages {n}", answer.json()["usage"], sorted(answer.json()))
            await p.look(f"messages {n}")
        for path in ("/v1/responses", "/v1/completions"):
            body = {"input": "abc", "prompt": "abc", "max_output_tokens": 2, "max_tokens": 2, "id_slot": 0}
            answer = await p.post(path, body | {"temperature": 0, "ignore_eos": True})
            p.note(path, answer.json()["usage"], sorted(answer.json()))
            await p.look(path)

    await compare(script, llama_server(slots=4, ctx=16384), fake_of(tmp_path, slots=4))


async def test_a_slot_never_used_does_not_tell_of_a_restore(llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        await p.chat("in slot 0", "hello")
        await p.act("save", "a.bin")
        await p.act("restore", "a.bin", slot=1)
        await p.chat("in slot 1", "hello", slot=1)

    await compare(script, llama_server(slots=2, ctx=8192), fake_of(tmp_path, slots=2))


async def test_idle_slots_are_cleared(llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        await p.chat("in slot 0", "hello", slot=0)
        await p.chat("in slot 1", "hello", slot=1)
        await p.act("save", "gone.bin", slot=0)
        await p.act("save", "a.bin", slot=1)
        await p.chat("in slot 0", "hello", slot=0)
        await p.act("restore", "a.bin", slot=1)
        await p.chat("in slot 1", "hello", slot=1)

    real = llama_server(slots=4, kv_unified=True, cache_idle_slots=True, cache_ram_mib=64)
    await compare(script, real, fake_of(tmp_path, slots=4, clears_idle_slots=True))


@pytest.mark.parametrize("model", ["swa", "hybrid"])
async def test_models_that_cannot_be_rewound(
    model: Any, llama_server: StartServer, tiny_models: Path, tmp_path: Path
) -> None:
    """Reuse exactly as measured, as long as the prompts stay within the window's spare room."""

    async def script(p: Player) -> None:
        long = "base text " * 30

        async def fresh_from(file: str) -> None:
            await p.act("erase", look=False)
            answer = await p.post("/slots/0?action=restore", {"filename": file})
            p.note(f"restore {file}", answer.status_code, answer.json()["n_restored"])

        await p.chat("first", long, n=8)
        await p.chat("again", long, n=8)
        await p.chat("next turn", turns(long, "okay", "more " * 5), n=8)
        await p.chat("third turn", turns(long, "okay", "more " * 5, "fine", "again"), n=8)
        await p.chat("parts early", long[:50] + "ZZ" + long[50:], n=8)
        await p.chat("first again", long, n=8)
        assert (await p.post("/slots/0?action=save", {"filename": "a.bin"})).status_code == 200
        await p.chat("another", "unlike")
        await fresh_from("a.bin")
        await p.chat("restored, the same prompt", long, n=8)
        await fresh_from("a.bin")
        await p.chat("restored, next turn", turns(long, "okay", "more"), n=8)
        await p.act("erase", look=False)
        tokens = [*(b"abc " * 100), *await p.text("text", "abc " * 100, n=8)]
        assert (await p.post("/slots/0?action=save", {"filename": "b.bin"})).status_code == 200
        for step, prompt in {
            "continues all of the file": [*tokens, 65, 66, 67],
            "the file, no more": tokens[:-1],
            "one token more": tokens,
            "one token less": tokens[:-2],
            "parts in the last token": [*tokens[:-2], 200, 65, 66],
        }.items():
            await fresh_from("b.bin")
            await p.text(step, prompt)
        await p.act("erase", look=False)
        await p.chat("several batches", "long " * 700, n=8)
        await p.chat("rewound", "long " * 700, n=0, add_generation_prompt=False, n_predict=0)
        await p.chat("several batches again", "long " * 700, n=8)
        for step, said in {"a question": turns("long " * 700), "an answer at the end": turns("hello", "yes")}.items():
            for begins in (True, False):
                body = {"messages": said, "add_generation_prompt": begins}
                rendered = (await p.post("/apply-template", body)).json()
                p.note(f"the template, {step}, {begins}", rendered)
                await p.text(f"rewound to {step}, {begins}", rendered["prompt"], n=0)

    fake = fake_of(tmp_path, reuse=model, checkpoints_in_file=True)
    # sizes are those of the dense model: of the answers to a save and a restore only the counts are compared here
    await compare(script, llama_server(model=tiny_models / f"{model}.gguf"), fake)


async def test_damaged_files(llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        await p.chat("something", "base text " * 10)
        await p.act("save", "good.bin")
        good = (p.folder / "good.bin").read_bytes()
        n = struct.unpack_from("<I", good, 8)[0] - 4
        state = 12 + 4 * (n + 4)

        def changed(at: int, value: bytes) -> bytes:
            return good[:at] + value + good[at + len(value) :]

        for what, data in {
            "whole": good,
            "longer": good + bytes(100),
            "nothing": b"",
            "cut in the magic": good[:4],
            "cut before the count": good[:8],
            "cut before the tokens": good[:12],
            "cut in the tokens": good[:100],
            "cut before the state": good[:state],
            "cut in the state's head": good[: state + 4],
            "another magic": changed(0, b"ABCD"),
            "another version": changed(4, b"\x09"),
            "one token more": changed(8, struct.pack("<I", n + 5)),
            "mark": changed(12, b"\0"),
            "token count": changed(20, struct.pack("<i", n - 1)),
            "no such token": changed(12 + 4 * 20, struct.pack("<i", 4711)),
            "another token": changed(12 + 4 * 20, struct.pack("<i", 65)),
            "streams": changed(state, struct.pack("<I", 2)),
            "cells": changed(state + 4, struct.pack("<I", n + 1)),
            "in the K/V data": changed(len(good) - 5000, b"\x01"),
            "at the end": changed(len(good) - 1, b"\x01"),
        }.items():
            (p.folder / "bad.bin").write_bytes(data)
            await p.act("erase", look=False)
            p.note(what)
            await p.act("restore", "bad.bin")
            await p.chat(f"after: {what}", "base text " * 10)

        (p.folder / "bad.bin").write_bytes(good[:-1000])
        with pytest.raises(httpx.RemoteProtocolError):
            await p.post("/slots/0?action=restore", {"filename": "bad.bin"})
        with pytest.raises(httpx.TransportError):
            while True:  # its process takes a moment to end
                await p.client.get("/health")

    fake = fake_of(tmp_path)
    await compare(script, llama_server(), fake)
    assert fake.crashes == 1


async def test_files_of_others(llama_server: StartServer, tiny_models: Path, tmp_path: Path) -> None:
    """The same shape: taken, and the answers are wrong. Another shape or another number of slots: refused."""
    facts: dict[str, list[Any]] = {"real": [], "fake": []}
    prompt = "base text " * 10

    async def write(p: Player) -> None:
        await p.chat("write", prompt)
        await p.act("save", "a.bin")

    async def read(p: Player, kind: str, folder: Path) -> None:
        cold = await p.chat("cold", prompt, n=12)
        (p.folder / "a.bin").write_bytes((folder / "a.bin").read_bytes())
        answer = await p.post("/slots/0?action=restore", {"filename": "a.bin"})
        answers = [answer.status_code, await p.chat("warm", prompt, n=12) == cold]
        facts[kind].append(answers)

    first = llama_server()
    async with player(first.base_url, Path(first.options.save_path)) as p:
        await write(p)
    first.stop()
    others: list[dict[str, Any]] = [{"model": tiny_models / f"{name}.gguf"} for name in ("other", "hybrid")]
    for options in (*others, {"slots": 2}):
        real = llama_server(ctx=8192, save_path=tmp_path / "read", **options)
        async with player(real.base_url, tmp_path / "read") as p:
            await read(p, "real", Path(first.options.save_path))
        real.stop()

    fake = fake_of(tmp_path)
    async with fake.serve() as url, player(url, fake.save_dir) as p:
        await write(p)
    others = [{"weights": "other"}, {"shape": "other"}]
    for options in (*others, {"slots": 2}):
        reader = FakeLlamaServer(save_dir=tmp_path / "read by the fake", **options)
        async with reader.serve() as url, player(url, reader.save_dir) as p:
            await read(p, "fake", fake.save_dir)

    assert facts["fake"] == facts["real"] == [[200, False], [400, True], [400, True]]


async def test_calls_for_a_busy_slot_are_parked(llama_server: StartServer, tmp_path: Path) -> None:
    """Each request that ends lets one of them go: one pinned to its slot first, else the one that waits longest."""

    async def play(p: Player, let_go: Callable[[], None]) -> list[str]:
        order: list[str] = []
        tasks: dict[str, asyncio.Task[None]] = {}

        async def work(name: str, path: str, body: Any) -> None:
            assert (await p.post(path, body)).status_code == 200
            order.append(name)

        def request(name: str, slot: int, n: int) -> None:
            body = {"messages": turns("hello"), "max_tokens": n, "ignore_eos": True, "id_slot": slot}
            tasks[name] = asyncio.create_task(work(name, "/v1/chat/completions", body))

        def act(name: str, target: str, body: Any) -> None:
            tasks[name] = asyncio.create_task(work(name, f"/slots/{target}", body))

        async def taken_in() -> None:
            for _ in range(5):  # the server has few threads for connections: let the last call arrive
                assert (await p.slots())[0]["is_processing"]

        async def ended(*names: str) -> None:
            for name in names:
                await asyncio.wait_for(tasks[name], 30)

        request("first", 0, 5000)
        while not (await p.slots())[0]["is_processing"]:
            pass
        act("save", "0?action=save", {"filename": "a.bin"})
        await taken_in()
        act("save 2", "2?action=save", {"filename": "b.bin"})
        await taken_in()
        request("second", 0, 30)
        await taken_in()
        act("erase", "0?action=erase", {})
        await taken_in()
        let_go()
        await ended("first", "second", "save")
        assert len(order) == 3  # the others wait, though their slot is free
        request("third", 1, 1)
        await ended("third", "save 2")
        assert len(order) == 5
        request("fourth", 1, 1)
        await ended("fourth", "erase")
        return order

    real = llama_server(slots=2, ctx=16384)
    async with player(real.base_url, Path(real.options.save_path)) as p:
        measured = await play(p, lambda: None)
    fake = fake_of(tmp_path, slots=2, n_ctx=8192)
    fake.gate = asyncio.Event()
    async with fake.serve() as url, player(url, fake.save_dir) as p:
        told = await play(p, fake.gate.set)
    # an answer and the one of the call that was let go then come at almost the same time
    expected = [{"first"}, {"second", "save"}, {"third", "save 2"}, {"fourth", "erase"}]
    for names in (measured, told):
        assert [set(names[:1]), set(names[1:3]), set(names[3:5]), set(names[5:])] == expected


async def test_a_client_that_left(llama_server: StartServer, tmp_path: Path) -> None:
    """A stream ends with its next token. Without a stream the server notices when it has been quiet for a second."""

    async def is_busy(p: Player) -> bool:
        return bool((await p.slots())[0]["is_processing"])

    async def leave(p: Player, stream: bool, n: int) -> None:
        """Sends a request and goes away when it is being answered."""
        async with httpx.AsyncClient(base_url=p.client.base_url, timeout=60) as client:
            body = {"messages": turns("Q" * 60), "max_tokens": n, "ignore_eos": True, "temperature": 0, "id_slot": 0}
            task = asyncio.create_task(client.post("/v1/chat/completions", json=body | {"stream": stream}))
            while not await is_busy(p):
                pass
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def play(p: Player) -> None:
        await leave(p, stream=True, n=20000)
        await until(lambda: is_busy(p), False)
        await leave(p, stream=False, n=20000)
        for _ in range(10):  # whoever looks more often than once a second keeps it alive
            await asyncio.sleep(0.2)
            assert await is_busy(p)
        await until(lambda: is_busy(p), False, every=1.3)
        assert (await p.slots())[0]["n_prompt_tokens"] < 20000

    real = llama_server(ctx=32768)
    async with player(real.base_url, tmp_path) as p:
        await play(p)
    fake = fake_of(tmp_path, n_ctx=32768, decode_seconds_per_token=0.001)
    async with fake.serve() as url, player(url, tmp_path) as p:
        await play(p)


async def test_sleep(llama_server: StartServer, tmp_path: Path) -> None:
    async def is_sleeping(p: Player) -> bool:
        return (await p.client.get("/props")).json()["is_sleeping"] is True

    async def play(p: Player, sleep: Callable[[], Awaitable[None]]) -> None:
        p.note("at first", await is_sleeping(p))
        await p.chat("something", "hello")
        await p.act("save", "a.bin")
        calls: list[tuple[str, str, Any]] = [
            ("GET", "/health", None),
            ("GET", "/props", None),
            ("GET", "/v1/models", None),
            ("GET", "/slots", None),
            ("POST", "/slots/0?action=save", {"filename": "b.bin"}),
            ("POST", "/slots/0?action=restore", {"filename": "a.bin"}),
            ("POST", "/slots/0?action=copy", {}),
            ("POST", "/apply-template", {"messages": turns("hi")}),
        ]
        for method, path, body in calls:
            await sleep()
            p.note(f"{path} before", await is_sleeping(p))
            answer = await p.client.request(method, path, json=body)
            p.note(path, answer.status_code, await is_sleeping(p))
        await p.look("restored, then woken by another call")
        await p.chat("again", "hello")

    real = llama_server(sleep_idle_seconds=1)
    async with player(real.base_url, Path(real.options.save_path)) as one:

        async def asleep() -> None:
            await until(lambda: is_sleeping(one))

        await play(one, asleep)
    fake = fake_of(tmp_path)
    async with fake.serve() as url, player(url, fake.save_dir) as other:

        async def send_to_sleep() -> None:
            fake.sleep()

        await play(other, send_to_sleep)
    assert fake.wakes == 5
    assert not list(differences(other.facts, one.facts))


@pytest.mark.parametrize("options", [{"api_keys": ("abc",)}, {"endpoint_slots": False}, {"save_path": None}])
async def test_what_is_forbidden(options: dict[str, Any], llama_server: StartServer, tmp_path: Path) -> None:
    async def script(p: Player) -> None:
        for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer abc"}, {"X-Api-Key": "abc"}):
            for method, path in (
                ("GET", "/health"),
                ("GET", "/v1/models"),
                ("GET", "/props"),
                ("GET", "/slots"),
                ("POST", "/slots/0?action=erase"),
                ("POST", "/slots/x?action=copy"),
                ("POST", "/v1/chat/completions"),
                ("GET", "/nothing"),
            ):
                answer = await p.client.request(method, path, headers=key)
                body = answer.json() if path.startswith("/slots") else None
                p.note(f"{method} {path} {key}", answer.status_code, body, answer.headers.get("connection"))

    mine = {
        "api_key": "abc" if "api_keys" in options else None,
        "slots_endpoint": "endpoint_slots" not in options,
        "slot_save_path": "save_path" not in options,
    }
    await compare(script, llama_server(**options), fake_of(tmp_path, **mine))


async def test_streams(llama_server: StartServer, tmp_path: Path) -> None:
    """The events of each API: their names and keys. (The real model's answer to this is readable.)"""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: shape(v) for k, v in value.items()}
        if isinstance(value, list):
            return [shape(v) for v in value]
        return value if value in ("length", "max_tokens", "assistant", None) else type(value).__name__

    async def script(p: Player) -> None:
        text = "Q" * 60
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": turns(text), "max_tokens": 3},
            "/v1/completions": {
                "prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n",
                "max_tokens": 3,
            },
            "/completion": {"prompt": f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", "n_predict": 3},
            "/v1/responses": {"input": text, "max_output_tokens": 3},
            "/v1/messages": {"messages": turns(text), "max_tokens": 3},
        }
        for path, body in bodies.items():
            for more in ({}, {"stream_options": {"include_usage": True}}):
                body |= more | {"stream": True, "temperature": 0}
                answer = await p.post(path, body, headers={"Connection": "close"})
                p.note(path, answer.status_code, answer.headers["content-type"])
                for event in answer.text.strip().split("\n\n"):
                    *name, data = event.split("\n")
                    told = data if data == "data: [DONE]" else json.loads(data.removeprefix("data: "))
                    p.note(path, name, shape(told), told.get("usage") if isinstance(told, dict) else None)
        body = {"messages": turns("z" * 5000), "stream": True}
        answer = await p.post("/v1/chat/completions", body)
        p.note("too long", answer.status_code, answer.json())

    await compare(script, llama_server(), fake_of(tmp_path))


async def test_connections(llama_server: StartServer, tmp_path: Path) -> None:
    """A connection carries 100 requests, is closed after an error, and after 5 s without a request."""

    async def count(base_url: str, path: bytes) -> int:
        reader, writer = await asyncio.open_connection(*base_url.removeprefix("http://").split(":"))
        n = 0
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(size)
                n += 1
                assert (b"connection: close" in head) == (n == 100 or path != b"/health")
        writer.close()
        return n

    async def idle(base_url: str) -> int:
        reader, writer = await asyncio.open_connection(*base_url.removeprefix("http://").split(":"))
        begin = asyncio.get_running_loop().time()
        assert await reader.read() == b""
        writer.close()
        return round(asyncio.get_running_loop().time() - begin)

    real, fake = llama_server(), fake_of(tmp_path)
    async with fake.serve() as url:
        for base_url in (real.base_url, url):
            assert await count(base_url, b"/health") == 100
            assert await count(base_url, b"/nothing") == 1
        assert list(await asyncio.gather(idle(real.base_url), idle(url))) == [5, 5]
