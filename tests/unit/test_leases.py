"""The queue for slots alone: who has which slot, who waits how long, and the locks of other processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import VirtualLoop

from slot_cache import leases
from slot_cache.leases import TURNS_IN_A_ROW, Lease, LeaseQueue, NoTurnError, Slot, Which
from slot_cache.plan import MOST_PASSES
from slot_cache.state import Ending, Resident, Want


class Counter:
    """A queue and those that come to it. What a request leaves in its slot is its conversation's."""

    def __init__(
        self, count: int | None = 2, lock_folder: Path | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.granted: list[str | None] = []
        self.asked: list[asyncio.Task[Lease]] = []
        self.no_locks: list[OSError] = []
        self.queue = LeaseQueue(
            name="llama",
            lock_folder=lock_folder,
            order=lambda lease, free: sorted(free, key=lambda slot: (not at_home(lease, slot), slot.number)),
            at_home=at_home,
            granted=lambda slot, lease: self.granted.append(lease.want.key),
            no_locks=self.no_locks.append,
            start=self.start,
            clock=clock or asyncio.get_running_loop().time,
            count=count,
        )

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def lease(self, key: str, which: Which = None) -> Lease:
        return Lease(self, self.queue.allowed(which)[0], Want(key), None, 0.0, which)

    async def take(self, key: str, which: Which = None, seconds: float = 60.0, *, first: bool = False) -> Lease:
        lease = self.lease(key, which)
        await self.queue.take(lease, seconds, first=first)
        return lease

    async def ask(self, key: str, which: Which = None, **more: Any) -> asyncio.Task[Lease]:
        """One that comes now; when this returns it has a slot or waits."""
        task = asyncio.ensure_future(self.take(key, which, **more))
        self.asked.append(task)
        await turns_of_the_loop()
        return task

    def ended(self, lease: Lease, ending: Ending, conversation: object) -> None:
        slot = lease.place
        if slot.lease is lease:
            slot.lease = None
            if ending is Ending.ANSWERED:
                slot.resident = Resident(lease.want.key)
            if not self.queue.hand_on(slot):
                self.queue.unlock(slot)

    def learned(self, lease: Lease, reused: int, computed: int, prefill_seconds: float | None) -> None:
        raise AssertionError("nobody learns here")

    async def close(self) -> None:
        self.queue.closed = True
        self.queue.dismiss("the test is over")
        for task in [*self.tasks, *self.asked]:
            task.cancel()
        await asyncio.gather(*self.tasks, *self.asked, return_exceptions=True)
        for slot in self.queue.slots.values():
            self.queue.unlock(slot)


def at_home(lease: Lease, slot: Slot) -> bool:
    return slot.resident is not None and slot.resident.key == lease.want.key


async def turns_of_the_loop(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def got(task: asyncio.Task[Lease]) -> Lease:
    return await asyncio.wait_for(task, 10)


@pytest.fixture
async def counter() -> AsyncIterator[Counter]:
    made = Counter()
    yield made
    await made.close()


@pytest.fixture
async def others(tmp_path: Path) -> AsyncIterator[tuple[Counter, Counter]]:
    """Two processes that share a server of two slots."""
    made = Counter(2, tmp_path), Counter(2, tmp_path)
    yield made
    for each in made:
        await each.close()


# one process


async def test_each_has_a_slot_of_its_own_while_there_is_one(counter: Counter) -> None:
    one, other, third = [await counter.ask(key) for key in "abc"]
    assert {(await got(one)).slot, (await got(other)).slot} == {0, 1}
    assert not third.done()
    assert counter.queue.waiting() == 1


async def test_its_own_conversation_s_slot_is_had_first(counter: Counter) -> None:
    first, second = [await got(await counter.ask(key)) for key in "ab"]
    first.release(Ending.ANSWERED)
    second.release(Ending.ANSWERED)
    assert (await got(await counter.ask("b"))).slot == 1
    assert (await got(await counter.ask("a"))).slot == 0


async def test_first_come_first_served_among_those_that_may_have_it(counter: Counter) -> None:
    holders = [await got(await counter.ask(key)) for key in "ab"]
    waiting = [await counter.ask(key, which) for key, which in [("c", 0), ("d", 1), ("e", None), ("f", 0)]]
    holders[1].release(Ending.ANSWERED)
    second = await got(waiting[1])
    second.release(Ending.ANSWERED)
    third = await got(waiting[2])
    assert (second.slot, third.slot) == (1, 1)
    assert not waiting[0].done() and not waiting[3].done()
    holders[0].release(Ending.ANSWERED)
    assert (await got(waiting[0])).slot == 0
    assert not waiting[3].done()


async def test_one_that_has_waited_before_is_the_next(counter: Counter) -> None:
    holder = await got(await counter.ask("a", 0))
    later = await counter.ask("b", 0)
    again = await counter.ask("c", 0, first=True)
    holder.release(Ending.ANSWERED)
    assert (await got(again)).slot == 0
    assert not later.done()


async def test_until_the_server_has_told_it_has_one_slot(counter: Counter) -> None:
    counter.queue.count = None
    await got(await counter.ask("a"))
    waiting = [await counter.ask(key, which) for key, which in [("b", None), ("c", range(2)), ("d", range(9))]]
    assert not any(task.done() for task in waiting)
    counter.queue.count = 3
    for number in range(3):
        counter.queue.slot(number)
    counter.queue.hand_on_all()
    assert [(await got(waiting[0])).slot, (await got(waiting[2])).slot] == [1, 2]
    assert not waiting[1].done()


async def test_a_range_is_cut_to_what_the_server_has(counter: Counter) -> None:
    numbers = [
        [slot.number for slot in counter.queue.allowed(which)] for which in (None, range(1), range(9), range(0), 7)
    ]
    assert numbers == [[0, 1], [0], [0, 1], [0], [7]]


async def test_a_lease_moves_and_its_old_slot_is_free(counter: Counter) -> None:
    lease = await got(await counter.ask("a", range(1)))
    epoch = lease.place.epoch
    assert counter.queue.move(lease, counter.queue.slot(1))
    old, new = counter.queue.slot(0), counter.queue.slot(1)
    assert (old.lease, new.lease, lease.slot) == (None, lease, 1)
    assert old.epoch > epoch
    assert not counter.queue.hand_on(old)
    assert (await got(await counter.ask("b"))).slot == 0


async def test_a_lease_does_not_move_where_it_may_not(counter: Counter) -> None:
    lease, other = [await got(await counter.ask(key)) for key in "ab"]
    assert not counter.queue.move(lease, other.place)
    other.release(Ending.UNSENT)
    other.place.yielding = True
    assert not counter.queue.move(lease, other.place)
    assert lease.slot == 0 and lease.place.lease is lease


async def test_a_slot_that_is_about_to_be_left_to_others_is_nobody_s(counter: Counter) -> None:
    slot = counter.queue.slot(0)
    slot.yielding = True
    task = await counter.ask("a", 0)
    assert not counter.queue.hand_on(slot)
    assert not task.done()
    slot.yielding = False
    assert counter.queue.hand_on(slot)
    assert (await got(task)).slot == 0


async def test_who_waits_too_long_has_no_slot(counter: Counter) -> None:
    holder = await got(await counter.ask("a", 0))
    with pytest.raises(NoTurnError, match="did not become free"):
        await counter.take("b", 0, seconds=0.01)
    assert counter.queue.waiting() == 0
    holder.release(Ending.ANSWERED)
    assert counter.queue.slot(0).lease is None


async def test_all_that_wait_can_be_dismissed(counter: Counter) -> None:
    await got(await counter.ask("a", 0))
    waiting = [await counter.ask(key, 0) for key in "bc"]
    counter.queue.dismiss("the server did not answer")
    for task in waiting:
        with pytest.raises(NoTurnError, match="the server did not answer"):
            await got(task)
    assert counter.queue.waiting() == 0


@pytest.mark.parametrize("steps", range(6))
async def test_who_is_cancelled_at_any_step_holds_nothing(counter: Counter, steps: int) -> None:
    holders = [await got(await counter.ask(key)) for key in "ab"]
    leaving, staying = await counter.ask("c"), await counter.ask("d")
    holders[0].release(Ending.ANSWERED)
    await turns_of_the_loop(steps)
    held = leaving.result() if leaving.done() else None
    leaving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await leaving
    if held is not None:
        held.release(Ending.UNSENT)
    assert (await got(staying)).slot == 0
    assert counter.queue.waiting() == 0


async def test_one_that_has_expired_is_not_served(counter: Counter) -> None:
    """Its time is over, though it has not run since."""
    holder = await got(await counter.ask("a", 0))
    late, next_one = await counter.ask("b", 0), await counter.ask("c", 0)
    leases._expire(counter.queue._waiters[0].turn, "late")
    holder.release(Ending.ANSWERED)
    with pytest.raises(NoTurnError, match="late"):
        await got(late)
    assert (await got(next_one)).slot == 0


# whoever comes and goes

WHICH: list[Which] = [None, None, range(1), range(2), range(3), 0, 1, 2]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("abcd"), st.sampled_from(WHICH)),
        st.tuples(st.just("end"), st.integers(0, 3), st.sampled_from([Ending.ANSWERED, Ending.UNSENT])),
        st.tuples(st.just("end"), st.integers(0, 3), st.just(Ending.ANSWERED)),
        st.tuples(st.just("leave"), st.integers(0, 7), st.booleans()),
        st.tuples(st.just("move"), st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 30.0]), st.none()),
    ),
    min_size=10,
    max_size=80,
)


@contextlib.contextmanager
def virtual() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    try:
        yield loop
        loop.end_all()
    finally:
        loop.close()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(count=st.integers(1, 3), steps=STEPS)
def test_the_queue_is_fair_and_never_idle(count: int, steps: list[tuple[Any, Any, Any]]) -> None:
    with virtual() as loop:
        loop.run_until_complete(_walk(count, steps))


async def _walk(count: int, steps: list[tuple[Any, Any, Any]]) -> None:
    counter = Counter(count)
    queue = counter.queue
    waiting: dict[asyncio.Task[Lease], tuple[Lease, int]] = {}
    held: list[Lease] = []
    passes: dict[asyncio.Task[Lease], int] = {}
    number = 0

    async def look() -> None:
        await turns_of_the_loop()
        had = [(task, waiting.pop(task)) for task in list(waiting) if task.done()]
        for task, (lease, came) in had:
            if task.cancelled() or task.exception() is not None:
                continue
            held.append(lease)
            for other, (earlier, before) in waiting.items():
                if before < came and lease.place in queue.allowed(earlier.which):
                    passes[other] = passes.get(other, 0) + 1
                    assert passes[other] <= MOST_PASSES
                    assert lease.want.key in told  # only one at home goes first
        places = [lease.place for lease in held]
        assert len(set(places)) == len(places), "two leases have one slot"
        assert {slot.lease for slot in queue.slots.values() if slot.lease is not None} == set(held)
        for lease, _ in waiting.values():
            assert all(slot.lease is not None for slot in queue.allowed(lease.which)), "one waits beside a free slot"
        assert queue.waiting() == len(waiting) == len(queue._waiters)

    told: set[str | None] = set()
    for kind, first, second in steps:
        told = {slot.resident.key for slot in queue.slots.values() if slot.resident is not None}
        if kind == "ask":
            lease, number = counter.lease(first, second), number + 1

            async def come(lease: Lease = lease) -> Lease:
                await queue.take(lease, 60.0)
                return lease

            waiting[asyncio.ensure_future(come())] = (lease, number)
        elif kind == "end" and held:
            lease = held.pop(first % len(held))
            told |= {lease.want.key}
            lease.release(second)
        elif kind == "leave" and waiting:
            list(waiting)[first % len(waiting)].cancel()
        elif kind == "move" and held:
            lease = held[first % len(held)]
            old = lease.place
            if second in (slot.number for slot in queue.allowed(lease.which)) and queue.move(lease, queue.slot(second)):
                assert queue.hand_on(old) or old.lease is None
        elif kind == "pass":
            await asyncio.sleep(first)
        await look()
    for lease in held:
        lease.release(Ending.UNSENT)
    held.clear()
    while waiting:
        await look()
        assert held
        held.pop().release(Ending.UNSENT)
    assert not counter.tasks


# several processes


async def test_a_slot_of_another_process_is_waited_for(others: tuple[Counter, Counter]) -> None:
    here, there = others
    holder = await got(await there.ask("a", 0))
    task = await here.ask("b", 0)
    assert not task.done()
    holder.release(Ending.ANSWERED)
    assert (await got(task)).slot == 0
    assert here.queue.slot(0).unread


async def test_whichever_slot_is_free_first_is_had(others: tuple[Counter, Counter]) -> None:
    here, there = others
    holders = [await got(await there.ask(key)) for key in "ab"]
    task = await here.ask("c")
    holders[1].release(Ending.ANSWERED)
    lease = await got(task)
    assert lease.slot == 1
    lease.release(Ending.ANSWERED)
    holders[0].release(Ending.ANSWERED)
    for each in ("d", "e"):  # what came for nobody was let go
        await got(await there.ask(each))


async def test_those_that_wait_have_it_one_after_the_other(others: tuple[Counter, Counter]) -> None:
    here, there = others
    holder = await got(await there.ask("a", 0))
    waiting = [await here.ask(key, 0) for key in "bcd"]
    assert len(here.tasks) == 1  # one waits for all
    holder.release(Ending.ANSWERED)
    for task in waiting:
        (await got(task)).release(Ending.ANSWERED)
    assert here.granted == ["b", "c", "d"]
    assert (await got(await there.ask("a", 0))).slot == 0


async def test_one_that_comes_while_the_lock_arrives_does_not_go_first(others: tuple[Counter, Counter]) -> None:
    here, there = others
    holder = await got(await there.ask("a", 0))
    first = await here.ask("b", 0)
    holder.release(Ending.ANSWERED)
    second = await here.ask("c", 0)
    (await got(first)).release(Ending.ANSWERED)
    (await got(second)).release(Ending.ANSWERED)
    assert here.granted == ["b", "c"]


async def test_another_process_has_its_turn(others: tuple[Counter, Counter]) -> None:
    here, there = others
    lease = await got(await here.ask("a", 0))
    task = await there.ask("b", 0)
    await _until(lease.place.lock.contended)
    turns = 0
    while not here.queue.must_yield(lease.place):
        turns += 1
        waiting = await here.ask("a", 0)
        lease.release(Ending.ANSWERED)
        lease = await got(waiting)
    assert turns == TURNS_IN_A_ROW
    assert not task.done()
    lease.release(Ending.ANSWERED)  # nobody waits here
    assert (await got(task)).slot == 0


async def test_nobody_yields_to_nobody(others: tuple[Counter, Counter]) -> None:
    here, _ = others
    lease = await got(await here.ask("a", 0))
    for _ in range(3 * TURNS_IN_A_ROW):
        waiting = await here.ask("a", 0)
        lease.release(Ending.ANSWERED)
        lease = await got(waiting)
    assert not here.queue.must_yield(lease.place)


async def test_threads_are_few_however_many_have_waited(others: tuple[Counter, Counter]) -> None:
    """A long answer over there; here requests come, wait a moment for whatever slot is free, and have the other one."""
    here, there = others
    await got(await there.ask("a", 0))
    before = threading.active_count()
    lease = await got(await here.ask("b"))
    for _ in range(20):
        waiting = await here.ask("c")
        lease.release(Ending.ANSWERED)
        lease = await got(waiting)
    assert lease.slot == 1
    assert threading.active_count() <= before + 1


async def test_a_slot_that_was_waited_for_in_vain_is_free_for_the_next(others: tuple[Counter, Counter]) -> None:
    here, there = others
    holder = await got(await there.ask("a", 0))
    leaving = await here.ask("b", 0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    later = await here.ask("c", 0)
    holder.release(Ending.ANSWERED)
    (await got(later)).release(Ending.ANSWERED)
    assert here.granted == ["c"]
    assert (await got(await there.ask("a", 0))).slot == 0


async def test_a_process_that_is_killed_leaves_its_slots(others: tuple[Counter, Counter]) -> None:
    here, there = others
    await got(await there.ask("a", 0))
    task = await here.ask("b", 0)
    there.queue.slot(0).lock.release()  # as the kernel does
    assert (await got(task)).slot == 0


async def test_where_there_can_be_no_locks_there_are_slots(tmp_path: Path) -> None:
    counter = Counter(2, tmp_path / "nowhere")
    lease = await got(await counter.ask("a", 0))
    waiting = await counter.ask("b", 0)
    assert counter.no_locks and not waiting.done()
    lease.release(Ending.ANSWERED)
    assert (await got(waiting)).slot == 0
    await counter.close()


async def test_a_closed_queue_starts_nothing(others: tuple[Counter, Counter]) -> None:
    here, there = others
    await got(await there.ask("a", 0))
    here.queue.closed = True
    task = await here.ask("b", 0)
    assert not here.tasks
    here.queue.dismiss("this process ends")
    with pytest.raises(NoTurnError):
        await got(task)


async def test_a_scout_that_is_ended_before_it_began_is_not_waited_for(others: tuple[Counter, Counter]) -> None:
    here, there = others
    holder = await got(await there.ask("a", 0))
    here.asked.append(asyncio.ensure_future(here.take("b", 0)))
    await asyncio.sleep(0)  # now it has called for a scout, which has not begun
    (scout,) = here.tasks
    scout.cancel()
    await turns_of_the_loop()
    holder.release(Ending.ANSWERED)
    assert (await got(here.asked[0])).slot == 0


async def _until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - the kernel tells nobody of a thread that waits
            await asyncio.sleep(0.001)

    await asyncio.wait_for(wait(), 10)
