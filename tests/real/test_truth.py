"""What becomes of conversations when servers, proxies, files and models do what they should not: with real programs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

import house
from clients import Session, count_tokens
from slot_cache.lab.chat import open_client
from slot_cache.lab.configs import route
from slot_cache.lab.proxy import LiteLLMProxy
from slot_cache.lab.server import EmbeddedServer
from talker import build_talker

pytestmark = pytest.mark.real

TOKENS = 24
LONG = "Of the ships that came in this week, and of what they carried, the keeper writes: "


def sessions(names: str, of: str = "managed") -> list[Session]:
    return [Session(f"session {name}", of, [("system", f"{name} is who I am. {LONG * 8}")]) for name in names]


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what another process does, which tells nobody."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.05)


def saved_files(folder: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_size, file.stat().st_mtime_ns) for file in (folder / "saved").glob("*.bin")}


class Talk:
    """Conversations over one proxy, what each reused of its previous prompt, and what a server without a cache says."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.answers: dict[str, str] = {}
        self._previous: dict[str, int] = {}

    async def turn(self, session: Session, text: str = "and then?", *, stream: bool = False) -> float:
        """One turn. Returns the reused part of the previous prompt; 1.0 for a first turn."""
        prompt = session.prompt(("user", text))
        reply = await session.ask(self.client, text, tokens=TOKENS, stream=stream)
        self.answers[prompt] = reply.text
        previous = self._previous.get(session.name)
        self._previous[session.name] = count_tokens(prompt)
        return 1.0 if previous is None else reply.cached_tokens / previous

    async def at_once(self, talking: list[Session], turns: int = 1) -> float:
        """Turns of all sessions at once. Returns the lowest reuse."""

        async def one(number: int, session: Session) -> float:
            return min([await self.turn(session, stream=(number + n) % 2 == 0) for n in range(turns)])

        return min(await asyncio.gather(*(one(number, session) for number, session in enumerate(talking))))

    async def are_right(self, server: EmbeddedServer) -> None:
        """Every answer was, to the last token, that of a server that computes all of the prompt."""
        assert self.answers == await house.answers_without_cache(server.base_url, self.answers, TOKENS)


@pytest.fixture
def server(talker: Path, tmp_path: Path) -> Iterator[EmbeddedServer]:
    with house.server(talker, tmp_path, n_ubatch=1) as running:
        yield running


@contextlib.asynccontextmanager
async def talk(proxy: LiteLLMProxy) -> AsyncIterator[Talk]:
    async with open_client(proxy.url, proxy.key) as client:
        yield Talk(client)


def managed(server: EmbeddedServer, tmp_path: Path, **options: object) -> dict[str, object]:
    return route("managed", server.base_url, slot_cache={"save_path": str(tmp_path / "saved"), **options})


async def test_a_killed_server_finds_every_conversation_again(server: EmbeddedServer, tmp_path: Path) -> None:
    talking = sessions("ABC")
    with house.proxy(tmp_path, managed(server, tmp_path, save_idle_seconds=1)) as proxy:
        async with talk(proxy) as conversation:
            await conversation.at_once(talking, 2)
            before = time.time_ns()
            await conversation.turn(talking[0])
            await until(lambda: any(when > before for _, when in saved_files(tmp_path).values()))
            server.kill()
            server.start()
            reuse = [await conversation.turn(session) for session in talking]
            await conversation.are_right(server)
    print(f"reuse after kill -9 with idle saving: {reuse}")
    assert min(reuse) >= 0.95


async def test_what_was_saved_is_found_after_a_kill_without_idle_saving(server: EmbeddedServer, tmp_path: Path) -> None:
    talking = sessions("ABC")
    with house.proxy(tmp_path, managed(server, tmp_path)) as proxy:
        async with talk(proxy) as conversation:
            for session in talking:
                await conversation.turn(session)
            server.kill()
            server.start()
            reuse = [await conversation.turn(session) for session in talking]
            await conversation.are_right(server)
    print(f"reuse after kill -9 without idle saving, the last one was not saved: {reuse}")
    assert min(reuse[:2]) >= 0.95


async def test_a_restarted_proxy_goes_on_where_it_stopped(server: EmbeddedServer, tmp_path: Path) -> None:
    talking = sessions("ABC")
    with house.proxy(tmp_path, managed(server, tmp_path)) as proxy:
        async with talk(proxy) as conversation:
            for session in talking:
                await conversation.turn(session)
        await asyncio.sleep(0.2)  # the look after the last request; a kill within it costs what is not written yet
        proxy.restart()
        async with talk(proxy) as again:
            again._previous, again.answers = conversation._previous, conversation.answers
            last = await talking[2].ask(again.client, "and then?", tokens=TOKENS, remember=False)
            reuse = [await again.turn(session) for session in talking]
            await again.are_right(server)
    assert last.outcome == "resident"
    print(f"reuse after a restart of the proxy: {reuse}")
    assert min(reuse) >= 0.99


async def test_two_workers_share_a_slot(server: EmbeddedServer, tmp_path: Path) -> None:
    config = {
        "model_list": [managed(server, tmp_path)],
        "litellm_settings": {"callbacks": "slot_cache.proxy_handler_instance", "num_retries": 0},
    }
    with LiteLLMProxy(config, num_workers=2, folder=tmp_path, extra_env={"XDG_STATE_HOME": str(tmp_path)}) as proxy:
        async with talk(proxy) as conversation:
            # a connection each time, so that both workers get requests
            conversation.client = httpx.AsyncClient(
                base_url=proxy.url,
                headers={"Authorization": f"Bearer {proxy.key}"},
                timeout=120,
                limits=httpx.Limits(max_keepalive_connections=0),
            )
            async with conversation.client:
                reuse = await conversation.at_once(sessions("ABCD"), 5)
            await conversation.are_right(server)
        workers = {line.split("pid=")[1] for line in proxy.log_path.read_text().splitlines() if "pid=" in line}
    print(f"lowest reuse with two workers: {reuse} {workers or ''}")
    assert reuse >= 0.99


async def test_a_stranger_s_request_costs_what_was_not_saved_and_no_file(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    mine, other = sessions("AB")
    with house.proxy(tmp_path, managed(server, tmp_path)) as proxy:
        async with talk(proxy) as conversation, open_client(server.base_url) as stranger:
            await conversation.turn(mine)
            await conversation.turn(other)  # saves mine
            reuse = await conversation.turn(mine)
            before = saved_files(tmp_path)
            answer = await stranger.post("/completion", json={"prompt": "z" * 700, "n_predict": 8, "id_slot": 0})
            assert answer.status_code == 200
            again = await conversation.turn(mine)
            assert {name: before[name] for name in before} == {
                name: found for name, found in saved_files(tmp_path).items() if name in before
            }
            await conversation.turn(other)
            await conversation.turn(mine)
            await conversation.are_right(server)
    print(f"reuse before and after a stranger's request: {reuse} {again}")
    assert reuse >= 0.99
    assert again >= 0.9  # the turn before the stranger was not saved


async def test_a_server_with_its_own_defaults_leaves_no_empty_file(talker: Path, tmp_path: Path) -> None:
    talking = sessions("ABC")
    options = {"slots": 4, "kv_unified": True, "cache_idle_slots": True, "cache_ram_mib": 64, "n_ubatch": 1}
    with (
        house.server(talker, tmp_path, **options) as server,
        house.proxy(tmp_path, managed(server, tmp_path, save_idle_seconds=1)) as proxy,
    ):
        async with talk(proxy) as conversation, open_client(server.base_url) as stranger:
            sizes: dict[str, int] = {}
            for _ in range(3):
                for session in talking:
                    await conversation.turn(session)
                    # somebody else starts a task in another slot: ours is emptied
                    await stranger.post("/completion", json={"prompt": "y" * 90, "n_predict": 4, "id_slot": 1})
                    found = {name: size for name, (size, _) in saved_files(tmp_path).items()}
                    assert all(size >= sizes.get(name, 0) for name, size in found.items()), "a good save was replaced"
                    assert all(size > 1000 for size in found.values()), "an empty file was left"
                    sizes = found
            await conversation.are_right(server)


DAMAGES: dict[str, Callable[[Path, Path], None]] = {
    "truncated": lambda file, other: os.truncate(file, file.stat().st_size // 2),
    "emptied": lambda file, other: os.truncate(file, 0),
    "a bit flipped in its head": lambda file, other: _flip(file, 40),
    "a bit flipped in its tail": lambda file, other: _flip(file, -40),
    "another session's": lambda file, other: _swap(file, other),
}


def _flip(file: Path, where: int) -> None:
    data = bytearray(file.read_bytes())
    data[where] ^= 4
    file.write_bytes(data)


def _swap(file: Path, other: Path) -> None:
    spare = file.with_suffix(".spare")
    file.rename(spare)
    shutil.copyfile(other, file)
    shutil.copyfile(spare, other)
    spare.unlink()


async def test_a_damaged_file_is_never_restored(server: EmbeddedServer, tmp_path: Path) -> None:
    with house.proxy(tmp_path, managed(server, tmp_path)) as proxy:
        async with talk(proxy) as conversation:
            for names, (what, damage) in zip(("ABC", "DEF", "GHI", "JKL", "MNO"), DAMAGES.items(), strict=True):
                hurt, other, third = sessions(names)
                files: list[Path] = []
                for session in (hurt, other, third):
                    before = set(saved_files(tmp_path))
                    await conversation.turn(session)
                    files += [tmp_path / "saved" / file for file in set(saved_files(tmp_path)) - before]
                damage(files[-2], files[-1])
                cold = await hurt.ask(conversation.client, "and then?", tokens=TOKENS, remember=False)
                assert cold.outcome == "cold", what
                await conversation.turn(hurt)
                await conversation.turn(third)
                assert await conversation.turn(hurt) >= 0.99, f"{what}: it was not saved anew"
            await conversation.are_right(server)
        log = proxy.log_path.read_text()
    assert log.count("the file is not what was saved") >= len(DAMAGES)
    assert "restore failed" not in log


async def test_a_file_of_another_model_is_never_restored(tmp_path: Path) -> None:
    model = build_talker(tmp_path / "model.gguf")
    build_talker(tmp_path / "other.gguf", seed=8)
    talking = sessions("ABC")
    with (
        house.server(model, tmp_path, n_ubatch=1) as server,
        house.proxy(tmp_path, managed(server, tmp_path)) as proxy,
    ):
        async with talk(proxy) as conversation:
            for session in talking * 2:
                await conversation.turn(session)
            await conversation.are_right(server)
        server.stop()
        shutil.copyfile(tmp_path / "other.gguf", model)  # the same path, the same shape, other weights
        server.start()
        async with talk(proxy) as conversation:
            outcomes = []
            for session in talking * 2:
                prompt = session.prompt(("user", "and then?"))
                reply = await session.ask(conversation.client, "and then?", tokens=TOKENS)
                conversation.answers[prompt] = reply.text
                outcomes.append(reply.outcome)
            await conversation.are_right(server)
        log = proxy.log_path.read_text()
    assert outcomes == ["cold"] * 3 + ["restored"] * 3
    assert log.count("is another model's and is not restored") == 1
