"""Whether the programs that demo and benchmark start are installed."""

from __future__ import annotations

import importlib.util

NEEDED = ("fastapi", "litellm", "xllamacpp")


def missing_extra(modules: tuple[str, ...] = NEEDED) -> str | None:
    """What to tell the user when the extra `demo` is not installed, None when it is. Nothing is imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"{', '.join(missing)}: not installed here. Get it with: pip install 'litellm-slot-cache[demo]'"
