"""How the conversations of a tenant that leaves are kept: in what order, how, and for how long that may take. Pure.

Slots are saved as they are, or conversations are recalled first; what an answer teaches about that is noted here, too.

A recall is a gateway's: it sends the conversation's last request again, nothing to be generated, so that it stands in a
slot and that slot can be saved. This pulls a conversation out of the server's RAM cache (the sweep) and takes one of a
hybrid model back to the end of its request (the rewind). Recalls of one tenant go one after the other: each may push
another conversation out of its slot, which is saved by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from swapper.core.commit import AlertKind
from swapper.core.conversations import Conversation, Costs, Keeping, ProofResult, Strategy
from swapper.core.draft import Draft
from swapper.core.orders import Command, Report
from swapper.core.types import Card, Step, WorkClass

RECALL = "recall"
"""The verb of a gateway. Arguments `conversation` (its id) and `limit_ms`, `beside` where its gate is open, `for` where
it then makes room for that snapshot; data `slot`, `tokens`, `cache_n`, `prompt_n`."""
RECALL_MS = 15_000
"""One recall may take so long: from the RAM cache it takes milliseconds, so that one which takes longer is being read
anew."""
EVICTED = 2
"""After so many that were not in the server's cache any more none is looked for that was used before them."""
REPLAYED = "replay:"
"""What stands before a conversation's id where a snapshot's name would stand, and there is none."""


def of(card: Card, tenant: str | None) -> Keeping:
    """How a tenant's conversations are kept, as far as its agent has said."""
    return card.keeping.get(tenant or "", Keeping())


def learn(draft: Draft, tenant: str, data: Mapping[str, object]) -> None:
    """Take over what the agent says of the model; what was seen to fail under another fingerprint counts no more."""
    if "strategies" not in data:
        return
    strategies, fingerprint = _texts(data["strategies"]), str(data.get("fingerprint", ""))
    before = draft.card.keeping.get(tenant)
    now = Keeping(strategies, fingerprint)
    if before is not None and before.fingerprint == fingerprint:
        now = replace(before, strategies=strategies)
    if n_slots := _int(data, "n_slots"):
        now = replace(now, n_slots=n_slots)
    if isinstance(costs := data.get("costs"), Mapping):
        now = replace(now, costs=Costs(**cast("Mapping[str, float]", costs)))
    if now != before:
        draft.card = replace(draft.card, keeping={**draft.card.keeping, tenant: now})


def note_known(draft: Draft, command: Command, report: Report) -> None:
    """A gateway has nothing in flight any more and says, once, which conversations of the tenant it knows there."""
    if command.tenant is not None:
        draft.update(known=(*draft.swap.known, *talks(command.tenant, report)))


def talks(tenant: str, report: Report) -> tuple[Conversation, ...]:
    """The conversations a gateway says it knows in the server: `talks` of its report, each without a snapshot."""
    said = cast("Sequence[Mapping[str, object]]", report.data.get("talks", ()))
    return tuple(_talk(tenant, report.executor, one) for one in said)


def _talk(tenant: str, gateway: str, said: Mapping[str, object]) -> Conversation:
    slot = said.get("slot")
    snapshot = said.get("snapshot")
    strategy = Strategy.REPLAY if said.get("unread") else Strategy.SLOTS
    return Conversation(
        tenant,
        slot if isinstance(slot, int) else -1,
        "",
        _int(said, "tokens"),
        0,
        strategy,
        head=str(said.get("id", "")),
        links=_texts(said.get("links", ())),
        used_ms=_int(said, "used_ms"),
        gateway=gateway if said.get("recallable") else None,
        replaces=str(snapshot) if snapshot else None,
        saved_ms=_int(said, "saved_ms"),
        restored=bool(said.get("restored")),
    )


def recall(draft: Draft, tenant: str) -> bool:
    """Command what follows for a tenant that has nothing pending; False when nothing is left to recall."""
    while (talk := _next(draft, tenant)) is not None:
        why, sender = _no_recall(draft, talk), heir(draft, talk)
        if why is None and sender is not None:
            left = _until(draft) - draft.now
            args = {"conversation": talk.head, "name": talk.snapshot, "limit_ms": min(left, RECALL_MS)}
            draft.record(Step.SAVE, tenant)
            draft.command(sender, RECALL, tenant, args)
            return True
        if give_up(draft, talk, why or ""):
            return True
    return False


def heir(draft: Draft, talk: Conversation) -> str | None:
    """Who sends its last request again: the gateway that had it, else one that may have taken over what it kept."""
    live = [f"gateway:{name}" for name in draft.world.gateways]
    return talk.gateway if talk.gateway in live else next(iter(live), None)


def give_up(draft: Draft, talk: Conversation, why: str) -> bool:
    """It is not recalled: saved as it lies where it is known to lie, which is True; else cold."""
    if talk.slot >= 0:
        as_it_is = replace(talk, recall=False, strategy=Strategy.SLOTS)
        mark(draft, talk.snapshot, recall=False, strategy=Strategy.SLOTS)
        draft.record(Step.SAVE, talk.tenant)
        draft.command(draft.agent_of(talk.tenant), Step.SAVE, talk.tenant, save_args(as_it_is))
        return True
    mark(draft, talk.snapshot, recall=False, result=ProofResult.COLD, reason=why)
    text = f"a conversation of {talk.tenant} could not be saved: {why}"
    draft.alert(text, AlertKind.UNSAVED, tenant=talk.tenant)
    return False


def _next(draft: Draft, tenant: str) -> Conversation | None:
    return next((c for c in draft.swap.conversations if c.tenant == tenant and c.recall and not c.saved), None)


def _no_recall(draft: Draft, talk: Conversation) -> str | None:
    if talk.gateway is None or heir(draft, talk) is None:
        return "the gateway that had its last request is gone"
    if draft.now >= _until(draft):
        return "there was no time left to recall it"
    if draft.swap.retried.count(_evicted(talk.tenant)) >= EVICTED:
        return "those used after it were not in the server's cache any more, so that it cannot be there either"
    return None


def _evicted(tenant: str) -> str:
    return f"{RECALL} {tenant} evicted"


def _until(draft: Draft) -> int:
    """When the time for saving is over: the drain limit of whoever waits for the card, from when saving began."""
    lease = draft.world.leases.get(draft.swap.lease or "")
    klass = lease.request.klass if lease is not None else WorkClass.INTERACTIVE
    return draft.swap.stage_ms + draft.spec.policy.drain_ms[klass]


def recalled(draft: Draft, command: Command, report: Report) -> None:
    """It stands in a slot: that one is saved. Else it is given up."""
    name, tenant = str(command.args["name"]), command.tenant
    assert tenant is not None
    (talk,) = (c for c in draft.swap.conversations if c.snapshot == name)
    if report.outcome != "ok":
        if report.data.get("evicted"):
            draft.update(retried=(*draft.swap.retried, _evicted(tenant)))
        give_up(draft, talk, report.detail or "it could not be recalled")
        return
    there = {"slot": _int(report.data, "slot"), "tokens": _int(report.data, "tokens")}
    mark(draft, name, recall=False, **there)
    for other in draft.swap.conversations:
        if other.tenant == tenant and other.recall and other.slot == there["slot"]:
            mark(draft, other.snapshot, slot=-1)  # it lies there no more
    draft.command(draft.agent_of(tenant), Step.SAVE, tenant, save_args(replace(talk, **there)))


def save_args(talk: Conversation) -> Mapping[str, object]:
    """Arguments of a save: which slot, under which fresh name, and whose conversation it is where that is known."""
    args: dict[str, object] = {"slot": talk.slot, "name": talk.snapshot, "strategy": talk.strategy}
    if talk.head:
        args["conversation"] = {"id": talk.head, "links": list(talk.links), "used_ms": talk.used_ms}
    if talk.replaces:
        args["replaces"] = talk.replaces
    return args


DOUBTS = 2
"""So many conversations are read anew, and none came back warm, before a strategy counts as failed: one may have had
bad luck (a stranger took its slot, a template prints the date)."""


def prove(card: Card, tenant: str, strategy: str) -> Card:
    """A conversation came back warm: the strategy works for this model, build and preset."""
    keeping = of(card, tenant)
    if strategy in keeping.proved:
        return card
    doubts = {s: n for s, n in keeping.doubts.items() if s != strategy}
    return _with(card, tenant, replace(keeping, proved=(*keeping.proved, strategy), doubts=doubts))


def doubt(card: Card, tenant: str, strategy: str, why: str) -> Card:
    """A restored conversation that was only continued was read anew: the last straw for what never worked."""
    keeping = of(card, tenant)
    if strategy not in keeping.strategies or strategy in (*keeping.demoted, *keeping.proved):
        return card
    count = keeping.doubts.get(strategy, 0) + 1
    if count < DOUBTS:
        return _with(card, tenant, replace(keeping, doubts={**keeping.doubts, strategy: count}))
    return _with(card, tenant, replace(keeping, demoted={**keeping.demoted, strategy: why}))


def _with(card: Card, tenant: str, keeping: Keeping) -> Card:
    return replace(card, keeping={**card.keeping, tenant: keeping})


def mark(draft: Draft, snapshot: str, **changes: object) -> None:
    """Change the line of one conversation of the swap."""
    talks = tuple(
        replace(c, **changes) if c.snapshot == snapshot else c  # pyright: ignore[reportArgumentType]
        for c in draft.swap.conversations
    )
    draft.update(conversations=talks)


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(one) for one in cast("Sequence[object]", value)) if isinstance(value, list | tuple) else ()


def _int(data: Mapping[str, object], key: str) -> int:
    value = data.get(key, 0)
    return value if isinstance(value, int) else 0
