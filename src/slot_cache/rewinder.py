"""Sends a slot back to where its conversation's next turn goes on; where that is, `rewind` tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slot_cache.leases import Slot
from slot_cache.llama_server import LlamaServer, LlamaServerError
from slot_cache.rewind import Conversation, find_point
from slot_cache.slot_actions import SlotActions
from slot_cache.slot_book import SlotBook
from slot_cache.state import Mark


class Rewinder:
    """Rewinds the slots of one server.

    Args:
        server: the server.
        actions: what is known of its model, and told how the rewind went.
        book: what is in the slots.
    """

    def __init__(self, server: LlamaServer, actions: SlotActions, book: SlotBook) -> None:
        self._server = server
        self._actions = actions
        self._book = book

    async def rewind(self, slot: Slot, conversation: Conversation) -> None:
        """Rewind a slot that the caller holds, where the model needs it and there is a place to rewind to.

        Raises:
            LlamaServerError: the server did not do it; what the slot holds is not known.
        """
        reading = await self._book.look(slot.number)
        if reading.processing:
            return
        self._book.judge(slot, reading)
        identity = await self._book.identify(slot)
        if slot.resident is None or not self._actions.needs_rewind(identity):
            return

        async def render(messages: Sequence[Any], answer_begins: bool) -> str | None:
            try:
                return await self._server.render(
                    messages, conversation.tools, conversation.template, answer_begins=answer_begins
                )
            except LlamaServerError as error:
                if error.fault != "refused":
                    raise
                return None  # the template has no words for it

        point = await find_point(conversation, render)
        if point is None:
            return
        seconds = self._actions.rewind_seconds(reading.tokens, point.whole)
        try:
            had, computed = await self._server.rewind(slot.number, point.text, seconds)
        except LlamaServerError as error:
            if error.fault == "timeout" and await self._server.alive():
                self._actions.rewind_too_slow(identity, seconds, point.whole)
            raise
        self._actions.rewound(identity, had, computed, point.whole)
        reading = await self._book.look(slot.number)
        if reading.task is not None and not reading.processing:
            mark = Mark(reading.task, reading.tokens)
            slot.resident = replace(slot.resident, mark=mark, dirty=True, whole=True, rewound=True)
