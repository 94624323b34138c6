"""A tiny dense model whose answers show what it has seen.

The answers of the models in tiny_models.py hardly depend on the prompt: mostly the last token over and over. This one has
an output matrix of its own and a strong attention, so other text anywhere in the prompt gives another answer, and at
temperature 0 it says nothing but printable ASCII, never the end mark: one character of the answer is one token.

A real server adds up floating-point numbers in another order when it computes a prompt in other portions, so whether it
answers the same with and without a cache is luck, but for one setting: with `n_ubatch=1`, one token at a time (2000
tokens/s), the answers are the same, to the last digit of their probabilities.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tiny_models import EMBED, HEAD, _Model

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


class _Talker(_Model):
    def random(self, name: str, *shape: int) -> None:
        values = self.rng.standard_normal(shape).astype(np.float32) * 0.08
        if name.endswith(STRONG):
            values *= 4
        if name == "output":
            values[:32] = values[127:] = 0  # a token's number is its byte
        self.writer.add_tensor(f"{name}.weight", values)
