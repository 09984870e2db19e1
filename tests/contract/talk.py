"""Plain requests to a router, as any client would send them, and waiting on its own events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

Json = dict[str, Any]


class Talk:
    def __init__(self, url: str) -> None:
        self.url = url
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))

    async def __aenter__(self) -> Talk:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()

    async def get(self, path: str, **params: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, params=params) as response:
            return response.status, _parse(await response.text())

    async def post(self, path: str, body: Mapping[str, object] | None = None, **params: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body or {}, params=params) as response:
            return response.status, _parse(await response.text())

    async def slot(self, model: str, nth: int) -> Json:
        status, slots = await self.get("/slots", model=model)
        assert status == 200, slots
        return slots[nth]

    async def act(self, action: str, slot: int, model: str, name: str | None = None) -> tuple[int, Any]:
        body = {"model": model, **({"filename": name} if name is not None else {})}
        return await self.post(f"/slots/{slot}", body, action=action)

    async def model(self, name: str) -> Json:
        _, listing = await self.get("/models")
        return next(model for model in listing["data"] if model["id"] == name)

    async def status(self, name: str) -> str:
        return (await self.model(name))["status"]["value"]

    async def say(self, model: str, prompt: str, *, slot: int = -1, n: int = 8) -> Json:
        body: Json = {"model": model, "prompt": prompt, "n_predict": n, "id_slot": slot, "temperature": 0}
        status, answer = await self.post("/completion", body)
        assert status == 200, answer
        return answer

    @asynccontextmanager
    async def streaming(self, model: str, n: int) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A call in flight: its first bytes have come."""
        body: Json = {"model": model, "prompt": "stream", "n_predict": n, "stream": True, "temperature": 0}
        async with self.session.post(self.url + "/completion", json=body) as response:
            await response.content.readline()
            yield response

    @asynccontextmanager
    async def events(self) -> AsyncGenerator[AsyncIterator[Json]]:
        async with self.session.get(self.url + "/models/sse") as response:
            yield _events(response)

    async def unload(self, model: str) -> Json:
        """Unload (if it runs) and wait for the router's word on it; its data, or nothing if it did not run."""
        async with self.events() as events:
            status, _ = await self.post("/models/unload", {"model": model})
            return await until(events, model, "unloaded") if status == 200 else {}

    async def load(self, model: str) -> Json:
        async with self.events() as events:
            status, answer = await self.post("/models/load", {"model": model})
            if status == 400:
                return {}
            assert status == 200, answer
            return await until(events, model, "loaded", "unloaded")

    async def reload(self, model: str) -> None:
        """A fresh child."""
        await self.unload(model)
        assert (await self.load(model))["status"] == "loaded"


async def until(events: AsyncIterator[Json], model: str, *states: str) -> Json:
    async for event in events:
        if event["model"] == model and event["data"]["status"] in states:
            return event["data"]
    raise AssertionError("the event stream ended")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    async for line in response.content:
        if line.startswith(b"data: "):
            event: Json = json.loads(line[6:])
            if event["model"] != "*":
                yield event


def _parse(text: str) -> Any:  # noqa: ANN401  # the server's JSON, or its bare text
    try:
        return json.loads(text)
    except ValueError:
        return text
