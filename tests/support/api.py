"""A served API for the tests: the shipped routes over the shipped store on an in-process fake server.

Invariant: nothing of the API is replaced; only the coordinator is absent, so a test commits what it would commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web
from aiohttp.test_utils import TestServer
from fakeredis import FakeAsyncRedis, FakeServer

from swapper.api import ApiContext, middlewares, routes
from swapper.config import ApiKey
from swapper.core.commit import Commit, Committed, LeaseChange
from swapper.core.spec import CardSpec, PolicySpec, Spec, TenantSpec
from swapper.core.types import ACTIVE, Card, LeaseState, WorkClass
from swapper.store.redis import Client, RedisStore

GIB = 1024
SPEC = Spec(
    cards={"gpu0": CardSpec("gpu0", 24 * GIB, reserve_mib=512), "gpu1": CardSpec("gpu1", 8 * GIB)},
    tenants={
        "llama/med": TenantSpec("llama/med", "llama", "gpu0", "main", need_mib=6 * GIB, default=True),
        "frigate": TenantSpec(
            "frigate", "frigate", "gpu0", "main", need_mib=2 * GIB, kind="none", evict_never=True, serves_models=False
        ),
    },
    policy=PolicySpec(drain_ms=dict.fromkeys(WorkClass, 600_000), max_queue=5),
)


@dataclass
class Observed:
    """What the coordinator would have observed."""

    cards: dict[str, dict[str, object]] = field(default_factory=dict[str, dict[str, object]])
    tenants: dict[str, str] = field(default_factory=dict[str, str])
    wrong: list[str] = field(default_factory=list[str])
    not_started: dict[str, str] = field(default_factory=dict[str, str])

    def readings(self) -> Mapping[str, dict[str, object]]:
        return self.cards

    def states(self) -> Mapping[str, str]:
        return self.tenants

    def why_not_started(self) -> Mapping[str, str]:
        return self.not_started

    def problems(self) -> list[str]:
        return list(self.wrong)


@dataclass
class Served:
    """The running server and what a test may reach behind it."""

    url: str
    ctx: ApiContext
    store: RedisStore
    live: Observed
    redis: FakeServer

    async def change(self, lease_id: str, state: LeaseState | None = None, **fields: Any) -> None:  # noqa: ANN401
        """Commit one change of a lease, as the coordinator would."""
        change = LeaseChange(lease_id, ACTIVE, state, **fields)
        assert await self.store.commit(Commit(leases=(change,))) == Committed()

    async def grant(self, lease_id: str, card: str = "gpu0") -> int:
        """Grant a lease and return its token."""
        token = (await self.store.read()).next_token
        await self.change(lease_id, LeaseState.GRANTED, token=token, card=card, explain="granted at once")
        return token

    async def commit_card(self, card: Card) -> None:
        """Write a card at the version it carries."""
        assert await self.store.commit(Commit(cards=(card,))) == Committed()

    async def granted_when_queued(self, card: str = "gpu0") -> str:
        """Wait for the next lease to be queued (by its event), grant it, and return its id."""
        after = "0"
        while True:
            for event in await self.store.events(after=after, limit=100, block_ms=5_000):
                after = event.id
                lease = await self.store.lease(event.subject) if event.type == "lease" else None
                if lease is not None and lease.state == LeaseState.QUEUED:
                    await self.grant(lease.id, card)
                    return lease.id


async def fake_store(server: FakeServer) -> RedisStore:
    """The shipped store over fakeredis; the library is loaded."""
    clients = [FakeAsyncRedis(server=server, decode_responses=True) for _ in range(2)]
    store = RedisStore(cast(Client, clients[0]), cast(Client, clients[1]))
    await store.load()
    return store


@asynccontextmanager
async def served(
    keys: tuple[ApiKey, ...] = (), *, spec: Spec = SPEC, keepalive_s: float = 15.0
) -> AsyncGenerator[Served]:
    """The API on a port the system chose."""
    redis = FakeServer()
    store = await fake_store(redis)
    live = Observed()
    ctx = ApiContext(store=store, spec=spec, keys=keys, live=live, names={"med": "llama/med"}, keepalive_s=keepalive_s)
    app = web.Application(middlewares=middlewares(ctx))
    app.add_routes(routes(ctx))
    app.on_shutdown.append(lambda _app: ctx.close())
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(auto_decompress=False)  # as the gateway's SERVER_OPTIONS say
    try:
        yield Served(str(server.make_url("/")).rstrip("/"), ctx, store, live, redis)
    finally:
        await asyncio.shield(server.close())
        await store.close()


def key(name: str, *scopes: str, classes: tuple[WorkClass, ...] = tuple(WorkClass)) -> ApiKey:
    """A key whose secret is its name and `-secret`."""
    return ApiKey(name, f"{name}-secret", frozenset(scopes), frozenset(classes), None)
