"""The benchmark by kind of model: its pure parts, and its cases against a server that is made up."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import pytest

from slot_cache.cli import bench, bench_kinds
from slot_cache.cli.bench_kinds import KindsReport, find_models, find_program, print_kinds
from slot_cache.cli.output import Output
from slot_cache.lab import kinds
from slot_cache.lab.kinds import (
    AsItStands,
    KindCase,
    KindRow,
    KindsPlan,
    Returns,
    WithPlugin,
    kind_in,
    learned_of,
    measure_kind,
)
from slot_cache.lab.measure import BenchError, Prompts
from slot_cache.lab.program_server import BINARY_VARIABLE
from slot_cache.lab.stats import Sample, sample

PLAN = KindsPlan(first_tokens=200, turn_tokens=40, answer_tokens=1, learning=2, returns=3)
PROMPTS = Prompts("test", 20)


class OneSlot:
    """A server with one slot. A token is a word; with `plain` off a restored slot is of no use.

    With `folder` it is a proxy with the plugin too: it swaps and saves by itself, into `folder`, and tells `kind`.
    """

    def __init__(self, *, plain: bool = True, refuses: str = "", folder: Path | None = None, kind: str = "") -> None:
        self.plain, self.refuses, self.folder, self.kind = plain, refuses, folder, kind
        self.slot: list[str] = []
        self.files: dict[str, list[str]] = {}
        self.useless = False
        self.calls: list[str] = []
        self.answers: list[str] = []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://fake")

    def start(self) -> None:
        self.calls.append("start")

    def kill(self) -> None:
        self.calls.append("kill")
        self.slot = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/slot-cache/status":
            return httpx.Response(200, json={"servers": [{"server": "http://fake", "kind": self.kind}]})
        body = json.loads(request.content)
        if request.url.path.startswith("/slots/0"):
            action = request.url.params["action"]
            self.calls.append(f"{action} {body['filename']}")
            if action == self.refuses:
                return httpx.Response(501, text="not here")
            return self.act(action, body["filename"])
        session = request.headers["x-session-id"]
        if self.folder is not None:
            self.act("restore", session)
        self.calls.append(f"chat {session}")
        self.answers += [message["content"] for message in body["messages"] if message["role"] == "assistant"]
        words = [word for message in body["messages"] for word in message["content"].split()]
        pairs = zip(self.slot, words, strict=False)
        cached = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": 0 if self.useless else cached},
        }
        self.slot, self.useless = words, False
        if self.folder is not None:
            self.act("save", session)
            if self.kind != "stopped":
                (self.folder / f"{session}.bin").touch()
        chunk = {"choices": [{"delta": {"content": "word"}}], "usage": usage}
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    def act(self, action: str, name: str) -> httpx.Response:
        if action == "save":
            self.files[name] = self.slot
        else:
            self.slot = self.files.get(name, [])
            self.useless = not self.plain
        return httpx.Response(200, json={})


def quiet(text: str) -> None:
    pass


@pytest.mark.parametrize(("plain", "reuse"), [(True, 1.0), (False, 0.0)])
async def test_as_it_stands(plain: bool, reuse: float) -> None:
    server = OneSlot(plain=plain)
    async with server.client() as client:
        case = await measure_kind(AsItStands(client), server, PROMPTS, "", PLAN, quiet)
    assert case.after_swap.reuse == Sample(6, reuse, reuse, reuse)
    assert case.after_restart.reuse == Sample(3, reuse, reuse, reuse)
    assert case.after_swap.ttft_ms.count == 6
    assert case.after_restart.ttft_ms.count == 3
    a, b = "test-a", "test-b"
    assert server.calls[:5] == [f"chat {a}", f"save {a}.bin", f"chat {b}", f"save {b}.bin", f"restore {a}.bin"]
    again = [f"save {b}.bin", "kill", "start", f"restore {b}.bin", f"chat {b}"]
    assert server.calls[-15:] == again * 3


@pytest.mark.parametrize("as_given", [True, False])
async def test_what_the_history_holds_of_the_answers(as_given: bool) -> None:
    server = OneSlot()
    async with server.client() as client:
        await measure_kind(AsItStands(client), server, PROMPTS, "", replace(PLAN, as_given=as_given), quiet)
    answers = set(server.answers)
    assert answers == ({"word"} if as_given else {f"So it is, {number} times." for number in range(8)})


@pytest.mark.parametrize("action", ["save", "restore"])
async def test_a_server_that_refuses(action: str) -> None:
    server = OneSlot(refuses=action)
    async with server.client() as client:
        with pytest.raises(BenchError, match=f"refused to {action} a slot: 501 not here"):
            await measure_kind(AsItStands(client), server, PROMPTS, "", PLAN, quiet)


@pytest.mark.parametrize("kind", ["rewind", "stopped"])
async def test_with_the_plugin(tmp_path: Path, kind: str) -> None:
    server = OneSlot(plain=kind == "rewind", folder=tmp_path, kind=kind)
    async with server.client() as client:
        way = WithPlugin(client, tmp_path, "http://fake", wait=0.0)
        case = await measure_kind(way, server, PROMPTS, "route", PLAN, quiet)
        await way.look()
    reuse = 1.0 if kind == "rewind" else 0.0
    assert case.after_swap.reuse.median == case.after_restart.reuse.median == reuse
    assert not any(call.startswith(("save", "restore")) for call in server.calls)
    assert set(way.kinds) == {kind}
    assert learned_of(way.kinds) == ("rewind" if kind == "rewind" else "none")
    assert kind == "rewind" or way.unsaved == 0  # nothing is waited for where nothing is saved


async def test_an_idle_save_that_does_not_come_is_counted(tmp_path: Path) -> None:
    async with OneSlot().client() as client:
        way = WithPlugin(client, tmp_path, "http://fake", wait=0.0)
        await way.keep(kinds.Conversation("a"))
    assert way.unsaved == 1
    assert way.kinds == []


async def test_an_idle_save_is_waited_for(tmp_path: Path) -> None:
    old, new = tmp_path / "old.bin", tmp_path / "new.bin"
    old.touch()
    os.utime(old, (1, 1))

    def saves(request: httpx.Request) -> httpx.Response:
        new.touch()
        os.utime(new, (2**32, 2**32))
        return httpx.Response(200, json={"servers": [{"server": "http://fake", "kind": "trial"}]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(saves), base_url="http://fake") as client:
        way = WithPlugin(client, tmp_path, "http://fake")
        await way.keep(kinds.Conversation("a"))
        assert way.kinds == ["trial"]
        await way.keep(kinds.Conversation("a"))  # it is there already
    assert way.kinds == ["trial"]
    assert way.unsaved == 0


def test_kind_in_a_status() -> None:
    status = {"servers": [{"server": "http://a", "kind": "plain"}, {"server": "http://b", "kind": "rewind"}]}
    assert kind_in(status, "http://b") == "rewind"
    assert kind_in(status, "http://c") == ""
    assert kind_in({}, "http://a") == ""


@pytest.mark.parametrize(
    ("told", "learned"),
    [
        ([], "nothing"),
        (["trial"], "nothing"),
        (["plain"], "plain"),
        (["trial", "rewind"], "rewind"),
        (["stopped", "trial"], "none"),
        (["trial", "stopped", "trial", "rewind"], "rewind"),
    ],
)
def test_what_was_learned(told: list[str], learned: str) -> None:
    assert learned_of(told) == learned


def test_report_as_text_and_as_json() -> None:
    def case(reuse: float, ttft: float) -> KindCase:
        return KindCase(Returns(sample([reuse]), sample([ttft])), Returns(sample([reuse - 0.01]), sample([ttft * 10])))

    report = KindsReport("some machine", "some server", PLAN)
    report.rows.append(KindRow("hybrid.gguf", case(0.01, 500.0), case(0.99, 20.0), "rewind"))
    report.rows.append(KindRow("broken.gguf", None, None, "nothing"))
    report.notes.append("broken.gguf: it did not start")
    stream = io.StringIO()
    print_kinds(Output(stream), report)
    text = stream.getvalue()
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if ".gguf " in line}
    cells = "0.01 500 ms 0.00 5,000 ms 0.99 20.0 ms 0.98 200 ms rewind"
    assert rows["hybrid.gguf"] == cells.split()
    assert rows["broken.gguf"] == ["-"] * 8 + ["nothing"]
    for part in (
        "some server",
        "The histories hold other answers than the model gave",
        "The first 2 returns of each conversation are not counted",
        "swap: 3 returns",
        "note: broken.gguf: it did not start",
    ):
        assert part in text
    values = json.loads(json.dumps(asdict(report)))
    assert values["rows"][0]["with_plugin"]["after_swap"]["reuse"]["median"] == 0.99
    assert values["rows"][1] == {
        "model": "broken.gguf",
        "as_it_stands": None,
        "with_plugin": None,
        "learned": "nothing",
    }
    assert values["plan"]["learning"] == 2


def test_explanation_tells_what_the_histories_hold() -> None:
    told = "\n".join(bench_kinds.explanation(replace(PLAN, as_given=True)))
    assert "The histories hold the answers as the model gave them" in told


def test_models_and_program_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    assert find_program(None) is None
    program = tmp_path / "llama-server"
    program.touch()
    with pytest.raises(BenchError, match=r"--server-bin: .* is no program"):
        find_program(program)
    program.chmod(0o755)
    assert find_program(program) == program
    monkeypatch.setenv(BINARY_VARIABLE, str(program))
    assert find_program(None) == program
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path))
    with pytest.raises(BenchError, match=rf"{BINARY_VARIABLE}: .* is no program"):
        find_program(None)
    with pytest.raises(BenchError, match="there is no"):
        find_models(tmp_path)
    for name in ("b", "a"):
        (tmp_path / f"{name}.gguf").touch()
    assert [path.name for path in find_models(tmp_path)] == ["a.gguf", "b.gguf"]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.register(parser.add_subparsers())
    return parser.parse_args(["bench", *words])


def test_options_that_do_not_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(parsed("--server-bin", "somewhere")) == 1
    assert bench.run(parsed("--answers-as-given")) == 1
    assert capsys.readouterr().out.splitlines() == ["--server-bin and --answers-as-given are for --models only"] * 2
    (tmp_path / "a.gguf").touch()
    assert bench.run(parsed("--models", str(tmp_path), "--base-url", "http://h:1")) == 1
    assert "does not go together with --base-url" in capsys.readouterr().out


def test_models_have_a_report_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    (tmp_path / "a.gguf").touch()

    def made_up(output: Output, plan: KindsPlan, models: list[Path], binary: Path | None) -> KindsReport:
        assert plan == kinds.QUICK
        assert binary is None
        return KindsReport("m", "s", plan, [KindRow(models[0].name, None, None, "nothing")])

    monkeypatch.setattr(bench_kinds, "bench_kinds", made_up)
    assert bench.run(parsed("--models", str(tmp_path), "--quick", "--json")) == 1  # nothing could be measured
    assert json.loads(capsys.readouterr().out)["rows"][0]["model"] == "a.gguf"
