"""What an executor's answer means for the swap: done, tried again, gone on without, or compensated. Pure.

One function a verb. Design 4 is the table these functions implement: a step ends on what was observed, every failure
has one compensation, and compensation always ends with a declared state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from swapper.core import comeback, keeping, periodic, plan, policy, saving, tend, watchdog
from swapper.core.commit import AlertKind, LeaseChange
from swapper.core.conversations import Conversation, ProofResult, Strategy
from swapper.core.draft import Draft
from swapper.core.orders import Command, Report
from swapper.core.steps import advance, begun, enter, prove_free
from swapper.core.types import Failure, Fault, LeaseState, Step, StepOutcome

FIRST_REST_MS = 30_000
SHORT_REST_MS = 5_000
"""The first rest of one that nobody had to leave for: trying it again costs nobody anything."""
LONGEST_REST_MS = 600_000
_GONE = "it was not loaded any more, and what its slots held went with it"


def take(draft: Draft, command: Command, report: Report) -> None:
    """Take the answer to a pending command; afterwards the swap waits, has gone on, or is over."""
    draft.update(pending=tuple(c for c in draft.swap.pending if c is not command))
    draft.note(draft.swap.stage, command.tenant, report.backend_ms)
    stage = draft.swap.stage
    if periodic.runs(draft.swap):
        periodic.take(draft, command, report)
    elif tend.brings(draft.swap):
        tend.take(draft, command, report)
    elif command.verb == keeping.RECALL:
        _recalled(draft, command, report)
    elif command.verb != "cut" and not (report.outcome != "ok" and _again(draft, command)):
        _TAKE[Step(command.verb)](draft, command, report)
    settle(draft, stage, command.tenant)


def settle(draft: Draft, stage: Step, *tenants: str | None) -> None:
    """Close the lines of the tenants with nothing more pending in the step; go on when nobody has."""
    if not draft.running or draft.swap.stage is not stage:
        return
    if periodic.runs(draft.swap):
        if not draft.swap.pending:
            periodic.go_on(draft)
        return
    if tend.brings(draft.swap) and not draft.swap.pending and tend.go_on(draft):
        return
    waits_for_server = stage is Step.DRAIN and not draft.swap.asked
    for tenant in tenants:
        if waits_for_server or any(c.tenant == tenant for c in draft.swap.pending):
            continue
        if stage is Step.SAVE and tenant is not None and keeping.recall(draft, tenant):
            continue
        forced = draft.swap.forced_ms is not None and stage in (Step.CLOSE, Step.DRAIN)
        if forced:
            draft.finish(stage, tenant, StepOutcome.FORCED, "calls in flight were ended at the drain limit")
        else:
            draft.finish(stage, tenant)
    while not draft.swap.pending and not _given_up(draft):
        advance(draft)
        if not draft.running or draft.swap.stage is not Step.SAVE:
            return


def _given_up(draft: Draft) -> bool:
    """Turn back where a conversation that is required could not be saved: nothing was unloaded yet."""
    if draft.swap.stage is not Step.SAVE:
        return False
    for talk in draft.swap.conversations:
        lost = talk.result is ProofResult.COLD and talk.head and talk.reason not in saving.NO_LOSS
        if lost and _must_keep(draft, talk.tenant):
            compensate(draft, f"a conversation of {talk.tenant} could not be saved: {talk.reason}")
            return True
    return False


def _must_keep(draft: Draft, tenant: str) -> bool:
    """Whether it may not leave while a conversation of its would be lost."""
    configured = draft.spec.tenants.get(tenant)
    return configured is not None and configured.save_required and not draft.swap.force


def _again(draft: Draft, command: Command) -> bool:
    """One more try for what may pass: a failed drain, save, release or load is commanded once more."""
    key = f"{command.verb} {command.tenant} {command.args.get('name', '')}"
    may = command.verb in (Step.DRAIN, Step.SAVE, Step.RELEASE, Step.LOAD) and command.executor.startswith("agent:")
    if not may or key in draft.swap.retried:
        return False
    draft.update(retried=(*draft.swap.retried, key))
    draft.command(command.executor, command.verb, command.tenant, command.args)
    return True


def _closed(draft: Draft, command: Command, report: Report) -> None:
    """A gateway shut the gate; one without a call in flight is drained by that."""
    if report.outcome == "ok" and report.data.get("in_flight") == 0:
        keeping.note_known(draft, command, report)
        draft.update(idle=(*draft.swap.idle, f"{command.executor} {command.tenant}"))


def _drained(draft: Draft, command: Command, report: Report) -> None:
    if command.executor.startswith("gateway:"):
        keeping.note_known(draft, command, report)
        return
    assert command.tenant is not None
    configured = draft.spec.tenants.get(command.tenant)
    if report.outcome != "ok":
        draft.finish(Step.DRAIN, command.tenant, StepOutcome.FAILED, report.detail)
        reopens = draft.spec.policy.on_drain_limit == "reopen" and not draft.swap.force
        if _must_keep(draft, command.tenant) or reopens:
            compensate(draft, f"{command.tenant} could not be drained: {report.detail}")
        elif configured is not None and configured.save:
            _lost(draft, command.tenant, f"what its slots held is not known: {report.detail}")
        return
    if configured is None or not configured.save:
        return
    before = draft.swap.conversations
    others = tuple(c for c in before if c.tenant != command.tenant)
    keeping.learn(draft, command.tenant, report.data)
    slots = cast("Sequence[Mapping[str, int]]", report.data.get("slots", ()))
    found = () if report.data.get("gone") else saving.plan_saves(draft, command.tenant, slots)
    if not report.data.get("gone"):
        draft.update(conversations=(*others, *found))
    elif before == others:  # else it was saved, and let go by an order of before the store was put back
        _lost(draft, command.tenant, _GONE)
    # What nobody knows nobody will ever be able to keep: that would hold the card up for ever.
    lost = [c for c in found if c.result is ProofResult.COLD and c.head and c.reason not in saving.NO_LOSS]
    if lost and _must_keep(draft, command.tenant):
        compensate(draft, f"a conversation of {command.tenant} cannot be kept: {lost[0].reason}")


def _recalled(draft: Draft, command: Command, report: Report) -> None:
    """A conversation stands in a slot again, or could not be brought there."""
    keeping.recalled(draft, command, report)


def _lost(draft: Draft, tenant: str, why: str) -> None:
    """A line for all the conversations nobody can name any more."""
    lost = Conversation(tenant, -1, "", 0, 0, result=ProofResult.COLD, reason=why)
    draft.update(conversations=(*draft.swap.conversations, lost))


def _saved(draft: Draft, command: Command, report: Report) -> None:
    assert command.tenant is not None
    name = str(command.args["name"])
    if report.outcome == "ok":
        tokens = _int(report.data, "tokens")
        if tokens == 0 and command.args.get("conversation"):
            keeping.mark(draft, name, result=ProofResult.COLD, reason="its slot was empty when it was to be saved")
        elif tokens == 0:
            talks = tuple(c for c in draft.swap.conversations if c.snapshot != name)
            draft.update(conversations=talks)
            draft.update(conversations=(*talks, *saving.unsaid(draft, command.tenant)))
        else:
            keeping.mark(draft, name, saved=True, tokens=tokens, bytes=_int(report.data, "bytes"))
        return
    unsupported = bool(report.data.get("unsupported"))
    reason = report.detail or ("the server cannot save slots" if unsupported else "the save failed")
    keeping.mark(draft, name, reason=reason, result=ProofResult.COLD)
    if unsupported:
        keeping.mark(draft, name, strategy=Strategy.OFF)
    else:
        draft.finish(Step.SAVE, command.tenant, StepOutcome.FAILED, reason)
        text = f"a conversation of {command.tenant} could not be saved: {reason}"
        draft.alert(text, AlertKind.UNSAVED, tenant=command.tenant)
    if _must_keep(draft, command.tenant):
        compensate(draft, f"{command.tenant} slot {command.args['slot']} could not be saved: {reason}")


def _released(draft: Draft, command: Command, report: Report) -> None:
    """Gone, or not: a release that failed is recorded, and the probe in `vacate` has the last word."""
    if report.outcome != "ok":
        draft.finish(Step.RELEASE, command.tenant, StepOutcome.FAILED, report.detail)
    elif report.detail is not None:
        draft.finish(Step.RELEASE, command.tenant, detail=report.detail)
    tenant, card = command.tenant, draft.card
    if draft.swap.back:  # a load that was given up: it held nothing, and what is saved of it waits on
        return
    kept = (c for c in draft.swap.conversations if c.tenant == tenant and c.saved)
    saved = (*(c for c in card.saved if c.tenant != tenant), *kept)
    draft.card = replace(card, residents=tuple(t for t in card.residents if t != tenant), saved=saved)


def _vacated(draft: Draft, command: Command, report: Report) -> None:
    if report.outcome == "ok":
        draft.update(free_mib=_int(report.data, "free_mib"))
        seen = {d["lease"] for d in cast("Sequence[Mapping[str, object]]", command.args.get("departed", ()))}
        left = tuple(d for d in draft.card.departed if d.lease not in seen)
        draft.card = replace(draft.card, departed=left)
        if left:  # somebody left while we looked: that one must be seen gone as well
            prove_free(draft)
        return
    holders = cast("Sequence[str]", report.data.get("holders", ()))
    free, need = _int(report.data, "free_mib"), _int(command.args, "need_mib")
    who = ", ".join(holders) or "nobody we can name"
    looked = "holders" in report.data and report.data.get("unread") is None
    reason = f"{free} MiB free of the {need} needed; held by {who}" if looked else report.detail or "it was not looked"
    draft.finish(Step.VACATE, None, StepOutcome.FAILED, reason)
    text = f"card {draft.card.name}: {reason}"
    draft.alert(text, AlertKind.FAULT, holders=list(holders), free_mib=free, need_mib=need)
    before = draft.card.fault
    count = before.count + 1 if before else 1
    rest = 0 if before is None else _rest(before.count)
    draft.card = replace(draft.card, fault=Fault(reason, need, draft.now, count, draft.now + rest))
    give_up(draft, f"the VRAM did not become free: {reason}")
    end_in_fault(draft, reason)


def _loaded(draft: Draft, command: Command, report: Report) -> None:
    assert command.tenant is not None
    tenant = command.tenant
    if report.outcome != "ok":
        reason = report.detail or "the load failed"
        if report.data.get("out_of_memory"):
            _ran_out(draft, tenant)
            if _crowded(draft, tenant, reason):
                return
        _load_failed(draft, tenant, reason)
        return
    draft.card = replace(
        draft.card,
        failed={t: f for t, f in draft.card.failed.items() if t != tenant},
        loads={**draft.card.loads, tenant: _took(draft, tenant)},
    )
    keeping.learn(draft, tenant, report.data)
    offered = cast("Sequence[Mapping[str, object]]", report.data.get("snapshots", ()))
    others = [c for c in draft.swap.conversations if c.tenant != tenant]
    shared = report.data.get("n_ctx_shared")
    room = plan.Room(_int(report.data, "n_slots"), shared if isinstance(shared, int) else None)
    back = comeback.of_tenant(draft, tenant, [comeback.candidate(s) for s in offered], room)
    draft.update(conversations=(*others, *back))
    comeback.loaded_anew(draft, tenant)
    periodic.put_off(draft, tenant)


def _took(draft: Draft, tenant: str) -> int:
    """Milliseconds since its load began."""
    began = [r.started_ms for r in draft.swap.steps if (r.step, r.tenant) == (Step.LOAD, tenant)]
    return draft.now - max(began, default=draft.now)


def _ran_out(draft: Draft, tenant: str) -> None:
    """Where its need was measured, or guessed, it is more than what was free for it then."""
    configured, seen = draft.spec.tenants.get(tenant), draft.swap.free_mib
    if configured is None or seen is None:
        return
    beside = plan.needs(draft.spec, (t for t in draft.swap.to if t != tenant))
    draft.card = watchdog.ran_out(draft.card, configured, seen - beside)


def _crowded(draft: Draft, tenant: str, reason: str) -> bool:
    """It takes more than was thought: it is tried again at once, once, with one resident fewer. False: nobody is left.

    Who left for it is not brought back in between.
    """
    before, swap = draft.card.failed.get(tenant), draft.swap
    if swap.grants or swap.back or (before and before.crowded):
        return False
    leaves = policy.leaves_for(draft.world, draft.spec, draft.card, tenant)
    if leaves is None:
        return False
    draft.finish(Step.LOAD, tenant, StepOutcome.FAILED, reason)
    failure = Failure(reason, before.count + 1 if before else 1, draft.now, crowded=True)
    draft.card = replace(draft.card, failed={**draft.card.failed, tenant: failure})
    text = f"{tenant} ran out of memory while it was loaded; {leaves} leaves as well, and it is tried once more"
    draft.alert(f"{text}: {reason}", AlertKind.NOT_LOADED, tenant=tenant)
    if not plan.arriving(draft.swap) and not draft.swap.pending:
        end_in_fault(draft, reason, outcome="compensated", again=True)
    return True


def _load_failed(draft: Draft, tenant: str, reason: str) -> None:
    draft.finish(Step.LOAD, tenant, StepOutcome.FAILED, reason)
    before = draft.card.failed.get(tenant)
    count = before.count + 1 if before else 1
    displaces = draft.swap.from_ and not draft.swap.back
    rest = _rest(count, FIRST_REST_MS if displaces else SHORT_REST_MS)
    failure = Failure(reason, count, draft.now + rest, crowded=before is not None and before.crowded)
    draft.card = replace(draft.card, failed={**draft.card.failed, tenant: failure})
    draft.alert(f"{tenant} could not be loaded: {reason}", AlertKind.NOT_LOADED, tenant=tenant)
    swap = draft.swap
    if plan.arriving(draft.swap):
        return
    if not swap.back and swap.from_:
        give_up(draft, f"{tenant} could not be loaded: {reason}")
        compensate(draft, f"{tenant} could not be loaded")
    elif not draft.swap.pending:
        give_up(draft, f"{tenant} could not be loaded: {reason}")
        end_in_fault(draft, reason, outcome="compensated")


def _rest(count: int, first_ms: int = FIRST_REST_MS) -> int:
    return min(first_ms * 2 ** (count - 1), LONGEST_REST_MS)


def _opened(draft: Draft, command: Command, report: Report) -> None:
    """A gateway admits again."""


def compensate(draft: Draft, reason: str) -> None:
    """Turn back. Before the release: reopen, nothing was lost. After it: those who left are loaded and restored.

    What is being loaded is sent away first.
    """
    give_up(draft, reason)
    swap = draft.swap
    released = any(r.step is Step.RELEASE for r in swap.steps)
    kept = () if released else tuple(map(_stays, swap.conversations))
    to = tuple(t for t in swap.from_ if not plan.by_lease(draft.spec, t))
    draft.update(back=True, grants=False, to=to, pending=(), reason=reason, conversations=kept)
    for record in swap.steps:
        draft.finish(record.step, record.tenant, StepOutcome.COMPENSATED)
    if begun(draft.swap):
        enter(draft, Step.RELEASE)
    else:
        enter(draft, Step.VACATE if released else Step.OPEN)


def go_on_by_force(draft: Draft, why: str) -> None:
    """Whoever still works is not waited for: what nobody has said of its conversations is lost, and said so."""
    unsaid = [c.tenant for c in draft.swap.pending if c.executor.startswith("agent:")]
    for tenant in draft.swap.from_:
        for step in (Step.CLOSE, Step.DRAIN):
            draft.finish(step, tenant, StepOutcome.FORCED, f"{why}; it was not waited for")
        configured = draft.spec.tenants.get(tenant)
        if configured is not None and configured.save and (tenant in unsaid or not draft.swap.asked):
            _lost(draft, tenant, f"what its slots held is not known: {why}")
    draft.update(pending=(), asked=True, told=draft.world.gateways, stage=Step.DRAIN)
    settle(draft, Step.DRAIN)


def _stays(talk: Conversation) -> Conversation:
    """What was given up for an unload that does not come is where it was; only what was lost before is cold."""
    if talk.result is not ProofResult.COLD or talk.reason in (_GONE, saving.COLD_BEFORE):
        return talk
    return replace(talk, result=None, reason=f"{talk.reason}; nothing was unloaded, it is where it was")


def give_up(draft: Draft, reason: str) -> None:
    """The lease this swap was for will not be granted: it fails, unless it has ended already."""
    swap = draft.swap
    lease = draft.world.leases.get(swap.lease or "")
    if not swap.grants or swap.lease is None:
        return
    draft.card = replace(draft.card, holds=tuple(h for h in draft.card.holds if h.lease != swap.lease))
    decided = any(change.id == swap.lease for change in draft.leases)
    if lease is not None and lease.state is LeaseState.PREPARING and not decided:
        change = LeaseChange(
            swap.lease,
            expect=frozenset({LeaseState.PREPARING}),
            state=LeaseState.FAILED,
            reason=reason,
            explain=f"failed: {reason}",
        )
        draft.leases.append(change)


def end_in_fault(draft: Draft, reason: str, outcome: str = "fault", *, again: bool = False) -> None:
    """The swap ends here; the policy brings back whoever fits, and tries the others again after a rest.

    `again`: what it was asked for by hand is tried anew.
    """
    swap = draft.swap
    owed = tuple(t for t in swap.from_ if not plan.by_lease(draft.spec, t))
    if draft.card.return_to is None and owed:
        draft.card = replace(draft.card, return_to=owed, return_lease=swap.lease)
    for record in swap.steps:
        draft.finish(record.step, record.tenant, StepOutcome.FAILED, reason)
    draft.end(replace(draft.swap, pending=(), outcome=outcome, reason=reason, ended_ms=draft.now), again=again)


def _int(data: Mapping[str, object], key: str) -> int:
    value = data.get(key, 0)
    return value if isinstance(value, int) else 0


_TAKE: Mapping[Step, Callable[[Draft, Command, Report], None]] = {
    Step.CLOSE: _closed,
    Step.DRAIN: _drained,
    Step.SAVE: _saved,
    Step.RELEASE: _released,
    Step.VACATE: _vacated,
    Step.LOAD: _loaded,
    Step.RESTORE: comeback.restored,
    Step.OPEN: _opened,
}
