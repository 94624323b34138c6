"""Tiny models whose answers show what they have seen: a dense one, and a hybrid one.

The answers of the models in tiny_models.py hardly depend on the prompt: mostly the last token over and over. These have
an output matrix of their own and a strong attention, so other text anywhere in the prompt gives another answer, and at
temperature 0 they say nothing but printable ASCII, never the end mark: one character of the answer is one token.

A real server adds up floating-point numbers in another order when it computes a prompt in other portions, so whether it
answers the same with and without a cache is luck, but for one setting: with `n_ubatch=1`, one token at a time (2000
tokens/s), the answers are the same, to the last digit of their probabilities.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from tiny_models import EMBED, HEAD, _Model, hybrid

STRONG = ("attn_q", "attn_k", "attn_v", "attn_output")


def build_talker(path: Path, seed: int = 3) -> Path:
    """Write the model to `path` and return it."""
    model = _Talker(path, "llama", seed, layers=2)
    model.writer.add_head_count_kv(2)
    model.writer.add_rope_dimension_count(HEAD)
    model.ones("output_norm", EMBED)
    model.random("output", 258, EMBED)
    for layer in range(2):
        model.ones(f"blk.{layer}.attn_norm", EMBED)
        model.attention(layer, kv_heads=2, qk_norm=False)
        model.feed_forward(layer)
    model.close()
    return path


def build_hybrid_talker(path: Path, seed: int = 3) -> Path:
    """Write a model with recurrent layers to `path` and return it."""
    return _build_hybrid(_HybridTalker, path, seed)


def build_hybrid_caller(path: Path, mark: str) -> Path:
    """Write a model with recurrent layers that begins each answer with a line `mark`, which has no character twice, whatever
    it is asked; where that begins a tool call, the server's grammar makes one of it."""

    class Caller(_HybridCaller):
        said = f"\n{mark}\n"

    return _build_hybrid(Caller, path, seed=3)


def _build_hybrid(kind: type[_Model], path: Path, seed: int) -> Path:
    hybrid(path, seed, kind=kind, own_output=True)
    return path


class _Talker(_Model):
    def gain(self, name: str) -> float:
        return 4.0 if name.endswith(STRONG) else 1.0

    def random(self, name: str, *shape: int) -> None:
        values = self.rng.standard_normal(shape).astype(np.float32) * 0.08 * np.float32(self.gain(name))
        if name == "output":
            values[:32] = values[127:] = 0  # a token's number is its byte
        self.writer.add_tensor(f"{name}.weight", values)


class _HybridTalker(_Talker):
    """Its recurrent layers look at three tokens only, so more must come of what its attention finds."""

    def gain(self, name: str) -> float:
        if name.endswith(STRONG):
            return 20.0
        return 2.0 if "shortconv" in name else 0.3 if name == "token_embd" else 1.0


class _HybridCaller(_Model):
    """Its layers hardly count, so that the last token alone tells the next one."""

    said = ""

    def random(self, name: str, *shape: int) -> None:
        values = self.rng.standard_normal(shape).astype(np.float32)
        if name == "token_embd":
            self.embedded = values
        elif name == "output":
            values *= 0.1
            for now, then in itertools.pairwise(self.said.encode()):
                values[then] = self.embedded[now]
        else:
            values *= 0.01
        self.writer.add_tensor(f"{name}.weight", values)
