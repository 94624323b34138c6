"""A small world for properties: a llama-server (the fake), proxies' workers that may be killed, and their clients.

Everything runs in one `VirtualLoop`. The world looks at what happens as nobody else can: at every call that a worker makes,
at what the server's slots really hold, at the files, the index and the log; what breaks one of the rules of the design is
a `Violation`.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
from virtual_time import VirtualLoop

from fake_http import Answer, Disconnected, Refused
from fake_llama_api import render, tokenize
from fake_llama_server import FakeLlamaServer, _Memory
from slot_cache import locks, report
from slot_cache.folder import CacheFolder, tag_of
from slot_cache.index import IndexThread, SqliteIndex
from slot_cache.leases import Lease, Slot, Which
from slot_cache.llama_server import LlamaServer
from slot_cache.prompt import fingerprint
from slot_cache.request import route_tag
from slot_cache.rewind import Conversation
from slot_cache.state import Ending, Outcome, Resident, Want
from slot_cache.switcher import SlotSwitcher

BASE_URL = "http://llama:8080"
SECRET = "zqxjvkwy"
"""Every word of a client has it: it must not be found in the log, the index or a file's name."""

QUEUE_SECONDS = 20.0
HELD_SECONDS = QUEUE_SECONDS + 25.0
"""The longest that a request may be held: its queue, and one fault of each call that a switch makes."""

DOWN_SECONDS = 1.0
"""A server that is replaced by one with another model is not there for at least so long."""

MIN_TOKENS = 16
ANSWER_BEGINS = tokenize("<|im_start|>assistant\n")
PREFILL, DECODE, SWITCH = 0.0005, 0.01, 0.02

Message = Mapping[str, str]


class Violation(AssertionError):
    """A rule was broken."""


@dataclass(frozen=True)
class Route:
    """A model_name and the slots that it uses."""

    name: str
    which: Which

    @property
    def tag(self) -> str:
        return route_tag(self.name)


@dataclass
class Session:
    """A conversation, and all that was ever asked in it."""

    route: Route
    number: int
    owner: str
    known_by: str = "key"
    """its key, or what it says: `session`: and its session's id, `content`: that alone"""
    messages: list[Message] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"{self.route.tag}_{sha256(str(self.number).encode()).hexdigest()[:32]}"


@dataclass
class Asked:
    """One request: its prompt, how many tokens were to be generated, and whether it was answered in a slot of ours."""

    prompt: tuple[int, ...]
    n_predict: int
    answered: bool = False
    managed: bool = False


@dataclass
class Good:
    """A file as a worker has left it."""

    signature: tuple[int, int, int]
    tokens: tuple[int, ...]
    weights: str
    tampered: bool = False


@dataclass(eq=False)
class Client:
    """One request of a client, on its way."""

    worker: Worker
    session: Session | None
    route: Route
    task: asyncio.Task[None] | None = None
    lease: Any = None
    stage: str = "asks"
    vanishes: bool = False
    """it ends without a word"""

    @property
    def done(self) -> bool:
        return self.task is None or self.task.done()


CURRENT: contextvars.ContextVar[Worker | None] = contextvars.ContextVar("worker", default=None)


async def for_ever() -> None:
    """What a dead process waits for."""
    await asyncio.get_running_loop().create_future()


class Wire(httpx.AsyncBaseTransport):
    """From a worker to the server."""

    def __init__(self, world: World, worker: Worker) -> None:
        self.world, self.worker = world, worker
        self.calls: set[asyncio.Task[Answer]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.worker.dead:
            await for_ever()
        body = await request.aread()
        asked_for = any(worker.acquiring for worker in self.world.workers)
        if self.world.latency:
            await asyncio.sleep(self.world.latency)
            if self.worker.dead:
                await for_ever()
        self.world.sees(request.method, request.url, body, asked_for)
        timeout = request.extensions.get("timeout", {}).get("read")
        target = request.url.raw_path.decode("ascii")
        handling = asyncio.ensure_future(self.world.fake.handle(request.method, target, request.headers, body))
        self.calls.add(handling)
        handling.add_done_callback(self.calls.discard)
        try:
            answer = await asyncio.wait_for(handling, timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise httpx.ReadTimeout("timed out", request=request) from None
        except Disconnected:
            words = "Server disconnected without sending a response."
            raise httpx.RemoteProtocolError(words, request=request) from None
        except Refused:
            raise httpx.ConnectError("All connection attempts failed", request=request) from None
        except asyncio.CancelledError:
            if self.worker.dead:
                await for_ever()
            raise
        self.world.saw(self.worker, request.method, request.url, body, answer)
        if self.world.latency:
            await asyncio.sleep(self.world.latency)
            if self.worker.dead:
                await for_ever()
        return httpx.Response(answer.status, headers={"Content-Type": answer.content_type}, content=answer.body)


class Worker:
    """One process of a proxy: what the hook has of the core, and no more."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.dead = False
        self.turns: set[Any] = set()
        self.clients: list[Client] = []
        self.acquiring = 0
        self.sqlite = SqliteIndex(world.state / "index.sqlite3")
        self.index = IndexThread(self.sqlite)
        self.wire = Wire(world, self)
        self.switcher = SlotSwitcher(
            LlamaServer(BASE_URL, transport=self.wire),
            self.index,
            name=BASE_URL,
            lock_folder=world.state,
            clock=world.loop.time,
        )
        self._watch_the_plan()
        self.folders = {
            route.name: CacheFolder(
                self.index,
                tag=route.tag,
                route=route.name,
                server=BASE_URL,
                path=world.saves if world.visible else None,
                max_files=world.max_files,
                verify=world.verify,
                min_tokens=MIN_TOKENS,
            )
            for route in world.routes
        }

    def _watch_the_plan(self) -> None:
        """See that what is decided is what the plan promises."""
        switcher, world = self.switcher, self.world
        queue, actions, files = switcher._queue, switcher.actions, switcher._files
        granted, save, restore = queue.granted, actions.save, files.restore

        def see_granted(slot: Slot, lease: Lease) -> None:
            if lease.want.knows_itself and slot.resident is not None and not queue.at_home(lease, slot):
                free = [other for other in queue.allowed(lease.which) if other.lease is None and not other.yielding]
                empty = [other.number for other in free if other.empty and other.resident is None]
                if empty:
                    world.violated(f"slot {slot.number} is taken, though {empty} are empty")
            granted(slot, lease)

        async def see_save(number: int, resident: Resident, folder: CacheFolder) -> Resident | None:
            if resident.key is None or not resident.dirty or resident.mark is None or not resident.mark.tokens:
                world.violated(f"slot {number} is saved, which holds {resident}")
            return await save(number, resident, folder)

        async def see_restore(lease: Lease, want: Want, *more: Any, donor: str | None = None) -> Outcome:
            resident, key = lease.place.resident, donor or want.key
            if resident is not None and resident.whole and resident.key == key:
                world.violated(f"{key} is restored, though it is there")
            return await restore(lease, want, *more, donor=donor)

        queue.granted, actions.save, files.restore = see_granted, see_save, see_restore  # type: ignore[method-assign]

    def spawn(self, work: Callable[[], Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        context = contextvars.copy_context()
        context.run(CURRENT.set, self)
        return context.run(lambda: self.world.loop.create_task(work()))

    def kill(self) -> None:
        """As kill -9: nothing that it had begun goes on, the kernel frees its locks and closes its connections."""
        self.dead = True
        for slot in self.switcher.slots.values():
            slot.lock.release()
            slot.lock._paths = None
        for held in self.turns:
            held.free()
        self.turns.clear()
        for handling in list(self.wire.calls):
            handling.cancel()
        for client in self.clients:
            if client.task is not None:
                client.task.cancel()
        self.world.tick(3)


class Server(FakeLlamaServer):
    """The fake; each start has its own marker, and what a process had begun surely ends with it."""

    async def _spend(self, seconds: float, slots_meanwhile: bool) -> None:
        life = self._life
        await super()._spend(seconds, slots_meanwhile)
        if life != self._life:  # `wait_for` may swallow a cancellation (Python before 3.12)
            raise asyncio.CancelledError


class World:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 2,
        workers: int = 1,
        idle_seconds: float = 0.0,
        max_files: int = 0,
        verify: Any = "fast",
        clears_idle_slots: bool = False,
        latency: float = 0.0,
        visible: bool = True,
        reuse: Any = "dense",
        mode: str = "one",
    ) -> None:
        self.visible = visible
        self.latency = latency
        self.loop = VirtualLoop()
        self.loop.is_dead = lambda context: (worker := context.get(CURRENT)) is not None and worker.dead
        self.broken: list[str] = []
        self.violations: list[str] = []
        self.loop.set_exception_handler(lambda loop, context: self.broken.append(repr(context)))
        self.idle_seconds, self.max_files, self.verify = idle_seconds, max_files, verify
        self.state, self.saves = folder / "state", folder / "saves"
        self.models = folder / "models"
        self.models.mkdir(parents=True)
        self.model_path = self.models / "a.gguf"
        self.weights = "one"
        self.put_model()
        self.fake = Server(
            slots,
            save_dir=self.saves,
            n_ctx=1000,
            clears_idle_slots=clears_idle_slots,
            bytes_per_token=40,
            model_path=str(self.model_path),
            weights=self.weights,
            prefill_seconds_per_token=PREFILL,
            decode_seconds_per_token=DECODE,
            switch_seconds=SWITCH,
            empty_file_crashes=True,
            damage_lasts=True,
            reuse=reuse,
        )
        if workers > 1:
            mode = "one"  # a conversation that two processes continue at a time has a cache in each
        which: list[Which] = {
            "one": [0, 0, slots - 1],
            "auto": [None, None, slots - 1],
            "some": [range(2), None, range(1)],
        }[mode]
        self.routes = [Route(name, some) for name, some in zip(["smol", "smol/2", "big"], which, strict=True)]
        known_by = ["key"] * 6 if mode == "one" else ["session", "content", "content", "session", "session", "content"]
        self.sessions = [
            Session(route, number, owner, known_by[number])
            for number, (route, owner) in enumerate(
                [
                    (self.routes[0], "k1"),
                    (self.routes[0], "k1"),
                    (self.routes[0], "k2"),
                    (self.routes[1], "k2"),
                    (self.routes[2], ""),
                    (self.routes[2], "k1"),
                ]
            )
        ]
        self.by_key = {session.key: session for session in self.sessions if session.known_by != "content"}
        self.clients: list[Client] = []
        self.vanished: set[Any] = set()
        self.ended: list[Worker] = []
        """kept, so that what they had begun is not cleared away"""
        self.strangers: set[asyncio.Task[None]] = set()
        self.in_use: dict[int, set[Client]] = {}
        self.good: dict[str, Good] = {}
        self.excused: set[str] = set()
        self.truths: dict[tuple[tuple[int, ...], str], _Truth] = {}
        self.words = 0
        self._calls_seen, self._quiet_since = 0, self.loop.time()
        self.log = _Log()
        report.logger.addHandler(self.log)
        self._level = report.logger.level
        report.logger.setLevel(logging.DEBUG)
        self.stats: dict[str, int] = {}
        self._wait, locks._wait = locks._wait, _wait_in_the_loop
        self.workers = [Worker(self) for _ in range(workers)]

    # time

    def run(self, seconds: float) -> None:
        self.loop.let_pass(seconds)
        self.look()

    def tick(self, times: int) -> None:
        self.loop.tick(times)

    def settle(self) -> None:
        """Until every client has its answer; the server comes up again, and what hangs goes on after a minute."""

        async def settled() -> None:
            waited = 0
            while not all(client.done for client in self.clients) or self.strangers:
                await asyncio.sleep(0.5)
                waited += 1
                if not self.fake.is_up and waited % 10 == 3:
                    self.bring_up()
                if waited == 240:
                    self.fake.clear()
                if waited > 1000:
                    stuck = [(client.stage, client.route.name) for client in self.clients if not client.done]
                    raise Violation(f"requests that do not end: {stuck}")

        self.loop.run_until_complete(settled())
        self.look()

    # the server

    def put_model(self) -> None:
        """A file of the same size for the weights that are to be loaded."""
        self.model_path.write_text(self.weights.ljust(10))
        stamp = int(sha256(self.weights.encode()).hexdigest()[:8], 16) * 10**9
        os.utime(self.model_path, ns=(stamp, stamp))

    def bring_up(self, weights: str | None = None) -> None:
        """Start a server that is down, perhaps with another model."""
        self.weights = weights or self.weights
        self.put_model()
        self.fake.restart(weights=self.weights)

    def may_sleep(self) -> bool:
        """A server sleeps when nobody has asked it for anything for a while."""
        if len(self.fake.calls) != self._calls_seen:
            self._calls_seen, self._quiet_since = len(self.fake.calls), self.loop.time()
        return self.fake.is_up and not self.fake.is_busy and self.loop.time() - self._quiet_since >= 1.0

    def props(self, answer: Answer) -> Answer:
        """The marker that a real server draws when it starts."""
        try:
            value = json.loads(answer.body)
        except ValueError:
            return answer
        if isinstance(value, dict) and "media_marker" in value:
            value["media_marker"] = f"<__media_{self.fake._life}__>"
            answer.body = json.dumps(value).encode()
        return answer

    # clients

    def text(self, length: int) -> str:
        self.words += 1
        word = f"{SECRET}{self.words} "
        return (word * (length // len(word) + 1))[:length]

    def ask(
        self,
        worker: Worker,
        session: Session | None,
        route: Route,
        owner: str,
        messages: Sequence[Message],
        *,
        n_predict: int,
        stream: bool,
        think: float,
        vanishes: bool = False,
    ) -> Client:
        """Start a client with a request."""
        client = Client(worker, session, route, vanishes=vanishes)
        messages = list(messages)
        prompt = tokenize(render(messages))
        asked = Asked(prompt, max(min(n_predict, self.fake.n_ctx - len(prompt)), 1))
        if session is not None:
            session.asked.append(asked)
        client.task = worker.spawn(lambda: self._ask(client, asked, owner, messages, stream, think))
        worker.clients.append(client)
        self.clients.append(client)
        return client

    async def _ask(
        self, client: Client, asked: Asked, owner: str, messages: list[Message], stream: bool, think: float
    ) -> None:
        worker, session, route = client.worker, client.session, client.route
        started = self.loop.time()
        want = self._want(session, route, owner, messages)
        worker.acquiring += 1
        try:
            lease = await worker.switcher.acquire(
                route.which,
                want,
                worker.folders[route.name],
                queue_seconds=QUEUE_SECONDS,
                idle_seconds=self.idle_seconds,
            )
        except asyncio.CancelledError:
            raise
        except Exception as error:
            raise Violation(f"a request was failed: {error!r}") from error
        finally:
            worker.acquiring -= 1
        client.lease = lease
        held = self.loop.time() - started
        if held > HELD_SECONDS:
            raise Violation(f"a request was held for {held:.1f} s")
        self.count(lease.granted.outcome.value)
        managed = lease.granted.outcome is not Outcome.UNMANAGED
        if managed:
            self._takes(lease.slot, client)
        ending = Ending.UNSENT
        client.stage = "thinks"
        try:
            if think:
                await asyncio.sleep(think)
            body: dict[str, Any] = {"messages": messages, "max_tokens": asked.n_predict, "temperature": 0}
            if managed:
                body["id_slot"] = lease.slot
                self._pins(lease.slot)
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            ending = Ending.BROKEN
            client.stage = "waits"
            got = await self._answer(body, stream)
            client.stage = "answered"
            if got is not None:
                text, usage, lives = got
                self._check_answer(asked, text, lives)
                reused = usage["prompt_tokens_details"]["cached_tokens"]
                if not client.vanishes:
                    computed = usage["prompt_tokens"] - reused
                    lease.learn(reused, computed, computed * PREFILL)
                asked.answered, asked.managed = True, managed
                ending = Ending.ANSWERED
                if session is not None:
                    # of a recurrent model a prompt that repeats the answer would continue all of a file
                    kept = "So it is." if self.fake.reuse == "hybrid" else text
                    session.messages = [*messages, {"role": "assistant", "content": kept}]
        finally:
            if not worker.dead:
                self.in_use.get(lease.slot, set()).discard(client)
                if client.vanishes:
                    self.vanished.add(lease)
                else:
                    wanted = ending is Ending.ANSWERED and session is not None and lease.wants_conversation
                    lease.release(ending, Conversation(tuple(messages)) if wanted else None)

    def _want(self, session: Session | None, route: Route, owner: str, messages: list[Message]) -> Want:
        if session is None:
            return Want(None, owner, apart=owner != "")
        prompt = fingerprint({"messages": messages})
        if session.known_by == "key":
            return Want(session.key, owner, apart=owner != "", chain=prompt.packed)
        return Want(
            None,
            owner,
            apart=owner != "",
            chain=prompt.packed,
            session=session.key if session.known_by == "session" else None,
            preamble=prompt.preamble,
            tag=route.tag,
        )

    async def _answer(self, body: dict[str, Any], stream: bool) -> tuple[str, Any, tuple[int, int, str]] | None:
        """The text, the usage, and the server's lives meanwhile; None for an answer that a client cannot use."""
        life, weights = self.fake._life, self.fake.weights
        try:
            answer = await self.fake.handle("POST", "/v1/chat/completions", {}, json.dumps(body).encode())
            if answer.status != 200:
                return None
            if answer.stream is not None:
                try:
                    events = [json.loads(line) async for line in _data_of(answer.stream)]
                finally:
                    await answer.stream.aclose()
                text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
                return text, events[-1]["usage"], (life, self.fake._life, weights)
            value = json.loads(answer.body)
            return value["choices"][0]["message"]["content"], value["usage"], (life, self.fake._life, weights)
        except (Disconnected, Refused, ValueError, KeyError, TypeError, IndexError):
            return None

    def _check_answer(self, asked: Asked, text: str, lives: tuple[int, int, str]) -> None:
        before, after, weights = lives
        models = [self.fake.weights] if before == after else ["one", "two"]
        if not any(self.truth(asked.prompt, model).text(asked.n_predict) == text for model in models):
            raise Violation(f"a wrong answer: {text!r} from {models}, was {weights}")
        self.count("answers")

    def stranger(self, prompt: str, slot: int | None, n_predict: int) -> None:
        """A request straight to the server."""

        async def ask() -> None:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": n_predict, "temperature": 0}
            if slot is not None:
                body["id_slot"] = slot
            try:
                answer = await self.fake.handle("POST", "/v1/completions", {}, json.dumps(body).encode())
                if answer.stream is not None:
                    await answer.stream.aclose()
            except (Disconnected, Refused):
                pass

        task = self.loop.create_task(ask())
        self.strangers.add(task)
        task.add_done_callback(self.strangers.discard)

    def _takes(self, slot: int, client: Client) -> None:
        users = self.in_use.setdefault(slot, set())
        if users:
            raise Violation(f"two requests have slot {slot}: {[(u.route.name, u.stage) for u in users]}")
        users.add(client)

    # what the world sees

    def count(self, what: str) -> None:
        self.stats[what] = self.stats.get(what, 0) + 1

    def sees(self, method: str, url: httpx.URL, body: bytes, asked_for: bool) -> None:
        """A call of a worker comes to the server; `asked_for`: some client waited for a slot when it was sent."""
        action = url.params.get("action", "")
        wakes = bool(action) or url.path == "/slots"
        if wakes and self.fake.is_up and self.fake.is_sleeping and not asked_for:
            self.violated(f"a sleeping server is woken for bookkeeping: {method} {url.path} {action}")
        if not action:
            if url.path == "/completion":
                self._pins(json.loads(body)["id_slot"])
            return
        slot = int(url.path.rpartition("/")[2])
        if self.in_use.get(slot):
            user = next(iter(self.in_use[slot]))
            self.violated(f"{action} while a request ({user.route.name}, {user.stage}) has slot {slot}")
        if self.fake.is_up and self.fake.slots[slot].is_processing and not self.strangers and not self._loose():
            self.violated(f"{action} of slot {slot}, which is busy")
        if action == "restore":
            try:
                self._check_restore(json.loads(body)["filename"])
            except Violation as violation:
                self.violated(str(violation))

    def _pins(self, slot: int) -> None:
        """A request goes to a slot. Where that is busy, llama-server with a RAM cache mixes it up with the one in there."""
        busy = self.fake.is_up and self.fake.slots[slot].is_processing
        if busy and not self.strangers and not self._loose():
            self.violated(f"a request is pinned to slot {slot}, which is busy")

    def violated(self, what: str) -> None:
        """Told in the middle of a worker's work, which goes on."""
        self.violations.append(what)

    def _loose(self) -> bool:
        """Whether a request is at the server that has no slot."""
        return any(client.lease and client.lease.granted.outcome is Outcome.UNMANAGED for client in self.clients)

    def saw(self, worker: Worker, method: str, url: httpx.URL, body: bytes, answer: Answer) -> None:
        """A worker gets an answer."""
        if url.path == "/props":
            self.props(answer)
        if url.path == "/completion":
            self.count("rewinds")
        if url.params.get("action") == "restore":
            name = json.loads(body)["filename"]
            try:
                fine = answer.status == 200 and json.loads(answer.body)["n_restored"] > 0
            except (ValueError, KeyError, TypeError):
                fine = False
            if not fine:
                self.excused.add(name.removesuffix(".bin"))
            self.count("restores")

    def _check_restore(self, name: str) -> None:
        key = name.removesuffix(".bin")
        if not (self.saves / name).exists():
            return  # it has just been deleted by hand
        if self.fake.is_up:
            tokens = self.whole_file(name, self.fake.weights)
            if tokens is None:
                raise Violation(f"a file is sent to the server that is damaged or another model's: {name}")
            self._check_owner(key, tokens, "restored")

    def whole_file(self, name: str, weights: str) -> tuple[int, ...] | None:
        """The tokens of a file, None if it is not exactly what a server with these weights writes."""
        try:
            tokens, memory, _, _ = self.fake._read_file(name)
        except Exception:
            return None
        size = (self.saves / name).stat().st_size
        if not tokens or size != self.fake.file_size(len(tokens)):
            return None
        right = self.truth(tokens, weights).cells(len(tokens))
        return tokens if memory.cells == right else None

    def truth(self, tokens: tuple[int, ...], weights: str) -> _Truth:
        found = self.truths.get((tokens, weights))
        if found is None:
            if len(self.truths) > 2000:
                self.truths.clear()
            found = self.truths[tokens, weights] = _Truth(tokens, f"{weights}\0".encode())
        return found

    def _check_owner(self, key: str, tokens: tuple[int, ...], what: str) -> int:
        """These are tokens of the session's own requests. Returns the last one of them that they begin."""
        for session in self._sessions_of(key):
            for number in reversed(range(len(session.asked))):
                if self._begins(session.asked[number], tokens):
                    return number
        raise Violation(f"{what} for {self._name_of(key)}: not its own tokens: {_shown(tokens)}")

    def _sessions_of(self, key: str) -> list[Session]:
        """Whose cache a key may be of: that of its name, or a conversation that is known by what it says."""
        if key in self.by_key:
            return [self.by_key[key]]
        return [session for session in self.sessions if session.known_by != "key" and session.route.tag == tag_of(key)]

    def _name_of(self, key: str) -> str:
        return ", ".join(f"{session.route.name}/{session.number}" for session in self._sessions_of(key))

    def _begins(self, asked: Asked, tokens: tuple[int, ...]) -> bool:
        n = min(len(tokens), len(asked.prompt))
        if tokens[:n] != asked.prompt[:n]:
            return False
        rest = "".join(map(chr, tokens[n:]))
        if not rest:
            return True
        return any(
            self.truth(asked.prompt, weights).text(asked.n_predict)[:-1].startswith(rest) for weights in ("one", "two")
        )

    def _is_all_of(self, asked: Asked, tokens: tuple[int, ...]) -> bool:
        if asked.answered and tokens == asked.prompt[: -len(ANSWER_BEGINS)]:
            return True  # rewound
        return asked.answered and len(tokens) == len(asked.prompt) + asked.n_predict - 1 and self._begins(asked, tokens)

    # after every step

    def look(self) -> None:
        """Check what can be seen."""
        self.may_sleep()
        for client in [client for client in self.clients if client.done]:
            self.clients.remove(client)
            task = client.task
            assert task is not None
            if not task.cancelled() and task.exception() is not None:
                raise task.exception() or Violation()
        self._look_at_files()
        self._look_at_log()
        self._look_at_memory()
        if self.violations:
            raise Violation("; ".join(self.violations))
        if self.broken:
            raise Violation(f"a background task failed: {self.broken}")

    def _look_at_files(self) -> None:
        there: dict[str, tuple[int, int, int]] = {}
        for entry in os.scandir(self.saves):
            if SECRET in entry.name:
                raise Violation(f"text in a file's name: {entry.name}")
            if entry.name.endswith(".bin"):
                info = entry.stat()
                there[entry.name.removesuffix(".bin")] = (info.st_mtime_ns, info.st_size, info.st_ino)
        if not self.visible:  # what the server writes has its name at once: `_check_restore` must do
            return
        for key, signature in there.items():
            before = self.good.get(key)
            if not self._sessions_of(key) or (before is not None and before.signature == signature):
                continue
            self._check_save(key, signature, before)
        for key in [key for key in self.good if key not in there]:
            gone = self.good.pop(key)
            if not (gone.tampered or key in self.excused or self.max_files):
                raise Violation(f"a good save is gone: {self._name_of(key)}")

    def _check_save(self, key: str, signature: tuple[int, int, int], before: Good | None) -> None:
        whose, name = self._name_of(key), f"{key}.bin"
        self.count("saves")
        weights = next((one for one in ("one", "two") if self.whole_file(name, one)), None)
        tokens = self.whole_file(name, weights) if weights else None
        if not tokens or weights is None:
            raise Violation(f"a save of {whose} that no server wrote so")
        number = self._check_owner(key, tokens, "saved")
        if len(tokens) < MIN_TOKENS:
            raise Violation(f"a save of {len(tokens)} tokens")
        if before is not None and not before.tampered and before.weights == weights:
            whole = any(self._is_all_of(asked, tokens) for session in self._sessions_of(key) for asked in session.asked)
            if len(tokens) < len(before.tokens) and not whole:
                raise Violation(
                    f"a save of {len(before.tokens)} tokens of {whose} was replaced by one "
                    f"of {len(tokens)}, which is not all of an answered request"
                )
            older = self._check_owner(key, before.tokens, "was saved")
            if number < older and before.tokens[: len(tokens)] != tokens[: len(before.tokens)]:
                raise Violation(f"a save of request {older} was replaced by one of request {number}")
        self.good[key] = Good(signature, tokens, weights)
        self.excused.discard(key)

    def _look_at_log(self) -> None:
        for line in self.log.take():
            if SECRET in line:
                raise Violation(f"text in the log: {line}")
            if "internal fault" in line:
                raise Violation(f"a fault of ours: {line}")

    def _look_at_memory(self) -> None:
        for worker in self.workers:
            switcher = worker.switcher
            if len(switcher._tasks) > 40 or len(switcher._loose) > 40:
                raise Violation(f"{len(switcher._tasks)} tasks, {len(switcher._loose)} loose leases")

    # what befalls files

    def tampered(self, key: str) -> None:
        """Somebody changed the file of a key by hand."""
        file = self.saves / f"{key}.bin"
        good = self.good.get(key)
        if good is not None:
            good.tampered = True
        if file.exists():
            info = file.stat()
            signature = (info.st_mtime_ns, info.st_size, info.st_ino)
            if good is None:
                self.good[key] = Good(signature, (), "", True)
            else:
                good.signature = signature

    # the end

    def check_all_over(self) -> None:
        """With no fault and no client left everything is given back and can be used again."""
        self.fake.clear()
        if not self.fake.is_up:
            self.run(DOWN_SECONDS)
            self.bring_up()
        self.settle()
        self.run(700.0)
        for session in self.sessions:  # who waits finds what nobody gave back
            for _ in range(2):
                messages = [*session.messages, {"role": "user", "content": self.text(20)}]
                self.ask(
                    self.workers[0],
                    session,
                    session.route,
                    session.owner,
                    messages,
                    n_predict=1,
                    stream=False,
                    think=0.0,
                )
                self.settle()
        self.run(700.0)
        for worker in self.workers:
            switcher = worker.switcher
            lost = [s for s in switcher.slots.values() if s.lease in self.vanished]  # nobody needs them
            held = [s.number for s in switcher.slots.values() if (s.lease is not None or s.locked) and s not in lost]
            held += [-1] * switcher.waiting()
            loose = [lease for lease in switcher._loose if lease not in self.vanished]
            tasks = switcher._tasks - {s.watch for s in lost}
            if held or loose or tasks or (lost and self.routes[0].which == 0):
                raise Violation(f"left over: slots {held}, {loose}, {tasks}")
        for file in self.state.iterdir():
            if SECRET.encode() in file.read_bytes():
                raise Violation(f"text in {file.name}")

    def close(self) -> None:
        locks._wait = self._wait
        report.logger.removeHandler(self.log)
        report.logger.setLevel(self._level)
        for worker in self.workers:
            worker.dead = True
        self.loop.set_exception_handler(lambda loop, context: None)
        try:
            self.loop.end_all()
        finally:
            self.loop.close()

    # workers

    def replace_worker(self, number: int, *, killed: bool) -> None:
        """A process of the proxy ends and another one starts."""
        old = self.workers[number]
        if killed:
            for users in self.in_use.values():
                users -= {client for client in users if client.worker is old}
            old.kill()
            self.clients = [client for client in self.clients if client.worker is not old]
        else:
            for client in old.clients:
                if client.task is not None:
                    client.task.cancel()
            self.run(3.0)
            self.loop.run_until_complete(old.switcher.aclose())
            self.tick(5)
            old.dead = True
        old.sqlite.close()
        self.ended.append(old)
        self.workers[number] = Worker(self)


class _Truth:
    """What a model makes of tokens, computed as far as it is asked for."""

    def __init__(self, tokens: tuple[int, ...], weights: bytes) -> None:
        self._weights = weights
        self._memory = _Memory()
        self._memory.compute(weights, tokens)
        self._out: list[int] = []

    def text(self, n_predict: int) -> str:
        while len(self._out) < n_predict:
            token = self._memory.next_token()
            self._out.append(token)
            self._memory.compute(self._weights, [token])
        return "".join(map(chr, self._out[:n_predict]))

    def cells(self, count: int) -> list[bytes]:
        return self._memory.cells[:count]


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = self._lines, []
        return lines


async def _data_of(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The JSON of a stream's events; its end mark must come."""
    async for piece in stream:
        for line in piece.splitlines():
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ")
    raise ValueError("the stream has no end")


async def _wait_in_the_loop(paths: tuple[Path, Path], seconds: float) -> Any:
    """What `locks._wait` does in a thread, in virtual time: first the turnstile, then the lock."""
    worker = CURRENT.get()
    assert worker is not None
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    turn: Any = None
    pause = 0.005
    try:
        while True:
            if worker.dead:
                await for_ever()
            if turn is None:
                turn = locks._locked(paths[0], wait=False)
                if turn is not None:
                    worker.turns.add(turn)
            if turn is not None:
                held = locks._locked(paths[1], wait=False)
                if held is not None:
                    return held
            if loop.time() >= end:
                return None
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, 0.5)
    finally:
        if turn is not None:
            worker.turns.discard(turn)
            turn.free()


def _shown(tokens: tuple[int, ...]) -> str:
    text = "".join(chr(token) if token < 256 else "|" for token in tokens)
    return f"{len(tokens)} tokens, {text[:60]!r} ... {text[-30:]!r}"


__all__ = ["Awaitable", "Client", "Ending", "Session", "Violation", "Worker", "World"]
