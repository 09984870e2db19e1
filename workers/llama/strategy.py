"""How the conversations of a model are best kept, from what its file says of its attention.

Invariant: pure. What a server was *seen* to do with a restored conversation decides in the end, elsewhere; this is
where to begin. Source: llama.cpp's `llm_arch_is_recurrent`, `llm_arch_is_hybrid` and the `swa_type` that each
architecture's loader sets; a slot file lacks the checkpoints that hybrid and sliding-window memories rewind by.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

Scalar = str | int | float | bool
"""A value of a GGUF header."""

SLOTS, REWIND, REPLAY = "slots", "rewind", "replay"

_RECURRENT = frozenset(
    {
        *("mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
        *("jamba", "falcon-h1", "plamo2", "granitehybrid", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe"),
        *("qwen3next", "qwen35", "qwen35moe", "kimi-linear"),
    }
)
_RECURRENT_KEYS = ("ssm.", "wkv.", "shortconv.", "kda.", "recurrent", "attention.recurrent")
"""What follows the architecture's name in the keys of layers that keep a state instead of attention."""
_WINDOW = "attention.sliding_window"
_WINDOW_UNASKED = frozenset({"gemma2", "llama4"})
"""Their loader has a window of its own where the file names none."""
_WINDOW_UNUSED = frozenset({"phi3", "phimoe"})
"""Their files name a window that llama.cpp does not use."""


class Attention(StrEnum):
    """What of a restored conversation can be used again.

    `dense`: any common beginning; `recurrent`: all of it, if the prompt only goes on; `window`: nothing.
    """

    DENSE = "dense"
    RECURRENT = "recurrent"
    WINDOW = "window"


def attention(facts: Mapping[str, Scalar]) -> Attention:
    """The attention of a model by its GGUF header's scalar values."""
    arch = str(facts.get("general.architecture", ""))
    if _has_window(arch, facts.get(f"{arch}.{_WINDOW}")):
        return Attention.WINDOW
    states = tuple(f"{arch}.{key}" for key in _RECURRENT_KEYS)
    if arch in _RECURRENT or any(key.startswith(states) for key in facts):
        return Attention.RECURRENT
    return Attention.DENSE


def _has_window(arch: str, size: Scalar | None) -> bool:
    """An architecture that we do not know and whose file names a window is taken to use it: loaders read what is so."""
    if arch in _WINDOW_UNUSED:
        return False
    return arch in _WINDOW_UNASKED if size is None else isinstance(size, int) and size > 0


_BEST = {
    Attention.DENSE: (SLOTS, REPLAY),
    Attention.RECURRENT: (REWIND, REPLAY),
    Attention.WINDOW: (REPLAY,),
}


def strategies(configured: str, facts: Mapping[str, Scalar] | None, *, can_save: bool) -> tuple[str, ...]:
    """The ways to keep a model's conversations, the best first; none: they are not kept.

    `configured` is `auto`, `off` or the one way; `facts` None: the model's file cannot be read here. Where the server
    cannot save, nothing is kept unless `replay`, which needs no file, is asked for by name.
    """
    if configured == "off" or not (can_save or configured == REPLAY):
        return ()
    if configured != "auto":
        return (configured,)
    return _BEST[attention(facts) if facts is not None else Attention.DENSE]
