"""A commit's effect on a World is what the store makes of it: here where the two once differed."""

from __future__ import annotations

from swapper.core.apply import apply, changed
from swapper.core.commit import Commit, LeaseChange
from swapper.core.types import Lease, LeaseRequest, LeaseState, World

NOW = 1_000_000
TTL = LeaseRequest("ann").ttl_ms
WAITS = Lease("a", LeaseRequest("ann"), 1, NOW)
GRANTED = changed(WAITS, LeaseChange("a", frozenset(), LeaseState.GRANTED, token=7, card="gpu0"), NOW)


def test_a_lease_that_is_granted_already_keeps_its_times() -> None:
    again = LeaseChange("a", frozenset(), LeaseState.GRANTED, reason="x")
    after = changed(GRANTED, again, NOW + 9)
    assert (after.granted_ms, after.expires_ms, after.reason) == (NOW, NOW + TTL, "x")


def test_a_lease_that_waits_again_waits_for_the_card_it_asked_for() -> None:
    prepares = changed(WAITS, LeaseChange("a", frozenset(), LeaseState.PREPARING, card="gpu0"), NOW)
    back = LeaseChange("a", frozenset(), LeaseState.QUEUED)
    assert changed(prepares, back, NOW).card is None
    world = apply(World(NOW, {}, {"a": prepares}), Commit(leases=(back,)))
    assert world.queued == 1


def test_a_grant_that_is_also_extended_lasts_as_long_as_that() -> None:
    change = LeaseChange("a", frozenset(), LeaseState.GRANTED, token=7, lives_ms=TTL + 1)
    assert changed(WAITS, change, NOW).expires_ms == NOW + TTL + 1


def test_what_does_not_expire_cannot_be_extended() -> None:
    assert changed(WAITS, LeaseChange("a", frozenset(), lives_ms=1), NOW).expires_ms is None


def test_who_leaves_the_queue_is_counted() -> None:
    world = World(NOW, {}, {"a": WAITS}, queued=5)
    assert apply(world, Commit(leases=(LeaseChange("a", frozenset(), LeaseState.CANCELLED),))).queued == 4
    assert apply(world, Commit(leases=(LeaseChange("a", frozenset(), explain="x"),))).queued == 5
