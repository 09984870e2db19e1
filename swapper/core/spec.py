"""What the configuration says and the core needs: cards, tenants and the policy's numbers, as frozen values.

Invariant: made from a valid configuration, and made anew when a probe tells how much a card has; never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swapper.core.types import WorkClass


@dataclass(frozen=True, slots=True)
class CardSpec:
    """A card as configured. `total_mib` 0: not known yet, and until it is nothing is started on the card.

    `measured`: the configuration does not say how much it has, its probe does (`Spec.learned`).
    """

    name: str
    total_mib: int
    reserve_mib: int = 0
    host: str = "main"
    measured: bool = False

    @property
    def whole_mib(self) -> int:
        """What it can give to tenants and leases together; 0 while that is not known."""
        return max(0, self.total_mib - self.reserve_mib)


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as configured. `server` is the config entry that has its control (`llama` of `llama/med`).

    `takes_all`: its need is all its card can give. `by_lease`: it is on the card only inside a lease of its own, whose
    holder it is. `sweep`: conversations that lie in no slot are saved as well. `every_ms`: so often idle slots are
    saved while it serves.
    """

    id: str
    server: str
    card: str
    host: str
    need_mib: int
    kind: str = "llama-router"
    evict_never: bool = False
    default: bool = False
    pinned: bool = False
    by_lease: bool = False
    save: bool = True
    save_required: bool = False
    sweep: bool = True
    every_ms: int | None = None
    serves_models: bool = True
    takes_all: bool = False


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The numbers of the policy, in milliseconds; `drain_ms` and the rest as in the configuration."""

    drain_ms: Mapping[WorkClass, int]
    on_drain_limit: str = "end"
    grace_ms: int = 30_000
    vacate_ms: int = 60_000
    idle_restore_ms: int = 120_000
    max_hold_ms: int = 3_600_000
    max_queue: int = 10_000


@dataclass(frozen=True, slots=True)
class Spec:
    """All that the configuration says and the core needs."""

    cards: Mapping[str, CardSpec]
    tenants: Mapping[str, TenantSpec]
    policy: PolicySpec

    def learned(self, totals: Mapping[str, int]) -> Spec:
        """With the MiB that probes read, card -> total, where the configuration leaves it to them.

        Itself where nothing is new.
        """
        new = {
            name: replace(card, total_mib=totals[name])
            for name, card in self.cards.items()
            if card.measured and totals.get(name, 0) > 0 and totals[name] != card.total_mib
        }
        if not new:
            return self
        grown = {
            t.id: replace(t, need_mib=new[t.card].whole_mib)
            for t in self.tenants.values()
            if t.takes_all and t.card in new
        }
        return replace(self, cards={**self.cards, **new}, tenants={**self.tenants, **grown})
