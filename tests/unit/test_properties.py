"""The rules of the design, whatever clients, servers, files and processes do: random steps in the small world."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from slot_world import DOWN_SECONDS, SECRET, Client, Session, World

STEPS: Counter[str] = Counter()

SYSTEM = {"role": "system", "content": f"{SECRET} " * 30}
"""What conversations that are known by what they say have in common."""

durations = st.sampled_from([0.0, 0.0, 0.002, 0.005, 0.01, 0.03, 0.1, 0.5, 2.0])
ticks = st.integers(0, 40)
FAULTS = [
    *[
        (where, kind)
        for where in ("save", "restore", "erase", "slots", "props", "models")
        for kind in (
            "drop",
            "drop_after",
            "refuse",
            "hang",
            "late",
            "500",
            "503",
            "garbage",
            "wrong_shape",
            "wrong_types",
        )
    ],
    *[("save", kind) for kind in ("empty_save", "short_file", "wrong_count", "crash")],
    *[(where, "restart") for where in ("save", "restore", "slots", "props", "chat")],
    *[("chat", kind) for kind in ("drop", "drop_after", "refuse", "late", "500", "503", "garbage", "cut", "crash")],
    *[("*", kind) for kind in ("drop", "refuse", "hang", "late", "500")],
    *[("health", kind) for kind in ("hang", "500")],
]


class Slots(RuleBasedStateMachine):
    """What can happen. The world checks."""

    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=self.root))
        self.world: World = None  # type: ignore[assignment]

    @initialize(
        slots=st.sampled_from([1, 2, 2, 3, 4]),
        mode=st.sampled_from(["one", "auto", "some"]),
        workers=st.sampled_from([1, 1, 2]),
        idle_seconds=st.sampled_from([0.0, 1.0]),
        max_files=st.sampled_from([0, 0, 2]),
        verify=st.sampled_from(["fast", "full"]),
        clears_idle_slots=st.booleans(),
        latency=st.sampled_from([0.0, 0.003]),
        visible=st.sampled_from([True, True, True, False]),
        reuse=st.sampled_from(["dense", "dense", "dense", "swa", "hybrid"]),
    )
    def begin(self, **options: Any) -> None:
        self.world = World(self.folder, **options)

    # clients

    @rule(
        number=st.integers(0, 5),
        worker=st.integers(0, 1),
        edit=st.sampled_from(["grow", "grow", "grow", "same", "change", "shrink", "anew", "too long"]),
        length=st.integers(5, 90),
        n_predict=st.integers(1, 5),
        stream=st.booleans(),
        think=st.sampled_from([0.0, 0.0, 0.05]),
        after=durations,
        ticks=ticks,
    )
    def ask(
        self,
        number: int,
        worker: int,
        edit: str,
        length: int,
        n_predict: int,
        stream: bool,
        think: float,
        after: float,
        ticks: int,
    ) -> None:
        if len(self.world.clients) >= 6:
            return
        session = self.world.sessions[number]
        messages = self._edited(session, edit, length)
        self.world.ask(
            self._worker(worker),
            session,
            session.route,
            session.owner,
            messages,
            n_predict=n_predict,
            stream=stream,
            think=think,
        )
        self._step(after, ticks)

    @rule(
        numbers=st.lists(st.integers(0, 5), min_size=2, max_size=6), worker=st.integers(0, 1), length=st.integers(5, 60)
    )
    def take_turns(self, numbers: list[int], worker: int, length: int) -> None:
        """Conversations that go on one after the other, each answered before the next."""
        self.world.settle()
        for number in numbers:
            session = self.world.sessions[number]
            messages = self._edited(session, "grow", length)
            self.world.ask(
                self._worker(worker),
                session,
                session.route,
                session.owner,
                messages,
                n_predict=2,
                stream=False,
                think=0.0,
            )
            self.world.settle()
            self._step(0.0, 0)

    def _edited(self, session: Session, edit: str, length: int) -> list[Any]:
        messages = list(session.messages)
        new = {"role": "user", "content": self.world.text(length)}
        if edit == "anew" or not messages or sum(len(m["content"]) for m in messages) > 700:
            messages = [new] if session.known_by == "key" else [SYSTEM, new]
        elif edit == "grow":
            messages.append(new)
        elif edit == "change":
            messages[-2 if len(messages) > 1 else 0] = new
        elif edit == "shrink":
            messages = [*messages[: max(len(messages) // 2 - 1, 0)], new]
        elif edit == "too long":
            return [*messages, {"role": "user", "content": self.world.text(1200)}]
        if messages[-1]["role"] == "assistant":
            messages.append(new)
        session.messages = messages
        return messages

    @rule(
        route=st.integers(0, 2),
        worker=st.integers(0, 1),
        owner=st.sampled_from(["", "k1", "k2"]),
        length=st.integers(5, 90),
        after=durations,
        ticks=ticks,
    )
    def ask_without_a_session(self, route: int, worker: int, owner: str, length: int, after: float, ticks: int) -> None:
        if len(self.world.clients) >= 6:
            return
        messages = [{"role": "user", "content": self.world.text(length)}]
        self.world.ask(
            self._worker(worker),
            None,
            self.world.routes[route],
            owner,
            messages,
            n_predict=2,
            stream=False,
            think=0.0,
        )
        self._step(after, ticks)

    @rule(slot=st.sampled_from([None, 0, 1, 3]), length=st.integers(1, 120), after=durations, ticks=ticks)
    def stranger(self, slot: int | None, length: int, after: float, ticks: int) -> None:
        if len(self.world.strangers) < 3:
            self.world.stranger(self.world.text(length), slot, 2)
        self._step(after, ticks)

    @precondition(lambda self: self.world.clients)
    @rule(which=st.integers(0, 5), ticks=ticks)
    def cancel(self, which: int, ticks: int) -> None:
        client = self._client(which)
        if client.task is not None:
            client.task.cancel()
        self._step(0.0, ticks)

    @precondition(lambda self: self.world.clients)
    @rule(which=st.integers(0, 5))
    def vanish(self, which: int) -> None:
        self._client(which).vanishes = True

    @rule(seconds=durations, ticks=ticks)
    def wait(self, seconds: float, ticks: int) -> None:
        self._step(seconds, ticks)

    @rule()
    def settle(self) -> None:
        self.world.settle()
        self._step(0.0, 0)

    @rule(seconds=st.sampled_from([1.5, 6.0, 40.0, 700.0]))
    def long_wait(self, seconds: float) -> None:
        self._step(seconds, 0)

    # the server

    @rule(
        fault=st.sampled_from(FAULTS),
        times=st.sampled_from([1, 1, 1, 2, 3]),
        seconds=st.sampled_from([0.05, 1.0, 3.0]),
    )
    def fault(self, fault: tuple[Any, Any], times: int, seconds: float) -> None:
        if fault[1] == "short_file" and not self.world.visible:
            return  # nothing tells of it
        if len(self.world.fake._faults) < 3:
            self.world.fake.fail(fault[0], fault[1], times, seconds=seconds)

    @rule()
    def no_more_faults(self) -> None:
        self.world.fake.clear()

    @rule()
    def restart(self) -> None:
        self.world.fake.restart()

    @rule(weights=st.sampled_from(["one", "one", "two"]))
    def another_model(self, weights: str) -> None:
        self.world.fake.crash()
        self._step(DOWN_SECONDS, 0)
        if not self.world.fake.is_up:
            self.world.bring_up(weights)

    @rule()
    def crash(self) -> None:
        self.world.fake.crash()

    @rule()
    def sleep(self) -> None:
        if self.world.may_sleep():
            self.world.fake.sleep()

    @rule(slot=st.integers(0, 3))
    def clear_slot(self, slot: int) -> None:
        found = self.world.fake.slots[slot % len(self.world.fake.slots)]
        if not found.is_processing:
            found.clear()

    # files

    @precondition(lambda self: self.world.good)
    @rule(
        which=st.integers(0, 5),
        how=st.sampled_from(["cut", "head", "tail", "middle", "empty", "gone", "longer", "junk"]),
    )
    def spoil(self, which: int, how: str) -> None:
        key = sorted(self.world.good)[which % len(self.world.good)]
        file = self.world.saves / f"{key}.bin"
        data = file.read_bytes() if file.exists() else b""
        if how == "gone" or not data:
            file.unlink(missing_ok=True)
        else:
            places = {"head": 15, "tail": len(data) - 1, "middle": len(data) // 2}
            if how in places:
                at = places[how] % len(data)
                data = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
            else:
                data = {"cut": data[: len(data) // 2], "empty": b"", "longer": data + b"x", "junk": b"junk"}[how]
            file.write_bytes(data)
        self.world.tampered(key)

    @precondition(lambda self: len(self.world.good) > 1)
    @rule(which=st.integers(0, 5))
    def swap_files(self, which: int) -> None:
        keys = sorted(self.world.good)
        one, other = keys[which % len(keys)], keys[(which + 1) % len(keys)]
        first, second = (self.world.saves / f"{key}.bin" for key in (one, other))
        if first.exists() and second.exists():
            between = self.world.saves / "between"
            first.rename(between)
            second.rename(first)
            between.rename(second)
            self.world.tampered(one)
            self.world.tampered(other)

    # the proxy

    @rule(worker=st.integers(0, 1), killed=st.booleans())
    def end_worker(self, worker: int, killed: bool) -> None:
        # where its files cannot be seen, nothing tells what a save was that a process did not live to record
        killed = killed and self.world.visible
        self.world.replace_worker(worker % len(self.world.workers), killed=killed)
        self._step(0.0, 0)

    def _worker(self, number: int) -> Any:
        return self.world.workers[number % len(self.world.workers)]

    def _client(self, which: int) -> Client:
        return self.world.clients[which % len(self.world.clients)]

    def _step(self, seconds: float, ticks: int) -> None:
        STEPS["steps"] += 1
        self.world.tick(ticks)
        self.world.run(seconds)

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            self.world.check_all_over()
        finally:
            self.world.close()
            STEPS.update(self.world.stats)
            shutil.rmtree(self.folder, ignore_errors=True)


EXAMPLES = os.environ.get("SLOT_CACHE_EXAMPLES")
"""Always the same steps, that a test run says something of the code and not of luck. Other ones when so many examples are
asked for; `--hypothesis-seed=N` chooses them."""


def test_the_rules_hold_whatever_happens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = type("Slots", (Slots,), {"root": tmp_path})
    STEPS.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            derandomize=EXAMPLES is None,
            database=None,
            max_examples=int(EXAMPLES or "170"),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate],
            report_multiple_bugs=False,
        ),
    )
    with capsys.disabled():
        print(f"\n{dict(STEPS)}")
    assert EXAMPLES is not None or STEPS["steps"] >= 4000
