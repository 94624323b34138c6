"""A llama-swap for tests, as its documentation says: it starts one llama-server a model, and stops others for it.

    swap = FakeLlamaSwap(("alpha", "beta"), save_dir=tmp_path)         # one group, one model of it at a time
    LlamaServer("http://swap:8080", transport=swap.transport())
    done = await swap.complete("alpha", "hello", slot=0)
    assert swap.running() == {"alpha"}

* `/upstream/<model>/...` is the model's own server. Any call there, also a GET, starts the model; the others of its
  exclusive group are stopped first, when the requests that are on their way to them have ended.
* `GET /running` lists what runs, and starts nothing. `POST /api/models/unload/<model>` stops one, `/api/models/unload` all.
* What cannot be started answers 502. There is no /props and no /slots of llama-swap's own: 404.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fake_http import Answer, Disconnected, Refused
from fake_llama_api import Completion
from fake_llama_server import FakeLlamaServer
from fake_router import Wire, with_boot


@dataclass(eq=False)
class SwapModel:
    """One model: its state is stopped, starting, ready or stopping."""

    name: str
    server: FakeLlamaServer
    group: int
    state: str = "stopped"
    start_seconds: float = 0.2
    fails: bool = False
    starts: int = 0
    attempts: int = 0
    in_flight: int = 0


class FakeLlamaSwap:
    """See the module.

    groups    names of models of which one runs at a time; every model that is in none has one of its own
    options   of each model's FakeLlamaServer
    """

    def __init__(
        self,
        names: Iterable[str] = ("alpha", "beta", "gamma"),
        *,
        save_dir: Path,
        groups: Sequence[Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        names = list(names)
        self.log: list[str] = []
        self._models: dict[str, SwapModel] = {}
        self._changed = asyncio.Event()
        self._swapping: dict[int, asyncio.Lock] = {}
        for number, name in enumerate(names):
            server = FakeLlamaServer(save_dir=save_dir, model_path=f"/models/{name}.gguf", **options)
            server.crash()
            of = [at for at, group in enumerate(groups if groups is not None else [names]) if name in group]
            self._models[name] = SwapModel(name, server, of[0] if of else 1000 + number)

    def __getitem__(self, name: str) -> SwapModel:
        return self._models[name]

    def running(self) -> set[str]:
        return {model.name for model in self._models.values() if model.state != "stopped"}

    def transport(self) -> Wire:
        return Wire(self)

    async def complete(
        self, name: str, prompt: Any, slot: int | None = None, n_predict: int = 4, gate: asyncio.Event | None = None
    ) -> Completion:
        """A request as a client makes it: it swaps the model in. Cancelling it is leaving."""
        self.log.append(f"POST /v1/completions {name}")
        model = self._models[name]
        await self._enter(model)
        try:
            return await model.server.complete(prompt, slot, n_predict, gate)
        finally:
            self._leave(model)

    def stop(self, name: str) -> None:
        """End a model at once, as /api/models/unload does."""
        model = self._models[name]
        if model.state != "stopped":
            model.state = "stopped"
            model.server.crash()
            self._note()

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """One call. To cancel it is what a client does that leaves."""
        url = urlsplit(target)
        path = url.path
        action = f"?{url.query.partition('action=')[2].partition('&')[0]}" if "action=" in url.query else ""
        self.log.append(f"{method} {unquote(path)}{action}")
        self._note()
        if (method, path) == ("GET", "/running"):
            entries = [
                {"model": model.name, "state": model.state, "proxy": "http://127.0.0.1:5800", "ttl": 0}
                for model in self._models.values()
                if model.state != "stopped"
            ]
            return _json({"running": entries})
        if (method, path) == ("GET", "/health"):
            return Answer(200, b"OK", "text/plain")
        if method == "POST" and path.startswith("/api/models/unload"):
            name = unquote(path.removeprefix("/api/models/unload").strip("/"))
            if name and name not in self._models:
                return _json({"error": "model not found"}, 404)
            for model in list(self._models.values()):
                if name in ("", model.name):
                    self.stop(model.name)
            return Answer(200, b"OK", "text/plain")
        if not path.startswith("/upstream/"):
            return Answer(404, b"404 page not found", "text/plain")
        quoted, _, rest = path.removeprefix("/upstream/").partition("/")
        found = self._models.get(unquote(quoted))
        if found is None:
            return _json({"error": "model not found"}, 404)
        try:
            await self._enter(found)
        except _DidNotStartError:
            return Answer(502, b"unable to start process", "text/plain")
        try:
            query = f"?{url.query}" if url.query else ""
            answer = await found.server.handle(method, f"/{rest}{query}", headers, body)
            return with_boot(answer, f"/{rest}", found.starts)
        except Refused:
            raise Disconnected from None
        finally:
            self._leave(found)

    async def _enter(self, model: SwapModel) -> None:
        """Swap the model in; from then on it does not go until `_leave`."""
        async with self._swapping.setdefault(model.group, asyncio.Lock()):
            if model.state != "ready":
                for other in self._models.values():
                    if other is not model and other.group == model.group and other.state != "stopped":
                        while other.in_flight:
                            await self._changed.wait()
                        self.log.append(f"(stops {other.name})")
                        self.stop(other.name)
                await self._start(model)
            model.in_flight += 1

    async def _start(self, model: SwapModel) -> None:
        self.log.append(f"(starts {model.name})")
        model.attempts += 1
        model.state = "starting"
        self._note()
        try:
            await asyncio.sleep(model.start_seconds)
        except asyncio.CancelledError:
            model.state = "stopped"
            raise
        if model.fails:
            model.state = "stopped"
            self._note()
            raise _DidNotStartError
        model.server.restart()
        model.starts += 1
        model.state = "ready"
        self._note()

    def _leave(self, model: SwapModel) -> None:
        model.in_flight -= 1
        self._note()

    def _note(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class _DidNotStartError(Exception):
    pass


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode())
