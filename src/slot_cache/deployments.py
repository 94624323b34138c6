"""The managed routes of a LiteLLM config.yaml, read as the proxy reads them; the file may be anything."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from slot_cache.llama_server import base_url_of
from slot_cache.settings import Settings, SettingsError, asks_for_it, read_settings

CALLBACK = "slot_cache.proxy_handler_instance"

MOST_BYTES = 2**20
MOST_VALUES = 50_000
MOST_DEPTH = 50
MOST_INCLUDES = 50
MOST_BITS = 256
"""A configuration that people write is far below all of these."""

FROM_ENVIRONMENT = "os.environ/"


class ConfigError(ValueError):
    """The configuration cannot be read. The message tells why, without its text."""


@dataclass(frozen=True)
class Deployment:
    """One managed entry of model_list.

    Attributes:
        route: its model_name.
        asked: the model as LiteLLM is told it, with its provider.
        base_url: the server; "" where there is none.
        api_key: the server's key, None for none.
        settings: None where they are wrong.
        problem: what is wrong with its settings or its api_base.
        unset: environment variables that it names and that are not set here.
        elsewhere: it takes its parameters from LiteLLM's credentials, which are not looked up here.
        configured: it is from a configuration, so that its settings are all there are.
    """

    route: str
    asked: str = ""
    base_url: str = ""
    api_key: str | None = field(default=None, repr=False)
    settings: Settings | None = None
    problem: str = ""
    unset: tuple[str, ...] = ()
    elsewhere: bool = False
    configured: bool = True

    @property
    def any_model(self) -> bool:
        """Whether the client says which model it wants."""
        named = self.settings is not None and self.settings.model is not None
        return not named and ("*" in self.asked or "*" in self.route)


@dataclass(frozen=True)
class Config:
    """What a config.yaml says of managed routes.

    Attributes:
        deployments: the managed entries of model_list.
        entries: how many entries there are.
        callbacks: the names of the callbacks.
        secrets: what must not be shown.
    """

    deployments: tuple[Deployment, ...]
    entries: int
    callbacks: tuple[str, ...]
    secrets: frozenset[str] = field(default=frozenset(), repr=False)


def read_config(path: Path, environ: Mapping[str, str]) -> Config:
    """The managed routes of a config.yaml and of the files that it includes.

    Raises:
        ConfigError: it cannot be read, is not YAML, or not what LiteLLM takes.
    """
    whole = _with_includes(path)
    unset: list[str] = []
    _resolve(whole, environ, unset)
    entries = whole.get("model_list") or []
    if not isinstance(entries, list):
        raise ConfigError("model_list is no list")
    found = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"entry {number + 1} of model_list is no mapping")
        info = entry.get("model_info")
        raw = info.get("slot_cache") if isinstance(info, Mapping) else None
        if asks_for_it(raw):
            found.append(_deployment(entry, raw, environ))
    settings = whole.get("litellm_settings")
    callbacks = settings.get("callbacks") if isinstance(settings, Mapping) else None
    names = [callbacks] if isinstance(callbacks, str) else callbacks if isinstance(callbacks, list) else []
    return Config(tuple(found), len(entries), tuple(str(name) for name in names), frozenset(_secrets(whole)))


def secrets_of_url(url: str) -> Iterator[str]:
    """User's password in a URL, as it is written and as it is meant."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    if parts.password:
        yield from (parts.password, unquote(parts.password))


def _deployment(entry: Mapping[str, Any], raw: object, environ: Mapping[str, str]) -> Deployment:
    name = entry.get("model_name")
    route = name if isinstance(name, str) and name else "-"
    found = entry.get("litellm_params")
    params: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    unset = tuple(dict.fromkeys(value.name for value in _unset_in(entry)))
    problem, settings, base_url = "", None, ""
    try:
        settings = read_settings(route, _without_unset(raw), environ)
    except SettingsError as error:
        problem = str(error)
    except (ValueError, TypeError) as error:  # a number with more digits than Python shows, say
        problem = f"route {route!r}: slot_cache cannot be read ({type(error).__name__})"
    api_base, key, asked = params.get("api_base"), params.get("api_key"), params.get("model")
    elsewhere = params.get("litellm_credential_name") is not None
    if not problem:
        if isinstance(api_base, str) and api_base.strip():
            try:
                base_url = base_url_of(api_base)
            except ValueError:
                problem = "litellm_params.api_base is no http or https URL"
        elif not elsewhere:
            problem = "litellm_params has no api_base"
    return Deployment(
        route,
        asked if isinstance(asked, str) else "",
        base_url,
        key if isinstance(key, str) and key.strip().lower() not in ("", "none") else None,
        settings,
        problem,
        unset,
        elsewhere,
    )


# YAML


def _with_includes(path: Path) -> dict[str, Any]:
    """The mapping of a file with what it includes: lists are joined, other values replaced, as LiteLLM does it."""
    whole = _load(path)
    waiting = [(name, path) for name in _includes(whole)]
    read = {_absolute(path)}
    while waiting:
        name, said_by = waiting.pop(0)
        beside = _absolute(said_by.parent / name)
        at = beside if beside.exists() else _absolute(path.parent / name)
        if at in read:
            continue
        read.add(at)
        if len(read) > MOST_INCLUDES:
            raise ConfigError(f"it includes more than {MOST_INCLUDES} files")
        included = _load(at)
        for key, value in included.items():
            if key != "include":
                mine = whole.get(key)
                whole[key] = [*mine, *value] if isinstance(mine, list) and isinstance(value, list) else value
        waiting += [(name, at) for name in _includes(included)]
    if _weight(whole, set(), 0) > MOST_VALUES:
        raise ConfigError(f"it has more than {MOST_VALUES} values")
    return {key: _copied(value) for key, value in whole.items()}


def _absolute(path: Path) -> Path:
    return Path(os.path.normpath(path.absolute()))


def _includes(config: Mapping[str, Any]) -> list[str]:
    names = config.get("include", [])
    if not isinstance(names, list) or not all(isinstance(name, str) and "\0" not in name for name in names):
        raise ConfigError("include is no list of files")
    return names


def _load(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"{path.name}: there is no such file")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path.name}: it cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path.name}: it is longer than {MOST_BYTES} bytes")
    try:
        value = yaml.safe_load(data.decode("utf-8-sig"))
        weight = _weight(value, set(), 0)
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path.name}: it is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"{path.name}: it is not YAML{where}") from None
    except RecursionError:
        raise ConfigError(f"{path.name}: it is nested too deeply") from None
    except Exception as error:  # what YAML's types make of hostile values: ValueError, IndexError, OverflowError ...
        raise ConfigError(f"{path.name}: it is not YAML ({type(error).__name__})") from None
    if weight > MOST_VALUES:
        raise ConfigError(f"{path.name}: it has more than {MOST_VALUES} values")
    if not isinstance(value, dict):
        raise ConfigError(f"{path.name}: it is no mapping")
    return value


def _weight(value: object, above: set[int], spent: int) -> int:
    """How many values there are when every anchor is written out. Stops counting a little above the most."""
    if isinstance(value, (dict, list, tuple, set)):
        if id(value) in above:
            raise ConfigError("an anchor contains itself")
        if len(above) >= MOST_DEPTH:
            raise ConfigError("it is nested too deeply")
        above.add(id(value))
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        for part in inner:
            spent = _weight(part, above, spent)
            if spent > MOST_VALUES:
                break
        above.discard(id(value))
    elif isinstance(value, (str, bytes)):
        spent += len(value) // 1000
    elif isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ConfigError("a number has too many digits")
    return spent + 1


def _copied(value: Any) -> Any:
    """The same with no part shared, so that a part can be changed for itself."""
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


# os.environ/NAME


@dataclass(frozen=True)
class _Unset:
    """Stands for a variable that is not set."""

    name: str


def _resolve(value: Any, environ: Mapping[str, str], unset: list[str]) -> None:
    """Put in place of each `os.environ/NAME` what the variable holds, where LiteLLM does so: as a value of a mapping."""
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, str) and part.startswith(FROM_ENVIRONMENT):
                name = part.replace(FROM_ENVIRONMENT, "")
                value[key] = environ.get(name, _Unset(name))
            else:
                _resolve(part, environ, unset)
    elif isinstance(value, list):
        for part in value:
            _resolve(part, environ, unset)


def _unset_in(value: object) -> Iterator[_Unset]:
    if isinstance(value, _Unset):
        yield value
    elif isinstance(value, (Mapping, list)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _unset_in(part)


def _without_unset(value: Any) -> Any:
    """LiteLLM puts nothing in place of a variable that is not set."""
    if isinstance(value, _Unset):
        return None
    return {key: _without_unset(part) for key, part in value.items()} if isinstance(value, dict) else value


def _secrets(value: object, name: str = "") -> Iterator[str]:
    """Keys, passwords and tokens, wherever they are, told by the names that they are given."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _secrets(part, str(key).lower())
    elif isinstance(value, list):
        for part in value:
            yield from _secrets(part, name)
    elif isinstance(value, str):
        if any(word in name for word in ("key", "password", "secret", "token", "authorization", "credential")):
            yield value
        yield from secrets_of_url(value)
