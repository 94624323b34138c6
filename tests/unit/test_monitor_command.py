"""`slot-cache monitor` as a command: its settings, its output for scripts, its keys."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from monitor_world import FIXTURES, SERVER

from fake_llama_server import FakeLlamaServer
from slot_cache.cli import _parser, main
from slot_cache.cli import monitor as command
from slot_cache.monitor.app import RATES, Monitor, Options
from terminal import Terminal

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
LOG = str(FIXTURES / "log-lv5.txt")


def settings(*words: str, environ: dict[str, str] | None = None) -> command.Options:
    arguments = _parser().parse_args(["monitor", *words])
    assert isinstance(arguments, argparse.Namespace)
    return command.settings_of(arguments, environ or {})


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_settings_of_the_command_line() -> None:
    told = settings("--proxy", "http://p:4000/", "--server", "http://s:8080/v1", "--log", "x.log", "--rate", "0.5")
    assert told == command.Options("http://p:4000", None, "http://s:8080", None, "x.log", 0.5)


def test_keys_come_from_the_environment() -> None:
    environ = {"LITELLM_API_KEY": "sk-user", "LLAMA_API_KEY": "llama"}
    told = settings("--proxy", "http://p:4000", environ=environ)
    assert (told.key, told.server_key) == ("sk-user", "llama")
    environ["LITELLM_MASTER_KEY"] = "sk-master"
    assert settings("--proxy", "http://p:4000", environ=environ).key == "sk-master"
    assert settings("--proxy", "http://p:4000", "--key", "sk-given", environ=environ).key == "sk-given"


def test_settings_of_a_config(tmp_path: Path) -> None:
    text = """
model_list: []
slot_cache_monitor:
  proxy: http://127.0.0.1:4000
  key: os.environ/MY_KEY
  server: http://127.0.0.1:8080
  log: ssh://gpu-box/var/log/llama-server.log
  rate: 2
"""
    path = config(tmp_path, text)
    told = settings("--config", path, environ={"MY_KEY": "sk-mine"})
    assert (told.proxy, told.key, told.rate) == ("http://127.0.0.1:4000", "sk-mine", 2.0)
    assert settings("--config", path, "--rate", "5", "--log", "y.log").log == "y.log"
    assert settings("--config", path).key is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slot_cache_monitor: {proxi: x}", "proxi is no setting"),
        ("slot_cache_monitor: [1]", "not a mapping"),
        ("slot_cache_monitor: {proxy: 3}", "proxy is no text"),
        ("slot_cache_monitor: {proxy: ftp://x}", "no http or https URL"),
        ("slot_cache_monitor: {log: x, rate: 0}", "rate"),
        ("slot_cache_monitor: {log: x, rate: fast}", "rate"),
        ("slot_cache_monitor: {}", "nothing to look at"),
        ("model_list: []", "nothing to look at"),
        ("a: [", "no YAML"),
    ],
)
def test_wrong_settings_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(command.SettingsError, match=message):
        settings("--config", config(tmp_path, text))


@pytest.mark.parametrize(
    "words", [[], ["--server", "nonsense"], ["--log", "ssh://-x/y"], ["--config", "/nowhere.yaml"]]
)
def test_wrong_use_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--once", *words]) == 2
    assert capsys.readouterr().err.startswith("slot-cache monitor: ")


def test_without_rich_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "missing_extra", lambda modules: f"{', '.join(modules)}: not installed here")
    assert main(["monitor", "--log", LOG]) == 1
    assert "the monitor needs rich" in capsys.readouterr().err


def test_the_other_commands_do_without_the_monitor() -> None:
    code = "import sys, slot_cache.cli; slot_cache.cli._parser(); sys.exit('slot_cache.monitor.view' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": SOURCE}, check=True, timeout=60)


def test_in_a_pipe_it_wants_once_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--log", LOG]) == 2
    assert "--once" in capsys.readouterr().err


def test_in_a_terminal_that_knows_lines_only_it_wants_once() -> None:
    with Terminal() as terminal:
        terminal.start(
            [sys.executable, "-m", "slot_cache", "monitor", "--log", LOG], {"PYTHONPATH": SOURCE, "TERM": "dumb"}
        )
        assert terminal.wait() == 2
        terminal.until(lambda: b"--once" in terminal.output)
        assert b"\x1b" not in terminal.output


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--log", LOG, "--once"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any("A fox and a crow are two of the most iconic creatures" in line for line in shown)
    assert any("691 tokens computed in 2.58 s (267.6/s) + 12 generated (82.5/s)" in line for line in shown)
    assert max(len(line) for line in shown) <= 120


def test_once_tells_a_source_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", "--log", LOG, "--server", "http://127.0.0.1:1", "--once", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["sources"] == {"server": {"up": False, "detail": "no connection"}, "log": {"up": True, "detail": ""}}


async def test_once_looks_twice_where_a_request_runs(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=2, save_dir=tmp_path)
    async with fake.serve() as url:
        await fake.complete("hello " * 30, slot=1)
        monitor = Monitor(Options(server=url))
        await monitor.once()
        assert fake.count("slots") == 1
        (server,) = monitor.board.shown
        assert [slot.state for slot in server.slots.values()] == ["empty", "idle"]


async def test_json_is_a_line_for_each_look(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=1, save_dir=tmp_path)
    async with fake.serve() as url:
        words = [sys.executable, "-m", "slot_cache", "monitor", "--server", url, "--json", "--rate", "0.1"]
        env = {**os.environ, "PYTHONPATH": SOURCE}
        process = await asyncio.create_subprocess_exec(*words, env=env, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        told: list[dict[str, Any]] = []
        while len(told) < 3 or not told[-1]["sources"]["server"]["up"]:
            told.append(json.loads(await asyncio.wait_for(process.stdout.readline(), 20)))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 130
        assert told[-1]["servers"][0]["slots"][0]["state"] == "empty"


@pytest.fixture
def monitor() -> Monitor:
    found = Monitor(Options(server=SERVER))
    found.board.slots(SERVER, None, [{"id": n, "n_ctx": 10, "is_processing": False} for n in range(3)], 1.0)
    return found


def test_keys_pick_a_slot(monitor: Monitor) -> None:
    picked = []
    for key in ["down", "down", "down", "down", "up", "up", "up", "up"]:
        monitor.press(key)
        picked.append(monitor.look.selected)
    assert picked == [0, 1, 2, 2, 1, 0, 0, 0]
    monitor.press("enter")
    assert monitor.look.history
    monitor.press("escape")
    assert (monitor.look.history, monitor.look.selected) == (False, 0)
    monitor.press("escape")
    monitor.press("enter")
    assert (monitor.look.history, monitor.look.selected) == (False, None)


def test_keys_change_the_rate(monitor: Monitor) -> None:
    for key, count, rate in [("+", 20, RATES[0]), ("-", 20, RATES[-1])]:
        for _ in range(count):
            monitor.press(key)
        assert (monitor.pace.seconds, monitor.look.rate) == (rate, rate)


def test_a_pause_keeps_what_was_to_be_seen(monitor: Monitor) -> None:
    monitor.press("p")
    monitor.board.happened(2.0, "warning", "later")
    assert monitor.look.paused
    assert monitor._frozen is not None
    assert not monitor._frozen.events
    monitor.press("p")
    assert monitor._frozen is None
    assert monitor.board.events


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Terminal]:
    """The monitor in a terminal of 80x24, looking at a log."""
    log = tmp_path / "llama.log"
    log.write_text(Path(LOG).read_text())
    with Terminal(80, 24) as terminal:
        words = [sys.executable, "-m", "slot_cache", "monitor", "--log", str(log)]
        terminal.start(words, {"PYTHONPATH": SOURCE})
        terminal.until(lambda: "most iconic creatures" in "\n".join(terminal.frame()))
        yield terminal


def test_in_a_terminal(shown: Terminal) -> None:
    assert len(shown.frame()) == 24
    shown.press("p")
    shown.until(lambda: "PAUSED" in shown.frame()[0])
    shown.press("p\x1b[B\x1b[B")
    shown.until(lambda: any(line.startswith(">  1") for line in shown.frame()))
    shown.press("\r")
    shown.until(lambda: any("slot 1" in line and line.startswith("──") for line in shown.frame()))
    shown.press("+")
    shown.until(lambda: "every 0.5 s" in shown.frame()[0])
    shown.press("q")
    assert shown.wait() == 0
    assert shown.attributes() == shown.found


def test_it_takes_the_size_that_the_terminal_has(shown: Terminal) -> None:
    for columns, lines in ((200, 50), (40, 10), (80, 24)):
        shown.resize(columns, lines)
        shown.until(lambda lines=lines: len(shown.frame()) == lines)
        assert max(map(len, shown.frame())) <= columns
    shown.resize(10, 2)
    shown.until(lambda: shown.frame()[0] == "too small")
    shown.press("q")
    assert shown.wait() == 0
