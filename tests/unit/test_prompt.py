"""Fingerprints of prompts: what two of them share, and what is told of where they part."""

from __future__ import annotations

import copy
import re
import sys
import time
from dataclasses import fields, is_dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slot_cache import prompt as prompt_module
from slot_cache.prompt import BLOCK_CHARS, Prompt, fingerprint, pieces_of, shared_blocks, tell_difference

Messages = list[tuple[str, list[str]]]


def chat(*messages: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages], **more}


def of(*messages: tuple[str, Any]) -> Prompt:
    return fingerprint(chat(*messages))


# the chain


@pytest.mark.parametrize(
    ("chars", "blocks"), [(1, 1), (BLOCK_CHARS - 1, 1), (BLOCK_CHARS, 1), (BLOCK_CHARS + 1, 2), (3 * BLOCK_CHARS, 3)]
)
def test_a_message_is_cut_into_blocks(chars: int, blocks: int) -> None:
    prompt = of(("user", "x" * chars))
    assert [(span.role, span.chars, span.blocks) for span in prompt.spans] == [("user", chars, blocks)]
    assert len(prompt.chain) == blocks


@pytest.mark.parametrize(
    "other",
    [
        [("user", "one"), ("assistant", "two")],
        [("system", "one"), ("user", "two")],
        [("user", "one"), ("user", "two!")],
        [("user", "two"), ("user", "one")],
        [("user", "onetwo")],
        [("user", "one"), ("user", "two"), ("user", "three")],
    ],
)
def test_another_prompt_has_another_chain(other: list[tuple[str, str]]) -> None:
    assert of(*other).chain != of(("user", "one"), ("user", "two")).chain


def test_the_same_text_elsewhere_is_another_block() -> None:
    prompt = of(("user", "x" * BLOCK_CHARS * 3))
    assert len(set(prompt.chain)) == 3


def test_text_is_told_from_a_call_and_an_image() -> None:
    texts = fingerprint({"messages": [{"role": "assistant", "content": 'look\0{"at":1}'}]})
    calls = fingerprint({"messages": [{"role": "assistant", "tool_calls": [call("look", '{"at":1}')]}]})
    assert texts.chain != calls.chain


@pytest.mark.parametrize("name", ["system", "instructions"])
def test_what_comes_beside_the_messages_comes_first(name: str) -> None:
    beside = fingerprint({name: "be kind", **chat(("user", "hello"))})
    assert beside == of(("system", "be kind"), ("user", "hello"))


def test_tools_come_before_all_else() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    prompt = fingerprint(chat(("system", "be kind"), tools=tools))
    assert [span.role for span in prompt.spans] == ["tools", "system"]
    assert shared_blocks(prompt, of(("system", "be kind"))) == 0


def test_a_text_completion_is_one_message() -> None:
    (span,) = fingerprint({"prompt": "x" * 300}).spans
    assert (span.role, span.chars, span.blocks) == ("prompt", 300, 10)
    assert fingerprint({"prompt": [1, 2, 3]}) != fingerprint({"prompt": [1, 2, 4]})


def test_a_request_without_a_prompt_is_empty() -> None:
    assert fingerprint({}) == Prompt(b"", ())


# chains of whatever conversation; blocks are small so that many are there


BLOCK = 4
texts = st.text("ab", min_size=1, max_size=10)
pieces = st.lists(texts, min_size=1, max_size=3)


def alternating(contents: list[list[str]]) -> Messages:
    return [("user" if at % 2 == 0 else "assistant", content) for at, content in enumerate(contents)]


conversations = st.lists(pieces, max_size=5).map(alternating)


@st.composite
def relatives(draw: st.DrawFn) -> tuple[Messages, Messages]:
    """Two conversations that may have a beginning in common."""
    last = draw(conversations)
    kept = draw(st.integers(0, len(last)))
    contents = [content for _, content in last[:kept]]
    if contents and draw(st.booleans()):
        contents[-1] = draw(st.sampled_from([contents[-1][:-1], contents[-1] + ["a"], [*contents[-1][:-1], "abab"]]))
        contents = [content for content in contents if content]
    contents += [content for _, content in draw(conversations)]
    return last, alternating(contents)


def small(messages: Messages) -> Prompt:
    content = [(role, [{"type": "text", "text": text} for text in texts]) for role, texts in messages]
    with small_blocks():
        return of(*content)


def small_blocks() -> Any:
    return patch.object(prompt_module, "BLOCK_CHARS", BLOCK)


def blocks_of(messages: Messages) -> list[tuple[str, bool, str]]:
    return [
        (role, start == 0, text[start : start + BLOCK])
        for role, texts in messages
        for text in texts
        for start in range(0, len(text), BLOCK)
    ]


def common(one: Any, other: Any) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


@given(relatives())
def test_two_prompts_share_as_many_blocks_as_they_have_in_common(both: tuple[Messages, Messages]) -> None:
    one, other = both
    assert shared_blocks(small(one), small(other)) == common(blocks_of(one), blocks_of(other))


@given(relatives())
def test_it_does_not_matter_which_comes_first(both: tuple[Messages, Messages]) -> None:
    one, other = small(both[0]), small(both[1])
    assert shared_blocks(one, other) == shared_blocks(other, one)
    assert shared_blocks(one, one) == len(one.chain)


@given(conversations, conversations)
def test_a_conversation_that_goes_on_keeps_its_chain(messages: Messages, more: Messages) -> None:
    longer = alternating([content for _, content in messages + more])
    assert small(longer).chain[: len(small(messages).chain)] == small(messages).chain


@given(conversations)
def test_spans_tell_the_messages(messages: Messages) -> None:
    prompt = small(messages)
    told = [(role, sum(map(len, texts))) for role, texts in messages]
    assert [(span.role, span.chars) for span in prompt.spans] == told
    with small_blocks():
        assert [span.blocks for span in prompt.spans] == [len(blocks_of([message])) for message in messages]
    assert len(prompt.chain) == len(blocks_of(messages))


# one conversation in three shapes


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


PICTURE = "iVBORw0KGgo="
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}

CHAT = {
    "tools": [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": SCHEMA}}],
    "messages": [
        {"role": "system", "content": "You help."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}},
            ],
        },
        {"role": "assistant", "content": "I look.", "tool_calls": [call("look", '{"at": "it", "closely": true}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "a cat"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": None, "tool_calls": [call("look", "{}"), call("think", '{"hard":1}')]},
        {"role": "tool", "tool_call_id": "c1", "content": "whiskers"},
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": [{"type": "text", "text": "yes"}, {"type": "text", "text": "!"}],
        },
        {"role": "user", "content": "And?"},
    ],
}
ANTHROPIC = {
    "tools": [{"name": "look", "description": "Looks.", "input_schema": SCHEMA}],
    "system": "You help.",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is this?"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PICTURE}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"closely": True, "at": "it"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "a cat"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "Sure?", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
                {"type": "tool_use", "id": "c2", "name": "think", "input": {"hard": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "whiskers"}]},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "yes"}, {"type": "text", "text": "!"}],
                },
                {"type": "text", "text": "And?"},
            ],
        },
    ],
}
RESPONSES = {
    "tools": [{"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA}],
    "instructions": "You help.",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "What is this?"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"},
            ],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"it","closely":true}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a cat"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "Sure?"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "think", "arguments": '{"hard": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "whiskers"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "yes"}, {"type": "input_text", "text": "!"}],
        },
        {"role": "user", "content": "And?"},
    ],
}
ROLES = ["tools", "system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "tool", "user"]


def test_a_chat_has_these_messages() -> None:
    assert [span.role for span in fingerprint(CHAT).spans] == ROLES


@pytest.mark.parametrize("request_", [ANTHROPIC, RESPONSES], ids=["anthropic", "responses"])
def test_the_same_conversation_has_the_same_chain_in_every_shape(request_: dict[str, Any]) -> None:
    assert fingerprint(request_) == fingerprint(CHAT)


@pytest.mark.parametrize("request_", [CHAT, ANTHROPIC, RESPONSES], ids=["chat", "anthropic", "responses"])
def test_a_fingerprint_leaves_the_request_as_it_was(request_: dict[str, Any]) -> None:
    before = copy.deepcopy(request_)
    fingerprint(request_)
    assert request_ == before


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (chat(("developer", "x")), chat(("system", "x"))),
        (chat(("system", [{"type": "text", "text": "x"}])), {"system": "x", "messages": []}),
        ({"system": [{"type": "text", "text": "x"}], "messages": []}, {"instructions": "x", "input": []}),
        ({"input": "hello"}, chat(("user", "hello"))),
        (chat(("user", ["hello"])), chat(("user", "hello"))),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]},
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
                    }
                ]
            },
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]},
            {
                "input": [
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
                    {"role": "assistant", "content": "a"},
                ]
            },
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call("f", "not { json")]}]},
            {"input": [{"type": "function_call", "name": "f", "arguments": "not { json"}]},
        ),
        (
            chat(("user", [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}])),
            chat(("user", [{"type": "image", "source": {"type": "url", "url": "https://x/y.png"}}])),
        ),
        (
            chat(("user", [{"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}}])),
            chat(("user", [{"type": "input_audio", "input_audio": {"data": PICTURE, "format": "wav"}, "id": 7}])),
        ),
    ],
)
def test_what_says_the_same_has_the_same_chain(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert fingerprint(one).chain
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            chat(("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}])),
            chat(("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAB"}}])),
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call("f", '{"a":1}')]}]},
            {"messages": [{"role": "assistant", "tool_calls": [call("f", '{"a":2}')]}]},
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [call("f", "{}")]}]},
            {"messages": [{"role": "assistant", "tool_calls": [call("g", "{}")]}]},
        ),
        (
            {"tools": [{"name": "f", "input_schema": {"a": 1}}], "messages": []},
            {"tools": [{"name": "f", "input_schema": {"a": 2}}], "messages": []},
        ),
        (
            {"input": [{"type": "custom_tool_call", "name": "patch", "input": "a"}]},
            {"input": [{"type": "custom_tool_call", "name": "patch", "input": "b"}]},
        ),
        ({"input": [{"type": "unheard_of", "x": 1}]}, {"input": []}),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, {"messages": []}),
        (chat(("user", {"x": 1})), chat(("user", {"x": 2}))),
    ],
)
def test_what_says_something_else_has_another_chain(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert fingerprint(one).chain != fingerprint(other).chain


# in words


LONG = "x" * BLOCK_CHARS
LAST = [("system", "be kind"), ("user", "hello"), ("assistant", "hi")]


@pytest.mark.parametrize(
    ("last", "now", "told"),
    [
        pytest.param(LAST, LAST, "the prompt is the same", id="the same"),
        pytest.param([], [], "the prompt is the same", id="nothing at all"),
        pytest.param(
            LAST,
            [*LAST, ("user", "bye")],
            "the first 3 messages are the same, 1 new message follows",
            id="one more",
        ),
        pytest.param(
            LAST,
            [*LAST, ("user", "bye"), ("assistant", "bye"), ("user", "?")],
            "the first 3 messages are the same, 3 new messages follow",
            id="three more",
        ),
        pytest.param(LAST, LAST[:2], "the first 2 messages are the same, the end was cut", id="cut"),
        pytest.param(
            LAST,
            [("system", "be cruel"), *LAST[1:]],
            "the first 0 messages are the same, message 1 (system) is the same for its first 0 of 8 characters",
            id="another beginning",
        ),
        pytest.param(
            [("system", LONG + "7:00"), ("user", "hello")],
            [("system", LONG + "8:00 h"), ("user", "hello")],
            f"the first 0 messages are the same, message 1 (system) is the same for its first {BLOCK_CHARS} of "
            f"{BLOCK_CHARS + 6} characters",
            id="a clock at the end of the system prompt",
        ),
        pytest.param(
            LAST,
            [*LAST[:2], ("assistant", "hi!"), ("user", "bye")],
            "the first 2 messages are the same, message 3 (assistant) is the same for its first 0 of 3 characters",
            id="another answer",
        ),
        pytest.param(
            LAST,
            [LAST[0], ("user", "no"), LAST[2]],
            "the first 1 message are the same, message 2 (user) is the same for its first 0 of 2 characters",
            id="another question",
        ),
        pytest.param(
            [("user", LONG)],
            [("user", LONG + "and more")],
            f"the first 0 messages are the same, message 1 (user) is the same for its first {BLOCK_CHARS} of "
            f"{BLOCK_CHARS + 8} characters",
            id="a message that grew at the end of a block",
        ),
        pytest.param(
            [("system", ["You are a tool.", LONG + "7:00"])],
            [("system", ["You are a tool.", LONG + "8:00"])],
            f"the first 0 messages are the same, message 1 (system) is the same for its first {15 + BLOCK_CHARS} of "
            f"{15 + BLOCK_CHARS + 4} characters",
            id="a system prompt of a short and a long piece",
        ),
        pytest.param(
            [("user", ["one", "two", "three"])],
            [("user", ["one", "two", "four!"])],
            "the first 0 messages are the same, message 1 (user) is the same for its first 6 of 11 characters",
            id="a message of many short pieces",
        ),
        pytest.param(
            [],
            [("user", "hello")],
            "the first 0 messages are the same, 1 new message follows",
            id="after nothing",
        ),
        pytest.param([("user", "hello")], [], "the first 0 messages are the same, the end was cut", id="nothing left"),
    ],
)
def test_where_a_prompt_differs_is_told_in_words(last: list[Any], now: list[Any], told: str) -> None:
    assert tell_difference(of(*last), of(*now)) == told


PARTS = re.compile(
    r"the prompt is the same|the first (?P<same>\d+) messages? are the same, (?:"
    r"(?P<cut>the end was cut)|(?P<new>\d+) new messages? follows?|"
    r"message (?P<at>\d+) \((?P<role>\w+)\) is the same for its first (?P<x>\d+) of (?P<y>\d+) characters)"
)


@given(relatives())
@example(([("user", ["aaaa"])], [("user", ["aaaab"])]))
@example(([("user", ["a", "a"])], [("user", ["a", "b"])]))
def test_what_is_told_is_true(both: tuple[Messages, Messages]) -> None:
    last, now = both
    with small_blocks():
        told = PARTS.fullmatch(tell_difference(small(last), small(now)))
    assert told is not None
    if told["same"] is None:
        assert now == last
        return
    same = int(told["same"])
    if told["cut"]:
        assert same <= len(now)
        assert blocks_of(now) == blocks_of(last)[: len(blocks_of(now))] != blocks_of(last)
        return
    known = blocks_of(now[:same])
    assert blocks_of(last)[: len(known)] == known
    if told["new"]:
        assert now[: len(last)] == last
        assert int(told["new"]) == len(now) - len(last) > 0
    else:
        assert int(told["at"]) == same + 1
        role, texts = now[same]
        assert told["role"] == role
        assert int(told["y"]) == sum(map(len, texts))
        truly = common("".join(texts), "".join(last[same][1])) if same < len(last) and last[same][0] == role else 0
        assert truly - len(texts) * BLOCK < int(told["x"]) <= truly
        assert now[same : same + 1] != last[same : same + 1]


# nothing of the text is kept


def strings_in(thing: object) -> list[str]:
    if isinstance(thing, str):
        return [thing]
    if isinstance(thing, (list, tuple)):
        return [text for part in thing for text in strings_in(part)]
    if is_dataclass(thing):
        return [text for field in fields(thing) for text in strings_in(getattr(thing, field.name))]
    return []


def test_no_text_is_kept() -> None:
    secret = "correct horse battery staple"
    prompt = fingerprint(
        {
            "system": secret,
            "tools": [{"name": secret, "description": secret}],
            "messages": [
                {"role": "user", "content": secret, "name": secret},
                {
                    "role": "assistant",
                    "content": [{"type": secret, "text": secret}],
                    "tool_calls": [call(secret, secret)],
                },
                {"role": "tool", "content": secret},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": secret}}]},
            ],
        }
    )
    assert set(strings_in(prompt)) == {"tools", "system", "user", "assistant", "tool"}
    for word in secret.split():
        assert word not in repr(prompt)
        assert all(word.encode() not in block for block in prompt.chain)


@pytest.mark.parametrize("role", ["correct horse battery staple", "user\nforged line", "r" * 10_000, "\ud800"])
def test_nor_is_a_role_that_a_client_made_up(role: str) -> None:
    prompt = of((role, "x"))
    told = tell_difference(of((role, "y")), prompt)
    assert role not in repr(prompt)
    assert role not in told
    assert told.isprintable()
    assert len(told) < 200


def size_of(thing: object, seen: set[int]) -> int:
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    parts = thing if isinstance(thing, tuple) else ()
    if is_dataclass(thing):
        parts = tuple(getattr(thing, field.name) for field in fields(thing))
    return sys.getsizeof(thing) + sum(size_of(part, seen) for part in parts)


def test_a_fingerprint_is_small() -> None:
    text = "".join(map(chr, range(0x4E00, 0x4E00 + 20_000))) * 10
    prompt = of(("user", text))
    assert len(prompt.chain) == -(-len(text) // BLOCK_CHARS)
    assert size_of(prompt, set()) < len(text) / 4


def test_a_long_prompt_takes_no_time() -> None:
    messages = [("user" if at % 2 else "assistant", "some words and more of them " * 36) for at in range(200)]
    request = chat(*messages)
    assert sum(len(text) for _, text in messages) > 200_000
    best = min(_seconds(request) for _ in range(5))
    assert best < 0.1


def _seconds(request: dict[str, Any]) -> float:
    started = time.perf_counter()
    fingerprint(request)
    return time.perf_counter() - started


# whatever comes


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
DEEP: Any = "x"
for _ in range(3000):
    DEEP = [DEEP]
DEEP_JSON = "[" * 100_000

HOSTILE: dict[str, dict[str, Any]] = {
    "messages is nothing": {"messages": None},
    "messages is a number": {"messages": 7},
    "messages is text": {"messages": "hello"},
    "messages is a mapping": {"messages": {"role": "user"}},
    "messages of all kinds": {"messages": [None, 7, 1.5, True, "text", [], {}, b"bytes", object()]},
    "messages in a circle": {"messages": CIRCLE},
    "messages are deep": {"messages": DEEP},
    "a role that is no text": {"messages": [{"role": 7, "content": "x"}, {"role": None}, {"role": ["user"]}]},
    "a role with half a character": {"messages": [{"role": "\ud800", "content": "x"}]},
    "text with half a character": {"messages": [{"role": "user", "content": "\ud800"}]},
    "half a character everywhere": {
        "system": "\ud800",
        "tools": [{"name": "\ud800", "parameters": {"\udfff": "\ud800"}}],
        "messages": [
            {"role": "assistant", "tool_calls": [call("\ud800", '{"\\ud800": 1}')], "reasoning_content": "\ud800"},
            {"role": "tool", "content": ["\ud800"]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "\ud800"}}, {"type": "\ud800"}]},
        ],
    },
    "content of all kinds": {
        "messages": [{"role": "user", "content": [None, 7, [], {}, "x", {"type": None}, {"text": 7}, b"bytes"]}]
    },
    "content is a mapping": {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
    "content is bytes": {"messages": [{"role": "user", "content": b"bytes"}]},
    "content in a circle": {"messages": [{"role": "user", "content": CIRCLE}]},
    "content is deep": {"messages": [{"role": "user", "content": DEEP}]},
    "calls of all kinds": {
        "messages": [{"role": "assistant", "tool_calls": [None, 7, {}, {"function": 7}, "f", CIRCLE]}]
    },
    "calls are a mapping": {"messages": [{"role": "assistant", "tool_calls": {"function": {}}}]},
    "a call without a name": {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
    "arguments are deep json": {"messages": [{"role": "assistant", "tool_calls": [call("f", DEEP_JSON)]}]},
    "arguments are a huge number": {"messages": [{"role": "assistant", "tool_calls": [call("f", "9" * 10_000)]}]},
    "arguments are nan": {"messages": [{"role": "assistant", "tool_calls": [call("f", "NaN")]}]},
    "arguments in a circle": {"messages": [{"role": "assistant", "tool_calls": [call("f", CIRCLE)]}]},
    "a result of all kinds": {"messages": [{"role": "tool", "content": [None, 7, {"text": 7}]}]},
    "a result is deep": {"messages": [{"role": "tool", "content": DEEP}]},
    "media of all kinds": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": 7},
                    {"type": "image_url", "image_url": {"url": None}},
                    {"type": "image", "source": {"data": 7}},
                    {"type": "image", "source": []},
                    {"type": "file", "file": {"file_id": "f"}},
                    {"type": "input_audio"},
                ],
            }
        ]
    },
    "tools is text": {"tools": "f", "messages": []},
    "tools of all kinds": {"tools": [None, 7, {}, "f", {"function": 7}, {"function": {}}, CIRCLE], "messages": []},
    "tools is a mapping": {"tools": {"name": "f"}, "messages": []},
    "system of all kinds": {"system": [None, 7, {"text": 7}, []], "messages": []},
    "system is a number": {"system": 7, "messages": []},
    "input of all kinds": {"input": [None, 7, "x", {"type": 7}, {"type": "reasoning"}, {"type": "function_call"}]},
    "input is a number": {"input": 7},
    "prompt is nothing": {"prompt": None},
    "prompt of all kinds": {"prompt": [None, {1: 2, "a": object()}]},
    "keys that are no text": {"messages": [{1: 2, None: 3, "role": "user", "content": {("a",): 1}}]},
}


@pytest.mark.parametrize("request_", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_shape_is_too_odd(request_: dict[str, Any]) -> None:
    one, other = fingerprint(request_), fingerprint(request_)
    assert sum(span.blocks for span in one.spans) == len(one.chain)
    tell_difference(one, other)
    tell_difference(of(*LAST), one)
    tell_difference(one, of(*LAST))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_use", "tool_result", "image", "image_url", "thinking"]) | anything},
    optional=dict.fromkeys(("text", "content", "image_url", "source", "name", "input", "thinking"), anything),
)
rows = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | anything},
    optional={
        "content": st.lists(blocks, max_size=3) | anything,
        "tool_calls": st.lists(st.fixed_dictionaries({"function": anything}) | anything, max_size=2) | anything,
        "type": st.sampled_from(["function_call", "function_call_output", "reasoning"]) | anything,
        "arguments": anything,
        "output": anything,
        "summary": anything,
        "reasoning_content": anything,
    },
)
requests = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.lists(rows, max_size=4) | anything,
        "input": st.lists(rows, max_size=4) | anything,
        "prompt": anything,
        "system": st.lists(blocks, max_size=2) | anything,
        "instructions": anything,
        "tools": st.lists(anything, max_size=2) | anything,
    },
)


@given(requests, requests)
def test_nothing_is_ever_raised(one: dict[str, Any], other: dict[str, Any]) -> None:
    last, now = fingerprint(one), fingerprint(other)
    assert fingerprint(copy.deepcopy(one)) == last
    assert tell_difference(last, now).isprintable()
    assert 0 <= shared_blocks(last, now) <= min(len(last.chain), len(now.chain))


# the beginning


def test_the_opening_ends_with_the_first_user_message() -> None:
    tools = [{"name": "f", "input_schema": {}}]
    opening = fingerprint(chat(("system", "x" * 300), ("user", "one"), tools=tools)).packed
    more = chat(("system", "x" * 300), ("user", "one"), ("assistant", "two"), ("user", "three"), tools=tools)
    assert fingerprint(more).opening == opening
    assert of(("system", "one"), ("assistant", "two")).opening == of(("system", "one")).packed
    assert of(("assistant", "two"), ("user", "one")).opening == b""


@given(
    st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant", "tool", "odd"]), st.text(min_size=1)), max_size=6
    )
)
def test_there_are_pieces_for_each_span(messages: list[tuple[str, str]]) -> None:
    request = chat(*messages)
    spans = fingerprint(request).spans
    assert [(role, tuple(map(len, texts))) for role, texts in pieces_of(request)] == [
        (span.role, span.pieces) for span in spans
    ]
