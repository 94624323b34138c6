"""Pure: what is in a slot, and what to do before a request goes there. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from slot_cache.state import Mark, Outcome, Resident, Saved, SlotReading, Want


class Found(str, Enum):
    """What a slot turned out to hold, compared with what was left there."""

    AS_LEFT = "as left"
    EMPTY = "empty"
    FOREIGN = "foreign"
    RESTARTED = "restarted"


def judge(resident: Resident | None, reading: SlotReading) -> tuple[Found, Resident | None]:
    """Compare what we remember of an idle slot with what the server says; the server is right.

    Returns:
        what was found, and the resident as it really is: marked, or None where nothing of ours is left.
    """
    last_task = None if resident is None else resident.mark.task if resident.mark else resident.task_before
    restarted = last_task is not None and (reading.task is None or reading.task < last_task)
    if restarted:
        return Found.RESTARTED, None
    if reading.task is None or reading.tokens == 0:
        return Found.EMPTY, None
    if resident is None:
        return Found.FOREIGN, None
    mark = Mark(reading.task, reading.tokens)
    if resident.mark is None:
        if reading.task == resident.task_before:  # the request never reached the slot
            return judge(resident.before, reading)
        if not resident.whole and reading.tokens == resident.tokens_before and not _same_cache(resident):
            return Found.FOREIGN, None  # refused by the server: what was there before may be there still
        return Found.AS_LEFT, replace(resident, mark=mark)
    if resident.mark == mark:
        return Found.AS_LEFT, resident
    return Found.FOREIGN, None


def _same_cache(resident: Resident) -> bool:
    return resident.before is not None and resident.before.key == resident.key


def worth_saving(resident: Resident | None, min_tokens: int = 0) -> bool:
    """Whether a save of this resident would be new, large enough, and no worse than the last good one.

    A broken request may have left less of the conversation than its file holds: that file is kept.
    """
    if resident is None or resident.key is None or not resident.dirty or resident.mark is None:
        return False
    return resident.mark.tokens >= max(min_tokens, 1) and (
        resident.whole or resident.mark.tokens > resident.saved_tokens
    )


@dataclass(frozen=True)
class Plan:
    """What to do, in this order: save the resident, restore the wanted cache; erase the slot where nothing is restored."""

    outcome: Outcome
    save: bool = False
    restore: bool = False
    erase: bool = False


def make_plan(
    want: Want, resident: Resident | None, saved: Saved | None, reading: SlotReading, min_tokens: int = 0
) -> Plan:
    """Decide what happens before the request of `want` is sent to a slot.

    Args:
        want: what the request would continue.
        resident: what is in the slot, as `judge` found it.
        saved: the wanted cache on disk, None if there is none.
        reading: the slot as the server sees it; tokens that are nobody's may be there.
        min_tokens: a cache with fewer is not worth a file.

    A slot is not erased for a new conversation: the server reuses a shared beginning by itself. Only where the tokens
    there may belong to another owner, and the request must be kept apart, it is.
    """
    if want.key is not None and resident is not None and resident.key == want.key:
        better_on_disk = not resident.whole and saved is not None and saved.tokens > reading.tokens
        if not better_on_disk:
            return Plan(Outcome.RESIDENT)
        resident = replace(resident, dirty=False)  # what is there is not put in the place of the better one
    save = worth_saving(resident, min_tokens)
    owner = None if resident is None else resident.owner
    perhaps_tokens = reading.task is None or reading.tokens > 0  # a restore is not told of before the first task
    strangers = owner != want.owner if owner is not None else want.owner != ""
    erase = want.apart and perhaps_tokens and strangers
    if want.key is not None and saved is not None:
        return Plan(Outcome.RESTORED, save=save, restore=True, erase=erase)
    return Plan(Outcome.COLD, save=save, erase=erase)


MOST_PASSES = 4
"""So often at most may a waiter be passed by later ones."""


@dataclass(frozen=True)
class SlotView:
    """A slot that is free, as one request sees it.

    Attributes:
        number: the slot's.
        shared: how many links of its chain the request shares with the cache there, if it continues it, else 0.
        empty: nothing is in there.
        busy: somebody else's request was seen in it.
        score: what losing the cache there costs (`eviction.slot_score`).
    """

    number: int
    shared: int = 0
    empty: bool = False
    busy: bool = False
    score: float = 0.0

    @property
    def rank(self) -> int:
        """0: it holds the conversation; 1: it is empty; 2: something would be lost; 3: it must be waited for."""
        return 3 if self.busy else 0 if self.shared else 1 if self.empty else 2


def order_slots(free: Iterable[SlotView]) -> list[int]:
    """The free slots, the best one for the request first: the one that holds its conversation, else an empty one, else
    the one whose cache is cheapest to lose."""
    return [view.number for view in sorted(free, key=lambda view: (view.rank, -view.shared, view.score, view.number))]


@dataclass(frozen=True)
class WaiterView:
    """A request that waits: how often later ones have passed it, and whether the free slot holds its conversation."""

    passed: int = 0
    at_home: bool = False


def choose_waiter(waiting: Sequence[WaiterView], most_passes: int = MOST_PASSES) -> int | None:
    """Which of those that wait, in the order in which they came, has the free slot: the first one, or a later one whose
    conversation is in there, while nobody before it has been passed `most_passes` times. None: nobody waits."""
    for number, waiter in enumerate(waiting):
        if waiter.at_home:
            return number
        if waiter.passed >= most_passes:
            break
    return 0 if waiting else None
