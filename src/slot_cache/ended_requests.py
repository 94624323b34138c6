"""What is told of a request that has ended: a line in the log, an event, the counts, why it computed again what had been
computed before, and what changes at the front of its conversation's prompts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from slot_cache import report
from slot_cache.events import Event
from slot_cache.findings import Finding, write_finding
from slot_cache.folder import tag_of
from slot_cache.last_prompts import LastPrompts
from slot_cache.matching import continues
from slot_cache.servers import Servers
from slot_cache.state import Outcome
from slot_cache.switcher import SlotSwitcher
from slot_cache.tally import Tally
from slot_cache.turns import Turn
from slot_cache.unsteady import TIMES, Finder
from slot_cache.why import Finding as Reason
from slot_cache.why import Recomputed, explain

STORED_SECONDS = 10.0
"""How often it is counted what is saved, at most."""

LOG_SECONDS = 0.01
"""The answer is on its way first; LiteLLM looks through each line of its log for secrets, which takes longer than all else
here."""


class EndedRequests:
    """Tells of them. Nothing here raises.

    Args:
        servers: where they went.
        prompts: the last prompts of their conversations.
        finder: what their prompts begin with.
        tally: counts them, and tells those who listen.
        counts: of the places that were found to change.
        once: for warnings.
    """

    def __init__(
        self,
        servers: Servers,
        prompts: LastPrompts,
        finder: Finder,
        tally: Tally,
        counts: Counter[str],
        once: report.Once,
    ) -> None:
        self._servers = servers
        self._prompts = prompts
        self._finder = finder
        self._tally = tally
        self._counts = counts
        self._once = once
        self._tasks: set[asyncio.Task[None]] = set()
        self._stored_at = float("-inf")

    async def aclose(self) -> None:
        """Wait a moment for what is being written down."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)

    def tell(self, turn: Turn, loop: asyncio.AbstractEventLoop | None) -> None:
        """Tell of a request.

        Args:
            turn: it.
            loop: in whose threads files are written; None: there is none any more.
        """
        reused, computed = turn.usage if turn.usage is not None else ("-", "-")
        finding = self.count(turn)
        self._log(
            loop,
            "request %s: %s%s, reused %s, computed %s, waited %.3f s%s%s",
            turn.key or f"{turn.request.tag} (no session)",
            turn.outcome.value,
            f" ({turn.why})" if turn.why else "",
            reused,
            computed,
            turn.waited,
            f"; {turn.difference}" if turn.difference else "",
            f"; computed again: {finding.words}" if finding is not None else "",
        )
        try:
            self._tell_unsteady(turn, loop)
        except Exception as error:
            self._once.bug("what a prompt begins with", error)

    def _log(self, loop: asyncio.AbstractEventLoop | None, *line: Any) -> None:
        if loop is not None and not loop.is_closed():
            loop.call_later(LOG_SECONDS, report.info, *line)
        else:
            report.info(*line)

    def count(self, turn: Turn) -> Reason | None:
        """Count a request that has ended. Returns why it reused less than it could, if it did."""
        try:
            finding = self._explain(turn)
            self._tell_end(turn, finding)
            return finding
        except Exception as error:
            self._once.bug("counting", error)
            return None

    def _explain(self, turn: Turn) -> Reason | None:
        lease, switcher = turn.lease, turn.switcher
        if turn.usage is None or turn.broken or turn.prompt is None or lease is None or switcher is None:
            return None
        if turn.said is not None:
            turn.said.tokens = sum(turn.usage)
        actions, identity = switcher.actions, switcher.identity
        lost = switcher.gone.cause(turn.key)
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

    def _find_lost(self, turn: Turn, switcher: SlotSwitcher) -> str:
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

    def _tell_end(self, turn: Turn, finding: Reason | None) -> None:
        request, lease = turn.request, turn.lease
        reused, computed = turn.usage if turn.usage is not None else (None, None)
        cause = finding.cause if finding is not None else None
        if reused is not None:
            turn.told.update(reused_tokens=reused, computed_tokens=computed)
        if finding is not None:
            turn.told.update(computed_again=finding.cause)
        self._tally.note(
            Event(
                "request",
                server=turn.switcher.server.shown if turn.switcher is not None else None,
                slot=lease.slot if lease is not None and turn.outcome is not Outcome.UNMANAGED else None,
                key=turn.key,
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
                self._tally.spared(request.route, reused / speed - (lease.sent_at - lease.taken_at))
        if finding is not None and reused is not None and computed is not None:
            note = Recomputed(
                at=time.time(),
                key=turn.key,
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
            self._tally.recomputed.append(note)
            index = self._servers.index
            if index is not None:
                self._start(index.call(index.index.put_recomputed, note))
        if time.monotonic() - self._stored_at > STORED_SECONDS:
            self._stored_at = time.monotonic()
            self._start(self._note_stored())

    async def _note_stored(self) -> None:
        """Count what is saved of the routes, for the metrics."""
        index = self._servers.index
        if index is None:
            return
        known: dict[str, list[int]] = {folder.route: [] for folder in self._servers.folders}
        for row in await index.call(index.index.overview):
            known.setdefault(row.route, []).append(row.size)
        for route, sizes in known.items():
            self._tally.stored(route, len(sizes), sum(sizes))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_unsteady(self, turn: Turn, loop: asyncio.AbstractEventLoop | None) -> None:
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
                self._counts["unsteady"] += 1
                kind = ("unsteady", turn.request.tag, place.role, str(place.start // 256), place.rule)
                self._once.warn(kind, "route %s: a conversation's %s", report.shown(route), place.tell())
            folder = self._servers.state_folder
            if folder is not None and loop is not None and not loop.is_closed():
                loop.run_in_executor(None, self._write, folder, Finding.of(place, route, key, time.time()))

    def _write(self, folder: Path, finding: Finding) -> None:
        try:
            write_finding(folder, finding)
        except Exception as error:
            self._once.bug("what was found is not kept", error)
