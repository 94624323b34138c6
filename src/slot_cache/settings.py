"""What a route asks for: `model_info.slot_cache` and the environment become one validated object."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

SESSION_HEADERS = ("x-session-id", "x-openwebui-chat-id")


class SettingsError(ValueError):
    """An option is unknown or its value is not allowed. The message names route, option, what was given, what is allowed."""


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    return value


def _folder(value: object) -> object:
    if isinstance(value, (str, Path)) and str(value).strip():
        try:
            return Path(value).expanduser()
        except RuntimeError:
            raise ValueError("no such home") from None
    raise ValueError("no path")


def _header_names(value: object) -> object:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if isinstance(value, (list, tuple)) and all(isinstance(name, str) and name.isascii() and name for name in value):
        return tuple(name.lower() for name in value)
    raise ValueError("no list of header names")


def _auto_or_number(value: object) -> object:
    if value == "auto":
        return value
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        return number
    raise ValueError("neither auto nor a number")


_Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=0)]
_Folder = Annotated[Path, BeforeValidator(_folder)]
_Number = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]


class Settings(BaseModel):
    """The options of one route, each optional.

    Attributes:
        slots: how many of the server's slots the route's conversations share: `auto` for all it has, or the first so many.
        slot: the id of the one slot that they share, in place of `slots`.
        model: the name by which the server knows the model, where it is not the one in the request.
        save_path: the server's --slot-save-path as this process sees it. Without it files are never looked at,
            renamed or deleted, and the limits cannot be kept.
        max_files: the most saved caches the route keeps, 0 for no limit.
        max_gib: the most room its saved caches take, in GiB (2**30 bytes), 0 for no limit.
        save_idle_seconds: a changed cache is saved when nobody has used it for so long; 0: only when its slot is needed.
        backend: what answers at api_base: `llama-server` (with a model, or as a router), `llama-swap`, or `auto` to find out.
        models_max: the most models a router has loaded at once, 0 for no limit; None: what the router says itself, or 4
            for an older one that does not.
        queue_seconds: how long a request waits for the slot before it goes on without one.
        scope: `key` keeps the caches of different LiteLLM keys apart, `shared` does not.
        min_tokens: a cache with fewer tokens is not worth a file.
        evict: which file goes first when a limit is passed: `cost`, the one that saves least prefill per byte by recency
            and use, or `lru`, the one used longest ago.
        verify: how a file is checked before it is restored: `full` reads all of it, `fast` reads all of it only where
            that is cheap, else its head, its tail and samples between.
        show_text: the status tells the last 80 characters that are being generated in each slot of the route, while a stream
            lasts. They are kept nowhere.
        state_dir: the folder of the index and the locks that the workers share; it should be on a local disk. The
            first route that is used decides it for the process.
        session_headers: request headers, lower case, that carry a session id; the first that is there counts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    slots: Annotated[Literal["auto"] | int, BeforeValidator(_auto_or_number)] = Field(
        default="auto", description="auto, or a whole number, 1 or more"
    )
    slot: _Count | None = Field(default=None, description="a whole number, 0 or more")
    model: str | None = Field(default=None, min_length=1, description="a model name")
    save_path: _Folder | None = Field(default=None, description="a folder, as a path")
    max_files: _Count = Field(default=0, description="a whole number, 0 (no limit) or more")
    max_gib: _Number = Field(default=0.0, le=1e9, description="a number of GiB, 0 (no limit) or more")
    save_idle_seconds: _Number = Field(default=0.0, description="seconds, 0 (only when the slot is needed) or more")
    backend: Literal["auto", "llama-server", "llama-swap"] = Field(
        default="auto", description="auto, llama-server or llama-swap"
    )
    models_max: _Count | None = Field(default=None, description="a whole number, 0 (no limit) or more")
    queue_seconds: Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)] = Field(
        default=3600.0, description="seconds, more than 0"
    )
    scope: Literal["key", "shared"] = Field(default="key", description="key or shared")
    min_tokens: _Count = Field(default=64, description="a whole number of tokens, 0 or more")
    evict: Literal["cost", "lru"] = Field(default="cost", description="cost or lru")
    verify: Literal["full", "fast"] = Field(default="fast", description="full or fast")
    show_text: bool = Field(default=False, description="true or false")
    state_dir: _Folder | None = Field(default=None, description="a folder, as a path")
    session_headers: Annotated[tuple[str, ...], BeforeValidator(_header_names)] = Field(
        default=SESSION_HEADERS, description="a list of header names"
    )

    @property
    def which_slots(self) -> int | range | None:
        """The slots of the route: one, the first so many, or (None) all there are."""
        if self.slot is not None:
            return self.slot
        return None if self.slots == "auto" else range(self.slots)

    @property
    def max_bytes(self) -> int:
        """`max_gib` in bytes, 0 for no limit."""
        return int(self.max_gib * 2**30)


ENVIRONMENT = {
    "slot": "LLAMA_SLOT",
    "slots": "LLAMA_SLOTS",
    "save_path": "LLAMA_SLOT_SAVE_PATH",
    "max_files": "LLAMA_CACHE_MAX_FILES",
    "max_gib": "LLAMA_CACHE_MAX_GIB",
    "save_idle_seconds": "LLAMA_SAVE_IDLE_SECONDS",
    "models_max": "LLAMA_MODELS_MAX",
}
"""The environment variable that sets an option's default. An empty variable is none."""


def asks_for_it(raw: object) -> bool:
    """Whether a route with this `model_info.slot_cache` wants to be managed; anything but nothing and `false` does."""
    return raw is not None and raw is not False


def read_settings(route: str, raw: object, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of `route` from `model_info.slot_cache`: `true`, or a mapping of options.

    What the mapping lacks comes from the environment (`ENVIRONMENT`), then from the defaults.

    Raises:
        SettingsError: an option is unknown, or it or a variable has a value that is not allowed.
    """
    if raw is True:
        raw = {}
    if not isinstance(raw, Mapping):
        raise SettingsError(
            f"route {_shown(route)}: slot_cache is {_shown(raw)}; allowed: true, or a mapping of options"
        )
    given: dict[str, Any] = {str(name): value for name, value in raw.items()}
    if given.get("slot") is not None and given.get("slots") is not None:
        raise SettingsError(f"route {_shown(route)}: both slot and slots are given; allowed: one of them")
    variables = os.environ if environ is None else environ
    defaults = {
        name: variables[variable]
        for name, variable in ENVIRONMENT.items()
        if name not in given and variables.get(variable, "") != ""
    }
    if given.get("slots") is not None:
        defaults.pop("slot", None)
    try:
        return Settings.model_validate({**defaults, **given})
    except ValidationError as error:
        raise SettingsError(_explain(route, error, given)) from None


def _explain(route: str, error: ValidationError, given: Mapping[str, object]) -> str:
    parts = []
    for problem in error.errors(include_url=False, include_context=False):
        option = str(problem["loc"][0]) if problem["loc"] else ""
        field = Settings.model_fields.get(option)
        if field is None:
            parts.append(f"unknown option {_shown(option)}; allowed: {', '.join(sorted(Settings.model_fields))}")
            continue
        where = f"option {option}" if option in given else f"environment variable {ENVIRONMENT[option]}"
        value = given[option] if option in given else problem["input"]
        parts.append(f"{where} is {_shown(value)}; allowed: {field.description}")
    return f"route {_shown(route)}: " + "; ".join(dict.fromkeys(parts))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
