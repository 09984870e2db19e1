"""The one counter of tokens: it only rises, also past what a double can hold and after a rollback."""

from __future__ import annotations

import asyncio

from swapper.core.commit import Commit, Committed, LeaseChange
from swapper.core.types import LeaseState
from swapper.store.redis import RedisStore
from tests.store.acts import NOW, QUEUED, ask


async def test_tokens_start_above_the_seconds_of_the_clock(store: RedisStore) -> None:
    assert await store.draw_token(now_ms=NOW + 999) == (NOW // 1000 << 20) + 1
    assert await store.draw_token(now_ms=NOW + 999) == (NOW // 1000 << 20) + 2


async def test_tokens_rise_also_when_the_clock_goes_back(store: RedisStore) -> None:
    drawn = [await store.draw_token(now_ms=now_ms) for now_ms in (NOW, NOW + 5_000, NOW - 5_000, 0)]
    assert drawn == sorted(set(drawn))


async def test_callers_at_once_never_share_a_token(store: RedisStore) -> None:
    drawn = await asyncio.gather(*(store.draw_token() for _ in range(50)))
    assert len(set(drawn)) == 50


async def test_a_reported_mark_raises_the_counter_and_never_lowers_it(store: RedisStore) -> None:
    mark = await store.draw_token(now_ms=NOW) + 1_000
    await store.raise_token(mark)
    assert await store.draw_token(now_ms=NOW) == mark + 1
    await store.raise_token(5)
    assert await store.draw_token(now_ms=NOW) == mark + 2


async def test_tokens_that_no_double_can_hold_stay_exact(store: RedisStore) -> None:
    await store.raise_token(2**60 + 1)
    token = await store.draw_token(now_ms=NOW)
    assert token == 2**60 + 2
    await store.raise_token(token + 1)
    assert await store.draw_token(now_ms=NOW) == token + 2
    await ask(store, "a")
    change = LeaseChange("a", QUEUED, LeaseState.GRANTED, token=token)
    assert await store.commit(Commit(leases=(change,)), now_ms=NOW) == Committed()
    lease = await store.lease("a")
    assert lease is not None
    assert lease.token == token
    assert f'"token":"{token}"' in (await store.events(after="0", limit=9, block_ms=0))[-1].data
