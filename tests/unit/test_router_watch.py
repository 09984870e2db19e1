"""Watching a router: its event stream as a pulse, its answers in words, its child as a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from swapper.errors import BackendDown, BackendRefused
from workers.backend import TenantState
from workers.llama.child import find_child, gone
from workers.llama.events import RouterEvents
from workers.llama.http import Model, RouterHttp, Status
from workers.llama.known import state_of
from workers.llama.lifecycle import patiently


class FakeRouter:
    """Answers /slots with whatever is scripted; its event stream ends after one event."""

    def __init__(self) -> None:
        self.answer: tuple[int, str] = (200, "[]")
        self.streams = 0
        self.url = ""

    async def events(self, request: web.Request) -> web.StreamResponse:
        self.streams += 1
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b'data: {"model":"a","event":"status_change","data":{"status":"loaded"}}\n\n')
        return stream

    async def slots(self, _request: web.Request) -> web.Response:
        return web.Response(status=self.answer[0], text=self.answer[1])


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake, app = FakeRouter(), web.Application()
    app.router.add_get("/models/sse", fake.events)
    app.router.add_get("/slots", fake.slots)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    yield fake
    await runner.cleanup()


async def test_the_event_stream_is_taken_up_again_after_it_broke(router: FakeRouter) -> None:
    async with RouterHttp(router.url) as http:
        events = RouterEvents(http)
        async for _ in events.pulses():
            if router.streams == 2:
                break
        await events.close()


async def test_waiting_for_an_event_ends_at_its_limit(router: FakeRouter) -> None:
    async with RouterHttp(router.url) as http:
        assert await RouterEvents(http).turn(0, 0.001) == 0


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (400, '{"error":{"code":400,"message":"model is not loaded"}}', "answered 400 to /slots: model is not loaded"),
        (500, "proxy error: Could not establish connection", "500 to /slots: proxy error"),
        (200, "<html>", "not what llama-server gives"),
    ],
)
async def test_an_answer_that_is_no_success_is_told_in_the_servers_words(
    router: FakeRouter, status: int, text: str, words: str
) -> None:
    router.answer = (status, text)
    async with RouterHttp(router.url) as http:
        with pytest.raises(BackendRefused, match=words):
            await http.slots("a")


async def test_a_router_that_is_not_there_is_down() -> None:
    async with RouterHttp("http://127.0.0.1:9") as http:
        with pytest.raises(BackendDown, match="does not answer"):
            await http.models()


def model(value: str, *, failed: bool = False) -> Model:
    return Model("a", Status(value, failed=failed), name="a")


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (model("loaded"), TenantState.LOADED),
        (model("loading"), TenantState.LOADING),
        (model("sleeping"), TenantState.SLEEPING),
        (model("unloaded"), TenantState.UNLOADED),
        (model("unloaded", failed=True), TenantState.FAILED),
        (model("downloading"), TenantState.UNLOADED),
        (None, TenantState.FAILED),
    ],
)
def test_every_word_of_the_router_has_a_state(seen: Model | None, state: TenantState) -> None:
    assert state_of(seen) is state


async def test_a_call_is_given_up_only_when_nothing_moves() -> None:
    never = asyncio.Event()
    sizes = iter([1, 2, 2])
    with pytest.raises(BackendDown, match="no progress"):
        await patiently(never.wait(), "save", 0.001, lambda: next(sizes))
    assert list(sizes) == []


async def test_a_child_is_found_by_alias_and_port_and_seen_to_go() -> None:
    program = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    program += ["--alias", "a-model", "--port", "40999"]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)  # its command line can be read only once it runs
        child = find_child("a-model", "40999")
        assert child is not None
        assert child.pid == process.pid
        assert find_child("a-model", "40998") is None
        assert find_child("another", "40999") is None
        assert not await gone(child, timeout_s=0.001)
        child.kill()
        assert await gone(child, timeout_s=10)
    finally:
        process.kill()
        process.communicate()
    assert not child.alive()
