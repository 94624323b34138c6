"""What llama-server says, in its own words: its tokens, and the shapes of its answers, as recorded from a real one.

Used by fake_llama_server.py.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IM_START, IM_END, N_VOCAB = 256, 257, 258


@dataclass(frozen=True)
class Completion:
    """What a request came to."""

    text: str
    tokens: tuple[int, ...]
    n_prompt: int
    cached: int
    slot: int
    id_task: int
    n_slot: int  # tokens in the slot afterwards
    prompt_ms: float
    predicted_ms: float


class ServerError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, kind: str = "", **more: Any) -> None:
        kinds = {400: "invalid_request_error", 500: "server_error", 501: "not_supported_error"}
        super().__init__(message)
        self.status = status
        self.body = {"error": {"code": status, "message": message, "type": kind or kinds[status], **more}}


def tokenize(text: str) -> tuple[int, ...]:
    tokens: list[int] = []
    for part in re.split(r"(<\|im_start\|>|<\|im_end\|>)", text):
        if part == "<|im_start|>":
            tokens.append(IM_START)
        elif part == "<|im_end|>":
            tokens.append(IM_END)
        else:
            tokens.extend(part.encode())
    return tuple(tokens)


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return ""


def render(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
    """The prompt of a conversation. An answer at its end is continued, whatever is asked for, as llama-server does it."""
    tail = ""
    if messages and messages[-1].get("role") == "assistant":
        messages, tail = messages[:-1], text_of(messages[-1].get("content"))
        add_generation_prompt = True
    turns = "".join(f"<|im_start|>{m.get('role')}\n{text_of(m.get('content'))}<|im_end|>\n" for m in messages)
    return turns + ("<|im_start|>assistant\n" + tail if add_generation_prompt else "")


def user_starts(tokens: tuple[int, ...]) -> tuple[int, ...]:
    mark = (IM_START, *b"user\n")
    return tuple(i for i, t in enumerate(tokens) if t == IM_START and tokens[i : i + len(mark)] == mark)


def body_of(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        raise ServerError(400, "[json.exception.parse_error.101] parse error at line 1, column 1") from None
    if not isinstance(value, dict):
        raise ServerError(400, "[json.exception.type_error.304] cannot use at() with another type")
    return value


def id_slot_of(fields: Mapping[str, Any]) -> int:
    value = fields.get("id_slot")
    return int(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else -1


def slot_params(n_predict: int, *, stream: bool, temperature: float) -> dict[str, Any]:
    """Of a slot: as recorded."""
    out = copy.deepcopy(_RECORDED_PARAMS)
    as_float32 = struct.unpack("<f", struct.pack("<f", temperature))[0]
    return out | {"temperature": as_float32, "max_tokens": n_predict, "n_predict": n_predict, "stream": stream}


_ONLY_IN_COMPLETION: dict[str, Any] = {
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "stop": [],
    "logit_bias": [],
    "grammar": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
}

_RECORDED_PARAMS: dict[str, Any] = {
    "seed": 4294967295,
    "temperature": 0.800000011920929,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_k": 40,
    "top_p": 0.949999988079071,
    "min_p": 0.05000000074505806,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.10000000149011612,
    "typical_p": 1.0,
    "repeat_last_n": 64,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.10000000149011612,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.8999999761581421,
    "max_tokens": -1,
    "n_predict": -1,
    "n_keep": 0,
    "n_discard": 0,
    "ignore_eos": False,
    "stream": False,
    "n_probs": 0,
    "min_keep": 0,
    "chat_format": "peg-native",
    "reasoning_format": "deepseek",
    "reasoning_in_content": False,
    "generation_prompt": "<|im_start|>assistant\n",
    "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "speculative.types": "none",
    "timings_per_token": False,
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}


def props(*, model: str, n_ctx: int, slots: int, slots_endpoint: bool, is_sleeping: bool) -> dict[str, Any]:
    """GET /props."""
    settings = slot_params(-1, stream=False, temperature=0.8)
    settings |= {"chat_format": "Content-only", "reasoning_format": "none", "generation_prompt": ""}
    return {
        "default_generation_settings": {"params": settings, "n_ctx": n_ctx},
        "total_slots": slots,
        "model_alias": model,
        "model_ftype": "(guessed) all F32",
        "model_path": model,
        "modalities": {"vision": False, "video": False, "audio": False},
        "media_marker": f"<__media_{_tail(model)}__>",
        "endpoint_slots": slots_endpoint,
        "endpoint_props": False,
        "endpoint_metrics": False,
        "ui": True,
        "ui_settings": {},
        "chat_template": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "chat_template_caps": {
            "supports_object_arguments": False,
            "supports_parallel_tool_calls": False,
            "supports_preserve_reasoning": False,
            "supports_reasoning_effort": False,
            "supports_string_content": True,
            "supports_system_role": True,
            "supports_tool_calls": False,
            "supports_tools": False,
            "supports_typed_content": False,
        },
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "build_info": "b0-unknown",
        "is_sleeping": is_sleeping,
        "cors_proxy_enabled": False,
    }


def models(*, model: str, n_ctx: int) -> dict[str, Any]:
    """GET /v1/models."""
    return {
        "models": [
            {
                "name": model,
                "model": model,
                "modified_at": "",
                "size": "",
                "digest": "",
                "type": "model",
                "description": "",
                "tags": [""],
                "capabilities": ["completion"],
                "parameters": "",
                "details": {
                    "parent_model": "",
                    "format": "gguf",
                    "family": "",
                    "families": [""],
                    "parameter_size": "",
                    "quantization_level": "",
                },
            }
        ],
        "object": "list",
        "data": [
            {
                "id": model,
                "aliases": [model],
                "tags": [],
                "object": "model",
                "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
                "created": int(time.time()),
                "owned_by": "llamacpp",
                "meta": {
                    "vocab_type": 2,
                    "n_vocab": N_VOCAB,
                    "n_ctx": n_ctx,
                    "n_ctx_train": 131072,
                    "n_embd": 64,
                    "n_params": 90560,
                    "size": 362240,
                    "ftype": "(guessed) all F32",
                },
            }
        ],
    }


def _tail(what: str) -> str:
    return hashlib.blake2b(what.encode(), digest_size=16).hexdigest()


def messages_of(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "messages" not in fields:
        raise ServerError(400, "'messages' is required")
    messages = fields["messages"]
    if not isinstance(messages, list):
        raise ServerError(400, "Expected 'messages' to be an array")
    for message in messages:
        if not isinstance(message, dict) or (message.get("role") != "assistant" and "content" not in message):
            raise ServerError(400, "All non-assistant messages must contain 'content'")
    return messages


@dataclass(frozen=True)
class Api:
    name: str

    @classmethod
    def of(cls, path: str) -> Api:
        names = {
            "/v1/chat/completions": "chat",
            "/chat/completions": "chat",
            "/v1/completions": "completions",
            "/completion": "native",
            "/completions": "native",
            "/v1/responses": "responses",
            "/v1/messages": "messages",
        }
        return cls(names.get(path, ""))

    @property
    def is_chat(self) -> bool:
        return self.name in ("chat", "responses", "messages")

    def prompt(self, fields: Mapping[str, Any]) -> tuple[int, ...]:
        generation = fields.get("add_generation_prompt", True) is not False
        if self.name == "chat":
            return tokenize(render(messages_of(fields), generation))
        if self.name == "messages":
            system = text_of(fields.get("system"))
            head: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
            return tokenize(render([*head, *messages_of(fields)]))
        if self.name == "responses":
            if "input" not in fields:
                raise ServerError(400, "'input' is required")
            given = fields["input"]
            items = given if isinstance(given, list) else [{"role": "user", "content": given}]
            system = str(fields.get("instructions") or "")
            head = [{"role": "system", "content": system}] if system else []
            return tokenize(render([*head, *(i for i in items if "role" in i)], generation))
        prompt = fields.get("prompt")
        if isinstance(prompt, str):
            return tokenize(prompt)
        if isinstance(prompt, list) and all(isinstance(t, int) for t in prompt):
            return tuple(prompt)
        raise ServerError(400, '"prompt" must be a string or a list of tokens')

    def n_predict(self, fields: Mapping[str, Any]) -> int:
        for name in ("n_predict", "max_tokens", "max_completion_tokens", "max_output_tokens"):
            if isinstance(fields.get(name), int):
                return int(fields[name])
        return -1


class Reply:
    """The words of one answer, in the shape of the API it was asked in."""

    def __init__(
        self,
        api: Api,
        model: str,
        fields: Mapping[str, Any],
        *,
        n_prompt: int,
        params: Mapping[str, Any],
        ended_by_itself: bool,
    ) -> None:
        self.api, self.model, self.n_prompt, self.params = api, model, n_prompt, params
        self._sent = 0
        self.reason = "stop" if ended_by_itself else "length"
        options = fields.get("stream_options")
        self.include_usage = isinstance(options, dict) and options.get("include_usage") is True
        self.given_prompt = fields.get("prompt")
        self.created = int(time.time())
        self.cached = 0
        tail = _tail(repr((id(self), time.monotonic())))
        self.id = f"chatcmpl-{tail}"
        self.response_id, self.item_id = f"resp_{tail}", f"msg_{tail}"

    def usage(self, done: Completion) -> dict[str, Any]:
        n, out = done.n_prompt, len(done.tokens)
        if self.api.name == "messages":
            return {"cache_read_input_tokens": done.cached, "input_tokens": n - done.cached, "output_tokens": out}
        cached = {"cached_tokens": done.cached}
        if self.api.name == "responses":
            return {
                "input_tokens": n,
                "output_tokens": out,
                "total_tokens": n + out,
                "input_tokens_details": cached,
            }
        return {
            "completion_tokens": out,
            "prompt_tokens": n,
            "total_tokens": n + out,
            "prompt_tokens_details": cached,
        }

    def timings(self, done: Completion) -> dict[str, Any]:
        computed, out = done.n_prompt - done.cached, len(done.tokens)
        prompt_ms, predicted_ms = max(done.prompt_ms, 0.001), max(done.predicted_ms, 0.001)
        return {
            "cache_n": done.cached,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(computed, 1),
            "prompt_per_second": 1000 * computed / prompt_ms,
            "predicted_n": out,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / max(out, 1),
            "predicted_per_second": 1000 * out / predicted_ms,
        }

    def whole(self, done: Completion) -> dict[str, Any]:
        if self.api.name == "responses":
            return {"completed_at": self.created, **self._response(done)}
        if self.api.name == "messages":
            return {
                "id": self.id,
                "type": "message",
                "role": "assistant",
                "content": [{"type": "text", "text": done.text}],
                "model": self.model,
                "stop_reason": "max_tokens" if self.reason == "length" else "end_turn",
                "stop_sequence": None,
                "usage": self.usage(done),
            }
        if self.api.name == "native":
            return {
                "index": 0,
                "content": done.text,
                "tokens": list(done.tokens),
                "id_slot": done.slot,
                "stop": True,
                "model": self.model,
                "tokens_predicted": len(done.tokens),
                "tokens_evaluated": done.n_prompt,
                "generation_settings": {**self.params, **_ONLY_IN_COMPLETION},
                "prompt": self.given_prompt,
                "has_new_line": False,
                "truncated": False,
                "stop_type": ("limit" if self.reason == "length" else "eos") if done.tokens else "none",
                "stopping_word": "",
                "tokens_cached": done.n_slot,
                "timings": self.timings(done),
            }
        choice: dict[str, Any]
        if self.api.name == "chat":
            choice = {"finish_reason": self.reason, "index": 0}
            choice["message"] = {"role": "assistant", "content": done.text}
        else:
            choice = {"text": done.text, "index": 0, "logprobs": None, "finish_reason": self.reason}
        return {
            "choices": [choice],
            "created": self.created,
            "model": self.model,
            "system_fingerprint": "b0-unknown",
            "object": "chat.completion" if self.api.name == "chat" else "text_completion",
            "usage": self.usage(done),
            "id": self.id,
            "timings": self.timings(done),
        }

    def events(self, kind: str, value: Any) -> list[bytes]:
        """What is sent for each token and at the end. Before its first token a stream has no more than its headers."""
        lines: list[bytes] = []
        if kind == "begin":
            self.cached = value
        if kind == "token":
            self._sent += 1
        if kind == "token" and self._sent == 1:
            lines += getattr(self, f"_{self.api.name}_begin")(self.cached)
        if kind != "begin":
            lines += getattr(self, f"_{self.api.name}_{kind}")(value)
        return lines

    # /v1/chat/completions

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        return _sse(
            {
                "choices": list(choices),
                "created": self.created,
                "id": self.id,
                "model": self.model,
                "system_fingerprint": "b0-unknown",
                "object": "chat.completion.chunk" if self.api.name == "chat" else "text_completion",
                **more,
            }
        )

    def _chat_delta(self, reason: str | None, **delta: Any) -> dict[str, Any]:
        return {"finish_reason": reason, "index": 0, "delta": delta}

    def _chat_begin(self, cached: int) -> Iterable[bytes]:
        yield self._chunk(self._chat_delta(None, role="assistant", content=None))

    def _chat_token(self, token: int) -> Iterable[bytes]:
        yield self._chunk(self._chat_delta(None, content=chr(token)))

    def _chat_end(self, done: Completion) -> Iterable[bytes]:
        last = self._chat_delta(self.reason)
        if self.include_usage:
            yield self._chunk(last)
            yield self._chunk(usage=self.usage(done), timings=self.timings(done))
        else:
            yield self._chunk(last, timings=self.timings(done))
        yield b"data: [DONE]\n\n"

    # /v1/completions

    def _completions_begin(self, cached: int) -> Iterable[bytes]:
        return ()

    def _completions_token(self, token: int) -> Iterable[bytes]:
        yield self._chunk({"text": chr(token), "index": 0, "logprobs": None, "finish_reason": None})

    def _completions_end(self, done: Completion) -> Iterable[bytes]:
        last = {"text": "", "index": 0, "logprobs": None, "finish_reason": self.reason}
        yield self._chunk(last, usage=self.usage(done), timings=self.timings(done))
        yield b"data: [DONE]\n\n"

    # /completion

    def _native_begin(self, cached: int) -> Iterable[bytes]:
        return ()

    def _native_token(self, token: int) -> Iterable[bytes]:
        piece = {"index": 0, "content": chr(token), "tokens": [token], "stop": False, "id_slot": -1}
        yield _sse({**piece, "tokens_predicted": self._sent, "tokens_evaluated": self.n_prompt})

    def _native_end(self, done: Completion) -> Iterable[bytes]:
        yield _sse({**self.whole(done), "content": "", "tokens": []})

    # /v1/responses

    def _item(self, done: Completion) -> dict[str, Any]:
        part = {"type": "output_text", "annotations": [], "logprobs": [], "text": done.text}
        item = {"type": "message", "status": "completed", "id": self.item_id}
        return {**item, "content": [part], "role": "assistant"}

    def _response(self, done: Completion) -> dict[str, Any]:
        return {
            "created_at": self.created,
            "id": self.response_id,
            "model": self.model,
            "object": "response",
            "output": [self._item(done)],
            "status": "completed",
            "usage": self.usage(done),
        }

    def _responses_begin(self, cached: int) -> Iterable[bytes]:
        empty = {"id": self.response_id, "object": "response", "status": "in_progress"}
        item = {"content": [], "id": self.item_id, "role": "assistant", "status": "in_progress", "type": "message"}
        yield _event("response.created", response=empty)
        yield _event("response.in_progress", response=empty)
        yield _event("response.output_item.added", item=item)
        part = {"type": "output_text", "text": ""}
        yield _event("response.content_part.added", item_id=self.item_id, part=part)

    def _responses_token(self, token: int) -> Iterable[bytes]:
        yield _event("response.output_text.delta", item_id=self.item_id, delta=chr(token))

    def _responses_end(self, done: Completion) -> Iterable[bytes]:
        item = self._item(done)
        yield _event("response.output_text.done", item_id=self.item_id, text=done.text)
        yield _event("response.content_part.done", item_id=self.item_id, part=item["content"][0])
        yield _event("response.output_item.done", item=item)
        yield _event("response.completed", response=self._response(done), timings=self.timings(done))

    # /v1/messages

    def _messages_begin(self, cached: int) -> Iterable[bytes]:
        n = self.n_prompt
        message: dict[str, Any] = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"cache_read_input_tokens": cached, "input_tokens": n - cached, "output_tokens": 0},
        }
        yield _event("message_start", message=message)
        yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def _messages_token(self, token: int) -> Iterable[bytes]:
        yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": chr(token)})

    def _messages_end(self, done: Completion) -> Iterable[bytes]:
        reason = "max_tokens" if self.reason == "length" else "end_turn"
        yield _event("content_block_stop", index=0)
        delta = {"stop_reason": reason, "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage={"output_tokens": len(done.tokens)})
        yield _event("message_stop")


def _sse(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\n".encode() + _sse({"type": kind, **more})
