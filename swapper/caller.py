"""Who calls: what a key gives its owner on the model routes. The api room makes it, and the gateway goes by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """By its key: the classes it may use (None: all) and the one a call has that names none (None: interactive)."""

    owner: str = "local"
    default_class: str | None = None
    classes: frozenset[str] | None = None
