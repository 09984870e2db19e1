"""What each step of a swap begins with: the commands it sends and the lines it opens. Pure.

A step whose commands are none is passed over at once. A step is done when nothing of it is pending any more; what its
answers mean is told in answers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from swapper.core import keeping, plan, unused
from swapper.core.commit import LeaseChange
from swapper.core.conversations import Conversation, ProofResult, Strategy
from swapper.core.draft import Draft
from swapper.core.spec import Spec
from swapper.core.types import LeaseState, Step, StepOutcome, Swap, World

PLACED = "placed"
"""The word to the gateways about a conversation that was asked for: `snapshot`, `ok`, `slot`, `tokens`, `detail`, and
`kept`: what was saved to make room for it."""
RELEASE_LIMIT_MS = 30_000
CUT_LIMIT_MS = 30_000
"""How long the server may stay busy after our calls were ended: then its calls are not ours."""


def enter(draft: Draft, step: Step) -> None:
    """Begin a step; steps with nothing to do are passed over, and at the end the swap is finished."""
    following: Step | None = step
    while following is not None:
        draft.update(stage=following, stage_ms=draft.now)
        _BEGIN[following](draft)
        if draft.swap.pending or following is Step.SAVE:  # what could not be saved is judged before it is left
            return
        following = plan.next_step(draft.swap, following)
    complete(draft)


def advance(draft: Draft) -> None:
    """The step in progress is done: close its lines, go on."""
    if _tell_newcomers(draft) or _ask_servers(draft):
        return
    following = plan.next_step(draft.swap, draft.swap.stage)
    if following is None:
        complete(draft)
    else:
        enter(draft, following)


def _tell_newcomers(draft: Draft) -> bool:
    """A gateway that joined while the gates were being closed may have seen them open: it is told as well."""
    swap = draft.swap
    new = [g for g in draft.world.gateways if g not in swap.told]
    if swap.stage not in (Step.CLOSE, Step.DRAIN) or not new:
        return False
    draft.update(told=(*swap.told, *new), asked=False, conversations=())
    for tenant in swap.from_:
        args = {"epoch": draft.world.gates[tenant].epoch}
        for gateway in new:
            draft.record(swap.stage, tenant)
            draft.command(f"gateway:{gateway}", Step.CLOSE, tenant, args)
            if swap.stage is Step.DRAIN:
                draft.command(f"gateway:{gateway}", Step.DRAIN, tenant, args)
    return True


def _ask_servers(draft: Draft) -> bool:
    """Once no gateway has a call in flight, the servers' own counters are asked, and what their slots hold."""
    if draft.swap.stage is not Step.DRAIN or draft.swap.asked:
        return False
    draft.update(asked=True)
    limit = drain_limit(draft.world, draft.spec, draft.swap)
    if draft.spec.policy.on_drain_limit == "end":
        limit += CUT_LIMIT_MS
    for tenant in draft.swap.from_:
        draft.record(Step.DRAIN, tenant)
        draft.command(draft.agent_of(tenant), Step.DRAIN, tenant, {"limit_ms": limit})
    return bool(draft.swap.pending)


def drain_limit(world: World, spec: Spec, swap: Swap) -> int:
    """Milliseconds the calls that leave may still take: as whoever asked said, else the longest of their classes."""
    if swap.drain_ms is not None:
        return swap.drain_ms
    running = [d.klass for d in world.demand if d.tenant in swap.from_ and d.running]
    limits = spec.policy.drain_ms
    return max((limits[k] for k in running), default=max(limits.values()))


def complete(draft: Draft) -> None:
    """The last step is done: grant the lease if it still waits, or keep who came; the swap goes to the record."""
    swap = draft.swap
    if swap.grants and not _grant(draft):
        draft.card = replace(draft.card, holds=tuple(h for h in draft.card.holds if h.lease != swap.lease))
    came = plan.arriving(swap)
    draft.card = replace(draft.card, saved=tuple(c for c in draft.card.saved if c.tenant not in came))
    if swap.to and not _still_owed(draft):
        draft.card = replace(draft.card, return_to=None, return_lease=None)
    if swap.tends is not None:
        _say_placed(draft, swap.tends)
    outcome = "compensated" if swap.back else "done"
    draft.end(replace(swap, outcome=outcome, ended_ms=draft.now))


def _say_placed(draft: Draft, tenant: str) -> None:
    """Tell the gateways what became of the conversation that was asked for, and of the one that made room."""
    asked, *kept = draft.swap.conversations
    said = {
        "snapshot": asked.snapshot,
        "ok": asked.restored,
        "slot": asked.slot,
        "tokens": asked.tokens,
        "detail": asked.reason,
        "again": asked.kept,
        "kept": [_on_disk(c) for c in kept],
    }
    draft.order(PLACED, tenant, said)


def _still_owed(draft: Draft) -> bool:
    """Whether residents from before a lease are still to come."""
    wanted = draft.card.return_to or ()
    return any(t not in draft.card.residents for t in wanted if t in draft.spec.tenants)


def _grant(draft: Draft) -> bool:
    """False when the lease has ended meanwhile (its owner cancelled it as the proof arrived)."""
    swap = draft.swap
    lease = draft.world.leases.get(swap.lease or "")
    if lease is None or lease.state is not LeaseState.PREPARING or swap.lease is None:
        return False
    holds = tuple(replace(h, granted=True) if h.lease == swap.lease else h for h in draft.card.holds)
    draft.card = replace(draft.card, holds=holds)
    draft.leases.append(
        LeaseChange(
            swap.lease,
            expect=frozenset({LeaseState.PREPARING}),
            state=LeaseState.GRANTED,
            token=swap.token,
            explain=granted_text(swap, draft.world),
        )
    )
    return True


def granted_text(swap: Swap, world: World) -> str:
    """One sentence: how long it took and what was done for it."""
    lease = world.leases.get(swap.lease or "")
    waited = (world.now_ms - lease.created_ms) / 1000 if lease else 0.0
    saved = [c for c in swap.conversations if c.saved]
    lost = [c for c in swap.conversations if not c.saved]
    parts = [f"granted after {waited:.1f} s"]
    if saved:
        parts.append(f"{len(saved)} conversation{'s' * (len(saved) > 1)} saved{_size(saved)}")
    if lost:
        parts.append(f"{len(lost)} not saved")
    if swap.forced_ms is not None:
        parts.append("calls ended at the drain limit")
    return parts[0] + (": " + ", ".join(parts[1:]) if parts[1:] else "")


def _size(saved: Sequence[Conversation]) -> str:
    """What they take on the disk, in brackets; nothing where only their texts are kept."""
    mib = sum(c.bytes for c in saved) / 2**20
    if mib >= 1:
        return f" ({mib:.0f} MiB)"
    return " (under 1 MiB)" if mib else ""


def _begin_close(draft: Draft) -> None:
    draft.update(told=draft.world.gateways)
    for tenant in draft.swap.from_:
        epoch = draft.gate(tenant, open_=False)
        draft.record(Step.CLOSE, tenant)
        draft.tell_gateways(Step.CLOSE, tenant, {"epoch": epoch})
        if not draft.world.gateways:
            draft.finish(Step.CLOSE, tenant)


def _begin_drain(draft: Draft) -> None:
    for tenant in draft.swap.from_:
        draft.record(Step.DRAIN, tenant)
        gate = draft.world.gates.get(tenant)
        for gateway in draft.world.gateways:
            if f"gateway:{gateway} {tenant}" not in draft.swap.idle:
                draft.command(f"gateway:{gateway}", Step.DRAIN, tenant, {"epoch": gate.epoch if gate else 0})
    if not draft.swap.pending:
        _ask_servers(draft)


def _begin_save(draft: Draft) -> None:
    for talk in draft.swap.conversations:
        if not (talk.saved or talk.recall) and talk.reason is None:
            draft.record(Step.SAVE, talk.tenant)
            draft.command(draft.agent_of(talk.tenant), Step.SAVE, talk.tenant, keeping.save_args(talk))
    for tenant in draft.swap.from_:
        if not any(c.tenant == tenant for c in draft.swap.pending):
            keeping.recall(draft, tenant)


def begun(swap: Swap) -> tuple[str, ...]:
    """Whose load was given up on the way: each has to leave before anybody comes."""
    loads = (r for r in swap.steps if r.step is Step.LOAD and r.outcome is StepOutcome.COMPENSATED)
    return tuple(dict.fromkeys(r.tenant for r in loads if r.tenant is not None and r.tenant not in swap.to))


def _begin_release(draft: Draft) -> None:
    for tenant in begun(draft.swap) if draft.swap.back else draft.swap.from_:
        draft.record(Step.RELEASE, tenant)
        draft.command(draft.agent_of(tenant), Step.RELEASE, tenant, {"limit_ms": RELEASE_LIMIT_MS})


def prove_free(draft: Draft) -> None:
    """Ask for the proof: enough VRAM free beside who comes (and may be there already), every holder that left gone.

    Who was not seen to leave at its release has to be seen gone now: room that is set aside for another is no proof.
    """
    failed = (r for r in draft.swap.steps if r.step is Step.RELEASE and r.outcome is StepOutcome.FAILED)
    stay = dict.fromkeys(r.tenant for r in failed)
    args = {
        "need_mib": plan.vacate_need(draft.spec, draft.card, draft.swap),
        "arriving": list(draft.swap.to),
        "leaving": [t for t in stay if t not in draft.swap.to],
        "stays": [h.lease for h in draft.card.holds if h.granted],
        "departed": [asdict(d) for d in draft.card.departed],
        "holding": [
            {"pid": h.pid, "started": h.started, "tenant": h.tenant, "vram_mib": h.vram_mib}
            for h in draft.card.holds
            if h.granted and h.vram_mib is not None
        ],
        "limit_ms": draft.spec.policy.vacate_ms,
        "now_ms": draft.now,
    }
    draft.record(Step.VACATE, None)
    draft.command(f"agent:{draft.spec.cards[draft.card.name].host}", Step.VACATE, None, args)


def _begin_load(draft: Draft) -> None:
    for tenant in draft.swap.to:
        draft.record(Step.LOAD, tenant)
        draft.command(draft.agent_of(tenant), Step.LOAD, tenant)


def _begin_restore(draft: Draft) -> None:
    for talk in draft.swap.conversations:
        if talk.tenant in draft.swap.to and _to_restore(talk):
            draft.record(Step.RESTORE, talk.tenant)
            args = {"snapshot": talk.snapshot, "slot": talk.slot}
            draft.command(draft.agent_of(talk.tenant), Step.RESTORE, talk.tenant, args)


def _to_restore(talk: Conversation) -> bool:
    there = talk.restored or talk.kept or talk.strategy == Strategy.REPLAY
    return talk.saved and not there and talk.result is None


def _begin_open(draft: Draft) -> None:
    swap = draft.swap
    arriving = plan.arriving(swap)
    coming = tuple(t for t in arriving if t not in draft.card.residents)
    back = {t: replace(one, away=one.away and t not in arriving) for t, one in draft.card.overruns.items()}
    draft.card = replace(draft.card, residents=(*draft.card.residents, *coming), overruns=back)
    draft.card = unused.back(draft.card, arriving)
    for tenant in arriving:
        epoch = draft.gate(tenant, open_=True)
        draft.record(Step.OPEN, tenant)
        draft.tell_gateways(Step.OPEN, tenant, {"epoch": epoch, "swap": swap.id, **comes_back(swap, tenant)})
        if not draft.world.gateways:
            draft.finish(Step.OPEN, tenant, StepOutcome.DONE)


def comes_back(swap: Swap, tenant: str) -> Mapping[str, object]:
    """What a gateway must know of a tenant's conversations: what to prove, to ask for, and to send again.

    `loaded`: its process is a new one, so that nothing else is in it.
    """
    mine = [c for c in swap.conversations if c.tenant == tenant]
    loaded = any(r.step is Step.LOAD and r.tenant == tenant for r in swap.steps)
    return {
        "loaded": loaded,
        "unproved": [
            {**_on_disk(c), "slot": c.slot, "strategy": c.strategy} for c in mine if c.result is ProofResult.UNPROVED
        ],
        "kept": [_on_disk(c) for c in mine if c.kept],
        "recall": [
            {"snapshot": c.snapshot, "id": c.head, "tokens": c.tokens, "gateway": c.gateway}
            for c in mine
            if loaded and c.strategy == Strategy.REPLAY and c.saved and c.result is None
        ],
    }


def _on_disk(c: Conversation) -> Mapping[str, object]:
    """A snapshot, and what its manifest tells of whose it is and when that was last used."""
    known = {"id": c.head, "links": list(c.links), "tokens": c.tokens, "used_ms": c.used_ms}
    return {"snapshot": c.snapshot, **known}


_BEGIN: Mapping[Step, Callable[[Draft], None]] = {
    Step.CLOSE: _begin_close,
    Step.DRAIN: _begin_drain,
    Step.SAVE: _begin_save,
    Step.RELEASE: _begin_release,
    Step.VACATE: prove_free,
    Step.LOAD: _begin_load,
    Step.RESTORE: _begin_restore,
    Step.OPEN: _begin_open,
}
