"""One value for everything the lints say: how bad, what is wrong, and how to mend it.

Invariant: plain words; `text` says what happens, `mend` what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """`error`: the server refuses it, or swapper cannot keep its promises. `warning`: something is lost or wrong."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. `code` is a short stable name; `line` and `column` are 1-based, None where no text is meant."""

    level: Level
    code: str
    text: str
    mend: str
    model: str | None = None
    line: int | None = None
    column: int | None = None

    def sentence(self, file: str = "presets.ini") -> str:
        """`presets.ini:12: [qwen] what is wrong: what to do`."""
        place = f"{file}:{self.line}: " if self.line is not None else ""
        section = f"[{self.model}] " if self.model is not None else ""
        return f"{place}{section}{self.text}: {self.mend}"
