"""The gate alone: one at a time, in turn, and left on every road."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slot_cache.start_gate import StartGate


async def turns_of_the_loop(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def entering(gate: StartGate, seconds: float = 60.0) -> asyncio.Task[bool]:
    task = asyncio.ensure_future(gate.enter(seconds))
    await turns_of_the_loop()
    return task


@pytest.fixture
def gate(tmp_path: Path) -> StartGate:
    return StartGate(tmp_path, "start")


@pytest.fixture
def other(tmp_path: Path) -> StartGate:
    """The same gate in another process."""
    return StartGate(tmp_path, "start")


async def test_one_at_a_time_in_turn(gate: StartGate) -> None:
    assert await gate.try_enter()
    waiting = [await entering(gate) for _ in range(3)]
    assert gate.occupied and gate.wanted()
    assert not await gate.try_enter()
    for number, task in enumerate(waiting):
        gate.leave()
        assert await asyncio.wait_for(task, 10)
        assert not any(later.done() for later in waiting[number + 1 :])
    assert not gate.wanted()
    gate.leave()
    assert not gate.occupied


async def test_nobody_passes_those_that_wait(gate: StartGate) -> None:
    assert await gate.try_enter()
    waiting = await entering(gate)
    gate.leave()
    assert not await gate.try_enter()
    assert await asyncio.wait_for(waiting, 10)


async def test_who_waits_too_long_is_not_inside(gate: StartGate) -> None:
    assert await gate.try_enter()
    assert not await gate.enter(0.01)
    assert not gate.wanted()
    gate.leave()
    assert await gate.try_enter()


@pytest.mark.parametrize("steps", range(5))
async def test_who_is_cancelled_leaves_it_to_the_next(gate: StartGate, steps: int) -> None:
    assert await gate.try_enter()
    leaving, staying = await entering(gate), await entering(gate)
    gate.leave()
    await turns_of_the_loop(steps)
    leaving.cancel()
    entered = (await asyncio.gather(leaving, return_exceptions=True))[0]
    if entered is True:
        gate.leave()
    assert await asyncio.wait_for(staying, 10)
    gate.leave()
    assert not gate.occupied


async def test_between_processes_too(gate: StartGate, other: StartGate) -> None:
    assert await gate.try_enter()
    assert not await other.try_enter()
    assert not other.occupied
    waiting = await entering(other)
    assert not waiting.done()
    while not gate.wanted():  # noqa: ASYNC110 - the kernel tells nobody of a thread that waits
        await asyncio.sleep(0.001)
    gate.leave()
    assert await asyncio.wait_for(waiting, 10)
    assert not await gate.try_enter()
    other.leave()
    assert await gate.try_enter()


async def test_a_wait_for_another_process_has_an_end(gate: StartGate, other: StartGate) -> None:
    assert await gate.try_enter()
    assert not await other.enter(0.01)
    assert not other.occupied
    gate.leave()
    assert await asyncio.wait_for(other.enter(10), 10)


async def test_the_time_for_both_waits_is_one(gate: StartGate, other: StartGate) -> None:
    """First those of the process are waited for, then other processes: not each of them as long as both may take."""
    assert await gate.try_enter()
    ahead = await entering(other, 60.0)
    loop = asyncio.get_running_loop()
    started = loop.time()
    behind = await entering(other, 0.4)
    ahead_gone = loop.call_later(0.3, ahead.cancel)
    assert not await asyncio.wait_for(behind, 10)
    assert loop.time() - started < 0.65
    ahead_gone.cancel()


async def test_where_there_can_be_no_lock_nobody_is_inside(tmp_path: Path) -> None:
    gate = StartGate(tmp_path / "nowhere", "start")
    with pytest.raises(OSError):
        await gate.try_enter()
    with pytest.raises(OSError):
        await gate.enter(1.0)
    assert not gate.occupied and not gate.wanted()


async def test_without_a_folder_there_is_one_process(tmp_path: Path) -> None:
    gate = StartGate(None, "start")
    assert await gate.enter(1.0)
    assert not gate.wanted()
    gate.leave()
