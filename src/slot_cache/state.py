"""Plain words for what slots, caches and requests are at a moment; the decisions (plan.py) are made of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Outcome(str, Enum):
    """Where a request found its prompt's cache."""

    RESIDENT = "resident"
    RESTORED = "restored"
    DONOR = "donor"
    """Another conversation's cache held the beginning of the prompt."""
    COLD = "cold"
    UNMANAGED = "unmanaged"


class Ending(Enum):
    """How a lease came to its end."""

    ANSWERED = "answered"
    BROKEN = "broken"
    """The request failed or its client left: the server may still be busy with it for a moment."""
    UNSENT = "unsent"
    """Nothing was sent to the server under this lease."""


@dataclass(frozen=True)
class SlotReading:
    """One slot as `GET /slots` tells of it.

    Attributes:
        id: the slot's number.
        processing: whether a request runs in it.
        task: the number of the last task that used it; it grows with every task and starts again with the server.
            None: no task since the server started.
        tokens: how many tokens the slot holds, prompt and generated.
        remaining: while an answer is generated: how many tokens it has until its limit; None: not told.
        context: how many tokens the slot has room for, 0 if not told.
    """

    id: int
    processing: bool
    task: int | None
    tokens: int
    remaining: int | None = None
    context: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Mark:
    """What the server said of a slot when our last request there had ended. Another mark later: it was touched."""

    task: int
    tokens: int


@dataclass(frozen=True)
class Resident:
    """A cache in a slot, as far as we know.

    Attributes:
        key: whose it is; None: nobody's, it is never saved.
        owner: the LiteLLM key that its tokens belong to ("" for the only one there is); None: not known.
        dirty: changed since its last save.
        mark: what the server said of it; None: not looked at since a request was sent there.
        task_before: the slot's task before that request, None if it had none.
        tokens_before: how many tokens it held before that request.
        before: what was there before that request.
        whole: the last request ended normally, so what is there is all of the conversation so far.
        saved_tokens: how many tokens the last good save holds, 0 for none.
        model: the fingerprint of the model it belongs to, "" where that was not asked.
        boot: the server's process it was computed in, "" where the server does not tell.
        chain: the fingerprint of its prompt, packed.
        session: the key that its session's first cache has, None for a conversation without a session.
        rewound: it ends where a message of the conversation ends, see `rewind`.
    """

    key: str | None
    owner: str | None = None
    dirty: bool = False
    mark: Mark | None = None
    task_before: int | None = None
    tokens_before: int = 0
    before: Resident | None = None
    whole: bool = True
    saved_tokens: int = 0
    model: str = ""
    boot: str = ""
    chain: bytes = b""
    session: str | None = None
    rewound: bool = False


@dataclass(frozen=True)
class Saved:
    """A cache on disk that may be restored: how many tokens it holds, its size in bytes, its prompt's fingerprint, and
    whether it was rewound before the save."""

    tokens: int
    size: int
    chain: bytes = b""
    rewound: bool = False


@dataclass(frozen=True)
class Want:
    """What a request wants of a slot.

    Attributes:
        key: the cache it continues; None: not known, its prompt and its session tell.
        owner: as in `Resident`.
        apart: it must not see tokens of another owner.
        chain: the fingerprint of its prompt, packed; empty: not known.
        session: the key of its session's first cache, None for a request without a session.
        preamble: how many links of the chain are tools and system messages, which many conversations share.
        tag: the beginning of the keys of its route.
    """

    key: str | None
    owner: str = ""
    apart: bool = True
    chain: bytes = b""
    session: str | None = None
    preamble: int = 0
    tag: str = ""

    @property
    def knows_itself(self) -> bool:
        """Whether there is anything to tell its conversation by."""
        return self.key is not None or self.session is not None or bool(self.chain)
