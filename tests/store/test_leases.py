"""One lease's life: grant, heartbeat, end, expiry, and the outcomes each call can have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swapper.core.commit import Commit, Committed, Conflict, LeaseChange
from swapper.core.types import LeaseState, WorkClass
from swapper.store.protocol import Ended, NotFound, Store, WrongToken
from tests.store.acts import GRANTED, NOW, PREPARING, QUEUED, ask, card_of, grant, prepare, request, state

TTL = 30_000
HOLD = 3_600_000


async def test_a_grant_is_stamped_with_the_stores_clock(store: Store) -> None:
    await ask(store, "a")
    await prepare(store, "a", NOW + 1)
    token = await grant(store, "a", NOW + 5)
    lease = await store.lease("a")
    assert lease is not None
    assert (lease.state, lease.token, lease.card, lease.swap_id) == (LeaseState.GRANTED, token, "gpu0", "sw-a")
    assert (lease.granted_ms, lease.expires_ms, lease.ended_ms) == (NOW + 5, NOW + 5 + TTL, None)


async def test_a_heartbeat_moves_the_expiry_and_notes_the_progress(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    lease = await store.heartbeat("a", token, progress=0.4, now_ms=NOW + 1_000)
    assert lease == await store.lease("a")
    assert (await store.read(now_ms=NOW)).next_due_ms == NOW + 1_000 + TTL
    assert getattr(lease, "progress", None) == 0.4
    assert getattr(lease, "expires_ms", None) == NOW + 1_000 + TTL


async def test_a_late_heartbeat_keeps_a_lease_that_no_commit_expired(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    lease = await store.heartbeat("a", token, now_ms=NOW + 10 * TTL)
    assert getattr(lease, "expires_ms", None) == NOW + 11 * TTL


async def test_a_heartbeat_never_moves_the_expiry_back(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    extend = LeaseChange("a", GRANTED, lives_ms=5 * TTL)
    assert await store.commit(Commit(leases=(extend,)), now_ms=NOW) == Committed()
    assert getattr(await store.heartbeat("a", token, now_ms=NOW), "expires_ms", None) == NOW + 5 * TTL


async def test_a_heartbeat_that_names_another_process_is_a_change_and_wakes_the_coordinator(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    before = await store.events(after="0", limit=100, block_ms=0)
    seen = (await store.inputs(after="0", block_ms=0)).last
    named = replace(request(), holder_pid=4711, holder_started=12)
    lease = await store.heartbeat("a", token, request=named, now_ms=NOW + 1_000)
    assert lease == await store.lease("a")
    assert getattr(lease, "request", None) == named
    assert getattr(lease, "expires_ms", None) == NOW + 1_000 + TTL
    world = await store.read(now_ms=NOW)
    assert (world.leases["a"].request, world.next_due_ms) == (named, NOW + 1_000 + TTL)
    after = await store.events(after=before[-1].id, limit=100, block_ms=0)
    assert [(event.type, event.subject) for event in after] == [("lease", "a")]
    assert (await store.inputs(after=seen, block_ms=0)).woken
    await store.heartbeat("a", token, request=named, now_ms=NOW + 2_000)
    assert await store.events(after=after[-1].id, limit=100, block_ms=0) == ()


async def test_a_heartbeat_with_another_token_names_nobody(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    assert await store.heartbeat("a", token + 1, request=replace(request(), holder_pid=1), now_ms=NOW) == WrongToken()
    lease = await store.lease("a")
    assert lease is not None
    assert lease.request == request()


async def test_a_heartbeat_says_what_is_wrong(store: Store) -> None:
    assert await store.heartbeat("nobody", 1, now_ms=NOW) == NotFound()
    await ask(store, "a")
    assert await store.heartbeat("a", 1, now_ms=NOW) == WrongToken()
    token = await grant(store, "a")
    assert await store.heartbeat("a", token + 1, now_ms=NOW) == WrongToken()
    ended = await store.end("a", token, now_ms=NOW)
    assert await store.heartbeat("a", token, now_ms=NOW) == Ended(ended)  # pyright: ignore[reportArgumentType]


async def test_the_holder_releases_with_its_token_only(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    assert await store.end("a", None, now_ms=NOW) == WrongToken()
    assert await store.end("a", token - 1, now_ms=NOW) == WrongToken()
    assert await state(store, "a") is LeaseState.GRANTED
    lease = await store.end("a", token, now_ms=NOW + 7)
    assert getattr(lease, "state", None) is LeaseState.RELEASED
    assert getattr(lease, "ended_ms", None) == NOW + 7


async def test_who_waits_is_cancelled_without_a_token(store: Store) -> None:
    await ask(store, "a")
    await ask(store, "b")
    await prepare(store, "b")
    for lease_id in ("a", "b"):
        assert getattr(await store.end(lease_id, None, now_ms=NOW), "state", None) is LeaseState.CANCELLED


async def test_who_ends_its_lease_leaves_a_reason(store: Store) -> None:
    for name in ("a", "b"):
        await ask(store, name)
    released = await store.end("a", await grant(store, "a"), now_ms=NOW)
    cancelled = await store.end("b", None, now_ms=NOW)
    reasons = [getattr(lease, "reason", None) for lease in (released, cancelled)]
    assert reasons == ["given back by its holder", "given up before it was granted"]


async def test_ending_twice_changes_nothing(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    first = await store.end("a", token, now_ms=NOW)
    assert await store.end("a", None, now_ms=NOW + 5) == first
    assert await store.end("nobody", None, now_ms=NOW) == NotFound()


async def test_a_lease_expires_only_once_its_time_has_passed(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    expire = Commit(leases=(LeaseChange("a", GRANTED, LeaseState.EXPIRED, "quiet", only_if_expired=True),))
    assert await store.commit(expire, now_ms=NOW + TTL - 1) == Conflict("lease a")
    await store.heartbeat("a", token, now_ms=NOW + TTL - 1)
    assert await store.commit(expire, now_ms=NOW + TTL) == Conflict("lease a")
    assert await store.commit(expire, now_ms=NOW + 2 * TTL - 1) == Committed()
    lease = await store.lease("a")
    assert lease is not None
    assert (lease.state, lease.reason, lease.ended_ms) == (LeaseState.EXPIRED, "quiet", NOW + 2 * TTL - 1)


async def test_a_waiting_lease_has_no_expiry_to_pass(store: Store) -> None:
    await ask(store, "a")
    expire = LeaseChange("a", QUEUED, LeaseState.EXPIRED, only_if_expired=True)
    assert await store.commit(Commit(leases=(expire,)), now_ms=NOW * 2) == Conflict("lease a")


async def test_what_falls_due_next_follows_the_lease_through_its_life(store: Store) -> None:
    async def due(now_ms: int = NOW) -> int | None:
        return (await store.read(now_ms=now_ms)).next_due_ms

    await ask(store, "a", request(not_before_ms=NOW + 10, deadline_ms=NOW + 20, max_hold_ms=TTL + 5))
    assert (await due(), await due(NOW + 10), await due(NOW + 20)) == (NOW + 10, NOW + 20, None)
    await prepare(store, "a")
    assert await due() == NOW + 20
    token = await grant(store, "a")
    assert (await due(), await due(NOW + TTL), await due(NOW + TTL + 5)) == (NOW + TTL, NOW + TTL + 5, None)
    leave = LeaseChange("a", GRANTED, revoke_ms=NOW + 3)
    await store.commit(Commit(leases=(leave,)), now_ms=NOW)
    assert await due() == NOW + 3
    await store.end("a", token, now_ms=NOW)
    assert await due() is None


async def test_an_abandoned_preparation_waits_again_in_its_old_place(store: Store) -> None:
    await ask(store, "a", request(card=None))
    await ask(store, "b", request(card=None))
    await prepare(store, "a")
    assert await store.position("a") is None
    back = LeaseChange("a", PREPARING, LeaseState.QUEUED)
    assert await store.commit(Commit(leases=(back,)), now_ms=NOW) == Committed()
    assert (await store.position("a"), await store.position("b")) == (1, 2)
    lease = await store.lease("a")
    assert lease is not None
    assert lease.card is None


async def test_an_ended_lease_stays_in_view_while_its_card_names_it(store: Store) -> None:
    await ask(store, "a")
    token = await grant(store, "a")
    await store.end("a", token, now_ms=NOW)
    assert (await store.read(now_ms=NOW)).leases["a"].state is LeaseState.RELEASED
    card = await card_of(store)
    await store.commit(Commit(cards=(replace(card, holds=()),)), now_ms=NOW)
    assert "a" not in (await store.read(now_ms=NOW)).leases


@pytest.mark.parametrize("state_", [LeaseState.QUEUED, LeaseState.PREPARING, LeaseState.FAILED])
async def test_a_granted_lease_takes_no_step_that_its_life_does_not_have(store: Store, state_: LeaseState) -> None:
    await ask(store, "a")
    await grant(store, "a")
    with pytest.raises(ValueError, match=f"lease a cannot go from granted to {state_}"):
        await store.commit(Commit(leases=(LeaseChange("a", GRANTED, state_),)), now_ms=NOW)
    assert await state(store, "a") is LeaseState.GRANTED


async def test_an_ended_lease_is_never_revived(store: Store) -> None:
    await ask(store, "a")
    await store.end("a", None, now_ms=NOW)
    revive = LeaseChange("a", frozenset(LeaseState), LeaseState.QUEUED)
    with pytest.raises(ValueError, match="cannot go from cancelled to queued"):
        await store.commit(Commit(leases=(revive,)), now_ms=NOW)


async def test_nobody_is_granted_without_a_token(store: Store) -> None:
    await ask(store, "a", request(klass=WorkClass.BATCH))
    with pytest.raises(ValueError, match="without a token"):
        await store.commit(Commit(leases=(LeaseChange("a", QUEUED, LeaseState.GRANTED),)), now_ms=NOW)
