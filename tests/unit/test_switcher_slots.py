"""The slots of a server together: who goes where, conversations known by their content, servers that clear idle slots."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from slots_desk import Desk, Make, Talk, in_virtual_time, make

from fake_llama_api import ServerError
from slot_cache.leases import Lease
from slot_cache.llama_server import LOOK_SECONDS
from slot_cache.state import Ending, Outcome, Want

__all__ = ["make"]

RESIDENT, RESTORED, DONOR, COLD, UNMANAGED = (
    Outcome.RESIDENT,
    Outcome.RESTORED,
    Outcome.DONOR,
    Outcome.COLD,
    Outcome.UNMANAGED,
)
SYSTEM = "You are a helpful assistant who knows all there is to know of boats, harbours and tides. " * 12


async def knows_its_server(desk: Desk) -> None:
    """Every process has asked the server how many slots it has, and knows whether it clears those that are idle; it leaves
    the server as it was started."""
    for number, process in enumerate(desk.processes):
        lease = await desk.talk("first", process=number).ask()
        lease.release(Ending.UNSENT)
        await process.quiet()
        process.switcher._book.clears = desk.fake.clears_idle_slots
    desk.fake.calls.clear()


async def all_over(desk: Desk) -> None:
    """Nothing is held or waited for by anybody."""
    for process in desk.processes:
        await process.quiet()
        assert process.switcher.leased() == []
        assert process.switcher.waiting() == 0
        assert process.gate_is_free
        assert not any(slot.locked for slot in process.switcher.slots.values() if slot.lease is None and desk.shared)


# which slot


@in_virtual_time
async def test_conversations_run_side_by_side_and_come_back_to_their_own(make: Make) -> None:
    desk = make(4)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "abcd"]
    assert await asyncio.gather(*(talk.turn() for talk in talks)) == [COLD] * 4
    places = [talk.slot for talk in talks]
    assert sorted(places) == [0, 1, 2, 3]
    await desk.here.quiet()
    for _ in range(3):
        random.Random(4).shuffle(talks)
        assert await asyncio.gather(*(talk.turn() for talk in talks)) == [RESIDENT] * 4
    assert all(talk.lost == 0 for talk in talks)
    assert desk.fake.count("save") == desk.fake.count("restore") == 0
    await all_over(desk)


@in_virtual_time
async def test_an_empty_slot_is_had_before_one_that_holds_something(make: Make) -> None:
    desk = make(3)
    await knows_its_server(desk)
    places = set()
    for name in "abc":
        talk = desk.talk(name)
        await talk.turn()
        places.add(talk.slot)
        await desk.here.quiet()
    assert places == {0, 1, 2}


@in_virtual_time
async def test_the_cache_that_is_cheapest_to_lose_goes(make: Make) -> None:
    desk = make(3)
    await knows_its_server(desk)
    long, short, other = desk.talk("l"), desk.talk("s"), desk.talk("o")
    await long.turn("a long story " * 60)
    await short.turn("hello")
    await other.turn("something in between " * 10)
    await desk.here.quiet()
    new = desk.talk("n")
    await new.turn()
    assert new.slot == short.slot
    assert desk.saved_tokens(short.key) > 0
    assert await long.turn() is RESIDENT
    assert await short.turn() is RESTORED
    assert (long.lost, short.lost) == (0, 0)


@in_virtual_time
async def test_nobody_waits_while_a_slot_is_free(make: Make) -> None:
    desk = make(4)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "abcdef"]
    asked = [talk.ask() for talk in talks]
    done, waiting = await asyncio.wait(asked, timeout=1.0)
    assert sorted(task.result().slot for task in done) == [0, 1, 2, 3]
    assert len(waiting) == 2
    leases = [asked[number].result() for number in range(4)]
    leases[2].release(Ending.UNSENT)
    assert (await asked[4]).slot == leases[2].slot
    leases[0].release(Ending.UNSENT)
    assert (await asked[5]).slot == leases[0].slot


@in_virtual_time
async def test_at_the_first_request_the_others_wait_only_for_the_first_look(make: Make) -> None:
    desk = make(4)
    asked = [desk.talk(name).ask() for name in "abcd"]
    done, _ = await asyncio.wait(asked, timeout=10.0)
    assert sorted(task.result().slot for task in done) == [0, 1, 2, 3]


@in_virtual_time
async def test_who_finds_a_stranger_in_its_slot_has_another(make: Make) -> None:
    desk = make(2)
    await knows_its_server(desk)
    gate = asyncio.Event()
    stranger = asyncio.ensure_future(desk.fake.complete("a stranger's prompt", slot=0, gate=gate))
    await desk.fake.until_processing(0)
    talk = desk.talk("a")
    assert await talk.turn() is COLD
    assert talk.slot == 1
    other = desk.talk("b")
    assert await other.turn() is COLD  # and its cache goes rather than to wait
    assert other.slot == 1
    gate.set()
    await stranger
    assert await talk.turn() is RESTORED
    assert talk.lost == 0
    await all_over(desk)


@in_virtual_time
async def test_what_a_slot_holds_that_a_lease_has_left_for_another_is_still_saved_when_idle(make: Make) -> None:
    desk = make(2)
    await knows_its_server(desk)
    talks = [desk.talk(name, idle_seconds=30.0) for name in "ab"]
    for talk in talks:
        await talk.turn()
    await desk.here.quiet()
    desk.fake.slots[1].clear()  # nobody knows that yet
    new = desk.talk("n", idle_seconds=30.0)
    lease = await new.ask()
    assert lease.slot == 1 != talks[0].slot
    await new.answer(lease)
    await asyncio.sleep(40.0)
    await desk.here.quiet()
    assert desk.saved_tokens(talks[0].key) > 0
    await all_over(desk)


@in_virtual_time
async def test_slots_that_a_server_has_more_of_are_found(make: Make) -> None:
    desk = make(1)
    await knows_its_server(desk)
    talk = desk.talk("a")
    await talk.turn()
    desk.fake.restart(slots=4)
    assert await talk.turn() is COLD
    asked = [desk.talk(name).ask() for name in "bcde"]
    done, _ = await asyncio.wait(asked, timeout=10.0)
    assert len({task.result().slot for task in done}) == 4


@pytest.mark.parametrize("clears", [False, True])
@in_virtual_time
async def test_slots_that_a_server_has_no_more_are_not_waited_for(make: Make, clears: bool) -> None:
    desk = make(4, clears_idle_slots=clears)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "abcd"]
    await asyncio.gather(*(talk.turn() for talk in talks))
    await desk.here.quiet()
    desk.fake.restart(slots=2)
    for _ in range(2):
        asked = [(talk, talk.ask()) for talk in talks]

        async def serve(talk: Talk, task: asyncio.Future[Lease]) -> tuple[Outcome, float]:
            lease = await task
            return await talk.answer(lease), lease.waited

        told = await asyncio.gather(*(serve(talk, task) for talk, task in asked))
        assert all(outcome is not UNMANAGED and waited < 3.0 for outcome, waited in told)
    assert {talk.slot for talk in talks} == {0, 1}
    await all_over(desk)


@in_virtual_time
async def test_what_was_in_a_slot_that_is_gone_is_found_on_disk(make: Make) -> None:
    desk = make(4, clears_idle_slots=True)  # unified: its files fit whatever the number of slots
    await knows_its_server(desk)
    talks = [desk.talk(name, idle_seconds=1.0) for name in "abcd"]
    await asyncio.gather(*(talk.turn() for talk in talks))
    await asyncio.sleep(2.0)
    last = max(talks, key=lambda talk: talk.slot)
    await last.turn()  # not saved since
    keys = [talk.key for talk in talks]
    await desk.here.quiet()
    desk.fake.restart(slots=2)
    for talk in talks:
        assert await talk.turn() is RESTORED
    assert [talk.key for talk in talks] == keys


@in_virtual_time
async def test_a_slot_that_is_gone_holds_nothing(make: Make) -> None:
    """Else its conversation would be taken to be in use there."""
    desk = make(4)
    await knows_its_server(desk)
    talks = [desk.talk(name, idle_seconds=1.0) for name in "abcd"]
    await asyncio.gather(*(talk.turn() for talk in talks))
    await asyncio.sleep(2.0)
    await asyncio.gather(*(talk.turn() for talk in talks))  # not saved since
    await desk.here.quiet()
    keys = [talk.key for talk in talks]
    desk.fake.restart(slots=2)
    await talks[0].turn()
    assert desk.switcher.resident(2) is None and desk.switcher.resident(3) is None
    for talk in talks[1:]:
        await talk.turn()
    assert [talk.key for talk in talks] == keys


# conversations


@in_virtual_time
async def test_conversations_without_a_session_are_told_apart(make: Make) -> None:
    desk = make(1)
    talks = [desk.talk(name, system=SYSTEM) for name in "abc"]
    for talk in talks:
        await talk.turn()
    for _ in range(3):
        for talk in talks:
            assert await talk.turn() is RESTORED
            assert talk.lost == 0
    assert len({talk.key for talk in talks}) == 3


@in_virtual_time
async def test_a_side_request_of_a_session_has_a_cache_of_its_own(make: Make) -> None:
    desk = make(1)
    main = desk.talk("main", session="a")
    keys = set()
    for number in range(4):
        assert await main.turn() in (COLD if not number else RESTORED, DONOR)
        assert main.lost == 0
        side = desk.talk(f"a title {number}", session="a")
        await side.turn()
        keys.add(side.key)
        assert side.key != main.key
    assert main.key == main.session
    assert len(keys) == 4


@in_virtual_time
@pytest.mark.parametrize("slots", [1, 3])
async def test_a_request_that_was_refused_for_its_length_does_not_hide_the_conversation(make: Make, slots: int) -> None:
    desk = make(slots, n_ctx=4000)
    await knows_its_server(desk)
    talk, other = desk.talk("a", session="a"), desk.talk("o", session="0")
    await talk.turn("a long story " * 40)
    await talk.turn()
    key, messages = talk.key, list(talk.messages)
    lease = await talk.ask("x" * 5000)
    with pytest.raises(ServerError):
        await desk.fake.complete(talk.messages, slot=lease.slot, n_predict=4)
    lease.release(Ending.BROKEN)
    talk.messages = messages
    await desk.here.quiet()
    await other.turn()
    assert await talk.turn() is (RESTORED if slots == 1 else RESIDENT)
    assert (talk.key, talk.lost) == (key, 0)


@in_virtual_time
async def test_an_edited_history_continues_what_it_still_shares(make: Make) -> None:
    desk = make(1)
    talk, other = desk.talk("a", session="a"), desk.talk("b", session="b")
    for _ in range(4):
        await talk.turn("and what came then of it? " * 12)
    key = talk.key
    await other.turn()
    del talk.messages[-2:]
    assert await talk.turn("no, tell me something else") is RESTORED
    assert talk.key == key


@pytest.mark.parametrize("session", [None, "a"])
@in_virtual_time
async def test_the_same_conversation_twice_at_once(make: Make, session: str | None) -> None:
    desk = make(3)
    await knows_its_server(desk)
    talk = desk.talk("a", session=session)
    for _ in range(2):
        await talk.turn("a long beginning " * 20)
    twins = [talk.fork() for _ in range(2)]
    for _ in range(3):
        await asyncio.gather(*(each.turn() for each in [talk, *twins]))  # each says whose request runs on which cache
        assert talk.lost == 0
    assert len({each.key for each in [talk, *twins]}) == 3
    for each in [talk, *twins]:
        assert await each.turn() in (RESIDENT, RESTORED)
        assert each.lost == 0
    await all_over(desk)


@in_virtual_time
async def test_the_same_saved_conversation_twice_at_once(make: Make) -> None:
    """Nothing of it is in a slot: both would restore it."""
    desk = make(2)
    await knows_its_server(desk)
    talk = desk.talk("a")
    await talk.turn("a long beginning " * 20)
    for name in "bcd":
        await asyncio.gather(desk.talk(name).turn(), desk.talk(f"{name}{name}").turn())
    twin = talk.fork()
    outcomes = await asyncio.gather(talk.turn(), twin.turn())
    assert sorted(outcome.value for outcome in outcomes) == ["donor", "restored"]
    assert talk.key != twin.key
    assert (talk.lost, twin.lost) == (0, 0)


@in_virtual_time
async def test_a_session_s_requests_without_a_prompt_are_not_taken_for_one_another(make: Make) -> None:
    """Nothing tells whether they are the same conversation."""
    desk = make(2)
    await knows_its_server(desk)
    wants = [Want(None, chain=b"", session=desk.talk("a", session="a").session, tag="t") for _ in range(2)]
    leases = [
        await desk.switcher.acquire(None, want, desk.here.folder, queue_seconds=5.0, idle_seconds=0.0) for want in wants
    ]
    assert [lease.key for lease in leases] == [wants[0].session, None]


# donors


@in_virtual_time
async def test_a_new_conversation_starts_from_what_another_slot_holds(make: Make) -> None:
    desk = make(2)
    await knows_its_server(desk)
    first, second = desk.talk("a", system=SYSTEM), desk.talk("b")
    await first.turn()
    await second.turn()
    await desk.here.quiet()
    running = await first.ask()  # its slot is taken: the new one has the other, and what is saved of the first is old
    running.release(Ending.UNSENT)
    holder = await desk.talk("c", which=second.slot).ask() if first.slot == 0 else None
    if holder is not None:
        holder.release(Ending.UNSENT)
    new = desk.talk("n", system=SYSTEM, which=second.slot)
    assert await new.turn() is DONOR
    assert new.reused >= len(SYSTEM)
    assert new.key != first.key
    assert await first.turn() is RESIDENT and first.lost == 0


@in_virtual_time
async def test_a_new_conversation_starts_from_a_file_which_stays_as_it_is(make: Make) -> None:
    desk = make(1)
    first, second = desk.talk("a", system=SYSTEM), desk.talk("b")
    await first.turn()
    await second.turn()
    file = desk.fake.save_dir / f"{first.key}.bin"
    before = file.read_bytes()
    new = desk.talk("n", system=SYSTEM)
    assert await new.turn() is DONOR
    assert new.reused >= len(SYSTEM)
    await second.turn()
    assert file.read_bytes() == before
    assert await first.turn() is RESTORED and first.lost == 0


@in_virtual_time
async def test_no_owner_starts_from_another_s_cache(make: Make) -> None:
    desk = make(2)
    await knows_its_server(desk)
    first, second = desk.talk("a", system=SYSTEM, owner="k1"), desk.talk("b", owner="k2")
    await first.turn()
    await second.turn()
    new = desk.talk("n", system=SYSTEM, owner="k2", which=second.slot)
    assert await new.turn() is COLD
    same = desk.talk("n", system=SYSTEM, owner="k2", which=first.slot)
    assert await same.turn() is not COLD
    assert same.reused >= len(SYSTEM)
    stranger = desk.talk("s", system=SYSTEM, owner="k3", which=first.slot)
    assert await stranger.turn() is COLD
    assert stranger.reused == 0


@in_virtual_time
async def test_nothing_is_restored_that_is_quicker_computed(make: Make) -> None:
    desk = make(1, prefill_seconds_per_token=0.00001, switch_seconds=1.0)
    first, second = desk.talk("a", system=SYSTEM), desk.talk("b")
    for talk in (first, second, first, second):  # what a restore takes is learned
        await talk.turn()
    assert desk.fake.count("restore") > 0
    desk.fake.calls.clear()
    assert await desk.talk("n", system=SYSTEM).turn() is COLD
    assert desk.fake.count("restore") == desk.fake.count("save") == 0


# servers that clear idle slots


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("sessions", [True, False])
@in_virtual_time
async def test_nothing_is_lost_however_conversations_interleave(make: Make, seed: int, sessions: bool) -> None:
    desk = make(3, clears_idle_slots=True)
    await knows_its_server(desk)
    draw = random.Random(seed)
    lost: list[tuple[str, int, int]] = []

    async def converse(name: str) -> None:
        talk = desk.talk(name, session=name if sessions else None)
        for number in range(6):
            await asyncio.sleep(draw.choice([0.0, 0.01, 0.1, 1.0, 5.0]) * draw.random())
            outcome = await talk.turn(n_predict=draw.choice([20, 30, 60]), think=draw.choice([0.0, 0.0, 0.02, 0.1]))
            assert outcome is not UNMANAGED
            if talk.lost:
                lost.append((name, number, talk.lost))

    await asyncio.gather(*(converse(name) for name in "abcde"))
    assert lost == []
    await all_over(desk)


@pytest.mark.parametrize("processes", [1, 2])
@in_virtual_time
async def test_one_conversation_alone_writes_no_file(make: Make, processes: int) -> None:
    desk = make(4, clears_idle_slots=True, processes=processes)
    await knows_its_server(desk)
    talk = desk.talk("a")
    for _ in range(5):
        await talk.turn()
        assert talk.lost == 0
        await asyncio.sleep(0.5)
    assert desk.fake.count("save") == 0
    await asyncio.sleep(5.0)
    assert desk.fake.count("save") == 1


@in_virtual_time
async def test_that_a_server_keeps_what_is_idle_is_learned(make: Make) -> None:
    desk = make(2)
    talks = [desk.talk(name) for name in "ab"]
    assert not desk.switcher.clears_idle  # of one slot, as long as no other is known
    for _ in range(3):
        for talk in talks:
            await talk.turn()
            await desk.here.quiet()
    assert not desk.switcher.clears_idle
    desk.fake.calls.clear()
    for _ in range(3):
        await asyncio.gather(*(talk.turn() for talk in talks))
    assert desk.fake.count("save") == desk.fake.count("restore") == 0
    await all_over(desk)


@in_virtual_time
async def test_that_a_server_clears_what_is_idle_is_learned(make: Make) -> None:
    desk = make(2, clears_idle_slots=True)
    talks = [desk.talk(name) for name in "ab"]
    for _ in range(3):
        for talk in talks:
            await talk.turn()
            await desk.here.quiet()
    assert desk.switcher.clears_idle and desk.switcher._book.clears is True
    desk.fake.clears_idle_slots = False
    desk.fake.restart()
    for _ in range(3):
        for talk in talks:
            await talk.turn()
            await desk.here.quiet()
    assert not desk.switcher.clears_idle


@in_virtual_time
async def test_what_another_process_restores_is_not_taken_for_what_survived(make: Make) -> None:
    desk = make(2, clears_idle_slots=True, processes=2)
    await knows_its_server(desk)
    saved = desk.talk("s", process=1, which=1)
    await saved.turn("what another process has saved " * 8)
    mine = desk.talk("m", which=1)
    await mine.turn()
    await desk.here.quiet()
    other = desk.talk("o", which=0)
    await other.turn()
    await desk.here.quiet()
    lease = await saved.ask()
    assert lease.granted.outcome is RESTORED
    await desk.here.switcher._book.look_at_all()
    assert desk.switcher.clears_idle
    await saved.answer(lease)


FAULTS = ["500", "hang", "drop", "garbage", "crash"]


@pytest.mark.parametrize("where", ["slots", "props", "save", "restore", "models"])
@pytest.mark.parametrize("kind", FAULTS)
@in_virtual_time
async def test_the_gate_is_left_whatever_the_server_does(make: Make, where: Any, kind: Any) -> None:
    desk = make(2, clears_idle_slots=True)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "abc"]
    for talk in talks:
        await talk.turn()
    desk.fake.fail(where, kind, 2)
    asked = [talk.ask() for talk in talks]
    started = desk.loop.time()
    for task in asked:
        lease = await task
        lease.release(Ending.UNSENT)
    assert desk.loop.time() - started < 3 * LOOK_SECONDS
    desk.fake.clear()
    if not desk.fake.is_up:
        desk.fake.restart()
    await asyncio.sleep(10.0)
    await all_over(desk)
    for talk in talks:
        assert await desk.talk(talk.name + "!").turn() is not UNMANAGED


@pytest.mark.parametrize("steps", [*range(0, 40, 3), 60, 90])
@in_virtual_time
async def test_the_gate_is_left_whenever_a_client_leaves(make: Make, steps: int) -> None:
    desk = make(2, clears_idle_slots=True)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "ab"]
    for talk in talks:
        await talk.turn()
    asked = [talk.ask() for talk in talks]
    for _ in range(steps):
        await asyncio.sleep(0)
    for task in asked:
        task.cancel()
    for got in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(got, Lease):
            got.release(Ending.UNSENT)
    last = desk.talk("c")
    assert await last.turn() is not UNMANAGED
    assert last.lease is not None and last.lease.waited < 1.0
    await all_over(desk)


@in_virtual_time
async def test_a_request_that_is_never_sent_holds_the_gate_for_moments(make: Make) -> None:
    desk = make(2, clears_idle_slots=True)
    await knows_its_server(desk)
    forgotten = await desk.talk("a").ask()
    lease = await desk.talk("b").ask()
    assert lease.waited < 3.0
    lease.release(Ending.UNSENT)
    forgotten.release(Ending.UNSENT)
    await all_over(desk)


@in_virtual_time
async def test_a_fault_of_ours_leaves_the_gate(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = make(2, clears_idle_slots=True)
    await knows_its_server(desk)

    async def known(model: str) -> Any:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(desk.here.folder, "known", known)
        lease = await desk.talk("a").ask()
    assert lease.granted.outcome is UNMANAGED
    lease.release(Ending.UNSENT)
    assert desk.here.gate_is_free
    assert await desk.talk("b").turn() is COLD


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("where", ["*", "slots", "save", "restore", "props"])
@in_virtual_time
async def test_a_server_that_hangs_holds_nobody_longer_than_one_call(make: Make, where: Any, clears: bool) -> None:
    desk = make(3, clears_idle_slots=clears)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "abcdef"]
    for talk in talks:
        await talk.turn("something to be saved " * 10)
    await desk.here.quiet()
    desk.fake.fail(where, "hang", None)
    started = desk.loop.time()
    asked = [talk.ask() for talk in talks]
    held = []
    for task in asked:
        lease = await task
        held.append(round(desk.loop.time() - started, 1))
        lease.release(Ending.UNSENT)
    assert max(held) < LOOK_SECONDS + 1.5
    desk.fake.clear()
    await asyncio.sleep(10.0)
    await all_over(desk)
    assert await desk.talk("z").turn() is not UNMANAGED


@pytest.mark.parametrize("clears", [False, True])
@in_virtual_time
async def test_those_at_the_gate_do_not_ask_a_hanging_server_one_after_the_other(make: Make, clears: bool) -> None:
    """It begins to hang when they have looked already."""
    desk = make(4, clears_idle_slots=clears)
    await knows_its_server(desk)
    for name in "abcd":
        await desk.talk(name).turn("something to be saved " * 10)
    await desk.here.quiet()
    first = await desk.talk("1").ask()  # is inside, and not sent
    asked = [desk.talk(name).ask() for name in "234"]
    await asyncio.sleep(0.2)
    desk.fake.fail("*", "hang", None)
    first.release(Ending.UNSENT)
    started = desk.loop.time()
    for task in asked:
        (await task).release(Ending.UNSENT)
    assert desk.loop.time() - started < LOOK_SECONDS + 1.5


@in_virtual_time
async def test_a_slow_answer_is_waited_for_while_another_request_is_at_work(make: Make) -> None:
    desk = make(2)
    await knows_its_server(desk)
    running = desk.talk("a")
    gate = desk.fake.gate = asyncio.Event()
    answer = asyncio.ensure_future(running.turn())
    await desk.fake.until_processing(0)
    desk.fake.gate = None
    desk.fake.fail("slots", "late", 1, seconds=4 * LOOK_SECONDS)
    talk = desk.talk("b")
    lease = await talk.ask()
    assert lease.granted.outcome is COLD
    assert lease.waited >= 4 * LOOK_SECONDS
    assert await talk.answer(lease) is COLD
    gate.set()
    await answer


@in_virtual_time
async def test_a_server_that_cannot_save_holds_nobody(make: Make) -> None:
    """llama-server's own defaults: four slots, cleared when idle, no --slot-save-path."""
    desk = make(4, clears_idle_slots=True, slot_save_path=False)
    await knows_its_server(desk)
    talks = [desk.talk(name) for name in "abcd"]
    for _ in range(3):
        for talk in talks:
            lease = await talk.ask()
            assert lease.waited < 0.5
            await talk.answer(lease)
    assert desk.fake.count("save") < 12
    assert len(desk.fake.calls) < 300
    await all_over(desk)


@pytest.mark.parametrize("kind", ["500", "empty_save", "wrong_count", "garbage"])
@in_virtual_time
async def test_saves_that_fail_are_not_tried_again_and_again(make: Make, kind: Any) -> None:
    desk = make(4, clears_idle_slots=True)
    await knows_its_server(desk)
    desk.fake.fail("save", kind, None)
    talks = [desk.talk(name) for name in "abcd"]
    for _ in range(3):
        for talk in talks:
            lease = await talk.ask()
            assert lease.waited < 0.5
            await talk.answer(lease)
    assert desk.fake.count("save") <= 3 * 4 * 4


@in_virtual_time
async def test_who_empties_the_server_does_not_keep_those_waiting_that_it_waits_for(make: Make) -> None:
    desk = make(3, clears_idle_slots=True)
    await knows_its_server(desk)
    old, running, new = desk.talk("o", which=0), desk.talk("r", which=1), desk.talk("n")
    await old.turn()
    lease = await running.ask()
    answer = asyncio.ensure_future(running.answer(lease, n_predict=300))
    await desk.fake.until_processing(1)
    vacated = asyncio.ensure_future(desk.switcher.vacate(60.0))
    await asyncio.sleep(0.5)
    assert not vacated.done()
    lease = await new.ask()
    assert lease.waited < 1.0
    await new.answer(lease)
    await answer
    slots = await vacated
    assert slots is not None
    slots.end(gone=False)
    assert await old.turn() is RESTORED
    assert old.lost == 0
    await all_over(desk)


# several processes


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("seed", range(40))
@in_virtual_time
async def test_processes_share_the_slots(make: Make, seed: int, clears: bool) -> None:
    desk = make(3, processes=2, clears_idle_slots=clears)
    await knows_its_server(desk)
    draw = random.Random(seed)
    lost: list[tuple[str, int, int]] = []

    async def converse(name: str) -> None:
        talk = desk.talk(name, session=name)
        for number in range(6):
            pause = draw.choice([0.0, 0.01, 0.1, 1.0, 5.0]) * draw.random()
            if pause > 0.3:  # another process learns of what was left when that has been looked at
                talk.process = desk.processes[draw.randrange(2)]
            await asyncio.sleep(pause)
            lease = await talk.ask()
            assert lease.granted.outcome is not UNMANAGED
            assert lease.waited < 8.0
            await talk.answer(lease, n_predict=draw.choice([20, 30, 60]))
            if talk.lost:
                lost.append((name, number, talk.lost))

    await asyncio.gather(*(converse(name) for name in "abcde"))
    assert lost == []
    await asyncio.sleep(60.0)
    await all_over(desk)
    rows = {row.slot: row for row in desk.index.slots("llama")}
    for number, slot in enumerate(desk.fake.slots):
        if number in rows and slot.tokens:
            assert rows[number].tokens == len(slot.tokens)


@in_virtual_time
async def test_what_another_process_has_taken_with_a_dirty_cache_is_saved_there(make: Make) -> None:
    desk = make(2, processes=2, clears_idle_slots=True)
    await knows_its_server(desk)
    old = desk.talk("old", which=1)
    await old.turn("what would be lost " * 10)
    await desk.here.quiet()
    started = desk.loop.time()
    inside = desk.talk("i", which=0)
    asked = inside.ask()
    there = desk.talk("there", process=1, which=1)
    waiting = there.ask()
    await inside.answer(await asked)
    await there.answer(await waiting)
    assert desk.loop.time() - started < 3.0
    assert await old.turn() is RESTORED
    assert old.lost == 0


@in_virtual_time
async def test_a_process_that_holds_a_dirty_cache_and_hangs_stops_nobody_for_long(make: Make) -> None:
    desk = make(2, processes=2, clears_idle_slots=True)
    await knows_its_server(desk)
    old = desk.talk("old", which=1)
    await old.turn("what would be lost " * 10)
    await desk.here.quiet()
    other = desk.processes[1].switcher._queue
    lease = Lease(desk.processes[1].switcher, other.slot(1), Want(None), None, 0.0, 1)
    assert other.try_take(lease)  # and nothing follows
    started = desk.loop.time()
    talk = desk.talk("i", which=0)
    got = await talk.ask()
    assert got.granted.outcome is COLD
    assert desk.loop.time() - started < 6.0
    await talk.answer(got)
    lease.release(Ending.UNSENT)
    await all_over(desk)
