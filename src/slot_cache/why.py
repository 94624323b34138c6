"""Pure: why a request computed again what had been computed before, in words and numbers. No text of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from slot_cache.prompt import Parting, Prompt, parting
from slot_cache.state import Outcome

CAUSES = {
    "tools": "a tool was changed, added or taken away",
    "system": "the system prompt was changed",
    "edited": "a message was edited",
    "compacted": "the history was compacted, or another conversation of the session began",
    "restarted": "the server was started again, or slept: what its slot held was lost",
    "other model": "what was saved is another model's",
    "evicted": "its file was deleted to keep the route's limit",
    "damaged": "its file was not what was saved",
    "save failed": "its save failed",
    "foreign": "its slot was used by a request that did not pass through here",
    "emptied": "its slot was emptied before it was saved",
    "never saved": "it was never saved",
    "not reused": "the server had it, and did not reuse it: restores and resident caches do not help on this model "
    "(sliding-window or recurrent memory), or its context was shifted",
    "stopped": "restores do not help on this model, so that nothing is saved of it",
    "off": "the server does no slot actions",
    "unmanaged": "the request went on without a slot",
}
"""The causes, and what is told of them."""

LEAST_TOKENS = 64
LEAST_PART = 0.05
"""Less than so many tokens, or than this part of what there was, is not worth a word: servers compute the last tokens of
a prompt again, and templates write the last answer in another way than it was generated."""

SLACK_PART = 0.15
"""Where a prompt parts from the last one is known in characters; tokens are reckoned from them to within so much."""


@dataclass
class Said:
    """The last prompt of a conversation: its fingerprint, and how many tokens it had, 0: not known."""

    prompt: Prompt
    tokens: int = 0


@dataclass(frozen=True)
class Finding:
    """Why a request reused less than it could.

    Attributes:
        cause: one of `CAUSES`.
        words: what to tell people.
        message: the first message that differs from the last prompt, counted from 1; None: none does.
        from_token: about how many tokens of the prompt come before that; None: not known.
        again: about how many tokens were computed that had been computed before.
        seconds: what that cost; None: the speed is not known.
    """

    cause: str
    words: str
    message: int | None
    from_token: int | None
    again: int
    seconds: float | None


@dataclass(frozen=True)
class Recomputed:
    """A request that reused less than it could, and why; the fields are those of `Finding` and of the request.

    Attributes:
        at: when it had ended, seconds since the epoch.
        key: the cache that it continued or began.
        session: the key of its session's first cache.
        owner: the LiteLLM key that it came with, as in `request.CacheRequest`.
        route: the model_name.
        outcome: of the request.
        reused, computed: tokens of its prompt.
    """

    at: float
    key: str | None
    session: str | None
    owner: str
    route: str
    outcome: str
    cause: str
    words: str
    message: int | None
    from_token: int | None
    reused: int
    computed: int
    again: int
    seconds: float | None


def explain(
    *,
    last: Said | None,
    now: Prompt,
    same: bool,
    outcome: Outcome,
    reused: int,
    computed: int,
    lost: str = "",
    why: str = "",
    held: int = 0,
    prefill: float = 0.0,
) -> Finding | None:
    """Why a request reused less than it could; None: it reused what it could, or there was nothing to reuse.

    Args:
        last: the last prompt of its conversation, or, where it begins one, of its session; None: not known.
        now: its prompt.
        same: `last` is of the same conversation.
        outcome: what the switch came to.
        reused, computed: tokens of the prompt, as the server reported them.
        lost: what is known to have happened to the conversation's cache (a word of `CAUSES`), "" for nothing.
        why: what is known of an unmanaged request.
        held: tokens of the cache that was restored or resident, 0: none, or not known.
        prefill: tokens per second, 0: not known.
    """
    total = reused + computed
    if last is None:
        if lost in ("", "never saved", "unmanaged") or outcome is not Outcome.COLD:
            return None
        return _finding(lost, "", None, None, computed, prefill)
    had = max(last.tokens or round(total * min(last.prompt.chars / max(now.chars, 1), 1.0)), 0)
    again = min(had, total) - reused
    if again < max(LEAST_TOKENS, LEAST_PART * had):
        return None
    there = parting(last.prompt, now)
    before = round(total * there.chars / max(now.chars, 1))
    if there.message >= min(len(last.prompt.spans), len(now.spans)):  # what was said before is still there
        if not same:
            return None  # it begins a conversation of its own: nothing was lost
        return _finding(_lost(outcome, lost, held), why, None, before, again, prefill)
    cause = _change(last.prompt, now, there.message, same=same)
    if cause is None:
        return None
    more = _tell(cause, last.prompt, now, there)
    if same and reused + LEAST_TOKENS < before * (1 - SLACK_PART):
        # the prompt was changed, but less was reused than even what is the same
        cause, more = _lost(outcome, lost, held), f"besides, {more}"
    return _finding(cause, more, there.message + 1, before, again, prefill)


def _lost(outcome: Outcome, lost: str, held: int) -> str:
    if outcome is Outcome.UNMANAGED:
        return "unmanaged"
    if lost:
        return lost
    if outcome in (Outcome.RESIDENT, Outcome.RESTORED) or held:
        return "not reused"
    return "never saved"


def _change(last: Prompt, now: Prompt, message: int, *, same: bool) -> str | None:
    """What was changed at a message where two prompts part; None: they are two conversations."""
    role, was = now.spans[message].role, last.spans[message].role
    tail = _common_end(last, now)
    if not same and not tail and not message:
        return None  # nothing at all in common: a request for a title, or something else that the program asks
    if "tools" in (role, was):
        return "tools"
    if "system" in (role, was):
        return "system" if same or tail else None
    shorter = len(now.spans) < len(last.spans)
    if shorter and (not same or len(last.spans) - len(now.spans) >= 2):
        return "compacted"
    return "edited" if same or tail else "compacted"


def _common_end(last: Prompt, now: Prompt) -> int:
    """How many messages of the last prompt's end seem to be in the other one too, by their lengths. Two conversations that
    part at their beginning are told from one that was changed there by this."""
    lengths = [(span.role, span.pieces) for span in now.spans]
    ends = [(span.role, span.pieces) for span in last.spans]
    best = 0
    for end in range(len(lengths), 0, -1):
        same = 0
        while same < min(end, len(ends)) and lengths[end - 1 - same] == ends[-1 - same]:
            same += 1
        best = max(best, same)
        if len(lengths) - end > 8:
            break
    return best if best >= 2 else 0


def _tell(cause: str, last: Prompt, now: Prompt, there: Parting) -> str:
    span = now.spans[there.message]
    where = f"message {there.message + 1} ({span.role})"
    if cause == "compacted":
        return f"{len(last.spans)} messages became {len(now.spans)}, the first that differs is {where}"
    chars = there.chars - sum(other.chars for other in now.spans[: there.message])
    return f"{where} is the same for its first {chars:,} of {span.chars:,} characters"


def _finding(cause: str, more: str, message: int | None, from_token: int | None, again: int, prefill: float) -> Finding:
    seconds = again / prefill if prefill > 0 else None
    words = CAUSES[cause]
    if more:
        words += f" ({more})"
    if from_token is not None and message is not None:
        words += f", about {from_token:,} tokens in"
    words += f": about {again:,} tokens computed again"
    if seconds is not None:
        words += f", {seconds:.1f} s" if seconds >= 1 else f", {seconds:.3f} s"
    return Finding(cause, words, message, from_token, again, seconds)
