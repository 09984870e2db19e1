"""Why does it wait, in one sentence: said from the same facts the policy decides on. Pure."""

from __future__ import annotations

from swapper.core import plan, policy
from swapper.core.errand import Errand
from swapper.core.excess import word
from swapper.core.spec import Spec
from swapper.core.types import Card, Hold, Lease, LeaseState, Step, Swap, World

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


_UNREAD = "how much VRAM {} has is not known yet, since its probe could not be read"


def explain_lease(world: World, spec: Spec, lease: Lease, position: int | None) -> str:
    """One true sentence about a lease. `position` is its place in the queue, 1 for the head."""
    match lease.state:
        case LeaseState.QUEUED:
            return f"queued{_place(position)}: {_why_queued(world, spec, lease)}"
        case LeaseState.PREPARING:
            card = world.cards.get(lease.card or "")
            doing = _doing(world, spec, card, card.swap) if card and card.swap else "its swap is being started"
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
        return f"waiting for {tenant}: {_doing(world, spec, card, card.swap)}"
    failure = card.failed.get(tenant)
    if failure is not None and failure.retry_ms > world.now_ms:
        return (
            f"{tenant} could not be loaded ({failure.reason}); next try in {_seconds(failure.retry_ms - world.now_ms)}"
        )
    why = _occupied(world, spec, card) or policy.never_fits(spec, card, configured) or "its load is about to start"
    return f"waiting for {tenant}: {why}"


def explain_errand(world: World, spec: Spec, errand: Errand) -> str:
    """One true sentence about what was asked for by hand and is not over."""
    what = f"{errand.verb} {', '.join(errand.tenants) or errand.card}"
    card = world.cards.get(errand.card, Card(errand.card))
    if card.swap is not None and card.swap.id == errand.id:
        return f"{what}: {_doing(world, spec, card, card.swap)}"
    if card.name in spec.cards and not spec.cards[card.name].total_mib:
        return f"{what}: {_UNREAD.format(card.name)}"
    why = _occupied(world, spec, card) or "it begins once the agent beside the card has said that it is there"
    return f"{what} waits: {why}"


def _doing(world: World, spec: Spec, card: Card, swap: Swap) -> str:
    """What a running swap of the card is doing, and whose process it waits for."""
    leaving = _leaving(card, world.now_ms, spec.policy.grace_ms)
    if swap.stage is Step.VACATE and leaving:
        return f"{_DOING[swap.stage]}: {leaving}"
    if swap.stage is Step.VACATE and card.intruders:
        who = " and ".join(f"{word(one)}, which holds {one.mib:,} MiB" for one in card.intruders)
        return f"{_DOING[swap.stage]} on {swap.card}, beside {who} and is foreign"
    whose = ", ".join(dict.fromkeys(c.tenant for c in swap.pending if c.tenant)) or swap.card
    turned = " (turned back)" if swap.back else ""
    return f"{_DOING[swap.stage]} on {whose}{turned}"


def _leaving(card: Card, now_ms: int, grace_ms: int) -> str:
    """Which holders that left are still waited for: until their process ends, or for a grace where none is known."""
    named = [f"{d.label or d.lease} (pid {d.pid})" for d in card.departed if d.pid is not None]
    unknown = [d for d in card.departed if d.pid is None and d.free_ms > now_ms]
    parts = [f"waiting for {', '.join(named)} to end"] if named else []
    if unknown:
        who = ", ".join(d.label or d.lease for d in unknown)
        left_ms = max(d.free_ms for d in unknown) - now_ms
        parts.append(
            f"{who} did not give its lease back and its process is unknown, so its memory counts as free after a grace "
            f"of {_seconds(grace_ms)} ({_seconds(left_ms)} left); a lease that names its holder_pid is not waited for "
            "so long"
        )
    return "; ".join(parts)


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
    if not spec.cards[card.name].total_mib:
        return _UNREAD.format(card.name)
    if need > plan.capacity(spec, card.name):
        return f"{card.name} can never give {need} MiB (its capacity is {plan.capacity(spec, card.name)} MiB)"
    occupied = _occupied(world, spec, card)
    if occupied:
        return occupied
    holder = lease.request.holder or ""
    failure = card.failed.get(holder)
    if failure is not None and failure.retry_ms > world.now_ms:
        return (
            f"{holder} could not be loaded ({failure.reason}); next try in {_seconds(failure.retry_ms - world.now_ms)}"
        )
    if pinned := policy.kept_by_pins(spec, card, lease):
        return f"no room beside {', '.join(pinned)}, pinned on {card.name}; {policy.lets_go(pinned)} would make room"
    ahead = [other for other in policy.leases_for(world, spec, card.name) if _before(other, lease)]
    if ahead:
        return f"{len(ahead)} lease{'s' * (len(ahead) > 1)} before it on {card.name}"
    return f"{card.name} is about to change hands"


def _before(other: Lease, lease: Lease) -> bool:
    return (other.request.klass.rank, other.seq) < (lease.request.klass.rank, lease.seq)


def _occupied(world: World, spec: Spec, card: Card) -> str | None:
    if card.swap is not None:
        again = f", after {card.fault.reason}" if card.fault is not None else ""
        return f"{card.name} is changing hands, {_doing(world, spec, card, card.swap)}{again}"
    if card.fault is not None:
        return f"{card.name} is at fault: {card.fault.reason}"
    if card.holds:
        return f"{card.name} is held by {', and by '.join(_holding(world, hold) for hold in card.holds)}"
    return None


def _holding(world: World, hold: Hold) -> str:
    """Who holds, and what ends it: its ttl unless it is heard, its max_hold in any case."""
    who = f"{hold.lease} ({hold.label})" if hold.label else hold.lease
    lease = world.leases.get(hold.lease)
    if lease is None or lease.granted_ms is None or lease.expires_ms is None or lease.state is not LeaseState.GRANTED:
        return who
    expires_ms = lease.expires_ms - world.now_ms
    most_ms = lease.granted_ms + lease.request.max_hold_ms - world.now_ms
    if most_ms <= expires_ms:
        return f"{who}, for at most another {_seconds(most_ms)}"
    unheard, heard = _seconds(expires_ms), _seconds(most_ms)
    return f"{who}, for another {unheard} if no heartbeat comes, for at most {heard} if they do"


def _seconds(ms: int) -> str:
    seconds = max(ms, 0) / 1000
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _place(position: int | None) -> str:
    return f", number {position}" if position else ""
