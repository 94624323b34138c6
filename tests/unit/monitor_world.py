"""Readings and statuses for the tests of the monitor, in the shapes of llama-server's and the plugin's answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "llama-server"
SERVER = "http://127.0.0.1:8080"
NOON = 1_800_000_000.0
HARBOUR, ORCHARD = "ab" * 16, "cd" * 16
HARBOUR_KEY, ORCHARD_KEY = f"local-12345678_{HARBOUR}", f"local-12345678_{ORCHARD}"


def recorded(name: str) -> Any:
    """The body of a recorded answer."""
    return json.loads((FIXTURES / f"{name}.json").read_text())["body"]


def reading(
    number: int, *, tokens: int = 0, busy: bool = False, task: int = 0, decoded: int = 0, remain: int = -1
) -> dict[str, Any]:
    """An entry of /slots."""
    return {
        "id": number,
        "n_ctx": 4096,
        "is_processing": busy,
        "id_task": task,
        "n_prompt_tokens": tokens,
        "next_token": [{"n_decoded": decoded, "n_remain": remain}],
    }


def slot_status(number: int, **told: Any) -> dict[str, Any]:
    """An entry of a server's slots in the plugin's status."""
    return {
        "id": number,
        "state": "idle",
        "key": None,
        "session": None,
        "route": None,
        "messages": None,
        "tokens": 0,
        "context": 4096,
        "used": None,
        "requests": 0,
        "dirty": False,
        "saved_tokens": 0,
        "last_outcome": None,
        "idle_seconds": None,
        "score": 0.0,
        "next_to_go": False,
        "holder": None,
        "holder_seconds": None,
        "text": "",
        **told,
    }


def cache(key: str, **told: Any) -> dict[str, Any]:
    """A saved cache in the plugin's status."""
    return {
        "key": key,
        "session": key.rpartition("_")[2],
        "tokens": 1092,
        "bytes": 25_000_000,
        "created": NOON - 100,
        "used": NOON - 100,
        "uses": 0,
        "seconds": 2.5,
        "fingerprint": "f" * 16,
        **told,
    }


def recomputed(**told: Any) -> dict[str, Any]:
    """A request of which the status says why it was computed again."""
    return {
        "at": NOON + 1,
        "key": HARBOUR_KEY,
        "session": HARBOUR,
        "route": "local",
        "outcome": "resident",
        "cause": "edited",
        "why": "message 3 (user) was edited",
        "message": 3,
        "from_token": 400,
        "reused": 400,
        "computed": 700,
        "again": 650,
        "seconds": 2.2,
        **told,
    }


def status(*slots: dict[str, Any], caches: tuple[dict[str, Any], ...] = (), **told: Any) -> dict[str, Any]:
    """The plugin's status: one server, one route."""
    server = {
        "server": SERVER,
        "model": None,
        "name": "model.gguf",
        "fingerprint": "f" * 16,
        "build": "b11549",
        "kind": "plain",
        "sleeping": False,
        "clears_idle": False,
        "hung": False,
        "off": False,
        "slot_count": len(slots),
        "slots": list(slots),
        "waiting": 0,
        "waits": [],
        "speeds": {"prefill": 400.0, "restore": 1e9, "token_bytes": 23040.0},
        "counts": {},
        **told.pop("server", {}),
    }
    route = {
        "route": "local",
        "server": None,
        "folder": "/srv/slot-cache",
        "files": len(caches),
        "bytes": sum(entry["bytes"] for entry in caches),
        "max_files": 0,
        "max_bytes": 20 * 2**30,
        "caches": list(caches),
    }
    totals = {
        "steadied": {},
        "requests": {"resident": 3, "restored": 5, "donor": 0, "cold": 2, "unmanaged": 0},
        "tokens_reused": 8000,
        "tokens_computed": 2000,
        "wait_seconds": 1.5,
        "prefill_seconds_saved": 17.2,
        "prefill_seconds_saved_by": "an estimate",
        "saves": 4,
        "restores": 5,
        "evictions": 0,
        "failures": {},
    }
    return {
        "version": "0.1.0",
        "worker": 4711,
        "started": NOON - 1000,
        "now": NOON,
        "servers": [server],
        "routers": [],
        "routes": [route],
        "totals": totals | told.pop("totals", {}),
        "recomputed": [],
        **told,
    }
