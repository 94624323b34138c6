"""What the benchmark measures, each section a function that returns its numbers. Times are in milliseconds of wall time.

The functions talk to clients that are handed in: `proxy` to a LiteLLM proxy, `server` to the llama-server behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import httpx

from slot_cache.lab.chat import Conversation, Turn
from slot_cache.lab.documents import TOKENS_PER_SENTENCE, document
from slot_cache.lab.stats import Sample, ratio, sample, totals

QUESTION = "What happened on the first day? Answer briefly."
FILE_NAME = "slot-cache-bench.bin"
Progress = Callable[[str], None]


class BenchError(RuntimeError):
    """A section cannot be measured on this server; the message says why."""


@dataclass(frozen=True)
class Prompts:
    """Makes prompts of about a wanted length, each text another one."""

    label: str
    tokens_per_sentence: float = TOKENS_PER_SENTENCE

    def text(self, name: str, tokens: int) -> str:
        """A text of about `tokens` tokens."""
        return document(f"{self.label}-{name}", sentences=max(1, round(tokens / self.tokens_per_sentence)))

    def conversation(self, name: str, route: str, tokens: int) -> Conversation:
        """A new session whose system prompt is a text of its own of about `tokens` tokens."""
        return Conversation(f"{self.label}-{name}", self.text(name, tokens), route)


async def tokens_per_sentence(server: httpx.AsyncClient) -> float:
    """How many tokens of this server's model a sentence of our texts has."""
    sentences = 50
    counted = await _count_tokens(server, document("calibration", sentences=sentences))
    return TOKENS_PER_SENTENCE if counted is None else counted / sentences


async def _count_tokens(server: httpx.AsyncClient, text: str) -> int | None:
    response = await server.post("/tokenize", json={"content": text})
    return len(response.json()["tokens"]) if response.status_code == 200 else None


@dataclass(frozen=True)
class PrefillRow:
    """TTFT at one prompt length; reuse is the share of the prompt that was not computed (median)."""

    prompt_tokens: float
    cold_ms: Sample
    resident_ms: Sample
    restored_ms: Sample
    resident_reuse: float
    restored_reuse: float


@dataclass(frozen=True)
class PrefillResult:
    """TTFT cold, resident and restored by prompt length, through the proxy and with the plugin."""

    rows: list[PrefillRow]


async def measure_prefill(
    proxy: httpx.AsyncClient, route: str, prompts: Prompts, lengths: Sequence[int], samples: int, progress: Progress
) -> PrefillResult:
    """For each length and sample a new session: its first turn (cold), its second (resident), and its third after another
    session had the slot (restored; this TTFT includes saving the other one and restoring this one)."""
    filler = prompts.conversation("filler", route, 60)
    rows: list[PrefillRow] = []
    for length in lengths:
        cold: list[Turn] = []
        resident: list[Turn] = []
        restored: list[Turn] = []
        for number in range(samples):
            progress(f"{length} tokens, {number + 1} of {samples}")
            conversation = prompts.conversation(f"prefill-{length}-{number}", route, length)
            await filler.turn(proxy, QUESTION, 1, remember=False)
            cold.append(await conversation.turn(proxy, QUESTION, 4))
            resident.append(await conversation.turn(proxy, QUESTION, 4))
            await filler.turn(proxy, QUESTION, 1, remember=False)
            restored.append(await conversation.turn(proxy, QUESTION, 4))
        rows.append(
            PrefillRow(
                sample(turn.prompt_tokens for turn in cold).median,
                _ttft_ms(cold),
                _ttft_ms(resident),
                _ttft_ms(restored),
                _reuse(resident),
                _reuse(restored),
            )
        )
    return PrefillResult(rows)


@dataclass(frozen=True)
class SwitchRow:
    """Cost of a switch at one size of a cache.

    save_ms, restore_ms         as the server reports them
    resident_ms, switched_ms    a whole request that computes one token: in the slot already; after saving another, as large
                                cache and restoring its own
    added_ms                    the difference of these medians
    switched_reuse              share of the prompt that was not computed after the switch (median)
    """

    tokens: int
    bytes: int
    save_ms: Sample
    restore_ms: Sample
    save_mb_per_second: float
    restore_mb_per_second: float
    resident_ms: Sample
    switched_ms: Sample
    added_ms: float
    switched_reuse: float


@dataclass(frozen=True)
class SwitchResult:
    """Cost of a switch by size."""

    rows: list[SwitchRow]


async def measure_switch(
    proxy: httpx.AsyncClient,
    server: httpx.AsyncClient,
    route: str,
    prompts: Prompts,
    lengths: Sequence[int],
    samples: int,
    progress: Progress,
    *,
    slot: int = 0,
) -> SwitchResult:
    """Two sessions of the same length take turns, each asking twice: the first request of a pair needs a switch, the second
    does not. Then the slot is saved and restored directly."""
    rows: list[SwitchRow] = []
    for length in lengths:
        progress(f"{length} tokens")
        pair = [prompts.conversation(f"switch-{length}-{name}", route, length) for name in "ab"]
        for conversation in pair:
            await conversation.turn(proxy, QUESTION, 1, stream=False, remember=False)
        switched: list[Turn] = []
        resident: list[Turn] = []
        for number in range(samples):
            conversation = pair[number % 2]
            switched.append(await conversation.turn(proxy, QUESTION, 1, stream=False, remember=False))
            resident.append(await conversation.turn(proxy, QUESTION, 1, stream=False, remember=False))
        saves = [await _slot_action(server, slot, "save") for _ in range(samples)]
        restores = [await _slot_action(server, slot, "restore") for _ in range(samples)]
        save_ms, restore_ms = sample(done.ms for done in saves), sample(done.ms for done in restores)
        resident_ms, switched_ms = _total_ms(resident), _total_ms(switched)
        megabytes = saves[0].bytes / 1e6
        rows.append(
            SwitchRow(
                tokens=saves[0].tokens,
                bytes=saves[0].bytes,
                save_ms=save_ms,
                restore_ms=restore_ms,
                save_mb_per_second=ratio(megabytes * 1000, save_ms.median) or 0.0,
                restore_mb_per_second=ratio(megabytes * 1000, restore_ms.median) or 0.0,
                resident_ms=resident_ms,
                switched_ms=switched_ms,
                added_ms=switched_ms.median - resident_ms.median,
                switched_reuse=_reuse(switched),
            )
        )
    return SwitchResult(rows)


@dataclass(frozen=True)
class OverheadResult:
    """What the plugin adds to a request of a resident session: `added_ms` is the median of the differences of the pairs."""

    pairs: int
    prompt_tokens: int
    without_ms: Sample
    with_ms: Sample
    added_ms: float


async def measure_overhead(
    proxy: httpx.AsyncClient, managed: str, plain: str, prompts: Prompts, pairs: int, progress: Progress
) -> OverheadResult:
    """The same request, over and over, by turns through the route `managed` (with the plugin) and `plain` (without).

    Each route must have a slot of its own on the same server, so that both find their prompt there each time and neither
    touches the other's slot.
    """
    conversations = [prompts.conversation("overhead", route, 200) for route in (plain, managed)]
    times: tuple[list[float], list[float]] = ([], [])
    turn = None
    for number in range(pairs + 3):  # the first three are for warming up
        progress(f"pair {number + 1} of {pairs + 3}")
        for which in (0, 1) if number % 2 else (1, 0):
            turn = await conversations[which].turn(proxy, QUESTION, 1, stream=False, remember=False)
            if number >= 3:
                if turn.computed_tokens > turn.prompt_tokens / 2:
                    raise BenchError("the session did not stay in its slot: somebody else uses this server")
                times[which].append(turn.total_seconds * 1000)
    assert turn is not None
    without, with_plugin = times
    differences = (b - a for a, b in zip(without, with_plugin, strict=True))
    return OverheadResult(pairs, turn.prompt_tokens, sample(without), sample(with_plugin), sample(differences).median)


@dataclass(frozen=True)
class LoadRound:
    """Some sessions at once, played once: the turns of each, and how long all of it took."""

    sessions: list[list[Turn]]
    wall_seconds: float


@dataclass(frozen=True)
class LoadRow:
    """What rounds of the same kind came to.

    reuse             share of the sessions' previous prompts that was not computed again, all rounds together
    computed_tokens   of a round (median)
    ttft_ms           of the returning turns
    outcomes          how many requests had which, all rounds together; none without the plugin
    """

    label: str
    sessions: int
    turns: int
    reuse: float | None
    computed_tokens: float
    ttft_ms: Sample
    wall_seconds: Sample
    outcomes: dict[str, int]


@dataclass(frozen=True)
class LoadResult:
    """Reuse under concurrent sessions, prompts of the same lengths in each row."""

    rows: list[LoadRow]


@dataclass(frozen=True)
class SlotsResult:
    """Reuse under more concurrent sessions than there are slots."""

    slots: int
    rows: list[LoadRow]


async def measure_load(
    proxy: httpx.AsyncClient, routes: Sequence[str], prompts: Prompts, sessions: int, turns: int, tokens: int
) -> LoadRound:
    """`sessions` conversations at once, each of `turns` turns, one request of each in flight all the time.

    Of several routes, which lead to one slot each, the conversations have one after the other, and those with the same take
    turns here, which is part of their times: a llama-server that gets a request for a slot at work mixes up the two
    (docs/measured.md).
    """
    locks = {route: asyncio.Lock() for route in routes} if len(routes) > 1 else {}

    async def one(number: int) -> list[Turn]:
        route = routes[number % len(routes)]
        conversation = prompts.conversation(f"load-{number}", route, tokens)
        done = []
        for turn in range(turns):
            asked = time.perf_counter()
            async with locks.get(route, contextlib.nullcontext()):
                waited = time.perf_counter() - asked
                answer = await conversation.turn(proxy, f"Question {turn + 1}. {QUESTION}", 16)
            ttft, total = waited + answer.ttft_seconds, waited + answer.total_seconds
            done.append(replace(answer, ttft_seconds=ttft, total_seconds=total))
        return done

    started = time.perf_counter()
    done = await asyncio.gather(*(one(number) for number in range(sessions)))
    return LoadRound(done, time.perf_counter() - started)


def load_row(label: str, rounds: Sequence[LoadRound]) -> LoadRow:
    """Sum up rounds of the same kind; there must be one at least."""
    sessions = [session for one in rounds for session in one.sessions]
    computed = (sum(turn.computed_tokens for session in one.sessions for turn in session) for one in rounds)
    return LoadRow(
        label=label,
        sessions=len(rounds[0].sessions),
        turns=len(sessions[0]),
        reuse=totals(sessions).reuse,
        computed_tokens=sample(computed).median,
        ttft_ms=_ttft_ms([turn for session in sessions for turn in session[1:]]),
        wall_seconds=sample(one.wall_seconds for one in rounds),
        outcomes=_outcomes(turn for session in sessions for turn in session),
    )


@dataclass(frozen=True)
class SharedRow:
    """New sessions that have their system prompt in common with one that was there before.

    prefix_tokens     of the system prompt
    reuse             share of it that a new session did not compute (median)
    least_reuse       the same of the session that reused least
    first_ms          TTFT of the session that was there before, which computed all of it
    ttft_ms           of the new sessions' first turns
    outcomes          how many of these had which; none without the plugin
    """

    label: str
    prefix_tokens: int
    reuse: float
    least_reuse: float
    first_ms: float
    ttft_ms: Sample
    outcomes: dict[str, int]


@dataclass(frozen=True)
class SharedResult:
    """What new sessions reuse of a system prompt that another one has computed."""

    rows: list[SharedRow]


async def measure_shared(
    proxy: httpx.AsyncClient,
    server: httpx.AsyncClient,
    route: str,
    prompts: Prompts,
    sessions: int,
    tokens: int,
    label: str,
) -> SharedRow:
    """One session computes a system prompt of about `tokens` tokens. Then `sessions` new ones, one after the other, ask their
    first question under the same system prompt, each after a session with a text of its own was served."""
    system = prompts.text("shared", tokens)
    prefix = await _count_tokens(server, system) or tokens

    async def first_turn(name: str) -> Turn:
        session = f"{prompts.label}-{name}"
        return await Conversation(session, system, route).turn(proxy, f"{name} asks: {QUESTION}", 4)

    first = await first_turn("first")
    new: list[Turn] = []
    for number in range(sessions):
        await prompts.conversation(f"between-{number}", route, 150).turn(proxy, QUESTION, 4)
        new.append(await first_turn(f"{number}-new"))
    reused = sample(min(turn.cached_tokens / prefix, 1.0) for turn in new)
    first_ms = first.ttft_seconds * 1000
    return SharedRow(label, prefix, reused.median, reused.low, first_ms, _ttft_ms(new), _outcomes(new))


@dataclass(frozen=True)
class _Action:
    tokens: int
    bytes: int
    ms: float


async def _slot_action(server: httpx.AsyncClient, slot: int, action: str) -> _Action:
    response = await server.post(f"/slots/{slot}?action={action}", json={"filename": FILE_NAME})
    if response.status_code != 200:
        raise BenchError(f"the server refused to {action} a slot ({response.status_code} {response.text[:200]})")
    answer = response.json()
    if action == "save":
        return _Action(answer["n_saved"], answer["n_written"], answer["timings"]["save_ms"])
    return _Action(answer["n_restored"], answer["n_read"], answer["timings"]["restore_ms"])


def _ttft_ms(turns: Sequence[Turn]) -> Sample:
    return sample(turn.ttft_seconds * 1000 for turn in turns)


def _total_ms(turns: Sequence[Turn]) -> Sample:
    return sample(turn.total_seconds * 1000 for turn in turns)


def _reuse(turns: Sequence[Turn]) -> float:
    return sample(turn.cached_tokens / turn.prompt_tokens for turn in turns).median


def _outcomes(turns: Iterable[Turn]) -> dict[str, int]:
    return dict(sorted(Counter(turn.outcome for turn in turns if turn.outcome is not None).items()))
