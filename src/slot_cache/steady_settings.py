"""The option `steady` of a route: which rules of steady.py its requests go through."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from slot_cache.steady import CLAUDE_CODE, READY, PatternError, Rule, Where, compile_pattern

ALLOWED = "true, false, or a mapping of claude_code (true or false) and rules (a list)"

MOST_RULES = 32

_FIELDS = ("name", "where", "pattern", "do", "for")
_WHERE: tuple[Where, ...] = ("system", "tools", "first_user")
_DO = ("drop", "freeze", "move")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([smhd]?)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


class SteadySettings(BaseModel):
    """What is done to prompts so that they hold still.

    Attributes:
        claude_code: take out the line with a checksum that Claude Code puts before its system prompt.
        rules: rules of the user, in order.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    claude_code: bool = True
    rules: tuple[Rule, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        if isinstance(raw, bool):
            return {"claude_code": raw}
        if not isinstance(raw, Mapping):
            raise ValueError(f"it is {_shown(raw)}; allowed: {ALLOWED}")
        for name in raw:
            if name not in ("claude_code", "rules"):
                raise ValueError(f"unknown {_shown(name)}; allowed: {ALLOWED}")
        claude_code, rules = raw.get("claude_code", True), raw.get("rules") or []
        if not isinstance(claude_code, bool):
            raise ValueError(f"claude_code is {_shown(claude_code)}; allowed: true or false")
        if not isinstance(rules, (list, tuple)):
            raise ValueError(f"rules is {_shown(rules)}; allowed: a list")
        if len(rules) > MOST_RULES:
            raise ValueError(f"{len(rules)} rules; allowed: {MOST_RULES} at most")
        made = tuple(
            rule if isinstance(rule, Rule) else read_rule(rule, number) for number, rule in enumerate(rules, 1)
        )
        names = [rule.name for rule in made]
        for name in names:
            if names.count(name) > 1 or name == CLAUDE_CODE.name:
                raise ValueError(f"rule {_shown(name)}: another one has this name")
        return {"claude_code": claude_code, "rules": made}

    @cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """All rules, in the order in which they are used."""
        return (*((CLAUDE_CODE,) if self.claude_code else ()), *self.rules)


def read_rule(raw: Any, number: int = 1) -> Rule:
    """A rule as it is written in a configuration: the name of a ready-made one, or a mapping.

    Raises:
        ValueError: what is wrong with which rule.
    """
    given: Mapping[Any, Any] = {"name": raw} if isinstance(raw, str) else raw
    if not isinstance(given, Mapping):
        raise ValueError(f"rule {number} is {_shown(raw)}; allowed: a name of {', '.join(READY)}, or a mapping")
    name = given.get("name", f"rule{number}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"rule {number}: name is {_shown(name)}; allowed: letters, digits, - and _, 40 at most")
    for field in given:
        if field not in _FIELDS:
            raise ValueError(f"rule {name}: unknown {_shown(field)}; allowed: {', '.join(_FIELDS)}")
    ready = READY.get(name) if "pattern" not in given else None
    if ready is None and "pattern" not in given:
        raise ValueError(f"rule {name}: it has no pattern, and is none of the ready-made {', '.join(READY)}")
    if ready is None and "do" not in given:
        raise ValueError(f"rule {name}: do is missing; allowed: {', '.join(_DO)}")
    do = given.get("do", ready.do if ready else None)
    if do not in _DO:
        raise ValueError(f"rule {name}: do is {_shown(do)}; allowed: {', '.join(_DO)}")
    seconds = _seconds(name, given.get("for", "session"))
    if seconds is not None and do != "freeze":
        raise ValueError(f"rule {name}: for belongs to do: freeze")
    where = _where(name, given["where"]) if "where" in given else ready.where if ready else frozenset({_WHERE[0]})
    if ready is not None:
        return Rule(name, where, ready.pattern, do, seconds)
    pattern = given["pattern"]
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"rule {name}: pattern is {_shown(pattern)}; allowed: a regular expression")
    try:
        return Rule(name, where, compile_pattern(pattern), do, seconds)
    except PatternError as error:
        raise ValueError(f"rule {name}: pattern {_shown(pattern)} cannot be used: {error}") from None


def _where(name: str, raw: Any) -> frozenset[Where]:
    asked = [raw] if isinstance(raw, str) else raw
    if isinstance(asked, (list, tuple)) and asked:
        where = frozenset(one for one in _WHERE if one in asked)
        if len(where) == len(asked):
            return where
    raise ValueError(f"rule {name}: where is {_shown(raw)}; allowed: {', '.join(_WHERE)}, or a list of them")


def _seconds(name: str, raw: Any) -> float | None:
    if raw == "session":
        return None
    found = _DURATION.fullmatch(str(raw).strip()) if not isinstance(raw, bool) else None
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if seconds <= 0:
        raise ValueError(f"rule {name}: for is {_shown(raw)}; allowed: session, or a time such as 30m, 1h, 1d")
    return seconds


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
