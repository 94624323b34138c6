"""What keeps a server's model loaded, as its slots see it: a router, or llama-swap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Host(Protocol):
    """What keeps a server's model loaded: a router. A server that runs a model of its own has none."""

    async def ready(self, deadline: float, abandoned: Callable[[], bool]) -> None:
        """Return when the model is loaded; or when `abandoned` says that nobody waits for it any more.

        Raises:
            LlamaServerError: it cannot be.
            NoTurnError: it was not until `deadline`.
        """

    async def loaded(self) -> bool:
        """Whether the model may be asked for without loading it."""

    def lost(self) -> None:
        """The model was found not loaded."""
