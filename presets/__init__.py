"""Ready-made llama.cpp presets with a swapper configuration that fits, and the true grammar of such preset files.

`parse` reads an INI as llama-server's router does, `effective` says what a model then runs with, `losses` which of
that would lose conversations. `path` gives a ready-made file.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from presets.finding import Finding, Level
from presets.ini import Entry, Ini, IniSection, canonical_model, parse
from presets.losses import losses, model_losses, router_losses
from presets.options import ModelOptions, RouterOptions, Setting, effective, from_child_args, named

CHAT_INI = "chat.ini"
CHAT_YAML = "chat.swapper.yaml"
READY_MADE = (
    CHAT_INI,
    CHAT_YAML,
    "one-card.ini",
    "one-card.swapper.yaml",  # chat, ComfyUI and immich's machine learning on one card
    "two-cards.swapper.yaml",
    "ollama.swapper.yaml",
    "cpu.ini",
    "cpu.swapper.yaml",
)


def path(name: str) -> Path:
    """Where a ready-made file lies; KeyError for a name not in READY_MADE."""
    if name not in READY_MADE:
        raise KeyError(name)
    return Path(str(files("presets").joinpath(name)))


__all__ = [
    "CHAT_INI",
    "CHAT_YAML",
    "READY_MADE",
    "Entry",
    "Finding",
    "Ini",
    "IniSection",
    "Level",
    "ModelOptions",
    "RouterOptions",
    "Setting",
    "canonical_model",
    "effective",
    "from_child_args",
    "losses",
    "model_losses",
    "named",
    "parse",
    "path",
    "router_losses",
]
