"""What the plugin says in the proxy's log: one line per action, one per request, a fault once per kind."""

from __future__ import annotations

import logging
from collections import OrderedDict

logger = logging.getLogger("LiteLLM Proxy")

_PREFIX = "slot-cache: "
_KINDS = 1000


def info(message: str, *args: object) -> None:
    """Log an action at INFO. Arguments are numbers and checked names, never text of a prompt."""
    logger.info(_PREFIX + message, *args)


def shown(text: object, limit: int = 80) -> str:
    """Text that a client may have chosen, made safe for one line of a log."""
    quoted = repr(str(text)[: limit + 1])
    return quoted if len(str(text)) <= limit else quoted[:limit] + "...'"


class Once:
    """Warnings that are given once per kind, until what they warn of is over."""

    def __init__(self) -> None:
        self._said: OrderedDict[tuple[str, ...], None] = OrderedDict()

    def warn(self, kind: tuple[str, ...], message: str, *args: object) -> None:
        """Log at WARNING the first time `kind` comes up, at DEBUG after that."""
        if kind in self._said:
            logger.debug(_PREFIX + message, *args)
            return
        self._said[kind] = None
        while len(self._said) > _KINDS:
            self._said.popitem(last=False)
        logger.warning(_PREFIX + message, *args)

    def bug(self, where: str, error: Exception) -> None:
        """Say once per kind that something of ours failed; with LITELLM_LOG=DEBUG each time, with its traceback."""
        self.warn(("bug", where, type(error).__name__), "%s: internal fault %s", where, type(error).__name__)
        logger.debug(_PREFIX + "%s", where, exc_info=error)

    def said(self, kind: tuple[str, ...]) -> bool:
        """Whether `kind` was said and is not over."""
        return kind in self._said

    def over(self, kind: tuple[str, ...]) -> bool:
        """The fault is over: the next of its kind is said again. Returns whether it had been said."""
        if kind in self._said:
            del self._said[kind]
            return True
        return False
