"""The benchmark's pure parts, and its sections against a server that is made up."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from dataclasses import asdict, replace

import httpx
import pytest
import respx

from slot_cache.cli.bench import (
    QUICK,
    Bench,
    Plan,
    Report,
    describe_server,
    pinned_routes,
    summarise_load,
    summarise_shared,
    summarise_slots,
)
from slot_cache.cli.bench_report import print_switch
from slot_cache.cli.output import Output
from slot_cache.lab.documents import TOKENS_PER_SENTENCE
from slot_cache.lab.measure import (
    BenchError,
    Prompts,
    SwitchResult,
    SwitchRow,
    load_row,
    measure_load,
    measure_overhead,
    measure_prefill,
    measure_shared,
    measure_switch,
    tokens_per_sentence,
)
from slot_cache.lab.stats import Sample, ratio, sample


class FakeServer:
    """One slot per route that holds one session's prompt; with `saves` it remembers all of them. A token is a word.

    A prompt reuses the longest beginning that it shares with one that is remembered. Routes `managed*` tell an outcome.
    """

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves
        self.known: dict[str, dict[str, list[str]]] = {}
        self.actions: list[str] = []

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(self.answer), base_url="http://fake")

    async def answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0)  # lets the other sessions send theirs
        body = json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": body["content"].split()})
        if request.url.path.startswith("/slots/"):
            return self.slot_action(request.url.params["action"])
        return self.chat(body, request.headers.get("x-session-id", ""))

    def slot_action(self, action: str) -> httpx.Response:
        self.actions.append(action)
        names = {"save": ("n_saved", "n_written", "save_ms"), "restore": ("n_restored", "n_read", "restore_ms")}
        tokens, size, ms = names[action]
        return httpx.Response(200, json={tokens: 100, size: 2_000_000, "timings": {ms: 4.0}})

    def chat(self, body: dict, session: str) -> httpx.Response:
        words = [word for message in body["messages"] for word in message["content"].split()]
        slot = self.known.setdefault(body["model"], {})
        outcome = "resident" if session in slot else "donor" if slot else "cold"
        cached = min(max((common(known, words) for known in slot.values()), default=0), len(words) - 1)
        if not self.saves:
            slot.clear()
        slot[session] = words
        headers = {"x-slot-cache": outcome} if body["model"].startswith("managed") else {}
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if body.get("stream"):
            chunk = {"choices": [{"delta": {"content": "word"}}], "usage": usage}
            return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", headers=headers)
        answer = {"choices": [{"message": {"content": "word"}}], "usage": usage}
        return httpx.Response(200, json=answer, headers=headers)


def common(one: list[str], other: list[str]) -> int:
    """How many words two prompts begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def quiet(text: str) -> None:
    pass


PROMPTS = Prompts("test", 20)


def test_sample() -> None:
    assert sample([3.0, 1.0, 2.0]) == Sample(3, 2.0, 1.0, 3.0)
    assert sample([4.0, 1.0]) == Sample(2, 2.5, 1.0, 4.0)
    assert sample([]) == Sample(0, 0.0, 0.0, 0.0)


def test_ratio() -> None:
    assert ratio(1, 4) == 0.25
    assert ratio(1, 0) is None


def test_prompts_are_about_as_long_as_asked_and_differ() -> None:
    a, b = (PROMPTS.conversation(name, "route", 400) for name in "ab")
    assert len(a.messages[0]["content"].splitlines()) == 21
    assert a.session != b.session
    assert a.messages[0]["content"][:40] != b.messages[0]["content"][:40]


async def test_tokens_per_sentence_asks_the_server() -> None:
    async with FakeServer(saves=True).client() as client:
        assert 10 < await tokens_per_sentence(client) < 25
    refusing = httpx.MockTransport(lambda request: httpx.Response(404))
    async with httpx.AsyncClient(transport=refusing, base_url="http://fake") as client:
        assert await tokens_per_sentence(client) == TOKENS_PER_SENTENCE


@pytest.mark.parametrize(("saves", "low", "high"), [(True, 0.9, 1.0), (False, 0.0, 0.01)])
async def test_prefill_tells_whether_a_cache_came_back(saves: bool, low: float, high: float) -> None:
    async with FakeServer(saves=saves).client() as client:
        result = await measure_prefill(client, "managed", PROMPTS, [400, 800], 3, quiet)
    assert [row.cold_ms.count for row in result.rows] == [3, 3]
    assert result.rows[1].prompt_tokens > 1.5 * result.rows[0].prompt_tokens
    for row in result.rows:
        assert row.resident_reuse > 0.9
        assert low <= row.restored_reuse <= high


async def test_switch() -> None:
    server = FakeServer(saves=True)
    async with server.client() as client:
        result = await measure_switch(client, client, "managed", PROMPTS, [400], 4, quiet)
    (row,) = result.rows
    assert server.actions == ["save"] * 4 + ["restore"] * 4
    assert (row.tokens, row.bytes) == (100, 2_000_000)
    assert row.save_mb_per_second == row.restore_mb_per_second == 500
    assert row.switched_ms.count == row.resident_ms.count == 4
    assert row.added_ms == row.switched_ms.median - row.resident_ms.median
    assert row.switched_reuse > 0.9


async def test_switch_needs_a_server_that_saves() -> None:
    async with FakeServer(saves=True).client() as proxy:
        refusing = httpx.MockTransport(lambda request: httpx.Response(501, text="no save path"))
        async with httpx.AsyncClient(transport=refusing, base_url="http://fake") as server:
            with pytest.raises(BenchError, match="refused to save a slot"):
                await measure_switch(proxy, server, "managed", PROMPTS, [400], 2, quiet)


async def test_overhead() -> None:
    async with FakeServer(saves=False).client() as client:
        result = await measure_overhead(client, "managed", "pinned", PROMPTS, 5, quiet)
    assert result.pairs == result.with_ms.count == result.without_ms.count == 5


async def test_overhead_notices_that_the_session_did_not_stay() -> None:
    def forgetful(request: httpx.Request) -> httpx.Response:
        usage = {"prompt_tokens": 100, "completion_tokens": 1}
        return httpx.Response(200, json={"choices": [{"message": {"content": "a"}}], "usage": usage})

    async with httpx.AsyncClient(transport=httpx.MockTransport(forgetful), base_url="http://fake") as client:
        with pytest.raises(BenchError, match="did not stay"):
            await measure_overhead(client, "managed", "pinned", PROMPTS, 5, quiet)


async def test_load_with_and_without_saving() -> None:
    rows = []
    for saves in (True, False):
        async with FakeServer(saves=saves).client() as client:
            rounds = [await measure_load(client, ["managed"], replace(PROMPTS, label=name), 3, 2, 200) for name in "ab"]
            rows.append(load_row(f"saves: {saves}", rounds))
    assert [row.reuse for row in rows] == pytest.approx([1.0, 0.0], abs=0.02)
    assert rows[0].outcomes == {"cold": 1, "donor": 5, "resident": 6}
    assert rows[0].computed_tokens < rows[1].computed_tokens
    assert rows[0].ttft_ms.count == 6
    assert rows[0].wall_seconds.count == 2
    assert (rows[0].label, rows[0].sessions, rows[0].turns) == ("saves: True", 3, 2)


async def test_sessions_have_the_routes_by_turns() -> None:
    server = FakeServer(saves=False)
    async with server.client() as client:
        done = await measure_load(client, ["pinned-0", "pinned-1"], PROMPTS, 3, 2, 200)
    assert {route: list(slot) for route, slot in server.known.items()} == {
        "pinned-0": ["test-load-2"],
        "pinned-1": ["test-load-1"],
    }
    row = load_row("pinned", [done])
    assert row.outcomes == {}
    assert row.reuse == pytest.approx(1 / 3, abs=0.02)  # the session that has a slot alone


@pytest.mark.parametrize("saves", [True, False])
async def test_new_sessions_with_a_common_system_prompt(saves: bool) -> None:
    async with FakeServer(saves=saves).client() as client:
        row = await measure_shared(client, client, "managed", PROMPTS, 3, 400, "some label")
    assert row.label == "some label"
    assert 250 < row.prefix_tokens < 450
    assert row.ttft_ms.count == 3
    assert row.first_ms > 0
    assert row.outcomes == {"donor": 3}
    assert row.reuse == pytest.approx(1.0 if saves else 0.0, abs=0.02)
    assert row.least_reuse == pytest.approx(1.0 if saves else 0.0, abs=0.02)


async def test_a_common_system_prompt_where_the_server_counts_no_tokens() -> None:
    refusing = httpx.MockTransport(lambda request: httpx.Response(404))
    async with (
        FakeServer(saves=True).client() as proxy,
        httpx.AsyncClient(transport=refusing, base_url="http://fake") as server,
    ):
        row = await measure_shared(proxy, server, "plain", PROMPTS, 1, 300, "some label")
    assert row.prefix_tokens == 300
    assert row.reuse <= 1.0
    assert row.outcomes == {}


def test_each_pinned_route_is_a_slot() -> None:
    assert pinned_routes(3) == ("pinned-0", "pinned-1", "pinned-2")


async def test_report_as_text_and_as_json() -> None:
    stream = io.StringIO()
    output = Output(stream)
    async with FakeServer(saves=True).client() as client:
        bench = Bench(output, QUICK, PROMPTS, client, client)
        report = Report("some machine", "some server", QUICK)
        report.prefill = await bench.prefill()
        report.switch = await bench.switch()
        report.overhead = await bench.overhead()
        rounds = {label: [await bench.load(label, ["plain"], label)] for label in ("without", "with")}
        report.load = summarise_load(output, rounds)
        kinds = {"pinned": pinned_routes(4), "with the plugin": ("managed",)}
        several = {label: [await bench.more_than_slots(label, routes, label)] for label, routes in kinds.items()}
        report.slots = summarise_slots(output, 4, several)
        shared = {label: [await bench.shared(label, routes, label)] for label, routes in kinds.items()}
        report.shared = summarise_shared(output, shared)
    text = stream.getvalue()
    for part in (
        "TTFT by prompt length ...",
        "cold/restored",
        "500",
        "median difference",
        "1.00 x",
        "4 sessions at once, 3 turns each",
        "6 sessions at once in 4 slots, 3 turns each",
        "1 cold, 5 donor, 12 resident",
        "New sessions with a common system prompt of",
        "3 donor",
    ):
        assert part in text
    values = json.loads(json.dumps(asdict(report)))
    assert values["switch"]["rows"][0]["bytes"] == 2_000_000
    assert [row["label"] for row in values["load"]["rows"]] == ["without", "with"]
    assert values["slots"]["slots"] == 4
    assert [row["outcomes"] for row in values["slots"]["rows"]] == [{}, {"cold": 1, "donor": 5, "resident": 12}]
    assert [row["reuse"] for row in values["shared"]["rows"]] == pytest.approx([1.0, 1.0], abs=0.02)


def test_a_switch_that_brings_nothing_back_is_said() -> None:
    nothing = sample([])
    row = SwitchRow(100, 1000, nothing, nothing, 0.0, 0.0, nothing, nothing, 0.0, switched_reuse=0.1)
    stream = io.StringIO()
    print_switch(Output(stream), SwitchResult([row]))
    assert "only 0.10 of the prompt was reused after the switch" in stream.getvalue()


def test_running_server_is_described(respx_mock: respx.MockRouter) -> None:
    props = respx_mock.get("http://h:1/props")
    props.respond(json={"total_slots": 1, "model_path": "/models/a.gguf"})
    assert describe_server("http://h:1", "k") == (1, "http://h:1, a.gguf, 1 slot")
    assert props.calls.last.request.headers["authorization"] == "Bearer k"
    props.respond(401)
    with pytest.raises(BenchError, match="answered 401"):
        describe_server("http://h:1", None)
    props.mock(side_effect=httpx.ConnectError("refused"))
    with pytest.raises(BenchError, match="does not answer: refused"):
        describe_server("http://h:1", None)


def test_quick_plan_is_smaller() -> None:
    full = asdict(Plan())
    quick = asdict(replace(QUICK, load_sessions=1))
    assert all(max([quick[name]] if isinstance(quick[name], int) else quick[name]) < 5000 for name in quick)
    assert quick["overhead_pairs"] < full["overhead_pairs"]
