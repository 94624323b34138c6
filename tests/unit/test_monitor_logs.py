"""What the monitor reads in llama-server's log: real lines of new builds, lines of old ones, and whatever else comes."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.monitor import logs
from slot_cache.monitor.text import clean, without_escapes

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "llama-server"


def read(text: str) -> list[logs.Line]:
    reader = logs.LogReader()
    return [event for line in text.split("\n") for event in reader.read(line)]


def fixture(name: str) -> list[logs.Line]:
    return read((FIXTURES / name).read_bytes().decode("utf-8", "surrogateescape").removesuffix("\n"))


def of_slot(events: list[logs.Line]) -> list[logs.Line]:
    return [event for event in events if isinstance(event, logs.OfSlot) and not isinstance(event, logs.SlotOther)]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        (
            "log-lv4.txt",
            {"Lifecycle": 3, "Other": 172, "Warned": 1, "NewSlot": 2, "Foreign": 14, "AllIdle": 2, "Chosen": 1}
            | {"SlotOther": 6, "Started": 1, "Prompt": 1, "Cached": 1, "Timing": 3, "Released": 1},
        ),
        (
            "log-lv5.txt",
            {"Lifecycle": 3, "Other": 192, "Warned": 1, "NewSlot": 2, "Foreign": 3, "AllIdle": 2, "Chosen": 1}
            | {"SlotOther": 23, "Started": 1, "Prompt": 1, "Cached": 1, "Timing": 3, "Released": 1, "Token": 12},
        ),
    ],
)
def test_every_line_of_a_real_log_is_accounted_for(name: str, counts: dict[str, int]) -> None:
    events = fixture(name)
    assert Counter(type(event).__name__ for event in events) == counts
    assert len(events) == len((FIXTURES / name).read_text().splitlines())


@pytest.mark.parametrize("name", ["log-two-slots.txt", "log-router.txt"])
def test_what_is_foreign_in_a_real_log_is_no_line_of_the_server(name: str) -> None:
    reader = logs.LogReader()
    for line in (FIXTURES / name).read_text().splitlines():
        events = reader.read(line)
        assert len(events) == 1
        if isinstance(events[0], logs.Foreign):
            assert " I " not in line
            assert "slot" not in line.split(":")[0]


def test_a_request_from_its_start_to_its_end() -> None:
    events = of_slot(fixture("log-lv5.txt"))
    kinds = [type(event) for event in events]
    assert kinds[:5] == [logs.NewSlot, logs.NewSlot, logs.Chosen, logs.Started, logs.Prompt]
    assert events[2] == logs.Chosen(None, pytest.approx(11.446611), 1, -1, "id")
    assert events[4] == logs.Prompt(None, pytest.approx(11.446823), 1, 0, context=2048, tokens=691)
    assert events[5] == logs.Cached(None, pytest.approx(11.446863), 1, 0, 0)
    tokens = [event for event in events if isinstance(event, logs.Token)]
    assert "".join(token.text for token in tokens) == "A fox and a crow are two of the most iconic creatures"
    assert [(token.decoded, token.remaining) for token in tokens] == [(n, 12 - n) for n in range(1, 13)]
    timings = [event for event in events if isinstance(event, logs.Timing)]
    assert [(t.phase, t.milliseconds, t.tokens, t.speed) for t in timings] == [
        ("prefill", 2582.17, 691, 267.60),
        ("decode", 133.39, 12, 82.46),
        ("total", 2715.56, 703, None),
    ]
    assert events[-1] == logs.Released(None, pytest.approx(14.162459), 1, 0, tokens=702, truncated=False)


def test_progress_sleep_erasure_and_a_failed_restore() -> None:
    events = fixture("log-two-slots.txt")
    progress = [event for event in events if isinstance(event, logs.Prefilling)]
    assert [(p.tokens, p.progress, p.seconds, p.speed) for p in progress] == [(512, 0.55, 5.60, 91.37)]
    assert [event.slot for event in events if isinstance(event, logs.Cleared)] == [0, 0]
    lives = [event.what for event in events if isinstance(event, logs.Lifecycle)]
    assert lives == ["starting", "loading", "ready", "sleeping", "waking", "loading"]
    warned = [event.text for event in events if isinstance(event, logs.Warned)]
    assert any("Unable to restore slot" in text for text in warned)
    chosen = [event.how for event in events if isinstance(event, logs.Chosen)]
    assert chosen == ["id", "LRU"]


def test_a_router_and_its_children() -> None:
    events = fixture("log-router.txt")
    started = [(event.model, event.port) for event in events if isinstance(event, logs.ChildStarted)]
    assert [model for model, _ in started] == ["alpha", "beta"]
    assert [event.model for event in events if isinstance(event, logs.ChildEnded)] == ["alpha", "beta"]
    released = [event for event in events if isinstance(event, logs.Released)]
    assert [event.child for event in released] == [port for _, port in started]


OLD = """\
slot launch_slot_: id  0 | task 7 | processing task
slot update_slots: id  0 | task 7 | new prompt, n_ctx_slot = 4096, n_keep = 0, n_prompt_tokens = 2239
slot update_slots: id  0 | task 7 | n_past = 12, memory_seq_rm [12, end)
slot update_slots: id  0 | task 7 | prompt processing progress, n_past = 2048, n_tokens = 2048, progress = 0.914667
slot update_slots: id  0 | task 7 | prompt done, n_past = 2239, n_tokens = 191
slot process_toke: id  0 | task 7 | n_decoded = 3, n_remaining = -1, next token:   284 ' and'
slot print_timing: id  0 | task 7 |
prompt eval time =     123.45 ms /    10 tokens (   12.34 ms per token,    81.00 tokens per second)
       eval time =     643.64 ms /    12 tokens (   53.63 ms per token,    18.64 tokens per second)
      total time =     767.09 ms /    22 tokens
slot      release: id  0 | task 7 | stop processing: n_past = 2250, truncated = 1
srv  update_slots: all slots are idle"""


def test_lines_of_old_builds() -> None:
    events = read(OLD)
    kinds = " ".join(type(event).__name__ for event in events)
    assert kinds == "Started Prompt Cached Prefilling Prefilled Token SlotOther Timing Timing Timing Released AllIdle"
    started, prompt, cached, progress, done, token = events[:6]
    assert started == logs.Started(None, None, 0, 7)
    assert prompt == logs.Prompt(None, None, 0, 7, 4096, 2239)
    assert cached == logs.Cached(None, None, 0, 7, 12)
    assert progress == logs.Prefilling(None, None, 0, 7, 2048, 0.914667, None, None)
    assert done == logs.Prefilled(None, None, 0, 7, 2239)
    assert token == logs.Token(None, None, 0, 7, 3, -1, " and")
    assert events[7] == logs.Timing(None, None, 0, 7, "prefill", 123.45, 10, 81.0)
    assert events[8] == logs.Timing(None, None, 0, 7, "decode", 643.64, 12, 18.64)
    assert events[10] == logs.Released(None, None, 0, 7, 2250, True)


TOKEN = "0.14.041.891 D slot process_toke: id  1 | task 0 | n_gen = 2, n_remaining = 10, next token: 16438 '"


@pytest.mark.parametrize("text", ["'", "''", "'s", "\n", "\n\n", " x\n  y", "' '", "", "ü", "\udce4", "| task 3 | x"])
def test_a_token_may_hold_quotes_and_line_breaks(text: str) -> None:
    events = read(f"{TOKEN}{text}'\n0.14.050.000 I srv  update_slots: all slots are idle")
    assert [event.text for event in events if isinstance(event, logs.Token)] == [text]
    assert isinstance(events[-1], logs.AllIdle)


def test_a_token_without_an_end_is_given_up() -> None:
    tokens = [event for event in read(TOKEN + "a\n" + "b\n" * 20) if isinstance(event, logs.Token)]
    assert len(tokens) == 1
    assert len(tokens[0].text) <= 2 * logs.PIECE_LINES + 2
    cut_short = [event for event in read(f"{TOKEN}a\n{TOKEN}b'") if isinstance(event, logs.Token)]
    assert [token.text for token in cut_short] == ["a", "b"]


def test_children_do_not_disturb_each_other() -> None:
    events = read(f"[1] {TOKEN}a\n[2] {TOKEN}x'\n[1] b'")
    told = [(event.child, event.text) for event in events if isinstance(event, logs.Token)]
    assert told == [(2, "x"), (1, "a\nb")]
    reader = logs.LogReader()
    for port in range(1000):
        reader.read(f"[{port}] {TOKEN}a")
    assert len(reader._pending) <= logs.MOST_CHILDREN


def test_coloured_lines_are_the_same_lines() -> None:
    plain = fixture("log-lv5.txt")[-30:]
    lines = (FIXTURES / "log-lv5.txt").read_text().splitlines()[-30:]
    assert read("\n".join(f"\x1b[34m{line[:13]}\x1b[0m{line[13:]}\x1b[K" for line in lines)) == plain


@given(st.text(max_size=300))
def test_no_line_raises(line: str) -> None:
    for shown in (line, f"{TOKEN}{line}", f"[42] slot x: id 1 | task 2 | {line}", f"0.00.001.934 W {line}"):
        for event in read(shown):
            assert isinstance(event, logs.Line)


def test_damaged_and_hostile_lines() -> None:
    """Real lines with bytes changed, cut and doubled: nothing raises, and huge numbers are no numbers."""
    rng = random.Random(1)
    lines = (FIXTURES / "log-lv5.txt").read_text().splitlines() + OLD.splitlines()
    reader = logs.LogReader()
    for _ in range(3000):
        line = list(rng.choice(lines))
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(line) + 1)
            line[place : place + rng.choice([0, 1, 5])] = rng.choice(
                ["\0", "9" * 30, "\x1b[2J", "'", "|", "\u202e", ""]
            )
        reader.read("".join(line))
    assert read(f"slot x: id {'9' * 5000} | task 1 | processing task")[0].child is None


def test_a_huge_line_takes_no_time() -> None:
    started = time.perf_counter()
    for filling in ("9", " ", "\x1b[", "n_tokens = 1, ", "'", "\x1b]0;"):
        read("slot x: id 1 | task 1 | prompt processing, n_tokens = 5, " + filling * (10**7 // len(filling)))
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]0;title\x07x\x1b]52;c;aGk=\x1b\\y", "xy"),
        ("\x1bPq#0\x1b\\z\x1bc", "z"),
        ("a\nb\tc\r", "a b c "),
        ("\x1b", ""),
        ("\x9b31m", "31m"),
        ("left\u202eright", "leftright"),
        ("\udcc3\udca4 \udcff", "ä \ufffd"),
        ("\ud800x", "?x"),
        ("日本語", "日本語"),
    ],
)
def test_what_is_shown_does_nothing_to_a_terminal(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.text(max_size=200))
def test_cleaned_text_is_printable(text: str) -> None:
    assert all(char.isprintable() for char in clean(text))
    assert clean(clean(text)) == clean(text)
    assert len(without_escapes(text)) <= len(text)
