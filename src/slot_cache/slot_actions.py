"""Saves, restores and erasures as they should be: checked before and after, recorded, said in the log.

A caller holds the slot. Nothing here raises a fault of the server or the folder; each is said once per kind.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from slot_cache import report
from slot_cache.events import Event
from slot_cache.eviction import Speeds
from slot_cache.folder import CacheFolder, FolderError, NotTheFolderError
from slot_cache.llama_server import UNKNOWN_BYTES_PER_TOKEN, LlamaServer, LlamaServerError
from slot_cache.model import Identity
from slot_cache.state import Mark, Resident, Saved, SlotReading, Want

HUNG_SECONDS = 5.0
"""After a call timed out, requests go on without a switch for so long before the server is asked again."""

OFF_SECONDS = 60.0
"""After the server said that it does not do slot actions (501), it is not asked for one for so long."""

USELESS_PART = 0.1
USELESS_IN_A_ROW = 2
"""A restore of which the server reused less than this part helped nothing. After so many in a row that should have
helped, the model's caches are neither saved nor restored any more until the server is started again."""

PLAIN, REWIND, TRIAL = "plain", "rewind", "trial"
"""What a model is like: its restores are reused; or only those of slots that were rewound; or that is to be found out."""

REWIND_PART = 0.1
CHECKPOINT_REACH = 2100
"""A rewind that computes more than this part of the prompt, and more than so many tokens, is not worth it. The server keeps
its last context checkpoints 4 and 4 + n_ubatch (516 by default, at most the batch of 2048) tokens before the end of a prompt,
so up to so many are computed where all is as it should be."""

SHORT_TOKENS = 600
SHORT_IN_A_ROW = 8
"""Shorter prompts may have no checkpoint to go back to; but where so many in a row of more than `SHORT_TOKENS` had none, there
are none."""

UNKNOWN_PREFILL_RATE = 200.0
"""Tokens per second, before it is known what the server prefills: that of a slow one."""

REMEMBERED = 1000
"""Of so many routes it is remembered how large a token is, and of so many caches that the server refused to restore them;
at the second time they are deleted."""

LARGE_BYTES = 16 * 2**20
"""Before a save of more than so much, and after one that failed, it is asked whether the disk has room."""

RATE_SECONDS = 600.0
"""How fast the server restores is taken as not known when it has not restored anything for so long: what was slow once, on
a busy disk, is tried again."""

_RATE_WEIGHT = 0.3


class SlotActions:
    """What one server does with slots, and what was learned from it.

    Attributes:
        counts: how often each thing happened since the start: saves, restores, and failures by kind.
        prefill_rate: tokens per second that the server prefills, 0 if not known yet.
    """

    def __init__(
        self,
        server: LlamaServer,
        once: report.Once,
        clock: Callable[[], float],
        tell: Callable[[Event], None] = lambda event: None,
        given_up: Callable[[Identity], None] = lambda identity: None,
    ) -> None:
        self.server = server
        self._tell = tell
        self._given_up = given_up
        self.counts: Counter[str] = Counter()
        self.prefill_rate = 0.0
        self._restore_rate = 0.0
        self._restored_at = float("-inf")
        self._token_bytes = 0.0
        self._once = once
        self._clock = clock
        self._hung_until = float("-inf")
        self._off_until = float("-inf")
        self._bytes_per_token: OrderedDict[str, float] = OrderedDict()
        self._useless: Counter[str] = Counter()
        self._had_none: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        self._recalled: OrderedDict[str, None] = OrderedDict()
        self._stopped: dict[str, str] = {}
        self._refused: OrderedDict[str, None] = OrderedDict()

    @property
    def speeds(self) -> Speeds:
        """What was measured of the server with this model."""
        known = self._clock() - self._restored_at < RATE_SECONDS
        return Speeds(self.prefill_rate, self._restore_rate if known else 0.0, self._token_bytes)

    def _learn_restore(self, tokens: int, size: int, seconds: float) -> None:
        """By the server's own time: what a call waits for other slots' batches, a prefill in its place would wait too."""
        if tokens <= 0 or size <= 0 or seconds <= 0:
            return
        rate, self._restored_at = size / seconds, self._clock()
        old = self._restore_rate
        self._restore_rate = rate if not old else (1 - _RATE_WEIGHT) * old + _RATE_WEIGHT * rate
        self._token_bytes = size / tokens

    @property
    def hung(self) -> bool:
        """The server let a call time out a moment ago."""
        return self._clock() < self._hung_until

    @property
    def off(self) -> bool:
        """The server does no slot actions."""
        return self._clock() < self._off_until

    def works_for(self, identity: Identity) -> bool:
        """Whether to save and restore now: the server can, and it helps with this model."""
        if self.off:
            return False
        stopped = self._stopped.get(identity.model)
        if stopped is not None and stopped != identity.boot:
            del self._stopped[identity.model]
            stopped = None
        return stopped is None

    def restarted(self) -> None:
        """The server was started again, perhaps with other flags: what did not help may help now."""
        self._stopped.clear()
        self._useless.clear()
        self._had_none.clear()
        self._off_until = float("-inf")

    def fault(self, error: LlamaServerError) -> None:
        """Note that the server did not do what it should, say so once."""
        self.counts[f"server {error.fault}"] += 1
        if error.fault == "timeout":
            self._hung_until = self._clock() + HUNG_SECONDS
        self._tell(Event("fault", server=self.server.shown, cause=f"server {error.fault}", words=str(error)))
        cure = {401: " (the key was refused: check the route's api_key)", 501: " (start llama-server with --slots)"}
        self._once.warn(
            ("server", self.server.base_url),
            "%s: %s%s; requests go on without a switch",
            self.server.shown,
            error,
            cure.get(error.status, ""),
        )

    def works_again(self) -> None:
        """The server answered; if it did not before, say so."""
        if self._once.over(("server", self.server.base_url)):
            report.info("%s answers again", self.server.shown)

    async def save(self, slot: int, resident: Resident, folder: CacheFolder) -> Resident | None:
        """Save what is in the slot; it must be worth it and be marked.

        Returns:
            the resident as it is with a good save, None if there is none (a good one from before stays).
        """
        if resident.key is None:
            return None
        async with folder.saving(resident.key):
            return await self._saved(slot, resident, folder)

    async def _saved(self, slot: int, resident: Resident, folder: CacheFolder) -> Resident | None:
        key, mark = resident.key, resident.mark
        if key is None or mark is None:
            return None
        kind = ("save", self.server.base_url, folder.tag)
        known = self._bytes_per_token.get(folder.tag)
        size = mark.tokens * (known or 0.0)
        if (size > LARGE_BYTES or self._once.said(kind)) and not await folder.has_room(size):
            self._failed("save", kind, key, "the disk is full")
            return None
        started = self._clock()
        expected = mark.tokens * (known or UNKNOWN_BYTES_PER_TOKEN)
        try:
            answer = await self.server.save(slot, folder.name_to_save(key), expected)
        except LlamaServerError as error:
            self._action_fault("save", kind, key, error)
            await self._failed_save(key, folder, written=error.status not in (401, 501))
            return None
        try:
            if answer.tokens != mark.tokens:  # fewer, or a stranger came between the look and the save
                raise FolderError(f"{answer.tokens} tokens were saved of {mark.tokens}")
            seconds = answer.tokens / self.prefill_rate if self.prefill_rate else 0.0
            await folder.commit(
                key,
                answer.tokens,
                answer.size,
                resident.model,
                resident.chain,
                seconds,
                session=resident.session,
                owner=resident.owner,
                rewound=resident.rewound,
            )
        except NotTheFolderError as error:
            self._failed("save", kind, key, f"{error}; its files are not looked at from now on")
            folder.blind()
            return await self._saved(slot, resident, folder)
        except FolderError as error:
            self._failed("save", kind, key, str(error))
            await self._failed_save(key, folder, written=True)
            return None
        self._once.over(kind)
        self.counts["saves"] += 1
        self._bytes_per_token[folder.tag] = self._token_bytes = answer.size / answer.tokens
        while len(self._bytes_per_token) > REMEMBERED:
            self._bytes_per_token.popitem(last=False)
        self._say("save", slot, key, answer.tokens, answer.size, started)
        return replace(resident, dirty=False, whole=True, saved_tokens=answer.tokens)

    async def restore(
        self,
        slot: int,
        want: Want,
        saved: Saved,
        folder: CacheFolder,
        reading: SlotReading,
        identity: Identity,
        donor: str | None = None,
    ) -> Resident | None:
        """Restore a cache that `folder.look_up` has checked: that of `want`, or as its beginning that of another key.

        Returns:
            what is in the slot now, as the cache of `want`; None if it is nothing that may be relied on.
        """
        key = donor or want.key
        if key is None:
            return None
        kind = ("restore", self.server.base_url)
        started = self._clock()
        try:
            answer = await self.server.restore(slot, folder.saved_name(key), float(saved.size))
        except LlamaServerError as error:
            self._action_fault("restore", kind, key, error)
            if error.status == 400:
                await self._refused_restore(key, folder)
            return None
        if answer.tokens != saved.tokens or answer.size != saved.size:
            self._failed("restore", kind, key, f"{answer.tokens} tokens came back of {saved.tokens}")
            await folder.forget(key)
            await self.erase(slot, "it is not what was saved")
            return None
        self._once.over(kind)
        self.counts["restores"] += 1
        self._refused.pop(key, None)
        self._say("restore", slot, key, answer.tokens, answer.size, started)
        self._learn_restore(answer.tokens, answer.size, answer.milliseconds / 1000)
        await folder.restored(key, answer.size, answer.milliseconds / 1000)
        return Resident(
            key=want.key,
            session=want.session,
            owner=want.owner,
            mark=Mark(reading.task, answer.tokens) if reading.task is not None else None,
            saved_tokens=answer.tokens if donor is None else 0,
            model=identity.model,
            boot=identity.boot,
            chain=saved.chain,
            rewound=saved.rewound,
        )

    async def _failed_save(self, key: str, folder: CacheFolder, written: bool) -> None:
        """Clear up after a save that was not good: where the file cannot be seen it may have overwritten the last good one."""
        if folder.path is not None:
            await folder.discard_part(key)
        elif written:
            await folder.forget(key)

    async def _refused_restore(self, key: str, folder: CacheFolder) -> None:
        """The server could not restore a file. One that was checked may do another time, when there is more room."""
        if folder.path is not None and key not in self._refused:
            self._refused[key] = None
            while len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)
            return
        self._refused.pop(key, None)
        await folder.forget(key)

    async def erase(self, slot: int, why: str) -> None:
        """Empty the slot."""
        try:
            await self.server.erase(slot)
        except LlamaServerError as error:
            self._action_fault("erase", ("erase", self.server.base_url), "-", error)
        else:
            self.counts["erasures"] += 1
            self._tell(Event("erase", server=self.server.shown, slot=slot, words=why))
            report.info("%s slot %d: erased, %s", self.server.shown, slot, why)

    def learn_prefill(self, tokens: int, seconds: float) -> None:
        """Learn from an answer how fast the server prefills; short prompts tell little and do not count."""
        if tokens >= 64 and seconds > 0:
            rate = tokens / seconds
            self.prefill_rate = (
                rate if not self.prefill_rate else (1 - _RATE_WEIGHT) * self.prefill_rate + _RATE_WEIGHT * rate
            )

    def learn_use(self, identity: Identity, restored: int, reused: int, rewound: bool = False) -> str:
        """Learn whether a restore helped, from what the server reused of a prompt that continues what was restored.

        The first one that did not starts a lesson: from then on slots are rewound before they are saved, and what was not
        is not restored. If that does not help either, or a model that was known does not behave as it did, its caches are
        neither saved nor restored any more. Where the prompt repeats all that was restored, every model reuses all of it: only
        one that reuses a part is surely plain.

        Returns:
            what has been learned for good just now (`plain` or `rewind`), else "".
        """
        if restored <= 0 or identity.model in self._stopped:
            return ""
        kind = self._kinds.get(identity.kind_key, "")
        if reused >= USELESS_PART * restored:
            self._useless[identity.model] = 0
            if kind == TRIAL and rewound:
                return self._learn_kind(identity, REWIND)
            return self._learn_kind(identity, PLAIN) if kind == "" and restored / 2 <= reused < restored else ""
        self.counts["useless restores"] += 1
        if kind == "":
            self._kinds[identity.kind_key] = TRIAL
            report.info(
                "%s: a restore of %s was not reused: its slots are rewound before they are saved from now on",
                self.server.shown,
                report.shown(identity.name),
            )
            return ""
        self._useless[identity.model] += 1
        if self._useless[identity.model] >= (1 if kind == TRIAL and rewound else USELESS_IN_A_ROW):
            self._stop(
                identity,
                "this model's restores are not reused (sliding-window or recurrent memory): for a sliding-window model "
                "start llama-server with --swa-full",
            )
        return ""

    def _learn_kind(self, identity: Identity, kind: str) -> str:
        self._kinds[identity.kind_key] = kind
        self._forget_kinds()
        return kind

    def _forget_kinds(self) -> None:
        while len(self._kinds) > REMEMBERED:
            del self._kinds[next(iter(self._kinds))]

    def _stop(self, identity: Identity, why: str) -> None:
        self._stopped[identity.model] = identity.boot
        self._given_up(identity)
        report.logger.warning(
            "slot-cache: %s: %s; %s is neither saved nor restored any more until the server is started again",
            self.server.shown,
            why,
            report.shown(identity.name),
        )

    def kind(self, identity: Identity) -> str:
        """What is known of a model: `plain`, `rewind`, `trial` (it may be either `rewind` or none), "" for nothing."""
        return self._kinds.get(identity.kind_key, "")

    def knows_kind(self, identity: Identity) -> bool:
        """Whether `recall_kind` was called for the model."""
        return identity.kind_key in self._recalled

    def recall_kind(self, identity: Identity, kind: str, given_up: str = "") -> None:
        """What was learned of a model before this process, and the boot of the server in which its restores did not help."""
        self._recalled[identity.kind_key] = None
        while len(self._recalled) > REMEMBERED:
            self._recalled.popitem(last=False)
        if kind in (PLAIN, REWIND) and not self._kinds.get(identity.kind_key):
            self._kinds[identity.kind_key] = kind
            self._forget_kinds()
        if given_up and given_up == identity.boot:
            self._stopped[identity.model] = identity.boot
            report.info("%s: %s is left alone, as before", self.server.shown, report.shown(identity.name))

    def needs_rewind(self, identity: Identity | None) -> bool:
        """Whether slots are rewound before they are saved."""
        return identity is not None and self.kind(identity) in (TRIAL, REWIND) and identity.model not in self._stopped

    def rewind_seconds(self, tokens: int, whole: bool) -> float:
        """How long a rewind of a slot with so many tokens may compute, to its last message's end (`whole`) or an earlier one."""
        most = max(CHECKPOINT_REACH, REWIND_PART * tokens if whole else tokens)
        return 2 * most / (self.prefill_rate or UNKNOWN_PREFILL_RATE)

    def rewound(self, identity: Identity, had: int, computed: int, whole: bool = True) -> None:
        """Note what a rewind has cost: tokens of the text that the slot had, and that were computed. One to an earlier message
        than the last may cost much where its checkpoint is gone; the next turn would have to compute as much."""
        self.counts["rewinds"] += 1
        if not whole:
            return
        short = had == 0 and computed > SHORT_TOKENS
        self._had_none[identity.model] = self._had_none[identity.model] + 1 if short else 0
        most = max(CHECKPOINT_REACH, REWIND_PART * (had + computed))
        if computed > most or self._had_none[identity.model] >= SHORT_IN_A_ROW:
            self._stop_rewinding(identity, f"a rewind computed {computed} of {had + computed} tokens")

    def rewind_too_slow(self, identity: Identity, seconds: float, whole: bool) -> None:
        """Note that a rewind was given up, while the server was alive."""
        self.counts["rewinds"] += 1
        if whole:
            self._stop_rewinding(identity, f"a rewind took longer than {seconds:.0f} s")

    def _stop_rewinding(self, identity: Identity, what: str) -> None:
        self._stop(
            identity,
            f"{what}: the server keeps no context checkpoints (--ctx-checkpoints 0?), so that this model's saves are of no use",
        )

    def stopped(self) -> list[str]:
        """The fingerprints of the models whose restores do not help."""
        return list(self._stopped)

    def _action_fault(self, action: str, kind: tuple[str, ...], key: str, error: LlamaServerError) -> None:
        cure = ""
        if error.status == 501:
            self._off_until = self._clock() + OFF_SECONDS
            cure = " (start llama-server with --slot-save-path; with a multimodal projector it cannot save slots)"
        elif error.fault == "timeout":
            self._hung_until = self._clock() + HUNG_SECONDS
        self._failed(action, kind, key, f"{error}{cure}")

    def _failed(self, action: str, kind: tuple[str, ...], key: str, why: str) -> None:
        self.counts[f"failed {action}s"] += 1
        words = f"{action} failed: {why}"
        self._tell(Event("fault", server=self.server.shown, key=key, cause=f"failed {action}s", words=words))
        self._once.warn(kind, "%s %s failed %s: %s", self.server.shown, action, key, why)

    def _say(
        self, action: Literal["save", "restore"], slot: int, key: str, tokens: int, size: int, started: float
    ) -> None:
        seconds = self._clock() - started
        self._tell(
            Event(action, server=self.server.shown, slot=slot, key=key, tokens=tokens, bytes=size, seconds=seconds)
        )
        report.info(
            "%s %s %s: %d tokens, %.1f MB, %.3f s",
            self.server.shown,
            action,
            key,
            tokens,
            size / 1e6,
            seconds,
        )
