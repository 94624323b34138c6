"""Which saved caches go first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.eviction import (
    BYTES_PER_TOKEN,
    FILE_RECENCY_SECONDS,
    PREFILL_TOKENS_PER_SECOND,
    RESTORE_BYTES_PER_SECOND,
    SLOT_RECENCY_SECONDS,
    CacheFile,
    Policy,
    Speeds,
    file_score,
    files_to_drop,
    over_alone,
    slot_score,
)


def cache(key: str, size: int = 10, used: float = 0.0) -> CacheFile:
    return CacheFile(key, size, used)


A, B, C = cache("a", 10, used=1), cache("b", 20, used=2), cache("c", 40, used=3)


@pytest.mark.parametrize(
    ("files", "max_files", "max_bytes", "protected", "dropped"),
    [
        pytest.param([], 1, 1, (), [], id="nothing there"),
        pytest.param([A, B, C], 0, 0, (), [], id="no limits"),
        pytest.param([A, B, C], 3, 70, (), [], id="both limits just kept"),
        pytest.param([A, B, C], 2, 0, (), [A], id="one file too many"),
        pytest.param([C, B, A], 2, 0, (), [A], id="the order given does not matter"),
        pytest.param([A, B, C], 1, 0, (), [A, B], id="two files too many"),
        pytest.param([A, B, C], 0, 69, (), [A], id="a byte too many"),
        pytest.param([A, B, C], 0, 59, (), [A, B], id="more bytes than the oldest has"),
        pytest.param([A, B, C], 2, 59, (), [A, B], id="the tighter limit counts: bytes"),
        pytest.param([A, B, C], 1, 69, (), [A, B], id="the tighter limit counts: files"),
        pytest.param([A, B, C], 2, 0, ("a",), [B], id="the oldest is protected"),
        pytest.param([A, B, C], 1, 0, ("a", "c"), [B], id="the limit stays passed by what is protected"),
        pytest.param([A, B, C], 1, 1, ("a", "b", "c"), [], id="all are protected"),
        pytest.param([A, B, C], 0, 39, ("c",), [A, B], id="the protected one is over the limit alone"),
        pytest.param([A, B, C], 2, 0, ("z",), [A], id="a protected one that is not there"),
        pytest.param([cache("b", used=1), cache("a", used=1)], 1, 0, (), [cache("a", used=1)], id="same age: by key"),
        pytest.param([A], 0, 5, (), [A], id="one alone over the limit goes unless protected"),
    ],
)
def test_what_is_dropped(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: tuple[str, ...], dropped: list[CacheFile]
) -> None:
    assert files_to_drop(files, max_files, max_bytes, protected) == dropped


@pytest.mark.parametrize(
    ("files", "max_bytes", "found"),
    [
        ([], 10, None),
        ([A, B, C], 0, None),
        ([A, B, C], 40, None),
        ([A, B, C], 39, C),
        ([A, B, C], 5, C),
    ],
)
def test_the_largest_is_told_if_it_is_over_the_limit_alone(
    files: list[CacheFile], max_bytes: int, found: CacheFile | None
) -> None:
    assert over_alone(files, max_bytes) == found


caches = st.lists(
    st.builds(
        CacheFile,
        key=st.text("abcdef", min_size=1, max_size=3),
        size=st.integers(0, 100),
        used=st.integers(0, 5).map(float),
        tokens=st.integers(0, 1000),
        seconds=st.integers(0, 50).map(float),
        uses=st.integers(0, 9),
    ),
    max_size=12,
    unique_by=lambda file: file.key,
)
limits = st.integers(0, 12), st.integers(0, 500)
keys = st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=4)
policies: st.SearchStrategy[Policy] = st.sampled_from(["lru", "cost"])


def within(files: list[CacheFile], max_files: int, max_bytes: int) -> bool:
    fits = not max_bytes or sum(file.size for file in files) <= max_bytes
    return fits and (not max_files or len(files) <= max_files)


@given(caches, *limits, keys, policies)
def test_the_limits_hold_afterwards_unless_only_protected_files_are_left(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str], policy: Policy
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected, policy=policy, now=9.0)
    left = [file for file in files if file not in dropped]
    assert within(left, max_files, max_bytes) or all(file.key in protected for file in left)


@given(caches, *limits, keys, policies)
def test_a_protected_file_is_never_dropped(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str], policy: Policy
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected, policy=policy, now=9.0)
    assert not protected & {file.key for file in dropped}
    assert set(dropped) <= set(files)
    assert len(set(dropped)) == len(dropped)


@given(caches, *limits, keys)
def test_the_lowest_scores_go_first(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str]
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected, policy="cost", now=9.0)
    scores = [file_score(file, 9.0) for file in dropped]
    assert scores == sorted(scores)
    kept = [file_score(file, 9.0) for file in files if file not in dropped and file.key not in protected]
    assert not scores or not kept or max(scores) <= min(kept)


@given(caches, *limits, keys)
def test_the_oldest_go_first(files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str]) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected)
    assert [file.used for file in dropped] == sorted(file.used for file in dropped)
    kept = [file.used for file in files if file not in dropped and file.key not in protected]
    assert not dropped or not kept or max(file.used for file in dropped) <= min(kept)


@given(caches, *limits, keys, policies)
def test_no_more_than_needed_is_dropped(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str], policy: Policy
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected, policy=policy, now=9.0)
    if dropped:
        left_before_the_last = [file for file in files if file not in dropped[:-1]]
        assert not within(left_before_the_last, max_files, max_bytes)


# speeds


MEASURED = Speeds(prefill=100.0, restore=1e6, token_bytes=1000.0)  # a token: 10 ms to compute, 1 ms to restore
SLOW_DISK = Speeds(prefill=100.0, restore=1e4, token_bytes=1000.0)  # a token: 10 ms to compute, 100 ms to restore


def test_what_was_measured_is_used() -> None:
    assert MEASURED.compute_seconds(500) == pytest.approx(5.0)
    assert MEASURED.restore_seconds(500) == pytest.approx(0.5)


def test_what_was_not_measured_is_assumed() -> None:
    assert Speeds().compute_seconds(1000) == pytest.approx(1000 / PREFILL_TOKENS_PER_SECOND)
    assert Speeds().restore_seconds(1000) == pytest.approx(1000 * BYTES_PER_TOKEN / RESTORE_BYTES_PER_SECOND)
    assert Speeds(restore=1e6).restore_seconds(1) == pytest.approx(BYTES_PER_TOKEN / 1e6)
    assert Speeds(token_bytes=500).restore_seconds(1) == pytest.approx(500 / RESTORE_BYTES_PER_SECOND)


@pytest.mark.parametrize(
    ("speeds", "restored", "useful", "pays"),
    [
        pytest.param(MEASURED, 1000, 1000, True, id="all of a file that is quicker to read"),
        pytest.param(MEASURED, 1000, 101, True, id="just enough of it"),
        pytest.param(MEASURED, 1000, 100, False, id="a tie: nothing is won"),
        pytest.param(MEASURED, 1000, 99, False, id="too little of it"),
        pytest.param(MEASURED, 1000, 0, False, id="nothing of it"),
        pytest.param(SLOW_DISK, 1000, 1000, False, id="a disk slower than the computer"),
        pytest.param(Speeds(), 1000, 1, True, id="nothing measured: tried"),
        pytest.param(Speeds(prefill=1e9), 1000, 1, True, id="the restore not measured: tried"),
        pytest.param(Speeds(restore=1.0, token_bytes=1000.0), 1000, 1, True, id="the prefill not measured: tried"),
    ],
)
def test_a_restore_pays_when_it_is_quicker(speeds: Speeds, restored: float, useful: float, pays: bool) -> None:
    assert speeds.restoring_pays(restored, useful) is pays


# slots


@pytest.mark.parametrize(
    ("tokens", "saved", "idle", "speeds", "score"),
    [
        pytest.param(600, 0, 0, MEASURED, 6.0 / 60, id="used just now, not saved"),
        pytest.param(600, 0, 60, MEASURED, 6.0 / 120, id="a minute later: half of it"),
        pytest.param(600, 0, 540, MEASURED, 6.0 / 600, id="nine minutes later: a tenth"),
        pytest.param(600, 600, 0, MEASURED, 0.6 / 60, id="saved: the time to restore it"),
        pytest.param(600, 400, 0, MEASURED, (0.4 + 2.0) / 60, id="saved in part: to restore it and compute the rest"),
        pytest.param(600, 900, 0, MEASURED, 0.6 / 60, id="more in its file than in the slot"),
        pytest.param(600, 600, 0, SLOW_DISK, 6.0 / 60, id="quicker to compute than to restore"),
        pytest.param(0, 0, 0, MEASURED, 0.0, id="nothing in it"),
        pytest.param(600, 0, -5, MEASURED, 6.0 / 60, id="a clock that went back"),
    ],
)
def test_slot_score(tokens: int, saved: int, idle: float, speeds: Speeds, score: float) -> None:
    assert slot_score(tokens, saved, idle, speeds) == pytest.approx(score)


@pytest.mark.parametrize(
    ("times_dearer", "idle", "outlives"),
    [
        (1, 1, False),
        (10, 60, True),
        (10, 9 * SLOT_RECENCY_SECONDS - 1, True),
        (10, 9 * SLOT_RECENCY_SECONDS + 1, False),
        (60, 3000, True),
        (60, 59 * SLOT_RECENCY_SECONDS - 1, True),
        (60, 59 * SLOT_RECENCY_SECONDS + 1, False),
    ],
)
def test_a_long_expensive_context_outlives_a_burst_of_small_fresh_ones_for_as_many_times_longer_as_it_is_dearer(
    times_dearer: int, idle: float, outlives: bool
) -> None:
    fresh = slot_score(500, 0, 0, MEASURED)
    assert (slot_score(500 * times_dearer, 0, idle, MEASURED) > fresh) is outlives


def test_of_two_that_cost_the_same_the_one_used_longest_ago_goes_first() -> None:
    assert slot_score(500, 0, 61, MEASURED) < slot_score(500, 0, 60, MEASURED)


def test_what_is_saved_goes_before_what_is_not() -> None:
    assert slot_score(4000, 4000, 0, MEASURED) < slot_score(500, 0, 0, MEASURED)


numbers = st.integers(0, 10**6)
speeds = st.builds(Speeds, *[st.sampled_from([0.0, 1.0, 1e3, 1e9])] * 3)


@given(numbers, numbers, numbers, numbers, speeds)
def test_a_slot_s_score_falls_with_time_and_never_rises_by_a_save(
    tokens: int, saved: int, idle: int, more: int, measured: Speeds
) -> None:
    score = slot_score(tokens, saved, idle, measured)
    assert 0 <= score <= slot_score(tokens, 0, idle, measured)
    assert slot_score(tokens, saved, idle + more, measured) <= score


# files by what they save


NOW = 1e6


def dear(key: str, seconds: float, size: int = 100, idle: float = 0.0, uses: int = 0, tokens: int = 0) -> CacheFile:
    return CacheFile(key, size, NOW - idle, tokens, seconds, uses)


@pytest.mark.parametrize(
    ("file", "score"),
    [
        pytest.param(dear("a", 36.0), 36.0 / 100 / 60, id="seconds per byte, used just now"),
        pytest.param(dear("a", 36.0, idle=FILE_RECENCY_SECONDS), 36.0 / 100 / 120, id="a minute later: half of it"),
        pytest.param(dear("a", 36.0, uses=2), 2 * 36.0 / 100 / 60, id="wanted twice: twice as much"),
        pytest.param(dear("a", 36.0, uses=14), 4 * 36.0 / 100 / 60, id="wanted fourteen times: four times as much"),
        pytest.param(dear("a", 36.0, size=200), 36.0 / 200 / 60, id="twice the bytes: half of it"),
        pytest.param(dear("a", 0, tokens=500), 500 / PREFILL_TOKENS_PER_SECOND / 100 / 60, id="by its tokens"),
        pytest.param(dear("a", 2.0, tokens=9999), 2.0 / 100 / 60, id="what was measured counts, not its tokens"),
        pytest.param(dear("a", 0), 0.0, id="nothing known"),
        pytest.param(dear("a", 36.0, size=0), 36.0 / 60, id="no bytes"),
        pytest.param(dear("a", 36.0, idle=-9), 36.0 / 100 / 60, id="used in the future"),
    ],
)
def test_file_score(file: CacheFile, score: float) -> None:
    assert file_score(file, NOW) == pytest.approx(score)


OLD_AND_DEAR, FRESH_AND_CHEAP = dear("dear", 60.0, idle=1800), dear("cheap", 1.0)
UNKNOWN = dear("unknown", 0)


@pytest.mark.parametrize(
    ("files", "policy", "dropped"),
    [
        pytest.param([OLD_AND_DEAR, FRESH_AND_CHEAP], "lru", ["dear"], id="lru: the oldest"),
        pytest.param([OLD_AND_DEAR, FRESH_AND_CHEAP], "cost", ["cheap"], id="cost: the cheapest"),
        pytest.param([OLD_AND_DEAR, UNKNOWN], "cost", ["unknown"], id="what cannot be restored goes first"),
        pytest.param([dear("b", 5), dear("a", 5)], "cost", ["a"], id="same score and age: by key"),
        pytest.param([dear("old", 0, idle=9), dear("a", 0)], "cost", ["old"], id="same score: the older"),
        pytest.param([dear("a", 5, idle=9), dear("b", 5)], "cost", ["a"], id="the same cost: the older"),
        pytest.param([dear("a", 5, size=900), dear("b", 5, idle=60)], "cost", ["a"], id="the same cost: the larger"),
        pytest.param([dear("a", 5), dear("b", 5, idle=60, uses=3)], "cost", ["a"], id="the one less wanted"),
    ],
)
def test_which_goes_first_by_policy(files: list[CacheFile], policy: Policy, dropped: list[str]) -> None:
    for order in (files, files[::-1]):
        assert [file.key for file in files_to_drop(order, 1, 0, policy=policy, now=NOW)] == dropped


@pytest.mark.parametrize(("times", "kept"), [(58, "dear"), (60, "cheap")])
def test_a_dear_file_outlives_fresh_cheap_ones_until_it_has_lain_as_many_times_longer(times: int, kept: str) -> None:
    files = [dear("dear", 60.0, idle=times * FILE_RECENCY_SECONDS), dear("cheap", 1.0)]
    (dropped,) = files_to_drop(files, 1, 0, policy="cost", now=NOW)
    assert {"dear", "cheap"} - {dropped.key} == {kept}


def test_a_conversation_that_has_ended_does_not_outlive_those_that_go_on_by_its_uses() -> None:
    """Twenty minutes after its last use, one restored fifteen times goes before a fresh one that never was."""
    ended, goes_on = dear("ended", 5, idle=1200, uses=15), dear("goes on", 5, idle=120)
    assert files_to_drop([ended, goes_on], 1, 0, policy="cost", now=NOW) == [ended]
