"""How long each call of the store takes is told, by its name; that of a read that waits for news is not."""

from __future__ import annotations

import asyncio
from inspect import iscoroutinefunction

import pytest

from swapper.core.commit import Commit
from swapper.core.orders import Command
from swapper.errors import StoreDown
from swapper.store.protocol import LeaseFilter, Store
from swapper.store.redis import RedisStore
from tests.store.acts import NOW, ask
from tests.store.test_trouble import scripted

ORDER = Command("agent:main", "gpu0", "llama/med", 7, 1, "save")


class Told:
    """What a store told of its calls."""

    def __init__(self, store: RedisStore) -> None:
        self.names: list[str] = []
        self.seconds: list[float] = []
        store.took = self

    def __call__(self, operation: str, seconds: float) -> None:
        self.names.append(operation)
        self.seconds.append(seconds)


async def test_each_call_is_told_of_by_its_name_in_the_protocol(served: RedisStore) -> None:
    told = Told(served)
    lease = (await ask(served, "a")).id
    await served.leases(LeaseFilter())
    await served.end(lease, None, now_ms=NOW)
    await served.lease(lease)
    await served.read(now_ms=NOW)
    await served.commit(Commit(commands=(ORDER,)), now_ms=NOW)
    await served.outbox("agent:main", after="0", block_ms=0)
    await served.inputs(after="0", block_ms=0)
    await served.wake()
    await served.swap("sw_1")
    assert told.names == ["enqueue", "leases", "end", "lease", "read", "commit", "outbox", "inputs", "wake", "swap"]
    assert all(0 < seconds < 60 for seconds in told.seconds)
    assert all(iscoroutinefunction(getattr(Store, name)) for name in told.names)


async def test_one_that_failed_is_told_of_too() -> None:
    store, _ = scripted(ConnectionResetError())
    told = Told(store)
    with pytest.raises(StoreDown):
        await store.read()
    assert told.names == ["read"]


async def test_a_read_that_waits_for_news_is_not_told_of(real: RedisStore) -> None:
    told = Told(real)
    reading = asyncio.create_task(real.outbox("agent:main", after="0", block_ms=10_000))
    await real.commit(Commit(commands=(ORDER,)), now_ms=NOW)
    assert [stored.command for stored in await reading] == [ORDER]
    assert told.names == ["commit"]
