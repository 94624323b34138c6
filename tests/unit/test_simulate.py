"""`slot-cache simulate`: the replay by hand-computed cases and by properties, and the command with files of every kind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.cli import main
from slot_cache.cli.trace import MAX_ID, MAX_TIMESTAMP, MAX_TOKENS, TraceError, parse_request, read_trace
from slot_cache.eviction import Policy, Speeds
from slot_cache.matching import Known, continued, donor_of
from slot_cache.prompt import links, shared_links
from slot_cache.simulated import TraceRequest, chain_of
from slot_cache.simulation import BLOCK_TOKENS, Result, World, _Replay, simulate
from slot_cache.state import Outcome, Want
from traces import make_trace

BLOCK = BLOCK_TOKENS
RESIDENT, RESTORED, DONOR, COLD = Outcome.RESIDENT, Outcome.RESTORED, Outcome.DONOR, Outcome.COLD

# A block takes a second to compute and a tenth of a second to restore; a token is a byte; answers take no time.
QUICK = Speeds(prefill=BLOCK, restore=10 * BLOCK, token_bytes=1)
ONE = World(slots=1, max_bytes=0, speeds=QUICK, decode=1.0)
TWO = replace(ONE, slots=2)
NO_DISK = Speeds(prefill=BLOCK, restore=1, token_bytes=1)  # nothing is worth a restore


def asks(arrived: float, *ids: int, output: int = 0) -> TraceRequest:
    """A request of whole blocks."""
    return TraceRequest(arrived, len(ids) * BLOCK, output, chain_of(ids))


def outcomes(result: Result) -> dict[Outcome, int]:
    return {outcome: number for outcome, number in result.outcomes.items() if number}


A, A_LATER = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6)
B = (11, 12, 13, 14)
LONG, FORK = (1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 21, 22)  # what they share is less than half of LONG


# chains


def test_a_link_covers_all_before_it() -> None:
    one, other = chain_of([1, 2, 3]), chain_of([1, 9, 3])
    assert links(one) == 3
    assert shared_links(one, other) == 1
    assert chain_of([1, 2]) == one[:16]
    assert chain_of([]) == b""
    assert links(chain_of([0, MAX_ID])) == 2


# by hand


def test_the_next_turn_finds_its_cache_in_its_slot() -> None:
    result = simulate([asks(0, *A), asks(100, *A_LATER)], ONE)
    assert outcomes(result) == {COLD: 1, RESIDENT: 1}
    assert (result.requests, result.prompt_tokens, result.reused_tokens) == (2, 10 * BLOCK, 4 * BLOCK)
    assert result.hit_rate == 0.4
    assert (result.plain_seconds, result.prefill_seconds, result.saved_seconds) == (10.0, 6.0, 4.0)
    assert (result.bytes_written, result.bytes_read, result.evicted) == (0, 0, 0)


def test_a_switch_is_a_save_and_a_restore() -> None:
    result = simulate([asks(0, *A), asks(100, *B), asks(200, *A_LATER)], ONE)
    assert outcomes(result) == {COLD: 2, RESTORED: 1}
    assert (result.bytes_written, result.bytes_read) == (8 * BLOCK, 4 * BLOCK)
    assert result.save_seconds == pytest.approx(0.8)
    assert result.restore_seconds == pytest.approx(0.4)
    assert (result.plain_seconds, result.prefill_seconds) == (14.0, 10.0)
    assert result.saved_seconds == pytest.approx(2.8)


def test_what_is_saved_and_not_changed_is_not_saved_again() -> None:
    both = [asks(0, *A), asks(100, *B), asks(200, *A), asks(300, *B)]
    result = simulate(both, ONE)
    assert outcomes(result) == {COLD: 2, RESTORED: 2}
    assert result.bytes_written == 12 * BLOCK  # A, B, and A again after its second request
    assert result.reused_tokens == 2 * (4 * BLOCK - 1)  # one token is computed in any case


def test_with_slots_for_all_nothing_is_written() -> None:
    result = simulate([asks(0, *A), asks(100, *B), asks(200, *A_LATER), asks(300, *B)], TWO)
    assert outcomes(result) == {COLD: 2, RESIDENT: 2}
    assert result.bytes_written == 0


def test_the_tokens_of_an_answer_are_saved_too() -> None:
    result = simulate([asks(0, *A, output=100), asks(200, *B)], ONE)
    assert result.bytes_written == 4 * BLOCK + 100


def test_an_answer_holds_its_slot() -> None:
    result = simulate([asks(0, *A, output=100), asks(50, *A_LATER)], ONE)
    assert result.waits == [0.0, 54.0]  # 4 seconds of prefill, 100 of decode


@pytest.mark.parametrize(
    ("world", "requests", "outcome", "written", "read"),
    [
        pytest.param(ONE, [asks(0, *LONG), asks(100, *FORK)], DONOR, 7, 0, id="in the slot itself: not restored"),
        pytest.param(
            ONE, [asks(0, *LONG), asks(100, *B), asks(200, *FORK)], DONOR, 11, 7, id="saved, and the restore pays"
        ),
        pytest.param(
            replace(ONE, speeds=replace(QUICK, restore=2 * BLOCK)),
            [asks(0, *LONG), asks(100, *B), asks(200, *FORK)],
            COLD,
            11,
            0,
            id="saved, and quicker to compute: 3 seconds for 3 blocks, 3.5 to restore 7",
        ),
        pytest.param(TWO, [asks(0, *LONG), asks(100, *FORK)], DONOR, 7, 7, id="in another slot: saved, then restored"),
        pytest.param(
            replace(TWO, speeds=replace(QUICK, restore=4 * BLOCK)),
            [asks(0, *LONG), asks(100, *FORK)],
            COLD,
            0,
            0,
            id="in another slot: saved and restored would take 3.5 seconds",
        ),
        pytest.param(TWO, [asks(0, *LONG), asks(1, *FORK)], COLD, 0, 0, id="in another slot that is busy"),
        pytest.param(
            TWO,
            [asks(0, *LONG), asks(100, *B), asks(200, 31, 32, 33, 34), asks(300, *FORK)],
            DONOR,
            11,
            7,
            id="the file of one that is in no slot",
        ),
    ],
)
def test_a_donor(world: World, requests: list[TraceRequest], outcome: Outcome, written: int, read: int) -> None:
    result = simulate(requests, world, "lru")
    assert result.outcomes[outcome] == len(requests) - (0 if outcome is COLD else len(requests) - 1)
    assert result.reused_tokens == (0 if outcome is COLD else 3 * BLOCK)
    assert (result.bytes_written, result.bytes_read) == (written * BLOCK, read * BLOCK)


def test_a_donor_s_file_stays_as_it_is() -> None:
    requests = [asks(0, *LONG), asks(100, *B), asks(200, *FORK), asks(300, *LONG, 8)]
    result = simulate(requests, ONE)
    assert outcomes(result) == {COLD: 2, DONOR: 1, RESTORED: 1}
    assert result.reused_tokens == 3 * BLOCK + 7 * BLOCK


def test_a_file_that_is_overwritten_for_the_switch_is_no_donor() -> None:
    """The slot holds a later, edited version of what the file has; only what is in the slot can be used."""
    edited = asks(200, 1, 2, 3, 4, *range(30, 35))
    result = simulate([asks(0, *LONG), asks(100, *B), edited, asks(300, 1, 2, 3, 4, 5, 6)], ONE)
    assert outcomes(result) == {COLD: 2, RESTORED: 1, DONOR: 1}
    assert result.reused_tokens == (4 + 4) * BLOCK
    assert result.bytes_read == 7 * BLOCK


def test_what_is_quicker_to_compute_is_not_saved() -> None:
    result = simulate([asks(0, *A), asks(100, *B), asks(200, *A_LATER)], replace(ONE, speeds=NO_DISK))
    assert outcomes(result) == {COLD: 3}
    assert result.bytes_written == result.bytes_read == 0


def test_a_conversation_that_is_answered_right_now_is_not_shared() -> None:
    result = simulate([asks(0, *A), asks(1, *A), asks(100, *A)], TWO)
    assert outcomes(result) == {COLD: 2, RESIDENT: 1}


def test_edited_by_half_it_is_the_same_conversation_and_by_more_another() -> None:
    same = simulate([asks(0, *A), asks(100, 1, 2, 8, 9)], ONE)
    assert outcomes(same) == {COLD: 1, RESIDENT: 1}
    assert (same.reused_tokens, same.bytes_written) == (2 * BLOCK, 0)
    another = simulate([asks(0, *A), asks(100, 1, 8, 9)], ONE)
    assert outcomes(another) == {COLD: 1, DONOR: 1}
    assert (another.reused_tokens, another.bytes_written) == (BLOCK, 4 * BLOCK)


def test_who_waits_is_served_in_order() -> None:
    result = simulate([asks(0, *A), asks(1, *B), asks(2, 31, 32)], ONE)
    assert result.waits == pytest.approx([0.0, 3.0, 4 + 4.4 - 2])  # B's own 4 seconds and the save of A
    assert result.mean_wait == pytest.approx((0 + 3 + 6.4) / 3)
    assert result.wait_of(0.95) == pytest.approx(6.4)
    assert result.wait_of(0.5) == pytest.approx(3.0)


def test_one_whose_conversation_is_in_the_free_slot_goes_first() -> None:
    result = simulate([asks(0, *A), asks(1, *B), asks(2, *A_LATER)], ONE)
    assert outcomes(result) == {COLD: 2, RESIDENT: 1}
    assert result.waits == [0.0, 2.0, 5.0]


def test_but_nobody_is_passed_without_end() -> None:
    chat = [asks(0.5 + number / 100, *A, *range(50, 51 + number)) for number in range(8)]
    result = simulate([asks(0, *A), asks(0.1, *B), *chat], ONE)
    assert result.waits[5] == pytest.approx(4 + 4 - 0.1)  # after the first and four more of a second each: B
    assert result.outcomes[RESIDENT] + result.outcomes[RESTORED] == 8


def test_the_order_of_the_file_does_not_matter() -> None:
    requests = [asks(0, *A), asks(100, *B), asks(200, *A_LATER)]
    assert simulate(requests[::-1], ONE) == simulate(requests, ONE)


def test_nothing_at_all() -> None:
    result = simulate([], ONE)
    assert (result.requests, result.hit_rate, result.saved_seconds) == (0, 0.0, 0.0)
    assert (result.mean_wait, result.wait_of(0.95)) == (0.0, 0.0)


# limits and policies


@pytest.mark.parametrize("world", [replace(ONE, max_files=1), replace(ONE, max_bytes=7 * BLOCK)])
@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_the_limits_of_the_disk(world: World, policy: Policy) -> None:
    """The file of A goes when B is saved."""
    requests = [asks(0, *A), asks(100, *B), asks(200, 31, 32, 33, 34), asks(300, *A_LATER)]
    result = simulate(requests, world, policy)
    assert outcomes(result) == {COLD: 4}
    assert result.bytes_written == 12 * BLOCK
    assert result.evicted == 2


def test_a_file_that_is_restored_is_not_deleted_for_the_one_that_makes_room() -> None:
    result = simulate([asks(0, *A), asks(100, *B), asks(200, *A_LATER)], replace(ONE, max_files=1))
    assert outcomes(result) == {COLD: 2, RESTORED: 1}
    assert result.bytes_read == 4 * BLOCK


def test_a_cache_whose_file_is_deleted_is_in_its_slot_still() -> None:
    others = [asks(100, *B), asks(200, 31, 32), asks(300, *A), asks(400, 41, 42)]
    result = simulate([asks(0, *A), *others, asks(500, *A_LATER)], replace(TWO, max_files=1), "lru")
    assert result.evicted == 2  # those of A and of B, when the third is saved
    assert outcomes(result) == {COLD: 4, RESTORED: 1, RESIDENT: 1}


def test_cost_keeps_the_dear_context_in_its_slot_where_lru_does_not() -> None:
    dear = tuple(range(100, 140))
    burst = [asks(100 + number, 1000 + number) for number in range(5)]
    requests = [asks(0, *dear), *burst, asks(200, *dear, 140)]
    world = replace(TWO, speeds=NO_DISK)
    lru, cost = simulate(requests, world, "lru"), simulate(requests, world, "cost")
    assert outcomes(lru) == {COLD: 7}
    assert outcomes(cost) == {COLD: 6, RESIDENT: 1}
    assert (lru.reused_tokens, cost.reused_tokens) == (0, 40 * BLOCK)
    assert cost.saved_seconds == 40.0


def test_cost_keeps_the_file_that_is_wanted_again_and_again_where_lru_does_not() -> None:
    often = [asks(50 * number, *((1, 2, 3) if number % 2 else (5, 6, 7))) for number in range(16)]
    burst = [asks(800 + 20 * number, 1000 + number) for number in range(3)]
    requests = [*often, *burst, asks(880, 1, 2, 3), asks(900, 5, 6, 7)]
    world = replace(ONE, max_files=3)
    assert simulate(requests, world, "lru").outcomes[RESTORED] == 15
    assert simulate(requests, world, "cost").outcomes[RESTORED] == 16


@pytest.mark.parametrize("gib", [20, 50])
@pytest.mark.parametrize("per_minute", [3, 10, 30])
def test_cost_is_no_worse_than_lru_where_slots_and_disk_are_small(gib: int, per_minute: float) -> None:
    """Disks that fill in minutes, and conversations that end: what was used often must not stay for that alone."""
    requests = [
        parse_request(json.dumps(one).encode(), BLOCK) for one in make_trace(2000, seed=4, per_minute=per_minute)
    ]
    world = World(max_bytes=gib * 2**30, speeds=Speeds(1000, 1e9, 65536))
    lru, cost = simulate(requests, world, "lru"), simulate(requests, world, "cost")
    assert cost.saved_seconds > 0.98 * lru.saved_seconds


# whatever comes


ids = st.lists(st.integers(0, 2), min_size=1, max_size=5)
traces = st.lists(
    st.builds(
        lambda arrived, blocks, output: asks(float(arrived), *blocks, output=output),
        st.integers(0, 60),
        ids,
        st.integers(0, 9),
    ),
    max_size=25,
)
worlds = st.builds(
    World,
    slots=st.integers(1, 3),
    max_bytes=st.sampled_from([0, 4 * BLOCK, 10 * BLOCK]),
    max_files=st.integers(0, 3),
    speeds=st.sampled_from([QUICK, NO_DISK, replace(QUICK, restore=1.5 * BLOCK)]),
    decode=st.just(5.0),
)
policies: st.SearchStrategy[Policy] = st.sampled_from(["lru", "cost"])


@given(traces, worlds, policies)
def test_every_request_is_served_once_and_the_numbers_agree(
    requests: list[TraceRequest], world: World, policy: Policy
) -> None:
    result = simulate(requests, world, policy)
    assert result.requests == len(result.waits) == sum(result.outcomes.values()) == len(requests)
    assert result.prompt_tokens == sum(request.prompt for request in requests)
    assert 0 <= result.reused_tokens <= result.prompt_tokens - len(requests)
    assert result.plain_seconds - result.prefill_seconds == pytest.approx(result.reused_tokens / BLOCK)
    assert all(wait >= 0 for wait in result.waits)
    if world.speeds is NO_DISK:
        assert result.bytes_written == result.bytes_read == result.outcomes[RESTORED] == 0
    assert simulate(requests, world, policy) == result


@given(traces, worlds, policies, ids)
def test_the_caches_are_found_that_the_product_finds(
    requests: list[TraceRequest], world: World, policy: Policy, blocks: list[int]
) -> None:
    """By looking up prefixes as by comparing the request with every cache there is."""
    replay = _Replay(world, policy)
    for request in sorted(requests, key=lambda request: request.arrived):
        replay.arrive(request)
    want = Want(None, chain=chain_of(blocks))
    everything = {cache for caches in replay._continuing._caches.values() for cache in caches}
    known = [Known(cache.key, None, "", cache.chain) for cache in everything]
    expected = continued(want, known, {cache.key for cache in everything if cache.in_use})
    found, shared = replay._continued(want.chain)
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert shared == shared_links(want.chain, found.chain) == shared_links(want.chain, expected.chain)
    files = [saved for cache in replay._saved.values() if (saved := cache.saved)]
    donor = donor_of(want, [Known(saved.file.key, None, "", saved.chain, 1, saved.file.size) for saved in files])
    lender = replay._lenders.best(want.chain)
    assert (lender is None) == (donor is None)
    if lender is not None and donor is not None and lender[0].saved is not None:
        assert (lender[1], lender[0].saved.file.size) == (donor.links, donor.cache.size)
    assert replay._saved_bytes == sum(saved.file.size for saved in files)
    resident = [slot.cache for slot in replay._slots if slot.cache is not None]
    assert len(set(resident)) == len(resident)
    assert everything == {*resident, *replay._saved.values()}
    for cache in everything:
        held = cache.saved.file.tokens if cache.saved is not None else 0
        assert cache.saved_tokens <= min(held, cache.tokens)
        assert cache.dirty or cache.saved_tokens == held == cache.tokens


# reading a trace


GOOD: dict[str, Any] = {"timestamp": 1500, "input_length": 1000, "output_length": 9, "hash_ids": [7, 8]}


def line(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def test_a_line_is_read() -> None:
    assert parse_request(line(), 512) == TraceRequest(1.5, 1000, 9, chain_of([7, 8]))
    assert parse_request(line(timestamp=0.5, hash_ids=[], more="of it"), 512) == TraceRequest(0.0005, 1000, 9, b"")
    largest = line(timestamp=MAX_TIMESTAMP, input_length=MAX_TOKENS, output_length=0, hash_ids=[0, MAX_ID])
    assert parse_request(largest, 512).prompt == MAX_TOKENS


WRONG = {
    "no JSON": (b"{", "no JSON"),
    "nothing but text": (b"timestamp", "allowed: one JSON object a line"),
    "a number": (b"5", "5 is no JSON object"),
    "a list": (b"[1, 2]", "a list is no JSON object"),
    "null": (b"null", "null is no JSON object"),
    "two objects": (line() + line(), "no JSON (Extra data"),
    "no UTF-8": (b'{"timestamp": "\xff"}', "no UTF-8 (byte 16"),
    "UTF-16": ('{"timestamp": 1}'.encode("utf-16"), "no UTF-8"),
    "an empty object": (b"{}", "no timestamp, input_length, output_length, hash_ids; needed"),
    "a field missing": (b'{"timestamp": 0, "input_length": 5, "output_length": 1}', "no hash_ids; needed: timestamp"),
    "a negative time": (line(timestamp=-1), "timestamp: -1; allowed: milliseconds, a number from 0"),
    "a time as text": (line(timestamp="0"), 'timestamp: "0"; allowed'),
    "a time that is none": (line(timestamp=float("nan")), "timestamp: NaN; allowed"),
    "a time without end": (line(timestamp=float("inf")), "timestamp: Infinity; allowed"),
    "a time too far off": (line(timestamp=MAX_TIMESTAMP + 1), "allowed: milliseconds"),
    "a time of huge size": (line(timestamp=10**4000), f"timestamp: 1{'0' * 39}...; allowed"),
    "true as a time": (line(timestamp=True), "timestamp: true; allowed"),
    "no prompt": (line(input_length=0), "input_length: 0; allowed: a whole number from 1 to 100,000,000"),
    "a negative prompt": (line(input_length=-5), "input_length: -5; allowed"),
    "half a token": (line(input_length=1.5), "input_length: 1.5; allowed"),
    "too long a prompt": (line(input_length=MAX_TOKENS + 1), "input_length: 100000001; allowed"),
    "a huge prompt": (line(input_length=10**4000), "input_length: 1000"),
    "a number that Python does not read": (b'{"timestamp": 1' + b"0" * 9000 + b"}", "a number is too long; allowed"),
    "a negative answer": (line(output_length=-1), "output_length: -1; allowed: a whole number from 0"),
    "an answer of null": (line(output_length=None), "output_length: null; allowed"),
    "ids as text": (line(hash_ids="7, 8"), 'hash_ids: "7, 8"; allowed: a list of whole numbers'),
    "ids as an object": (line(hash_ids={"a": 1}), "hash_ids: an object; allowed"),
    "a negative id": (line(hash_ids=[7, -8]), "hash_ids[1]: -8; allowed"),
    "an id too large": (line(hash_ids=[2**63]), "hash_ids[0]: 9223372036854775808; allowed"),
    "ids in ids": (line(hash_ids=[[7]]), "hash_ids[0]: a list; allowed"),
    "an id that is true": (line(hash_ids=[True]), "hash_ids[0]: true; allowed"),
    "more ids than blocks": (
        line(hash_ids=[1, 2, 3, 4]),
        "4 ids; allowed: at most 3, for 1,000 tokens in blocks of 512",
    ),
    "control characters": (line(timestamp="\x1b[31m"), 'timestamp: "\\u001b[31m"; allowed'),
    "long text": (line(timestamp="x" * 10**6), f'timestamp: "{"x" * 39}...; allowed'),
    "nested deeply": (b"[" * 200_000, "nested too deeply; allowed"),
    "nested deeply in a field": (b'{"timestamp": ' + b"[" * 200_000, "nested too deeply"),
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_line_is_told(text: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(line() + b"\n\n" + text + b"\n" + line())
    with pytest.raises(TraceError) as error:
        read_trace(file, 512)
    told = str(error.value)
    assert told.startswith(f"{file}, line 3: ")
    assert message in told
    assert len(told) < 400 and told.isprintable()


def test_a_line_without_end_is_not_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with file.open("wb") as stream:
        stream.truncate(2**30)  # a sparse file of a GiB
    with pytest.raises(TraceError, match="line 1: too long; allowed: 16 MiB"):
        read_trace(file, 512)


@given(
    st.binary(max_size=60)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "x"]), inner, max_size=5),
    ).map(lambda value: json.dumps(value).encode())
)
def test_nothing_else_than_a_trace_error_comes_of_a_line(text: bytes) -> None:
    try:
        parse_request(text, 512)
    except TraceError as error:
        assert str(error).isprintable()


# the command


class Done:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`slot-cache simulate ...`."""
    monkeypatch.setattr("signal.signal", lambda *args: None)

    def command(*arguments: object) -> Done:
        try:
            code = main(["simulate", *map(str, arguments)])
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return command


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(seconds: float, *blocks: int, output: int = 0) -> dict[str, Any]:
    return {
        "timestamp": seconds * 1000,
        "input_length": len(blocks) * BLOCK,
        "output_length": output,
        "hash_ids": list(blocks),
    }


AS_ONE = ("--slots", 1, "--prefill-rate", BLOCK, "--restore-rate", 10 * BLOCK / 1e6, "--bytes-per-token", 1)


def test_the_policies_side_by_side(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [row(0, *A), row(100, *B), row(200, *A_LATER)])
    done = run(trace, *AS_ONE)
    assert (done.code, done.err) == (0, "")
    head, speeds, titles, _, *rows = done.out.splitlines()
    assert head == "3 requests in 200.0 s; 1 slot, 50 GiB on disk"
    assert speeds.startswith("a slot computes 512 tokens/s and generates 30; saves and restores ")
    assert titles.split() == ["lru", "cost"]
    cells = {" ".join(parts[:-2]): parts[-2:] for parts in (text.replace(" s ", "s ").split() for text in rows)}
    assert cells["restored"] == ["1", "1"]
    assert cells["cold"] == ["2", "2"]
    assert cells["reused"] == ["0.286", "0.286"]


def test_as_json(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [row(0, *A), row(100, *B), row(200, *A_LATER)])
    done = run(trace, *AS_ONE, "--policy", "cost", "--json", "--disk-gib", 0)
    report = json.loads(done.out)
    assert list(report["results"]) == ["cost"]
    assert report["world"]["max_bytes"] == 0
    assert report["results"]["cost"] == {
        "requests": 3,
        "outcomes": {"resident": 0, "restored": 1, "donor": 0, "cold": 2},
        "prompt_tokens": 14 * BLOCK,
        "reused_tokens": 4 * BLOCK,
        "hit_rate": pytest.approx(4 / 14),
        "plain_seconds": pytest.approx(14),
        "prefill_seconds": pytest.approx(10),
        "restore_seconds": pytest.approx(0.4),
        "save_seconds": pytest.approx(0.8),
        "saved_seconds": pytest.approx(2.8),
        "bytes_written": 8 * BLOCK,
        "bytes_read": 4 * BLOCK,
        "evicted": 0,
        "mean_wait": 0,
        "p95_wait": 0,
    }


def test_the_limits_are_options(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", [row(100 * number, number, number + 50) for number in range(9)])

    def evicted(*options: object) -> int:
        report = json.loads(run(trace, *AS_ONE, "--policy", "lru", "--json", *options).out)
        number: int = report["results"]["lru"]["evicted"]
        return number

    assert evicted() == 0
    assert evicted("--max-files", 3) == 5
    assert evicted("--disk-gib", 3 * 2 * BLOCK / 2**30) == 5


def test_blocks_of_another_size(run: Run, tmp_path: Path) -> None:
    rows = [{"timestamp": time, "input_length": 64, "output_length": 1, "hash_ids": [1, 2, 3, 4]} for time in (0, 9000)]
    trace = write(tmp_path / "trace.jsonl", rows)
    refused = run(trace)
    assert refused.code == 2
    assert "line 1: hash_ids: 4 ids; allowed: at most 2" in refused.err and "--block-tokens" in refused.err
    report = json.loads(run(trace, "--block-tokens", 16, "--json").out)
    assert report["results"]["lru"]["reused_tokens"] == 63


def test_a_bad_line_ends_it_with_exit_code_2(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(line() + b"\n" + line(input_length=-1))
    done = run(trace)
    assert (done.code, done.out) == (2, "")
    assert done.err == f"{trace}, line 2: input_length: -1; allowed: a whole number from 1 to 100,000,000\n"


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_file(run: Run, tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    done = run(trace)
    assert (done.code, done.out) == (2, "")
    assert "holds no requests; allowed: one JSON object a line" in done.err


def test_no_file_and_a_folder(run: Run, tmp_path: Path) -> None:
    for path, why in ((tmp_path / "nowhere", "No such file"), (tmp_path, "Is a directory")):
        done = run(path)
        assert (done.code, done.out) == (2, "")
        assert f"{path} cannot be read: {why}" in done.err


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("--slots", "0", "a whole number from 1 to 4,096"),
        ("--slots", "1e3", "a whole number"),
        ("--slots", "9" * 5000, "a whole number"),
        ("--disk-gib", "-1", "a number from 0"),
        ("--disk-gib", "nan", "a number from 0"),
        ("--max-files", "-1", "a whole number from 0"),
        ("--prefill-rate", "0", "a number from 0.001"),
        ("--restore-rate", "inf", "a number from 0.001"),
        ("--decode-rate", "x", "a number from 0.001"),
        ("--bytes-per-token", "0", "a number from 1"),
        ("--block-tokens", "0", "a whole number from 1"),
        ("--policy", "random", "choose from"),
    ],
)
def test_an_option_that_makes_no_sense(run: Run, tmp_path: Path, option: str, value: str, allowed: str) -> None:
    trace = write(tmp_path / "trace.jsonl", [row(0, *A)])
    done = run(trace, f"{option}={value}")
    assert (done.code, done.out) == (2, "")
    assert option in done.err and allowed in done.err


# a large one


def test_ten_thousand_requests_take_seconds(run: Run, tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", make_trace(10_000))
    started = time.perf_counter()
    done = run(trace, "--json")
    seconds = time.perf_counter() - started
    assert done.code == 0
    for result in json.loads(done.out)["results"].values():
        assert result["requests"] == 10_000
        assert result["hit_rate"] > 0.3
    assert seconds < 30  # about 2


@pytest.mark.parametrize("options", [("--slots", 256, "--disk-gib", 0), ("--slots", 1), ("--bytes-per-token", 1000)])
def test_neither_do_they_with_other_sizes(run: Run, tmp_path: Path, options: tuple[object, ...]) -> None:
    trace = write(tmp_path / "trace.jsonl", make_trace(3_000, seed=1, per_minute=100))
    started = time.perf_counter()
    assert run(trace, *options).code == 0
    assert time.perf_counter() - started < 20
