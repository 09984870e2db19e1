"""Residents that nobody has used for as long as their `ttl`: they leave, and come back only when they are asked for.

Invariant: only work counts, calls that run or wait; not who looks. What is pinned, never evicted, or there for a lease
stays. Pure: when a tenant was last used is an argument, remembered beside the store, so that after a restart of swapper
the time begins anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swapper.core.spec import Spec
from swapper.core.types import Card, World

TTL = "ttl"
"""The cause of a swap that sends them away."""


def note(world: World, spec: Spec, used: dict[str, int]) -> None:
    """Whose calls run or wait is used now; of one seen for the first time that is taken to be so."""
    at_work = {demand.tenant for demand in world.demand if demand.running or demand.waiting}
    residents = {tenant for card in world.cards.values() for tenant in card.residents}
    for tenant, configured in spec.tenants.items():
        if configured.ttl_ms is None:
            continue
        if tenant in at_work or tenant not in residents:
            used[tenant] = world.now_ms
        else:
            used.setdefault(tenant, world.now_ms)


def expired(world: World, spec: Spec, card: Card, used: Mapping[str, int]) -> tuple[str, ...]:
    """Whose time is over."""
    return tuple(tenant for tenant in card.residents if _is_over(world, spec, tenant, used))


def _is_over(world: World, spec: Spec, tenant: str, used: Mapping[str, int]) -> bool:
    configured = spec.tenants.get(tenant)
    if configured is None or configured.ttl_ms is None or tenant not in used:
        return False
    stays = configured.evict_never or configured.pinned or configured.by_lease
    return not stays and world.now_ms - used[tenant] >= configured.ttl_ms


def left(card: Card, leaving: tuple[str, ...]) -> Card:
    """They are sent away for it."""
    return replace(card, unused=tuple(dict.fromkeys((*card.unused, *leaving))))


def back(card: Card, arriving: tuple[str, ...]) -> Card:
    """They serve again, whatever brought them."""
    return replace(card, unused=tuple(t for t in card.unused if t not in arriving))
