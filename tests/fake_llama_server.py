"""A model of llama-server's slots for tests: as strict as the real one, instant, and it can be told to fail.

What it does was measured on llama.cpp b11549 and is checked against a real server in tests/real/test_fake_agrees.py:
task ids, token counts, reuse, sizes of files, what is parked and when it is let go, what a damaged file does.

How to use it:

    fake = FakeLlamaServer(slots=1, save_dir=tmp_path)
    fake.mount(respx_mock, "http://llama:8080")        # requests of httpx are answered in this process
    async with fake.serve() as base_url: ...           # or a real HTTP server on a free port

    done = await fake.complete("hello", slot=0)        # a request without any HTTP
    assert done.text == fake.truth("hello")            # the oracle: what a server without a cache answers
    fake.fail("save", "drop", times=2)                 # faults, per action
    assert fake.count("slots") == 1                    # the log of all calls: fake.calls

The oracle. A slot has two things: the tokens that the server believes to be there, and the K/V cells that really are.
A cell is a digest of the model's weights, its token and all cells before it. The tokens that a request generates are
a digest of all cells of its slot. So an answer that was computed upon a cache of another model, or upon a damaged
one, is another answer than `truth()`, although the server reports nothing but a good reuse; as with the real one.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import hashlib
import json
import re
import string
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import httpx
import respx

from fake_http import Answer, Disconnected, HttpServer, Refused, Stream
from fake_llama_api import (
    N_VOCAB,
    Api,
    Completion,
    Reply,
    ServerError,
    body_of,
    id_slot_of,
    messages_of,
    models,
    props,
    render,
    slot_params,
    tokenize,
    user_starts,
)

__all__ = ["Answer", "Call", "Completion", "Disconnected", "FakeLlamaServer", "Refused", "Slot", "render", "tokenize"]

Reuse = Literal["dense", "swa", "hybrid"]
Where = Literal["save", "restore", "erase", "slots", "props", "models", "health", "chat", "template", "*"]
Kind = Literal[
    "drop",  # the connection is closed before anything was done
    "drop_after",  # it is done, but the connection is closed before the answer
    "refuse",  # no connection to be had
    "hang",  # nothing is done and no answer comes until the fault is cleared; then it goes on as if nothing was
    "late",  # done at once, answered `seconds` later
    "500",
    "503",
    "garbage",  # 200, and no JSON
    "wrong_shape",  # 200, and a list where an object is due, or the other way round
    "wrong_types",  # 200, and strings where numbers are due
    "empty_save",  # the slot was emptied just before: n_saved 0 and a file without tokens
    "short_file",  # the answer is as it should be, the file lacks its end
    "wrong_count",  # n_saved is half of what it should be
    "cut",  # a stream ends in the middle, without its end mark; an answer that is no stream: half of its body
    "restart",  # the server was restarted just before: it answers with empty slots
    "crash",  # the server dies of it (a save leaves half a file); nobody answers until restart()
]

N_BATCH, N_UBATCH = 2048, 512
N_SWA, SWA_CELLS = 128, 768
MAX_CHECKPOINTS, CHECKPOINT_STEP = 32, 8192
ALPHABET = string.ascii_letters + string.digits
FILE_MAGIC, CHECKPOINT_MAGIC = b"qsgg\x04\x00\x00\x00", b"SCKP"
_CELL = 8
_INT32 = 2**31

# --------------------------------------------------------------------------------------------------------------------
# what a slot holds


def _digest(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=_CELL).digest()


class _Memory:
    """The K/V cells of one slot."""

    def __init__(self, cells: Iterable[bytes] = ()) -> None:
        self._set(list(cells))

    def _set(self, cells: list[bytes]) -> None:
        self.cells = cells
        self._all = hashlib.blake2b(b"".join(cells), digest_size=16)

    def compute(self, weights: bytes, tokens: Iterable[int]) -> None:
        for token in tokens:
            cell = _digest(weights, self._all.digest(), struct.pack("<i", token))
            self.cells.append(cell)
            self._all.update(cell)

    def keep_first(self, n: int) -> None:
        if n < len(self.cells):
            self._set(self.cells[:n])

    def next_token(self) -> int:
        return ord(ALPHABET[int.from_bytes(self._all.digest()[:4], "big") % len(ALPHABET)])


@dataclass(frozen=True)
class _Checkpoint:
    n_tokens: int
    pos_min: int

    @property
    def pos_max(self) -> int:
        return self.n_tokens - 1


class _DoesNotFit(Exception):
    """A file that the server refuses, with its words."""


class _CutShort(Exception):
    """A file that ends in the middle of its K/V data: the server dies of it (an assertion in b11549)."""


@dataclass
class Slot:
    """One slot. `id_task` is None until a request has used it: so long not even a restore is to be seen in /slots."""

    id: int
    tokens: tuple[int, ...] = ()
    id_task: int | None = None
    is_processing: bool = False
    memory: _Memory = field(default_factory=_Memory, repr=False)
    checkpoints: list[_Checkpoint] = field(default_factory=list, repr=False)
    window_start: int = 0  # sliding window: the first position whose cells are all still there
    last_used: int = -1
    params: dict[str, Any] = field(default_factory=dict, repr=False)

    def clear(self) -> None:
        self.put((), _Memory(), ())

    def put(self, tokens: Iterable[int], memory: _Memory, checkpoints: Iterable[_Checkpoint]) -> None:
        self.tokens, self.memory, self.checkpoints = tuple(tokens), memory, list(checkpoints)
        self.window_start = max(0, len(self.tokens) - N_SWA)


# --------------------------------------------------------------------------------------------------------------------
# requests and answers


@dataclass
class Call:
    """One call as it came in. `status` is None while it runs, 0 when it never got an answer."""

    method: str
    path: str
    action: str
    slot: int | None
    filename: str | None
    status: int | None = None


class _Abandoned(Exception):
    """The client of a request had left and the server has noticed."""


_RESTORE_ERROR = "Unable to restore slot: "
_NO_SPACE = "No available space in KV cache or invalid slot save file"


@dataclass(eq=False)
class _Fault:
    where: str
    kind: Kind
    times: int | None
    seconds: float
    cleared: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Job:
    """A task of the server's queue."""

    id: int
    kind: Literal["chat", "save", "restore", "erase", "slots", "cancel"]
    id_slot: int = -1
    done: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    # a request
    prompt: tuple[int, ...] = ()
    user_starts: tuple[int, ...] = ()
    n_predict: int = -1
    cache_prompt: bool = True
    stream: bool = False
    gate: asyncio.Event | None = None
    params: dict[str, Any] = field(default_factory=dict)
    events: asyncio.Queue[tuple[str, Any]] = field(default_factory=asyncio.Queue)
    # a request that runs
    state: Literal["waiting", "started", "prompt", "prompt_done", "generating"] = "waiting"
    cached: int = 0
    processed: int = 0
    generated: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # start, first token
    # a save, a restore
    filename: str = ""
    fault: str = ""
    # a cancel
    target: _Job | None = None

    @property
    def budget(self) -> int:
        return max(self.n_predict, 1)

    def finish(self, value: Any) -> None:
        if not self.done.done():
            self.done.set_result(value)
            self.events.put_nowait(("end", value))

    def fail(self, error: BaseException) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # seen: nobody may be left to ask
            self.events.put_nowait(("error", error))


class FakeLlamaServer:
    """See the module. All times are 0 unless given; nothing happens by itself while nobody asks.

    slots, n_ctx          number of slots, and tokens that each may hold
    clears_idle_slots     unified K/V: a request that starts empties all other idle slots
    bytes_per_token       of a saved file (272 is what the tiny dense model of the tests needs)
    reuse                 the model's memory: "dense", "swa" (sliding window) or "hybrid" (recurrent)
    checkpoints_in_file   saved files hold the checkpoints too, as builds since about b11500 write them;
                          without it a restored "swa" or "hybrid" slot is reused as older builds reuse it
    model_path, weights   files fit every model of the same `shape`; the answers depend on `weights` (the path, if empty)
    short_file_crashes    a file that ends within its K/V data kills the server (measured); else it answers 400
    empty_file_crashes    restoring a file without tokens kills the server (older builds)
    damage_lasts          a refused restore spoils what is computed from then on, until a restart (llama.cpp issue 27068)
    leave_poll_seconds    a client that left without a stream is only noticed when the server has finished nothing for
                          this long: whoever asks for /slots more often, or sends short requests to other slots, keeps
                          the abandoned request running (measured: 1 s; /health, /props and streams do not count)
    messages_pin          whether /v1/messages obeys id_slot (b11549 does not)

    The attribute `gate`, an asyncio.Event, holds the requests that begin while it is there: they stay in processing,
    their prompt computed, until it is set.
    """

    def __init__(
        self,
        slots: int = 1,
        *,
        save_dir: Path,
        n_ctx: int = 4096,
        clears_idle_slots: bool = False,
        bytes_per_token: int = 272,
        api_key: str | None = None,
        slots_endpoint: bool = True,
        slot_save_path: bool = True,
        model_path: str = "/models/a.gguf",
        weights: str = "",
        shape: str = "tiny",
        reuse: Reuse = "dense",
        checkpoints_in_file: bool = False,
        prefill_seconds_per_token: float = 0.0,
        decode_seconds_per_token: float = 0.0,
        switch_seconds: float = 0.0,
        wake_seconds: float = 0.0,
        default_predict: int = 16,
        short_file_crashes: bool = True,
        empty_file_crashes: bool = False,
        damage_lasts: bool = False,
        leave_poll_seconds: float = 1.0,
        messages_pin: bool = False,
    ) -> None:
        if bytes_per_token < 4 + _CELL:
            raise ValueError(f"bytes_per_token must be at least {4 + _CELL}")
        self.save_dir = Path(save_dir)
        self.save_dir.mkdir(parents=True, exist_ok=True)
        self.n_ctx = n_ctx
        self.clears_idle_slots = clears_idle_slots
        self.bytes_per_token = bytes_per_token
        self.api_key = api_key
        self.slots_endpoint = slots_endpoint
        self.slot_save_path = slot_save_path
        self.model_path, self.weights, self.shape = model_path, weights, shape
        self.reuse: Reuse = reuse
        self.checkpoints_in_file = checkpoints_in_file
        self.prefill_seconds_per_token = prefill_seconds_per_token
        self.decode_seconds_per_token = decode_seconds_per_token
        self.switch_seconds = switch_seconds
        self.wake_seconds = wake_seconds
        self.default_predict = default_predict
        self.short_file_crashes = short_file_crashes
        self.empty_file_crashes = empty_file_crashes
        self.damage_lasts = damage_lasts
        self.leave_poll_seconds = leave_poll_seconds
        self.messages_pin = messages_pin
        self.gate: asyncio.Event | None = None

        self.calls: list[Call] = []
        self.wakes = 0  # how often something woke it
        self.restarts = 0
        self.crashes = 0
        self.is_sleeping = False
        self.is_up = True
        self._life = 0
        self._waking = asyncio.Lock()
        self._faults: list[_Fault] = []
        self._hanging: list[_Fault] = []
        self._servers: list[HttpServer] = []
        self._n_slots = slots
        self._changed: asyncio.Event = asyncio.Event()
        self._left: dict[_Job, asyncio.TimerHandle] = {}  # requests whose client is gone
        self._fresh()

    # ------------------------------------------------------------------------------------------ for tests to look at

    def count(self, action: str, status: int | None = None) -> int:
        """How many calls of this action came in (that were answered with this status)."""
        return sum(c.action == action and (status is None or c.status == status) for c in self.calls)

    def actions(self) -> list[str]:
        return [c.action for c in self.calls]

    @property
    def parked(self) -> int:
        """How many calls wait for a slot."""
        return len(self._deferred)

    @property
    def is_busy(self) -> bool:
        return any(s.is_processing for s in self.slots)

    async def until(self, condition: Callable[[], bool], timeout: float = 5.0) -> None:
        """Returns as soon as the condition holds, which is looked at whenever something has happened here."""

        async def wait() -> None:
            while not condition():
                await self._changed.wait()

        await asyncio.wait_for(wait(), timeout)

    async def until_processing(self, slot: int = 0, timeout: float = 5.0) -> None:
        """Returns when a request holds the slot and its prompt has been computed."""

        def ready() -> bool:
            job = self._running.get(slot)
            return job is not None and job.state in ("prompt_done", "generating")

        await self.until(ready, timeout)

    async def until_idle(self, timeout: float = 5.0) -> None:
        await self.until(lambda: not self.is_busy and not self._queue and not self._deferred, timeout)

    def truth(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], n_predict: int = 4) -> str:
        """What this model answers to a prompt (text, tokens or messages) when no cache is involved."""
        memory = _Memory()
        tokens = _as_tokens(prompt)
        memory.compute(self._weights(healthy=True), tokens)
        out: list[int] = []
        for _ in range(min(max(n_predict, 1), self.n_ctx - len(tokens))):
            out.append(memory.next_token())
            memory.compute(self._weights(healthy=True), out[-1:])
        return "".join(map(chr, out))

    def file_size(self, n_tokens: int) -> int:
        """Bytes of a saved file without checkpoints."""
        return 36 + 4 * (self._n_stream - 1) + (64 + self.bytes_per_token * n_tokens if n_tokens else 0)

    def tokens_in_file(self, filename: str) -> tuple[int, ...] | None:
        """The tokens of a saved file; None if this server would not take it."""
        with contextlib.suppress(OSError, _DoesNotFit, _CutShort):
            return self._read_file(filename)[0]
        return None

    # ------------------------------------------------------------------------------------------------ for tests to do

    def fail(self, where: Where, kind: Kind, times: int | None = 1, *, seconds: float = 0.0) -> None:
        """Makes the next `times` calls of an action (None: all until `clear()`) fail in this way.

        On a real port a refused call is a reset connection; `fail("*", "refuse", None)` really closes the port.
        """
        self._faults.append(_Fault(where, kind, times, seconds))
        for server in self._servers:
            server.listen(self._listens())

    def clear(self) -> None:
        """Ends all faults. What hangs goes on."""
        faults, self._faults = self._faults, []
        for fault in faults:
            fault.cleared.set()
        for fault in self._hanging:
            fault.cleared.set()
        for server in self._servers:
            server.listen(self._listens())

    def restart(self, *, model_path: str | None = None, weights: str | None = None, slots: int | None = None) -> None:
        """The process ends (everything that runs is lost, every connection closed) and a new one takes its place."""
        self._die()
        self.restarts += 1
        self.model_path = self.model_path if model_path is None else model_path
        self.weights = self.weights if weights is None else weights
        self._n_slots = self._n_slots if slots is None else slots
        self._fresh()
        self.is_up = True
        for server in self._servers:
            server.listen(self._listens())
        self._note_change()

    def crash(self) -> None:
        """The process ends. Nobody answers until `restart()`."""
        self.crashes += 1
        self._die()

    def sleep(self) -> None:
        """The model is unloaded, as after --sleep-idle-seconds."""
        if self.is_busy:
            raise RuntimeError("a server that works does not sleep")
        self.is_sleeping = True
        self.slots = [Slot(i) for i in range(self._n_slots)]
        self._note_change()

    async def complete(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        slot: int | None = None,
        n_predict: int = 4,
        gate: asyncio.Event | None = None,
    ) -> Completion:
        """A request without HTTP: text, tokens or messages. It stays in processing until `gate` is set.

        Cancelling it is a client that leaves and is noticed at once.
        """
        if not self.is_up:
            raise Refused
        await self._wake()
        tokens = _as_tokens(prompt)
        starts = user_starts(tokens) if prompt and isinstance(prompt[0], Mapping) else ()
        job = self._new(
            "chat",
            id_slot=-1 if slot is None else slot,
            prompt=tokens,
            user_starts=starts,
            n_predict=n_predict,
            gate=gate or self.gate,
            params=slot_params(n_predict, stream=False, temperature=0.0),
        )
        self._post(job)
        try:
            result = await asyncio.shield(job.done)
        except asyncio.CancelledError:
            self._cancel(job)
            raise
        assert isinstance(result, Completion)
        return result

    # ----------------------------------------------------------------------------------------------------- two ways in

    def mount(self, router: respx.MockRouter, base_url: str) -> respx.Route:
        """Answers what httpx sends to `base_url`. Read time-outs of the client hold."""

        async def answer(request: httpx.Request) -> httpx.Response:
            target = request.url.raw_path.decode("ascii")
            prefix = urlsplit(base_url).path.rstrip("/")
            timeout = request.extensions.get("timeout", {}).get("read")
            try:
                got = await asyncio.wait_for(
                    self.handle(request.method, target.removeprefix(prefix), request.headers, await request.aread()),
                    timeout,
                )
            except (TimeoutError, asyncio.TimeoutError):
                raise httpx.ReadTimeout("timed out", request=request) from None
            except Disconnected:
                words = "Server disconnected without sending a response."
                raise httpx.RemoteProtocolError(words, request=request) from None
            except Refused:
                raise httpx.ConnectError("All connection attempts failed", request=request) from None
            headers = {"Server": "llama.cpp", "Content-Type": got.content_type}
            if got.stream is not None:
                return httpx.Response(got.status, headers=headers, stream=_HttpxStream(got.stream, request, timeout))
            return httpx.Response(got.status, headers=headers, content=got.body)

        # respx awaits coroutine side effects, its annotations do not know
        route: respx.Route = router.route(url__startswith=base_url.rstrip("/"))
        route.side_effect = answer
        return route

    @contextlib.asynccontextmanager
    async def serve(
        self, port: int = 0, *, keep_alive_seconds: float = 5.0, keep_alive_requests: int = 100
    ) -> AsyncIterator[str]:
        """A real HTTP server on the loopback address; yields its base URL."""
        server = HttpServer(self.handle, port, keep_alive_seconds, keep_alive_requests)
        self._servers.append(server)
        server.listen(self._listens())
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            self._servers.remove(server)
            self.clear()
            await server.close()

    def _listens(self) -> bool:
        down = any(f.where == "*" and f.kind == "refuse" and f.times is None for f in self._faults)
        return self.is_up and not down

    # ------------------------------------------------------------------------------------------------------ HTTP calls

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """One call. Raises Disconnected or Refused. To cancel it is what a client does that leaves."""
        url = urlsplit(target)
        path, query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        action = _action_of(method, path, query)
        payload: Any = None
        with contextlib.suppress(ValueError):
            payload = json.loads(body)
        fields = payload if isinstance(payload, dict) else {}
        name = fields.get("filename")
        at = re.match(r"/slots/\s*([+-]?\d+)", path)
        id_slot = int(at[1]) if at else id_slot_of(fields) if action == "chat" and "id_slot" in fields else None
        call = Call(method, path, action, id_slot, name if isinstance(name, str) else None)
        self.calls.append(call)
        self._note_change()
        if not self.is_up:
            call.status = 0
            raise Refused
        fault = self._fault_for(action)
        try:
            answer = await self._with_fault(fault, lambda kind: self._answer(call, fields, headers, body, query, kind))
        except (Disconnected, Refused):
            call.status = 0
            raise
        except asyncio.CancelledError:
            call.status = 0
            raise
        call.status = answer.status
        self._note_change()
        return answer

    def _fault_for(self, action: str) -> _Fault | None:
        for fault in self._faults:
            if fault.where in (action, "*"):
                if fault.times is not None:
                    fault.times -= 1
                    if fault.times == 0:
                        self._faults.remove(fault)
                return fault
        return None

    async def _with_fault(self, fault: _Fault | None, work: Callable[[str], Awaitable[Answer]]) -> Answer:
        kind = fault.kind if fault else ""
        if fault is None or kind in ("empty_save", "short_file", "wrong_count"):
            return await work(kind)
        if kind == "drop":
            raise Disconnected
        if kind == "refuse":
            raise Refused
        if kind == "500":
            return _json(500, {"error": {"code": 500, "message": "Internal error", "type": "server_error"}})
        if kind == "503":
            return _json(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
        if kind == "garbage":
            return Answer(200, b"<html><body>nothing to see here", "text/html")
        if kind == "hang":
            life = self._life
            self._hanging.append(fault)
            try:
                await fault.cleared.wait()
            finally:
                self._hanging.remove(fault)
            if life != self._life:
                raise Disconnected
            return await work("")
        if kind == "restart":
            self._end_all()
            self.restarts += 1
            self._fresh()
        if kind == "crash":
            answer = await work(kind)
            self.crash()
            raise Disconnected
        answer = await work("")
        if kind == "drop_after":
            if answer.stream is not None:
                await answer.stream.aclose()
            raise Disconnected
        if kind == "late":
            await asyncio.sleep(fault.seconds)
        elif kind == "cut":
            if isinstance(answer.stream, _Events):
                answer.stream.cut_after = 2
            else:
                answer.body = answer.body[: len(answer.body) // 2]
        elif kind in ("wrong_shape", "wrong_types") and answer.stream is None:
            value = json.loads(answer.body)
            if kind == "wrong_types":
                value = _as_strings(value)
            else:
                value = {"value": value} if isinstance(value, list) else [value]
            answer.body = json.dumps(value).encode()
        return answer

    async def _answer(
        self,
        call: Call,
        fields: dict[str, Any],
        headers: Mapping[str, str],
        body: bytes,
        query: dict[str, list[str]],
        fault: str,
    ) -> Answer:
        if call.action == "health":
            return _json(200, {"status": "ok"})
        if self.api_key is not None:
            given = {k.lower(): v for k, v in headers.items()}
            bearer = given.get("authorization", "").removeprefix("Bearer ")
            if self.api_key not in (bearer, given.get("x-api-key")):
                words = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
                return _json(401, {"error": words})
        if call.action == "props":
            return _json(
                200,
                props(
                    model=self.model_path,
                    n_ctx=self.n_ctx,
                    slots=self._n_slots,
                    slots_endpoint=self.slots_endpoint,
                    is_sleeping=self.is_sleeping,
                ),
            )
        if call.action == "models":
            return _json(200, models(model=self.model_path, n_ctx=self.n_ctx))
        if call.action == "other":
            return _json(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})
        await self._wake()
        try:
            if call.action == "chat":
                return await self._chat(call.path, body_of(body))
            if call.action == "template":
                fields = body_of(body)
                return _json(200, {"prompt": render(messages_of(fields), fields.get("add_generation_prompt", True))})
            if call.action == "tokenize":
                return _json(200, {"tokens": list(tokenize(str(body_of(body).get("content", ""))))})
            if call.action == "slots":
                if not self.slots_endpoint:
                    raise ServerError(501, "This server does not support slots endpoint. Start it with `--slots`")
                return _json(200, await self._wait_for(self._new("slots")))
            return await self._slot_action(call, body, query, fault)
        except ServerError as error:
            return _json(error.status, error.body)

    async def _slot_action(self, call: Call, body: bytes, query: dict[str, list[str]], fault: str) -> Answer:
        if not self.slot_save_path:
            raise ServerError(501, "This server does not support slots action. Start it with `--slot-save-path`")
        if call.slot is None or not -_INT32 <= call.slot < _INT32:
            raise ServerError(400, "Invalid slot ID")
        if call.action == "bad_action":
            raise ServerError(400, "Invalid action")
        if call.action != "erase":
            fields = body_of(body)
            if "filename" not in fields:
                raise ServerError(400, "[json.exception.out_of_range.403] key 'filename' not found")
            if not isinstance(fields["filename"], str):
                raise ServerError(400, "[json.exception.type_error.302] type must be string, but is another")
            if not _is_filename(fields["filename"]):
                raise ServerError(400, "Invalid filename")
        assert call.action in ("save", "restore", "erase")
        job = self._new(call.action, filename=call.filename or "", fault=fault)
        job.params = {"id_slot": call.slot}
        return _json(200, await self._wait_for(job))

    async def _wait_for(self, job: _Job) -> Any:
        self._post(job)
        try:
            return await asyncio.shield(job.done)
        except asyncio.CancelledError:
            self._leave(job)
            raise

    async def _chat(self, path: str, fields: dict[str, Any]) -> Answer:
        api = Api.of(path)
        tokens = api.prompt(fields)
        n_predict = api.n_predict(fields)
        stream = fields.get("stream") is True
        job = self._new(
            "chat",
            id_slot=id_slot_of(fields) if api.name != "messages" or self.messages_pin else -1,
            prompt=tokens,
            user_starts=user_starts(tokens) if api.is_chat else (),
            n_predict=self.default_predict if n_predict < 0 else n_predict,
            cache_prompt=fields.get("cache_prompt") is not False,
            stream=stream,
            gate=self.gate,
            params=slot_params(n_predict, stream=stream, temperature=float(fields.get("temperature", 0.8) or 0.0)),
        )
        reply = Reply(
            api, self.model_path, fields, n_prompt=len(tokens), params=job.params, ended_by_itself=n_predict < 0
        )
        if not stream:
            return _json(200, reply.whole(await self._wait_for(job)))
        self._post(job)
        try:
            first = await job.events.get()  # no answer begins before the slot has
        except asyncio.CancelledError:
            self._leave(job)
            raise
        if first[0] == "error":
            raise first[1]
        return Answer(200, content_type="text/event-stream", stream=_Events(job, reply, first, self._leave))

    # ------------------------------------------------------------------------------------------------ clients that left

    def _leave(self, job: _Job) -> None:
        """The client is gone. The server notices when it next writes to it, or when it has been quiet for a while."""
        if job.done.done() or not self.is_up:
            return
        self._left[job] = asyncio.get_running_loop().call_later(self.leave_poll_seconds, self._cancel, job)

    def _cancel(self, job: _Job) -> None:
        if (timer := self._left.pop(job, None)) is not None:
            timer.cancel()
        if job.done.done() or not self.is_up:
            return
        with contextlib.suppress(ValueError):
            self._queue.remove(job)
        with contextlib.suppress(ValueError):
            self._deferred.remove(job)
        self._post(self._new("cancel", target=job))

    # ------------------------------------------------------------------------------------------- the server's own loop
    # llama-server has one thread that works: it takes what is in its queue, then computes one batch for all slots.

    def _fresh(self) -> None:
        self.slots = [Slot(i) for i in range(self._n_slots)]
        self.is_sleeping = False
        self._n_stream = 1 if self.clears_idle_slots else self._n_slots
        self._damaged = False
        self._next_id = 0
        self._uses = 0
        self._queue: deque[_Job] = deque()
        self._deferred: deque[_Job] = deque()
        self._running: dict[int, _Job] = {}
        self._news: asyncio.Event = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def _die(self) -> None:
        self.is_up = False
        self._end_all()
        for server in self._servers:
            server.listen(False)
        self._note_change()

    def _end_all(self) -> None:
        self._life += 1
        if self._loop is not None:
            self._loop.cancel()
            self._loop = None
        for job in [*self._queue, *self._deferred, *self._running.values()]:
            job.fail(Disconnected())
        self._queue.clear()
        self._deferred.clear()
        self._running.clear()
        for timer in self._left.values():
            timer.cancel()
        self._left.clear()
        for fault in self._hanging:
            fault.cleared.set()

    def _new(self, kind: Any, **more: Any) -> _Job:
        job = _Job(self._next_id, kind, **more)
        self._next_id += 1
        return job

    def _post(self, job: _Job) -> None:
        if job.kind == "slots":
            self._queue.appendleft(job)
        else:
            self._queue.append(job)
        self._news.set()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.get_running_loop().create_task(self._work())
        self._note_change()

    def _note_change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _note_result(self) -> None:
        for job in list(self._left):
            self._left.pop(job).cancel()
            self._leave(job)
        self._note_change()

    async def _work(self) -> None:
        try:
            await self._work_on()
        except Exception as error:  # a mistake in this file: tell whoever waits, do not let them wait for ever
            for job in [*self._queue, *self._deferred, *self._running.values()]:
                job.fail(error)
            raise

    async def _work_on(self) -> None:
        while True:
            self._news.clear()
            while self._queue:
                await self._process(self._queue.popleft())
            if not self._running:
                return
            gates = [j.gate for j in self._running.values() if j.state == "prompt_done" and not _is_open(j.gate)]
            if len(gates) == len(self._running):
                await _first_of([self._news, *(g for g in gates if g is not None)])
            else:
                await self._update_slots()
                await asyncio.sleep(0)

    async def _spend(self, seconds: float, slots_meanwhile: bool) -> None:
        """Time in which the server computes. GET /slots is answered while it computes a batch, not during a switch."""
        if seconds <= 0:
            return
        end = _now() + seconds
        while (left := end - _now()) > 0:
            if slots_meanwhile:
                for job in [j for j in self._queue if j.kind == "slots"]:
                    self._queue.remove(job)
                    await self._process(job)
                self._news.clear()
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), left)
            else:
                await asyncio.sleep(left)

    async def _process(self, job: _Job) -> None:
        if job.kind == "cancel":
            assert job.target is not None
            self._ended(job.target)
            job.target.fail(_Abandoned())
            self._note_change()
            return
        if job.done.done():
            return
        if job.kind == "slots":
            job.finish([self._slot_json(s) for s in self.slots])
            self._note_result()
            return
        slot = self._slot_for(job)
        if slot is None or slot.is_processing:
            self._deferred.append(job)
            self._note_change()
            return
        if job.kind == "chat":
            self._launch(slot, job)
            return
        try:
            if job.kind != "erase":
                await self._spend(self.switch_seconds, slots_meanwhile=False)
            job.finish(self._do(slot, job))
        except ServerError as error:
            self._refuse(job, error)
        except _CutShort:
            job.fail(Disconnected())
            asyncio.get_running_loop().call_soon(self.crash)
        self._note_result()

    def _refuse(self, job: _Job, error: ServerError) -> None:
        self._next_id += 1  # after an error the server cancels the task that has ended anyway
        job.fail(error)

    def _slot_for(self, job: _Job) -> Slot | None:
        id_slot = job.id_slot if job.kind == "chat" else job.params["id_slot"]
        if job.kind != "chat" or id_slot != -1:
            return self.slots[(id_slot % 2**64) % len(self.slots)]
        idle = [s for s in self.slots if not s.is_processing]
        alike, best = None, 0.1
        for slot in idle:
            part = _common_prefix(slot.tokens, job.prompt) / len(job.prompt) if job.prompt and slot.tokens else 0.0
            if part > best:
                alike, best = slot, part
        # of slots that were used equally long ago, the last: a new server begins with its last slot
        return alike or min(reversed(idle), key=lambda s: s.last_used, default=None)

    def _launch(self, slot: Slot, job: _Job) -> None:
        slot.id_task, slot.is_processing, slot.params = job.id, True, job.params
        job.state = "started"
        self._running[slot.id] = job
        if self.clears_idle_slots:
            for other in self.slots:
                if not other.is_processing:
                    other.clear()
        self._note_change()

    def _ended(self, job: _Job) -> None:
        """The slot is free again, and one of those that wait is let go: a request pinned to it, else the first of all."""
        for slot in self.slots:
            if self._running.get(slot.id) is job:
                del self._running[slot.id]
                slot.is_processing = False
                self._uses += 1
                slot.last_used = self._uses
                pinned = (j for j in self._deferred if j.kind == "chat" and j.id_slot == slot.id)
                following = next(pinned, None) or (self._deferred[0] if self._deferred else None)
                if following is not None:
                    self._deferred.remove(following)
                    self._queue.appendleft(following)
                    self._news.set()

    async def _update_slots(self) -> None:
        """One batch: one token for each slot that generates, and as much of the prompts as fits."""
        self._next_id += 1  # the server posts itself a task for each
        room = N_BATCH
        sample: list[tuple[Slot, _Job]] = []
        todo: list[tuple[Slot, _Job, int]] = []
        for slot, job in self._at_work("generating"):
            slot.tokens += (job.generated[-1],)
            todo.append((slot, job, 1))
            sample.append((slot, job))
            room -= 1
        for slot, job in self._at_work("started", "prompt"):
            if room <= 0:
                break
            if job.state == "started" and not self._start(slot, job):
                continue
            n = self._next_batch(slot, job, room)
            slot.tokens = job.prompt[: len(slot.tokens) + n]
            room -= n
            todo.append((slot, job, n))
            if len(slot.tokens) == len(job.prompt):
                job.state = "prompt_done"
                sample.append((slot, job))
        self._note_change()
        prefill = sum(n for _, job, n in todo if job.state != "generating")
        decodes = any(job.state == "generating" for _, job, _ in todo)
        cost = prefill * self.prefill_seconds_per_token + (self.decode_seconds_per_token if decodes else 0.0)
        await self._spend(cost, slots_meanwhile=True)
        for slot, job, n in todo:
            slot.memory.compute(self._weights(), slot.tokens[len(slot.memory.cells) :])
            slot.window_start = max(slot.window_start, len(slot.tokens) - SWA_CELLS)
            if job.state != "generating":
                job.processed += n
        for slot, job in self._at_work("prompt_done"):
            if (slot, job) not in sample:
                sample.append((slot, job))
        for slot, job in sample:
            if job.state == "prompt_done" and not _is_open(job.gate):
                continue
            self._sample(slot, job)
        self._note_change()

    def _at_work(self, *states: str) -> list[tuple[Slot, _Job]]:
        return [(s, j) for s in self.slots if (j := self._running.get(s.id)) is not None and j.state in states]

    def _start(self, slot: Slot, job: _Job) -> bool:
        """Finds out what can be reused. False when the request ended here."""
        n_prompt = len(job.prompt)
        if not n_prompt:
            self._finish(slot, job)
            return False
        if n_prompt >= self.n_ctx:
            words = f"request ({n_prompt} tokens) exceeds the available context size ({self.n_ctx} tokens)"
            more = {"n_prompt_tokens": n_prompt, "n_ctx": self.n_ctx}
            self._ended(job)
            self._refuse(job, ServerError(400, words + ", try increasing it", "exceed_context_size_error", **more))
            self._note_result()
            return False
        job.cached = self._reusable(slot, job)
        slot.tokens = slot.tokens[: job.cached]
        slot.memory.keep_first(job.cached)
        job.state = "prompt"
        job.times.append(_now())
        job.events.put_nowait(("begin", job.cached))
        return True

    def _reusable(self, slot: Slot, job: _Job) -> int:
        prompt = job.prompt
        past = _common_prefix(slot.tokens, prompt) if job.cache_prompt else 0
        if self.reuse != "dense":
            window = N_SWA if self.reuse == "swa" else 0
            pos_min = slot.window_start if self.reuse == "swa" else len(slot.tokens) - 1
            needed = max(0, past - window - (0 if past < len(prompt) else 1))
            if past > 0 and pos_min >= needed:
                for point in reversed(slot.checkpoints):
                    if point.pos_max <= past and (point.pos_min < needed or point.pos_min == 0):
                        past = min(past, max(point.pos_min + 1, point.pos_max), point.n_tokens)
                        slot.window_start = max(0, point.n_tokens - N_SWA)
                        break
                else:
                    past = 0
            if past == 0:
                slot.window_start = 0
            slot.checkpoints = [c for c in slot.checkpoints if c.pos_max <= past]
        return past - 1 if past == len(prompt) else past

    def _next_batch(self, slot: Slot, job: _Job, room: int) -> int:
        """How many tokens of the prompt come next; models that cannot be rewound make checkpoints in between."""
        start, end = len(slot.tokens), len(job.prompt)
        stop = min(end, start + room)
        if self.reuse == "dense":
            return stop - start
        last_user = job.user_starts[-1] if job.user_starts else -1
        newest = slot.checkpoints[-1].n_tokens if slot.checkpoints else None
        stops = [end - min(N_BATCH, 4 + N_UBATCH), end - 4]
        stops += [u for u in job.user_starts if u == last_user or newest is None or u > newest + CHECKPOINT_STEP]
        stops.sort()
        i = bisect.bisect_right(stops, start)
        stop = min([stop, *stops[i : i + 1]])
        near_end = end < stop + N_UBATCH
        wanted = stop == end or start in job.user_starts or near_end
        spaced = newest is None or start == last_user or near_end or start > newest + CHECKPOINT_STEP
        if start > 0 and wanted and spaced:
            kept = [c for c in slot.checkpoints if c.n_tokens != start][-(MAX_CHECKPOINTS - 1) :]
            slot.checkpoints = [*kept, _Checkpoint(start, slot.window_start if self.reuse == "swa" else start - 1)]
        return stop - start

    def _sample(self, slot: Slot, job: _Job) -> None:
        job.state = "generating"
        token = slot.memory.next_token()
        job.generated.append(token)
        if len(job.generated) == 1:
            job.times.append(_now())
        if job.stream:
            job.events.put_nowait(("token", token))
            if job in self._left:
                self._cancel(job)
        if len(job.generated) >= job.budget or len(slot.tokens) + 1 >= self.n_ctx:
            self._finish(slot, job)

    def _finish(self, slot: Slot, job: _Job) -> None:
        text = "".join(map(chr, job.generated))
        begin, first, end = *[*job.times, _now(), _now()][:2], _now()
        done = Completion(
            text=text,
            tokens=tuple(job.generated),
            n_prompt=len(job.prompt),
            cached=job.cached,
            slot=slot.id,
            id_task=job.id,
            n_slot=len(slot.tokens),
            prompt_ms=1000 * (first - begin),
            predicted_ms=1000 * (end - first),
        )
        self._ended(job)
        job.finish(done)
        self._note_result()

    # ---------------------------------------------------------------------------------------- save, restore and erase

    def _do(self, slot: Slot, job: _Job) -> dict[str, Any]:
        id_slot = job.params["id_slot"]
        if job.kind == "erase":
            n = len(slot.tokens)
            slot.clear()
            return {"id_slot": id_slot, "n_erased": n}
        if job.kind == "save":
            if job.fault == "empty_save":
                slot.clear()
            n, written = self._write_file(slot, job)
            n = n // 2 if job.fault == "wrong_count" else n
            return {
                "id_slot": id_slot,
                "filename": job.filename,
                "n_saved": n,
                "n_written": written,
                "timings": {"save_ms": 1000 * self.switch_seconds + 0.1},
            }
        try:
            tokens, memory, checkpoints, n_read = self._read_file(job.filename)
        except (OSError, _DoesNotFit) as error:
            slot.clear()
            self._damaged |= self.damage_lasts and isinstance(error, _DoesNotFit)
            words = str(error) if isinstance(error, _DoesNotFit) else _NO_SPACE
            raise ServerError(400, _RESTORE_ERROR + words) from None
        slot.put(tokens, memory, checkpoints)
        return {
            "id_slot": id_slot,
            "filename": job.filename,
            "n_restored": len(tokens),
            "n_read": n_read,
            "timings": {"restore_ms": 1000 * self.switch_seconds + 0.1},
        }

    # A file as the real one writes it, in outline: magic, version, tokens; then the number of streams and cells; then
    # 64 bytes that say which kind of model it fits, and the cells. Each cell is blown up to its share of the size, so
    # that a bit flipped anywhere in it makes it another cell.

    def _write_file(self, slot: Slot, job: _Job) -> tuple[int, int]:
        n = len(slot.tokens)
        packed = struct.pack(f"<{n + 4}i", -1, 1, n, *slot.tokens, 0)
        parts = [FILE_MAGIC, struct.pack("<I", n + 4), packed, struct.pack("<II", self._n_stream, n)]
        parts.append(bytes(4 * (self._n_stream - 1)))
        if n:
            parts.append(_digest(self.shape.encode()).ljust(64, b"\0"))
            parts.extend(self._blow_up(cell) for cell in slot.memory.cells)
        if self.checkpoints_in_file and slot.checkpoints:
            parts.append(CHECKPOINT_MAGIC + struct.pack("<II", 1, len(slot.checkpoints)))
            parts.extend(struct.pack("<qi", c.n_tokens, c.pos_min) for c in slot.checkpoints)
        data = b"".join(parts)
        short = job.fault in ("short_file", "crash")
        try:
            (self.save_dir / job.filename).write_bytes(data[: len(data) // 2] if short else data)
        except OSError:
            raise ServerError(500, "Unable to save slot") from None
        return n, len(data)

    def _blow_up(self, cell: bytes) -> bytes:
        size = self.bytes_per_token - 4
        return (cell * (size // _CELL + 1))[:size]

    def _read_file(self, filename: str) -> tuple[tuple[int, ...], _Memory, list[_Checkpoint], int]:
        data = (self.save_dir / filename).read_bytes()
        if data[:8] != FILE_MAGIC or len(data) < 12:
            raise _DoesNotFit(_NO_SPACE)
        n_packed = struct.unpack_from("<I", data, 8)[0]
        at = 12 + 4 * n_packed
        if n_packed < 4 or len(data) < at + 8 + 4 * (self._n_stream - 1):
            raise _DoesNotFit(_NO_SPACE)
        packed = struct.unpack_from(f"<{n_packed}i", data, 12)
        n = n_packed - 4
        if struct.unpack_from("<II", data, at) != (self._n_stream, n) or n > self.n_ctx:
            raise _DoesNotFit(_NO_SPACE)
        at += 8 + 4 * (self._n_stream - 1)
        if not n:
            if self.empty_file_crashes:
                raise _CutShort
            return (), _Memory(), [], at
        if len(data) < at + 64 or data[at : at + _CELL] != _digest(self.shape.encode()):
            raise _DoesNotFit(_NO_SPACE)
        at += 64
        size = self.bytes_per_token - 4
        end = at + n * size
        if len(data) < end:
            raise _CutShort if self.short_file_crashes else _DoesNotFit(_NO_SPACE)
        if packed[:2] != (-1, 1) or not all(0 <= t < N_VOCAB for t in packed[3:-1]):
            raise _DoesNotFit("Invalid tokens in slot save file")
        if packed[2] != n or packed[-1] != 0:
            raise _DoesNotFit("Unexpected end of server tokens state")
        cells = []
        for i in range(at, end, size):
            blown, cell = data[i : i + size], data[i : i + _CELL]
            cells.append(cell if blown == self._blow_up(cell) else _digest(blown))
        checkpoints: list[_Checkpoint] = []
        if self.checkpoints_in_file and data[end : end + 4] == CHECKPOINT_MAGIC and len(data) >= end + 12:
            count = struct.unpack_from("<I", data, end + 8)[0]
            if len(data) >= end + 12 + 12 * count:
                found = struct.iter_unpack("<qi", data[end + 12 : end + 12 + 12 * count])
                checkpoints = [_Checkpoint(a, b) for a, b in found]
                end += 12 + 12 * count
        return packed[3:-1], _Memory(cells), checkpoints, end

    # ------------------------------------------------------------------------------------------------- sleep, and shapes

    async def _wake(self) -> None:
        async with self._waking:
            if self.is_sleeping:
                self.wakes += 1
                await asyncio.sleep(self.wake_seconds)
                self.is_sleeping = False
                self._note_change()

    def _weights(self, healthy: bool = False) -> bytes:
        spoiled = "" if healthy or not self._damaged else "spoiled"
        return f"{self.weights or self.model_path}\0{spoiled}".encode()

    def _slot_json(self, slot: Slot) -> dict[str, Any]:
        job = self._running.get(slot.id)
        out: dict[str, Any] = {
            "id": slot.id,
            "n_ctx": self.n_ctx,
            "speculative": False,
            "is_processing": slot.is_processing,
        }
        if slot.id_task is None:
            return out
        remain = job.n_predict - len(job.generated) if job else -1
        out |= {
            "id_task": slot.id_task,
            "n_prompt_tokens": len(slot.tokens),
            "n_prompt_tokens_processed": job.processed if job else 0,
            "n_prompt_tokens_cache": job.cached if job else 0,
            "params": slot.params,
            "next_token": [
                {
                    "has_next_token": job is not None,
                    "has_new_line": False,
                    "n_remain": remain,
                    "n_decoded": len(job.generated) if job else 0,
                }
            ],
        }
        return out


# --------------------------------------------------------------------------------------------------------------------
# small helpers


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _is_open(gate: asyncio.Event | None) -> bool:
    return gate is None or gate.is_set()


async def _first_of(events: Sequence[asyncio.Event]) -> None:
    tasks = [asyncio.ensure_future(e.wait()) for e in events]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _as_tokens(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tokenize(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return tokenize(render(prompt))
    return tuple(prompt)


def _as_strings(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _as_strings(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_as_strings(v) for v in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value} pieces"
    return value


def _json(status: int, value: Any) -> Answer:
    return Answer(status, json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode())


def _is_filename(name: str) -> bool:
    if not name or len(name.encode()) > 255 or ".." in name or name == "." or name != name.strip(" "):
        return False
    return not name.endswith(".") and not re.search(r'[\x00-\x1f\x7f/\\:*?"<>|]', name)


def _action_of(method: str, path: str, query: Mapping[str, list[str]]) -> str:
    known = {
        ("GET", "/health"): "health",
        ("GET", "/v1/health"): "health",
        ("GET", "/props"): "props",
        ("GET", "/models"): "models",
        ("GET", "/v1/models"): "models",
        ("GET", "/slots"): "slots",
        ("POST", "/apply-template"): "template",
        ("POST", "/tokenize"): "tokenize",
    }
    if method == "POST" and re.fullmatch(r"/slots/[^/]+", path):
        action = query.get("action", [""])[0]
        return action if action in ("save", "restore", "erase") else "bad_action"
    if method == "POST" and Api.of(path).name:
        return "chat"
    return known.get((method, path), "other")


class _Events(AsyncIterator[bytes]):
    """The events of a stream, as they come."""

    def __init__(self, job: _Job, reply: Reply, first: tuple[str, Any], leave: Callable[[_Job], None]) -> None:
        self.cut_after: int | None = None
        self._job, self._reply, self._leave = job, reply, leave
        self._event: tuple[str, Any] | None = first
        self._lines: deque[bytes] = deque()
        self._sent = 0

    async def __anext__(self) -> bytes:
        if self._sent == self.cut_after:
            raise Disconnected
        while not self._lines:
            if self._event is None:
                raise StopAsyncIteration
            kind, value = self._event
            if kind == "error":
                raise value
            self._lines.extend(self._reply.events(kind, value))
            self._event = await self._job.events.get() if kind != "end" else None
        self._sent += 1
        return self._lines.popleft()

    async def aclose(self) -> None:
        """The client has what it wants, or has left."""
        self._leave(self._job)


class _HttpxStream(httpx.AsyncByteStream):
    """A stream as httpx reads it: with the client's read time-out between two pieces."""

    def __init__(self, stream: Stream, request: httpx.Request, timeout: float | None) -> None:
        self._stream, self._request, self._timeout = stream, request, timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            try:
                piece = await asyncio.wait_for(self._stream.__anext__(), self._timeout)
            except StopAsyncIteration:
                return
            except (TimeoutError, asyncio.TimeoutError):
                raise httpx.ReadTimeout("timed out", request=self._request) from None
            except Disconnected:
                words = "peer closed connection without sending complete message body (incomplete chunked read)"
                raise httpx.RemoteProtocolError(words, request=self._request) from None
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
