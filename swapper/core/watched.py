"""What is remembered of a card's memory: who is foreign on it, who is over its need, what each was seen to take.

Invariant: frozen values on the card's record, so that a restart neither says a thing twice nor forgets that it was
said. Sizes are MiB, times the store's clock in ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

REST_MS = 600_000
"""A tenant that takes too much is restarted, or sent away, once in so long."""


class NeedFrom(StrEnum):
    """Where the need of a tenant comes from.

    `unknown`: from nowhere yet, so that it counts as all its card can give.
    """

    DECLARED = "declared"
    ESTIMATED = "estimated"
    MEASURED = "measured"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Intruder:
    """A process that is nobody's and holds `mib` of the card since `since_ms`; told of once.

    `started`: clock ticks since boot, which tell it from a later one with its pid.
    """

    pid: int
    started: int | None
    mib: int
    since_ms: int
    name: str | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True)
class Overrun:
    """A tenant that takes, or took, `mib` where its need is less. `raised`: it is told of, and not over yet.

    `acted_ms`: when it was last restarted or sent away for it. `away`: sent away, and back only when it is asked for.
    """

    mib: int
    since_ms: int
    raised: bool = True
    acted_ms: int | None = None
    away: bool = False

    def rests(self, now_ms: int) -> bool:
        """Whether something was done about it lately."""
        return self.acted_ms is not None and now_ms < self.acted_ms + REST_MS


@dataclass(frozen=True, slots=True)
class Need:
    """What a tenant was seen to take at most; or more than what was free when it ran out of memory.

    It holds for that `fingerprint` (of model, build and preset) only.
    """

    mib: int
    fingerprint: str = ""
