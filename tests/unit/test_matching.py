"""Which cache a prompt continues, and which one lends it its beginning."""

from __future__ import annotations

import random
import time
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slot_cache.matching import CONTINUES_PART, Donor, Known, continued, continues, donor_of
from slot_cache.prompt import links, shared_links, shares
from slot_cache.state import Want


def chain(text: str) -> bytes:
    """A packed chain with one link a letter; as in a real one, each link covers all before it."""
    return b"".join(blake2b(text[:end].encode(), digest_size=8).digest() for end in range(1, len(text) + 1))


def want(text: str, session: str | None = "s", owner: str = "me", preamble: int = 0) -> Want:
    return Want(None, owner=owner, chain=chain(text), session=session, preamble=preamble)


def known(
    key: str,
    text: str,
    session: str | None = "s",
    owner: str | None = "me",
    *,
    tokens: int = 0,
    size: int = 0,
    used: float = 0.0,
) -> Known:
    return Known(key, session, owner, chain(text), tokens, size, used)


# continues


@pytest.mark.parametrize(
    ("request_", "held", "shared"),
    [
        pytest.param("abcd", "abc", 3, id="the next turn"),
        pytest.param("abc", "abc", 3, id="the same again"),
        pytest.param("ab", "abcd", 2, id="cut to just half of it"),
        pytest.param("a", "abc", 0, id="cut to less than half of it"),
        pytest.param("abXYZ", "abcd", 2, id="edited in the middle"),
        pytest.param("aXYZ", "abcd", 0, id="edited near the beginning"),
        pytest.param("abXYZ", "abcde", 0, id="of an odd number, less than half"),
        pytest.param("abcXYZ", "abcde", 3, id="of an odd number, more than half"),
        pytest.param("Xbc", "abc", 0, id="another conversation"),
        pytest.param("", "abc", 0, id="a prompt that is not known"),
        pytest.param("abc", "", 0, id="a cache of which nothing is known"),
        pytest.param("", "", 0, id="nothing known of both"),
    ],
)
def test_at_least_half_of_the_cache_must_be_there_again(request_: str, held: str, shared: int) -> None:
    assert continues(want(request_), "s", "me", chain(held)) == shared


@pytest.mark.parametrize(
    ("preamble", "request_", "held", "shared"),
    [
        pytest.param(2, "ssX", "ssa", 0, id="the same tools and system message only"),
        pytest.param(2, "ssaX", "ssa", 3, id="and the first message"),
        pytest.param(2, "ss", "ssa", 2, id="a request that is nothing but its preamble"),
        pytest.param(2, "ssX", "ss", 0, id="a cache that is nothing but the preamble"),
        pytest.param(3, "sssaX", "sssabcdefg", 0, id="a message more than the preamble, but less than half"),
        pytest.param(0, "a", "a", 1, id="no preamble"),
    ],
)
def test_what_a_program_always_says_is_no_sign(preamble: int, request_: str, held: str, shared: int) -> None:
    assert continues(want(request_, preamble=preamble), "s", "me", chain(held)) == shared


@pytest.mark.parametrize(
    ("wants", "has", "yes"),
    [
        pytest.param(("s", "me"), ("s", "me"), True, id="one session"),
        pytest.param(("s", "me"), ("t", "me"), False, id="two sessions"),
        pytest.param(("s", "me"), (None, "me"), False, id="a cache without a session"),
        pytest.param((None, "me"), ("s", "me"), False, id="a request without a session"),
        pytest.param((None, "me"), (None, "me"), True, id="no sessions, one owner"),
        pytest.param((None, "me"), (None, "you"), False, id="no sessions, two owners"),
        pytest.param((None, "me"), (None, None), False, id="no sessions, not known whose"),
        pytest.param((None, ""), (None, ""), True, id="no sessions, the only owner"),
        pytest.param(("s", "me"), ("s", None), True, id="a session's key tells its owner"),
    ],
)
def test_a_session_is_searched_alone(
    wants: tuple[str | None, str], has: tuple[str | None, str | None], yes: bool
) -> None:
    assert bool(continues(want("abc", *wants), *has, chain("ab"))) is yes


# continued


MAIN, TITLE, FORK = known("main", "abcdef"), known("title", "tu"), known("fork", "abcXY")


@pytest.mark.parametrize(
    ("request_", "caches", "in_use", "key"),
    [
        pytest.param("abcdefg", [], (), None, id="nothing there"),
        pytest.param("abcdefg", [MAIN, TITLE, FORK], (), "main", id="the one it shares most with"),
        pytest.param("abcdefg", [FORK, TITLE, MAIN], (), "main", id="the order does not matter"),
        pytest.param("abcXYZ", [MAIN, TITLE, FORK], (), "fork", id="its fork"),
        pytest.param("tuv", [MAIN, TITLE, FORK], (), "title", id="the side request of the session"),
        pytest.param("new", [MAIN, TITLE, FORK], (), None, id="a new one"),
        pytest.param("abcdefg", [MAIN, TITLE], ("main",), None, id="another request has it"),
        pytest.param("abcdefg", [MAIN, FORK], ("main",), "fork", id="another request has it: the next best"),
        pytest.param("abcdefg", [known("old", "abc", used=1), known("new", "abc", used=2)], (), "new", id="the later"),
        pytest.param(
            "abcdefg", [known("new", "abc", used=2), known("old", "abc", used=1)], (), "new", id="the later one"
        ),
        pytest.param("abcdefg", [known("long", "abcd"), known("new", "abc", used=9)], (), "long", id="more, not later"),
        pytest.param("abc", [known("long", "abcdefg", used=9), known("short", "ab")], (), "short", id="too much in it"),
    ],
)
def test_which_cache_a_request_continues(
    request_: str, caches: list[Known], in_use: tuple[str, ...], key: str | None
) -> None:
    found = continued(want(request_), caches, in_use)
    assert (found and found.key) == key


# donor_of


@pytest.mark.parametrize(
    ("request_", "caches", "donor"),
    [
        pytest.param("ssX", [], None, id="nothing there"),
        pytest.param("ssX", [known("a", "tta", tokens=30)], None, id="nothing shared"),
        pytest.param("ssX", [known("a", "ssa", tokens=30)], ("a", 2, 20), id="the same preamble"),
        pytest.param("ssX", [known("a", "ssa", "another", tokens=30)], ("a", 2, 20), id="of another session"),
        pytest.param("ssX", [known("a", "ssa", owner="you", tokens=30)], None, id="not another owner's"),
        pytest.param("ssX", [known("a", "ssa", owner=None, tokens=30)], None, id="not known whose"),
        pytest.param(
            "ssXY", [known("a", "ssa"), known("b", "ssXb", tokens=40)], ("b", 3, 30), id="the longest beginning"
        ),
        pytest.param("ssX", [known("a", "ss" + "a" * 98, tokens=1000)], ("a", 2, 20), id="a small part of a long one"),
        pytest.param(
            "ssX", [known("a", "ssa", size=9), known("b", "ssb", size=5)], ("b", 2, 0), id="the smallest file"
        ),
        pytest.param("ssX", [known("b", "ssb", size=5), known("a", "ssa", size=9)], ("b", 2, 0), id="in any order"),
        pytest.param("ssX", [known("a", "ssa", tokens=10)], ("a", 2, 6), id="tokens are rounded down"),
        pytest.param("", [known("a", "ssa")], None, id="a prompt that is not known"),
        pytest.param("ssX", [known("a", "")], None, id="a cache of which nothing is known"),
    ],
)
def test_which_cache_lends_its_beginning(
    request_: str, caches: list[Known], donor: tuple[str, int, int] | None
) -> None:
    found = donor_of(want(request_), caches)
    assert (found and (found.cache.key, found.links, found.tokens)) == donor


# whatever there is


texts = st.text("ab", max_size=6)
sessions = st.none() | st.sampled_from(["s", "t"])
owners = st.sampled_from(["", "me"])
wants = st.builds(want, texts, sessions, owners, st.integers(0, 3))
caches = st.lists(
    st.builds(
        known,
        st.text("klm", min_size=1, max_size=2),
        texts,
        sessions,
        st.none() | owners,
        tokens=st.integers(0, 99),
        size=st.integers(0, 9),
        used=st.integers(0, 9).map(float),
    ),
    max_size=8,
    unique_by=lambda cache: cache.key,
)
keys = st.sets(st.text("klm", min_size=1, max_size=2), max_size=3)


@given(wants, caches, keys)
def test_what_is_continued_is_of_the_same_session_free_and_at_least_half_there(
    wanted: Want, there: list[Known], in_use: set[str]
) -> None:
    found = continued(wanted, there, in_use)
    if found is not None:
        assert found in there and found.key not in in_use
        assert found.session == wanted.session
        assert wanted.session is not None or found.owner == wanted.owner
        assert shared_links(wanted.chain, found.chain) >= max(1, CONTINUES_PART * links(found.chain))


@given(wants, caches, keys)
def test_nothing_that_would_be_continued_does_better(wanted: Want, there: list[Known], in_use: set[str]) -> None:
    def rank(cache: Known) -> tuple[int, float]:
        return continues(wanted, cache.session, cache.owner, cache.chain), cache.used

    found = continued(wanted, there, in_use)
    others = [rank(cache) for cache in there if cache.key not in in_use and rank(cache)[0]]
    assert (found is None) == (not others)
    assert found is None or rank(found) == max(others)


@given(wants, caches)
def test_a_donor_is_of_the_same_owner_and_nothing_shares_more(wanted: Want, there: list[Known]) -> None:
    found = donor_of(wanted, there)
    shared = [shared_links(wanted.chain, cache.chain) for cache in there if cache.owner == wanted.owner]
    if found is None:
        assert not any(shared)
        return
    assert found == Donor(found.cache, max(shared), found.tokens)
    assert found.cache.owner == wanted.owner
    assert 0 <= found.tokens <= found.cache.tokens


@given(wants, caches)
def test_a_donor_shares_no_less_than_the_cache_of_one_s_own_that_is_continued(wanted: Want, there: list[Known]) -> None:
    own = continued(wanted, [cache for cache in there if cache.owner == wanted.owner])
    found = donor_of(wanted, there)
    if own is not None:
        assert found is not None
        assert found.links >= shared_links(wanted.chain, own.chain)


def test_thousands_of_caches_are_looked_through_in_a_moment() -> None:
    """The event loop stands still meanwhile: it takes a few milliseconds, not tens of them."""
    draw = random.Random(1)
    preamble = draw.randbytes(8 * 20)
    caches = [
        Known(f"t_{number}", None, "", preamble + draw.randbytes(8 * 380), 6000, 10**6, float(number))
        for number in range(5000)
    ]
    want = Want(None, "", True, caches[77].chain + draw.randbytes(8 * 4), None, 20, "t")
    began = time.process_time()
    assert continued(want, caches) == caches[77]
    assert continued(want, caches, {"t_77"}) is None
    found = donor_of(want, caches)
    assert found is not None and (found.cache, found.links) == (caches[77], 400)
    assert time.process_time() - began < 0.06


@given(st.text("ab", max_size=6), st.text("ab", max_size=6), st.integers(1, 8))
def test_whether_so_many_are_shared_is_what_counting_says(one: str, other: str, count: int) -> None:
    assert shares(chain(one), chain(other), count) == (shared_links(chain(one), chain(other)) >= count)
