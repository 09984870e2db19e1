"""The stores that the tests run on, each empty; on the real embedded server each test has its own prefix.

`store`: in memory, on fakeredis, and on the real server; tests of the protocol. `able`: those two on which much can be
done fast, and a reader cancelled, which fakeredis swallows. `served`: the two that a server's commands reach. `real`:
the real server alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import fakeredis
import pytest

from swapper.store import embedded
from swapper.store.embedded import Embedded
from swapper.store.memory import MemoryStore
from swapper.store.protocol import Store
from swapper.store.redis import Client, RedisStore

_numbers = itertools.count()


def fake_client(server: fakeredis.FakeServer) -> Client:
    return cast("Client", fakeredis.FakeAsyncRedis(server=server, decode_responses=True))


async def fake_store() -> RedisStore:
    """A store on fakeredis, alone on its server."""
    server = fakeredis.FakeServer()
    store = RedisStore(fake_client(server), fake_client(server))
    await store.load()
    return store


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedded]:
    """One real server for the session."""
    folder = tmp_path_factory.mktemp("store")
    yield asyncio.run(embedded.start(folder))
    assert asyncio.run(embedded.stop(folder))


async def memory_store() -> MemoryStore:
    """A store in memory, with the time of day."""
    return MemoryStore(lambda: time.time_ns() // 1_000_000)


async def real_store(server: Embedded) -> RedisStore:
    """A store on the real server, under a prefix of its own."""
    return await RedisStore.open(server.url, prefix=f"{{t{next(_numbers)}}}")


@pytest.fixture
async def real(server: Embedded) -> AsyncIterator[RedisStore]:
    made = await real_store(server)
    yield made
    await made.close()


@pytest.fixture(params=["fakeredis", "valkey"])
async def served(request: pytest.FixtureRequest, server: Embedded) -> AsyncIterator[RedisStore]:
    made = await (fake_store() if request.param == "fakeredis" else real_store(server))
    yield made
    await made.close()


@pytest.fixture(params=["memory", "valkey"])
async def able(request: pytest.FixtureRequest, server: Embedded) -> AsyncIterator[Store]:
    made = await (memory_store() if request.param == "memory" else real_store(server))
    yield made
    await made.close()


@pytest.fixture(params=["memory", "fakeredis", "valkey"])
async def store(request: pytest.FixtureRequest, server: Embedded) -> AsyncIterator[Store]:
    match request.param:
        case "memory":
            made = await memory_store()
        case "fakeredis":
            made = await fake_store()
        case _:
            made = await real_store(server)
    yield made
    await made.close()


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """A state folder whose server, if the test started one, is stopped afterwards."""
    yield tmp_path
    await embedded.stop(tmp_path)
