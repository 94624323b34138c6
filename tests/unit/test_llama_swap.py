"""llama-swap: what runs is saved before it swaps, against one that does as its documentation says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from virtual_time import VirtualLoop

from fake_llama_server import Completion
from fake_llama_swap import FakeLlamaSwap
from slot_cache.folder import CacheFolder
from slot_cache.index import IndexThread, MemoryIndex
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.llama_swap import SwapTracker
from slot_cache.request import route_tag
from slot_cache.state import Ending, Outcome, Want
from slot_cache.switcher import Lease

BASE = "http://swap:8080"
RESIDENT, RESTORED, COLD, UNMANAGED = Outcome.RESIDENT, Outcome.RESTORED, Outcome.COLD, Outcome.UNMANAGED
ORDER = ["alpha", "beta", "gamma", "alpha", "beta", "alpha", "gamma", "beta"]
T = TypeVar("T")


def virtual(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test in a loop whose clock jumps: waits take no time, and a deadlock is `Stuck`. The test needs `make`."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        make: Maker = fixtures["make"]
        make.loop.run_until_complete(test(**fixtures))
        make.close()
        assert make.broken == []

    return run


def key(model: str, name: str) -> str:
    return f"{route_tag(model)}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


async def soon(work: Awaitable[T], seconds: float = 1200.0) -> T:
    return await asyncio.wait_for(work, seconds)


class Desk:
    """A tracker, the folders of the models' routes, and the llama-swap they are for."""

    def __init__(self, swap: FakeLlamaSwap, index: IndexThread, folder: Path) -> None:
        self.swap, self.index, self.path = swap, index, folder
        self.tracker = SwapTracker(
            LlamaServer(BASE, transport=swap.transport()), index, name="swap", clock=asyncio.get_running_loop().time
        )
        self.folders: dict[str, CacheFolder] = {}
        self.talks: dict[tuple[str, str], Talk] = {}

    def folder(self, model: str) -> CacheFolder:
        if model not in self.folders:
            self.folders[model] = CacheFolder(
                self.index, tag=route_tag(model), route=model, server="swap", path=self.path, min_tokens=1
            )
        return self.folders[model]

    async def acquire(
        self, model: str, name: str = "s", *, queue_seconds: float = 600.0, idle_seconds: float = 0.0
    ) -> Lease:
        switcher = self.tracker.switcher(await self.tracker.canonical(model))
        want, folder = Want(key(model, name)), self.folder(model)
        return await switcher.acquire(0, want, folder, queue_seconds=queue_seconds, idle_seconds=idle_seconds)

    def talk(self, model: str, name: str = "s", **options: Any) -> Talk:
        if (model, name) not in self.talks:
            self.talks[model, name] = Talk(self, model, name, **options)
        return self.talks[model, name]

    async def quiet(self) -> None:
        for switcher in self.tracker.switchers.values():
            while tasks := [task for task in switcher._tasks if "lost" not in str(task.get_coro())]:
                await asyncio.wait(tasks, timeout=5)

    def leased(self) -> dict[str, list[int]]:
        return {name: held for name, switcher in self.tracker.switchers.items() if (held := switcher.leased())}

    @contextlib.contextmanager
    def calls(self) -> Iterator[list[str]]:
        """What llama-swap is told meanwhile, and what it does."""
        seen: list[str] = []
        before = len(self.swap.log)
        yield seen
        seen += self.swap.log[before:]


class Talk:
    """A conversation: each turn goes on where the last one ended, and its answer is checked against the truth."""

    def __init__(self, desk: Desk, model: str, name: str, **options: Any) -> None:
        self.desk, self.model, self.name, self.options = desk, model, name, options
        self.prompt = f"{model} {name}> " + "what was said before; " * 3
        self.done: Completion | None = None
        self.reuse = 0.0

    async def turn(self, text: str = "and then? ", **more: Any) -> Outcome:
        lease = await soon(self.desk.acquire(self.model, self.name, **(self.options | more)))
        ending = Ending.BROKEN
        try:
            prompt, before = self.prompt + text, self.done
            slot = None if lease.granted.outcome is UNMANAGED else lease.slot
            done = await self.desk.swap.complete(self.model, prompt, slot)
            assert done.text == self.desk.swap[self.model].server.truth(prompt)
            self.reuse = done.cached / (before.n_slot if before else len(prompt))
            self.prompt, self.done = prompt + done.text, done
            ending = Ending.ANSWERED
        finally:
            lease.release(ending)
        return lease.granted.outcome


class Maker:
    """Makes desks, in a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.loop = VirtualLoop()
        self.broken: list[str] = []
        self.loop.set_exception_handler(lambda loop, context: self.broken.append(repr(context)))
        self.folder = folder
        self.index = IndexThread(MemoryIndex())
        self.desks: list[Desk] = []

    async def __call__(self, **options: Any) -> Desk:
        saves = self.folder / "saves"
        desk = Desk(FakeLlamaSwap(save_dir=saves, **options), self.index, saves)
        self.desks.append(desk)
        return desk

    async def _aclose(self) -> None:
        for desk in self.desks:
            await desk.tracker.aclose()

    def close(self) -> None:
        """End everything, once."""
        if not self.loop.is_closed():
            self.loop.run_until_complete(self._aclose())
            self.loop.end_all()
            gc.collect()  # exceptions that nobody has asked for are told now
            self.loop.close()
            self.index.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    maker = Maker(tmp_path)
    yield maker
    maker.close()


@virtual
async def test_it_is_recognised(make: Maker) -> None:
    desk = await make()
    assert (await desk.tracker.server.role()).kind == "llama-swap"
    assert desk.swap.running() == set()


@virtual
async def test_every_model_that_returns_finds_its_cache(make: Maker) -> None:
    desk = await make()
    outcomes = [(await desk.talk(model).turn(), desk.talk(model).reuse) for model in ORDER]
    assert [outcome for outcome, _ in outcomes] == [COLD] * 3 + [RESTORED] * 5
    assert all(reuse >= 0.95 for outcome, reuse in outcomes if outcome is not COLD)
    assert desk.leased() == {}


@virtual
async def test_without_the_tracker_caches_are_lost(make: Maker) -> None:
    """The same without a save before the swap: this is what the test above would see."""
    desk = await make()
    await desk.talk("alpha").turn()
    await desk.quiet()
    await desk.swap.complete("beta", "a stranger's words")
    assert await desk.talk("alpha").turn() is COLD


@virtual
async def test_what_runs_is_saved_before_another_is_started(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha").turn()
    await desk.quiet()
    with desk.calls() as calls:
        await desk.talk("beta").turn()
    saved, started = calls.index("POST /upstream/alpha/slots/0?save"), calls.index("(starts beta)")
    assert saved < calls.index("(stops alpha)") < started
    after = calls[saved + 1 : started]
    assert not [call for call in after if call.startswith(("GET /upstream/alpha", "POST /upstream/alpha"))]


@virtual
async def test_a_model_that_runs_costs_one_call_more(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha").turn()
    await desk.quiet()
    with desk.calls() as calls:
        await desk.talk("alpha").turn()
        await desk.quiet()
    request = calls.index("POST /v1/completions alpha")
    assert calls[:request] == ["GET /running", "GET /upstream/alpha/slots"]
    assert calls.count("GET /upstream/alpha/slots") == 2


@virtual
async def test_models_that_run_side_by_side_stay(make: Maker) -> None:
    desk = await make(groups=[["alpha", "beta"]])
    outcomes = [await desk.talk(model).turn() for model in ORDER]
    assert outcomes == [COLD, COLD, COLD, RESTORED, RESTORED, RESTORED, RESIDENT, RESTORED]
    assert desk.swap["gamma"].starts == 1
    assert all(talk.reuse >= 0.95 for talk in desk.talks.values())


@virtual
async def test_different_models_are_asked_for_at_once(make: Maker) -> None:
    desk = await make()
    for _ in range(4):
        outcomes = await asyncio.gather(*(desk.talk(model).turn() for model in ("gamma", "alpha", "beta")))
        assert UNMANAGED not in outcomes
    assert all(talk.reuse >= 0.95 for talk in desk.talks.values())
    assert desk.leased() == {}


@virtual
async def test_our_own_request_is_waited_for(make: Maker) -> None:
    desk = await make()
    lease = await desk.acquire("alpha")
    asked = asyncio.ensure_future(desk.talk("beta").turn())
    await asyncio.sleep(20.0)
    assert not asked.done()
    assert desk.swap.running() == {"alpha"}
    lease.release(Ending.UNSENT)
    assert await soon(asked) is COLD


@virtual
async def test_a_strangers_request_is_waited_for(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha").turn()
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(desk.swap.complete("alpha", "who are you?", gate=gate))
    await desk.swap["alpha"].server.until_processing()
    asked = asyncio.ensure_future(desk.talk("beta").turn())
    await asyncio.sleep(20.0)
    assert not asked.done()
    gate.set()
    assert await soon(asked) is COLD
    assert (await stranger).text == desk.swap["alpha"].server.truth("who are you?")


@virtual
async def test_there_is_no_room_in_time(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha").turn()
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(desk.swap.complete("alpha", "who are you?", gate=gate))
    await desk.swap["alpha"].server.until_processing()
    lease = await soon(desk.acquire("beta", queue_seconds=10.0), 20.0)
    assert lease.granted.outcome is UNMANAGED
    lease.release(Ending.UNSENT)
    gate.set()
    await stranger
    assert desk.leased() == {}


@virtual
async def test_a_model_that_does_not_start(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha").turn()
    desk.swap["beta"].fails = True
    started = make.loop.time()
    lease = await soon(desk.acquire("beta"))
    assert lease.granted.outcome is UNMANAGED
    lease.release(Ending.UNSENT)
    assert make.loop.time() - started < 60
    assert desk.swap["beta"].attempts <= 3
    assert await desk.talk("alpha").turn() is RESTORED


@virtual
async def test_a_model_that_starts_slowly(make: Maker) -> None:
    desk = await make()
    desk.swap["alpha"].start_seconds = 1.5  # longer than one call may take
    with pytest.raises(LlamaServerError):
        await desk.tracker.switcher("alpha").server._call("GET", "/health", 1.0)
    desk.swap["alpha"].start_seconds = 0.9
    assert await desk.talk("alpha").turn() is COLD


@virtual
async def test_an_unknown_model(make: Maker) -> None:
    desk = await make()
    started = make.loop.time()
    lease = await soon(desk.acquire("zeta"))
    assert lease.granted.outcome is UNMANAGED
    assert make.loop.time() - started < 60


@virtual
async def test_a_stranger_swaps(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha").turn()
    await desk.talk("beta").turn()
    await desk.quiet()
    await desk.swap.complete("gamma", "a stranger's words")
    assert await desk.talk("alpha").turn() is RESTORED
    assert await desk.talk("beta").turn() is COLD
    assert desk.leased() == {}


@virtual
async def test_an_idle_save_starts_nothing(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha", idle_seconds=30.0).turn()
    await desk.quiet()
    await desk.swap.complete("beta", "a stranger's words")
    with desk.calls() as calls:
        await asyncio.sleep(300.0)
    assert calls == ["GET /running"]
    assert desk.swap.running() == {"beta"}


@virtual
async def test_an_idle_save_saves(make: Maker) -> None:
    desk = await make()
    await desk.talk("alpha", idle_seconds=30.0).turn()
    await asyncio.sleep(60.0)
    desk.swap.stop("alpha")
    assert await desk.talk("alpha").turn() is RESTORED


@virtual
async def test_looking_after_a_request_that_broke_off_starts_nothing(make: Maker) -> None:
    """A stranger has swapped another model in just when our request had ended."""
    desk = await make()
    lease = await desk.acquire("alpha")
    request = asyncio.ensure_future(desk.swap.complete("alpha", "what was said before", 0))
    await request
    stranger = asyncio.ensure_future(desk.swap.complete("beta", "a stranger's words"))
    await asyncio.sleep(0.05)
    lease.release(Ending.BROKEN)
    await stranger
    await desk.quiet()
    assert desk.swap.running() == {"beta"}
    assert desk.swap["alpha"].starts == 1


@pytest.mark.parametrize("after", [0.0, 0.1, 0.2, 0.3, 0.5, 1.0])
@virtual
async def test_a_client_leaves_while_models_are_swapped(make: Maker, after: float) -> None:
    desk = await make()
    desk.swap["alpha"].server.switch_seconds = 0.1
    await desk.talk("alpha").turn()
    asked = asyncio.ensure_future(desk.acquire("beta"))
    await asyncio.sleep(after)
    if asked.done():
        (await asked).release(Ending.UNSENT)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await desk.quiet()
    assert desk.leased() == {}
    assert await desk.talk("beta").turn() is COLD
    assert await desk.talk("alpha").turn() in (RESTORED, RESIDENT)
    assert desk.talk("alpha").reuse >= 0.95


@pytest.mark.parametrize("seed", range(4))
@virtual
async def test_many_at_once_and_some_leave(make: Maker, seed: int) -> None:
    chance = random.Random(seed)
    desk = await make()
    outcomes: list[Outcome] = []

    async def session(model: str, name: str) -> None:
        talk = desk.talk(model, name)
        for _ in range(6):
            turn = asyncio.ensure_future(talk.turn())
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 2)
                turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                outcomes.append(await turn)
            await asyncio.sleep(chance.random())

    everybody = asyncio.gather(*(session(model, name) for model in ("alpha", "beta", "gamma") for name in "ab"))
    await soon(everybody, 3000.0)
    await desk.quiet()
    assert desk.leased() == {}
    assert UNMANAGED not in outcomes
    assert outcomes.count(COLD) <= 6 + (36 - len(outcomes))
