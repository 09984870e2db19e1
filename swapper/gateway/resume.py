"""What a gateway process knows of conversations after a start, while models go on serving: from the last swap's record.

Invariant: a conversation is believed in the server only where nothing speaks against it: its model was not loaded
since its last use, as far as the record goes. What is on disk is found there again, and what is unproved can be proved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

from swapper.core import plan
from swapper.core.conversations import Conversation
from swapper.core.steps import comes_back
from swapper.core.types import Step, StepOutcome, Swap
from swapper.gateway.talks import Talks
from swapper.snapshots.conversation import Kept, Place


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
    on_disk = [_as_kept(talk) for talk in displaced if talk.tenant == tenant]
    # Also what made room since this process began, and was told at once.
    told = (talk for talk in talks.index.conversations(tenant) if talk.place is Place.DISK)
    on_disk += [Kept(talk.snapshot, talk.id, (), talk.tokens, talk.used_ms) for talk in told]
    last = next((swap for swap in swaps if _loaded(swap, tenant)), None)
    loaded_ms = 0
    if last is not None:
        loaded_ms = last.ended_ms or last.started_ms
        there = tuple(talk for talk in last.conversations if not talk.kept or talk.result is None)
        args = comes_back(replace(last, conversations=there), tenant)
        came = {"loaded": True, "recall": _ours(args, others), "unproved": _unseen(args)}
        talks.opened(tenant, last.card, last.id, {**args, **came})
    for one in on_disk:
        talks.index.stored(tenant, one)
    for talk in talks.index.conversations(tenant):
        if talk.place is Place.COLD and talk.request is not None and talk.used_ms >= loaded_ms:
            talks.index.found(tenant, talk.id)


def _as_kept(talk: Conversation) -> Kept:
    return Kept(talk.snapshot, talk.head, talk.links, talk.tokens, talk.used_ms)


def _unseen(args: Mapping[str, object]) -> list[dict[str, object]]:
    """Another may have been brought from disk into its slot since: of that there is no record."""
    return [{**one, "stands": False} for one in cast("Sequence[Mapping[str, object]]", args["unproved"])]


def _ours(args: Mapping[str, object], others: Collection[str]) -> list[dict[str, object]]:
    theirs = {f"gateway:{name}" for name in others}
    again = cast("Sequence[Mapping[str, object]]", args["recall"])
    return [{**one, "gateway": None} for one in again if one["gateway"] not in theirs]


def _loaded(swap: Swap, tenant: str) -> bool:
    """Whether it brought the tenant, by a load that was seen to end well."""
    if tenant not in plan.arriving(swap):
        return False
    loads = (step for step in swap.steps if step.step is Step.LOAD and step.tenant == tenant)
    return any(step.outcome is StepOutcome.DONE for step in loads)
