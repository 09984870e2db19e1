"""Errands on record: written once, read in the order they came, and ended by a commit alone."""

from __future__ import annotations

from dataclasses import replace

from swapper.core.byhand import queued_swap
from swapper.core.commit import Commit, Committed, Conflict
from swapper.core.errand import Errand, Verb
from swapper.store import codec
from swapper.store.protocol import QueueFull, Store
from tests.store.acts import NOW, card_of


def errand(number: int, **changes: object) -> Errand:
    made = Errand(f"sw_{number}", "gpu0", Verb.UNLOAD, ("llama/ü:Q4",), owner="ann", drain_ms=30_000)
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


async def ask(store: Store, wanted: Errand, now_ms: int = NOW) -> Errand | QueueFull:
    return await store.errand(wanted, max_errands=3, now_ms=now_ms)


async def open_errands(store: Store) -> tuple[Errand, ...]:
    return (await store.read(now_ms=NOW)).errands


async def test_an_errand_is_read_as_it_was_asked_for_with_the_moment_it_came(store: Store) -> None:
    asked = replace(errand(1), asked_ms=NOW)
    assert await ask(store, errand(1, asked_ms=7)) == asked
    assert await open_errands(store) == (asked,)


async def test_they_are_read_in_the_order_they_came_whatever_the_clock_and_their_ids(store: Store) -> None:
    for number, now_ms in ((3, NOW), (1, NOW - 5_000), (2, NOW)):
        await ask(store, errand(number), now_ms)
    assert [one.id for one in await open_errands(store)] == ["sw_3", "sw_1", "sw_2"]


async def test_the_same_id_again_gives_the_errand_that_has_it(store: Store) -> None:
    first = await ask(store, errand(1))
    assert await ask(store, errand(1, verb=Verb.LOAD), NOW + 1) == first
    assert len(await open_errands(store)) == 1


async def test_beyond_the_most_nothing_is_written(store: Store) -> None:
    for number in range(3):
        await ask(store, errand(number))
    assert await ask(store, errand(3)) == QueueFull(3)
    assert len(await open_errands(store)) == 3


async def test_it_wakes_the_coordinator_and_is_told_as_the_swap_it_will_be(store: Store) -> None:
    before = await store.inputs(after="$", block_ms=0)
    asked = await ask(store, errand(1))
    assert isinstance(asked, Errand)
    assert (await store.inputs(after=before.last, block_ms=0)).woken
    (event,) = await store.events(after="0", limit=10, block_ms=0)
    assert (event.type, event.subject, event.version) == ("swap", "sw_1", 0)
    assert codec.swap_of(event) == queued_swap(asked)
    assert '"state":"queued"' in event.data


async def test_a_commit_ends_it_together_with_what_it_writes(store: Store) -> None:
    await ask(store, errand(1))
    card = replace(await card_of(store), pinned=("llama/med",))
    assert await store.commit(Commit(cards=(card,), over=("sw_1",)), now_ms=NOW) == Committed()
    assert await open_errands(store) == ()
    assert (await card_of(store)).pinned == ("llama/med",)


async def test_a_commit_that_ends_one_that_is_over_writes_nothing(store: Store) -> None:
    await ask(store, errand(1))
    await store.commit(Commit(over=("sw_1",)), now_ms=NOW)
    card = replace(await card_of(store), pinned=("llama/med",))
    assert await store.commit(Commit(cards=(card,), over=("sw_1",)), now_ms=NOW) == Conflict("errand sw_1")
    assert (await card_of(store)).pinned == ()
