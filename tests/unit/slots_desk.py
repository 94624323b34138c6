"""A server of several slots, one or more processes that share it, and conversations: in virtual time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from virtual_time import VirtualLoop

from fake_http import Disconnected, Refused
from fake_llama_api import render, tokenize
from fake_llama_server import Completion, FakeLlamaServer
from slot_cache import locks
from slot_cache.folder import CacheFolder
from slot_cache.index import IndexThread, MemoryIndex
from slot_cache.leases import Lease, Which
from slot_cache.llama_server import LlamaServer
from slot_cache.prompt import fingerprint
from slot_cache.request import route_tag
from slot_cache.state import Ending, Outcome, Want
from slot_cache.switcher import SlotSwitcher

TAG = route_tag("smol")


class Wire(httpx.AsyncBaseTransport):
    """From a process to the server."""

    def __init__(self, fake: FakeLlamaServer) -> None:
        self.fake = fake

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        target = request.url.raw_path.decode("ascii")
        timeout = request.extensions.get("timeout", {}).get("read")
        try:
            answer = await asyncio.wait_for(self.fake.handle(request.method, target, request.headers, body), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise httpx.ReadTimeout("timed out", request=request) from None
        except Disconnected:
            raise httpx.RemoteProtocolError("disconnected", request=request) from None
        except Refused:
            raise httpx.ConnectError("refused", request=request) from None
        content = answer.body.replace(b'"<__media_', f'"<__media_{self.fake._life}_'.encode())  # drawn at each start
        return httpx.Response(answer.status, headers={"Content-Type": answer.content_type}, content=content)


class Process:
    """A switcher and its route's folder."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.index = IndexThread(desk.index)
        lock_folder = desk.state if desk.shared else None
        self.switcher = SlotSwitcher(
            LlamaServer("http://llama:8080", transport=Wire(desk.fake)),
            self.index,
            name="llama",
            lock_folder=lock_folder,
            clock=desk.loop.time,
        )
        self.folder = CacheFolder(
            self.index, tag=TAG, route="smol", server="llama", path=desk.fake.save_dir, min_tokens=1
        )

    @property
    def gate_is_free(self) -> bool:
        return not self.switcher._clearing.starting

    async def quiet(self) -> None:
        """When all that follows the requests so far is done."""
        while tasks := [task for task in self.switcher._tasks if "lost" not in str(task.get_coro())]:
            await asyncio.wait(tasks)


class Desk:
    """See the module."""

    def __init__(self, folder: Path, loop: VirtualLoop, processes: int, slots: int, **options: Any) -> None:
        self.loop = loop
        self.state = folder / "state"
        self.state.mkdir()
        self.shared = processes > 1
        self.index = MemoryIndex()
        speeds = {"prefill_seconds_per_token": 0.002, "decode_seconds_per_token": 0.01, "switch_seconds": 0.01}
        self.fake = FakeLlamaServer(slots, save_dir=folder / "saves", **(speeds | options))
        self.processes = [Process(self) for _ in range(processes)]
        self.held: dict[str, list[Lease]] = {}
        """the leases of each cache that requests run with just now"""

    @property
    def here(self) -> Process:
        return self.processes[0]

    @property
    def switcher(self) -> SlotSwitcher:
        return self.here.switcher

    def talk(self, name: str, **options: Any) -> Talk:
        return Talk(self, name, **options)

    def saved_tokens(self, key: str | None) -> int:
        return len(self.fake.tokens_in_file(f"{key}.bin") or ())

    async def close(self) -> None:
        self.fake.clear()
        for process in self.processes:
            await process.switcher.aclose()


class Talk:
    """A conversation: each turn says all that was said before; its answer is checked against the truth."""

    def __init__(
        self,
        desk: Desk,
        name: str,
        *,
        system: str = "",
        session: str | None = None,
        owner: str = "",
        which: Which = None,
        process: int = 0,
        idle_seconds: float = 0.0,
        queue_seconds: float = 60.0,
    ) -> None:
        self.desk, self.name = desk, name
        self.session = None if session is None else f"{TAG}_{session * 32}"[: len(TAG) + 33]
        self.owner, self.which = owner, which
        self.process = desk.processes[process]
        self.idle_seconds, self.queue_seconds = idle_seconds, queue_seconds
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.lease: Lease | None = None
        self.done: Completion | None = None
        self.turns = 0
        self.had: tuple[int, ...] = ()
        """the tokens of the last turn, prompt and answer"""
        self.lost = 0
        """how many of those that the last turn's prompt had said again were not there"""

    @property
    def key(self) -> str | None:
        """The cache of the last turn."""
        assert self.lease is not None
        return self.lease.key

    @property
    def slot(self) -> int:
        assert self.lease is not None
        return self.lease.slot

    @property
    def reused(self) -> int:
        assert self.done is not None
        return self.done.cached

    def fork(self) -> Talk:
        """Somebody else who says the same so far."""
        other = Talk(self.desk, self.name, owner=self.owner, which=self.which)
        other.session, other.process, other.messages = self.session, self.process, list(self.messages)
        other.had = self.had
        return other

    def ask(self, text: str = "") -> asyncio.Future[Lease]:
        """Say something: ask for a slot for it."""
        self.turns += 1
        self.messages.append({"role": "user", "content": text or f"{self.name} {self.turns} " * 8})
        prompt = fingerprint({"messages": self.messages})
        want = Want(
            None,
            self.owner,
            apart=self.owner != "",
            chain=prompt.packed,
            session=self.session,
            preamble=prompt.preamble,
            tag=TAG,
        )
        return asyncio.ensure_future(
            self.process.switcher.acquire(
                self.which,
                want,
                self.process.folder,
                queue_seconds=self.queue_seconds,
                idle_seconds=self.idle_seconds,
            )
        )

    async def answer(self, lease: Lease, n_predict: int = 4, *, think: float = 0.0) -> Outcome:
        """Send the request and give the slot back at its end."""
        self.lease = lease
        managed = lease.granted.outcome is not Outcome.UNMANAGED
        held = self.desk.held.setdefault(lease.key or "", [])
        if lease.key is not None:
            assert not held, f"two requests run on {lease.key}"
        held.append(lease)
        if think:
            await asyncio.sleep(think)
        self.done = await self.desk.fake.complete(
            self.messages, slot=lease.slot if managed else None, n_predict=n_predict
        )
        assert self.done.text == self.desk.fake.truth(self.messages, n_predict)
        held.remove(lease)
        self.messages.append({"role": "assistant", "content": self.done.text})
        prompt = tokenize(render(self.messages[:-1]))
        self.lost = max(_shared(self.had, prompt) - 1 - self.done.cached, 0)
        self.had = (*prompt, *tokenize(self.done.text))
        computed = len(prompt) - self.done.cached
        lease.learn(self.done.cached, computed, computed * self.desk.fake.prefill_seconds_per_token)
        lease.release(Ending.ANSWERED)
        return lease.granted.outcome

    async def turn(self, text: str = "", **more: Any) -> Outcome:
        return await self.answer(await self.ask(text), **more)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    same = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        same += 1
    return same


Make = Callable[..., Desk]


class Maker:
    """Makes desks, in one virtual loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = VirtualLoop()
        self.made: list[Desk] = []

    def __call__(self, slots: int = 2, *, processes: int = 1, **options: Any) -> Desk:
        folder = self.folder / str(len(self.made))
        folder.mkdir()
        self.made.append(Desk(folder, self.loop, processes, slots, **options))
        return self.made[-1]

    async def close(self) -> None:
        for desk in self.made:
            await desk.close()


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test, which has `make`, in its loop."""

    @functools.wraps(test)
    def run(make: Maker, **more: Any) -> None:
        make.loop.run_until_complete(test(make=make, **more))

    return run


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(locks, "_wait", wait_in_the_loop)
    maker = Maker(tmp_path)
    broken: list[Any] = []
    maker.loop.set_exception_handler(lambda loop, context: broken.append(context))
    yield maker
    maker.loop.run_until_complete(maker.close())
    maker.loop.end_all()
    maker.loop.close()
    assert not broken


async def wait_in_the_loop(paths: tuple[Path, Path], seconds: float) -> Any:
    """What `locks._wait` does in a thread, in virtual time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    turn: Any = None
    try:
        while True:
            turn = turn or locks._locked(paths[0], wait=False)
            held = locks._locked(paths[1], wait=False) if turn is not None else None
            if held is not None or loop.time() >= end:
                return held
            await asyncio.sleep(0.005)
    finally:
        if turn is not None:
            turn.free()
