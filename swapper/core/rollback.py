"""A store that was put back: how it is noticed, what is said of it, how the swap goes on that it has under way. Pure.

A token is committed before anybody hears of it. A higher one than the store has, known to an agent that obeyed it or
to a coordinator that gave it out, proves that the store lost something, and so does a higher epoch of a gate. What it
lost it cannot name: what was seen before counts no more, and is seen anew.
"""

from __future__ import annotations

from dataclasses import replace

from swapper.core.commit import Alert, AlertKind, Commit
from swapper.core.draft import Draft
from swapper.core.machine import BEFORE_RELEASE
from swapper.core.orders import Report
from swapper.core.spec import Spec
from swapper.core.steps import enter
from swapper.core.types import Card, Gate, Step, StepOutcome, Swap, World


def on_mark(world: World, spec: Spec, mark: int) -> Commit | None:
    """An alert for each card when `mark` is above the counter, which is to be raised right after; else None."""
    if mark <= world.token:
        return None
    text = (
        f"the store is an older copy of itself, or a new one: token {mark} was given out, and it knows of none above "
        f"{world.token}; leases asked for or granted since then are lost, and each card is taken as its agent sees it"
    )
    data = {"mark": str(mark), "token": str(world.token)}
    return Commit(alerts=tuple(Alert(name, text, data, AlertKind.PUT_BACK) for name in spec.cards))


def retoken(world: World, spec: Spec, card: Card, token: int) -> Commit | None:
    """Send what is pending again under a higher token: the agent knew a mark the store had lost.

    What was proved before a load may be so no more: whatever came onto the card since is forgotten. So is what a tenant
    was seen to hold, and that nobody called it, before its release: it may have come back and served since.
    """
    if card.swap is None or token <= card.swap.token:
        return None
    draft = Draft(world, spec, card)
    if _leaving(card.swap):
        _leave_anew(draft, token)
        return draft.commit()
    pending = card.swap.pending
    draft.begin(replace(card.swap, token=token, pending=()))
    if card.swap.stage is Step.LOAD:
        enter(draft, Step.VACATE)
        return draft.commit()
    for command in pending:
        draft.command(command.executor, command.verb, command.tenant, command.args)
    return draft.commit()


def _leaving(swap: Swap) -> bool:
    """Whether it sends tenants away and has not yet seen them go."""
    return swap.tends is None and not swap.back and swap.stage in (*BEFORE_RELEASE, Step.RELEASE)


def _leave_anew(draft: Draft, token: int, above: int = 0) -> None:
    """Begin again with the gates, `above` that epoch: what is known of those who leave is from before they served."""
    saved = tuple(talk for talk in draft.swap.conversations if talk.saved)
    steps = tuple(record for record in draft.swap.steps if record.outcome is not StepOutcome.RUNNING)
    again = replace(draft.swap, token=token, started_ms=draft.now, forced_ms=None, pending=(), steps=steps)
    draft.begin(replace(again, told=(), idle=(), asked=False, known=(), retried=(), conversations=saved))
    for tenant in draft.swap.from_:
        draft.gate(tenant, open_=False, above=above)
    enter(draft, Step.CLOSE)


def on_gate_refused(world: World, spec: Spec, report: Report) -> Commit | None:
    """A gateway obeys a higher epoch than ours (the store was rolled back): go above it and tell all of them again."""
    card, epoch = world.cards.get(report.card), report.data.get("epoch")
    if card is None or card.swap is None or not isinstance(epoch, int):
        return None
    refused = [c for c in card.swap.pending if (c.token, c.n, c.executor) == (report.token, report.n, report.executor)]
    if not refused:
        return None
    (command,) = refused
    assert command.tenant is not None
    draft = Draft(world, spec, card)
    same = [c for c in card.swap.pending if (c.verb, c.tenant) == (command.verb, command.tenant)]
    draft.update(pending=tuple(c for c in card.swap.pending if c not in same))
    raised = draft.gate(command.tenant, open_=command.verb == Step.OPEN, above=epoch)
    draft.tell_gateways(command.verb, command.tenant, {**command.args, "epoch": raised})
    return draft.commit()


def on_gate_ahead(world: World, spec: Spec, report: Report) -> Commit | None:
    """A gateway knows a higher epoch than ours (the store was rolled back): go above it, with the gate as it is.

    Calls that it admitted since may be on their way to one that is to leave: that begins again.
    """
    epoch, tenant = report.data.get("epoch"), report.tenant
    configured = spec.tenants.get(tenant or "")
    if tenant is None or configured is None or not isinstance(epoch, int):
        return None
    gate = world.gates.get(tenant, Gate(0, open=False))
    if gate.epoch >= epoch:
        return None
    draft = Draft(world, spec, world.cards.get(configured.card) or Card(configured.card))
    if draft.running and _leaving(draft.swap) and tenant in draft.swap.from_:
        _leave_anew(draft, world.next_token, above=epoch)
    elif gate.open:
        draft.let_in(tenant, above=epoch)
    else:
        draft.order(Step.CLOSE, tenant, {"epoch": draft.gate(tenant, open_=False, above=epoch)})
    return draft.commit()
