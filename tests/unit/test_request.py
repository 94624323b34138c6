"""What a request is to us: its route, its server, its session, its owner and its key."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from litellm.constants import LITELLM_PROXY_MASTER_KEY_ALIAS, SESSION_ID_GENERATED_METADATA_KEY

from slot_cache.folder import SAFE_KEY, tag_of
from slot_cache.request import (
    MASTER_KEY,
    SESSION_MADE_UP,
    CacheRequest,
    RequestError,
    read_request,
    request_metadata,
    route_of,
    route_tag,
    session_digest,
)
from slot_cache.settings import Settings

HEX = "0123456789abcdef0123456789abcdef"
OWNER = hashlib.sha256(b"sk-one").hexdigest()
OTHER_OWNER = hashlib.sha256(b"sk-two").hexdigest()


def sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def asked(
    *, headers: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {
        "api_base": "http://llama:8080/v1",
        "metadata": {"model_group": "smol", **(metadata or {})},
        "proxy_server_request": {"headers": headers or {}},
        **more,
    }


def read(settings: Settings | None = None, **more: Any) -> CacheRequest:
    return read_request(asked(**more), settings or Settings())


# whose session it is


MADE_UP = {"metadata": {SESSION_MADE_UP: True}}


@pytest.mark.parametrize(
    ("given", "session_id"),
    [
        pytest.param({}, None, id="nothing"),
        pytest.param({"headers": {"x-session-id": "h"}}, "h", id="first header"),
        pytest.param({"headers": {"x-openwebui-chat-id": "o"}}, "o", id="second header"),
        pytest.param(
            {"headers": {"x-openwebui-chat-id": "o", "x-session-id": "h"}}, "h", id="first before second header"
        ),
        pytest.param({"headers": {"x-session-id": "h"}, "prompt_cache_key": "p"}, "h", id="header before body"),
        pytest.param({"headers": {"x-session-id": "h"}, "litellm_session_id": "l"}, "h", id="header before LiteLLM's"),
        pytest.param({"prompt_cache_key": "p"}, "p", id="body"),
        pytest.param({"prompt_cache_key": "p", "litellm_session_id": "l"}, "p", id="body before LiteLLM's"),
        pytest.param({"extra_body": {"prompt_cache_key": "e"}}, "e", id="extra body"),
        pytest.param({"extra_body": {"prompt_cache_key": "e"}, "prompt_cache_key": "p"}, "p", id="body before extra"),
        pytest.param(
            {"extra_body": {"prompt_cache_key": "e"}, "litellm_session_id": "l"}, "e", id="extra before LiteLLM's"
        ),
        pytest.param({"litellm_session_id": "l"}, "l", id="LiteLLM's"),
        pytest.param({"litellm_session_id": "l", **MADE_UP}, None, id="made up by LiteLLM"),
        pytest.param(
            {"headers": {"x-session-id": "h"}, "litellm_session_id": "l", **MADE_UP}, "h", id="header, one made up"
        ),
        pytest.param({"prompt_cache_key": "p", "litellm_session_id": "l", **MADE_UP}, "p", id="body, one made up"),
        pytest.param({"headers": {"x-session-id": "  h "}}, "h", id="spaces around it do not count"),
        pytest.param({"headers": {"x-session-id": "  "}, "prompt_cache_key": "p"}, "p", id="an empty header is none"),
        pytest.param({"headers": {"x-session-id": 7}, "prompt_cache_key": "p"}, "p", id="a header that is no text"),
        pytest.param({"prompt_cache_key": "", "litellm_session_id": "l"}, "l", id="an empty body field is none"),
        pytest.param({"prompt_cache_key": ["p"], "litellm_session_id": "l"}, "l", id="a body field that is no text"),
        pytest.param({"litellm_session_id": "  "}, None, id="an empty one of LiteLLM"),
        pytest.param({"litellm_session_id": 7}, None, id="one of LiteLLM that is no text"),
        pytest.param({"proxy_server_request": None, "litellm_session_id": "l"}, "l", id="no headers at all"),
        pytest.param(
            {"proxy_server_request": {"headers": None}, "litellm_session_id": "l"}, "l", id="headers are nothing"
        ),
        pytest.param({"extra_body": "p", "litellm_session_id": "l"}, "l", id="extra body is text"),
    ],
)
def test_the_first_session_id_that_fits_counts(given: dict[str, Any], session_id: str | None) -> None:
    assert read(**given).session == (None if session_id is None else sha(session_id))


def test_the_headers_are_those_of_the_settings() -> None:
    settings = Settings(session_headers=("x-chat", "x-talk"))
    assert read(settings, headers={"x-talk": "t", "x-session-id": "h"}).session == sha("t")
    assert read(settings, headers={"x-session-id": "h"}).session is None


def test_a_request_without_a_session_has_no_key() -> None:
    request = read()
    assert request.session is None
    assert request.key is None


# keys


def test_hex_ids_are_used_as_they_are() -> None:
    assert read(headers={"x-session-id": HEX}).session == HEX


@pytest.mark.parametrize(
    "session_id",
    [HEX.upper(), HEX[:-1], HEX + "0", HEX[:-1] + "g", HEX[:16] + "-" + HEX[16:], "\N{FULLWIDTH DIGIT ONE}" * 32],
)
def test_other_ids_are_hashed(session_id: str) -> None:
    assert read(headers={"x-session-id": session_id}).session == sha(session_id)


def test_hex_ids_of_one_key_of_many_are_hashed_with_the_key() -> None:
    session = read(headers={"x-session-id": HEX}, metadata={"user_api_key_hash": OWNER}).session
    assert session is not None
    assert session != HEX
    assert re.fullmatch(r"[0-9a-f]{32}", session)


def test_the_names_that_litellm_uses_are_known() -> None:
    assert MASTER_KEY == LITELLM_PROXY_MASTER_KEY_ALIAS
    assert SESSION_MADE_UP == SESSION_ID_GENERATED_METADATA_KEY


@pytest.mark.parametrize("who", [MASTER_KEY, None, 7, ""])
def test_the_master_key_is_no_owner(who: object) -> None:
    request = read(headers={"x-session-id": HEX}, metadata={"user_api_key_hash": who})
    assert request.owner == ""
    assert request.session == HEX


def test_two_keys_of_litellm_do_not_reach_each_other_s_cache() -> None:
    one = read(headers={"x-session-id": "h"}, metadata={"user_api_key_hash": OWNER})
    other = read(headers={"x-session-id": "h"}, metadata={"user_api_key_hash": OTHER_OWNER})
    assert one.key != other.key
    assert (one.owner, other.owner) == (OWNER, OTHER_OWNER)


def test_they_do_where_the_scope_is_shared() -> None:
    shared = Settings(scope="shared")
    one = read(shared, headers={"x-session-id": HEX}, metadata={"user_api_key_hash": OWNER})
    other = read(shared, headers={"x-session-id": HEX}, metadata={"user_api_key_hash": OTHER_OWNER})
    assert one == other
    assert one.owner == ""
    assert one.session == HEX


owners = st.text("0123456789abcdef", min_size=1, max_size=64)


@given(owners, owners, st.text(), st.text())
@example("a", "ab", "bc", "c")
def test_no_two_owners_have_the_same_session(owner: str, other: str, session_id: str, other_id: str) -> None:
    assume(owner != other)
    assert session_digest(session_id, owner) != session_digest(other_id, other)


@given(owners, st.text(), st.text().filter(lambda text: not re.fullmatch(r"[0-9a-f]{32}", text)))
@example("a", "b", "a\0b")
def test_nor_has_the_only_owner_that_of_another(owner: str, session_id: str, own_id: str) -> None:
    assert session_digest(session_id, owner) != session_digest(own_id, "")


@given(st.text(), st.text(), st.just("") | owners)
def test_no_two_sessions_of_an_owner_are_the_same(one: str, other: str, owner: str) -> None:
    assume(one != other)
    assert session_digest(one, owner) != session_digest(other, owner)


HOSTILE = [
    "smol",
    "openai/smol",
    "a.b.c",
    "..",
    "../../etc/passwd",
    ".hidden",
    "a\nb",
    "a\0b",
    " ",
    "*",
    "C:\\x",
    "r\N{LATIN SMALL LETTER O WITH DIAERESIS}ute",
    "\N{SNOWMAN}" * 50,
    "\ud800",
    "a\udcffb",
    "x" * 10_000,
    "-rf",
    "a_" * 100,
]


@pytest.mark.parametrize("route", HOSTILE, ids=lambda route: ascii(route)[:30])
@pytest.mark.parametrize(
    "session_id", ["s", HEX, "\ud800", "../x", "\0", "s" * 10_000], ids=lambda text: ascii(text)[:12]
)
def test_a_key_is_a_plain_file_name(route: str, session_id: str) -> None:
    request = read_request(asked(metadata={"model_group": route}, headers={"x-session-id": session_id}), Settings())
    assert request.route == route
    assert request.key is not None
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}-[0-9a-f]{8}_[0-9a-f]{32}", request.key)
    assert SAFE_KEY.fullmatch(request.key)
    assert request.key.startswith(request.tag + "_")


@pytest.mark.parametrize(
    ("route", "tag"),
    [
        ("smol", "smol-" + hashlib.sha256(b"smol").hexdigest()[:8]),
        ("openai/smol.q4", "openai_smol_q4-" + hashlib.sha256(b"openai/smol.q4").hexdigest()[:8]),
        ("Aa0_-", "Aa0_--" + hashlib.sha256(b"Aa0_-").hexdigest()[:8]),
        ("x" * 41, "x" * 40 + "-" + hashlib.sha256(b"x" * 41).hexdigest()[:8]),
    ],
)
def test_a_route_tag_is_the_route_and_a_hash_of_it(route: str, tag: str) -> None:
    assert route_tag(route) == tag


def test_routes_that_look_alike_have_other_tags() -> None:
    alike = ["a/b", "a.b", "a_b", "a b", "a:b", "a\nb", "x" * 40 + "1", "x" * 40 + "2"]
    assert len({route_tag(route) for route in alike}) == len(alike)


@given(st.text(min_size=1), st.text(min_size=1))
@example("smol", f"{route_tag('smol')}_x")
def test_no_route_s_files_look_like_another_s(one: str, other: str) -> None:
    assume(one != other)
    assert tag_of(f"{route_tag(one)}_{HEX}") == route_tag(one) != tag_of(f"{route_tag(other)}_{HEX}")


# where it goes


@pytest.mark.parametrize(
    ("api_base", "base_url"),
    [
        ("http://llama:8080", "http://llama:8080"),
        ("http://llama:8080/", "http://llama:8080"),
        ("http://llama:8080/v1", "http://llama:8080"),
        ("http://llama:8080/v1/", "http://llama:8080"),
        ("http://llama:8080/v1//", "http://llama:8080"),
        (" http://llama:8080/v1 ", "http://llama:8080"),
        ("https://llama/v1", "https://llama"),
        ("http://llama/behind/a/proxy/v1", "http://llama/behind/a/proxy"),
        ("http://llama/v10", "http://llama/v10"),
        ("http://llama/xv1", "http://llama/xv1"),
        ("http://[::1]:8080/v1", "http://[::1]:8080"),
        ("http://[2001:db8::1]/v1", "http://[2001:db8::1]"),
        ("http://user:word@llama:8080/v1", "http://user:word@llama:8080"),
        ("http://llama:8080/v1?x=1#y", "http://llama:8080"),
    ],
)
def test_the_server_is_the_deployment_s_own(api_base: str, base_url: str) -> None:
    assert read(api_base=api_base).base_url == base_url


@pytest.mark.parametrize("api_base", [None, "", "  ", 7, ["http://llama"]])
def test_no_api_base_is_said_to_be_missing(api_base: object) -> None:
    with pytest.raises(RequestError, match="no api_base"):
        read(api_base=api_base)


@pytest.mark.parametrize(
    "api_base",
    [
        "llama:8080",
        "/v1",
        "ftp://llama",
        "unix:/run/llama.sock",
        "http://",
        "http:///v1",
        "http://[::1",
        "http://llama:port/v1",
        "http://llama:99999/v1",
    ],
)
def test_an_api_base_that_is_no_url_is_said_to_be_wrong(api_base: str) -> None:
    with pytest.raises(RequestError, match="no http or https URL"):
        read(api_base=api_base)


@pytest.mark.parametrize("key", [None, "", " ", "none", "None", "NONE", " none ", 7])
def test_none_and_empty_are_no_api_key(key: object) -> None:
    assert read(api_key=key).api_key is None


def test_any_other_is_an_api_key() -> None:
    assert read(api_key="sk-llama").api_key == "sk-llama"


# what LiteLLM keeps for it


@pytest.mark.parametrize(
    ("kwargs", "route"),
    [
        ({"metadata": {"model_group": "m"}}, "m"),
        ({"litellm_metadata": {"model_group": "l"}}, "l"),
        ({"litellm_metadata": {"model_group": "l"}, "metadata": {"model_group": "m"}}, "l"),
        ({"litellm_metadata": {}, "metadata": {"model_group": "m"}}, "m"),
        ({"litellm_metadata": {"model_group": "l"}, "metadata": {"user_id": "u"}}, "l"),
        ({"litellm_metadata": None, "metadata": {"model_group": "m"}}, "m"),
        ({"metadata": {}}, None),
        ({"metadata": None}, None),
        ({"metadata": "m"}, None),
        ({"metadata": {"model_group": None}}, None),
        ({"metadata": {"model_group": ""}}, None),
        ({"metadata": {"model_group": 7}}, None),
        ({}, None),
    ],
)
def test_the_route_is_where_the_router_put_it(kwargs: dict[str, Any], route: str | None) -> None:
    assert route_of(kwargs) == route


def test_the_client_s_own_metadata_is_not_the_router_s() -> None:
    kwargs = {"litellm_metadata": {"model_group": "l"}, "metadata": {"user_id": "u"}}
    assert request_metadata(kwargs) is kwargs["litellm_metadata"]


def test_the_key_s_hash_is_found_in_litellm_metadata_as_well() -> None:
    kwargs = asked(headers={"x-session-id": "h"})
    kwargs["litellm_metadata"] = {"model_group": "smol", "user_api_key_hash": OWNER}
    kwargs["metadata"] = {"user_api_key_hash": OTHER_OWNER}
    assert read_request(kwargs, Settings()).owner == OWNER


def test_a_request_without_a_route_is_none_of_ours() -> None:
    with pytest.raises(RequestError, match="route"):
        read_request({"api_base": "http://llama", "metadata": {}}, Settings())
