"""llama-server's HTTP API as far as slots need it, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from json import loads
from typing import Any, Literal
from urllib.parse import quote, urlsplit, urlunsplit

import httpx

from slot_cache.model import Identity, boot_of, identity_of
from slot_cache.state import SlotReading
from slot_cache.transport import MOST_BYTES, Begun, TooLongError, new_sender, unheard

LOOK_SECONDS = 2.0
"""How long `GET /slots`, /props and /health may take. A healthy server answers in milliseconds, or, between two batches
of a long prompt, in a few seconds; a request must not wait longer than 5 s for a server that hangs."""

SWITCH_SECONDS = 2.0
SLOWEST_BYTES_PER_SECOND = 50e6
"""A save or restore may take `SWITCH_SECONDS` and the time its bytes need on a slow disk."""

PATIENCE_SECONDS = 600.0
"""The server does what is asked of its slots between two batches of the prompts it computes, or when it has woken up. While
there is such a reason for it not to answer in time, it is waited for so long at most."""

UNKNOWN_BYTES_PER_TOKEN = 128 * 1024
"""A token's size in a file before one has been seen: that of an 8B model with f16 K/V and grouped-query attention."""

LOOKS = 20
"""So many of the requests that only look are kept to be sent again."""

_OF_THE_ROUTER = frozenset({"/health", "/models", "/v1/models", "/models/load", "/models/unload"})

Fault = Literal["unreachable", "timeout", "refused", "nonsense"]


class LlamaServerError(Exception):
    """A call did not bring what it should.

    Attributes:
        fault: `unreachable` (no connection, or it broke), `timeout`, `refused` (an HTTP error, see status), `nonsense`
            (an answer of another shape than llama-server's).
        status: the HTTP status, 0 if there was none.
    """

    def __init__(self, fault: Fault, what: str, status: int = 0) -> None:
        super().__init__(what)
        self.fault: Fault = fault
        self.status = status


@dataclass(frozen=True)
class SwitchAnswer:
    """What the server says of a save or a restore: tokens, size in bytes, and its own milliseconds for it."""

    tokens: int
    size: int
    milliseconds: float


@dataclass(frozen=True)
class Role:
    """What a server is, and the most models a router has loaded at once (0: no limit, None: it does not tell)."""

    kind: Literal["server", "router", "llama-swap"]
    max_instances: int | None = None


@dataclass(frozen=True)
class RouterModel:
    """A model of a router: its name, its status (unloaded, loading, loaded, sleeping ...), its other names."""

    name: str
    status: str
    aliases: tuple[str, ...] = ()
    failed: bool = False


@lru_cache(maxsize=256)
def base_url_of(api_base: str) -> str:
    """The server's own address from a deployment's `api_base`, with or without /v1.

    Raises:
        ValueError: it is no http or https URL with a host.
    """
    parts = urlsplit(api_base.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:  # .port raises on a bad one
        raise ValueError("api_base is no http or https URL")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        path = path[: -len("/v1")].rstrip("/")
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def shown_url(base_url: str) -> str:
    """The address without user and password, for logs."""
    parts = urlsplit(base_url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


@lru_cache(maxsize=256)
def same_server_key(base_url: str) -> str:
    """Equal for addresses that surely name the same server: case, a default port, and localhost's name do not count."""
    parts = urlsplit(base_url)
    host = (parts.hostname or "").lower()
    if host == "localhost":
        host = "127.0.0.1"
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{host}:{port}{parts.path}"


class LlamaServer:
    """One llama-server, or one model of a router (a llama-server without a model of its own, which starts others).

    With a `model` every call names it, and none makes the router load it.

    Every method raises `LlamaServerError` and nothing else (but `CancelledError`), within its time, or, while `has_a_reason`
    tells that the server may need longer for what concerns its slots, `PATIENCE_SECONDS`. A call on a
    kept-alive connection that the server has closed meanwhile is made once more on a new one; all calls here may
    safely be made twice.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        model: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self.shown = shown_url(base_url) if model is None else f"{shown_url(base_url)} {shown_model(model)}"
        self.api_key = api_key
        self.model = model
        self.has_a_reason: Callable[[], Awaitable[bool]] | None = None
        self._transport = transport
        self._sender = new_sender(base_url, transport)
        self._looks: dict[tuple[str, tuple[float, float], str | None], httpx.Request] = {}

    def for_model(self, model: str) -> LlamaServer:
        """The same server, for one model of it if it is a router."""
        return LlamaServer(self.base_url, self.api_key, model=model, transport=self._transport)

    def upstream(self, model: str) -> LlamaServer:
        """A model's own server behind a llama-swap. A call there starts it."""
        base_url = f"{self.base_url}/upstream/{quote(model, safe='')}"
        return LlamaServer(base_url, self.api_key, transport=self._transport)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._sender.aclose()

    async def slots(self, begun: Begun | None = None) -> list[SlotReading]:
        """Every slot, as `begin_slots` was answered if that was `begun`. This wakes a server that sleeps; ask `props` first
        where nobody waits."""
        return slot_readings(await self._call("GET", "/slots", LOOK_SECONDS, begun=begun))

    def begin_slots(self) -> Begun | None:
        """Ask for the slots, and await the answer later; None where that would have to wait. A plain call that never fails.
        What it returns must be dropped in the end."""
        try:
            return self._sender.begin(self._request("GET", "/slots", LOOK_SECONDS))
        except (httpx.InvalidURL, ValueError):
            return None

    async def takes_actions(self) -> bool:
        """Whether the server has a --slot-save-path: it is asked for an action that there is not, so that nothing is done.
        This wakes a server that sleeps."""
        try:
            await self._call("POST", "/slots/0", LOOK_SECONDS, params={"action": "none"}, json={})
        except LlamaServerError as error:
            if error.status not in (400, 501):
                raise
            return error.status == 400
        return True

    async def read(self, path: str) -> Any:
        """What the server answers to a GET, as it is. Of these /props, /models and /v1/models wake and load nothing."""
        return await self._call("GET", path, LOOK_SECONDS)

    async def sleeping(self) -> bool:
        """Whether the server has unloaded its model until the next request. Asking does not wake it."""
        return (await self._object("/props", 1.0)).get("is_sleeping") is True

    async def identity(self, known: Identity | None = None) -> Identity:
        """Which model the server runs. Asking does not wake it: of one that sleeps no more is told than what is known.

        Args:
            known: what it was last time; one call is spared where the server shows that it was not started again since.
        """
        props = await self._object("/props")
        sleeping = props.get("is_sleeping") is True
        if sleeping or (known is not None and known.boot and known.boot == boot_of(props)):
            return replace(known or Identity("", ""), sleeping=sleeping)
        entries = _entries(await self._object("/v1/models"))
        if self.model is not None:
            entries = [entry for entry in entries if entry.get("id") == self.model]
        return identity_of(props, entries[0] if entries else {})

    async def role(self) -> Role:
        """What the server is: one with a model of its own, a router, or a llama-swap (which has no /props of its own)."""
        try:
            props = await self._object("/props")
        except LlamaServerError as error:
            if error.status != 404:
                raise
            await self.running()
            return Role("llama-swap")
        limit = props.get("max_instances")
        if props.get("role") != "router":
            return Role("server")
        return Role("router", limit if isinstance(limit, int) and limit >= 0 else None)

    async def running(self) -> list[str]:
        """The models whose servers llama-swap has running. Asking starts none."""
        entries = (await self._object("/running")).get("running")
        if not isinstance(entries, list):
            raise LlamaServerError("nonsense", "GET /running answered no list of models")
        ready = [entry for entry in entries if isinstance(entry, dict) and entry.get("state", "ready") == "ready"]
        return [entry["model"] for entry in ready if isinstance(entry.get("model"), str)]

    async def models(self) -> list[RouterModel]:
        """The models of a router, in its order. Asking loads none."""
        found = []
        for entry in _entries(await self._object("/models")):
            name, status, aliases = entry.get("id"), entry.get("status"), entry.get("aliases")
            value = status.get("value") if isinstance(status, dict) else None
            if isinstance(name, str) and isinstance(value, str):
                known = aliases if isinstance(aliases, list) else []
                failed = isinstance(status, dict) and status.get("failed") is True
                found.append(RouterModel(name, value, tuple(str(alias) for alias in known), failed))
        return found

    async def load(self, model: str) -> None:
        """Have a router begin to load a model."""
        await self._call("POST", "/models/load", SWITCH_SECONDS, json={"model": model})

    async def unload(self, model: str) -> None:
        """Have a router begin to unload a model."""
        await self._call("POST", "/models/unload", SWITCH_SECONDS, json={"model": model})

    async def _object(self, path: str, seconds: float = LOOK_SECONDS) -> dict[str, Any]:
        body = await self._call("GET", path, seconds)
        if not isinstance(body, dict):
            raise LlamaServerError("nonsense", f"GET {path} answered no object")
        return body

    async def alive(self) -> bool:
        """Whether /health answers, which it does while the model computes."""
        try:
            if self.model is None:
                await self.health()
            else:  # /health would be the router's
                await self._call("GET", "/props", 1.0)
        except LlamaServerError:
            return False
        return True

    async def health(self) -> None:
        """Return when /health answers."""
        await self._call("GET", "/health", 1.0)

    async def save(self, slot: int, filename: str, expected_bytes: float) -> SwitchAnswer:
        """Have the slot written to a file in the server's --slot-save-path. Never call it for a busy slot."""
        return await self._switch(slot, "save", filename, expected_bytes, ("n_saved", "n_written", "save_ms"))

    async def restore(self, slot: int, filename: str, expected_bytes: float) -> SwitchAnswer:
        """Have a file read into the slot. One that fails (`refused`) leaves the slot empty."""
        return await self._switch(slot, "restore", filename, expected_bytes, ("n_restored", "n_read", "restore_ms"))

    async def erase(self, slot: int) -> None:
        """Have the slot emptied."""
        await self._call("POST", f"/slots/{slot}", SWITCH_SECONDS, params={"action": "erase"}, json={})

    async def render(
        self, messages: Sequence[Any], tools: Sequence[Any], template: Mapping[str, Any], *, answer_begins: bool
    ) -> str:
        """The prompt that the model's chat template makes of messages, with or without the beginning of an answer."""
        body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": answer_begins}
        if tools:
            body["tools"] = list(tools)
        if template:
            body["chat_template_kwargs"] = dict(template)
        told = await self._call("POST", "/apply-template", LOOK_SECONDS, json=body)
        prompt = told.get("prompt") if isinstance(told, dict) else None
        if not isinstance(prompt, str):
            raise LlamaServerError("nonsense", "POST /apply-template answered without a prompt")
        return prompt

    async def rewind(self, slot: int, text: str, seconds: float = 10.0) -> tuple[int, int]:
        """Have the slot hold the tokens of `text` and nothing else, within `seconds` for what must be computed. Returns how
        many of them it had, and how many it computed."""
        body = {"prompt": text, "n_predict": 0, "cache_prompt": True, "id_slot": slot, "temperature": 0}
        told = await self._call("POST", "/completion", SWITCH_SECONDS + seconds, json=body)
        timings = told.get("timings") if isinstance(told, dict) else None
        had, computed = (timings.get("cache_n"), timings.get("prompt_n")) if isinstance(timings, dict) else (None, None)
        if not isinstance(had, int) or not isinstance(computed, int):
            raise LlamaServerError("nonsense", "POST /completion answered without timings")
        return had, computed

    async def _switch(
        self, slot: int, action: str, filename: str, expected_bytes: float, names: tuple[str, str, str]
    ) -> SwitchAnswer:
        seconds = SWITCH_SECONDS + expected_bytes / SLOWEST_BYTES_PER_SECOND
        body = await self._call(
            "POST", f"/slots/{slot}", seconds, params={"action": action}, json={"filename": filename}
        )
        try:
            tokens, size = body[names[0]], body[names[1]]
            milliseconds = body.get("timings", {}).get(names[2], 0.0)
            if not (isinstance(tokens, int) and isinstance(size, int) and isinstance(milliseconds, (int, float))):
                raise TypeError
        except (TypeError, KeyError, AttributeError):
            raise LlamaServerError("nonsense", f"{action} answered without {names[0]} and {names[1]}") from None
        return SwitchAnswer(tokens, size, float(milliseconds))

    async def _call(
        self,
        method: str,
        path: str,
        seconds: float,
        *,
        params: dict[str, str] | None = None,
        json: Any = None,
        begun: Begun | None = None,
    ) -> Any:
        what = f"{method} {path}" + (f"?action={params['action']}" if params and "action" in params else "")
        try:
            request = self._request(method, path, seconds, params, json)
            has_a_reason = self._reason_for(path)
            if has_a_reason is not None:
                status, body = await self._patiently(request, seconds, has_a_reason, begun)
            else:
                status, body = await asyncio.wait_for(self._sending(request, begun), seconds)
        except TooLongError:
            raise LlamaServerError("nonsense", f"{what}: the answer is longer than {MOST_BYTES} bytes") from None
        except (asyncio.TimeoutError, httpx.TimeoutException):
            raise LlamaServerError("timeout", f"{what}: no answer within {seconds:.1f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            raise LlamaServerError("unreachable", f"{what}: {type(error).__name__}") from None
        if status != 200:
            raise LlamaServerError("refused", f"{what}: HTTP {status}", status)
        try:
            return loads(body)
        except (ValueError, RecursionError):
            raise LlamaServerError("nonsense", f"{what}: the answer is no JSON") from None

    def _reason_for(self, path: str) -> Callable[[], Awaitable[bool]] | None:
        """What tells whether there is a reason to wait longer for the answer; None: there is none for such calls."""
        return self.has_a_reason if path.startswith(("/slots", "/completion")) else None

    def _request(
        self, method: str, path: str, seconds: float, params: dict[str, str] | None = None, json: Any = None
    ) -> httpx.Request:
        """A request that names the model; a GET is the same each time, and made once."""
        timeout = (seconds if self._reason_for(path) is None else PATIENCE_SECONDS, min(seconds, LOOK_SECONDS))
        look = (path, timeout, self.api_key)
        if method == "GET" and look in self._looks:
            return self._looks[look]
        if self.model is not None and path not in _OF_THE_ROUTER:
            params = {**(params or {}), "autoload": "false"}
            if method == "GET":
                params["model"] = self.model
            else:
                json = {**(json or {}), "model": self.model}
        headers = {"Accept-Encoding": "identity", "User-Agent": "litellm-slot-cache"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = httpx.Request(
            method,
            self.base_url + path,
            params=params,
            json=json,
            headers=headers,
            extensions={"timeout": httpx.Timeout(timeout[0], connect=timeout[1]).as_dict()},
        )
        if request.url.userinfo:  # as httpx's client has it
            request = next(httpx.BasicAuth(request.url.username, request.url.password).auth_flow(request))
        if method == "GET":
            if len(self._looks) > LOOKS:
                self._looks.clear()
            self._looks[look] = request
        return request

    async def _patiently(
        self,
        request: httpx.Request,
        seconds: float,
        has_a_reason: Callable[[], Awaitable[bool]],
        begun: Begun | None,
    ) -> tuple[int, bytes]:
        """Send; go on waiting for the answer while there is a reason to."""
        call = self._sending(request, begun)
        waited = 0.0
        try:
            while not (await asyncio.wait({call}, timeout=seconds))[0]:
                waited += seconds
                if waited >= PATIENCE_SECONDS or not await has_a_reason():
                    raise asyncio.TimeoutError
            return call.result()
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait({call})

    def _sending(self, request: httpx.Request, begun: Begun | None) -> asyncio.Task[tuple[int, bytes]]:
        return unheard(asyncio.get_running_loop().create_task(self._twice(request, begun)))

    async def _twice(self, request: httpx.Request, begun: Begun | None = None) -> tuple[int, bytes]:
        """Send, if that was not begun; once more on a new connection if the one there was broke."""
        try:
            return await (self._sender.send(request) if begun is None else begun.answer())
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            return await self._sender.send(request, fresh=True)


def shown_model(model: str) -> str:
    """A model's name, which a client may have chosen, for one line of a log."""
    return "".join(char if char.isprintable() else "?" for char in model[:60])


def _entries(body: dict[str, Any]) -> list[dict[str, Any]]:
    entries = body.get("data")
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def slot_readings(body: object) -> list[SlotReading]:
    """Every slot, from the answer of `GET /slots`. Raises LlamaServerError where it is none."""
    try:
        if not isinstance(body, list):
            raise TypeError
        return [_slot_reading(entry) for entry in body]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise LlamaServerError("nonsense", f"GET /slots answered no list of slots ({type(error).__name__})") from None


def _slot_reading(entry: dict[str, Any]) -> SlotReading:
    number, processing, task, tokens = (
        entry["id"],
        entry["is_processing"],
        entry.get("id_task"),
        entry.get("n_prompt_tokens", 0),
    )
    if not isinstance(number, int) or not isinstance(processing, bool) or not isinstance(tokens, int):
        raise TypeError
    if task is not None and not isinstance(task, int):
        raise TypeError
    if task is not None and task < 0:
        task = None
    context = entry.get("n_ctx")
    return SlotReading(
        number,
        processing,
        task,
        tokens,
        _remaining(entry) if processing else None,
        context if isinstance(context, int) and context > 0 else 0,
    )


def _remaining(entry: dict[str, Any]) -> int | None:
    told = entry.get("next_token")
    token = told[0] if isinstance(told, list) and told else told
    if not isinstance(token, dict):
        return None
    decoded, remain = token.get("n_decoded"), token.get("n_remain")
    return remain if isinstance(remain, int) and remain >= 0 and isinstance(decoded, int) and decoded > 0 else None
