"""Tiny random models in GGUF: a few MB, tens of thousands of tokens per second on a CPU, for tests with a real llama-server.

`python tests/tiny_models.py FOLDER` writes them by hand. Their answers are noise (the same noise each time at temperature 0);
their memory behaves as that of real models of the kind:

dense   (llama)   a restored slot is reused up to the last common token
other   (llama)   dense's shape with other weights: the server restores dense's files into it without a word
swa     (gemma3)  sliding-window attention: a restored slot is not reused, unless the server runs with --swa-full
hybrid  (lfm2)    recurrent layers: a restored slot is reused only by a prompt that continues all of it

The tokenizer is made here: one token a byte, and the two marks of a ChatML template. So a prompt's tokens can be counted by
hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EMBED, FEED_FORWARD, HEADS, CONTEXT = 64, 128, 4, 131072
HEAD = EMBED // HEADS


def build_all(folder: Path) -> Path:
    """Write all four models into `folder`, which is made if absent, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    dense(folder / "dense.gguf")
    dense(folder / "other.gguf", seed=7)
    swa(folder / "swa.gguf")
    hybrid(folder / "hybrid.gguf")
    return folder


def dense(path: Path, seed: int = 0) -> None:
    model = _Model(path, "llama", seed, layers=2)
    model.writer.add_head_count_kv(2)
    model.writer.add_rope_dimension_count(HEAD)
    model.ones("output_norm", EMBED)
    for layer in range(2):
        model.ones(f"blk.{layer}.attn_norm", EMBED)
        model.attention(layer, kv_heads=2, qk_norm=False)
        model.feed_forward(layer)
    model.close()


def swa(path: Path, seed: int = 1) -> None:
    model = _Model(path, "gemma3", seed, layers=6)  # five windowed layers, then one that sees everything
    model.writer.add_head_count_kv(2)
    model.writer.add_sliding_window(128)
    model.writer.add_key_length(HEAD)
    model.writer.add_value_length(HEAD)
    model.ones("output_norm", EMBED)
    for layer in range(6):
        model.ones(f"blk.{layer}.attn_norm", EMBED)
        model.attention(layer, kv_heads=2, qk_norm=True)
        model.feed_forward(layer)
        model.ones(f"blk.{layer}.post_attention_norm", EMBED)
        model.ones(f"blk.{layer}.post_ffw_norm", EMBED)
    model.close()


def hybrid(path: Path, seed: int = 2, *, kind: type[_Model] | None = None, own_output: bool = False) -> None:
    kv_heads, window = [0, 2, 0, 2], 3  # no key/value heads: a recurrent (short convolution) layer
    model = (kind or _Model)(path, "lfm2", seed, layers=len(kv_heads))
    model.writer.add_head_count_kv(kv_heads)
    model.writer.add_uint32("lfm2.shortconv.l_cache", window)
    model.ones("token_embd_norm", EMBED)
    if own_output:
        model.random("output", 258, EMBED)
    for layer, heads in enumerate(kv_heads):
        model.ones(f"blk.{layer}.attn_norm", EMBED)
        model.feed_forward(layer)
        if heads:
            model.attention(layer, heads, qk_norm=True)
        else:
            model.random(f"blk.{layer}.shortconv.conv", EMBED, window)
            model.random(f"blk.{layer}.shortconv.in_proj", 3 * EMBED, EMBED)
            model.random(f"blk.{layer}.shortconv.out_proj", EMBED, EMBED)
    model.close()


class _Model:
    def __init__(self, path: Path, arch: str, seed: int, layers: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.writer = writer = GGUFWriter(path, arch)
        writer.add_name(f"tiny-random-{path.stem}")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(EMBED)
        writer.add_feed_forward_length(FEED_FORWARD)
        writer.add_block_count(layers)
        writer.add_head_count(HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1e6)
        tokens = [*_byte_symbols(), "<|im_start|>", "<|im_end|>"]
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])  # the loader wants one: two control bytes
        writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2)
        writer.add_bos_token_id(256)
        writer.add_eos_token_id(257)
        writer.add_pad_token_id(257)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
        writer.add_vocab_size(len(tokens))
        self.random("token_embd", len(tokens), EMBED)

    def random(self, name: str, *shape: int) -> None:
        self.writer.add_tensor(f"{name}.weight", (self.rng.standard_normal(shape) * 0.08).astype(np.float32))

    def ones(self, name: str, n: int) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))

    def attention(self, layer: int, kv_heads: int, qk_norm: bool) -> None:
        self.random(f"blk.{layer}.attn_q", EMBED, EMBED)
        self.random(f"blk.{layer}.attn_output", EMBED, EMBED)
        self.random(f"blk.{layer}.attn_k", kv_heads * HEAD, EMBED)
        self.random(f"blk.{layer}.attn_v", kv_heads * HEAD, EMBED)
        if qk_norm:
            self.ones(f"blk.{layer}.attn_q_norm", HEAD)
            self.ones(f"blk.{layer}.attn_k_norm", HEAD)

    def feed_forward(self, layer: int) -> None:
        self.ones(f"blk.{layer}.ffn_norm", EMBED)
        self.random(f"blk.{layer}.ffn_gate", FEED_FORWARD, EMBED)
        self.random(f"blk.{layer}.ffn_up", FEED_FORWARD, EMBED)
        self.random(f"blk.{layer}.ffn_down", EMBED, FEED_FORWARD)

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def _byte_symbols() -> list[str]:
    """The 256 printable characters that byte-level BPE stands for bytes with."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(spare)) for byte in range(256)]


if __name__ == "__main__":
    build_all(Path(sys.argv[1]))
