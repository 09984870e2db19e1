"""When a model that calls wait for may be there: an estimate, for clients that ask when to come again. Pure.

Invariant: nothing is made up. Only what somebody stated (how long a lease expects to take, when a load is tried again)
or what was measured (what a load took the last time) makes a number; where that is missing there is none.
"""

from __future__ import annotations

from swapper.core.spec import Spec
from swapper.core.types import Hold, LeaseState, World


def there_in_ms(world: World, spec: Spec, tenant: str) -> int | None:
    """Milliseconds until the tenant may serve; None: nobody can tell."""
    configured = spec.tenants.get(tenant)
    card = None if configured is None else world.cards.get(configured.card)
    if card is None or card.fault is not None:
        return None
    failure = card.failed.get(tenant)
    if failure is not None and failure.retry_ms > world.now_ms:
        return failure.retry_ms - world.now_ms
    load_ms = card.loads.get(tenant)
    if card.swap is not None and not card.holds and tenant in card.swap.to and load_ms is not None:
        return max(0, card.swap.started_ms + load_ms - world.now_ms)
    left = [_left(world, hold) for hold in card.holds]
    if not left or None in left:
        return None
    return max(ms for ms in left if ms is not None) + (load_ms or 0)


def _left(world: World, hold: Hold) -> int | None:
    """What a holder said it would take, less what it took; None where it said nothing, or takes longer."""
    lease = world.leases.get(hold.lease)
    if lease is None or lease.state is not LeaseState.GRANTED or lease.granted_ms is None:
        return None
    expected = lease.request.expected_ms
    left = 0 if expected is None else lease.granted_ms + expected - world.now_ms
    return left if left > 0 else None
