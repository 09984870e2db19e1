"""The store's clock is stepped: what a commit may say of it, and what follows."""

from __future__ import annotations

from swapper.core.commit import Commit, Committed, Conflict, LeaseChange
from swapper.core.types import ACTIVE
from swapper.store.protocol import Store
from tests.store.acts import GRANTED, NOW, ask, fold, grant, request, unmoved

TTL, HOLD = 30_000, 3_600_000
HOUR = 3_600_000


async def test_a_commit_decided_by_another_clock_than_the_store_shows_is_a_conflict(store: Store) -> None:
    await ask(store, "a")
    for between in ((NOW + 1, NOW + 9), (NOW - 9, NOW - 1)):
        said = Commit(leases=(LeaseChange("a", ACTIVE, explain="x"),), between_ms=between)
        assert await store.commit(said, now_ms=NOW) == Conflict("clock")
    assert (await store.read(now_ms=NOW)).leases["a"].explain is None
    said = Commit(leases=(LeaseChange("a", ACTIVE, explain="x"),), between_ms=(NOW, NOW))
    assert await store.commit(said, now_ms=NOW) == Committed()


async def test_a_step_is_taken_into_account_once(store: Store) -> None:
    assert (await store.read(now_ms=NOW)).stepped_ms == 0
    for was, now in ((0, -HOUR), (-HOUR, 7)):
        assert await store.commit(Commit(stepped=(was, now)), now_ms=NOW) == Committed()
        assert await store.commit(Commit(stepped=(was, now)), now_ms=NOW) == Conflict("clock")
        assert (await store.read(now_ms=NOW)).stepped_ms == now


async def test_a_lease_moves_with_the_clock_and_what_falls_due_moves_with_it(store: Store) -> None:
    await ask(store, "a", request(max_hold_ms=2 * TTL))
    await grant(store, "a", NOW + 10)
    await store.commit(Commit(leases=(LeaseChange("a", GRANTED, revoke_ms=NOW + HOLD),)), now_ms=NOW + 10)
    for shift in (HOUR, -2 * HOUR):
        before = await store.lease("a")
        now = (before.granted_ms if before and before.granted_ms else 0) + shift + 5
        moves = LeaseChange("a", ACTIVE, shift_ms=shift, lives_ms=TTL)
        assert await store.commit(Commit(leases=(moves,)), now_ms=now) == Committed()
        lease = await store.lease("a")
        assert before is not None
        assert lease is not None
        assert (lease.created_ms, lease.granted_ms) == (before.created_ms + shift, now - 5)
        assert (lease.expires_ms, lease.revoke_ms) == (now + TTL, (before.revoke_ms or 0) + shift)
        assert (await store.read(now_ms=now)).next_due_ms == now + TTL
        assert (await store.read(now_ms=now + TTL)).next_due_ms == now - 5 + 2 * TTL
    folded = fold(await store.events(after="0", limit=100, block_ms=0))
    lease = await store.lease("a")
    assert lease is not None
    assert folded.leases["a"] == unmoved(lease)


async def test_what_began_lies_never_ahead(store: Store) -> None:
    await ask(store, "a", now_ms=NOW + HOUR)
    await grant(store, "a", NOW + HOUR)
    await store.commit(Commit(leases=(LeaseChange("a", ACTIVE, shift_ms=0),)), now_ms=NOW)
    lease = await store.lease("a")
    assert lease is not None
    assert (lease.created_ms, lease.granted_ms, lease.expires_ms) == (NOW, NOW, NOW + HOUR + TTL)


async def test_who_was_a_member_before_a_step_is_one_after_it(store: Store) -> None:
    for step in (HOUR, -HOUR):
        await store.beat("lives", (), ttl_ms=TTL, now_ms=NOW)
        stepped = (await store.read(now_ms=NOW)).stepped_ms
        now = NOW + step + 1
        commit = Commit(stepped=(stepped, stepped + step), members_ms=1_000)
        assert await store.commit(commit, now_ms=now) == Committed()
        assert (await store.read(now_ms=now + 999)).gateways == ("lives",)
        assert (await store.read(now_ms=now + 1_000)).gateways == ()


async def test_without_a_step_who_was_no_member_any_more_stays_none(store: Store) -> None:
    await store.beat("gone", (), ttl_ms=10, now_ms=NOW)
    await store.beat("lives", (), ttl_ms=TTL, now_ms=NOW)
    await store.commit(Commit(members_ms=1_000), now_ms=NOW + 10)
    world = await store.read(now_ms=NOW + 10)
    assert (world.gateways, world.next_due_ms) == (("lives",), NOW + 1_010)
