"""What is asked for by hand, as far as no swap is needed for it; the swaps for the rest are the policy's. Pure.

Invariant: every errand ends once, in a swap on record, with a reason where nothing moved. Of two about one tenant the
last word counts: a load that waits is taken back by an unload that came after it, never the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from swapper.core import plan, policy, unused
from swapper.core.answers import compensate
from swapper.core.commit import AlertKind, Commit, LeaseChange
from swapper.core.draft import Draft
from swapper.core.errand import MANUAL, Errand, Verb
from swapper.core.machine import leave
from swapper.core.spec import Spec
from swapper.core.types import Card, LeaseState, Step, Swap, World

QUEUED = "queued"
"""The state of a swap that has not begun, in its event and wherever it is shown."""
_UNTIL_SAVED = (Step.CLOSE, Step.DRAIN)


def queued_swap(errand: Errand) -> Swap:
    """The swap an errand will be, as long as it has not begun."""
    from_ = errand.tenants if errand.verb is Verb.UNLOAD else ()
    to = errand.tenants if errand.verb is Verb.LOAD else ()
    first = plan.first_step(from_)
    return Swap(errand.id, errand.card, MANUAL, 0, from_, to, first, errand.asked_ms, errand.asked_ms)


def at_work(card: Card, errand: Errand) -> bool:
    """Whether its swap runs."""
    return card.swap is not None and card.swap.id == errand.id


def homeless(world: World, spec: Spec) -> Commit | None:
    """Errands of a card that left the configuration."""
    lost = [errand for errand in world.errands if errand.card not in spec.cards]
    if not lost:
        return None
    why = "card {} is not configured any more"
    ended = tuple(_ended(errand, world.now_ms, "compensated", why.format(errand.card)) for errand in lost)
    return Commit(swaps=ended, over=tuple(errand.id for errand in lost))


def due(world: World, spec: Spec, card: Card) -> Commit | None:
    """What is done at once for an errand of the card; None where they all wait for a swap, or are at it."""
    mine = [errand for errand in world.errands if errand.card == card.name]
    for nth, errand in enumerate(mine):
        commit = None if at_work(card, errand) else _do(Draft(world, spec, card), errand, mine[:nth], mine[nth + 1 :])
        if commit is not None:
            return commit
    return None


def _do(draft: Draft, errand: Errand, before: Iterable[Errand], after: Iterable[Errand]) -> Commit | None:
    match errand.verb:
        case Verb.PIN | Verb.UNPIN:
            return _pin(draft, errand)
        case Verb.LOAD:
            return _load(draft, errand, before, after)
        case Verb.UNLOAD:
            return _unload(draft, errand)
        case Verb.VACATE:
            return (_force(draft, errand) if errand.force else None) or _vacate(draft, errand)


def _pin(draft: Draft, errand: Errand) -> Commit:
    pinned = tuple(t for t in draft.card.pinned if t not in errand.tenants)
    if errand.verb is Verb.PIN:
        pinned += errand.tenants
    draft.card = replace(draft.card, pinned=pinned)
    how = "is sent away by hand or for maintenance only" if errand.verb is Verb.PIN else "may be sent away again"
    return _over(draft, errand, f"{', '.join(errand.tenants)} {how}")


def _load(draft: Draft, errand: Errand, before: Iterable[Errand], after: Iterable[Errand]) -> Commit | None:
    (tenant,) = errand.tenants
    card, configured = draft.card, draft.spec.tenants.get(tenant)
    later = next((one for one in after if one.sends_away and one.about(tenant)), None)
    if later is not None:
        return _over(draft, errand, f"taken back by {later.verb} {later.id}, which came after it", "compensated")
    if configured is None or configured.card != card.name:
        return _over(draft, errand, f"{tenant} is not configured on {card.name} any more", "compensated")
    if configured.by_lease:
        why = f"{tenant} comes onto {card.name} inside a lease of its own only: send it work"
        return _over(draft, errand, why, "compensated")
    leaving = card.swap.from_ if card.swap is not None else ()
    if tenant in card.residents and tenant not in leaving:
        sent_away = any(one.sends_away and one.about(tenant) for one in before)
        return None if sent_away else _over(draft, errand, f"{tenant} was on {card.name} already")
    why = policy.never_fits(draft.spec, card, configured)
    return None if why is None else _over(draft, errand, why, "compensated")


def _unload(draft: Draft, errand: Errand) -> Commit | None:
    """Over where nobody has to leave for it; whoever comes with a swap that runs may have to."""
    card = draft.card
    if card.swap is not None or policy.leaves_by_hand(draft.spec, card, errand):
        return None
    there = [t for t in card.residents if errand.about(t)]
    if there:
        why = f"{', '.join(there)} leaves {card.name} at the end of its lease only"
        if any(t.evict_never for t in map(draft.spec.tenants.get, there) if t is not None):
            why = f"{', '.join(there)} never leaves {card.name} (evict: never in the configuration)"
        return _over(draft, errand, why, "compensated")
    draft.card = unused.sent_off(draft.spec, card, errand)
    return _over(draft, errand, f"{', '.join(errand.tenants)} was not on {card.name}")


def _vacate(draft: Draft, errand: Errand) -> Commit | None:
    """A card in a lease has no residents to send away; they stay off when it ends."""
    card = draft.card
    if card.swap is not None or card.whole is None:
        return None
    draft.card = unused.sent_off(draft.spec, card, errand)
    kept = f"{card.whole.lease} keeps {card.name} until it ends, and nobody comes back then"
    return _over(draft, errand, f"{kept}; swapper vacate {card.name} --force ends it now")


def _force(draft: Draft, errand: Errand) -> Commit | None:
    """Holders lose their leases, what leaves already does so at once, a fault is left; None: there is none of it."""
    card = draft.card
    for hold in card.holds:
        lease = draft.world.leases.get(hold.lease)
        state = None if lease is None else lease.state
        why = f"{card.name} was vacated by force ({errand.id})"
        if state is LeaseState.GRANTED:
            draft.leases.append(LeaseChange(hold.lease, frozenset({state}), LeaseState.REVOKED, why))
        elif state is LeaseState.PREPARING:
            draft.leases.append(LeaseChange(hold.lease, frozenset({state}), LeaseState.QUEUED))
        leave(draft, hold, draft.now + draft.spec.policy.grace_ms)
    if draft.running:
        _hurry(draft, errand)
    if draft.card.fault is not None:
        draft.card = replace(draft.card, fault=None)
        draft.alert(f"card {card.name} was vacated by force: it is at fault no more", AlertKind.FAULT)
        draft.alerts[-1] = replace(draft.alerts[-1], over=True)
    changed = draft.commit()
    return changed if changed.leases or changed.cards != (card,) else None


def _hurry(draft: Draft, errand: Errand) -> None:
    """Calls that a swap waits for end now, and what it loads is stopped: nobody is to come any more."""
    swap = draft.swap
    if swap.stage in _UNTIL_SAVED and swap.drain_ms != 0:
        draft.update(drain_ms=0)
    elif swap.stage is Step.LOAD and not swap.back:
        compensate(draft, f"{swap.card} was vacated by force ({errand.id})")
        draft.update(to=())


def _over(draft: Draft, errand: Errand, reason: str, outcome: str = "done") -> Commit:
    draft.ended.append(_ended(errand, draft.now, outcome, reason))
    draft.over.append(errand.id)
    return draft.commit()


def _ended(errand: Errand, now_ms: int, outcome: str, reason: str) -> Swap:
    """Nothing was moved for it."""
    as_asked = replace(queued_swap(errand), from_=(), to=())
    return replace(as_asked, outcome=outcome, reason=reason, ended_ms=max(now_ms, errand.asked_ms))
