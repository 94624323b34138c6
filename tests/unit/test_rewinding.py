"""Models whose restores are reused only where the slot was rewound before its save: what is learned of them, and the rewind."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import respx
from test_switcher import ANSWERED, BASE, BROKEN, COLD, RESIDENT, RESTORED, TAG, Clock, got, key

from fake_llama_server import Call, Completion, FakeLlamaServer
from slot_cache import llama_server as llama_server_module
from slot_cache import report, slot_actions
from slot_cache.folder import CacheFolder
from slot_cache.index import IndexThread, MemoryIndex
from slot_cache.llama_server import LlamaServer
from slot_cache.model import Identity
from slot_cache.prompt import fingerprint
from slot_cache.rewind import Conversation, Message
from slot_cache.slot_actions import PLAIN, REWIND, TRIAL, SlotActions
from slot_cache.state import Outcome, Want
from slot_cache.switcher import Lease, SlotSwitcher

MODEL = Identity("m" * 32, "boot 1", "hybrid.gguf", build="b1")
STORY = "Of the ships that came in this week the keeper writes. " * 4


@pytest.fixture
def actions() -> SlotActions:
    return SlotActions(LlamaServer(BASE), report.Once(), Clock())


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(report.logger, "warning", lambda text, *args: lines.append(text % args))
    return lines


# lessons


def test_a_model_that_reuses_a_part_is_plain(actions: SlotActions) -> None:
    assert actions.learn_use(MODEL, 1000, 990) == PLAIN
    assert actions.kind(MODEL) == PLAIN
    assert not actions.needs_rewind(MODEL)
    assert actions.learn_use(MODEL, 1000, 990) == ""


def test_one_that_reuses_all_may_be_either(actions: SlotActions) -> None:
    """A recurrent model does so too, if the next prompt happens to repeat the answer token for token."""
    assert actions.learn_use(MODEL, 1000, 1000) == ""
    assert actions.kind(MODEL) == ""
    actions.learn_use(MODEL, 1000, 0)
    assert actions.kind(MODEL) == TRIAL
    assert actions.works_for(MODEL)


def test_one_useless_restore_starts_the_lesson_and_a_rewound_one_that_helps_ends_it(
    actions: SlotActions, warned: list[str]
) -> None:
    assert actions.learn_use(MODEL, 1000, 0) == ""
    assert actions.needs_rewind(MODEL)
    assert actions.learn_use(MODEL, 1000, 1000, rewound=True) == REWIND
    assert actions.needs_rewind(MODEL)
    assert actions.works_for(MODEL)
    assert warned == []


def test_one_that_does_not_help_even_so_is_given_up_at_once(actions: SlotActions, warned: list[str]) -> None:
    actions.learn_use(MODEL, 1000, 0)
    assert actions.learn_use(MODEL, 1000, 0, rewound=True) == ""
    assert not actions.works_for(MODEL)
    assert not actions.needs_rewind(MODEL)
    assert len(warned) == 1
    assert "--swa-full" in warned[0]
    actions.learn_use(MODEL, 1000, 0, rewound=True)
    assert len(warned) == 1
    assert actions.works_for(replace(MODEL, boot="boot 2"))


@pytest.mark.parametrize(("boot", "works"), [("boot 1", False), ("boot 0", True), ("", True)])
def test_one_that_was_given_up_before_this_process_is_left_alone_until_the_server_starts_again(
    actions: SlotActions, warned: list[str], boot: str, works: bool
) -> None:
    actions.recall_kind(MODEL, "", boot)
    assert actions.works_for(MODEL) is works
    assert actions.works_for(replace(MODEL, boot="boot 2"))
    assert warned == []


def test_a_server_that_does_not_tell_its_boot_is_tried_again(actions: SlotActions) -> None:
    actions.recall_kind(replace(MODEL, boot=""), "", "")
    assert actions.works_for(replace(MODEL, boot=""))


@pytest.mark.parametrize("kind", [PLAIN, REWIND])
def test_a_model_once_learned_is_not_taught_again(actions: SlotActions, warned: list[str], kind: str) -> None:
    actions.recall_kind(MODEL, kind)
    assert actions.knows_kind(MODEL)
    actions.learn_use(MODEL, 1000, 0, rewound=kind == REWIND)
    assert actions.kind(MODEL) == kind
    assert actions.works_for(MODEL)
    actions.learn_use(MODEL, 1000, 1000, rewound=kind == REWIND)
    actions.learn_use(MODEL, 1000, 0, rewound=kind == REWIND)
    assert actions.works_for(MODEL)
    actions.learn_use(MODEL, 1000, 0, rewound=kind == REWIND)
    assert not actions.works_for(MODEL)
    assert actions.kind(MODEL) == kind
    assert len(warned) == 1


def test_builds_and_models_are_not_mixed_up(actions: SlotActions) -> None:
    newer, other = replace(MODEL, build="b2"), replace(MODEL, model="n" * 32)
    actions.learn_use(MODEL, 1000, 0)
    actions.learn_use(newer, 1000, 990)
    assert [actions.kind(one) for one in (MODEL, newer, other)] == [TRIAL, PLAIN, ""]
    assert [actions.needs_rewind(one) for one in (MODEL, newer, other, None)] == [True, False, False, False]


def test_what_the_index_does_not_know_changes_nothing(actions: SlotActions) -> None:
    actions.learn_use(MODEL, 1000, 0)
    for kind in ("", TRIAL, PLAIN, "nonsense"):
        actions.recall_kind(MODEL, kind)
    assert actions.kind(MODEL) == TRIAL


@pytest.mark.parametrize(("had", "computed"), [(5000, 505), (0, 13), (0, 600), (2973, 2037), (19_000, 1900), (1, 2099)])
def test_a_rewind_that_is_worth_it(actions: SlotActions, had: int, computed: int) -> None:
    """2037 of 5010 tokens is what one computes with -ub 2048: the next turn finds all of them."""
    actions.recall_kind(MODEL, REWIND)
    for _ in range(20):
        actions.rewound(MODEL, had, computed)
    assert actions.needs_rewind(MODEL)


def test_one_that_computes_everything_is_the_last(actions: SlotActions, warned: list[str]) -> None:
    actions.recall_kind(MODEL, REWIND)
    actions.rewound(MODEL, 0, 3000)
    assert not actions.needs_rewind(MODEL)
    assert not actions.works_for(MODEL)
    assert len(warned) == 1
    assert "--ctx-checkpoints" in warned[0]


def test_short_ones_without_a_checkpoint_are_the_last_when_there_are_some_in_a_row(
    actions: SlotActions, warned: list[str]
) -> None:
    actions.recall_kind(MODEL, REWIND)
    actions.rewound(MODEL, 0, 1500)
    actions.rewound(MODEL, 3000, 100)
    for _ in range(slot_actions.SHORT_IN_A_ROW - 1):
        actions.rewound(MODEL, 0, 1500)
    assert actions.needs_rewind(MODEL)
    actions.rewound(MODEL, 0, 1500)
    assert not actions.needs_rewind(MODEL)
    assert len(warned) == 1


def test_one_to_an_earlier_message_is_not_held_against_the_server(actions: SlotActions) -> None:
    """The checkpoint there may be gone, and the next turn would have to compute as much."""
    actions.recall_kind(MODEL, REWIND)
    for _ in range(5):
        actions.rewound(MODEL, 0, 9000, whole=False)
        actions.rewind_too_slow(MODEL, 30, whole=False)
    assert actions.needs_rewind(MODEL)
    actions.rewind_too_slow(MODEL, 30, whole=True)
    assert not actions.needs_rewind(MODEL)


def test_a_rewind_has_the_time_that_one_which_is_worth_it_takes(actions: SlotActions) -> None:
    assert actions.rewind_seconds(1000, True) >= slot_actions.CHECKPOINT_REACH / 200
    actions.learn_prefill(1000, 10.0)
    assert actions.rewind_seconds(100_000, True) == pytest.approx(200.0)
    assert actions.rewind_seconds(100_000, False) == pytest.approx(2000.0)


# rewinds


class Desk:
    """A switcher, and the server of a hybrid model it talks to."""

    def __init__(self, fake: FakeLlamaServer, index: IndexThread) -> None:
        self.fake, self.clock = fake, Clock()
        self.folder = CacheFolder(index, tag=TAG, route="smol", server="llama", path=fake.save_dir, min_tokens=1)
        self.switcher = SlotSwitcher(LlamaServer(BASE), index, name="llama", clock=self.clock)

    async def quiet(self) -> None:
        while tasks := [task for task in self.switcher._tasks if "lost" not in str(task.get_coro())]:
            await asyncio.wait(tasks, timeout=5)

    def kind(self) -> str:
        assert self.switcher._book.identity is not None
        return self.switcher.actions.kind(self.switcher._book.identity)

    def kinds(self, since: int = 0) -> list[str]:
        return self.fake.actions()[since:]


class Talk:
    """A conversation whose history holds other answers than were given, as where reasoning is left out."""

    def __init__(self, desk: Desk, name: str, **options: Any) -> None:
        self.desk, self.name, self.options = desk, name, options
        self.messages: list[Message] = [{"role": "system", "content": f"{name} is who I am. {STORY}"}]
        self.reused: list[int] = []

    def acquire(self) -> Any:
        chain = fingerprint({"messages": self.messages}).packed
        want = Want(key(self.name), "", True, chain=chain)
        return self.desk.switcher.acquire(0, want, self.desk.folder, queue_seconds=60, **self.options)

    async def ask(self, lease: Lease) -> Completion:
        done = await self.desk.fake.complete(self.messages, slot=0)
        assert done.text == self.desk.fake.truth(self.messages)
        self.reused.append(done.cached)
        lease.learn(done.cached, done.n_prompt - done.cached)
        return done

    def end(self, lease: Lease, ending: Any = ANSWERED) -> None:
        conversation = Conversation(tuple(self.messages)) if lease.wants_conversation else None
        lease.release(ending, conversation)
        self.messages = [*self.messages, {"role": "assistant", "content": "So it is."}]

    async def turn(self, text: str = "And then?", ending: Any = ANSWERED) -> Outcome:
        self.messages = [*self.messages, {"role": "user", "content": text}]
        lease = await got(self.acquire())
        await self.ask(lease)
        self.end(lease, ending)
        return lease.granted.outcome


async def make_desk(tmp_path: Path, **options: Any) -> AsyncIterator[Desk]:
    index = IndexThread(MemoryIndex())
    fake = FakeLlamaServer(save_dir=tmp_path / "saves", reuse="hybrid", **options)
    with respx.mock(assert_all_called=False) as router:
        fake.mount(router, BASE)
        made = Desk(fake, index)
        yield made
        fake.clear()
        await made.switcher.aclose()
    index.close()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async for made in make_desk(tmp_path):
        yield made


@pytest.fixture
async def clearing(tmp_path: Path) -> AsyncIterator[Desk]:
    async for made in make_desk(tmp_path, slots=2, clears_idle_slots=True):
        yield made


def is_save_of(call: Call, name: str) -> bool:
    return call.action == "save" and (call.filename or "").startswith(key(name))


async def learned(desk: Desk) -> tuple[Talk, Talk]:
    """Two conversations with a model that was just learned."""
    a, b = Talk(desk, "a"), Talk(desk, "b")
    for _ in range(3):
        await a.turn()
        await b.turn()
    await desk.quiet()
    assert desk.kind() == REWIND
    return a, b


async def test_from_the_third_return_on_all_is_reused(desk: Desk) -> None:
    a, b = Talk(desk, "a"), Talk(desk, "b")
    outcomes = [await talk.turn() for _ in range(6) for talk in (a, b)]
    assert outcomes == [COLD, COLD, RESTORED, COLD] + [RESTORED] * 8
    for talk in (a, b):
        assert talk.reused[:2] == [0, 0]
        assert all(later > 200 for later in talk.reused[2:])


async def test_the_slot_is_rewound_before_anybody_else_has_it(desk: Desk) -> None:
    a, b = await learned(desk)
    a.messages = [*a.messages, {"role": "user", "content": "And?"}]
    b.messages = [*b.messages, {"role": "user", "content": "And?"}]
    lease = await got(a.acquire())
    waiting = asyncio.ensure_future(b.acquire())
    await a.ask(lease)
    first = len(desk.fake.calls)
    a.end(lease)
    other = await got(waiting)
    calls = desk.kinds(first)
    assert calls.index("template") < calls.index("chat") < calls.index("save") < calls.index("restore")
    assert (desk.fake.tokens_in_file(f"{key('a')}.bin") or ())[-1] == ord("\n")
    await b.ask(other)
    assert b.reused[-1] > 200
    b.end(other)


async def test_a_client_that_comes_back_meanwhile_waits_for_the_rewind(desk: Desk) -> None:
    a, _ = await learned(desk)
    desk.fake.fail("template", "hang", times=1)
    await a.turn()
    await desk.fake.until(lambda: desk.fake.actions()[-1] == "template")
    a.messages = [*a.messages, {"role": "user", "content": "And?"}]
    waiting = asyncio.ensure_future(a.acquire())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    desk.fake.clear()
    lease = await got(waiting)
    assert lease.granted.outcome is RESIDENT
    await a.ask(lease)
    assert a.reused[-1] > 200
    a.end(lease)


FAILURES = ["drop", "refuse", "500", "503", "garbage", "wrong_shape", "wrong_types", "hang"]


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("where", ["template", "chat"])
async def test_a_rewind_that_fails_costs_the_cache_and_nothing_else(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, where: Any, kind: Any
) -> None:
    a, b = await learned(desk)
    if kind == "hang":
        monkeypatch.setattr(llama_server_module, "LOOK_SECONDS", 0.3)
        monkeypatch.setattr(llama_server_module, "SWITCH_SECONDS", 0.3)
        monkeypatch.setattr(slot_actions, "UNKNOWN_PREFILL_RATE", 1e9)
    desk.fake.fail(where, kind, times=None)
    await a.turn()
    await desk.quiet()
    assert desk.switcher.leased() == []
    desk.fake.clear()
    desk.clock.now += slot_actions.HUNG_SECONDS + 1
    assert await b.turn() in (RESTORED, COLD)
    await desk.quiet()
    assert await a.turn() in (RESTORED, COLD)
    await desk.quiet()
    assert desk.switcher.leased() == []
    if (where, kind) == ("chat", "hang"):  # the server is alive and computes for too long: it is not asked again
        assert desk.switcher.actions.stopped()
        identity = desk.switcher._book.identity
        assert identity is not None and identity.boot
        assert desk.switcher._index.index.kind(identity.useless_key("llama")) == identity.boot
        return
    assert await b.turn() is RESTORED
    await desk.quiet()
    assert await a.turn() is RESTORED
    assert a.reused[-1] > 200


async def test_images_are_neither_rewound_nor_saved(desk: Desk) -> None:
    a, b = await learned(desk)
    a.messages = [*a.messages, {"role": "user", "content": "See"}]
    lease = await got(a.acquire())
    await a.ask(lease)
    first = len(desk.fake.calls)
    lease.release(ANSWERED, None)
    await b.turn()
    await desk.quiet()
    assert "save" not in desk.kinds(first)
    assert desk.kinds(first).index("restore") < desk.kinds(first).index("template")


async def test_a_broken_answer_is_not_rewound(desk: Desk) -> None:
    a, _ = await learned(desk)
    first = len(desk.fake.calls)
    await a.turn(ending=BROKEN)
    await desk.quiet()
    assert "template" not in desk.kinds(first)


async def test_what_is_told_late_is_learned_and_the_slot_rewound_then(desk: Desk) -> None:
    """As of a stream, whose usage is known only after its end."""
    a, b = Talk(desk, "a"), Talk(desk, "b")
    for talk in (a, b):
        await talk.turn()
    a.messages = [*a.messages, {"role": "user", "content": "And?"}]
    lease = await got(a.acquire())
    done = await desk.fake.complete(a.messages, slot=0)
    a.end(lease)
    await desk.quiet()
    assert desk.fake.count("template") == 0
    lease.learn(done.cached, done.n_prompt)
    await desk.quiet()
    assert desk.fake.count("template") == 3
    assert await b.turn() is COLD
    assert await a.turn() is RESTORED
    assert a.reused[-1] > 200


async def test_an_idle_save_is_rewound(desk: Desk) -> None:
    await learned(desk)
    a = Talk(desk, "a2", idle_seconds=0.01)
    await a.turn()
    await desk.fake.until(lambda: any(call.status == 200 and is_save_of(call, "a2") for call in desk.fake.calls))
    await desk.quiet()
    assert (desk.fake.tokens_in_file(f"{key('a2')}.bin") or ())[-1] == ord("\n")
    desk.fake.restart()
    assert await a.turn() is RESTORED
    assert a.reused[-1] > 200


async def test_on_a_server_that_clears_idle_slots_it_goes_through_the_gate(clearing: Desk) -> None:
    desk = clearing
    a, _ = await learned(desk)
    entered: list[str] = []
    enter = desk.switcher._clearing.enter

    async def note(lease: Lease, deadline: float, look: Any = None) -> None:
        await enter(lease, deadline, look)
        entered.append("inside" if lease.inside else "outside")

    desk.switcher._clearing.enter = note  # type: ignore[method-assign]
    first = len(desk.fake.calls)
    await a.turn()
    await desk.quiet()
    assert "template" in desk.kinds(first)
    if desk.switcher.clears_idle:
        assert entered == ["inside"] * 2
    assert not desk.switcher._clearing.starting
    assert await a.turn() in (RESIDENT, RESTORED)
    assert a.reused[-1] > 200


class Secret(dict[str, Any]):
    """A message that can be looked for."""


@pytest.mark.parametrize("how", ["rewound", "failed", "plain", "late"])
async def test_nothing_of_what_was_said_is_left(desk: Desk, how: str) -> None:
    if how == "plain":
        desk.fake.reuse = "dense"
        talk = Talk(desk, "a")
    elif how == "late":
        talk = Talk(desk, "a")
        await talk.turn()
        await Talk(desk, "b").turn()
    else:
        talk, _ = await learned(desk)
    if how == "failed":
        desk.fake.fail("template", "500", times=None)
    message = Secret(role="user", content="a secret")
    watched = weakref.ref(message)
    talk.messages = [*talk.messages, message]
    lease = await got(talk.acquire())
    done = await desk.fake.complete(talk.messages, slot=0)
    lease.release(ANSWERED, Conversation(tuple(talk.messages)))
    lease.learn(done.cached, done.n_prompt - done.cached)
    await desk.quiet()
    talk.messages = []
    del message, done
    gc.collect()
    assert watched() is None
    assert lease.conversation is None


async def test_a_dense_model_is_not_rewound(desk: Desk) -> None:
    desk.fake.reuse = "dense"
    a, b = Talk(desk, "a"), Talk(desk, "b")
    outcomes = [await talk.turn() for _ in range(4) for talk in (a, b)]
    assert outcomes == [COLD] * 2 + [RESTORED] * 6
    assert desk.kind() == PLAIN
    assert not {"template", "chat"} & set(desk.kinds())
