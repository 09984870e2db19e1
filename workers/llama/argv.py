"""A llama-server command line as a router would write it: long names only, one for each option.

Invariant: pure; words that are no known option are kept as they stand.
"""

from __future__ import annotations

from collections.abc import Sequence

from presets.names import lookup

_MODEL = frozenset({"--model", "--model-url", "--hf-repo", "--docker-repo"})


def long_names(words: Sequence[str]) -> list[str]:
    """`-c 4096 -nkvo` becomes `--ctx-size 4096 --no-kv-offload`; the program in front stays."""
    found: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        option = lookup(word.lstrip("-").replace("_", "-") if word.startswith("--") else word[1:])
        if option is None or not word.startswith("-"):
            found.append(word)
            continue
        found.append(("--no-" if option.negative else "--") + option.canonical)
        found += words[at : at + option.arity]
        at += option.arity
    return found


def serves_one(words: Sequence[str]) -> bool:
    """Whether a command line in long names names a model: then it is a server's, not that of a shell around it."""
    return not _MODEL.isdisjoint(words)
