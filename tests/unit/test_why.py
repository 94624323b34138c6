"""Why a request was computed again: one cause a case, told without the client's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from slot_cache.prompt import Prompt, fingerprint
from slot_cache.state import Outcome
from slot_cache.why import CAUSES, Said, explain

Message = dict[str, str]
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks around. " * 20, "parameters": {}}}


def words(name: str, length: int = 400) -> str:
    return (f"{name} " * length)[:length]


def talk(*names: str, system: str = "be brief", length: int = 400) -> list[Message]:
    """A conversation: messages of user and assistant in turn."""
    rows = [{"role": "system", "content": words(system, 800)}]
    return rows + [
        {"role": "assistant" if number % 2 else "user", "content": words(name, length + 10 * number)}
        for number, name in enumerate(names)
    ]


def prompt(rows: list[Message], tools: list[Any] | None = None) -> Prompt:
    return fingerprint({"messages": rows, "tools": tools or []})


@dataclass
class Case:
    last: Prompt
    now: Prompt
    cause: str | None
    message: int | None = None
    same: bool = True
    outcome: Outcome = Outcome.RESIDENT
    reused: float | None = None
    """part of the prompt; None: what both share"""
    lost: str = ""


LONG = ["one", "two", "three", "four", "five"]
BASE = prompt(talk(*LONG))
MORE = prompt(talk(*LONG, "six", "seven"))
CASES = {
    "nothing was lost": Case(BASE, MORE, None),
    "the end was cut": Case(MORE, BASE, None),
    "a message in the middle": Case(BASE, prompt(talk("one", "two", "THREE", *LONG[3:], "six")), "edited", 4),
    "the first message": Case(BASE, prompt(talk("ONE", *LONG[1:], "six")), "edited", 2),
    "the first message, as a new conversation": Case(
        BASE, prompt(talk("ONE", *LONG[1:])), "edited", 2, same=False, outcome=Outcome.COLD
    ),
    "the system prompt": Case(BASE, prompt(talk(*LONG, "six", system="be long")), "system", 1),
    "the system prompt, as a new conversation": Case(
        BASE, prompt(talk(*LONG, system="be long")), "system", 1, same=False, outcome=Outcome.COLD
    ),
    "a tool": Case(
        prompt(talk(*LONG), [TOOL]), prompt(talk(*LONG, "six"), [{**TOOL, "x": 1}, TOOL]), "tools", 1, outcome=Outcome.COLD
    ),
    "a tool taken away": Case(prompt(talk(*LONG), [TOOL]), prompt(talk(*LONG)), "tools", 1),
    "compaction": Case(BASE, prompt(talk("a summary", "five")), "compacted", 2, same=False, outcome=Outcome.COLD),
    "a title of the same session": Case(
        BASE, fingerprint({"messages": [{"role": "user", "content": words("title", 3000)}]}), None, same=False
    ),
    "a new conversation with the same beginning": Case(
        prompt(talk("one")[:1]), prompt(talk("other")), None, same=False, outcome=Outcome.COLD, reused=0.0
    ),
    "evicted": Case(BASE, MORE, "evicted", outcome=Outcome.COLD, reused=0.0, lost="evicted"),
    "restarted, and an old save restored": Case(
        BASE, MORE, "restarted", outcome=Outcome.RESTORED, reused=0.3, lost="restarted"
    ),
    "never saved": Case(BASE, MORE, "never saved", outcome=Outcome.COLD, reused=0.0),
    "a restore that did not help": Case(BASE, MORE, "not reused", outcome=Outcome.RESTORED, reused=0.0),
    "a resident that did not help": Case(BASE, MORE, "not reused", outcome=Outcome.RESIDENT, reused=0.0),
    "stopped": Case(BASE, MORE, "stopped", outcome=Outcome.COLD, reused=0.0, lost="stopped"),
    "unmanaged": Case(BASE, MORE, "unmanaged", outcome=Outcome.UNMANAGED, reused=0.0, lost="evicted"),
    "edited, and evicted before": Case(
        BASE, prompt(talk("one", "two", "three", "FOUR", "five", "six")), "evicted", 5, outcome=Outcome.COLD, reused=0.0,
        lost="evicted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_causes(name: str) -> None:
    case = CASES[name]
    total = case.now.chars
    shared = 0
    for one, other in zip(case.last.chain, case.now.chain, strict=False):
        shared += 256 * (one == other)
    reused = round(min(shared, case.last.chars, total)) if case.reused is None else round(case.reused * total)
    found = explain(
        last=Said(case.last, case.last.chars),
        now=case.now,
        same=case.same,
        outcome=case.outcome,
        reused=reused,
        computed=total - reused,
        lost=case.lost,
        prefill=100.0,
    )
    if case.cause is None:
        assert found is None
        return
    assert found is not None
    assert (found.cause, found.message) == (case.cause, case.message)
    assert found.again == min(case.last.chars, total) - reused
    assert found.seconds == pytest.approx(found.again / 100)
    assert found.words.startswith(CAUSES[case.cause])
    assert f"about {found.again:,} tokens computed again" in found.words
    if case.message is not None and case.cause != "tools":
        before = sum(span.chars for span in case.now.spans[: case.message - 1])
        assert found.from_token == pytest.approx(before, abs=256)
        assert f"message {case.message} (" in found.words


def test_no_text_of_the_prompt_is_told() -> None:
    secret = "zanzibar"
    last, now = prompt(talk(secret, secret, secret)), prompt(talk(secret, f"{secret} x", secret, secret))
    found = explain(last=Said(last, 900), now=now, same=True, outcome=Outcome.RESIDENT, reused=300, computed=900)
    assert found is not None
    assert secret not in found.words


def test_without_the_last_prompt_only_what_is_known_is_told() -> None:
    known = {"now": BASE, "same": False, "outcome": Outcome.COLD, "reused": 0, "computed": 1000}
    assert explain(last=None, **known) is None
    found = explain(last=None, lost="other model", **known)
    assert found is not None
    assert (found.cause, found.again, found.seconds) == ("other model", 1000, None)


def test_a_few_tokens_are_not_worth_a_word() -> None:
    known = {"now": MORE, "same": True, "outcome": Outcome.RESIDENT}
    assert explain(last=Said(BASE, 10_000), reused=9_600, computed=2_000, **known) is None
    assert explain(last=Said(BASE, 10_000), reused=9_400, computed=2_000, **known) is not None
