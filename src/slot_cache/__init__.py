"""Every conversation's prompt cache on llama-server, saved and restored by a LiteLLM proxy callback.

In config.yaml: `litellm_settings: {callbacks: slot_cache.proxy_handler_instance}`, and `model_info: {slot_cache: true}`
on the routes that ask for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slot_cache.hook import SlotCacheHook

__version__ = "0.1.0"
__all__ = ["SlotCacheHook", "__version__", "proxy_handler_instance"]

proxy_handler_instance: SlotCacheHook
"""The callback; there is one in a process. It is made when it is first asked for, so that the command line can do
without importing litellm."""


def __getattr__(name: str) -> Any:
    if name == "SlotCacheHook":
        from slot_cache.hook import SlotCacheHook

        return SlotCacheHook
    if name == "proxy_handler_instance":
        from slot_cache.hook import SlotCacheHook

        instance = globals()[name] = SlotCacheHook()
        return instance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
