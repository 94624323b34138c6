"""A model whose restores are not reused: sliding-window attention on a server without --swa-full.

llama.cpp saves the context checkpoints, with which such restores are reused, since some build after b11434. That is the one
that `make llama-server` builds; on a newer one these tests have nothing to look at.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from router_server import ModelServer, find_binary

import house
from clients import Reply, Session, count_tokens
from relay import Relay
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import route

BINARY, WHY_NOT = find_binary()
pytestmark = [pytest.mark.real, pytest.mark.skipif(BINARY is None, reason=f"no real llama-server: {WHY_NOT}")]

STORY = "Of the ships that came in this week, and of what they carried, the keeper writes: " * 8
TOKENS = 16
TURNS = 6
WARNING = "this model's restores are not reused"


def conversations() -> list[Session]:
    return [Session(f"session {name}", "managed", [("system", f"{name} is who I am. {STORY}")]) for name in "AB"]


async def reuses_restores(server: ModelServer) -> bool:
    """Whether the server alone, without us, reuses what it restored, if the same prompt comes again and goes on."""
    async with open_client(server.base_url) as client:

        async def complete(prompt: str) -> int:
            body = {"prompt": prompt, "n_predict": 1, "temperature": 0, "cache_prompt": True, "id_slot": 0}
            cached = (await client.post("/completion", json=body)).json()["timings"]["cache_n"]
            assert isinstance(cached, int)
            return cached

        async def act(action: str, name: str) -> None:
            answer = await client.post(f"/slots/0?action={action}", json={"filename": name})
            assert answer.status_code == 200, answer.text

        await complete(STORY)
        await act("save", "probe.bin")
        await complete("Z" * 300)
        await act("restore", "probe.bin")
        (server.save_path / "probe.bin").unlink()
        return await complete(f"{STORY} and more") > len(STORY) / 2


async def talk(
    server: ModelServer, folder: Path, *, restarted: bool = False
) -> tuple[list[Reply], list[float], Relay, list[int], str]:
    """Two conversations that take turns over a proxy.

    Returns:
        each turn's answer, what each turn but the first two reused of its conversation's previous prompt, the relay, how many
        calls it had seen before each turn, and the proxy's log.
    """
    talking = conversations()
    previous: dict[str, int] = {}
    replies: list[Reply] = []
    reuse: list[float] = []
    marks: list[int] = []
    with Relay(server.base_url) as relay:
        entry = route("managed", relay.base_url, slot_cache={"save_path": str(server.save_path)})
        with house.proxy(folder, entry) as proxy:
            async with open_client(proxy.url, proxy.key) as client:
                for number in range(TURNS):
                    for session in talking:
                        marks.append(len(relay.calls))
                        prompt = count_tokens(session.prompt(("user", f"and on day {number}?")))
                        replies.append(await session.ask(client, f"and on day {number}?", tokens=TOKENS))
                        if number:
                            reuse.append(replies[-1].cached_tokens / previous[session.name])
                        previous[session.name] = prompt
                if restarted:
                    proxy.restart()
                    replies += [await session.ask(client, "and now?", tokens=TOKENS) for session in talking]
            log = proxy.log_path.read_text()
    return replies, reuse, relay, marks, log


async def test_a_model_whose_restores_are_not_reused_is_told_once_and_left_alone(
    tiny_models: Path, tmp_path: Path
) -> None:
    with ModelServer(tiny_models / "swa.gguf", tmp_path) as server:
        if await reuses_restores(server):
            pytest.skip("this llama-server saves context checkpoints: it reuses restores of sliding-window models")
        replies, reuse, relay, marks, log = await talk(server, tmp_path, restarted=True)
    outcomes = [reply.outcome for reply in replies]
    print(f"outcomes: {outcomes}; reuse: {[round(part, 3) for part in reuse]}")
    # after the first useless restore slots are rewound before they are saved; that does not help this kind of model either
    assert outcomes == ["cold"] * 2 + ["restored", "cold", "restored"] + ["cold"] * (2 * TURNS - 3)
    assert max(reuse) < 0.1
    assert log.count(WARNING) == 1
    assert "--swa-full" in next(line for line in log.splitlines() if WARNING in line)
    assert relay.count("restore") == 2
    after = relay.kinds(since=marks[5])  # all that came after the second useless restore was answered
    assert not {"save", "restore"} & set(after)
    assert after.count("request") == len(replies) - 5


async def test_with_swa_full_its_restores_are_reused(tiny_models: Path, tmp_path: Path) -> None:
    with ModelServer(tiny_models / "swa.gguf", tmp_path, arguments=("--swa-full",)) as server:
        assert await reuses_restores(server)
        replies, reuse, relay, _, log = await talk(server, tmp_path)
    print(f"reuse with --swa-full: {[round(part, 3) for part in reuse]}")
    assert [reply.outcome for reply in replies] == ["cold"] * 2 + ["restored"] * (2 * TURNS - 2)
    assert min(reuse) >= 0.99
    assert relay.count("restore") == 2 * TURNS - 2
    assert WARNING not in log
