"""When a tenant takes too much; the sentences about that, and about who is foreign: what fits no more for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from swapper.core import plan
from swapper.core.spec import Spec, TenantSpec
from swapper.core.types import Card
from swapper.core.watched import Intruder, NeedFrom, Overrun

MARGIN = 0.1
MARGIN_MIB = 256
"""What a tenant takes beyond its need is told of from a tenth of that on, and never below this."""
SHORT = 12
"""So many digits of a container's id are shown, as the tools do."""


def is_over(tenant: TenantSpec, used_mib: int | None) -> bool:
    """Whether it takes more than was declared for it, and that by more than the margin."""
    if used_mib is None or tenant.takes_all or tenant.need_from is not NeedFrom.DECLARED:
        return False
    return used_mib > tenant.need_mib + max(int(tenant.need_mib * MARGIN), MARGIN_MIB)


def word(one: Intruder) -> str:
    """`pid 12 (python in container 0f3c...)`."""
    inside = f"in container {one.container[:SHORT]}" if one.container else ""
    said = " ".join(filter(None, (one.name, inside)))
    return f"pid {one.pid} ({said})" if said else f"pid {one.pid}"


def intruder_text(spec: Spec, card: Card, one: Intruder, taken_mib: int, left_by: str | None) -> str:
    """Who it is, what it holds since when, what fits no more. `taken_mib`: of all that are foreign together."""
    whose = f"was left behind by {left_by}" if left_by else "is neither a tenant's nor a lease's"
    lost = max(0, taken_mib - spec.cards[card.name].reserve_mib)
    mend = "end it, run it under a lease (swapper run), or make it a tenant"
    return f"{_holding(card, one)} and {whose}: {_loses(spec, card, lost)}; {mend}"


def intruder_line(card: Card, one: Intruder) -> str:
    """The same while it lasts, for a status."""
    return f"{_holding(card, one)} and is neither a tenant's nor a lease's"


def gone_text(card: Card, one: Intruder) -> str:
    """That it is over."""
    return f"{word(one)}, which held {one.mib:,} MiB, is foreign on {card.name} no more"


def over_text(spec: Spec, card: Card, tenant: TenantSpec, one: Overrun) -> str:
    """By how much, since when, what fits no more, what is done about it."""
    what = {
        "restart": "it is released and loaded anew, with its conversations, once nobody else waits for the card",
        "evict": "it leaves once nobody else waits for the card, and comes back when it is asked for",
    }
    mend = what.get(tenant.on_over, "raise its vram to what it takes, or lower its contexts")
    lost = max(0, one.mib - tenant.need_mib)
    return f"{over_line(card, tenant, one)}: {_loses(spec, card, lost)}; {mend}"


def over_line(card: Card, tenant: TenantSpec, one: Overrun) -> str:
    """The same while it lasts, for a status."""
    more = one.mib - tenant.need_mib
    need = f"{more:,} MiB more than the {tenant.need_mib:,} MiB of its vram"
    return f"{tenant.id} takes {one.mib:,} MiB of {card.name} since {_moment(one.since_ms)}, {need}"


def kept_text(card: Card, tenant: str, used_mib: int | None) -> str:
    """That it is over."""
    now = "" if used_mib is None else f", it takes {used_mib:,} MiB"
    return f"{tenant} keeps to its need on {card.name} again{now}"


def _holding(card: Card, one: Intruder) -> str:
    return f"{word(one)} holds {one.mib:,} MiB of {card.name} since {_moment(one.since_ms)}"


def _loses(spec: Spec, card: Card, lost_mib: int) -> str:
    """Who fits no more where so much is gone: not at all, or not beside who is there now."""
    most = plan.capacity(spec, card.name)
    room = most - plan.needs(spec, (t for t in card.residents if not _set_aside(spec, t))) - plan.held(card)
    others = [t for t in spec.tenants.values() if t.card == card.name and t.id not in card.residents]
    movable = [t for t in others if not t.evict_never]
    never = [t for t in movable if most - lost_mib < t.need_mib <= most]
    beside = [t for t in movable if t not in never and room - lost_mib < t.need_mib <= room]
    parts = [f"{_listed(never)} fit{_s(never)} no more at all"] if never else []
    parts += [f"{_listed(beside)} fit{_s(beside)} no more beside who is there"] if beside else []
    if lost_mib:
        parts.append("no lease can have the whole card")
    return ", ".join(parts) or "all tenants still fit"


def _set_aside(spec: Spec, tenant: str) -> bool:
    configured = spec.tenants.get(tenant)
    return configured is not None and configured.evict_never


def _listed(tenants: Sequence[TenantSpec]) -> str:
    return " and ".join(f"{t.id} ({t.need_mib:,} MiB)" for t in tenants)


def _s(tenants: Sequence[TenantSpec]) -> str:
    return "s" if len(tenants) == 1 else ""


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
