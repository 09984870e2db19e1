"""How the tests of the fake router run one and speak with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.fake_child import Pace
from tests.support.fake_router import FakeRouter
from tests.support.fake_slots import FakeModel
from tests.support.fake_wire import Answer, Json, Stream

ALPHA, BETA = FakeModel("alpha", aliases=("first",)), FakeModel("beta")
HOUR_S = 3600.0


@asynccontextmanager
async def running(
    folder: Path, *models: FakeModel, models_max: int = 0, autoload: bool = False, pace: Pace | None = None
) -> AsyncGenerator[FakeRouter]:
    """A router, ended afterwards with nothing left of it."""
    router = FakeRouter(models or (ALPHA, BETA), slot_dir=folder, models_max=models_max, autoload=autoload, pace=pace)
    router.start()
    try:
        yield router
    finally:
        await router.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not router.vram.held


async def get(router: FakeRouter, path: str, **query: str) -> Answer:
    return await router.request("GET", path, query)


async def post(router: FakeRouter, path: str, *, port: str | None = None, action: str = "", **body: object) -> Answer:
    query = {"action": action} if action else {}
    return await router.request("POST", path, query, json.dumps(body).encode(), port=port)


async def status(router: FakeRouter, model: str = "alpha") -> Json:
    listed = (await get(router, "/models")).json()["data"]
    return next(one["status"] for one in listed if one["id"] == model)


async def events(router: FakeRouter) -> Stream:
    stream = (await get(router, "/models/sse")).body
    assert isinstance(stream, Stream)
    return stream


async def until(feed: Stream, model: str, *states: str) -> str:
    async for line in feed:
        event = json.loads(line.removeprefix(b"data: "))
        if event["model"] == model and event["data"]["status"] in states:
            await feed.aclose()
            return event["data"]["status"]
    raise AssertionError("the event stream ended")


async def load(router: FakeRouter, model: str = "alpha") -> str:
    feed = await events(router)
    assert (await post(router, "/models/load", model=model)).status == 200
    return await until(feed, model, "loaded", "unloaded")


async def unload(router: FakeRouter, model: str = "alpha") -> None:
    feed = await events(router)
    assert (await post(router, "/models/unload", model=model)).status == 200
    await until(feed, model, "unloaded")


async def say(router: FakeRouter, prompt: str, slot: int = -1) -> Answer:
    return await post(router, "/completion", model="alpha", prompt=prompt, n_predict=4, id_slot=slot)


async def text_of(stream: Stream) -> bytes:
    return b"".join([chunk async for chunk in stream])


async def act(router: FakeRouter, action: str, slot: int = 0, model: str = "alpha") -> Answer:
    return await post(router, f"/slots/{slot}", action=action, model=model, filename="a.bin")


async def streamed(router: FakeRouter, n: int = 50, port: str | None = None) -> Stream:
    body = (await post(router, "/completion", port=port, model="alpha", prompt="stream", n_predict=n, stream=True)).body
    assert isinstance(body, Stream)
    return body


def now() -> float:
    return asyncio.get_running_loop().time()
