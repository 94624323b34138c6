"""Who may use a slot, and the switches between conversations, against a server that behaves like llama-server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import respx

from fake_llama_server import Answer, Completion, FakeLlamaServer
from slot_cache import idle_slots, lost_leases, report, slot_actions
from slot_cache import llama_server as llama_server_module
from slot_cache import switcher as switcher_module
from slot_cache.folder import CacheFolder
from slot_cache.index import IndexThread, MemoryIndex
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.plan import MOST_PASSES
from slot_cache.request import route_tag
from slot_cache.state import Ending, Outcome, Want
from slot_cache.switcher import Granted, Lease, SlotSwitcher

BASE = "http://llama:8080"
TAG = route_tag("smol")
RESIDENT, RESTORED, COLD, UNMANAGED = Outcome.RESIDENT, Outcome.RESTORED, Outcome.COLD, Outcome.UNMANAGED
ANSWERED, BROKEN, UNSENT = Ending.ANSWERED, Ending.BROKEN, Ending.UNSENT
SWITCHES = {"save", "restore", "erase"}


def key(name: str) -> str:
    return f"{TAG}_{hashlib.sha256(name.encode()).hexdigest()[:32]}"


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.runs = False
        """they pass by themselves"""

    def __call__(self) -> float:
        return time.monotonic() if self.runs else self.now


class Desk:
    """A switcher, its folder, and the server it talks to."""

    def __init__(self, fake: FakeLlamaServer, index: IndexThread, path: Path | None, clock: Clock) -> None:
        self.fake = fake
        self.clock = clock
        self.index = index
        self.folder = CacheFolder(index, tag=TAG, route="smol", server="llama", path=path, min_tokens=1)
        self.switcher = SlotSwitcher(LlamaServer(BASE), index, name="llama", clock=clock)

    def acquire(
        self,
        name: str | None,
        number: int = 0,
        *,
        owner: str = "",
        apart: bool = True,
        queue_seconds: float = 60.0,
        idle_seconds: float = 0.0,
    ) -> Coroutine[Any, Any, Lease]:
        want = Want(None if name is None else key(name), owner, apart)
        return self.switcher.acquire(number, want, self.folder, queue_seconds=queue_seconds, idle_seconds=idle_seconds)

    async def waiters(self, *names: str | None, **more: Any) -> list[asyncio.Task[Lease]]:
        """Requests that wait behind the holder, in this order."""
        tasks = []
        for name in names:
            tasks.append(asyncio.ensure_future(self.acquire(name, **more)))
            await turns_of_the_loop()
        return tasks

    async def quiet(self) -> None:
        """Returns when all that follows the requests so far is done; what watches for lost leases does not count."""
        while tasks := [task for task in self.switcher._tasks if "lost" not in str(task.get_coro())]:
            await asyncio.wait(tasks, timeout=5)

    def file(self, name: str) -> bytes | None:
        file = self.fake.save_dir / f"{key(name)}.bin"
        return file.read_bytes() if file.exists() else None

    def saved_text(self, name: str) -> str | None:
        tokens = self.fake.tokens_in_file(f"{key(name)}.bin")
        return None if tokens is None else "".join(map(chr, tokens))

    @contextlib.contextmanager
    def calls(self) -> Iterator[list[str]]:
        """The calls that come in meanwhile."""
        seen: list[str] = []
        before = len(self.fake.calls)
        yield seen
        seen += self.fake.actions()[before:]


async def turns_of_the_loop(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def got(work: Awaitable[Lease], seconds: float = 10.0) -> Lease:
    return await asyncio.wait_for(work, seconds)


class Talk:
    """A conversation: each turn goes on where the last one ended, and its answer is checked against the truth."""

    def __init__(self, desk: Desk, name: str | None, **options: Any) -> None:
        self.desk, self.name, self.options = desk, name, options
        self.prompt = f"{name}> "
        self.done: Completion | None = None

    async def turn(self, text: str = "and then? ", ending: Ending = ANSWERED, **more: Any) -> Outcome:
        lease = await got(self.desk.acquire(self.name, **(self.options | more)))
        await self.ask(lease, text)
        lease.release(ending)
        return lease.granted.outcome

    async def ask(self, lease: Lease, text: str = "and then? ") -> Completion:
        self.prompt += text
        slot = None if lease.granted.outcome is UNMANAGED else lease.slot
        self.done = await self.desk.fake.complete(self.prompt, slot=slot)
        assert self.done.text == self.desk.fake.truth(self.prompt)
        self.prompt += self.done.text
        return self.done

    @property
    def reused(self) -> int:
        assert self.done is not None
        return self.done.cached


@pytest.fixture
def saves(tmp_path: Path) -> Path:
    return tmp_path / "saves"


@pytest.fixture
def fake(saves: Path) -> FakeLlamaServer:
    return FakeLlamaServer(slots=2, save_dir=saves)


@pytest.fixture
async def desk(fake: FakeLlamaServer, saves: Path) -> AsyncIterator[Desk]:
    async for made in _desk(fake, saves):
        yield made


@pytest.fixture
async def blind_desk(fake: FakeLlamaServer) -> AsyncIterator[Desk]:
    async for made in _desk(fake, None):
        yield made


async def _desk(fake: FakeLlamaServer, path: Path | None) -> AsyncIterator[Desk]:
    index = IndexThread(MemoryIndex())
    with respx.mock(assert_all_called=False) as router:
        fake.mount(router, BASE)
        desk = Desk(fake, index, path, Clock())
        yield desk
        fake.clear()
        await desk.switcher.aclose()
    index.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that hangs is given up in a moment."""
    monkeypatch.setattr(llama_server_module, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(llama_server_module, "SWITCH_SECONDS", 0.1)


# the queue


async def test_a_free_slot_is_had_at_once(desk: Desk) -> None:
    lease = await got(desk.acquire("a"))
    assert (lease.granted.outcome, lease.slot, lease.active) == (COLD, 0, True)
    assert desk.switcher.leased() == [0]
    lease.release(UNSENT)
    assert desk.switcher.leased() == []


async def test_first_come_first_served(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    names = ["b", "c", "d", None, "e", "f", "g"]
    waiting = await desk.waiters(*names)
    assert desk.switcher.waiting(0) == len(names)
    holder.release(ANSWERED)
    for number, task in enumerate(waiting):
        lease = await got(task)
        assert not any(later.done() for later in waiting[number + 1 :])
        assert desk.switcher.waiting(0) == len(names) - number - 1
        lease.release(ANSWERED)
    assert desk.switcher.leased() == []


async def test_one_whose_cache_is_in_the_slot_goes_first_so_often_at_most(desk: Desk) -> None:
    a = Talk(desk, "a")
    await a.turn()
    holder = await got(desk.acquire("a"))
    (other,) = await desk.waiters("b")
    served = []
    for _ in range(MOST_PASSES + 3):
        (next_turn,) = await desk.waiters("a")
        await a.ask(holder)
        holder.release(ANSWERED)
        done, _ = await asyncio.wait({other, next_turn}, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        served.append("b" if other in done else "a")
        if other in done:
            (await got(other)).release(ANSWERED)
            (await got(next_turn)).release(ANSWERED)
            break
        holder = await got(next_turn)
    assert served == ["a"] * MOST_PASSES + ["b"]
    assert desk.switcher.leased() == []


async def test_nobody_has_the_slot_beside_its_holder(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    (waiter,) = await desk.waiters("a")
    with desk.calls() as calls:
        await Talk(desk, "a").ask(holder)
        await turns_of_the_loop(100)
    assert not waiter.done()
    assert calls == []
    holder.release(ANSWERED)
    assert (await got(waiter)).granted.outcome is RESIDENT


async def test_other_slots_are_free_meanwhile(desk: Desk) -> None:
    await got(desk.acquire("a", 0))
    other = await got(desk.acquire("b", 1))
    assert other.slot == 1
    assert sorted(desk.switcher.leased()) == [0, 1]


async def test_a_waiter_that_is_cancelled_leaves_the_queue(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    first, second, third = await desk.waiters("b", "c", "d")
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert desk.switcher.waiting(0) == 2
    holder.release(ANSWERED)
    (await got(first)).release(ANSWERED)
    (await got(third)).release(ANSWERED)
    assert desk.switcher.leased() == []


async def test_who_is_cancelled_in_the_moment_of_its_turn_hands_it_on(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    first, second = await desk.waiters("b", "c")
    holder.release(ANSWERED)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    lease = await got(second)
    assert lease.want.key == key("c")
    lease.release(ANSWERED)
    await desk.quiet()
    assert desk.switcher.leased() == []


async def test_who_is_cancelled_in_the_moment_of_its_turn_frees_the_slot(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    (waiter,) = await desk.waiters("b")
    holder.release(ANSWERED)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert desk.switcher.leased() == []
    assert desk.switcher.waiting(0) == 0


@pytest.mark.parametrize("steps", range(12))
async def test_who_is_cancelled_at_any_step_leaves_nothing_behind(desk: Desk, steps: int) -> None:
    holder = await got(desk.acquire("a"))
    first, second = await desk.waiters("b", "c")
    holder.release(ANSWERED)
    await turns_of_the_loop(steps)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    (await got(second)).release(ANSWERED)
    await desk.quiet()
    assert desk.switcher.leased() == []


async def test_a_switch_that_has_begun_is_carried_to_its_end(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    desk.fake.fail("restore", "hang")
    leaving = asyncio.ensure_future(desk.acquire("a"))
    await desk.fake.until(lambda: desk.fake.count("restore") == 1)
    (waiter,) = await desk.waiters("c")
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await turns_of_the_loop(100)
    assert desk.switcher.leased() == [0]
    assert not waiter.done()
    desk.fake.clear()
    await got(waiter)
    assert desk.fake.count("restore", 200) == 1
    assert desk.saved_text("b") is not None


async def test_and_frees_the_slot_then(desk: Desk) -> None:
    desk.fake.fail("slots", "hang")
    leaving = asyncio.ensure_future(desk.acquire("a"))
    await desk.fake.until(lambda: desk.fake.count("slots") == 1)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert desk.switcher.leased() == [0]
    desk.fake.clear()
    await desk.quiet()
    assert desk.switcher.leased() == []
    assert await Talk(desk, "b").turn() is COLD


async def test_what_was_switched_for_a_client_that_left_is_still_known(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    desk.fake.fail("restore", "hang")
    leaving = asyncio.ensure_future(desk.acquire("a"))
    await desk.fake.until(lambda: desk.fake.count("restore") == 1)
    leaving.cancel()
    desk.fake.clear()
    await desk.quiet()
    assert await a.turn() is RESIDENT


async def test_who_waits_too_long_goes_on_without_a_slot(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    with desk.calls() as calls:
        lease = await got(desk.acquire("b", queue_seconds=0.05))
    assert lease.granted.outcome is UNMANAGED
    assert lease.granted.why
    assert calls == []
    assert desk.switcher.leased() == [0]
    assert desk.switcher.waiting(0) == 0
    lease.release(ANSWERED)
    assert desk.switcher.leased() == [0]
    holder.release(ANSWERED)
    assert desk.switcher.leased() == []


async def test_the_time_waited_is_told(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    assert holder.waited == 0.0
    (waiter,) = await desk.waiters("b")
    desk.clock.now += 7
    holder.release(ANSWERED)
    assert (await got(waiter)).waited == 7.0


@pytest.mark.parametrize("ending", Ending)
async def test_giving_back_twice_does_nothing(desk: Desk, ending: Ending) -> None:
    holder = await got(desk.acquire("a"))
    first, second = await desk.waiters("b", "c")
    holder.release(ending)
    holder.release(ending)
    lease = await got(first)
    holder.release(ending)
    await turns_of_the_loop(50)
    assert not second.done()
    assert lease.active
    assert not holder.active
    lease.release(ending)
    await got(second)


# switches


async def test_each_conversation_finds_its_cache_again(desk: Desk) -> None:
    talks = [Talk(desk, name) for name in "abc"]
    for talk in talks:
        assert await talk.turn() is COLD
    for _ in range(3):
        for talk in talks:
            before = len(talk.prompt)
            assert await talk.turn() is RESTORED
            assert talk.reused >= before - 1


async def test_who_is_there_already_costs_one_look(desk: Desk) -> None:
    a = Talk(desk, "a")
    await a.turn()
    await desk.quiet()
    for _ in range(3):
        with desk.calls() as calls:
            lease = await got(desk.acquire("a"))
        assert calls == ["slots"]
        assert lease.granted.outcome is RESIDENT
        await a.ask(lease)
        lease.release(ANSWERED)
        await desk.quiet()


async def test_what_is_there_is_saved_before_the_other_is_restored(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    with desk.calls() as calls:
        assert await a.turn() is RESTORED
    assert [call for call in calls if call in SWITCHES] == ["save", "restore"]
    assert calls[0] == "slots"
    saved = [call.filename for call in desk.fake.calls if call.action == "save"]
    assert saved == [f"{key('a')}.bin.part", f"{key('b')}.bin.part"]


async def test_what_did_not_change_is_not_saved_again(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    (await got(desk.acquire("a"))).release(UNSENT)
    await desk.quiet()
    with desk.calls() as calls:
        assert await b.turn() is RESTORED
    assert [call for call in calls if call in SWITCHES] == ["restore"]


async def test_a_new_conversation_erases_nothing(desk: Desk) -> None:
    await Talk(desk, "a").turn()
    await Talk(desk, "b").turn()
    assert desk.fake.count("erase") == 0


@pytest.mark.parametrize(
    ("first", "then", "erased"),
    [
        ({"owner": "me"}, {"owner": "you"}, 1),
        ({"owner": "me"}, {"owner": ""}, 1),
        ({"owner": "me"}, {"owner": "me"}, 0),
        ({"owner": ""}, {"owner": ""}, 0),
        ({"owner": "", "apart": False}, {"owner": "", "apart": False}, 0),
    ],
)
async def test_a_slot_is_erased_only_where_tokens_must_be_kept_apart(
    desk: Desk, first: dict[str, Any], then: dict[str, Any], erased: int
) -> None:
    await Talk(desk, "a", **first).turn()
    await desk.quiet()
    with desk.calls() as calls:
        stranger = Talk(desk, "b", **then)
        assert await stranger.turn() is COLD
    assert calls.count("erase") == erased
    if erased:
        assert stranger.reused == 0
        assert desk.saved_text("a") is not None


async def test_a_restore_that_failed_does_not_leave_a_stranger_s_tokens(desk: Desk) -> None:
    a, b = Talk(desk, "a", owner="me"), Talk(desk, "b", owner="you")
    a.prompt = b.prompt = "the same beginning of both of them "
    await a.turn("a")
    await b.turn("b")
    await desk.quiet()
    desk.fake.fail("restore", "500")
    a.prompt = b.prompt
    assert await a.turn() is COLD
    assert a.reused == 0


async def test_a_request_without_a_session_saves_what_was_there(desk: Desk) -> None:
    a, nobody = Talk(desk, "a"), Talk(desk, None)
    await a.turn()
    assert await nobody.turn() is COLD
    assert desk.saved_text("a") == a.prompt[:-1]
    before = len(a.prompt)
    assert await a.turn() is RESTORED
    assert a.reused >= before - 1


async def test_what_a_request_without_a_session_leaves_is_never_saved(desk: Desk) -> None:
    nobody = Talk(desk, None, idle_seconds=0.01)
    await nobody.turn()
    await nobody.turn()
    await Talk(desk, "a").turn()
    await nobody.turn()
    await Talk(desk, "b").turn()
    await desk.quiet()
    saved = {call.filename for call in desk.fake.calls if call.action == "save"}
    assert saved <= {f"{key('a')}.bin.part", f"{key('b')}.bin.part"}


async def test_a_cache_that_is_too_small_is_not_saved(desk: Desk) -> None:
    desk.folder.min_tokens = 64
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn("x" * 10)
    await b.turn("y" * 100)
    await a.turn()
    assert desk.file("a") is None
    assert desk.saved_text("b") is not None


# the slot is what the server says it is


async def test_somebody_else_s_use_is_noticed_and_never_saved_as_ours(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await a.turn()
    await desk.quiet()
    good = desk.file("a")
    await desk.fake.complete("somebody else's long prompt, longer than all of ours " * 3, slot=0)
    await b.turn()
    assert desk.file("a") == good
    assert await a.turn() is RESTORED


@pytest.mark.parametrize(
    "text", ["x", "somebody else's long prompt, longer than all of ours " * 3], ids=["short", "long"]
)
async def test_somebody_else_s_use_just_before_a_save_is_noticed_as_well(desk: Desk, text: str) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    for talk in (a, b, a):
        await talk.turn()
    await desk.quiet()
    good = desk.file("a")
    handle = desk.fake.handle

    async def used_first(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if "action=save" in target:
            await desk.fake.complete(text, slot=0)
        return await handle(method, target, headers, body)

    desk.fake.handle = used_first  # type: ignore[method-assign]
    await b.turn()
    assert desk.file("a") == good


async def test_somebody_else_s_use_between_two_turns_costs_what_was_not_saved(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    saved = len(a.prompt) - 1
    await b.turn()
    await a.turn()
    await desk.quiet()
    await desk.fake.complete("somebody else", slot=0)
    assert await a.turn() is RESTORED
    assert a.reused >= saved


@pytest.mark.parametrize("used", [False, True], ids=["not used since", "used since"])
async def test_a_restart_is_noticed(desk: Desk, used: bool) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await a.turn()
    await desk.quiet()
    good = desk.file("a")
    desk.fake.restart()
    if used:
        await desk.fake.complete("x", slot=0)
    assert await a.turn() is RESTORED
    assert desk.file("a") == good
    assert await b.turn() is RESTORED


async def test_a_restart_during_a_request_is_noticed(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    for _ in range(3):
        await a.turn()
        await b.turn()
    lease = await got(desk.acquire("a"))
    good = desk.file("a")
    desk.fake.restart()
    lease.release(BROKEN)
    assert await b.turn() is RESTORED
    assert desk.file("a") == good


async def test_a_slot_that_the_server_emptied_is_never_saved(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await a.turn()
    await desk.quiet()
    good = desk.file("a")
    desk.fake.slots[0].clear()
    with desk.calls() as calls:
        await b.turn()
    assert "save" not in calls
    assert desk.file("a") == good
    assert await a.turn() is RESTORED


async def test_a_request_that_never_reached_the_slot_changes_nothing(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await desk.quiet()
    for ending in (ANSWERED, BROKEN, UNSENT):
        (await got(desk.acquire("a"))).release(ending)
        await desk.quiet()
        assert await a.turn() is RESIDENT
        await desk.quiet()
    (await got(desk.acquire(None))).release(BROKEN)
    await desk.quiet()
    assert await a.turn() is RESIDENT
    await b.turn()
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_another_model_s_cache_is_not_restored(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    desk.fake.restart(model_path="/models/b.gguf")
    assert await a.turn() is COLD
    assert a.reused == 0
    assert desk.fake.count("restore") == 0


async def test_another_switcher_knows_what_is_in_the_slot(desk: Desk, saves: Path) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    after = Desk(desk.fake, desk.index, saves, Clock())
    a.desk = b.desk = after
    assert await b.turn() is RESIDENT
    assert await a.turn() is RESTORED
    await after.quiet()
    await after.switcher.aclose()


# saves and restores that fail


BAD_SAVES = ["500", "503", "garbage", "wrong_shape", "wrong_types", "empty_save", "short_file", "wrong_count", "refuse"]


@pytest.mark.parametrize("kind", [*BAD_SAVES, "drop"])
async def test_a_save_that_fails_leaves_the_good_one_and_the_request_goes_on(desk: Desk, kind: Any) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    saved = len(a.prompt) - 1
    await b.turn()
    await a.turn()
    await desk.quiet()
    good = desk.file("a")
    desk.fake.fail("save", kind, times=2 if kind == "drop" else 1)
    lease = await got(desk.acquire("b"))
    assert lease.granted.outcome is RESTORED
    await b.ask(lease)
    lease.release(ANSWERED)
    await desk.quiet()
    assert desk.file("a") == good
    assert not list(desk.fake.save_dir.glob("*.part"))
    assert await a.turn() is RESTORED
    assert a.reused >= saved


async def test_a_save_that_failed_is_tried_again_at_the_next_chance(desk: Desk) -> None:
    a = Talk(desk, "a")
    await a.turn()
    await desk.quiet()
    desk.fake.fail("save", "500")
    (await got(desk.acquire("b"))).release(UNSENT)
    await desk.quiet()
    assert desk.file("a") is None
    await Talk(desk, "c").turn()
    assert desk.saved_text("a") == a.prompt[:-1]


@pytest.mark.parametrize("kind", ["500", "garbage", "wrong_types", "refuse", "drop"])
async def test_a_restore_that_fails_is_a_cold_start(desk: Desk, kind: Any) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    good = desk.file("a")
    desk.fake.fail("restore", kind, times=2 if kind == "drop" else 1)
    lease = await got(desk.acquire("a"))
    assert lease.granted.outcome is COLD
    lease.release(UNSENT)
    assert desk.file("a") == good
    assert await a.turn() is RESTORED


async def test_a_file_that_the_server_refuses_twice_is_forgotten(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    good = desk.file("a")
    desk.fake.shape = "another"
    lease = await got(desk.acquire("a"))
    assert lease.granted.outcome is COLD
    assert desk.file("a") == good  # there may be room for it another time
    lease.release(UNSENT)
    lease = await got(desk.acquire("a"))
    assert lease.granted.outcome is COLD
    assert desk.fake.count("restore", 400) == 2
    assert desk.file("a") is None
    lease.release(UNSENT)


async def test_a_damaged_file_never_goes_to_the_server(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    file = desk.fake.save_dir / f"{key('a')}.bin"
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    assert await a.turn() is COLD
    assert desk.fake.count("restore") == 0
    await b.turn()
    assert await a.turn() is RESTORED


async def test_a_server_without_slot_save_path_is_asked_no_more(desk: Desk) -> None:
    desk.fake.slot_save_path = False
    a, b = Talk(desk, "a"), Talk(desk, "b")
    for _ in range(3):
        assert await a.turn() in (COLD, RESIDENT)
        assert await b.turn() in (COLD, RESIDENT)
    assert sum(desk.fake.count(action) for action in SWITCHES) == 1
    desk.clock.now += slot_actions.OFF_SECONDS + 1
    desk.fake.slot_save_path = True
    await a.turn()
    assert desk.saved_text("b") is not None


async def test_a_folder_that_is_not_the_server_s_is_not_looked_at(
    fake: FakeLlamaServer, tmp_path: Path, desk: Desk
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    desk.folder.path = elsewhere
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    assert await a.turn() is RESTORED
    assert await b.turn() is RESTORED


async def test_without_a_folder_caches_are_found_all_the_same(blind_desk: Desk) -> None:
    talks = [Talk(blind_desk, name) for name in "abc"]
    for talk in talks:
        assert await talk.turn() is COLD
    for talk in talks:
        assert await talk.turn() is RESTORED


@pytest.mark.parametrize("kind", ["empty_save", "wrong_count", "garbage", "drop_after", "hang"])
async def test_what_a_failed_save_has_left_is_not_restored_where_it_cannot_be_checked(
    blind_desk: Desk, quick: None, kind: Any
) -> None:
    desk = blind_desk
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await a.turn()
    await desk.quiet()
    desk.fake.fail("save", kind, times=2 if kind == "drop_after" else 1)
    await b.turn()
    await desk.quiet()
    desk.fake.clear()
    desk.clock.now += slot_actions.HUNG_SECONDS + 1
    desk.fake.calls.clear()
    await a.turn()
    restored = [call.filename for call in desk.fake.calls if call.action == "restore"]
    assert f"{key('a')}.bin" not in restored


async def test_the_better_save_is_kept_where_a_restore_failed_and_the_request_as_well(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn("a long beginning " * 10)
    await b.turn()
    await desk.quiet()
    good = desk.file("a")
    desk.fake.fail("restore", "500")
    lease = await got(desk.acquire("a"))
    assert lease.granted.outcome is COLD
    await desk.fake.complete(a.prompt[:30], slot=0)  # as far as it came
    lease.release(BROKEN)
    await b.turn()
    assert desk.file("a") == good
    assert await a.turn() is RESTORED


async def test_a_broken_request_does_not_take_the_place_of_a_better_save(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn("a long beginning " * 10)
    await b.turn()
    lease = await got(desk.acquire("a"))
    good = desk.file("a")
    await desk.fake.complete(a.prompt[:30], slot=0)
    lease.release(BROKEN)
    await b.turn()
    assert desk.file("a") == good
    lease = await got(desk.acquire("a"))
    await desk.fake.complete(a.prompt[:30], slot=0)
    lease.release(BROKEN)
    assert await a.turn() is RESTORED
    assert a.reused > 100


async def test_a_broken_request_that_came_far_is_saved(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn(ending=BROKEN)
    await b.turn()
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_what_was_not_rewound_is_left_alone_after_a_restore_that_did_not_help(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    lease = await got(desk.acquire("a"))
    assert lease.granted.outcome is RESTORED
    await a.ask(lease)
    lease.learn(0, 500)
    lease.release(ANSWERED)
    await desk.quiet()
    with desk.calls() as calls:
        assert await b.turn() is COLD
        assert await a.turn() is COLD
    assert not SWITCHES & set(calls)


# a server that does not do what it should


BAD_LOOKS = ["500", "garbage", "wrong_shape", "wrong_types", "refuse"]


@pytest.mark.parametrize("kind", [*BAD_LOOKS, "hang"])
async def test_a_request_goes_on_without_a_server_that_answers(desk: Desk, quick: None, kind: Any) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    desk.fake.fail("slots", kind, times=None)
    lease = await got(desk.acquire("a"), 2)
    assert lease.granted.outcome is UNMANAGED
    assert lease.granted.why
    assert desk.switcher.leased() == []
    await a.ask(lease)
    lease.release(ANSWERED)
    desk.fake.clear()
    desk.clock.now += slot_actions.HUNG_SECONDS + 1
    assert await a.turn() is RESTORED


@pytest.mark.parametrize("where", ["props", "models"])
@pytest.mark.parametrize("kind", [*BAD_LOOKS, "hang"])
async def test_a_request_goes_on_where_the_model_is_not_told(desk: Desk, quick: None, where: Any, kind: Any) -> None:
    desk.fake.fail(where, kind, times=None)
    lease = await got(desk.acquire("a"), 5)
    await Talk(desk, "a").ask(lease)
    lease.release(ANSWERED)
    await desk.quiet()
    desk.fake.clear()
    desk.clock.now += slot_actions.HUNG_SECONDS + 1
    assert await Talk(desk, "b").turn() is COLD


async def test_one_failed_look_does_not_cost_what_is_in_the_slot(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await desk.quiet()
    desk.fake.fail("slots", "500")
    lease = await got(desk.acquire("b", 0))
    assert lease.granted.outcome is UNMANAGED
    lease.release(UNSENT)
    await b.turn()
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_when_the_server_hangs_nobody_waits_any_longer(desk: Desk, quick: None) -> None:
    holder = await got(desk.acquire("a"))
    waiting = await desk.waiters(*"bcdefgh")
    desk.fake.fail("slots", "hang", times=None)
    holder.release(ANSWERED)
    with desk.calls() as calls:
        leases = [await got(task, 2) for task in waiting]
    assert {lease.granted.outcome for lease in leases} == {UNMANAGED}
    assert calls.count("slots") <= 2
    assert len(calls) <= 3
    with desk.calls() as calls:
        late = await got(desk.acquire("i"), 1)
    assert late.granted.outcome is UNMANAGED
    assert calls == []


@pytest.mark.parametrize("action", ["save", "restore", "props"])
async def test_nor_when_it_hangs_in_a_switch(desk: Desk, quick: None, action: Any) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    desk.switcher.actions._bytes_per_token[TAG] = 1.0
    holder = await got(desk.acquire("b"))
    await b.ask(holder)
    waiting = await desk.waiters(*"acde")
    desk.fake.fail(action, "hang", times=None)
    with desk.calls() as calls:
        holder.release(ANSWERED)
        leases = [await got(task, 5) for task in waiting]
    assert {lease.granted.outcome for lease in leases} == {UNMANAGED}
    assert calls.count("slots") <= 2  # of the one whose switch it was, and when its slot was given back
    assert calls.count(action) == 1


@pytest.mark.parametrize("slow", ["slots", "props", "models", "save", "restore"])
async def test_a_request_is_held_by_a_server_that_hangs_for_less_than_five_seconds(desk: Desk, slow: str) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    await desk.quiet()
    held: list[float] = []
    handle = desk.fake.handle
    hangs = False

    async def hanging(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        nonlocal hangs
        hangs = hangs or slow in target
        if hangs:  # once it hangs it hangs for good
            raise httpx.ReadTimeout("no answer")
        return await handle(method, target, headers, body)

    desk.fake.handle = hanging  # type: ignore[method-assign]
    call = LlamaServer._call

    async def timed(self: LlamaServer, method: str, path: str, seconds: float, **more: Any) -> Any:
        try:
            return await call(self, method, path, seconds, **more)
        except LlamaServerError as error:
            held.append(seconds if error.fault == "timeout" else 0.0)
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaServer, "_call", timed)
        desk.switcher._book.identity = None
        lease = await got(desk.acquire("a"))
    assert lease.granted.outcome is UNMANAGED
    assert 0 < sum(held) < 5


async def test_when_the_server_is_well_again_all_is_as_before(desk: Desk, quick: None) -> None:
    a = Talk(desk, "a")
    desk.fake.fail("slots", "hang", times=None)
    assert await a.turn() is UNMANAGED
    desk.fake.clear()
    desk.clock.now += slot_actions.HUNG_SECONDS - 0.1
    assert await a.turn() is UNMANAGED
    desk.clock.now += 0.2
    assert await a.turn() is COLD
    assert await a.turn() is RESIDENT


async def test_a_slot_that_the_server_does_not_have_is_told(desk: Desk) -> None:
    lease = await got(desk.acquire("a", 5))
    assert lease.granted.outcome is UNMANAGED
    assert "no slot 5" in lease.granted.why


async def test_a_fault_is_said_once_and_when_it_is_over(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", report.logger.name)
    desk.fake.fail("slots", "500", times=None)
    for _ in range(3):
        assert await Talk(desk, "a").turn() is UNMANAGED
    desk.fake.clear()
    await Talk(desk, "a").turn()
    lines = [record.getMessage() for record in caplog.records if record.name == report.logger.name]
    assert sum("requests go on without a switch" in line for line in lines) == 1
    assert sum("answers again" in line for line in lines) == 1


# a slot that others use as well


async def test_a_slot_in_which_somebody_else_s_request_runs_is_waited_for(desk: Desk) -> None:
    await Talk(desk, "a").turn()
    await desk.quiet()
    gate = asyncio.Event()
    other = asyncio.ensure_future(desk.fake.complete("somebody else", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    waiting = asyncio.ensure_future(desk.acquire("a"))
    await desk.fake.until(lambda: desk.fake.count("slots") >= 4)
    assert not waiting.done()
    assert desk.fake.parked == 0
    gate.set()
    await other
    lease = await got(waiting)
    assert lease.granted.outcome is COLD
    assert desk.file("a") is None
    lease.release(UNSENT)


async def test_but_no_longer_than_for_one_of_ours(desk: Desk) -> None:
    gate = asyncio.Event()
    other = asyncio.ensure_future(desk.fake.complete("somebody else", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    waiting = asyncio.ensure_future(desk.acquire("a", queue_seconds=60))
    await desk.fake.until(lambda: desk.fake.count("slots") >= 2)
    desk.clock.now += 61
    assert (await got(waiting)).granted.outcome is UNMANAGED
    assert not SWITCHES & set(desk.fake.actions())
    gate.set()
    await other


async def test_a_broken_request_may_need_a_moment_to_end(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    lease = await got(desk.acquire("a"))
    gate = asyncio.Event()
    running = asyncio.ensure_future(desk.fake.complete(a.prompt + "and then?", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    (waiter,) = await desk.waiters("b")
    lease.release(BROKEN)
    await desk.fake.until(lambda: desk.fake.count("slots") >= 6)
    assert not waiter.done()
    assert desk.fake.parked == 0
    gate.set()
    await running
    assert (await got(waiter)).granted.outcome is RESTORED
    assert desk.saved_text("a") == a.prompt + "and then?" + running.result().text[:-1]


async def test_an_abandoned_request_is_not_kept_alive_by_looking(desk: Desk) -> None:
    desk.fake.gate = asyncio.Event()  # it would never end by itself
    lease = await got(desk.acquire("a"))
    async with httpx.AsyncClient() as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "id_slot": 0}
        request = asyncio.ensure_future(client.post(f"{BASE}/v1/chat/completions", json=body))
        await desk.fake.until_processing(0)
        (waiter,) = await desk.waiters("b")
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    lease.release(BROKEN)
    assert (await got(waiter, 8)).granted.outcome is COLD


async def test_a_request_without_a_slot_that_ran_in_ours_is_not_saved_as_ours(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    holder = await got(desk.acquire("a"))
    good = desk.file("a")
    loose = await got(desk.acquire("c", queue_seconds=0.01))
    assert loose.granted.outcome is UNMANAGED
    await a.ask(holder)
    await desk.fake.complete("a long prompt of a request without a slot " * 5, slot=0)
    holder.release(ANSWERED)
    await b.turn()
    assert desk.file("a") == good
    loose.release(ANSWERED)


async def test_nor_when_it_ran_before_anybody_looked(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    await a.turn()
    await b.turn()
    holder = await got(desk.acquire("a"))
    good = desk.file("a")
    gate = asyncio.Event()
    running = asyncio.ensure_future(desk.fake.complete(a.prompt + "and then?", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    (first,) = await desk.waiters("c", queue_seconds=60)
    (second,) = await desk.waiters("b", queue_seconds=600)
    holder.release(BROKEN)
    await desk.fake.until(lambda: desk.fake.count("slots") >= 4)
    desk.clock.now += 61  # more than the first may wait
    loose = await got(first)
    assert loose.granted.outcome is UNMANAGED
    gate.set()
    await running
    await desk.fake.complete("a long prompt of a request without a slot " * 5, slot=0)
    loose.release(ANSWERED)
    assert (await got(second)).granted.outcome is RESTORED
    assert desk.file("a") == good


async def test_requests_without_a_slot_are_forgotten_when_they_end(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    loose = await got(desk.acquire("b", queue_seconds=0.01))
    loose.release(ANSWERED)
    holder.release(ANSWERED)
    a = Talk(desk, "a")
    await a.turn()
    assert await a.turn() is RESIDENT


async def test_and_after_a_long_while_when_their_end_was_not_told(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    await got(desk.acquire("b", queue_seconds=0.01))
    holder.release(ANSWERED)
    a = Talk(desk, "a")
    await a.turn()
    assert await a.turn() is not RESIDENT
    desk.clock.now += switcher_module.LOOSE_SECONDS + 1
    await a.turn()
    assert await a.turn() is RESIDENT


# idle saves


async def idle_save(desk: Desk, count: int = 1) -> None:
    await desk.fake.until(lambda: desk.fake.count("save") >= count)
    await desk.quiet()


async def test_what_nobody_uses_for_a_while_is_saved(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.02)
    await a.turn()
    await idle_save(desk)
    assert desk.saved_text("a") == a.prompt[:-1]
    assert desk.switcher.leased() == []
    with desk.calls() as calls:
        assert await a.turn() is RESIDENT
    assert calls[0] == "slots"
    await idle_save(desk, 2)
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_and_only_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    a = Talk(desk, "a", idle_seconds=0.02)
    await a.turn()
    await idle_save(desk)
    with desk.calls() as calls:
        await asyncio.sleep(0.2)
        await Talk(desk, "b", idle_seconds=0.0).turn()
    assert "save" not in calls


async def test_without_idle_seconds_nothing_is_saved_before_its_slot_is_needed(desk: Desk) -> None:
    await Talk(desk, "a").turn()
    await desk.quiet()
    with desk.calls() as calls:
        await asyncio.sleep(0.1)
    assert calls == []


async def test_a_new_request_puts_the_idle_save_off(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.2)
    await a.turn()
    await desk.quiet()
    lease = await got(desk.acquire("a", idle_seconds=0.2))
    await asyncio.sleep(0.5)
    assert desk.fake.count("save") == 0
    await a.ask(lease)
    lease.release(ANSWERED)
    await idle_save(desk)
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_a_request_that_comes_during_an_idle_save_waits_for_it(desk: Desk) -> None:
    a, b = Talk(desk, "a", idle_seconds=0.02), Talk(desk, "b")
    await a.turn()
    desk.fake.fail("save", "hang")
    await desk.fake.until(lambda: desk.fake.count("save") == 1)
    waiting = asyncio.ensure_future(desk.acquire("b"))
    await turns_of_the_loop(50)
    assert not waiting.done()
    desk.fake.clear()
    lease = await got(waiting)
    await b.ask(lease)
    lease.release(ANSWERED)
    assert desk.saved_text("a") == a.prompt[:-1]
    assert desk.fake.count("save") == 1


async def test_a_server_that_sleeps_is_not_woken(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.05)
    await a.turn()
    await desk.quiet()
    desk.fake.sleep()
    with desk.calls() as calls:
        await desk.fake.until(lambda: desk.fake.count("props") >= 2)
        await desk.quiet()
        await asyncio.sleep(0.2)
    assert desk.fake.wakes == 0
    assert not {"slots", "save"} & set(calls)
    assert await a.turn() is COLD


async def test_what_somebody_else_left_is_not_saved_when_idle(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.05)
    await a.turn()
    await desk.quiet()
    await desk.fake.complete("somebody else", slot=0)
    before = desk.fake.count("slots")
    await desk.fake.until(lambda: desk.fake.count("slots") > before)
    await desk.quiet()
    assert desk.fake.count("save") == 0


async def test_an_idle_save_does_not_wait_for_somebody_else(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.05)
    await a.turn()
    await desk.quiet()
    gate = asyncio.Event()
    other = asyncio.ensure_future(desk.fake.complete("somebody else", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    before = desk.fake.count("slots")
    await desk.fake.until(lambda: desk.fake.count("slots") > before)
    await desk.quiet()
    assert desk.switcher.leased() == []
    assert desk.fake.count("save") == 0
    gate.set()
    await other


async def test_an_idle_save_that_failed_is_tried_again_but_not_for_ever(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.02)
    await a.turn()
    desk.fake.fail("save", "500", times=None)
    await idle_save(desk, idle_slots.IDLE_TRIES)
    await asyncio.sleep(0.2)
    await desk.quiet()
    assert desk.fake.count("save") == idle_slots.IDLE_TRIES
    desk.fake.clear()
    assert await a.turn() is RESIDENT
    await idle_save(desk, idle_slots.IDLE_TRIES + 1)
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_an_idle_save_at_a_server_that_is_gone_is_no_harm(desk: Desk) -> None:
    a = Talk(desk, "a", idle_seconds=0.02)
    await a.turn()
    await desk.quiet()
    desk.fake.crash()
    before = len(desk.fake.calls)
    await desk.fake.until(lambda: len(desk.fake.calls) > before)
    await desk.quiet()
    assert desk.switcher.leased() == []
    desk.fake.restart()
    assert await a.turn() is COLD


# leases that nobody gives back


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_leases, "LOST_AFTER_SECONDS", 0.03)
    monkeypatch.setattr(lost_leases, "LOST_CONFIRM_SECONDS", 0.01)


async def passes(desk: Desk, until: Callable[[], bool], step: float = 0.1) -> None:
    """Time passes on the switcher's clock until something is so."""
    for _ in range(1000):
        if until():
            return
        desk.clock.now += step
        await asyncio.sleep(0.01)
    raise TimeoutError


async def test_a_lease_that_nobody_gave_back_is_found(desk: Desk, soon: None) -> None:
    a = Talk(desk, "a")
    lost = await got(desk.acquire("a"))
    await a.ask(lost)
    (waiter,) = await desk.waiters("b")
    await passes(desk, waiter.done)
    assert waiter.result().granted.outcome is COLD
    assert not lost.active
    assert desk.saved_text("a") is None  # somebody else may have come after it
    lost.release(ANSWERED)
    assert waiter.result().active


async def test_a_lease_that_was_never_used_leaves_what_was_there_before(desk: Desk, soon: None) -> None:
    a = Talk(desk, "a")
    await a.turn()
    lost = await got(desk.acquire("a"))
    desk.clock.now += lost_leases.UNSEEN_AFTER_SECONDS
    (waiter,) = await desk.waiters("b")
    await passes(desk, waiter.done)
    assert not lost.active
    assert desk.saved_text("a") == a.prompt[:-1]


async def test_it_is_not_looked_for_while_nobody_waits(desk: Desk, soon: None) -> None:
    lost = await got(desk.acquire("a"))
    await Talk(desk, "a").ask(lost)
    with desk.calls() as calls:
        for _ in range(10):
            desk.clock.now += 10
            await asyncio.sleep(0.01)
    assert calls == []
    assert lost.active


async def test_a_lease_whose_request_runs_is_not_lost(desk: Desk, soon: None) -> None:
    holder = await got(desk.acquire("a"))
    gate = asyncio.Event()
    running = asyncio.ensure_future(desk.fake.complete("a> hello", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    (waiter,) = await desk.waiters("b")
    before = desk.fake.count("slots")
    await passes(desk, lambda: desk.fake.count("slots") >= before + 5)
    assert holder.active
    assert not waiter.done()
    gate.set()
    await running
    await passes(desk, waiter.done)


async def test_a_lease_whose_request_is_still_on_its_way_is_not_lost_soon(desk: Desk, soon: None) -> None:
    a = Talk(desk, "a")
    await a.turn()
    await desk.quiet()
    holder = await got(desk.acquire("a"))
    (waiter,) = await desk.waiters("b")
    before = desk.fake.count("slots")
    await passes(desk, lambda: desk.fake.count("slots") >= before + 5, step=0.03)
    assert holder.active
    desk.clock.now += lost_leases.UNSEEN_AFTER_SECONDS
    await passes(desk, waiter.done)
    assert not holder.active


async def test_a_slot_seen_idle_once_is_not_enough(desk: Desk, soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_leases, "LOST_CONFIRM_SECONDS", 0.3)
    a = Talk(desk, "a")
    holder = await got(desk.acquire("a"))
    await a.ask(holder)
    (waiter,) = await desk.waiters("b")
    before = desk.fake.count("slots")
    await passes(desk, lambda: desk.fake.count("slots", 200) > before)
    gate = asyncio.Event()
    running = asyncio.ensure_future(desk.fake.complete(a.prompt + "?", slot=0, gate=gate))
    await passes(desk, lambda: desk.fake.count("slots") >= before + 5)
    assert holder.active
    gate.set()
    await running
    await passes(desk, waiter.done)


async def test_one_lost_lease_after_the_other_is_found(desk: Desk, soon: None) -> None:
    lease = await got(desk.acquire("a"))
    for name in "bcd":
        await Talk(desk, name).ask(lease)
        (waiter,) = await desk.waiters(name)
        await passes(desk, waiter.done)
        lease = waiter.result()
    assert lease.active
    assert lease.want.key == key("d")


async def test_one_that_is_closed_lets_requests_go_on_and_asks_nothing_more(desk: Desk) -> None:
    holder = await got(desk.acquire("a"))
    (waiter,) = await desk.waiters("b")
    await desk.switcher.aclose()
    with desk.calls() as calls:
        for late in (await got(waiter), await got(desk.acquire("c")), holder):
            assert late is holder or late.granted == Granted(UNMANAGED, "this process ends")
            late.release(ANSWERED)
        await desk.quiet()
    assert calls == []


# everything at once


def watched(fake: FakeLlamaServer) -> list[str]:
    """Notes each switch that is sent to a slot in which a request runs."""
    wrong: list[str] = []
    handle = fake.handle

    async def watching(method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if method == "POST" and target.startswith("/slots/") and fake.slots[int(target[7])].is_processing:
            wrong.append(target)
        return await handle(method, target, headers, body)

    fake.handle = watching  # type: ignore[method-assign]
    return wrong


@pytest.mark.parametrize("seed", range(3))
async def test_two_hundred_requests_and_clients_that_leave(desk: Desk, seed: int) -> None:
    chance = random.Random(seed)
    wrong = watched(desk.fake)
    talks = [Talk(desk, name) for name in "abcdefgh"]
    users = [0, 0]
    outcomes: list[Outcome] = []
    whys: set[str] = set()

    async def one(talk: Talk, number: int) -> None:
        lease = await desk.acquire(talk.name, number)
        users[number] += 1
        assert users[number] == 1
        assert not desk.fake.slots[number].is_processing
        outcomes.append(lease.granted.outcome)
        whys.add(lease.granted.why)
        ending = BROKEN
        try:
            prompt = talk.prompt + f"turn {chance.random():.3f} "
            done = await desk.fake.complete(prompt, slot=number)
            assert done.text == desk.fake.truth(prompt)
            talk.prompt = prompt + done.text if len(prompt) < 400 else f"{talk.name}> "
            ending = ANSWERED
        finally:
            users[number] -= 1
            lease.release(ending)

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.ensure_future(one(chance.choice(talks), chance.randrange(2))))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    failed = [result for result in results if isinstance(result, Exception)]
    assert failed == []
    assert wrong == []
    await desk.quiet()
    assert desk.switcher.leased() == []
    assert [desk.switcher.waiting(number) for number in (0, 1)] == [0, 0]
    assert {RESIDENT, RESTORED, COLD} <= set(outcomes)
    assert whys == {""}
    assert not list(desk.fake.save_dir.glob("*.part"))


@pytest.mark.parametrize("seed", range(3))
async def test_two_hundred_requests_at_a_server_that_fails_now_and_then(desk: Desk, seed: int, quick: None) -> None:
    chance = random.Random(seed)
    desk.clock.runs = True
    talks = [Talk(desk, name) for name in [*"abcdef", None]]
    answers = 0

    async def one(talk: Talk) -> None:
        nonlocal answers
        lease = await desk.acquire(talk.name, queue_seconds=chance.choice([0.01, 5.0]))
        ending = BROKEN
        try:
            prompt = talk.prompt + f"turn {chance.random():.3f} "
            slot = None if lease.granted.outcome is UNMANAGED else 0
            done = await desk.fake.complete(prompt, slot=slot)
            assert done.text == desk.fake.truth(prompt)
            answers += 1
            talk.prompt = prompt + done.text if len(prompt) < 400 else f"{talk.name}> "
            ending = ANSWERED
        except (asyncio.CancelledError, AssertionError):
            raise
        except Exception:
            pass  # the server went down with the request
        finally:
            lease.release(ending)

    kinds = ["500", "drop", "garbage", "hang", "wrong_types", "empty_save", "short_file", "wrong_count", "restart"]
    tasks = []
    for _ in range(200):
        tasks.append(asyncio.ensure_future(one(chance.choice(talks))))
        await asyncio.sleep(chance.choice([0, 0, 0.001]))
        if chance.random() < 0.2:
            chance.choice(tasks).cancel()
        if chance.random() < 0.1:
            desk.fake.fail(chance.choice(["slots", "save", "restore", "props"]), chance.choice(kinds))  # type: ignore[arg-type]
        if chance.random() < 0.05:
            desk.fake.clear()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert [result for result in results if isinstance(result, Exception)] == []
    assert answers > 50
    desk.fake.clear()
    await desk.quiet()
    assert desk.switcher.leased() == []
    assert desk.switcher.waiting(0) == 0
