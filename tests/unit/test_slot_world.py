"""What befell slots in the small world once, step by step: each of these broke a rule, or nearly did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slot_world import MIN_TOKENS, Client, Session, World


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def world(**options: Any) -> World:
        made.append(World(tmp_path / str(len(made)), **({"slots": 1} | options)))
        return made[-1]

    yield world
    for each in made:
        each.close()


def ask(world: World, session: Session, *, worker: int = 0, length: int = 40, **more: Any) -> Client:
    """The next turn of a conversation."""
    session.messages = [*session.messages, {"role": "user", "content": world.text(length)}]
    options = {"n_predict": 2, "stream": False, "think": 0.0} | more
    return world.ask(world.workers[worker], session, session.route, session.owner, session.messages, **options)


def turn(world: World, session: Session, **more: Any) -> None:
    ask(world, session, **more)
    world.settle()


def saved(world: World, session: Session) -> int:
    """How many tokens of a session are saved, and they are its own."""
    good = world.good.get(session.key)
    return 0 if good is None else len(good.tokens)


def restores(world: World) -> int:
    return world.stats.get("restores", 0)


def test_conversations_that_take_turns_find_their_caches(make: Callable[..., World]) -> None:
    world = make()
    one, other = world.sessions[:2]
    for _ in range(4):
        turn(world, one)
        turn(world, other)
    assert saved(world, one) > MIN_TOKENS and saved(world, other) > MIN_TOKENS
    assert restores(world) == 6
    world.check_all_over()


def test_the_world_notices_a_foreign_save(make: Callable[..., World]) -> None:
    """It must be able to fail."""
    world = make()
    one, other = world.sessions[:2]
    turn(world, one)
    turn(world, other)
    world.stranger(world.text(200), 0, 2)
    world.settle()
    name = f"{one.key}.bin"
    world.loop.run_until_complete(
        world.fake.handle("POST", "/slots/0?action=save", {}, b'{"filename": "' + name.encode() + b'"}')
    )
    with pytest.raises(AssertionError, match="not its own tokens"):
        world.look()
    world.good.clear()


def test_the_world_notices_a_wrong_answer(make: Callable[..., World]) -> None:
    world = make()
    session = world.sessions[0]
    turn(world, session)
    world.fake.slots[0].memory.cells[-5] = b"spoiled!"
    world.fake.slots[0].memory.keep_first(len(world.fake.slots[0].memory.cells) - 1)
    with pytest.raises(AssertionError, match="a wrong answer"):
        turn(world, session)


def test_what_strangers_leave_after_a_lost_lease_is_nobody_s(make: Callable[..., World]) -> None:
    """The end of a request was not told; until that is noticed others used the slot."""
    world = make()
    one, other = world.sessions[:2]
    ask(world, one, vanishes=True)
    world.settle()
    world.stranger(world.text(300), 0, 2)
    world.settle()
    turn(world, other)  # waits until the lost lease is found
    turn(world, one)
    world.check_all_over()


@pytest.mark.parametrize("times", [1, 2, 3, 4, 5])
def test_what_strangers_leave_while_the_slot_cannot_be_looked_at_is_nobody_s(
    make: Callable[..., World], times: int
) -> None:
    """The first look comes with the end of the request, and a few tries follow it; one who came and went between two of
    these could not be told from the request."""
    world = make()
    one, other = world.sessions[:2]
    client = ask(world, one, think=0.05)
    world.run(0.03)
    assert client.stage == "thinks"
    world.fake.fail("slots", "500", times)
    while not client.done:
        world.run(0.002)
    world.stranger(world.text(300), 0, 2)
    world.settle()
    world.run(5.0)
    turn(world, other)
    turn(world, one)
    world.check_all_over()


@pytest.mark.parametrize("more", [1, 40, -20], ids=["one more", "many more", "fewer"])
def test_a_stranger_between_the_look_and_the_save_is_not_saved(make: Callable[..., World], more: int) -> None:
    """The number of tokens that the server saved tells. It is all that does: the server has no save of a slot as it was
    when it was looked at, so one who leaves exactly as many tokens between the look and the save is not noticed."""
    world = make(latency=0.003)
    one, other = world.sessions[:2]
    turn(world, one)
    tokens = len(world.fake.slots[0].tokens)
    ask(world, other)
    while world.fake.actions()[-1] != "props":  # the slot has been looked at
        world.run(0.001)
    world.stranger(world.text(tokens + more - 1), 0, 2)  # two tokens, of which the last one is not in the slot
    world.settle()
    turn(world, one)
    turn(world, other)
    world.check_all_over()


def test_a_worker_that_ends_in_order_leaves_no_broken_task(make: Callable[..., World]) -> None:
    """Also when a client leaves only after the connections were closed."""
    world = make()
    client = ask(world, world.sessions[0], think=0.5)
    world.run(0.1)
    world.loop.run_until_complete(world.workers[0].switcher.aclose())
    assert client.task is not None
    client.task.cancel()
    world.run(3.0)
    assert world.broken == []


def test_a_client_that_left_while_it_waited_for_another_worker_wakes_nobody(make: Callable[..., World]) -> None:
    world = make(workers=2)
    one, other = world.sessions[:2]
    holder = ask(world, one, think=6.0)
    world.run(0.5)
    assert holder.stage == "thinks"
    waiting = ask(world, other, worker=1)
    world.run(0.5)
    assert waiting.task is not None and holder.task is not None
    waiting.task.cancel()
    world.run(1.0)
    assert world.may_sleep()
    world.fake.sleep()
    holder.task.cancel()  # it never sent anything
    world.run(30.0)
    assert world.fake.wakes == 0 and world.fake.is_sleeping


def test_a_save_that_is_good_outlives_a_failed_restore_and_a_broken_request(make: Callable[..., World]) -> None:
    world = make()
    one, other = world.sessions[:2]
    for _ in range(4):
        turn(world, one)
    turn(world, other)
    before = saved(world, one)
    assert before > 100
    world.fake.fail("restore", "500", 1)
    client = ask(world, one, n_predict=50)
    while client.stage != "waits":
        world.run(0.002)
    world.run(0.08)
    assert client.task is not None
    client.task.cancel()
    world.settle()
    turn(world, other)
    assert saved(world, one) >= before
    world.check_all_over()


def test_a_request_that_is_refused_leaves_nothing_of_its_own(make: Callable[..., World]) -> None:
    world = make()
    one, other = world.sessions[:2]
    turn(world, one)
    ask(world, other, length=1200)  # more than the context: refused, what was in the slot stays
    world.settle()
    other.messages = []
    assert saved(world, other) == 0
    turn(world, one)
    turn(world, other)
    turn(world, one)
    world.check_all_over()


@pytest.mark.parametrize("same_path", [True, False])
def test_another_model_of_the_same_shape_gets_nobody_s_cache(make: Callable[..., World], same_path: bool) -> None:
    world = make()
    one, other = world.sessions[:2]
    for session in (one, other, one):
        turn(world, session)
    seen = restores(world)
    world.fake.crash()
    world.run(1.0)
    if not same_path:
        world.model_path = world.models / "b.gguf"
        world.fake.model_path = str(world.model_path)
    world.bring_up("two")
    for session in (one, other):
        turn(world, session)
    assert restores(world) == seen
    turn(world, one)
    assert restores(world) == seen + 1
    world.check_all_over()


def test_workers_that_are_killed_anywhere_in_a_switch_leave_good_saves(make: Callable[..., World]) -> None:
    for steps in range(0, 120, 3):
        world = make()
        one, other = world.sessions[:2]
        for session in (one, other, one):
            turn(world, session)
        kept = saved(world, one), saved(world, other)
        ask(world, other)
        world.tick(steps)
        world.run(0.0)
        world.replace_worker(0, killed=True)
        world.look()
        assert (saved(world, one), saved(world, other)) >= kept
        turn(world, one)
        turn(world, other)
        world.check_all_over()
        world.close()
