"""The loop for tests whose clock jumps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from virtual_time import START, Stuck, VirtualLoop


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.end_all()
    loop.close()


def test_hours_pass_in_no_time_and_to_the_second(loop: VirtualLoop) -> None:
    loop.let_pass(7200.0)
    assert loop.time() == START + 7200.0


def test_a_wait_for_a_rounding_s_rest_of_a_time_moves_the_clock(loop: VirtualLoop) -> None:
    """However short, and whatever else is ready: who waits until a time comes to it, in one wait."""

    async def waits() -> int:
        end, times = loop.time() + 2e-13, 0
        while (left := end - loop.time()) > 0:
            loop.call_soon(int)  # the loop does not come to rest
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), left)
            times += 1
        return times

    assert loop.run_until_complete(waits()) == 1


def test_a_timer_is_not_early(loop: VirtualLoop) -> None:
    times: list[float] = []
    loop.call_later(1e-10, lambda: times.append(loop.time()))
    loop.tick(100)
    assert times == []
    loop.let_pass(1e-9)
    assert times == [START + 1e-10]


def test_a_loop_in_which_nothing_will_happen_says_so(loop: VirtualLoop) -> None:
    with pytest.raises(Stuck, match="nothing"):
        loop.run_until_complete(loop.create_future())


def test_a_loop_that_never_comes_to_rest_says_so(loop: VirtualLoop) -> None:
    def spin() -> None:
        loop.call_soon(spin)

    spin()
    with pytest.raises(Stuck, match="round and round"):
        loop.let_pass(1.0)
