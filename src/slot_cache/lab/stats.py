"""The arithmetic of demo and benchmark."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slot_cache.lab.chat import Turn


@dataclass(frozen=True)
class Sample:
    """Measured values of one kind, summed up. Without values everything is 0."""

    count: int
    median: float
    low: float
    high: float


def sample(values: Iterable[float]) -> Sample:
    """Median, smallest and largest of `values`, and how many there are."""
    known = sorted(values)
    if not known:
        return Sample(0, 0.0, 0.0, 0.0)
    return Sample(len(known), statistics.median(known), known[0], known[-1])


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None when there is nothing to divide by."""
    return part / whole if whole else None


@dataclass(frozen=True)
class Totals:
    """What a number of turns cost together.

    returning         turns that had one before them in their session
    prompt_tokens, computed_tokens, ttft_seconds   sums over the returning turns
    reuse             share of what the sessions' previous prompts held that was not computed again; None: no returning turn
    """

    turns: int
    returning: int
    prompt_tokens: int
    computed_tokens: int
    ttft_seconds: float
    reuse: float | None


def totals(sessions: Iterable[Sequence[Turn]]) -> Totals:
    """Sum up the turns of some sessions, each given in order."""
    turns = returning = prompt = computed = previous_tokens = reused = 0
    ttft = 0.0
    for session in sessions:
        turns += len(session)
        for previous, turn in itertools.pairwise(session):
            returning += 1
            prompt += turn.prompt_tokens
            computed += turn.computed_tokens
            ttft += turn.ttft_seconds
            previous_tokens += previous.prompt_tokens
            reused += min(turn.cached_tokens, previous.prompt_tokens)
    return Totals(turns, returning, prompt, computed, ttft, ratio(reused, previous_tokens))
