"""What is remembered of a router's models is used only while its event stream says that nothing changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from workers.backend import TenantState
from workers.llama.events import RouterEvents
from workers.llama.http import Model, RouterHttp, Status
from workers.llama.joined import Joined
from workers.llama.known import Known, state_of


class FakeRouter:
    """One model `a`, and an event stream that says what the test says and breaks when it wants."""

    def __init__(self) -> None:
        self.status, self.port = "loaded", "4001"
        self.looks = 0
        self.url = ""
        self._said: asyncio.Queue[str | None] = asyncio.Queue()

    def say(self, status: str) -> None:
        self._said.put_nowait(f'data: {{"model":"a","event":"status_change","data":{{"status":"{status}"}}}}\n\n')

    def hang_up(self) -> None:
        self._said.put_nowait(None)

    async def events(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        while (said := await self._said.get()) is not None:
            await stream.write(said.encode())
        return stream

    async def models(self, _request: web.Request) -> web.Response:
        self.looks += 1
        status = {"value": self.status, "args": ["llama-server", "--port", self.port]}
        return web.json_response({"data": [{"id": "a", "status": status}]})


@pytest.fixture
async def router() -> AsyncIterator[FakeRouter]:
    fake, app = FakeRouter(), web.Application()
    app.router.add_get("/models/sse", fake.events)
    app.router.add_get("/models", fake.models)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def http(router: FakeRouter) -> AsyncIterator[RouterHttp]:
    async with RouterHttp(router.url) as http:
        yield http


@pytest.fixture
async def events(http: RouterHttp) -> AsyncIterator[RouterEvents]:
    events = RouterEvents(http)
    events.open()
    while not events.standing:
        await events.turn(events.turns)
    yield events
    await events.close()


@pytest.fixture
def known(http: RouterHttp, events: RouterEvents) -> Known:
    return Known(http, events)


async def heard(events: RouterEvents, seq: int) -> None:
    async for _ in events.pulses():
        if events.seq > seq:
            return


async def test_a_model_seen_loaded_is_known_until_the_router_tells_of_a_change(
    router: FakeRouter, events: RouterEvents, known: Known
) -> None:
    assert known.loaded("a") is None
    model = await known.look("a")
    assert state_of(model) is TenantState.LOADED
    assert known.loaded("a") is model
    turns = events.turns
    router.say("sleeping")
    await events.turn(turns, 10)
    assert known.loaded("a") is None


async def test_the_steps_of_a_load_are_no_change_and_end_no_wait(
    router: FakeRouter, events: RouterEvents, known: Known
) -> None:
    await known.look("a")
    before = events.turns, events.seq
    router.say("loading")
    await heard(events, before[1])
    assert known.loaded("a") is not None
    assert events.turns == before[0]


async def test_a_change_while_it_was_looked_at_makes_the_look_worthless(
    router: FakeRouter, events: RouterEvents, known: Known
) -> None:
    turns = events.turns
    look = asyncio.create_task(known.look("a"))
    await asyncio.sleep(0)
    router.say("unloaded")
    await events.turn(turns, 10)
    await look
    assert known.loaded("a") is None


async def test_without_its_stream_nothing_is_known(router: FakeRouter, events: RouterEvents, known: Known) -> None:
    await known.look("a")
    turns = events.turns
    router.hang_up()
    await events.turn(turns, 10)
    assert not events.standing
    assert known.loaded("a") is None
    await known.look("a")
    assert known.loaded("a") is None


@pytest.mark.parametrize("status", ["unloaded", "loading", "sleeping"])
async def test_only_a_loaded_model_is_remembered(router: FakeRouter, known: Known, status: str) -> None:
    await known.look("a")
    router.status = status
    await known.look("a")
    assert known.loaded("a") is None


async def test_a_look_of_somebody_else_that_shows_another_child_or_state_is_believed(known: Known) -> None:
    model = await known.look("a")
    assert model is not None
    known.compare({"a": model})
    assert known.loaded("a") is model
    for other in ({}, {"a": Model("a", Status("sleeping", model.status.args))}, {"a": Model("a", Status("loaded"))}):
        await known.look("a")
        known.compare(other)
        assert known.loaded("a") is None


async def test_questions_of_one_moment_are_asked_once_and_later_ones_anew() -> None:
    asked: list[str] = []
    sent = asyncio.Event()

    async def ask(key: str) -> str:
        asked.append(key)
        sent.set()
        await asyncio.sleep(0)
        return f"{key} {len(asked)}"

    joined = Joined(ask)
    assert await asyncio.gather(joined("a"), joined("a")) == ["a 1", "a 1"]
    sent.clear()
    first = asyncio.create_task(joined("a"))
    await sent.wait()
    assert await joined("a") == "a 3"
    assert await first == "a 2"


async def test_a_failed_question_fails_for_everybody_who_asked_it() -> None:
    async def ask(_key: str) -> str:
        raise OSError("down")

    joined = Joined(ask)
    answers = await asyncio.gather(joined("a"), joined("a"), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["down", "down"]
