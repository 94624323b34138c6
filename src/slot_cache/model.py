"""Which model a server runs, told by what it says of itself: a cache fits only the model that wrote it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_META = ("n_params", "size", "n_vocab", "n_embd", "n_ctx_train", "ftype", "vocab_type")


@dataclass(frozen=True)
class Identity:
    """A server's model and process.

    Attributes:
        model: the model's fingerprint, 32 hex digits.
        boot: differs after each start of the server, "" where the server's build does not tell.
        name: the model file's name, for people.
        sleeping: the server has unloaded the model for now.
        build: the server's build, "" if it does not tell.
    """

    model: str
    boot: str
    name: str = ""
    sleeping: bool = False
    build: str = ""

    @property
    def kind_key(self) -> str:
        """What is learned of the model with this build is recorded under it: another build may save more, or less."""
        return f"{self.model} {self.build}" if self.build else self.model

    def useless_key(self, server: str) -> str:
        """That the model's restores are of no use on a server is recorded under it, with the server's `boot`: started with
        other options it may be otherwise."""
        return f"{self.model} {server}"


def boot_of(props: Mapping[str, Any]) -> str:
    """What differs from start to start. llama-server draws its media marker anew each time (builds since mid-2026)."""
    marker = props.get("media_marker")
    return marker if isinstance(marker, str) and marker not in ("", "<__media__>") else ""


def identity_of(props: Mapping[str, Any], entry: Mapping[str, Any]) -> Identity:
    """The identity from the answer of `GET /props` and the model's entry in that of `GET /v1/models`.

    The fingerprint covers the file's path, the model's sizes and types, the chat template, LoRA adapters, and, where the path can be
    seen from here, the file's size and time of change: a file of the same shape put in its place is another model.
    """
    path = str(props.get("model_path") or "")
    meta = entry.get("meta")
    told = {name: meta.get(name) for name in _META} if isinstance(meta, Mapping) else {}
    template = props.get("chat_template")
    parts = {
        "path": path,
        "ftype": props.get("model_ftype"),
        "template": hashlib.sha256(str(template).encode("utf-8", "surrogatepass")).hexdigest(),
        "meta": told,
        "lora": _adapters(props),
        "file": _file_state(path),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return Identity(
        model=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32],
        boot=boot_of(props),
        name=path.replace("\\", "/").rpartition("/")[2],
        sleeping=props.get("is_sleeping") is True,
        build=str(props.get("build_info") or "")[:80],
    )


def _adapters(props: Mapping[str, Any]) -> object:
    """The LoRA adapters that the server applies by default."""
    settings = props.get("default_generation_settings")
    params = settings.get("params") if isinstance(settings, Mapping) else None
    return params.get("lora") if isinstance(params, Mapping) else None


def _file_state(path: str) -> list[int] | None:
    """Size and time of change of the model's file, None where it cannot be seen. One system call."""
    if not path.startswith("/"):
        return None
    try:
        info = Path(path).stat()
    except (OSError, ValueError):
        return None
    return [info.st_size, info.st_mtime_ns]
