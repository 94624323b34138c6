"""Where to rewind a conversation to, so that what is saved is what its next turn begins with.

Models with recurrent layers cannot go back by a token: a restored cache helps only a prompt that continues every token of
it. A slot is left with the tokens of the answer at its end, and the next prompt hardly ever repeats these: the template
drops the reasoning, the text is tokenized anew. So the slot is sent back to the end of a message before it is saved.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], Awaitable[str | None]]
"""Messages, and whether the beginning of an answer follows, as the model's template writes them; None: it cannot."""

MOST_TRIES = 8
"""So many ends of messages are tried at most."""

WORTH_PART = 0.1
"""Where the next turn keeps less than this part of the prompt, a rewind is not worth it."""

_MEDIA = frozenset({"image_url", "input_image", "image", "input_audio", "audio", "input_file", "file", "video_url"})


@dataclass(frozen=True)
class Conversation:
    """What a request that has been answered said, as the server got it. It holds the client's text: it is dropped as soon as
    its slot is rewound.

    Attributes:
        messages: in the form of chat completions.
        tools: their definitions.
        template: arguments for the template (`chat_template_kwargs`).
        prompt: in place of messages, a prompt as it is.
        calls_tools: the answer calls tools, so that their results come next.
    """

    messages: tuple[Message, ...] = field(default=(), repr=False)
    tools: tuple[Any, ...] = field(default=(), repr=False)
    template: Mapping[str, Any] = field(default_factory=dict, repr=False)
    prompt: str | None = field(default=None, repr=False)
    calls_tools: bool = False


@dataclass(frozen=True)
class Point:
    """Where to rewind to.

    Attributes:
        text: the beginning of the prompt up to there.
        whole: it is the end of the last message, not of an earlier one that a template keeps as it is.
    """

    text: str = field(repr=False)
    whole: bool


def conversation_of(request: Mapping[str, Any], calls_tools: bool = False) -> Conversation | None:
    """What a chat, responses or completions request says; None if it has images or sounds, or is of another shape."""
    body = request.get("extra_body")
    extra: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
    tools = request.get("tools")
    template = extra.get("chat_template_kwargs") or request.get("chat_template_kwargs")
    if "messages" in request:
        messages = request["messages"]
    elif "input" in request:
        messages = _chat_messages(request)
    else:
        prompt = request.get("prompt")
        return Conversation(prompt=prompt) if isinstance(prompt, str) and prompt else None
    if not isinstance(messages, (list, tuple)) or not messages or not all(isinstance(row, Mapping) for row in messages):
        return None
    if any(_has_media(row) for row in messages):
        return None
    return Conversation(
        tuple(messages),
        tuple(_chat_tool(tool) for tool in tools) if isinstance(tools, (list, tuple)) else (),
        template if isinstance(template, Mapping) else {},
        calls_tools=calls_tools,
    )


async def find_point(conversation: Conversation, render: Render) -> Point | None:
    """The longest beginning of a conversation, up to the end of a message, that its next turn keeps; None if there is none.

    What the slot holds is the conversation with the beginning of an answer. What comes next is the same with an answer and
    one more message, of a tool or the user. A template may write a message in another way when others follow it, so each end
    of a message is tried, the last one first: its text must be a beginning of both.
    """
    if conversation.prompt is not None:
        return Point(conversation.prompt, True)
    messages = list(conversation.messages)
    now = await render(messages, True)
    then = await render([*messages, *_next(conversation)], False)
    if now is None or then is None:
        return None
    if not then.startswith(now[: int(WORTH_PART * len(now))]):
        return None  # the template writes something else each time
    for end in _ends(messages):
        text = await render(messages[:end], False)
        if text and now.startswith(text) and then.startswith(text):
            return Point(text, end == len(messages))
    return None


def _ends(messages: Sequence[Message]) -> Iterator[int]:
    """How many messages to keep: all, one less and so on; then up to each message of the user, from the last one on."""
    total = len(messages)
    last = list(range(total, max(total - MOST_TRIES // 2, 0), -1))
    users = [number for number in range(total, 0, -1) if messages[number - 1].get("role") == "user"]
    yield from list(dict.fromkeys([*last, *users]))[:MOST_TRIES]


def _next(conversation: Conversation) -> list[Message]:
    """Some answer and what may follow it."""
    if not conversation.calls_tools:
        return [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."}]
    call = {"id": "call000000", "type": "function", "function": {"name": _some_name(conversation), "arguments": "{}"}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call000000", "content": "done"},
    ]


def _some_name(conversation: Conversation) -> str:
    for tool in conversation.tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    return "tool"


def _has_media(row: Message) -> bool:
    return any(_is_media(part) for name in ("content", "output") for part in _parts(row.get(name)))


def _is_media(part: Message) -> bool:
    kind = part.get("type")
    return (isinstance(kind, str) and kind in _MEDIA) or any(_is_media(inner) for inner in _parts(part.get("content")))


def _parts(content: object) -> list[Message]:
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, (list, tuple)) else []


def _chat_tool(tool: Any) -> Any:
    """A tool's definition as chat completions has it."""
    if isinstance(tool, Mapping) and "function" not in tool and tool.get("type") == "function":
        return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
    return tool


def _chat_messages(request: Mapping[str, Any]) -> list[Message] | None:
    """The messages of a responses request, as llama-server reads them."""
    rows = request["input"]
    found: list[dict[str, Any]] = []
    if isinstance(request.get("instructions"), str) and request["instructions"]:
        found.append({"role": "system", "content": request["instructions"]})
    if isinstance(rows, str):
        return [*found, {"role": "user", "content": rows}]
    if not isinstance(rows, (list, tuple)):
        return None
    reasoning = ""
    for row in rows:
        if not isinstance(row, Mapping):
            return None
        kind = row.get("type", "message")
        if kind == "reasoning":
            reasoning = _text(row.get("content")) or _text(row.get("summary"))
            continue
        if kind == "function_call":
            call = {
                "id": row.get("call_id"),
                "type": "function",
                "function": {"name": row.get("name"), "arguments": row.get("arguments")},
            }
            if not (found and found[-1]["role"] == "assistant"):
                found.append({"role": "assistant", "content": ""})
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            if _has_media(row):
                return [row]
            output = row.get("output")
            text = output if isinstance(output, str) else _text(output) or json.dumps(output)
            found.append({"role": "tool", "tool_call_id": row.get("call_id"), "content": text})
        elif kind == "message" and isinstance(row.get("role"), str):
            if _has_media(row):
                return [row]
            content = row.get("content")
            text = content if isinstance(content, str) else _text(content)
            role = "system" if row["role"] == "developer" else row["role"]
            found.append({"role": role, "content": text})
        else:
            return None
        if reasoning and found[-1]["role"] == "assistant":
            found[-1]["reasoning_content"], reasoning = reasoning, ""
    return list(found)


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return ""
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def calls_tools(answer: Any) -> bool:
    """Whether an answer, or a piece of a stream, of any of the APIs calls a tool."""
    if isinstance(answer, (bytes, str)):
        marks: tuple[Any, ...] = ('"tool_use"', '"tool_calls"', '"function_call"')
        return any((mark.encode() if isinstance(answer, bytes) else mark) in answer for mark in marks)
    choices = _get(answer, "choices")
    if isinstance(choices, (list, tuple)):
        for choice in choices:
            if _get(choice, "finish_reason") == "tool_calls":
                return True
            if any(_get(_get(choice, name), "tool_calls") for name in ("message", "delta")):
                return True
        return False
    items = [_get(answer, "item"), _get(answer, "content_block")]
    for name in ("output", "content"):
        more = _get(answer, name)
        items += more if isinstance(more, (list, tuple)) else []
    return any(_get(item, "type") in ("tool_use", "function_call") for item in items)


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
