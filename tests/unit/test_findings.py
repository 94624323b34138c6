"""What was found is kept for `slot-cache why`."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from slot_cache.cli import main
from slot_cache.findings import MOST, NAME, Finding, read_findings, write_finding
from slot_cache.unsteady import Place

PLACE = Place(1, "system", 32, 64, 3000, "a time", "steady: {rules: [times]}", times=3, tokens=1200, seconds=2.5)


def finding(number: int = 0, session: str = "smol_a", **more: object) -> Finding:
    return replace(Finding.of(PLACE, "smol", session, 1_700_000_000.0 + number), **more)


def test_a_finding_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_findings(tmp_path) == []
    write_finding(tmp_path, finding())
    write_finding(tmp_path, finding(session="smol_b"))
    assert read_findings(tmp_path) == [finding(), finding(session="smol_b")]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_the_same_place_is_written_anew(tmp_path: Path) -> None:
    write_finding(tmp_path, finding())
    write_finding(tmp_path, finding(start=2000, end=2032))
    write_finding(tmp_path, finding(1, start=48, times=6))
    assert [(one.start, one.times) for one in read_findings(tmp_path)] == [(2000, 3), (48, 6)]


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(MOST + 5):
        write_finding(tmp_path, finding(number, f"smol_{number}"))
    assert [one.session for one in read_findings(tmp_path)] == [f"smol_{number}" for number in range(5, MOST + 5)]


def test_several_workers_write_at_once(tmp_path: Path) -> None:
    def write(worker: int) -> None:
        for number in range(10):
            write_finding(tmp_path, finding(number, f"smol_{worker}_{number}"))

    workers = [threading.Thread(target=write, args=(worker,)) for worker in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len({one.session for one in read_findings(tmp_path)}) == 40


@pytest.mark.parametrize("text", ["", "{", "{}", "[7, {}, null]", '[{"route": "smol"}]', "\x00"])
def test_a_damaged_file_is_no_finding(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    assert read_findings(tmp_path) == []
    write_finding(tmp_path, finding())
    assert read_findings(tmp_path) == [finding()]


def test_what_is_of_another_kind_is_left_out(tmp_path: Path) -> None:
    write_finding(tmp_path, finding())
    (good,) = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(
        json.dumps([{**good, "start": "x"}, {**good, "shape": 7}, {**good, "times": True}, good])
    )
    assert read_findings(tmp_path) == [finding()]


def why(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["why", *arguments]) == 0
    return capsys.readouterr().out


def test_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--state-dir", str(tmp_path))
    assert "no prompt was found" in why(capsys, *where)
    assert json.loads(why(capsys, *where, "--json")) == {"unsteady": [], "recomputed": []}
    write_finding(tmp_path, finding())
    write_finding(tmp_path, finding(session="", tokens=0))
    text = why(capsys, *where)
    assert "smol, smol_a, 2023-11-1" in text
    assert "message 1 (system) differed in 3 of its requests from about character 32 to 64 of 3000: a time" in text
    assert text.count("about 1,200 tokens behind it were computed again, in 2.5 s") == 1
    assert text.count("this would help: steady: {rules: [times]}") == 2
    assert "without a session" in text
    assert "without a session" not in why(capsys, "smol_a", *where)
    assert [one["session"] for one in json.loads(why(capsys, *where, "--json"))["unsteady"]] == ["smol_a", ""]
