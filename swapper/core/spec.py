"""What the configuration says and the core needs: cards, tenants and the policy's numbers, as frozen values.

Invariant: made from a valid configuration, and made anew when a probe tells how much a card has; never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from swapper.core.types import Card, WorkClass
from swapper.core.watched import NeedFrom


@dataclass(frozen=True, slots=True)
class CardSpec:
    """A card as configured. `total_mib` 0: not known yet, and until it is nothing is started on the card.

    `measured`: the configuration does not say how much it has, its probe does (`Spec.learned`). `foreign_mib`: a
    process that is nobody's and holds more than that is told of.
    """

    name: str
    total_mib: int
    reserve_mib: int = 0
    host: str = "main"
    measured: bool = False
    foreign_mib: int = 256

    @property
    def whole_mib(self) -> int:
        """What it can give to tenants and leases together; 0 while that is not known."""
        return max(0, self.total_mib - self.reserve_mib)


@dataclass(frozen=True, slots=True)
class TenantSpec:
    """A tenant as configured. `server` is the config entry that has its control (`llama` of `llama/med`).

    `takes_all`: its need is all its card can give. `by_lease`: it is on the card only inside a lease of its own, whose
    holder it is. `sweep`: conversations that lie in no slot are saved as well. `every_ms`: so often idle slots are
    saved while it serves. `need_from`: where `need_mib` comes from. `on_over`: what is done about it once it takes more
    than a declared need: alert, restart or evict. `ttl_ms`: after so long without a call it leaves.
    """

    id: str
    server: str
    card: str
    host: str
    need_mib: int
    kind: str = "llama-router"
    evict_never: bool = False
    default: bool = False
    by_lease: bool = False
    save: bool = True
    save_required: bool = False
    sweep: bool = True
    every_ms: int | None = None
    ttl_ms: int | None = None
    serves_models: bool = True
    takes_all: bool = False
    need_from: NeedFrom = NeedFrom.DECLARED
    on_over: str = "alert"


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
        grown = replace(self, cards={**self.cards, **new})
        fitted = {t.id: grown._fitted(t) for t in self.tenants.values() if t.card in new}
        return replace(grown, tenants={**self.tenants, **fitted})

    def _fitted(self, tenant: TenantSpec) -> TenantSpec:
        """To what its card was read to have."""
        match tenant.need_from:
            case NeedFrom.UNKNOWN:
                return replace(tenant, need_mib=self._most(tenant))
            case NeedFrom.DECLARED if tenant.takes_all:
                return replace(tenant, need_mib=self.cards[tenant.card].whole_mib)
            case NeedFrom.ESTIMATED:
                return replace(tenant, need_mib=min(tenant.need_mib, self._most(tenant)))
            case _:
                return tenant

    def _most(self, tenant: TenantSpec) -> int:
        """All that its card can give to it, beside those that never leave."""
        beside = (t for t in self.tenants.values() if t.card == tenant.card and t.evict_never and t.id != tenant.id)
        return max(0, self.cards[tenant.card].whole_mib - sum(t.need_mib for t in beside))

    def estimated(self, needs: Mapping[str, int]) -> Spec:
        """With what tenants are thought to take, tenant id -> MiB, where neither file nor measurement says it."""
        found = {
            t.id: self._needing(t, needs[t.id], NeedFrom.ESTIMATED)
            for t in self.tenants.values()
            if t.need_from is NeedFrom.UNKNOWN and t.id in needs
        }
        return replace(self, tenants={**self.tenants, **found}) if found else self

    def needing(self, cards: Mapping[str, Card]) -> Spec:
        """With what was measured of tenants whose need nobody declared, as the cards' records have it.

        Itself where nothing is new.
        """
        found: dict[str, TenantSpec] = {}
        for t in self.tenants.values():
            measured = None if t.need_from is NeedFrom.DECLARED else measured_need(cards.get(t.card), t.id)
            if measured is not None and (now := self._needing(t, measured, NeedFrom.MEASURED)) != t:
                found[t.id] = now
        return replace(self, tenants={**self.tenants, **found}) if found else self

    def _needing(self, tenant: TenantSpec, mib: int, whence: NeedFrom) -> TenantSpec:
        """No more than all its card can give: else it could never come back, whatever would leave for it."""
        most = self._most(tenant) if self.cards[tenant.card].total_mib else mib
        return replace(tenant, need_mib=min(mib, most), takes_all=False, need_from=whence)


def measured_need(card: Card | None, tenant: str) -> int | None:
    """MiB that a tenant was seen to take; None where nothing was measured of its model, build and preset."""
    need = None if card is None else card.needs.get(tenant)
    if card is None or need is None:
        return None
    keeping = card.keeping.get(tenant)
    return need.mib if need.fingerprint == ("" if keeping is None else keeping.fingerprint) else None
