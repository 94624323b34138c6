"""Clients of the four APIs, as tests need them: they hold a conversation over any of them, and they leave when told to.

The tests' models have a ChatML template and one token a byte, so a conversation's prompt is known here as text, it is the
same in every API, and its characters are its tokens (but for the two marks of the template).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

Api = Literal["chat", "completions", "messages", "responses"]
APIS: tuple[Api, ...] = ("chat", "completions", "messages", "responses")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


def api_of(name: str, turn: int) -> Api:
    """The API for a turn of a conversation: another one each time, but completions, whose prompt is a text of its own and not
    known for the same conversation, for a quarter of the conversations and all their turns."""
    number = ord(name[0])
    return "completions" if number % 4 == 1 else ("chat", "messages", "responses")[(number + turn) % 3]


FEWEST_TOKENS = 16
"""LiteLLM asks for no shorter answers in messages and responses."""


def count_tokens(prompt: str) -> int:
    """How many tokens a prompt has: one a character, and one for each mark of the template."""
    marks = ("<|im_start|>", "<|im_end|>")
    return len(prompt) - sum(prompt.count(mark) * (len(mark) - 1) for mark in marks)


def text_of(name: str, length: int = 400) -> str:
    """A text that differs from every other name's in its first characters and all along."""
    text = ""
    for number in itertools.count():
        if len(text) >= length:
            break
        text += f"{name}{number * 7919 % 1000} "
    return text[:length]


class RequestFailed(RuntimeError):
    """Something else than a complete answer came."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:500]}")
        self.status = status


@dataclass(frozen=True)
class Reply:
    """A complete answer; `outcome` and `steadied` are what the plugin's response headers say."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    outcome: str | None
    steadied: str | None = None


def reuse(sessions: Iterable[Sequence[Reply]]) -> float:
    """The share of the sessions' previous prompts that was not computed again."""
    pairs = [pair for session in sessions for pair in itertools.pairwise(session)]
    return sum(min(now.cached_tokens, last.prompt_tokens) for last, now in pairs) / sum(
        last.prompt_tokens for last, _ in pairs
    )


@dataclass
class Session:
    """A conversation. What is said is remembered when its answer is complete, and only then."""

    name: str
    route: str
    said: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, *more: tuple[str, str]) -> str:
        """The whole prompt as the template makes it, up to where the answer begins."""
        turns = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*self.said, *more])
        return f"{turns}<|im_start|>assistant\n"

    async def ask(
        self,
        client: httpx.AsyncClient,
        text: str,
        *,
        api: Api = "chat",
        stream: bool = False,
        tokens: int = FEWEST_TOKENS,
        remember: bool = True,
        headers: Mapping[str, str] | None = None,
        extensions: dict[str, Any] | None = None,
        **options: Any,
    ) -> Reply:
        """Say `text` and read the whole answer, at temperature 0.

        Raises:
            RequestFailed: another answer than 200, or a stream that says that it failed.
        """
        body = self.body(text, api, stream, tokens) | options
        asked = {**self.headers, **(headers or {})}
        if stream:
            reply = await _streamed(client, api, body, asked, extensions)
        else:
            response = await client.post(PATHS[api], json=body, headers=asked, extensions=extensions)
            if response.status_code != 200:
                raise RequestFailed(response.status_code, response.text)
            reply = _whole(api, response)
        if remember:
            self.said += [("user", text), ("assistant", reply.text)]
        return reply

    @contextlib.asynccontextmanager
    async def open_stream(
        self,
        client: httpx.AsyncClient,
        text: str,
        *,
        api: Api = "chat",
        tokens: int = FEWEST_TOKENS,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Say `text` and be handed the pieces of the answer as they come. Who leaves the block leaves the stream."""
        body = self.body(text, api, True, tokens) | options
        asked = {**self.headers, **(headers or {})}
        async with client.stream("POST", PATHS[api], json=body, headers=asked) as response:
            if response.status_code != 200:
                await response.aread()
                raise RequestFailed(response.status_code, response.text)
            yield _pieces(api, response)

    async def leave(
        self,
        client: httpx.AsyncClient,
        text: str,
        *,
        after: int = 0,
        when: Callable[[], Awaitable[object]] | None = None,
        stream: bool = True,
        **options: Any,
    ) -> bool:
        """Say `text` and go away: after so many pieces of the answer, or when `when` has returned, or else at once, as
        soon as all of the request is sent. Returns whether the answer was still to come."""
        if after:
            async with self.open_stream(client, text, **options) as pieces:
                async for _ in pieces:
                    after -= 1
                    if not after:
                        return True
            return False
        sent = asyncio.Event()

        async def trace(event: str, _: object) -> None:
            if event == "http11.send_request_body.complete":
                sent.set()

        ask = self.ask(client, text, remember=False, stream=stream, extensions={"trace": trace}, **options)
        asking = asyncio.ensure_future(ask)
        waiting = asyncio.ensure_future((when or sent.wait)())
        await asyncio.wait({asking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        left = not asking.done()
        for task in (asking, waiting):
            task.cancel()
        await asyncio.gather(asking, waiting, return_exceptions=True)
        return left

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-ID": self.name} if self.name else {}

    def body(self, text: str, api: Api, stream: bool, tokens: int) -> dict[str, Any]:
        """The request's body."""
        said = [*self.said, ("user", text)]
        body: dict[str, Any] = {"model": self.route, "temperature": 0, "stream": stream}
        if api == "responses":
            return body | {"input": [_item(role, words) for role, words in said], "max_output_tokens": tokens}
        rows = [{"role": role, "content": words} for role, words in said]
        if api == "messages":
            return body | {"messages": rows, "max_tokens": tokens}
        if stream:
            body["stream_options"] = {"include_usage": True}
        if api == "chat":
            return body | {"messages": rows, "max_tokens": tokens}
        return body | {"prompt": self.prompt(("user", text)), "max_tokens": tokens}


@dataclass
class ClaudeCode:
    """Claude Code, as far as a proxy can tell: a line with a checksum before its system prompt, blocks, tools and their
    results, marks for a cache that move along, and side requests for titles with the same session id.

    Every second request carries the result of a tool. The calls are made up here: the tests' models make none.
    """

    session: str
    route: str
    system: str = "You are an interactive agent that helps with software engineering. " * 30
    rows: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0

    async def turn(self, client: httpx.AsyncClient, text: str) -> Reply:
        """Say `text`, as the user's words or as what a tool has found, and read the answer."""
        if len(self.rows) % 4 == 2:
            call = f"toolu_{len(self.rows):04}"
            arguments = {"file_path": f"/src/file{len(self.rows)}.py"}
            self.rows[-1]["content"].append({"type": "tool_use", "id": call, "name": "Read", "input": arguments})
            content = [{"type": "tool_result", "tool_use_id": call, "content": text}]
        else:
            content = [{"type": "text", "text": text}]
        self.rows.append({"role": "user", "content": content})
        marked = {**content[-1], "cache_control": {"type": "ephemeral"}}
        rows = [*self.rows[:-1], {"role": "user", "content": [*content[:-1], marked]}]
        reply = await self._ask(client, rows, self.system, CLAUDE_CODE_TOOLS)
        self.rows.append({"role": "assistant", "content": [{"type": "text", "text": reply.text}]})
        return reply

    async def title(self, client: httpx.AsyncClient) -> Reply:
        """Ask for a title of the conversation, beside it."""
        said = next(block["text"] for row in self.rows for block in row["content"] if "text" in block)
        rows = [{"role": "user", "content": said}]
        return await self._ask(client, rows, "Analyze if this message indicates a new topic; write a title.", [])

    def line(self) -> str:
        """The line before the system prompt, another one for every request."""
        self.requests += 1
        digest = hashlib.sha256(f"{self.session}{self.requests}".encode()).hexdigest()
        return f"x-anthropic-billing-header: cc_version=2.1.37.{digest[:3]}; cc_entrypoint=cli; cch={digest[3:8]};"

    async def _ask(
        self, client: httpx.AsyncClient, rows: list[dict[str, Any]], system: str, tools: list[dict[str, Any]]
    ) -> Reply:
        body = {
            "model": self.route,
            "max_tokens": 32,
            "temperature": 0,
            "stream": True,
            "system": [
                {"type": "text", "text": self.line()},
                {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": rows,
            "metadata": {"user_id": f"user_{'0' * 64}_account__session_{self.session}"},
        }
        if tools:
            body["tools"] = tools
        headers = {
            "x-claude-code-session-id": self.session,
            "anthropic-version": "2023-06-01",
            "user-agent": "claude-cli/2.1.37 (external, cli)",
        }
        return await _streamed(client, "messages", body, headers, None)


CLAUDE_CODE_TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": f"{does} Use it when nothing else will do, with absolute paths only. " * 3,
        "input_schema": {
            "type": "object",
            "properties": {field: {"type": "string", "description": f"The {field}."} for field in fields},
            "required": list(fields),
            "additionalProperties": False,
        },
    }
    for name, does, fields in (
        ("Bash", "Runs a command in a shell and gives back what it prints.", ("command",)),
        ("Read", "Reads a file and gives back its lines, each with its number.", ("file_path",)),
        ("Edit", "Puts one text in the place of another one in a file.", ("file_path", "old_string", "new_string")),
    )
]


RECORDED = Path(__file__).parent / "fixtures" / "clients"
"""Requests in the shapes of programs, written for the tests: path, headers and body, in the order in which they are sent."""


def recorded(name: str) -> list[dict[str, Any]]:
    """The requests of a program: the first of a conversation, one beside it where it sends such, and the second."""
    loaded: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


async def send(client: httpx.AsyncClient, request: Mapping[str, Any]) -> Reply:
    """Send a recorded request and read the whole answer."""
    path = str(request["path"])
    api: Api = next(api for api in APIS if path.partition("?")[0] == PATHS[api])
    limit = "max_output_tokens" if api == "responses" else "max_tokens"  # the tests' models find no end
    body = {**request["body"], limit: FEWEST_TOKENS}
    if body["stream"]:
        return await _streamed(client, api, body, request["headers"], None, path)
    response = await client.post(path, json=body, headers=request["headers"])
    if response.status_code != 200:
        raise RequestFailed(response.status_code, response.text)
    return _whole(api, response)


def _item(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def _whole(api: Api, response: httpx.Response) -> Reply:
    answer = response.json()
    if api == "chat":
        text = answer["choices"][0]["message"]["content"]
    elif api == "completions":
        text = answer["choices"][0]["text"]
    elif api == "messages":
        text = "".join(block.get("text", "") for block in answer["content"])
    else:
        text = "".join(part["text"] for item in answer["output"] for part in item.get("content", []))
    return _reply(text, answer["usage"], response)


async def _streamed(
    client: httpx.AsyncClient,
    api: Api,
    body: dict[str, Any],
    headers: Mapping[str, str],
    extensions: dict[str, Any] | None,
    path: str = "",
) -> Reply:
    path = path or PATHS[api]
    usage: dict[str, Any] = {}
    parts: list[str] = []
    async with client.stream("POST", path, json=body, headers=dict(headers), extensions=extensions) as response:
        if response.status_code != 200:
            await response.aread()
            raise RequestFailed(response.status_code, response.text)
        async for event in _events(response):
            parts.append(_piece(api, event))
            told = event.get("usage") or (event.get("response") or {}).get("usage")
            if told and any(told.values()):
                usage = told
    return _reply("".join(parts), usage, response)


async def _pieces(api: Api, response: httpx.Response) -> AsyncIterator[str]:
    async for event in _events(response):
        if piece := _piece(api, event):
            yield piece


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if not line.startswith("data:") or line.endswith("[DONE]"):
            continue
        event = json.loads(line[5:])
        if event.get("error"):
            raise RequestFailed(200, json.dumps(event))
        yield event


def _piece(api: Api, event: dict[str, Any]) -> str:
    if api in ("chat", "completions"):
        choices = event.get("choices") or [{}]
        return (choices[0].get("delta") or {}).get("content") or choices[0].get("text") or ""
    if api == "messages":
        return str((event.get("delta") or {}).get("text", "")) if event["type"] == "content_block_delta" else ""
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _reply(text: str, usage: Mapping[str, Any], response: httpx.Response) -> Reply:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    prompt = usage.get("prompt_tokens") or usage.get("input_tokens") or 0
    cached = details.get("cached_tokens") or 0
    if "cache_read_input_tokens" in usage and not details:  # Anthropic counts them beside the input
        cached = usage["cache_read_input_tokens"] or 0
        prompt += cached
    headers = response.headers
    return Reply(text, prompt, cached, headers.get("x-slot-cache"), headers.get("x-slot-cache-steadied"))
