"""What a model will take on its card, about, from its file and its options alone: until it was measured.

Pure. Rather too much than too little: a sliding window and layers that keep no keys are counted like any other where
the file does not say how many there are. Source: llama.cpp's KV cache is layers x tokens x (K heads x width + V heads x
width), in the block formats of ggml; what it needs beside weights and cache is a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from presets import ModelOptions
from workers.llama.strategy import Scalar

MIB = 1 << 20
BESIDE_MIB = 512
BESIDE_PART = 0.05
"""The driver's context and the buffers it computes in: a fixed part, and one that grows with the model."""
_BYTES = {
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}
"""Bytes of one number of a KV cache, by its type."""
_PAD = 256


@dataclass(frozen=True, slots=True)
class Estimate:
    """MiB of weights, KV cache for `n_ctx` tokens, and what comes beside.

    `host_mib`: of weights and cache together, what stays in the machine's memory.
    """

    weights_mib: int
    cache_mib: int
    n_ctx: int
    beside_mib: int
    host_mib: int = 0

    @property
    def mib(self) -> int:
        """Of all together."""
        return self.weights_mib + self.cache_mib + self.beside_mib


def estimate(options: ModelOptions, size: int, facts: Mapping[str, Scalar]) -> Estimate | None:
    """`size`: bytes of the model's files, those beside it included; None where the header lacks what it takes."""
    arch = str(facts.get("general.architecture", ""))

    def number(key: str) -> int | None:
        value = facts.get(f"{arch}.{key}")
        return int(value) if isinstance(value, int | float) else None

    layers, heads, width = number("block_count"), number("attention.head_count"), number("embedding_length")
    n_ctx = options.n_ctx or number("context_length")
    if layers is None or n_ctx is None or size <= 0:
        return None
    n_ctx = -(-n_ctx // _PAD) * _PAD
    kv_heads = number("attention.head_count_kv") or heads or 0
    each = (width or 0) // heads if heads else 0
    keys = (number("attention.key_length") or each) * _bytes(options, "cache-type-k")
    values = (number("attention.value_length") or each) * _bytes(options, "cache-type-v")
    remembering = layers // (number("full_attention_interval") or 1)
    there = _on_the_card(options, layers)
    all_cache = remembering * n_ctx * kv_heads * (keys + values)
    weights, cache = size * there, all_cache * there
    beside = BESIDE_MIB * MIB + weights * BESIDE_PART
    host = (size + all_cache) * (1 - there)
    return Estimate(_up(weights), _up(cache), n_ctx, _up(beside), _up(host))


def _bytes(options: ModelOptions, name: str) -> float:
    return _BYTES.get(options.text(name) or "f16", 4.0)


def _on_the_card(options: ModelOptions, layers: int) -> float:
    """The part of the layers that is loaded onto it: all where nothing else is said."""
    chosen = options.number("n-gpu-layers")
    return 1.0 if chosen is None or chosen < 0 else min(1.0, chosen / (layers + 1))


def _up(size: float) -> int:
    return -int(-size // MIB)
