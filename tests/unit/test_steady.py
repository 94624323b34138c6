"""What rules do to a request, and what they never do."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.steady import (
    CLAUDE_CODE,
    MOST_MATCHES,
    READY,
    SESSION_SECONDS,
    FrozenTexts,
    PatternError,
    Rule,
    compile_pattern,
    literal_start,
    steadied,
)
from slot_cache.steady_settings import read_rule

LINE = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={}; "
KIND = "You are Claude Code."
ASK = {"role": "user", "content": "Fix the bug."}
Request = Mapping[str, Any]


def rule(do: str, pattern: str, where: str | list[str] = "system", name: str = "mine", **more: Any) -> Rule:
    return read_rule({"name": name, "where": where, "pattern": pattern, "do": do, **more})


class Client:
    """A session that sends requests through rules."""

    def __init__(self, *rules: Rule, session: str = "s", frozen: FrozenTexts | None = None, by_content: bool = False):
        self.rules, self.session, self.by_content = rules, session, by_content
        self.frozen = FrozenTexts() if frozen is None else frozen
        self.now = 1000.0

    def send(self, request: Request) -> tuple[Request, tuple[str, ...]]:
        before = copy.deepcopy(request)
        new, done = steadied(
            request, self.rules, self.frozen, session=self.session, by_content=self.by_content, now=self.now
        )
        assert request == before, "what is given was changed"
        assert (new is request) == (done == ()) == (new == request)
        return new, done

    def sent(self, **request: Any) -> Any:
        return self.send(request)[0]


def chat(system: Any, *rows: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, *(rows or (ASK,))]}


# Claude Code's line


SHAPES: dict[str, tuple[Request, Request]] = {
    "anthropic, blocks": (
        {
            "system": [
                {"type": "text", "text": LINE.format("fa690")},
                {"type": "text", "text": KIND, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [ASK],
        },
        {"system": [{"type": "text", "text": KIND, "cache_control": {"type": "ephemeral"}}], "messages": [ASK]},
    ),
    "anthropic, text": (
        {"system": f"{LINE.format(1)}\n{KIND}", "messages": [ASK]},
        {"system": KIND, "messages": [ASK]},
    ),
    "anthropic, nothing else": ({"system": LINE.format("0"), "messages": [ASK]}, {"messages": [ASK]}),
    "anthropic, the only block": (
        {"system": [{"type": "text", "text": LINE.format("0")}], "messages": [ASK]},
        {"messages": [ASK]},
    ),
    "chat, text": (chat(f"{LINE.format(1)}\n\n{KIND}"), chat(KIND)),
    "chat, blocks": (
        chat([{"type": "text", "text": LINE.format(1)}, {"type": "text", "text": KIND}]),
        chat([{"type": "text", "text": KIND}]),
    ),
    "chat, a message of its own": (
        {"messages": [{"role": "system", "content": LINE.format(1)}, *chat(KIND)["messages"]]},
        chat(KIND),
    ),
    "responses, instructions": (
        {"instructions": f"{LINE.format(1)}\n{KIND}", "input": "hello"},
        {"instructions": KIND, "input": "hello"},
    ),
    "responses, a developer's message": (
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": f"{LINE.format(1)}\n{KIND}"}]},
                ASK,
            ]
        },
        {"input": [{"role": "developer", "content": [{"type": "input_text", "text": KIND}]}, ASK]},
    ),
    "without spaces and the last semicolon": (
        chat(f"x-anthropic-billing-header:cc_version=2.1;cch=0\r\n{KIND}"),
        chat(KIND),
    ),
}


@pytest.mark.parametrize(("request_", "wanted"), SHAPES.values(), ids=SHAPES.keys())
def test_claude_code_s_line_is_taken_out(request_: Request, wanted: Request) -> None:
    client = Client(CLAUDE_CODE)
    assert client.send(request_) == (wanted, ("claude_code",))
    assert client.send(wanted) == (wanted, ())


@pytest.mark.parametrize(
    "request_",
    [
        chat(f"{KIND}\n{LINE.format(1)}"),
        chat(f"{LINE.format(1)} is what it sends\n{KIND}"),
        {"messages": [{"role": "user", "content": LINE.format(1)}]},
        {"messages": [{"role": "assistant", "content": LINE.format(1)}, {"role": "tool", "content": LINE.format(1)}]},
        {"input": LINE.format(1)},
        {"prompt": LINE.format(1)},
    ],
    ids=["not at the start", "not alone", "a user's", "others'", "input", "a text completion"],
)
def test_what_is_not_its_line_stays(request_: Request) -> None:
    assert Client(CLAUDE_CODE).send(request_) == (request_, ())


# drop, freeze, move


def test_what_a_group_holds_is_meant() -> None:
    client = Client(rule("drop", "request (?:id)=([0-9a-f]+)"))
    assert client.sent(**chat("request id=beef, and so on")) == chat("request id=, and so on")


def test_drop_in_each_place() -> None:
    tools = [{"type": "function", "function": {"name": "now 1", "description": "now 1", "parameters": {"x": "now 1"}}}]
    request = {
        "tools": tools,
        **chat("now 1", {"role": "user", "content": "now 1"}, {"role": "user", "content": "now 1"}),
    }
    dropped = {
        "system": {"tools": tools, "messages": request["messages"][1:]},
        "first_user": {"tools": tools, **chat("now 1", {"role": "user", "content": ""}, request["messages"][2])},
        "tools": {
            "tools": [{"type": "function", "function": {**tools[0]["function"], "description": ""}}],
            "messages": request["messages"],
        },
    }
    for where, wanted in dropped.items():
        assert Client(rule("drop", r"now \d", where)).send(request) == (wanted, ("mine",))


def test_anthropic_and_nested_descriptions_of_tools_are_found() -> None:
    tools = [{"name": "t", "description": "at 1", "input_schema": {"properties": {"a": {"description": "at 2"}}}}]
    assert Client(rule("drop", r" \d", "tools")).sent(tools=tools, messages=[ASK])["tools"] == [
        {"name": "t", "description": "at", "input_schema": {"properties": {"a": {"description": "at"}}}}
    ]


def test_freeze_keeps_what_the_first_request_had() -> None:
    client = Client(rule("freeze", r"\d\d:\d\d"))
    assert client.send(chat("It is 10:00 now.")) == (chat("It is 10:00 now."), ())
    assert client.send(chat("It is 10:01 now.")) == (chat("It is 10:00 now."), ("mine",))
    assert client.send(chat("It is 10:00 now.")) == (chat("It is 10:00 now."), ())


def test_what_is_frozen_is_known_by_what_surrounds_it() -> None:
    client = Client(rule("freeze", r"\d+"))
    client.send(chat("Build 1 of the program, run 1"))
    client.send(chat("Write a title. Build 7"))
    assert client.sent(**chat("Build 2 of the program, run 2")) == chat("Build 1 of the program, run 1")
    assert client.sent(**chat("Write a title. Build 8")) == chat("Write a title. Build 7")


def test_fields_that_look_the_same_are_counted() -> None:
    client = Client(rule("freeze", r"\d"))
    client.send(chat("[1][2][3]"))
    assert client.sent(**chat("[4][5][6]")) == chat("[1][2][3]")


def test_sessions_are_frozen_apart() -> None:
    frozen = FrozenTexts()
    one, other = (Client(rule("freeze", r"\d"), session=name, frozen=frozen) for name in "ab")
    one.send(chat("at 1"))
    assert other.send(chat("at 2")) == (chat("at 2"), ())
    assert one.sent(**chat("at 3")) == chat("at 1")


def test_without_a_session_the_first_user_message_tells_whose_it_is() -> None:
    client = Client(rule("freeze", r"\d", ["system", "first_user"]), by_content=True)
    first = {"role": "user", "content": "first, at 5"}
    client.send(chat("at 1", first))
    assert client.sent(**chat("at 2")) == chat("at 2")
    again = {"role": "user", "content": "first, at 6"}
    assert client.sent(**chat("at 3", again, ASK)) == chat("at 1", first, ASK)


def test_a_frozen_text_is_kept_for_as_long_as_asked() -> None:
    client = Client(rule("freeze", r"\d+", **{"for": "1h"}))
    client.send(chat("at 1"))
    client.now += 3599
    assert client.sent(**chat("at 2")) == chat("at 1")
    client.now += 1
    assert client.sent(**chat("at 3")) == chat("at 3")
    assert client.sent(**chat("at 4")) == chat("at 3")


def test_a_session_ends_when_it_has_not_been_seen_for_a_day() -> None:
    client = Client(rule("freeze", r"\d+"))
    client.send(chat("at 1"))
    client.now += SESSION_SECONDS - 1
    assert client.sent(**chat("at 2")) == chat("at 1")
    client.now += SESSION_SECONDS - 1
    assert client.sent(**chat("at 2")) == chat("at 1")
    client.now += SESSION_SECONDS
    assert client.sent(**chat("at 5")) == chat("at 5")


def test_move_adds_it_to_the_end_of_the_last_user_message() -> None:
    client = Client(rule("move", r"At \d\d:\d\d\."), rule("move", r"Run \d+\.", name="runs"))
    assert client.send(chat("Run 7.At 10:00. Be kind.")) == (
        chat(" Be kind.", {"role": "user", "content": "Fix the bug.\n\nRun 7.\nAt 10:00."}),
        ("mine", "runs"),
    )


@pytest.mark.parametrize(("name", "kind"), [("messages", "text"), ("input", "input_text")])
def test_move_adds_a_block_to_blocks(name: str, kind: str) -> None:
    blocks = [{"type": kind, "text": "look"}, {"type": "image", "source": {}}]
    rows = [{"role": "system", "content": "at 1, go"}, {"role": "user", "content": blocks}]
    new = Client(rule("move", r"at \d")).sent(**{name: rows})
    assert new[name] == [
        {"role": "system", "content": ", go"},
        {"role": "user", "content": [*blocks, {"type": kind, "text": "at 1"}]},
    ]


def test_move_into_an_input_that_is_a_text() -> None:
    assert Client(rule("move", r"at \d")).sent(instructions="at 1, go", input="hi") == {
        "instructions": ", go",
        "input": "hi\n\nat 1",
    }


def test_move_where_nobody_asks_leaves_all_as_it_is() -> None:
    request = {"messages": [{"role": "system", "content": "at 1"}, {"role": "assistant", "content": "yes"}]}
    assert Client(rule("move", r"at \d")).send(request) == (request, ())


RESULTS: dict[str, list[dict[str, Any]]] = {
    "anthropic": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "at 5"}]},
    ],
    "chat": [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "tool_call_id": "1", "content": "at 5"},
    ],
}


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS.keys())
def test_what_was_moved_holds_still_while_tools_answer(results: list[dict[str, Any]]) -> None:
    client = Client(rule("move", r"at \d"))
    first = client.sent(**chat("at 1"))["messages"]
    assert first == chat("", {"role": "user", "content": "Fix the bug.\n\nat 1"})["messages"][1:]
    second = client.sent(**chat("at 2", ASK, *results))["messages"]
    assert second == [*first, *results]


def test_what_was_moved_stays_with_its_message() -> None:
    client = Client(rule("move", r"at \d"))
    rows: list[Any] = []
    last: list[Any] = []
    for turn in range(5):
        rows.append({"role": "user", "content": "go on"})
        sent = client.sent(**chat(f"Be kind, at {turn}", *rows))["messages"]
        assert sent[: len(last)] == last
        assert sent[-1] == {"role": "user", "content": f"go on\n\nat {turn}"}
        rows.append({"role": "assistant", "content": "done"})
        last = [*sent, rows[-1]]


def test_a_message_that_is_sent_again_has_the_current_time() -> None:
    client = Client(rule("move", r"at \d"))
    for turn in (1, 2):
        assert client.sent(**chat(f"at {turn}"))["messages"][-1]["content"].endswith(f"\n\nat {turn}")


# ready-made rules


TIMES = {
    "The time is 2026-11-30T18:46:15.123Z, ok": "The time is 2026-11-30T18:46:15.123Z",
    "Current time: 2026-11-30 18:46+01:00\n": "Current time: 2026-11-30 18:46+01:00",
    "Today is Mon Nov 30 18:46:15 UTC 2026, ok": "Today is Mon Nov 30 18:46:15 UTC 2026",
    "The current date and time is November 30, 2026 at 6:46 PM": "The current date and time is November 30, 2026 at 6:46 PM",
    "now 11/30/2026, 6:46:15 PM": "now 11/30/2026, 6:46:15 PM",
    "Monday, 30 November 2026 18:46 CET": "Monday, 30 November 2026 18:46 CET",
    "30.11.2026 18:46": "30.11.2026 18:46",
    "It is now 18:46:15 UTC.": "It is now 18:46:15 UTC",
    "time: 18:46, go": "time: 18:46",
    "a day, 2026-11-30, and a verse, Mark 10:30": "",
    "lines 10:30 to 12:40 of v1.2.3": "",
}


@pytest.mark.parametrize(("text", "time"), TIMES.items())
def test_times_to_the_minute_are_moved(text: str, time: str) -> None:
    new, done = Client(READY["times"]).send(chat(text))
    assert done == (("times",) if time else ())
    if time:
        rest = text.replace(time, "")
        assert new["messages"][-1]["content"] == f"Fix the bug.\n\n{time}"
        assert not rest or new["messages"][0]["content"] == rest


UUID = "123e4567-e89b-12d3-a456-42661417400"


@pytest.mark.parametrize("text", ["request_id: {}, go", '"trace": "{}"', "Session ID={}", "<id>: '{}'"])
def test_uuids_with_a_label_are_frozen(text: str) -> None:
    client = Client(READY["uuids"])
    client.send(chat(text.format(UUID + "1")))
    expected = text[0] != "<"
    new, done = client.send(chat(text.format(UUID + "2")))
    assert done == (("uuids",) if expected else ())
    assert new == chat(text.format(UUID + ("1" if expected else "2")))


def test_uuids_without_a_label_stay() -> None:
    client = Client(READY["uuids"])
    for number in "12":
        request = chat(f"The volume {UUID}{number} is read-only.")
        assert client.send(request) == (request, ())


STATUS = """<env>
Platform: linux
</env>

gitStatus: This is the git status at the start of the conversation. Note that this status is a snapshot in time.

Current branch: main

Main branch (you will usually use this for PRs): main

Status:
{}

Recent commits:
{}

And what follows.
"""


def test_git_status_is_frozen() -> None:
    client = Client(READY["git_status"])
    first = chat(STATUS.format("(clean)", "0123abc one\n4567def two"))
    client.send(first)
    assert client.send(chat(STATUS.format("M a.py\n?? b.py", "89abcde three\n0123abc one"))) == (first, ("git_status",))


# what is never done


TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from([LINE.format("ab"), f"{LINE.format(1)}\n{KIND}", "now 1", "It is 10:00:01", f"id: {UUID}1", ""]),
)
BLOCKS = st.lists(
    st.one_of(
        TEXTS,
        st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text"]), "text": TEXTS}),
        st.fixed_dictionaries({"type": st.just("tool_result"), "content": TEXTS}),
        st.fixed_dictionaries({"type": st.just("tool_use"), "text": TEXTS}),
        st.sampled_from([7, None, {"text": 7}, []]),
    ),
    max_size=4,
)
ROWS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function", 7]),
                "content": st.one_of(TEXTS, BLOCKS, st.none()),
            }
        ),
        st.fixed_dictionaries({"type": st.sampled_from(["function_call", "function_call_output"]), "output": TEXTS}),
        st.sampled_from([7, "text", {}]),
    ),
    max_size=6,
)
REQUESTS = st.one_of(
    st.fixed_dictionaries({"messages": ROWS}, optional={"system": st.one_of(TEXTS, BLOCKS), "tools": BLOCKS}),
    st.fixed_dictionaries({"input": st.one_of(TEXTS, ROWS)}, optional={"instructions": TEXTS}),
    st.fixed_dictionaries({"prompt": TEXTS}),
)
EVERYWHERE = ["system", "tools", "first_user"]
ALL = [
    CLAUDE_CODE,
    *READY.values(),
    rule("move", r"now \d", EVERYWHERE, "move"),
    rule("freeze", r"[0-9a-f]{2}", EVERYWHERE, "freeze"),
    rule("drop", r"ab|cd", EVERYWHERE, "drop"),
]
DROPS = [CLAUDE_CODE, *(read_rule({"name": name, "where": EVERYWHERE, "do": "drop"}) for name in READY), ALL[-1]]


@given(REQUESTS, REQUESTS)
def test_only_what_a_rule_may_touch_is_touched(first: Request, second: Request) -> None:
    client = Client(*ALL)
    for request in (first, second):
        new, _ = client.send(request)
        name = "messages" if "messages" in request else "input"
        rows = request.get(name, [])
        if isinstance(rows, str):
            continue
        kept = [
            row
            for row in new.get(name, [])
            if not (isinstance(row, dict) and row.get("role") in ("system", "developer"))
        ]
        wanted = [row for row in rows if not (isinstance(row, dict) and row.get("role") in ("system", "developer"))]
        for one, other in zip(wanted, kept, strict=True):
            if not isinstance(one, dict) or one.get("role") != "user":
                assert one is other
            elif isinstance(one["content"], list) and isinstance(other["content"], list):
                results = [block for block in one["content"] if isinstance(block, dict) and "content" in block]
                assert results == [
                    block for block in other["content"] if isinstance(block, dict) and "content" in block
                ]


@given(REQUESTS)
def test_to_drop_twice_is_to_drop_once(request: Request) -> None:
    client = Client(*DROPS)
    once, _ = client.send(request)
    assert client.send(once) == (once, ())


@given(REQUESTS)
def test_without_a_match_it_is_the_same_object(request: Request) -> None:
    client = Client(*(rule(do, "\\x{10FFFF}never", EVERYWHERE, do) for do in ("drop", "freeze", "move")))
    assert client.send(request)[0] is request


@given(st.lists(TEXTS, min_size=2, max_size=4))
def test_what_is_frozen_makes_the_same_of_every_request(fields: list[str]) -> None:
    client = Client(rule("freeze", r"<[^>]*>"))
    sent = [client.sent(**chat(f"start <{field.replace('>', '')}> end")) for field in fields]
    assert all(one == sent[0] for one in sent)


# bounds


def test_frozen_texts_are_bounded() -> None:
    frozen = FrozenTexts(number=3, chars=100, longest=40)
    for number in range(5):
        frozen.put(b"%d" % number, "x" * 10, now=0)
    assert [frozen.get(b"%d" % number, now=0) is not None for number in range(5)] == [False, False, True, True, True]
    frozen.put(b"long", "x" * 41, now=0)
    assert frozen.get(b"long", now=0) is None
    for name in (b"a", b"b", b"c"):
        frozen.put(name, "x" * 40, now=0)
    assert (frozen.get(b"a", now=0), len(frozen)) == (None, 2)
    frozen.put(b"new", "x", now=SESSION_SECONDS)
    assert len(frozen) == 1


def test_a_text_too_long_to_be_kept_is_left_as_it_is() -> None:
    client = Client(rule("freeze", r"\[[^]]*\]"), frozen=FrozenTexts(longest=10))
    for letter in "ab":
        request = chat(f"[{letter * 20}]")
        assert client.send(request) == (request, ())


HOSTILE = {
    "nested repetition": (r"(a+)+b", "a" * 200_000),
    "alternatives": (r"(a|aa)+b", "a" * 200_000),
    "a look far ahead from each match": (r"a(?:.*b)?", "a" * 200_000),
    "many matches": (r"a", "a" * 200_000),
    "states without end": (r"(?:a|b)*a(?:a|b){20}c", "ab" * 100_000),
    "a text that is cut": (r"z", "a" * 3_000_000 + "z"),
}


@pytest.mark.parametrize("do", ["drop", "freeze", "move"])
@pytest.mark.parametrize(("pattern", "text"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_texts_take_bounded_time(pattern: str, text: str, do: str) -> None:
    client = Client(rule(do, pattern))
    started = time.perf_counter()
    client.send(chat(text))
    assert time.perf_counter() - started < 2


def test_only_so_many_matches_are_heeded() -> None:
    assert len(compile_pattern("a").spans("a" * 1000)) == MOST_MATCHES


def test_half_a_character_is_no_text_to_match() -> None:
    request = chat("now 1 \ud800")
    assert Client(rule("drop", "now")).send(request) == (request, ())


@pytest.mark.parametrize("pattern", ["a*", "(", "(?=a)", r"(a)\1", "a" * 1001, "(?:a{900}){900}", "", "x?", "\ud800"])
def test_an_expression_that_cannot_be_used(pattern: str) -> None:
    with pytest.raises(PatternError):
        compile_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "literal"),
    [
        ("cch=[0-9a-f]+", "cch="),
        ("abc", "abc"),
        ("abc?d", "ab"),
        ("abc{2}", "ab"),
        ("a|b", ""),
        ("(?i)abc", ""),
        ("^abc", ""),
        ("a+b", "a"),
        (r"ab\d", "ab"),
    ],
)
def test_what_every_match_begins_with(pattern: str, literal: str) -> None:
    assert literal_start(pattern) == literal


@pytest.mark.parametrize("odd", ["", "é", "漢"])
def test_rules_take_less_than_a_millisecond(odd: str) -> None:
    line = f"{odd}You are a helpful assistant - the quick brown fox reads a file: src/main.py, line 12.\n"
    request = chat((line * 4000)[:200_000])
    rules = [CLAUDE_CODE, *READY.values()]
    client = Client(*rules)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        new, _ = steadied(request, rules, client.frozen, session="s", now=0.0)
        times.append(time.perf_counter() - started)
        assert new is request
    print(
        f"{len(rules)} rules, 200,000 characters: {statistics.median(times) * 1000:.2f} ms, least {min(times) * 1000:.2f}"
    )
    assert min(times) < 0.001
