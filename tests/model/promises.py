"""What each commit must hold to about conversations, judged beside the machine: S4 of recalls and saves, and N3.

Invariant: pure; it looks at what a commit says of a card and its swap, and at nothing the machine keeps for itself.
N3: what a gateway knew when it was drained is, once its model is told to leave, saved, to be replayed, or cold with a
reason; what was saved comes back, stays on disk, is to be replayed, or is cold with a reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from swapper.core.commit import Commit
from swapper.core.conversations import Conversation, ProofResult, Strategy
from swapper.core.keeping import RECALL
from swapper.core.orders import Report
from swapper.core.spec import Spec
from swapper.core.types import Card, Step, StepOutcome, Swap, World


class Broken(AssertionError):
    """A promise was broken; the text says which, and by what."""


def on_commit(before: World, commit: Commit, spec: Spec) -> None:
    """Raises Broken."""
    swaps = {swap.id: swap for swap in commit.swaps} | {c.swap.id: c.swap for c in commit.cards if c.swap is not None}
    for card in commit.cards:
        _recalls(card, commit)
        saved_before = before.cards[card.name].saved if card.name in before.cards else ()
        for tenant in {c.tenant for c in saved_before} - {c.tenant for c in card.saved}:
            mine = [swap for swap in swaps.values() if swap.card == card.name and tenant in swap.to]
            _comes_back(tenant, [c for c in saved_before if c.tenant == tenant], mine)
    for command in commit.commands:
        swap = next((s for s in swaps.values() if s.token == command.token), None)
        if command.verb == Step.RELEASE and swap is not None and command.tenant in spec.tenants:
            _leaves(str(command.tenant), swap, keeps=spec.tenants[str(command.tenant)].save)
    for swap in commit.swaps:
        if swap.outcome is not None:
            _over(swap)


def _recalls(card: Card, commit: Commit) -> None:
    """A tenant is not told to leave while one of its conversations is on its way, and none is sent for afterwards."""
    if card.swap is None:
        return
    pending = card.swap.pending
    leaving = {c.tenant for c in pending if c.verb == Step.RELEASE}
    if unsaved := [c for c in pending if c.tenant in leaving and c.verb in (RECALL, Step.SAVE)]:
        raise Broken(f"{unsaved[0].tenant} is to leave while a {unsaved[0].verb} of it is awaited (S4)")
    ordered = [c for c in commit.commands if c.token == card.swap.token]
    releases = [c.n for c in ordered if c.verb == Step.RELEASE]
    released = bool(releases) or any(r.step is Step.RELEASE for r in card.swap.steps)
    for command in ordered:
        if command.verb == RECALL and released and command.n > min(releases, default=0):
            raise Broken(f"{command.tenant} is recalled after it was told to leave")


def _leaves(tenant: str, swap: Swap, *, keeps: bool) -> None:
    if keeps:
        known = {c.head for c in swap.known if c.tenant == tenant and c.head}
        stated(tenant, known, swap.conversations)


def stated(tenant: str, known: set[str], lines: Sequence[Conversation]) -> None:
    """Each of `known` has a line that says what became of it; an unnamed slot may be one of them."""
    mine = [c for c in lines if c.tenant == tenant]
    everything = any(c.slot == -1 and not c.head and c.reason for c in mine)
    missing = known - {c.head for c in mine}
    if missing and not everything and len(missing) > sum(1 for c in mine if not c.head):
        raise Broken(f"{tenant} leaves, and nothing is said of {sorted(missing)} (N3)")
    for talk in mine:
        if not talk.saved and not talk.reason:
            raise Broken(f"{tenant} leaves with {talk} neither saved nor stated (N3)")


def _comes_back(tenant: str, saved: Sequence[Conversation], swaps: Sequence[Swap]) -> None:
    lines = [c for swap in swaps for c in swap.conversations if c.tenant == tenant]
    for talk in saved:
        if not any(c.snapshot == talk.snapshot or (talk.head and c.head == talk.head) for c in lines):
            raise Broken(f"{tenant} is loaded, and nothing is said of {talk.snapshot}, which was saved (N3)")


def closed(swap: Swap) -> None:
    """A swap that is over says how, and so does every line of it."""
    if swap.outcome is None or swap.ended_ms is None:
        raise Broken(f"{swap.id} is over and does not say how")
    if swap.outcome != "done" and not swap.reason:
        raise Broken(f"{swap.id} is {swap.outcome} without a reason")
    if left := [r for r in swap.steps if r.outcome is StepOutcome.RUNNING]:
        raise Broken(f"{swap.id} is {swap.outcome} and still runs: {left}")


def carried_out(errand: str, swap: Swap | None) -> None:
    """What was asked for by hand is over: so is the swap it became."""
    if swap is None or swap.outcome is None:
        raise Broken(f"{errand} is over, and its swap is not: {swap} (N1)")


def _over(swap: Swap) -> None:
    """The swap is over: whoever came has lines that say where each conversation is."""
    if swap.outcome != "done":
        return
    for talk in swap.conversations:
        later = talk.kept or (talk.strategy == Strategy.REPLAY and talk.saved and talk.result is None)
        cold = talk.result is ProofResult.COLD and bool(talk.reason)
        if talk.tenant in swap.to and not (talk.restored or later or cold):
            raise Broken(f"{swap.id} ends with {talk} neither back nor stated cold (N3)")


def told_by(report: Report) -> set[str]:
    """The heads of the conversations that a gateway's answer names."""
    said = cast("Sequence[Mapping[str, object]]", report.data.get("talks", ()))
    return {str(one["id"]) for one in said}
