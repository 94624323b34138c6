"""What a route may ask for, and what it is told when that is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from slot_cache.settings import ENVIRONMENT, SESSION_HEADERS, Settings, SettingsError, asks_for_it, read_settings
from slot_cache.steady import CLAUDE_CODE, READY
from slot_cache.steady_settings import SteadySettings

ROUTE = "my-route"


def read(raw: object, **environ: str) -> Settings:
    return read_settings(ROUTE, raw, environ)


def complaint(raw: object, **environ: str) -> str:
    with pytest.raises(SettingsError) as caught:
        read(raw, **environ)
    return str(caught.value)


# who asks for it


@pytest.mark.parametrize("raw", [True, {}, {"slot": 1}, "yes", "true", 1, 0, [], ["slot"], ""])
def test_anything_but_nothing_and_false_asks_for_it(raw: object) -> None:
    assert asks_for_it(raw)


@pytest.mark.parametrize("raw", [None, False])
def test_nothing_and_false_do_not_ask_for_it(raw: object) -> None:
    assert not asks_for_it(raw)


@pytest.mark.parametrize("raw", ["yes", "true", 1, 0, 1.0, [], ["slot"], "", None, False])
def test_only_true_or_a_mapping_is_understood(raw: object) -> None:
    message = complaint(raw)
    assert repr(ROUTE) in message
    assert repr(raw) in message
    assert "true, or a mapping" in message


# defaults, the environment, and the mapping


DEFAULTS: dict[str, Any] = {
    "slot": None,
    "slots": "auto",
    "evict": "cost",
    "model": None,
    "save_path": None,
    "max_files": 0,
    "max_gib": 0.0,
    "save_idle_seconds": 0.0,
    "models_max": None,
    "queue_seconds": 3600.0,
    "scope": "key",
    "min_tokens": 64,
    "verify": "fast",
    "state_dir": None,
    "session_headers": ("x-session-id", "x-openwebui-chat-id"),
    "steady": SteadySettings(claude_code=True, rules=()),
}


@pytest.mark.parametrize("raw", [True, {}])
@pytest.mark.parametrize(("option", "value"), DEFAULTS.items())
def test_every_option_has_its_default(raw: object, option: str, value: object) -> None:
    assert getattr(read(raw), option) == value


def test_the_table_of_defaults_is_complete() -> None:
    # an option of a later issue belongs in the table above as well
    assert set(DEFAULTS) <= set(Settings.model_fields)
    assert DEFAULTS["session_headers"] == SESSION_HEADERS


FROM_ENVIRONMENT = [
    ("slot", "LLAMA_SLOT", "3", 3),
    ("slots", "LLAMA_SLOTS", "3", 3),
    ("slots", "LLAMA_SLOTS", "auto", "auto"),
    ("save_path", "LLAMA_SLOT_SAVE_PATH", "/var/cache/slots", Path("/var/cache/slots")),
    ("max_files", "LLAMA_CACHE_MAX_FILES", "12", 12),
    ("max_gib", "LLAMA_CACHE_MAX_GIB", "1.5", 1.5),
    ("save_idle_seconds", "LLAMA_SAVE_IDLE_SECONDS", "30", 30.0),
    ("models_max", "LLAMA_MODELS_MAX", "2", 2),
]


@pytest.mark.parametrize(("option", "variable", "text", "value"), FROM_ENVIRONMENT)
def test_a_variable_sets_the_default(option: str, variable: str, text: str, value: object) -> None:
    assert ENVIRONMENT[option] == variable
    assert getattr(read(True, **{variable: text}), option) == value


GIVEN: dict[str, Any] = {
    "slot": 7,
    "slots": 7,
    "save_path": "/given",
    "max_files": 70,
    "max_gib": 0.25,
    "save_idle_seconds": 7.5,
    "models_max": 0,
}


@pytest.mark.parametrize(("option", "variable", "text", "_"), FROM_ENVIRONMENT)
def test_the_mapping_goes_over_the_environment(option: str, variable: str, text: str, _: object) -> None:
    settings = read({option: GIVEN[option]}, **{variable: text})
    assert str(getattr(settings, option)) == str(GIVEN[option])


@pytest.mark.parametrize(("option", "variable", "_text", "_value"), FROM_ENVIRONMENT)
def test_a_wrong_variable_is_of_no_account_where_the_mapping_has_the_option(
    option: str, variable: str, _text: str, _value: object
) -> None:
    assert str(getattr(read({option: GIVEN[option]}, **{variable: "\0wrong"}), option)) == str(GIVEN[option])


@pytest.mark.parametrize(("option", "variable", "_text", "_value"), FROM_ENVIRONMENT)
def test_an_empty_variable_is_none(option: str, variable: str, _text: str, _value: object) -> None:
    assert getattr(read(True, **{variable: ""}), option) == DEFAULTS[option]


def test_other_variables_do_not_count() -> None:
    assert read(True, LLAMA_SCOPE="shared", SLOT="9", LLAMA_QUEUE_SECONDS="1") == read(True)


def test_the_process_environment_is_the_one_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("LLAMA_SLOT", "5")
    assert read_settings(ROUTE, True).slot == 5


# good values


@pytest.mark.parametrize(
    ("option", "given", "value"),
    [
        ("slot", 3, 3),
        ("slot", "3", 3),
        ("model", "smol", "smol"),
        ("save_path", "/x/y", Path("/x/y")),
        ("max_files", 0, 0),
        ("max_gib", 1, 1.0),
        ("max_gib", "0.5", 0.5),
        ("save_idle_seconds", 0.1, 0.1),
        ("queue_seconds", 0.5, 0.5),
        ("models_max", 0, 0),
        ("scope", "shared", "shared"),
        ("min_tokens", 0, 0),
        ("verify", "full", "full"),
        ("state_dir", "/x/y", Path("/x/y")),
        ("session_headers", ["X-Chat", "X-Session-ID"], ("x-chat", "x-session-id")),
        ("session_headers", "X-Chat, X-Session-ID", ("x-chat", "x-session-id")),
        ("session_headers", [], ()),
    ],
)
def test_a_good_value_is_taken(option: str, given: object, value: object) -> None:
    assert getattr(read({option: given}), option) == value


@pytest.mark.parametrize("option", ["save_path", "state_dir"])
def test_a_path_in_the_home_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert getattr(read({option: "~/slots"}), option) == tmp_path / "slots"


@pytest.mark.parametrize(("gib", "size"), [(0, 0), (1, 2**30), (0.5, 2**29), (2.25, 9 * 2**28)])
def test_max_bytes_is_max_gib_in_bytes(gib: float, size: int) -> None:
    assert read({"max_gib": gib}).max_bytes == size


def test_settings_cannot_be_changed() -> None:
    settings = read(True)
    with pytest.raises(ValueError, match="frozen"):
        settings.slot = 1


# bad values


ALLOWED = {
    "slot": "whole number",
    "slots": "auto, or a whole number, 1 or more",
    "evict": "cost or lru",
    "model": "model name",
    "save_path": "path",
    "max_files": "whole number",
    "max_gib": "GiB",
    "save_idle_seconds": "seconds",
    "models_max": "whole number",
    "queue_seconds": "seconds, more than 0",
    "scope": "key or shared",
    "min_tokens": "whole number",
    "verify": "full or fast",
    "state_dir": "path",
    "session_headers": "header names",
}

BAD: list[tuple[str, object]] = [
    *[
        (option, value)
        for option in ("slot", "max_files", "models_max", "min_tokens")
        for value in (-1, "-1", 1.5, "1.5", "many", "", True, False, [], {}, math.nan, math.inf)
    ],
    *[
        (option, value)
        for option in ("max_gib", "save_idle_seconds", "queue_seconds")
        for value in (-0.1, "-1", "much", "", True, False, None, [], {}, math.nan, math.inf, -math.inf, "nan", "inf")
    ],
    *[(option, None) for option in ("slots", "max_files", "min_tokens")],
    *[("slots", value) for value in (0, -1, "0", "-1", 1.5, "all", "", True, False, [], {}, math.nan)],
    ("evict", "oldest"),
    ("evict", None),
    ("queue_seconds", 0),
    ("queue_seconds", "0"),
    ("model", ""),
    ("model", 7),
    ("model", True),
    ("model", ["smol"]),
    *[
        (option, value)
        for option in ("save_path", "state_dir")
        for value in (7, True, ["/x"], "", "~nobody-has-this-name/slots")
    ],
    ("verify", "none"),
    ("verify", True),
    ("max_gib", 1e300),
    ("scope", "Key"),
    ("scope", "all"),
    ("scope", None),
    ("scope", True),
    ("session_headers", None),
    ("session_headers", 7),
    ("session_headers", True),
    ("session_headers", ["x-ok", 7]),
    ("session_headers", ["x-ok", ""]),
    ("session_headers", "x-ok,,"),
    ("session_headers", ["x-\N{LATIN SMALL LETTER A WITH DIAERESIS}"]),
    ("session_headers", {"x-ok": 1}),
]


@pytest.mark.parametrize(("option", "value"), BAD, ids=lambda part: repr(part)[:30])
def test_a_bad_value_is_told_with_route_option_value_and_what_is_allowed(option: str, value: object) -> None:
    message = complaint({option: value})
    assert repr(ROUTE) in message
    assert option in message
    assert repr(value) in message
    assert ALLOWED[option] in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("slot", "first"),
        ("slot", "-1"),
        ("slot", "true"),
        ("max_files", "1.5"),
        ("max_gib", "nan"),
        ("max_gib", "1e999"),
        ("save_idle_seconds", "soon"),
        ("models_max", "-2"),
    ],
)
def test_a_bad_variable_is_told_by_its_name(option: str, text: str) -> None:
    message = complaint(True, **{ENVIRONMENT[option]: text})
    assert repr(ROUTE) in message
    assert ENVIRONMENT[option] in message
    assert repr(text) in message
    assert ALLOWED[option] in message


def test_the_variable_is_not_named_for_a_bad_value_of_the_mapping() -> None:
    assert "LLAMA_SLOT" not in complaint({"slot": -1}, LLAMA_SLOT="2")


@pytest.mark.parametrize(
    ("raw", "environ", "slots"),
    [
        (True, {}, None),
        ({"slots": "auto"}, {}, None),
        ({"slots": 3}, {}, range(3)),
        ({"slots": "3"}, {}, range(3)),
        ({"slot": 0}, {}, 0),
        ({"slot": 2}, {}, 2),
        (True, {"LLAMA_SLOT": "2"}, 2),
        (True, {"LLAMA_SLOTS": "2"}, range(2)),
        ({"slots": 3}, {"LLAMA_SLOT": "2"}, range(3)),
        ({"slot": 1}, {"LLAMA_SLOTS": "2"}, 1),
    ],
)
def test_the_slots_of_a_route(raw: object, environ: dict[str, str], slots: object) -> None:
    assert read(raw, **environ).which_slots == slots


def test_one_slot_and_many_are_not_both_to_be_had() -> None:
    message = complaint({"slot": 1, "slots": 2})
    assert repr(ROUTE) in message
    assert "both slot and slots" in message


@pytest.mark.parametrize("name", ["slotz", "Slot", "save-path", "", "\N{SNOWMAN}", "x\ny"])
def test_an_unknown_option_is_told_with_all_that_are_known(name: str) -> None:
    message = complaint({name: 1})
    assert repr(ROUTE) in message
    assert f"unknown option {name!r}" in message
    assert all(option in message for option in DEFAULTS)
    assert "\n" not in message


@pytest.mark.parametrize("name", [1, None, ("slot",)])
def test_an_option_that_is_no_text_is_unknown(name: object) -> None:
    assert f"unknown option {str(name)!r}" in complaint({name: 1})


def test_every_wrong_option_is_told_at_once() -> None:
    message = complaint({"slot": -1, "scope": "all", "colour": "red"}, LLAMA_CACHE_MAX_GIB="much")
    for part in ("option slot is -1", "option scope is 'all'", "'colour'", "variable LLAMA_CACHE_MAX_GIB is 'much'"):
        assert part in message


@pytest.mark.parametrize("raw", [{"scope": "s" * 5000}, {"x" * 5000: 1}, "s" * 5000, {"session_headers": ["é"] * 5000}])
def test_a_long_value_is_cut(raw: object) -> None:
    assert len(complaint(raw)) < 600


def test_a_long_route_is_cut() -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings("r" * 10_000, {"slot": -1}, {})
    assert len(str(caught.value)) < 600


def test_the_values_of_other_options_are_not_told() -> None:
    assert "hidden" not in complaint({"slot": -1, "model": "hidden-name", "save_path": "/hidden"})


# steady


def rules(raw: object) -> list[str]:
    return [rule.name for rule in read({"steady": raw}).steady.all_rules]


def test_claude_code_s_line_is_the_only_rule_that_is_on_by_default() -> None:
    assert read(True).steady.all_rules == (CLAUDE_CODE,)
    assert rules({}) == rules(True) == rules({"claude_code": True}) == rules({"rules": None}) == ["claude_code"]
    assert rules(False) == rules({"claude_code": False}) == []


def test_ready_made_rules_go_by_their_names() -> None:
    assert read({"steady": {"rules": [*READY]}}).steady.rules == tuple(READY.values())
    (rule,) = read(
        {"steady": {"rules": [{"name": "times", "do": "freeze", "for": "1h", "where": ["system", "first_user"]}]}}
    ).steady.rules
    assert (rule.pattern, rule.do, rule.seconds) == (READY["times"].pattern, "freeze", 3600.0)
    assert rule.where == {"system", "first_user"}


def test_a_rule_of_one_s_own() -> None:
    (rule, other) = read(
        {"steady": {"rules": [{"pattern": "id=[0-9]+", "do": "drop"}, {"name": "b", "pattern": "b", "do": "move"}]}}
    ).steady.rules
    assert (rule.name, rule.where, rule.do, rule.seconds) == ("rule1", {"system"}, "drop", None)
    assert rule.pattern.spans("an id=12.") == [(3, 8)]
    assert (other.name, other.do) == ("b", "move")


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("session", None), ("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400), (60, 60), ("7", 7)],
)
def test_how_long_a_text_is_frozen(given: object, seconds: float | None) -> None:
    rule = {"name": "a", "pattern": "a", "do": "freeze", "for": given}
    assert read({"steady": {"rules": [rule]}}).steady.rules[0].seconds == seconds


OWN = {"name": "mine", "pattern": "a", "do": "freeze"}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (7, ("7", "true, false, or a mapping")),
        ("times", ("'times'", "true, false, or a mapping")),
        ({"claude": True}, ("'claude'", "claude_code")),
        ({"claude_code": "yes"}, ("claude_code is 'yes'", "true or false")),
        ({"rules": "times"}, ("rules is 'times'", "a list")),
        ({"rules": [{**OWN, "name": f"r{number}"} for number in range(33)]}, ("33 rules", "32 at most")),
        ({"rules": [7]}, ("rule 1 is 7", "times, uuids, git_status")),
        ({"rules": ["times", "time"]}, ("rule time", "no pattern", "times, uuids, git_status")),
        ({"rules": [{**OWN, "pattern": "(a"}]}, ("rule mine", "'(a'", "missing")),
        ({"rules": [{**OWN, "pattern": "a*"}]}, ("rule mine", "'a*'", "empty")),
        ({"rules": [{**OWN, "pattern": "(?=a)"}]}, ("rule mine", "cannot be used")),
        ({"rules": [{**OWN, "pattern": 7}]}, ("rule mine", "pattern is 7")),
        ({"rules": [OWN, OWN]}, ("rule 'mine'", "another one")),
        ({"rules": [{**OWN, "name": "claude_code"}]}, ("rule 'claude_code'", "another one")),
        ({"rules": [{**OWN, "name": "a b"}]}, ("rule 1", "'a b'", "letters")),
        ({"rules": [{**OWN, "name": "a\n"}]}, ("rule 1", "letters")),
        ({"rules": [{**OWN, "do": "hide"}]}, ("rule mine", "'hide'", "drop, freeze, move")),
        ({"rules": [{"pattern": "a"}]}, ("rule rule1", "do is missing")),
        ({"rules": [{**OWN, "where": "assistant"}]}, ("rule mine", "'assistant'", "system, tools, first_user")),
        ({"rules": [{**OWN, "where": []}]}, ("rule mine", "where")),
        ({"rules": [{**OWN, "for": "soon"}]}, ("rule mine", "'soon'", "30m, 1h, 1d")),
        ({"rules": [{**OWN, "for": True}]}, ("rule mine", "for is True")),
        ({"rules": [{**OWN, "for": 0}]}, ("rule mine", "for is 0")),
        ({"rules": [{**OWN, "do": "drop", "for": "1h"}]}, ("rule mine", "freeze")),
        ({"rules": [{**OWN, "when": "1h"}]}, ("rule mine", "'when'", "name, where, pattern, do, for")),
    ],
)
def test_a_wrong_rule_is_told_by_its_name(raw: object, told: tuple[str, ...]) -> None:
    message = complaint({"steady": raw})
    assert message.startswith(f"route {ROUTE!r}: option steady: ")
    for words in told:
        assert words in message
