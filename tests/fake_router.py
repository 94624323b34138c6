"""A router (llama-server without a model) for tests, in the shapes that were recorded, with the habits that were measured.

    router = FakeRouter(("alpha", "beta", "gamma"), save_dir=tmp_path, max_instances=2)
    LlamaServer("http://llama:8080", transport=router.transport())     # requests of httpx are answered in this process
    async with router.serve() as base_url: ...                         # or a real HTTP server on a free port

    done = await router.complete("alpha", "hello", slot=0)             # a request, as a client makes it
    assert router.status() == {"alpha": "loaded", ...}
    assert router.log == ["POST /completion alpha", ...]               # all calls, and what it did by itself

Every model is a `FakeLlamaServer`: `router["alpha"].server`. What was measured of llama.cpp b11434:

* A POST counts as a use of its model, a GET does not; a model that is loaded was used then.
* Room is made by unloading the idle model that was used longest ago; while none is idle, whoever wants room waits.
* `autoload=false` never loads; a model that is not loaded answers 400 then, one that is loading, too.
* A load that fails leaves the model unloaded, with `failed` in its status; a request that wanted it gets 500.
* The slots of a model that is unloaded are gone, and so are the requests in it, if it was told to go.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

import httpx

from fake_http import Answer, Disconnected, HttpServer, Refused
from fake_llama_api import Completion
from fake_llama_server import FakeLlamaServer, _HttpxStream

ACTIVE = ("loading", "loaded", "sleeping")


class Handles(Protocol):
    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer: ...


class Wire(httpx.AsyncBaseTransport):
    """From httpx to a fake in this process. The client's read time-out holds, and a client that leaves is cancelled."""

    def __init__(self, fake: Handles) -> None:
        self._fake = fake

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        timeout = request.extensions.get("timeout", {}).get("read")
        target = request.url.raw_path.decode("ascii")
        body = await request.aread()
        try:
            answer = await asyncio.wait_for(self._fake.handle(request.method, target, request.headers, body), timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise httpx.ReadTimeout("timed out", request=request) from None
        except Disconnected:
            words = "Server disconnected without sending a response."
            raise httpx.RemoteProtocolError(words, request=request) from None
        except Refused:
            raise httpx.ConnectError("All connection attempts failed", request=request) from None
        headers = {"Content-Type": answer.content_type}
        if answer.stream is not None:
            return httpx.Response(answer.status, headers=headers, stream=_HttpxStream(answer.stream, request, timeout))
        return httpx.Response(answer.status, headers=headers, content=answer.body)


@dataclass(eq=False)
class Model:
    """One model of a router.

    load_seconds, unload_seconds   how long it takes to come and to go
    fails                          it cannot be loaded
    last_used                      grows with every use; 0: never
    loads                          how often it was loaded
    """

    name: str
    server: FakeLlamaServer
    aliases: tuple[str, ...] = ()
    status: str = "unloaded"
    load_seconds: float = 0.2
    unload_seconds: float = 0.1
    fails: bool = False
    failed: bool = False
    last_used: int = 0
    loads: int = 0
    in_flight: int = 0
    gone: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def now(self) -> str:
        """Its status, as the router tells it."""
        return "sleeping" if self.status == "loaded" and self.server.is_sleeping else self.status

    @property
    def is_idle(self) -> bool:
        return self.status == "loaded" and not self.in_flight and not self.server.is_busy


class FakeRouter:
    """See the module.

    max_instances   --models-max, 0 for no limit
    tells_limit     older routers do not
    can_load, can_unload   whether it knows /models/load and /models/unload
    options         of each model's FakeLlamaServer
    """

    def __init__(
        self,
        names: Iterable[str] = ("alpha", "beta", "gamma"),
        *,
        save_dir: Path,
        max_instances: int = 2,
        tells_limit: bool = True,
        can_load: bool = True,
        can_unload: bool = True,
        aliases: Mapping[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        self.save_dir = save_dir
        self.max_instances = max_instances
        self.tells_limit = tells_limit
        self.can_load, self.can_unload = can_load, can_unload
        self.log: list[str] = []
        self.is_up = True
        self._uses = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._models: dict[str, Model] = {}
        for name in names:
            server = FakeLlamaServer(save_dir=save_dir, model_path=f"/models/{name}.gguf", **options)
            server.crash()
            self._models[name] = Model(name, server, tuple((aliases or {}).get(name, ())))

    # for tests

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def status(self) -> dict[str, str]:
        return {model.name: model.now for model in self._models.values()}

    def loaded(self) -> set[str]:
        return {model.name for model in self._models.values() if model.status in ACTIVE}

    def count(self, what: str) -> int:
        """How many entries of the log begin so."""
        return sum(entry.startswith(what) for entry in self.log)

    async def until(self, condition: Callable[[], bool], timeout: float = 5.0) -> None:
        """Returns as soon as the condition holds, which is looked at whenever something has happened here."""

        async def wait() -> None:
            while not condition():
                await self._changes()

        await asyncio.wait_for(wait(), timeout)

    def transport(self) -> Wire:
        return Wire(self)

    @contextlib.asynccontextmanager
    async def serve(self, port: int = 0) -> AsyncIterator[str]:
        """A real HTTP server on the loopback address; yields its base URL."""
        server = HttpServer(self.handle, port, 5.0, 100)
        server.listen(True)
        try:
            yield f"http://127.0.0.1:{server.port}"
        finally:
            await server.close()

    async def complete(
        self,
        name: str,
        prompt: Any,
        slot: int | None = None,
        n_predict: int = 4,
        gate: asyncio.Event | None = None,
    ) -> Completion:
        """A request as a client makes it: it loads the model, and counts as a use. Cancelling it is leaving."""
        self.log.append(f"POST /completion {name}")
        model = self._models[name]
        await self._ready(model)
        with self._used(model):
            return await model.server.complete(prompt, slot, n_predict, gate)

    async def load(self, name: str) -> None:
        """Have a model loaded, as a stranger's request does; returns when it is there or has failed."""
        model = self._models[name]
        if model.status == "unloaded":
            await self._begin(model)
        await self._until(lambda: model.status != "loading")

    async def unload(self, name: str) -> None:
        """Have a model unloaded, as a stranger does."""
        model = self._models[name]
        self._end(model)
        if model.gone is not None:
            await model.gone

    def restart(self) -> None:
        """Router and models end, a new router takes their place."""
        for model in self._models.values():
            model.status, model.failed, model.last_used = "unloaded", False, 0
            model.server.crash()
        self._note()

    async def aclose(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # HTTP

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """One call. To cancel it is what a client does that leaves."""
        if not self.is_up:
            raise Refused
        url = urlsplit(target)
        path, query = unquote(url.path), parse_qs(url.query, keep_blank_values=True)
        fields: Any = None
        with contextlib.suppress(ValueError):
            fields = json.loads(body)
        fields = fields if isinstance(fields, dict) else {}
        name = fields.get("model") if method == "POST" else query.get("model", [None])[0]
        action = f"?{query['action'][0]}" if "action" in query else ""
        self.log.append(" ".join(filter(None, [method, path + action, name if isinstance(name, str) else ""])))
        self._note()
        if method == "GET" and path in ("/health", "/v1/health"):
            return _json({"status": "ok"})
        if method == "GET" and path in ("/models", "/v1/models"):
            return _json({"data": [self._entry(model) for model in self._models.values()], "object": "list"})
        if method == "GET" and path == "/props" and name is None:
            return _json(self._props())
        if method == "POST" and path == "/models/load" and self.can_load:
            return await self._load(name)
        if method == "POST" and path == "/models/unload" and self.can_unload:
            return self._unload(name)
        if path in ("/models/load", "/models/unload"):
            return _not_found()
        if not isinstance(name, str) or not name:
            return _error(400, "model name is missing from the request")
        model = self._find(name)
        if model is None:
            return _error(400, f"model '{name}' not found")
        if query.get("autoload") == ["false"] and model.status != "loaded":
            return _error(400, "model is not loaded")
        try:
            await self._ready(model)
        except _LoadFailedError:
            return _error(500, f"model name={model.name} failed to load")
        if method == "POST":
            self._use(model)
        model.in_flight += method == "POST"
        try:
            return with_boot(await model.server.handle(method, target, headers, body), path, model.loads)
        except Refused:
            raise Disconnected from None
        finally:
            model.in_flight -= method == "POST"
            self._note()

    def _props(self) -> dict[str, Any]:
        told = {"max_instances": self.max_instances} if self.tells_limit else {}
        return {
            "role": "router",
            **told,
            "models_autoload": True,
            "model_alias": "llama-server",
            "model_path": "none",
            "default_generation_settings": {"params": None, "n_ctx": 0},
            "ui_settings": {},
            "build_info": "b0-unknown",
            "cors_proxy_enabled": False,
        }

    def _entry(self, model: Model) -> dict[str, Any]:
        status: dict[str, Any] = {"value": model.now, "args": ["llama-server", "--alias", model.name]}
        if model.failed:
            status |= {"exit_code": 1, "failed": True}
        entry: dict[str, Any] = {
            "id": model.name,
            "aliases": list(model.aliases),
            "tags": [],
            "object": "model",
            "owned_by": "llamacpp",
            "created": 1796045597,
            "status": status,
            "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
            "source": "models_dir",
            "can_remove": False,
        }
        if model.status == "loaded":
            entry["meta"] = {
                "vocab_type": 2,
                "n_vocab": 258,
                "n_ctx": model.server.n_ctx,
                "n_ctx_train": 131072,
                "n_embd": 64,
                "n_params": 90560,
                "size": 362240,
                "ftype": "(guessed) all F32",
            }
        return entry

    async def _load(self, name: object) -> Answer:
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            return _not_found()
        if model.status != "unloaded":
            return _error(400, "model is already running")
        await self._begin(model)
        return _json({"success": True})

    def _unload(self, name: object) -> Answer:
        model = self._models.get(name) if isinstance(name, str) else None
        if model is None:
            return _error(400, "model is not found")
        if model.status not in ACTIVE:
            return _error(400, "model is not running")
        self._end(model)
        return _json({"success": True})

    # what it does

    def _find(self, name: str) -> Model | None:
        return next((m for m in self._models.values() if name == m.name or name in m.aliases), None)

    def _use(self, model: Model) -> None:
        self._uses += 1
        model.last_used = self._uses

    @contextlib.contextmanager
    def _used(self, model: Model) -> Any:
        self._use(model)
        model.in_flight += 1
        try:
            yield
        finally:
            model.in_flight -= 1
            self._note()

    async def _ready(self, model: Model) -> None:
        while model.status != "loaded":
            if model.status == "unloaded":
                await self._begin(model)
            await self._until(lambda: model.status != "loading")
            if model.failed:
                raise _LoadFailedError
            if model.gone is not None:
                await asyncio.wait([model.gone])

    async def _begin(self, model: Model) -> None:
        """Make room, then begin to load."""
        async with self._room:
            while model.status == "unloaded" and self.max_instances and len(self._active()) >= self.max_instances:
                idle = [other for other in self._active() if other.is_idle]
                if idle:
                    victim = min(idle, key=lambda other: other.last_used)
                    self.log.append(f"(makes room: {victim.name})")
                    self._end(victim)
                    assert victim.gone is not None
                    await victim.gone
                else:
                    await self._changes()
            if model.status != "unloaded":
                return
            model.status, model.failed = "loading", False
            self._note()
        self._task(self._come(model))

    def _active(self) -> list[Model]:
        return [model for model in self._models.values() if model.status != "unloaded"]

    async def _come(self, model: Model) -> None:
        await asyncio.sleep(model.load_seconds)
        if model.status != "loading":
            return
        if model.fails:
            model.status, model.failed = "unloaded", True
        else:
            model.server.restart()
            model.status = "loaded"
            model.loads += 1
            self._use(model)
        self._note()

    def _end(self, model: Model) -> None:
        model.status = "unloading"
        model.server.crash()
        model.gone = self._task(self._go(model))
        self._note()

    async def _go(self, model: Model) -> None:
        await asyncio.sleep(model.unload_seconds)
        model.status, model.gone = "unloaded", None
        self._note()

    def _note(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _changes(self) -> None:
        """Until something has happened here, or in one of the models."""
        waits = [asyncio.ensure_future(self._changed.wait())]
        waits += [asyncio.ensure_future(model.server._changed.wait()) for model in self._active()]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _LoadFailedError(Exception):
    pass


def with_boot(answer: Answer, path: str, boot: int) -> Answer:
    """An answer of /props, with a media marker that is another after each start, as llama-server draws it."""
    if path == "/props" and answer.status == 200:
        answer.body = json.dumps(json.loads(answer.body) | {"media_marker": f"<__media_{boot}__>"}).encode()
    return answer


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())


def _error(status: int, message: str) -> Answer:
    kind = "invalid_request_error" if status == 400 else "server_error"
    return _json({"error": {"code": status, "message": message, "type": kind}}, status)


def _not_found() -> Answer:
    return _json({"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}, 404)
