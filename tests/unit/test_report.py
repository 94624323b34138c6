"""What is said in the log, and how often."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache import report
from slot_cache.report import Once, info, shown


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, report.logger.name)
    return caplog


def levels(said: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in said.records if record.name == report.logger.name]


def test_it_speaks_in_the_proxy_s_log() -> None:
    from litellm._logging import verbose_proxy_logger

    assert report.logger is verbose_proxy_logger


def test_an_action_is_a_line_at_info(said: pytest.LogCaptureFixture) -> None:
    info("save %s: %d tokens", "key", 3)
    assert [(record.levelname, record.getMessage()) for record in said.records] == [
        ("INFO", "slot-cache: save key: 3 tokens")
    ]


def test_a_fault_is_a_warning_once(said: pytest.LogCaptureFixture) -> None:
    once = Once()
    for _ in range(3):
        once.warn(("server", "a"), "%s is gone", "a")
    assert levels(said) == ["WARNING", "DEBUG", "DEBUG"]
    assert {record.getMessage() for record in said.records} == {"slot-cache: a is gone"}


def test_each_kind_has_its_own_warning(said: pytest.LogCaptureFixture) -> None:
    once = Once()
    once.warn(("server", "a"), "gone")
    once.warn(("server", "b"), "gone")
    once.warn(("server",), "gone")
    assert levels(said) == ["WARNING"] * 3


def test_a_fault_that_is_over_is_warned_of_again(said: pytest.LogCaptureFixture) -> None:
    once = Once()
    once.warn(("server",), "gone")
    assert once.over(("server",))
    once.warn(("server",), "gone")
    assert levels(said) == ["WARNING", "WARNING"]


def test_over_tells_whether_there_was_a_fault() -> None:
    once = Once()
    assert not once.over(("server",))
    once.warn(("server",), "gone")
    assert not once.over(("other",))
    assert once.over(("server",))
    assert not once.over(("server",))


def test_two_of_them_know_nothing_of_each_other(said: pytest.LogCaptureFixture) -> None:
    Once().warn(("server",), "gone")
    Once().warn(("server",), "gone")
    assert levels(said) == ["WARNING", "WARNING"]


def test_only_so_many_kinds_are_remembered_and_the_oldest_is_forgotten(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_KINDS", 3)
    once = Once()
    for number in range(4):
        once.warn((str(number),), "gone")
    said.clear()
    once.warn(("3",), "gone")
    once.warn(("1",), "gone")
    once.warn(("0",), "gone")
    assert levels(said) == ["DEBUG", "DEBUG", "WARNING"]


def test_many_kinds_take_no_more_room() -> None:
    once = Once()
    for number in range(5000):
        once.warn((str(number),), "gone")
    assert sum(once.over((str(number),)) for number in range(5000)) == report._KINDS <= 1000


# text that a client may have chosen


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("smol", "'smol'"),
        ("", "''"),
        ("a\nb", r"'a\nb'"),
        ("a\r\n\tb", r"'a\r\n\tb'"),
        ("\x1b[31mred", r"'\x1b[31mred'"),
        ("a\0b", r"'a\x00b'"),
        ("\u2028", r"'\u2028'"),
        ("\u202eback", r"'\u202eback'"),
        ("\ud800", r"'\ud800'"),
        (7, "'7'"),
        (None, "'None'"),
        ("x" * 80, "'" + "x" * 80 + "'"),
    ],
)
def test_text_is_quoted_in_one_line(text: object, line: str) -> None:
    assert shown(text) == line


def test_long_text_is_cut() -> None:
    assert shown("x" * 81).endswith("...'")
    assert len(shown("x" * 10_000)) < 90
    assert shown("x" * 10_000, limit=10) == "'" + "x" * 9 + "...'"


@given(st.text(st.characters()) | st.text(st.characters(categories=["Cs", "Cc", "Zl", "Zp", "Cf"]), min_size=60))
def test_whatever_it_is_it_is_one_printable_line_that_can_be_written(text: str) -> None:
    line = shown(text)
    assert line.isprintable()
    assert len(line.splitlines()) == 1
    line.encode("utf-8")
    assert len(line) < 1000
