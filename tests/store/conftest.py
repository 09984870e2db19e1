"""Every test that takes `store` runs on fakeredis and on the real embedded server; each test has its own prefix."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import cast

import fakeredis
import pytest

from swapper.store import embedded
from swapper.store.embedded import Embedded
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


@pytest.fixture
async def real(server: Embedded) -> AsyncIterator[RedisStore]:
    """An empty store on the real server, where fakeredis is too slow or lies (it swallows a reader's cancellation)."""
    made = await RedisStore.open(server.url, prefix=f"{{t{next(_numbers)}}}")
    yield made
    await made.close()


@pytest.fixture(params=["fakeredis", "valkey"])
async def store(request: pytest.FixtureRequest, server: Embedded) -> AsyncIterator[RedisStore]:
    """An empty store."""
    if request.param == "fakeredis":
        made = await fake_store()
    else:
        made = await RedisStore.open(server.url, prefix=f"{{t{next(_numbers)}}}")
    yield made
    await made.close()


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[Path]:
    """A state folder whose server, if the test started one, is stopped afterwards."""
    yield tmp_path
    await embedded.stop(tmp_path)
