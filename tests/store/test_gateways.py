"""Membership and demand of gateway processes: one write, gone with their process."""

from __future__ import annotations

from swapper.core.types import Demand, WorkClass
from swapper.store.protocol import Store
from tests.store.acts import NOW


def demand(gateway: str, waiting: int = 1) -> tuple[Demand, ...]:
    return (
        Demand(gateway, "llama/med", WorkClass.INTERACTIVE, waiting, 0, NOW - 10),
        Demand(gateway, "llama/big", WorkClass.BATCH, 0, 2, None),
    )


async def woken(store: Store, last: str) -> bool:
    return (await store.inputs(after=last, block_ms=0)).woken


async def test_a_beat_carries_the_membership_and_all_demand(store: Store) -> None:
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW)
    await store.beat("g2", (), ttl_ms=2_000, now_ms=NOW)
    world = await store.read(now_ms=NOW)
    assert (world.gateways, world.demand) == (("g1", "g2"), demand("g1"))


async def test_the_next_beat_replaces_the_demand(store: Store) -> None:
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW)
    await store.beat("g1", demand("g1", 5)[:1], ttl_ms=1_000, now_ms=NOW)
    assert (await store.read(now_ms=NOW)).demand == demand("g1", 5)[:1]


async def test_the_demand_of_a_dead_gateway_vanishes(store: Store) -> None:
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW)
    await store.beat("g2", demand("g2"), ttl_ms=5_000, now_ms=NOW)
    alive = await store.read(now_ms=NOW + 999)
    assert (alive.gateways, alive.next_due_ms) == (("g1", "g2"), NOW + 1_000)
    later = await store.read(now_ms=NOW + 1_000)
    assert (later.gateways, later.demand, later.next_due_ms) == (("g2",), demand("g2"), NOW + 5_000)


async def test_a_gateway_thought_dead_is_back_with_its_next_beat(store: Store) -> None:
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW)
    await store.beat("g2", (), ttl_ms=60_000, now_ms=NOW + 2_000)
    last = (await store.inputs(after="$", block_ms=0)).last
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW + 3_000)
    assert (await store.read(now_ms=NOW + 3_000)).demand == demand("g1")
    assert await woken(store, last)


async def test_a_beat_tells_whether_the_membership_was_there_still(store: Store) -> None:
    """Who was none was told nothing meanwhile: also after a step of the store's clock, which no gateway can see."""
    assert not await store.beat("g1", (), ttl_ms=1_000, now_ms=NOW)
    assert await store.beat("g1", (), ttl_ms=1_000, now_ms=NOW + 999)
    assert not await store.beat("g1", (), ttl_ms=1_000, now_ms=NOW + 1_999)
    await store.leave("g1")
    assert not await store.beat("g1", (), ttl_ms=1_000, now_ms=NOW + 2_000)


async def test_only_a_beat_that_changes_something_wakes_the_coordinator(store: Store) -> None:
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW)
    last = (await store.inputs(after="$", block_ms=0)).last
    await store.beat("g1", demand("g1"), ttl_ms=1_000, now_ms=NOW + 500)
    assert not await woken(store, last)
    await store.beat("g1", demand("g1", 2), ttl_ms=1_000, now_ms=NOW + 500)
    assert await woken(store, last)


async def test_a_gateway_that_leaves_is_gone_at_once(store: Store) -> None:
    await store.beat("g1", demand("g1"), ttl_ms=60_000, now_ms=NOW)
    last = (await store.inputs(after="$", block_ms=0)).last
    await store.leave("g1")
    world = await store.read(now_ms=NOW)
    assert (world.gateways, world.demand, world.next_due_ms) == ((), (), None)
    assert await woken(store, last)
    await store.leave("g1")
