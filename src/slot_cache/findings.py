"""The places that change at the front of prompts, kept in the state folder for `slot-cache why`: shapes and counts, no text.

One small JSON file for all workers of a machine: written whole under a lock, then renamed, the last `MOST` findings.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import portalocker

from slot_cache.unsteady import Place

NAME = "unsteady.json"
MOST = 200
LOCK_SECONDS = 2.0


@dataclass(frozen=True)
class Finding:
    """A place that has changed again and again, as `slot_cache.unsteady.Place` has it.

    Attributes:
        route: the model_name.
        session: the key of the session's first cache, "" for conversations without a session.
        found: when it was told last, in seconds since the epoch.
    """

    route: str
    session: str
    found: float
    message: int
    role: str
    start: int
    end: int
    chars: int
    shape: str
    rule: str
    times: int
    tokens: int
    seconds: float

    @classmethod
    def of(cls, place: Place, route: str, session: str | None, found: float) -> Finding:
        """The finding of a place."""
        known = {name: value for name, value in asdict(place).items() if name in _NAMES}
        return cls(route=route, session=session or "", found=found, **known)

    def same_place(self, other: Finding) -> bool:
        """Whether both tell of one place of one session."""
        near = self.start <= other.end + 64 and other.start <= self.end + 64
        return (self.route, self.session, self.message) == (other.route, other.session, other.message) and near


_NAMES = frozenset(field.name for field in fields(Finding))


def read_findings(folder: Path) -> list[Finding]:
    """What was found, the oldest first. What cannot be read is left out."""
    try:
        loaded = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [found for one in loaded if (found := _finding(one)) is not None] if isinstance(loaded, list) else []


def write_finding(folder: Path, finding: Finding) -> None:
    """Add a finding, in place of an older one of the same place. Not for the event loop: it may wait for other workers.

    Raises:
        OSError, portalocker.LockException: the folder cannot be written, or others write for too long.
    """
    with portalocker.Lock(folder / f"{NAME}.lock", "a", timeout=LOCK_SECONDS):
        kept = [one for one in read_findings(folder) if not one.same_place(finding)]
        text = json.dumps([asdict(one) for one in [*kept, finding][-MOST:]], indent=1)
        part = folder / f"{NAME}.part"
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(folder / NAME)


def _finding(loaded: object) -> Finding | None:
    if not isinstance(loaded, Mapping) or set(loaded) != _NAMES:
        return None
    values: dict[str, Any] = dict(loaded)
    numbers = {"found", "message", "start", "end", "chars", "times", "tokens", "seconds"}
    fits = all(
        isinstance(value, (int, float) if name in numbers else str) and not isinstance(value, bool)
        for name, value in values.items()
    )
    return Finding(**values) if fits else None
