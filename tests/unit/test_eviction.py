"""Which saved caches go first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.eviction import CacheFile, files_to_drop, over_alone


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
    ),
    max_size=12,
    unique_by=lambda file: file.key,
)
limits = st.integers(0, 12), st.integers(0, 500)
keys = st.sets(st.text("abcdef", min_size=1, max_size=3), max_size=4)


def within(files: list[CacheFile], max_files: int, max_bytes: int) -> bool:
    fits = not max_bytes or sum(file.size for file in files) <= max_bytes
    return fits and (not max_files or len(files) <= max_files)


@given(caches, *limits, keys)
def test_the_limits_hold_afterwards_unless_only_protected_files_are_left(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str]
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected)
    left = [file for file in files if file not in dropped]
    assert within(left, max_files, max_bytes) or all(file.key in protected for file in left)


@given(caches, *limits, keys)
def test_a_protected_file_is_never_dropped(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str]
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected)
    assert not protected & {file.key for file in dropped}
    assert set(dropped) <= set(files)
    assert len(set(dropped)) == len(dropped)


@given(caches, *limits, keys)
def test_the_oldest_go_first(files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str]) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected)
    assert [file.used for file in dropped] == sorted(file.used for file in dropped)
    kept = [file.used for file in files if file not in dropped and file.key not in protected]
    assert not dropped or not kept or max(file.used for file in dropped) <= min(kept)


@given(caches, *limits, keys)
def test_no_more_than_needed_is_dropped(
    files: list[CacheFile], max_files: int, max_bytes: int, protected: set[str]
) -> None:
    dropped = files_to_drop(files, max_files, max_bytes, protected)
    if dropped:
        left_before_the_last = [file for file in files if file not in dropped[:-1]]
        assert not within(left_before_the_last, max_files, max_bytes)
