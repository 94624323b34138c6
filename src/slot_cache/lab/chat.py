"""A client that holds conversations and measures them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

OUTCOME_HEADER = "x-slot-cache"


class ChatError(RuntimeError):
    """A request was answered with something else than a completion."""


@dataclass(frozen=True)
class Turn:
    """One answered request.

    prompt_tokens    tokens of the whole prompt
    cached_tokens    how many of them the server did not have to compute
    ttft_seconds     from sending the request to the first text of the answer; not streamed: to the whole answer
    total_seconds    from sending the request to the end of the answer
    outcome          what the plugin says it did (response header), None without it
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_seconds: float
    total_seconds: float
    text: str
    outcome: str | None = None

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that the server had to compute."""
        return self.prompt_tokens - self.cached_tokens


def open_client(base_url: str, key: str | None = None, *, timeout: float = 600.0) -> httpx.AsyncClient:
    """A client for a proxy or a llama-server on this machine; `timeout` in seconds, for each read."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(keepalive_expiry=2.0)  # llama-server closes after 5 s
    return httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout, limits=limits, trust_env=False)


@dataclass
class Conversation:
    """A session id ("" sends none) and what was said so far. `model` is the route for a proxy, ignored by a llama-server."""

    session: str
    system: str = ""
    model: str = "smol"
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.system and not self.messages:
            self.messages.append({"role": "system", "content": self.system})

    async def turn(
        self,
        client: httpx.AsyncClient,
        text: str,
        max_tokens: int,
        stream: bool = True,
        *,
        remember: bool = True,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Turn:
        """Say `text` and read the whole answer, temperature 0.

        With `remember` both become part of the conversation, else the next turn starts where this one did. Raises ChatError
        on any other answer than 200, httpx errors when there is none; the conversation is then as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= extra_body or {}
        headers = {"X-Session-ID": self.session} if self.session else {}
        result = await (_streamed if stream else _whole)(client, body, headers)
        if remember:
            self.messages = [*messages, {"role": "assistant", "content": result.text}]
        return result


async def _whole(client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
    started = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body, headers=dict(headers))
    seconds = time.perf_counter() - started
    _raise_for_status(response)
    answer = response.json()
    message = answer["choices"][0]["message"]
    text = message.get("content") or message.get("reasoning_content") or ""
    return _turn(answer.get("usage"), seconds, seconds, text, response)


async def _streamed(client: httpx.AsyncClient, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
    started = time.perf_counter()
    first: float | None = None
    usage: Mapping[str, Any] | None = None
    parts: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=dict(headers)) as response:
        if response.status_code != 200:
            await response.aread()
        _raise_for_status(response)
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            chunk = json.loads(line[5:])
            if "error" in chunk:
                raise ChatError(f"the stream broke off: {json.dumps(chunk['error'])[:500]}")
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices") or []:
                delta = choice.get("delta") or {}
                part = delta.get("content") or delta.get("reasoning_content")
                if part:
                    first = first or time.perf_counter() - started
                    parts.append(part)
    seconds = time.perf_counter() - started
    return _turn(usage, first or seconds, seconds, "".join(parts), response)


def _turn(usage: Mapping[str, Any] | None, ttft: float, total: float, text: str, response: httpx.Response) -> Turn:
    if usage is None:
        raise ChatError("the answer carries no usage")
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=details.get("cached_tokens") or 0,
        completion_tokens=usage["completion_tokens"],
        ttft_seconds=ttft,
        total_seconds=total,
        text=text,
        outcome=response.headers.get(OUTCOME_HEADER),
    )


def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code != 200:
        raise ChatError(f"{response.status_code} {response.reason_phrase}: {response.text[:500]}")
