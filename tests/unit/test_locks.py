"""The lock between processes: with real processes, of which some die."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slot_cache import locks
from slot_cache.locks import SlotLock

PATIENCE = 30.0
"""Seconds to wait for what must come; it comes in milliseconds."""

_CHILD = """
import asyncio, sys, time
from pathlib import Path
from slot_cache.locks import SlotLock

lock = SlotLock(Path(sys.argv[1]), sys.argv[2])
counter = Path(sys.argv[1]) / "counter"


async def count(times):
    for _ in range(times):
        assert await lock.acquire(60)
        number = int(counter.read_text())
        await asyncio.sleep(0)
        counter.write_text(str(number + 1))
        lock.release()


async def turns(seconds):
    taken, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        assert await lock.acquire(60)
        taken += 1
        lock.release()
    return taken


for line in sys.stdin:
    name, *args = line.split()
    if name == "acquire":
        answer = asyncio.run(lock.acquire(float(args[0])))
    elif name == "count":
        answer = asyncio.run(count(int(args[0])))
    elif name == "turns":
        answer = asyncio.run(turns(float(args[0])))
    elif name == "try":
        answer = lock.try_acquire()
    elif name == "contended":
        answer = lock.contended()
    elif name == "release":
        answer = lock.release()
    print(answer, flush=True)
"""


class Other:
    """Another process with the same lock."""

    def __init__(self, folder: Path, name: str = "slot") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(folder), name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.pid = self._process.pid

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")

    def answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        self.tell(command)
        return self.answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Other]]:
    started: list[Other] = []

    def one() -> Other:
        started.append(Other(tmp_path))
        return started[-1]

    yield one
    for other in started:
        other.close()


@pytest.fixture
def other(start: Callable[[], Other]) -> Other:
    return start()


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[SlotLock]:
    made = SlotLock(tmp_path, "slot")
    yield made
    made.release()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[SlotLock]:
    """Another lock of this process on the same files: to the kernel it is as another process."""
    made = SlotLock(tmp_path, "slot")
    yield made
    made.release()


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Of what another process or thread does nobody tells; it is looked at."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


async def until_async(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.002)


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slot-cache-lock"]


def open_files() -> int:
    """How many files this process has open; 0 where that cannot be seen."""
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def _keep_busy(seconds: float) -> None:
    """Block the loop that calls it."""
    time.sleep(seconds)


def is_free(lock: SlotLock) -> bool:
    """Whether it can be had now; it is not kept."""
    if not lock.try_acquire():
        return False
    lock.release()
    return True


# one at a time


async def test_only_one_process_has_it(lock: SlotLock, other: Other) -> None:
    assert await lock.acquire(PATIENCE)
    assert other.ask("try") == "False"
    assert other.ask("acquire 0.05") == "False"
    lock.release()
    assert other.ask("acquire 30") == "True"
    assert not lock.try_acquire()
    assert not await lock.acquire(0.05)
    assert other.ask("release") == "None"
    assert await lock.acquire(PATIENCE)


async def test_locks_of_other_names_are_others(tmp_path: Path, lock: SlotLock) -> None:
    assert lock.try_acquire()
    another = SlotLock(tmp_path, "slot-2")
    assert another.try_acquire()
    another.release()


def test_what_two_processes_count_under_it_is_not_lost(tmp_path: Path, start: Callable[[], Other]) -> None:
    (tmp_path / "counter").write_text("0")
    one, two = start(), start()
    one.tell("count 150")
    two.tell("count 150")
    assert one.answer() == two.answer() == "None"
    assert (tmp_path / "counter").read_text() == "300"


async def test_giving_back_what_is_not_held_does_nothing(lock: SlotLock, second: SlotLock) -> None:
    lock.release()
    assert second.try_acquire()
    lock.release()
    assert not lock.try_acquire()
    second.release()
    second.release()
    assert lock.try_acquire()


def test_its_files_are_for_the_owner_only(tmp_path: Path, lock: SlotLock) -> None:
    umask = os.umask(0)
    try:
        assert lock.try_acquire()
    finally:
        os.umask(umask)
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()} == {
        "slot.lock": 0o600,
        "slot.turn": 0o600,
    }


def test_a_process_that_is_started_meanwhile_does_not_inherit_it(lock: SlotLock, second: SlotLock) -> None:
    assert lock.try_acquire()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    lock.release()
    assert second.try_acquire()
    child.communicate(b"\n", timeout=PATIENCE)


async def test_without_a_folder_it_is_always_free() -> None:
    one, two = SlotLock(None, "slot"), SlotLock(None, "slot")
    assert await one.acquire(0) and two.try_acquire() and await two.acquire(0)
    assert not one.contended()
    one.release()
    two.release()


# a process that dies


async def test_a_holder_that_is_killed_frees_it(lock: SlotLock, other: Other) -> None:
    assert other.ask("acquire 30") == "True"
    waits = asyncio.create_task(lock.acquire(PATIENCE))
    await until_async(lambda: len(waiting_threads()) == 1)
    assert not waits.done()
    other.kill()
    assert await waits is True


async def test_one_that_is_killed_while_it_waits_is_in_nobody_s_way(lock: SlotLock, start: Callable[[], Other]) -> None:
    assert lock.try_acquire()
    dies, lives = start(), start()
    dies.tell("acquire 30")
    await until_async(lock.contended)
    lives.tell("acquire 30")
    dies.kill()
    lock.release()
    assert lives.answer() == "True"


# waiting


def _switches(pid: int) -> int:
    """How often the threads of a process were woken up so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "status").read_text().splitlines():
            if "ctxt_switches" in line:
                total += int(line.split()[1])
    return total


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_one_that_waits_sleeps(lock: SlotLock, other: Other) -> None:
    assert lock.try_acquire()
    other.tell("acquire 30")
    until(lock.contended)
    time.sleep(0.2)  # it is on its way from the turnstile to the lock
    before = _switches(other.pid)
    time.sleep(0.6)  # nothing is to happen
    assert _switches(other.pid) - before <= 2
    lock.release()
    assert other.answer() == "True"


async def test_it_comes_as_soon_as_it_is_free(lock: SlotLock, second: SlotLock) -> None:
    assert second.try_acquire()
    waits = asyncio.create_task(lock.acquire(PATIENCE))
    await until_async(second.contended)
    second.release()
    started = time.monotonic()
    assert await waits is True
    assert time.monotonic() - started < 5
    assert not second.try_acquire()


async def test_the_wait_has_an_end_and_leaves_nothing_behind(lock: SlotLock, second: SlotLock, other: Other) -> None:
    assert second.try_acquire()
    started = time.monotonic()
    assert await lock.acquire(0.1) is False
    assert 0.05 < time.monotonic() - started < 10
    lock.release()  # it has nothing
    second.release()
    await until_async(lambda: not waiting_threads())
    assert other.ask("try") == "True"


async def test_one_that_came_too_late_may_ask_again(lock: SlotLock, second: SlotLock) -> None:
    assert second.try_acquire()
    assert await lock.acquire(0.02) is False
    again = asyncio.create_task(lock.acquire(PATIENCE))
    await asyncio.sleep(0)
    second.release()
    assert await again is True
    assert not second.try_acquire()
    lock.release()
    await until_async(lambda: not waiting_threads())
    assert is_free(second)


async def test_many_that_wait_get_it_one_after_the_other(tmp_path: Path) -> None:
    inside = 0

    async def use(number: int) -> None:
        nonlocal inside
        lock = SlotLock(tmp_path, "slot")
        assert await lock.acquire(PATIENCE)
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        inside -= 1
        lock.release()

    await asyncio.gather(*(use(number) for number in range(30)))
    await until_async(lambda: not waiting_threads())


def test_two_processes_take_turns(start: Callable[[], Other]) -> None:
    one, two = start(), start()
    assert one.ask("contended") == two.ask("contended") == "False"  # both are there
    one.tell("turns 1.5")
    two.tell("turns 1.5")
    taken = sorted([int(one.answer()), int(two.answer())])
    assert taken[0] >= 10
    assert taken[0] >= 0.2 * taken[1], taken


async def test_one_that_takes_it_again_at_once_comes_after_one_that_waits(lock: SlotLock, other: Other) -> None:
    for _ in range(10):
        assert await lock.acquire(PATIENCE)
        other.tell("acquire 30")
        await until_async(lock.contended)
        lock.release()
        mine = asyncio.create_task(lock.acquire(PATIENCE))
        assert await asyncio.to_thread(other.answer) == "True"
        assert not mine.done()
        assert other.ask("release") == "None"
        assert await mine is True
        lock.release()


# who waits


async def test_it_tells_whether_somebody_waits(lock: SlotLock, other: Other) -> None:
    assert await lock.acquire(PATIENCE)
    assert not lock.contended()
    other.tell("acquire 30")
    await until_async(lock.contended)
    assert lock.contended()  # asking does not change it
    lock.release()
    assert other.answer() == "True"
    assert other.ask("contended") == "False"


async def test_asking_who_waits_is_in_nobody_s_way(lock: SlotLock, second: SlotLock) -> None:
    assert lock.try_acquire()
    for _ in range(100):
        assert not lock.contended()
    lock.release()
    assert second.try_acquire()


# cancelled


async def test_one_that_is_cancelled_while_it_waits_does_not_get_it(
    lock: SlotLock, second: SlotLock, other: Other
) -> None:
    assert second.try_acquire()
    waits = asyncio.create_task(lock.acquire(PATIENCE))
    await until_async(second.contended)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    second.release()
    await until_async(lambda: not waiting_threads())
    assert other.ask("try") == "True"


@pytest.mark.parametrize("delivered", [False, True], ids=["before the delivery", "after the delivery"])
async def test_one_that_is_cancelled_in_the_moment_of_delivery_does_not_keep_it(
    lock: SlotLock, second: SlotLock, other: Other, delivered: bool
) -> None:
    assert second.try_acquire()
    waits = asyncio.create_task(lock.acquire(PATIENCE))
    await until_async(second.contended)
    (thread,) = waiting_threads()
    second.release()
    thread.join(PATIENCE)  # it is ours now, and the loop has not been told: this blocks it
    assert not second.try_acquire()
    if delivered:
        asyncio.get_running_loop().call_soon(waits.cancel)  # comes after the result is set, before the task goes on
    else:
        waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert other.ask("try") == "True"


async def test_a_time_out_in_the_moment_of_delivery_does_not_keep_it(
    lock: SlotLock, second: SlotLock, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert second.try_acquire()
    block = locks._block
    entered = threading.Event()

    def slow(paths: tuple[Path, Path]) -> int:
        entered.set()
        return block(paths)

    monkeypatch.setattr(locks, "_block", slow)
    waits = asyncio.create_task(lock.acquire(0.05))
    await asyncio.sleep(0)
    assert entered.wait(PATIENCE)
    (thread,) = waiting_threads()
    second.release()
    thread.join(PATIENCE)
    _keep_busy(0.1)  # until the time is over, too
    got = await waits
    assert other.ask("try") == str(not got)
    lock.release()


async def test_cancelling_again_and_again_leaves_nothing_locked(lock: SlotLock, second: SlotLock) -> None:
    for number in range(30):
        assert await second.acquire(PATIENCE)
        waits = asyncio.create_task(lock.acquire(PATIENCE))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        if number % 2:
            await until_async(second.contended)
        second.release()
        for _ in range(number % 5):
            await asyncio.sleep(0)
        waits.cancel()
        try:
            assert await waits is True
            lock.release()
        except asyncio.CancelledError:
            pass
    await until_async(lambda: not waiting_threads())
    assert is_free(second)


# a loop that is closed


def test_one_whose_loop_was_closed_does_not_get_it(lock: SlotLock, second: SlotLock, other: Other) -> None:
    assert second.try_acquire()
    loop = asyncio.new_event_loop()
    waits = loop.create_task(lock.acquire(PATIENCE))
    loop.run_until_complete(until_async(second.contended))
    loop.close()
    second.release()
    until(lambda: not waiting_threads())
    assert other.ask("try") == "True"
    assert not waits.done()
    waits._log_destroy_pending = False  # type: ignore[attr-defined]


def test_one_whose_loop_is_closed_with_the_lock_on_its_way_does_not_keep_it(
    lock: SlotLock, second: SlotLock, other: Other
) -> None:
    assert second.try_acquire()
    loop = asyncio.new_event_loop()
    waits = loop.create_task(lock.acquire(PATIENCE))
    loop.run_until_complete(until_async(second.contended))
    (thread,) = waiting_threads()
    second.release()
    thread.join(PATIENCE)
    loop.close()
    waits._log_destroy_pending = False  # type: ignore[attr-defined]
    del waits
    gc.collect()  # the lock is freed with the last that knows of it
    until(lambda: other.ask("try") == "True", 2.0)


# no files to lock


@contextlib.contextmanager
def _unwritable() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # root may write everywhere
        try:
            yield folder
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)


@contextlib.contextmanager
def _missing() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "missing"


@contextlib.contextmanager
def _file() -> Iterator[Path]:
    with tempfile.NamedTemporaryFile() as file:
        yield Path(file.name)


@pytest.mark.parametrize("where", [_missing, _unwritable, _file], ids=lambda where: where.__name__.strip("_"))
async def test_where_no_file_can_be_locked_it_says_so(
    where: Callable[[], contextlib.AbstractContextManager[Path]],
) -> None:
    with where() as folder:
        lock = SlotLock(folder, "slot")
        with pytest.raises(OSError):
            await lock.acquire(PATIENCE)
        with pytest.raises(OSError):
            lock.try_acquire()
        assert not lock.contended()
        lock.release()


async def test_a_failure_while_it_waits_is_told(
    lock: SlotLock, second: SlotLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert second.try_acquire()

    def fails(paths: tuple[Path, Path]) -> int:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks, "_block", fails)
    with pytest.raises(OSError, match="No locks available"):
        await lock.acquire(PATIENCE)
    second.release()
    assert is_free(lock)


async def test_a_file_system_without_locks_is_an_oserror(lock: SlotLock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise locks.portalocker.exceptions.LockException("no locks here")

    monkeypatch.setattr(locks.portalocker, "lock", refuses)
    before = open_files()
    for _ in range(5):
        with pytest.raises(OSError):
            lock.try_acquire()
    assert open_files() == before


async def test_no_descriptor_is_left_open(lock: SlotLock, second: SlotLock) -> None:
    before = open_files()
    for _ in range(10):
        assert second.try_acquire()
        assert not lock.try_acquire()
        assert await lock.acquire(0.001) is False
        assert second.contended() in (True, False)
        second.release()
        await until_async(lambda: not waiting_threads())
    assert open_files() == before


def test_an_owner_knows_that_nobody_has_had_the_lock_since(tmp_path: Path) -> None:
    one, other = SlotLock(tmp_path, "slot"), SlotLock(tmp_path, "slot")
    assert not one.touched()  # nobody has ever had it
    known = []
    for owner in (one, one, other, one, one, other, other):
        assert owner.try_acquire()
        known.append(owner.unshared)
        owner.release()
    assert known == [False, True, False, False, True, False, True]
    assert one.touched()
    assert not other.touched()


def test_an_owner_that_has_the_lock_now_has_touched_it(tmp_path: Path) -> None:
    one, other = SlotLock(tmp_path, "slot"), SlotLock(tmp_path, "slot")
    assert one.try_acquire()
    one.release()
    assert other.try_acquire()
    assert one.touched()
    other.release()
    assert one.touched()


def test_a_mark_that_cannot_be_written_counts_as_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    lock = SlotLock(tmp_path, "slot")
    monkeypatch.setattr("os.pwrite", full)
    for _ in range(3):
        assert lock.try_acquire()
        assert not lock.unshared
        lock.release()


def test_without_a_folder_nobody_else_has_the_lock() -> None:
    lock = SlotLock(None, "slot")
    assert lock.try_acquire()
    assert lock.unshared
    assert not lock.touched()


def test_whether_another_has_it_is_seen_without_a_trace(tmp_path: Path) -> None:
    mine, other = SlotLock(tmp_path, "s"), SlotLock(tmp_path, "s")
    assert not mine.taken()
    assert other.try_acquire()
    assert mine.taken()
    other.release()
    assert not mine.taken()
    assert not other.touched()
    assert not SlotLock(None, "s").taken()
    assert not SlotLock(tmp_path / "nowhere", "s").taken()
