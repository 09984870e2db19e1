"""What tenants need and take of their card, and who takes what is not theirs, as JSON and in words.

Invariant: plain functions from values to values; what is over or foreign is what the card's record says (it was told).
"""

from __future__ import annotations

from collections.abc import Mapping

from swapper.api.views import Json, iso
from swapper.core import foreign
from swapper.core.excess import intruder_line, over_line
from swapper.core.spec import Spec, TenantSpec
from swapper.core.types import Card, World
from swapper.core.watched import Intruder


def need_json(tenant: TenantSpec, card: Card, reading: Mapping[str, object]) -> Json:
    """`need_from`: declared, estimated, measured, or unknown (then it counts as all its card can give).

    `used_mib`: what its processes have, null where that is not measured. `over_need` is null while it keeps to it.
    """
    one = card.overruns.get(tenant.id)
    over = one is not None and one.raised
    return {
        "need_mib": tenant.need_mib,
        "need_from": tenant.need_from,
        "used_mib": used_mib(tenant.id, reading),
        "over_need": {"mib": one.mib, "since": iso(one.since_ms), "explain": over_line(card, tenant, one)}
        if one is not None and over
        else None,
        "on_over": tenant.on_over,
        "away": one is not None and one.away,
    }


def used_mib(tenant: str, reading: Mapping[str, object]) -> int | None:
    """What its processes have of the card, MiB; None where no process of it is seen, or one does not tell."""
    sizes = [one.mib for one in foreign.processes(reading) if one.owner == tenant]
    return None if not sizes or None in sizes else sum(mib for mib in sizes if mib is not None)


def intruder_json(card: Card, one: Intruder) -> Json:
    """A process that is nobody's and was told of."""
    return {
        "pid": one.pid,
        "name": one.name,
        "container": one.container,
        "mib": one.mib,
        "since": iso(one.since_ms),
        "explain": intruder_line(card, one),
    }


def troubles(spec: Spec, world: World) -> list[str]:
    """A sentence about each process that is foreign, and each tenant that is over its need."""
    said: list[str] = []
    for name in spec.cards:
        card = world.cards.get(name, Card(name))
        said += [intruder_line(card, one) for one in card.intruders]
        overs = ((spec.tenants.get(t), one) for t, one in card.overruns.items() if one.raised)
        said += [over_line(card, tenant, one) for tenant, one in overs if tenant is not None]
    return said
