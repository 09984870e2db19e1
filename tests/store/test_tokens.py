"""The one counter of tokens: it only rises, also past what a double can hold and after a rollback."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from swapper.core.commit import Commit, Committed, Conflict, LeaseChange
from swapper.core.types import Card, LeaseState
from swapper.store.protocol import Store
from tests.store.acts import NOW, QUEUED, ask, draw


async def test_tokens_start_above_the_seconds_of_the_clock(store: Store) -> None:
    assert await draw(store, NOW + 999) == (NOW // 1000 << 20) + 1
    assert await draw(store, NOW + 999) == (NOW // 1000 << 20) + 2


async def test_tokens_rise_also_when_the_clock_goes_back(store: Store) -> None:
    drawn = [await draw(store, now_ms) for now_ms in (NOW, NOW + 5_000, NOW - 5_000, 0)]
    assert drawn == sorted(set(drawn))


async def test_callers_at_once_never_share_a_token(store: Store) -> None:
    drawn = await asyncio.gather(*(draw(store, None) for _ in range(50)))
    assert len(set(drawn)) == 50


async def test_a_token_that_is_not_above_every_other_is_refused_with_all_that_came_with_it(store: Store) -> None:
    await ask(store, "a")
    token = await draw(store)
    change = LeaseChange("a", QUEUED, LeaseState.GRANTED, token=token)
    late = Commit(cards=(Card("gpu0"),), leases=(change,), tokens=(token, token + 1))
    assert await store.commit(late, now_ms=NOW) == Conflict("tokens")
    world = await store.read(now_ms=NOW)
    assert (world.leases["a"].state, world.cards, world.token) == (LeaseState.QUEUED, {}, token)
    assert await store.commit(replace(late, tokens=(token + 1, token + 2)), now_ms=NOW) == Committed()
    assert (await store.read(now_ms=NOW)).token == token + 2


async def test_a_reported_mark_raises_the_counter_and_never_lowers_it(store: Store) -> None:
    mark = await draw(store) + 1_000
    await store.raise_token(mark)
    assert await draw(store) == mark + 1
    await store.raise_token(5)
    assert await draw(store) == mark + 2


async def test_tokens_that_no_double_can_hold_stay_exact(store: Store) -> None:
    await store.raise_token(2**60 + 1)
    token = await draw(store)
    assert token == 2**60 + 2
    await store.raise_token(token + 1)
    assert await draw(store) == token + 2
    await ask(store, "a")
    change = LeaseChange("a", QUEUED, LeaseState.GRANTED, token=token)
    assert await store.commit(Commit(leases=(change,)), now_ms=NOW) == Committed()
    lease = await store.lease("a")
    assert lease is not None
    assert lease.token == token
    assert f'"token":"{token}"' in (await store.events(after="0", limit=9, block_ms=0))[-1].data
