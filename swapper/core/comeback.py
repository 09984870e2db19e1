"""What comes back of a tenant's conversations once it is loaded. Pure.

Each is restored now, kept on disk until it is asked for, replayed from its text, or cold with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from swapper.core import keeping, plan
from swapper.core.conversations import Conversation, ProofResult, Strategy
from swapper.core.draft import Draft
from swapper.core.orders import Command, Report
from swapper.core.plan import Candidate
from swapper.core.types import Step, StepOutcome

MOST = 100
"""So many that had to make room are remembered of a card, the last ones."""
ON_DISK = "on disk: it comes back when it is asked for"
_NOBODYS = "there was no room for it, and nobody knows whose conversation it is, so that nobody can ask for it"
_NO_ROOM = "there are more conversations than slots to replay them into"


def candidate(said: Mapping[str, object]) -> Candidate:
    """A snapshot as an agent's answer to `load` describes it."""
    return Candidate(
        str(said["snapshot"]),
        _int(said, "slot"),
        _int(said, "tokens"),
        _int(said, "bytes"),
        str(said.get("strategy", Strategy.SLOTS)),
        cast("str | None", said.get("refused")),
        str(said.get("id", "")),
        tuple(cast("Sequence[str]", said.get("links", ()))),
        _int(said, "used_ms"),
    )


def of_tenant(draft: Draft, tenant: str, offered: Sequence[Candidate], room: plan.Room) -> Iterable[Conversation]:
    """The lines of one tenant, its agent having offered these snapshots, the most recently used first."""
    usable = [_judged(draft, tenant, c) for c in offered]
    chosen = plan.choose_slots(usable, room)
    taken = {c.snapshot for c, _ in chosen}
    lines = [_line(tenant, c, slot=slot) for c, slot in chosen]
    others = [c for c in usable if c.refused is None and c.snapshot not in taken]
    lines += [kept(tenant, c) for c in others if c.id]
    lost = {c.snapshot for c in draft.card.saved if c.tenant == tenant}  # older ones were told of when they were
    left = (_line(tenant, c, slot=-1) for c in others if not c.id and c.snapshot in lost)
    lines += [replace(line, result=ProofResult.COLD, reason=_NOBODYS) for line in left]
    lines += [replace(_line(tenant, c), result=ProofResult.COLD, reason=c.refused) for c in usable if c.refused]
    lines += _vanished(draft, tenant, {c.snapshot for c in offered})
    return (*lines, *_replayed(draft, tenant, lines, room.slots - len(chosen)))


def _judged(draft: Draft, tenant: str, offered: Candidate) -> Candidate:
    """What was kept in a way that was seen to fail for this model is not put into it again."""
    why = keeping.of(draft.card, tenant).demoted.get(offered.strategy)
    return replace(offered, refused=why) if why is not None and offered.refused is None else offered


def kept(tenant: str, c: Candidate) -> Conversation:
    """One that stays on disk until it is asked for."""
    return replace(_line(tenant, c, slot=-1), kept=True, reason=ON_DISK)


def _line(tenant: str, c: Candidate, slot: int | None = None) -> Conversation:
    where = c.slot if slot is None else slot
    return Conversation(
        tenant,
        where,
        c.snapshot,
        c.tokens,
        c.bytes,
        c.strategy,
        saved=True,
        head=c.id,
        links=c.links,
        used_ms=c.used_ms,
    )


def _vanished(draft: Draft, tenant: str, offered: Collection[str]) -> Iterable[Conversation]:
    """What was saved as the tenant left and is offered no more: lost, and said so."""
    reason = "its snapshot is gone: the slot folder has no manifest of it that can be read"
    for talk in draft.card.saved:
        if talk.tenant == tenant and talk.snapshot not in offered and talk.strategy != Strategy.REPLAY:
            yield replace(talk, restored=False, result=ProofResult.COLD, cache_n=None, reason=reason)


def _replayed(draft: Draft, tenant: str, lines: Sequence[Conversation], room: int) -> Iterable[Conversation]:
    """Those whose text a gateway has, and nothing else is left of: as many as there is room for, the newest first."""
    left = [c for c in draft.card.saved if c.tenant == tenant]
    cold = {c.snapshot for c in lines if c.result is ProofResult.COLD}
    refused = (_again(c) for c in left if c.snapshot in cold and c.gateway is not None)
    waiting = sorted(
        (*(c for c in left if c.strategy == Strategy.REPLAY), *refused), key=lambda c: c.used_ms, reverse=True
    )
    for nth, talk in enumerate(waiting):
        gateway = keeping.heir(draft, talk)
        line = replace(talk, slot=-1, bytes=0, restored=False, cache_n=None, gateway=gateway)
        if gateway is None:
            gone = "the gateway that had its last request is gone, so that it cannot be replayed"
            yield replace(line, result=ProofResult.COLD, reason=gone)
        elif nth < room:
            yield replace(line, result=None, reason=None)
        else:
            yield replace(line, result=ProofResult.COLD, reason=_NO_ROOM)


def _again(refused: Conversation) -> Conversation:
    """The second line of a conversation whose snapshot must not be used."""
    return replace(refused, snapshot=f"{keeping.REPLAYED}{refused.head}", strategy=Strategy.REPLAY)


def restored(draft: Draft, command: Command, report: Report) -> None:
    """An agent has put a conversation into a slot, or could not."""
    name = str(command.args["snapshot"])
    if report.outcome == "ok":
        there = {k: _int(report.data, k) for k in ("slot", "tokens") if k in report.data}
        keeping.mark(draft, name, restored=True, result=ProofResult.UNPROVED, **there)
        _not_displaced(draft, lambda talk: talk.snapshot == name)
        _displaced(draft, command, report)
    elif report.data.get("busy"):
        keeping.mark(draft, name, kept=True, reason=ON_DISK)
    else:
        reason = report.detail or "the restore failed"
        keeping.mark(draft, name, result=ProofResult.COLD, reason=reason)
        _not_displaced(draft, lambda talk: talk.snapshot == name)
        draft.finish(Step.RESTORE, command.tenant, StepOutcome.FAILED, reason)


def _displaced(draft: Draft, command: Command, report: Report) -> None:
    """A conversation that was saved to make room for another: on disk from now on."""
    said = cast("Mapping[str, object] | None", report.data.get("displaced"))
    if said and command.tenant is not None:
        made_room = kept(command.tenant, candidate(said))
        draft.update(conversations=(*draft.swap.conversations, made_room))
        draft.conversations.append(made_room)
        draft.card = replace(draft.card, displaced=(*draft.card.displaced, made_room)[-MOST:])


def loaded_anew(draft: Draft, tenant: str) -> None:
    """The lines of its load tell of all that is on disk."""
    _not_displaced(draft, lambda talk: talk.tenant == tenant)


def _not_displaced(draft: Draft, those: Callable[[Conversation], bool]) -> None:
    """They are on disk no more, or told of elsewhere."""
    left = tuple(talk for talk in draft.card.displaced if not those(talk))
    if left != draft.card.displaced:
        draft.card = replace(draft.card, displaced=left)


def _int(data: Mapping[str, object], key: str) -> int:
    value = data.get(key, 0)
    return value if isinstance(value, int) else 0
