"""What is kept is bounded: ended leases, swaps, outboxes. The fillers are written straight into the index."""

from __future__ import annotations

from dataclasses import replace

from swapper.core.commit import Commit
from swapper.store.redis import RedisStore
from tests.store.acts import NOW, ask, raw
from tests.store.test_commit import ORDER, SWAP


async def fill(store: RedisStore, index: str, count: int, score: float) -> None:
    members = [str(part) for number in range(count) for part in (score, f"filler{number}")]
    await raw(store, "ZADD", index, *members)


async def test_ten_thousand_ended_leases_are_kept_and_the_oldest_go_first(real: RedisStore) -> None:
    await ask(real, "old", now_ms=NOW)
    await real.end("old", None, now_ms=NOW)
    await fill(real, "finals", 9_998, 1)
    await ask(real, "new", now_ms=NOW)
    await real.end("new", None, now_ms=NOW + 1)
    assert await raw(real, "ZCARD", "finals") == 10_000
    await ask(real, "newer", now_ms=NOW)
    await real.end("newer", None, now_ms=NOW + 2)
    assert await raw(real, "ZCARD", "finals") == 10_000
    assert await raw(real, "ZSCORE", "finals", "filler0") is None
    assert [await real.lease(name) is not None for name in ("old", "new", "newer")] == [True] * 3


async def test_a_forgotten_lease_is_gone_from_everywhere(real: RedisStore) -> None:
    await ask(real, "old", now_ms=5)
    await real.end("old", None, now_ms=5)
    await fill(real, "finals", 10_000, NOW)
    await ask(real, "new", now_ms=NOW)
    await real.end("new", None, now_ms=NOW)
    assert await real.lease("old") is None
    assert await raw(real, "ZCARD", "leases") == 1


async def test_a_thousand_swaps_are_kept(real: RedisStore) -> None:
    await real.commit(Commit(swaps=(replace(SWAP, id="first"),)), now_ms=NOW)
    await fill(real, "swaps", 1_000, 1.5)
    await real.commit(Commit(swaps=(replace(SWAP, id="second"),)), now_ms=NOW)
    assert await raw(real, "ZCARD", "swaps") == 1_000
    assert await real.swap("first") is None
    assert [swap.id for swap in await real.swaps(limit=5)] == ["second"]


async def test_an_outbox_nobody_reads_does_not_grow_for_ever(real: RedisStore) -> None:
    many = tuple(replace(ORDER, n=number) for number in range(1_500))
    await real.commit(Commit(commands=many), now_ms=NOW)
    assert await raw(real, "XLEN", "out:agent:main") <= 1_100
    assert 0 < await raw(real, "PTTL", "out:agent:main") <= 7 * 86_400_000
