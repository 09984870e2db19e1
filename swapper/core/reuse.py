"""What answers and recalls show about conversations that came back: warm, cold, or a strategy that does not work. Pure.

Invariant: a result is said once, and never before reuse (or its absence) was seen in an answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from swapper.core import keeping
from swapper.core.commit import Alert, AlertKind, Commit
from swapper.core.conversations import Conversation, ProofResult
from swapper.core.orders import Report
from swapper.core.types import Card, Swap

_LINKS = 8
"""So many of its last ones a line keeps, as everywhere."""


def on_proof(card: Card, swap: Swap, report: Report) -> Commit | None:
    """An answer showed whether a restored conversation was reused.

    Data: `snapshot`, `result` (warm | cold), `cache_n`, `reason`, `slot`, and `continued`: the answer's request was the
    saved conversation and nothing but more of it, in the very slot, so that reading it anew is the strategy's fault.
    `id` and `links` of the conversation where its gateway knows it.
    """
    result = report.data.get("result")
    if result not in (ProofResult.WARM, ProofResult.COLD):
        return None
    card, swap, talk = _line(card, swap, report)
    if talk is None and report.data.get("made_room"):
        talk = _new_line(report)
        before = {talk.head, *_links(report)} - {""}
        others = (c for c in swap.conversations if c.tenant != talk.tenant or c.head not in before)
        swap = replace(swap, conversations=(*others, talk))  # one line a conversation, however often it comes and goes
    if talk is None or talk.result not in (None, ProofResult.UNPROVED) or not (talk.restored or _comes_later(talk)):
        return None
    cache_n, reason, slot = (report.data.get(name) for name in ("cache_n", "reason", "slot"))
    proved = replace(
        talk,
        restored=talk.restored or result == ProofResult.WARM,
        slot=slot if isinstance(slot, int) else talk.slot,
        result=ProofResult(str(result)),
        cache_n=cache_n if isinstance(cache_n, int) else None,
        reason=str(reason) if reason else None,
    )
    if result == ProofResult.WARM:
        return _told(keeping.prove(card, talk.tenant, talk.strategy), swap, talk, proved)
    return (_doubted if report.data.get("continued") else _told)(card, swap, talk, proved)


def on_recalled(card: Card, swap: Swap, report: Report) -> Commit | None:
    """A gateway sent a conversation's last request again after the load (strategy replay), or could not.

    Data: `snapshot`, `slot`, `tokens`; an outcome other than ok is the conversation's end, with the reason in `detail`.
    """
    card, swap, talk = _line(card, swap, report)
    if talk is None or talk.result is not None:
        return None
    if report.outcome != "ok":
        reason = report.detail or "it could not be replayed"
        return _told(card, swap, talk, replace(talk, result=ProofResult.COLD, reason=reason))
    slot, tokens = report.data.get("slot"), report.data.get("tokens")
    again = replace(
        talk,
        restored=True,
        slot=slot if isinstance(slot, int) else talk.slot,
        tokens=tokens if isinstance(tokens, int) else talk.tokens,
        result=ProofResult.UNPROVED,
    )
    return _told(card, swap, talk, again)


def _new_line(report: Report) -> Conversation:
    """Of one that was saved to make room for another while its model served, and came back since."""
    snapshot, tokens = str(report.data.get("snapshot")), report.data.get("tokens")
    line = Conversation(
        report.tenant or "", -1, snapshot, tokens if isinstance(tokens, int) else 0, 0, saved=True, kept=True
    )
    return replace(line, head=str(report.data.get("id", "")), links=_links(report)[-_LINKS:])


def _links(report: Report) -> tuple[str, ...]:
    return tuple(cast("Sequence[str]", report.data.get("links", ())))


def _comes_later(talk: Conversation) -> bool:
    return talk.kept or talk.strategy == "replay"


def _line(card: Card, swap: Swap, report: Report) -> tuple[Card, Swap, Conversation | None]:
    """The conversation's line in the swap as it is now, which may still be running."""
    if card.swap is not None and card.swap.id == swap.id:
        swap = card.swap
    snapshot = str(report.data.get("snapshot"))
    return card, swap, next((c for c in swap.conversations if c.snapshot == snapshot), None)


def _told(card: Card, swap: Swap, before: Conversation, after: Conversation) -> Commit:
    told = replace(swap, conversations=tuple(after if c is before else c for c in swap.conversations))
    running = card.swap is not None and card.swap.id == swap.id
    return Commit(cards=(replace(card, swap=told) if running else card,), swaps=(told,), conversations=(after,))


def _doubted(card: Card, swap: Swap, before: Conversation, after: Conversation) -> Commit:
    why = f"strategy {before.strategy} was seen to fail for this model, build and preset: {after.reason}"
    lower = keeping.doubt(card, before.tenant, before.strategy, why)
    told = _told(lower, swap, before, after)
    now = keeping.of(lower, before.tenant)
    if now.demoted == keeping.of(card, before.tenant).demoted:
        return told
    text = f"{before.tenant}: {why}; from now on: {now.strategy}"
    data = {"tenant": before.tenant, "strategy": now.strategy}
    return replace(told, alerts=(Alert(card.name, text, data, AlertKind.DEMOTED),))
