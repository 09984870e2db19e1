"""Time that goes on: what a step of the store's wall clock, and a gap in our service, do to the times on record.

Every time on record is a moment of the store's clock, and what is promised is a duration: a lease's ttl and max_hold,
the limit of a drain, the rest after a failure, the grace of a holder that left. So when that clock is stepped, these
moments move along, and no duration changes. Times of day that a client named (`not_before`, `deadline`) stay as they
are. Invariant: after `moved` nothing lies further ahead than its own duration, and nothing begun lies ahead. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swapper.core.answers import LONGEST_REST_MS
from swapper.core.commit import Alert, AlertKind, Commit, LeaseChange
from swapper.core.spec import Spec
from swapper.core.types import ACTIVE, Card, Lease, LeaseState, Swap, World
from swapper.core.watched import Overrun

STEP_MS = 5_000
"""What the store's clock moves more or less than ours between two looks is a step; below it is drift and latency."""
FLOOR_MS = 30_000
"""So long a lease lives at least after a gap or a step: its holder may have to find us again."""
MEMBER_MS = 10_000
"""So long a gateway is a member at least, then: it beats three times in it."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the store's clock: what it showed, and between which moments of our own (monotonic) clock; ms.

    `stepped_ms`: the steps of the store's clock that were taken into account by then (World).
    """

    store_ms: int
    stepped_ms: int
    before_ms: int
    after_ms: int


def step_between(then: Look, now: Look) -> int:
    """How far the store's clock was stepped between two looks, ms, ahead or (below 0) back; 0: it was not.

    A look may take long (we were stopped in the middle of it): only what no moment within it explains is a step.
    """
    moved = (now.store_ms - now.stepped_ms) - (then.store_ms - then.stepped_ms)
    least, most = now.before_ms - then.after_ms, now.after_ms - then.before_ms
    if moved - most > STEP_MS:
        return moved - most
    return moved - least if least - moved > STEP_MS else 0


def between(look: Look, own_ms: int) -> tuple[int, int]:
    """What the store's clock shows about now, by ours, unless it was stepped since the look."""
    passed = own_ms - look.after_ms
    longest = own_ms - look.before_ms
    return look.store_ms + passed - STEP_MS, look.store_ms + longest + STEP_MS


def moved(world: World, spec: Spec, step_ms: int = 0) -> Commit | None:
    """Everything on record goes on as if there had been no step; with 0, as if there had been no gap in our service.

    After either no lease expires before max(ttl, 30 s), and none that is left alone lives longer. None where nothing is
    on record.
    """
    cards = tuple(_card(card, world.now_ms, step_ms, spec) for card in world.cards.values())
    cards = tuple(card for card in cards if step_ms or card != world.cards[card.name])
    swaps = tuple(card.swap for card in cards if card.swap is not None and card.swap.listed)
    changes = (_lease(lease, world.now_ms, step_ms) for lease in world.leases.values() if lease.state in ACTIVE)
    leases = tuple(change for change in changes if change is not None)
    if not step_ms:
        found = cards or leases or world.gateways
        return Commit(cards=cards, leases=leases, swaps=swaps, members_ms=MEMBER_MS) if found else None
    return Commit(
        cards=cards,
        leases=leases,
        swaps=swaps,
        members_ms=MEMBER_MS,
        stepped=(world.stepped_ms, world.stepped_ms + step_ms),
        alerts=tuple(Alert(name, _said(step_ms), {"step_ms": step_ms}, AlertKind.CLOCK) for name in spec.cards),
    )


def _lease(lease: Lease, now_ms: int, step_ms: int) -> LeaseChange | None:
    """Whatever became of it meanwhile, unless it has ended: a client may have cancelled, or beaten."""
    lives_ms = max(lease.request.ttl_ms, FLOOR_MS) if lease.state is LeaseState.GRANTED else None
    if lives_ms is None and not step_ms and lease.created_ms <= now_ms:
        return None
    return LeaseChange(lease.id, ACTIVE, shift_ms=step_ms, lives_ms=lives_ms)


def _card(card: Card, now_ms: int, step_ms: int, spec: Spec) -> Card:
    def began(ms: int) -> int:
        return min(ms + step_ms, now_ms)

    def ends(ms: int, longest_ms: int) -> int:
        return min(ms + step_ms, now_ms + longest_ms)

    def every(tenant: str) -> int:
        configured = spec.tenants.get(tenant)
        return (configured and configured.every_ms) or 0

    fault = card.fault
    return replace(
        card,
        swap=None if card.swap is None else _swap(card.swap, began),
        departed=tuple(replace(d, free_ms=ends(d.free_ms, spec.policy.grace_ms)) for d in card.departed),
        fault=fault and replace(fault, since_ms=began(fault.since_ms), retry_ms=ends(fault.retry_ms, LONGEST_REST_MS)),
        failed={t: replace(f, retry_ms=ends(f.retry_ms, LONGEST_REST_MS)) for t, f in card.failed.items()},
        save_after={t: ends(ms, every(t)) for t, ms in card.save_after.items()},
        intruders=tuple(replace(one, since_ms=began(one.since_ms)) for one in card.intruders),
        overruns={t: _overrun(one, began) for t, one in card.overruns.items()},
    )


def _overrun(one: Overrun, began: Callable[[int], int]) -> Overrun:
    acted_ms = None if one.acted_ms is None else began(one.acted_ms)
    return replace(one, since_ms=began(one.since_ms), acted_ms=acted_ms)


def _swap(swap: Swap, began: Callable[[int], int]) -> Swap:
    return replace(
        swap,
        started_ms=began(swap.started_ms),
        stage_ms=began(swap.stage_ms),
        forced_ms=None if swap.forced_ms is None else began(swap.forced_ms),
        steps=tuple(replace(record, started_ms=began(record.started_ms)) for record in swap.steps),
    )


def _said(step_ms: int) -> str:
    seconds = abs(step_ms) / 1000
    way = "ahead" if step_ms > 0 else "back"
    return (
        f"the store's clock was stepped {way} by {seconds:.0f} s: leases, drains and rests keep the time they had left "
        "(a lease 30 s at least); `not_before` and `deadline` are times of day and stay"
    )
