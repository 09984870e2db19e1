"""One agent an executor: who has it keeps the others away for as long as it is heard, and no longer."""

from __future__ import annotations

import asyncio

from swapper.store.protocol import Claimed, Held, Store
from tests.store.acts import NOW, draw

MAIN = "agent:main"


async def claim(store: Store, owner: str, now_ms: int = NOW, *, executor: str = MAIN) -> Claimed | Held:
    return await store.claim(executor, owner, who=f"the agent {owner}", ttl_ms=10_000, now_ms=now_ms)


async def test_who_has_an_executor_keeps_others_away_while_it_is_heard(store: Store) -> None:
    assert await claim(store, "a") == Claimed(0)
    assert await claim(store, "b", NOW + 4_000) == Held("the agent a", NOW + 10_000, 6_000)
    assert await claim(store, "a", NOW + 9_000) == Claimed(0)
    assert await claim(store, "b", NOW + 18_999) == Held("the agent a", NOW + 19_000, 1)
    assert await claim(store, "b", NOW + 19_000) == Claimed(0)
    assert await claim(store, "a", NOW + 19_000) == Held("the agent b", NOW + 29_000, 10_000)


async def test_executors_are_claimed_each_by_itself(store: Store) -> None:
    await claim(store, "a")
    assert await claim(store, "b", executor="agent:other") == Claimed(0)


async def test_who_had_it_last_has_it_at_once_also_after_its_end(store: Store) -> None:
    await claim(store, "a")
    assert await claim(store, "a", NOW + 1) == Claimed(0)
    await store.unclaim(MAIN, "a")
    assert await claim(store, "a", NOW + 90_000) == Claimed(0)


async def test_given_up_it_is_free_at_once_and_only_its_owner_gives_it_up(store: Store) -> None:
    await claim(store, "a")
    await store.unclaim(MAIN, "b")
    assert isinstance(await claim(store, "b"), Held)
    await store.unclaim(MAIN, "a")
    assert isinstance(await claim(store, "b"), Claimed)


async def test_a_new_owner_is_told_the_highest_token_there_was_and_keeps_it(store: Store) -> None:
    """What was ordered before is not its to carry out, also after it was started again."""
    await claim(store, "a")
    before = await draw(store)
    await store.unclaim(MAIN, "a")
    assert await claim(store, "b") == Claimed(before)
    later = await draw(store)
    assert await claim(store, "b") == Claimed(before)
    await store.unclaim(MAIN, "b")
    assert await claim(store, "b") == Claimed(before)
    await store.unclaim(MAIN, "b")
    assert await claim(store, "a") == Claimed(later)


async def test_a_clock_that_was_stepped_back_keeps_nobody_away_for_longer(store: Store) -> None:
    await claim(store, "dead", NOW + 3_600_000)
    assert await claim(store, "b", NOW) == Held("the agent dead", NOW + 10_000, 10_000)
    assert await claim(store, "b", NOW + 10_000) == Claimed(0)


async def test_how_far_its_owner_has_come_is_noted_for_the_next_one_by_the_owner_alone(store: Store) -> None:
    assert await store.noted(MAIN) is None
    assert not await store.note(MAIN, "a", "nobody has it")
    await claim(store, "a")
    assert await store.note(MAIN, "a", '{"at": "1-0"}')
    assert await claim(store, "b", NOW + 10_000) == Claimed(0)
    assert not await store.note(MAIN, "a", "too late")
    assert await store.noted(MAIN) == '{"at": "1-0"}'
    assert await store.note(MAIN, "b", "further")
    assert await store.noted(MAIN) == "further"
    assert await store.noted("agent:other") is None


async def test_of_many_who_claim_at_once_one_has_it(able: Store) -> None:
    answers = await asyncio.gather(*(claim(able, f"o{number}") for number in range(20)))
    assert sum(isinstance(answer, Claimed) for answer in answers) == 1
