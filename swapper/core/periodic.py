"""Idle slots of a resident saved by the clock, so that the crash of its server costs minutes of a conversation. Pure.

Each save is a swap that moves nobody, as in tend.py, and saves one conversation: the gateways say which they know, the
server what its slots hold, and that slot is saved. It begins only where a gateway knows of something that it could
save, so that an idle model costs no write. The gate stays open meanwhile, so whoever calls the model or waits
for the card goes first: the asking is given up at once, and only a save under way is waited for. Nothing is saved that
was not used since its last snapshot, and no conversation more often than the configuration says. A hybrid model's is
rewound before (keeping.py), so that its next turn reads its last answer again; of what can only be replayed nothing is
saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from swapper.core import keeping, plan, policy, saving
from swapper.core.commit import AlertKind, Commit
from swapper.core.conversations import Conversation, Strategy
from swapper.core.draft import Draft
from swapper.core.orders import Command, Report
from swapper.core.spec import Spec, TenantSpec
from swapper.core.types import Card, Step, Swap, World

TALKS = "talks"
"""The verb of a gateway that asks which conversations it knows in the server: data `talks`. Its gate stays as it is."""
SAVED = "saved"
"""The word to the gateways about a conversation that was saved and is still in the server: `snapshot`, `id`, `ms`, and
`replaces`: the snapshot it came back from, which is gone now."""
PASSED = "passed"
"""The word to the gateways about conversations that cannot be saved as they are, in no slot or without text: `ids`."""
ASK_MS = 500
"""A server that is not seen idle within that is at work for somebody we do not know of."""
REWIND_MS = 5_000
SPACE_MS = 2_000
"""Between two saves of one tenant: each keeps all its slots waiting."""
AGAIN_MS = 30_000
"""After it had to give way it is tried again so much later."""
_BY_SLOTS = frozenset({Strategy.SLOTS, Strategy.REWIND})
_Slots = Sequence[Mapping[str, int]]


def put_off(draft: Draft, tenant: str) -> None:
    """It was loaded just now: all it holds is on disk."""
    configured = draft.spec.tenants.get(tenant)
    if configured is not None and configured.every_ms is not None:
        _not_before(draft, tenant, draft.now + configured.every_ms)


def due(world: World, spec: Spec, card: Card) -> str | None:
    """The resident whose slots are to be saved now: the time is there, and nobody asks anything of it or of the card.

    To be asked when the policy has nothing to do with the card.
    """
    if card.swap is not None or not world.gateways:
        return None
    for tenant in card.residents:
        gate, configured = world.gates.get(tenant), spec.tenants.get(tenant)
        if configured is None or configured.every_ms is None or not configured.save or gate is None or not gate.open:
            continue
        by_slots = keeping.of(card, tenant).strategy in _BY_SLOTS
        used = any(d.unsaved for d in world.demand if d.tenant == tenant)
        if by_slots and used and card.save_after.get(tenant, 0) <= world.now_ms and _quiet(world, spec, card, tenant):
            return tenant
    return None


def start(world: World, spec: Spec, card: Card, tenant: str, *, swap_id: str, token: int) -> Commit:
    """Begin: the gateways are asked."""
    draft, now, cause = Draft(world, spec, card), world.now_ms, f"snapshots of {tenant}"
    draft.begin(Swap(swap_id, card.name, cause, token, (), (), Step.SAVE, now, now, tends=tenant))
    draft.tell_gateways(TALKS, tenant, {})
    return draft.commit()


def runs(swap: Swap) -> bool:
    """Whether this is such a swap."""
    return swap.tends is not None and swap.stage is Step.SAVE


def give_way(world: World, spec: Spec, card: Card) -> Commit | None:
    """Somebody calls or waits: nothing is asked any more; what is being saved, or rewound for it, is waited for."""
    swap = card.swap
    if swap is None or swap.tends is None or not runs(swap) or swap.conversations:
        return None
    if _quiet(world, spec, card, swap.tends):
        return None
    draft = Draft(world, spec, card)
    _end(draft, AGAIN_MS)
    return draft.commit()


def take(draft: Draft, command: Command, report: Report) -> None:
    """Take an answer; it is not pending any more."""
    ok = report.outcome == "ok"
    match command.verb:
        case keeping.RECALL if ok:
            _rewound(draft, report)
        case Step.DRAIN if ok and not report.data.get("gone"):
            keeping.learn(draft, cast("str", command.tenant), report.data)
            _choose(draft, cast("_Slots", report.data.get("slots", ())))
        case Step.DRAIN:
            _end(draft, AGAIN_MS)
        case Step.SAVE if ok:
            _saved(draft, report)
        case Step.SAVE:
            _not_saved(draft, report)
        case _ if ok:
            keeping.note_known(draft, command, report)
        case _:
            pass


def go_on(draft: Draft) -> None:
    """Nothing is pending: ask the server, if the gateways know anything that is worth it; else that was all."""
    swap = draft.swap
    tenant = cast("str", swap.tends)
    every_ms = _every_ms(draft)
    if swap.asked or not any(_unsaved(c, draft.now, every_ms) for c in swap.known):
        _end(draft, _rest_ms(swap.known, draft.now, every_ms))
        return
    draft.update(asked=True)
    draft.command(draft.agent_of(tenant), Step.DRAIN, tenant, {"limit_ms": ASK_MS})


def _choose(draft: Draft, slots: _Slots) -> None:
    """Of what lies in a slot and was used since its last snapshot: what was longest without one."""
    tenant = cast("str", draft.swap.tends)
    strategy = keeping.of(draft.card, tenant).strategy
    if strategy not in _BY_SLOTS or not _quiet(draft.world, draft.spec, draft.card, tenant):
        return
    rewound = strategy is Strategy.REWIND
    found = saving.in_slots(slots, saving.newest(draft.swap.known))
    there = (replace(talk, slot=slot) for slot, talk in found.items() if _unsaved(talk, draft.now, _every_ms(draft)))
    able = [talk for talk in there if not rewound or _sender(draft, talk)]
    if not able:
        _pass_over(draft, tenant)
        return
    chosen = min(able, key=lambda talk: (talk.saved_ms, -talk.used_ms))
    name = plan.snapshot_name(tenant, draft.swap.token, chosen.slot)
    line = replace(chosen, snapshot=name, strategy=strategy, recall=rewound)
    draft.update(conversations=(line,))
    if rewound and line.gateway is not None:
        args = {"conversation": line.head, "name": name, "limit_ms": REWIND_MS, "beside": True}
        draft.command(line.gateway, keeping.RECALL, tenant, args)
    else:
        _save(draft, line)


def _pass_over(draft: Draft, tenant: str) -> None:
    """Nobody asks for these again before they were used."""
    old = (c for c in draft.swap.known if c.head and _unsaved(c, draft.now, _every_ms(draft)))
    draft.order(PASSED, tenant, {"ids": [c.head for c in old]})


def _sender(draft: Draft, talk: Conversation) -> bool:
    """Whether there is a gateway that can send its last request again."""
    return talk.gateway is not None and talk.gateway.removeprefix("gateway:") in draft.world.gateways


def _rewound(draft: Draft, report: Report) -> None:
    (line,) = draft.swap.conversations
    slot, tokens = cast("int", report.data["slot"]), cast("int", report.data["tokens"])
    line = replace(line, slot=slot, tokens=tokens, recall=False)
    draft.update(conversations=(line,))
    _save(draft, line)


def _save(draft: Draft, line: Conversation) -> None:
    args = {**keeping.save_args(line), "holds": line.tokens}
    draft.command(draft.agent_of(line.tenant), Step.SAVE, line.tenant, args)


def _saved(draft: Draft, report: Report) -> None:
    (line,) = draft.swap.conversations
    line = replace(line, saved=True, bytes=cast("int", report.data.get("bytes", 0)))
    draft.conversations.append(line)
    said = {"snapshot": line.snapshot, "id": line.head, "ms": draft.now, "replaces": line.replaces or ""}
    draft.order(SAVED, line.tenant, said)
    _end(draft, SPACE_MS)


def _not_saved(draft: Draft, report: Report) -> None:
    if report.data.get("busy"):
        _end(draft, AGAIN_MS)
        return
    tenant = cast("str", draft.swap.tends)
    if not report.data.get("unsupported"):
        why = report.detail or "the save failed"
        text = f"a conversation of {tenant} could not be saved beside its calls: {why}"
        draft.alert(text, AlertKind.UNSAVED, tenant=tenant)
    _end(draft, _every_ms(draft))


def _end(draft: Draft, rest_ms: int) -> None:
    """The next one comes after so long, at the latest after what is configured."""
    swap = draft.swap
    _not_before(draft, cast("str", swap.tends), draft.now + min(rest_ms, _every_ms(draft)))
    draft.end(replace(swap, pending=(), outcome="done", ended_ms=draft.now))


def _not_before(draft: Draft, tenant: str, ms: int) -> None:
    draft.card = replace(draft.card, save_after={**draft.card.save_after, tenant: ms})


def _every_ms(draft: Draft) -> int:
    configured: TenantSpec | None = draft.spec.tenants.get(draft.swap.tends or "")
    return (configured and configured.every_ms) or AGAIN_MS


def _quiet(world: World, spec: Spec, card: Card, tenant: str) -> bool:
    """Nobody waits for the card, and no call of the tenant runs."""
    calls = (d for d in world.demand if d.tenant in spec.tenants and spec.tenants[d.tenant].card == card.name)
    busy = any(d.waiting or (d.running and d.tenant == tenant) for d in calls)
    return not busy and not policy.leases_for(world, spec, card.name)


def _unsaved(talk: Conversation, now_ms: int, every_ms: int) -> bool:
    """Whether it was used since its last snapshot, which is old enough; one that is yet to be made says nothing."""
    return not talk.restored and talk.tokens > 0 and not 0 <= now_ms - talk.saved_ms < every_ms


def _rest_ms(talks: Iterable[Conversation], now_ms: int, every_ms: int) -> int:
    """Until the first of those used since their last snapshot is old enough."""
    waiting = (talk.saved_ms + every_ms - now_ms for talk in talks if not talk.restored and talk.tokens > 0)
    return max(min((ms for ms in waiting if ms > 0), default=every_ms), SPACE_MS)
