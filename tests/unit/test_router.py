"""The models of a router: who goes next, and that what goes was saved, against a router that behaves as measured."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from litellm.types.utils import CallTypes
from virtual_time import VirtualLoop

from fake_llama_server import Completion, FakeLlamaServer
from fake_router import FakeRouter
from slot_cache import locks, report
from slot_cache import router as router_module
from slot_cache.folder import CacheFolder
from slot_cache.hook import SlotCacheHook
from slot_cache.index import IndexThread, MemoryIndex
from slot_cache.llama_server import LlamaServer, LlamaServerError, Role, RouterModel
from slot_cache.request import route_tag
from slot_cache.router import RouterTracker, limit_of, next_to_go
from slot_cache.state import Ending, Outcome, Want
from slot_cache.switcher import Lease

BASE = "http://router:8080"
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


class Clock:
    """The loop's time; no two moments are the same."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._asked = 0

    def __call__(self) -> float:
        self._asked += 1
        return self._loop.time() + self._asked * 1e-9


class Desk:
    """A tracker, the folders of the models' routes, and the router they are for."""

    def __init__(
        self,
        router: FakeRouter,
        index: IndexThread,
        limit: int,
        tracker: type[RouterTracker],
        locks: Path | None = None,
    ) -> None:
        self.router = router
        self.index = index
        self.tracker = tracker(
            LlamaServer(BASE, transport=router.transport()),
            index,
            name="router",
            limit=limit,
            lock_folder=locks,
            clock=Clock(),
        )
        self.folders: dict[str, CacheFolder] = {}
        self.talks: dict[tuple[str, str], Talk] = {}

    def folder(self, model: str) -> CacheFolder:
        if model not in self.folders:
            self.folders[model] = CacheFolder(
                self.index, tag=route_tag(model), route=model, server="router", path=self.router.save_dir, min_tokens=1
            )
        return self.folders[model]

    async def acquire(
        self, model: str, name: str = "s", *, slot: int = 0, queue_seconds: float = 600.0, idle_seconds: float = 0.0
    ) -> Lease:
        switcher = self.tracker.switcher(await self.tracker.canonical(model))
        want = Want(key(model, name))
        folder = self.folder(model)
        return await switcher.acquire(slot, want, folder, queue_seconds=queue_seconds, idle_seconds=idle_seconds)

    def talk(self, model: str, name: str = "s", **options: Any) -> Talk:
        if (model, name) not in self.talks:
            self.talks[model, name] = Talk(self, model, name, **options)
        return self.talks[model, name]

    def file(self, model: str, name: str = "s") -> str | None:
        tokens = self.router[model].server.tokens_in_file(f"{key(model, name)}.bin")
        return None if tokens is None else "".join(map(chr, tokens))

    async def quiet(self) -> None:
        """Returns when all that follows the requests so far is done; what watches for lost leases does not count."""
        for switcher in self.tracker.switchers.values():
            while tasks := [task for task in switcher._tasks if "lost" not in str(task.get_coro())]:
                await asyncio.wait(tasks, timeout=5)

    def leased(self) -> dict[str, list[int]]:
        return {name: held for name, switcher in self.tracker.switchers.items() if (held := switcher.leased())}

    @contextlib.contextmanager
    def calls(self) -> Iterator[list[str]]:
        """What the router is told meanwhile, and what it does by itself."""
        seen: list[str] = []
        before = len(self.router.log)
        yield seen
        seen += self.router.log[before:]


def key(model: str, name: str) -> str:
    return f"{route_tag(model)}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class Talk:
    """A conversation: each turn goes on where the last one ended, and its answer is checked against the truth."""

    def __init__(self, desk: Desk, model: str, name: str, **options: Any) -> None:
        self.desk, self.model, self.name, self.options = desk, model, name, options
        self.prompt = f"{model} {name}> " + "what was said before; " * 3
        self.done: Completion | None = None
        self.reuse = 0.0
        """of the last turn's prompt and answer, so much was reused in this one"""

    async def turn(self, text: str = "and then? ", **more: Any) -> Outcome:
        lease = await soon(self.desk.acquire(self.model, self.name, **(self.options | more)))
        ending = Ending.BROKEN
        try:
            await self.ask(lease, text)
            ending = Ending.ANSWERED
        finally:
            lease.release(ending)
        return lease.granted.outcome

    async def ask(self, lease: Lease, text: str = "and then? ", gate: asyncio.Event | None = None) -> Completion:
        prompt = self.prompt + text
        slot = None if lease.granted.outcome is UNMANAGED else lease.slot
        before = self.done
        done = await self.desk.router.complete(self.model, prompt, slot, gate=gate)
        assert done.text == self.desk.router[self.model].server.truth(prompt)
        self.reuse = done.cached / (before.n_slot if before else len(prompt))
        self.prompt, self.done = prompt + done.text, done
        return done


async def soon(work: Awaitable[T], seconds: float = 1200.0) -> T:
    return await asyncio.wait_for(work, seconds)


async def a_while(seconds: float = 0.5) -> None:
    """In a loop whose clock jumps this waits until nothing else is to be done for so long."""
    await asyncio.sleep(seconds)


class Maker:
    """Makes desks, in a loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.loop = VirtualLoop()
        self.broken: list[str] = []
        self.loop.set_exception_handler(lambda loop, context: self.broken.append(repr(context)))
        self.folder = folder
        self.index = IndexThread(MemoryIndex())
        self.desks: list[Desk] = []

    async def __call__(
        self,
        limit: int = 2,
        *,
        models_max: int | None = None,
        tracker: type[RouterTracker] = RouterTracker,
        router: FakeRouter | None = None,
        locks: Path | None = None,
        **options: Any,
    ) -> Desk:
        if router is None:
            router = FakeRouter(save_dir=self.folder / "saves", max_instances=limit, **options)
        role = await LlamaServer(BASE, transport=router.transport()).role()
        desk = Desk(router, self.index, limit_of(role, models_max), tracker, locks)
        router.log.clear()
        self.desks.append(desk)
        return desk

    async def _aclose(self) -> None:
        for desk in self.desks:
            await desk.tracker.aclose()
            await desk.router.aclose()

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


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level("INFO", report.logger.name)
    return lambda: [record.getMessage().removeprefix("slot-cache: ") for record in caplog.records]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    return lambda: [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


# how many


@pytest.mark.parametrize(
    ("told", "setting", "limit"),
    [(2, None, 2), (None, None, 4), (0, None, 0), (2, 1, 1), (2, 4, 4), (2, 0, 0), (None, 0, 0), (None, 7, 7)],
)
def test_the_limit_is_the_settings_then_what_the_router_says_then_four(
    told: int | None, setting: int | None, limit: int
) -> None:
    assert limit_of(Role("router", told), setting) == limit


# who goes next


def models(**status: str) -> list[RouterModel]:
    return [RouterModel(name, value) for name, value in status.items()]


def names(found: list[RouterModel]) -> list[str]:
    return [model.name for model in found]


@pytest.mark.parametrize(
    ("running", "uses", "busy", "order"),
    [
        ({}, {}, (), []),
        ({"a": "loaded"}, {}, (), ["a"]),
        ({"a": "loaded", "b": "loaded"}, {"a": 2.0, "b": 1.0}, (), ["b", "a"]),
        ({"a": "loaded", "b": "loaded"}, {"a": 1.0}, (), ["b", "a"]),  # never by us: before all others
        ({"a": "loaded", "b": "loaded"}, {"a": 1.0, "b": 2.0}, ("a",), ["b", "a"]),
        ({"a": "loaded", "b": "loaded"}, {"a": 2.0, "b": 1.0}, ("a", "b"), ["b", "a"]),
        ({"a": "sleeping", "b": "loaded"}, {"a": 1.0, "b": 2.0}, (), ["a", "b"]),
        ({"a": "loading", "b": "loaded"}, {"a": 1.0, "b": 2.0}, (), ["b"]),
        ({"a": "unloading", "b": "downloading", "c": "unloaded"}, {}, (), []),
        ({"b": "loaded", "a": "loaded"}, {}, (), ["a", "b"]),
    ],
)
def test_who_goes_next(
    running: dict[str, str], uses: dict[str, float], busy: tuple[str, ...], order: list[str]
) -> None:
    assert names(next_to_go(models(**running), uses, busy)) == order


STATUS = st.sampled_from(["loaded", "sleeping", "loading", "unloaded", "unloading"])


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), STATUS),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 5).map(float)),
    st.sets(st.sampled_from("abcdefgh")),
    st.randoms(use_true_random=False),
)
def test_who_goes_next_is_the_idle_one_used_longest_ago(
    running: dict[str, str], uses: dict[str, float], busy: set[str], chance: random.Random
) -> None:
    given_models = models(**running)
    order = names(next_to_go(given_models, uses, busy))
    assert sorted(order) == sorted(name for name, status in running.items() if status in ("loaded", "sleeping"))
    waited_for = [name in busy for name in order]
    assert waited_for == sorted(waited_for)
    for group in (False, True):
        used = [uses.get(name, 0.0) for name in order if (name in busy) is group]
        assert used == sorted(used)
    chance.shuffle(given_models)
    assert names(next_to_go(given_models, uses, busy)) == order


# the order of the issue


@virtual
async def test_every_model_that_returns_finds_its_cache(make: Maker) -> None:
    desk = await make(2)
    outcomes = [(await desk.talk(model).turn(), desk.talk(model).reuse) for model in ORDER]
    assert [outcome for outcome, _ in outcomes] == [COLD, COLD, COLD, RESTORED, RESTORED, RESIDENT, RESTORED, RESTORED]
    assert all(reuse >= 0.95 for outcome, reuse in outcomes if outcome is not COLD)
    assert desk.router.count("(makes room") == 0
    assert desk.leased() == {}


@virtual
async def test_only_the_model_that_goes_is_saved(make: Maker) -> None:
    desk = await make(2)
    for model in ("alpha", "beta", "gamma"):
        await desk.talk(model).turn()
    await desk.quiet()
    assert desk.file("alpha") == desk.talk("alpha").prompt[:-1]  # the last token was never computed
    assert desk.file("beta") is None
    assert desk.router.status() == {"alpha": "unloaded", "beta": "loaded", "gamma": "loaded"}


@virtual
async def test_the_model_that_goes_is_sent_nothing_between_its_save_and_its_end(make: Maker) -> None:
    desk = await make(2)
    for model in ("alpha", "beta"):
        await desk.talk(model).turn()
    await desk.quiet()
    with desk.calls() as calls:
        await desk.talk("gamma").turn()
        await desk.quiet()
    of_alpha = [call for call in calls if "alpha" in call or "(" in call]
    saved, unloaded = of_alpha.index("POST /slots/0?save alpha"), of_alpha.index("POST /models/unload alpha")
    assert unloaded == saved + 1
    assert unloaded == len(of_alpha) - 1
    assert "POST /models/load gamma" in calls[calls.index("POST /models/unload alpha") :]
    assert calls.index("POST /models/load gamma") < calls.index("POST /completion gamma")
    assert not [call for call in calls if call.startswith("POST") and "beta" in call]


@virtual
async def test_a_model_that_is_known_to_be_loaded_costs_no_call(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha").turn()
    await desk.quiet()
    with desk.calls() as calls:
        await desk.talk("alpha").turn()
        await desk.quiet()
    assert calls == ["GET /slots alpha", "POST /completion alpha", "GET /slots alpha"]


class SavesAndLetsTheRouterChoose(RouterTracker):
    """Saves the model whose turn it is to go, and has the router make the room."""

    async def _make_room(self, running: list[RouterModel], *_: Any) -> Any:
        self._can_unload = False
        vacated = await self.switcher(next_to_go(running, self._uses)[0].name).vacate(0.0)
        assert vacated is not None
        vacated.end(gone=False)
        return []


@virtual
async def test_a_version_that_lets_the_router_choose_loses_a_cache(make: Maker) -> None:
    desk = await make(2, tracker=SavesAndLetsTheRouterChoose)
    for model in ("alpha", "beta", "gamma"):
        await desk.talk(model).turn()
    assert "(makes room: beta)" in desk.router.log  # alpha was saved, and so was the newest
    assert await desk.talk("beta").turn() is COLD
    assert desk.talk("beta").reuse == 0


# how many


@pytest.mark.parametrize(("told", "setting", "most"), [(2, None, 2), (2, 1, 1), (4, 2, 2), (1, None, 1), (0, None, 3)])
@virtual
async def test_no_more_are_loaded_than_the_limit(make: Maker, told: int, setting: int | None, most: int) -> None:
    desk = await make(told, models_max=setting)
    loaded = []
    for model in ORDER:
        outcome = await desk.talk(model).turn()
        loaded.append(len(desk.router.loaded()))
        assert outcome is COLD or desk.talk(model).reuse >= 0.95
    assert max(loaded) == most
    assert desk.router.count("(makes room") == 0
    if most == 3:
        assert desk.router.count("POST /slots") == desk.router.count("POST /models/unload") == 0


@virtual
async def test_an_older_router_that_does_not_tell_has_room_for_four(make: Maker) -> None:
    desk = await make(4, names=("a", "b", "c", "d", "e"), tells_limit=False)
    for model in "abcd":
        await desk.talk(model).turn()
    assert desk.router.count("POST /models/unload") == 0
    await desk.talk("e").turn()
    assert desk.router.loaded() == {"b", "c", "d", "e"}
    assert await desk.talk("a").turn() is RESTORED


@virtual
async def test_a_setting_above_the_routers_own_limit_leaves_the_choice_to_the_router(make: Maker) -> None:
    desk = await make(2, models_max=0)
    outcomes = [await desk.talk(model).turn() for model in ORDER]
    assert UNMANAGED not in outcomes
    assert desk.leased() == {}


# several at once


@pytest.mark.parametrize("limit", [1, 2, 3, 0])
@virtual
async def test_different_models_are_asked_for_at_once(make: Maker, limit: int) -> None:
    desk = await make(limit)
    first = await asyncio.gather(*(desk.talk(model).turn() for model in ("alpha", "beta", "gamma")))
    assert first == [COLD] * 3
    for _ in range(3):
        again = await asyncio.gather(*(desk.talk(model).turn() for model in ("gamma", "beta", "alpha")))
        assert set(again) <= {RESIDENT, RESTORED}
        assert all(desk.talk(model).reuse >= 0.95 for model in ("alpha", "beta", "gamma"))
    assert desk.leased() == {}
    assert desk.router.count("(makes room") == 0


@virtual
async def test_the_same_model_is_loaded_once_for_all_that_ask(make: Maker) -> None:
    desk = await make(2)
    outcomes = await asyncio.gather(*(desk.talk("alpha", name).turn() for name in "abc"))
    assert outcomes == [COLD] * 3
    assert desk.router["alpha"].loads == 1
    assert desk.router.count("POST /models/load") == 1


async def known_to_nobody(make: Maker) -> Desk:
    """The proxy was started again: alpha and beta are loaded, and the tracker does not know it."""
    before = await make(2)
    for model in ("alpha", "beta"):
        await before.talk(model).turn()
    await before.quiet()
    after = await make(2, router=before.router)
    after.talks = before.talks
    for talk in after.talks.values():
        talk.desk = after
    return after


@pytest.mark.parametrize(
    "order",
    [
        "gamma alpha beta",
        "alpha gamma beta",
        "alpha beta gamma",
    ],
)
@virtual
async def test_models_that_were_loaded_before_us_are_asked_for_at_once(make: Maker, order: str) -> None:
    desk = await known_to_nobody(make)
    started = make.loop.time()
    outcomes = await asyncio.gather(*(desk.talk(model).turn() for model in order.split()))
    assert UNMANAGED not in outcomes
    assert make.loop.time() - started < 60
    assert desk.leased() == {}


@virtual
async def test_a_model_that_a_stranger_loads_meanwhile_is_not_waited_for_by_itself(make: Maker) -> None:
    desk = await make(1)
    desk.router["alpha"].load_seconds = 5.0
    loading = asyncio.ensure_future(desk.router.load("alpha"))
    await a_while(0.1)
    started = make.loop.time()
    outcomes = await asyncio.gather(*(desk.talk(model).turn() for model in ("gamma", "alpha")))
    await loading
    assert UNMANAGED not in outcomes
    assert make.loop.time() - started < 60


@pytest.mark.parametrize(
    "seconds",
    [
        1.0,
        8.0,
        20.0,
    ],
)
@virtual
async def test_a_model_is_not_kept_out_by_one_that_is_always_asked_for(make: Maker, seconds: float) -> None:
    """The requests of beta come first to last; each takes its time. Alpha's turn comes all the same."""
    desk = await make(1)
    over = asyncio.Event()

    async def always(name: str) -> None:
        while not over.is_set():
            lease = await desk.acquire("beta", name)
            await asyncio.sleep(seconds)
            lease.release(Ending.ANSWERED)

    others = [asyncio.ensure_future(always(name)) for name in "ab"]
    await a_while(1.0)
    asked = make.loop.time()
    outcome = await desk.talk("alpha").turn(queue_seconds=3600.0)
    waited = make.loop.time() - asked
    over.set()
    await asyncio.gather(*others)
    assert outcome is COLD
    assert waited < 4 * seconds + 10


# models that are loading, sleeping, busy, broken


@virtual
async def test_a_model_that_is_loading_is_waited_for(make: Maker) -> None:
    desk = await make(2)
    desk.router["alpha"].load_seconds = 30.0
    loading = asyncio.ensure_future(desk.router.load("alpha"))
    await a_while(0.1)
    assert desk.router.status()["alpha"] == "loading"
    assert await desk.talk("alpha").turn() is COLD
    await loading
    assert desk.router["alpha"].loads == 1
    assert desk.router.count("POST /models/load") == 0


@virtual
async def test_a_model_that_is_loading_is_not_made_to_go(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha").turn()
    desk.router["beta"].load_seconds = 30.0
    loading = asyncio.ensure_future(desk.router.load("beta"))
    await a_while(0.1)
    await desk.talk("gamma").turn()
    assert desk.router.status() == {"alpha": "unloaded", "beta": "loading", "gamma": "loaded"}
    await loading


@virtual
async def test_all_that_may_go_are_loading(make: Maker) -> None:
    desk = await make(1)
    desk.router["alpha"].load_seconds = 30.0
    loading = asyncio.ensure_future(desk.router.load("alpha"))
    await a_while(0.1)
    assert await desk.talk("beta").turn() is COLD
    await loading
    assert desk.router.loaded() == {"beta"}


@virtual
async def test_a_sleeping_model_is_not_loaded_again(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha").turn()
    await desk.quiet()
    desk.router["alpha"].server.sleep()
    assert await desk.talk("alpha").turn() is COLD  # it has slept, and nobody had saved it
    assert desk.router["alpha"].loads == 1


@virtual
async def test_a_sleeping_model_is_not_woken_to_be_unloaded(make: Maker) -> None:
    desk = await make(2)
    for model in ("alpha", "beta"):
        await desk.talk(model).turn()
    await desk.quiet()
    desk.router["alpha"].server.sleep()
    await desk.talk("gamma").turn()
    assert desk.router.loaded() == {"beta", "gamma"}
    assert desk.router["alpha"].server.wakes == 0


@virtual
async def test_a_model_busy_with_a_strangers_request_does_not_go(make: Maker) -> None:
    desk = await make(2)
    for model in ("alpha", "beta"):
        await desk.talk(model).turn()
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(desk.router.complete("alpha", "who are you?", gate=gate))
    await desk.router["alpha"].server.until_processing()
    assert await desk.talk("gamma").turn() is COLD
    assert desk.router.status() == {"alpha": "loaded", "beta": "unloaded", "gamma": "loaded"}
    assert desk.file("beta") is not None
    gate.set()
    assert (await stranger).text == desk.router["alpha"].server.truth("who are you?")


@virtual
async def test_a_strangers_request_is_waited_for_when_there_is_no_other_room(make: Maker) -> None:
    desk = await make(1)
    await desk.talk("alpha").turn()
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(desk.router.complete("alpha", "who are you?", gate=gate))
    await desk.router["alpha"].server.until_processing()
    asked = asyncio.ensure_future(desk.talk("beta").turn())
    await a_while(30.0)
    assert not asked.done()
    gate.set()
    assert await soon(asked) is COLD
    assert (await stranger).text == desk.router["alpha"].server.truth("who are you?")


@virtual
async def test_a_stranger_that_has_left_is_not_kept_alive_by_looking(make: Maker) -> None:
    """The server notices it only when it was asked for nothing for a second."""
    desk = await make(1)
    await desk.talk("alpha").turn()
    await desk.quiet()
    desk.router["alpha"].server.gate = asyncio.Event()
    body = b'{"model": "alpha", "prompt": "who?", "n_predict": 4}'
    stranger = asyncio.ensure_future(desk.router.handle("POST", "/completion", {}, body))
    await desk.router["alpha"].server.until_processing()
    stranger.cancel()
    await asyncio.gather(stranger, return_exceptions=True)
    started = make.loop.time()
    assert await desk.talk("beta").turn(queue_seconds=120.0) is COLD
    assert make.loop.time() - started < 20


@virtual
async def test_there_is_no_room_in_time(make: Maker) -> None:
    desk = await make(1)
    await desk.talk("alpha").turn()
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(desk.router.complete("alpha", "who are you?", gate=gate))
    await desk.router["alpha"].server.until_processing()
    started = make.loop.time()
    lease = await soon(desk.acquire("beta", queue_seconds=10.0))
    assert lease.granted.outcome is UNMANAGED
    assert 9.9 < make.loop.time() - started < 15.0
    lease.release(Ending.UNSENT)
    gate.set()
    await stranger
    assert desk.leased() == {}
    assert await desk.talk("beta").turn() is COLD


@virtual
async def test_our_own_request_is_waited_for(make: Maker) -> None:
    desk = await make(1)
    lease = await desk.acquire("alpha")
    asked = asyncio.ensure_future(desk.talk("beta").turn())
    await a_while(20.0)
    assert not asked.done()
    assert desk.router.loaded() == {"alpha"}
    await desk.talk("alpha").ask(lease)
    lease.release(Ending.ANSWERED)
    assert await soon(asked) is COLD
    assert await desk.talk("alpha").turn() is RESTORED


@virtual
async def test_a_load_that_fails(make: Maker, warned: Callable[[], list[str]]) -> None:
    desk = await make(2)
    for model in ("alpha", "beta"):
        await desk.talk(model).turn()
    desk.router["gamma"].fails = True
    started = make.loop.time()
    lease = await soon(desk.acquire("gamma"))
    assert lease.granted.outcome is UNMANAGED
    assert make.loop.time() - started < 5
    lease.release(Ending.UNSENT)
    assert any("gamma" in line and "could not load" in line for line in warned())
    with desk.calls() as calls:
        for _ in range(3):
            (await soon(desk.acquire("gamma"))).release(Ending.UNSENT)
    assert calls.count("POST /models/unload beta") == 0
    assert [await desk.talk(model).turn() for model in ("beta", "alpha")] == [RESIDENT, RESTORED]
    desk.router["gamma"].fails = False
    assert await desk.talk("gamma").turn() is COLD
    assert desk.leased() == {}


@virtual
async def test_an_unknown_model(make: Maker) -> None:
    desk = await make(2)
    with pytest.raises(LlamaServerError) as raised:
        await desk.acquire("zeta")
    assert raised.value.status == 404
    with pytest.raises(LlamaServerError):
        await desk.tracker.ready("zeta", make.loop.time() + 10, lambda: False)
    assert set(desk.router.log) == {"GET /models"}


@virtual
async def test_a_model_has_one_cache_by_all_its_names(make: Maker) -> None:
    desk = await make(2, aliases={"alpha": ("a", "the-first")})
    assert await desk.tracker.canonical("a") == await desk.tracker.canonical("alpha") == "alpha"
    await desk.talk("alpha").turn()
    lease = await desk.acquire("the-first")
    assert set(desk.tracker.switchers) == {"alpha"}
    lease.release(Ending.UNSENT)
    with pytest.raises(LlamaServerError):
        await desk.tracker.canonical("b")


@virtual
async def test_the_router_does_not_answer(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha").turn()
    desk.router.is_up = False
    for model in ("alpha", "beta"):
        switcher = desk.tracker.switcher(model)
        lease = await soon(switcher.acquire(0, Want(key(model, "s")), desk.folder(model), queue_seconds=60.0))
        assert lease.granted.outcome is UNMANAGED
        lease.release(Ending.BROKEN)
    desk.router.is_up = True
    assert await desk.talk("beta").turn() is COLD
    assert desk.leased() == {}


# behind our back


@virtual
async def test_a_model_that_hangs_does_not_hold_a_request_for_long(make: Maker) -> None:
    """The router itself answers, the model does not: that is a fault, and no reason to wait."""
    desk = await make(2)
    talk = desk.talk("alpha")
    lease = await desk.acquire("alpha")
    await talk.ask(lease)
    lease.release(Ending.BROKEN)
    desk.router["alpha"].server.fail("*", "hang", None)
    await desk.quiet()
    started = make.loop.time()
    lease = await soon(desk.acquire("alpha", queue_seconds=3600.0), 3600.0)
    assert lease.granted.outcome is UNMANAGED
    assert make.loop.time() - started < 60
    lease.release(Ending.UNSENT)
    desk.router["alpha"].server.clear()


@virtual
async def test_a_stranger_has_a_model_unloaded(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha").turn()
    await desk.quiet()
    await desk.router.unload("alpha")
    assert await desk.talk("alpha").turn() is COLD
    assert await desk.talk("alpha").turn() is RESIDENT
    assert desk.leased() == {}


@virtual
async def test_a_strangers_requests_make_the_router_choose(make: Maker) -> None:
    """What was saved is found, and what a stranger has made the router unload is only slower."""
    desk = await make(2)
    for model in ("alpha", "beta", "gamma"):
        await desk.talk(model).turn()
    await desk.router.complete("alpha", "a stranger's words")  # beta goes, unsaved
    assert desk.router.count("(makes room: beta)") == 1
    assert await desk.talk("alpha").turn() is RESTORED
    assert desk.talk("alpha").reuse >= 0.95
    assert await desk.talk("beta").turn() is COLD
    assert await desk.talk("gamma").turn() is RESTORED
    assert desk.leased() == {}


@virtual
async def test_a_stranger_unloads_the_model_that_goes_first(make: Maker) -> None:
    desk = await make(2)
    for model in ("alpha", "beta"):
        await desk.talk(model).turn()
    await desk.quiet()
    unload = desk.router._unload

    def already(name: object) -> Any:
        unload(name)
        return unload(name)

    desk.router._unload = already  # type: ignore[method-assign]
    assert await desk.talk("gamma").turn() is COLD
    assert await desk.talk("alpha").turn() is RESTORED


@virtual
async def test_the_router_is_started_again(make: Maker) -> None:
    desk = await make(2)
    for model in ("alpha", "beta", "gamma"):
        await desk.talk(model).turn()
    desk.router.restart()
    assert [await desk.talk(model).turn() for model in ("alpha", "beta", "gamma")] == [RESTORED, COLD, COLD]


@virtual
async def test_a_model_that_was_loaded_again_behind_our_back_has_nothing_of_ours(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha").turn()
    await desk.quiet()
    await desk.router.unload("alpha")
    await desk.router.complete("alpha", desk.talk("alpha").prompt[:-4])  # the same task, and as many tokens
    assert await desk.talk("alpha", "another").turn() is COLD
    await desk.quiet()
    assert desk.file("alpha") is None


# background work


@virtual
async def test_an_idle_save_never_loads_a_model(make: Maker, warned: Callable[[], list[str]]) -> None:
    desk = await make(2)
    await desk.talk("alpha", idle_seconds=30.0).turn()
    await desk.quiet()
    await desk.router.unload("alpha")
    with desk.calls() as calls:
        await a_while(300.0)
    assert calls
    assert desk.router.loaded() == set()
    assert desk.router["alpha"].loads == 1
    assert not [call for call in calls if call.startswith("POST")]
    assert warned() == []


@virtual
async def test_an_idle_save_saves(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha", idle_seconds=30.0).turn()
    await a_while(60.0)
    assert desk.file("alpha") is not None
    await desk.router.unload("alpha")
    assert await desk.talk("alpha").turn() is RESTORED


@virtual
async def test_an_idle_save_does_not_change_who_goes(make: Maker) -> None:
    desk = await make(2)
    await desk.talk("alpha", idle_seconds=30.0).turn()
    await desk.talk("beta").turn()
    await a_while(60.0)  # the router takes alpha for the newest now
    await desk.talk("gamma").turn()
    assert desk.router.loaded() == {"beta", "gamma"}
    assert await desk.talk("beta").turn() is RESIDENT


@virtual
async def test_nothing_is_asked_while_nobody_waits(make: Maker) -> None:
    desk = await make(2)
    for model in ORDER:
        await desk.talk(model).turn()
    await desk.quiet()
    with desk.calls() as calls:
        await a_while(3600.0)
    assert calls == []


# older routers


@virtual
async def test_a_router_that_cannot_unload(make: Maker) -> None:
    desk = await make(2, can_unload=False)
    outcomes = [await desk.talk(model).turn() for model in ORDER]
    assert outcomes[:3] == [COLD] * 3
    assert set(outcomes[3:]) <= {RESIDENT, RESTORED}
    assert desk.leased() == {}


@virtual
async def test_a_router_that_can_neither_load_nor_unload_is_left_alone(make: Maker) -> None:
    desk = await make(2, can_unload=False, can_load=False)
    outcomes = [await desk.talk(model).turn() for model in ORDER]
    assert outcomes[:3] == [UNMANAGED] * 3
    assert desk.leased() == {}


# several workers


async def _wait_in_the_loop(paths: tuple[Path, Path], seconds: float) -> Any:
    """What `locks._wait` does in a thread, in virtual time."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    turn = held = None
    try:
        while held is None and loop.time() < end:
            turn = turn or locks._locked(paths[0], wait=False)
            held = turn and locks._locked(paths[1], wait=False)
            await asyncio.sleep(0 if held else 0.01)
        return held
    except asyncio.CancelledError:
        if held is not None:
            held.free()
        raise
    finally:
        if turn is not None:
            turn.free()


async def two_workers(make: Maker, monkeypatch: pytest.MonkeyPatch, limit: int) -> tuple[Desk, Desk]:
    """Two processes of a proxy: they share the index and the locks, and nothing else."""
    monkeypatch.setattr(locks, "_wait", _wait_in_the_loop)
    folder = make.folder / "locks"
    folder.mkdir()
    one = await make(limit, locks=folder)
    two = await make(limit, locks=folder, router=one.router)
    two.talks, two.folders = one.talks, one.folders
    return one, two


@virtual
async def test_what_one_worker_has_left_another_saves(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = await two_workers(make, monkeypatch, 1)
    await one.talk("alpha").turn()
    await one.quiet()
    one.talk("beta").desk = two
    await one.talk("beta").turn()
    one.talk("alpha").desk = two
    assert await one.talk("alpha").turn() is RESTORED


@virtual
async def test_workers_take_turns(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    desks = await two_workers(make, monkeypatch, 2)
    outcomes = []
    for number, model in enumerate(ORDER * 2):
        talk = desks[0].talk(model)
        talk.desk = desks[number % 2]
        outcomes.append(await talk.turn())
        await talk.desk.quiet()
    assert outcomes[:3] == [COLD] * 3
    assert set(outcomes[3:]) <= {RESIDENT, RESTORED}
    assert desks[0].router.count("(makes room") == 0


@virtual
async def test_a_model_that_another_worker_has_taken_does_not_go(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slot was never used before, so nothing of it is written down yet."""
    one, two = await two_workers(make, monkeypatch, 1)
    lease = await one.acquire("alpha")
    asked = asyncio.ensure_future(two.talk("beta").turn())
    await a_while(20.0)
    assert one.router.loaded() == {"alpha"}
    assert not asked.done()
    await one.talk("alpha").ask(lease)
    lease.release(Ending.ANSWERED)
    assert await soon(asked) is COLD


@virtual
async def test_workers_that_want_different_models_do_not_wait_for_each_other(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One makes room while the other, which does not know that its model is there, has that model's slot."""
    one, two = await two_workers(make, monkeypatch, 1)
    await one.talk("alpha").turn()
    await one.quiet()
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(one.router.complete("alpha", "who are you?", gate=gate))
    await one.router["alpha"].server.until_processing()
    started = make.loop.time()
    beta = asyncio.ensure_future(one.talk("beta").turn())  # has room made, as soon as the stranger has his answer
    await a_while(3.0)
    one.talk("alpha").desk = two
    alpha = asyncio.ensure_future(one.talk("alpha").turn())
    await a_while(3.0)
    gate.set()
    await stranger
    outcomes = await soon(asyncio.gather(alpha, beta))
    assert UNMANAGED not in outcomes
    assert make.loop.time() - started < 60


@virtual
async def test_a_model_that_another_worker_always_uses_goes_in_the_end(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = await two_workers(make, monkeypatch, 1)
    over = asyncio.Event()

    async def always(name: str) -> None:
        while not over.is_set():
            lease = await two.acquire("beta", name)
            await asyncio.sleep(2.0)
            lease.release(Ending.ANSWERED)

    others = [asyncio.ensure_future(always(name)) for name in "ab"]
    await a_while(1.0)
    asked = make.loop.time()
    lease = await soon(one.acquire("alpha", queue_seconds=600.0))
    lease.release(Ending.UNSENT)
    over.set()
    await soon(asyncio.gather(*others))
    assert lease.granted.outcome is COLD
    assert make.loop.time() - asked < 120


# clients that leave


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0])
@virtual
async def test_a_client_leaves_while_room_is_made(make: Maker, after: float) -> None:
    desk = await make(2)
    for model in ("alpha", "beta"):
        desk.router[model].server.switch_seconds = 0.1
        await desk.talk(model).turn()
    asked = asyncio.ensure_future(desk.acquire("gamma"))
    await a_while(after)
    if asked.done():
        (await asked).release(Ending.UNSENT)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await desk.quiet()
    assert desk.leased() == {}
    outcomes = [await desk.talk(model).turn() for model in ORDER]
    assert outcomes[:2] != [COLD, COLD]
    assert outcomes.count(COLD) == 1  # gamma's first
    assert all(talk.reuse >= 0.95 for talk in desk.talks.values())


@virtual
async def test_a_client_that_has_left_does_not_wait_for_room(make: Maker) -> None:
    desk = await make(1)
    lease = await desk.acquire("alpha")
    leaver = asyncio.ensure_future(desk.acquire("beta"))
    await a_while(1.0)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    other = asyncio.ensure_future(desk.acquire("gamma"))
    await a_while(20.0)
    assert set(desk.leased()) == {"alpha", "gamma"}  # the leaver holds nothing
    lease.release(Ending.UNSENT)
    (await soon(other)).release(Ending.UNSENT)
    await desk.quiet()
    assert desk.router.loaded() == {"gamma"}
    assert desk.router["beta"].loads == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [1, 2])
@virtual
async def test_many_at_once_and_some_leave(make: Maker, limit: int, seed: int) -> None:
    """Three models with two sessions each, six at once: every answer is right, nobody waits for ever, nothing is held."""
    chance = random.Random(seed)
    desk = await make(limit)
    for model in ("alpha", "beta", "gamma"):
        desk.router[model].server.switch_seconds = 0.05
        desk.router[model].server.decode_seconds_per_token = 0.02
    outcomes: list[Outcome] = []

    async def session(model: str, name: str) -> None:
        talk = desk.talk(model, name)
        for _ in range(8):
            turn = asyncio.ensure_future(talk.turn())
            if chance.random() < 0.3:
                await a_while(chance.random() * 2)
                turn.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                outcomes.append(await turn)
            await a_while(chance.random())

    everybody = asyncio.gather(*(session(model, name) for model in ("alpha", "beta", "gamma") for name in "ab"))
    await soon(everybody, 3000.0)
    await desk.quiet()
    assert desk.leased() == {}
    assert UNMANAGED not in outcomes
    assert len(outcomes) >= 24
    assert outcomes.count(COLD) <= 6 + (48 - len(outcomes))  # of a session's first, and of what was broken off
    assert desk.router.count("(makes room") == 0


# through the hook


class Road:
    """A proxy with the hook, as far as the hook can tell, and one wildcard entry."""

    def __init__(self, base_url: str, folder: Path, **options: Any) -> None:
        self.base_url = base_url
        self.hook = SlotCacheHook()
        self.options = {
            "save_path": str(folder / "saves"),
            "state_dir": str(folder / "state"),
            "min_tokens": 1,
        } | options

    def kwargs(self, model: str, session: str = "s") -> dict[str, Any]:
        return {
            "model": f"openai/{model}",
            "api_base": f"{self.base_url}/v1",
            "api_key": "none",
            "model_info": {"id": "d1", "slot_cache": self.options},
            "messages": [{"role": "user", "content": "who?"}],
            "litellm_call_id": "c1",
            "metadata": {"model_group": model},
            "proxy_server_request": {"headers": {"x-session-id": session}},
        }

    async def chat(self, router: FakeRouter, model: str) -> str:
        """A request, its prompt the same each time; returns the outcome."""
        kwargs = self.kwargs(model)
        work = self.hook.async_pre_call_deployment_hook(kwargs=kwargs, call_type=CallTypes.acompletion)
        sent = await asyncio.wait_for(work, 20)
        slot = None if sent is None else sent["extra_body"]["id_slot"]
        done = await router.complete(model, f"{model}: what was said before", slot)
        assert done.text == router[model].server.truth(f"{model}: what was said before")
        await self.hook.async_post_call_success_deployment_hook(kwargs, None, CallTypes.acompletion)
        told = await self.hook.async_post_call_response_headers_hook(
            data=kwargs, user_api_key_dict=None, response=None, request_headers={}, litellm_call_info={}
        )
        return "none" if told is None else told["x-slot-cache"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "POLL_FIRST_SECONDS", 0.005)


@contextlib.asynccontextmanager
async def real_road(folder: Path, limit: int, **options: Any) -> AsyncIterator[tuple[Road, FakeRouter]]:
    router = FakeRouter(save_dir=folder / "saves", max_instances=limit)
    for name in ("alpha", "beta", "gamma"):
        router[name].load_seconds = router[name].unload_seconds = 0.01
    async with router.serve() as base_url:
        road = Road(base_url, folder, **options)
        try:
            yield road, router
        finally:
            await road.hook.aclose()
            await router.aclose()


@pytest.mark.parametrize(("told", "setting", "most"), [(2, None, 2), (4, 1, 1), (2, 0, 3)])
async def test_one_wildcard_entry_covers_all_models(
    quick: None, tmp_path: Path, told: int, setting: int | None, most: int
) -> None:
    options = {} if setting is None else {"models_max": setting}
    async with real_road(tmp_path, 3 if setting == 0 else told, **options) as (road, router):
        outcomes, loaded = [], []
        for model in ORDER:
            outcomes.append(await road.chat(router, model))
            loaded.append(len(router.loaded()))
        assert outcomes[:3] == ["cold"] * 3
        assert set(outcomes[3:]) <= {"resident", "restored"}
        assert max(loaded) == most
        assert router.count("(makes room") == 0
        assert [entry for entry in router.log if entry == "GET /props"] == ["GET /props"]


async def test_an_unknown_model_goes_on_without_a_slot(quick: None, tmp_path: Path) -> None:
    async with real_road(tmp_path, 2) as (road, router):
        kwargs = road.kwargs("zeta")
        assert await road.hook.async_pre_call_deployment_hook(kwargs=kwargs, call_type=CallTypes.acompletion) is None
        assert router.loaded() == set()
        assert await road.chat(router, "alpha") == "cold"


async def test_a_server_that_is_no_router_is_asked_once(tmp_path: Path) -> None:
    fake = FakeLlamaServer(save_dir=tmp_path / "saves")
    async with fake.serve() as base_url:
        road = Road(base_url, tmp_path)
        for number in range(4):
            kwargs = road.kwargs("smol")
            await road.hook.async_pre_call_deployment_hook(kwargs=kwargs, call_type=CallTypes.acompletion)
            await fake.complete("who?" * (number + 1), slot=0)
            await road.hook.async_post_call_success_deployment_hook(kwargs, None, CallTypes.acompletion)
            paths = {call.path for call in fake.calls}
            assert not paths & {"/running", "/models", "/models/load", "/models/unload"}
        assert fake.count("props") <= 2  # what it is, and which model it runs
        await road.hook.aclose()
