"""Where to rewind a conversation to, with templates of each kind there is."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slot_cache.rewind import MOST_TRIES, Conversation, Message, Point, calls_tools, conversation_of, find_point

START, END = "<|im_start|>", "<|im_end|>\n"
KEEPS_ALL = (
    "{% if tools %}[tools: {{ tools | tojson }}]\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }}({{ call.function.arguments }})]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_USER = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
DROPS_REASONING = (
    (LAST_USER + KEEPS_ALL)
    .replace("if m.reasoning_content", "if m.reasoning_content and loop.index0 > ns.last")
    .replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
)
DATED = "Today is {{ today }}.\n" + KEEPS_ALL
NUMBERED = "Request {{ number() }}.\n" + KEEPS_ALL
NUMBERED_AT_THE_END = KEEPS_ALL.replace(
    "<|im_end|>\n{% endfor %}", "{% if loop.last %} ({{ number() }}){% endif %}<|im_end|>\n{% endfor %}"
)
MERGES_SYSTEM = (
    "<|im_start|>system\n{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n{% endif %}{% endfor %}<|im_end|>\n"
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + KEEPS_ALL
)
ANSWERS_TOOLS_ONLY = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + KEEPS_ALL


class Renderer:
    """What llama-server's /apply-template does with a template: an answer at the end is continued, whatever is asked for."""

    def __init__(self, template: str, tools: Sequence[Any] = ()) -> None:
        environment = jinja2.Environment(undefined=jinja2.ChainableUndefined)
        self.counter = itertools.count()
        environment.globals["raise_exception"] = self.refuse
        environment.globals["number"] = lambda: next(self.counter)
        self.template = environment.from_string(template)
        self.tools = tools
        self.asked = 0

    @staticmethod
    def refuse(why: str) -> None:
        raise jinja2.TemplateError(why)

    def __call__(self, messages: Sequence[Message], answer_begins: bool) -> str | None:
        self.asked += 1
        continued = ""
        if messages and messages[-1]["role"] == "assistant":
            messages, continued, answer_begins = messages[:-1], str(messages[-1]["content"]), True
        try:
            text = self.template.render(
                messages=messages, add_generation_prompt=answer_begins, today="2026-11-30", tools=self.tools
            )
        except jinja2.TemplateError:
            return None
        return text + continued

    async def render(self, messages: Sequence[Message], answer_begins: bool) -> str | None:
        return self(messages, answer_begins)


def said(*words: str, system: str = "") -> list[Message]:
    """Messages of a user and a model in turn."""
    head: list[Message] = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)]


def call(name: str = "look", thought: str = "") -> Message:
    made = {"id": "c1", "type": "function", "function": {"name": name, "arguments": '{"day": 1}'}}
    return {"role": "assistant", "content": "", "reasoning_content": thought, "tool_calls": [made]}


RESULT: Message = {"role": "tool", "tool_call_id": "c1", "content": "rain"}


async def point_of(template: str, messages: Sequence[Message], calls: bool = False) -> Point | None:
    renderer = Renderer(template)
    found = await find_point(Conversation(tuple(messages), calls_tools=calls), renderer.render)
    assert renderer.asked <= 2 + MOST_TRIES
    return found


@pytest.mark.parametrize(
    "template",
    [KEEPS_ALL, DROPS_REASONING, DATED, MERGES_SYSTEM],
    ids=["keeps all", "drops reasoning", "dated", "merges system messages"],
)
async def test_the_point_is_the_end_of_the_last_message(template: str) -> None:
    messages = said("Hello", "Hi", "And?", system="Be brief")
    point = await point_of(template, messages)
    assert point is not None
    assert point.whole
    assert point.text.endswith(f"{START}user\nAnd?{END}")
    assert point.text == Renderer(template)(messages, False)


async def test_system_messages_that_are_merged_into_the_first_part() -> None:
    messages = [*said("Hello", system="Be brief"), {"role": "system", "content": "Be kind"}]
    point = await point_of(MERGES_SYSTEM, messages)
    assert point is not None
    assert point.text == f"{START}system\nBe brief\nBe kind\n{END}{START}user\nHello{END}"


async def test_reasoning_that_is_kept_inside_a_loop_of_tool_calls() -> None:
    messages = [*said("Hello"), call(thought="Hm"), RESULT]
    point = await point_of(DROPS_REASONING, messages, calls=True)
    assert point is not None
    assert point.whole
    assert "<think>Hm</think>" in point.text
    assert point.text.endswith(f"{START}tool\nrain{END}")


async def test_and_dropped_when_the_loop_is_over() -> None:
    messages = [*said("Hello", "Hi", "What is the weather?"), call(thought="Hm"), RESULT]
    point = await point_of(DROPS_REASONING, messages)
    assert point is not None
    assert not point.whole
    assert point.text.endswith(f"{START}user\nWhat is the weather?{END}")


async def test_a_loop_without_reasoning_is_kept_to_its_end() -> None:
    point = await point_of(DROPS_REASONING, [*said("Hello"), call(), RESULT])
    assert point is not None
    assert point.whole


async def test_what_changes_at_each_rendering_has_no_point() -> None:
    renderer = Renderer(NUMBERED)
    messages = said("Hello, who are you? " * 20, "Hi", *(["And then?", "Well."] * 10), "And?")
    assert await find_point(Conversation(tuple(messages)), renderer.render) is None
    assert renderer.asked == 2


async def test_what_changes_at_the_end_alone_does_not_matter_before_it() -> None:
    point = await point_of(NUMBERED_AT_THE_END, said("Hello", "Hi", "And?"))
    assert point is None or not point.whole


async def test_a_template_that_refuses_odd_beginnings() -> None:
    point = await point_of(STRICT, said("Hello", "Hi", "And?"))
    assert point is not None
    assert point.whole
    assert await point_of(STRICT, [*said("Hello"), *said("Again")]) is None
    point = await point_of(ANSWERS_TOOLS_ONLY, [*said("Hello"), call(), RESULT])
    assert point is None  # the conversation itself cannot be rendered


async def test_a_prompt_is_its_own_point() -> None:
    point = await find_point(Conversation(prompt="Once upon a time"), Renderer(KEEPS_ALL).render)
    assert point == Point("Once upon a time", True)


WORDS = st.text("abc <|>\n", max_size=6)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages: list[Message] = said("", system=draw(WORDS))[:1] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": draw(WORDS)})
        for _ in range(draw(st.integers(0, 2))):
            messages += [call(thought=draw(WORDS)), {**RESULT, "content": draw(WORDS)}]
        messages.append({"role": "assistant", "content": draw(WORDS), "reasoning_content": draw(WORDS)})
    return messages[: draw(st.integers(1, len(messages)))]


@settings(deadline=None, max_examples=200)
@given(conversations(), st.sampled_from([KEEPS_ALL, DROPS_REASONING, DATED, MERGES_SYSTEM, STRICT]), st.booleans())
async def test_the_point_is_a_beginning_of_now_and_then(messages: list[Message], template: str, calls: bool) -> None:
    point = await point_of(template, messages, calls)
    if point is None:
        return
    renderer = Renderer(template)
    now = renderer(messages, True)
    follows = [call(), RESULT] if calls else said("", "Well.", "Next?")[1:]
    then = renderer([*messages, *follows], False)
    assert now is not None
    assert now.startswith(point.text)
    assert then is None or then.startswith(point.text)
    ends = [renderer(messages[:number], False) for number in range(1, len(messages) + 1)]
    assert point.text in ends
    assert point.whole == (point.text == ends[-1])


# what a request says


def test_a_chat_request() -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    asked = {"messages": said("Hello"), "tools": tools, "extra_body": {"chat_template_kwargs": {"think": False}}}
    found = conversation_of(asked, calls_tools=True)
    assert found == Conversation(tuple(said("Hello")), tuple(tools), {"think": False}, calls_tools=True)


def test_a_completions_request() -> None:
    assert conversation_of({"prompt": "Once"}) == Conversation(prompt="Once")


def test_a_responses_request() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be kind"},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "it?"}],
        },
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"day": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"day": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Rain, then sun."}]},
        {"role": "user", "content": "Thanks"},
    ]
    tools = [{"type": "function", "name": "look", "parameters": {}}]
    found = conversation_of({"input": items, "instructions": "Be brief", "tools": tools})
    assert found is not None
    assert [message["role"] for message in found.messages] == [
        *["system", "system", "user", "assistant", "tool", "tool", "assistant", "user"]
    ]
    assert found.messages[2]["content"] == "What is it?"
    assert found.messages[3]["reasoning_content"] == "Hm"
    assert [made["id"] for made in found.messages[3]["tool_calls"]] == ["c1", "c2"]
    assert [found.messages[n]["content"] for n in (4, 5)] == ["rain", "sun"]
    assert found.tools == ({"type": "function", "function": {"name": "look", "parameters": {}}},)
    one = conversation_of({"input": "Hello"})
    assert one is not None
    assert list(one.messages) == said("Hello")


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "audio", "input_file", "file"])
@pytest.mark.parametrize("field", ["messages", "input"])
def test_images_and_sounds_are_not_rewound(field: str, kind: str) -> None:
    rows = [{"role": "user", "content": [{"type": "text", "text": "See"}, {"type": kind, kind: {"url": "data:"}}]}]
    assert conversation_of({field: rows}) is None
    assert conversation_of({field: [*rows, *said("Hello")]}) is None


def test_an_image_that_a_tool_has_brought_is_not_rewound() -> None:
    rows = [
        {"role": "user", "content": "Look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": "data:"}]},
    ]
    assert conversation_of({"input": rows}) is None

    result = {"type": "tool_result", "content": [{"type": "image", "source": {}}]}
    assert conversation_of({"messages": [{"role": "user", "content": [result]}]}) is None


NONSENSE = [
    None,
    "",
    0,
    "words",
    [],
    {},
    [None],
    [1],
    [[]],
    [{}],
    [{"role": 3}],
    [{"type": "x"}],
    [{"content": [None, 3]}],
    [{"content": [{"type": []}]}],
]


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
@pytest.mark.parametrize("name", ["messages", "input", "prompt", "tools", "extra_body", "chat_template_kwargs"])
def test_whatever_a_client_sends_nothing_is_raised(name: str, value: Any) -> None:
    for asked in ({name: value}, {"messages": said("Hello"), name: value}, {"input": "Hello", name: value}):
        found = conversation_of(asked)
        assert found is None or found.prompt or all(isinstance(row, Mapping) for row in found.messages)
    assert conversation_of({}) is None


def test_what_was_said_is_not_shown() -> None:
    found = conversation_of({"messages": said("a secret"), "tools": [{"function": {"name": "secret"}}]})
    assert "secret" not in repr(found)
    assert "secret" not in repr(conversation_of({"prompt": "a secret"}))
    assert "secret" not in repr(Point("a secret", True))


TOOL_CALL = SimpleNamespace(id="c1", function=SimpleNamespace(name="look"))


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"finish_reason": "tool_calls", "message": {"content": None}}]},
        {"choices": [{"finish_reason": None, "delta": {"tool_calls": [{"index": 0}]}}]},
        SimpleNamespace(
            choices=[SimpleNamespace(finish_reason="stop", message=SimpleNamespace(tool_calls=[TOOL_CALL]))]
        ),
        SimpleNamespace(choices=[SimpleNamespace(finish_reason=None, delta=SimpleNamespace(tool_calls=[TOOL_CALL]))]),
        {"content": [{"type": "text", "text": ""}, {"type": "tool_use", "name": "look"}]},
        {"type": "content_block_start", "content_block": {"type": "tool_use"}},
        b'event: content_block_start\ndata: {"content_block": {"type": "tool_use", "name": "look"}}\n\n',
        b'data: {"choices": [{"delta": {"tool_calls": []}}]}\n\n',
        'data: {"item": {"type": "function_call"}}',
        {"output": [{"type": "reasoning"}, {"type": "function_call", "name": "look"}]},
        SimpleNamespace(output=[SimpleNamespace(type="function_call")]),
        SimpleNamespace(type="response.output_item.added", item=SimpleNamespace(type="function_call")),
    ],
)
def test_an_answer_that_calls_a_tool(answer: Any) -> None:
    assert calls_tools(answer)


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"finish_reason": "stop", "message": {"content": "tool_calls", "tool_calls": None}}]},
        SimpleNamespace(choices=[SimpleNamespace(finish_reason="length", delta=SimpleNamespace(tool_calls=None))]),
        {"content": [{"type": "text", "text": "tool_use"}]},
        {"output": [{"type": "message"}]},
        b'data: {"delta": {"text": "hello"}}\n\n',
        {"choices": None, "output": 3, "content": "tool_use"},
        None,
        17,
    ],
)
def test_one_that_does_not(answer: Any) -> None:
    assert not calls_tools(answer)
