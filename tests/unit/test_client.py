"""The Python client against the served API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from swapper.client import SwapperClient
from swapper.client.sse import Message, messages
from swapper.errors import ApiDown, ApiRefused
from tests.support.api import Served, key, served


@pytest.fixture
async def api() -> AsyncGenerator[Served]:
    async with served() as running:
        yield running


@pytest.fixture
async def client(api: Served) -> AsyncGenerator[SwapperClient]:
    async with SwapperClient(api.url) as connected:
        yield connected


async def test_a_lease_lives_from_request_to_release(api: Served, client: SwapperClient) -> None:
    granting = asyncio.create_task(api.granted_when_queued())
    asked = await client.request_lease({"card": "gpu0", "label": "encode"})
    lease = await client.wait(asked["id"])
    assert (lease["state"], lease["id"]) == ("granted", await granting)
    beaten = await client.heartbeat(lease["id"], lease["token"], progress=0.5)
    assert beaten["progress"] == 0.5
    released = await client.release(lease["id"], token=lease["token"])
    assert released["state"] == "released"
    page = await client.leases(state="released", card=None)
    assert [item["id"] for item in page["items"]] == [lease["id"]]


async def test_waiting_stops_at_its_limit(client: SwapperClient) -> None:
    asked = await client.request_lease({})
    assert (await client.wait(asked["id"], limit_s=0.05))["state"] == "queued"


async def test_a_refusal_carries_status_and_problem(client: SwapperClient) -> None:
    with pytest.raises(ApiRefused, match="did you mean label") as caught:
        await client.request_lease({"lable": "x"})
    assert caught.value.status == 422
    assert caught.value.problem["type"] == "urn:swapper:bad-field"


async def test_a_key_is_sent_as_bearer_token() -> None:
    async with served((key("ann", "leases"),)) as api:
        async with SwapperClient(api.url, "ann-secret") as client:
            assert (await client.request_lease({}))["owner"] == "ann"
        async with SwapperClient(api.url) as stranger:
            with pytest.raises(ApiRefused, match="A key is needed"):
                await stranger.status()


async def test_nobody_there_is_down_and_says_where(unused_tcp_port: int) -> None:
    async with SwapperClient(f"http://127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(ApiDown, match=f"127.0.0.1:{unused_tcp_port}.*swapper serve"):
            await client.status()


async def test_a_dead_store_is_down_not_refused(api: Served, client: SwapperClient) -> None:
    api.redis.connected = False
    with pytest.raises(ApiDown, match="store does not answer"):
        await client.status()


async def test_events_go_on_after_the_connection_broke() -> None:
    asked: list[str | None] = []

    async def flaky(request: web.Request) -> web.StreamResponse:
        asked.append(request.headers.get("Last-Event-ID"))
        response = web.StreamResponse()
        await response.prepare(request)
        number = len(asked)
        await response.write(f'id: {number}-0\nevent: card\ndata: {{"id": "gpu0"}}\n\nid: 9'.encode())
        return response

    app = web.Application()
    app.add_routes([web.get("/api/events", flaky)])
    async with TestServer(app) as server, SwapperClient(str(server.make_url("/"))) as client:
        found: list[str] = []
        async for event in client.events(since="0"):
            found.append(event.id)
            if len(found) == 2:
                break
    assert found == ["1-0", "2-0"]
    assert asked == ["0", "1-0"]


async def test_server_sent_events_are_read_as_the_standard_says() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for line in (
            b": hello\n",
            b"\n",
            b"id: 1\r\n",
            b"event: x\n",
            b"data: a\n",
            b"data:b\n",
            b"\n",
            b"data: cut\n",
        ):
            yield line

    assert [message async for message in messages(lines())] == [Message("1", "x", "a\nb")]
