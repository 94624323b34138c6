"""`/slot-cache/status`, `/slot-cache/events` and `/slot-cache/metrics` on the proxy's own app, behind LiteLLM's key check.

They are added once, when a callback is made in a process of a LiteLLM proxy; nothing is imported where there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from slot_cache import metrics, report
from slot_cache.events import Listener
from slot_cache.status import Status
from slot_cache.tally import Tally

if TYPE_CHECKING:
    from fastapi import FastAPI

HEARTBEAT_SECONDS = 10.0
"""A stream of events says that it is alive, and the status, so often at least."""

STATUS_SECONDS = 1.0
"""While something goes on, the status is sent again so often at most."""

PROXY_MODULE = "litellm.proxy.proxy_server"

_PREFIX = "/slot-cache"


class Source(Protocol):
    """What the endpoints tell of: the callback."""

    @property
    def tally(self) -> Tally:
        """What was counted."""

    @property
    def active(self) -> bool:
        """Whether a request of this process has a slot, or waits for one."""

    async def status(self) -> Status:
        """The status."""


def mount(source: Source) -> bool:
    """Add the endpoints to the app of the proxy that this process is, if it is one. Returns whether they are there now."""
    app = getattr(sys.modules.get(PROXY_MODULE), "app", None)
    if app is None:
        return False
    if not getattr(app.state, "slot_cache", False):
        add_to(app, source)
        app.state.slot_cache = True
        metrics.shared()  # so that they are there from the beginning
        report.info("status at %s/status", _PREFIX)
    return True


def add_to(app: FastAPI, source: Source, check: Any = None) -> None:
    """Add the endpoints to an app.

    Args:
        check: what raises for a caller who may not look; None: LiteLLM's own check of keys.
    """
    from fastapi import APIRouter, Depends, HTTPException
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from fastapi.routing import APIRoute
    from starlette.requests import Request

    if check is None:
        from litellm.proxy.auth.user_api_key_auth import user_api_key_auth as check

    class Guarded(APIRoute):
        """Who does not pass the check is told that a key is needed, and no more, whatever went wrong with it."""

        def get_route_handler(self) -> Any:
            handler = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                try:
                    return await handler(request)
                except Exception as error:
                    if getattr(request.state, "slot_cache_passed", False):
                        raise
                    status = _status_of(error)
                    words = {401: "a key of the proxy is needed", 429: "too many requests"}
                    told = {
                        "message": words.get(status, "this key may not look"),
                        "type": "auth_error",
                        "code": str(status),
                    }
                    return JSONResponse({"error": told}, status_code=status)

            return guarded

    async def passed(request: Request) -> None:
        request.state.slot_cache_passed = True

    passed.__annotations__["request"] = Request  # FastAPI looks for it in the module
    router = APIRouter(
        prefix=_PREFIX, route_class=Guarded, dependencies=[Depends(check), Depends(passed)], tags=["slot-cache"]
    )

    @router.get("/status", response_model=Status)
    async def status() -> Any:
        """What the worker that answers knows of its servers, slots and caches. No server is asked."""
        return Response((await source.status()).model_dump_json(), media_type="application/json")

    @router.get("/events", response_model=None)
    async def events() -> Any:
        """Server-sent events: `status` (as /slot-cache/status), `event` (what happens), `lost` (so many, too fast for you)."""
        listener = source.tally.events.listen()
        if listener is None:
            raise HTTPException(503, "too many listen already")
        return StreamingResponse(
            stream(source, listener),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    @router.get("/metrics", response_model=None)
    async def prometheus() -> Any:
        """The slot_cache_ metrics for Prometheus; LiteLLM's own /metrics, where it is on, has them too."""
        try:
            body, media_type = await asyncio.to_thread(metrics.exposition)
        except ImportError:
            raise HTTPException(501, "prometheus_client is not installed") from None
        return Response(body, media_type=media_type)

    app.include_router(router)


def _status_of(error: Exception) -> int:
    """What the check's failure is to the caller: 403 and 429 are told as they are, everything else is no (good) key. (Where
    its database client is not installed, LiteLLM fails with an ImportError when there is no key.)"""
    code = str(getattr(error, "status_code", None) or getattr(error, "code", None))
    return int(code) if code in ("403", "429") else 401


async def stream(source: Source, listener: Listener, tick: float = STATUS_SECONDS) -> AsyncIterator[str]:
    """What one listener is sent, until it goes away or the process is about to end."""
    told = time.monotonic()
    try:
        yield _sent("status", (await source.status()).model_dump_json())
        stale = source.active
        while not _ending():
            events, lost = await listener.next(tick)
            if lost:
                yield _sent("lost", json.dumps({"lost": lost}))
            for event in events:
                yield _sent("event", json.dumps(event.told()))
            stale = stale or bool(events) or source.active
            since = time.monotonic() - told
            if since >= HEARTBEAT_SECONDS:
                yield ": heartbeat\n\n"
                stale = True
            if stale and since >= tick:
                told, stale = time.monotonic(), source.active
                yield _sent("status", (await source.status()).model_dump_json())
    finally:
        source.tally.events.leave(listener)


def _sent(kind: str, data: str) -> str:
    return f"event: {kind}\ndata: {data}\n\n"


def _ending() -> bool:
    """Whether the server that runs in this process was told to end: it waits for the streams that are open."""
    with contextlib.suppress(ValueError):
        owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        return getattr(owner, "should_exit", False) is True
    return False
