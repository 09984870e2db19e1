"""A gate before the ComfyUI of the tests, over the shipped store on a fake one; a test grants and ends leases."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from fakeredis import FakeServer

from swapper.api.ids import lease_id
from swapper.comfyui.gate import Gate, Limits
from swapper.comfyui.holding import Holding, Wish
from swapper.comfyui.proxy import Proxy
from swapper.comfyui.renders import Renders
from swapper.comfyui.taken import Taken
from swapper.core.commit import Commit, Committed, LeaseChange
from swapper.core.types import ACTIVE, Lease, LeaseState, WorkClass
from swapper.gateway.session import open_session
from swapper.store.protocol import LeaseFilter
from swapper.store.redis import RedisStore
from swapper.store.tail import Tail
from tests.support.api import fake_store
from tests.support.comfyprocess import ComfyProcess
from workers.comfyui.http import ComfyHttp

Json = dict[str, Any]
ME = "comfyui"


@dataclass
class Options:
    """How a gate is made."""

    linger_s: float = 0.2
    drain_s: float = 30.0
    max_waiting: int = 100
    max_queue: int = 100
    failing: Callable[[], str | None] = field(default=lambda: None)


@dataclass
class Rig:
    """See the module text."""

    comfy: ComfyProcess
    store: RedisStore
    tail: Tail
    gate: Gate
    running: asyncio.Task[None]
    url: str
    client: aiohttp.ClientSession

    def post(self, body: object, path: str = "/prompt", **headers: str) -> asyncio.Task[tuple[int, Json]]:
        """A prompt on its way; the task ends with its answer."""

        async def call() -> tuple[int, Json]:
            async with self.client.post(self.url + path, json=body, headers=headers) as answer:
                raw = await answer.read()
                told = cast("Json", json.loads(raw)) if raw else Json()
                return answer.status, {**told, "retry_after": answer.headers.get("Retry-After")}

        return asyncio.create_task(call())

    async def leases(self) -> list[Lease]:
        """All of them, the oldest first."""
        return list(reversed((await self.store.leases(LeaseFilter())).items))

    async def lease(self, wanted: Callable[[Lease], bool]) -> Lease:
        """The first that is as wanted, once there is one."""
        async with asyncio.timeout(15):
            with self.tail.watch_all() as changed:
                while True:
                    changed.clear()
                    found = [one for one in await self.leases() if wanted(one)]
                    if found:
                        return found[0]
                    await changed.wait()

    async def waiting(self, count: int) -> None:
        """Until so many prompts have arrived and wait."""
        await self._until(lambda: self.gate.waiting == count)

    async def until(self, wanted: Callable[[Lease], bool]) -> None:
        """Until the newest lease is as wanted; of a heartbeat no event tells."""
        newest = (await self.leases())[-1]
        async with asyncio.timeout(15):
            while not wanted(newest):
                newest = (await self.leases())[-1]

    async def _until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(15):
            while True:
                if done():
                    return
                await asyncio.sleep(0)  # a turn for everybody else

    async def change(self, lease: Lease, state: LeaseState, **fields: Any) -> None:  # noqa: ANN401
        """Commit it, as the coordinator would."""
        change = LeaseChange(lease.id, ACTIVE, state, **fields)
        assert await self.store.commit(Commit(leases=(change,))) == Committed()

    async def grant(self) -> Lease:
        """Grant the lease that waits; as it is then."""
        lease = await self.lease(lambda one: one.state is LeaseState.QUEUED)
        token = (await self.store.read()).next_token
        await self.change(lease, LeaseState.GRANTED, token=token, card="gpu0")
        return await self.lease(lambda one: one.id == lease.id and one.state is LeaseState.GRANTED)

    async def ended(self, lease: Lease) -> Lease:
        """As it ended."""
        return await self.lease(lambda one: one.id == lease.id and one.state not in ACTIVE)

    async def comfy_has(self, wanted: Callable[[Json], object]) -> Json:
        """ComfyUI's state, once it is as wanted."""
        return await asyncio.to_thread(self.comfy.until, wanted)


async def ids_of(calls: list[asyncio.Task[tuple[int, Json]]]) -> list[str]:
    """The prompts' ids, in the order of their numbers."""
    told = [(await call)[1] for call in calls]
    return [str(one["prompt_id"]) for one in sorted(told, key=lambda one: float(one["number"]))]


@asynccontextmanager
async def gated(
    comfy: ComfyProcess, folder: Path, redis: FakeServer | None = None, options: Options | None = None
) -> AsyncGenerator[Rig]:
    """A gate that runs; leaving the block ends it as a stop of swapper does. With `redis` an earlier one's store."""
    opts = options or Options()
    store = await fake_store(redis or FakeServer())
    tail = Tail(store)
    http, session = ComfyHttp(comfy.url), open_session()
    wish = Wish(ME, "gpu0", None, 3_600_000, opts.max_queue)
    limits = Limits(
        linger_ms=round(opts.linger_s * 1000),
        drain_ms=dict.fromkeys(WorkClass, round(opts.drain_s * 1000)),
        max_waiting=opts.max_waiting,
    )
    renders = Renders(http, Taken(folder / "taken.json"))
    gate = Gate(Holding(store, tail, wish, lease_id), renders, limits, f"gate-{os.getpid()}", opts.failing)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", Proxy(comfy.url, gate, session).handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(auto_decompress=False)  # it cancels handlers, too, as SERVER_OPTIONS say
    running = asyncio.create_task(gate.run())
    client = aiohttp.ClientSession(auto_decompress=False)
    url = str(server.make_url("")).rstrip("/")
    try:
        yield Rig(comfy, store, tail, gate, running, url, client)
    finally:
        running.cancel()
        done = cast("list[object]", await asyncio.gather(running, return_exceptions=True))
        await asyncio.shield(server.close())
        await client.close()
        await http.close()
        await session.close()
        await tail.close()
        await store.close()
    assert isinstance(done[0], asyncio.CancelledError), f"the gate ended by itself: {done[0]!r}"
