"""A process that saves is killed at random moments; what it leaves is whole, and nobody's but its own."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from saver import TAG

import house
from slot_cache.housekeeping import entries
from slot_cache.index import SqliteIndex

pytestmark = pytest.mark.real

KILLS = int(os.environ.get("SLOT_CACHE_KILLS", "15"))
"""How often: `SLOT_CACHE_KILLS=100` for the whole of it."""

TOKENS = 8


async def test_a_process_killed_while_it_saves_leaves_only_good_files(talker: Path, tmp_path: Path) -> None:
    pick = random.Random(1)
    answers: dict[str, str] = {}
    outcomes: list[str] = []
    with house.server(talker, tmp_path, n_ubatch=1) as server:
        for number in range(KILLS):
            lines = _run_until_killed(server.base_url, tmp_path, number, pick.uniform(0.0, 0.8))
            for line in lines:
                outcome, text, answer = line.split("\t")
                outcomes.append(outcome)
                answers[text] = answer
            index = SqliteIndex(tmp_path / "state" / "index.sqlite3")
            try:
                found = entries(index, verify=True)
            finally:
                index.close()
            # "unknown" is a file whose first save was not recorded: it is never restored
            assert {entry.state for entry in found} <= {"ok", "unknown"}, f"after kill {number}"
            assert all(entry.key.startswith(TAG) for entry in found)
        right = await house.answers_without_cache(server.base_url, answers, TOKENS)
    wrong = [text[:1] for text, answer in answers.items() if answer != right[text]]
    print(f"{KILLS} kills, {len(outcomes)} requests: { ({name: outcomes.count(name) for name in set(outcomes)}) }")
    assert not wrong
    assert outcomes.count("restored") >= KILLS // 2


def _run_until_killed(base_url: str, folder: Path, seed: int, seconds: float) -> list[str]:
    """Run the saver, kill it (-9) so long after its first request; return the lines it has printed whole."""
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("saver.py")), base_url, str(folder), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    first = child.stdout.readline()
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    rest = child.stdout.read()
    child.wait()
    timer.cancel()
    return [line for line in (first + rest).split("\n")[:-1] if line.count("\t") == 2]
