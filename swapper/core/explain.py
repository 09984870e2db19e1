"""Why does it wait, in one sentence: said from the same facts the policy decides on. Pure."""

from __future__ import annotations

from swapper.core import plan, policy
from swapper.core.spec import Spec
from swapper.core.types import Card, Lease, LeaseState, Step, Swap, World

_DOING = {
    Step.CLOSE: "the gate is being closed",
    Step.DRAIN: "calls in flight are being finished",
    Step.SAVE: "conversations are being saved",
    Step.RELEASE: "the model is being unloaded",
    Step.VACATE: "the VRAM is being proved free",
    Step.LOAD: "the model is being loaded",
    Step.RESTORE: "conversations are being restored",
    Step.OPEN: "the gate is being opened",
}


def explain_lease(world: World, spec: Spec, lease: Lease, position: int | None) -> str:
    """One true sentence about a lease. `position` is its place in the queue, 1 for the head."""
    match lease.state:
        case LeaseState.QUEUED:
            return f"queued{_place(position)}: {_why_queued(world, spec, lease)}"
        case LeaseState.PREPARING:
            card = world.cards.get(lease.card or "")
            doing = doing_text(card, card.swap) if card and card.swap else "its swap is being started"
            return f"preparing: {doing}"
        case LeaseState.GRANTED:
            return lease.explain or "granted"
        case _:
            reason = lease.reason or lease.explain
            return (
                f"{lease.state}: {reason}" if reason and not reason.startswith(lease.state) else reason or lease.state
            )


def explain_demand(world: World, spec: Spec, tenant: str) -> str:
    """One true sentence about calls that wait for a tenant."""
    configured = spec.tenants[tenant]
    card = world.cards.get(configured.card, Card(configured.card))
    if card.swap is not None:
        return f"waiting for {tenant}: {doing_text(card, card.swap)}"
    failure = card.failed.get(tenant)
    if failure is not None and failure.retry_ms > world.now_ms:
        return (
            f"{tenant} could not be loaded ({failure.reason}); next try in {_seconds(failure.retry_ms - world.now_ms)}"
        )
    return f"waiting for {tenant}: {_occupied(world, card) or 'its load is about to start'}"


def doing_text(card: Card, swap: Swap) -> str:
    """What a running swap of the card is doing, and whose process it waits for."""
    leaving = [f"{d.label or d.lease} (pid {d.pid})" for d in card.departed if d.pid is not None]
    if swap.stage is Step.VACATE and leaving:
        return f"{_DOING[swap.stage]}: waiting for {', '.join(leaving)} to end"
    whose = ", ".join(dict.fromkeys(c.tenant for c in swap.pending if c.tenant)) or swap.card
    turned = " (turned back)" if swap.back else ""
    return f"{_DOING[swap.stage]} on {whose}{turned}"


def _why_queued(world: World, spec: Spec, lease: Lease) -> str:
    not_before = lease.request.not_before_ms
    if not_before is not None and not_before > world.now_ms:
        return f"not before {_seconds(not_before - world.now_ms)} from now"
    names = [lease.request.card] if lease.request.card else list(spec.cards)
    reasons = [_why_not(world, spec, lease, world.cards.get(name, Card(name))) for name in names]
    return "; ".join(reasons)


def _why_not(world: World, spec: Spec, lease: Lease, card: Card) -> str:
    need = lease.request.vram_mib or 0
    if card.name not in spec.cards:
        return f"card {card.name} is not configured any more"
    if need > plan.capacity(spec, card.name):
        return f"{card.name} can never give {need} MiB (its capacity is {plan.capacity(spec, card.name)} MiB)"
    occupied = _occupied(world, card)
    if occupied:
        return occupied
    ahead = [other for other in policy.leases_for(world, spec, card.name) if _before(other, lease)]
    if ahead:
        return f"{len(ahead)} lease{'s' * (len(ahead) > 1)} before it on {card.name}"
    return f"{card.name} is about to change hands"


def _before(other: Lease, lease: Lease) -> bool:
    return (other.request.klass.rank, other.seq) < (lease.request.klass.rank, lease.seq)


def _occupied(world: World, card: Card) -> str | None:
    if card.swap is not None:
        again = f", after {card.fault.reason}" if card.fault is not None else ""
        return f"{card.name} is changing hands, {doing_text(card, card.swap)}{again}"
    if card.fault is not None:
        return f"{card.name} is at fault: {card.fault.reason}"
    if card.holds:
        names = ", ".join(f"{h.lease} ({h.label})" if h.label else h.lease for h in card.holds)
        latest = max((_end(world.leases.get(h.lease)) for h in card.holds), default=0)
        until = f", for at most another {_seconds(latest - world.now_ms)}" if latest > world.now_ms else ""
        return f"{card.name} is held by {names}{until}"
    return None


def _end(lease: Lease | None) -> int:
    if lease is None or lease.granted_ms is None:
        return 0
    return lease.granted_ms + lease.request.max_hold_ms


def _seconds(ms: int) -> str:
    seconds = max(ms, 0) / 1000
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _place(position: int | None) -> str:
    return f", number {position}" if position else ""
