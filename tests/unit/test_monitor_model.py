"""What the monitor makes of log lines, readings of /slots and the plugin's status."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitor_world import (
    FIXTURES,
    HARBOUR,
    HARBOUR_KEY,
    NOON,
    ORCHARD,
    ORCHARD_KEY,
    SERVER,
    cache,
    reading,
    recomputed,
    recorded,
    slot_status,
    status,
)
from pydantic import ValidationError

from slot_cache.monitor import logs
from slot_cache.monitor.model import MOST_EVENTS, MOST_HISTORY, MOST_SERVERS, MOST_SLOTS, MOST_TEXT, Dashboard, SlotView
from slot_cache.status import Status


def told_by_log(text: str, board: Dashboard | None = None, now: float = NOON) -> Dashboard:
    board = board or Dashboard(SERVER)
    reader = logs.LogReader()
    for line in text.split("\n"):
        for event in reader.read(line):
            board.log(event, now)
    return board


def texts(board: Dashboard, kind: str) -> list[str]:
    return [event.text for event in board.events if event.kind == kind]


def slot(board: Dashboard, number: int = 1) -> SlotView:
    (server,) = board.shown
    return server.slots[number]


def log_until(part: str) -> str:
    """The log of a request up to the first line that holds `part`."""
    lines = (FIXTURES / "log-lv5.txt").read_text().splitlines()
    return "\n".join(lines[: 1 + next(n for n, line in enumerate(lines) if part in line)])


def test_a_request_in_the_log() -> None:
    board = told_by_log(log_until("new slot, n_ctx"))
    assert slot(board, 0).state == "empty"
    board = told_by_log(log_until("task.n_tokens = 691"))
    assert (slot(board).state, slot(board).prompt_tokens, slot(board).context) == ("prefill", 691, 2048)
    board = told_by_log(log_until("n_gen = 8"))
    assert (slot(board).state, slot(board).decoded, slot(board).remaining) == ("decode", 8, 4)
    assert slot(board).text == "A fox and a crow are two of"
    assert slot(board).tokens == 699
    assert slot(board).decode_speed == pytest.approx(82.5, rel=0.05)  # what the server measures in the end
    board = told_by_log((FIXTURES / "log-lv5.txt").read_text())
    assert (slot(board).state, slot(board).tokens, slot(board).remaining) == ("idle", 702, None)
    assert (slot(board).prefill_speed, slot(board).decode_speed) == (267.60, 82.46)
    assert texts(board, "request") == ["slot 1: 691 tokens computed in 2.58 s (267.6/s) + 12 generated (82.5/s)"]
    assert [event.text for event in slot(board).history] == texts(board, "request")


def test_progress_in_the_log() -> None:
    lines = (FIXTURES / "log-two-slots.txt").read_text().splitlines()
    end = next(n for n, line in enumerate(lines) if "progress" in line)
    board = told_by_log("\n".join(lines[: end + 1]))
    assert (slot(board, 0).progress, slot(board, 0).prefill_speed) == (0.55, 91.37)
    assert slot(board, 0).tokens == 512
    board = told_by_log("\n".join(lines))
    assert [slot(board, n).tokens for n in (0, 1)] == [0, 70]
    assert "the server falls asleep" in texts(board, "server")
    assert any("Unable to restore" in text for text in texts(board, "warning"))


def test_each_batch_tells_the_speed() -> None:
    line = "slot   operator(): id  0 | task 7 | "
    board = told_by_log(
        f"0.01.000.000 I {line}new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = 1100\n"
        f"0.01.000.000 I {line}cached n_tokens = 100, memory_seq_rm [100, end)\n"
        f"0.03.000.000 I {line}cached n_tokens = 600, memory_seq_rm [600, end)"
    )
    assert (slot(board, 0).cached, slot(board, 0).prefill_speed) == (100, 250.0)
    assert slot(board, 0).progress == pytest.approx(600 / 1100)


def test_progress_of_old_builds_is_timed_here() -> None:
    board = Dashboard(SERVER)
    line = "slot update_slots: id  0 | task 7 | "
    told_by_log(
        f"{line}processing task\n{line}new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 4000", board
    )
    told_by_log(f"{line}kv cache rm [0, end)", board, NOON)
    told_by_log(f"{line}prompt processing progress, n_past = 2000, n_tokens = 2000, progress = 0.5", board, NOON + 4)
    assert (slot(board, 0).prefill_speed, slot(board, 0).progress) == (500.0, 0.5)


def test_a_routers_children_are_its_models() -> None:
    board = Dashboard(SERVER)
    board.slots(SERVER, "alpha", [reading(0)], NOON)
    lines = (FIXTURES / "log-router.txt").read_text().splitlines()
    until = next(n for n, line in enumerate(lines) if "stop processing" in line)
    told_by_log("\n".join(lines[: until + 1]), board)
    assert [server.model for server in board.shown] == ["alpha"]
    assert slot(board, 0).tokens == 45
    told_by_log("\n".join(lines[until + 1 :]), board)
    assert board.servers[(SERVER, "alpha")].slots == {}
    assert "alpha is unloaded" in texts(board, "server")


def test_slots_while_one_prefills_and_one_decodes() -> None:
    board = Dashboard()
    board.slots(SERVER, None, recorded("slots_while_prefilling"), NOON)
    assert [(view.state, view.tokens) for view in board.shown[0].slots.values()] == [("idle", 138), ("prefill", 2048)]
    assert slot(board).progress is None  # /slots does not tell how long the prompt is
    board.slots(SERVER, None, recorded("slots_while_decoding"), NOON + 1)
    assert (slot(board).state, slot(board).decoded, slot(board).remaining) == ("decode", 102, 198)
    board.slots(SERVER, None, recorded("slots_never_used"), NOON + 2)
    assert [view.state for view in board.shown[0].slots.values()] == ["empty", "empty"]


def test_speeds_from_slots() -> None:
    board = Dashboard()
    for second, tokens in enumerate((0, 300, 580, 900)):
        board.slots(SERVER, None, [reading(0, tokens=tokens, busy=True, task=3)], NOON + second)
    assert slot(board, 0).prefill_speed == 300.0
    for second, decoded in enumerate((10, 50, 90)):
        board.slots(
            SERVER,
            None,
            [reading(0, tokens=1000 + decoded, busy=True, task=3, decoded=decoded, remain=500)],
            NOON + 5 + second,
        )
    assert slot(board, 0).decode_speed == 40.0
    assert slot(board, 0).prefill_speed == 300.0
    assert slot(board, 0).prompt_tokens == 1000
    board.slots(SERVER, None, [reading(0, tokens=1200, task=3)], NOON + 9)
    assert (slot(board, 0).state, slot(board, 0).decode_speed) == ("idle", 40.0)  # the last one stays
    board.slots(SERVER, None, [reading(0, tokens=10, busy=True, task=4)], NOON + 10)
    assert (slot(board, 0).prefill_speed, slot(board, 0).decode_speed) == (None, None)  # another request


def test_the_log_is_believed_before_a_reading_that_was_under_way() -> None:
    board = told_by_log((FIXTURES / "log-lv5.txt").read_text())
    late = reading(1, tokens=695, busy=True, task=0, decoded=4, remain=8)
    board.slots(SERVER, None, [reading(0), late], NOON + 0.5)
    assert slot(board).state == "idle"
    board.slots(SERVER, None, [reading(0), late], NOON + 5)  # but a log that is silent is not believed for ever
    assert slot(board).state == "decode"


def test_the_clocks_of_the_server_and_of_the_monitor_are_kept_apart() -> None:
    board = told_by_log(log_until("memory_seq_rm"))
    for second, tokens in ((2, 256), (3, 512)):
        board.slots(SERVER, None, [reading(0), reading(1, tokens=tokens, busy=True)], NOON + second)
    assert slot(board).prefill_speed == 256.0
    assert slot(board).progress == pytest.approx(512 / 691)  # of the prompt that the log has told
    assert slot(board).decode_speed is None
    told_by_log(
        "0.12.446.863 I slot print_timing: id  1 | task 0 | prompt processing, n_tokens = 512, progress = 0.74, "
        "t = 1.00 s / 512.00 tokens per second",
        board,
        NOON + 3.5,
    )
    board.slots(SERVER, None, [reading(0), reading(1, tokens=640, busy=True)], NOON + 6)
    assert slot(board).prefill_speed == 512.0  # the server itself has measured it


def test_a_server_that_sleeps_has_empty_slots() -> None:
    board = Dashboard()
    board.slots(SERVER, None, [reading(0, tokens=100)], NOON)
    board.props(SERVER, None, "model.gguf", sleeping=True)
    assert (slot(board, 0).state, slot(board, 0).tokens) == ("empty", 0)
    assert board.shown[0].sleeping


def test_the_status_tells_who_sits_there() -> None:
    board = Dashboard(SERVER)
    board.slots("http://localhost:8080", None, [reading(0, tokens=777), reading(1)], NOON)
    told = slot_status(
        0,
        key=HARBOUR_KEY,
        session=HARBOUR,
        messages=5,
        tokens=700,
        dirty=True,
        score=2.5,
        next_to_go=True,
        last_outcome="restored",
    )
    board.status(status(told, slot_status(1, state="empty")), NOON + 1)
    found = slot(board, 0)
    assert (found.session, found.messages, found.outcome, found.score) == (HARBOUR, 5, "restored", 2.5)
    assert (found.dirty, found.next_to_go) == (True, True)
    assert found.tokens == 777  # the server knows better
    assert slot(board, 1).score is None
    board.status(status({**told, "state": "switch"}), NOON + 2)
    assert found.state == "switch"
    board.status(status({**told, "tokens": 800}), NOON + 60)  # the server has told nothing for a minute
    assert found.tokens == 800
    assert board.totals is not None
    assert (board.totals.reused, board.totals.requests["cold"]) == (8000, 2)


def test_who_has_a_slot_now() -> None:
    board = Dashboard()
    told = slot_status(0, key=HARBOUR_KEY, session=HARBOUR, state="prefill")
    for holder, seconds, shown in ((ORCHARD_KEY, 0.5, ORCHARD_KEY), (None, 0.5, "new"), (None, None, None)):
        board.status(status({**told, "holder": holder, "holder_seconds": seconds}), NOON)
        assert slot(board, 0).holder == shown
        assert slot(board, 0).session == HARBOUR


def test_a_server_that_the_proxy_knows_by_another_address_is_the_same() -> None:
    board = Dashboard()
    board.slots(SERVER, None, [reading(0, tokens=777)], NOON)
    board.status(status(slot_status(0, session=HARBOUR, key=HARBOUR_KEY), server={"server": "http://llama:8080"}), NOON)
    assert slot(board, 0).session == HARBOUR


@pytest.mark.parametrize("address", ["", "http://x:abc", "http://[", "\0", "ftp://x", "http://user:secret@h:1"])
def test_an_address_may_be_nonsense(address: str) -> None:
    board = Dashboard()
    board.slots(SERVER, None, [reading(0, tokens=777)], NOON)
    told = status(slot_status(0), server={"server": address, "model": "m"})
    board.status(told, NOON)
    board.status({**told, "servers": told["servers"] * 2}, NOON)
    board.plugin_event({"kind": "save", "server": address, "slot": 0}, NOON)
    assert not any("secret" in server.address for server in board.servers.values())


def test_what_changed_between_two_statuses() -> None:
    board = Dashboard()
    first = slot_status(0, key=HARBOUR_KEY, session=HARBOUR, requests=1, last_outcome="cold")
    board.status(status(first, caches=(cache(HARBOUR_KEY), cache(ORCHARD_KEY))), NOON)
    assert list(board.events) == []  # how it is found is no event
    second = slot_status(0, key=ORCHARD_KEY, session=ORCHARD, requests=2, last_outcome="restored")
    new = cache("local-12345678_" + "ef" * 16, created=NOON + 1, tokens=500, bytes=11_500_000)
    board.status(
        status(
            second,
            caches=(cache(ORCHARD_KEY, uses=1), new),
            totals={"failures": {"failed saves": 1}},
            recomputed=[recomputed()],
            now=NOON + 2,
        ),
        NOON + 2,
    )
    assert texts(board, "switch") == ["slot 0: abababab -> cdcdcdcd"]
    assert texts(board, "request") == ["slot 0: cdcdcdcd restored"]
    assert texts(board, "restore") == ["restored cdcdcdcd: 1,092 tokens, 25.0 MB"]
    assert texts(board, "save") == ["saved efefefef: 500 tokens, 11.5 MB"]
    assert texts(board, "evict") == ["deleted abababab: 25.0 MB"]
    assert texts(board, "warning") == ["failed saves: 1"]
    assert texts(board, "why") == ["abababab: message 3 (user) was edited; about 650 tokens again, 2.2 s"]
    seen = len(board.events)
    board.status(
        status(second, caches=(cache(ORCHARD_KEY, uses=1), new), recomputed=[recomputed()], now=NOON + 3), NOON + 3
    )
    assert len(board.events) == seen
    board.status(status(second, worker=1, totals={"failures": {"failed saves": 9}}), NOON + 4)
    assert texts(board, "warning") == ["failed saves: 1"]  # another worker's counts


def test_events_that_the_plugin_tells() -> None:
    board = Dashboard()
    board.streaming = True
    board.status(status(slot_status(0, key=HARBOUR_KEY, session=HARBOUR)), NOON)
    common = {"server": SERVER, "slot": 0, "key": HARBOUR_KEY, "session": HARBOUR, "at": NOON + 1}
    amounts = {"tokens": 1092, "bytes": 25_000_000, "seconds": 0.0123}
    request = {"outcome": "cold", "reused": 8, "computed": 701}
    for told in (
        {"kind": "ask"},
        {"kind": "save", **amounts},
        {"kind": "restore", **amounts},
        {"kind": "switch", "seconds": 0.031},
        {"kind": "request", **request},
        {"kind": "request", **request, "cause": "edited", "words": "message 3 (user) was edited"},
        {"kind": "evict", "bytes": 25_000_000},
        {"kind": "fault", "words": "save failed: the disk is full"},
        {"kind": "restart"},
        {"kind": "of a later version"},
    ):
        board.plugin_event({**common, **told}, NOON + 1)
    assert [(event.kind, event.text) for event in board.events] == [
        ("save", "slot 0: saved abababab: 1,092 tokens, 25.0 MB, 12.3 ms"),
        ("restore", "slot 0: restored abababab: 1,092 tokens, 25.0 MB, 12.3 ms"),
        ("switch", "slot 0: abababab, waited 31.0 ms"),
        ("miss", "slot 0: abababab cold, reused 8, computed 701"),
        ("why", "slot 0: abababab cold, reused 8, computed 701; message 3 (user) was edited"),
        ("evict", "deleted abababab: 25.0 MB"),
        ("warning", "save failed: the disk is full"),
        ("server", f"{SERVER} was started again"),
    ]
    assert len(slot(board, 0).history) == 5
    # what the status shows is not told twice
    board.status(
        status(slot_status(0, key=ORCHARD_KEY, requests=1, last_outcome="cold"), recomputed=[recomputed(at=NOON + 9)]),
        NOON,
    )
    assert len(board.events) == 8


def test_sources_come_and_go() -> None:
    board = Dashboard()
    board.source("server", None, "", NOON)
    board.source("server", True, "", NOON)
    assert list(board.events) == []
    for _ in range(3):
        board.source("server", False, "no connection", NOON)
    board.source("server", True, "", NOON)
    assert [event.text for event in board.events] == ["server: no connection", "server: is back"]


def test_it_is_bounded() -> None:
    board = Dashboard()
    for number in range(1000):
        board.slots(f"http://h{number}:1", None, [reading(n) for n in range(2)], NOON)
        board.log(logs.Warned(None, None, "W", "x" * 10_000), NOON)
        board.log(logs.ChildStarted(None, None, f"m{number}", number), NOON)
        board.log(logs.Token(None, None, 0, 1, number, 5, "word " * 20), NOON)
        board.log(logs.Released(number, None, number, 1, 5, False), NOON)
    board.slots(SERVER, None, [reading(n) for n in range(5000)], NOON)
    view = SlotView(0)
    for number in range(1000):
        board.happened(NOON, "request", str(number), view)
    assert len(board.servers) <= MOST_SERVERS
    assert len(board.events) == MOST_EVENTS
    assert len(view.history) == MOST_HISTORY
    assert max(len(event.text) for event in board.events) <= 400
    for server in board.servers.values():
        assert len(server.slots) <= MOST_SLOTS
        assert all(len(entry.text) <= MOST_TEXT for entry in server.slots.values())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(status())), inner, max_size=4),
    max_leaves=12,
)


@given(st.data())
def test_nonsense_in_a_status_is_left_out(data: st.DataObject) -> None:
    """A good status with one value replaced, anywhere in it."""
    told: Any = json.loads(json.dumps(status(slot_status(0), caches=(cache(HARBOUR_KEY),), recomputed=[recomputed()])))
    place = told
    while True:
        name = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[name], (dict, list)) or not place[name] or data.draw(st.booleans()):
            place[name] = data.draw(JSON)
            break
        place = place[name]
    board = Dashboard()
    board.status(status(slot_status(0)), NOON)
    board.status(told, NOON + 1)
    board.slots(SERVER, None, [told, data.draw(JSON)], NOON)
    board.plugin_event(told | {"kind": data.draw(st.sampled_from(["save", "request", "switch", "fault", 3]))}, NOON)


def test_the_names_are_those_of_the_plugins_models() -> None:
    """Every field of these tests' statuses is one of the plugin's, and of its type; the plugin may tell more."""
    told = status(slot_status(0, score=1.0), caches=(cache(HARBOUR_KEY),), recomputed=[recomputed()])
    try:
        Status.model_validate(told)
    except ValidationError as error:
        assert {entry["type"] for entry in error.errors()} == {"missing"}
