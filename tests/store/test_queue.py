"""The queue: who waits, in which order, and what a decision gets to see of it."""

from __future__ import annotations

from swapper.core.types import LeaseState, WorkClass
from swapper.store.protocol import Enqueued, Idempotency, KeyReused, LeaseFilter, QueueFull, Store
from tests.store.acts import NOW, ask, ask_all, grant, request, state

DAY = 86_400_000


async def test_the_queue_is_ordered_by_class_and_then_by_arrival(store: Store) -> None:
    for lease_id, klass in [("b", "batch"), ("n9", "normal"), ("m", "maintenance"), ("i9", "interactive")]:
        await ask(store, lease_id, request(klass=WorkClass(klass)))
    await ask(store, "n2")
    await ask(store, "i2", request(klass=WorkClass.INTERACTIVE))

    order = ["i9", "i2", "n9", "n2", "b", "m"]
    assert list((await store.read(now_ms=NOW)).leases) == order
    assert [await store.position(lease_id) for lease_id in order] == [1, 2, 3, 4, 5, 6]


async def test_who_does_not_wait_has_no_position(store: Store) -> None:
    await ask(store, "a")
    await grant(store, "a")
    assert await store.position("a") is None
    assert await store.position("nobody") is None


async def test_a_lease_comes_back_as_it_was_asked_for(store: Store) -> None:
    wanted = request(owner="ann: ü", card=None, not_before_ms=NOW + 5, deadline_ms=NOW + 10)
    lease = await ask(store, "a", wanted)
    assert lease.request == wanted
    assert (lease.state, lease.created_ms, lease.card) == (LeaseState.QUEUED, NOW, None)
    assert await store.lease("a") == lease
    assert await store.lease("b") is None


async def test_without_a_time_the_server_uses_its_own_clock(store: Store) -> None:
    lease = await ask(store, "a", now_ms=None)
    world = await store.read()
    assert 1_700_000_000_000 < lease.created_ms <= world.now_ms < lease.created_ms + 60_000


async def test_a_full_queue_takes_nobody(store: Store) -> None:
    await ask(store, "a")
    assert await store.enqueue(request(), lease_id="b", max_queue=1, now_ms=NOW) == QueueFull(1)
    assert await store.lease("b") is None
    await grant(store, "a")
    assert isinstance(await store.enqueue(request(), lease_id="b", max_queue=1, now_ms=NOW), Enqueued)


async def test_the_same_key_gives_the_same_lease_even_when_the_queue_is_full(store: Store) -> None:
    key = Idempotency("k", "digest")
    first = await store.enqueue(request(), lease_id="a", max_queue=1, idempotency=key, now_ms=NOW)
    again = await store.enqueue(request(), lease_id="b", max_queue=1, idempotency=key, now_ms=NOW)
    assert isinstance(first, Enqueued)
    assert again == Enqueued(first.lease, created=False)
    assert (await store.read(now_ms=NOW)).queued == 1


async def test_the_same_key_with_another_body_is_refused(store: Store) -> None:
    await store.enqueue(request(), lease_id="a", max_queue=9, idempotency=Idempotency("k", "one"), now_ms=NOW)
    other = Idempotency("k", "two")
    assert await store.enqueue(request(), lease_id="b", max_queue=9, idempotency=other, now_ms=NOW) == KeyReused("a")


async def test_a_key_belongs_to_its_owner_and_lasts_a_day(store: Store) -> None:
    key = Idempotency("k", "digest")

    async def created(owner: str, lease_id: str, now_ms: int) -> bool:
        wanted = request(owner=owner)
        answer = await store.enqueue(wanted, lease_id=lease_id, max_queue=9, idempotency=key, now_ms=now_ms)
        assert isinstance(answer, Enqueued)
        return answer.created

    assert await created("ann", "a", NOW)
    assert await created("bob", "b", NOW)
    assert not await created("ann", "c", NOW + DAY - 1)
    assert await created("ann", "d", NOW + DAY)


async def test_owners_and_keys_that_read_alike_are_told_apart(store: Store) -> None:
    for owner, key, lease_id in [("a:b", "c", "x"), ("a", "b:c", "y")]:
        idempotency = Idempotency(key, lease_id)
        answer = await store.enqueue(
            request(owner=owner), lease_id=lease_id, max_queue=9, idempotency=idempotency, now_ms=NOW
        )
        assert isinstance(answer, Enqueued)
        assert answer.created


async def test_an_enqueue_sent_again_with_its_id_is_the_same_lease(store: Store) -> None:
    lease = await ask(store, "a")
    assert await store.enqueue(request(), lease_id="a", max_queue=9, now_ms=NOW + 1) == Enqueued(lease, created=False)


async def test_a_long_queue_for_one_card_hides_nobody_who_waits_for_another(store: Store) -> None:
    await ask_all(store, "a", 300, request(card="gpu0", klass=WorkClass.INTERACTIVE))
    await ask(store, "b", request(card="gpu1", klass=WorkClass.BATCH))
    await ask(store, "any", request(card=None, klass=WorkClass.BATCH))

    world = await store.read(now_ms=NOW)
    assert world.queued == 302
    assert {"b", "any"} <= set(world.leases)
    assert len(world.leases) == 256 + 2


async def test_leases_whose_time_is_ahead_are_seen_and_take_no_place_among_the_heads(store: Store) -> None:
    await ask_all(store, "t", 260, request(klass=WorkClass.INTERACTIVE, not_before_ms=NOW + 2_000))
    await ask(store, "first", request(not_before_ms=NOW + 1_000))
    await ask(store, "now", request(klass=WorkClass.BATCH))

    world = await store.read(now_ms=NOW)
    assert {"first", "now"} <= set(world.leases)
    assert world.next_due_ms == NOW + 1_000


async def test_a_window_behind_a_long_queue_is_seen_before_its_time(store: Store) -> None:
    await ask_all(store, "b", 300, request(klass=WorkClass.BATCH))
    await ask(store, "window", request(klass=WorkClass.MAINTENANCE, not_before_ms=NOW + 60_000))
    assert "window" in (await store.read(now_ms=NOW)).leases
    assert "window" in (await store.read(now_ms=NOW + 60_000)).leases


async def test_a_lease_past_its_deadline_is_seen_wherever_it_stands(store: Store) -> None:
    await ask_all(store, "a", 300, request(klass=WorkClass.INTERACTIVE))
    await ask(store, "late", request(klass=WorkClass.BATCH, deadline_ms=NOW + 10))
    before = await store.read(now_ms=NOW + 9)
    assert "late" not in before.leases
    assert before.next_due_ms == NOW + 10
    after = await store.read(now_ms=NOW + 10)
    assert "late" in after.leases
    assert after.next_due_ms is None


async def test_leases_are_listed_newest_first_in_pages(store: Store) -> None:
    for number in range(5):
        await ask(store, f"a{number}")
    first = await store.leases(LeaseFilter(limit=2))
    second = await store.leases(LeaseFilter(limit=2, cursor=first.next_cursor))
    third = await store.leases(LeaseFilter(limit=2, cursor=second.next_cursor))
    assert [[lease.id for lease in page.items] for page in (first, second, third)] == [
        ["a4", "a3"],
        ["a2", "a1"],
        ["a0"],
    ]
    assert third.next_cursor is None
    assert (await store.leases(LeaseFilter(limit=5))).next_cursor is None


async def test_leases_are_listed_by_state_card_and_owner(store: Store) -> None:
    await ask(store, "a")
    await ask(store, "b", request(owner="bob", card="gpu1"))
    await ask(store, "c", request(owner="bob"))
    await store.end("c", None, now_ms=NOW)

    async def listed(query: LeaseFilter) -> list[str]:
        return [lease.id for lease in (await store.leases(query)).items]

    assert await listed(LeaseFilter(owner="bob")) == ["c", "b"]
    assert await listed(LeaseFilter(card="gpu0")) == ["c", "a"]
    assert await listed(LeaseFilter(state=LeaseState.QUEUED)) == ["b", "a"]
    assert await listed(LeaseFilter(state=LeaseState.CANCELLED, card="gpu0", owner="bob")) == ["c"]
    assert await listed(LeaseFilter(owner="eve")) == []


async def test_a_listing_finds_the_one_match_behind_a_thousand_others(able: Store) -> None:
    await ask(able, "oldest", request(owner="bob"))
    await ask_all(able, "a", 1_050, request())
    page = await able.leases(LeaseFilter(owner="bob", limit=1))
    assert [lease.id for lease in page.items] == ["oldest"]
    assert page.next_cursor is None


async def test_a_cancelled_lease_leaves_the_queue(store: Store) -> None:
    await ask(store, "a", request(not_before_ms=NOW + 5, deadline_ms=NOW + 9))
    await store.end("a", None, now_ms=NOW)
    world = await store.read(now_ms=NOW)
    assert (world.queued, dict(world.leases), world.next_due_ms) == (0, {}, None)
    assert await state(store, "a") is LeaseState.CANCELLED
