"""The fingerprints of the last prompts of conversations and sessions: what the next ones are compared with. In memory."""

from __future__ import annotations

from collections import OrderedDict

from slot_cache.prompt import Prompt
from slot_cache.why import Said

PROMPTS = 4_000
"""Of how many conversations and sessions the fingerprint of the last prompt is kept."""


class LastPrompts:
    """The last prompt of each conversation, by its cache's key, and of each session."""

    def __init__(self) -> None:
        self._said: OrderedDict[str, Said] = OrderedDict()

    def __len__(self) -> int:
        return len(self._said)

    def get(self, key: str) -> Said | None:
        """The last prompt of a conversation."""
        return self._said.get(key)

    def messages(self, key: str) -> int | None:
        """How many messages it had."""
        said = self._said.get(key)
        return None if said is None else len(said.prompt.spans)

    def put(self, key: str, session: str | None, prompt: Prompt) -> tuple[Said, Said | None, bool]:
        """Keep a prompt in place of the last one.

        Args:
            key: its conversation's.
            session: the key of its session's first cache, None without a session.
            prompt: it.

        Returns:
            what is kept of it now; the last prompt of its conversation, or, where it begins one, of its session; and whether
            that one is of the same conversation.
        """
        of_session = f"session {session}"
        last = self._said.get(key)
        same = last is not None
        if last is None and session is not None:
            last = self._said.get(of_session)
        said = Said(prompt)
        for name in (key, of_session):
            self._said.pop(name, None)
            self._said[name] = said
        while len(self._said) > PROMPTS:
            self._said.popitem(last=False)
        return said, last, same
