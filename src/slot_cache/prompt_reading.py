"""A request's prompt before it is sent: it is made to hold still, its fingerprint is taken, its beginning is looked at.

Short prompts are read at once, long ones in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from slot_cache import report
from slot_cache.prompt import Prompt, fingerprint
from slot_cache.request import CacheRequest
from slot_cache.settings import Settings
from slot_cache.steady import FrozenTexts, steadied
from slot_cache.turns import Turn
from slot_cache.unsteady import Finder, Seen

INLINE_CHARS = 20_000
"""A prompt with more characters is hashed in a thread; one with as many takes about 0.1 ms."""

_PROMPT_FIELDS = ("messages", "system", "instructions", "input", "prompt", "tools")

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Sent:
    """The arguments of a request as it is to be sent: LiteLLM's own until something is changed."""

    kwargs: dict[str, Any]
    changed: bool = False

    def change(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        """Have some arguments in place of others."""
        kept = {name: value for name, value in self.kwargs.items() if name not in old or name in new}
        self.kwargs, self.changed = {**kept, **new}, True


class PromptReader:
    """Reads the prompts of one process.

    Args:
        finder: looks at their beginnings.
        counts: of what was made to hold still.
        once: for warnings.
    """

    def __init__(self, finder: Finder, counts: Counter[str], once: report.Once) -> None:
        self._finder = finder
        self._counts = counts
        self._once = once
        self._frozen = FrozenTexts()

    async def read(self, turn: Turn, settings: Settings, sent: Sent, inner: bool) -> None:
        """Have the prompt hold still, and take the fingerprint of what is sent.

        Args:
            turn: the request.
            settings: of its route.
            sent: its arguments, which may be changed.
            inner: it is LiteLLM's own call inside another one, to whose prompt all this was done already.
        """
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

    def _steadied(self, turn: Turn, settings: Settings, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        before, turn.steadied = turn.steadied, ()
        try:
            new, turn.steadied = steadied(
                asked, settings.steady.all_rules, self._frozen, now=time.monotonic(), **_whose(turn.request)
            )
        except Exception as error:
            self._once.bug("steady", error)
            return asked
        if turn.steadied and not before:
            self._counts.update(("steadied", *(f"steadied_{name}" for name in turn.steadied)))
        return new

    def _look_at(self, request: CacheRequest, asked: Mapping[str, Any], prompt: Prompt) -> Seen | None:
        try:
            return self._finder.see(request=asked, prompt=prompt, **_whose(request))
        except Exception as error:
            self._once.bug("what a prompt begins with", error)
            return None


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
