"""What is in a slot, and what is to be done before a request goes there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slot_cache.plan import (
    MOST_PASSES,
    Found,
    Plan,
    SlotView,
    WaiterView,
    choose_waiter,
    judge,
    make_plan,
    order_slots,
    worth_saving,
)
from slot_cache.state import Mark, Outcome, Resident, Saved, SlotReading, Want


def reads(task: int | None, tokens: int) -> SlotReading:
    return SlotReading(0, False, task, tokens)


def left(task: int, tokens: int, key: str | None = "a", **more: object) -> Resident:
    """A cache that was looked at after its last request."""
    return replace(Resident(key, owner="", mark=Mark(task, tokens)), **more)  # type: ignore[arg-type]


def sent(task_before: int | None, before: Resident | None = None, **more: object) -> Resident:
    """A cache whose request was sent to the slot, which was not looked at since."""
    return replace(Resident("a", owner="", dirty=True, task_before=task_before, before=before), **more)  # type: ignore[arg-type]


# judge


@pytest.mark.parametrize(
    ("resident", "reading", "found", "is_now"),
    [
        pytest.param(None, reads(None, 0), Found.EMPTY, None, id="never used"),
        pytest.param(None, reads(4, 0), Found.EMPTY, None, id="emptied"),
        pytest.param(None, reads(4, 9), Found.FOREIGN, None, id="somebody's tokens where we know of none"),
        pytest.param(left(4, 9), reads(4, 9), Found.AS_LEFT, left(4, 9), id="as left"),
        pytest.param(left(0, 9), reads(0, 9), Found.AS_LEFT, left(0, 9), id="as left by the server's first task"),
        pytest.param(left(4, 9), reads(4, 0), Found.EMPTY, None, id="cleared by the server itself"),
        pytest.param(left(4, 9), reads(5, 9), Found.FOREIGN, None, id="another task, as many tokens"),
        pytest.param(left(4, 9), reads(5, 12), Found.FOREIGN, None, id="another task, other tokens"),
        pytest.param(left(4, 9), reads(4, 12), Found.FOREIGN, None, id="something else was restored"),
        pytest.param(left(4, 9), reads(6, 0), Found.EMPTY, None, id="used by another and emptied"),
        pytest.param(left(4, 9), reads(None, 0), Found.RESTARTED, None, id="restarted, not used since"),
        pytest.param(left(4, 9), reads(3, 9), Found.RESTARTED, None, id="restarted and used"),
        pytest.param(left(0, 9), reads(None, 0), Found.RESTARTED, None, id="restarted after its first task"),
        pytest.param(
            sent(None), reads(0, 9), Found.AS_LEFT, sent(None, mark=Mark(0, 9)), id="first request of the server"
        ),
        pytest.param(sent(3), reads(4, 9), Found.AS_LEFT, sent(3, mark=Mark(4, 9)), id="after its request"),
        pytest.param(sent(3), reads(8, 9), Found.AS_LEFT, sent(3, mark=Mark(8, 9)), id="task numbers with gaps"),
        pytest.param(sent(3), reads(4, 0), Found.EMPTY, None, id="its request left nothing"),
        pytest.param(sent(3), reads(2, 9), Found.RESTARTED, None, id="restarted during its request"),
        pytest.param(sent(3), reads(None, 0), Found.RESTARTED, None, id="restarted during its request, not used"),
        pytest.param(sent(None), reads(None, 0), Found.EMPTY, None, id="never arrived at an unused slot"),
        pytest.param(
            sent(4, left(4, 9, "b")), reads(4, 9), Found.AS_LEFT, left(4, 9, "b"), id="never arrived: the one before"
        ),
        pytest.param(sent(4), reads(4, 9), Found.FOREIGN, None, id="never arrived, and nothing of ours before"),
        pytest.param(
            sent(4, left(4, 9, "b")), reads(4, 7), Found.FOREIGN, None, id="never arrived, and the one before is gone"
        ),
        pytest.param(
            sent(4, left(4, 9, "b")), reads(4, 0), Found.EMPTY, None, id="never arrived, and the one before was cleared"
        ),
        pytest.param(
            sent(4, left(4, 9, "b")), reads(3, 9), Found.RESTARTED, None, id="never arrived: the server went down"
        ),
    ],
)
def test_the_server_is_right(
    resident: Resident | None, reading: SlotReading, found: Found, is_now: Resident | None
) -> None:
    assert judge(resident, reading) == (found, is_now)


# worth_saving


@pytest.mark.parametrize(
    ("resident", "worth"),
    [
        pytest.param(None, False, id="nothing there"),
        pytest.param(left(1, 9, dirty=True), True, id="changed"),
        pytest.param(left(1, 9), False, id="not changed"),
        pytest.param(left(1, 9, None, dirty=True), False, id="nobody's"),
        pytest.param(left(1, 0, dirty=True), False, id="empty"),
        pytest.param(sent(1), False, id="not looked at"),
        pytest.param(left(1, 9, dirty=True, saved_tokens=20), True, id="whole, and shorter than its save"),
        pytest.param(left(1, 9, dirty=True, whole=False), True, id="broken, never saved"),
        pytest.param(left(1, 9, dirty=True, whole=False, saved_tokens=8), True, id="broken, more than its save"),
        pytest.param(left(1, 9, dirty=True, whole=False, saved_tokens=9), False, id="broken, no more than its save"),
        pytest.param(left(1, 9, dirty=True, whole=False, saved_tokens=20), False, id="broken, less than its save"),
    ],
)
def test_only_a_changed_cache_that_is_no_worse_is_worth_saving(resident: Resident | None, worth: bool) -> None:
    assert worth_saving(resident) is worth


@pytest.mark.parametrize(("tokens", "worth"), [(63, False), (64, True)])
def test_a_small_cache_is_not_worth_a_file(tokens: int, worth: bool) -> None:
    resident = left(1, tokens, dirty=True)
    assert worth_saving(resident, min_tokens=64) is worth
    assert make_plan(Want("b"), resident, None, reads(1, tokens), min_tokens=64).save is worth


# make_plan


RESIDENT, RESTORED, COLD = Outcome.RESIDENT, Outcome.RESTORED, Outcome.COLD
A, B, NOBODY = Want("a"), Want("b"), Want(None)
ON_DISK = Saved(tokens=5, size=100)


@pytest.mark.parametrize(
    ("want", "resident", "saved", "reading", "plan"),
    [
        pytest.param(A, None, None, reads(None, 0), Plan(COLD), id="a new conversation on a new server"),
        pytest.param(A, None, ON_DISK, reads(None, 0), Plan(RESTORED, restore=True), id="a saved one on a new server"),
        pytest.param(A, left(1, 9), None, reads(1, 9), Plan(RESIDENT), id="it is there"),
        pytest.param(A, left(1, 9), ON_DISK, reads(1, 9), Plan(RESIDENT), id="it is there and on disk"),
        pytest.param(A, left(1, 9, dirty=True), ON_DISK, reads(1, 9), Plan(RESIDENT), id="it is there, changed"),
        pytest.param(B, left(1, 9), None, reads(1, 9), Plan(COLD), id="another is there, saved"),
        pytest.param(
            B, left(1, 9, dirty=True), None, reads(1, 9), Plan(COLD, save=True), id="another is there, changed"
        ),
        pytest.param(
            B, left(1, 9, dirty=True), ON_DISK, reads(1, 9), Plan(RESTORED, save=True, restore=True), id="a switch"
        ),
        pytest.param(B, left(1, 9), ON_DISK, reads(1, 9), Plan(RESTORED, restore=True), id="a switch without a save"),
        pytest.param(
            B, left(1, 9, None, dirty=True), ON_DISK, reads(1, 9), Plan(RESTORED, restore=True), id="over nobody's"
        ),
        pytest.param(B, None, ON_DISK, reads(1, 9), Plan(RESTORED, restore=True), id="over a stranger's"),
        pytest.param(B, None, None, reads(1, 9), Plan(COLD), id="beside a stranger's, the only owner"),
        pytest.param(NOBODY, None, None, reads(None, 0), Plan(COLD), id="no session, new server"),
        pytest.param(
            NOBODY,
            left(1, 9, dirty=True),
            None,
            reads(1, 9),
            Plan(COLD, save=True),
            id="no session: what is there is saved",
        ),
        pytest.param(
            NOBODY, left(1, 9, None, dirty=True), None, reads(1, 9), Plan(COLD), id="no session after no session"
        ),
        pytest.param(
            A,
            left(1, 9, dirty=True, whole=False, saved_tokens=20),
            Saved(20, 100),
            reads(1, 9),
            Plan(RESTORED, restore=True),
            id="broken, and the disk has more",
        ),
        pytest.param(
            A,
            left(1, 9, dirty=True, whole=False, saved_tokens=0),
            Saved(20, 100),
            reads(1, 9),
            Plan(RESTORED, restore=True),
            id="broken, and the disk has more, of which the slot knows nothing",
        ),
        pytest.param(
            A,
            left(1, 9, dirty=True, whole=False, saved_tokens=5),
            ON_DISK,
            reads(1, 9),
            Plan(RESIDENT),
            id="broken, and the disk has less",
        ),
        pytest.param(
            A, left(1, 9, dirty=True, whole=False), None, reads(1, 9), Plan(RESIDENT), id="broken, and never saved"
        ),
        pytest.param(
            B,
            left(1, 9, dirty=True, whole=False, saved_tokens=20),
            ON_DISK,
            reads(1, 9),
            Plan(RESTORED, restore=True),
            id="another is there, broken: its better save is kept",
        ),
    ],
)
def test_what_is_done(
    want: Want, resident: Resident | None, saved: Saved | None, reading: SlotReading, plan: Plan
) -> None:
    assert make_plan(want, resident, saved, reading) == plan


@pytest.mark.parametrize(
    ("owner", "there", "apart", "tokens", "erases"),
    [
        pytest.param("me", "you", True, 9, True, id="another owner's"),
        pytest.param("me", None, True, 9, True, id="not known whose"),
        pytest.param("me", "", True, 9, True, id="the master key's"),
        pytest.param("", "you", True, 9, True, id="the master key after another"),
        pytest.param("me", "me", True, 9, False, id="my own"),
        pytest.param("", "", True, 9, False, id="the only owner's"),
        pytest.param("", None, True, 9, False, id="not known whose, where there is only one owner"),
        pytest.param("me", "you", False, 9, False, id="shared"),
        pytest.param("me", None, False, 9, False, id="shared, not known whose"),
        pytest.param("me", None, True, 0, False, id="no tokens there"),
    ],
)
def test_a_slot_is_erased_only_where_its_tokens_must_not_be_seen(
    owner: str, there: str | None, apart: bool, tokens: int, erases: bool
) -> None:
    resident = None if there is None else left(1, tokens, "b", owner=there)
    assert make_plan(Want("a", owner, apart), resident, None, reads(1, tokens)) == Plan(COLD, erase=erases)


def test_a_slot_is_erased_where_a_restore_may_not_be_told_of_yet() -> None:
    assert make_plan(Want("a", "me"), None, None, reads(None, 0)).erase
    assert not make_plan(Want("a", ""), None, None, reads(None, 0)).erase


def test_a_stranger_s_tokens_are_erased_as_well_where_the_restore_fails() -> None:
    plan = make_plan(Want("a", "me"), left(1, 9, "b", owner="you"), ON_DISK, reads(1, 9))
    assert plan == Plan(RESTORED, restore=True, erase=True)


# whatever there is


many = settings(max_examples=500)

tasks = st.none() | st.integers(0, 4)
counts = st.integers(0, 4)
names = st.none() | st.sampled_from(["a", "b"])
owners = st.sampled_from(["", "me", "you"])
readings = st.builds(reads, tasks, counts)


def residents(before: st.SearchStrategy[Resident | None]) -> st.SearchStrategy[Resident]:
    return st.builds(
        Resident,
        key=names,
        owner=st.none() | owners,
        dirty=st.booleans(),
        mark=st.none() | st.builds(Mark, st.integers(0, 4), counts),
        task_before=tasks,
        before=before,
        whole=st.booleans(),
        saved_tokens=counts,
    )


anything = st.none() | residents(st.none() | residents(st.none()))
wants = st.builds(Want, names, owners, st.booleans())
saves = st.none() | st.builds(Saved, counts, counts)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Resident | None, SlotReading]:
    """What we remember of a slot, and what the server says of it: as it was left, or anything."""
    resident = draw(anything)
    if resident is not None and draw(st.booleans()):
        if resident.mark is not None:
            return resident, reads(resident.mark.task, resident.mark.tokens)
        return resident, reads((resident.task_before or 0) + 1, draw(counts))
    return resident, draw(readings)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Want, Resident | None, Saved | None, SlotReading]:
    """A request as well; as often as not it wants what is there."""
    resident, reading = draw(situations())
    want = draw(wants)
    if resident is not None and draw(st.booleans()):
        want = replace(want, key=resident.key)
    return want, resident, draw(saves), reading


@given(situations())
def test_what_is_ours_after_a_look_is_marked_with_what_the_server_says(
    situation: tuple[Resident | None, SlotReading],
) -> None:
    resident, reading = situation
    found, now = judge(resident, reading)
    assert (now is not None) == (found is Found.AS_LEFT)
    if now is not None:
        assert now.mark == Mark(reading.task, reading.tokens)  # type: ignore[arg-type]
        assert reading.tokens > 0


@given(situations())
def test_looking_twice_is_as_good_as_once(situation: tuple[Resident | None, SlotReading]) -> None:
    resident, reading = situation
    found, now = judge(resident, reading)
    again, still = judge(now, reading)
    assert still == now
    if found is Found.AS_LEFT:
        assert again is Found.AS_LEFT


@given(situations())
def test_only_what_was_there_can_be_there(situation: tuple[Resident | None, SlotReading]) -> None:
    resident, reading = situation
    _, now = judge(resident, reading)
    known = [resident, resident.before if resident else None]
    known += [resident.before.before if resident and resident.before else None]
    assert now is None or now.key in [one.key for one in known if one is not None]


@many
@given(scenes())
def test_nothing_foreign_empty_clean_or_nobodys_is_saved(
    scene: tuple[Want, Resident | None, Saved | None, SlotReading],
) -> None:
    want, resident, saved, reading = scene
    found, now = judge(resident, reading)
    plan = make_plan(want, now, saved, reading)
    if plan.save:
        assert found is Found.AS_LEFT
        assert now is not None
        assert now.key is not None
        assert now.dirty
        assert reading.tokens > 0
        assert now.whole or reading.tokens > now.saved_tokens


@many
@given(scenes())
def test_what_is_there_is_not_restored_unless_the_disk_has_more_of_it(
    scene: tuple[Want, Resident | None, Saved | None, SlotReading],
) -> None:
    want, resident, saved, reading = scene
    _, now = judge(resident, reading)
    plan = make_plan(want, now, saved, reading)
    if plan.restore:
        assert want.key is not None
        assert saved is not None
        if now is not None and now.key == want.key:
            assert not now.whole
            assert saved.tokens > reading.tokens


@many
@given(scenes())
def test_a_better_save_is_not_overwritten_just_before_it_is_restored(
    scene: tuple[Want, Resident | None, Saved | None, SlotReading],
) -> None:
    want, resident, saved, reading = scene
    _, now = judge(resident, reading)
    plan = make_plan(want, now, saved, reading)
    assert not (plan.save and plan.restore and now is not None and now.key == want.key)


@many
@given(scenes())
def test_nothing_is_erased_for_the_same_owner_or_where_all_is_shared(
    scene: tuple[Want, Resident | None, Saved | None, SlotReading],
) -> None:
    want, resident, saved, reading = scene
    _, now = judge(resident, reading)
    plan = make_plan(want, now, saved, reading)
    if plan.erase:
        assert want.apart
        assert now is None or now.owner is None or now.owner != want.owner


@many
@given(scenes())
def test_a_stranger_never_computes_upon_tokens_that_must_be_kept_apart(
    scene: tuple[Want, Resident | None, Saved | None, SlotReading],
) -> None:
    want, resident, saved, reading = scene
    _, now = judge(resident, reading)
    plan = make_plan(want, now, saved, reading)
    ours = now is not None and want.key is not None and now.key == want.key
    if want.apart and not ours and reading.tokens > 0 and reading.task is not None:
        strangers = want.owner != "" if now is None or now.owner is None else now.owner != want.owner
        assert plan.erase == strangers


@many
@given(scenes())
def test_the_outcome_says_what_is_done(
    scene: tuple[Want, Resident | None, Saved | None, SlotReading],
) -> None:
    want, resident, saved, reading = scene
    _, now = judge(resident, reading)
    plan = make_plan(want, now, saved, reading)
    assert (plan.outcome is RESTORED) == plan.restore
    if plan.outcome is RESIDENT:
        assert plan == Plan(RESIDENT)
        assert now is not None
        assert now.key == want.key is not None
    if want.key is None:
        assert plan.outcome is COLD


# order_slots


def home(number: int, shared: int = 1, score: float = 0.0) -> SlotView:
    return SlotView(number, shared=shared, score=score)


def empty(number: int) -> SlotView:
    return SlotView(number, empty=True)


def victim(number: int, score: float) -> SlotView:
    return SlotView(number, score=score)


@pytest.mark.parametrize(
    ("free", "order"),
    [
        pytest.param([], [], id="none is free"),
        pytest.param([victim(0, 1.0)], [0], id="the only one"),
        pytest.param([victim(0, 0.0), empty(1), home(2, score=9.0)], [2, 1, 0], id="home, then empty, then a victim"),
        pytest.param([victim(0, 3.0), victim(1, 1.0), victim(2, 2.0)], [1, 2, 0], id="the cheapest victim"),
        pytest.param([victim(0, 1.0), home(1, 1, 99.0)], [1, 0], id="home, however dear what it holds is"),
        pytest.param([home(0, 2), home(1, 5), home(2, 3)], [1, 2, 0], id="where more of it is"),
        pytest.param([empty(3), empty(1), empty(2)], [1, 2, 3], id="empty ones by number"),
        pytest.param([victim(2, 1.0), victim(1, 1.0)], [1, 2], id="the same cost: by number"),
        pytest.param([home(2, 4), home(1, 4)], [1, 2], id="as much in both: by number"),
        pytest.param([home(1, 4, 2.0), home(2, 4, 1.0)], [2, 1], id="as much in both: the one cheaper to lose"),
        pytest.param([SlotView(0, shared=9, busy=True), victim(1, 9.0)], [1, 0], id="home, but it must be waited for"),
        pytest.param([SlotView(0, empty=True, busy=True), victim(1, 9.0)], [1, 0], id="said to be empty, but busy"),
    ],
)
def test_the_best_slot_comes_first(free: list[SlotView], order: list[int]) -> None:
    assert order_slots(free) == order
    assert order_slots(free[::-1]) == order


views = st.lists(
    st.builds(home, st.integers(0, 9), st.integers(1, 3), st.floats(0, 9))
    | st.builds(empty, st.integers(0, 9))
    | st.builds(victim, st.integers(0, 9), st.floats(0, 9))
    | st.builds(SlotView, st.integers(0, 9), st.integers(0, 3), st.booleans(), busy=st.just(True)),
    max_size=8,
    unique_by=lambda view: view.number,
)


@given(views)
def test_nothing_is_lost_while_a_slot_is_empty_or_holds_the_conversation(free: list[SlotView]) -> None:
    by_number = {view.number: view for view in free}
    order = [by_number[number] for number in order_slots(free)]
    assert sorted(view.number for view in order) == sorted(by_number)
    kinds = ["busy" if view.busy else "home" if view.shared else "empty" if view.empty else "victim" for view in order]
    assert kinds == sorted(kinds, key=["home", "empty", "victim", "busy"].index)
    scores = [view.score for view, kind in zip(order, kinds, strict=True) if kind == "victim"]
    assert scores == sorted(scores)


# choose_waiter


def waits(text: str) -> list[WaiterView]:
    """Waiters, first come first: `2h` was passed twice and is at home, `0` was never passed and is not."""
    return [WaiterView(int(word[0]), word.endswith("h")) for word in text.split()]


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        pytest.param("", None, id="nobody waits"),
        pytest.param("0", 0, id="the only one"),
        pytest.param("0 0 0", 0, id="nobody is at home: the first"),
        pytest.param("0h 0h", 0, id="the first is at home"),
        pytest.param("0 0h", 1, id="a later one is at home"),
        pytest.param("0 0h 0h", 1, id="the first of those at home"),
        pytest.param("3 3 0h", 2, id="passed once more"),
        pytest.param("4 0h", 0, id="passed often enough"),
        pytest.param("3 4 0h", 0, id="passing would pass the second too often: the first"),
        pytest.param("3 0h 4", 1, id="one behind does not matter"),
        pytest.param("4h 0", 0, id="passed often enough, and at home"),
        pytest.param("0 4h", 1, id="passed often enough itself: it goes home"),
        pytest.param("9 0h", 0, id="passed more often than allowed"),
    ],
)
def test_who_has_the_free_slot(waiting: str, chosen: int | None) -> None:
    assert MOST_PASSES == 4
    assert choose_waiter(waits(waiting)) == chosen


@pytest.mark.parametrize(("most", "chosen"), [(0, 0), (1, 0), (2, 1)])
def test_how_often_one_may_be_passed_can_be_told(most: int, chosen: int) -> None:
    assert choose_waiter(waits("1 0h"), most) == chosen


@many
@given(st.lists(st.one_of(st.none(), st.sampled_from("abc")), max_size=60), st.integers(0, MOST_PASSES))
def test_nobody_is_passed_more_often_than_allowed(steps: list[str | None], most: int) -> None:
    """`None`: a slot comes free that holds "a"; a letter: a request of that conversation comes and waits."""
    queue: list[tuple[str, int]] = []
    for step in steps:
        if step is not None:
            queue.append((step, 0))
            continue
        chosen = choose_waiter([WaiterView(passed, name == "a") for name, passed in queue], most)
        assert (chosen is None) == (not queue)
        if chosen is not None:
            assert chosen == 0 or queue[chosen][0] == "a"
            queue = [(name, passed + 1) for name, passed in queue[:chosen]] + queue[chosen + 1 :]
            assert all(passed <= most for _, passed in queue)


@pytest.mark.parametrize("most", range(MOST_PASSES + 1))
def test_one_who_waits_is_served_however_many_come_that_are_at_home(most: int) -> None:
    passed = 0
    while choose_waiter([WaiterView(passed), WaiterView(at_home=True)], most) == 1:
        passed += 1
    assert passed == most
