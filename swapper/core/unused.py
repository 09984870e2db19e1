"""Who comes back only when it is asked for: residents that left for their `ttl`, unused, and who was sent off by hand.

Invariant: only work counts as use, calls that run or wait; not who looks. What is pinned, never evicted, or there for a
lease stays. Pure: when a tenant was last used is an argument, remembered beside the store, so that after a restart of
swapper the time begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from swapper.core.errand import Errand
from swapper.core.spec import Spec
from swapper.core.types import Card, World

TTL = "ttl"
"""The cause of a swap that sends them away."""


def note(world: World, spec: Spec, used: dict[str, int]) -> None:
    """Who works, or is waited for, is used now; of one seen for the first time that is taken to be so.

    A call that only looks runs, too; and one that works may be over before anybody hears that it ran.
    """
    at_work = {demand.tenant for demand in world.demand if demand.used or demand.waiting}
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
    return tuple(t for t in card.residents if t not in card.pinned and _is_over(world, spec, t, used))


def _is_over(world: World, spec: Spec, tenant: str, used: Mapping[str, int]) -> bool:
    configured = spec.tenants.get(tenant)
    if configured is None or configured.ttl_ms is None or tenant not in used:
        return False
    stays = configured.evict_never or configured.by_lease
    return not stays and world.now_ms - used[tenant] >= configured.ttl_ms


def left(card: Card, leaving: tuple[str, ...]) -> Card:
    """They are sent away for it."""
    return replace(card, unused=tuple(dict.fromkeys((*card.unused, *leaving))))


def sent_off(spec: Spec, card: Card, errand: Errand, gone: Collection[str] = ()) -> Card:
    """By hand: of whom the errand is about, those that are not on the card any more are not owed to it either.

    `gone`: who left for it. Who would not come by itself anyway is no part of it.
    """
    back = {*gone, *(card.return_to or ()), *(t.id for t in spec.tenants.values() if t.default)}
    about = (t for t in spec.tenants.values() if t.card == card.name and errand.about(t.id) and t.id in back)
    off = tuple(t.id for t in about if t.id not in card.residents and not (t.evict_never or t.by_lease))
    owed = tuple(t for t in card.return_to or () if t not in off)
    if set(owed) <= set(card.residents):
        return replace(left(card, off), return_to=None, return_lease=None)
    return replace(left(card, off), return_to=owed)


def back(card: Card, arriving: tuple[str, ...]) -> Card:
    """They serve again, whatever brought them."""
    return replace(card, unused=tuple(t for t in card.unused if t not in arriving))
