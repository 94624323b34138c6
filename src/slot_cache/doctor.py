"""What is wrong with a set-up, judged from what was found: facts in, findings out, no I/O. `examine.py` finds the facts.

What nobody has told is `unknown`, and is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from slot_cache.deployments import CALLBACK, Config, Deployment
from slot_cache.idle_slots import CLEARING_IDLE_SECONDS
from slot_cache.llama_server import Fault
from slot_cache.router import OLD_ROUTER_MAX
from slot_cache.settings import Settings
from slot_cache.slot_actions import PLAIN, REWIND
from slot_cache.state import SlotReading

Level = Literal["ok", "unknown", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "unknown", "note", "warning", "error")

DEFAULT_SLOTS = 4
"""What llama-server has without -np, with unified K/V and idle slots that are cleared."""

FUTURE_SECONDS = 120.0
"""Clocks that differ by less do no harm."""

LITTLE_ROOM = 2**30
NO_ROOM = 64 * 2**20
OLDEST_BUILD = 11434
"""The oldest build of llama.cpp that was measured."""

USELESS = "useless"
"""What a model is like whose restores the plugin has given up, beside those of `slot_actions`."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: `ok`; `unknown`: it cannot be told from here; `note`: worth knowing; `warning`: caches are lost or wrong
            sometimes; `error`: nothing is saved or restored, or not as it was set.
        check: what was looked at, one of a fixed set of words.
        where: the file, route, server or folder.
        what: what was found.
        why: why it matters.
        fix: the flag or setting to change.
    """

    level: Level
    check: str
    where: str
    what: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Arguments:
    """What the command line of a router's model says; None: it does not."""

    save_path: str | None = None
    slots: int | None = None
    unified: bool | None = None
    cache_idle: bool | None = None
    cache_ram: int | None = None
    sleep_seconds: int | None = None
    tells_slots: bool | None = None

    @property
    def shares_kv(self) -> bool:
        """Whether the slots share their K/V: by default only where the number of slots is not given either."""
        return self.unified if self.unified is not None else self.slots is None

    @property
    def clears_idle(self) -> bool:
        """Whether a request empties the idle slots."""
        return (
            (self.slots is None or self.slots > 1)
            and self.shares_kv
            and self.cache_idle is not False
            and self.cache_ram != 0
        )


@dataclass(frozen=True)
class Trial:
    """What came of saving an idle slot under a name of our own.

    Attributes:
        problem: why the save failed, "" if it did not.
        untried: why nothing was tried, "" if it was.
        tokens, size: what the server says it wrote.
        seen: whether the file was in the folder; None: no folder to look in.
        missing: bytes of it that were not there.
        removed: whether it could be deleted there.
        ahead: seconds that the file's time was ahead of the clock here.
        streams: the server's K/V streams, None if the slot was not empty, which alone tells them.
        clears: whether a request in one slot emptied another idle one, None if that could not be tried.
    """

    problem: str = ""
    untried: str = ""
    tokens: int = 0
    size: int = 0
    seen: bool | None = None
    missing: int = 0
    removed: bool = False
    ahead: float = 0.0
    streams: int | None = None
    clears: bool | None = None


@dataclass(frozen=True)
class Told:
    """What one server, or one model of a router, tells of itself.

    Attributes:
        where: its address (and model), as it may be shown.
        fault, status: of the call that ended the examination, as in `LlamaServerError`; "" if none did.
        key_given: whether it was asked with a key.
        open_to_all: whether it can be reached from other machines, by its address.
        loading: it loads its model just now.
        props: its answer to /props.
        slots: its slots, None if they were not to be had.
        slots_fault: the HTTP status, or the fault, of /slots, "" if it answered.
        counts_tokens: whether its slots say how many tokens they hold.
        actions: whether it saves and restores, None if it was not asked.
        arguments: of its command line, where a router tells it.
        kind: what is known of its model's restores: `plain`, `rewind`, `useless`, "" for nothing; None: there is no index to
            tell.
        trial: what came of a save, None if none was asked for.
    """

    where: str
    fault: Fault | Literal[""] = ""
    status: int = 0
    key_given: bool = False
    open_to_all: bool = False
    loading: bool = False
    props: Mapping[str, Any] = field(default_factory=dict)
    slots: tuple[SlotReading, ...] | None = None
    slots_fault: str = ""
    counts_tokens: bool = True
    actions: bool | None = None
    arguments: Arguments | None = None
    kind: str | None = None
    trial: Trial | None = None

    @property
    def sleeps(self) -> bool:
        return self.props.get("is_sleeping") is True

    @property
    def slot_count(self) -> int | None:
        """How many slots it has."""
        told = self.props.get("total_slots")
        if isinstance(told, int) and not isinstance(told, bool) and told > 0:
            return told
        if self.slots is not None:
            return len(self.slots)
        return self.arguments.slots if self.arguments is not None else None

    @property
    def tells_slots(self) -> bool | None:
        """Whether GET /slots is on, None if that is not told."""
        told = self.props.get("endpoint_slots")
        if isinstance(told, bool):
            return told
        return self.arguments.tells_slots if self.arguments is not None else None


@dataclass(frozen=True)
class RouterModelTold:
    """A model of a router: its names, its status, its command line."""

    names: tuple[str, ...]
    status: str
    arguments: Arguments | None = None


@dataclass(frozen=True)
class RouterTold:
    """What a router tells. `models` is None if it does not; `max_instances` None for an older one."""

    where: str
    max_instances: int | None = None
    models: tuple[RouterModelTold, ...] | None = None


@dataclass(frozen=True)
class Folder:
    """A folder as it is seen from here.

    Attributes:
        path: for people.
        problem: why it cannot be used at all, "" if it can.
        writable: whether this process may make and delete files in it.
        free: bytes free on its disk.
        used: bytes of the saved caches in it.
        largest: bytes of the largest of them.
        ahead: seconds that the newest of them is ahead of the clock.
        others_may_read: its mode lets other users of the machine in.
        network: the kind of its file system, if that is one of other machines; None if it cannot be told.
    """

    path: str
    problem: str = ""
    writable: bool = True
    free: int = 0
    used: int = 0
    largest: int = 0
    ahead: float = 0.0
    others_may_read: bool = False
    network: str | None = ""


@dataclass(frozen=True)
class State:
    """The folder of index and locks: as `Folder`, and the state of the index: none (yet), ok, damaged, newer, unread."""

    folder: Folder
    index: Literal["none", "ok", "damaged", "newer", "unread"] = "none"
    ahead: float = 0.0
    workers: int | None = None


@dataclass(frozen=True)
class Route:
    """A managed route whose settings are right.

    Attributes:
        name: its model_name.
        settings: its settings.
        model: the name by which a router is asked for its model, "" if the client says it.
        configured: its settings are those of a configuration, not only what was given by hand.
    """

    name: str
    settings: Settings
    model: str = ""
    configured: bool = True

    @property
    def where(self) -> str:
        """The route, for people."""
        return f"route {self.name}" if self.configured else self.name


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level there is."""
    return max((finding.level for finding in findings), key=LEVELS.index, default="ok")


def exit_code(findings: Iterable[Finding]) -> int:
    """0: nothing worse than a note; 1: warnings; 2: errors."""
    return {"warning": 1, "error": 2}.get(worst(findings), 0)


# the configuration


def check_config(config: Config, name: str) -> Iterator[Finding]:
    """What is wrong with the configuration by itself."""
    if not config.deployments:
        yield Finding(
            "error",
            "routes",
            name,
            f"none of the {config.entries} entries of model_list asks for slot_cache",
            "Only routes that ask for it are managed.",
            "model_info: {slot_cache: true} in the entry of each llama-server route",
        )
    fix = f"litellm_settings: {{callbacks: {CALLBACK}}}"
    if not config.callbacks:
        yield Finding("error", "callback", name, "no callback is set", "The plugin is not loaded without it.", fix)
    elif CALLBACK not in config.callbacks:
        yield Finding(
            "warning",
            "callback",
            name,
            f"none of the callbacks is {CALLBACK}",
            "Unless one of them is an instance of SlotCacheHook by another name, the plugin is not loaded.",
            fix,
        )
    else:
        yield Finding("ok", "callback", name, "the callback is set")
    for deployment in config.deployments:
        yield from _check_deployment(deployment)
    yield from _check_state_dirs(config.deployments)


def _check_deployment(deployment: Deployment) -> Iterator[Finding]:
    where = f"route {deployment.route}"
    if deployment.unset:
        yield Finding(
            "warning",
            "environment",
            where,
            f"not set in this environment: {', '.join(deployment.unset)}",
            "LiteLLM puts nothing in place of os.environ/NAME when NAME is not set; the proxy may have another environment.",
            "set it here as for the proxy, and run this again",
        )
    if deployment.problem:
        fix = "correct it in model_info.slot_cache" if deployment.settings is None else "litellm_params.api_base"
        why = "The route is passed through unmanaged."
        yield Finding("error", "settings", where, deployment.problem, why, fix)
        return
    yield Finding("ok", "settings", where, "the settings are valid")
    if deployment.elsewhere and not deployment.base_url:
        what = "its server is in litellm_credential_name, which is not looked up here"
        yield Finding("unknown", "server", where, what, fix="slot-cache doctor --server URL")
    settings = deployment.settings
    if settings is None or settings.save_path is not None:
        return
    fix = "slot_cache: {save_path: DIR}, the server's --slot-save-path as the proxy sees it"
    if settings.max_files or settings.max_gib:
        what = "max_files and max_gib are set, save_path is not"
        why = "Files that cannot be seen cannot be deleted: the limits are not kept."
        yield Finding("warning", "limits", where, what, why, fix)
    else:
        why = "Files are not checked before they are restored, and never deleted."
        yield Finding("note", "save_path", where, "it has no save_path", why, fix)


def _check_state_dirs(deployments: Sequence[Deployment]) -> Iterator[Finding]:
    folders = {deployment.settings.state_dir for deployment in deployments if deployment.settings is not None}
    if len(folders) > 1:
        yield Finding(
            "warning",
            "state folder",
            "config",
            "state_dir differs between routes",
            "The route that is used first decides it for the process, so that workers may have different ones.",
            "the same slot_cache: {state_dir: DIR} for all routes, or for none",
        )


def check_folders_of_server(where: str, routes: Sequence[Route]) -> Iterator[Finding]:
    """Routes of one llama-server must name one folder, for the server has only one."""
    folders = {str(route.settings.save_path) for route in routes if route.settings.save_path is not None}
    if len(folders) > 1:
        yield Finding(
            "error",
            "save_path",
            where,
            f"routes of this server have different save_paths: {', '.join(sorted(folders))}",
            "A server has one --slot-save-path: the others are not its folder.",
            "the same slot_cache: {save_path: DIR} for all of them",
        )


# a server


def check_server(told: Told, routes: Sequence[Route]) -> Iterator[Finding]:
    """What is wrong with a llama-server, or with one loaded model of a router."""
    if told.fault:
        yield _no_answer(told)
        return
    yield Finding("ok", "server", told.where, "it answers")
    if told.loading:
        what = "it is loading its model"
        yield Finding(
            "warning", "server", told.where, what, "Nothing more can be asked.", "run this again when it is ready"
        )
        return
    yield from _check_key(told)
    yield from _check_build(told)
    if told.sleeps:
        yield Finding("unknown", "asleep", told.where, "it sleeps; nothing that would wake it was asked")
    yield from _check_slots(told, routes)
    yield from _check_actions(told)
    yield from _check_trial(told, routes)
    yield from _check_clearing(told)
    yield from _check_sleep(told, routes)
    yield from _check_ram(told)
    yield from _check_kind(told)


def _no_answer(told: Told) -> Finding:
    if told.status in (401, 403):
        what = f"it refuses the key (HTTP {told.status})" if told.key_given else f"it wants a key (HTTP {told.status})"
        why = "Without its key the server neither answers requests nor saves and restores."
        return Finding("error", "key", told.where, what, why, "litellm_params.api_key: the server's --api-key")
    if told.fault == "unreachable":
        what, fix = "nobody answers there", "start llama-server with that --host and --port, or correct api_base"
    elif told.fault == "timeout":
        what, fix = "it takes the connection and does not answer", "restart llama-server; look into its log"
    elif told.status:
        what = f"it answers HTTP {told.status} where llama-server does not"
        fix = "litellm_params.api_base: the address of a llama-server"
    else:
        what, fix = "it answers, but not as llama-server does", "litellm_params.api_base: the address of a llama-server"
    return Finding("error", "server", told.where, what, "Its routes are not managed meanwhile.", fix)


def _check_key(told: Told) -> Iterator[Finding]:
    if told.key_given or not told.open_to_all:
        yield Finding("ok", "key", told.where, "the key is accepted" if told.key_given else "it wants no key")
        return
    yield Finding(
        "note",
        "key",
        told.where,
        "it answers without a key, at an address that other machines may reach",
        "Who can reach it can have any saved cache restored, and use every slot.",
        "llama-server --api-key KEY, and litellm_params.api_key",
    )


def _check_build(told: Told) -> Iterator[Finding]:
    build = str(told.props.get("build_info") or "")[:80]
    number = re.match(r"b(\d{2,7})\b", build)
    fix = f"a llama-server of build b{OLDEST_BUILD} or later"
    if not told.counts_tokens:
        what = f"its slots do not tell how many tokens they hold ({build or 'no build told'})"
        why = "The plugin cannot tell whether a slot still holds what it left there."
        yield Finding("error", "build", told.where, what, why, fix)
    elif not told.props.get("media_marker") or told.props.get("media_marker") == "<__media__>":
        what = f"it does not tell when it was started anew ({build or 'no build told'}, before mid-2026)"
        why = "A restart is recognised with less certainty, by task numbers that begin again."
        yield Finding("warning", "build", told.where, what, why, fix)
    elif number and 0 < int(number[1]) < OLDEST_BUILD:
        yield Finding("note", "build", told.where, f"{build} is older than what was measured", "", fix)
    else:
        yield Finding("ok", "build", told.where, f"the build is new enough ({build or 'not named'})")


def _check_slots(told: Told, routes: Sequence[Route]) -> Iterator[Finding]:
    if told.slots_fault == "501" or told.tells_slots is False:
        yield Finding(
            "error",
            "slots",
            told.where,
            "GET /slots is off (--no-slots)",
            "The plugin must see what is in a slot: nothing is managed, although saves and restores would work.",
            "start llama-server without --no-slots",
        )
    elif told.slots_fault:
        what = f"GET /slots failed ({told.slots_fault})"
        yield Finding(
            "error", "slots", told.where, what, "Nothing is managed without it.", "look into the server's log"
        )
    elif told.slots is not None:
        yield Finding("ok", "slots", told.where, f"/slots is on, {_number(len(told.slots), 'slot')}")
    count = told.slot_count
    if count is None:
        return
    for route in routes:
        wants = route.settings.which_slots
        if isinstance(wants, int) and wants >= count:
            what = f"slot is {wants}, the server has {_number(count, 'slot')} (0 to {count - 1})"
            yield Finding(
                "error",
                "slot number",
                route.where,
                what,
                "There is no such slot: the route's requests are not managed.",
                f"slot_cache: {{slot: {count - 1}}} or less, or llama-server -np {wants + 1}",
            )
        elif isinstance(wants, range) and wants.stop > count:
            what = f"slots is {wants.stop}, the server has {_number(count, 'slot')}"
            yield Finding(
                "note",
                "slot number",
                route.where,
                what,
                "The route uses those there are.",
                f"slot_cache: {{slots: {count}}}, or llama-server -np {wants.stop}",
            )


def _check_actions(told: Told) -> Iterator[Finding]:
    given = told.arguments.save_path if told.arguments is not None else None
    if told.actions is False or (told.actions is None and told.arguments is not None and given is None):
        yield Finding(
            "error",
            "slot-save-path",
            told.where,
            "it has no --slot-save-path",
            "llama-server neither saves nor restores a slot without it.",
            "llama-server --slot-save-path DIR (the folder must exist before it starts)",
        )
    elif told.actions or given is not None:
        yield Finding("ok", "slot-save-path", told.where, "--slot-save-path is set")
    else:
        yield Finding("unknown", "slot-save-path", told.where, "whether --slot-save-path is set was not asked")


def _check_trial(told: Told, routes: Sequence[Route]) -> Iterator[Finding]:
    trial = told.trial
    if trial is None:
        if told.actions is not False and any(route.settings.save_path is not None for route in routes):
            what = "whether save_path is the server's folder was not tried"
            yield Finding("unknown", "save_path", told.where, what, fix="slot-cache doctor --write")
        return
    if trial.untried:
        yield Finding("unknown", "save", told.where, trial.untried, fix="run this again later")
        return
    if trial.problem:
        fix = "make --slot-save-path a folder that llama-server's user may write to, with room left"
        yield Finding("error", "save", told.where, trial.problem, "Nothing can be saved.", fix)
        return
    if trial.missing:
        what = f"it says that it saved {trial.size} bytes, {trial.missing} of them are not in the file"
        yield Finding("error", "save", told.where, what, "Nothing can be saved.", "free some room, or another disk")
    else:
        yield Finding("ok", "save", told.where, f"it saved an idle slot: {trial.tokens} tokens, {trial.size} bytes")
    if trial.seen is False:
        yield Finding(
            "error",
            "save_path",
            told.where,
            "the file that it saved is not in save_path (it stays where it is: slot-cache-doctor.bin)",
            "save_path is not the server's --slot-save-path: files are not checked, and the limits are not kept.",
            "slot_cache: {save_path: DIR}, the server's --slot-save-path as the proxy sees it (the same mount)",
        )
    elif trial.seen and not trial.removed:
        yield Finding(
            "error",
            "save_path",
            told.where,
            "the file that it saved is in save_path, but cannot be deleted",
            "Saves are renamed and old files deleted by the proxy.",
            "make save_path writable for the proxy's user",
        )
    elif trial.seen:
        yield Finding(
            "ok", "save_path", told.where, "it is the server's folder: a saved file was seen and removed there"
        )
    else:
        what = "no save_path is given: the file was not looked for, and stays where it is (slot-cache-doctor.bin)"
        yield Finding("unknown", "save_path", told.where, what)
    if trial.seen and abs(trial.ahead) > FUTURE_SECONDS:
        what = f"the clock of the server's machine or disk differs by {abs(trial.ahead):.0f} s"
        why = "Which files are old, or left over, is told by their times."
        yield Finding("warning", "clock", told.where, what, why, "set both clocks (NTP)")


def _check_clearing(told: Told) -> Iterator[Finding]:
    count, arguments, trial = told.slot_count, told.arguments, told.trial
    if count is None and arguments is None:
        return
    if count == 1 or (arguments is not None and arguments.slots == 1):
        yield Finding("ok", "idle slots", told.where, "one slot: nothing empties it while it is idle")
        return
    clears = trial.clears if trial is not None and trial.clears is not None else None
    by = "tried"
    if clears is None and trial is not None and trial.streams is not None and trial.streams > 1:
        clears, by = False, "its slots do not share their K/V"
    if clears is None and arguments is not None:
        clears, by = arguments.clears_idle, "by its command line"
    shown = _number(count or DEFAULT_SLOTS, "slot")
    if clears is False:
        yield Finding("ok", "idle slots", told.where, f"{shown}; a request leaves the idle ones alone ({by})")
        return
    why = (
        "On such a server the plugin saves what would be emptied before each request starts, and changed slots after "
        f"{CLEARING_IDLE_SECONDS:.0f} s idle: it works, but writes and reads many more files."
    )
    fix = "llama-server -np N without --kv-unified, or --no-cache-idle-slots: fewer files are written"
    if clears:
        what = f"{shown}; a request empties every idle one ({by})"
        yield Finding("note", "idle slots", told.where, what, why, fix)
        return
    unified = trial is not None and trial.streams == 1
    kv = "they share their K/V; " if unified else ""
    like = f"{count} slots are what llama-server has by default, where it does. " if count == DEFAULT_SLOTS else ""
    what = f"{shown}; {kv}whether a request empties the idle ones is not told"
    yield Finding("unknown", "idle slots", told.where, what, like + why, fix)


def _check_sleep(told: Told, routes: Sequence[Route]) -> Iterator[Finding]:
    seconds = told.arguments.sleep_seconds if told.arguments is not None else None
    never = told.arguments is not None and (seconds is None or seconds < 0)
    if never and not told.sleeps:
        yield Finding("ok", "sleep", told.where, "it never sleeps (no --sleep-idle-seconds)")
        return
    if not told.sleeps and seconds is None:
        what = "whether it sleeps (--sleep-idle-seconds) is not told"
        fix = "if it does: slot_cache: {save_idle_seconds: S}, with S less than the server's"
        yield Finding("unknown", "sleep", told.where, what, "What is not saved when it falls asleep is lost.", fix)
        return
    sleeps = "it sleeps now" if seconds is None else f"it sleeps after {seconds} s"
    why = "A server that falls asleep loses what is not saved; each conversation is then computed again."
    if not any(route.configured for route in routes):
        yield Finding(
            "note", "sleep", told.where, sleeps, why, "slot_cache: {save_idle_seconds: S}, with S less than that"
        )
        return
    for route in routes:
        idle = route.settings.save_idle_seconds
        where = route.where
        if idle == 0:
            what = f"{sleeps}, and save_idle_seconds is 0: its caches are saved only when the slot is needed"
        elif seconds is not None and idle >= seconds:
            what = f"{sleeps}, before save_idle_seconds ({idle:g})"
        else:
            kind: Level = "ok" if seconds is not None else "unknown"
            what = f"{sleeps}; save_idle_seconds is {idle:g}"
            yield Finding(kind, "sleep", where, what + ("" if seconds is not None else ", its own time is not told"))
            continue
        most = f"less than {seconds}" if seconds is not None else "less than the server's --sleep-idle-seconds"
        yield Finding("warning", "sleep", where, what, why, f"slot_cache: {{save_idle_seconds: S}}, with S {most}")


def _check_ram(told: Told) -> Iterator[Finding]:
    ram = told.arguments.cache_ram if told.arguments is not None else None
    if told.arguments is None:
        yield Finding("unknown", "cache-ram", told.where, "--cache-ram is not told (8192 MiB by default)")
    elif ram is None:
        what = "--cache-ram is not on its command line (8192 MiB, but for LLAMA_ARG_CACHE_RAM, which is not told)"
        yield Finding("unknown", "cache-ram", told.where, what)
    elif ram > 0:
        yield Finding("ok", "cache-ram", told.where, f"--cache-ram is {ram} MiB")
    elif ram == 0:
        yield Finding("ok", "cache-ram", told.where, "--cache-ram 0: no RAM cache of the server's own")
    else:
        what = f"--cache-ram {ram}: the server's own RAM cache has no limit"
        why = "It grows until the machine has no memory left; a server that is killed loses what is not saved."
        yield Finding("warning", "cache-ram", told.where, what, why, "llama-server --cache-ram MIB")


def _check_kind(told: Told) -> Iterator[Finding]:
    if told.sleeps or told.kind is None:
        what = "nothing is known of this model's restores" + (" while it sleeps" if told.sleeps else "")
        yield Finding("unknown", "model", told.where, what)
    elif told.kind == PLAIN:
        yield Finding("ok", "model", told.where, "restores of this model are reused")
    elif told.kind == REWIND:
        what = "restores of this model are reused when its slots were rewound before the save, which the plugin does"
        yield Finding("ok", "model", told.where, what)
    elif told.kind == "":
        what = "whether restores of this model are reused is learned from the first ones"
        why = "Those of sliding-window and recurrent models are not, in some builds: nothing but a restore tells."
        yield Finding("unknown", "model", told.where, what, why, "for sliding-window models: llama-server --swa-full")
    else:
        what = "restores of this model are not reused (sliding-window or recurrent memory)"
        why = "The plugin neither saves nor restores it until the server is started again."
        fix = "llama-server --swa-full for sliding-window models, no --ctx-checkpoints 0 for others, or a newer build"
        yield Finding("warning", "model", told.where, what, why, fix)


# a router


def check_router(told: RouterTold, routes: Sequence[Route], any_model: bool = False) -> Iterator[Finding]:
    """What is wrong with a router, but for its models. `any_model`: a route lets clients say the model."""
    yield Finding("ok", "server", told.where, "it is a router")
    if told.max_instances is None and all(route.settings.models_max is None for route in routes):
        what = f"it does not tell its --models-max; {OLD_ROUTER_MAX} is taken"
        why = "If it is less, the router unloads models that nobody has saved."
        yield Finding(
            "warning", "models-max", told.where, what, why, "slot_cache: {models_max: N}, the router's --models-max"
        )
    for route in routes:
        mine, its = route.settings.models_max, told.max_instances
        if mine is None or its is None:
            continue
        if its and (mine == 0 or mine > its):
            yield Finding(
                "warning",
                "models-max",
                route.where,
                f"models_max is {mine or '0 (no limit)'}, the router's --models-max is {its}",
                "The router unloads a model by itself before the plugin has saved it.",
                f"slot_cache: {{models_max: {its}}}, or leave it out",
            )
        elif mine and (its == 0 or mine < its):
            what = f"models_max is {mine}, the router's --models-max is {its or '0 (no limit)'}"
            why = "Models are unloaded although the router has room."
            yield Finding("note", "models-max", route.where, what, why, "leave models_max out")
    if told.max_instances is not None and all(route.settings.models_max is None for route in routes):
        yield Finding("ok", "models-max", told.where, f"--models-max is {told.max_instances or '0 (no limit)'}")
    if told.models is None:
        yield Finding("error", "models", told.where, "it does not tell its models", "Nothing is managed without them.")
        return
    names = {name for model in told.models for name in model.names}
    for route in routes:
        if route.model and "*" not in route.model and route.model not in names:
            yield Finding(
                "error",
                "models",
                route.where,
                f"the router has no model {route.model!r}",
                "The route's requests fail, or are not managed.",
                "litellm_params.model or slot_cache: {model: NAME}, one of: " + ", ".join(sorted(names)[:20]),
            )
    if any_model:
        what = f"clients say the model: the {_number(len(told.models), 'model')} of the router were looked at"
        yield Finding("ok", "models", told.where, what)


def check_unloaded(told: Told, status: str, routes: Sequence[Route]) -> Iterator[Finding]:
    """What the command line of a router's model that is not loaded tells."""
    what = f"it is {status}: only its command line was looked at, since asking more would load it"
    yield Finding("unknown", "loaded", told.where, what)
    yield from _check_slots(told, routes)
    yield from _check_actions(told)
    yield from _check_clearing(told)
    yield from _check_sleep(told, routes)
    yield from _check_ram(told)


def check_save_path(told: Told, routes: Sequence[Route]) -> Iterator[Finding]:
    """Whether save_path is what the command line of a router's model says, where a save has not shown it."""
    given = told.arguments.save_path if told.arguments is not None else None
    if given is None or (told.trial is not None and told.trial.seen is not None):
        return
    for route in routes:
        mine = route.settings.save_path
        if mine is not None and str(mine).rstrip("/") != given.rstrip("/"):
            yield Finding(
                "warning",
                "save_path",
                route.where,
                f"save_path is {mine}, the model's --slot-save-path is {given}",
                "If they are not the same folder, files are not checked, and the limits are not kept.",
                f"slot_cache: {{save_path: {given}}}; where it is mounted elsewhere: slot-cache doctor --write shows it",
            )


_FLAGS = {
    "--slot-save-path": "save_path",
    "-np": "slots",
    "--parallel": "slots",
    "-cram": "cache_ram",
    "--cache-ram": "cache_ram",
    "--sleep-idle-seconds": "sleep_seconds",
}
_SWITCHES = {
    "-kvu": ("unified", True),
    "--kv-unified": ("unified", True),
    "-no-kvu": ("unified", False),
    "--no-kv-unified": ("unified", False),
    "--cache-idle-slots": ("cache_idle", True),
    "--no-cache-idle-slots": ("cache_idle", False),
    "--slots": ("tells_slots", True),
    "--no-slots": ("tells_slots", False),
}


def read_arguments(args: object) -> Arguments | None:
    """What a command line says, as a router tells it of its models; None if that is none."""
    if not isinstance(args, list) or not args or not all(isinstance(arg, str) for arg in args):
        return None
    found: dict[str, Any] = {}
    for flag, value in zip(args, [*args[1:], ""], strict=True):
        if flag in _SWITCHES:
            name, on = _SWITCHES[flag]
            found[name] = on
        elif flag in _FLAGS:
            name = _FLAGS[flag]
            if name == "save_path":
                found[name] = value
            elif re.fullmatch(r"-?\d{1,9}", value):
                found[name] = int(value)
    if found.get("slots", 1) < 1:  # -1: as many as llama-server likes
        del found["slots"]
    return Arguments(**found)


# folders


def check_folder(folder: Folder, routes: Sequence[Route]) -> Iterator[Finding]:
    """What is wrong with a save_path, as it is seen from here."""
    if folder.problem:
        fix = "make the folder before llama-server starts, and let the proxy's user read and write it"
        why = "Files are then not looked at, and the limits are not kept."
        yield Finding("error", "folder", folder.path, folder.problem, why, fix)
        return
    if not folder.writable:
        yield Finding(
            "error",
            "folder",
            folder.path,
            "this user may not write to it",
            "The proxy renames what was saved and deletes what is old; if it runs as this user, it cannot.",
            "let the proxy's user read and write the folder (a group of both users, mode 2770)",
        )
    else:
        yield Finding("ok", "folder", folder.path, "it can be read and written")
    yield from _check_room(folder, routes)
    if folder.others_may_read:
        why = "A saved cache holds the tokens of the conversation: who can read the file can read it."
        yield Finding("note", "privacy", folder.path, "other users of the machine may look into it", why, "chmod 700")
    if folder.network:
        why = "Every switch writes and reads a file as large as the cache."
        yield Finding("note", "disk", folder.path, f"it is on another machine ({folder.network})", why, "a local disk")
    if folder.ahead > FUTURE_SECONDS:
        what = f"a file's time is {folder.ahead:.0f} s in the future"
        why = "Which files are old, or left over, is told by their times: the wrong ones may go."
        yield Finding("warning", "clock", folder.path, what, why, "set the clocks of both machines (NTP)")
    else:
        yield Finding("ok", "clock", folder.path, "no file is from the future")


def _check_room(folder: Folder, routes: Sequence[Route]) -> Iterator[Finding]:
    free = f"{folder.free / 2**30:.1f} GiB free"
    fix = "free some, or another disk; slot_cache: {max_gib: N} keeps the caches within it"
    largest = f"; the largest cache has {folder.largest / 2**30:.1f} GiB" if folder.largest > LITTLE_ROOM else ""
    if folder.free < NO_ROOM or folder.free < folder.largest:
        what = f"there is no room left: {folder.free / 2**20:.0f} MiB free{largest}"
        yield Finding("error", "room", folder.path, what, "Nothing more can be saved.", fix)
    elif folder.free < max(LITTLE_ROOM, 2 * folder.largest):
        why = "A cache of a large model has several GiB."
        yield Finding("warning", "room", folder.path, f"there is little room left: {free}{largest}", why, fix)
    else:
        yield Finding("ok", "room", folder.path, free)
    limits = [route.settings.max_bytes for route in routes]
    unlimited = [
        route.name
        for route in routes
        if route.configured and not (route.settings.max_bytes or route.settings.max_files)
    ]
    if unlimited:
        what = f"no limit for {_number(len(unlimited), 'route')}: {', '.join(unlimited[:5])}"
        why = "Saved caches are kept until the disk is full."
        yield Finding("note", "limits", folder.path, what, why, "slot_cache: {max_gib: N}, or max_files")
    elif sum(limits) > folder.free + folder.used:
        what = (
            f"max_gib comes to {sum(limits) / 2**30:.1f}, there is room for {(folder.free + folder.used) / 2**30:.1f}"
        )
        why = "The disk is full before the limit is reached, and then nothing more is saved."
        yield Finding(
            "warning", "limits", folder.path, what, why, "slot_cache: {max_gib: N}, less than there is room for"
        )


def check_state(state: State) -> Iterator[Finding]:
    """What is wrong with the folder of the index and the locks."""
    folder, several = state.folder, (state.workers or 1) > 1
    fix = "slot_cache: {state_dir: DIR}, a folder on a local disk that all workers may write to"
    shared = "Workers and proxies of this machine share the index and take turns by its locks."
    if folder.problem or not folder.writable:
        what = folder.problem or "this user may not write to it"
        why = f"{shared} Without it each keeps its own in memory until it ends."
        yield Finding("error" if several else "warning", "state folder", folder.path, what, why, fix)
        return
    if folder.network:
        what = f"it is on another machine ({folder.network})"
        yield Finding("warning", "state folder", folder.path, what, f"{shared} Neither is reliable there.", fix)
    elif folder.network is None:
        yield Finding(
            "unknown", "state folder", folder.path, "whether it is on a local disk cannot be told", shared, fix
        )
    else:
        workers = f"; NUM_WORKERS is {state.workers}, and they share it" if several else ""
        yield Finding("ok", "state folder", folder.path, f"it can be written, on a local disk{workers}")
    if state.index == "damaged":
        why = "It is put aside and made anew at the next start: saved files are then not known any more."
        yield Finding(
            "warning", "index", folder.path, "index.sqlite3 is damaged", why, "slot-cache ls shows what is left"
        )
    elif state.index == "newer":
        why = "This version leaves it alone and keeps an index in memory."
        yield Finding(
            "error", "index", folder.path, "index.sqlite3 is of a newer version", why, "the newer version again"
        )
    elif state.index == "unread":
        yield Finding("unknown", "index", folder.path, "index.sqlite3 cannot be read just now")
    else:
        what = "index.sqlite3 is whole" if state.index == "ok" else "there is no index yet: nothing was saved so far"
        yield Finding("ok", "index", folder.path, what)
    if state.ahead > FUTURE_SECONDS:
        what = f"a cache was used {state.ahead:.0f} s in the future"
        why = "The clock was set back: what goes first is told by the time of use."
        yield Finding("warning", "clock", folder.path, what, why, "set the clock (NTP); it passes by itself then")


def _number(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")
