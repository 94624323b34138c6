"""The laboratory itself: programs that start, answer, and end when they should."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from slot_cache.lab import configs
from slot_cache.lab.chat import ChatError, Conversation, Turn, open_client
from slot_cache.lab.process import StartError
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer, ServerOptions

pytestmark = pytest.mark.real

Server = Callable[..., EmbeddedServer]
Proxy = Callable[..., LiteLLMProxy]


def ended(pid: int, seconds: float = 10.0) -> bool:
    """Wait until the process is gone or a zombie."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def processes_of_group(pgid: int) -> list[int]:
    """Ids of the running processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == pgid and state != "Z":
            found.append(int(path.parent.name))
    return found


async def ask(url: str, key: str | None = None, *, model: str = "smol", stream: bool = True) -> list[Turn]:
    conversation, turns = Conversation("a-session", "You are a test.", model), []
    for text in ("one", "two"):
        # a connection for each: llama-server now and then closes one that it said it keeps
        async with open_client(url, key) as client:
            turns.append(await conversation.turn(client, text, 8, stream))
    return turns


async def test_server_answers_and_reports_reuse(llama_server: Server) -> None:
    server = llama_server()
    for stream in (True, False):
        first, second = await ask(server.base_url, stream=stream)
        assert second.prompt_tokens > first.prompt_tokens
        assert second.cached_tokens >= first.prompt_tokens
        assert first.completion_tokens == 8
        assert 0 < first.ttft_seconds <= first.total_seconds
        assert first.outcome is None


async def test_turn_that_is_not_remembered(llama_server: Server) -> None:
    server = llama_server()
    conversation = Conversation("a-session", "You are a test.")
    async with open_client(server.base_url) as client:
        turns = [await conversation.turn(client, "one", 1, stream=False, remember=False) for _ in range(2)]
    assert turns[0].prompt_tokens == turns[1].prompt_tokens
    assert conversation.messages == [{"role": "system", "content": "You are a test."}]


async def test_server_is_killed_and_starts_again_on_its_port(llama_server: Server) -> None:
    server = llama_server()
    url, pid = server.base_url, server.pid
    assert pid is not None
    await ask(url)
    server.kill()
    assert not server.running
    with pytest.raises(httpx.ConnectError):
        await ask(url)
    server.start()
    assert server.base_url == url
    assert server.pid != pid
    turns = await ask(url)
    assert turns[0].cached_tokens == 0


def test_saved_slots_outlive_the_server(llama_server: Server, tmp_path: Path) -> None:
    server = llama_server(slots=2)
    body = {"prompt": "hello", "n_predict": 4, "id_slot": 1}
    with httpx.Client(base_url=server.base_url, trust_env=False) as client:
        client.post("/completion", json=body).raise_for_status()
        saved = client.post("/slots/1?action=save", json={"filename": "a.bin"}).json()["n_saved"]
        assert (tmp_path / "saved" / "a.bin").is_file()
    server.stop()
    server.start()
    with httpx.Client(base_url=server.base_url, trust_env=False) as client:
        assert client.post("/slots/0?action=restore", json={"filename": "a.bin"}).json()["n_restored"] == saved


def test_options_reach_the_server(llama_server: Server) -> None:
    server = llama_server(slots=3, ctx=3072, api_keys=("k1", "k2"), endpoint_slots=False)
    with httpx.Client(base_url=server.base_url, trust_env=False) as client:
        assert client.get("/slots").status_code == 401
        client.headers["Authorization"] = "Bearer k2"
        assert client.get("/slots").status_code == 501
        props = client.get("/props").json()
    assert props["total_slots"] == 3
    assert props["default_generation_settings"]["n_ctx"] == 1024


def test_server_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    server = EmbeddedServer(ServerOptions(model=tmp_path / "absent.gguf"), folder=tmp_path)
    with pytest.raises(StartError, match=r"absent\.gguf"):
        server.start(timeout=30)
    assert not server.running


def test_server_ends_when_its_parent_is_killed(tiny_models: Path, tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from slot_cache.lab.server import EmbeddedServer, ServerOptions\n"
        "server = EmbeddedServer(ServerOptions(model=sys.argv[1]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tiny_models / "dense.gguf")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    assert ended(pid)


async def test_proxy_answers_and_ends_with_its_workers(llama_server: Server, litellm_proxy: Proxy) -> None:
    server = llama_server()
    proxy = litellm_proxy(configs.config(configs.route("smol", server.base_url)), num_workers=2)
    for stream in (True, False):
        _, second = await ask(proxy.url, proxy.key, stream=stream)
        assert second.cached_tokens > 0
    with pytest.raises(ChatError):
        await ask(proxy.url, "sk-wrong")
    pid = proxy.pid
    assert pid is not None
    assert len(processes_of_group(pid)) >= 4  # guard, supervisor, two workers
    proxy.stop()
    assert processes_of_group(pid) == []


def test_proxy_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from slot_cache.lab.proxy import LiteLLMProxy\n"
        "proxy = LiteLLMProxy({'model_list': []})\n"
        "proxy.start()\n"
        "print(proxy.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert processes_of_group(group)
        parent.kill()
    deadline = time.monotonic() + 15
    while processes_of_group(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of_group(group) == []


def test_proxy_that_cannot_start_shows_its_log(tmp_path: Path) -> None:
    config = {"model_list": [], "litellm_settings": {"callbacks": "no_such_module_here.instance"}}
    proxy = LiteLLMProxy(config, folder=tmp_path)
    with pytest.raises(StartError, match="no_such_module_here"):
        proxy.start(timeout=60)
    assert not proxy.running


def test_interrupted_demo_leaves_nothing_running(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    code = (  # who runs the tests in the background may ignore SIGINT, and so would its children
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('slot_cache', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "demo", "--serve"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if line.startswith("Ctrl-C"):
            break
    children = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == demo.pid]
    assert len(children) == 2
    demo.send_signal(signal.SIGINT)
    assert demo.wait(timeout=30) == 130
    demo.stdout.close()
    assert all(ended(pid) for pid in children)
    assert list(tmp_path.iterdir()) == []


def _parent(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
