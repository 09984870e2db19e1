"""What a gateway process knows of conversations after a start, while models go on serving: noted, or from the record.

Invariant: a conversation is believed in the server only where nothing speaks against it: its model was not loaded
since its last use, as far as the record goes. What is on disk is found there again, and what is unproved can be proved.
A copy on disk never takes the place of what went on from it in the server.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from swapper.core import plan
from swapper.core.conversations import Conversation
from swapper.core.steps import comes_back
from swapper.core.types import Step, StepOutcome, Swap
from swapper.gateway.talks import Talks
from swapper.snapshots.conversation import Conversation as Known
from swapper.snapshots.conversation import Kept, Place


def stands(swaps: Sequence[Swap], tenant: str, load: str) -> bool:
    """Whether what was noted after the swap `load` is about the server of now: no later one loaded the tenant."""
    last = _last(swaps, tenant)
    return last is None or last.id == load


def resume(
    talks: Talks,
    tenant: str,
    swaps: Sequence[Swap],
    others: Collection[str] = (),
    displaced: Sequence[Conversation] = (),
) -> None:
    """Of a tenant whose gate was open when this process began. `swaps`: the last ones, the newest first.

    `others`: the gateways that live beside this one. What was to be replayed by one that is dead is taken over.
    `displaced`: what has made room for others since the load, of all tenants.
    """
    if talks.opened_here(tenant):
        return  # a swap has told since
    index, known = talks.index, talks.index.conversations(tenant)
    noted = index.load(tenant) is not None
    made_room = [_as_kept(talk) for talk in displaced if talk.tenant == tenant]
    # Also what made room since this process began, and was told at once.
    told = (talk for talk in known if talk.place is Place.DISK)
    made_room += [Kept(talk.snapshot, talk.id, (), talk.tokens, talk.used_ms) for talk in told]
    last = _last(swaps, tenant)
    if last is not None:
        there = tuple(talk for talk in last.conversations if not talk.kept or talk.result is None)
        args = comes_back(replace(last, conversations=there), tenant)
        unproved = [_unseen(one) for one in _lines(args, "unproved")]
        if noted:
            unproved = [*_still(unproved, known)]
        came = {"loaded": not noted, "recall": _ours(args, others), "unproved": unproved}
        talks.opened(tenant, last.card, last.id, {**args, **came})
    if not noted:
        loaded_ms = 0 if last is None else last.ended_ms or last.started_ms
        for talk in known:
            if talk.request is not None and talk.used_ms >= loaded_ms:
                index.found(tenant, talk.id, talk.tokens)
    for one in made_room:
        if not _went_on(talks, tenant, one):
            index.stored(tenant, one)


def _went_on(talks: Talks, tenant: str, one: Kept) -> bool:
    """Whether that conversation was asked the same again since it made room, and is in the server."""
    talk = talks.index.conversation(tenant, one.id)
    return talk is not None and talk.place is Place.SERVER and 0 < one.used_ms < talk.used_ms


def _as_kept(talk: Conversation) -> Kept:
    return Kept(talk.snapshot, talk.head, talk.links, talk.tokens, talk.used_ms)


def _lines(args: Mapping[str, object], name: str) -> Sequence[Mapping[str, object]]:
    return cast("Sequence[Mapping[str, object]]", args[name])


def _unseen(one: Mapping[str, object]) -> Mapping[str, object]:
    """Another may have been brought from disk into its slot since: of that there is no record."""
    return {**one, "stands": False}


def _still(unproved: Iterable[Mapping[str, object]], known: Iterable[Known]) -> Iterator[Mapping[str, object]]:
    """By the names they have now; also those that came back since the swap, of which its record has nothing."""
    waiting = {talk.origin: talk for talk in known if talk.restored}
    for one in unproved:
        talk = waiting.pop(str(one["snapshot"]), None)
        yield one if talk is None else {**one, "id": talk.id}
    for snapshot, talk in waiting.items():
        slot = -1 if talk.slot is None else talk.slot
        yield _unseen({"snapshot": snapshot, "slot": slot, "tokens": talk.tokens, "id": talk.id, "strategy": ""})


def _ours(args: Mapping[str, object], others: Collection[str]) -> list[Mapping[str, object]]:
    theirs = {f"gateway:{name}" for name in others}
    return [{**one, "gateway": None} for one in _lines(args, "recall") if one["gateway"] not in theirs]


def _last(swaps: Sequence[Swap], tenant: str) -> Swap | None:
    """The newest that loaded it."""
    return next((swap for swap in swaps if _loaded(swap, tenant)), None)


def _loaded(swap: Swap, tenant: str) -> bool:
    """Whether it brought the tenant, by a load that was seen to end well."""
    if tenant not in plan.arriving(swap):
        return False
    loads = (step for step in swap.steps if step.step is Step.LOAD and step.tenant == tenant)
    return any(step.outcome is StepOutcome.DONE for step in loads)
