"""Pure: why a request computed again what had been computed before, in words and numbers. No text of a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recomputed:
    """A request that reused less than it could.

    Attributes:
        at: when it had ended, seconds since the epoch.
        key: the cache that it continued or began.
        session: the key of its session's first cache.
        route: the model_name.
        outcome: of the request.
        cause: one of `CAUSES`.
        words: what to tell people.
        message: the first message that differs, counted from 1.
        from_token: about how many tokens of the prompt come before that.
        reused, computed: tokens of the prompt.
        again: about how many of those had been computed before.
        seconds: what that cost, None if the speed is not known.
    """

    at: float
    key: str | None
    session: str | None
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
