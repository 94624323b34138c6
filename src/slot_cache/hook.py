"""SlotCacheHook: the LiteLLM callback. The only file that knows LiteLLM's hooks.

The slot is taken in the last hook before a request goes out, and given back when the request has ended, whatever road
that takes. A request is found again in the later hooks by a random token in the metadata that LiteLLM's router keeps
for it: LiteLLM's own call id will not do, since a client may choose it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from litellm.integrations.custom_logger import CustomLogger

from slot_cache import endpoints, report
from slot_cache.events import Event
from slot_cache.findings import Finding, write_finding
from slot_cache.folder import CacheFolder, tag_of
from slot_cache.index import Index, IndexThread, MemoryIndex, SqliteIndex, open_index
from slot_cache.llama_server import LlamaServer, LlamaServerError, Role, same_server_key, shown_url
from slot_cache.llama_swap import SwapTracker
from slot_cache.matching import continues
from slot_cache.prompt import Prompt, fingerprint, tell_difference
from slot_cache.request import CacheRequest, RequestError, read_request, request_metadata, route_of
from slot_cache.rewind import Conversation, calls_tools, conversation_of
from slot_cache.router import RouterTracker, limit_of
from slot_cache.settings import Settings, SettingsError, asks_for_it, read_settings
from slot_cache.shown_text import tail
from slot_cache.state import Ending, Outcome, Want
from slot_cache.status import Status, build_status
from slot_cache.steady import FrozenTexts, steadied
from slot_cache.switcher import Lease, SlotSwitcher
from slot_cache.tally import Tally
from slot_cache.unsteady import TIMES, Finder, Seen
from slot_cache.why import Finding as Reason
from slot_cache.why import Recomputed, Said, explain

MANAGED_CALLS = frozenset({"acompletion", "atext_completion", "anthropic_messages", "aresponses"})

TOKEN = "slot_cache_request"
"""The key of our token in LiteLLM's metadata of a request."""

LOGGED = "slot_cache"
"""The key under which LiteLLM's logging integrations find what became of a request."""

TURNS = 20_000
"""How many requests are remembered at most; ended ones go first."""

PROMPTS = 4_000
"""Of how many conversations and sessions the fingerprint of the last prompt is kept."""

INLINE_CHARS = 20_000
"""A prompt with more characters is hashed in a thread; one with as many takes about 0.1 ms."""

USAGE_SECONDS = 10.0
"""How long after its end a request waits for LiteLLM to tell its usage, before its line is logged without."""


STORED_SECONDS = 10.0
"""How often it is counted what is saved, at most."""


@dataclass
class _Turn:
    """One request of a client: the attempts that LiteLLM makes at it share one."""

    token: str
    request: CacheRequest
    call_type: str = ""
    nested: bool = False
    lease: Lease | None = None
    outcome: Outcome = Outcome.UNMANAGED
    why: str = ""
    waited: float = 0.0
    prompt: Prompt | None = None
    asked: str | None = None
    """the conversation that the prompt was last read for"""
    switcher: SlotSwitcher | None = field(default=None, repr=False)
    """where it has, or has had, its slot"""
    said: Said | None = None
    """its prompt, as the next one of its conversation is compared with it"""
    last: Said | None = None
    """the last prompt of its conversation, or, where it begins one, of its session"""
    same: bool = False
    """`last` is of the same conversation"""
    told: dict[str, Any] = field(default_factory=dict)
    """what LiteLLM's logging integrations are told"""
    show_text: bool = False
    difference: str = ""
    """where the prompt parts from the last one of its conversation, in words"""
    steadied: tuple[str, ...] = ()
    """the rules that changed something in what is sent"""
    seen: Seen | None = None
    """what its prompt's beginning showed, beside that of the last one of its conversation"""
    usage: tuple[int, int] | None = None
    """tokens reused and computed"""
    prefill_seconds: float | None = None
    busy: bool = False
    """an attempt waits for its slot"""
    broken: bool = False
    """the last attempt was broken off: LiteLLM makes up a usage for it, of an estimate and without reused tokens"""
    reported: bool = False
    sent: Mapping[str, Any] | None = field(default=None, repr=False)
    """the request as it goes to the server, until it has ended"""
    calls_tools: bool = False
    """the answer calls tools"""
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def holds(self) -> bool:
        return self.busy or (self.lease is not None and self.lease.active)


class SlotCacheHook(CustomLogger):
    """A LiteLLM callback that gives every conversation its own prompt cache on llama-server.

    It acts on chat, text completion, Anthropic messages and responses requests to routes whose `model_info.slot_cache`
    asks for it, and on nothing else. It never raises into LiteLLM: whatever goes wrong here, the request goes on.

    Attributes:
        counts: how often each thing happened since the start: `steadied` requests, `steadied_<rule>` for each rule that
            changed something in one, and `unsteady` places that were found.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._state_dir: Path | None = None
        self._opening: asyncio.Future[Index] | None = None
        self._index: IndexThread | None = None
        self._once = report.Once()
        self._switchers: dict[str, SlotSwitcher] = {}
        self._routers: dict[str, RouterTracker | SwapTracker] = {}
        self._folders: OrderedDict[tuple[str, ...], CacheFolder] = OrderedDict()
        self._settings: dict[tuple[str, str], Settings | None] = {}
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._prompts: OrderedDict[str, Said] = OrderedDict()
        self.tally = Tally()
        self._mounted = endpoints.mount(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stored_at = float("-inf")
        self._frozen = FrozenTexts()
        self._finder = Finder()
        self.counts: Counter[str] = Counter()

    async def aclose(self) -> None:
        """End all background work and close the connections to the servers."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        for switcher in self._switchers.values():
            await switcher.aclose()
        for router in self._routers.values():
            await router.aclose()
        if self._index is not None:
            self._index.close()

    async def status(self) -> Status:
        """What `GET /slot-cache/status` answers. Asks no server."""

        def messages(key: str) -> int | None:
            said = self._prompts.get(key)
            return None if said is None else len(said.prompt.spans)

        return await build_status(
            switchers=self._switchers,
            routers=self._routers,
            folders=self._folders.values(),
            index=self._index,
            tally=self.tally,
            steadied=self.counts,
            messages=messages,
        )

    @property
    def active(self) -> bool:
        """Whether a request of this process has a slot, or waits for one."""
        return any(switcher.leased() or switcher.waiting() for switcher in self._all_switchers())

    def _all_switchers(self) -> list[SlotSwitcher]:
        routed = [switcher for router in self._routers.values() for switcher in router.switchers.values()]
        return [*self._switchers.values(), *routed]

    # LiteLLM's hooks. LiteLLM looks for some of them in this very class and passes most arguments by name.

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Have the prompt hold still, take the slot, put the conversation's cache into it, and pin the request to it."""
        name = str(getattr(call_type, "value", call_type))
        raw = _slot_cache_option(kwargs)
        if name not in MANAGED_CALLS or not asks_for_it(raw):
            turn = self._turn_of(kwargs)  # a fallback to a route that is not ours
            if turn is not None and not _is_nested(turn, name):
                self._end(turn, Ending.BROKEN)
                turn.outcome, turn.why, turn.steadied = Outcome.UNMANAGED, "another route answered", ()
            return None
        sent = _Sent(kwargs)
        try:
            turn = await self._begin(sent, name, raw)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._once.bug("a request goes on unmanaged", error)
            turn = None
        kwargs = sent.kwargs
        if turn is None or turn.lease is None or turn.outcome is Outcome.UNMANAGED:
            return kwargs if sent.changed else None
        extra_body = kwargs.get("extra_body")
        pinned = {**(extra_body if isinstance(extra_body, dict) else {}), "id_slot": turn.lease.slot}
        return {**{key: value for key, value in kwargs.items() if key != "id_slot"}, "extra_body": pinned}

    async def async_post_call_success_deployment_hook(
        self, request_data: dict[str, Any], response: Any, call_type: Any
    ) -> None:
        """The server's answer is complete."""
        turn = self._turn_of(request_data)
        if turn is not None:
            try:
                self._note_usage(turn, response)
            except Exception as error:
                self._once.bug("usage", error)
            self._heed(turn, response)
            self._end(turn, Ending.ANSWERED)

    async def async_post_call_failure_deployment_hook(
        self, request_data: Mapping[str, Any], exception: Exception, call_type: Any, fallback_depth: int | None = None
    ) -> None:
        """This attempt failed; LiteLLM may make another."""
        turn = self._turn_of(request_data)
        if turn is not None:
            self._end(turn, Ending.BROKEN)

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> None:
        """The request is answered, perhaps from LiteLLM's own cache."""
        turn = self._turn_of(data)
        if turn is not None and not hasattr(response, "__aiter__"):
            self._end(turn, Ending.ANSWERED)

    async def async_post_call_failure_hook(
        self,
        request_data: dict[str, Any],
        original_exception: Exception,
        user_api_key_dict: Any,
        traceback_str: str | None = None,
    ) -> None:
        """The request failed for good, perhaps before anything was sent."""
        turn = self._turn_of(request_data)
        if turn is not None:
            self._end(turn, Ending.BROKEN)
            self._report(turn)

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Pass a stream on, and notice its end: the last chunk, a failure, or a client that left."""
        turn = self._turn_of(request_data)
        ending = Ending.BROKEN
        try:
            async for chunk in response:
                self._heed(turn, chunk)
                self._show(turn, chunk)
                yield chunk
            ending = Ending.ANSWERED
        finally:
            if turn is not None:
                self._end(turn, ending)

    async def async_post_call_response_headers_hook(
        self,
        data: dict[str, Any],
        user_api_key_dict: Any,
        response: Any,
        request_headers: dict[str, str] | None = None,
        litellm_call_info: dict[str, object] | None = None,
    ) -> dict[str, str] | None:
        """Tell the client the outcome, and what else is known: of a stream that begins, not yet what was computed."""
        turn = self._turn_of(data)
        if turn is None:
            return None
        headers = {"x-slot-cache": turn.outcome.value, "x-slot-cache-wait-ms": str(round(turn.waited * 1000))}
        if turn.usage is not None and not turn.broken:
            headers["x-slot-cache-reused-tokens"], headers["x-slot-cache-computed-tokens"] = map(str, turn.usage)
        if turn.steadied:
            headers["x-slot-cache-steadied"] = ",".join(turn.steadied)
        return headers

    async def async_log_success_event(
        self, kwargs: dict[str, Any], response_obj: Any, start_time: Any, end_time: Any
    ) -> None:
        """LiteLLM knows the usage of a stream only here."""
        turn = self._turn_of(kwargs)
        if turn is not None:
            try:
                if kwargs.get("cache_hit") is not True:
                    self._note_usage(turn, response_obj)
                if not turn.holds:
                    self._report(turn)
            except Exception as error:
                self._once.bug("usage", error)

    # a request's life

    async def _begin(self, sent: _Sent, call_type: str, raw: object) -> _Turn | None:
        kwargs = sent.kwargs
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
        if not self._mounted:
            self._mounted = endpoints.mount(self)
        if loop is not self._loop:
            self._once.warn(("loop",), "requests from another event loop go on unmanaged")
            return None
        turn = self._turn_of(kwargs)
        if turn is not None and turn.holds:
            if _is_nested(turn, call_type):
                turn.nested, turn.sent = True, kwargs
                return turn
            self._end(turn, Ending.BROKEN)  # another attempt: the last one ended without a word
        settings = self._settings_of(kwargs, raw)
        if settings is None:
            return None
        try:
            request = read_request(kwargs, settings)
        except RequestError as error:
            self._once.warn(
                ("request", route_of(kwargs) or "-", str(error)),
                "route %s is not managed: %s",
                report.shown(route_of(kwargs) or "-"),
                error,
            )
            return None
        metadata = request_metadata(kwargs)
        if metadata is None:
            return None
        if turn is None:
            turn = _Turn(uuid.uuid4().hex, request)
            self._remember(turn)
            metadata[TOKEN] = turn.token
        self._log_with(metadata, turn)
        inner = _is_nested(turn, call_type)  # what is to be done to its prompt was done to the one around it
        turn.request, turn.call_type, turn.nested, turn.usage = request, call_type, False, None
        turn.lease, turn.outcome, turn.why, turn.busy, turn.reported = None, Outcome.UNMANAGED, "", True, False
        turn.broken, turn.sent, turn.calls_tools = False, kwargs, False
        if turn.timer is not None:
            turn.timer.cancel()
            turn.timer = None
        try:
            await self._read_prompt(turn, settings, sent, inner)
            await self._take_slot(turn, settings)
        finally:
            turn.busy = False
        return turn

    async def _read_prompt(self, turn: _Turn, settings: Settings, sent: _Sent, inner: bool) -> None:
        """Have the prompt hold still, and take the fingerprint of what is sent."""
        asked: Mapping[str, Any]
        asked = {name: sent.kwargs[name] for name in _PROMPT_FIELDS if sent.kwargs.get(name) is not None}
        run = _at_once if _rough_size(asked) <= INLINE_CHARS else asyncio.to_thread
        if settings.steady.all_rules and not inner:
            new = await run(self._steadied, turn, settings, asked)
            if new is not asked:
                sent.change(asked, new)
                asked = new
        if turn.prompt is None:
            turn.prompt = await run(fingerprint, asked)
            turn.seen = await run(self._look_at, turn.request, asked, turn.prompt)
        elif turn.steadied and not inner:  # else another attempt at the same has it already
            turn.prompt = await run(fingerprint, asked)

    def _steadied(self, turn: _Turn, settings: Settings, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        before, turn.steadied = turn.steadied, ()
        try:
            new, turn.steadied = steadied(
                asked, settings.steady.all_rules, self._frozen, now=time.monotonic(), **_whose(turn.request)
            )
        except Exception as error:
            self._once.bug("steady", error)
            return asked
        if turn.steadied and not before:
            self.counts.update(("steadied", *(f"steadied_{name}" for name in turn.steadied)))
        return new

    def _look_at(self, request: CacheRequest, asked: Mapping[str, Any], prompt: Prompt) -> Seen | None:
        try:
            return self._finder.see(request=asked, prompt=prompt, **_whose(request))
        except Exception as error:
            self._once.bug("what a prompt begins with", error)
            return None

    async def _take_slot(self, turn: _Turn, settings: Settings) -> None:
        request = turn.request
        assert turn.prompt is not None
        index = await self._open_index(settings)
        turn.show_text, turn.switcher = settings.show_text, None
        try:
            switcher = await self._switcher_of(request, settings, index)
        except LlamaServerError as error:
            self._once.warn(("router", request.base_url, error.fault), "%s: %s", shown_url(request.base_url), error)
            turn.why = str(error)
            return
        want = Want(
            None,
            request.owner,
            apart=settings.scope == "key",
            chain=turn.prompt.packed,
            session=request.key,
            preamble=turn.prompt.preamble,
            tag=request.tag,
        )
        turn.switcher = switcher
        where: dict[str, Any] = {"server": switcher.server.shown, "route": request.route, "session": request.session}
        self.tally.note(Event("ask", key=request.key, **where))
        asyncio.get_running_loop().call_soon(self._note_now, switcher)  # when it waits
        lease = turn.lease = await switcher.acquire(
            settings.which_slots,
            want,
            self._folder_of(request, settings, index),
            queue_seconds=settings.queue_seconds,
            idle_seconds=settings.save_idle_seconds,
        )
        turn.outcome, turn.why, turn.waited = lease.granted.outcome, lease.granted.why, lease.waited
        self._compare(turn, lease.key if turn.outcome is not Outcome.UNMANAGED else request.key)
        turn.told.update(outcome=turn.outcome.value, wait_ms=round(turn.waited * 1000))
        self.tally.note(
            Event(
                "switch",
                slot=None if turn.outcome is Outcome.UNMANAGED else lease.slot,
                key=lease.key,
                outcome=turn.outcome.value,
                tokens=lease.granted.tokens or None,
                seconds=turn.waited,
                words=turn.why or turn.difference or None,
                **where,
            )
        )
        self._note_now(switcher)

    def _end(self, turn: _Turn, ending: Ending) -> None:
        """The attempt has ended: give the slot back. A plain call, safe in a `finally` that may not await."""
        if turn.lease is None or not turn.lease.active:
            return
        turn.broken = ending is Ending.BROKEN
        turn.lease.release(ending, self._conversation(turn) if ending is Ending.ANSWERED else None)
        turn.sent, turn.lease.tail = None, ""
        if turn.switcher is not None:
            self._note_now(turn.switcher)
        if turn.usage is not None:
            self._report(turn)
        elif turn.timer is None and self._loop is not None and not self._loop.is_closed():
            turn.timer = self._loop.call_later(USAGE_SECONDS, self._report, turn)

    def _heed(self, turn: _Turn | None, answer: Any) -> None:
        """Note of an answer, or a piece of it, whether it calls tools, where that is of interest."""
        if turn is None or turn.calls_tools or turn.lease is None or not turn.lease.wants_conversation:
            return
        try:
            turn.calls_tools = calls_tools(answer)
        except Exception as error:
            self._once.bug("answer", error)

    def _show(self, turn: _Turn | None, chunk: Any) -> None:
        """Note that an answer comes, and, where that is asked for, its last characters."""
        if turn is None or turn.lease is None or not turn.lease.active:
            return
        turn.lease.answering = True
        if turn.show_text:
            try:
                turn.lease.tail = tail(turn.lease.tail, chunk)
            except Exception as error:
                self._once.bug("text", error)

    def _log_with(self, metadata: dict[str, Any], turn: _Turn) -> None:
        """Have LiteLLM hand what becomes of a request to its logging integrations: those that take all metadata, and, under
        the one name that it lets through into its own logs, the others."""
        metadata[LOGGED] = turn.told
        more = metadata.get("spend_logs_metadata")
        metadata["spend_logs_metadata"] = {**(more if isinstance(more, dict) else {}), LOGGED: turn.told}

    def _note_now(self, switcher: SlotSwitcher) -> None:
        speed = switcher.actions.prefill_rate
        self.tally.now(switcher.server.shown, len(switcher.leased()), switcher.waiting(), speed)

    def _conversation(self, turn: _Turn) -> Conversation | None:
        if turn.sent is None or turn.lease is None or not turn.lease.wants_conversation:
            return None
        try:
            return conversation_of(turn.sent, turn.calls_tools)
        except Exception as error:
            self._once.bug("conversation", error)
            return None

    def _report(self, turn: _Turn) -> None:
        if turn.reported or turn.holds:
            return
        turn.reported, turn.sent = True, None
        if turn.lease is not None:
            turn.lease.conversation = None
        if turn.timer is not None:
            turn.timer.cancel()
        reused, computed = turn.usage if turn.usage is not None else ("-", "-")
        finding = self._count(turn)
        report.info(
            "request %s: %s%s, reused %s, computed %s, waited %.3f s%s%s",
            (turn.lease.key if turn.lease is not None else None)
            or turn.request.key
            or f"{turn.request.tag} (no session)",
            turn.outcome.value,
            f" ({turn.why})" if turn.why else "",
            reused,
            computed,
            turn.waited,
            f"; {turn.difference}" if turn.difference else "",
            f"; computed again: {finding.words}" if finding is not None else "",
        )
        try:
            self._tell_unsteady(turn)
        except Exception as error:
            self._once.bug("what a prompt begins with", error)
        if self._loop is not None and not self._loop.is_closed():
            # later hooks of the same request still find it for a while
            self._loop.call_later(USAGE_SECONDS, self._forget, turn)

    def _count(self, turn: _Turn) -> Reason | None:
        """Count a request that has ended. Returns why it reused less than it could, if it did."""
        try:
            finding = self._explain(turn)
            self._tell_end(turn, finding)
            return finding
        except Exception as error:
            self._once.bug("counting", error)
            return None

    def _explain(self, turn: _Turn) -> Reason | None:
        lease, switcher = turn.lease, turn.switcher
        if turn.usage is None or turn.broken or turn.prompt is None or lease is None or switcher is None:
            return None
        if turn.said is not None:
            turn.said.tokens = sum(turn.usage)
        actions, identity = switcher.actions, switcher.identity
        lost = switcher.gone.cause(lease.key or turn.request.key)
        if turn.last is None and turn.outcome is Outcome.COLD and turn.request.key is None:
            lost = self._find_lost(turn, switcher)
        if turn.outcome is Outcome.COLD and actions.off:
            lost = "off"
        elif turn.outcome is Outcome.COLD and identity is not None and identity.model in actions.stopped():
            lost = "stopped"
        finding = explain(
            last=turn.last,
            now=turn.prompt,
            same=turn.same,
            outcome=turn.outcome,
            reused=turn.usage[0],
            computed=turn.usage[1],
            lost=lost,
            why=turn.why,
            held=lease.granted.tokens,
            prefill=actions.prefill_rate,
        )
        switcher.gone.back(lease.key)
        return finding

    def _find_lost(self, turn: _Turn, switcher: SlotSwitcher) -> str:
        """What happened to the cache that a conversation without a session would have continued."""
        assert turn.lease is not None
        want = turn.lease.want
        for key, cause in switcher.gone.last():
            said = self._prompts.get(key)
            if said is None or tag_of(key) != want.tag:
                continue
            if continues(want, want.session, want.owner, said.prompt.packed):
                turn.last, turn.same = said, True
                return cause
        return ""

    def _tell_end(self, turn: _Turn, finding: Reason | None) -> None:
        request, lease = turn.request, turn.lease
        key = (lease.key if lease is not None else None) or request.key
        reused, computed = turn.usage if turn.usage is not None else (None, None)
        cause = finding.cause if finding is not None else None
        if reused is not None:
            turn.told.update(reused_tokens=reused, computed_tokens=computed)
        if finding is not None:
            turn.told.update(computed_again=finding.cause)
        self.tally.note(
            Event(
                "request",
                server=turn.switcher.server.shown if turn.switcher is not None else None,
                slot=lease.slot if lease is not None and turn.outcome is not Outcome.UNMANAGED else None,
                key=key,
                session=request.session,
                route=request.route,
                outcome=turn.outcome.value,
                tokens=finding.again if finding is not None else None,
                seconds=turn.waited,
                reused=reused,
                computed=computed,
                cause=cause,
                words=finding.words if finding is not None else turn.why or None,
            )
        )
        if turn.outcome in (Outcome.RESTORED, Outcome.DONOR) and reused is not None and turn.switcher is not None:
            speed = turn.switcher.actions.prefill_rate
            if speed and lease is not None and lease.sent_at is not None and lease.taken_at is not None:
                self.tally.spared(request.route, reused / speed - (lease.sent_at - lease.taken_at))
        if finding is not None and reused is not None and computed is not None:
            note = Recomputed(
                at=time.time(),
                key=key,
                session=request.key,
                owner=request.owner,
                route=request.route,
                outcome=turn.outcome.value,
                cause=finding.cause,
                words=finding.words,
                message=finding.message,
                from_token=finding.from_token,
                reused=reused,
                computed=computed,
                again=finding.again,
                seconds=finding.seconds,
            )
            self.tally.recomputed.append(note)
            if self._index is not None:
                self._start(self._index.call(self._index.index.put_recomputed, note))
        if time.monotonic() - self._stored_at > STORED_SECONDS:
            self._stored_at = time.monotonic()
            self._start(self._note_stored())

    async def _note_stored(self) -> None:
        """Count what is saved of the routes, for the metrics."""
        if self._index is None:
            return
        known: dict[str, list[int]] = {folder.route: [] for folder in self._folders.values()}
        for row in await self._index.call(self._index.index.overview):
            known.setdefault(row.route, []).append(row.size)
        for route, sizes in known.items():
            self.tally.stored(route, len(sizes), sum(sizes))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_unsteady(self, turn: _Turn) -> None:
        """Once a place has changed again and again, say so."""
        seen, turn.seen = turn.seen, None
        if seen is None:
            return
        reused, computed = turn.usage or (0, 0)
        rate = turn.switcher.actions.prefill_rate if turn.switcher is not None else 0.0
        seconds = turn.prefill_seconds or (computed / rate if rate else 0.0)
        for place in self._finder.charge(seen, reused + computed, computed, seconds):
            route, key = turn.request.route, turn.request.key
            if place.times == TIMES:
                self.counts["unsteady"] += 1
                kind = ("unsteady", turn.request.tag, place.role, str(place.start // 256), place.rule)
                self._once.warn(kind, "route %s: a conversation's %s", report.shown(route), place.tell())
            if self._index is not None and isinstance(self._index.index, SqliteIndex):
                folder = self._index.index.path.parent
                self._write(folder, Finding.of(place, route, key, time.time()))

    def _write(self, folder: Path, finding: Finding) -> None:
        def write() -> None:
            try:
                write_finding(folder, finding)
            except Exception as error:
                self._once.bug("what was found is not kept", error)

        if self._loop is not None and not self._loop.is_closed():
            self._loop.run_in_executor(None, write)

    def _forget(self, turn: _Turn) -> None:
        if turn.reported and not turn.holds:
            self._turns.pop(turn.token, None)

    def _note_usage(self, turn: _Turn, response: Any) -> None:
        usage = _usage(response)
        if usage is None or turn.broken:
            return
        first = turn.usage is None
        turn.usage = usage
        turn.prefill_seconds = _prefill_seconds(response) or turn.prefill_seconds
        if first and turn.lease is not None and turn.outcome is not Outcome.UNMANAGED:
            turn.lease.learn(*usage, _prefill_seconds(response))

    def _remember(self, turn: _Turn) -> None:
        self._turns[turn.token] = turn
        if len(self._turns) > TURNS:
            ended = [token for token, old in self._turns.items() if not old.holds and old is not turn]
            for token in ended[: max(TURNS // 10, 1)]:
                del self._turns[token]

    def _turn_of(self, data: Mapping[str, Any]) -> _Turn | None:
        places = [data]
        params = data.get("litellm_params")
        if isinstance(params, Mapping):
            places.append(params)
        for place in places:
            for name in ("litellm_metadata", "metadata"):
                metadata = place.get(name)
                token = metadata.get(TOKEN) if isinstance(metadata, Mapping) else None
                turn = self._turns.get(token) if isinstance(token, str) else None
                if turn is not None:
                    return turn
        return None

    # what a request needs

    def _settings_of(self, kwargs: Mapping[str, Any], raw: object) -> Settings | None:
        route = route_of(kwargs) or "-"
        where = (_deployment_of(kwargs), repr(raw))
        if where not in self._settings:
            if len(self._settings) > 10_000:
                self._settings.clear()
            try:
                self._settings[where] = read_settings(route, raw)
            except SettingsError as error:
                self._settings[where] = None
                report.logger.error("slot-cache: %s; the route is passed through unmanaged", error)
        return self._settings[where]

    async def _open_index(self, settings: Settings) -> IndexThread:
        """The process's one index, opened in a thread by the first request that needs it."""
        wanted = settings.state_dir
        if self._opening is None:
            self._state_dir = wanted
            self._opening = asyncio.ensure_future(asyncio.to_thread(open_index, wanted))
        elif wanted != self._state_dir:
            self._once.warn(("state_dir",), "state_dir differs between routes: the first one counts")
        if self._index is None:
            try:
                index = await asyncio.shield(self._opening)
            except Exception as error:
                self._once.bug("index", error)
                index = MemoryIndex()
            if self._index is None:
                self._index = IndexThread(index)
        return self._index

    async def _switcher_of(self, request: CacheRequest, settings: Settings, index: IndexThread) -> SlotSwitcher:
        """The slots for a request: those of its server, or of its model where the server is a router."""
        name = same_server_key(request.base_url)
        locks = index.index.path.parent if isinstance(index.index, SqliteIndex) else None
        router = self._routers.get(name)
        switcher = self._switchers.get(name)
        if router is None and switcher is None:
            server = LlamaServer(request.base_url, request.api_key)
            switcher = self._switchers[name] = SlotSwitcher(
                server, index, name=name, lock_folder=locks, tell=self.tally.note
            )
        if router is None and switcher is not None:
            switcher.server.api_key = request.api_key
            if switcher.role_known or switcher.actions.hung:
                return switcher
            try:
                role = await switcher.server.role() if settings.backend != "llama-swap" else Role("llama-swap")
            except LlamaServerError as error:
                if error.fault == "timeout":
                    switcher.actions.fault(error)
                return switcher  # the slots will tell what is wrong, and the role is asked for again next time
            switcher.role_known = True
            if role.kind == "server" or (role.kind == "llama-swap" and settings.backend == "llama-server"):
                return switcher
            router = self._routers.get(name)
            if router is None:
                if role.kind == "llama-swap":
                    router = SwapTracker(switcher.server, index, name=name, lock_folder=locks, tell=self.tally.note)
                else:
                    limit = limit_of(role, settings.models_max)
                    router = RouterTracker(
                        switcher.server, index, name=name, limit=limit, lock_folder=locks, tell=self.tally.note
                    )
                self._routers[name] = router
                self._switchers.pop(name, None)
        assert router is not None
        router.server.api_key = request.api_key
        switcher = router.switcher(await router.canonical(request.model))
        switcher.server.api_key = request.api_key
        return switcher

    def _folder_of(self, request: CacheRequest, settings: Settings, index: IndexThread) -> CacheFolder:
        server = same_server_key(request.base_url)
        where = (request.tag, server if settings.save_path is None else str(settings.save_path))
        folder = self._folders.get(where)
        if folder is None:
            if settings.save_path is None and (settings.max_files or settings.max_bytes):
                self._once.warn(
                    ("limits", request.tag),
                    "route %s: max_files and max_gib need save_path",
                    report.shown(request.route),
                )
            folder = self._folders[where] = CacheFolder(
                index,
                tag=request.tag,
                route=request.route,
                server=server,
                path=settings.save_path,
                max_files=settings.max_files,
                max_bytes=settings.max_bytes,
                verify=settings.verify,
                min_tokens=settings.min_tokens,
                evict=settings.evict,
            )
            while len(self._folders) > PROMPTS:
                self._folders.popitem(last=False)
        self._folders.move_to_end(where)
        return folder

    def _compare(self, turn: _Turn, key: str | None) -> None:
        """Note where the prompt differs from the last one of its conversation, or, where it begins one, of its session."""
        if key is None or turn.prompt is None or turn.asked == key:
            return
        turn.asked, session = key, f"session {turn.request.key}"
        last = self._prompts.get(key)
        turn.same = last is not None
        if last is None and turn.request.key is not None:
            last = self._prompts.get(session)
        turn.last, turn.said = last, Said(turn.prompt)
        for name in (key, session):
            self._prompts.pop(name, None)
            self._prompts[name] = turn.said
        while len(self._prompts) > PROMPTS:
            self._prompts.popitem(last=False)
        turn.difference = "" if last is None else tell_difference(last.prompt, turn.prompt)


@dataclass
class _Sent:
    """The arguments of a request as it is to be sent: LiteLLM's own until something is changed."""

    kwargs: dict[str, Any]
    changed: bool = False

    def change(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        kept = {name: value for name, value in self.kwargs.items() if name not in old or name in new}
        self.kwargs, self.changed = {**kept, **new}, True


_PROMPT_FIELDS = ("messages", "system", "instructions", "input", "prompt", "tools")


P = ParamSpec("P")
T = TypeVar("T")


async def _at_once(work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    return work(*args, **kwargs)


def _rough_size(asked: object, depth: int = 0) -> int:
    """About how many characters there are to hash; counts no further than it needs to."""
    if isinstance(asked, str):
        return len(asked)
    if depth > 6:
        return 16
    total = 16
    if isinstance(asked, Mapping):
        asked = list(asked.values())
    if isinstance(asked, (list, tuple)):
        for value in asked:
            total += _rough_size(value, depth + 1)
            if total > INLINE_CHARS:
                break
    return total


def _whose(request: CacheRequest) -> dict[str, Any]:
    """Whose request it is, for what is kept of a session: without one, its content tells."""
    if request.key is not None:
        return {"session": request.key, "by_content": False}
    return {"session": f"{request.tag} of {request.owner}", "by_content": True}


def _slot_cache_option(kwargs: Mapping[str, Any]) -> object:
    info = kwargs.get("model_info")
    return info.get("slot_cache") if isinstance(info, Mapping) else None


def _deployment_of(kwargs: Mapping[str, Any]) -> str:
    """What names the entry of model_list: its id, which a wildcard's many routes share, else the route."""
    info = kwargs.get("model_info")
    found = info.get("id") if isinstance(info, Mapping) else None
    return str(found) if found else f"route {route_of(kwargs) or '-'}"


def _is_nested(turn: _Turn, call_type: str) -> bool:
    """Whether this is the call that LiteLLM makes inside the one of /v1/messages, for the same attempt."""
    return turn.call_type == "anthropic_messages" and call_type != "anthropic_messages" and not turn.nested


def _usage(response: Any) -> tuple[int, int] | None:
    """Tokens reused and computed of the prompt, from an answer of any of the APIs; None if it does not say."""
    usage = _get(response, "usage") or _get(_get(response, "response"), "usage")
    if usage is None:
        return None
    details = _get(usage, "prompt_tokens_details") or _get(usage, "input_tokens_details")
    total = _get(usage, "prompt_tokens")
    if not isinstance(total, int):
        total = _get(usage, "input_tokens")
    reused = _get(details, "cached_tokens")
    if reused is None and _get(usage, "cache_read_input_tokens") is not None:  # Anthropic counts them beside the input
        reused = _get(usage, "cache_read_input_tokens")
        total = total + reused if isinstance(total, int) and isinstance(reused, int) else None
    if not isinstance(total, int) or total <= 0:
        return None
    reused = reused if isinstance(reused, int) else 0
    return reused, max(total - reused, 0)


def _prefill_seconds(response: Any) -> float | None:
    """How long the server says it took for the computed part of the prompt; chat and completions answers say so."""
    milliseconds = _get(_get(response, "timings"), "prompt_ms")
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) and milliseconds > 0 else None


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
