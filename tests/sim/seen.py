"""What the check knows: the event log as folded so far, what happened physically, and which durations are promised.

Invariant: plain values, changed by the check alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from swapper.core.types import Card, Lease, Swap
from swapper.store.memory_streams import NOTHING, Id

Pair = tuple[int, int]
Order = tuple[str, str, Pair]
"""Card, tenant, (token, n)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Durations that are promised, ms. `drain_ms` 0: not of drains; `holds`: also of max_hold."""

    grace_ms: int
    drain_ms: int
    holds: bool


@dataclass(slots=True)
class Fold:
    """What the event log says, as far as it was read."""

    last: Id = NOTHING
    versions: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    docs: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])
    cards: dict[str, Card] = field(default_factory=dict[str, Card])
    swaps: dict[str, Swap] = field(default_factory=dict[str, Swap])
    granted: dict[str, int] = field(default_factory=dict[str, int])
    token: int = 0

    def copy(self) -> Fold:
        """As it is now."""
        maps = {name: {**getattr(self, name)} for name in ("versions", "docs", "leases", "cards", "swaps", "granted")}
        return replace(self, **maps)


@dataclass(slots=True)
class Seen:
    """What happened physically and what the check must remember of it, across any rollback of the store.

    `tainted`: leases whose state a rollback took back; `lost`: those it took away. `dutiful`: their owner does all
    that is asked of it just now. `begun`: per lane the newest command carried out. `reused`: what answers took from a
    slot, (model, slot) -> (cached tokens, whose answer it was) since the last restore. `highest`: the highest token
    granted on a card, and the lease it went to. `came`: when somebody took VRAM unasked, `proved`: when the last
    look at a card began that proved it free. `granted`, `ended`, `drains`: when a lease was granted or ended, a swap
    began or ended calls; by a clock that nobody steps. `ordered`: the swaps that ordered a release (a store that is
    rolled back may give out a pair twice). `forced`: cards that somebody vacated by force.
    """

    tainted: set[str] = field(default_factory=set[str])
    lost: set[str] = field(default_factory=set[str])
    dutiful: set[str] = field(default_factory=set[str])
    begun: dict[tuple[str, str | None], Pair] = field(default_factory=dict[tuple[str, str | None], Pair])
    reused: dict[tuple[str, int], list[tuple[int, str, int]]] = field(
        default_factory=dict[tuple[str, int], list[tuple[int, str, int]]]
    )
    highest: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    came: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    proved: dict[str, int] = field(default_factory=dict[str, int])
    granted: dict[str, int] = field(default_factory=dict[str, int])
    ended: dict[str, int] = field(default_factory=dict[str, int])
    drains: dict[str, int] = field(default_factory=dict[str, int])
    ordered: dict[Order, list[Swap]] = field(default_factory=dict[Order, list[Swap]])
    forced: set[str] = field(default_factory=set[str])
    rollbacks: int = 0
