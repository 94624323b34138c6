"""An event loop for tests whose clock stands still while there is work, and jumps when there is none.

Hours pass in no time, nothing is random: what runs in "threads" runs in the loop, one step later. A loop in which nothing
will ever happen again does not wait, and one that never comes to rest does not run on: it raises `Stuck`.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import selectors
from collections.abc import Callable
from typing import Any

START = 1000.0

TURNS_AT_ONE_TIME = 100_000
"""Work in which the clock stands still for so many turns of the loop has no end."""


class Stuck(Exception):
    """Whatever is waited for will never come."""


class _Selector(selectors.DefaultSelector):
    loop: VirtualLoop
    turns = 0
    last = START

    def select(self, timeout: float | None = None) -> Any:
        self.turns = self.turns + 1 if self.last == self.loop.now else 0
        self.last = self.loop.now
        if self.turns > TURNS_AT_ONE_TIME:
            self.turns = 0
            raise Stuck(f"at {self.last} something goes round and round")
        found = super().select(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if timeout is None:
            raise Stuck("nothing will ever happen again")
        scheduled = self.loop._scheduled  # type: ignore[attr-defined]
        self.loop.now = max(self.loop.now + timeout, scheduled[0].when() if scheduled else 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module.

    Attributes:
        now: the time.
        is_dead: asked with the context of each call for a thread, before it is made and before its answer is told;
            where it says yes, neither happens.
    """

    def __init__(self) -> None:
        self.now = START
        self.is_dead: Callable[[contextvars.Context], bool] = lambda context: False
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    @property
    def _clock_resolution(self) -> float:
        """Timers are due when it is their time and not a nanosecond before: who waits for what a rounding has left of a
        time must see the clock move, or it waits again and again."""
        return math.ulp(self.now)

    @_clock_resolution.setter
    def _clock_resolution(self, value: float) -> None:
        """asyncio sets that of the real clock."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            if self.is_dead(context):
                return
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_soon(run)
        return future

    def let_pass(self, seconds: float) -> None:
        """Run for so long."""
        self.run_until_complete(asyncio.sleep(seconds))

    def tick(self, times: int) -> None:
        """Run whatever is ready, so many times."""

        async def ticks() -> None:
            for _ in range(times):
                await asyncio.sleep(0)

        self.run_until_complete(ticks())

    def end_all(self) -> None:
        """Cancel every task until none is left."""
        for _ in range(50):
            tasks = asyncio.all_tasks(self)
            if not tasks:
                return
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1.0))
        raise AssertionError(f"tasks that cannot be cancelled: {asyncio.all_tasks(self)}")
