"""Finds the facts that `doctor.py` judges: asks the servers, looks at the folders.

It disturbs nothing: a server that sleeps is not woken, a router's model not loaded, a busy slot not touched. Only when it
may write, idle slots are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from slot_cache import doctor
from slot_cache.deployments import Deployment
from slot_cache.doctor import Finding, Folder, Route, RouterModelTold, RouterTold, State, Told, Trial
from slot_cache.folder import list_files
from slot_cache.index import SCHEMA, default_state_dir
from slot_cache.llama_server import (
    UNKNOWN_BYTES_PER_TOKEN,
    LlamaServer,
    LlamaServerError,
    same_server_key,
    slot_readings,
)
from slot_cache.locks import SlotLock, digest_of
from slot_cache.model import Identity, identity_of
from slot_cache.request import upstream_model
from slot_cache.state import SlotReading

FILE = "slot-cache-doctor.bin"
"""What is saved to see whether that works."""

AT_ONCE = 8
FOLDER_SECONDS = 5.0
"""How long a folder may take to answer: one of a server that is gone never does."""

SEE_SECONDS = 1.0
"""How long a saved file is awaited in a folder of another machine."""

_USUAL_PROVIDER = "openai/"
SERVER_SECONDS = 60.0
MOST_MODELS = 50
MOST_SLOTS = 16

_EMPTY_BYTES = 36
"""A saved slot without tokens has so many, and four more for each K/V stream but the first."""

_OF_OTHER_MACHINES = re.compile(
    r"nfs4?|cifs|smb3|smbfs|9p|afs|ceph|glusterfs|lustre|gpfs|ocfs2|gfs2|beegfs"
    r"|fuse\.(sshfs|glusterfs|s3fs|rclone|ceph|juicefs|vmhgfs-fuse)"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """What is to be examined.

    Attributes:
        deployments: the managed routes.
        state_dir: the folder of index and locks; None: the routes' own, or the default one.
        write: whether an idle slot may be saved, and a file made and removed.
        environ: the environment.
    """

    deployments: Sequence[Deployment]
    state_dir: Path | None
    write: bool
    environ: Mapping[str, str]


async def examine(plan: Plan) -> list[Finding]:
    """Everything that is found on the servers and in the folders of these routes. Raises nothing, ends within bounds."""
    usable = [deployment for deployment in plan.deployments if deployment.settings and deployment.base_url]
    state_dir = plan.state_dir or next(
        (d.settings.state_dir for d in usable if d.settings is not None and d.settings.state_dir), None
    )
    findings: list[Finding] = []
    index = locks = None
    if usable:
        state, index, locks = await _state(state_dir, plan.environ)
        findings += doctor.check_state(state)
    folders: dict[Path, list[Route]] = {}
    servers: dict[tuple[str, str | None], list[Deployment]] = {}
    for deployment in usable:
        servers.setdefault((same_server_key(deployment.base_url), deployment.api_key), []).append(deployment)
        route = _route(deployment)
        if route.settings.save_path is not None:
            folders.setdefault(route.settings.save_path, []).append(route)
    at_once = asyncio.Semaphore(AT_ONCE)
    one_by_one = asyncio.Lock()

    async def one(group: list[Deployment]) -> list[Finding]:
        async with at_once:
            look = _Look(group, index, locks, one_by_one if plan.write else None)
            try:
                return [finding async for finding in _all(look)]
            finally:
                await look.server.aclose()

    for found in await asyncio.gather(*(one(group) for group in servers.values())):
        findings += found
    for path, routes in folders.items():
        findings += doctor.check_folder(await _folder(path), routes)
    return findings


async def _all(look: _Look) -> AsyncIterator[Finding]:
    try:
        for finding in await asyncio.wait_for(look.findings(), SERVER_SECONDS):
            yield finding
    except asyncio.TimeoutError:
        for finding in doctor.check_server(Told(look.server.shown, fault="timeout"), look.routes):
            yield finding


def _route(deployment: Deployment, model: str = "") -> Route:
    assert deployment.settings is not None
    return Route(deployment.route, deployment.settings, model, deployment.configured)


# a server


class _Look:
    """A look at one server, for the routes that go there with one key. It saves only if it has a lock to hold meanwhile:
    servers may share a folder, or be one by two names."""

    def __init__(
        self, deployments: Sequence[Deployment], index: Path | None, locks: Path | None, saves: asyncio.Lock | None
    ) -> None:
        first = deployments[0]
        self.deployments = deployments
        self.routes = [_route(deployment) for deployment in deployments]
        self.server = LlamaServer(first.base_url, first.api_key)
        self.name = same_server_key(first.base_url)
        self.index = index
        self.locks = locks
        self.saves = saves
        host = urlsplit(first.base_url).hostname or ""
        self.open_to_all = not (host == "localhost" or host == "::1" or host.startswith("127."))

    async def findings(self) -> list[Finding]:
        """All about the server."""
        told = Told(self.server.shown, key_given=self.server.api_key is not None, open_to_all=self.open_to_all)
        try:
            try:
                await self.server.health()
            except LlamaServerError as error:
                if error.fault in ("unreachable", "timeout"):
                    raise
                if error.status == 503:
                    return list(doctor.check_server(replace(told, loading=True), self.routes))
            props = await self._props(self.server)
        except LlamaServerError as error:
            if error.status == 404:
                with contextlib.suppress(LlamaServerError):
                    return self._llama_swap(await self.server.running())
            loading = error.status == 503
            told = replace(told, fault="" if loading else error.fault, status=error.status, loading=loading)
            return list(doctor.check_server(told, self.routes))
        found = self._backends(props)
        if props.get("role") == "router":
            return found + await self._router(props)
        told = await self._model(replace(told, props=props), self.server, self.name)
        return [
            *found,
            *doctor.check_server(told, self.routes),
            *doctor.check_folders_of_server(self.server.shown, self.routes),
        ]

    def _llama_swap(self, running: list[str]) -> list[Finding]:
        where = self.server.shown
        what = f"its models' own servers were not asked ({len(running)} running): that would count as a use"
        fix = "slot-cache doctor --server URL, with the address of a model's own llama-server"
        found = [
            Finding("ok", "server", where, "it is a llama-swap"),
            Finding("unknown", "models", where, what, fix=fix),
        ]
        for route in self.routes:
            if route.settings.backend == "llama-server":
                found.append(_wrong_backend(route, "a llama-swap"))
        return found

    def _backends(self, props: Mapping[str, Any]) -> list[Finding]:
        what = "a router" if props.get("role") == "router" else "a llama-server"
        return [_wrong_backend(route, what) for route in self.routes if route.settings.backend == "llama-swap"]

    async def _props(self, server: LlamaServer) -> dict[str, Any]:
        props = await server.read("/props")
        if not isinstance(props, dict) or not ("default_generation_settings" in props or "total_slots" in props):
            raise LlamaServerError("nonsense", "GET /props answered something else")
        return props

    async def _router(self, props: Mapping[str, Any]) -> list[Finding]:
        limit = props.get("max_instances")
        told = RouterTold(self.server.shown, limit if isinstance(limit, int) and limit >= 0 else None)
        with contextlib.suppress(LlamaServerError):
            told = replace(told, models=tuple(_router_models(await self.server.read("/models"))))
        routes = [_route(deployment, await _asked(deployment)) for deployment in self.deployments]
        any_model = any(deployment.any_model for deployment in self.deployments)
        found = list(doctor.check_router(told, routes, any_model))
        for model in (told.models or ())[:1000]:
            of_it = [
                route
                for route, deployment in zip(routes, self.deployments, strict=True)
                if route.model in model.names or deployment.any_model
            ]
            if of_it and len(found) < 20 * MOST_MODELS:
                found += await self._router_model(model, of_it)
        return found

    async def _router_model(self, model: RouterModelTold, routes: list[Route]) -> list[Finding]:
        server = self.server.for_model(model.names[0])
        given = model.arguments.save_path if model.arguments is not None else None
        others = await _with_another_folder(routes, given)
        try:
            told = Told(
                server.shown,
                key_given=self.server.api_key is not None,
                open_to_all=self.open_to_all,
                arguments=model.arguments,
            )
            if model.status != "loaded":
                unloaded = list(doctor.check_unloaded(told, model.status, routes))
                return unloaded + list(doctor.check_save_path(told, others))
            try:
                told = replace(told, props=await self._props(server))
            except LlamaServerError as error:
                told = replace(told, fault=error.fault, status=error.status)
            else:
                told = await self._model(told, server, f"{self.name}#{model.names[0]}", routes)
            return [*doctor.check_server(told, routes), *doctor.check_save_path(told, others)]
        finally:
            await server.aclose()

    async def _model(self, told: Told, server: LlamaServer, name: str, routes: Sequence[Route] | None = None) -> Told:
        """What a server, or one loaded model of a router, tells besides /props."""
        if told.sleeps:
            return told
        told = replace(told, kind=await self._kind(told.props, server, name))
        if told.props.get("endpoint_slots") is not False:
            try:
                body = await _patiently(lambda: server.read("/slots"))
                used = [
                    entry for entry in body if isinstance(entry, dict) and entry.get("id_task", -1) not in (-1, None)
                ]
                told = replace(
                    told,
                    slots=tuple(slot_readings(body)),
                    counts_tokens=all("n_prompt_tokens" in entry for entry in used),
                )
            except LlamaServerError as error:
                told = replace(told, slots_fault=str(error.status or error.fault))
            except TypeError:
                told = replace(told, slots_fault="nonsense")
        if server.model is None or self.saves is not None:  # a router takes a POST for a use of the model
            with contextlib.suppress(LlamaServerError):
                told = replace(told, actions=await _patiently(server.takes_actions))
        if self.saves is not None and told.actions and told.slots:
            folders = {r.settings.save_path for r in routes or self.routes if r.settings.save_path is not None}
            async with self.saves:
                trial = await _Trial(server, name, self.locks, sorted(folders)).run(len(told.slots))
            told = replace(told, trial=trial)
        return told

    async def _kind(self, props: Mapping[str, Any], server: LlamaServer, name: str) -> str | None:
        if self.index is None:
            return None
        try:
            body = await server.read("/v1/models")
        except LlamaServerError:
            return None
        entries = body.get("data") if isinstance(body, dict) else None
        known = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        if server.model is not None:
            known = [entry for entry in known if entry.get("id") == server.model]
        identity = identity_of(props, known[0] if known else {})
        index = self.index
        return await _within(FOLDER_SECONDS, lambda: _kind_in(index, identity, name))


def _wrong_backend(route: Route, what: str) -> Finding:
    return Finding(
        "error",
        "backend",
        f"route {route.name}",
        f"backend is {route.settings.backend}, the server is {what}",
        "It is asked what it does not know, and nothing is managed.",
        "leave slot_cache: {backend: ...} out",
    )


async def _asked(deployment: Deployment) -> str:
    """The name by which a router is asked for the model."""
    assert deployment.settings is not None
    if deployment.settings.model:
        return deployment.settings.model
    if deployment.asked.startswith(_USUAL_PROVIDER):  # spares the seconds that it takes to import LiteLLM
        return deployment.asked.removeprefix(_USUAL_PROVIDER)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # importing LiteLLM must not ask the network
    return await asyncio.to_thread(upstream_model, {"model": deployment.asked, "api_base": deployment.base_url})


def _router_models(body: object) -> Iterator[RouterModelTold]:
    entries = body.get("data") if isinstance(body, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        status = entry.get("status") if isinstance(entry, dict) else None
        if isinstance(status, dict) and isinstance(entry.get("id"), str) and isinstance(status.get("value"), str):
            aliases = entry.get("aliases")
            names = [str(alias) for alias in aliases] if isinstance(aliases, list) else []
            yield RouterModelTold((entry["id"], *names), status["value"], doctor.read_arguments(status.get("args")))


async def _patiently(call: Callable[[], Awaitable[_T]]) -> _T:
    """A server that computes a long prompt answers between two batches: it is asked up to three times."""
    for _ in range(2):
        try:
            return await call()
        except LlamaServerError as error:
            if error.fault != "timeout":
                raise
    return await call()


class _Trial:
    """Saving an idle slot, and seeing what came of it."""

    def __init__(self, server: LlamaServer, name: str, locks: Path | None, folders: Sequence[Path]) -> None:
        self._server = server
        self._folders = folders
        self._digest = digest_of(name)
        self._locks = locks

    async def run(self, count: int) -> Trial:
        """Try it. The file is removed again, where it can be seen."""
        with contextlib.ExitStack() as stack:
            ours = [number for number in range(min(count, MOST_SLOTS)) if self._take(number, stack)]
            try:
                readings = await self._server.slots()
            except LlamaServerError:
                return Trial(untried="its slots could not be looked at")
            idle = sorted(
                (reading for reading in readings if reading.id in ours and not reading.processing),
                key=lambda reading: (reading.tokens, reading.id),
            )
            if not idle:
                return Trial(untried="no slot is idle: nothing was saved")
            if idle[0].tokens and not await self._has_room(idle[0].tokens * UNKNOWN_BYTES_PER_TOKEN):
                return Trial(untried="no idle slot is empty, and a large file is not written just to try")
            await self._remove()
            try:
                trial = await self._save(idle[0])
            finally:
                await self._remove()
            if trial.streams == 1 and len(ours) == count == len(idle) > 1:
                trial = replace(trial, clears=await self._clears(readings))
            return trial

    def _take(self, number: int, stack: contextlib.ExitStack) -> bool:
        """Have the slot to ourselves among the proxies of this machine."""
        lock = SlotLock(self._locks, f"{self._digest}-{number}")
        try:
            taken = lock.try_acquire()
        except OSError:  # then the proxies have no locks there either
            return True
        if taken:
            stack.callback(lock.release)
        return taken

    async def _has_room(self, size: int) -> bool:
        """Whether a file of so many bytes does no harm: it can be removed again, and its disk has much more room."""
        free = [await _within(FOLDER_SECONDS, partial(_free, path)) for path in self._folders]
        return bool(free) and all((room or 0) > 4 * size for room in free)

    async def _save(self, reading: SlotReading) -> Trial:
        try:
            answer = await self._server.save(reading.id, FILE, reading.tokens * UNKNOWN_BYTES_PER_TOKEN)
        except LlamaServerError as error:
            how = f"HTTP {error.status}" if error.status else error.fault
            return Trial(problem=f"saving slot {reading.id} failed ({how})")
        trial = Trial(tokens=answer.tokens, size=answer.size)
        more = answer.size - _EMPTY_BYTES
        if answer.tokens == 0 and more % 4 == 0 and 0 <= more < 4 * 256:
            trial = replace(trial, streams=more // 4 + 1)
        if self._folders:
            looks = [await _within(FOLDER_SECONDS, partial(_see, path / FILE, answer.size)) for path in self._folders]
            seen = [look for look in looks if look is not None]
            trial = replace(
                trial,
                seen=len(seen) == len(looks),
                missing=max((answer.size - size for _, size in seen if size < answer.size), default=0),
                ahead=max((age for age, _ in seen), key=abs, default=0.0),
                removed=await self._remove(),
            )
        return trial

    async def _remove(self) -> bool:
        """Delete our file wherever it can be seen. Returns whether it is nowhere any more."""
        gone = [await _within(FOLDER_SECONDS, partial(_removed, path / FILE)) for path in self._folders]
        return all(gone)

    async def _clears(self, readings: Sequence[SlotReading]) -> bool | None:
        """Whether a request in one slot empties another, tried where there is nothing to lose: all slots are ours and empty."""
        if any(reading.processing or reading.tokens for reading in readings):
            return None
        first, second = readings[0].id, readings[1].id
        try:
            await self._server.rewind(first, "a")
            await self._server.rewind(second, "a")
            after = {reading.id: reading for reading in await self._server.slots()}
            return after[first].tokens == 0 if second in after and after[second].tokens else None
        except (LlamaServerError, KeyError):
            return None
        finally:
            for slot in (first, second):
                with contextlib.suppress(LlamaServerError):
                    await self._server.erase(slot)


def _see(file: Path, size: int) -> tuple[float, int] | None:
    """How far the file's time is ahead, and its size, which may take a while to become `size`; None if it is not there."""
    end = time.monotonic() + SEE_SECONDS
    seen = None
    while True:
        with contextlib.suppress(OSError, ValueError):
            info = file.lstat()
            if stat.S_ISREG(info.st_mode):
                seen = info.st_mtime - time.time(), info.st_size
        if (seen is not None and seen[1] == size) or time.monotonic() > end:
            return seen
        time.sleep(0.05)


def _free(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except (OSError, ValueError):
        return 0


async def _with_another_folder(routes: list[Route], given: str | None) -> list[Route]:
    """Those whose save_path is not seen to be the folder of this name, as it is where one is a link to the other."""
    if given is None or not given.startswith("/"):
        return routes
    paths = {route.settings.save_path for route in routes if route.settings.save_path is not None}
    same = {path for path in paths if await _within(FOLDER_SECONDS, partial(_is_same, path, given))}
    return [route for route in routes if route.settings.save_path not in same]


def _is_same(path: Path, other: str) -> bool:
    try:
        return path.samefile(other)
    except (OSError, ValueError):
        return False


def _removed(file: Path) -> bool:
    try:
        file.unlink(missing_ok=True)
    except (OSError, ValueError):
        return False
    return True


# folders


async def _folder(path: Path) -> Folder:
    found = await _within(FOLDER_SECONDS, lambda: _look_at(path))
    return found or Folder(str(path), problem=f"it does not answer within {FOLDER_SECONDS:.0f} s")


def _look_at(path: Path) -> Folder:
    shown = str(path)
    try:
        if not path.exists():
            return Folder(shown, problem="there is no such folder")
        if not path.is_dir():
            return Folder(shown, problem="it is no folder")
        files = list_files(path, None)
        next(path.iterdir(), None)
        return Folder(
            shown,
            writable=os.access(path, os.W_OK | os.X_OK),
            free=shutil.disk_usage(path).free,
            used=sum(file.size for file in files),
            largest=max((file.size for file in files), default=0),
            ahead=max((file.used for file in files), default=0.0) - time.time(),
            others_may_read=bool(path.stat().st_mode & 0o007),
            network=network_of(path),
        )
    except (OSError, ValueError) as error:
        return Folder(shown, problem=f"it cannot be read ({type(error).__name__})")


def network_of(path: Path, mounts: str | None = None) -> str | None:
    """The kind of a path's file system if that is one of other machines, "" if not, None if it cannot be told."""
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return None
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, types = left.split(" "), right.split(" ")
        if len(fields) < 5 or not types[0]:
            continue
        point = fields[4].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(f"{point}/")
        if inside and len(point) >= len(best):
            best, kind = point, types[0]
    return None if kind is None else kind if _OF_OTHER_MACHINES.fullmatch(kind) else ""


async def _state(state_dir: Path | None, environ: Mapping[str, str]) -> tuple[State, Path | None, Path | None]:
    """What is to be known of the folder of index and locks; the index, where there is one; the folder, if it can be used."""
    told = environ.get("NUM_WORKERS", "")
    workers = int(told) if told.isdecimal() and len(told) < 6 else None
    try:
        path = state_dir or default_state_dir()
    except RuntimeError:
        return State(Folder("state folder", problem="there is no home folder"), workers=workers), None, None
    state = await _within(FOLDER_SECONDS, lambda: _look_at_state(path, workers))
    if state is None:
        folder = Folder(str(path), problem=f"it does not answer within {FOLDER_SECONDS:.0f} s")
        return State(folder, workers=workers), None, None
    there = not state.folder.problem and await _within(FOLDER_SECONDS, path.is_dir)
    return state, path / "index.sqlite3" if state.index == "ok" else None, path if there else None


def _look_at_state(path: Path, workers: int | None) -> State:
    there, index = path, path / "index.sqlite3"
    if "\0" in str(path):  # for pathlib that is a folder which is not there (yet)
        return State(Folder(str(path), problem="no path has such characters"), workers=workers)
    try:
        while not there.exists() and there != there.parent:  # it is made when it is needed
            there = there.parent
        folder = replace(_look_at(there), path=str(path))
        if folder.problem or not index.exists():
            return State(folder, workers=workers)
    except (OSError, ValueError) as error:
        return State(Folder(str(path), problem=f"it cannot be read ({type(error).__name__})"), workers=workers)
    try:
        with contextlib.closing(_read_only(index)) as db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA:
                return State(folder, "newer", workers=workers)
            newest = db.execute("SELECT max(used), max(created) FROM caches").fetchone()
            ahead = max((float(when) for when in newest if when is not None), default=0.0) - time.time()
            return State(folder, "ok", ahead, workers)
    except sqlite3.OperationalError:
        return State(folder, "unread", workers=workers)
    except (sqlite3.Error, ValueError, TypeError):
        return State(folder, "damaged", workers=workers)


def _kind_in(index: Path, identity: Identity, server: str) -> str:
    useless = identity.useless_key(server)
    try:
        with contextlib.closing(_read_only(index)) as db:
            keys = (identity.kind_key, useless)
            found = dict(db.execute("SELECT model, kind FROM kinds WHERE model IN (?, ?)", keys).fetchall())
    except (sqlite3.Error, UnicodeError):
        return ""
    if identity.boot and found.get(useless) == identity.boot:
        return doctor.USELESS
    return str(found.get(identity.kind_key, ""))


def _read_only(index: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True, timeout=0.5)


async def _within(seconds: float, function: Callable[[], _T]) -> _T | None:
    """What a function that may block for ever returns, None if it has not in time. Nobody waits for its thread."""
    result: Future[_T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name="slot-cache-look").start()
    done, _ = await asyncio.wait({asyncio.wrap_future(result)}, timeout=seconds)
    return result.result() if done else None
