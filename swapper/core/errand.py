"""An errand: what somebody asked for by hand, kept until it is over. A noun, beside those of types.py.

Invariant: an errand's id is that of the swap it becomes, so that whoever asked follows one id from the first moment to
the end; it is over in the commit that writes that swap's end, and not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MANUAL = "manual"
"""The cause of its swap."""


class Verb(StrEnum):
    """What is asked for."""

    LOAD = "load"
    UNLOAD = "unload"
    VACATE = "vacate"
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class Errand:
    """`tenants`: ids on `card`, whom it is about; none for `vacate`, which is about all of them.

    `drain_ms`: so long calls in flight may still take; None: as long as their class may. `force` (of `vacate`): calls
    end at once, leases are revoked, a fault is left. `asked_ms`: when, by the store's clock, which sets it.
    """

    id: str
    card: str
    verb: Verb
    tenants: tuple[str, ...] = ()
    owner: str = "local"
    drain_ms: int | None = None
    force: bool = False
    asked_ms: int = 0

    @property
    def sends_away(self) -> bool:
        """Whether somebody has to leave for it."""
        return self.verb in (Verb.UNLOAD, Verb.VACATE)

    def about(self, tenant: str) -> bool:
        """Whether it concerns a tenant of its card."""
        return self.verb is Verb.VACATE or tenant in self.tenants
