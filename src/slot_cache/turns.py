"""What is known of the requests of clients, for as long as LiteLLM makes attempts at them.

A request is found again in LiteLLM's later hooks by a random token in the metadata that its router keeps for it: LiteLLM's
own call id will not do, since a client may choose it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slot_cache.leases import Lease
from slot_cache.prompt import Prompt
from slot_cache.request import CacheRequest
from slot_cache.state import Outcome
from slot_cache.switcher import SlotSwitcher
from slot_cache.unsteady import Seen
from slot_cache.why import Said

TOKEN = "slot_cache_request"
"""The key of our token in LiteLLM's metadata of a request."""

TURNS = 20_000
"""How many requests are remembered at most; ended ones go first."""


@dataclass
class Turn:
    """One request of a client: the attempts that LiteLLM makes at it share one."""

    token: str
    request: CacheRequest
    call_type: str = ""
    nested: bool = False
    lease: Lease | None = None
    outcome: Outcome = Outcome.UNMANAGED
    why: str = ""
    waited: float = 0.0
    prompt: Prompt | None = None
    asked: str | None = None
    """the conversation that the prompt was last read for"""
    switcher: SlotSwitcher | None = field(default=None, repr=False)
    """where it has, or has had, its slot"""
    said: Said | None = None
    """its prompt, as the next one of its conversation is compared with it"""
    last: Said | None = None
    """the last prompt of its conversation, or, where it begins one, of its session"""
    same: bool = False
    """`last` is of the same conversation"""
    told: dict[str, Any] = field(default_factory=dict)
    """what LiteLLM's logging integrations are told"""
    show_text: bool = False
    difference: str = ""
    """where the prompt parts from the last one of its conversation, in words"""
    steadied: tuple[str, ...] = ()
    """the rules that changed something in what is sent"""
    seen: Seen | None = None
    """what its prompt's beginning showed, beside that of the last one of its conversation"""
    usage: tuple[int, int] | None = None
    """tokens reused and computed"""
    prefill_seconds: float | None = None
    busy: bool = False
    """an attempt waits for its slot"""
    broken: bool = False
    """the last attempt was broken off: LiteLLM makes up a usage for it, of an estimate and without reused tokens"""
    reported: bool = False
    sent: Mapping[str, Any] | None = field(default=None, repr=False)
    """the request as it goes to the server, until it has ended"""
    calls_tools: bool = False
    """the answer calls tools"""
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def holds(self) -> bool:
        """It has a slot, or waits for one."""
        return self.busy or (self.lease is not None and self.lease.active)

    @property
    def key(self) -> str | None:
        """The cache that it continues or begins, as far as is known."""
        return (self.lease.key if self.lease is not None else None) or self.request.key

    def is_nested(self, call_type: str) -> bool:
        """Whether this is the call that LiteLLM makes inside the one of /v1/messages, for the same attempt."""
        return self.call_type == "anthropic_messages" and call_type != "anthropic_messages" and not self.nested


class Turns:
    """The requests that are remembered, by their tokens."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def begin(self, request: CacheRequest, metadata: dict[str, Any]) -> Turn:
        """Remember a request, and leave its token in LiteLLM's metadata."""
        turn = Turn(uuid.uuid4().hex, request)
        self._turns[turn.token] = turn
        if len(self._turns) > TURNS:
            ended = [token for token, old in self._turns.items() if not old.holds and old is not turn]
            for token in ended[: max(TURNS // 10, 1)]:
                del self._turns[token]
        metadata[TOKEN] = turn.token
        return turn

    def find(self, data: Mapping[str, Any]) -> Turn | None:
        """The request that arguments of one of LiteLLM's hooks belong to; None if it is not ours."""
        places = [data]
        params = data.get("litellm_params")
        if isinstance(params, Mapping):
            places.append(params)
        for place in places:
            for name in ("litellm_metadata", "metadata"):
                metadata = place.get(name)
                token = metadata.get(TOKEN) if isinstance(metadata, Mapping) else None
                turn = self._turns.get(token) if isinstance(token, str) else None
                if turn is not None:
                    return turn
        return None

    def forget(self, turn: Turn) -> None:
        """A request has ended, and all was told of it; unless another attempt was made at it since."""
        if turn.reported and not turn.holds:
            self._turns.pop(turn.token, None)
