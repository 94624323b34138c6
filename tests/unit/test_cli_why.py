"""`slot-cache why`, and what the index keeps for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slot_cache import index as index_module
from slot_cache.cli import main
from slot_cache.index import Index, MemoryIndex, SqliteIndex
from slot_cache.request import session_digest
from slot_cache.why import Recomputed

TAG = "smol-ec2b18d8"


def note(number: int, **more: Any) -> Recomputed:
    values: dict[str, Any] = {
        "at": float(number), "key": f"{TAG}_{number:032x}", "session": None, "owner": "", "route": "smol",
        "outcome": "cold", "cause": "evicted", "words": "gone", "message": None, "from_token": None, "reused": 0,
        "computed": 5, "again": 5, "seconds": None,
    }  # fmt: skip
    return Recomputed(**(values | more))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    index = SqliteIndex(tmp_path / "index.sqlite3")
    plain, owned = session_digest("chat 7", ""), session_digest("chat 7", "hash-of-a-key")
    index.put_recomputed(note(1, key=f"{TAG}_{plain}", session=f"{TAG}_{plain}", words="first"))
    index.put_recomputed(
        note(2, key=f"{TAG}_{2:032x}", session=f"{TAG}_{owned}", owner="hash-of-a-key", words="second")
    )
    index.put_recomputed(note(3, words="third", again=1234567, seconds=2.5))
    index.close()
    return tmp_path


def run(state: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["why", "--state-dir", str(state), *words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("session", "expected"),
    [
        ("chat 7", ["second", "first"]),
        (session_digest("chat 7", "hash-of-a-key"), ["second"]),
        (session_digest("chat 7", ""), ["first"]),
        (f"{TAG}_{3:032x}", ["third"]),
        (f"{3:032x}", ["third"]),
        ("chat 8", []),
    ],
)
def test_a_session_is_found_by_any_of_its_names(
    state: Path, capsys: pytest.CaptureFixture[str], session: str, expected: list[str]
) -> None:
    lines = run(state, capsys, session)
    if not expected:
        assert lines == ["nothing was computed again that could have been reused"]
        return
    assert [line.rpartition(": ")[2] for line in lines] == expected
    told = json.loads(run(state, capsys, session, "--json")[0])
    assert [entry["words"] for entry in told] == expected


def test_without_a_session_the_last_ones_of_all_are_told(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(state, capsys, "-n", "2")
    assert [line.rpartition(": ")[2] for line in lines] == ["third", "second"]
    assert f"smol, cold, reused 0, computed 5 ({TAG}_{3:032x})" in lines[0]


def test_without_an_index_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "x", "--state-dir", str(tmp_path)]) == 1
    assert "there is no index" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sqlite", "memory"])
def test_only_so_many_notes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(index_module, "MOST_RECOMPUTED", 5)
    index: Index = SqliteIndex(tmp_path / "i") if kind == "sqlite" else MemoryIndex()
    for number in range(20):
        index.put_recomputed(note(number, message=number, seconds=0.5))
    assert index.recomputed() == [note(number, message=number, seconds=0.5) for number in range(19, 14, -1)]
    index.close()
    assert index.recomputed() == []


def test_an_index_from_before_there_were_notes_is_brought_up_to_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(index_module, "SCHEMA", 2)
        SqliteIndex(tmp_path / "i").close()
    index = SqliteIndex(tmp_path / "i")
    index.put_recomputed(note(1))
    assert index.recomputed() == [note(1)]
    index.close()
