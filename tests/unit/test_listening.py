"""The HTTP server under every route: heads that never end, and what is raised before any handler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from swapper.api import listening
from tests.support.wire import request, wire


@asynccontextmanager
async def front(released: asyncio.Event | None = None) -> AsyncGenerator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if released is not None:
            await released.wait()
        return web.Response(text="here")

    app = web.Application()
    app.router.add_post("/", handle)
    runner = listening.Runner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("before", [b"", request(b"", "/")], ids=["first", "second"])
async def test_a_head_that_does_not_end_ends_its_connection(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_S", 0.05)
    async with front() as url, wire(url) as client:
        if before:
            assert (await client.call(before)).status == 200
        await client.send(b"POST / HTTP/1.1\r\nHost: slow\r\nX-")

        async def drip() -> None:
            for _ in range(4000):  # less than a head may have
                await client.send(b"a")
                await asyncio.sleep(0)

        dripping = asyncio.create_task(drip())
        assert await client.ended() == b""
        dripping.cancel()
        await asyncio.gather(dripping, return_exceptions=True)


async def test_a_connection_over_which_nothing_ever_comes_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_S", 0.05)
    async with front() as url, wire(url) as client:
        assert await client.ended() == b""


async def test_what_takes_long_after_its_head_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_S", 0.05)
    released = asyncio.Event()
    async with front(released) as url, wire(url) as client, wire(url) as idle:
        await client.send(request(b"", "/"))
        assert await idle.ended() == b""  # as long as a head may take
        released.set()
        assert (await client.answer()).body == b"here"


@pytest.mark.parametrize("path", ["/", "/nowhere"])
async def test_what_is_expected_and_not_known_is_a_417_in_the_envelope(path: str) -> None:
    async with front() as url, wire(url) as client:
        got = await client.call(request(b"", path, "Expect: a miracle"))
        assert (got.status, got.error()["type"]) == (417, "invalid_request_error")


async def test_what_is_no_http_is_told_in_the_envelope_without_what_came() -> None:
    async with front() as url, wire(url) as client:
        got = await client.call(request(b"", "/", "Authorization: Bearer hunter\0two"))
        assert (got.status, got.error()["code"]) == (400, "bad_request")
        assert b"hunter" not in got.body
        assert await client.ended() == b""
