"""SlotCacheHook: the LiteLLM callback. The only file that knows LiteLLM's hooks.

The slot is taken in the last hook before a request goes out, and given back when the request has ended, whatever road
that takes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from slot_cache import endpoints, report
from slot_cache.ended_requests import EndedRequests
from slot_cache.events import Event
from slot_cache.last_prompts import LastPrompts
from slot_cache.llama_server import LlamaServerError, shown_url
from slot_cache.prompt import tell_difference
from slot_cache.prompt_reading import PromptReader, Sent
from slot_cache.request import RequestError, read_request, request_metadata, route_of
from slot_cache.rewind import Conversation, calls_tools, conversation_of
from slot_cache.servers import Servers
from slot_cache.settings import Settings, SettingsError, asks_for_it, read_settings
from slot_cache.shown_text import tail
from slot_cache.state import Ending, Outcome, Want
from slot_cache.status import Status, build_status
from slot_cache.switcher import SlotSwitcher
from slot_cache.tally import Tally
from slot_cache.turns import Turn, Turns
from slot_cache.unsteady import Finder
from slot_cache.usage import prefill_seconds_of, usage_of

MANAGED_CALLS = frozenset({"acompletion", "atext_completion", "anthropic_messages", "aresponses"})

LOGGED = "slot_cache"
"""The key under which LiteLLM's logging integrations find what became of a request."""

NOTE_SECONDS = 0.01
"""How late the gauges may be: a request is not held for them."""

USAGE_SECONDS = 10.0
"""How long after its end a request waits for LiteLLM to tell its usage, before its line is logged without."""


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
        self._once = report.Once()
        self._settings: dict[tuple[str, str], Settings | None] = {}
        self._turns = Turns()
        self.tally = Tally()
        self.counts: Counter[str] = Counter()
        finder = Finder()
        self._servers = Servers(self._once, self.tally.note)
        self._reader = PromptReader(finder, self.counts, self._once)
        self._prompts = LastPrompts()
        self._ended = EndedRequests(self._servers, self._prompts, finder, self.tally, self.counts, self._once)
        self._mounted = endpoints.mount(self)
        self._to_note: set[SlotSwitcher] = set()

    async def aclose(self) -> None:
        """End all background work and close the connections to the servers."""
        await self._ended.aclose()
        await self._servers.aclose()

    async def status(self) -> Status:
        """What `GET /slot-cache/status` answers. Asks no server."""
        return await build_status(
            switchers=self._servers.switchers,
            routers=self._servers.routers,
            folders=self._servers.folders,
            index=self._servers.index,
            tally=self.tally,
            steadied=self.counts,
            messages=self._prompts.messages,
        )

    @property
    def active(self) -> bool:
        """Whether a request of this process has a slot, or waits for one."""
        return any(switcher.leased() or switcher.waiting() for switcher in self._servers.all_switchers())

    # LiteLLM's hooks. LiteLLM looks for some of them in this very class and passes most arguments by name.

    async def async_pre_call_deployment_hook(self, kwargs: dict[str, Any], call_type: Any) -> dict[str, Any] | None:
        """Have the prompt hold still, take the slot, put the conversation's cache into it, and pin the request to it."""
        name = str(getattr(call_type, "value", call_type))
        raw = _slot_cache_option(kwargs)
        if name not in MANAGED_CALLS or not asks_for_it(raw):
            turn = self._turns.find(kwargs)  # a fallback to a route that is not ours
            if turn is not None and not turn.is_nested(name):
                self._end(turn, Ending.BROKEN)
                turn.outcome, turn.why, turn.steadied = Outcome.UNMANAGED, "another route answered", ()
            return None
        sent = Sent(kwargs)
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
        turn = self._turns.find(request_data)
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
        turn = self._turns.find(request_data)
        if turn is not None:
            self._end(turn, Ending.BROKEN)

    async def async_post_call_success_hook(self, data: dict[str, Any], user_api_key_dict: Any, response: Any) -> None:
        """The request is answered, perhaps from LiteLLM's own cache."""
        turn = self._turns.find(data)
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
        turn = self._turns.find(request_data)
        if turn is not None:
            self._end(turn, Ending.BROKEN)
            self._report(turn)

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Pass a stream on, and notice its end: the last chunk, a failure, or a client that left."""
        turn = self._turns.find(request_data)
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
        turn = self._turns.find(data)
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
        turn = self._turns.find(kwargs)
        if turn is not None:
            try:
                if kwargs.get("cache_hit") is not True:
                    self._note_usage(turn, response_obj)
                if not turn.holds:
                    self._report(turn)
            except Exception as error:
                self._once.bug("usage", error)

    # a request's life

    async def _begin(self, sent: Sent, call_type: str, raw: object) -> Turn | None:
        kwargs = sent.kwargs
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = loop
            self._to_note.clear()  # their timers have ended with the last loop
        if not self._mounted:
            self._mounted = endpoints.mount(self)
        if loop is not self._loop:
            self._once.warn(("loop",), "requests from another event loop go on unmanaged")
            return None
        turn = self._turns.find(kwargs)
        if turn is not None and turn.holds:
            if turn.is_nested(call_type):
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
            turn = self._turns.begin(request, metadata)
        self._log_with(metadata, turn)
        inner = turn.is_nested(call_type)  # what is to be done to its prompt was done to the one around it
        turn.request, turn.call_type, turn.nested, turn.usage = request, call_type, False, None
        turn.lease, turn.outcome, turn.why, turn.busy, turn.reported = None, Outcome.UNMANAGED, "", True, False
        turn.broken, turn.sent, turn.calls_tools = False, kwargs, False
        if turn.timer is not None:
            turn.timer.cancel()
            turn.timer = None
        try:
            await self._reader.read(turn, settings, sent, inner)
            await self._take_slot(turn, settings)
        finally:
            turn.busy = False
        return turn

    async def _take_slot(self, turn: Turn, settings: Settings) -> None:
        request = turn.request
        assert turn.prompt is not None
        index = await self._servers.open_index(settings)
        turn.show_text, turn.switcher = settings.show_text, None
        try:
            switcher = await self._servers.switcher(request, settings, index)
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
        self._note_soon(switcher)
        lease = turn.lease = await switcher.acquire(
            settings.which_slots,
            want,
            self._servers.folder(request, settings, index),
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
        self._note_soon(switcher)

    def _end(self, turn: Turn, ending: Ending) -> None:
        """The attempt has ended: give the slot back. A plain call, safe in a `finally` that may not await."""
        if turn.lease is None or not turn.lease.active:
            return
        turn.broken = ending is Ending.BROKEN
        turn.lease.release(ending, self._conversation(turn) if ending is Ending.ANSWERED else None)
        turn.sent, turn.lease.tail = None, ""
        if turn.switcher is not None:
            self._note_soon(turn.switcher)
        if turn.usage is not None:
            self._report(turn)
        elif turn.timer is None and self._loop is not None and not self._loop.is_closed():
            turn.timer = self._loop.call_later(USAGE_SECONDS, self._report, turn)

    def _heed(self, turn: Turn | None, answer: Any) -> None:
        """Note of an answer, or a piece of it, whether it calls tools, where that is of interest."""
        if turn is None or turn.calls_tools or turn.lease is None or not turn.lease.wants_conversation:
            return
        try:
            turn.calls_tools = calls_tools(answer)
        except Exception as error:
            self._once.bug("answer", error)

    def _show(self, turn: Turn | None, chunk: Any) -> None:
        """Note that an answer comes, and, where that is asked for, its last characters."""
        if turn is None or turn.lease is None or not turn.lease.active:
            return
        turn.lease.answering = True
        if turn.show_text:
            try:
                turn.lease.tail = tail(turn.lease.tail, chunk)
            except Exception as error:
                self._once.bug("text", error)

    def _log_with(self, metadata: dict[str, Any], turn: Turn) -> None:
        """Have LiteLLM hand what becomes of a request to its logging integrations: those that take all metadata, and, under
        the one name that it lets through into its own logs, the others."""
        metadata[LOGGED] = turn.told
        more = metadata.get("spend_logs_metadata")
        metadata["spend_logs_metadata"] = {**(more if isinstance(more, dict) else {}), LOGGED: turn.told}

    def _note_soon(self, switcher: SlotSwitcher) -> None:
        """Have the gauges told how things are, once for all that happens until then."""
        if switcher not in self._to_note and self._loop is not None and not self._loop.is_closed():
            self._to_note.add(switcher)
            self._loop.call_later(NOTE_SECONDS, self._note_now, switcher)

    def _note_now(self, switcher: SlotSwitcher) -> None:
        self._to_note.discard(switcher)
        speed = switcher.actions.prefill_rate
        self.tally.now(switcher.server.shown, len(switcher.leased()), switcher.waiting(), speed)

    def _conversation(self, turn: Turn) -> Conversation | None:
        if turn.sent is None or turn.lease is None or not turn.lease.wants_conversation:
            return None
        try:
            return conversation_of(turn.sent, turn.calls_tools)
        except Exception as error:
            self._once.bug("conversation", error)
            return None

    def _report(self, turn: Turn) -> None:
        if turn.reported or turn.holds:
            return
        turn.reported, turn.sent = True, None
        if turn.lease is not None:
            turn.lease.conversation = None
        if turn.timer is not None:
            turn.timer.cancel()
        self._ended.tell(turn, self._loop)
        if self._loop is not None and not self._loop.is_closed():
            # later hooks of the same request still find it for a while
            self._loop.call_later(USAGE_SECONDS, self._turns.forget, turn)

    def _note_usage(self, turn: Turn, response: Any) -> None:
        usage = usage_of(response)
        if usage is None or turn.broken:
            return
        first = turn.usage is None
        turn.usage = usage
        turn.prefill_seconds = prefill_seconds_of(response) or turn.prefill_seconds
        if first and turn.lease is not None and turn.outcome is not Outcome.UNMANAGED:
            turn.lease.learn(*usage, prefill_seconds_of(response))

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

    def _compare(self, turn: Turn, key: str | None) -> None:
        """Note where the prompt differs from the last one of its conversation, or, where it begins one, of its session."""
        if key is None or turn.prompt is None or turn.asked == key:
            return
        turn.asked = key
        turn.said, turn.last, turn.same = self._prompts.put(key, turn.request.key, turn.prompt)
        turn.difference = "" if turn.last is None else tell_difference(turn.last.prompt, turn.prompt)


def _slot_cache_option(kwargs: Mapping[str, Any]) -> object:
    info = kwargs.get("model_info")
    return info.get("slot_cache") if isinstance(info, Mapping) else None


def _deployment_of(kwargs: Mapping[str, Any]) -> str:
    """What names the entry of model_list: its id, which a wildcard's many routes share, else the route."""
    info = kwargs.get("model_info")
    found = info.get("id") if isinstance(info, Mapping) else None
    return str(found) if found else f"route {route_of(kwargs) or '-'}"
