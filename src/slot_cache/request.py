"""What a request is to us, read from the arguments that LiteLLM hands to its hooks."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slot_cache.llama_server import base_url_of
from slot_cache.settings import Settings

MASTER_KEY = "litellm_proxy_master_key"
"""What LiteLLM writes in place of a key's hash for the master key."""

DEFAULT_USER = "default_user_id"
"""LiteLLM's user where there are none."""

SESSION_MADE_UP = "litellm_session_id_generated"
"""LiteLLM's mark on a session id that it made up itself, for a request that had none."""

_KEPT_CHARS = 200
"""What is made of longer names, which clients may choose, is not kept."""

_HEX = re.compile(r"[0-9a-f]{32}")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class RequestError(ValueError):
    """The request lacks something that a managed route needs. The message says what."""


@dataclass(frozen=True)
class CacheRequest:
    """One request to a managed route.

    Attributes:
        route: the model_name the client asked for.
        base_url: the server, without /v1.
        api_key: the server's key, None for none.
        model: the name by which the server is asked for the model.
        session: 32 hex digits that stand for who is asking, None if nobody told.
        owner: the LiteLLM key's hash, or the user's id where there is no key; "" for the master key and where there are
            none.
    """

    route: str
    base_url: str
    api_key: str | None
    model: str
    session: str | None
    owner: str

    @property
    def tag(self) -> str:
        """The beginning of the file names of the route."""
        return route_tag(self.route)

    @property
    def key(self) -> str | None:
        """The name of the cache that the request would continue."""
        return None if self.session is None else f"{self.tag}_{self.session}"


def route_tag(route: str) -> str:
    """A route's name as part of a file name: safe characters only, and no two routes have the same."""
    return (_route_tag if len(route) <= _KEPT_CHARS else _route_tag.__wrapped__)(route)


@lru_cache(maxsize=1024)
def _route_tag(route: str) -> str:
    digest = hashlib.sha256(route.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_UNSAFE.sub('_', route)[:40]}-{digest[:8]}"


def session_digest(session_id: str, owner: str) -> str:
    """32 hex digits for a session id: itself if it is such already and there is only one LiteLLM key, else a hash."""
    if not owner and _HEX.fullmatch(session_id):
        return session_id
    text = session_id.encode("utf-8", "surrogatepass")
    if owner:  # a keyed hash: no session id of another owner, however it is made up, comes to the same
        return hmac.new(owner.encode("utf-8", "surrogatepass"), text, hashlib.sha256).hexdigest()[:32]
    return hashlib.sha256(text).hexdigest()[:32]


def request_metadata(kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dict where LiteLLM's router keeps what it knows of the request: `metadata` or `litellm_metadata`.

    The other one, where it exists, is the client's own and goes to the server: it is not ours to read or write.
    """
    for name in ("litellm_metadata", "metadata"):
        found = kwargs.get(name)
        if isinstance(found, dict) and "model_group" in found:
            return found
    return None


def route_of(kwargs: Mapping[str, Any]) -> str | None:
    """The model_name the client asked for, None if the request did not come through a router."""
    metadata = request_metadata(kwargs)
    route = metadata.get("model_group") if metadata is not None else None
    return route if isinstance(route, str) and route else None


def read_request(kwargs: Mapping[str, Any], settings: Settings) -> CacheRequest:
    """Read a request of a managed route.

    Raises:
        RequestError: there is no route, or no api_base that is an http URL.
    """
    route = route_of(kwargs)
    if route is None:
        raise RequestError("the request came without a route")
    api_base = kwargs.get("api_base")
    if not isinstance(api_base, str) or not api_base.strip():
        raise RequestError("litellm_params has no api_base")
    try:
        base_url = base_url_of(api_base)
    except ValueError:
        raise RequestError("litellm_params.api_base is no http or https URL") from None
    key = kwargs.get("api_key")
    owner = _owner(kwargs) if settings.scope == "key" else ""
    session_id = _session_id(kwargs, settings.session_headers)
    return CacheRequest(
        route=route,
        base_url=base_url,
        model=settings.model or upstream_model(kwargs),
        api_key=key if isinstance(key, str) and key.strip().lower() not in ("", "none") else None,
        session=None if session_id is None else session_digest(session_id, owner),
        owner=owner,
    )


def upstream_model(kwargs: Mapping[str, Any]) -> str:
    """The model's name as LiteLLM sends it to the server: without the provider's prefix, by LiteLLM's own rules."""
    model, provider, api_base = (kwargs.get(name) for name in ("model", "custom_llm_provider", "api_base"))
    if not isinstance(model, str):
        return ""
    known = _upstream_model if len(model) <= _KEPT_CHARS else _upstream_model.__wrapped__
    return known(
        model, provider if isinstance(provider, str) else None, api_base if isinstance(api_base, str) else None
    )


@lru_cache(maxsize=1024)
def _upstream_model(model: str, provider: str | None, api_base: str | None) -> str:
    from litellm import get_llm_provider

    try:
        return str(get_llm_provider(model=model, custom_llm_provider=provider, api_base=api_base)[0])
    except Exception:  # a name that LiteLLM has no provider for: it will say so itself
        return model


def _owner(kwargs: Mapping[str, Any]) -> str:
    metadata = request_metadata(kwargs) or {}
    found = metadata.get("user_api_key_hash")
    if isinstance(found, str) and found:
        return found if found != MASTER_KEY else ""
    user = metadata.get("user_api_key_user_id")  # somebody who came without a key, by single sign-on
    return user if isinstance(user, str) and user != DEFAULT_USER else ""


def _session_id(kwargs: Mapping[str, Any], headers: tuple[str, ...]) -> str | None:
    sent = kwargs.get("proxy_server_request")
    sent_headers = sent.get("headers") if isinstance(sent, Mapping) else None
    if isinstance(sent_headers, Mapping):
        for name in headers:
            value = sent_headers.get(name)
            if isinstance(value, str) and value.strip():
                return value.strip()
    for place in (kwargs, kwargs.get("extra_body")):
        value = place.get("prompt_cache_key") if isinstance(place, Mapping) else None
        if isinstance(value, str) and value.strip():
            return value.strip()
    if (request_metadata(kwargs) or {}).get(SESSION_MADE_UP):
        return None
    value = kwargs.get("litellm_session_id")
    return value.strip() if isinstance(value, str) and value.strip() else None
