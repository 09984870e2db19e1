"""A tenant of ours that somebody else loads while a swap proves its card free: it is taken as it is. Pure.

Nobody will send it away for the proof, which would only run into its limit. So the swap ends where it stands, the
tenant becomes a resident, its lease or errand waits again, and the policy decides anew, now knowing who is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swapper.core import plan, unused
from swapper.core.commit import AlertKind, LeaseChange
from swapper.core.draft import Draft
from swapper.core.spec import Spec
from swapper.core.types import Card, LeaseState, Step, StepOutcome, Swap


def proving(card: Card) -> tuple[int, int] | None:
    """The order after which what was seen of the card counts while it is being proved free; None when it is not."""
    swap = card.swap
    if swap is None or swap.stage is not Step.VACATE or len(swap.pending) != 1:
        return None
    return (swap.pending[0].token, swap.pending[0].n - 1)


def in_the_way(spec: Spec, card: Card, swap: Swap, states: Mapping[str, str]) -> tuple[str, ...]:
    """Tenants seen loaded that neither are residents nor left nor come with the swap, where there is no room beside."""
    ours = {*card.residents, *swap.from_, *swap.to}
    found = tuple(t for t, state in states.items() if state == "loaded" and t in spec.tenants and t not in ours)
    if any(plan.by_lease(spec, t) for t in found):  # what it takes stands in no number before it has its lease
        return found
    needed = plan.vacate_need(spec, card, swap) + plan.needs(spec, found)
    return found if needed > plan.capacity(spec, card.name) - plan.needs(spec, card.residents) else ()


def make_way(draft: Draft, found: tuple[str, ...]) -> None:
    """End the swap for them; see the module text."""
    swap, card = draft.swap, draft.card
    reason = f"{', '.join(found)} was loaded by somebody else meanwhile"
    owed = card.return_to if card.return_to is not None else swap.from_ or None
    draft.card = unused.back(replace(card, residents=(*card.residents, *found), return_to=owed), found)
    if swap.grants and swap.lease is not None:
        draft.card = replace(draft.card, holds=tuple(h for h in card.holds if h.lease != swap.lease))
        lease = draft.world.leases.get(swap.lease)
        if lease is not None and lease.state is LeaseState.PREPARING:
            change = LeaseChange(lease.id, frozenset({LeaseState.PREPARING}), LeaseState.QUEUED)
            draft.leases.append(change)
    for tenant in found:
        draft.let_in(tenant)
        text = f"{tenant} was loaded by somebody else; it serves, and who waits goes on from there"
        draft.alert(text, AlertKind.STRANGER, tenant=tenant)
    for record in swap.steps:
        draft.finish(record.step, record.tenant, StepOutcome.COMPENSATED, reason)
    draft.end(replace(draft.swap, pending=(), outcome="compensated", reason=reason, ended_ms=draft.now), again=True)
