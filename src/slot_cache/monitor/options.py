"""What a monitor looks at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What `slot_cache_monitor` in config.yaml, and the options of the same names, set. What is None is not looked at.

    Attributes:
        proxy: URL of the LiteLLM proxy.
        key: a key of it. In config.yaml better `os.environ/NAME`.
        server: URL of llama-server.
        server_key: its --api-key.
        log: path of its log, or ssh://user@host/path.
        rate: seconds between two looks.
    """

    proxy: str | None = None
    key: str | None = None
    server: str | None = None
    server_key: str | None = None
    log: str | None = None
    rate: float = 1.0
