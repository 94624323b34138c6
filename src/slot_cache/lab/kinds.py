"""What a returning conversation reuses of its last prompt, by kind of model: after a swap, and after a restart of the server.

Measured for slots that are saved and restored as they stand, by plain calls, and for those that the plugin takes care of,
which rewinds them where that helps. Two conversations take turns on one slot, then the server is killed again and again while
one of them goes on. What is learned of a model that was not seen before takes restores that are of no use: the first returns
of each conversation are not counted, in either case.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import httpx

from slot_cache.lab.chat import Conversation, Turn
from slot_cache.lab.measure import BenchError, Progress, Prompts
from slot_cache.lab.stats import Sample, sample

SAVE_WAIT_SECONDS = 20.0
NO_LESSON = "nothing"


@dataclass(frozen=True)
class KindsPlan:
    """How much is measured. Lengths in tokens.

    first_tokens    what each conversation begins with
    turn_tokens     what each later turn adds
    learning        returns of each conversation that are not counted
    returns         those after them that are, of each of two conversations after a swap, and of one after a restart
    as_given        the history holds the answers as they were given. Else it holds others, as with a client that leaves the
                    reasoning out: a prompt that continues a slot to its last token is the one that every model reuses
    """

    first_tokens: int = 2000
    turn_tokens: int = 400
    answer_tokens: int = 24
    learning: int = 2
    returns: int = 5
    as_given: bool = False


QUICK = KindsPlan(first_tokens=1200, turn_tokens=300, returns=2)


@dataclass(frozen=True)
class Return:
    """A turn of a conversation that had one before it.

    reuse           share of the previous prompt that was not computed again
    ttft_seconds    from the wish to ask to the first text of the answer, with all that is done to the slot before
    """

    reuse: float
    ttft_seconds: float


@dataclass(frozen=True)
class Returns:
    """Some of them, summed up."""

    reuse: Sample
    ttft_ms: Sample


@dataclass(frozen=True)
class KindCase:
    """One way of saving and restoring."""

    after_swap: Returns
    after_restart: Returns


@dataclass(frozen=True)
class KindRow:
    """One model; what could not be measured is None. `learned`: plain, rewind or none, see `learned_of`."""

    model: str
    as_it_stands: KindCase | None
    with_plugin: KindCase | None
    learned: str


class Restartable(Protocol):
    """A server that can be killed and started again at the same address."""

    def start(self) -> None: ...

    def kill(self) -> None: ...


class Way(Protocol):
    """How a conversation gets its slot, and how it is seen to that its cache outlives the server."""

    async def turn(self, conversation: Conversation, text: str, tokens: int) -> Turn:
        """A turn; its TTFT covers all that is done to the slot before."""

    async def keep(self, conversation: Conversation) -> None:
        """What it takes until the server may be killed."""


class AsItStands:
    """One slot, saved and restored as it stands: by the calls that anybody would make around a request."""

    def __init__(self, server: httpx.AsyncClient) -> None:
        server.headers["Connection"] = "close"  # none outlives the server
        self._server = server
        self._in_slot = ""
        self._saved: set[str] = set()

    async def turn(self, conversation: Conversation, text: str, tokens: int) -> Turn:
        started = time.perf_counter()
        name = conversation.session
        if self._in_slot != name:
            if self._in_slot:
                await self._act("save", self._in_slot)
            if name in self._saved:
                await self._act("restore", name)
        spent = time.perf_counter() - started
        self._in_slot = name
        turn = await conversation.turn(self._server, text, tokens, extra_body={"id_slot": 0, "cache_prompt": True})
        return _later(turn, spent)

    async def keep(self, conversation: Conversation) -> None:
        await self._act("save", conversation.session)
        self._in_slot = ""  # the server is killed next

    async def _act(self, action: str, session: str) -> None:
        answer = await self._server.post(f"/slots/0?action={action}", json={"filename": f"{session}.bin"})
        if answer.status_code != 200:
            raise BenchError(f"the server refused to {action} a slot: {answer.status_code} {answer.text[:200]}")
        self._saved.add(session)


class WithPlugin:
    """A route of the plugin, whose idle saves are waited for.

    status_of   the server's address, as the plugin's status tells it
    """

    def __init__(self, proxy: httpx.AsyncClient, saved: Path, status_of: str, wait: float = SAVE_WAIT_SECONDS) -> None:
        self._proxy = proxy
        self._saved = saved
        self._status_of = status_of
        self._wait = wait
        self.kinds: list[str] = []
        """what the status said of the model, in the order in which it was looked at"""
        self.unsaved = 0
        """how often an idle save was waited for in vain"""

    async def turn(self, conversation: Conversation, text: str, tokens: int) -> Turn:
        return await conversation.turn(self._proxy, text, tokens)

    async def keep(self, conversation: Conversation) -> None:
        """Wait for a save that is newer than the answer, unless the plugin saves nothing of this model any more."""
        since = time.time()
        deadline = time.monotonic() + self._wait
        while _newest(self._saved) < since:
            if await self.look() == "stopped":
                return
            if time.monotonic() > deadline:
                self.unsaved += 1
                return
            await asyncio.sleep(0.1)

    async def look(self) -> str:
        """What the plugin has learned of the model by now: plain, rewind, trial, stopped, or nothing yet."""
        answer = await self._proxy.get("/slot-cache/status")
        kind = kind_in(answer.json(), self._status_of) if answer.status_code == 200 else ""
        if kind:
            self.kinds.append(kind)
        return kind


def kind_in(status: Mapping[str, Any], server: str) -> str:
    """What a status says that a server's model is like, "" for nothing."""
    found = (str(entry.get("kind", "")) for entry in status.get("servers", []) if entry.get("server") == server)
    return next(found, "")


def learned_of(kinds: Sequence[str]) -> str:
    """In one word what was learned, from what the status said in turn.

    A model is `none`, that is: no restore helps, once it was given up, though a server that was started again gets another
    chance; `nothing` was learned where that was still to be found out at the end.
    """
    known = [kind for kind in kinds if kind in ("plain", "rewind", "stopped")]
    return {"stopped": "none"}.get(known[-1], known[-1]) if known else NO_LESSON


async def measure_kind(
    way: Way, server: Restartable, prompts: Prompts, route: str, plan: KindsPlan, progress: Progress
) -> KindCase:
    """Two conversations by turns on one slot, then one of them while the server is killed before each turn."""
    pair = [Conversation(f"{prompts.label}-{name}", model=route) for name in "ab"]
    last: dict[str, Turn] = {}

    async def ask(conversation: Conversation, number: int) -> Return | None:
        length = plan.turn_tokens if number else plan.first_tokens
        text = prompts.text(f"{conversation.session[-1]}{number}", length)
        turn = await way.turn(conversation, text, plan.answer_tokens)
        if not plan.as_given:
            conversation.messages[-1] = {"role": "assistant", "content": f"So it is, {number} times."}
        before = last.get(conversation.session)
        last[conversation.session] = turn
        if before is None:
            return None
        return Return(min(turn.cached_tokens, before.prompt_tokens) / before.prompt_tokens, turn.ttft_seconds)

    swapped: list[Return] = []
    number = 0
    for number in range(1 + plan.learning + plan.returns):
        progress(f"turn {number + 1}")
        for conversation in pair:
            done = await ask(conversation, number)
            if done is not None and number > plan.learning:
                swapped.append(done)
    restarted: list[Return] = []
    conversation = pair[-1]  # it has the slot
    for later in range(number + 1, number + 1 + plan.returns):
        progress(f"restart {later - number} of {plan.returns}")
        await way.keep(conversation)
        await asyncio.to_thread(_restart, server)
        done = await ask(conversation, later)
        if done is not None:
            restarted.append(done)
    return KindCase(_summed(swapped), _summed(restarted))


def _restart(server: Restartable) -> None:
    server.kill()
    server.start()


def _summed(returns: Iterable[Return]) -> Returns:
    done = list(returns)
    return Returns(sample(one.reuse for one in done), sample(one.ttft_seconds * 1000 for one in done))


def _later(turn: Turn, seconds: float) -> Turn:
    """The turn as it looks to somebody who has waited for `seconds` before it was sent."""
    return replace(turn, ttft_seconds=turn.ttft_seconds + seconds, total_seconds=turn.total_seconds + seconds)


def _newest(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.glob("*.bin")), default=0.0)
