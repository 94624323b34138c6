"""Which cache a request continues, begins or starts from, by what is in the slots; and what it leaves behind."""

from __future__ import annotations

import dataclasses

import pytest
from test_matching import chain

from slot_cache.continuing import Named, choose_donor, known_of, left_by, name_cache, shared_with
from slot_cache.eviction import Speeds
from slot_cache.matching import Known
from slot_cache.prompt import links
from slot_cache.state import Ending, Mark, Resident, SlotReading, Want

TAG = "smol-12345678"
ID = "0" * 31
FIRST, SECOND = f"{TAG}_{ID}1", f"{TAG}_{ID}2"
KNOWN = Speeds(prefill=100.0, restore=1e6, token_bytes=1000.0)
"""10 ms to compute a token, 1 ms to restore one."""


def want(text: str, session: str | None = FIRST, key: str | None = None) -> Want:
    return Want(key, owner="me", chain=chain(text), session=session, tag=TAG)


def resident(key: str | None, text: str, session: str | None = FIRST, **more: object) -> Resident:
    made = Resident(key, owner="me", mark=Mark(1, 100 * len(text)), chain=chain(text), session=session)
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]  # fields of a Resident


def known(key: str, text: str, session: str | None = FIRST, size: int = 0) -> Known:
    return Known(key, session, "me", chain(text), 100 * len(text), size)


@pytest.mark.parametrize(
    ("asked", "there", "shared"),
    [
        pytest.param(want("abcd"), None, 0, id="nothing is there"),
        pytest.param(want("abcd"), resident(None, "abc"), 0, id="nobody's"),
        pytest.param(want("abcd"), resident(FIRST, "abc"), 3, id="what it continues"),
        pytest.param(want("abcd"), resident(f"other-12345678_{ID}1", "abc"), 0, id="another route's"),
        pytest.param(want("Xbcd", key=FIRST), resident(FIRST, "abc"), 1, id="its key is known"),
        pytest.param(want("abcd", key=SECOND), resident(FIRST, "abc"), 0, id="its key is another"),
    ],
)
def test_what_a_request_shares_with_a_slot(asked: Want, there: Resident | None, shared: int) -> None:
    assert shared_with(asked, there) == shared


def test_what_is_known_of_slots_is_marked_and_of_the_route() -> None:
    there = [
        None,
        resident(None, "a"),
        resident(SECOND, "a", mark=None),
        resident(f"other-12345678_{ID}1", "a"),
        resident(FIRST, "ab"),
    ]
    (found,) = known_of(want("abc"), there, 5.0)
    assert (found.key, found.tokens, found.used) == (FIRST, 200, 5.0)


@pytest.mark.parametrize(
    ("asked", "here", "elsewhere", "saved", "in_use", "named"),
    [
        pytest.param(want("a", key=SECOND), [], [], [], {SECOND}, Named(SECOND), id="its key is known"),
        pytest.param(want(""), [], [], [], set(), Named(FIRST), id="its session is all that tells"),
        pytest.param(want(""), [], [], [], {FIRST}, Named(None), id="that goes on just now"),
        pytest.param(want("", None), [], [], [], set(), Named(None), id="nothing tells"),
        pytest.param(want("abc"), [known(SECOND, "ab")], [], [], set(), Named(SECOND, found=True), id="in its slot"),
        pytest.param(want("abc"), [], [], [known(SECOND, "ab")], set(), Named(SECOND, found=True), id="saved"),
        pytest.param(want("abc"), [], [], [known(SECOND, "ab")], {SECOND}, Named(FIRST), id="saved, but in use"),
        pytest.param(
            want("abc"),
            [],
            [resident(SECOND, "abc", dirty=True)],
            [known(SECOND, "ab")],
            set(),
            Named(FIRST),
            id="saved, but there is more of it in another slot",
        ),
        pytest.param(
            want("abc"),
            [],
            [resident(SECOND, "ab", dirty=True, mark=None)],
            [known(SECOND, "ab")],
            set(),
            Named(FIRST),
            id="saved, but what is in another slot is not known yet",
        ),
        pytest.param(
            want("abc"),
            [],
            [resident(SECOND, "ab", dirty=True)],
            [known(SECOND, "ab")],
            set(),
            Named(SECOND, found=True),
            id="saved by another process, so that what was dirty in another slot is not any more",
        ),
        pytest.param(
            want("abyz"),
            [],
            [resident(SECOND, "aby", dirty=True)],
            [known(SECOND, "abcd")],
            set(),
            Named(FIRST),
            id="saved, but in another slot it has gone on from an earlier turn since",
        ),
        pytest.param(want("abc"), [], [], [], set(), Named(FIRST), id="the session's first"),
    ],
)
def test_the_cache_that_a_request_continues(
    asked: Want, here: list[Known], elsewhere: list[Resident], saved: list[Known], in_use: set[str], named: Named
) -> None:
    assert name_cache(asked, here, elsewhere, saved, in_use) == named


@pytest.mark.parametrize(
    ("here", "elsewhere", "in_use"),
    [
        pytest.param([known(FIRST, "xyz")], [], set(), id="in its slot"),
        pytest.param([], [resident(FIRST, "xyz")], set(), id="in another"),
        pytest.param([], [], {FIRST}, id="in use"),
    ],
)
def test_another_conversation_of_a_session_has_a_name_of_its_own(
    here: list[Known], elsewhere: list[Resident], in_use: set[str]
) -> None:
    named = name_cache(want("abc"), here, elsewhere, [], in_use)
    assert named.key is not None
    assert named.key.startswith(f"{TAG}_") and named.key != FIRST
    assert (named.perhaps_saved, named.found) == (False, False)


@pytest.mark.parametrize(
    ("here", "others", "speeds", "key"),
    [
        pytest.param([], [], KNOWN, None, id="there is none"),
        pytest.param([], [known("x", "abc", size=9)], KNOWN, "x", id="saved"),
        pytest.param([known("h", "abc")], [known("x", "abc", size=9)], KNOWN, "h", id="as much in its slot"),
        pytest.param([known("h", "a")], [known("x", "abc", size=9)], KNOWN, "x", id="more than in its slot"),
        pytest.param([], [known("x", "abc", size=9)], Speeds(100.0, 1e3, 1e3), None, id="slower than to compute it"),
        pytest.param([], [known("x", "abc", size=9)], Speeds(0.0, 0.0, 0.0), "x", id="speeds are not known"),
        pytest.param([], [known("x", "abc", size=9)], Speeds(100.0, 1.5e5, 1e3), "x", id="saved: one call"),
        pytest.param([], [known("x", "abc")], Speeds(100.0, 1.5e5, 1e3), None, id="in another slot: two calls"),
    ],
)
def test_what_a_new_conversation_starts_from(
    here: list[Known], others: list[Known], speeds: Speeds, key: str | None
) -> None:
    found = choose_donor(want("abcd"), here, others, 1, speeds)
    assert (found.cache.key if found else None) == key


def test_a_donor_of_too_few_tokens_is_none() -> None:
    assert choose_donor(want("abcd"), [], [known("x", "ab", size=9)], 201, KNOWN) is None


def test_what_an_answered_request_leaves() -> None:
    before = resident(FIRST, "ab", saved_tokens=50, model="m", boot="b", before=resident(SECOND, "x"))
    reading = SlotReading(0, False, 7, 200)
    left = left_by(want("abc"), FIRST, Ending.ANSWERED, before, reading=reading, identity=None, saved_tokens=20)
    assert left == Resident(
        key=FIRST,
        session=FIRST,
        owner="me",
        dirty=True,
        task_before=7,
        tokens_before=200,
        before=dataclasses.replace(before, before=None),
        whole=True,
        saved_tokens=50,
        model="m",
        boot="b",
        chain=chain("abc"),
    )


@pytest.mark.parametrize(
    ("key", "asked", "left"),
    [
        pytest.param(FIRST, "abXY", 2, id="what both begin with is there"),
        pytest.param(FIRST, "XYZ", 3, id="they begin with nothing in common"),
        pytest.param(SECOND, "abXY", 4, id="of another conversation"),
    ],
)
def test_what_a_request_leaves_that_was_broken_off(key: str, asked: str, left: int) -> None:
    before = resident(FIRST, "abcd", model="m")
    made = left_by(want(asked), key, Ending.BROKEN, before, reading=None, identity=None, saved_tokens=0)
    assert not made.whole
    assert links(made.chain) == left
    assert made.model == ("m" if key == FIRST else "")
