"""The card machine: events in, commits out. Pure: the coordinator, the simulator and the checker drive this code.

Every function looks at a World and returns the Commit that should follow, or None when nothing has to change. Time and
ids are arguments. Entry points: `start` a swap, `on_report` an executor's answer, `on_time` what is due, `on_hello` and
`on_observed` what the agents saw, `resume` after a restart.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from swapper.core import intruder, periodic, plan, policy, steps, unused, watchdog
from swapper.core.answers import compensate, go_on_by_force, settle, take
from swapper.core.commit import Alert, AlertKind, Commit, LeaseChange
from swapper.core.draft import Draft
from swapper.core.orders import Report
from swapper.core.policy import Choice
from swapper.core.spec import Spec
from swapper.core.steps import enter
from swapper.core.types import ACTIVE, Card, Departed, Hold, Lease, LeaseState, Step, Swap, World

BEFORE_RELEASE = frozenset({Step.CLOSE, Step.DRAIN, Step.SAVE})
_SHUT_MS = 5_000
"""A gate is shut by then, unless its gateway hangs."""


def start(world: World, spec: Spec, card: Card, choice: Choice, *, swap_id: str, token: int) -> Commit:
    """Begin the swap a choice asks for; a lease becomes `preparing` in the same commit."""
    draft = Draft(world, spec, card)
    lease = world.leases.get(choice.lease or "")
    grants = choice.lease is not None and {*choice.arriving} <= ({lease.request.holder} if lease else set())
    first, errand = plan.first_step(choice.leaving), choice.errand
    by_force = errand is not None and errand.force
    swap = Swap(
        swap_id if errand is None else errand.id,
        card.name,
        choice.cause,
        token,
        choice.leaving,
        choice.arriving,
        first,
        world.now_ms,
        world.now_ms,
        lease=choice.lease,
        grants=grants,
        drain_ms=0 if by_force else errand and errand.drain_ms,
        force=by_force,
    )
    draft.begin(swap)
    if choice.cause == policy.WATCHDOG:
        draft.card = replace(card, overruns=watchdog.acted(card, choice.leaving, choice.arriving, world.now_ms))
    if choice.cause == unused.TTL:
        draft.card = unused.left(draft.card, choice.leaving)
    if grants and choice.lease is not None:
        _prepare(draft, world.leases[choice.lease])
    enter(draft, first)
    return draft.commit()


def _prepare(draft: Draft, lease: Lease) -> None:
    card, swap = draft.card, draft.swap
    asked = lease.request
    tenant = asked.holder if plan.by_lease(draft.spec, asked.holder or "") else None
    hold = Hold(lease.id, asked.label, asked.vram_mib, asked.holder_pid, started=asked.holder_started, tenant=tenant)
    draft.card = replace(card, holds=(*card.holds, hold))
    if swap.from_:
        wanted = plan.owed(draft.spec, card)
        draft.card = replace(draft.card, return_to=wanted, return_lease=card.return_lease or lease.id)
    draft.leases.append(
        LeaseChange(
            lease.id,
            expect=frozenset({LeaseState.QUEUED}),
            state=LeaseState.PREPARING,
            card=card.name,
            swap_id=swap.id if swap.moves else None,
        )
    )


def on_report(world: World, spec: Spec, report: Report) -> Commit | None:
    """An executor answered. An answer nobody waits for (late, twice, of an older swap) changes nothing."""
    card = world.cards.get(report.card)
    if card is None or card.swap is None or report.outcome == "refused":
        return None
    for command in card.swap.pending:
        if (command.executor, command.token, command.n) == (report.executor, report.token, report.n):
            draft = Draft(world, spec, card)
            take(draft, command, report)
            return draft.commit()
    return None


def resume(world: World, spec: Spec, card: Card) -> Commit | None:
    """After a restart the pending commands go out again as they were; executors answer repeats from their record."""
    if card.swap is None or not card.swap.pending:
        return None
    return Commit(cards=(card,), commands=card.swap.pending)


def on_time(world: World, spec: Spec, card: Card, silent: Collection[str] = ()) -> Commit | None:
    """Whatever is due on one card: holders that ended, leases past their limits, gateways gone, the drain limit.

    `silent`: the tenants whose server was seen not to answer.
    """
    drain_limit = partial(_drain_limit, silent=silent)
    for due in (_renamed, _overdue, _ended_holds, _lost_gateways, drain_limit, periodic.give_way):
        commit = due(world, spec, card)
        if commit is not None:
            return commit
    return None


def overdue_in_queue(world: World, spec: Spec) -> Commit | None:
    """Leases that no card looks after: queued past their deadline, or of a card that left the configuration."""
    changes = (_orphan(lease, spec, world.now_ms) for lease in world.leases.values())
    ended = tuple(change for change in changes if change is not None)
    return Commit(leases=ended) if ended else None


def _orphan(lease: Lease, spec: Spec, now_ms: int) -> LeaseChange | None:
    queued = frozenset({LeaseState.QUEUED})
    name = lease.card or lease.request.card
    if name is not None and name not in spec.cards:
        if lease.state is LeaseState.GRANTED:
            return _verdict(lease, now_ms)
        waiting = frozenset({LeaseState.QUEUED, LeaseState.PREPARING})
        return LeaseChange(lease.id, waiting, LeaseState.FAILED, f"card {name} is not configured any more")
    if lease.state is LeaseState.QUEUED and _past(lease.request.deadline_ms, now_ms):
        return LeaseChange(lease.id, queued, LeaseState.EXPIRED, "its deadline passed while it was queued")
    return None


def _past(limit_ms: int | None, now_ms: int) -> bool:
    return limit_ms is not None and limit_ms <= now_ms


def _renamed(world: World, spec: Spec, card: Card) -> Commit | None:
    """A lease names another process than when it was granted: its end is seen by that one."""
    holds = tuple(_as_named(world, hold) for hold in card.holds)
    if holds == card.holds:
        return None
    draft = Draft(world, spec, card)
    draft.card = replace(card, holds=holds)
    return draft.commit()


def _as_named(world: World, hold: Hold) -> Hold:
    lease = world.leases.get(hold.lease)
    return hold if lease is None else replace(hold, pid=lease.request.holder_pid, started=lease.request.holder_started)


def _overdue(world: World, spec: Spec, card: Card) -> Commit | None:
    for hold in card.holds:
        lease = world.leases.get(hold.lease)
        change = _verdict(lease, world.now_ms) if lease is not None else None
        if lease is None or change is None:
            continue
        draft = Draft(world, spec, card)
        draft.leases.append(change)
        leave(draft, hold, world.now_ms + spec.policy.grace_ms)
        return draft.commit()
    return None


def _verdict(lease: Lease, now_ms: int) -> LeaseChange | None:
    """How a preparing or granted lease ends by the clock, if it does."""
    granted = frozenset({LeaseState.GRANTED})
    if lease.state is LeaseState.GRANTED and _past(lease.expires_ms, now_ms):
        reason = f"no heartbeat within {lease.request.ttl_ms / 1000:g} s"
        return LeaseChange(lease.id, granted, LeaseState.EXPIRED, reason, only_if_expired=True)
    if lease.state is LeaseState.GRANTED and _past((lease.granted_ms or 0) + lease.request.max_hold_ms, now_ms):
        reason = f"held longer than its max_hold of {lease.request.max_hold_ms / 1000:g} s"
        return LeaseChange(lease.id, granted, LeaseState.REVOKED, reason)
    if lease.state is LeaseState.PREPARING and _past(lease.request.deadline_ms, now_ms):
        preparing = frozenset({LeaseState.PREPARING})
        return LeaseChange(lease.id, preparing, LeaseState.EXPIRED, "its deadline passed while its swap ran")
    return None


def _ended_holds(world: World, spec: Spec, card: Card) -> Commit | None:
    for hold in card.holds:
        lease = world.leases.get(hold.lease)
        if lease is None or lease.state not in ACTIVE:
            draft = Draft(world, spec, card)
            leave(draft, hold, world.now_ms)
            return draft.commit()
    return None


def leave(draft: Draft, hold: Hold, free_ms: int) -> None:
    """A holder goes; a swap that was preparing for it turns back while that costs nothing.

    `free_ms`: when its memory counts as free where its process is not known.
    """
    draft.card = replace(draft.card, holds=tuple(h for h in draft.card.holds if h != hold))
    if hold.granted and hold.tenant is None:  # a tenant's is released, which is seen
        departed = Departed(hold.lease, hold.label, hold.pid, free_ms, hold.started)
        draft.card = replace(draft.card, departed=(*draft.card.departed, departed))
    elif draft.running and draft.swap.grants and draft.swap.lease == hold.lease:
        if draft.swap.stage in BEFORE_RELEASE:
            compensate(draft, "the lease ended before the card was ready")
        else:
            draft.update(grants=False, reason="the lease ended before the card was ready")


def _lost_gateways(world: World, spec: Spec, card: Card) -> Commit | None:
    if card.swap is None:
        return None
    live = {f"gateway:{g}" for g in world.gateways}
    lost = [c for c in card.swap.pending if c.executor.startswith("gateway:") and c.executor not in live]
    if not lost:
        return None
    draft = Draft(world, spec, card)
    stage = card.swap.stage
    draft.update(pending=tuple(c for c in card.swap.pending if c not in lost))
    settle(draft, stage, *dict.fromkeys(c.tenant for c in lost))
    return draft.commit()


def _drain_limit(world: World, spec: Spec, card: Card, silent: Collection[str]) -> Commit | None:
    swap = card.swap
    if swap is None or swap.stage not in (Step.CLOSE, Step.DRAIN):
        return None
    draft = Draft(world, spec, card)
    if swap.forced_ms is None:
        over_ms = world.now_ms - swap.started_ms - _limit(world, spec, swap)
        if over_ms < 0:
            return None
        reopens = spec.policy.on_drain_limit == "reopen" and not swap.force
        if (reopens or swap.drain_ms is not None) and _only_servers(swap) and over_ms < steps.CUT_LIMIT_MS:
            return None  # no call of ours is left: a server that was asked says itself whether it is idle
        if reopens:
            compensate(draft, "calls were still running at the drain limit (policy.on_drain_limit: reopen)")
            return draft.commit()
        draft.update(forced_ms=world.now_ms)
        for tenant in swap.from_:
            draft.tell_gateways("cut", tenant, {"epoch": world.gates[tenant].epoch, "reason": "the drain limit"})
        return draft.commit()
    if world.now_ms - swap.forced_ms < steps.CUT_LIMIT_MS:
        return None
    give_way = go_on_by_force if swap.force else compensate
    give_way(draft, _why_not_drained(swap, silent))
    return draft.commit()


def _limit(world: World, spec: Spec, swap: Swap) -> int:
    """Where calls are to end at once they do so when the gates are shut: then it is known whether there are any."""
    limit = steps.drain_limit(world, spec, swap)
    return max(limit, _SHUT_MS) if swap.stage is Step.CLOSE else limit


def _only_servers(swap: Swap) -> bool:
    """Whether every gateway has said that its calls have ended."""
    return swap.asked and not any(c.executor.startswith("gateway:") for c in swap.pending)


def _why_not_drained(swap: Swap, silent: Collection[str]) -> str:
    mute = [tenant for tenant in swap.from_ if tenant in silent]
    gateways = sorted({c.executor for c in swap.pending if c.executor.startswith("gateway:")})
    if mute:
        return f"the server of {', '.join(mute)} does not answer, so that nobody knows whether it is idle"
    if gateways:
        return f"{', '.join(gateways)} did not say that its calls have ended"
    return "the server is still busy with calls that did not come through swapper"


def on_hello(world: World, spec: Spec, host: str, mark: int) -> Commit | None:
    """An agent is there that knows no token above `mark`; what it lost of our orders it will never carry out."""
    cards = tuple(
        replace(card, ordered=(mark, 0))
        for card in world.cards.values()
        if card.swap is None
        and card.ordered[0] > mark
        and card.name in spec.cards
        and spec.cards[card.name].host == host
    )
    return Commit(cards=cards) if cards else None


def on_observed(world: World, spec: Spec, card: Card, states: Mapping[str, str], free_mib: int | None) -> Commit | None:
    """What the agents see, against what the card should be (level-triggered; between swaps, but for one case).

    `states` maps tenant ids of this card to TenantState values; `free_mib` is the probe's reading. A resident that is
    gone is brought back, a stranger that is loaded becomes a resident where it fits, a fault is left when the probe is
    clear and the time of every holder that left without a process is up. While the card is being proved free, one of
    ours that somebody loads meanwhile ends that (intruder.py).
    """
    if card.swap is not None:
        found = intruder.in_the_way(spec, card, card.swap, states) if intruder.proving(card) else ()
        if not found:
            return None
        draft = Draft(world, spec, card)
        intruder.make_way(draft, found)
        return draft.commit()
    lost = tuple(t for t in card.residents if states.get(t) in ("unloaded", "failed", "stopped"))
    if lost:
        return _lose(world, spec, card, lost)
    waited_for = any(one.pid is None and one.free_ms > world.now_ms for one in card.departed)
    if card.fault is not None and free_mib is not None and not waited_for:
        within_reach = free_mib + plan.needs(spec, card.residents)
        if within_reach >= min(card.fault.need_mib, plan.capacity(spec, card.name)):
            over = Alert(card.name, f"card {card.name} is free again", kind=AlertKind.FAULT, over=True)
            return Commit(cards=(replace(card, fault=None),), alerts=(over,))
    strangers = tuple(t for t, state in states.items() if t not in card.residents and _is_there(spec, card, t, state))
    return _adopt(world, spec, card, strangers) if strangers and not card.holds else None


def _is_there(spec: Spec, card: Card, tenant: str, state: str) -> bool:
    """Whether it serves, though no swap brought it; at a fault also what was begun and may never come up.

    As a resident it can be sent away: else it keeps its card at fault, and nobody but us would end it.
    """
    configured = spec.tenants.get(tenant)
    begun = state == "loading" and card.fault is not None
    return configured is not None and (state == "loaded" or (begun and not configured.serves_models))


def _lose(world: World, spec: Spec, card: Card, lost: tuple[str, ...]) -> Commit:
    draft = Draft(world, spec, card)
    left = tuple(t for t in card.residents if t not in lost)
    draft.card = replace(card, residents=left, return_to=plan.owed(spec, card))
    for tenant in lost:
        draft.order(Step.CLOSE, tenant, {"epoch": draft.gate(tenant, open_=False)})
        text = f"{tenant} is gone from the card though no swap took it away; it will be brought back"
        draft.alert(text, AlertKind.GONE, tenant=tenant)
    return draft.commit()


def _adopt(world: World, spec: Spec, card: Card, strangers: tuple[str, ...]) -> Commit | None:
    room = spec.cards[card.name].total_mib - spec.cards[card.name].reserve_mib - plan.needs(spec, card.residents)
    if plan.needs(spec, strangers) > room:
        return None
    draft = Draft(world, spec, card)
    for tenant in strangers:
        draft.let_in(tenant, loaded=True)
    residents = (*card.residents, *strangers)
    card = unused.back(card, strangers)
    owed = card.return_to is not None and not set(card.return_to) <= set(residents)
    draft.card = replace(
        card,
        residents=residents,
        failed={t: failure for t, failure in card.failed.items() if t not in strangers},
        return_to=card.return_to if owed else None,
        return_lease=card.return_lease if owed else None,
    )
    return draft.commit()


__all__ = [
    "on_hello",
    "on_observed",
    "on_report",
    "on_time",
    "overdue_in_queue",
    "resume",
    "start",
]
