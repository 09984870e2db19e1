"""The names of llama-server's options: short, long and LLAMA_ARG_* forms of each, and the one we call canonical.

Invariant: read once from options.txt beside this file; a name is looked up as it is written, case matters.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

TRUE = frozenset({"on", "enabled", "true", "1"})
FALSE = frozenset({"off", "disabled", "false", "0"})

CARRIED_OVER: Mapping[str, str] = {
    "ctx": "ctx-size = N (or c = N)",
    "context": "ctx-size = N",
    "context-size": "ctx-size = N",
    "n_ctx": "ctx-size = N",
    "num_ctx": "ctx-size = N",
    "cache_type_k": "cache-type-k = TYPE (or ctk = TYPE)",
    "cache_type_v": "cache-type-v = TYPE (or ctv = TYPE)",
    "mtp": "spec-type = draft-mtp, and model-draft = FILE when the head is a file of its own",
    "dflash": "spec-type = draft-dflash and model-draft = FILE",
    "draft-model": "model-draft = FILE",
    "draft": "spec-draft-n-max = N",
    "draft-n": "spec-draft-n-max = N",
    "draft-max": "spec-draft-n-max = N",
    "draft-min": "spec-draft-n-min = N",
    "draft-n-min": "spec-draft-n-min = N",
    "n_parallel": "parallel = N",
    "gpu_layers": "n-gpu-layers = N",
    "n_gpu_layers": "n-gpu-layers = N",
    "cmd": "one key for each option of the command, without dashes",
    "ttl": "sleep-idle-seconds = N, though under swapper a model is better unloaded than put to sleep",
}


@dataclass(frozen=True, slots=True)
class OptionName:
    """What a written name stands for. `arity`: values on a command line. `negative`: the name says no (`no-mmap`)."""

    canonical: str
    arity: int
    negative: bool = False
    removed: bool = False
    preset_only: bool = False

    @property
    def flag(self) -> bool:
        """True for an on/off option."""
        return self.arity == 0


@cache
def table() -> Mapping[str, OptionName]:
    """Every known name -> its option."""
    found: dict[str, OptionName] = {}
    text = files("presets").joinpath("options.txt").read_text(encoding="ascii")
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        canonical, kind, *others = line.split()
        arity = int(kind) if kind.isdigit() else int(kind == "removed" or canonical == "stop-timeout")
        option = OptionName(canonical, arity, removed=kind == "removed", preset_only=kind == "preset")
        found[canonical] = option
        for other in others:
            negative = other.startswith("!")
            found[other.removeprefix("!")] = OptionName(canonical, arity, negative, option.removed)
    return found


def lookup(name: str) -> OptionName | None:
    """The option a key stands for, None for one not known. `LLAMA_ARG_NO_X` is known where `LLAMA_ARG_X` is a flag.

    A preset key LLAMA_ARG_NO_X is *not* read as a negation by the router (seen on b10434: LLAMA_ARG_NO_MMAP = 1 gave
    the child --mmap), so `negative` is False for it.
    """
    option = table().get(name)
    if option is None and name.startswith("LLAMA_ARG_NO_"):
        option = table().get("LLAMA_ARG_" + name.removeprefix("LLAMA_ARG_NO_"))
        return option if option is not None and option.flag else None
    return option


def suggestion(name: str) -> str | None:
    """What to write instead of an unknown or removed key; None when nothing is near."""
    carried = CARRIED_OVER.get(name) or CARRIED_OVER.get(name.lower().lstrip("-"))
    if carried is not None:
        return carried
    dashed = name.lower().lstrip("-").replace("_", "-")
    if dashed in table():
        return dashed
    if f"llama-arg-{dashed}".upper().replace("-", "_") in table():
        return f"llama-arg-{dashed}".upper().replace("-", "_")
    close = difflib.get_close_matches(dashed, list(table()), n=1, cutoff=0.75)
    return close[0] if close else None
