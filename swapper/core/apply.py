"""A commit's effect on a World, in memory: what the store will answer next, if nobody else writes. Pure.

Invariant: the same meaning as the store's `commit` once its guards have passed; the store alone decides whether they
pass. Lets a coordinator go on deciding without asking back, and virtual time run without a store.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swapper.core.commit import Commit, LeaseChange
from swapper.core.types import ACTIVE, Lease, LeaseState, World


def apply(world: World, commit: Commit) -> World:
    """The world after the commit, at the same moment. Leases that ended leave it."""
    cards = {card.name: replace(card, version=card.version + 1) for card in commit.cards}
    leases = {**world.leases}
    for change in commit.leases:
        if change.id in leases:
            leases[change.id] = changed(leases[change.id], change, world.now_ms)
    after = replace(
        world, cards={**world.cards, **cards}, gates={**world.gates, **commit.gates}, leases=_visible(leases)
    )
    return replace(
        after,
        queued=after.queued + _joined_queue(world, commit),
        token=max((world.token, *commit.tokens)),
        stepped_ms=world.stepped_ms if commit.stepped is None else commit.stepped[1],
        errands=tuple(errand for errand in after.errands if errand.id not in commit.over),
    )


def changed(lease: Lease, change: LeaseChange, now_ms: int) -> Lease:
    """One lease after a change: fields given, the times the store stamps; the card asked for when it waits again."""
    fields = {} if change.shift_ms is None else _shifted(lease, change.shift_ms, now_ms)
    fields |= {
        name: value
        for name in ("state", "reason", "token", "card", "swap_id", "explain", "revoke_ms")
        if (value := getattr(change, name)) is not None
    }
    expires_ms = lease.expires_ms
    if change.state not in (None, lease.state):
        if change.state is LeaseState.GRANTED:
            fields["granted_ms"], expires_ms = now_ms, now_ms + lease.request.ttl_ms
        elif change.state is LeaseState.QUEUED:
            fields["card"] = lease.request.card or None
        elif change.state not in ACTIVE:
            fields["ended_ms"] = now_ms
    if change.lives_ms is not None and expires_ms is not None:
        expires_ms = now_ms + change.lives_ms
    return replace(lease, expires_ms=expires_ms, **fields)  # pyright: ignore[reportArgumentType]


def _shifted(lease: Lease, shift_ms: int, now_ms: int) -> dict[str, object]:
    began = {"created_ms": lease.created_ms, "granted_ms": lease.granted_ms}
    fields: dict[str, object] = {name: min(ms + shift_ms, now_ms) for name, ms in began.items() if ms is not None}
    return fields if lease.revoke_ms is None else fields | {"revoke_ms": lease.revoke_ms + shift_ms}


def _visible(leases: Mapping[str, Lease]) -> dict[str, Lease]:
    return {name: lease for name, lease in leases.items() if lease.state in ACTIVE}


def _joined_queue(world: World, commit: Commit) -> int:
    """How many more wait in the queue afterwards; below 0: how many fewer."""
    joined = 0
    for change in commit.leases:
        lease = world.leases.get(change.id)
        if lease is not None and change.state is not None:
            joined += (change.state is LeaseState.QUEUED) - (lease.state is LeaseState.QUEUED)
    return joined
