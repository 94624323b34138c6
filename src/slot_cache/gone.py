"""What became of caches that are not there any more, as far as this process has seen it."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from slot_cache.plan import Found
from slot_cache.state import Resident

REMEMBERED = 4_000
"""Of so many caches at most; the oldest go first."""

_FOUND = {Found.RESTARTED: "restarted", Found.EMPTY: "emptied", Found.FOREIGN: "foreign"}


class Gone:
    """Remembers by key what happened to a cache; the words are those of `why.CAUSES`."""

    def __init__(self) -> None:
        self._causes: OrderedDict[str, str] = OrderedDict()

    def note(self, key: str | None, cause: str) -> None:
        """Something has happened to a cache."""
        if key is None:
            return
        self._causes.pop(key, None)
        self._causes[key] = cause
        while len(self._causes) > REMEMBERED:
            self._causes.popitem(last=False)

    def lost(self, before: Resident | None, found: Found) -> None:
        """What was in a slot is not there any more; what was not saved of it is lost."""
        if before is not None and before.dirty and found in _FOUND:
            self.note(before.key, _FOUND[found])

    def back(self, key: str | None) -> None:
        """The cache is there again: saved, or in a slot."""
        if key is not None:
            self._causes.pop(key, None)

    def last(self, most: int = 50) -> list[tuple[str, str]]:
        """The last ones, the newest first: keys and causes."""
        return list(islice(reversed(self._causes.items()), most))

    def cause(self, key: str | None) -> str:
        """What happened to a cache, "" for nothing that is known."""
        return "" if key is None else self._causes.get(key, "")
