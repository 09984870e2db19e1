"""The policy: who gets a card next. Class first, then arrival; afterwards the previous residents come back.

A lease that waits for other holders to go is not overtaken by leases behind it: else it would wait for ever.
Pure decisions: `choose` looks at one card and returns what the machine should start, or None. It never acts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from swapper.core import plan
from swapper.core.errand import MANUAL, Errand, Verb
from swapper.core.spec import Spec, TenantSpec
from swapper.core.types import Card, Demand, Hold, Lease, LeaseState, Swap, WorkClass, World
from swapper.core.unused import TTL

WATCHDOG = "watchdog"
"""The cause of a swap that nobody asked for: a tenant that takes more than its need is restarted, or sent away."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A swap worth starting: who leaves, who comes, and why.

    `lease` is granted at its end when nobody comes but its own tenant. `errand`: by hand, it is over at its end.
    """

    cause: str
    leaving: tuple[str, ...] = ()
    arriving: tuple[str, ...] = ()
    lease: str | None = None
    errand: Errand | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One candidate for the card: a lease, or the demand for one tenant, or its load by hand."""

    rank: int
    since_ms: int
    lease: Lease | None = None
    tenant: str | None = None
    errand: Errand | None = None


def choose(world: World, spec: Spec, card: Card, *, idle_since_ms: int, unused: tuple[str, ...] = ()) -> Choice | None:
    """What to start on a card without a running swap; None when all is as it should be.

    `idle_since_ms`: since when no call has been running or waiting on the card (milliseconds, store clock). `unused`:
    residents whose `ttl` is over.
    """
    if card.swap is not None or not spec.cards[card.name].total_mib:
        return None
    if (by_hand := _sent_away(world, spec, card)) is not None:
        return by_hand
    if card.fault is not None and card.fault.retry_ms > world.now_ms:
        return None
    if missing := tuple(h.tenant for h in card.holds if _is_missing(world, card, h)):
        return Choice("recovery", arriving=tuple(t for t in missing if t is not None))
    if card.whole is not None:
        return None
    held = {h.tenant for h in card.holds}
    spent = tuple(t for t in card.residents if plan.by_lease(spec, t) and t not in held)
    without = replace(card, residents=tuple(t for t in card.residents if t not in spent))
    wish = _wish(world, spec, without, idle_since_ms) or _put_right(world, spec, without)
    idle = tuple(t for t in unused if t not in held)
    return _leave_too(card, spent, wish or (Choice(TTL, leaving=idle) if idle else None))


def _sent_away(world: World, spec: Spec, card: Card) -> Choice | None:
    """The first unload by hand, whatever else waits; a card is vacated though nobody is there, to be proved free."""
    for errand in world.errands:
        if errand.card != card.name or not errand.sends_away or card.whole is not None:
            continue
        leaving = leaves_by_hand(spec, card, errand)
        if leaving or errand.verb is Verb.VACATE:
            return Choice(MANUAL, leaving=leaving, errand=errand)
    return None


def leaves_by_hand(spec: Spec, card: Card, errand: Errand) -> tuple[str, ...]:
    """Who leaves for an errand: also who is pinned, but nobody in a lease of its own, nor who never leaves."""
    held = {hold.tenant for hold in card.holds}
    return tuple(t for t in card.residents if errand.about(t) and t not in held and not _stays(spec, t))


def _put_right(world: World, spec: Spec, card: Card) -> Choice | None:
    """What the configuration wants done about a resident over its need; nothing to one that is there for a lease."""
    for tenant in card.residents:
        one, configured = card.overruns.get(tenant), spec.tenants.get(tenant)
        if one is None or not one.raised or one.rests(world.now_ms):
            continue
        if configured is None or configured.on_over == "alert" or not _may_leave(card, configured):
            continue
        if not any(hold.tenant == tenant for hold in card.holds):
            return Choice(WATCHDOG, leaving=(tenant,), arriving=(tenant,) if configured.on_over == "restart" else ())
    return None


def _is_missing(world: World, card: Card, hold: Hold) -> bool:
    """Whether a lease's tenant, for which it was granted, is gone from the card."""
    there = hold.tenant is None or hold.tenant in card.residents
    return hold.granted and not there and not _resting(world, card, hold.tenant or "")


def _leave_too(card: Card, spent: tuple[str, ...], choice: Choice | None) -> Choice | None:
    """Those whose lease is over go with the next swap, or in one of their own; not one that comes at once again."""
    if choice is None:
        cause = f"lease {card.return_lease}" if card.return_lease else "recovery"
        return Choice(cause, leaving=spent) if spent else None
    return replace(choice, leaving=(*choice.leaving, *(t for t in spent if t not in choice.arriving)))


def _wish(world: World, spec: Spec, card: Card, idle_since_ms: int) -> Choice | None:
    waiting = sorted(_waiting(world, spec, card), key=lambda w: (w.rank, w.since_ms))
    held_up = False
    for candidate in waiting:
        if candidate.lease is not None and held_up:
            continue
        choice = _serve(world, spec, card, candidate)
        if choice is not None:
            return choice
        held_up = held_up or (candidate.lease is not None and bool(card.holds))
    return _come_back(world, spec, card, idle_since_ms, busy=bool(waiting))


def leases_for(world: World, spec: Spec, card: str) -> list[Lease]:
    """Queued leases that this card could serve now, in (class rank, arrival) order."""
    fitting = [
        lease
        for lease in world.leases.values()
        if lease.state is LeaseState.QUEUED
        and (lease.request.card or card) == card
        and (lease.request.not_before_ms or 0) <= world.now_ms
        and (lease.request.vram_mib or 0) <= plan.capacity(spec, card)
    ]
    return sorted(fitting, key=lambda lease: (lease.request.klass.rank, lease.seq))


def _called(tenant: str) -> str:
    """The cause of a swap that brings what calls wait for."""
    return f"model {tenant}"


def for_calls(swap: Swap) -> bool:
    """Whether calls of the model it brings are all it is for."""
    return len(swap.to) == 1 and swap.cause == _called(swap.to[0])


def others_wait(world: World, spec: Spec, card: Card, but: Collection[str]) -> bool:
    """Whether leases, calls of other models than those, or what is asked for by hand wait for the card."""
    if any(errand.card == card.name for errand in world.errands):
        return True
    calls = (d.tenant for d in world.demand if d.waiting and d.tenant not in but)
    return bool(leases_for(world, spec, card.name)) or any(_loadable(world, spec, card, t) for t in calls)


def _waiting(world: World, spec: Spec, card: Card) -> Iterable[_Waiting]:
    arrived: dict[int, int] = {}  # never before who came before it, wherever the clock went meanwhile
    for lease in leases_for(world, spec, card.name):
        rank = lease.request.klass.rank
        arrived[rank] = max(arrived.get(rank, 0), lease.created_ms)
        yield _Waiting(rank, arrived[rank], lease=lease)
    for demand in world.demand:
        if demand.waiting and _loadable(world, spec, card, demand.tenant):
            since = demand.oldest_ms or world.now_ms
            yield _Waiting(demand.klass.rank, since, tenant=demand.tenant)
    for errand in world.errands:
        if errand.card == card.name and errand.verb is Verb.LOAD and _awaited(spec, card, errand.tenants[0]):
            since = min(errand.asked_ms, world.now_ms)
            yield _Waiting(WorkClass.INTERACTIVE.rank, since, tenant=errand.tenants[0], errand=errand)


def _loadable(world: World, spec: Spec, card: Card, tenant: str) -> bool:
    return _awaited(spec, card, tenant) and not _resting(world, card, tenant)


def _awaited(spec: Spec, card: Card, tenant: str) -> bool:
    """Whether it belongs onto the card and is not there; by hand it is tried though it rests after a failure."""
    configured = spec.tenants.get(tenant)
    return configured is not None and configured.card == card.name and tenant not in card.residents


def _resting(world: World, card: Card, tenant: str) -> bool:
    failure = card.failed.get(tenant)
    return failure is not None and failure.retry_ms > world.now_ms


def _serve(world: World, spec: Spec, card: Card, candidate: _Waiting) -> Choice | None:
    if candidate.lease is not None:
        if card.fault is not None:
            return None
        return _to_lease(world, spec, card, candidate.lease)
    assert candidate.tenant is not None
    cause = _called(candidate.tenant) if candidate.errand is None else MANUAL
    more = _crowded(card, candidate.tenant)
    if card.return_to and candidate.tenant in card.return_to and not more and candidate.errand is None:
        arriving = _that_fit(world, spec, card, (t for t in card.return_to if t not in card.unused))
        if candidate.tenant in arriving:
            returning = f"lease {card.return_lease}" if card.return_lease else "recovery"
            return Choice(returning, arriving=arriving, lease=card.return_lease)
    leaving = _make_room(world, spec, card, _wanted(spec, candidate.tenant), one_more=more)
    if leaving is None:
        return None
    return Choice(cause, leaving=leaving, arriving=(candidate.tenant,), errand=candidate.errand)


def _to_lease(world: World, spec: Spec, card: Card, lease: Lease) -> Choice | None:
    cause = f"lease {lease.id}"
    holder = lease.request.holder
    arriving = (holder,) if holder is not None and plan.by_lease(spec, holder) else ()
    if arriving and _resting(world, card, arriving[0]):
        return None
    if lease.whole:
        if card.holds:
            return None
        leaving = tuple(t for t in card.residents if not _stays(spec, t))
        return None if kept_by_pins(spec, card, lease) else Choice(cause, leaving, arriving, lease.id)
    room = _make_room(world, spec, card, lease.request.vram_mib or 0)
    return None if room is None else Choice(cause, room, arriving, lease.id)


def kept_by_pins(spec: Spec, card: Card, lease: Lease) -> tuple[str, ...]:
    """The pinned residents beside which a lease has no room; for maintenance the whole card is vacated all the same."""
    pinned = _pinned(spec, card)
    if lease.whole:
        return () if lease.request.klass is WorkClass.MAINTENANCE else pinned
    beside = plan.needs(spec, pinned) + (lease.request.vram_mib or 0)
    return pinned if beside > plan.capacity(spec, card.name) else ()


def _pinned(spec: Spec, card: Card) -> tuple[str, ...]:
    return tuple(t for t in card.residents if t in card.pinned and not _stays(spec, t))


def lets_go(pinned: Iterable[str]) -> str:
    """What to do about those that are pinned."""
    return " and ".join(f"`swapper unpin {tenant}`" for tenant in pinned)


def never_fits(spec: Spec, card: Card, tenant: TenantSpec) -> str | None:
    """Why a tenant could not come whoever else left, beside those that are pinned; None where it could, some day."""
    if not spec.cards[card.name].total_mib or tenant.evict_never:
        return None
    most, need = plan.capacity(spec, card.name), tenant.need_mib
    if need > most:
        return f"{tenant.id} needs {need:,} MiB, and {card.name} has {most:,} MiB to give"
    pinned = [t for t in _pinned(spec, card) if t != tenant.id]
    if need + plan.needs(spec, pinned) <= most:
        return None
    names = ", ".join(pinned)
    return f"{tenant.id} does not fit beside {names}, pinned on {card.name}; {lets_go(pinned)} would make room"


def _stays(spec: Spec, tenant: str) -> bool:
    configured = spec.tenants.get(tenant)
    return configured is not None and configured.evict_never


def _free(spec: Spec, card: Card) -> int:
    """MiB nobody has, less what is set aside for those who never leave and are not there."""
    others = (t for t in card.residents if not _stays(spec, t))
    return plan.capacity(spec, card.name) - plan.needs(spec, others) - plan.held(card)


def _wanted(spec: Spec, tenant: str) -> int:
    """MiB of `_free` that a tenant takes when it comes: none where its room is set aside."""
    return 0 if _stays(spec, tenant) else spec.tenants[tenant].need_mib


def _crowded(card: Card, tenant: str) -> bool:
    failure = card.failed.get(tenant)
    return failure is not None and failure.crowded


def evictable(world: World, spec: Spec, card: Card) -> list[str]:
    """Residents that may be sent away for others, the one that costs least first: idle and non-default ones."""
    found = ((t, spec.tenants.get(t)) for t in card.residents)
    return sorted((t for t, one in found if one is None or _may_leave(card, one)), key=lambda t: _value(world, spec, t))


def _may_leave(card: Card, tenant: TenantSpec) -> bool:
    return not (tenant.evict_never or tenant.by_lease or tenant.id in card.pinned)


def leaves_for(world: World, spec: Spec, card: Card, tenant: str) -> str | None:
    """Who leaves for a tenant that ran out of memory, beside whom its need says; None: nobody would."""
    waited_for = any(d.waiting for d in world.demand if d.tenant == tenant)
    waited_for = waited_for or any(e.verb is Verb.LOAD and tenant in e.tenants for e in world.errands)
    kept = frozenset[str]() if waited_for else _kept_from(spec, card, (tenant,))
    return next((t for t in evictable(world, spec, card) if t not in kept), None)


def _kept_from(spec: Spec, card: Card, tenants: Collection[str]) -> frozenset[str]:
    """Who does not leave for those who come back and ran out of memory: no default, nor who is owed as they are.

    A default is owed more than one that only was there before a lease: else it would stay away as long as that serves.
    """
    defaults = frozenset(t.id for t in spec.tenants.values() if t.default and t.card == card.name)
    return defaults if defaults.intersection(tenants) else defaults.union(card.return_to or ())


def _make_room(
    world: World, spec: Spec, card: Card, need_mib: int, keep: Collection[str] = (), *, one_more: bool = False
) -> tuple[str, ...] | None:
    """Residents that must leave so that `need_mib` fits, and one more where there is any; None if it cannot fit."""
    free = _free(spec, card)
    leaving: list[str] = []
    for tenant in (t for t in evictable(world, spec, card) if t not in keep):
        if free >= need_mib:
            leaving += [tenant] * one_more
            break
        configured = spec.tenants.get(tenant)
        leaving.append(tenant)
        free += configured.need_mib if configured else 0
    return tuple(leaving) if free >= need_mib else None


def _value(world: World, spec: Spec, tenant: str) -> tuple[int, bool, int]:
    running = sum(d.running for d in world.demand if d.tenant == tenant)
    configured = spec.tenants.get(tenant)
    return (running, configured.default, configured.need_mib) if configured else (-1, False, 0)


def _that_fit(world: World, spec: Spec, card: Card, tenants: Iterable[str]) -> tuple[str, ...]:
    """Those of `tenants` that are missing, may be tried, and fit beside what is there, in the order given."""
    free = _free(spec, card)
    fitting: list[str] = []
    for tenant in tenants:
        if not _loadable(world, spec, card, tenant):
            continue
        wanted = _wanted(spec, tenant)
        if wanted <= free:
            fitting.append(tenant)
            free -= wanted
    return tuple(fitting)


def _come_back(world: World, spec: Spec, card: Card, idle_since_ms: int, *, busy: bool) -> Choice | None:
    """The residents from before a lease come back at once where they fit; they, and displaced defaults, when idle.

    Who is owed and cannot come (its load fails, a default is in its place) does not keep the defaults away.
    """
    away = {*card.unused, *(t for t, one in card.overruns.items() if one.away)}
    owed = [t for t in card.return_to or () if t not in away and _loadable(world, spec, card, t)]
    defaults = [t.id for t in spec.tenants.values() if t.default and t.card == card.name and t.id not in away]
    idle = not busy and world.now_ms - idle_since_ms >= spec.policy.idle_restore_ms
    idle = idle and not _in_use(world.demand, card)
    keep = {*(card.return_to or ()), *defaults}
    cause = f"lease {card.return_lease}" if card.return_lease else "recovery"
    choice = _bring(world, spec, card, Choice(cause, arriving=tuple(owed), lease=card.return_lease), keep, idle=idle)
    if choice is not None or busy or (owed and (card.holds or not idle)):
        return choice
    return _bring(world, spec, card, Choice("recovery", arriving=tuple(defaults)), keep, idle=idle)


def _bring(world: World, spec: Spec, card: Card, wish: Choice, keep: Collection[str], *, idle: bool) -> Choice | None:
    """As many of those wished for as fit now; when idle, all of them in the place of who is not to be kept."""
    arriving = _that_fit(world, spec, card, wish.arriving)
    if arriving:
        crowded = [t for t in arriving if _crowded(card, t)]
        others = [t for t in evictable(world, spec, card) if crowded and t not in _kept_from(spec, card, crowded)]
        return replace(wish, leaving=tuple(others[:1]), arriving=arriving)
    missing = tuple(t for t in wish.arriving if _loadable(world, spec, card, t))
    if not missing or not idle:
        return None
    leaving = _make_room(world, spec, card, sum(_wanted(spec, t) for t in missing), keep)
    return replace(wish, leaving=leaving, arriving=missing) if leaving else None


def _in_use(demand: Iterable[Demand], card: Card) -> bool:
    return any(d.running or d.waiting for d in demand if d.tenant in card.residents)
