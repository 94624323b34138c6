"""Configurations of LiteLLM proxies, as config.yaml would hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CALLBACK = "slot_cache.proxy_handler_instance"


def route(
    name: str,
    base_url: str,
    *,
    api_key: str | None = None,
    slot_cache: Mapping[str, Any] | bool | None = None,
    id_slot: int | None = None,
    retries: int = 0,
) -> dict[str, Any]:
    """An entry of model_list: the route `name` to the llama-server at `base_url` (without /v1).

    slot_cache   options of the plugin; None: the route is not the plugin's
    id_slot      pin every request of the route to a slot, for a route without the plugin
    retries      how often a failed request is sent again: the connection may have turned out to be broken
    """
    params: dict[str, Any] = {
        "model": f"openai/{name}",
        "api_base": f"{base_url}/v1",
        "api_key": api_key or "none",
        "timeout": 600,
        "max_retries": 0,
    }
    if retries:
        params["num_retries"] = retries  # LiteLLM's router sets max_retries, those of the connection, to 0
    if id_slot is not None:
        params["extra_body"] = {"id_slot": id_slot}
    entry: dict[str, Any] = {"model_name": name, "litellm_params": params}
    if slot_cache is not None:
        entry["model_info"] = {"slot_cache": dict(slot_cache) if isinstance(slot_cache, Mapping) else slot_cache}
    return entry


def config(*routes: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration; the callback is loaded when one of the routes asks for it. Failed requests stay failed."""
    settings: dict[str, Any] = {"num_retries": 0}
    if any("slot_cache" in entry.get("model_info", {}) for entry in routes):
        settings["callbacks"] = CALLBACK
    return {"model_list": list(routes), "litellm_settings": settings, "router_settings": {"disable_cooldowns": True}}
