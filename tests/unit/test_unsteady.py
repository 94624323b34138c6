"""What is found of places that change at the front of every request, and when nothing is said."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slot_cache.prompt import fingerprint
from slot_cache.unsteady import BLOCK, TIMES, Finder, Place, shape_of

WORDS = "the quick brown fox jumps over a lazy dog and reads file number "
SECRET = "swordfish"


def prose(chars: int, seed: int = 0) -> str:
    text = "".join(f"{WORDS}{seed + number}. {'' if number % 3 else chr(10)}" for number in range(chars // 60 + 1))
    return text[:chars]


class Session:
    """A conversation of growing length whose system prompt is made anew for every request."""

    def __init__(self, finder: Finder | None = None, name: str = "s", by_content: bool = False) -> None:
        self.finder, self.name, self.by_content = finder or Finder(), name, by_content
        self.rows: list[dict[str, Any]] = []
        self.told: list[Place] = []

    def turn(self, said: str = "and then?", **front: Any) -> list[Place]:
        self.rows.append({"role": "user", "content": said})
        told = self.ask({"messages": list(self.rows), **front})
        self.rows.append({"role": "assistant", "content": "Yes, then."})
        return told

    def ask(
        self, request: dict[str, Any], tokens: int = 1000, computed: int = 900, seconds: float = 2.0
    ) -> list[Place]:
        seen = self.finder.see(self.name, request, fingerprint(request), self.by_content)
        told = self.finder.charge(seen, tokens, computed, seconds)
        self.told += told
        return told


FIELDS: dict[str, tuple[list[str], str, str]] = {
    "a checksum": (
        [f"x-anthropic-billing-header: cc_version=2.1.37; cch={n * 7919 + 0xA1B2C:05x};\n" for n in range(6)],
        "5 hex digits",
        "steady: {claude_code: true}",
    ),
    "a clock": (
        [f"Current time: 2026-11-30 18:{n + 10}\n" for n in range(6)],
        " time",
        "steady: {rules: [times]}",
    ),
    "a clock whose length changes": ([f"[{n + 7}:59:59]" for n in range(6)], "a time", "steady: {rules: [times]}"),
    "a UUID": (
        [f"request-id: {n * 999983 + 0x1234ABCD:08x}-e89b-12d3-a456-42661417400{n}\n" for n in range(6)],
        "a UUID",
        "steady: {rules: [uuids]}",
    ),
    "a count": ([f"You have {n**5 + 1} unread letters" for n in range(6)], "digits", "pattern: ..., do: freeze"),
    "words": (
        [f"mood {word} <" for word in ("fine", "so-so", "great", "bad", "fair", "odd")],
        "characters",
        "pattern: ...",
    ),
}


@pytest.mark.parametrize("lead", [0, 5, 777, 9000])
@pytest.mark.parametrize(("fields", "shape", "rule"), FIELDS.values(), ids=FIELDS.keys())
def test_the_place_is_found_within_64_characters(fields: list[str], shape: str, rule: str, lead: int) -> None:
    session = Session()
    for number, text in enumerate(fields):
        told = session.turn(system=prose(lead) + text + prose(3000, 7))
        assert len(told) == (number == TIMES)
    (place,) = session.told
    now = fields[TIMES]
    first = next(n for n in range(len(now)) if len({field[: n + 1] for field in fields[: TIMES + 1]}) > 1)
    last = len(now) - next(
        n for n in range(len(now)) if len({field[::-1][: n + 1] for field in fields[: TIMES + 1]}) > 1
    )
    assert place.message == 1
    assert place.role == "system"
    assert lead + first - 64 <= place.start <= lead + first
    assert lead + last <= place.end <= lead + last + 64
    assert shape in place.shape
    if lead == 0 or "claude" not in rule:
        assert rule in place.rule
    assert f"about character {place.start} to {place.end}" in place.tell()


def test_what_it_cost_is_told() -> None:
    session = Session()
    for number in range(5):
        session.turn(system=f"at 10:0{number}:00 {prose(8000)}")
    (place,) = session.told
    assert place.times == 5 - 1
    assert 800 * TIMES < place.tokens <= 900 * (TIMES + 1)
    assert place.seconds == pytest.approx(2.0 * (TIMES + 1), rel=0.15)
    assert "tokens behind it were computed again in " in place.tell()


def test_a_place_at_the_end_of_a_message() -> None:
    session = Session()
    for number in range(6):
        session.turn(system=f"{prose(2000)} It is 18:46:{number + 10}")
    (place,) = session.told
    assert place.start >= 1936 and place.end <= 2070
    assert place.shape == "a time"


def test_a_place_in_the_tools_and_one_in_the_first_user_message() -> None:
    session = Session()
    for number in range(6):
        tools = [{"name": "f", "description": f"{prose(900)} (version {number}) {prose(900)}", "input_schema": {}}]
        session.rows[:1] = [{"role": "user", "content": f"{prose(500)} [{number}7] {prose(500)}"}]
        session.turn(tools=tools, system=prose(3000))
    assert sorted(place.role for place in session.told) == ["tools", "user"]
    assert {place.rule.partition("where: ")[2].partition(",")[0] for place in session.told} == {"tools", "first_user"}


def test_two_places_are_two() -> None:
    session = Session()
    for number in range(6):
        session.turn(system=f"{prose(300)} id {number}1 {prose(600)} id {number}2 {prose(900)}")
    one, other = sorted(session.told, key=lambda place: place.start)
    assert 304 - 64 < one.start <= 304 < one.end < 305 + 64
    assert 911 - 64 < other.start <= 911 < other.end < 912 + 64


def test_side_requests_and_clocks_that_stand_still_in_between_are_no_matter() -> None:
    session = Session()
    for number in range(8):
        session.turn(system=f"at 10:0{number // 2}:00 {prose(3000)}")
        session.ask({"system": "Write a title.", "messages": [{"role": "user", "content": f"{number} {prose(200)}"}]})
    (place,) = session.told
    assert place.shape == "a time"


def test_a_conversation_without_a_session_is_known_by_its_first_user_message() -> None:
    finder = Finder()
    one, other = (Session(finder, "nobody", by_content=True) for _ in range(2))
    for number in range(5):
        for session, said in ((one, "one"), (other, "other")):
            session.turn(said if not number else "go on", system=f"at 10:0{number}:00 {prose(3000)}")
    assert (len(one.told), len(other.told)) == (1, 1)


# silence


SYSTEM = f"Be kind. {prose(2000)}"


def test_nothing_is_said_of_a_conversation_that_only_grows() -> None:
    session = Session()
    for number in range(30):
        session.turn(f"{number} {prose(300, number)}", system=SYSTEM)
    assert session.told == []


def test_nothing_is_said_of_other_conversations_of_the_session() -> None:
    finder = Finder()
    for number in range(12):
        session = Session(finder)
        session.turn(f"{number}: {prose(400, number * 1000)}", system=SYSTEM)
        session.turn(system=SYSTEM)
        assert session.told == []


def test_nothing_is_said_of_a_message_that_is_being_written() -> None:
    session = Session()
    for number in range(1, 20):
        session.ask({"system": SYSTEM, "messages": [{"role": "user", "content": prose(number * 37)}]})
    assert session.told == []


def test_nothing_is_said_of_system_prompts_that_have_nothing_in_common() -> None:
    session = Session()
    for number in range(12):
        session.turn(system=prose(3000, number * 12345)[number * 17 :].replace(WORDS[number], "?"))
    assert session.told == []


def test_it_is_told_again_when_it_has_changed_twice_as_often() -> None:
    session = Session()
    told = [len(session.turn(system=f"at 10:{number + 10}:00 {prose(3000)}")) for number in range(30)]
    assert [number for number, places in enumerate(told) if places] == [3, 6, 12, 24]
    assert len(set(map(id, session.told))) == 1


@settings(max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=300), min_size=1, max_size=8), st.text(max_size=400))
def test_growing_conversations_of_any_text_are_silent(turns: list[str], system: str) -> None:
    session = Session()
    for text in turns:
        session.turn(text, system=system)
    assert session.told == []


JSON = st.recursive(
    st.none() | st.text(max_size=30) | st.integers(), lambda inner: st.lists(inner, max_size=3), max_leaves=6
)


@given(st.lists(st.fixed_dictionaries({}, optional={"messages": JSON, "system": JSON, "tools": JSON, "input": JSON})))
def test_nothing_is_ever_raised(requests: list[dict[str, Any]]) -> None:
    session = Session()
    for request in requests:
        session.ask(request)


# no text, and bounds


def test_no_text_is_kept_or_told() -> None:
    session = Session()
    for number in range(6):
        session.turn(f"{SECRET} {number}", system=f"{SECRET} at 10:0{number}:00 {SECRET}, {prose(2000)}")
    (place,) = session.told
    assert SECRET not in place.tell()
    assert SECRET not in repr(session.finder._sessions)
    assert "quick" not in repr(session.finder._sessions)


def test_what_is_kept_is_bounded() -> None:
    few = Finder(blocks=2500)
    for number in range(20):
        Session(few, f"s{number}").turn(system=prose(500_000, number))
        Session(few, f"s{number}").turn(system=prose(400_000, number))
    assert list(few._sessions) == ["s18", "s19"]
    assert few._blocks == sum(track.blocks for tracks in few._sessions.values() for track in tracks) <= 2500
    finder = Finder(sessions=5)
    for number in range(20):
        Session(finder, f"s{number}").turn(system=prose(500_000, number))
    assert len(finder._sessions) == 5
    session = Session(finder)
    for number in range(20):
        session.ask({"system": f"{number}" * 500, "messages": [{"role": "user", "content": f"{number}"}]})
    (tracks,) = [tracks for name, tracks in finder._sessions.items() if name == "s"]
    assert len(tracks) == 4
    (track,) = finder._sessions["s19"]
    assert sum(len(sketch.blocks) for sketch in track.messages) * BLOCK <= 65_536


def test_a_request_that_goes_on_costs_microseconds_and_one_that_changes_milliseconds() -> None:
    tools = [{"name": f"t{n}", "description": prose(1000, n), "input_schema": {}} for n in range(40)]
    finder, taken = Finder(), {"grows": [], "changes": []}  # type: tuple[Finder, dict[str, list[float]]]
    for number in range(10):
        for name, system in (("grows", SYSTEM), ("changes", f"at {number} {prose(30_000)}")):
            request = {"tools": tools, "system": system, "messages": [{"role": "user", "content": "hello"}]}
            prompt = fingerprint(request)
            started = time.perf_counter()
            finder.see(name, request, prompt)
            taken[name].append(time.perf_counter() - started)
    print({name: f"{min(times[1:]) * 1e6:.0f} us" for name, times in taken.items()})
    assert min(taken["grows"][1:]) < 0.0005
    assert min(taken["changes"][1:]) < 0.02


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("cch=fa690;", "5 hex digits"),
        (".37.0d9; cc_entrypoint=cli; cch=fa690;", "5 hex digits and 2 digits"),
        ("cc_version=2.1.37", "2 digits"),
        ("on 30.11.2026", "a date"),
        ("is 2026-11-30", "a date"),
        ("run 4711", "4 digits"),
        ("good morning", "12 characters"),
        ("2026-11-30 10:00 run 7", "a date and a time and 1 digits"),
    ],
)
def test_shapes(text: str, shape: str) -> None:
    assert shape_of(text, 0, len(text)) == shape
