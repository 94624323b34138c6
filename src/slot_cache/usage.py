"""Pure: what an answer of any of the APIs says of its prompt's tokens, and of the time that they took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def usage_of(response: Any) -> tuple[int, int] | None:
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


def prefill_seconds_of(response: Any) -> float | None:
    """How long the server says it took for the computed part of the prompt; chat and completions answers say so."""
    milliseconds = _get(_get(response, "timings"), "prompt_ms")
    return milliseconds / 1000 if isinstance(milliseconds, (int, float)) and milliseconds > 0 else None


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
