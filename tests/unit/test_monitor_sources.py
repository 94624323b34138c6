"""The monitor's sources: what goes away and comes back, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitor_world import HARBOUR, HARBOUR_KEY, SERVER, slot_status, status

from fake_http import Answer, HttpServer
from fake_llama_server import FakeLlamaServer
from slot_cache.lab.process import free_port
from slot_cache.monitor import sources
from slot_cache.monitor.model import Dashboard, SlotView
from slot_cache.monitor.sources import FileLog, LineSplitter, Pace, PluginSource, ServerSource, SourceError, SshLog

TOKEN = "slot process_toke: id  0 | task 1 | n_decoded = 3, n_remaining = 9, next token:   284 '{}'\n"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "FIRST_BACKOFF", 0.02)
    monkeypatch.setattr(sources, "MOST_BACKOFF", 0.05)
    monkeypatch.setattr(sources, "FILE_SECONDS", 0.005)
    monkeypatch.setattr(sources, "BUSY_SECONDS", 0.05)


@contextlib.asynccontextmanager
async def running(source: FileLog | SshLog | ServerSource | PluginSource) -> AsyncIterator[None]:
    task = asyncio.ensure_future(source.run())
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 (what is waited for is told by no event)
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), seconds)


def text(board: Dashboard) -> str:
    return "".join(slot.text for server in board.servers.values() for slot in server.slots.values())


def append(path: Path, *words: str) -> None:
    with path.open("a") as file:
        file.write("".join(TOKEN.format(word) for word in words))


# a log file


async def test_a_log_is_followed_over_rotation_and_truncation(tmp_path: Path) -> None:
    path, board = tmp_path / "llama.log", Dashboard(SERVER)
    append(path, "a")
    async with running(FileLog(board, path)):
        await until(lambda: text(board) == "a")
        append(path, "b")
        await until(lambda: text(board) == "ab")
        append(path, "c")
        path.rename(tmp_path / "llama.log.1")  # the writer still has the old file
        append(tmp_path / "llama.log.1", "d")
        await until(lambda: board.sources["log"].up is False)  # there is none of this name
        append(path, "e")
        await until(lambda: text(board) == "abcde")
        os.truncate(path, 0)  # copytruncate
        append(path, "f")
        await until(lambda: text(board) == "abcdef")
        os.truncate(path, 0)
        append(path, "g" * 500)  # longer at once than it was
        await until(lambda: text(board).endswith("gg"))
        assert board.sources["log"].up


async def test_a_writer_that_does_not_append_leaves_a_hole(tmp_path: Path) -> None:
    path, board = tmp_path / "llama.log", Dashboard(SERVER)
    with path.open("w") as writer:
        writer.write("filling\n" * 10_000 + TOKEN.format("a"))
        writer.flush()
        async with running(FileLog(board, path)):
            await until(lambda: text(board) == "a")
            os.truncate(path, 0)
            writer.write(TOKEN.format("b"))
            writer.flush()
            await until(lambda: text(board) == "ab")


async def test_a_log_that_vanishes_or_is_none(tmp_path: Path) -> None:
    path, board = tmp_path / "llama.log", Dashboard(SERVER)
    async with running(FileLog(board, path)):
        await until(lambda: board.sources["log"].up is False)
        assert board.sources["log"].detail == "No such file or directory"
        append(path, "a")
        await until(lambda: text(board) == "a")
        path.unlink()
        await until(lambda: board.sources["log"].up is False)
        os.mkfifo(path)  # nobody writes: opening it must not wait
        await until(lambda: board.sources["log"].detail == "it is no file")
        path.unlink()
        append(path, "b")
        await until(lambda: text(board) == "ab")


async def test_of_a_long_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BACKLOG_BYTES", 2000)
    path, board = tmp_path / "llama.log", Dashboard(SERVER)
    path.write_bytes(b"0.00.001.934 W srv  x: old\n" * 100_000)
    append(path, "a")
    async with running(FileLog(board, path)):
        await until(lambda: text(board) == "a")
        assert 0 < len(board.events) < 100
        assert {event.at for event in board.events} == {None}  # nobody knows when that was
    await FileLog(board, path).once()
    assert text(board) == "aa"


def test_lines_are_cut_and_long_ones_skipped() -> None:
    splitter = LineSplitter(longest=10)
    assert splitter.feed(b"one\ntw") == ["one"]
    assert splitter.feed(b"o\n\xff\n") == ["two", "\udcff"]
    assert splitter.feed(b"0123456789abc") == ["0123456789"]
    assert splitter.feed(b"x" * 1000) == []
    assert splitter.feed(b"x\nnext\n") == ["next"]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_however_it_comes_the_lines_are_the_same(chunks: list[bytes]) -> None:
    splitter = LineSplitter()
    found = [line for chunk in chunks for line in splitter.feed(chunk)]
    whole = b"".join(chunks).decode("utf-8", "surrogateescape").split("\n")[:-1]
    assert found == whole


# a log on another machine


STUB = """\
#!{python}
import os, sys, time
path = os.environ["STUB_LOG"]
with open(path + ".calls", "a") as calls:
    calls.write(repr(sys.argv[1:]) + "\\n")
mode = open(path + ".mode").read()
if mode == "refuse":
    sys.exit("a banner\\nPermission denied (publickey).")
place = os.path.getsize(path)
while open(path + ".mode").read() == "work":
    with open(path, "rb") as log:
        log.seek(place)
        data = log.read()
    place += len(data)
    os.write(1, data)
    time.sleep(0.005)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ssh on PATH that follows a file: the file is returned, beside it lie `.mode` and `.calls`."""
    log = tmp_path / "remote.log"
    log.touch()
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(STUB.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STUB_LOG", str(log))
    return log


def mode(log: Path, word: str) -> None:
    new = log.with_name("mode.new")
    new.write_text(word)
    new.rename(f"{log}.mode")


async def test_an_ssh_that_dies_is_started_again(stub: Path) -> None:
    mode(stub, "work")
    board = Dashboard(SERVER)
    calls = Path(f"{stub}.calls")
    async with running(SshLog(board, sources.parse_remote("ssh://me@gpu-box/var/log/llama server.log"))):
        await until(calls.exists)
        await until(lambda: append(stub, "a") or text(board).startswith("a"))
        mode(stub, "die")
        await until(lambda: board.sources["log"].up is False)
        assert board.sources["log"].detail == "ssh has ended (0)"
        mode(stub, "refuse")
        await until(lambda: board.sources["log"].detail == "Permission denied (publickey).")
        mode(stub, "work")
        await until(lambda: append(stub, "b") or text(board).endswith("b"))
        assert board.sources["log"].up
    first, *others = calls.read_text().splitlines()  # noqa: ASYNC240
    assert first.endswith("""'--', 'me@gpu-box', "exec tail -n 200 -F -- '/var/log/llama server.log'"]""")
    assert others
    assert all("exec tail -n 0 -F" in call for call in others)  # nothing is told twice


async def test_a_log_that_is_quiet_is_there(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "QUIET_SECONDS", 0.2)
    board, calls = Dashboard(SERVER), Path(f"{stub}.calls")
    mode(stub, "refuse")
    async with running(SshLog(board, sources.parse_remote("ssh://gpu-box/l.log"))):
        await until(lambda: board.sources["log"].up is False)
        mode(stub, "work")
        await until(lambda: board.sources["log"].up)
    assert "tail -n 200" in calls.read_text().splitlines()[-1]  # noqa: ASYNC240 (nothing has been seen of it yet)


async def test_no_ssh_outlives_its_source(stub: Path) -> None:
    mode(stub, "work")
    board, others = Dashboard(SERVER), children()
    async with running(SshLog(board, sources.parse_remote("ssh://gpu-box/l.log"))):
        await until(lambda: append(stub, "a") or text(board).startswith("a"))
        (pid,) = children() - others
    await until(lambda: pid not in children())


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


@pytest.mark.parametrize(
    "url",
    [
        "ssh://-oProxyCommand=touch%20owned/x.log",
        "ssh://-x/x.log",
        "ssh://a@-x/x.log",
        "ssh://-a@host/x.log",
        "ssh://host;touch x/x.log",
        "ssh://$(touch x)/x.log",
        "ssh://`touch x`/x.log",
        "ssh://a b@host/x.log",
        "ssh://a:secret@host/x.log",
        "ssh://a@b@host/x.log",
        "ssh://host../x.log",
        "ssh://host:99999/x.log",
        "ssh://host:-1/x.log",
        "ssh://host%0a/x.log",
        "ssh:///x.log",
        "ssh://host",
        "ssh://host/",
        "ssh://host/dir/",
        "ssh://host/x.log?a=b",
        "ssh://host/x.log#a",
        "ssh://host/x%0atouch%20owned",
        "ssh://host/x%1b[2J",
        "ssh://host/x\ny",
        "ssh://[::1/x.log",
        "ssh:host/x.log",
    ],
)
def test_hostile_hosts_and_paths_are_refused(url: str) -> None:
    with pytest.raises(SourceError):
        sources.log_source(Dashboard(), url)


def test_other_urls_are_no_paths() -> None:
    with pytest.raises(SourceError, match="a path or ssh"):
        sources.log_source(Dashboard(), "http://host/x.log")


@given(
    st.text(
        st.characters(min_codepoint=0x20, exclude_categories=("C", "Z"), include_characters=" "),
        min_size=1,
        max_size=30,
    )
)
def test_a_path_is_one_word_for_the_shell_there(path: str) -> None:
    quoted = "".join(f"%{byte:02x}" for byte in f"/{path}x".encode())
    remote = sources.parse_remote(f"ssh://host/{quoted[3:]}")
    command = remote.command(0)
    assert command[-2] == "host"
    assert shlex.split(command[-1])[-1] == f"/{path}x"


def test_a_shell_reads_a_hostile_path_as_a_name(tmp_path: Path) -> None:
    name = "a'; touch owned; echo $(touch owned) `touch owned` -n \"x"
    (tmp_path / name).write_text("hello\n")
    url = "ssh://host" + "".join(f"%{byte:02x}" for byte in str(tmp_path / name).encode()).replace("%2f", "/")
    command = sources.parse_remote(url).command(5)[-1].replace(" -F", "")
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout == "hello\n"
    assert not (tmp_path / "owned").exists()


def test_user_and_port_are_left_to_ssh() -> None:
    command = sources.parse_remote("ssh://gpu-box/var/log/l.log").command(200)
    assert "-p" not in command
    assert command[-3:] == ["--", "gpu-box", "exec tail -n 200 -F -- /var/log/l.log"]
    command = sources.parse_remote("ssh://me@[fe80::1]:2222/l.log").command(0)
    assert command[command.index("-p") + 1] == "2222"
    assert command[-2] == "me@fe80::1"


# llama-server


def only_slot(board: Dashboard, number: int = 0) -> SlotView:
    (server,) = board.shown
    return server.slots[number]


async def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    board, port = Dashboard(), free_port()
    url = f"http://127.0.0.1:{port}"
    async with running(ServerSource(board, url, None, Pace(0.02))):
        await until(lambda: board.sources["server"].up is False)
        assert board.sources["server"].detail == "no connection"
        for tokens in ("hello " * 5, "hello " * 50):
            fake = FakeLlamaServer(slots=2, save_dir=tmp_path)
            async with fake.serve(port=port):
                await fake.complete(tokens, slot=1)
                held = fake.slots[1].tokens
                await until(lambda held=held: board.sources["server"].up and only_slot(board, 1).tokens == len(held))
            await until(lambda: board.sources["server"].up is False)
    assert [event.text for event in board.events][-2:] == ["server: is back", "server: no connection"]


async def test_a_server_that_sleeps_is_left_asleep(tmp_path: Path) -> None:
    fake = FakeLlamaServer(slots=1, save_dir=tmp_path)
    board = Dashboard()
    async with fake.serve() as url, running(ServerSource(board, url, None, Pace(0.01))):
        await until(lambda: fake.count("slots") > 2)
        fake.sleep()
        looked, asked = fake.count("slots"), fake.count("props")
        await until(lambda: fake.count("props") > asked + 10)
        assert fake.count("slots") <= looked + 1  # the one that was under way
        assert board.shown[0].sleeping


class Script:
    """An HTTP server whose answers are told, by path."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, str, str]] = []
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def says(self, path: str, body: object, status_code: int = 200) -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answers[path] = Answer(status_code, raw)

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        self.asked.append((method, target, headers.get("authorization", "")))
        return self.answers.get(target.partition("?")[0]) or Answer(404, b"{}")

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        server = HttpServer(self.handle, self.port, 5.0, 100)
        server.listen(True)
        try:
            yield
        finally:
            await server.close()


async def test_while_a_request_runs_slots_is_asked_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BUSY_SECONDS", 0.3)
    script = Script()
    script.says("/props", {"model_path": "/m/model.gguf", "is_sleeping": False})
    script.says("/slots", [{"id": 0, "is_processing": True, "id_task": 1, "n_prompt_tokens": 5, "n_ctx": 10}])

    def looks() -> int:
        return sum(target == "/slots" for _, target, _ in script.asked)

    async with script.serve(), running(ServerSource(Dashboard(), script.url, None, Pace(0.01))):
        await until(lambda: looks() == 1)
        started = asyncio.get_running_loop().time()
        await until(lambda: looks() == 4)
        assert asyncio.get_running_loop().time() - started >= 0.85


async def test_only_the_loaded_models_of_a_router_are_asked() -> None:
    script, board = Script(), Dashboard()
    script.says("/props", {"role": "router"})
    models = [("alpha", "loaded"), ("beta", "unloaded"), ("gamma", "sleeping"), ("delta", "loading")]
    script.says("/models", {"data": [{"id": name, "status": {"value": value}} for name, value in models]})
    script.says("/slots", [{"id": 0, "is_processing": False, "n_ctx": 10}])
    async with script.serve():
        await ServerSource(board, script.url, "secret", Pace()).once()
    # the router's /props is asked for the role too, so a model's is not told from it here
    asked = [target for _, target, _ in script.asked if target.startswith(("/slots", "/props?"))]
    assert asked == ["/props?model=alpha&autoload=false", "/slots?model=alpha&autoload=false"]
    assert {key for _, _, key in script.asked} == {"Bearer secret"}
    assert all(method == "GET" for method, _, _ in script.asked)
    assert [server.model for server in board.shown] == ["alpha"]


@pytest.mark.parametrize(
    ("code", "body", "detail"),
    [
        (401, {}, "401: the key is missing or wrong"),
        (503, {}, "HTTP 503"),
        (200, [1], "the answer is no object"),
        (200, b"nonsense", "JSONDecodeError"),
        (200, b"[" * 100_000, "the answer is no JSON of a server"),
        (302, {}, "HTTP 302"),
    ],
)
async def test_nonsense_from_a_server_is_a_fault_and_no_end(code: int, body: object, detail: str) -> None:
    script, board = Script(), Dashboard()
    script.says("/props", body, code)
    script.says("/slots", [])
    async with script.serve(), running(ServerSource(board, script.url, None, Pace(0.01))):
        await until(lambda: board.sources["server"].detail == detail)
        script.says("/props", {"model_path": 3})
        await until(lambda: board.sources["server"].up)


# the plugin


async def test_the_plugins_status_and_its_events() -> None:
    script, board = Script(), Dashboard()
    script.says("/slot-cache/status", status(slot_status(0, key=HARBOUR_KEY, session=HARBOUR)))
    event = {"kind": "save", "at": 1.0, "slot": 0, "session": HARBOUR, "tokens": 5}
    stream = b": hello\n\nevent: save\ndata: " + json.dumps(event).encode() + b"\n\ndata: nonsense\n\ndata: [1]\n\n"
    script.says("/slot-cache/events", stream)
    async with script.serve(), running(PluginSource(board, script.url, "sk-1", Pace(0.02))):
        await until(lambda: board.sources["proxy"].up and only_slot(board).session == HARBOUR)
        await until(lambda: any(entry.text == "slot 0: saved abababab: 5 tokens" for entry in board.events))
        await until(lambda: sum(target == "/slot-cache/events" for _, target, _ in script.asked) > 2)  # it has ended
    assert {key for _, _, key in script.asked} == {"Bearer sk-1"}


async def test_a_proxy_that_is_away_and_one_that_refuses() -> None:
    script, board = Script(), Dashboard()
    async with running(PluginSource(board, script.url, None, Pace(0.02))):
        await until(lambda: board.sources["proxy"].detail == "no connection")
        script.says("/slot-cache/status", {}, 401)
        async with script.serve():
            await until(lambda: board.sources["proxy"].detail.startswith("401"))
            script.says("/slot-cache/status", status(slot_status(0, key=HARBOUR_KEY, session=HARBOUR)))
            await until(lambda: board.sources["proxy"].up)
        await until(lambda: board.sources["proxy"].up is False)
    assert not board.streaming


async def test_server_sent_events_however_they_come() -> None:
    raw = b"data: a\ndata: b\r\n\r\nevent: save\ndata:c\nid: 3\n\n: comment\n\ndata: unfinished"
    for size in (1, 3, 1000):

        async def chunks(size: int = size) -> AsyncIterator[bytes]:
            for place in range(0, len(raw), size):
                yield raw[place : place + size]

        found = [event async for event in sources.server_sent(chunks())]
        assert found == [("message", "a\nb"), ("save", "c")]


def test_the_pause_between_attempts_grows_to_a_limit() -> None:
    waits = [sources.backoff(failures) for failures in range(60)]
    assert max(waits) <= 0.05 * 1.2
    assert waits[0] < 0.02 * 1.3
