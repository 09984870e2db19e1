"""Which conversations of a tenant that leaves are saved as they lie in their slots, and which are recalled first. Pure.

What a gateway knows and what the server's slots hold are two lists: they meet where the gateway said which slot, or by
the number of tokens where that leaves no doubt. What cannot be kept is said here, before anything is unloaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from swapper.core import plan
from swapper.core.conversations import WORTH_TOKENS, Conversation, Keeping, ProofResult, Strategy
from swapper.core.draft import Draft
from swapper.core.keeping import REPLAYED, of

Slots = Sequence[Mapping[str, int]]
"""What the server's slots hold: {slot, tokens, gone_on}; 0 tokens where it does not say, right after a restore.

`gone_on`: something ran there after a conversation had come into it from disk.
"""
_NO_TEXT = "it was not in a slot, and its last request is not kept, so that it could not be recalled"
_NO_SWEEP = "it was not in a slot, and only slots are saved (sweep: false)"
TOO_SHORT = (
    f"it was in no slot, and has fewer than {WORTH_TOKENS} tokens, which are read faster than they are brought back"
)
FELT_MS = 2_000
"""Of less than that it does not matter which way of keeping is the faster one: files outlive a crash, texts may not."""
MOST = 64
"""So many conversations that lie in no slot are recalled of a tenant in one swap, the most recent ones."""
_TOO_MANY = f"it was in no slot, and {MOST} that were used after it are saved"
COLD_BEFORE = "it was restored in a way that was seen to fail for this model, and its text is not kept"
"""What is lost by this was lost before: nothing that is unloaded now could be more than that."""
NO_LOSS = frozenset({COLD_BEFORE, TOO_SHORT})
"""Where conversations are required, these hold nothing up."""
_MORE_THAN_SLOTS = (
    "this model's can only be read again from their text, each into a slot, and there are {many} for {slots}: raise "
    "parallel, or write snapshots: {{required: false}}"
)
_NOBODYS = "nobody knows whose conversation this is, and this model's can only be read again from their text"


def plan_saves(draft: Draft, tenant: str, slots: Slots) -> tuple[Conversation, ...]:
    """The lines of a tenant: to be saved as they are, to be recalled and then saved, kept as a text, or lost."""
    keeping = of(draft.card, tenant)
    known = newest(c for c in draft.swap.known if c.tenant == tenant)
    unread = [c for c in known if c.strategy == Strategy.REPLAY]
    known = [c for c in known if c not in unread]
    found = in_slots(slots, known)
    unnamed = [use for use in slots if use["slot"] not in found][max(len(known) - len(found), 0) :]
    match keeping.strategy:
        case Strategy.OFF:
            why = "; ".join(keeping.demoted.values()) or "its conversations are not kept (strategy off)"
            cold = (_cold(c, why, Strategy.OFF) for c in (*known, *unread))
            return (*cold, *_nobodys(tenant, unnamed, why, Strategy.OFF))
        case Strategy.REPLAY:
            texts = _readable(draft, tenant, [_as_text(c) for c in (*known, *unread)])
            return (*texts, *_nobodys(tenant, unnamed, _NOBODYS, Strategy.REPLAY))
        case _:
            texts = _better_read(draft, tenant, known)
            named = {slot: c for slot, c in found.items() if c not in texts}
            left = [use for use in slots if use["slot"] in named or use["slot"] not in found]
            others = [c for c in known if c not in found.values() and c not in texts]
            return (*_saved(draft, tenant, left, named, others), *map(_as_text, (*texts, *unread)))


def _readable(draft: Draft, tenant: str, texts: Sequence[Conversation]) -> Sequence[Conversation]:
    """Where conversations are required, more texts than slots are not kept: the rest would have to be read when asked.

    What is too short to come back counts for nothing. Of a model whose number of slots is not known all are kept.
    """
    configured, n_slots = draft.spec.tenants.get(tenant), of(draft.card, tenant).n_slots
    worth = [c for c in texts if c.saved and not 0 < c.tokens < WORTH_TOKENS]
    if configured is None or not configured.save_required or not 0 < n_slots < len(worth):
        return texts
    why = _MORE_THAN_SLOTS.format(many=len(worth), slots=n_slots)
    left = sorted(worth, key=lambda c: -c.used_ms)[n_slots:]
    return [_cold(replace(c, saved=False), why, Strategy.REPLAY) if c in left else c for c in texts]


def _better_read(draft: Draft, tenant: str, known: Sequence[Conversation]) -> Sequence[Conversation]:
    """Those whose text is kept, where a slow disk makes reading them again the faster way, and it would be felt.

    A conversation that is required is on disk in any case: a text is in its gateway's memory only.
    """
    keeping, configured = of(draft.card, tenant), draft.spec.tenants.get(tenant)
    costs, required = keeping.costs, configured is not None and configured.save_required
    readable = Strategy.REPLAY in keeping.strategies and Strategy.REPLAY not in keeping.demoted
    if costs is None or required or not readable:
        return ()
    texts = [c for c in known if c.gateway is not None and not c.restored]
    felt = sum(c.tokens for c in texts) * (costs.keep - costs.read) / 1000 >= FELT_MS
    return texts if felt else ()


def _saved(
    draft: Draft, tenant: str, slots: Slots, found: Mapping[int, Conversation], others: Sequence[Conversation]
) -> tuple[Conversation, ...]:
    """`found`: slot -> the conversation in it; `others` are in no slot, or in one that is not known."""
    keeping, token = of(draft.card, tenant), draft.swap.token
    configured = draft.spec.tenants.get(tenant)
    sweep = configured is None or configured.sweep
    worth = [c for c in others if c.tokens == 0 or c.tokens >= WORTH_TOKENS]
    recallable = [c for c in worth if c.gateway is not None and sweep][:MOST]
    unnamed_slots = Counter(use["tokens"] for use in slots if use["slot"] not in found)
    lengths = {n for n, count in Counter(c.tokens for c in recallable).items() if count >= unnamed_slots[n]}
    as_they_are = [
        _in_slot(tenant, use, found.get(use["slot"]), keeping) for use in slots if _is_one(use, found, lengths)
    ]
    recalls = [c for c in as_they_are if c.recall] + [_to_recall(c, keeping.strategy) for c in recallable]
    named = [c for c in as_they_are if not c.recall]
    unnamed = sum(1 for c in named if not c.head)
    lost = [c for c in others if c not in recallable]
    if len(others) <= unnamed:  # one of the unnamed slots may be it
        lost = []
    recalls.sort(key=lambda c: -c.used_ms)
    return (
        *(replace(c, snapshot=plan.snapshot_name(tenant, token, c.slot)) for c in named),
        *(_left_behind(c, _why_left(c, sweep=sweep), keeping.strategy) for c in lost),
        *(replace(c, snapshot=plan.snapshot_name(tenant, token, f"c{k}")) for k, c in enumerate(recalls)),
    )


def _why_left(talk: Conversation, *, sweep: bool) -> str:
    if 0 < talk.tokens < WORTH_TOKENS:
        return TOO_SHORT
    return _NO_SWEEP if not sweep else _NO_TEXT if talk.gateway is None else _TOO_MANY


def unsaid(draft: Draft, tenant: str) -> tuple[Conversation, ...]:
    """Lines for those that some unnamed slot might have held, now that fewer of these are left than of them."""
    mine = [c for c in draft.swap.conversations if c.tenant == tenant]
    named = {c.head for c in mine}
    left = [c for c in newest(c for c in draft.swap.known if c.tenant == tenant) if c.head not in named]
    if len(left) <= sum(1 for c in mine if not c.head):
        return ()
    return tuple(_left_behind(c, _NO_TEXT, of(draft.card, tenant).strategy) for c in left)


def _is_one(use: Mapping[str, int], found: Mapping[int, Conversation], lengths: Collection[int]) -> bool:
    """Not one of the conversations of its length, as many as such slots, each of which will be recalled and saved."""
    return use["slot"] in found or use["tokens"] not in lengths


def _in_slot(tenant: str, use: Mapping[str, int], talk: Conversation | None, keeping: Keeping) -> Conversation:
    """What lies in a slot; of a model that needs it, rewound first, unless it lies there as it was saved."""
    there = talk or Conversation(tenant, use["slot"], "", use["tokens"], 0)
    untouched, rewound = there.restored, keeping.strategy is Strategy.REWIND
    there = replace(there, slot=use["slot"], tokens=use["tokens"], restored=False)
    if rewound and there.gateway is not None and not untouched:
        return replace(there, recall=True, strategy=Strategy.REWIND)
    return replace(there, strategy=keeping.strategy if untouched else Strategy.SLOTS)


def newest(talks: Iterable[Conversation]) -> list[Conversation]:
    """Each conversation once, as whoever used it last knows it, the most recent first; no older state of another.

    Of what came back from one snapshot the one used last replaces it. The others have it no more; one of them of which
    nothing was asked since, and that nobody can send again, is an older state, too.
    """
    found: dict[str, Conversation] = {}
    for talk in sorted(talks, key=lambda c: (c.used_ms, c.gateway is not None)):
        found[talk.head] = talk
    older = {link for talk in found.values() for link in talk.links if link != talk.head}
    left: list[Conversation] = []
    for talk in sorted((c for c in found.values() if c.head not in older), key=lambda c: -c.used_ms):
        if talk.replaces is None or talk.replaces not in {c.replaces for c in left}:
            left.append(talk)
        elif talk.gateway is not None or not talk.restored:
            left.append(replace(talk, replaces=None))
    return left


def in_slots(slots: Slots, talks: Sequence[Conversation]) -> Mapping[int, Conversation]:
    """Slot -> the conversation in it: the one said to be there, or the only one of as many tokens.

    Of one that was restored and not used since the server says no number. It is nowhere where something ran since a
    restore: as many tokens there are a coincidence.
    """
    holds = {use["slot"]: use["tokens"] for use in slots}
    gone_on = {use["slot"] for use in slots if use.get("gone_on")}
    there = (c for c in reversed(talks) if c.slot in holds and not (c.restored and c.slot in gone_on))
    found = {c.slot: c for c in there if holds[c.slot] == c.tokens or (c.restored and not holds[c.slot])}
    placed = {c.head for c in found.values()}
    for slot, tokens in holds.items():
        fitting = [c for c in talks if c.tokens == tokens and c.head not in placed]
        fitting = [c for c in fitting if not (c.restored and slot in gone_on)]
        rivals = [s for s, n in holds.items() if n == tokens and s not in found]
        if tokens and slot not in found and len(fitting) == 1 and len(rivals) == 1:
            found[slot] = fitting[0]
    return found


def _to_recall(talk: Conversation, strategy: Strategy) -> Conversation:
    return replace(talk, slot=-1, recall=True, strategy=strategy, restored=False)


def _as_text(talk: Conversation) -> Conversation:
    if talk.gateway is None:
        return _cold(talk, COLD_BEFORE if talk.restored and not talk.saved_ms else _NO_TEXT, Strategy.REPLAY)
    return replace(_unplaced(talk, Strategy.REPLAY), saved=True)


def _left_behind(talk: Conversation, why: str, strategy: Strategy) -> Conversation:
    """Lost, unless the snapshot it came back from is still there: that one comes back, as old as it is."""
    if talk.replaces is None:
        return _cold(talk, why, strategy)
    return replace(
        _unplaced(talk, strategy), snapshot=talk.replaces, saved=True, reason=f"{why}; as it was saved before"
    )


def _cold(talk: Conversation, why: str, strategy: Strategy) -> Conversation:
    return replace(_unplaced(talk, strategy), result=ProofResult.COLD, reason=why)


def _unplaced(talk: Conversation, strategy: Strategy) -> Conversation:
    return replace(talk, slot=-1, snapshot=f"{REPLAYED}{talk.head}", strategy=strategy, restored=False)


def _nobodys(tenant: str, slots: Slots, why: str, strategy: Strategy) -> Iterable[Conversation]:
    """Slots whose conversation nobody knows, where slots are not saved: lost, and said so."""
    for use in slots:
        line = Conversation(tenant, use["slot"], f"slot {use['slot']}", use["tokens"], 0, strategy=strategy)
        yield replace(line, result=ProofResult.COLD, reason=why)
